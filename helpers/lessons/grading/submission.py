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

KINDS = (".cu", ".ipynb")  # of files that may be answers
LARGEST = 8 << 20  # bytes of a file that is looked at
MOST = 200  # files of a folder


@dataclass(frozen=True)
class Answer:
    """What was handed in for a task: bodies by region, or why there are none; for a detective case the diagnosis, too. blank: the form
    as it was handed out."""

    task: str
    bodies: dict[str, Typed]
    problem: str = ""
    diagnosis: tuple[int | str | None, str] | None = None
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
        case = _case(whole, file.name) if file.suffix.lower() == ".cu" else None
        for answer in [case] if case else [_answer(*each) for each in _texts(whole, file)]:
            if answer and not (answer.blank and answer.task in found):
                found[answer.task] = answer
    return found


def why_none(path: Path) -> str:
    """Why a submission, or part of it, holds no answer, as the end of a sentence that has named it: of a folder file by file, zips too, and
    of other files the first lines that ask for a region and name no task. Empty where all of it is answers."""
    if path.is_dir():
        inside = {str(file.relative_to(path)): why_none(file) for file in _files(path, (*KINDS, ".zip"))}
        said = "; ".join(f"{name}: {why}" for name, why in inside.items() if why)
        return said if inside else "there is no `.cu` file or notebook in it"
    whole, kind = _read(path), path.suffix.lower()
    if kind == ".cu" and _case(whole, path.name):
        return ""
    if texts := _texts(whole, path):
        strays = [opening.line.strip().splitlines()[-1] for opening, *rest in texts if _answer(opening, *rest) is None]
        return "; ".join(f"`{line[:80]}` is no task" for line in strays)
    if kind not in KINDS:
        return "a submission is a `.cu` file, a notebook or a folder of these"
    if path.stat().st_size > LARGEST:
        return f"it has more than {LARGEST >> 20} MiB"
    if "\0" in whole:
        return "it is not in UTF-8"
    if kind == ".cu":
        return "its first line has to be `// region: RUNG REGION`"
    try:
        json.loads(whole)["cells"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it can't be read as a notebook"
    return "no cell begins with %%region"


def _files(path: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    if path.is_file():
        return [path]
    inside = sorted(each for each in path.rglob("*") if each.suffix.lower() in kinds and each.is_file())
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
    if file.suffix.lower() != ".ipynb":
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
