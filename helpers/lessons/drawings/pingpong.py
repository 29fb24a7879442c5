"""Drawings of what runs under what: warpgroups over time, and a loop's instructions between its waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from ...figures import lanes as swim
from ...figures.steps import beside as steps
from ...figures.style import (
    GREEN,
    GRID,
    INK,
    MAGENTA,
    MUTED,
    ORANGE,
    PALEST,
    SAND,
    VIOLET,
    Figure,
    blank,
    canvas,
    styled,
)
from ...toolchain.loops import Line, is_named, waits
from .hopper import KINDS

__all__ = [
    "lanes",
    "loop",
    "states",
    "steps",
]


@styled
def lanes(cases: Mapping[str, pd.DataFrame], unit: str, span: tuple[float, float] | None = None) -> Figure:
    """Swim lanes one case above the other on one axis of time. cases: title -> lane, kind (of hopper.KINDS), begin, end.

    span: the part of the time that is shown, from 0 on in the figure; by default all of it. Where a lane does softmax under a
    product of its own, the product has the upper half and the softmax the lower one.
    """
    names = [sorted(frame["lane"].unique(), key=lambda lane: (lane != "producer", lane)) for frame in cases.values()]
    first, last = span or (0, max(frame["end"].max() for frame in cases.values()))
    figure, _ = canvas(10.2, 0.9 + sum(0.55 + 0.34 * len(n) for n in names))
    figure.clear()
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False, height_ratios=[len(n) for n in names])[:, 0]
    shown: dict[str, Patch] = {}  # by what the legend says
    for ax, lanes_here, (title, frame) in zip(axes, names, cases.items(), strict=True):
        at_once = {lane for lane, events in frame.groupby("lane") if _at_once(events)}

        def where(lane: str, kind: str, lanes_here=lanes_here, at_once=at_once) -> tuple[float, float]:
            if lane not in at_once:
                return lanes_here.index(lane), 0.8
            return lanes_here.index(lane) + (0.2 if kind == "softmax" else -0.2), 0.4

        seen = frame.assign(begin=frame["begin"].clip(lower=first) - first, end=frame["end"].clip(upper=last) - first)
        handles = swim.draw(ax, seen[seen["begin"] < seen["end"]], lanes_here, KINDS, where)
        shown |= {handle.get_label(): handle for handle in handles}
        ax.tick_params(axis="y", labelsize=8.5, labelcolor=INK)
        ax.set(xlim=(0, last - first), ylim=(len(lanes_here) - 0.45, -0.55))
        ax.set_title(title, color=MUTED, fontsize=9.5)
    axes[-1].set_xlabel(unit)
    handles = [shown[label] for _, _, label in KINDS.values() if label in shown]
    figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False, fontsize=9)
    return figure


def _at_once(frame: pd.DataFrame) -> bool:
    """Whether a lane does several things at a time."""
    ordered = frame.sort_values(["begin", "end"])
    return bool((ordered["begin"].values[1:] < ordered["end"].cummax().values[:-1] - 1e-6).any())


# What is drawn of a loop's code: pattern of the opcode -> name, colour; the first that matches counts.
INSTRUCTIONS = {
    r"HGMMA": ("HGMMA, a product", GREEN),
    r"MUFU\.EX2": ("MUFU.EX2, an exponential", ORANGE),
    r"FMNMX": ("FMNMX, a maximum", VIOLET),
    r"FMUL": ("FMUL, mostly to rescale O", MAGENTA),
    r"F2FP": ("F2FP, rounding P", SAND),
}


@styled
def loop(code: Mapping[str, Sequence[Line]]) -> Figure:
    """Loops as strips, an instruction next to the other in the order of the code, with their waits for products.

    code: name -> sass.loop_lines(...). Over each piece between waits stands its number of exponentials, under a wait how many
    groups of products may still be under way behind it, if any.
    """
    most = max(len(lines) for lines in code.values())
    figure, axes = canvas(10.2, 0.7 + 0.85 * len(code))
    figure.clear()
    axes = figure.subplots(len(code), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, lines) in zip(axes, code.items(), strict=True):
        ax.barh(0, len(lines), 1.0, left=0, color=GRID)
        for pattern, (_, colour) in INSTRUCTIONS.items():
            at = [i for i, (_, opcode, _) in enumerate(lines) if is_named(opcode, pattern)]
            ax.bar(at, 1.0, 1.0, bottom=-0.5, align="edge", color=colour)
        left_at = dict(waits(lines))
        for begin, end in zip([0, *left_at], [*left_at, len(lines)], strict=True):
            count = sum(opcode.startswith("MUFU.EX2") for _, opcode, _ in lines[begin:end])
            ax.text(
                (begin + end) / 2, 0.68, count, ha="center", va="bottom", fontsize=8.5, color=INK if count else MUTED
            )
        for i, left in left_at.items():
            ax.plot([i, i], [-0.6, 0.95], color=INK, linewidth=1.6, linestyle="--" if left else "-")
            if left:
                ax.text(i, -0.66, left, ha="center", va="top", fontsize=8, color=INK)
        ax.set(xlim=(-1, most + 1), ylim=(-1.0, 1.25), yticks=[])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK)
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[-1].set_xlabel("instructions of the loop, in the order of the code")
    handles = [Patch(color=colour, label=label) for label, colour in INSTRUCTIONS.values()] + [
        Patch(color=GRID, label="others"),
        Line2D(
            [], [], color=INK, linewidth=1.6, linestyle="--", label="waits until n of its groups of products are left"
        ),
        Line2D([], [], color=INK, linewidth=1.6, label="waits for all of them"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8.5)
    return figure


STATES = {  # name -> where, and what is done with a tile of keys
    "alone": (0.0, "S, mask, maximum, P:\nno other product under way"),
    "tracked": (4.4, "S, maximum, exponentials;\nO is complete, and rescaled"),
    "taken": (8.8, "S, exponentials with\nthe maximum there is"),
}
WAYS = [  # from, to, bend, when, where that is written
    ("alone", "tracked", 0.0, "the next is the first\nwhole tile, or one\nwas missed before", (2.2, 0.1)),
    ("tracked", "taken", 0.0, "that was the first\nwhole tile, and\nnone was missed", (6.6, 0.1)),
    ("alone", "taken", -0.16, "the first tile is whole", (4.4, 1.42)),
    (
        "taken",
        "alone",
        -0.2,
        "a sum above 32: voted down. The same tile again; from there on all are tracked",
        (4.4, -1.75),
    ),
]


@styled
def states() -> Figure:
    """What a warpgroup of 32_ping_pong does with a tile of keys, and what leads from one way of doing it to another."""
    figure, (ax,) = canvas(10.2, 3.1)
    blank(ax).set(xlim=(-1.5, 10.3), ylim=(-1.85, 1.75))
    for name, (x, does) in STATES.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": PALEST, "edgecolor": INK}
        ax.text(x, 0, f"{name}\n{does}", ha="center", va="center", fontsize=9, bbox=box, linespacing=1.4)
    for begin, end, bend, when, (x, y) in WAYS:
        a, b = STATES[begin][0], STATES[end][0]
        ends = ((a + 1.4, 0), (b - 1.4, 0)) if not bend else ((a, 0.5), (b, 0.5)) if a < b else ((a, -0.5), (b, -0.5))
        look = {"arrowstyle": "-|>", "mutation_scale": 14, "color": INK, "connectionstyle": f"arc3,rad={bend}"}
        ax.add_patch(FancyArrowPatch(*ends, **look))
        ax.text(x, y, when, ha="center", va="bottom", fontsize=8.5, color=MUTED)
    return figure
