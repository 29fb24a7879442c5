"""Writes the tables and pictures of README.md, data/README.md and CONTRIBUTING.md anew, from data/, the code and an X-ray.

With --check it writes nothing, and exits with 1 if something is out of date.
"""

from __future__ import annotations

import argparse

EXAMPLES = ("readme", "readme --check")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; show what would change")


def run(arguments: argparse.Namespace) -> int:
    from .. import pages

    changes = pages.update(check=arguments.check)
    for path, difference in changes.items():
        print(difference if arguments.check else f"wrote {path.relative_to(pages.ROOT)}")
    if not changes:
        print("all pages are up to date")
    return int(arguments.check and bool(changes))
