"""A notebook's text and the notebook say the same, in both directions, and outputs stay where sources do."""

import nbformat
import pytest

from helpers.lessons import pairs

TEXT = f"""{pairs.HEADER}
# %% [markdown]
# # A title
#
# - `# %%` in prose, and 5 % of it

# %%
# %load_ext helpers
# a comment
x = "%"


def f():
    return 42


# %% tags=["active-ipynb"]
# %%kernel mine
# // mine: nothing
# int x;
#
# int y;
"""


def test_reads_prose_magics_and_whole_cells_of_another_language():
    title, code, kernel = pairs.cells(TEXT)
    assert (title.cell_type, title.source) == ("markdown", "# A title\n\n- `# %%` in prose, and 5 % of it")
    assert code.source == '%load_ext helpers\n# a comment\nx = "%"\n\n\ndef f():\n    return 42'
    assert kernel.source == "%%kernel mine\n// mine: nothing\nint x;\n\nint y;"
    assert kernel.metadata == {"tags": ["active-ipynb"]} and code.metadata == {}


def test_code_before_the_first_cell_is_refused():
    with pytest.raises(ValueError, match="before the first `# %%`: 'x = 1'"):
        pairs.cells(pairs.HEADER + "\nx = 1\n\n# %%\ny = 2\n")


@pytest.mark.parametrize("path", sorted(pairs.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_survives_the_way_there_and_back(path):
    notebook = nbformat.read(path, as_version=4)
    back = pairs.cells(pairs.text_of(notebook))
    assert [(c.cell_type, c.source) for c in back] == [(c.cell_type, c.source) for c in notebook.cells]


def test_cells_keep_their_outputs_where_the_text_left_them_alone(tmp_path):
    cells = pairs.cells(TEXT)
    shown = [nbformat.v4.new_output("stream", text=word) for word in ("first", "second")]
    twice = [nbformat.v4.new_code_cell("print()", outputs=[output]) for output in shown]
    notebook = nbformat.v4.new_notebook(cells=[*cells, *twice])
    nbformat.write(notebook, tmp_path / "mine.ipynb")
    (tmp_path / "src").mkdir()
    pairs.to_text("mine", tmp_path)
    text = tmp_path / "src" / "mine.py"
    before = (tmp_path / "mine.ipynb").read_text()
    assert pairs.to_notebook("mine", tmp_path) == 0 and (tmp_path / "mine.ipynb").read_text() == before

    text.write_text(text.read_text().replace("return 42", "return 43") + "\n# %%\nprint()\n")
    assert pairs.to_notebook("mine", tmp_path) == 2
    after = nbformat.read(tmp_path / "mine.ipynb", as_version=4).cells
    assert "return 43" in after[1].source and [c.get("outputs") for c in after[3:]] == [[shown[0]], [shown[1]], []]


def test_a_text_that_says_the_same_is_left_as_it_is(tmp_path):
    """Blank lines of its own included, which `ruff format` has set."""
    (tmp_path / "src").mkdir()
    text = tmp_path / "src" / "00_one.py"
    text.write_text(TEXT.replace('\nx = "%"', '\nx = "%"\n') + "\n\n")
    written = text.read_text()
    nbformat.write(nbformat.v4.new_notebook(cells=pairs.cells(written)), tmp_path / "00_one.ipynb")
    pairs.to_text("00_one", tmp_path)
    assert text.read_text() == written
    nbformat.write(nbformat.v4.new_notebook(cells=pairs.cells(written)[:2]), tmp_path / "00_one.ipynb")
    pairs.to_text("00_one", tmp_path)
    assert "int x;" not in text.read_text() and "return 42" in text.read_text()
