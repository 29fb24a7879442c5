"""The drawings of notebook 20: masks, the tiles they leave, heads that share keys, and how full the GPU is meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ...emulator import banks
from ...figures.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    SAND,
    SHADES,
    TINTS,
    WHITE,
    Figure,
    blank,
    canvas,
    styled,
)
from .. import schedule

# What becomes of the scores of 32 queries, a warp's, with a tile of keys; an index of these is what tile maps are made of.
KINDS = ("never read", "read for other warps only", "multiplied and masked", "multiplied as it is")
LOOKS = ((WHITE, ""), (PALE, "///"), (SAND, ""), (SHADES[3], ""))


@styled
def masks(panels: Mapping[str, np.ndarray]) -> Figure:
    """Small masks side by side, a row per query and a column per key. panels: title -> boolean (Nq, Nk), True where it sees."""
    widths = [seen.shape[1] for seen in panels.values()]
    high = max(seen.shape[0] for seen in panels.values())
    figure, axes = canvas(0.5 * sum(widths) + 1.1 * len(widths), 0.5 * high + 1.1, len(panels), width_ratios=widths)
    for ax, (title, seen) in zip(axes, panels.items(), strict=True):
        Nq, Nk = seen.shape
        blank(ax).set(xlim=(-0.7, Nk + 0.05), ylim=(high + 0.05, -0.75), aspect="equal")
        for i, j in np.ndindex(Nq, Nk):
            face = SHADES[3] if seen[i, j] else CARD
            ax.add_patch(Rectangle((j, i), 1, 1, facecolor=face, edgecolor=MUTED, linewidth=0.8))
        for j in range(Nk):
            ax.text(j + 0.5, -0.3, f"k{j}", ha="center", va="center", fontsize=8.5, color=MUTED)
        for i in range(Nq):
            ax.text(-0.35, i + 0.5, f"q{i}", ha="center", va="center", fontsize=8.5, color=MUTED)
        ax.set_title(title, color=MUTED)
    told = [
        f"{title}: " + ", ".join(f"q{i} sees {_runs(row)}" for i, row in enumerate(seen))
        for title, seen in panels.items()
    ]
    figure.in_words = f"Which keys each query sees. {'; '.join(told)}."
    return figure


def _runs(row: np.ndarray) -> str:
    at = np.flatnonzero(row)
    return "k" + banks.runs(at).replace("–", " to k").replace(", ", " and k") if len(at) else "nothing"


@styled
def tile_map(panels: Mapping[str, np.ndarray], Br: int = 128, Bc: int = 64, strip: int = 32) -> Figure:
    """What a kernel does with each strip of queries and tile of keys. panels: title -> indices into KINDS, (strips, tiles);
    thick lines part the CTAs, of `Br` queries each."""
    figure, axes = canvas(4.3 * len(panels), 4.9, len(panels))
    for ax, (title, kinds) in zip(axes, panels.items(), strict=True):
        rows, columns = kinds.shape
        for i, j in np.ndindex(rows, columns):
            face, hatch = LOOKS[kinds[i, j]]
            box = Rectangle((j * Bc, i * strip), Bc, strip, facecolor=face, hatch=hatch, edgecolor=MUTED, linewidth=0.4)
            ax.add_patch(box)
        for i in range(0, rows * strip + 1, Br):
            ax.plot([0, columns * Bc], [i, i], color=INK, linewidth=1.6)
        ax.grid(False)
        ax.set(xlim=(-4, columns * Bc + 4), ylim=(rows * strip + 4, -4), aspect="equal", anchor="N", xlabel="key j")
        ax.set_xticks(range(0, columns * Bc + 1, 2 * Bc)), ax.set_yticks(range(0, rows * strip + 1, Br))
        ax.set_title(title, color=MUTED)
    axes[0].set_ylabel("query i")
    handles = [Patch(facecolor=f, hatch=h, edgecolor=MUTED, label=n) for n, (f, h) in zip(KINDS, LOOKS, strict=True)]
    figure.legend(handles=handles[::-1], loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    told = [
        f"{title}: " + ", ".join(f"{(kinds == n).sum()} {name}" for n, name in enumerate(KINDS))
        for title, kinds in panels.items()
    ]
    figure.in_words = f"Strips of {strip} queries by tiles of {Bc} keys, {Br} queries to a CTA. {'; '.join(told)}."
    return figure


@styled
def heads(H: int, shared: Sequence[int]) -> Figure:
    """Which head of K and V each of H query heads reads, a panel for each number of K and V heads."""
    names = {H: "multi-head", 1: "multi-query"}
    figure, axes = canvas(3.5 * len(shared), 2.3, len(shared))
    for ax, Hkv in zip(axes, shared, strict=True):
        group = H // Hkv
        blank(ax).set(xlim=(-0.9, H), ylim=(-0.35, 2.5))
        for h in range(H):
            tint = TINTS[h // group % len(TINTS)]
            ax.add_patch(Rectangle((h + 0.08, 1.7), 0.84, 0.62, facecolor=tint, edgecolor=INK, linewidth=0.8))
            ax.text(h + 0.5, 2.01, h, ha="center", va="center", fontsize=9)
            ax.plot([h + 0.5, (h // group + 0.5) * group], [1.66, 0.68], color=MUTED, linewidth=0.9)
        for hk in range(Hkv):
            x = (hk + 0.5) * group - 0.42
            tint = TINTS[hk % len(TINTS)]
            ax.add_patch(Rectangle((x, 0.0), 0.84, 0.62, facecolor=tint, edgecolor=INK, linewidth=0.8))
            ax.text(x + 0.42, 0.31, hk, ha="center", va="center", fontsize=9)
        ax.text(-0.15, 2.01, "Q", ha="right", va="center", fontsize=9, color=MUTED)
        ax.text(-0.15, 0.31, "K, V", ha="right", va="center", fontsize=9, color=MUTED)
        ax.set_title(f"Hkv = {Hkv}: {names.get(Hkv, 'grouped-query')}", color=MUTED)
    told = [f"{Hkv} heads of K and V, {H // Hkv} query heads to each" for Hkv in shared]
    figure.in_words = f"{H} heads of Q and the heads of K and V that they read. {'; '.join(told)}."
    return figure


@styled
def packed(lengths: Sequence[int]) -> Figure:
    """The same sequences padded to the longest, and packed one behind the other; rows of a tensor to scale."""
    most, total = max(lengths), sum(lengths)
    figure, (left, right) = canvas(10.2, 0.9 + 0.34 * len(lengths), 2, width_ratios=(1, 1.6))
    for ax in (left, right):
        ax.grid(False)
        ax.spines["left"].set_visible(False)
    for s, n in enumerate(lengths):
        face = TINTS[s % len(TINTS)]
        left.barh(s, n, 0.8, color=face, edgecolor=INK, linewidth=0.8)
        left.barh(s, most - n, 0.8, left=n, color=CARD, hatch="////", edgecolor=MUTED, linewidth=0.5)
        begin = sum(lengths[:s])
        right.barh(0, n, 0.8, left=begin, color=face, edgecolor=INK, linewidth=0.8)
        right.text(begin + n / 2, 0, s, ha="center", va="center", fontsize=8.5)
    left.set_yticks(range(len(lengths)), [f"sequence {s}" for s in range(len(lengths))], color=INK)
    left.invert_yaxis()
    left.set_xlabel("rows")
    starts = np.cumsum([0, *lengths])
    right.set(ylim=(len(lengths) / 2, -len(lengths) / 2), yticks=[])
    right.set_xticks(starts, [str(x) for x in starts], rotation=90 if len(lengths) > 8 else 45)
    right.set_xlabel("cu_seqlens: the row where each sequence begins")
    left.set_title(f"padded: {len(lengths)} × {most} = {len(lengths) * most} rows, hatched wasted", color=MUTED)
    right.set_title(f"packed: {total} rows", color=MUTED)
    figure.in_words = (
        f"Sequences of {', '.join(map(str, lengths))} rows. Padded to the longest they take {len(lengths) * most} rows, packed one"
        f" behind the other {total}; cu_seqlens is {', '.join(map(str, starts))}."
    )
    return figure


@styled
def occupancy(orders: Mapping[str, pd.DataFrame], places: int, unit: str = "time (tiles of keys)") -> Figure:
    """How many places for CTAs are at work, over time, for each order of the same CTAs. orders: name -> schedule.run(...)."""
    looks = [(BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (INK, ":")]
    figure, (whole, end) = canvas(11.0, 3.6, 2, width_ratios=(1, 1.25), sharey=True)
    last = max(frame["end"].max() for frame in orders.values())
    ideal = next((frame["end"] - frame["begin"]).sum() for frame in orders.values()) / places
    handles = []
    for (name, frame), (colour, dash) in zip(orders.items(), looks, strict=False):
        steps = schedule.busy(frame)
        finish = frame["end"].max()
        for ax in (whole, end):
            ax.step(steps.index, steps, where="post", color=colour, linestyle=dash, linewidth=1.8)
        label = f"{name}: done at {finish:.0f}, {finish / ideal - 1:.1%} above the ideal"
        handles.append(Line2D([], [], color=colour, linestyle=dash, linewidth=1.8, label=label))
    for ax in (whole, end):
        ax.axvline(ideal, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        ax.set(ylim=(0, places * 1.06), xlabel=unit)
    whole.set(xlim=(0, last * 1.01), ylabel=f"places at work, of {places}")
    end.set(xlim=(ideal - 1.6 * (last - ideal) - 1, last * 1.003))
    end.text(ideal, places * 0.04, "all places \nbusy to the end ", ha="right", fontsize=8.5, color=MUTED)
    whole.set_title("from the first CTA to the last", color=MUTED)
    end.set_title("the end, enlarged", color=MUTED)
    figure.legend(handles=handles, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    told = "; ".join(str(handle.get_label()) for handle in handles)
    figure.in_words = f"How many of {places} places are at work over time, and how that ends. {told}."
    return figure
