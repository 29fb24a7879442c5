"""Which exercises and tasks a reader has solved: a file of their own, on their own machine."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ..ladder.paths import ROOT
from ..toolchain.compile import making


def file() -> Path:
    """Where it is kept: FA_PROGRESS, else work/progress.json in the checkout (which git ignores). An empty FA_PROGRESS: nowhere."""
    return Path(os.environ.get("FA_PROGRESS") or ROOT / "work" / "progress.json").expanduser()


def solved() -> dict[str, str]:
    """What is solved, with the date of the first time: "exercise 2.1", "task 04.1" or "case.5" -> "2026-11-23". Empty where there is no file, or
    none that can be read."""
    if os.environ.get("FA_PROGRESS") == "":
        return {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file().read_text())
        if isinstance(found, dict):
            return {str(name): str(date) for name, date in found.items()}
    return {}


def keep(name: str) -> None:
    """Notes that `name` is solved. Where the file can't be written nothing is noted, and nothing is said."""
    if os.environ.get("FA_PROGRESS") == "":
        return
    path = file()
    with making(path), contextlib.suppress(OSError):  # another notebook may solve something at the same time
        known = solved()
        if name not in known:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(known | {name: time.strftime("%Y-%m-%d")}, indent=1) + "\n")
            fresh.replace(path)


@dataclass(frozen=True)
class Progress:
    """What is solved, and of the tasks which are left. cases: how many detective cases there are."""

    done: dict[str, str]
    left: tuple[str, ...]
    cases: int = 0

    def __str__(self) -> str:
        exercises = [name.partition(" ")[2] for name in self.done if name.startswith("exercise ")]
        tasks = [name.partition(" ")[2] for name in self.done if name.startswith("task ")]
        lines = [f"exercises solved: {len(exercises)}" + f" ({', '.join(exercises)})" * bool(exercises)]
        lines.append(
            f"tasks solved: {len(tasks)} of {len(tasks) + len(self.left)}" + f" ({', '.join(tasks)})" * bool(tasks)
        )
        if found := [name.removeprefix("case.") for name in self.done if name.startswith("case.")]:
            lines.append(f"cases solved: {len(found)} of {self.cases} ({', '.join(found)})")
        if self.left:
            lines.append(f"next: {', '.join(self.left[:4])}; from helpers import tasks; tasks() describes them all")
        where = file()
        where = where.relative_to(ROOT) if where.is_relative_to(ROOT) else where
        return "\n".join([*lines, f"kept in {where}"])

    __repr__ = __str__


def progress() -> Progress:
    """What this reader has solved.

    progress()
    """
    from .cases import CASES
    from .tasks.catalogue import tasks

    done = solved()
    return Progress(done, tuple(id for id in tasks() if f"task {id}" not in done), len(CASES))
