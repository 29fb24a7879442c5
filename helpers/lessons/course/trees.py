"""What a course hands out, from the same sources: a tree for students without solutions, one for instructors with them.

In the student tree, regions of kernels that are asked for may be left blank. A rung that lacks one doesn't compile before somebody has
typed it; what the rung itself costs, which `%%region` shows beside the reader's, then comes from `course/costs.json`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat

from ...ladder.paths import KERNELS, NOTEBOOKS, ROOT
from ...ladder.rung import Rung
from ...ladder.rung import rung as find
from ...ladder.show import regions_of
from ..handed import BLANK, packed
from ..regions import WHOLE, body
from ..tasks.catalogue import task as task_of
from ..tasks.task import Task
from .exercises import exercises, solved, unsolved
from .marked import for_instructors, for_students
from .nbgrader import gradable

FOLDERS = ("helpers", "kernels", "data", "docs/images", ".jupyterlab", ".devcontainer", ".binder")
ANSWERS = Path("helpers") / "lessons" / "answers.json"  # of the detective cases: in the instructor's tree alone
FILES = ("README.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "Makefile", "pyproject.toml", "environment.yml")
FILES += ("Dockerfile", ".dockerignore", ".gitignore")
# Below the title of a tree's README.md.
PART = """
A course's copy of the series, without `tests/`, `docs/book/`, `course/slides/` and `notebooks/src/`: `make test`, `make book`,
`make slides` and what else needs them run in the full repository.
"""
COURSE = ROOT / "course"
SHARED = 0.5  # of a region's lines: a kernel that has more of them in common is named


@dataclass(frozen=True)
class Built:
    """student, instructor: the trees. exercises: how many. near: task -> kernels of the student tree that hold much of a blank region,
    with the share of its lines that they hold."""

    student: Path
    instructor: Path
    exercises: int
    near: dict[str, dict[str, float]]

    def __str__(self) -> str:
        lines = [f"{self.student}: {self.exercises} exercises, no solutions", f"{self.instructor}: the same, solved"]
        for id, kernels in self.near.items():
            names = ", ".join(f"{name} ({share:.0%})" for name, share in kernels.items())
            lines.append(f"task {id} is blank" + f"; much of it can be read in {names}" * bool(names))
        return "\n".join(lines)


def build(folder: Path, blank: Sequence[str] = ()) -> Built:
    """Writes folder/student and folder/instructor, which must not be there yet.

    blank: ids of tasks whose regions the student's kernels lack. ValueError if a tree is there already or a task is about a whole rung,
    KeyError for an unknown task.
    """
    tasks = [task_of(id) for id in blank]
    if of_rungs := [task.id for task in tasks if WHOLE in task.regions]:
        raise ValueError(
            f"{', '.join(of_rungs)}: the whole kernel can't be blank: hand out the notebook without the .cu"
        )
    student, instructor = folder / "student", folder / "instructor"
    if there := [tree for tree in (student, instructor) if tree.exists()]:
        raise ValueError(f"{there[0]} is there already: remove it, or choose another folder")
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    number = 0
    for tree in (student, instructor):
        _copy(tree)
    (student / ANSWERS).unlink()
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        number += len(exercises(notebook))
        nbformat.write(gradable(unsolved(notebook)), student / "notebooks" / path.name)
        nbformat.write(solved(notebook), instructor / "notebooks" / path.name)
    for source in sorted(COURSE.glob("*.md")):
        text, there = source.read_text(), source.relative_to(ROOT)
        _write(instructor / there, for_instructors(text))
        if (text := for_students(text)).strip():
            _write(student / there, text)
    near = _blank(student, tasks)
    return Built(student, instructor, number, near)


def _copy(tree: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    title, _, rest = (tree / "README.md").read_text().partition("\n")
    (tree / "README.md").write_text(f"{title}\n{PART}{rest}")
    (tree / "notebooks").mkdir()
    shutil.copy(NOTEBOOKS / "glossary.md", tree / "notebooks")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# Blank regions


def _blank(tree: Path, tasks: Sequence[Task]) -> dict[str, dict[str, float]]:
    """Takes the regions of tasks out of a tree's kernels; see Built.near."""
    if not tasks:
        return {}
    known = {number: costs(find(number)) for number in sorted({task.number for task in tasks})}
    _write(tree / "course" / "costs.json", json.dumps(known, indent=1) + "\n")
    texts: dict[str, str] = {}
    for task in tasks:
        rung = find(task.number)
        lines = texts.get(rung.stem, rung.source).splitlines()
        for region in task.regions:
            text = "\n".join(lines)
            lines = _without(text, region, f'{BLANK}{task.id}: the region {region} is for you to write"')
        texts[rung.stem] = "\n".join(lines) + "\n"
    for stem, text in texts.items():
        (tree / "kernels" / f"{stem}.cu").write_text(text)
    return {task.id: near(task, sorted((tree / "kernels").rglob("*.cu")), tree / "kernels") for task in tasks}


def _without(text: str, region: str, instead: str) -> list[str]:
    lines, found = text.splitlines(), regions_of(text, "the kernel")
    if region in found:
        first, last = found[region]
        lines[first - 1 : last] = [instead]
    return lines


def near(task: Task, paths: Iterable[Path], folder: Path = KERNELS) -> dict[str, float]:
    """Kernels, by path in `folder`, that hold more than SHARED of the distinct lines of a task's regions, with the share."""
    wanted = set(code_lines("\n".join(body(task.number, region) for region in task.regions)))
    found = {}
    for path in paths:
        share = len(wanted & set(code_lines(path.read_text()))) / max(len(wanted), 1)
        if share > SHARED:
            found[str(path.relative_to(folder))] = share
    return found


def code_lines(text: str) -> list[str]:
    """Lines of code that say something: without comments and blanks, and long enough not to occur by chance."""
    bare = (re.sub(r"\s+", "", line.partition("//")[0]) for line in text.splitlines())
    return [line for line in bare if len(line) >= 12 and not line.startswith("#")]


def costs(rung: Rung) -> dict:
    """What a rung costs, for trees in which it isn't whole: counts of the X-ray on `typed.workload`, and costs on the inputs of
    seed 0 by which answers are judged; and the rung's text, packed, for the regions that nobody is typing at the moment."""
    from .. import judge, typed

    inputs, options = typed.workload(rung)
    return {
        "counts": dict(typed.counts(typed.xray(rung, *inputs, **options))),
        "lean": {where: asdict(each) for where, each in typed.lean_costs(rung, rung).items()},
        "judged": asdict(judge.own(rung.number, 0)[1]),
        "rest": packed(rung.source),
    }
