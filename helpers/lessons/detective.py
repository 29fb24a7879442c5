"""Detective cases: a broken kernel, its symptoms, and a reader who names the bug and fixes it.

    cases = detective(7)  # twelve, drawn by this seed
    cases[0].symptoms()
    cases[0].code()
    cases[0].solve(line=112, mechanism="barrier", fix={112: "      __syncthreads();"})

Cases always run on the emulator, and what its X-ray finds is withheld: that would be the answer.
"""

from __future__ import annotations

import difflib
import html
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

from ..evidence.mutants import of_rung
from ..figures.words import many
from ..ladder import show
from ..ladder.errors import CompileError
from ..ladder.instances import for_d64
from ..ladder.rung import Rung, parse
from ..ladder.rung import rung as find
from ..ladder.show import Listing
from ..run.check import compare
from ..run.reference import Case
from ..run.report import Comparison, draw, error_pixels, pattern
from . import cases as stored
from . import judge
from .cases import CASES, DRAWN, MECHANISMS, SHOWN
from .forms import Hints
from .handed import BLANK
from .inputs import Draw, instance
from .inputs import draw as drawn
from .progress import keep, solved
from .regions import code as bare

MOST_LINES = 8  # that a fix may change
ORDERS = (0, 5, 9, 13)  # of threads: the emulator's own, and three others
SECONDS = 60.0
_HEAD = re.compile(r"^// *case: *([0-9]{1,3}) *$", re.MULTILINE)
_FIELD = r"^// *{}: *(.*?) *$"


@dataclass(frozen=True)
class Seen:
    """One input: what came of it. said: in words. comparison: the worst wrong output, if there are outputs."""

    name: str
    right: bool
    said: str
    comparison: Comparison | None = None


