"""What can be said of a figure by its parts alone: titles, axes, lines with their first and last value, what is written in it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

MOST = 14  # lines, bars or labels of one panel


def described(figure: Figure) -> str:
    """Sentences that stand in for a figure: its title, then for each panel its title, axes, lines, bars and labels."""
    parts = [figure.get_suptitle(), *(_panel(ax) for ax in figure.axes)]
    return " ".join(f"{part.rstrip('.')}." for part in map(_line, parts) if part)


def _panel(ax: Axes) -> str:
    title = _line(ax.get_title(loc="left") or ax.get_title())
    axes = [
        f"{name}: {_line(label)}" for name, label in (("across", ax.get_xlabel()), ("up", ax.get_ylabel())) if label
    ]
    shown = [*_lines(ax), *_bars(ax)] or _labels(ax)
    return "; ".join([*filter(None, [title]), *axes, *shown])


def _lines(ax: Axes) -> list[str]:
    """Each named line with its first and last value. A name is in the legend, or at the line's end in its colour."""
    names = {_colour(text): _line(text.get_text()) for text in ax.texts if text.get_text().strip()}
    found = []
    rows = _rows(ax)
    for line in ax.lines:
        x, y = ([float(v) for v in data if _number(v)] for data in (line.get_xdata(), line.get_ydata()))
        name = str(line.get_label())
        name = names.get(_colour(line), "") if name.startswith("_") else name
        at = [rows.get(round(v)) for v in y]  # marks in rows, as in a table, or a little off them
        if name and rows and len(x) == len(y) and all(at):
            found.append(f"{name}: " + ", ".join(_first(f"{row} {_short(a)}" for a, row in zip(x, at, strict=True))))
        elif name and y:
            level = len(set(y)) == 1 and name[-1].isdigit()  # a line across, whose number is in its name
            ends = " to ".join(_short(v) for v in dict.fromkeys((y[0], y[-1])))
            found.append(name if level else f"{name} {ends}")
    return _first(found)


def _rows(ax: Axes) -> dict[float, str]:
    """Rows with names, numbered from 0, by their place. Panels beside each other have them at the first alone."""
    beside = [other for other in ax.figure.axes if other is not ax and other.get_ylim() == ax.get_ylim()]
    return next(filter(None, map(_own_rows, [ax, *beside])), {})


def _own_rows(ax: Axes) -> dict[float, str]:
    rows = {
        float(y): _line(t.get_text())
        for y, t in zip(ax.get_yticks(), ax.get_yticklabels(), strict=False)
        if t.get_text()
    }
    named = any(letter.isalpha() for text in rows.values() for letter in text)
    return rows if named and set(rows) <= set(map(float, range(200))) else {}


def _bars(ax: Axes) -> list[str]:
    """Each series of bars with its values, by the ticks that they stand at."""
    found = []
    for bars in (c for c in ax.containers if isinstance(c, BarContainer)):
        flat = bars.orientation == "horizontal"
        ticks = zip(
            *((ax.get_yticks(), ax.get_yticklabels()) if flat else (ax.get_xticks(), ax.get_xticklabels())),
            strict=False,
        )
        at = {round(float(place)): _line(text.get_text()) for place, text in ticks}
        label = "" if bars.get_label().startswith("_") else f"{bars.get_label()}: "
        values = []
        for patch in bars.patches:
            place = patch.get_y() + patch.get_height() / 2 if flat else patch.get_x() + patch.get_width() / 2
            size = patch.get_width() if flat else patch.get_height()
            if math.isfinite(size):
                values.append(f"{at.get(round(place), '')} {_short(size)}".strip())
        found.append(label + ", ".join(_first(values)))
    return _first(found)


def _labels(ax: Axes) -> list[str]:
    return _first(dict.fromkeys(_line(t.get_text()) for t in ax.texts if len(t.get_text().strip()) > 1))


def _first(found: Iterable[str]) -> list[str]:
    found = [text for text in found if text]
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def _line(text: str) -> str:
    return " ".join(text.replace("$", "").split())


def _colour(artist: object) -> str:
    return str(artist.get_color())


def _number(value: object) -> bool:
    return (isinstance(value, int | float) or hasattr(value, "dtype")) and math.isfinite(float(value))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
