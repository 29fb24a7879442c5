"""The weeks of the course as data, and course/syllabus.md's tables made from them, with the notebooks' own minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...ladder.paths import NOTEBOOKS, ROOT
from ..tasks.catalogue import task as task_of

PAGE = ROOT / "course" / "syllabus.md"
MINUTES = {1: 25, 2: 45, 3: 90, 4: 240}  # of a task, by level: estimates
LECTURE = 90  # minutes
_TABLE = re.compile(r"(<!-- weeks (\d+) -->\n).*?(<!-- /weeks -->)", re.DOTALL)


@dataclass(frozen=True)
class Week:
    """notebooks: their numbers; tasks: ids of region tasks; assessed: besides the tasks."""

    topic: str
    notebooks: tuple[str, ...]
    tasks: tuple[str, ...]
    assessed: str
    lecture: str = ""

    @property
    def minutes(self) -> int:
        """Of a student: lecture, notebooks and tasks."""
        return LECTURE + sum(map(reading, self.notebooks)) + sum(MINUTES[task_of(id).level] for id in self.tasks)


QUIZ = "quiz"
WEEKS = {
    6: (
        Week("attention and its memory", ("00", "01", "02"), ("01.1", "02.1"), QUIZ, "1"),
        Week("FlashAttention 1 and 2", ("03", "04"), ("04.1", "04.2"), QUIZ, "2"),
        Week("tensor cores and shared memory", ("10", "11"), ("10.1", "11.1"), QUIZ, "3"),
        Week(
            "hiding latency; masks and decoding", ("12", "20", "21"), ("12.1", "20.1"), f"{QUIZ}; project proposal", "4"
        ),
        Week("Hopper", ("30", "32"), ("30.2",), QUIZ, "5"),
        Week("the backward pass; proof", ("22", "90", "91"), ("22.1",), "project; oral exam", "6"),
    ),
    12: (
        Week("attention and its memory", ("00", "01"), ("01.1", "01.3"), QUIZ, "1"),
        Week("online softmax", ("02",), ("02.1", "02.2"), QUIZ, "1"),
        Week("FlashAttention-1", ("03",), ("03.1", "03.2"), QUIZ, "2"),
        Week("FlashAttention-2", ("04",), ("04.1", "04.2"), QUIZ, "2"),
        Week("tensor cores", ("10",), ("10.1", "10.4"), QUIZ, "3"),
        Week("shared memory without conflicts", ("11",), ("11.1", "11.2"), QUIZ, "3"),
        Week("asynchronous copies; proof", ("12", "90"), ("12.1", "12.3"), f"{QUIZ}; project proposal", "4"),
        Week("what limits a kernel; bugs", ("13", "91"), ("13.1",), QUIZ, "4"),
        Week("masks and decoding", ("20", "21"), ("20.1", "21.1"), QUIZ, "4"),
        Week("the backward pass", ("22", "23"), ("22.1", "23.1"), QUIZ, "6"),
        Week("Hopper: TMA, wgmma, roles", ("30", "31"), ("30.2", "31.1"), QUIZ, "5"),
        Week("ping-pong; the whole ladder", ("32", "93", "99"), ("32.1",), "project; oral exam", "5"),
    ),
}


def stem(number: str) -> str:
    """The notebook with this number. ValueError if there is none, or more than one."""
    (found,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return found.stem


def reading(number: str) -> int:
    """The minutes that a notebook names for itself."""
    text = (NOTEBOOKS / "src" / f"{stem(number)}.py").read_text()
    found = re.search(r"\*\*Time\*\* (\d+) minutes", text)
    if found is None:
        raise ValueError(f"notebook {number} doesn't say how long it takes")
    return int(found[1])


def table(weeks: tuple[Week, ...]) -> str:
    """A table of weeks in Markdown."""
    lines = ["| week | topic | slides | notebooks | tasks | minutes | assessed |", "|--:|---|--:|---|---|--:|---|"]
    for n, week in enumerate(weeks, 1):
        books = ", ".join(f"[{number}](../notebooks/{stem(number)}.ipynb)" for number in week.notebooks)
        lines.append(
            f"| {n} | {week.topic} | {week.lecture} | {books} | {', '.join(week.tasks)} | {week.minutes} | "
            f"{week.assessed} |"
        )
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """The text with its tables as the data give them."""
    return _TABLE.sub(lambda found: found[1] + table(WEEKS[int(found[2])]) + found[3], text)