@dataclass(frozen=True)
class Symptoms:
    """What can be seen of a broken kernel from outside. orders: whether its answer depends on the order of threads. counts: (what,
    this kernel's, the rung's own) on input `counted`, which is drawn, too. found: whether the X-ray reports something; what stays hidden."""

    title: str
    seen: tuple[Seen, ...]
    orders: str
    counted: str
    counts: tuple[tuple[str, int, int], ...]
    found: bool

    @property
    def shown(self) -> Comparison | None:
        """The wrong output that is drawn; None where there is none, or where nothing in it is right."""
        found = next((each.comparison for each in self.seen if each.name == self.counted), None)
        if found is None or found.wrong is None:
            return None
        head = found.worst[: found.wrong.ndim - (1 if found.output == "lse" else 2)]
        return None if found.wrong[head].all() else found

    def _after(self) -> list[str]:
        lines = [self.orders]
        lines.append(f"the X-ray {'reports something, which is withheld here' if self.found else 'finds nothing'}")
        if self.counts:
            lines.append(f"{f'it counts, {self.counted}':<52}{'this kernel':>14}{'the rung':>14}")
            lines += [f"  {what:<50}{mine:>14,}{own:>14,}" for what, mine, own in self.counts]
        return lines

    def _before(self) -> list[str]:
        rows = [f"  {'✓' if each.right else '✗'} {each.name:<36} {each.said}".rstrip() for each in self.seen]
        return [self.title, *rows]

    def __str__(self) -> str:
        picture = [draw(self.shown)] if self.shown else []
        return "\n".join([*self._before(), *picture, *self._after()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><td>{'✓' if each.right else '<b>✗</b>'}</td><td {left}>{html.escape(each.name)}</td>"
            f"<td {left}>{html.escape(each.said)}</td></tr>"
            for each in self.seen
        )
        heads = f"<th></th><th {left}>input</th><th {left}>what came out</th>"
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        after = html.escape("\n".join(self._after()))
        page = f"<pre style='font-family:monospace;margin:0;word-break:normal;white-space:pre-wrap'>{after}</pre>"
        return f"<div>{html.escape(self.title)}</div>{table}{error_pixels(self.shown) if self.shown else ''}{page}"


class Opened:
    """A case with its kernel: `rung` is the broken text, a Rung. Made by `detective`."""

    def __init__(self, case: stored.Case) -> None:
        self.case = case

    @property
    def id(self) -> str:
        """Like "case.5"."""
        return self.case.id

    @cached_property
    def _texts(self) -> tuple[list[str], list[str]]:
        """Lines of the rung, and of the same with the bug."""
        stem = find(self.case.number).stem
        whole = find(stem).source.splitlines()
        try:
            bug = next(m for id, m in of_rung(stem).items() if self.case.is_bug(id))
        except (ValueError, StopIteration):
            bug = None
        if bug is None or BLANK in find(stem).source:  # regions that were left blank
            raise ValueError(f"case {self.case.n} is not available: {stem} is not whole in this tree")
        before = (find(stem) if bug.wrong_result else for_d64(stem)).source.splitlines()
        made, at = [], 0  # the changed lines, without the comments that would give them away
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
            None, before, after := bug.source.splitlines()
        ).get_opcodes():
            if tag != "equal":
                made += whole[at:i1] + _silent(after[j1:j2])
                at = i2
        return whole, made + whole[at:]

    @cached_property
    def rung(self) -> Rung:
        """The broken kernel, with all its instances."""
        return self._parsed(self._texts[1])

    def _parsed(self, lines: list[str]) -> Rung:
        return parse("\n".join(lines) + "\n", Path(f"case_{self.case.n:02d}.cu"))

    def code(self, *regions: str) -> Listing:
        """The regions of the broken kernel among which the bug is, with the file's line numbers; others by name. KeyError names them."""
        where, source = show.regions(self.rung), show.source(self.rung).lines
        shown: dict[int, tuple[int | None, str, str]] = {}
        for name in regions or self.case.regions:
            ends = name.split(" to ")  # "schedule to mask": with all that lies between
            for each in ends:
                if each not in where:
                    raise KeyError(f"{self.case.title} has no region {each!r}; it has {', '.join(where)}")
            first, last = where[ends[0]][0], where[ends[-1]][1]
            shown |= {line[0]: line for line in source if line[0] is not None and first <= line[0] <= last}
        lines: list[tuple[int | None, str, str]] = []
        for n in sorted(shown):
            gap = lines and n > (lines[-1][0] or 0) + 1 and any(self.rung.source.splitlines()[lines[-1][0] : n - 1])
            lines += [(None, " ", "…")] if gap and not self._markers(lines[-1][0] or 0, n) else []
            lines.append(shown[n])
        return Listing(f"{self.case.title} · {', '.join(regions or self.case.regions)}", tuple(lines))

    def _markers(self, last: int, first: int) -> bool:
        """Whether there is nothing but markers of regions between two lines."""
        return all(show.MARKER.match(line) for line in self.rung.source.splitlines()[last : first - 1])

    def symptoms(self) -> Symptoms:
        """What an outsider sees of it; takes seconds (case 11: half a minute)."""
        return _symptoms(self)

    def outputs(self, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What it computes on an input, by the input's name or how that begins, and what float64 does: output -> (got, expected), two
        arrays of the output's shape. KeyError names the inputs; ValueError where there is no output."""
        draw_of = self._draw
        cases = draw_of.cases()
        found = [n for n, case in enumerate(cases) if case.name.startswith(name)]
        if not found or not name:
            raise KeyError(f"no input {name!r}; there are {', '.join(case.name.partition(':')[0] for case in cases)}")
        case, jobs = cases[found[0]], [job for job in _jobs(cases) if job.case == found[0]]
        run = next(iter(judge.observe(instance(self.rung, draw_of.D, draw_of.dtype), jobs, SECONDS)))
        if run.outputs is None:
            raise ValueError(f"there is no output: it was {_seen(case, run).said}")
        pairs = zip(case.names, run.outputs, case.exact(), strict=True)
        return {output.upper(): (got.double().numpy(), exact.numpy()) for output, got, exact in pairs}

    @property
    def _draw(self) -> Draw:
        return drawn(find(self.case.number), self.case.seed)

    def hint(self) -> Hints:
        """The hints, folded one inside the other; in a terminal one more with each call."""
        return Hints(self.case)

    def mechanisms(self) -> str:
        """The names among which `mechanism` is chosen."""
        return mechanisms()

    # The answer

    @cached_property
    def _lines(self) -> set[int]:
        """Lines of the broken text that are a right answer to "where": those that differ and, where some are gone, their neighbours."""
        whole, broken = self._texts
        found: set[int] = set()
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, whole, broken).get_opcodes():
            if tag == "delete" or (tag == "replace" and i2 - i1 != j2 - j1):
                found |= set(range(_code_before(broken, j1), _code_from(broken, j2) + 1))
            if tag != "equal":
                found |= set(range(j1 + 1, j2 + 1))
        return found

    def diagnose(self, line: int | str | None, mechanism: str) -> str:
        """What is wrong with a diagnosis, in a sentence; empty if it is right.

        line: of the broken file; where a line is missing, the one before or behind. mechanism: a key of MECHANISMS.
        """
        if line is None or line is ... or not mechanism or mechanism is ...:
            return "first the diagnosis: a line and a mechanism"
        if mechanism not in MECHANISMS:
            return f"{mechanism!r} is no mechanism; there are {', '.join(MECHANISMS)}"
        if not isinstance(line, int) or isinstance(line, bool) or not 1 <= line <= len(self._texts[1]):
            return f"line is a number from 1 to {len(self._texts[1])}, not {line!r}"
        place, way = line in self._lines, self.case.is_mechanism(mechanism)
        if place and way:
            return ""
        if place:
            return "the line is right, the mechanism is another one"
        return "that is the mechanism, in another line" if way else "neither the line nor the mechanism"

    def fixed(self, fix: Mapping[int, str]) -> Rung:
        """The broken kernel with some lines replaced: number -> new text, which may be several lines, or "" for none.

        ValueError if that is no such dictionary, or if more than MOST_LINES lines change.
        """
        lines = list(self._texts[1])
        if not isinstance(fix, Mapping) or not fix:
            raise ValueError("fix is a dictionary, the number of a line -> its new text")
        for n, text in fix.items():
            if not isinstance(n, int) or not 1 <= n <= len(lines) or not isinstance(text, str):
                raise ValueError(f"fix: {n!r} -> {text!r} is no line of the file and its new text")
        made = [part for n, line in enumerate(lines, 1) for part in (fix[n].splitlines() if n in fix else [line])]
        return self.edited("\n".join(made))

    def edited(self, text: str) -> Rung:
        """The same of a whole text that a reader has edited, with the case's own header block: comments above the code, such as a name,
        count for nothing, and the code keeps its lines. ValueError if more than MOST_LINES of its lines are others."""
        lines, broken = text.splitlines(), self._texts[1]
        at, begin = _above(lines), _above(broken)
        changes = difflib.SequenceMatcher(None, broken[begin:], lines[at:], autojunk=False).get_opcodes()
        if (count := sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal")) > MOST_LINES:
            raise ValueError(f"the fix changes {count} lines; {MOST_LINES} are enough for every case")
        if not count:
            raise ValueError("nothing is fixed yet")
        return self._parsed([*broken[:begin], *[""] * (at - begin), *lines[at:]])

    def fault(self, rung: Rung) -> str:
        """What is still wrong with a fixed kernel, in a sentence: on every input, in other orders of threads, and to the X-ray."""
        return judge.fault(rung, self.case.number, self.case.seed, schedules=ORDERS[:3])

    def solve(self, line: int | None, mechanism: str, fix: Mapping[int, str]) -> bool:
        """True if the diagnosis is right and the fixed kernel is, too; notes that the case is solved.

        AssertionError says what is not. Nothing is compiled before the diagnosis is right.
        """
        if wrong := self.diagnose(line, mechanism):
            raise AssertionError(wrong)
        self._require(lambda: self.fixed(fix))
        return True

    def _require(self, make: Callable[[], Rung]) -> None:
        try:
            wrong = self.fault(make())
        except (ValueError, CompileError) as error:
            wrong = str(error)
        if wrong:
            raise AssertionError(f"the diagnosis is right; the fix isn't: {wrong}")
        keep(self.id)

    def solution(self) -> tuple[int, str, dict[int, str]]:
        """Line, mechanism and fix, and prints why. ValueError in a tree that was handed out without solutions."""
        answer = stored.answers()[self.case.n]
        whole, broken = self._texts
        fix, line = {}, None
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, whole, broken).get_opcodes():
            if tag == "equal":
                continue
            line = line or min(j1 + 1, len(broken))
            text = "\n".join(whole[i1:i2])
            if j2 > j1:
                fix |= {j1 + 1: text} | {n: "" for n in range(j1 + 2, j2 + 1)}
            else:  # lines are missing: they come before the next one
                fix[j1 + 1] = f"{text}\n{broken[j1]}"
        print(answer["why"])
        return line or 1, answer["mechanism"], fix

    def __repr__(self) -> str:
        return self.case.title + (" · solved" if self.id in solved() else "")


