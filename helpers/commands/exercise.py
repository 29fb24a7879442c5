"""Writes the empty form of a region to type into, and checks it: exits with 1 if it isn't right.

The form says what is given and what has to hold afterwards. `kernel` is the whole rung behind its header block. `new case 5` writes
a broken kernel to be diagnosed and fixed, with its symptoms.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import command, known_names, positive

EXAMPLES = (
    "exercise list 04",
    "exercise new 04 online_update",
    "exercise check work/04_online_update.cu",
    "exercise hint 04.1",
    "exercise list cases --seed 7",
    "exercise new case 5",
    "exercise hint case.5",
)


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    which = command(commands, "list", "Lists the tasks of a rung, or of all, with what is solved.", _list, EXAMPLES[:1])
    which.add_argument("rung", nargs="?", metavar="RUNG", help="like 04, or cases; default: all tasks")
    which.add_argument("--seed", type=int, help="of cases: the twelve that this number draws (default: all)")
    new = command(commands, "new", "Writes work/RUNG_REGION.cu, an empty form; never over a file.", _new, EXAMPLES[1:2])
    new.add_argument("rung", metavar="RUNG", help="like 04 or ping_pong; or case")
    new.add_argument(
        "regions", nargs="+", metavar="REGION", help="a region of the rung, or kernel for all of it; a case's number"
    )
    check = command(commands, "check", "Compiles, checks and X-rays a form that was filled in.", _check, EXAMPLES[2:3])
    check.add_argument("file", type=Path, metavar="FILE")
    hint = command(commands, "hint", "Tells a task's hints, the first N of them.", _hint, EXAMPLES[3:4])
    hint.add_argument("task", metavar="TASK", help="like 04.1 or case.5")
    hint.add_argument("n", nargs="?", type=positive, default=1, metavar="N", help="how many (default: 1)")


def _list(arguments: argparse.Namespace) -> int:
    if arguments.rung == "cases":
        from ..lessons.detective import detective, every

        print("\n".join(map(repr, every() if arguments.seed is None else detective(arguments.seed))))
        return 0
    from ..lessons.forms import tasks

    print(tasks(arguments.rung))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from ..ladder.paths import from_root
    from ..lessons import forms

    regions = tuple(arguments.regions)
    if arguments.rung == "case":
        return _new_case(regions)
    with known_names():
        text, path = forms.page(arguments.rung, regions), Path(forms.work(arguments.rung, regions))
    _write(path, text)
    print(f"wrote {from_root(path)}; when it is filled in: python -m helpers exercise check {from_root(path)}")
    return 0


def _new_case(numbers: tuple[str, ...]) -> int:
    from ..ladder.paths import ROOT, from_root
    from ..lessons import detective

    if len(numbers) != 1:
        raise ValueError("one case at a time: exercise new case 5")
    with known_names():
        case = detective.opened(numbers[0])
    path = ROOT / "work" / f"case_{case.case.n:02d}.cu"
    _write(path, detective.page(case.case.n))
    print(f"{case.symptoms()}\n\nwrote {from_root(path)}. At its end: the line and one of these mechanisms")
    print(f"{detective.mechanisms()}\nMend it, then: python -m helpers exercise check {from_root(path)}")
    return 0


def _write(path: Path, text: str) -> None:
    from ..ladder.paths import from_root

    if path.exists():
        raise ValueError(f"{from_root(path)} is there already: move it away to begin anew")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _check(arguments: argparse.Namespace) -> int:
    from ..lessons import detective
    from ..lessons.typed import attempt_file

    if arguments.file.is_file() and (handed := detective.read(arguments.file.read_text("utf-8-sig"))):
        solved, said = detective.attempt(handed)
        print(said)
        return 0 if solved else 1
    made = attempt_file(arguments.file)
    print(made)
    return 0 if made.ok else 1


def _hint(arguments: argparse.Namespace) -> int:
    from ..lessons.forms import hint

    with known_names():
        hints = hint(arguments.task).task.hints
    for n, text in enumerate(hints[: arguments.n], 1):
        print(f"hint {n} of {len(hints)}: {text}")
    return 0
