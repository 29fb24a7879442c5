"""What a reader sees of a region task: the contract, the empty form to type into, hints that unfold one at a time, the list of all."""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass

from ..ladder.paths import ROOT
from ..ladder.rung import Rung, Which
from ..ladder.rung import rung as find
from ..ladder.show import coloured
from .cases import Case, case
from .progress import solved
from .regions import WHOLE, body, span
from .tasks.catalogue import about, task
from .tasks.catalogue import tasks as every
from .tasks.task import LEVELS, Task

WIDTH = 118
_told: dict[str, int] = {}  # hints told in a terminal, by task


class Text(str):
    """A text that shows itself as it is, coloured as CUDA in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre style='margin:0;word-break:normal'>{chr(10).join(coloured(line) for line in self.splitlines())}</pre>"


def contract(which: Which, regions: tuple[str, ...]) -> list[str]:
    """What is given in these regions of a rung and what has to hold behind them, as lines; of a region that no task is about, the
    comment that it opens with."""
    if found := about(which, regions):
        rows = [("given", line) for line in found.given] + [("after", line) for line in found.after]
        return [f"{found.id}: {found.statement}", *(f"{word}: {line}" for word, line in rows)]
    lines = [line for region in regions for line in _opening(find(which), region)]
    return lines or ["there is no contract for this region: read what stands around it (show.source)"]


def _opening(rung: Rung, region: str) -> list[str]:
    """The comment that a region opens with."""
    found = []
    for line in body(rung, region).splitlines():
        if not line.strip().startswith("//"):
            break
        found.append(line.strip().removeprefix("//").strip())
    return found


def form(which: Which, regions: tuple[str, ...], marked: bool = False) -> str:
    """The contract as comments and room for each region; several regions, or one if `marked`, stand between their markers."""
    rung = find(which)
    said = [part for line in contract(rung, regions) for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    lines = [f"// {line}" for line in said]
    for region in regions:
        first, _ = span(rung, region)
        indent = len(rung.source.splitlines()[first - 1]) - len(rung.source.splitlines()[first - 1].lstrip())
        room = (
            [line for line in body(rung, WHOLE).splitlines() if line.startswith("#include")] if region == WHOLE else []
        )
        room = [*room, " " * indent]
        between = marked or len(regions) > 1
        lines += [f"// [region: {region}]", *room, f"// [end: {region}]"] if between else room
    return "\n".join(lines) + "\n"


def blank(which: Which, *regions: str) -> Text:
    """The empty form of one or several regions of a rung, to copy into a cell.

        blank("04_fa2_fp32", "online_update")

    ValueError and KeyError name the rungs and regions there are.
    """
    rung = find(which)
    names = regions or (WHOLE,)
    return Text(f"%%region {rung.number} {' '.join(names)} -> my_{names[0]}\n{form(rung, names)}")


def page(which: Which, regions: tuple[str, ...]) -> str:
    """The same as a file for an editor: its first line says what it is about."""
    rung = find(which)
    return f"// region: {rung.stem} {' '.join(regions)}\n{form(rung, regions, marked=True)}"


@dataclass(frozen=True)
class Hints:
    """The hints of a task or a case. In a notebook each is folded inside the one before; in a terminal each call tells one more."""

    task: Task | Case

    def __repr__(self) -> str:
        told = min(_told.get(self.task.id, 0) + 1, len(self.task.hints))
        _told[self.task.id] = told
        return f"hint {told} of {len(self.task.hints)}: {self.task.hints[told - 1]}"

    def _repr_html_(self) -> str:
        inner = ""
        for n, text in reversed(list(enumerate(self.task.hints, 1))):
            name = f"{self.task.name.capitalize()}: hint {n} of {len(self.task.hints)}"
            shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
            inner = f"<details><summary>{name}</summary><p>{shown}</p>{inner}</details>"
        return inner

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {
            "text/html": self._repr_html_(),
            "text/plain": f"hints of {self.task.name}, folded",
        }


def hint(id: str) -> Hints:
    """A task's hints, folded, one inside the other; of a detective case by "case.5".

        hint("04.1")

    KeyError names the tasks there are.
    """
    return Hints(case(id) if id.startswith("case.") else task(id))


@dataclass(frozen=True)
class Tasks:
    """A table of tasks."""

    rows: tuple[Task, ...]

    def __repr__(self) -> str:
        done = solved()
        mark = {task.id: "solved" if f"task {task.id}" in done else "" for task in self.rows}
        return "\n".join(
            f"{task.id}  {' '.join(task.regions):<16} {LEVELS[task.level]:<32} {mark[task.id]:<7} {task.statement}".rstrip()
            for task in self.rows
        )


def tasks(which: Which = None) -> Tasks:
    """The tasks of a rung, or of all, with what is solved.

    tasks("04")
    """
    number = None if which is None else find(which).number
    return Tasks(tuple(each for each in every().values() if number in (None, each.number)))


def work(which: Which, regions: tuple[str, ...]) -> str:
    """The path of a reader's file for these regions, from the checkout's root: work/04_online_update.cu."""
    return str(ROOT / "work" / f"{find(which).number}_{'_'.join(regions)}.cu")
