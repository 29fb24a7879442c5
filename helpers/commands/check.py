"""Checks a kernel against float64 on adversarial cases; exits with 1 if it is wrong.

The error rule: a kernel may err twice as much as plain PyTorch at the same precision, plus unavoidable rounding. Without a GPU
the kernel runs on the emulator, on the small cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .arguments import add_device, add_header, add_kernel, described, loaded, progress, require_one_rank

if TYPE_CHECKING:
    from ..run.reference import Case

EXAMPLES = ("check 04", "check mine.cu --dtype fp16", "check ping_pong --device cpu --cases small")


def options(parser: argparse.ArgumentParser) -> None:
    add_kernel(parser)
    add_device(parser)
    cases = "default: full on a GPU, small on the emulator; a merge has one set of cases"
    parser.add_argument("--cases", choices=("small", "full"), help=cases)
    add_header(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..run import reference
    from ..run.check import check

    rung = described(arguments)
    require_one_rank(rung)
    merges = rung.op == "merge"  # its cases are the same everywhere
    if merges and arguments.cases:
        raise ValueError(f"--cases {arguments.cases}: {rung.stem} has one set of cases")
    kernel = loaded(rung, arguments.device)
    size = arguments.cases or ("full" if kernel.device == "cuda" else "small")
    report = check(kernel, None if merges else _shown(reference.cases(kernel.rung, kernel.device, size)))
    print(report)
    return 0 if report.ok else 1


def _shown(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, each announced."""
    for number, case in enumerate(cases, 1):
        progress(f"case {number}: {case.name}")
        yield case
    progress("")
