"""The series as a book: pages for Sphinx, made from the executed notebooks, the kernels, the glossary and data/README.md.

`stage` writes them into a folder, laid out as the checkout is, so that the links between them stay as they are; `build` has Sphinx
make a static site of it, which opens from the file system and asks nothing of any other host.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat

from ..ladder.paths import INCLUDE, KERNELS, NOTEBOOKS, ROOT
from .pairs import FIRST_CELL

SOURCES = ROOT / "docs" / "book"
CHAPTERS = {  # by the decade of a notebook's number
    0: "From the definition to FlashAttention-2, in fp32",
    1: "Tensor cores",
    2: "Masks, decoding, gradients and a model",
    3: "Hopper",
    4: "Other languages",
    5: "Several GPUs",
    9: "Proofs, bugs and the whole ladder",
}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
TARGET = re.compile(r'<a id="[^"]*"></a>')  # JupyterLab's; the book's headings have targets of their own
FENCE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
REGION = re.compile(r"// \[region: (\w+)\]")
MIMES = {"image/png": "png", "image/svg+xml": "svg", "image/jpeg": "jpg"}


def build(folder: Path) -> Path:
    """Makes the book in `folder` and returns its first page. RuntimeError if there is no Sphinx, and with its words if it fails, or
    warns; ValueError if the folder's source/ is not a book's."""
    if not importlib.util.find_spec("sphinx"):
        raise RuntimeError("Sphinx makes the book, and is not installed: `pip install '.[book]'`")
    pages, site = folder / "source", folder / "html"
    stage(pages)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", folder / "doctrees"]
    done = subprocess.run([*map(str, command), str(pages), str(site)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Sphinx could not make the book (pip install '.[book]' brings it):\n{done.stderr.strip()}")
    return site / "index.html"


def stage(folder: Path) -> None:
    """Writes the pages of the book, and Sphinx's configuration, into `folder`, which is emptied before. ValueError if it holds
    anything but a book."""
    if folder.exists() and any(folder.iterdir()) and _opening(folder / "conf.py") != _opening(SOURCES / "conf.py"):
        raise ValueError(f"{folder} is not a book's, and would be emptied: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "_static").mkdir(parents=True)
    shutil.copy(SOURCES / "conf.py", folder)
    shutil.copy(SOURCES / "book.css", folder / "_static")
    shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images")
    stems = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    sources = [*sorted(KERNELS.rglob("*.cu")), *sorted(INCLUDE.rglob("*.cuh"))]
    for path in sources:
        _write(folder / path.relative_to(ROOT).with_suffix(".md"), kernel_page(path, stems))
    _write(folder / "kernels" / "index.md", _kernels(sources))
    known = {str(p.relative_to(ROOT)) for p in sources} | {f"notebooks/{s}.ipynb" for s in stems}
    known |= {"notebooks/glossary.md", "data/README.md", "README.md"}
    for stem in stems:
        notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
        nbformat.write(page(notebook, stem, folder, known), _made(folder / "notebooks" / f"{stem}.ipynb"))
    for name in ("notebooks/glossary.md", "data/README.md"):
        _write(folder / name, markdown((ROOT / name).read_text(), Path(name).parent, known))
    staircase = re.search(r'alt="([^"]*)" src="docs/images/staircase-light', (ROOT / "README.md").read_text())
    index = (SOURCES / "index.md").read_text().replace("STAIRCASE IN WORDS", html.unescape(staircase[1]))
    _write(folder / "index.md", index + contents(stems))


def _opening(file: Path) -> str:
    """A file's first line; "" where there is none."""
    return file.read_text(errors="replace").partition("\n")[0] if file.is_file() else ""


