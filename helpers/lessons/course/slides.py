"""Slides of the lectures: course/slides/*.md with the notebooks' own figures, made into reveal.js by nbconvert, to be shown offline.

Slides are parted by lines `---`. `{{ figure 04_fa2_fp32 draw.tile_walk }}` is the figure that the first cell with this text in its source
saved in that notebook, with its words as alternative text. What follows a line `Notes:` is for the speaker (key s). Numbers are the records', as in notebooks (numbers.py).
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import nbformat

from ...ladder.paths import NOTEBOOKS, ROOT
from ..book import COMMENT, figure_words
from ..numbers import renewed

SOURCES = ROOT / "course" / "slides"
REVEAL = "reveal.js@5.2.1"
FIGURE = re.compile(r"\{\{ figure (?P<stem>\w+) (?P<what>.+?) \}\}")


def lectures() -> list[Path]:
    """The sources, in order."""
    return sorted(SOURCES.glob("[0-9]_*.md"))


def build(folder: Path) -> list[Path]:
    """Makes a page for each lecture in `folder`, beside a copy of reveal.js, and gives the pages.

    RuntimeError where npm, which fetches reveal.js, is missing or fails.
    """
    from nbconvert import SlidesExporter

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "reveal.js").is_dir():
        _fetch(folder)
    exporter = SlidesExporter(
        template_name="template",
        extra_template_basedirs=[str(SOURCES)],
        reveal_url_prefix="reveal.js",
        reveal_theme="white",
        reveal_width="1280",
        reveal_height="720",
        exclude_input_prompt=True,
    )
    pages = []
    for path in lectures():
        made = notebook(path.read_text())
        page, _ = exporter.from_notebook_node(made, {"metadata": {"name": made.metadata.title}})
        pages.append(folder / f"{path.stem}.html")
        pages[-1].write_text(page)
    return pages


def notebook(text: str) -> nbformat.NotebookNode:
    """A lecture as a notebook of slides. LookupError names a figure that isn't there."""
    cells = []
    for slide in re.split(r"^---$", renewed(text), flags=re.MULTILINE):
        shown, _, notes = slide.partition("\nNotes:\n")
        cells.append(_cell(FIGURE.sub(lambda found: figure(found["stem"], found["what"]), shown), "slide"))
        if notes.strip():
            cells.append(_cell(notes, "notes"))
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": title[1] if title else "Slides"})


def _cell(text: str, kind: str) -> nbformat.NotebookNode:
    text = COMMENT.sub("", text).strip()
    return nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": kind}})


@cache
def _saved(stem: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)


def figure(stem: str, what: str) -> str:
    """A saved figure as HTML. LookupError where no cell with `what` in its source has saved a figure, or it has no words."""
    for cell in _saved(stem).cells:
        if cell.cell_type != "code" or what not in cell.source:
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                if not (words := figure_words(output, "image/png")):
                    raise LookupError(f"the figure of {what!r} in {stem} has no words")
                raw = "".join(data["image/png"].split())
                image = f'<img src="data:image/png;base64,{raw}" alt="{html.escape(words)}">'
                return f'<div class="figure">{image}</div>'
    raise LookupError(f"{stem} has no saved figure of a cell with {what!r} in it")


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm is needed to fetch {REVEAL} (Debian, Ubuntu: apt install npm)")
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--no-save", "--prefix", str(folder), REVEAL],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"npm could not fetch {REVEAL}:\n{done.stderr.strip()}")
    package = folder / "node_modules" / "reveal.js"
    for part in ("dist", "plugin"):
        shutil.copytree(package / part, folder / "reveal.js" / part)
    shutil.copy(package / "LICENSE", folder / "reveal.js")
    shutil.rmtree(folder / "node_modules")
