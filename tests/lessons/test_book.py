"""The book's pages, before Sphinx makes a site of them (tests/release/book_site.py looks at that)."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest

from helpers.ladder.paths import INCLUDE, KERNELS, NOTEBOOKS, ROOT
from helpers.lessons import book
from helpers.lessons.pairs import FIRST_CELL

KNOWN = {"kernels/04_fa2_fp32.cu", "notebooks/02_online_softmax.ipynb", "notebooks/glossary.md"}
PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](02_online_softmax.ipynb)", "[a](../notebooks/02_online_softmax.ipynb)"),
        ("[a](glossary.md#warp)", "[a](../notebooks/glossary.md#warp)"),
        ("[a](../kernels/04_fa2_fp32.cu)", "[a](../kernels/04_fa2_fp32.md)"),
        ("[a](../helpers/__init__.py)", "a"),  # not in the book
        ("[a](https://arxiv.org/abs/1805.02867#x)", "[a](https://arxiv.org/abs/1805.02867#x)"),
        ("[a](#What-was-tried)", "[a](#what-was-tried)"),
        ("`[a](#B)` and 1.24<!--= ratio('13') -->.", "`[a](#B)` and 1.24."),
        ('<a id="b"></a>\n\n### B', "\n\n### B"),  # or the anchor were there twice
        ("```\n[a](#B)<!-- c -->\n```", "```\n[a](#B)<!-- c -->\n```"),
    ],
)
def test_links_lead_to_pages_of_the_book(written, shown):
    assert book.markdown(written, Path("notebooks"), KNOWN) == shown + "\n"


def test_what_is_folded_is_markdown_and_a_solution_says_so():
    text = "<details><summary>Solution</summary>\n\n$x$\n</details>\n<details><summary>Why?</summary>\n$y$\n</details>"
    shown = book.markdown(text, Path("notebooks"), KNOWN)
    assert '<details class="solution"><summary>Solution</summary>\n\n$x$\n\n</details>\n\n' in shown
    assert "<details><summary>Why?</summary>\n\n$y$\n\n</details>" in shown


def test_a_figure_is_a_file_with_its_words_and_an_answer_is_folded(tmp_path):
    make = nbformat.v4
    figure = make.new_output("display_data", {"image/png": PNG, "text/plain": 'a "right" kernel'}, metadata={})
    bare = make.new_output("display_data", {"image/png": PNG, "text/plain": "<Figure size 1 x 1>"}, metadata={})
    answer = make.new_code_cell("predict(x, 4, 'wavefronts')", outputs=[figure, bare], metadata={"tags": ["reveal"]})
    notebook = make.new_notebook(cells=[make.new_code_cell(FIRST_CELL), answer])
    (cell,) = book.page(notebook, "77", tmp_path, KNOWN).cells  # the first cell fetches the series, which a page can't
    assert "hide-output" in cell.metadata["tags"]
    first, second = (output["data"]["text/html"] for output in cell.outputs)
    assert 'alt="a &quot;right&quot; kernel"' in first and 'alt=""' in second
    name = re.search(r'src="\.\./(_static/figures/[^"]+)"', first)[1]
    assert (tmp_path / name).read_bytes() == b"\x89PNG"
    assert first.startswith(f'<a href="../{name}"><img '), "by itself it can be enlarged"


def test_every_line_and_region_of_a_kernel_has_an_anchor():
    path = KERNELS / "04_fa2_fp32.cu"
    shown = book.kernel_page(path, ["04_fa2_fp32"])
    for number in range(1, len(path.read_text().splitlines()) + 1):
        assert f'id="L{number}"' in shown
    regions = re.findall(r"\[region: (\w+)\]", path.read_text())
    assert len(regions) > 5
    for region in regions:
        assert shown.count(f'id="region-{region}"') == 1 and f'href="#region-{region}"' in shown
    assert 'href="include/fa/args.html"' in shown and "../notebooks/04_fa2_fp32.ipynb" in shown
    assert 'href="../../include/fa/sm80.html"' in book.kernel_page(INCLUDE / "fa" / "rows32.cuh", [])


def test_the_pages_hold_the_whole_series(tmp_path):
    book.stage(tmp_path)
    index = (tmp_path / "index.md").read_text()
    for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"):
        assert (tmp_path / "notebooks" / path.name).exists() and f"\nnotebooks/{path.stem}\n" in index
    for path in KERNELS.rglob("*.cu*"):
        assert (tmp_path / path.relative_to(ROOT).with_suffix(".md")).exists()
    listed = re.findall(r":caption: (.+)", index)
    assert listed == [*book.CHAPTERS.values(), "To look up"]
    words = re.findall(r'<a class="only-\w+" href="_images/[\w-]+\.svg">!\[([^]]+)\]', index)
    assert len(words) == 2 and all("04_fa2_fp32 0." in alt for alt in words), "the staircase, with its values"
    index = index[index.index("{toctree}") :]
    assert index.index("04_fa2_fp32") < index.index(book.CHAPTERS[1]) < index.index("10_fa2_mma_fp16")


def test_what_is_not_a_book_is_not_emptied(tmp_path):
    """A folder source/ with a conf.py has every project that Sphinx documents."""
    book.stage(tmp_path / "mine" / "source")
    book.stage(tmp_path / "mine" / "source")
    theirs = tmp_path / "source" / "conf.py"
    theirs.parent.mkdir()
    theirs.write_text('project = "other"\n')
    with pytest.raises(ValueError, match="source is not a book's.*name another folder"):
        book.stage(theirs.parent)
    assert theirs.exists()


def test_without_sphinx_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(book.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"Sphinx .* not installed: `pip install"):
        book.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted((NOTEBOOKS / "src").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_fold_is_called_is_html(path):
    """Sphinx takes it as it stands: Markdown and mathematics would be shown as they are written."""
    summaries = re.findall("<summary>(.*?)</summary>", book.COMMENT.sub("", path.read_text()))
    assert not [words for words in summaries if re.search(r"[$`]|\*\*", words)]
