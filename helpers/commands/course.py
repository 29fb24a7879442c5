"""Makes what a course hands out: trees for students and instructors, and slides.

The student tree has no solutions, no answers to self-checks and no outputs; exercises have nbgrader's metadata. The instructor tree is
solved. What is in it may be handed out as it is, or in part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import command, known_names

EXAMPLES = (
    "course build build/course",
    "course build build/week3 --blank 04.1 04.3",
    "course nbgrader build/nbgrader 02_online_softmax",
    "course slides build/slides",
    "course syllabus",
)


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    build = command(commands, "build", "Writes OUT/student and OUT/instructor.", _build, EXAMPLES[:2])
    build.usage = "%(prog)s OUT [--blank TASK [TASK ...]]"  # behind --blank it would be a task
    build.add_argument("out", type=Path, metavar="OUT", help="a folder that has neither yet")
    build.add_argument(
        "--blank",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks, like 04.1, whose regions the student's kernels lack",
    )
    nbgrader = command(commands, "nbgrader", "Writes a course folder for nbgrader.", _nbgrader, EXAMPLES[2:3])
    nbgrader.add_argument("out", type=Path, metavar="OUT")
    nbgrader.add_argument("stems", nargs="*", metavar="STEM", help="notebooks, an assignment each; all by default")
    slides = command(
        commands, "slides", "Makes the lectures' slides; reveal.js comes with npm.", _slides, EXAMPLES[3:4]
    )
    slides.add_argument("out", type=Path, metavar="OUT")

    command(commands, "syllabus", "Writes course/syllabus.md's tables anew.", _syllabus, EXAMPLES[4:])


def _syllabus(arguments: argparse.Namespace) -> int:
    from ..lessons.course import syllabus

    syllabus.PAGE.write_text(syllabus.renewed(syllabus.PAGE.read_text()))
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from ..lessons.course import trees
    from ..lessons.tasks.catalogue import task

    with known_names():
        for id in arguments.blank:
            task(id)
    print(trees.build(arguments.out.resolve(), arguments.blank))
    return 0


def _nbgrader(arguments: argparse.Namespace) -> int:
    from ..lessons.course import nbgrader

    for assignment in nbgrader.write(arguments.out.resolve(), arguments.stems):
        print(assignment)
    return 0


def _slides(arguments: argparse.Namespace) -> int:
    from ..lessons.course import slides

    for page in slides.build(arguments.out.resolve()):
        print(page)
    return 0
