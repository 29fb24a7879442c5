"""Executes notebooks on this machine; exits with 1 if one fails.

Executed copies and HTML go to build/notebooks/.
"""

from __future__ import annotations

import argparse

EXAMPLES = ("notebooks", "notebooks 03_fa1_fp32 04_fa2_fp32", "notebooks 92_xray_against_hardware --inplace")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stems", nargs="*", metavar="STEM", help="notebooks, like 03_fa1_fp32; all by default")
    parser.add_argument("--inplace", action="store_true", help="keep the outputs in notebooks/ as well")


def run(arguments: argparse.Namespace) -> int:
    from ..lessons.execute import execute_all

    return 0 if execute_all(arguments.stems, arguments.inplace) else 1
