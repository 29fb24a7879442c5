"""One warp request as a picture: over the banks of shared memory, or over the lines and sectors of global memory.

Each has a text form for the terminal.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from ..emulator import banks
from ..emulator.trace import Access
from .style import CARD, INK, MUTED, ORANGE, PALEST, QUARTERS, WASTED, Picture, blank, picture, styled
from .words import SOURCES, many, place


def colour(lane: int) -> tuple[float, float, float]:
    """A lane's colour as red, green, blue: the hue of its quarter warp, lighter from the quarter's first lane to its last."""
    base = np.array(to_rgb(QUARTERS[lane // 8]))
    return tuple(base + (1 - base) * 0.075 * (lane % 8))


def _fitting(lanes: list[int], cells: int) -> str:
    """The lanes in words where they fit into so many cells, else the first and a plus."""
    text = banks.runs(lanes)
    return text if len(text) <= 2.3 * cells else f"{lanes[0]}+"


# Shared memory


@styled
def bank_map(access: Access, at: str = "") -> Picture:
    """32 banks across, a row per wavefront of the access's worst request, the lanes that each bank serves in its cells.
    at: see `words.place`."""
    request = access.worst_request
    parts = banks.served(request.addresses, request.width, access.op)
    served, late = [w for part in parts for w in part], _late(parts, access)
    cost, ideal, rows = request.cost, request.ideal, len(served)
    verdict = f"where {ideal} would do" if cost > ideal else "as few as can be"
    head = f"{place(access, at)}: {many(cost, 'wavefront')}{' ' if cost > ideal else ', '}{verdict}"
    unseen = cost > rows  # wavefronts of a cp.async for the banks of its sources
    height = 1.2 + (0.27 if rows <= 16 else 0.21) * (rows + unseen)
    figure, ax = picture(_bank_text(served, late, head, cost), 9.6, height, head)
    blank(ax).set(xlim=(-0.2, 35.4), ylim=(rows + unseen + 0.1, -0.75))
    ax.text(-0.1, -0.35, "bank", ha="right", va="center", fontsize=8, color=MUTED, clip_on=False)
    ax.text(32.2, -0.35, "wavefront", va="center", fontsize=8, color=MUTED)
    for bank in range(banks.BANKS):
        ax.text(bank + 0.5, -0.35, bank, ha="center", va="center", fontsize=7.5, color=MUTED)
    for n, wavefront in enumerate(served):
        _wavefront(ax, n, wavefront, max(1, request.width // banks.WORD))
        said = f"{n + 1} conflict" if late[n] else f"{n + 1}"
        ax.text(32.3, n + 0.52, said, va="center", fontsize=8, color=ORANGE if late[n] else MUTED)
    if unseen:
        ax.text(0.05, rows + 0.55, f"wavefronts {_by_sources(rows, cost)}", va="center", fontsize=8, color=ORANGE)
    for top in np.cumsum([len(part) for part in parts[:-1]]):
        ax.plot([0, 35.2], [top, top], color=MUTED, linewidth=0.9)
    shared = ", + others that want the same word" if any(len(l) > 1 for w in served for l in w.values()) else ""
    foot = f"In a cell: the lane that the bank serves{shared}."
    if len(parts) > 1:
        foot += f" Lines separate the parts of the warp: {request.width} bytes per lane are too many for one wavefront."
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return figure


def _wavefront(ax: Axes, row: int, wavefront: banks.Wavefront, span: int) -> None:
    """A row of the bank map; `span` banks serve one lane."""
    for bank in range(0, banks.BANKS, span):
        for b in range(bank, bank + span) if bank not in wavefront else ():
            ax.add_patch(Rectangle((b, row), 1, 1, facecolor=PALEST, edgecolor=CARD, linewidth=1))
        if lanes := wavefront.get(bank):
            look = {"facecolor": colour(lanes[0]), "edgecolor": CARD, "linewidth": 1}
            ax.add_patch(Rectangle((bank, row), span, 1, **look))
            text = _fitting(lanes, span)
            ax.text(bank + span / 2, row + 0.52, text, ha="center", va="center", fontsize=8, color=INK)


def _late(parts: list[list[banks.Wavefront]], access: Access) -> list[bool]:
    """Which wavefronts are bank conflicts: in each part of the warp all but the first."""
    late = [n > 0 for part in parts for n in range(len(part))]
    needless = len(late) - access.worst_request.ideal  # what a cp.async costs beyond these is not for the banks drawn
    return late if sum(late) == needless else [n >= len(late) - needless for n in range(len(late))]


def _by_sources(rows: int, cost: int) -> str:
    """Which wavefronts of a cp.async its sources cost beyond the `rows` that the banks it writes would."""
    which = f"{rows + 1}" if cost == rows + 1 else f"{rows + 1} to {cost}"
    return f"{which}: not for these banks; {SOURCES}"


def _bank_text(served: list[banks.Wavefront], late: list[bool], head: str, cost: int) -> str:
    rows = [head, "wavefront   bank " + "".join(f"{b:<12}" for b in range(0, banks.BANKS, 4)).rstrip()]
    for n, wavefront in enumerate(served):
        cells = []
        for bank in range(banks.BANKS):
            lanes = wavefront.get(bank)
            cells.append(" · " if not lanes else f"{lanes[0]:>2}{'+' if len(lanes) > 1 else ' '}")
        rows.append(f"{n + 1:>9}       {''.join(cells)}{' conflict' if late[n] else ''}".rstrip())
    if cost > len(served):
        rows.append(f"{'':>7} {_by_sources(len(served), cost)}")
    rows.append("cells: the lane that the bank serves; + and others that want the same word; · nothing to do")
    return "\n".join(rows)


# Global memory

MOST_LINES = 16  # of 128 bytes that are drawn
SECTORS = banks.LINE // banks.SECTOR  # of a line
WORDS = banks.SECTOR // banks.WORD  # of a sector

Words = dict[int, list[int]]  # word of a line -> lanes that ask for a byte of it


@styled
def address_map(access: Access, at: str = "") -> Picture:
    """The access's worst request over 128-byte lines (rows) and 32-byte sectors, the lanes that ask in the cells.
    at: see `words.place`."""
    request = access.worst_request
    by_line = _by_word(access)
    shown, left = sorted(by_line)[:MOST_LINES], max(0, len(by_line) - MOST_LINES)
    asked = sum(a is not None for a in request.addresses) * request.width
    verdict = f"{asked} bytes asked for, in {many(request.cost, 'sector')} ({banks.SECTOR * request.cost} bytes)"
    verdict += f"; {request.ideal} would do" if request.cost > request.ideal else ", as few as can be"
    head = f"{place(access, at)}: {verdict}"
    height = 1.3 + 0.3 * (len(shown) + bool(left))
    figure, ax = picture(_address_text(by_line, shown, head, left), 9.6, height, head)
    blank(ax).set(xlim=(-4.2, 32.4), ylim=(len(shown) + bool(left) + 0.1, -0.9))
    for s in range(SECTORS):
        ax.text(8 * s + 4, -0.35, f"bytes {32 * s}–{32 * s + 31}", ha="center", va="center", fontsize=8, color=MUTED)
    for row, line in enumerate(shown):
        ax.text(-0.3, row + 0.52, f"+{line * banks.LINE:,}", ha="right", va="center", fontsize=8, color=MUTED)
        _line(ax, row, by_line[line])
    if left:
        ax.text(16, len(shown) + 0.5, _more(left), ha="center", va="center", fontsize=8.5, color=MUTED)
    ax.text(-0.3, -0.35, f"offset in {access.target}", ha="right", va="center", fontsize=8, color=MUTED)
    foot = "A row is a line of 128 bytes, a box a sector of 32. In a cell of 4 bytes: the lane that asks for it"
    wasted = any(0 < len(_asked(by_line[line], s)) < WORDS for line in shown for s in range(SECTORS))
    more = any(_fitting(l, n).endswith("+") for line in shown for _, l, n in _labels(by_line[line]))
    foot += "; +: other lanes too" * more + "." + "\nOrange without a lane: in the sector, not asked for here." * wasted
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return figure


def _line(ax: Axes, row: int, lanes_of: Words) -> None:
    """A row of the address map."""
    edge = {"edgecolor": CARD, "zorder": 1}
    for sector in range(SECTORS):
        face = WASTED if _asked(lanes_of, sector) else PALEST
        ax.add_patch(Rectangle((8 * sector, row), 8, 1, facecolor=face, linewidth=1, **edge))
    for word, lanes in lanes_of.items():
        look = {"facecolor": colour(lanes[0]), "edgecolor": CARD, "linewidth": 0.6, "zorder": 2}
        ax.add_patch(Rectangle((word, row), 1, 1, **look))
    for word, lanes, wide in _labels(lanes_of):
        text = _fitting(lanes, wide)
        ax.text(word + wide / 2, row + 0.52, text, ha="center", va="center", fontsize=7.5, color=INK, zorder=3)
    for sector in range(SECTORS):
        look = {"facecolor": "none", "edgecolor": MUTED, "linewidth": 0.9, "zorder": 4}
        ax.add_patch(Rectangle((8 * sector, row), 8, 1, **look))


def _by_word(access: Access) -> dict[int, Words]:
    """By 128-byte line."""
    found: dict[int, Words] = defaultdict(lambda: defaultdict(list))
    for lane, address in enumerate(access.worst_request.addresses):
        if address is not None:
            for word in range(address // banks.WORD, (address + access.worst_request.width - 1) // banks.WORD + 1):
                found[word // 32][word % 32].append(lane)
    return found


def _asked(lanes_of: Words, sector: int) -> list[int]:
    """The words of a sector that lanes ask for."""
    return [w for w in lanes_of if w // WORDS == sector]


def _labels(lanes_of: Words) -> list[tuple[int, list[int], int]]:
    """Neighbouring words of the same lanes as one: first word, lanes, words."""
    found: list[tuple[int, list[int], int]] = []
    for word in sorted(lanes_of):
        if found and found[-1][1] == lanes_of[word] and found[-1][0] + found[-1][2] == word:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((word, lanes_of[word], 1))
    return found


def _more(left: int) -> str:
    return f"… and {many(left, 'more line')}"


def _address_text(by_line: dict[int, Words], shown: list[int], head: str, left: int) -> str:
    rows = [head, "bytes from" + "".join(f"  | +{b:<22}" for b in range(0, banks.LINE, banks.SECTOR))]
    for line in shown:
        sectors = []
        for s in range(SECTORS):
            lanes = [by_line[line].get(WORDS * s + w) for w in range(WORDS)]
            rest = " ~ " if any(lanes) else " · "
            sectors.append("".join(f"{l[0]:>2}{'+' if len(l) > 1 else ' '}" if l else rest for l in lanes))
        rows.append(f"{line * banks.LINE:>10,}  |" + " |".join(sectors))
    if left:
        rows.append(f"            {_more(left)}")
    rows.append(
        "cells: 4 bytes and the lane that asks for them; + others too; ~ in the sector but not asked for; | sectors of 32 bytes"
    )
    return "\n".join(rows)
