"""Holds the records of data/ against what each rung is meant to reach; exits with 1 if a goal is missed."""

from __future__ import annotations

import argparse

from .arguments import add_kernels, found

EXAMPLES = ("goals", "goals ping_pong")


def options(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "all rungs and notebook 40's languages by default")


def run(arguments: argparse.Namespace) -> int:
    from ..record.goals import verdicts

    table = verdicts([rung.stem for rung in found(arguments.kernels)] if arguments.kernels else [])
    print(table.to_string(index=False, na_rep=""))
    return int(table["verdict"].eq("missed").any())
