"""Reading kernels: a named region of a .cu, a whole one, or what changed from one rung to the next.

A region lies between the lines `// [region: name]` and `// [end: name]` of the file, so that prose names a part of the
kernel and can't drift from it. Everything here is text in a terminal and coloured HTML in a notebook; no torch needed.
"""

from __future__ import annotations

import difflib
import functools
import html
import re
from dataclasses import dataclass

from .rung import Rung, Which
from .rung import rung as find

MARKER = re.compile(r"^\s*(?://|#)\s*\[(region|end):\s*([^\]]+?)\s*\]\s*$")
# Styles are written on each element: JupyterLab drops a <style> from a notebook that it doesn't trust, which is every
# notebook until its cells have been run. For the same reason each colour has to read on a light page and on a dark one.
COLOURS = {"c": "#6f7a85", "k": "#a65bcf", "m": "#b8651b", "s": "#3d8a3d"}  # by prefix of Pygments' short class names
COLOURS |= {"cp": "#a65bcf", "nf": "#2f80c8", "nb": "#2f80c8"}
PAGE = "font-family:monospace;font-size:12.5px;line-height:1.45;white-space:pre;overflow-x:auto;margin:0;padding:4px 0"
ASIDE = "color:#808890;user-select:none"  # titles and line numbers: not part of what is copied
MARKS = {"+": "rgba(46,160,67,0.2)", "-": "rgba(248,81,73,0.2)"}


@dataclass(frozen=True)
class Listing:
    """Lines of a file with their numbers and, in a diff, their signs; text in a terminal, HTML in a notebook."""

    title: str
    lines: tuple[tuple[int | None, str, str], ...]  # (line number, " " | "+" | "-" | "@", text)
    language: str = "cuda"  # by Pygments' name

    @property
    def text(self) -> str:
        """The lines alone, with neither numbers nor signs."""
        return "\n".join(line for _, _, line in self.lines)

    def __str__(self) -> str:
        signed = any(sign != " " for _, sign, _ in self.lines)
        body = (f"{no or '':>5} {sign + ' ' if signed else ''}{line}".rstrip() for no, sign, line in self.lines)
        return "\n".join([self.title, *body])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        signed = any(sign != " " for _, sign, _ in self.lines)
        rows = [f'<span style="{ASIDE}">{html.escape(self.title)}</span>']
        for no, sign, line in self.lines:
            shown = (
                f'<span style="{ASIDE}">{html.escape(line)}</span>' if sign == "@" else coloured(line, self.language)
            )
            mark = f"{sign.replace('@', ' ')} " if signed else ""
            row = f'<span style="{ASIDE}">{no or "":>5}</span> {mark}{shown}'
            rows.append(f'<span style="background-color:{MARKS[sign]}">{row}</span>' if sign in MARKS else row)
        return f'<pre style="{PAGE}">{chr(10).join(rows)}</pre>'


@functools.cache
def coloured(line: str, language: str = "cuda") -> str:
    """One line of CUDA, or of what Pygments calls `language`, as HTML; lines are coloured one by one, so a block comment must close
    on its line."""
    try:
        from pygments.lexers import get_lexer_by_name
        from pygments.token import STANDARD_TYPES
    except ImportError:  # a notebook always has Pygments; a bare Python shows the text
        return html.escape(line)
    parts = []
    for token, text in get_lexer_by_name(language, stripnl=False).get_tokens(
        line + "\n"
    ):  # without its end `// ...` is no comment
        name = STANDARD_TYPES.get(token, "")
        kind = name if name in COLOURS else name[:1]
        shown = html.escape(text.rstrip("\n"))
        parts.append(f'<span style="color:{COLOURS[kind]}">{shown}</span>' if kind in COLOURS and shown else shown)
    return "".join(parts)


def regions(which: Which) -> dict[str, tuple[int, int]]:
    """The regions of a kernel's file: name -> first and last line number, markers left out.

        show.regions("04")

    which: what `rung` takes. ValueError names a marker that is opened twice, left open or closed without being open.
    """
    rung = find(which)
    return regions_of(rung.source, str(rung.path))


