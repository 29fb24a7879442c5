"""Makes the executed series a static site, build/book/html/index.html, that opens offline.

The notebooks are shown as they were last executed. It needs what `pip install '.[book]'` installs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = ("book", "book --into /tmp/book")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="default: build/book")


def run(arguments: argparse.Namespace) -> int:
    from ..ladder.paths import ROOT
    from ..lessons import book

    print(book.build((arguments.into or ROOT / "build" / "book").resolve()))
    return 0
