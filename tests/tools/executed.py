"""Which notebooks have to be executed: those of which a file that they read has changed since they last were.

A record, executed/<stem>.txt beside the notebooks' tests, has the digest of all that a notebook read, the digest of its own
part of that (its cells and its kernels), and the paths, relative to the checkout. `make executed` writes it. Where a notebook's
own part has changed, it is executed. Where only helpers or data have, which many notebooks read, MOST of those are; and SHARE of
the unchanged: drawn by a seed.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat

from helpers.ladder.paths import ROOT
from helpers.lessons.pairs import FIRST_CELL

RECORDS = ROOT / "tests" / "lessons" / "executed"
PARTS = ("helpers", "kernels", "data", "notebooks")  # of the checkout: what notebooks read
ALWAYS = ("pyproject.toml", "helpers/lessons/execute.py")  # read, or obeyed, by whoever executes them
SHARE = 1  # of what has not changed, so many run each time
MOST = 4  # of those that read something changed which is not their own

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


def watched(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook, with a cell before the others and one behind them that say what was read between."""
    cells = [nbformat.v4.new_code_cell(WATCH), *notebook.cells, nbformat.v4.new_code_cell(TELL)]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def told(executed: nbformat.NotebookNode) -> list[str]:
    """The files of the checkout that an executed `watched` notebook has read; takes the two cells out of it."""
    (output,) = executed.cells.pop().outputs
    executed.cells.pop(0)
    found, all_of_ours = json.loads(ast.literal_eval(output.data["text/plain"]))
    paths = [*map(Path, found), *((ROOT / "helpers").rglob("*.py") if all_of_ours else [])]
    inside = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT) and path.is_file()}
    return sorted(str(p) for p in inside if p.parts[0] in PARTS and "__pycache__" not in p.parts)


def _cells(notebook: nbformat.NotebookNode):
    """A digest to go on with: of all cells but the first, which is the same everywhere and does nothing here."""
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells if cell.source != FIRST_CELL]
    return hashlib.sha256(repr(cells).encode())


def digest(notebook: nbformat.NotebookNode, reads: list[str], root: Path = ROOT) -> str:
    """Of the notebook's cells, of every file among `reads`, and of the names of all kernels and records, which are looked for."""
    total = _cells(notebook)
    for path in sorted({*reads, *ALWAYS}):
        text = (root / path).read_bytes() if (root / path).is_file() else b"gone"
        total.update(f"\n{path} {hashlib.sha256(text).hexdigest()}".encode())
    names = [
        p.relative_to(root) for part in ("kernels", "data") for p in sorted((root / part).rglob("*")) if p.is_file()
    ]
    total.update("\n".join(map(str, names)).encode())
    return total.hexdigest()[:16]


def own_digest(notebook: nbformat.NotebookNode, reads: list[str], root: Path = ROOT) -> str:
    """Of the notebook's cells, and of the kernels and headers among `reads`."""
    total = _cells(notebook)
    for path in sorted(path for path in reads if path.startswith("kernels/")):
        total.update((root / path).read_bytes() if (root / path).is_file() else b"gone")
    return total.hexdigest()[:16]


def changed(stem: str, notebook: nbformat.NotebookNode, root: Path = ROOT, records: Path = RECORDS) -> str:
    """What is different since the notebook's recorded execution: "" (nothing that it read), "others" or "own"."""
    record = records / f"{stem}.txt"
    if not record.is_file():
        return "own"
    was, own, *reads = record.read_text().splitlines()
    if was == digest(notebook, reads, root):
        return ""
    return "others" if own == own_digest(notebook, reads, root) else "own"


def chosen(states: Mapping[str, str], seed: str) -> set[str]:
    """The notebooks to execute, of all by what has changed in each."""
    of = {state: [stem for stem, what in states.items() if what == state] for state in ("", "others", "own")}
    return {*of["own"], *drawn(of["others"], seed, MOST), *drawn(of[""], seed)}


def keep(stem: str, notebook: nbformat.NotebookNode, reads: list[str], records: Path = RECORDS) -> None:
    """Records a successful execution of `notebook`, which read `reads`."""
    records.mkdir(exist_ok=True)
    lines = [digest(notebook, reads), own_digest(notebook, reads), *reads, ""]
    (records / f"{stem}.txt").write_text("\n".join(lines))


def drawn(names: Iterable[str], seed: str, share: int = SHARE) -> list[str]:
    """So many of the names as `share` says: the same for the same seed, others for another."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:share]
