"""Assignments for nbgrader: notebooks without solutions, whose check cells end in a hidden test that raises unless solved.

nbgrader executes what students wrote as it is, on the instructor's account: run it in a container. Kernels are graded in a sandbox by
`python -m helpers grade`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import nbformat

from ..execute import chosen
from .exercises import exercises, unsolved

CONFIG = '''\
"""nbgrader's configuration for this course: start cells are handed out as they are, and a notebook has ten minutes a cell."""

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "flashattention"
c.GenerateAssignment.preprocessors = [
    "nbgrader.preprocessors." + name
    for name in (
        "IncludeHeaderFooter", "LockCells", "ClearOutput", "CheckCellMetadata", "ComputeChecksums", "SaveCells",
        "ClearHiddenTests", "ComputeChecksums", "CheckCellMetadata",
    )
]
c.Execute.timeout = 600
'''
HIDDEN = "### BEGIN HIDDEN TESTS\nassert verdict\n### END HIDDEN TESTS"


def write(folder: Path, stems: Sequence[str] = ()) -> list[Path]:
    """Writes nbgrader_config.py and source/STEM/STEM.ipynb for each notebook with exercises, all by default, and gives their paths.

    Checks that are no `exercise.verify(…)` at the end of a cell are left to `python -m helpers grade`. ValueError for a notebook that is
    not there, or has no exercise.
    """
    paths = chosen(stems)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nbgrader_config.py").write_text(CONFIG)
    made = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        if not exercises(notebook):
            if stems:
                raise ValueError(f"{path.stem} has no exercise to grade")
            continue
        there = folder / "source" / path.stem / path.name
        there.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(source(notebook), there)
        made.append(there)
    return made


def source(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as nbgrader's `source/` has it."""
    made = gradable(unsolved(notebook))
    for each in exercises(made).values():
        if each.check is not None:
            cell = made.cells[each.check]
            cell.source = f"{_kept(cell.source)}\n{HIDDEN}"
    return made


def _kept(code: str) -> str:
    """The code with its last expression bound to `verdict`."""
    last = ast.parse(code).body[-1]
    if not isinstance(last, ast.Expr):
        return code
    lines = code.splitlines()
    lines[last.lineno - 1] = f"verdict = {lines[last.lineno - 1]}"
    return "\n".join(lines)


def gradable(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with nbgrader's metadata (schema 3): start cells are manual solutions without points, check cells graded tests."""
    for number, each in exercises(notebook).items():
        name = number.replace(".", "-").replace(" ", "-")
        if each.start is not None:
            notebook.cells[each.start].metadata["nbgrader"] = _cell(f"exercise-{name}", solution=True)
        if each.check is not None:
            cell = notebook.cells[each.check]
            cell.metadata["nbgrader"] = _cell(f"check-{name}", grade=True, locked=True) | {"points": 10}
    return notebook


def _cell(id: str, grade: bool = False, locked: bool = False, solution: bool = False) -> dict:
    return {
        "schema_version": 3,
        "grade_id": id,
        "grade": grade,
        "locked": locked,
        "solution": solution,
        "task": False,
        "cell_type": "code",
    }
