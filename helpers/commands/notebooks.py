"""Executes notebooks on this machine; exits with 1 if one fails.

Executed copies and HTML go to build/notebooks/. --from-text and --to-text execute nothing: they write notebooks/src/STEM.py into
the notebook, where unchanged cells keep their outputs, or the notebook's cells into the text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = (
    "notebooks",
    "notebooks 03_fa1_fp32 04_fa2_fp32",
    "notebooks 92_xray_against_hardware --inplace",
    "notebooks 04_fa2_fp32 --from-text",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stems", nargs="*", metavar="STEM", help="notebooks, like 03_fa1_fp32 or 03; all by default")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--from-text", action="store_true", help="write the text's cells into the notebook instead")
    instead.add_argument("--to-text", action="store_true", help="write the notebook's cells into its text instead")
    parser.add_argument("--inplace", action="store_true", help="keep the outputs in notebooks/ as well")


def run(arguments: argparse.Namespace) -> int:
    from ..lessons.execute import chosen, execute_all

    for path in chosen(arguments.stems):
        _require_notebook(path)
    if arguments.from_text or arguments.to_text:
        from ..lessons import pairs

        for stem in (path.stem for path in chosen(arguments.stems)):
            if arguments.to_text:
                pairs.to_text(stem)
            else:
                print(f"{stem}: {pairs.to_notebook(stem)} new cells")
        return 0
    return 0 if execute_all(arguments.stems, arguments.inplace) else 1


def _require_notebook(path: Path) -> None:
    from ..ladder.paths import from_root

    text = path.read_text()
    try:
        json.loads(text)
    except ValueError as error:
        why = str(error) if text.strip() else "it is empty"
        raise ValueError(f"{from_root(path)} is no notebook: {why}") from None
