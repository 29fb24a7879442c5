"""What can be handed in: region tasks and detective cases, each with the kernel that an answer makes and its points by criterion."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from ...ladder.rung import rung as find
from .. import judge
from ..cases import MECHANISMS, Case
from ..cases import case as case_of
from ..detective import opened
from ..regions import WHOLE, Filled, RegionError, fill, require_inside, require_without
from ..tasks.catalogue import task as task_of
from ..tasks.task import Task
from .submission import Answer

CORRECT, CLEAN, SHARED, MOVED = 6, 2, 1, 1  # points of a task
PART = 3  # of CORRECT, at most, for an answer that is right in some cases only
LINE, MECHANISM, FIXED = 2, 2, 6  # of a detective case
MOST_SAID = 600  # characters of one sentence
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class Criterion:
    """Points for one thing, and a sentence on them."""

    name: str
    points: float
    most: float
    said: str


class Assignment(ABC):
    """One thing that is graded, as the grader sees it. id: as in `--tasks`; number: of the rung that an answer is held against;
    every_D: as Task has it."""

    id: str
    number: str
    every_D: bool = False

    @abstractmethod
    def filled(self, answer: Answer) -> Filled:
        """The kernel that an answer makes. RegionError where it makes none."""

    @abstractmethod
    def criteria(self, verdict: judge.Judgement, filled: Filled, answer: Answer) -> Iterable[Criterion]:
        """The points for a kernel that has run."""

    @abstractmethod
    def nothing(self, why: str, answer: Answer | None) -> Iterable[Criterion]:
        """The points where no kernel has run, or one that did not do the work: none for the kernel, for one reason."""


def assignment(id: str) -> Assignment:
    """A task, "04.1", or a detective case, "case.5". KeyError for another one."""
    return OfCase(case_of(id)) if id.startswith("case.") else OfTask(task_of(id))


class OfTask(Assignment):
    """A region task: the rung with the reader's text in it, right, clean and as lean as the rung."""

    def __init__(self, task: Task) -> None:
        self.id, self.number, self.every_D = task.id, task.number, task.every_D
        self.lean, self.without = task.lean, task.without

    def filled(self, answer: Answer) -> Filled:
        """The rung with the regions that were handed in."""
        for typed in answer.bodies.values():
            require_without(typed, self.without)
        return fill(find(self.number), answer.bodies)

    def criteria(self, verdict: judge.Judgement, filled: Filled, answer: Answer) -> Iterable[Criterion]:
        """For the outputs, for no findings, and for what it asks of both memories beside the rung; these count once it is right."""
        right, all = verdict.right, len(verdict.cases)
        if verdict.correct:
            yield Criterion("correct", CORRECT, CORRECT, f"right in all {all} cases")
        else:
            name, why = next((name, why) for name, why in verdict.cases if why)
            said = filled.located(f"right in {right} of {all} cases; wrong: {name}: {why}")
            yield Criterion("correct", int(PART * right / all), CORRECT, _tidy(said))
        if verdict.findings:
            yield Criterion("no races, no findings", 0, CLEAN, _tidy(filled.located(verdict.findings[0])))
        else:
            said = "nothing was found" if verdict.correct else "counts once the result is right"
            yield Criterion("no races, no findings", CLEAN * verdict.correct, CLEAN, said)
        mine, own = verdict.costs, verdict.rungs
        # a rung without shared memory: then no conflicts is as good
        wavefronts = 0 if mine.wavefronts == mine.ideal and not own.wavefronts else mine.wavefronts
        shared, moved = judge.wasted(mine, own) if self.lean else ("", "")
        yield _against("shared memory", SHARED, verdict, wavefronts, own.wavefronts, "wavefronts", shared)
        yield _against("global memory", MOVED, verdict, mine.traffic, own.traffic, "bytes", moved)

    def nothing(self, why: str, answer: Answer | None) -> Iterable[Criterion]:
        """None for any of the four."""
        most = {"correct": CORRECT, "no races, no findings": CLEAN, "shared memory": SHARED, "global memory": MOVED}
        return [Criterion(name, 0, points, _tidy(why)) for name, points in most.items()]


class OfCase(Assignment):
    """A detective case: a diagnosis, which counts by itself, and a fixed kernel."""

    def __init__(self, case: Case) -> None:
        self.case, self.id, self.number = case, case.id, case.number

    def filled(self, answer: Answer) -> Filled:
        """The broken kernel as it was fixed, if few lines were changed."""
        typed = answer.bodies[WHOLE]
        require_inside(find(self.number), typed)
        try:
            rung = opened(self.id).edited(typed.text)
        except ValueError as error:
            raise RegionError(str(error)) from error
        return Filled(rung, rung, ())

    def criteria(self, verdict: judge.Judgement, filled: Filled, answer: Answer) -> Iterable[Criterion]:
        """For line, mechanism and fix; the last is right and clean, or worth nothing."""
        if verdict.wrong:
            return self.nothing(verdict.wrong, answer)
        said = f"right in all {len(verdict.cases)} cases, nothing was found"
        return [*self._diagnosed(answer), Criterion("fixed", FIXED, FIXED, said)]

    def nothing(self, why: str, answer: Answer | None) -> Iterable[Criterion]:
        """None for the fix; the diagnosis counts all the same."""
        return [*self._diagnosed(answer), Criterion("fixed", 0, FIXED, _tidy(why))]

    def _diagnosed(self, answer: Answer | None) -> Iterable[Criterion]:
        line, mechanism = (answer and answer.diagnosis) or (None, "")
        there = line is not None and line in opened(self.id)._lines
        named = self.case.is_mechanism(mechanism)
        wrong = f"'{line}' is no number of a line" if isinstance(line, str) else f"line {line}: it is another one"
        said = "the line" if there else "no line was given" if line is None else wrong
        yield Criterion("line", LINE * there, LINE, said)
        wrong = "it is another one" if mechanism in MECHANISMS else "there is none of this name"
        said = f"mechanism {mechanism[:40]}: {wrong}" if mechanism else "no mechanism was given"
        said = "the mechanism" if named else said
        yield Criterion("mechanism", MECHANISM * named, MECHANISM, said)


def _against(
    name: str, most: float, verdict: judge.Judgement, mine: int, own: int, unit: str, refused: str = ""
) -> Criterion:
    """Full points for what costs no more than the rung, half for up to twice as much; none for what the task forbids, `refused`."""
    if not verdict.correct:
        return Criterion(name, 0, most, "counts once the result is right")
    points = 0 if refused else most if mine <= judge.NEAR * own else most / 2 if mine <= 2 * own else 0
    return Criterion(name, points, most, refused or f"{mine:,} {unit}, the rung {own:,}")


def _tidy(text: str) -> str:
    """The same text for the same mistake: without addresses, and not too long."""
    return ADDRESS.sub("an address", text)[:MOST_SAID]
