"""Which notebooks have to be executed: those of which a file that they read has changed since they last were.

A record, executed/<stem>.txt beside the notebooks' tests, has the digest of all that a notebook read, the digest of its own
part of that (its cells and its kernels), and the paths, relative to the checkout. `make executed` writes it. Where a notebook's
own part has changed, it is executed. Where only helpers or data have, which many notebooks read, MOST of those are; and SHARE of
the unchanged: drawn by a seed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat

from helpers.ladder.paths import ROOT
from helpers.lessons.course.exercises import exercises
from helpers.lessons.pairs import FIRST_CELL

RECORDS = ROOT / "tests" / "lessons" / "executed"
ALWAYS = (
    "pyproject.toml",
    "helpers/lessons/execute.py",
    "helpers/lessons/watch.py",
)  # read, or obeyed, by whoever executes them
SHARE = 1  # of what has not changed, so many run each time
MOST = 1  # of those that read something changed which is not their own


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
        p.relative_to(root)
        for part in ("kernels", "data")
        for p in sorted((root / part).rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
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


def verdicts(notebook: nbformat.NotebookNode) -> dict[str, list[str]]:
    """What an executed notebook says of each exercise: "solved" or "not solved yet", once for every time that it was judged."""
    said: dict[str, list[str]] = {}
    for number, each in exercises(notebook).items():
        cells = [notebook.cells[n] for n in (each.start, each.check) if n is not None]
        words = "\n".join(str(o.get("text", "")) for cell in cells for o in cell.get("outputs", []))
        said[number] = re.findall(rf"^Exercise {re.escape(number)}: (solved|not solved yet)", words, re.MULTILINE)
        if each.check is None:
            said[number] = ["solved" if re.search(r"^Task [\d.]+: solved", words, re.MULTILINE) else "not solved yet"]
    return said
