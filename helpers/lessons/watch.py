"""Which files of the checkout a notebook reads when it is executed: modules, kernels, records."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import nbformat

from ..ladder.paths import ROOT

PARTS = ("helpers", "kernels", "data", "notebooks")  # of the checkout

# In the notebook's own process. An import opens the compiled file, so modules are asked for their source at the end.
WATCH = """import sys as _sys
_opened = set()
def _watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        _opened.add(arguments[0])
    elif event == "subprocess.Popen" and "helpers" in str(arguments[1]):
        _opened.add("helpers")  # a program of ours, which may read any of it
_sys.addaudithook(_watch)"""
TELL = f"""import json as _json, os as _os
_files = [vars(m).get("__file__") for m in list(_sys.modules.values()) if hasattr(m, "__dict__")]
_paths = {{_os.path.abspath(f) for f in [*_opened, *_files] if isinstance(f, str) and f != "helpers"}}
_json.dumps([sorted(p for p in _paths if p.startswith({str(ROOT)!r})), "helpers" in _opened])"""


def begin(notebook: nbformat.NotebookNode) -> None:
    """Puts a cell before the others and one behind them that say what was read between."""
    notebook.cells = [nbformat.v4.new_code_cell(WATCH), *notebook.cells, nbformat.v4.new_code_cell(TELL)]


def end(notebook: nbformat.NotebookNode) -> list[str]:
    """Takes the two cells out again and returns the files, relative to the checkout; none if the notebook has not come to its end."""
    outputs = notebook.cells.pop().outputs
    notebook.cells.pop(0)
    if not outputs:
        return []
    found, all_of_ours = json.loads(ast.literal_eval(outputs[0].data["text/plain"]))
    paths = [*map(Path, found), *((ROOT / "helpers").rglob("*.py") if all_of_ours else [])]
    inside = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT) and path.is_file()}
    return sorted(str(p) for p in inside if p.parts[0] in PARTS and "__pycache__" not in p.parts)


def records(reads: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Of the files in data/ among `reads` a digest each; "gone" for one that is not there."""
    paths = {path: root / path for path in reads if path.startswith("data/")}
    return {
        path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "gone"
        for path, file in paths.items()
    }
