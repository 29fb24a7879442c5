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
    """What was handed in for a task: bodies by region, or why there are none; for a detective case the diagnosis, too. blank: the form
    as it was handed out."""

    task: str
    bodies: dict[str, Typed]
    problem: str = ""
    diagnosis: tuple[int | None, str] | None = None
    blank: bool = False


def answers(path: Path) -> dict[str, Answer]:
    """The answers of a submission by task: a `.cu` file, a notebook, or a folder of both; of several to one task the last that isn't blank.

    ValueError if there is no such file or folder. A file that can't be read as what it claims to be holds no answers.
    """
    if not path.exists():
        raise ValueError(f"there is no submission {str(path)!r}")
    found: dict[str, Answer] = {}
    for file in _files(path):
        whole = _read(file)
        case = _case(whole, file.name) if file.suffix == ".cu" else None
        for answer in [case] if case else [_answer(*each) for each in _texts(whole, file)]:
            if answer and not (answer.blank and answer.task in found):
                found[answer.task] = answer
    return found


def strays(path: Path) -> list[str]:
    """First lines of cells and files of a submission that ask for a region and name no task."""
    every = (each for file in _files(path) for each in _texts(_read(file), file))
    return [opening.line.strip() for opening, *rest in every if _answer(opening, *rest) is None]


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


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    inside = sorted(each for each in path.rglob("*") if each.suffix in (".cu", ".ipynb") and each.is_file())
    real = path.resolve()
    return [each for each in inside if each.resolve().is_relative_to(real)][:MOST]  # a link may lead to somebody else's


def _read(file: Path) -> str:
    """A file's text; nothing of one that is too large or can't be read."""
    try:
        return file.read_text("utf-8-sig", errors="replace") if file.stat().st_size <= LARGEST else ""
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
    return [(opening, opening.text, "cell", opening.line.count("\n") + 1) for opening in openings]


def _case(text: str, name: str) -> Answer | None:
    """The answer of a case's file, as `exercise new case 5` writes it; None for another file."""
    handed = detective.read(text)
    if handed is None or handed.n not in {each.n for each in CASES}:
        return None
    typed = Typed(WHOLE, handed.text, name, 1)
    try:
        blank = handed == detective.read(detective.page(handed.n))
    except ValueError:  # a case that isn't available in this tree
        blank = False
    return Answer(f"case.{handed.n}", {WHOLE: typed}, diagnosis=(handed.line, handed.mechanism), blank=blank)


def _answer(opening: Head, text: str, name: str, line: int) -> Answer | None:
    if "/" in opening.rung or opening.rung.endswith(".cu"):
        return None  # a file of theirs is no rung
    try:
        task = about(find(opening.rung), opening.regions)
        if task is None:
            return None
        bodies = read(text, task.regions, name, line)
        return Answer(task.id, bodies, blank=all(typed.empty for typed in bodies.values()))
    except RegionError as error:
        return Answer(task.id, {}, str(error))
    except (ValueError, KeyError):
        return None