@dataclass(frozen=True)
class Cases:
    """The cases of a seed, in the order of the ladder: indexed from 0, shown as a table."""

    drawn: tuple[Opened, ...]

    def __getitem__(self, i: int) -> Opened:
        return self.drawn[i]

    def __len__(self) -> int:
        return len(self.drawn)

    def __repr__(self) -> str:
        return "\n".join(f"{i:>2}  {case!r}" for i, case in enumerate(self.drawn))


def detective(seed: int) -> Cases:
    """Twelve cases drawn by a seed.

    detective(7)[0].symptoms()
    """
    numbers = random.Random(seed).sample([each.n for each in CASES if each.n != SHOWN], DRAWN)
    return Cases(tuple(opened(n) for n in sorted(numbers)))


@cache
def opened(id: str | int) -> Opened:
    """A case by number or id. KeyError names those there are."""
    return Opened(stored.case(id))


def mechanisms() -> str:
    """The mechanisms by name, one a line."""
    return "\n".join(f"{name:<12}{said}" for name, said in MECHANISMS.items())


def every() -> Cases:
    """All cases."""
    return Cases(tuple(opened(each.n) for each in CASES))


# Symptoms


def _symptoms(opened: Opened) -> Symptoms:
    draw_of = opened._draw
    cases = draw_of.cases()
    runs = list(judge.observe(instance(opened.rung, draw_of.D, draw_of.dtype), _jobs(cases, ORDERS), SECONDS))
    unsteady, orders = _orders(cases, runs)
    seen = tuple(_seen(case, next(r for r in runs if r.case == n), n in unsteady) for n, case in enumerate(cases))
    n = _telling(seen)
    said = f"the answer is the same in {many(orders, 'order')} of threads"
    if unsteady:
        said = f"the answer changes with the order of threads, as it would from run to run: {', '.join(seen[i].name for i in unsteady)}"
    return Symptoms(
        f"{opened.case.title}, D = {draw_of.D}, {draw_of.dtype}",
        seen,
        said,
        seen[n].name,
        _counts(opened.case.number, draw_of, cases, runs, n),
        any(run.findings for run in runs),
    )


