"""The pair of a notebook and its text: notebooks/src/NN_name.py holds the cells, for review; outputs stay in the .ipynb.

A cell starts at a line `# %%`, a Markdown cell at `# %% [markdown]`; `tags=["…"]` may follow. Lines of Markdown, IPython magics
(`%load_ext`, `!ls`) and whole `%%magic` cells stand in comments, so that the file is a Python file. What a cell tagged "reveal"
shows is the answer to a prediction: it is saved collapsed, and JupyterLab opens it by a click.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat

from ..ladder.paths import NOTEBOOKS
from .links import linked
from .numbers import renewed

HEADER = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""

# The first code cell of every notebook, the same in each. Where the package is installed it does nothing.
FIRST_CELL = """\
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()"""

_CELL = re.compile(r"# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?")
_COMMENT = re.compile(r"^# ?", re.MULTILINE)
_MAGIC = re.compile(r"^(?=[%!])", re.MULTILINE)
_MAGIC_IN_COMMENT = re.compile(r"^# (?=[%!])", re.MULTILINE)


def cells(text: str) -> list[nbformat.NotebookNode]:
    """The cells of a text, code without outputs. ValueError, with its line, for code before the first cell."""
    found: list[tuple[re.Match, list[str]]] = []
    for number, line in enumerate(text.removeprefix(HEADER).splitlines(), 1):
        if start := _CELL.fullmatch(line):
            found.append((start, []))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"line {number} after the header stands before the first `# %%`: {line!r}")
    return [_cell(start, "\n".join(lines).strip("\n")) for start, lines in found]


def _cell(start: re.Match, source: str) -> nbformat.NotebookNode:
    if start["markdown"]:
        cell = nbformat.v4.new_markdown_cell(_COMMENT.sub("", source))
    elif source.startswith("# %%"):
        cell = nbformat.v4.new_code_cell(_COMMENT.sub("", source))
    else:
        cell = nbformat.v4.new_code_cell(_MAGIC_IN_COMMENT.sub("", source))
    if start["tags"]:
        cell.metadata["tags"] = json.loads(start["tags"])
        if "reveal" in cell.metadata["tags"]:
            cell.metadata["jupyter"] = {"outputs_hidden": True}
    return cell


def text_of(notebook: nbformat.NotebookNode) -> str:
    """The text of a notebook: what `cells` reads back."""
    parts = []
    for cell in notebook.cells:
        markdown = cell.cell_type == "markdown"
        tags = f" tags={json.dumps(cell.metadata['tags'])}" if cell.metadata.get("tags") else ""
        if markdown or cell.source.startswith("%%"):
            lines = [f"# {line}".rstrip() for line in cell.source.splitlines()]
        else:
            lines = _MAGIC.sub("# ", cell.source).splitlines()
        parts.append("\n".join([f"# %%{' [markdown]' if markdown else ''}{tags}", *lines]))
    return f"{HEADER}\n{(chr(10) * 2).join(parts)}\n"


def to_notebook(stem: str, folder: Path = NOTEBOOKS) -> int:
    """Writes src/<stem>.py, with its links (links.py) and its numbers as the records give them (numbers.py), into <stem>.ipynb and
    returns how many cells are new; the others keep their outputs."""
    path, text = folder / f"{stem}.ipynb", folder / "src" / f"{stem}.py"
    text.write_text(linked(renewed(text.read_text()), stem, folder))
    notebook = nbformat.read(path, as_version=4)
    old: dict[tuple[str, str], list[nbformat.NotebookNode]] = {}
    for cell in reversed(notebook.cells):
        old.setdefault((cell.cell_type, cell.source), []).append(cell)
    new = cells(text.read_text())
    kept = [same.pop() if (same := old.get((cell.cell_type, cell.source))) else None for cell in new]
    for before, cell in zip(kept, new, strict=True):
        if before:
            before.metadata = cell.metadata
    notebook.cells = [before or cell for before, cell in zip(kept, new, strict=True)]
    nbformat.write(notebook, path)
    return kept.count(None)


def to_text(stem: str, folder: Path = NOTEBOOKS) -> None:
    """Writes the cells of <stem>.ipynb into src/<stem>.py, unless it has the same. `ruff format` then sets its blank lines."""
    notebook, text = nbformat.read(folder / f"{stem}.ipynb", as_version=4), folder / "src" / f"{stem}.py"
    if not text.exists() or _told(cells(text.read_text())) != _told(notebook.cells):
        text.write_text(text_of(notebook))


def _told(notebook_cells: list[nbformat.NotebookNode]) -> list[tuple]:
    """What a text says of cells."""
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook_cells]
