"""What somebody has handed in: the bodies of regions, taken as text from notebooks and `.cu` files. Nothing of it is executed here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...ladder.rung import rung as find
from .. import detective
from ..cases import CASES
from ..regions import WHOLE, Head, RegionError, Typed, head, read
from ..tasks.catalogue import about

LARGEST = 8 << 20  # bytes of a file that is looked at
MOST = 200  # files of a folder


@dataclass(frozen=True)
class Answer:
    """What was handed in for a task: bodies by region, or why there are none; for a detective case the diagnosis, too."""

    task: str
    bodies: dict[str, Typed]
    problem: str = ""
    diagnosis: tuple[int | None, str] | None = None


def answers(path: Path) -> dict[str, Answer]:
    """The answers of a submission by task: a `.cu` file, a notebook, or a folder of both; of several to one task the last.

    ValueError if there is no such file or folder. A file that can't be read as what it claims to be holds no answers.
    """
    if not path.exists():
        raise ValueError(f"there is no submission {str(path)!r}")
    found: dict[str, Answer] = {}
    for file in [path] if path.is_file() else _files(path):
        whole = _read(file)
        if file.suffix == ".cu" and (answer := _case(whole, file.name)):
            found[answer.task] = answer
            continue
        for opening, text, name, line in _texts(whole, file):
            if answer := _answer(opening, text, name, line):
                found[answer.task] = answer
    return found


def why_none(path: Path) -> str:
    """Why a submission holds no answer, as the end of a sentence that has named it."""
    if path.is_dir():
        return "no `.cu` file or notebook in it is an answer to a task"
    whole = _read(path)
    if path.suffix == ".cu":
        opening = head(whole, cell=False)
        return "its regions are no task" if opening else "its first line has to be `// region: RUNG REGION`"
    if path.suffix != ".ipynb":
        return "a submission is a `.cu` file, a notebook or a folder of these"
    try:
        json.loads(whole)["cells"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it can't be read as a notebook"
    return "the regions of its %%region cells are no task" if _texts(whole, path) else "no cell begins with %%region"


def _files(folder: Path) -> list[Path]:
    inside = sorted(each for each in folder.rglob("*") if each.suffix in (".cu", ".ipynb") and each.is_file())
    real = folder.resolve()
    return [each for each in inside if each.resolve().is_relative_to(real)][:MOST]  # a link may lead to somebody else's


def _read(file: Path) -> str:
    """A file's text; nothing of one that is too large or can't be read."""
    try:
        return file.read_text(errors="replace") if file.stat().st_size <= LARGEST else ""
    except OSError:
        return ""


def _texts(text: str, file: Path) -> list[tuple[Head, str, str, int]]:
    """(first line, text, name, number of the text's first line) of every cell or file that is an answer."""
    if file.suffix != ".ipynb":
        opening = head(text, cell=False)
        return [(opening, text, file.name, 1)] if opening else []
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    sources = [source.encode(errors="replace").decode() for source in sources]  # JSON may hold halves of letters
    openings = [opening for source in sources if (opening := head(source, cell=True))]
    return [(opening, opening.text, "cell", 2) for opening in openings]


def _case(text: str, name: str) -> Answer | None:
    """The answer of a case's file, as `exercise new case 5` writes it; None for another file."""
    handed = detective.read(text)
    if handed is None or handed.n not in {each.n for each in CASES}:
        return None
    typed = Typed(WHOLE, handed.text, name, 1)
    return Answer(f"case.{handed.n}", {WHOLE: typed}, diagnosis=(handed.line, handed.mechanism))


def _answer(opening: Head, text: str, name: str, line: int) -> Answer | None:
    if "/" in opening.rung or opening.rung.endswith(".cu"):
        return None  # a file of theirs is no rung
    try:
        task = about(find(opening.rung), opening.regions)
        if task is None:
            return None
        return Answer(task.id, read(text, task.regions, name, line))
    except RegionError as error:
        return Answer(task.id, {}, str(error))
    except (ValueError, KeyError):
        return None
