"""The drawings of notebooks 22, 23 and 33: what is kept for the way back, who owns which sum, how the five products meet, and
what of a Hopper kernel they are drawn from: its constants and the machine code of its loop.

The look is that of plot.py and draw.py: a light card on any page, colours that differ in lightness too.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from ..figures.style import BLUE, CARD, GREEN, INK, MUTED, ORANGE, SAND, SHADES, Figure, blank, canvas, styled
from ..ladder.rung import Rung
from ..ladder.rung import rung as find
from ..toolchain import sass
from .draw_mma import TINTS

UNITS = {2.0**10: "1 KiB", 2.0**20: "1 MiB", 2.0**30: "1 GiB", 2.0**40: "1 TiB"}


# 22_backward_fp32


@styled
def stored_bytes(frame: pd.DataFrame, title: str) -> Figure:
    """What stays in memory between the way there and the way back. frame: index N, a column of bytes for each thing that could
    be kept."""
    figure, (ax,) = canvas(7.8, 3.9, title=title)
    width = 0.82 / frame.shape[1]
    looks = zip((ORANGE, BLUE, GREEN, MUTED), ("//", "", "..", "xx"), strict=True)
    for n, ((name, values), (colour, hatch)) in enumerate(zip(frame.items(), looks, strict=False)):
        x = np.arange(len(frame)) + (n - (frame.shape[1] - 1) / 2) * width
        bars = ax.bar(x, values, width * 0.94, color=colour, hatch=hatch, edgecolor=CARD, label=name)
        ax.bar_label(bars, [_size(v) for v in values], fontsize=8, color=INK, padding=2)
    ax.set_yscale("log", base=2)
    low, high = frame.min(axis=None), frame.max(axis=None)
    ax.set_yticks(list(UNITS), list(UNITS.values()))
    ax.set_xticks(range(len(frame)), [f"{n:,}" for n in frame.index])
    ax.set(xlabel="sequence length N", ylabel="bytes", ylim=(low / 8, high * 16))
    ax.grid(axis="x", visible=False)
    ax.minorticks_off()
    figure.legend(loc="outside upper right", ncols=frame.shape[1], frameon=False, fontsize=9)
    return figure


def _size(n: float) -> str:
    """3.5 MiB: three digits at most."""
    for unit, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if n >= unit:
            return f"{n / unit:.3g}\n{name}"
    return f"{n:.0f}\nB"


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
    return figure


# 33_backward_wgmma


def constants(source: str, d: int, **given: int) -> dict[str, int]:
    """The numbers in `struct Tile` of a rung's text for head dimension d, in the order in which they stand there. given: those
    of them that shall be something else, so that what depends on them changes too. ValueError where there is no such struct.
    """
    found = re.search(r"struct Tile \{\n(.*?)\n\};", source, re.DOTALL)
    if not found:
        raise ValueError("the text has no struct Tile")
    values = {"d": d}
    for declared in re.findall(r"static constexpr int ([^;]+);", re.sub(r"//.*", "", found[1])):
        for each in declared.split(","):
            name, expression = (part.strip() for part in each.split("=", 1))
            values[name] = given.get(name, _evaluate(expression, values))
    return values


def _evaluate(expression: str, values: Mapping[str, int]) -> int:
    """A C++ expression of whole numbers: + - * / %, comparisons, ! && || and ?:"""
    while inner := re.search(r"\(([^()]*)\)", expression):
        expression = expression[: inner.start()] + f" {_evaluate(inner[1], values)} " + expression[inner.end() :]
    while choice := re.fullmatch(r"([^?]*)\?(.*?):(.*)", expression):  # a ? b : c ? d : e
        condition, yes, no = choice.groups()
        expression = yes if _evaluate(condition, values) else no
    for cpp, python in (("/", "//"), ("&&", " and "), ("||", " or "), (r"!(?!=)", " not ")):
        expression = re.sub(cpp if cpp.startswith("!") else re.escape(cpp), python, expression)
    return int(eval(expression.strip(), {"__builtins__": {}}, dict(values)))


PARTS = (
    "K",
    "V",
    "Q",
    "dO",
    "dS",
    "dQ",
    "LSE",
    "delta",
    "barriers",
)  # of shared memory, each a constant that says where
SMEM_LIMIT = 227 * 1024  # bytes of a CTA (CUDA C++ Programming Guide, "Compute Capabilities", 9.0)


def parts(values: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each part of shared memory, from where the next one begins; the last ends at `smem_bytes`."""
    places = sorted((values[name], name) for name in PARTS if name in values)
    ends = [begin for begin, _ in places[1:]] + [values["smem_bytes"]]
    return {name: end - begin for (begin, name), end in zip(places, ends, strict=True)}