def contents(stems: Iterable[str]) -> str:
    """The table of contents, a chapter for each decade."""
    chapters: dict[str, list[str]] = {}
    for stem in stems:
        chapters.setdefault(CHAPTERS.get(int(stem[0]), f"Notebooks {stem[0]}0 to {stem[0]}9"), []).append(
            f"notebooks/{stem}"
        )
    chapters["To look up"] = ["notebooks/glossary", "kernels/index", "data/README"]
    trees = [
        "\n".join(["```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *pages, "```"])
        for caption, pages in chapters.items()
    ]
    return "\n" + "\n\n".join(trees) + "\n"


# Notebooks


def page(notebook: nbformat.NotebookNode, stem: str, folder: Path, known: set[str]) -> nbformat.NotebookNode:
    """A notebook as the book shows it: without its first cell, which fetches the series; an answer to a prediction folded; figures
    as files with their words as alternative text. known: the pages of the book, as paths in the checkout."""
    kept = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = markdown(cell.source, Path("notebooks"), known)
        elif cell.source == FIRST_CELL:
            continue
        else:
            if "reveal" in cell.metadata.get("tags", []):
                cell.metadata["tags"] = [*cell.metadata["tags"], "hide-output"]
            cell.outputs = [_output(o, f"{stem}-{number}-{n}", folder) for n, o in enumerate(cell.outputs)]
        kept.append(cell)
    notebook.cells = kept
    return notebook


def figure_words(output: nbformat.NotebookNode, mime: str) -> str:
    """A saved figure's alternative text, or its text form; "" where it has none."""
    plain = " ".join(str(output["data"].get("text/plain", "")).split())
    return output.metadata.get(mime, {}).get("alt") or ("" if plain.startswith("<") else plain)


def _output(output: nbformat.NotebookNode, name: str, folder: Path) -> nbformat.NotebookNode:
    """An output; an image becomes a file and an <img> with the text form of the figure as its alternative text."""
    data = output.get("data", {})
    mime = next((m for m in MIMES if m in data), None)
    if mime is None or "text/html" in data:
        data.pop("text/latex", None)
        return output
    path = _made(folder / "_static" / "figures" / f"{name}.{MIMES[mime]}")
    raw = data[mime]
    path.write_bytes(raw.encode() if mime.endswith("xml") else base64.b64decode(raw))
    words, about = figure_words(output, mime), output.metadata.get(mime, {})
    width = f' width="{about["width"]}"' if "width" in about else ""
    file = f"../_static/figures/{path.name}"
    image = f'<img class="figure" loading="lazy" src="{file}"{width} alt="{html.escape(words)}">'
    shown = f'<a href="{file}">{image}</a>'  # by itself it can be enlarged, which a narrow screen needs
    return nbformat.v4.new_output(output.output_type, {"text/html": shown, "text/plain": words}, **_count(output))


def _count(output: nbformat.NotebookNode) -> dict:
    return {"execution_count": output.execution_count} if output.output_type == "execute_result" else {}


# Text


def markdown(text: str, place: Path, known: set[str]) -> str:
    """Markdown as the book has it: without comments, <picture>, JupyterLab's targets and links to files that are not in the book; what
    is folded is Markdown, too, and a solution says so. place: the text's folder in the checkout."""
    parts = FENCE.split(text)  # code, fenced or not, stays as it is
    parts[::2] = [_links(TARGET.sub("", PICTURE.sub("", COMMENT.sub("", part))), place, known) for part in parts[::2]]
    text = "".join(parts)
    text = re.sub(r"<details>\s*<summary>(Solution)", r'<details class="solution"><summary>\1', text)
    text = re.sub(r"[ \t]*</summary>[ \t]*\n*", "</summary>\n\n", text)
    return re.sub(r"\n*[ \t]*</details>[ \t]*\n?", "\n\n</details>\n\n", text).rstrip() + "\n"


def _links(text: str, place: Path, known: set[str]) -> str:
    def new(match: re.Match) -> str:
        target, _, anchor = match["target"].partition("#")
        anchor = anchor.lower()  # JupyterLab's keep the capitals
        if not target:
            return f"[{match['text']}](#{anchor})"
        if re.match(r"\w+:", target):
            return match[0]
        path = (ROOT / place / target).resolve()
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if name not in known:
            return match["text"]
        here = "../" * len(place.parts)
        name = "index.md" if name == "README.md" else re.sub(r"\.cuh?$", ".md", name)
        return f"[{match['text']}]({here}{name}{'#' + anchor if anchor else ''})"

    return LINK.sub(new, text)


# Kernels


def kernel_page(path: Path, stems: Iterable[str]) -> str:
    """A kernel or a header: highlighted, every line with an anchor (#L12), every region too (#region-scores), includes as links."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CudaLexer

    source = path.read_text()
    look = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    lines = highlight(source, CudaLexer(stripnl=False), look).replace('id="L-', 'id="L').replace('name="L-', 'name="L')
    lines = lines.replace('href="#L-', 'href="#L')
    up = "../" * len(path.relative_to(KERNELS).parent.parts)
    into = rf'<a class="include" href="{up}include/\1.html">&lt;\1.cuh&gt;</a>'
    lines = re.sub(r"&lt;(fa/\w+)\.cuh&gt;", into, lines)
    lines = REGION.sub(r'<span id="region-\1">\g<0></span>', lines)
    words = [f"# {path.relative_to(KERNELS)}"]
    if path.stem in stems:
        words.append(f"The kernel of notebook [{path.stem}]({up}../notebooks/{path.stem}.ipynb).")
    regions = REGION.findall(source)
    if regions:
        words.append("Regions: " + ", ".join(f'<a href="#region-{r}">{r}</a>' for r in regions) + ".")
    return "\n\n".join([*words, f'```{{raw}} html\n<div class="kernel">{lines}</div>\n```\n'])


def _kernels(sources: list[Path]) -> str:
    """The list of the kernels with their ideas, then the headers."""
    rows = {path: _about(path) for path in sources}
    items = [
        f"- [{path.relative_to(KERNELS)}]({path.relative_to(KERNELS).with_suffix('.md')}): {about}"
        for path, about in rows.items()
    ]
    names = [str(path.relative_to(KERNELS).with_suffix("")) for path in sources]
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    return "# Kernels\n\n" + "\n".join(items) + f"\n\n{tree}\n"


def _about(path: Path) -> str:
    """What a kernel's first line says, or a header's first sentence."""
    opening = re.match(r"(?://.*\n)+", path.read_text())
    lines = [line.removeprefix("//").strip() for line in opening[0].splitlines()] if opening else [""]
    text = lines[0] if path.suffix == ".cu" else " ".join(lines).split(". ")[0].rstrip(".")
    return re.sub(r"^[\w/.]+: ", "", text)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, text: str) -> None:
    _made(path).write_text(text)