def regions_of(source: str, path: str) -> dict[str, tuple[int, int]]:
    """The same of a text, in which a marker may be a comment of Python, too; `path` is named in errors."""
    found: dict[str, tuple[int, int]] = {}
    opened: dict[str, int] = {}
    for number, line in enumerate(source.splitlines(), 1):
        if not (match := MARKER.match(line)):
            continue
        what, name = match.groups()
        place = f"{path}:{number}"
        if what == "region":
            if name in opened or name in found:
                raise ValueError(f"{place}: region {name!r} is there twice")
            opened[name] = number
        elif name not in opened:
            raise ValueError(f"{place}: region {name!r} ends here and never began")
        else:
            found[name] = (opened.pop(name) + 1, number - 1)
    if opened:
        name, number = next(iter(opened.items()))
        raise ValueError(f"{path}:{number}: region {name!r} begins here and never ends")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def region(which: Which, name: str) -> Listing:
    """The lines of a kernel's file in the region `name`, with the file's line numbers; markers of inner regions are left out.

        show.region("04", "scores")

    which: what `rung` takes. KeyError names the regions there are.
    """
    rung = find(which)
    found = regions(rung)
    if name not in found:
        raise KeyError(f"{rung.stem} has no region {name!r}; it has {', '.join(found) or 'none'}")
    first, last = found[name]
    return _listing(rung, f"{rung.stem}.cu · {name} · lines {first}–{last}", first, last)


def source(which: Which) -> Listing:
    """A kernel's whole file, markers left out.

        show.source("04")

    which: what `rung` takes.
    """
    rung = find(which)
    length = len(rung.source.splitlines())
    return _listing(rung, f"{rung.stem}.cu · {length} lines", 1, length)


def _listing(rung: Rung, title: str, first: int, last: int) -> Listing:
    lines = rung.source.splitlines()
    kept = [(i, " ", lines[i - 1]) for i in range(first, last + 1) if not MARKER.match(lines[i - 1])]
    return Listing(title, tuple(kept))


def _code(rung: Rung) -> list[tuple[int, str]]:
    """A rung's lines without its header block and markers, numbered."""
    lines = rung.source.splitlines()
    start = next((i for i, line in enumerate(lines) if not line.startswith("//")), 0)
    return [(i + 1, line) for i, line in enumerate(lines) if i >= start and not MARKER.match(line)]


def _opcodes(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> list:
    words = [[" ".join(line.split()) for _, line in side] for side in (before, after)]  # indentation is no change
    return difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes()


def diff(before: Which, after: Which, context: int = 2) -> Listing:
    """What changed from one kernel to the next, with `context` unchanged lines around it.

        show.diff("03", "04")

    before, after: what `rung` takes. Header blocks and indentation are not compared. Line numbers are those of `after`, of
    `before` for removed lines.
    """
    a, b = find(before), find(after)
    old, new = _code(a), _code(b)
    codes = _opcodes(old, new)
    lines: list[tuple[int | None, str, str]] = []
    for kind, i1, i2, j1, j2 in codes:
        if kind == "equal":
            head = 0 if not lines else context
            tail = 0 if j2 == len(new) else context
            if j2 - j1 > head + tail:
                lines += [(n, " ", t) for n, t in new[j1 : j1 + head]]
                lines.append((None, "@", f"⋯ {j2 - j1 - head - tail} unchanged lines"))
                lines += [(n, " ", t) for n, t in new[j2 - tail : j2]]
            else:
                lines += [(n, " ", t) for n, t in new[j1:j2]]
            continue
        lines += [(n, "-", t) for n, t in old[i1:i2]]
        lines += [(n, "+", t) for n, t in new[j1:j2]]
    return Listing(f"{a.stem}.cu → {b.stem}.cu · {changed(a, b)} lines changed", tuple(lines))


def changed(before: Which, after: Which) -> int:
    """How many lines of code of `after` are new or different: blank lines, comments, header block and indentation don't count.

        show.changed("03", "04")

    before, after: what `rung` takes.
    """
    old, code = _code(find(before)), _code(find(after))
    new = (code[j] for kind, _, _, j1, j2 in _opcodes(old, code) if kind != "equal" for j in range(j1, j2))
    return sum(1 for _, line in new if line.strip() and not line.strip().startswith("//"))
