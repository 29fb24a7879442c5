"""Writes the empty form of a region to type into, and checks it: exits with 1 if it isn't right.

The form says what is given and what has to hold afterwards. `kernel` is the whole rung behind its header block.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import command

EXAMPLES = (
    "exercise list 04",
    "exercise new 04 online_update",
    "exercise check work/04_online_update.cu",
    "exercise hint 04.1",
)


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    which = command(commands, "list", "Lists the tasks of a rung, or of all, with what is solved.", _list, EXAMPLES[:1])
    which.add_argument("rung", nargs="?", metavar="RUNG", help="like 04; default: all")
    new = command(commands, "new", "Writes work/RUNG_REGION.cu, an empty form; never over a file.", _new, EXAMPLES[1:2])
    new.add_argument("rung", metavar="RUNG", help="like 04 or ping_pong")
    new.add_argument("regions", nargs="+", metavar="REGION", help="a region of the rung, or kernel for all of it")
    check = command(commands, "check", "Compiles, checks and X-rays a form that was filled in.", _check, EXAMPLES[2:3])
    check.add_argument("file", type=Path, metavar="FILE")
    hint = command(commands, "hint", "Tells a task's hints, the first N of them.", _hint, EXAMPLES[3:])
    hint.add_argument("task", metavar="TASK", help="like 04.1")
    hint.add_argument("n", nargs="?", type=int, default=1, metavar="N", help="how many (default: 1)")


def _list(arguments: argparse.Namespace) -> int:
    from ..lessons.forms import tasks

    print(tasks(arguments.rung))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from ..ladder.paths import from_root
    from ..lessons import forms

    regions = tuple(arguments.regions)
    text, path = forms.page(arguments.rung, regions), Path(forms.work(arguments.rung, regions))
    if path.exists():
        raise ValueError(f"{from_root(path)} is there already: move it away to begin anew")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {from_root(path)}; when it is filled in: python -m helpers exercise check {from_root(path)}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ..lessons.typed import attempt_file

    made = attempt_file(arguments.file)
    print(made)
    return 0 if made.ok else 1


def _hint(arguments: argparse.Namespace) -> int:
    from ..lessons.tasks.catalogue import task

    hints = task(arguments.task).hints
    for n, text in enumerate(hints[: max(1, arguments.n)], 1):
        print(f"hint {n} of {len(hints)}: {text}")
    return 0