def _jobs(cases: list[Case], orders: tuple[int, ...] = ORDERS[:1]) -> list[judge.Job]:
    """The launches that symptoms are read from. All are traced: others stop where shared memory is read that nobody has written, and a
    GPU goes on."""
    return [replace(job, traced=True) for job in judge.jobs(cases, orders)]


def _telling(seen: tuple[Seen, ...]) -> int:
    """The input whose map says most: with rows of which some are right, else with many rows; if there is no map, one that ends."""

    def worth(n: int) -> tuple[bool, bool, bool]:
        found = seen[n].comparison
        if found is None or found.wrong is None:
            return False, False, False
        rows = found.wrong.shape[-1 if found.output == "lse" else -2]
        return True, rows >= 16, bool(0 < found.wrong.sum() < 0.9 * found.wrong.size)

    best = max(range(len(seen)), key=lambda n: (worth(n), -n))
    if worth(best)[0]:
        return best
    ended = [n for n, each in enumerate(seen) if each.right]
    return next((n for n in ended if seen[n].name == "many tiles"), ended[0] if ended else 0)


def _seen(case: Case, run: judge.Run, unsteady: bool = False) -> Seen:
    name = case.name.partition(":")[0]
    if run.outputs is None:
        return Seen(name, False, f"stopped{_kind(run.error)}")
    compared = compare(case, run.outputs)
    found = [each for each in compared if each.problem or each.used > judge.TIMES]
    if not found:
        return Seen(name, True, "in other orders of threads another answer" if unsteady else "")
    right = [each.output.upper() for each in compared if each not in found]
    said = "; ".join([*map(_wrong, found), *([f"{', '.join(right)} right"] if right else [])])
    return Seen(name, False, said, next((each for each in found if each.wrong is not None), None))


def _wrong(found: Comparison) -> str:
    """One wrong output, in a few words."""
    name = found.output.upper()
    if found.wrong is None:
        return f"{name}: {found.problem.splitlines()[0]}"
    share, _, where = pattern(found.wrong, found.output).partition(" elements wrong: ")
    axes = [axis for axis in where.split("; ") if not re.fullmatch(r"\w+ (all|0)", axis)]
    axes = ["some columns" if re.match("column .* more runs", axis) else axis for axis in axes]
    nan = " (NaN)" if "NaN" in found.problem else ""
    worst = "" if found.got != found.got else f", got {found.got:.4g} for {found.expected:.4g}"
    return f"{name} wrong{nan} in {share}{': ' + ', '.join(axes) if axes else ''}{worst}"


def _kind(error: str) -> str:
    """How a run without outputs ended, as far as a program on a GPU would show it."""
    return (
        ": it did not end" if re.search(r"deadlock|after \d", error) else " by the emulator, whose reason is withheld"
    )


