"""Accesses as a table, in text and in HTML, and frames that are shown whole.

Styles are written on each element: JupyterLab drops a <style> from a notebook that it doesn't trust. Colours are translucent,
so that they read on a light page and on a dark one.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

import pandas as pd

from ..emulator.trace import Access
from .style import COOL, HOT
from .words import UNIT, cut, statement

UNFOLDED = 8  # rows
# The counts stand first, in cells that keep their width; the code comes last, and is what gives way on a narrow page.
TABLE = "table-layout:auto;width:100%;margin:0;border-collapse:collapse"
COUNT = "padding:3px 8px;text-align:right;white-space:nowrap"
NAME = "padding:3px 8px;text-align:left;white-space:nowrap"
CODE = "padding:3px 8px;text-align:left;white-space:pre;font-family:monospace"
CODE += ";width:100%;min-width:10em;max-width:0;overflow:hidden;text-overflow:ellipsis"
HEADS = {COUNT: "padding:3px 8px;text-align:right;white-space:normal"}  # in two lines where that is narrower
WHAT = {"shared": "Shared memory, by line", "global": "Global memory, by line (a sector is 32 bytes)"}


class Table(pd.DataFrame):
    """A frame whose text has every row and column, however narrow the terminal."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def __repr__(self) -> str:
        return self.to_string()


def preformatted(text: str) -> str:
    """Text as HTML that keeps its lines, and wraps those too long for the page."""
    return (
        f"<pre style='font-family:monospace;margin:0;word-break:normal;white-space:pre-wrap'>{html.escape(text)}</pre>"
    )


def access_html(rows: Sequence[Access], space: str, code: Callable[[Access], str]) -> str:
    """The accesses of one space, the costliest first; beyond the first UNFOLDED, folded. code: the text of an access's line."""
    most = max(a.cost for a in rows) or 1
    heads = [("line", COUNT), (UNIT[space], COUNT), ("ideal", COUNT), ("beyond ideal", COUNT), ("requests", COUNT)]
    heads += [("worst request", COUNT), ("operation", NAME), ("bytes per lane", COUNT), ("code", CODE)]
    head = "".join(f'<th style="{HEADS.get(style, style)}">{name}</th>' for name, style in heads)
    cells = [_row(a, most, code(a)) for a in rows]

    def table(part: list[str]) -> str:
        inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(part)}</tbody>"
        return f'<div style="overflow-x:auto"><table style="{TABLE}">{inner}</table></div>'

    shown = f"<div style='margin-top:8px'><b>{WHAT[space]}</b></div>{table(cells[:UNFOLDED])}"
    if len(cells) > UNFOLDED:
        more = f"{len(cells) - UNFOLDED} more lines"
        shown += f"<details><summary>{more}</summary>{table(cells[UNFOLDED:])}</details>"
    return shown


def _row(a: Access, most: int, code: str) -> str:
    excess = a.cost - a.ideal
    cool = f"background-color:{COOL.format(0.55 * a.cost / most)}"
    hot = f"background-color:{HOT.format(0.15 + 0.45 * excess / a.cost)}" if excess else ""
    worst = f"{a.worst_request.cost} for {a.worst_request.ideal}"
    counts = [(f"{a.line}", ""), (f"{a.cost:,}", cool), (f"{a.ideal:,}", ""), (f"{excess:,}", hot)]
    counts += [(f"{a.requests:,}", ""), (worst, "")]
    cells = "".join(f'<td style="{COUNT}{";" * bool(tint)}{tint}">{text}</td>' for text, tint in counts)
    cells += f'<td style="{NAME}">{a.op} {html.escape(a.target)}</td><td style="{COUNT}">{a.width}</td>'
    whole = html.escape(statement(code))
    return f'<tr>{cells}<td style="{CODE}" title="{whole}">{whole}</td></tr>'


def access_text(rows: Sequence[Access], space: str, code: Callable[[Access], str], wide: int) -> str:
    """The same as text, in lines of at most `wide` characters."""
    head = (" line", "operation", "width", "requests", UNIT[space], "ideal", "worst request", "")
    cells = [
        (f"{a.line:>5}", f"{a.op} {a.target}", f"{a.width} B", f"{a.requests:,}", f"{a.cost:,}", f"{a.ideal:,}")
        + (f"{a.worst_request.cost} for {a.worst_request.ideal}", statement(code(a)))
        for a in rows
    ]
    sizes = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    left = {1, 7}
    lines = [
        "  ".join(c.ljust(n) if i in left else c.rjust(n) for i, (c, n) in enumerate(zip(row, sizes))).rstrip()
        for row in (head, *cells)
    ]
    return "\n".join([f"costliest lines, {space} memory", *(cut(line, wide) for line in lines)])
