"""A region of a rung in a reader's words: the empty form, the rung with what was typed, and lines named as the reader counts them.

Regions are those that kernels mark (`show.regions`); `kernel` is all of a rung that follows its header block. What a reader types
stays within its region: brackets balance, and only `#pragma` may begin with a `#`, except where the region itself has more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ladder.rung import Rung, Which, parse
from ..ladder.rung import rung as find
from ..ladder.show import MARKER, regions
from . import handed

# What an answer opens with: `%%region RUNG REGION .. -> NAME` a cell, `// region: RUNG REGION ..` a file. All of the line is matched, and
# above it blank lines, which IPython drops, and comments, such as a name. A line may end in \r\n.
_HEAD = re.compile(
    r"(?:[^\S\n]*(?://(?! *region:)[^\n]*)?\n)*(?P<mark>%%region[^\S\n]|// *region:)[^\S\n]*(?P<rung>\S+)[^\S\n]+"
    r"(?P<regions>\S+?(?:[^\S\n]+\S+?)*?)(?:[^\S\n]*->[^\S\n]*\w+)?[^\S\n]*(?:\n|\Z)"
)
WHOLE = "kernel"  # the region that is the whole rung, but for its header block
# A number is a word, since the marks in 1'000 quote nothing.
_WORDS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|(?<![\w$])\d(?:\'?\w|\.)*|//[^\n]*|/\*.*?\*/', re.DOTALL
)
_OPEN = {")": "(", "]": "[", "}": "{"}
# What would let a text reach past its region unseen: joined lines, other spellings of brackets, raw strings.
_ODD = re.compile(r"\\[ \t]*$|\?\?[(<)>=/]|<%|%>|<:|:>|%:|\b(?:u8|[uUL])?R\"", re.MULTILINE)

# A macro of several lines. A blank before each backslash, so that no word goes on in the next line.
_MACRO = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\n]*[ \t]\\\n)+", re.MULTILINE)


class RegionError(ValueError):
    """What a reader typed isn't the body of a region; the text is one sentence with the reader's line."""

    def _render_traceback_(self) -> list[str]:
        return [f"RegionError: {self}"]


@dataclass(frozen=True)
class Head:
    """The first line of an answer, with what stands above it: the rung and its regions as they are written there, and what follows."""

    line: str
    rung: str
    regions: tuple[str, ...]
    text: str


def head(answer: str, cell: bool) -> Head | None:
    """How a cell, or a file, opens that answers a task; None if it opens otherwise."""
    found = _HEAD.match(answer)
    if found is None or found["mark"].startswith("%%") != cell:
        return None
    return Head(found[0], found["rung"], tuple(found["regions"].split()), answer[found.end() :])


@dataclass(frozen=True)
class Typed:
    """The body of one region as it was typed; its first line is line `line` of the cell or file `name`.

    Whatever ended its lines, a line feed does: what is looked for in the text is looked for in what is compiled.
    """

    region: str
    text: str
    name: str = "cell"
    line: int = 2  # the magic's is the first

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", "\n".join(self.text.splitlines()))

    @property
    def empty(self) -> bool:
        """Nothing but comments and blanks."""
        return not _WORDS.sub(lambda word: "" if word[0].startswith("/") else word[0], self.text).strip()


@dataclass(frozen=True)
class Filled:
    """`rung`: `original` with bodies that a reader typed in place of its own."""

    rung: Rung
    original: Rung
    places: tuple[tuple[int, int, int, Typed], ...]  # first line, lines, lines that stood there, what was typed

    def place(self, line: int) -> tuple[str, int]:
        """Where line `line` of the filled rung stands: (the reader's cell or file, its line), or (the rung's file, its line)."""
        moved = 0
        for first, count, stood, typed in self.places:
            if first <= line < first + count:
                return typed.name, typed.line + line - first
            if line >= first + count:
                moved += count - stood
        return f"{self.original.stem}.cu", line - moved

    def located(self, text: str) -> str:
        """A text of compiler or emulator with the filled rung's line numbers turned into those of `place`. Where all of the rung was typed,
        its file is the reader's."""
        file = re.escape(self.rung.path.name)
        shift = 0

        def line_of(found: re.Match[str]) -> str:
            nonlocal shift
            name, number = self.place(int(found["line"]))
            shift = number - int(found["line"])
            return f"{name}{found['mark']}{number}"

        lines = []
        for line in text.splitlines():
            line = re.sub(rf"(?<![\w./]){file}(?P<mark>[:(])(?P<line>\d+)", line_of, line)
            line = re.sub(r"\b(?P<word>lines?) (?P<n>\d+)\b", self._spoken, line) if file not in line else line
            quoted = re.match(r"^( *)(\d+)( \|.*)$", line)
            if quoted:
                line = f"{int(quoted[2]) + shift:>{len(quoted[1] + quoted[2])}}{quoted[3]}"
            lines.append(line)
        of_all = next((typed.name for *_, typed in self.places if typed.region == WHOLE), self.rung.path.name)
        return re.sub(rf"(?<![\w./]){file}(?![:(]\d)", lambda _: of_all, "\n".join(lines))

    def _spoken(self, found: re.Match[str]) -> str:
        name, number = self.place(int(found["n"]))
        return f"{found['word']} {number} of {name}"


def names(which: Which) -> list[str]:
    """The regions of a rung that a reader can type: those it marks whose brackets balance, and `kernel`."""
    rung = find(which)
    return [name for name in regions(rung) if not _unbalanced(body(rung, name))] + [WHOLE]