@styled
def shared_memory(bars: Mapping[str, Mapping[str, int]], title: str) -> Figure:
    """Shared memory of a CTA as a bar of its parts, in the order in which they lie there. bars: name -> part -> bytes."""
    figure, (ax,) = canvas(9.6, 1.35 + 0.62 * len(bars), title=title)
    for y, sizes in enumerate(bars.values()):
        left = 0.0
        for (name, size), face in zip(sizes.items(), [*TINTS, SHADES[1]] * 2, strict=False):
            ax.barh(y, size / 1024, 0.62, left=left, color=face, edgecolor=INK, linewidth=0.7)
            if size >= 6 * 1024:
                ax.text(left + size / 2048, y, f"{name}\n{size / 1024:.3g}", ha="center", va="center", fontsize=8.5)
            left += size / 1024
        ax.text(left + 1.5, y, f"{math.ceil(left)} KB", va="center", fontsize=9)
    ax.axvline(SMEM_LIMIT / 1024, color=ORANGE, linewidth=1.6, linestyle="--")
    ax.text(SMEM_LIMIT / 1024 + 1.5, -0.45, "227 KB: all that a CTA can have", va="bottom", fontsize=8.5, color=MUTED)
    ax.set_yticks(range(len(bars)), list(bars), color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="KB", xlim=(0, 272))
    return figure


def main_loop(rung: str | Rung, D: int, dtype: str = "fp16", kernel: str = "backward_wgmma") -> list[sass.Line]:
    """The machine instructions of a kernel's main loop, in the order of the code."""
    rung = rung if isinstance(rung, Rung) else find(rung)
    code = sass._code(sass.disassembly(rung))
    return loop_of(code[sass.instance(code, D, dtype, kernel)])


def loop_of(lines: Sequence[sass.Line]) -> list[sass.Line]:
    """Of all code between a backward branch and its target the one with the most products, the shortest of these. Not what has the
    kernel's end in it: waiting for an mbarrier goes on in a piece of code behind the end, which branches back to where it came
    from. ValueError if no loop has products."""
    loops = [[]]
    for address, opcode, operands in lines:
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        if target and (start := int(target[1], 16)) < address:
            inside = [line for line in lines if start <= line[0] <= address]
            loops += [inside] if not any(code == "EXIT" for _, code, _ in inside) else []
    most = max(loops, key=lambda loop: (sum(code.startswith("HGMMA") for _, code, _ in loop), -len(loop)))
    if not any(code.startswith("HGMMA") for _, code, _ in most):
        raise ValueError("the kernel has no loop with wgmma")
    return most


def accumulators(source: str, region: str = "tile_loop") -> list[str]:
    """What the products in a region of a rung's text add to, in its order: "dP", "dV", "S" ..., each once where it stands; a call
    of start_S(), a function of the kernel, stands for S."""
    text = source.partition(f"// [region: {region}]")[2].partition(f"// [end: {region}]")[0]
    found = re.findall(r"\b(?:product|wgmma_mma_async<[^>]*>)\(\s*(\w+)_reg\b|\bstart_(\w+)\(", text)
    return [a or b for a, b in found]


def products(lines: Sequence[sass.Line], names: Sequence[str]) -> pd.DataFrame:
    """The products in a loop of machine code, a row for each of `names`, in which order they have to come.

    Columns: name; shape, of one instruction; instructions; A and B ("registers", "K-major", "MN-major"); begin and issued,
    the numbers of its first and last instruction in the loop; done, that of the wait that covers it, beyond the loop's length
    where that is in the next turn. ValueError where the loop has more or fewer products than there are names.
    """
    found: list[dict] = []
    commits, into = [], ""
    for at, (_, opcode, operands) in enumerate(lines):
        if not opcode.startswith("HGMMA"):
            continue
        shape, fields = opcode.split(".")[1], [x.strip() for x in operands.split(",")]
        if fields[0] != into:
            majors = {side: "MN-major" if f"tnsp{side}" in operands else "K-major" for side in "AB"}
            a = "registers" if fields[1].startswith("R") else majors["A"]
            found.append({"shape": shape, "instructions": 0, "A": a, "B": majors["B"], "begin": at})
            into = fields[0]
        found[-1] |= {"instructions": found[-1]["instructions"] + 1, "issued": at}
        if "gsb0" in operands:
            commits.append(at)
    if len(found) != len(names):
        raise ValueError(f"the loop has {len(found)} products, not {len(names)}: {', '.join(names)}")
    waits = [(at, int(o.rpartition(",")[2], 16)) for at, (_, code, o) in enumerate(lines) if code.startswith(sass.WAIT)]
    n = len(lines)
    for row in found:
        turns = [(at + turn, left) for turn in (0, n) for at, left in waits if at + turn > row["issued"]]
        all_commits = commits + [at + n for at in commits]
        done = [at for at, left in turns if sum(row["issued"] < commit < at for commit in all_commits) >= left]
        row["done"] = done[0] if done else 2 * n
    frame = pd.DataFrame(found)
    frame.insert(0, "name", list(names))
    return frame


