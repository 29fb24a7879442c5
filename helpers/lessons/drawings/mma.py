"""Drawings for the rungs on tensor cores: who holds which element, where a tile lies in shared memory, what waits for what.

Layouts are passed in as functions (fragments.py has them), so that a picture can't disagree with the interpreter.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ...emulator.fragments import a_fragment, b_fragment
from ...figures import lanes
from ...figures.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    QUARTERS,
    SAND,
    SHADES,
    TINTS,
    Picture,
    blank,
    styled,
)

Layout = Callable[[int, int], tuple[int, int]]  # lane, element -> row, column
AXES = {"A": ("row (m)", "k"), "B": ("k", "column (n)"), "C": ("row (m)", "column (n)"), "S": ("query", "key")}


def _number(ax: Axes, rows: int, columns: int, down: str, across: str) -> None:
    """Names the axes of a matrix and numbers every fourth row and column; row 0 is on top."""
    ax.set_xticks([c + 0.5 for c in range(0, columns, 4)], range(0, columns, 4))
    ax.set_yticks([r + 0.5 for r in range(0, rows, 4)], range(0, rows, 4))
    ax.tick_params(length=0, labelsize=7.5, pad=1)
    ax.set_xlabel(across, fontsize=8.5, color=MUTED, labelpad=2)
    ax.set_ylabel(down, fontsize=8.5, color=MUTED, labelpad=2)


def _panels(text: str, width: float, height: float, columns: int, **options: object) -> tuple[Picture, list[Axes]]:
    """A Picture of `columns` axes side by side, with its text form."""
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = text
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


@styled
def fragments(panels: Mapping[str, tuple[Layout, int, int, int]], lane: int = 5) -> Picture:
    """Matrices whose cells say which lane holds them; the tint says in which of its 32-bit registers.

    panels: title -> (layout, elements per lane, rows, columns). The cells of `lane` are filled and carry the element's
    number. Two 16-bit elements share a register; those of C, fp32, have one each. A title's first letter says what its rows and
    columns are called.
    """
    shapes = [(rows, columns) for _, _, rows, columns in panels.values()]
    widths = [columns for _, columns in shapes]
    text = ", ".join(
        f"{title}: lane {lane} holds (row, column) {', '.join(str(layout(lane, i)) for i in range(elements))}"
        for title, (layout, elements, _, _) in panels.items()
    )
    height = 0.24 * max(r for r, _ in shapes) + 1.0
    figure, axes = _panels(text, 0.24 * sum(widths) + 0.95 * len(widths), height, len(panels), width_ratios=widths)
    for ax, (title, (layout, elements, rows, columns)) in zip(axes, panels.items(), strict=True):
        blank(ax).set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal", anchor="N")
        ax.set_title(title, color=MUTED)
        _number(ax, rows, columns, *AXES.get(title[0], ("row", "column")))
        per_register = 1 if title[0] == "C" else 2
        for owner in range(32):
            for element in range(elements):
                row, column = layout(owner, element)
                mine = owner == lane
                face = GREEN if mine else TINTS[element // per_register % len(TINTS)]
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=CARD, linewidth=0.7))
                text = f"{title[0].lower()}{element}" if mine else str(owner)
                ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8.5,
                        color=CARD if mine else INK, fontweight="bold" if mine else "normal")  # fmt: skip
    return figure


OPERANDS = {  # what ldmatrix.x4 reads: title, its rows, lane -> row and chunk that it names, and as what it is multiplied
    "Q": ("Q: operand A", "query", lambda lane: (lane % 16, lane // 16), a_fragment, False),
    "K": ("K: operand B = Kᵀ", "key", lambda lane: (lane % 8 + lane // 16 * 8, lane // 8 % 2), b_fragment, False),
    "V": ("V, .trans: operand B", "key", lambda lane: (lane % 16, lane // 16), b_fragment, True),
}


def held(operand: str, lane: int) -> list[list[tuple[int, int]]]:
    """Of each of the four registers that a lane gets of an operand of OPERANDS, the two places (row, column) in the 16 x 16 tile
    in shared memory, by what ldmatrix does (PTX ISA): with .trans every 8 x 8 matrix is handed out transposed."""
    _, _, address, _, trans = OPERANDS[operand]
    registers = []
    for matrix in range(4):
        row, chunk = address(8 * matrix)
        pairs = [(lane // 4, lane % 4 * 2 + i) for i in range(2)]
        registers.append([(row + (c if trans else r), 8 * chunk + (r if trans else c)) for r, c in pairs])
    return registers


@styled
def operands(lane: int = 5) -> Picture:
    """A 16 x 16 tile of Q, K and V in shared memory: which lanes name the rows of which 8 x 8 matrix of ldmatrix.x4, in which
    register it arrives, and the pairs of elements that `lane` gets."""
    text = (
        "ldmatrix.x4 on a 16 x 16 tile of Q, K and V. Q and V: lanes 0-7 name the upper left matrix, 8-15 the lower left, 16-23 "
        "the upper right, 24-31 the lower right; of K 8-15 name the upper right and 16-23 the lower left. A lane's pair of "
        "elements lies side by side in Q and K, and one below the other in V, because of .trans."
    )
    figure, axes = _panels(text, 11.4, 4.9, 3)
    for ax, (name, (title, down, address, _, _)) in zip(axes, OPERANDS.items(), strict=True):
        blank(ax).set(xlim=(-0.05, 16.05), ylim=(16.05, -0.05), aspect="equal")
        ax.set_title(title, color=MUTED)
        _number(ax, 16, 16, down, "column (d)")
        for matrix in range(4):
            row, chunk = address(8 * matrix)
            box = Rectangle((8 * chunk + 0.06, row + 0.06), 7.88, 7.88, facecolor=QUARTERS[matrix], edgecolor=MUTED)
            ax.add_patch(box)
            said = f"lanes {8 * matrix}–{8 * matrix + 7}\nregister {matrix}"
            ax.text(8 * chunk + 4, row + 5.5, said, ha="center", va="center", fontsize=9)
            for r, c in held(name, lane)[matrix]:
                ax.add_patch(Rectangle((c, r), 1, 1, facecolor=GREEN, edgecolor=CARD, linewidth=0.7))
                ax.text(c + 0.5, r + 0.5, lane, ha="center", va="center", fontsize=7.5, color=CARD, fontweight="bold")
    return figure


@styled
def split_over_warps() -> Picture:
    """A tile of S with what each of four warps computes of it, and whose O it is: keys split over the warps, and queries."""
    text = (
        "Left, the keys of a tile are split over four warps: each has a part of the sum for every row of O, and the parts have to "
        "be added through shared memory. Right, the queries are split: each warp has its rows of S and of O to itself."
    )
    figure, axes = _panels(text, 9.6, 3.1, 2)
    titles = "keys split: FlashAttention-1", "queries split: FlashAttention-2 and this kernel"
    for ax, title in zip(axes, titles, strict=True):
        blank(ax).set(xlim=(-0.9, 7.6), ylim=(4.35, -0.75), aspect="equal")
        ax.set_title(title, color=MUTED)
        ax.text(2, -0.2, "S: keys →", ha="center", fontsize=9)
        ax.text(6, -0.2, "O: d →", ha="center", fontsize=9)
        ax.text(-0.25, 2, "queries", ha="center", va="center", rotation=90, fontsize=9)
        for warp in range(4):
            by_keys = ax is axes[0]
            at, size = ((warp, 0), (1, 4)) if by_keys else ((0, warp), (4, 1))
            ax.add_patch(Rectangle(at, *size, facecolor=QUARTERS[warp], edgecolor=INK, linewidth=0.8))
            ax.text(at[0] + size[0] / 2, at[1] + size[1] / 2, f"warp {warp}", ha="center", va="center", fontsize=8.5,
                    rotation=90 if by_keys else 0)  # fmt: skip
            if not by_keys:
                ax.add_patch(Rectangle((4.9, warp), 2.2, 1, facecolor=QUARTERS[warp], edgecolor=INK, linewidth=0.8))
                ax.text(6, warp + 0.5, f"warp {warp}", ha="center", va="center", fontsize=8.5)
    axes[0].add_patch(Rectangle((4.9, 0), 2.2, 4, facecolor=CARD, edgecolor=INK, hatch="////", linewidth=0.8))
    said = "four parts,\nadded through\nshared memory"
    box = {"facecolor": CARD, "edgecolor": "none", "pad": 2}
    axes[0].text(6, 2, said, ha="center", va="center", fontsize=8.5, bbox=box)
    return figure


@styled
def dots(
    frame: pd.DataFrame,
    title: str,
    xlabel: str,
    text: str,
    log: bool = False,
    line: float | None = 1,
    digits: str = ".2f",
) -> Picture:
    """A line for each label and on it a mark for each D, its number beside it.

    frame: columns label, D, ratio, and kept (True: filled, False: hollow); a label's rows in the order of the lines, from the top.
    text: what to see. log: a logarithmic axis. line: where a dashed line stands. digits: the format of the numbers.
    """
    labels = list(dict.fromkeys(frame["label"]))
    wrapped = [textwrap.fill(label, 58) for label in labels]
    figure, (ax,) = _panels(text, 10.2, 1.3 + sum(0.2 + 0.17 * (1 + w.count("\n")) for w in wrapped), 1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    looks = dict(zip(sorted(set(frame["D"])), (("o", BLUE), ("s", ORANGE), ("D", GREEN)), strict=False))
    for row in frame.itertuples():
        marker, colour = looks[row.D]
        y = labels.index(row.label) + (
            0.14 if row.D == max(looks) and len(looks) > 1 else -0.14 if len(looks) > 1 else 0
        )
        ax.plot(
            row.ratio, y, marker, color=colour, markerfacecolor=colour if row.kept else CARD, markersize=6.5, zorder=3
        )
        ax.annotate(
            f"{row.ratio:{digits}}", (row.ratio, y), (6, 0), textcoords="offset points", va="center", fontsize=7.5
        )
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if line is not None:
        ax.axvline(line, color=MUTED, linewidth=1, linestyle="--")
    ax.set_yticks(range(len(labels)), wrapped, color=INK, fontsize=8.5)
    ax.set(xlabel=xlabel, ylim=(len(labels) - 0.5, -0.6))
    ax.margins(x=0.09)
    handles = [Line2D([], [], linestyle="", marker=m, color=c, label=f"D = {D}") for D, (m, c) in looks.items()]
    if not frame["kept"].all():
        handles.append(
            Line2D([], [], linestyle="", marker="o", color=MUTED, markerfacecolor=CARD, label="did not stay")
        )
    figure.legend(handles=handles, loc="outside lower right", ncols=4, frameon=False, fontsize=9)
    return figure


@styled
def swizzled_tile(
    place: Callable[[int, int], int], chunks: int, rows: int = 8, column: int = 0, title: str = ""
) -> Picture:
    """Rows of 16-byte chunks as they lie in shared memory, plain and with `place`(row, chunk) -> chunk.

    Each box names the chunk of the row that is stored there; those of chunk `column`, which one 8 x 8 matrix of ldmatrix
    reads, are filled. Above the boxes, the four banks of 32 that they lie in. Rows that share a round of the banks, of fewer
    than 8 chunks, stand in one line, in turn lighter and darker.
    """
    wide, together = max(chunks, 8), max(1, 8 // chunks)  # boxes in a line, rows in a line
    plain, spread = (
        len({(row * chunks + where(row, column)) % 8 for row in range(rows)}) for where in (lambda r, c: c, place)
    )
    text = (
        f"{rows} rows of {chunks} chunks in shared memory. Chunk {column} of the {rows} rows lies in {plain} of the 8 groups of four "
        f"banks if it is stored at place {column}, and in {spread} of them if it is swizzled."
    )
    figure, axes = _panels(text, 10.2, 0.42 * rows / together + 1.5, 2)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
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
    "load": (BLUE, "", "a tile of K, V on its way"),
    "wait": (CARD, "////", "waits"),
    "mma": (GREEN, "", "products"),
    "softmax": (SAND, "", "softmax"),
}


@styled
def timeline(events: pd.DataFrame, title: str, unit: str, text: str, until: float = 0) -> Picture:
    """Swim lanes of one warp. events: columns lane (a name), kind (of LANES), begin and end, in `unit`; without a unit the lengths
    mean nothing, and the axis has no numbers. text: what to see. until: where the axis ends, to compare two (default: with the last event)."""
    names = list(dict.fromkeys(events["lane"]))
    figure, (ax,) = _panels(text, 10.0, 0.9 + 0.62 * len(names), 1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles = lanes.draw(ax, events, names, LANES)
    if not unit:
        ax.set_xticks([])
    ax.set(xlabel=unit or "time (lengths made up)", xlim=(0, max(until, events["end"].max()) * 1.01))
    ax.legend(handles=handles, frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure


def prescribed(
    copied_ahead: bool, tiles: int = 3, copy: float = 4, product: float = 2, softmax: float = 1
) -> pd.DataFrame:
    """The order in which one warp's loop has to do things, with made-up durations: for `timeline`.

    copied_ahead: a tile's copy is ordered before the products of the tile before (12), else the warp waits for it (11).
    """
    rows, now, landed = [], 0.0, copy
    for j in range(tiles):
        ordered = now
        if not copied_ahead or j == 0:
            rows += [("copy", "load", now, now + copy), ("warp", "wait", now, now + copy)]
            now += copy
        elif landed > now:
            rows.append(("warp", "wait", now, landed))
            now = landed
        if copied_ahead and j + 1 < tiles:
            ordered, landed = now, now + copy
            rows.append(("copy", "load", ordered, landed))
        for kind, length in (("mma", product), ("softmax", softmax), ("mma", product)):
            rows.append(("warp", kind, now, now + length))
            now += length
    frame = pd.DataFrame(rows, columns=["lane", "kind", "begin", "end"])
    return frame.sort_values(["lane", "begin"], kind="stable")
