"""The drawings of notebooks 22, 23 and 33: what is kept for the backward pass, who owns which sum, how the five products meet,
and how the main loop of a Hopper kernel proceeds.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from ...figures import words
from ...figures.lines import device as device_of
from ...figures.steps import in_words, stays
from ...figures.steps import marks as drafts
from ...figures.style import BLUE, CARD, GREEN, INK, MUTED, ORANGE, SAND, SHADES, TINTS, Figure, blank, canvas, styled
from ...ladder.constants import SMEM_LIMIT, accumulators, constants, parts
from ...ladder.rung import Which
from ...toolchain import sass
from ...toolchain.loops import WORK, Line, products, work

__all__ = [
    "EDGES",
    "LDMATRIX",
    "SMEM_LIMIT",
    "WGMMA",
    "accumulators",
    "additions",
    "constants",
    "dataflow",
    "drafts",
    "hand_over",
    "loop_orders",
    "main_loop",
    "operands",
    "owners",
    "parts",
    "products",
    "program",
    "shared_memory",
    "steps_taken",
    "stored_bytes",
    "work",
]


# 22_backward_fp32


@styled
def stored_bytes(frame: pd.DataFrame, title: str) -> Figure:
    """What stays in memory between the forward and the backward pass. frame: index N, a column of bytes for each thing that
    could be kept."""
    figure, (ax,) = canvas(7.8, 3.7, title=title)
    looks = [(ORANGE, "s", "--"), (BLUE, "o", "-"), (GREEN, "^", ":"), (MUTED, "D", "-.")]
    for (name, values), (colour, marker, dash) in zip(frame.items(), looks, strict=False):
        ax.plot(frame.index, values, color=colour, marker=marker, linestyle=dash, label=name)
        for n, size in values.items():
            at = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8.5, "color": colour}
            ax.annotate(words.size(size), (n, size), **at)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    low, high = frame.min(axis=None), frame.max(axis=None)
    ticks = [2.0**e for e in (10, 20, 30, 40) if low / 8 <= 2.0**e <= high * 16]
    ax.set_yticks(ticks, [words.size(n) for n in ticks])
    ax.set_xticks(frame.index, [f"{n:,}" for n in frame.index])
    ax.set(xlabel="sequence length N", ylabel="bytes kept", ylim=(low / 8, high * 16))
    ax.margins(x=0.08)
    ax.minorticks_off()
    figure.legend(loc="outside upper right", ncols=frame.shape[1], frameon=False, fontsize=9)
    said = [f"{name} from {words.size(x.iloc[0])} to {words.size(x.iloc[-1])}" for name, x in frame.items()]
    figure.in_words = (
        f"Bytes kept against N, both axes logarithmic, N from {frame.index[0]} to {frame.index[-1]}: {', '.join(said)}."
    )
    return figure


@styled
def steps_taken(
    steps: pd.DataFrame, title: str, peer: str, names: Mapping[int, str] | None = None, wide: int = 58
) -> Figure:
    """What drafts of a kernel reached beside a peer: a line for each, a dot for each D, without a mask and, where there is a
    `ratio_causal`, with one. Filled dots: what stayed in the kernel.

    steps: a `steps` record. names: step -> what it is called, for those to be shown; by default all, by what the record says.
    """
    # A draft is what it was, whatever has become of the rung since.
    title = f"{title} · {device_of(steps.drop(columns='stale', errors='ignore'))}"
    shown = steps if names is None else steps[steps["step"].isin(list(names))]
    order = shown.drop_duplicates("step").sort_values("step")
    named = {row.step: (names or {}).get(row.step, row.what) for row in order.itertuples()}
    labels = [textwrap.fill(f"{step} · {what}", wide) for step, what in named.items()]
    panels = {"ratio": "without a mask", "ratio_causal": "causal"} if "ratio_causal" in shown else {"ratio": ""}
    high = 0.29 * len(labels) + 0.17 * sum(label.count("\n") for label in labels)
    figure, axes = canvas(0.075 * wide + 2.9 * len(panels), 1.5 + high, len(panels), title=title, sharey=True)
    places, top = [], -0.5
    for label in labels:  # a line of text more, a bit more room
        room = 1 + 0.55 * label.count("\n")
        places.append(top + room / 2)
        top += room
    looks = dict(zip(sorted(shown["D"].unique()), (("o", BLUE), ("s", ORANGE), ("D", GREEN)), strict=False))
    for ax, (column, said) in zip(axes, panels.items(), strict=True):
        for D, (marker, colour) in looks.items():
            part = shown[shown["D"] == D].set_index("step")[[column, "kept"]].dropna()
            at = [places[list(named).index(step)] for step in part.index]
            faces = [colour if stays(str(kept), D) else CARD for kept in part["kept"]]
            ax.scatter(part[column], at, s=46, marker=marker, color=faces, edgecolor=colour, linewidths=1.4, zorder=3)
        ax.axvline(1, color=INK, linewidth=1, linestyle="--")
        ax.set_title(said, color=MUTED)
        ax.set(xlabel=f"times as fast as {peer}", ylim=(top, -0.6))
    axes[0].set_yticks(places, labels, color=INK, fontsize=9)
    mark = {"linestyle": "", "markersize": 7}
    handles = [Line2D([], [], marker=m, color=c, label=f"D = {D}", **mark) for D, (m, c) in looks.items()]
    hollow = {"marker": "o", "color": MUTED, "markerfacecolor": CARD, "label": "hollow: surpassed or did not stay"}
    handles.append(Line2D([], [], **hollow, **mark))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.in_words = in_words(shown, title, peer, named)
    return figure


@styled
def additions(layouts: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Which words of memory the 32 lanes of an atomic addition go to, a panel for each layout: a row is a line of 128 bytes, four
    sectors of 32. layouts: title -> the word (of 4 bytes) of each lane. Only lines that are touched are drawn."""
    figure, axes = canvas(5.4 * len(layouts), 2.9, len(layouts), title=title)
    told = []
    for ax, (name, places) in zip(axes, layouts.items(), strict=True):
        lines = sorted({place // 32 for place in places})
        sectors = len({place // 8 for place in places})
        blank(ax).set(xlim=(-4.5, 32.2), ylim=(max(8, len(lines)) + 0.2, -0.3))
        for y, line in enumerate(lines):
            for sector in range(4):
                touched = any(place // 8 == 4 * line + sector for place in places)
                box = {"facecolor": SAND if touched else CARD, "edgecolor": MUTED, "linewidth": 0.9}
                ax.add_patch(Rectangle((8 * sector, y), 8, 0.9, **box))
            ax.text(-0.4, y + 0.45, f"byte {128 * line}", ha="right", va="center", fontsize=8, color=MUTED)
        for lane, place in enumerate(places):
            x, y = place % 32, lines.index(place // 32)
            ax.add_patch(Rectangle((x, y), 1, 0.9, facecolor=SHADES[3], edgecolor=INK, linewidth=0.5))
            ax.text(x + 0.5, y + 0.45, lane, ha="center", va="center", fontsize=6.5)
        used = len(set(places)) * 4 / (32 * sectors)
        ax.set_title(f"{name}: {sectors} sectors, {used:.0%} of their bytes added to", color=MUTED)
        told.append(f"{name}: {len(lines)} lines, {sectors} sectors, {used:.0%} of their bytes")
    handles = [
        Patch(facecolor=SHADES[3], edgecolor=INK, label="a word, with the lane that adds to it"),
        Patch(facecolor=SAND, edgecolor=MUTED, label="the rest of a sector (32 bytes) that is touched"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    figure.in_words = f"{title}. {'; '.join(told)}."
    return figure


# Ways through the tiles of S, and which gradients' sums then run across CTAs.
ORDERS = {"one CTA, keys outside": "", "a CTA per tile of keys": "dQ", "a CTA per tile of queries": "dK and dV"}


@styled
def loop_orders(tiles: int = 4) -> Figure:
    """Three ways through the tiles of S, a panel each: the tint says which CTA a tile is of, the number when it comes. Arrows run
    over the tiles that add to one tile of a gradient: grey inside one CTA, orange across CTAs."""
    figure, axes = canvas(10.8, 4.2, 3)
    for ax, (name, across_ctas) in zip(axes, ORDERS.items(), strict=True):
        blank(ax).set(xlim=(-0.75, tiles + 0.75), ylim=(tiles + 0.8, -0.85), aspect="equal")
        ax.set_title(name, color=MUTED)
        for i, j in np.ndindex(tiles, tiles):
            cta, step = {"": (0, j * tiles + i), "dQ": (j, i), "dK and dV": (i, j)}[across_ctas]
            ax.add_patch(Rectangle((j, i), 1, 1, facecolor=SHADES[cta % len(SHADES)], edgecolor=CARD, linewidth=1.5))
            ax.text(j + 0.2, i + 0.22, step + 1, ha="center", va="center", fontsize=8.5)
        for k in range(tiles):
            for gradient, begin, end in (
                ("dK and dV", (k + 0.5, 0), (k + 0.5, tiles)),
                ("dQ", (0, k + 0.5), (tiles, k + 0.5)),
            ):
                summed = gradient == across_ctas
                look = {"linewidth": 2.2, "linestyle": "--"} if summed else {"linewidth": 0.9}
                colour = ORANGE if summed else MUTED
                ax.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=11, color=colour, **look))
        for text, x, y, turned in (
            ("dK$_j$, dV$_j$", tiles / 2, tiles + 0.4, 0),
            ("dQ$_i$", tiles + 0.4, tiles / 2, 90),
            ("keys j →", tiles / 2, -0.4, 0),
            ("← queries i", -0.4, tiles / 2, 90),
        ):
            ax.text(x, y, text, ha="center", va="center", rotation=turned, fontsize=9.5)
    handles = [
        Line2D([], [], color=MUTED, linewidth=0.9, label="added up inside a CTA"),
        Line2D([], [], color=ORANGE, linewidth=2.2, linestyle="--", label="added up across CTAs, in HBM"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    figure.in_words = (
        "Tiles of S, queries down, keys across, three times. One CTA, keys outside: it walks column by column, and nothing crosses"
        " CTAs. A CTA per tile of keys (a column): dK and dV are added up inside a CTA, dQ, a sum along a row, across CTAs. A CTA per"
        " tile of queries (a row): dQ inside, dK and dV across."
    )
    return figure


PLACES = {"registers": (BLUE, "-", 1.6), "shared memory": (ORANGE, "--", 2.2), "HBM": (INK, ":", 2.2)}
# The five products and the two steps between them: what stands in the box, and where the box is.
BOXES = {
    "S": ("1   S = Q$_i$ K$_j$ᵀ", 0.0, 2.0),
    "dP": ("3   dP = dO$_i$ V$_j$ᵀ", 0.0, 0.0),
    "P": ("P = exp(S − LSE$_i$)", 1.0, 2.0),
    "dS": ("dS = P ∘ (dP − delta$_i$)", 1.0, 0.0),
    "dV": ("2   dV$_j$ += Pᵀ dO$_i$", 2.0, 2.0),
    "dK": ("4   dK$_j$ += dSᵀ Q$_i$", 2.0, 1.0),
    "dQ": ("5   dQ$_i$ += dS K$_j$", 2.0, 0.0),
}
EDGES = (("S", "P"), ("P", "dV"), ("P", "dS"), ("dP", "dS"), ("dS", "dK"), ("dS", "dQ"))


@styled
def dataflow(ways: Mapping[tuple[str, str], str], ends: Mapping[str, str], title: str) -> Figure:
    """The five products of a step, and by which way each result comes to where it is needed.

    ways: ("P", "dV") and the other pairs of EDGES to one of PLACES. ends: "dV", "dK", "dQ" to where that sum is kept, in
    words. ValueError for a pair without a way, or a place that is none.
    """
    if set(ways) != set(EDGES) or not set(ways.values()) <= set(PLACES):
        raise ValueError(f"ways has to name one of {', '.join(PLACES)} for each of {EDGES}")
    figure, (ax,) = canvas(10.4, 4.0, title=title)
    blank(ax).set(xlim=(-0.42, 3.05), ylim=(-0.45, 2.5))
    for name, (text, x, y) in BOXES.items():
        face = SAND if name in ("P", "dS") else SHADES[1] if name in ends else SHADES[0]
        box = {"facecolor": face, "edgecolor": INK, "boxstyle": "round,pad=0.45", "linewidth": 0.9}
        ax.text(x, y, text, ha="center", va="center", fontsize=10.5, bbox=box, zorder=3)
        if name in ends:
            ax.text(x + 0.39, y, ends[name], ha="left", va="center", fontsize=9, color=MUTED)
    for (a, b), place in ways.items():
        colour, dash, wide = PLACES[place]
        (_, x, y), (_, u, v) = BOXES[a], BOXES[b]
        begin, end = ((x + 0.26, y), (u - 0.3, v)) if x != u else ((x, y - 0.17), (u, v + 0.17))
        look = {"color": colour, "linestyle": dash, "linewidth": wide, "zorder": 2}
        ax.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=14, **look))
    shown = [p for p in PLACES if p in ways.values()]
    handles = [Line2D([], [], color=PLACES[p][0], linestyle=PLACES[p][1], linewidth=PLACES[p][2]) for p in shown]
    figure.legend(handles, [f"through {p}" for p in shown], loc="outside lower left", ncols=3, frameon=False)
    told = [f"{a} to {b} through {place}" for (a, b), place in ways.items()]
    kept = [f"{name}: {where}" for name, where in ends.items()]
    figure.in_words = f"{title}. {'; '.join(told)}. Where sums are kept: {'; '.join(kept)}."
    return figure


@styled
def hand_over(steps: pd.DataFrame, title: str) -> Figure:
    """CTAs that add to the same rows of dQ in turn: a lane for each, time to the right in units of one product.

    steps: a row per step with `cta`, `tile` (of queries), `begin`, `ready` (its share of dQ is there), `turn` (it may add) and
    `end`.
    """
    ctas = sorted(set(steps["cta"]))
    figure, (ax,) = canvas(9.6, 1.3 + 0.42 * len(ctas), title=title)
    for row in steps.itertuples():
        y = ctas.index(row.cta)
        ax.barh(y, row.ready - row.begin, 0.7, row.begin, color=SHADES[1], edgecolor=CARD, linewidth=0.8)
        ax.barh(y, row.turn - row.ready, 0.7, row.ready, color=CARD, edgecolor=MUTED, hatch="////", linewidth=0)
        ax.barh(y, row.end - row.turn, 0.7, row.turn, color=ORANGE, edgecolor=CARD, linewidth=0.8)
        ax.text((row.begin + row.ready) / 2, y, row.tile, ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(ctas)), [f"keys {j}" for j in ctas], color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="time, in products of one tile (a model, not a measurement)", xlim=(0, steps["end"].max()))
    handles = [
        Patch(facecolor=SHADES[1], label="S, dV, dP, dK with this tile of queries"),
        Patch(facecolor=CARD, edgecolor=MUTED, hatch="////", label="waits for its turn"),
        Patch(facecolor=ORANGE, label="dQ"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    waits = (steps["turn"] - steps["ready"]).groupby(steps["cta"]).sum()
    told = ", ".join(f"{wait:g}" for wait in waits)
    figure.in_words = (
        f"{title}: a lane per CTA, steps with 4 units of products and 1 for dQ. In all they wait, CTA by CTA: {told}."
    )
    return figure


# 23_backward_mma


LDMATRIX = ("rows run along k: ldmatrix", "rows run across k: ldmatrix.trans", "in registers already")
WGMMA = ("rows run along k: K-major", "rows run across k: MN-major", "in registers already")


@styled
def operands(
    products: Mapping[str, Sequence[tuple[str, str, str, bool | None]]], ways: Sequence[str] = LDMATRIX
) -> Figure:
    """The operands A and B of each product, k running across A and down B. Stripes are rows of a tile in shared memory: where
    they run along k ldmatrix will do, where they run across it ldmatrix.trans has to. Plain: born in registers.

    products: title to operands A, B, each (name, what runs along the other side, what k is, stripes along k; None: registers).
    ways: what the legend says of the three.
    """
    figure, axes = canvas(2.35 * len(products), 3.1, len(products))
    for ax, (title, (a, b)) in zip(axes, products.items(), strict=True):
        blank(ax).set(xlim=(-0.55, 3.3), ylim=(2.75, -1.75), aspect="equal")
        ax.set_title(title, fontsize=9.5)
        for (name, side, k, along), (x, y, w, h) in zip((a, b), ((0, 0, 1.3, 2.0), (1.7, -1.4, 1.3, 1.3)), strict=True):
            is_a = h == 2.0
            face = SHADES[0] if along is None else SAND if along is False else SHADES[2]
            ax.add_patch(Rectangle((x, y), w, h, facecolor=face, edgecolor=INK, linewidth=0.9))
            rows_across = along is not None and along == is_a  # A's k runs across, B's k down
            for t in np.arange(0.2, h if rows_across else w, 0.2) if along is not None else ():
                line = ([x, x + w], [y + t, y + t]) if rows_across else ([x + t, x + t], [y, y + h])
                ax.plot(*line, color=CARD, linewidth=1.3)
            box = {"facecolor": face, "edgecolor": "none", "pad": 1.5}
            ax.text(x + w / 2, y + h / 2, name, ha="center", va="center", fontsize=10, fontweight="bold", bbox=box)
            if is_a:
                ax.text(x + w / 2, y + h + 0.25, f"k: {k}", ha="center", va="center", fontsize=8, color=MUTED)
                ax.text(x - 0.22, y + h / 2, side, ha="center", va="center", rotation=90, fontsize=8, color=MUTED)
            else:
                ax.text(x + w / 2, y - 0.2, side, ha="center", va="center", fontsize=8, color=MUTED)
        ax.add_patch(Rectangle((1.7, 0), 1.3, 2.0, facecolor="none", edgecolor=MUTED, linestyle="--", linewidth=0.9))
        ax.text(2.35, 1.0, "+=" if "+=" in title else "=", ha="center", va="center", fontsize=10, color=MUTED)
    faces = (SHADES[2], SAND, SHADES[0])
    handles = [Patch(facecolor=face, edgecolor=INK, label=way) for face, way in zip(faces, ways, strict=True)]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    way = {True: ways[0], False: ways[1], None: ways[2]}
    told = [
        f"{title}: {', '.join(f'{name} {way[along]}' for name, _, _, along in both)}"
        for title, both in products.items()
    ]
    figure.in_words = "; ".join(told) + "."
    return figure


@styled
def owners(lines: Mapping[str, Mapping[tuple[str, str, str], np.ndarray]], share: Mapping[str, int]) -> Figure:
    """Which warp has which block of what a CTA computes in a step. lines: title -> (what, its rows, its columns) -> the number
    of the warp of each block of 32 x 32. share: title -> how many neighbouring warps have a hue in common."""
    figure = Figure(figsize=(9.6, 2.6 * len(lines)), layout="constrained")
    for ax, (title, panels) in zip(figure.subplots(len(lines), 1, squeeze=False)[:, 0], lines.items(), strict=True):
        left = 0.0
        for (what, down, along), blocks in panels.items():
            for (i, j), warp in np.ndenumerate(blocks):
                face = TINTS[warp // share[title] + 4 * (warp % share[title])]
                ax.add_patch(Rectangle((left + j, i), 1, 1, facecolor=face, edgecolor=INK, linewidth=0.8))
                ax.text(left + j + 0.5, i + 0.5, f"{warp}", ha="center", va="center", fontsize=10)
            middle = left + blocks.shape[1] / 2
            ax.text(middle, -0.15, what, ha="center", va="bottom", fontsize=10)
            ax.text(middle, blocks.shape[0] + 0.12, along, ha="center", va="top", fontsize=8.5, color=MUTED)
            middle = blocks.shape[0] / 2
            ax.text(left - 0.15, middle, down, ha="right", va="center", rotation=90, fontsize=8.5, color=MUTED)
            left += blocks.shape[1] + 1.6
        blank(ax).set(xlim=(-0.6, 13.3), ylim=(4.6, -0.7), aspect="equal")
        ax.set_title(title, fontsize=10)
    told = [
        f"{title}, {what}: " + " / ".join(" ".join(map(str, row)) for row in blocks)
        for title, panels in lines.items()
        for (what, _, _), blocks in panels.items()
    ]
    figure.in_words = f"The number of the warp of each block of 32 x 32, row by row. {'; '.join(told)}."
    return figure


# 33_backward_wgmma

WIDE = 6 * 1024  # bytes of a part of shared memory that has room for its name


@styled
def shared_memory(bars: Mapping[str, Mapping[str, int]], title: str) -> Figure:
    """Shared memory of a CTA as a bar of its parts, in the order in which they lie there; those too narrow for a name have theirs
    below the bar. bars: name -> part -> bytes."""
    words = "; ".join(
        f"{name}: {', '.join(f'{part} {size / 1024:.3g}' for part, size in sizes.items())}, {sum(sizes.values()) / 1024:.3g} KB in all"
        for name, sizes in bars.items()
    )
    figure, (ax,) = canvas(9.6, 1.35 + 0.62 * len(bars), title=title, words=f"{words}. A CTA can have 227 KB.")
    for y, sizes in enumerate(bars.values()):
        left = 0.0
        for (name, size), face in zip(sizes.items(), [*TINTS, SHADES[1]] * 2, strict=False):
            ax.barh(y, size / 1024, 0.62, left=left, color=face, edgecolor=INK, linewidth=0.7)
            if size >= WIDE:
                ax.text(left + size / 2048, y, f"{name}\n{size / 1024:.3g}", ha="center", va="center", fontsize=8.5)
            left += size / 1024
        if narrow := {name: size for name, size in sizes.items() if size < WIDE}:
            rest = f"{', '.join(narrow)}: {sum(narrow.values()) / 1024:.3g}"
            ax.text(left - 1, y + 0.34, rest, ha="right", va="top", fontsize=8.5)
        ax.text(left + 1.5, y, f"{math.ceil(left)} KB", va="center", fontsize=9)
    ax.axvline(SMEM_LIMIT / 1024, color=ORANGE, linewidth=1.6, linestyle="--")
    ax.text(SMEM_LIMIT / 1024 + 1.5, -0.45, "227 KB: all that a CTA can have", va="bottom", fontsize=8.5, color=MUTED)
    ax.set_yticks(range(len(bars)), list(bars), color=INK)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="KB", xlim=(0, 272), ylim=(len(bars) - 0.4, -0.4))
    return figure


def main_loop(which: Which, D: int, dtype: str = "fp16", kernel: str = "backward_wgmma") -> list[Line]:
    """The machine instructions of a backward kernel's main loop, in the order of the code (`sass.loop_lines`)."""
    return sass.loop_lines(which, D, dtype, kernel=kernel)


@styled
def program(found: pd.DataFrame, done: pd.DataFrame, end: int, title: str) -> Figure:
    """One turn of a loop of `end` machine instructions, in the order of the code: above, from where each product is started until
    where it is waited for; below, what the threads do in between. found, done: what `products` and `work` say of the loop."""
    kinds = [kind for kind in WORK if kind in set(done["kind"])]
    alone = {kind: (done.loc[done["kind"] == kind, "under_way"] == 0).mean() for kind in kinds}
    words = f"Products in the order {', '.join(found['name'])}. Work under no product: " + ", ".join(
        f"{share:.0%} of {kind}" for kind, share in alone.items()
    )
    figure, (ax,) = canvas(10.6, 1.3 + 0.34 * (len(found) + len(kinds)), title=title, words=f"{words}.")
    for y, row in enumerate(found.itertuples()):
        for left in (0, -end):  # what is still under way at the end is so at the beginning
            begin, stop = max(row.begin + left, 0), min(row.done + left, end)
            if stop > begin:
                ax.barh(y, stop - begin, 0.6, left=begin, color=SHADES[1], edgecolor=INK, linewidth=0.5)
        ax.barh(y, row.issued - row.begin + 1, 0.6, left=row.begin, color=BLUE, edgecolor=INK, linewidth=0.5)
    for y, kind in enumerate(kinds, len(found)):
        at = done[done["kind"] == kind]
        for alone, colour in ((False, INK), (True, ORANGE)):
            chosen = at[(at["under_way"] == 0) == alone]["at"]
            ax.vlines(chosen, y - 0.36, y + 0.36, color=colour, linewidth=1.4)
    ax.axhline(len(found) - 0.5, color=MUTED, linewidth=0.8)
    ax.set_yticks(range(len(found) + len(kinds)), [*found["name"], *kinds], color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="instruction of the loop", xlim=(0, end))
    handles = [
        Patch(facecolor=BLUE, edgecolor=INK, label="a product is started"),
        Patch(facecolor=SHADES[1], edgecolor=INK, label="under way, until it is waited for"),
        Line2D([], [], color=INK, linewidth=1.6, label="work under a product"),
        Line2D([], [], color=ORANGE, linewidth=1.6, label="under none"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure
