"""The X-ray's pictures: the source with its costs, one request over the banks or over the lines of memory, bytes by tensor.

Each has a text form for the terminal. Figures are drawn on a light card, as plot.py's; HTML has no colours of its own but
translucent ones, so that both read on a light page and on a dark one.
"""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..emulator import banks
from ..emulator.trace import Access
from ..ladder.show import ASIDE, MARKER, PAGE, _coloured
from ..run.xray import SPACES, UNIT, Xray, _bytes, _cut, _statement, words
from .style import BLUE, CARD, GRID, INK, MUTED, ORANGE, SAND, Figure, blank, styled

# A hue per quarter warp (the lanes that 16-byte requests serve together), light enough for black text.
HUES = ("#a9cfe8", "#f6cd9c", "#a9dcc6", "#e5bcd3")
IDLE, WASTED = "#efefec", "#f7ddc8"
BAR = 8  # characters
HEADS = {"shared": " shared memory", "global": " global memory"}
HEAT = {"shared": "#2f80c8", "global": "#3d8a3d"}  # both read on a light page and on a dark one
EXCESS = "#d5672a"


class Picture(Figure):
    """A figure with a text form: PNG in a notebook, `in_words` in a terminal."""

    in_words: str = ""

    def __repr__(self) -> str:
        return self.in_words

    __str__ = __repr__


