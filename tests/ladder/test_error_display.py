"""What a notebook shows of an error: the reader's own line and one sentence."""

import runpy

import pytest

from helpers.ladder import errors


@pytest.mark.parametrize("name", ["mine.py", "helpers_of_mine.py"])
def test_a_file_beside_the_package_is_the_reader_s(name, tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "HELPERS", tmp_path / "helpers")
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "ours.py").write_text("def call(error):\n    raise error\n")
    (tmp_path / name).write_text("ours['call'](error)  # the reader's\n")
    names = {"ours": runpy.run_path(str(tmp_path / "helpers" / "ours.py")), "error": errors.CallError("k is too short")}
    with pytest.raises(errors.CallError) as caught:
        runpy.run_path(str(tmp_path / name), names)
    assert caught.value._render_traceback_() == [
        "----> ours['call'](error)  # the reader's",
        "ValueError: k is too short",
    ]
