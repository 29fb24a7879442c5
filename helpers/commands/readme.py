"""Rewrites the README's ladder table from data/; with --check, exits with 1 if it is out of date."""

from __future__ import annotations

import argparse

EXAMPLES = ("readme", "readme --check")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; show what would change")


def run(arguments: argparse.Namespace) -> int:
    from ..record import readme

    changes = readme.update(check=arguments.check)
    print(changes or "README.md is up to date")
    return int(arguments.check and bool(changes))
