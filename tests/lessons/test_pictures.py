"""The pictures of the executed notebooks: each has alternative text, and none makes its notebook too large for GitHub."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def pictures(notebook):
    """The metadata of every PNG among the outputs."""
    outputs = (o for cell in notebook["cells"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {}))
    return [o["metadata"].get("image/png", {}) for o in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_picture_says_what_to_see(path):
    for about in pictures(json.loads(path.read_text())):
        assert len(about.get("alt", "")) >= 40, "show a figure of helpers.figures, or one that gives `alt` itself"


def test_a_picture_without_words_would_be_seen():
    notebook = {"cells": [{"outputs": [{"data": {"image/png": ""}, "metadata": {"image/png": {"alt": "short"}}}]}]}
    assert pictures(notebook) == [{"alt": "short"}]