WORK = {  # what threads do meanwhile: opcodes
    "exponentials": r"MUFU\.EX2",
    "multiply, add": r"FFMA|FMUL|FADD",
    "round to 16 bits": r"F2FP",
    "read shared memory": r"LDS",
    "write shared memory": r"STSM|STS",
    "wait for other threads": r"BAR\.|SYNCS\.PHASECHK",
}


def work(lines: Sequence[sass.Line], found: pd.DataFrame) -> pd.DataFrame:
    """The instructions of WORK in a loop: at, its number; kind; and under_way, how many of the products `found` in the loop have
    begun by then and are not yet waited for."""
    rows, n = [], len(lines)
    for at, (_, opcode, _) in enumerate(lines):
        for kind, pattern in WORK.items():
            if re.match(pattern, opcode):
                spans = zip(found["begin"], found["done"], strict=True)
                rows.append((at, kind, sum(begin < at < done or at + n < done for begin, done in spans)))
    return pd.DataFrame(rows, columns=["at", "kind", "under_way"])


@styled
def program(found: pd.DataFrame, done: pd.DataFrame, end: int, title: str) -> Figure:
    """One turn of a loop of `end` machine instructions, in the order of the code: above, from where each product is started until
    where it is waited for; below, what the threads do in between. found, done: what `products` and `work` say of the loop."""
    kinds = [kind for kind in WORK if kind in set(done["kind"])]
    figure, (ax,) = canvas(10.6, 1.3 + 0.34 * (len(found) + len(kinds)), title=title)
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


@styled
def drafts(frame: pd.DataFrame, title: str) -> Figure:
    """What drafts of a kernel reached, as a ratio to a peer, a line for each and a mark for each D. frame: step, what, kept ("yes…",
    "at D = …" or "no…"), D and ratio; with ratio_causal a second panel. Marks of what stayed are filled."""
    order = frame.drop_duplicates("step").sort_values("step")
    panels = {"ratio": "without a mask", "ratio_causal": "causal"} if "ratio_causal" in frame else {"ratio": ""}
    figure, axes = canvas(6.4 + 3.2 * len(panels), 1.5 + 0.28 * len(order), len(panels), title=title, sharey=True)
    places = {step: y for y, step in enumerate(order["step"])}
    looks = dict(zip(sorted(frame["D"].unique()), (("o", BLUE), ("s", ORANGE), ("D", GREEN)), strict=False))
    for row in frame.itertuples():
        marker, colour = looks[row.D]
        stays = not row.kept.startswith("no") and ("D =" not in row.kept or f"D = {row.D}" in row.kept)
        look = {"marker": marker, "markeredgecolor": colour, "markerfacecolor": colour if stays else CARD}
        for ax, name in zip(axes, panels, strict=True):
            ax.plot(getattr(row, name), places[row.step], linestyle="", markersize=7, **look)
    for ax, said in zip(axes, panels.values(), strict=True):
        ax.axvline(1, color=MUTED, linewidth=1, linestyle="--")
        ax.set_title(said, color=MUTED)
        ax.set(xlabel="times as fast as the peer", ylim=(len(order) - 0.4, -0.6))
    labels = [f"{step} · {textwrap.shorten(what, 62)}" for step, what in zip(order["step"], order["what"], strict=True)]
    axes[0].set_yticks(range(len(order)), labels, color=INK, fontsize=8)
    handles = [
        Line2D([], [], linestyle="", marker=m, color=c, markersize=7, label=f"D = {D}") for D, (m, c) in looks.items()
    ]
    handles.append(Line2D([], [], linestyle="", marker="o", color=MUTED, markerfacecolor=CARD, label="not kept"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure
