"""One assignment made, handed in and graded by the real nbgrader: `python tests/release/nbgrader_course.py [STEM]`.

It installs nbgrader into an environment of its own (pip, some minutes), makes the course folder of `python -m helpers course nbgrader`, has
nbgrader make the students' version, hands in three answers (all solved, nothing done, one exercise solved), and has nbgrader grade them
with this environment's kernel. It fails if the solved one doesn't get all points, or the empty one any. NBGRADER names an
nbgrader that is there already.

What it prints:

    nbgrader version 0.9.6
    all: 20 of 20
    nothing: 0 of 20
    one: 10 of 20
    as it should be
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from helpers.ladder.paths import NOTEBOOKS, ROOT
from helpers.lessons.course import nbgrader
from helpers.lessons.course.exercises import exercises

PINNED = "nbgrader==0.9.6"
POINTS = """
import sys
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    for s in sorted(book.assignment_submissions(sys.argv[1]), key=lambda s: s.student.id):
        print(f"{s.student.id}: {s.score:g} of {s.max_score:g}")
"""


def main(stem: str = "02_online_softmax") -> int:
    folder = Path(tempfile.mkdtemp(prefix="nbgrader-"))
    try:
        return graded(folder, stem)
    finally:
        shutil.rmtree(folder)


def graded(folder: Path, stem: str) -> int:
    course = folder / "course"
    program = os.environ.get("NBGRADER") or installed(folder)
    nbgrader.write(course, [stem])
    environment = kernel(folder)
    environment["PATH"] = f"{Path(program).parent}:{os.environ['PATH']}"  # it calls alembic by name

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    print(run(program, "--version").splitlines()[-1])
    run(program, "generate_assignment", stem)
    release = nbformat.read(course / "release" / stem / f"{stem}.ipynb", as_version=4)
    text = json.dumps(release)
    assert "HIDDEN TESTS" not in text and "assert verdict" not in text and "<summary>Solution" not in text
    numbers = [number for number, each in exercises(release).items() if each.check is not None]
    students = {"all": numbers, "nothing": [], "one": numbers[:1]}
    for student, solved in students.items():
        there = course / "submitted" / student / stem / f"{stem}.ipynb"
        there.parent.mkdir(parents=True)
        nbformat.write(answered(release, stem, solved), there)
    run(program, "autograde", stem)
    reports = run(str(Path(program).with_name("python")), "-c", POINTS, stem)
    print(reports.strip())
    points = {line.partition(":")[0]: line.partition(": ")[2] for line in reports.splitlines() if " of " in line}
    most = 10 * len(numbers)
    wanted = {"all": f"{most} of {most}", "nothing": f"0 of {most}", "one": f"10 of {most}"}
    print("as it should be" if points == wanted else f"it should be {wanted}")
    return int(points != wanted)


def answered(release: nbformat.NotebookNode, stem: str, solved: list[str]) -> nbformat.NotebookNode:
    """The students' version with these exercises solved."""
    whole, made = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4), nbformat.from_dict(release)
    known = exercises(whole)
    made = nbformat.reads(nbformat.writes(made), as_version=4)
    for number, each in exercises(made).items():
        if number in solved:
            made.cells[each.start].source = known[number].solution(whole)
    return made


def installed(folder: Path) -> str:
    """nbgrader in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    subprocess.run([str(folder / "venv/bin/pip"), "install", "--quiet", PINNED], check=True)
    return str(folder / "venv/bin/nbgrader")


def kernel(folder: Path) -> dict[str, str]:
    """An environment in which the kernel `python3` is this Python, which has the series."""
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "series", "language": "python"}))
    return {**os.environ, "JUPYTER_PATH": str(folder / "jupyter"), "PYTHONPATH": str(ROOT), "FA_PROGRESS": ""}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