def _orders(cases: list[Case], runs: list[judge.Run]) -> tuple[list[int], int]:
    """The inputs whose outputs are not the same, bit by bit, in all orders of threads; and how many orders were tried."""
    tried, unsteady = 1, []
    for n in range(len(cases)):
        of = [run.outputs for run in runs if run.case == n and run.outputs is not None]
        tried = max(tried, len(of))
        bits = [[x.contiguous().view(torch.uint8) for x in outputs] for outputs in of]
        if any(not torch.equal(x, y) for other in bits[1:] for x, y in zip(bits[0], other, strict=True)):
            unsteady.append(n)
    return unsteady, tried


def _counts(
    number: str, draw_of: Draw, cases: list[Case], runs: list[judge.Run], n: int
) -> tuple[tuple[str, int, int], ...]:
    """Counts of one input beside the rung's own; none where it didn't end, or the rung isn't whole."""
    mine = next(run for run in runs if run.case == n)
    if mine.outputs is None:
        return ()
    jobs = [job for job in _jobs(cases) if job.case == n]
    own = next(iter(judge.observe(replace(draw_of, rung=find(number)).instance, jobs, SECONDS)))
    rows = [("wavefronts of shared memory", mine.wavefronts, own.wavefronts)]
    rows.append(("of them bank conflicts", mine.wavefronts - mine.ideal, own.wavefronts - own.ideal))
    for i, what in enumerate(("read", "written")):
        names = [name for name in own.bytes if mine.bytes.get(name, (0, 0))[i] or own.bytes[name][i]]
        rows += [(f"bytes of {name} {what}", mine.bytes.get(name, (0, 0))[i], own.bytes[name][i]) for name in names]
    return tuple(rows)


# Text


def _silent(lines: list[str]) -> list[str]:
    """Lines without comments; what is nothing then, or a lone semicolon, is left out."""
    shape = re.compile(r" *// \([\w, ]+\)$")  # tells nothing
    bare = [line if shape.search(line) else re.sub(r" *//.*", "", line) for line in lines]
    return [line for line, was in zip(bare, lines) if not was.strip() or line.strip() not in ("", ";")]


def _above(lines: list[str]) -> int:
    """How many lines stand above the first line of code."""
    return next((n for n, line in enumerate(bare("\n".join(lines)).split("\n")) if line.strip()), len(lines))


def _code_before(lines: list[str], at: int) -> int:
    """The number of the last line of code in front of index `at`."""
    return next((n for n in range(at, 0, -1) if lines[n - 1].partition("//")[0].strip()), 1)


def _code_from(lines: list[str], at: int) -> int:
    """The number of the first line of code from index `at` on."""
    return next((n for n in range(at + 1, len(lines) + 1) if lines[n - 1].partition("//")[0].strip()), len(lines))


# As a file


def page(n: int) -> str:
    """A case as a file for an editor: the broken kernel, and behind it room for the diagnosis, so that lines keep their numbers."""
    case = opened(n)
    names = ", ".join(MECHANISMS)
    return f"{case.rung.source}\n// case: {case.case.n}\n// line:\n// mechanism:\n// One of: {names}\n"


@dataclass(frozen=True)
class Handed:
    """A case's file, read: the diagnosis and the text without it. line: as it is written there, if that is no number."""

    n: int
    line: int | str | None
    mechanism: str
    text: str


def read(text: str) -> Handed | None:
    """What a file says of a case; None if it is about none."""
    if not (head := _HEAD.search(text)):
        return None
    end = text[head.start() :]
    line, mechanism = (re.search(_FIELD.format(key), end, re.MULTILINE) for key in ("line", "mechanism"))
    number = re.fullmatch(r"(?:line )?([0-9]{1,6})\.?", line[1]) if line else None
    given = int(number[1]) if number else (line and line[1][:40]) or None
    name = mechanism[1].strip("`'\" ").lower() if mechanism else ""
    return Handed(int(head[1]), given, name, text[: head.start()].rstrip("\n"))


def attempt(handed: Handed) -> tuple[bool, str]:
    """Whether a case's file solves it, and what to say."""
    case = opened(handed.n)
    wrong = case.diagnose(handed.line, handed.mechanism)
    if not wrong:
        try:
            case._require(lambda: case.edited(handed.text))
        except AssertionError as error:
            wrong = str(error)
    return not wrong, f"Case {handed.n}: " + (f"not solved yet\n  {wrong}" if wrong else "solved")
