"""Says what this machine can run, and how to fix what it can't.

Exits with 1 if a notebook can run neither on a GPU nor on the emulator.
"""

from __future__ import annotations

import argparse

EXAMPLES = ("doctor",)


def options(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(arguments: argparse.Namespace) -> int:
    from ..run.doctor import doctor

    report = doctor()
    print(report)
    return 0 if report.ok else 1
