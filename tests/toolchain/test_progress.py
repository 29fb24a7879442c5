"""What takes long says so in one way: one line with seconds, replaced in place, and nothing is left of it."""

import sys
import threading
import time
import types

import nbformat
import pytest

from helpers.lessons.execute import settle
from helpers.toolchain import progress
from helpers.toolchain.progress import telling


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)


def in_a_notebook(monkeypatch):
    """The messages that a kernel of Jupyter would send: data, display id, whether it is an update."""
    sent = []
    publisher = types.SimpleNamespace(
        publish=lambda data, metadata, transient, update: sent.append((data, transient["display_id"], update))
    )
    shell = types.SimpleNamespace(kernel=object(), display_pub=publisher)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return sent


def test_in_a_notebook_one_display_changes_and_leaves_nothing(quick, monkeypatch, capsys):
    sent = in_a_notebook(monkeypatch)
    with telling("compiling", after=0.0):
        time.sleep(0.2)
    assert len(sent) > 2 and len({name for _, name, _ in sent}) == 1, "a display of its own"
    assert [update for *_, update in sent] == [False] + [True] * (len(sent) - 1)
    assert sent[0][0] == {"text/plain": "compiling, 0 s …"} and sent[-1][0] == {}
    assert capsys.readouterr() == ("", "")


def test_what_is_quick_or_in_the_background_says_nothing(quick, monkeypatch):
    sent = in_a_notebook(monkeypatch)
    with telling("compiling", after=5):
        pass

    def work():
        with telling("compiling", after=0.0):
            time.sleep(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sent == []


def test_a_terminal_shows_a_line_and_clears_it(quick, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with telling(lambda: "12 of 100", after=0.0):
        time.sleep(0.05)
    shown = capsys.readouterr().err
    assert "12 of 100, 0 s …" in shown and shown.endswith("\r\x1b[K") and "\n" not in shown


def test_nothing_is_shown_where_nobody_looks(quick, capsys):
    with telling("compiling", after=0.0):
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_a_saved_notebook_has_nothing_of_it():
    taken_back = nbformat.v4.new_output("display_data", data={})
    kept = nbformat.v4.new_output("display_data", data={"text/plain": "1"})
    cell = nbformat.v4.new_code_cell("x", outputs=[taken_back, kept])
    (left,) = settle(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs
    assert left.data == {"text/plain": "1"}
