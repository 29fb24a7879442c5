"""Pictures for pages that are not notebooks, as SVG text: small, the same on every machine, in a light and a dark theme."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from .style import Theme

if TYPE_CHECKING:
    from .heat import HeatListing

SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class _Svg:
    """An SVG document that grows by elements; numbers are rounded to a tenth."""

    def __init__(self, width: float, height: float, title: str, description: str):
        self.size, self.parts = (width, height), [f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"]

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: object) -> None:
        self._add("rect", None, x=x, y=y, width=width, height=height, fill=fill, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, **more: object) -> None:
        self._add("line", None, x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)

    def path(self, d: str, **more: object) -> None:
        self._add("path", None, d=d, **more)

    def text(self, x: float, y: float, text: str, fill: str, size: float = 12, **more: object) -> None:
        self._add("text", text, x=x, y=y, fill=fill, font_size=size, **more)

    def _add(self, kind: str, text: str | None, **attributes: object) -> None:
        words = "".join(
            f' {name.replace("_", "-")}="{f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))}"'
            for name, value in attributes.items()
        )
        self.parts.append(f"<{kind}{words}/>" if text is None else f"<{kind}{words}>{escape(text)}</{kind}>")

    def __str__(self) -> str:
        width, height = (f"{side:g}" for side in self.size)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        )
        return "\n".join([f'{head} role="img" font-family="{SANS}">', *self.parts, "</svg>"]) + "\n"


# The staircase

GROUPS = {"forward": "forward pass", "decode": "decode", "backward": "backward pass"}
COLUMN, GAP, LEFT, TOP, HEIGHT, FOOT = 54.0, 22.0, 34.0, 50.0, 290.0, 66.0
BAR = 20.0


def staircase(steps: pd.DataFrame, title: str, description: str, theme: Theme) -> str:
    """Speed of each rung and public kernel over FlashAttention-2's, linear: bars for rungs, diamonds for public kernels.

    steps: name (a rung's stem, or a kernel's name), group (of GROUPS), kind ("rung", "fp32" or "peer"), D (64 or 128), flash.
    A column for each name, left to right as they come; fp32 rungs are hatched.
    """
    columns: dict[tuple[str, str], float] = {}
    x = LEFT + 12
    spans = {}
    for group in (g for g in GROUPS if g in set(steps["group"])):
        start = x
        for name in dict.fromkeys(steps.loc[steps["group"] == group, "name"]):
            columns[group, name] = x + COLUMN / 2
            x += COLUMN
        spans[group] = (start, x)
        x += GAP
    width = x - GAP + 10
    most = float(steps["flash"].max()) * 1.1
    base = TOP + HEIGHT

    def y(ratio: float) -> float:
        return base - HEIGHT * ratio / most

    svg = _Svg(width, base + FOOT, title, description)
    if (steps["kind"] == "fp32").any():
        _hatch(svg, theme)
    svg.text(6, 15, title, theme.ink, 14, font_weight="600")
    _key(svg, theme)
    tick = 0.0
    while tick < most:
        svg.line(LEFT, y(tick), width - 6, y(tick), theme.grid, stroke_width=0.8)
        svg.text(LEFT - 6, y(tick) + 4, f"{tick:g}×", theme.muted, 11, text_anchor="end")
        tick += 0.5
    numbers = []
    for (group, name), at in columns.items():
        rows = steps[(steps["group"] == group) & (steps["name"] == name)].sort_values("D")
        numbers.append((at, *_column(svg, theme, at, y, rows)))
        _name(svg, theme, at, base, name, rows["kind"].iloc[0], group)
    svg.line(LEFT, base, width - 6, base, theme.muted, stroke_width=1)
    one = y(1)
    svg.line(LEFT, one, width - 6, one, theme.ink, stroke_width=1.4, stroke_dasharray="6 4")
    svg.text(LEFT + 4, one - 6, "FlashAttention-2", theme.ink, 12, font_weight="600")
    for at, top, words in numbers:
        for halo in ({"stroke": theme.halo, "stroke_width": 4, "stroke_linejoin": "round"}, {}):  # lines stay out of it
            svg.text(at, top, words, theme.ink, 11.5, text_anchor="middle", **halo)
    for group, (start, end) in spans.items():
        svg.text((start + end) / 2, base + FOOT - 5, GROUPS[group], theme.muted, 12, text_anchor="middle")
    return str(svg)


def _hatch(svg: _Svg, theme: Theme) -> None:
    for name, colour in (("hatch64", theme.soft), ("hatch128", theme.strong)):
        svg.parts.append(
            f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="5" height="5" fill="{theme.halo}"/><rect width="2.6" height="5" fill="{colour}"/></pattern>'
        )


def _key(svg: _Svg, theme: Theme) -> None:
    """What bars and marks stand for."""
    x, y = 6.0, 28.0
    for fill, words in ((theme.soft, "D = 64"), (theme.strong, "D = 128"), ("url(#hatch128)", "fp32")):
        svg.rect(x, y, 11, 11, fill)
        svg.text(x + 16, y + 10, words, theme.muted, 12)
        x += 78
    svg.path(_diamond(x + 6, y + 6), fill=theme.peer)
    svg.text(x + 16, y + 10, "public kernels", theme.muted, 12)
    svg.text(x + 118, y + 10, "(numbers: D = 128)", theme.muted, 12)


def _column(svg: _Svg, theme: Theme, at: float, y: Callable[[float], float], rows: pd.DataFrame) -> tuple[float, str]:
    """Draws the bars or diamonds of one name around `at`; where its number stands, and the number."""
    marks = []
    for place, (_, row) in enumerate(rows.iterrows()):
        left = at + (place - len(rows) / 2) * BAR
        top = y(row["flash"])
        marks.append(top)
        wide = row["D"] == 128
        if row["kind"] == "peer":
            svg.path(_diamond(left + BAR / 2, top), fill=theme.peer, fill_opacity=1.0 if wide else 0.55)
        else:
            plain = theme.strong if wide else theme.soft
            fill = f"url(#hatch{row['D']})" if row["kind"] == "fp32" else plain
            svg.rect(left, top, BAR - 1, max(y(0) - top, 1.0), fill)
    ratio = rows["flash"].iloc[-1]
    words = f"{ratio:.3f}" if ratio < 0.01 else f"{ratio:.2f}"
    above = min(marks) - (10 if rows["kind"].iloc[0] == "peer" else 6)
    return above, words


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"


def _name(svg: _Svg, theme: Theme, at: float, base: float, name: str, kind: str, group: str) -> None:
    """A rung's number, and its name below in two lines at most, without the group's; of a public kernel only its name."""
    number, _, rest = name.partition("_") if kind != "peer" else ("", "", name)
    words = [word for word in rest.split("_") if word != group]
    if len(words) > 2:
        words = [words[0], " ".join(words[1:])]
    if number:
        svg.text(at, base + 15, number, theme.ink, 12, font_weight="600", text_anchor="middle")
    for row, word in enumerate(words):
        colour = theme.muted if number else theme.peer
        svg.text(at, base + (28 if number else 15) + 11.5 * row, word, colour, 10, text_anchor="middle")


# An X-ray


def heat(listing: HeatListing, title: str, description: str, theme: Theme, space: str = "shared") -> str:
    """The lines of an X-ray's listing that cost something in `space`, each with its neighbours and a bar: how often the line
    took the memory, the part that a kernel without bank conflicts (or uncoalesced accesses) would not take in orange."""
    rows = _around(listing, space)
    line, size, char, left, bar, top = 18.0, 12.5, 7.6, 12.0, 150.0, 54.0
    code = left + bar + 106
    bottom = top + line * len(rows)
    width = code + char * max(len(text) for _, text in rows) + 12
    svg = _Svg(width, bottom + 32, title, description)
    svg.rect(0.5, 0.5, width - 1, bottom + 31, theme.card, rx=6, stroke=theme.grid)
    svg.text(left, 21, title, theme.ink, 14, font_weight="600")
    svg.text(left, 40, listing.title, theme.muted, 12)
    for at, (number, text) in enumerate(rows):
        y = top + line * at
        cost, excess = listing.costs.get(number, {}).get(space, (0, 0))
        if cost:
            svg.rect(0.5, y, width - 1, line, theme.grid, fill_opacity=0.45)
            full = bar * cost / listing.most[space]
            over = full * excess / cost
            svg.rect(left, y + 3, max(full - over, 1.5), line - 6, theme.strong)
            if excess:
                svg.rect(left + full - over, y + 3, over, line - 6, theme.excess)
            svg.text(left + full + 6, y + 13, f"{cost:,}", theme.ink, 12, font_weight="600" if excess else "400")
        if number:
            svg.text(code - 14, y + 13, str(number), theme.muted, 12, text_anchor="end", font_family=MONO)
        body, mark, comment = text.partition("//")
        for start, part, colour in ((0, body, theme.ink), (len(body), mark + comment, theme.muted)):
            if part.strip():
                blank = len(part) - len(part.lstrip())
                svg.text(code + char * (start + blank), y + 13, part.strip(), colour, size, font_family=MONO)
    x = left
    for colour, words in ((theme.strong, "wavefronts that the bytes need"), (theme.excess, EXCESS_IN[space])):
        svg.rect(x, bottom + 9, 11, 11, colour)
        svg.text(x + 17, bottom + 19, words, theme.muted, 12)
        x += 220
    return str(svg)


LONGEST = 84  # letters shown of a line of code
EXCESS_IN = {"shared": "wavefronts lost to bank conflicts", "global": "sectors of uncoalesced accesses"}


def _around(listing: HeatListing, space: str) -> list[tuple[int, str]]:
    """The costly lines of a listing, each with the line of code before and after it; (0, "⋯") between distant ones."""
    code = [(number, text) for number, text in listing.lines if text.strip() and not text.startswith("#")]
    hot = [at for at, (number, _) in enumerate(code) if space in listing.costs.get(number, {})]
    shown = sorted({near for at in hot for near in (at - 1, at, at + 1) if 0 <= near < len(code)})
    rows: list[tuple[int, str]] = []
    pieces: list[list[tuple[int, str]]] = []
    for before, at in zip([None, *shown], shown):
        if before is None or at > before + 1:
            pieces.append([])
        pieces[-1].append(code[at])
    for piece in pieces:
        indent = min(len(text) - len(text.lstrip()) for _, text in piece)
        rows += [(0, "⋯")] if rows else []
        rows += [(number, text[indent:][:LONGEST] + "…" * (len(text) - indent > LONGEST)) for number, text in piece]
    return rows


# The house

ROOM, STEP, LANE = 640.0, 46.0, 15.0


def rooms(sentences: Mapping[str, str], imports: Iterable[tuple[str, str]], title: str, theme: Theme) -> str:
    """Rooms one above the other, the top one first, each with its sentence; a wire leads from each room to those it imports.

    sentences: room -> what it is for, top to bottom. imports: (importer, imported); one that leads upwards is drawn in orange.
    """
    order = list(sentences)
    found = sorted(set(imports), key=lambda pair: (order.index(pair[0]), order.index(pair[1])))
    named = "; ".join(f"{a} imports {b}" for a, b in found)
    svg = _Svg(ROOM + LANE * (len(order) + 2) + 10, STEP * len(order) + 34, title, named)
    svg.text(6, 18, title, theme.ink, 14, font_weight="600")
    top = {room: 32.0 + STEP * at for at, room in enumerate(order)}
    for importer, imported in found:
        at = order.index(importer)
        lane = ROOM + LANE * (len(order) - at)  # the upper a room, the further out its wire
        start, end = top[importer] + STEP - 14, top[imported] + 6 + 2.6 * at
        colour = theme.muted if order.index(imported) > at else theme.excess
        svg.path(f"M{ROOM:.1f} {start:.1f}H{lane:.1f}V{end:.1f}H{ROOM + 6:.1f}", fill="none", stroke=colour)
        svg.path(f"M{ROOM:.1f} {end:.1f}l7 -3v6z", fill=colour)
    for room, sentence in sentences.items():
        svg.rect(4, top[room], ROOM - 4, STEP - 8, theme.card, rx=5, stroke=theme.muted)
        svg.text(14, top[room] + 24, room, theme.ink, 14, font_weight="600")
        lines = textwrap.wrap(sentence.replace("`", ""), 84)
        for at, line in enumerate(lines):
            svg.text(104, top[room] + 23 + 15 * (at - (len(lines) - 1) / 2), line, theme.ink, 11.5)
    return str(svg)