class Table(pd.DataFrame):
    """A frame whose text has every row and column, however narrow the terminal."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def __repr__(self) -> str:
        return self.to_string()


def _picture(text: str, width: float, height: float, title: str = "") -> tuple[Picture, Axes]:
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = text
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, figure.subplots()


def _place(access: Access) -> str:
    return f"line {access.line}: {access.op} of {access.width} bytes per lane, {access.target}"


# The source


@dataclass(frozen=True)
class HeatListing:
    """Lines of a `.cu` with what each costs: shared memory's wavefronts left, global memory's sectors right of it.

    A bar's length is the line's share of the costliest line of the kernel in that space; its orange part (░ in text) is
    what a request without conflicts, or a coalesced one, would not cost.
    """

    title: str
    lines: tuple[tuple[int, str], ...]
    costs: dict[int, dict[str, tuple[int, int]]]  # line -> space -> cost, excess
    most: dict[str, int]  # space -> the largest cost of a line
    marked: dict[int, str]  # lines that findings name -> the kind

    def _bar(self, line: int, space: str) -> tuple[str, str, str]:
        """Of a line: the bar's part that has to be, its part that needn't, and the number."""
        cost, excess = self.costs.get(line, {}).get(space, (0, 0))
        if not cost:
            return "", "", ""
        both = 0 < excess < cost  # each part is seen
        full = max(1 + both, round(BAR * cost / self.most[space]))
        over = min(full - both, max(1, round(full * excess / cost))) if excess else 0
        return "█" * (full - over), "░" * over, _count(cost)

    @property
    def spaces(self) -> list[str]:
        """Those that these lines touch; both where none does."""
        found = [space for space in SPACES if any(space in self.costs.get(n, ()) for n, _ in self.lines)]
        return found or [space for space in SPACES if self.most.get(space)]

    @property
    def _head(self) -> str:
        return "".join(f"{HEADS[space]:<{BAR + 9}}" for space in self.spaces)

    def __str__(self) -> str:
        rows = [self.title, f"      {self._head}".rstrip()]
        for number, text in self.lines:
            strip = ""
            for space in self.spaces:
                must, needless, count = self._bar(number, space)
                strip += f"{count:>7} {must + needless:<{BAR}} "
            rows.append(f"{number:>5} {strip}{'✗' if number in self.marked else ' '} {text}".rstrip())
        return "\n".join([*rows, f"      {self.legend}"])

    __repr__ = __str__

    @property
    def legend(self) -> str:
        """What the bars stand for."""
        return (
            "█ as many as the bytes need  ░ bank conflicts, or sectors not coalesced; numbers: wavefronts, sectors"
            + ("  ✗ see the findings" if self.marked else "")
        )

    def _repr_html_(self) -> str:
        def aside(text: str) -> str:
            return f'<span style="{ASIDE}">{html.escape(text)}</span>'

        rows = [aside(self.title), aside(f"      {self._head}")]
        for number, text in self.lines:
            strip = ""
            for space in self.spaces:
                must, needless, count = self._bar(number, space)
                strip += f"{count:>7} "
                strip += f'<span style="color:{HEAT[space]}">{must}</span>' if must else ""
                strip += f'<span style="color:{EXCESS}">{"█" * len(needless)}</span>' if needless else ""
                strip += " " * (BAR + 1 - len(must + needless))
            mark = f'<span style="color:{EXCESS}">✗</span>' if number in self.marked else " "
            gutter = f'<span style="{ASIDE}">{number:>5} {strip}</span>{mark}'
            rows.append(f"{gutter} {_coloured(text)}")
        keys = f'<span style="color:{HEAT["shared"]}">█</span> <span style="color:{HEAT["global"]}">█</span> '
        keys += aside("as many as the bytes need") + f'  <span style="color:{EXCESS}">█</span> '
        keys += aside("beyond that: bank conflicts, or sectors not coalesced. Numbers: wavefronts, sectors")
        return f'<pre style="{PAGE}">{chr(10).join([*rows, "      " + keys])}</pre>'


def heat(ray: Xray, region: str | None) -> HeatListing:
    """The listing behind `Xray.source`."""
    costs: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for a in ray.accesses:
        cost, excess = costs[a.line].get(a.space, (0, 0))
        costs[a.line][a.space] = (cost + a.cost, excess + a.cost - a.ideal)
    most = {space: max((c[space][0] for c in costs.values() if space in c), default=0) for space in SPACES}
    first, last = ray._regions[region] if region else (1, len(ray._lines))
    lines = tuple((n, ray.code(n)) for n in range(first, last + 1) if not MARKER.match(ray.code(n)))
    marked = {n: f.kind for f in ray.findings for n in (f.line, f.other_line) if n}
    title = f"{ray.rung.path.name} · {region + ' · ' if region else ''}lines {first}–{last} · {ray.workload}"
    return HeatListing(title, lines, dict(costs), most, marked)


def _count(n: int) -> str:
    """1024, 65.5k, 1.2M: a number that fits beside a line."""
    for unit, suffix in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if n >= unit:
            return f"{n / (1000 if suffix == 'k' else unit):.3g}{suffix}"
    return str(n)


# One request


def _colour(lane: int) -> tuple[float, float, float]:
    """The lane's hue is its quarter warp's; it gets lighter from the quarter's first lane to its last."""
    from matplotlib.colors import to_rgb

    base = np.array(to_rgb(HUES[lane // 8]))
    return tuple(base + (1 - base) * 0.075 * (lane % 8))


def _fitting(lanes: list[int], cells: int) -> str:
    """The lanes in words where they fit into so many cells, else the first and a plus."""
    text = banks.runs(lanes)
    return text if len(text) <= 2.3 * cells else f"{lanes[0]}+"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _late(parts: list[list[banks.Wavefront]], access: Access) -> list[bool]:
    """Which wavefronts are bank conflicts: in each part of the warp all but the first."""
    late = [n > 0 for part in parts for n in range(len(part))]
    needless = len(late) - access.worst_request.ideal  # what a cp.async costs beyond these is not for the banks drawn
    return late if sum(late) == needless else [n >= len(late) - needless for n in range(len(late))]


def _by_sources(rows: int, cost: int) -> str:
    """Which wavefronts of a cp.async its sources cost beyond the `rows` that the banks it writes would."""
    which = f"{rows + 1}" if cost == rows + 1 else f"{rows + 1} to {cost}"
    return f"{which}: not for these banks; lanes take turns whose sources lie in the same banks"


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


@styled
def bank_map(access: Access) -> Picture:
    """32 banks across, a row per wavefront of the access's worst request, the lanes that each bank serves in its cells."""
    request = access.worst_request
    parts = banks.served(request.addresses, request.width, access.op)
    served, late = [w for part in parts for w in part], _late(parts, access)
    cost, ideal, rows = request.cost, request.ideal, len(served)
    many = _many(cost, "wavefront")
    head = (
        f"{_place(access)}: {many} where {ideal} would do"
        if cost > ideal
        else f"{_place(access)}: {many}, as few as can be"
    )
    unseen = cost > rows  # of a cp.async: for the banks of its sources
    height = 1.2 + (0.27 if rows <= 16 else 0.21) * (rows + unseen)
    figure, ax = _picture(_bank_text(served, late, head, cost), 9.6, height, head)
    blank(ax).set(xlim=(-0.2, 35.4), ylim=(rows + unseen + 0.1, -0.75))
    ax.text(-0.1, -0.35, "bank", ha="right", va="center", fontsize=8, color=MUTED, clip_on=False)
    ax.text(32.2, -0.35, "wavefront", va="center", fontsize=8, color=MUTED)
    for bank in range(banks.BANKS):
        ax.text(bank + 0.5, -0.35, bank, ha="center", va="center", fontsize=7.5, color=MUTED)
    span = max(1, request.width // banks.WORD)
    for n, wavefront in enumerate(served):
        for bank in range(0, banks.BANKS, span):
            for b in range(bank, bank + span) if bank not in wavefront else ():
                ax.add_patch(Rectangle((b, n), 1, 1, facecolor=IDLE, edgecolor=CARD, linewidth=1))
            if lanes := wavefront.get(bank):
                look = {"facecolor": _colour(lanes[0]), "edgecolor": CARD, "linewidth": 1}
                ax.add_patch(Rectangle((bank, n), span, 1, **look))
                text = _fitting(lanes, span)
                ax.text(bank + span / 2, n + 0.52, text, ha="center", va="center", fontsize=8, color=INK)
        words = f"{n + 1} conflict" if late[n] else f"{n + 1}"
        ax.text(32.3, n + 0.52, words, va="center", fontsize=8, color=ORANGE if late[n] else MUTED)
    if unseen:
        ax.text(0.05, rows + 0.55, f"wavefronts {_by_sources(rows, cost)}", va="center", fontsize=8, color=ORANGE)
    top = 0
    for part in parts[:-1]:
        top += len(part)
        ax.plot([0, 35.2], [top, top], color=MUTED, linewidth=0.9)
    foot = "In a cell: the lane that the bank serves"
    foot += ", + others that want the same word." if any(len(l) > 1 for w in served for l in w.values()) else "."
    foot += (
        f" Lines part the warp: {request.width} bytes per lane are too many for one wavefront."
        if len(parts) > 1
        else ""
    )
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return figure


MOST_LINES = 16  # of 128 bytes that are drawn


def _by_word(access: Access) -> dict[int, dict[int, list[int]]]:
    """128-byte line -> word of it -> lanes that ask for a byte of that word."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for lane, address in enumerate(access.worst_request.addresses):
        if address is not None:
            for word in range(address // banks.WORD, (address + access.worst_request.width - 1) // banks.WORD + 1):
                found[word // 32][word % 32].append(lane)
    return found


def _address_text(by_line: dict[int, dict[int, list[int]]], shown: list[int], head: str, left: int) -> str:
    rows = [head, "bytes from" + "".join(f"  | +{b:<22}" for b in range(0, banks.LINE, banks.SECTOR))]
    for line in shown:
        sectors = []
        for s in range(4):
            asked = [by_line[line].get(8 * s + w) for w in range(8)]
            touched = any(asked)
            cells = [f"{l[0]:>2}{'+' if len(l) > 1 else ' '}" if l else (" ~ " if touched else " · ") for l in asked]
            sectors.append("".join(cells))
        rows.append(f"{line * banks.LINE:>10,}  |" + " |".join(sectors))
    if left:
        rows.append(f"            … and {left} more lines")
    rows.append(
        "cells: 4 bytes and the lane that asks for them; + others too; ~ in the sector but not asked for; | sectors of 32 bytes"
    )
    return "\n".join(rows)


@styled
def address_map(access: Access) -> Picture:
    """The access's worst request over 128-byte lines (rows) and 32-byte sectors, the lanes that ask in the cells."""
    request = access.worst_request
    by_line = _by_word(access)
    lines = sorted(by_line)
    shown, left = lines[:MOST_LINES], max(0, len(lines) - MOST_LINES)
    asked = sum(a is not None for a in request.addresses) * request.width
    verdict = f"{asked} bytes asked for, in {_many(request.cost, 'sector')} ({banks.SECTOR * request.cost} bytes)"
    verdict += f"; {request.ideal} would do" if request.cost > request.ideal else ", as few as can be"
    head = f"{_place(access)}: {verdict}"
    height = 1.3 + 0.3 * (len(shown) + bool(left))
    figure, ax = _picture(_address_text(by_line, shown, head, left), 9.6, height, head)
    blank(ax).set(xlim=(-4.2, 32.4), ylim=(len(shown) + bool(left) + 0.1, -0.9))
    for s in range(4):
        ax.text(8 * s + 4, -0.35, f"bytes {32 * s}–{32 * s + 31}", ha="center", va="center", fontsize=8, color=MUTED)
    for row, line in enumerate(shown):
        ax.text(-0.3, row + 0.52, f"+{line * banks.LINE:,}", ha="right", va="center", fontsize=8, color=MUTED)
        for sector in range(4):
            touched = any(8 * sector + w in by_line[line] for w in range(8))
            box = Rectangle(
                (8 * sector, row), 8, 1, facecolor=WASTED if touched else IDLE, edgecolor=CARD, linewidth=1, zorder=1
            )
            ax.add_patch(box)
        for word, lanes in by_line[line].items():
            box = Rectangle((word, row), 1, 1, facecolor=_colour(lanes[0]), edgecolor=CARD, linewidth=0.6, zorder=2)
            ax.add_patch(box)
        for word, lanes, wide in _labels(by_line[line]):
            text = _fitting(lanes, wide)
            ax.text(word + wide / 2, row + 0.52, text, ha="center", va="center", fontsize=7.5, color=INK, zorder=3)
        for sector in range(4):
            box = Rectangle((8 * sector, row), 8, 1, facecolor="none", edgecolor=MUTED, linewidth=0.9, zorder=4)
            ax.add_patch(box)
    if left:
        ax.text(16, len(shown) + 0.5, f"… and {left} more lines", ha="center", va="center", fontsize=8.5, color=MUTED)
    ax.text(-0.3, -0.35, f"offset in {access.target}", ha="right", va="center", fontsize=8, color=MUTED)
    foot = "A row is a line of 128 bytes, a box a sector of 32. In a cell of 4 bytes: the lane that asks for it"
    wasted = any(len({w for w in by_line[line] if w // 8 == s}) in range(1, 8) for line in shown for s in range(4))
    foot += "; orange without a lane: in the sector for nothing." if wasted else "."
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return figure


def _labels(by_word: dict[int, list[int]]) -> list[tuple[int, list[int], int]]:
    """Neighbouring words of the same lanes as one: first word, lanes, words."""
    found: list[tuple[int, list[int], int]] = []
    for word in sorted(by_word):
        if found and found[-1][1] == by_word[word] and found[-1][0] + found[-1][2] == word:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((word, by_word[word], 1))
    return found


# Bytes


@styled
def traffic(ray: Xray) -> Picture:
    """Bytes by tensor, read and written, beside the theoretical minimum."""
    table = ray.tensors[(ray.tensors.bytes_read + ray.tensors.bytes_written) > 0]
    total = table.bytes_read + table.bytes_written
    most = max(total.max(), table.minimum_bytes.max()) if len(table) else 1
    head = f"{ray.rung.stem}, bytes requested · {ray.workload}"
    rows = [head, f"{'tensor':<8}{'read':>10}{'written':>10}{'minimum':>10}   × minimum"]
    figure, ax = _picture("", 7.4, 1.3 + 0.55 * len(table), head)
    for y, (name, row) in enumerate(table.iterrows()):
        both, least = row.bytes_read + row.bytes_written, row.minimum_bytes
        times = f"× {both / least:.3g}" if least else "none needed"
        rows.append(
            f"{name:<8}{_bytes(row.bytes_read):>10}{_bytes(row.bytes_written):>10}{_bytes(least):>10}   {times}"
        )
        look = {"edgecolor": CARD, "linewidth": 0}
        ax.barh(y - 0.18, row.bytes_read, 0.36, color=BLUE, label="read" if y == 0 else None, **look)
        hatched = {"color": SAND, "hatch": "///", "edgecolor": "#8a4b00", "linewidth": 0}
        ax.barh(y - 0.18, row.bytes_written, 0.36, left=row.bytes_read, label="written" if y == 0 else None, **hatched)
        ax.barh(y + 0.18, least, 0.3, color=MUTED, alpha=0.55, label="theoretical minimum" if y == 0 else None, **look)
        ax.text(both + 0.012 * most, y - 0.18, _bytes(both), va="center", fontsize=9)
        ax.text(least + 0.012 * most, y + 0.18, times, va="center", fontsize=9, color=MUTED)
    figure.in_words = "\n".join(rows)
    ax.set_yticks(range(len(table)), table.index, color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.16 * most)
    step = 2.0 ** np.ceil(np.log2(most / 6)) if most > 1 else 1
    ax.set_xticks(np.arange(0, 1.16 * most, step))
    ax.xaxis.set_major_formatter(lambda v, _: _bytes(v))
    ax.spines["left"].set_color(GRID)
    figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


# The table and the widget


def table_html(ray: Xray, space: str) -> str:
    """The accesses of one space as an HTML table; beyond the first eight, folded."""
    rows = [a for a in ray.accesses if a.space == space]
    most = max(a.cost for a in rows) or 1
    heads = ("line", "", "operation", "bytes/lane", "requests", UNIT[space], "ideal", "beyond ideal", "worst request")
    left = "text-align:left"
    head = "".join(f'<th style="{left if i in (1, 2) else ""}">{h}</th>' for i, h in enumerate(heads))
    cells = []
    for a in rows:
        excess = a.cost - a.ideal
        shade = 0.55 * a.cost / most
        tint = f"background-color:rgba(47,128,200,{shade:.2f})"
        hot = f"background-color:rgba(213,103,42,{0.15 + 0.45 * excess / a.cost:.2f})" if excess else ""
        code = html.escape(_cut(_statement(ray.code(a.line)), 60))
        cells.append(
            f'<tr><td>{a.line}</td><td style="{left};white-space:pre;font-family:monospace">{code}</td>'
            f'<td style="{left}">{a.op} {html.escape(a.target)}</td><td>{a.width}</td><td>{a.requests:,}</td>'
            f'<td style="{tint}">{a.cost:,}</td><td>{a.ideal:,}</td><td style="{hot}">{excess:,}</td>'
            f"<td>{a.worst_request.cost} for {a.worst_request.ideal}</td></tr>"
        )

    def table(part: list[str]) -> str:
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(part)}</tbody></table>"

    what = {"shared": "Shared memory, by line", "global": "Global memory, by line (a sector is 32 bytes)"}[space]
    shown = f"<div style='margin-top:8px'><b>{what}</b></div>{table(cells[:8])}"
    if len(cells) > 8:
        shown += f"<details><summary>{len(cells) - 8} more lines</summary>{table(cells[8:])}</details>"
    return shown


def step(ray: Xray) -> Any:
    """A drop-down of all accesses and the picture of the chosen one; a sentence where ipywidgets is missing."""
    try:
        import ipywidgets
    except ImportError:
        print(
            "step() needs ipywidgets: pip install ipywidgets. bank_map(line) and address_map(line) draw the same pictures"
        )
        return None

    def show(access: Access) -> None:
        from IPython.display import display

        print(words(access))
        display(bank_map(access) if access.space == "shared" else address_map(access))

    names = [(f"{_place(a)} ({a.cost - a.ideal:,} beyond ideal)", a) for a in ray.accesses]
    return ipywidgets.interactive(show, access=ipywidgets.Dropdown(options=names, description="request"))
