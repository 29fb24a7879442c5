"""Grades submissions: `.cu` forms, notebooks with %%region cells, files of detective cases, or folders of them.

Answers are taken as text, compiled and run in a sandbox (Linux: Landlock, seccomp) on the emulator, with inputs drawn from the seed and
several orders of threads. Points by criterion, the same for the same seed. Exits with 1 if a submission lacks points.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..ladder.errors import ToolkitError
from .arguments import positive

EXAMPLES = (
    "grade work/04_online_update.cu",
    "grade submissions/* --tasks 04.1 04.2 --seed 7 --json",
    "grade my.ipynb --gradescope results.json",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SUBMISSION [SUBMISSION ...] [options]"  # behind --tasks they would be tasks
    parser.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a .cu, a notebook, or a folder"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the inputs (default: 0); keep it to yourself")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="what counts, like 04.1 or case.5; default: what is answered",
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="submissions at a time (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object per submission, a line each")
    parser.add_argument(
        "--gradescope", type=Path, metavar="FILE", help="write the (last) submission's results.json to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..lessons.cases import CASES
    from ..lessons.grading.assignments import assignment
    from ..lessons.grading.grade import Grade, grade, refusal

    if reason := refusal():
        raise RuntimeError(reason)
    if (to := arguments.gradescope) and (to.is_dir() or not to.parent.is_dir()):
        raise ValueError(
            f"--gradescope {to}: " + ("it is a folder" if to.is_dir() else f"there is no folder {to.parent}")
        )
    for id in arguments.tasks:
        try:
            assignment(id)
        except KeyError as error:
            cases = "" if id.startswith("case.") else f", and case.1 to case.{len(CASES)}"
            raise ValueError(f"{error.args[0]}{cases}") from None

    def graded(path: Path) -> Grade | Exception:
        try:
            return grade(path, arguments.seed, arguments.tasks)
        except Exception as error:  # whatever one of them holds, the others get their points
            return error

    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)  # not in the report, which students may get
    full, results = True, {}
    with ThreadPoolExecutor(arguments.jobs) as pool:  # each waits for a process of its own
        for path, found in zip(arguments.submissions, pool.map(graded, arguments.submissions), strict=True):
            if isinstance(found, Exception):
                told = isinstance(found, (ValueError, ToolkitError, OSError))  # a sentence for whoever handed it in
                full, why = False, f"{path} is not graded: {'' if told else f'{type(found).__name__}: '}{found}"
                results = {"score": 0, "output": why, "tests": []}
                print(why, file=sys.stderr, flush=True)
                if arguments.json:
                    nothing = Grade(str(path), arguments.seed, ()).as_json() | {"error": why}
                    print(json.dumps(nothing, ensure_ascii=False), flush=True)
                continue
            results, full = found.as_gradescope(), full and found.points == found.most
            print(json.dumps(found.as_json(), ensure_ascii=False) if arguments.json else found, flush=True)
    if arguments.gradescope:
        arguments.gradescope.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0 if full else 1