def span(which: Which, region: str) -> tuple[int, int]:
    """First and last line of a region, markers left out. KeyError names the regions there are."""
    rung = find(which)
    found = regions(rung)
    if region == WHOLE:
        lines = rung.source.splitlines()
        start = next((i for i, line in enumerate(lines, 1) if not line.startswith("//")), 1)
        return start, len(lines)
    if region not in found:
        raise KeyError(
            f"{rung.stem} has no region {region!r}; it has {', '.join([*found, WHOLE])} (a name of yours stands behind `->`)"
        )
    return found[region]


def body(which: Which, region: str) -> str:
    """The rung's own text of a region, without markers of regions inside it."""
    rung = find(which)
    first, last = span(rung, region)
    lines = rung.source.splitlines()[first - 1 : last]
    return "\n".join(line for line in lines if not MARKER.match(line))


def fill(which: Which, bodies: Mapping[str, Typed]) -> Filled:
    """The rung with typed bodies in place of its own; see `handed.rest` for one whose regions are blank.

    KeyError for a region that the rung hasn't; RegionError for a body that leaves its region, or for two of which one is inside the
    other.
    """
    rung = handed.rest(find(which))
    spans = sorted((*span(rung, name), name) for name in bodies)
    for (_, last, outer), (first, _, inner) in zip(spans, spans[1:]):
        if first <= last:
            raise RegionError(f"region {inner!r} lies inside {outer!r}: type one of them")
    lines, places, at = rung.source.splitlines(), [], 1
    result: list[str] = []
    for first, last, name in spans:
        typed = bodies[name]
        require_inside(rung, typed)
        result += lines[at - 1 : first - 1]
        if name == WHOLE:
            result.append("")  # a comment that it opens with is none of the header block's
        new = typed.text.splitlines() or [""]
        places.append((len(result) + 1, len(new), last - first + 1, typed))
        result += new
        at = last + 1
    result += lines[at - 1 :]
    return Filled(parse("\n".join(result) + "\n", Path(f"{rung.stem}.cu")), rung, tuple(places))


def read(text: str, wanted: tuple[str, ...], name: str = "cell", line: int = 2) -> dict[str, Typed]:
    """The bodies that a cell or file holds: what stands between `// [region: x]` and `// [end: x]`, or, of one region, all of it.

    line: the number of the text's first line. RegionError where a wanted region is missing.
    """
    found: dict[str, Typed] = {}
    lines, opened = text.splitlines(), None
    for i, each in enumerate(lines):
        match = MARKER.match(each)
        if match and match[2] in wanted and match[1] == "region" and opened is None:
            opened = (match[2], i + 1)
        elif match and opened and match[1] == "end" and match[2] == opened[0]:
            found[opened[0]] = Typed(opened[0], "\n".join(lines[opened[1] : i]), name, line + opened[1])
            opened = None
    if opened:
        raise RegionError(f"{name}:{line + opened[1] - 1}: `// [region: {opened[0]}]` has no `// [end: {opened[0]}]`")
    if not found and len(wanted) == 1:
        found = {wanted[0]: Typed(wanted[0], text, name, line)}
    if missing := [each for each in wanted if each not in found]:
        raise RegionError(f"{name} lacks `// [region: {missing[0]}]` … `// [end: {missing[0]}]`")
    return found


def require_inside(rung: Rung, typed: Typed) -> None:
    """RegionError where a body would reach past its region, or hides what it says."""
    whole = typed.region == WHOLE
    text = _MACRO.sub(lambda macro: macro[0].replace("\\\n", "\n"), typed.text) if whole else typed.text
    if at := _unbalanced(text):
        raise RegionError(f"{typed.name}:{typed.line + at[0] - 1}: {at[1]}")
    allowed = {"pragma"} | set(re.findall(r"^\s*#\s*(\w+)", body(rung, typed.region), re.MULTILINE))
    if whole:
        allowed |= {"include", "define", "if", "ifdef", "ifndef", "else", "elif", "endif", "undef"}
    for number, line in enumerate(code(typed.text).splitlines(), typed.line):
        directive = re.match(r"\s*#\s*(\w*)", line)
        if directive and directive[1] not in allowed:
            raise RegionError(f"{typed.name}:{number}: `#{directive[1]}` has no place in the region {typed.region!r}")


def require_without(typed: Typed, names: Iterable[str]) -> None:
    """RegionError with the first line of a body that says one of `names`."""
    for number, line in enumerate(code(typed.text).splitlines(), typed.line):
        if said := next((name for name in names if re.search(rf"\b{name}\b", line)), None):
            raise RegionError(f"{typed.name}:{number}: `{said}` has no place in the region {typed.region!r}")


def code(text: str, kept: str = "") -> str:
    """The text with comments and quoted words blanked, all but the quoted word `kept`; lines stay."""

    def blanked(word: re.Match[str]) -> str:
        return word[0] if word[0] == kept or word[0][0].isdigit() else re.sub(r"[^\n]", " ", word[0])

    return _WORDS.sub(blanked, text)


def _unbalanced(text: str) -> tuple[int, str] | None:
    """The line on which the brackets of a text go wrong, and how; None if they balance."""
    if odd := _ODD.search(text):
        return text[: odd.start()].count("\n") + 1, f"{odd[0].strip()!r} has no place in a region"
    opened: list[tuple[str, int]] = []
    for number, line in enumerate(code(text).splitlines(), 1):
        if "/*" in line:
            return number, "a comment that doesn't end"
        for letter in line:
            if letter in "([{":
                opened.append((letter, number))
            elif letter in _OPEN:
                if not opened or opened[-1][0] != _OPEN[letter]:
                    return number, f"{letter!r} closes what was opened outside of the region"
                opened.pop()
    return (opened[-1][1], f"{opened[-1][0]!r} is never closed") if opened else None
