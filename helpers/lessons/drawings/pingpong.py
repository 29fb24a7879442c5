"""Drawings of what runs under what: warpgroups over time, and a loop's instructions between its waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from ...figures import lanes as swim
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
from .hopper import KINDS, said

__all__ = [
    "lanes",
    "loop",
    "states",
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
    told = []
    for ax, lanes_here, (title, frame) in zip(axes, names, cases.items(), strict=True):
        at_once = {lane for lane, events in frame.groupby("lane") if _at_once(events)}

        def where(lane: str, kind: str, lanes_here=lanes_here, at_once=at_once) -> tuple[float, float]:
            if lane not in at_once:
                return lanes_here.index(lane), 0.8
            return lanes_here.index(lane) + (0.2 if kind == "softmax" else -0.2), 0.4

        seen = frame.assign(begin=frame["begin"].clip(lower=first) - first, end=frame["end"].clip(upper=last) - first)
        seen = seen[seen["begin"] < seen["end"]]
        told.append(f"{title}: {said(seen)}.")
        handles = swim.draw(ax, seen, lanes_here, KINDS, where)
        shown |= {handle.get_label(): handle for handle in handles}
        ax.tick_params(axis="y", labelsize=8.5, labelcolor=INK)
        ax.set(xlim=(0, last - first), ylim=(len(lanes_here) - 0.45, -0.55))
        ax.set_title(title, color=MUTED, fontsize=9.5)
    axes[-1].set_xlabel(unit)
    handles = [shown[label] for _, _, label in KINDS.values() if label in shown]
    figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False, fontsize=9)
    figure.in_words = " ".join(told)
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
            if count or end - begin > most / 50:  # a zero needs room beside its waits' lines
                colour = INK if count else MUTED
                ax.text((begin + end) / 2, 0.68, count, ha="center", va="bottom", fontsize=8.5, color=colour)
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
    figure.in_words = " ".join(f"{name}: {_pieces(lines)}." for name, lines in code.items())
    return figure


def _pieces(lines: Sequence[Line]) -> str:
    """A loop's exponentials between its waits for products, in words."""
    parts, begin = [], 0
    for end, left in [*waits(lines), (len(lines), None)]:
        count = sum(opcode.startswith("MUFU.EX2") for _, opcode, _ in lines[begin:end])
        until = "the loop's end" if left is None else f"a wait until {left} groups of products are left"
        parts.append(f"{count} exponentials before {until}")
        begin = end
    return ", ".join(parts)


# The states of a warpgroup's loop over tiles of keys: number in the kernel's comments -> name, what it does, place of the box.
STATES = {
    1: ("exact tile", "S alone; mask, maximum,\nexponentials, P rounded", (1.6, 0.0)),
    2: ("next turn", "wait for the next K and, unless\nit is held, for the turn; read votes", (6.3, 0.0)),
    3: ("two products", "start the next S, then O; pass the turn;\nexponentials; cast a vote, if need be", (12.0, 1.9)),
    4: ("O alone", "start O; pass the turn;\nwait for O", (12.0, -1.9)),
    5: ("last tile", "a barrier of the warpgroup;\nread votes", (6.3, 2.6)),
    6: ("voted down", "clear the votes; track the\nmaximum from here on", (6.3, -2.6)),
    7: ("done", "the last O, division,\nO to HBM", (1.6, 2.6)),
}
WAYS = [  # from, to, begin and end of the arrow, how it bends, is the turn held (see HELD), when, where that is written
    (1, 2, (3.25, 0.0), (4.3, 0.0), 0.0, None, "a tile\nfollows", (3.8, 0.12)),
    (1, 5, (2.8, 0.65), (4.6, 2.2), 0.0, False, "none\nfollows", (3.35, 1.45)),
    (2, 3, (7.4, 0.65), (9.5, 1.6), 0.0, True, "P stands,\nthe next tile is whole", (7.75, 1.4)),
    (3, 2, (11.0, 1.25), (8.35, 0.1), -0.25, False, "a tile follows", (10.6, 0.2)),
    (3, 5, (9.5, 2.5), (8.1, 2.75), 0.0, False, "none follows", (8.95, 2.8)),
    (2, 4, (7.6, -0.65), (10.2, -1.6), 0.0, True, "P stands, the mask\ncuts the next tile", (10.0, -1.15)),
    (4, 1, (11.0, -2.55), (0.7, -0.65), -0.38, False, "the next tile", (10.4, -3.5)),
    (2, 6, (6.3, -0.65), (6.3, -1.95), 0.0, True, "P may\nnot stand", (5.6, -1.5)),
    (5, 6, (4.9, 1.95), (4.7, -2.2), 0.18, False, "P may\nnot stand", (3.95, -1.35)),
    (6, 1, (4.6, -2.6), (1.9, -0.65), -0.2, None, "the same tile", (3.95, -1.95)),
    (5, 7, (4.5, 2.6), (3.1, 2.6), 0.0, False, "P stands", (3.8, 2.68)),
]
HELD = {  # how an arrow is drawn: colour, dash, width, what that means
    True: (ORANGE, "--", 2.2, "the warpgroup holds the turn (has_turn)"),
    None: (ORANGE, (0, (1, 0.9)), 2.2, "it does if (2) found a vote, not if (5) did"),
    False: (INK, "-", 1.2, "it doesn't"),
}


@styled
def states() -> Figure:
    """What a warpgroup of 32_ping_pong does with a tile of keys, what leads from one state to the next, and where it holds the
    turn. The numbers are those in the kernel's comments."""
    figure, (ax,) = canvas(10.6, 5.4)
    blank(ax).set(xlim=(-0.4, 14.9), ylim=(-4.2, 3.45))
    for number, (name, does, (x, y)) in STATES.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": PALEST, "edgecolor": INK}
        ax.text(x, y, f"({number}) {name}\n{does}", ha="center", va="center", fontsize=9, bbox=box, linespacing=1.35)
    for _, _, begin, end, bend, held, when, (x, y) in WAYS:
        colour, dash, wide = HELD[held][:3]
        look = {"color": colour, "linestyle": dash, "linewidth": wide, "connectionstyle": f"arc3,rad={bend}"}
        ax.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=14, **look))
        ax.text(x, y, when, ha="center", va="bottom", fontsize=8.5, color=MUTED, linespacing=1.1)
    handles = [Line2D([], [], color=c, linestyle=d, linewidth=w, label=label) for c, d, w, label in HELD.values()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    figure.in_words = (
        "Seven states of a warpgroup. From an exact tile it goes to the next turn; from there, if P stands, to two products "
        "or, where the mask cuts the next tile, to O alone; if P may not stand, back to the same tile, and it keeps the turn. At "
        "the last tile a barrier shows the votes: from there it goes back without a turn."
    )
    return figure
