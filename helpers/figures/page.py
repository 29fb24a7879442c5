"""A standalone page: one file that makes no request, readable in a light theme and in a dark one."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from typing import Any

from .style import CARD, DARK_INK, DARK_PAGE, GRID, INK, LISTINGS, MUTED, Figure

LIGHT, DARK = (
    "\n".join(f'[style*="color:{old}"] {{ color: {new[theme]} !important; }}' for old, new in LISTINGS.items())
    for theme in (0, 1)
)
STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 16px; max-width: 1100px; background: {CARD}; color: {INK};
       font: 14px/1.45 system-ui, sans-serif; }}
pre, td, th {{ font-size: 12.5px; }}
section {{ margin: 0 0 24px; overflow-x: auto; }}
td, th {{ border-bottom: 1px solid {GRID}; }}
img {{ max-width: 100%; height: auto; }}
summary {{ cursor: pointer; color: {MUTED}; }}
{LIGHT}
@media (prefers-color-scheme: dark) {{ body {{ background: {DARK_PAGE}; color: {DARK_INK}; }}
  summary {{ color: {DARK_INK}; }} td, th {{ border-color: {MUTED}; }}
{DARK} }}
@media print {{ body {{ max-width: none; padding: 0; }} section {{ overflow: visible; }} }}
"""


def page(title: str, parts: Iterable[Any]) -> str:
    """An HTML document. parts: objects with a `_repr_html_`, as a notebook shows them, or Figures, whose words become the
    alternative text."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    sections = "\n".join(f"<section>{_shown(part)}</section>" for part in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}<title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n{sections}\n</body>\n</html>\n"
    )


def _shown(part: Any) -> str:
    if not isinstance(part, Figure):
        return part._repr_html_()
    data, size = part._repr_png_()
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img src="{source}" width="{size["width"]}" alt="{html.escape(part.words())}">'
