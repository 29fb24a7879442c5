"""Drawings for the rungs on tensor cores: who holds which element, where a tile lies in shared memory, what waits for what.

Layouts are passed in as functions (fragments.py has them), so that a picture can't disagree with the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd
from matplotlib.patches import Rectangle

from ...figures import lanes
from ...figures.steps import bars as steps
from ...figures.style import BLUE, CARD, GREEN, INK, MUTED, ORANGE, SAND, SHADES, TINTS, Figure, blank, canvas, styled

__all__ = [
    "fragments",
    "ldmatrix",
    "steps",
    "swizzled_tile",
    "timeline",
]

Layout = Callable[[int, int], tuple[int, int]]  # lane, element -> row, column


@styled
def fragments(panels: Mapping[str, tuple[Layout, int, int, int]], lane: int = 5) -> Figure:
    """Matrices whose cells say which lane holds them; the tint says in which of its 32-bit registers.

    panels: title -> (layout, elements per lane, rows, columns). The cells of `lane` are filled and carry the element's
    number. Two 16-bit elements share a register; those of C, fp32, have one each.
    """
    shapes = [(rows, columns) for _, _, rows, columns in panels.values()]
    widths = [columns for _, columns in shapes]
    figure, axes = canvas(0.36 * sum(widths) + 0.75 * len(widths), 0.36 * max(r for r, _ in shapes) + 1.0, len(panels),
                          width_ratios=widths)  # fmt: skip
    for ax, (title, (layout, elements, rows, columns)) in zip(axes, panels.items(), strict=True):
        blank(ax).set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal", anchor="N")
        ax.set_title(title, color=MUTED)
        per_register = 1 if title[0] == "C" else 2
        for owner in range(32):
            for element in range(elements):
                row, column = layout(owner, element)
                mine = owner == lane
                face = GREEN if mine else TINTS[element // per_register % len(TINTS)]
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=CARD, linewidth=0.7))
                text = f"{title[0].lower()}{element}" if mine else str(owner)
                ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8 if mine else 7,
                        color=CARD if mine else INK, fontweight="bold" if mine else "normal")  # fmt: skip
    return figure


@styled
def ldmatrix(layout: Layout, trans: bool = False) -> Figure:
    """ldmatrix.x4 on one 16 x 16 tile: left, which lane gives the address of which 16-byte row; right, which lane gets
    what. layout: lane, element (0..7, two per register) -> row, column of the tile."""
    figure, (left, right) = canvas(10.0, 5.4, 2)
    for ax in (left, right):
        blank(ax).set(xlim=(-0.1, 16.1), ylim=(16.1, -0.1), aspect="equal")
    for lane in range(32):
        matrix = lane // 8
        row, column = lane % 8 + matrix % 2 * 8, matrix // 2 * 8
        left.add_patch(
            Rectangle((column + 0.04, row + 0.06), 7.92, 0.88, facecolor=TINTS[matrix], edgecolor=MUTED, linewidth=0.7)
        )
        left.text(column + 4, row + 0.5, f"address from lane {lane}", ha="center", va="center", fontsize=8)
    left.set_title("in: 32 addresses of rows of 16 bytes (four 8 × 8 matrices)", color=MUTED)
    for lane in range(32):
        for element in range(8):
            row, column = layout(lane, element)
            right.add_patch(
                Rectangle((column, row), 1, 1, facecolor=TINTS[element // 2], edgecolor=CARD, linewidth=0.7)
            )
            right.text(column + 0.5, row + 0.5, lane, ha="center", va="center", fontsize=7)
    right.set_title(f"out{', .trans' if trans else ''}: the lane that gets it; the tint is the register", color=MUTED)
    return figure


@styled
def swizzled_tile(
    place: Callable[[int, int], int], chunks: int, rows: int = 8, column: int = 0, title: str = ""
) -> Figure:
    """Rows of 16-byte chunks as they lie in shared memory, plain and with `place`(row, chunk) -> chunk.

    Each box names the chunk of the row that is stored there; those of chunk `column`, which one 8 x 8 matrix of ldmatrix
    reads, are filled. Above the boxes, the four banks of 32 that they lie in. Rows that share a round of the banks, of fewer
    than 8 chunks, stand in one line, in turn lighter and darker.
    """
    wide, together = max(chunks, 8), max(1, 8 // chunks)  # boxes in a line, rows in a line
    figure, axes = canvas(10.2, 0.42 * rows / together + 1.5, 2, title=title)
    for ax, (name, where) in zip(axes, (("plain: chunk c at c", lambda r, c: c), ("swizzled", place)), strict=True):
        blank(ax).set(
            xlim=(-1.5 if together > 1 else -1.1, wide + 0.1), ylim=(rows / together + 0.1, -1.35), aspect="auto"
        )
        hit: dict[int, int] = {}
        for row in range(rows):
            y, turn = divmod(row, together)
            if turn == 0:
                said = f"row {row}" if together == 1 else f"rows {row}–{row + together - 1}"
                ax.text(-0.2, y + 0.5, said, ha="right", va="center", fontsize=8, color=MUTED)
            for chunk in range(chunks):
                x = turn * chunks + where(row, chunk)
                mine = chunk == column
                hit[x % 8] = hit.get(x % 8, 0) + mine
                face = ORANGE if mine else SHADES[turn % 2]
                ax.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=face, edgecolor=MUTED, linewidth=0.6))
                ax.text(x + 0.5, y + 0.5, chunk, ha="center", va="center", fontsize=8.5, color=CARD if mine else INK)
        for x in range(8):
            ax.text(x + 0.5, -0.3, f"{4 * x}–{4 * x + 3}", ha="center", fontsize=7.5, color=MUTED)
        ax.text(-0.2, -0.3, "banks", ha="right", fontsize=7.5, color=MUTED)
        worst = max(hit.values())
        ax.set_title(f"{name}: {worst} wavefront{'s' if worst > 1 else ''} for these {rows} rows", color=MUTED)
    return figure


LANES = {  # kinds of events of a timeline
    "load": (BLUE, "", "a tile of K, V may be on its way"),
    "wait": (CARD, "////", "waits"),
    "mma": (GREEN, "", "products"),
    "softmax": (SAND, "", "softmax"),
}


@styled
def timeline(events: pd.DataFrame, title: str, unit: str) -> Figure:
    """Swim lanes of one warp. events: columns lane (a name), kind (of LANES), begin and end, in `unit`."""
    names = list(dict.fromkeys(events["lane"]))
    figure, (ax,) = canvas(10.0, 0.9 + 0.62 * len(names), title=title)
    handles = lanes.draw(ax, events, names, LANES)
    ax.set(xlabel=unit, xlim=(0, events["end"].max() * 1.01))
    ax.legend(handles=handles, frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure
