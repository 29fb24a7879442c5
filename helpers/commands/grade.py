"""Grades submissions: `.cu` forms, notebooks with %%region cells, files of detective cases, or folders of them.

Answers are taken as text, compiled and run in a sandbox (Linux: Landlock, seccomp) on the emulator, with inputs drawn from the seed and
several orders of threads. Points by criterion, the same for the same seed. Exits with 1 if a submission lacks points.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLES = (
    "grade work/04_online_update.cu",
    "grade submissions/* --tasks 04.1 04.2 --seed 7 --json",
    "grade my.ipynb --gradescope results.json",
)


def options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="submissions at a time (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object per submission, a line each")
    parser.add_argument(
        "--gradescope", type=Path, metavar="FILE", help="write the (last) submission's results.json to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..lessons.grading.grade import grade

    full = True
    with ThreadPoolExecutor(arguments.jobs) as pool:  # each waits for a process of its own
        work = [pool.submit(grade, path, arguments.seed, arguments.tasks) for path in arguments.submissions]
        for each in work:
            found = each.result()
            full &= found.points == found.most
            print(json.dumps(found.as_json(), ensure_ascii=False) if arguments.json else found, flush=True)
    if arguments.gradescope:
        arguments.gradescope.write_text(json.dumps(found.as_gradescope(), indent=1, ensure_ascii=False) + "\n")
    return 0 if full else 1
