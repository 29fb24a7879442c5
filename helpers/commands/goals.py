"""Holds the records of data/ against what each rung is meant to reach; exits with 1 if a goal is missed."""

from __future__ import annotations

import argparse

from ..ladder.paths import KERNELS
from .arguments import add_kernels, found

EXAMPLES = ("goals", "goals ping_pong")
LANGUAGES = "40_every_language"


def options(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "all rungs and notebook 40's languages by default")


def run(arguments: argparse.Namespace) -> int:
    from ..record.goals import GOALS, verdicts

    stems = [_stem(name) for name in arguments.kernels]
    if without := [stem for stem in stems if stem not in {goal.rung for goal in GOALS}]:
        raise ValueError(f"no goal is set for {', '.join(without)}")
    table = verdicts(stems)
    print(table.to_string(index=False, na_rep=""))
    return int(table["verdict"].eq("missed").any())


def _stem(name: str) -> str:
    """The stem that a rung's goals have, or those of notebook 40. ValueError for a kernel that has no records."""
    if name in (LANGUAGES[:2], LANGUAGES):
        return LANGUAGES
    (rung,) = found([name])
    if rung.file is None or rung.file.parent != KERNELS:
        raise ValueError(f"{rung.path} is no rung: goals are held against records, and it has none")
    return rung.stem
