"""The look of figures is defined in one place, and its colours can be told apart and read."""

import ast
import io
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

import helpers
from helpers.figures import style
from helpers.figures.described import MOST, described
from helpers.figures.page import page

HELPERS = Path(helpers.__file__).parent


def contrast(a, b):
    """Contrast ratio of two colours (WCAG 2.2, success criterion 1.4.3)."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def literals(path):
    """Colours that are written out in a module: "#0072b2", or the names that matplotlib knows."""
    named = r"""["'](?:#[0-9a-fA-F]{6}|tab:\w+|C\d|red|green|blue|black|white|gray|grey|orange)["']"""
    return re.findall(rf"{named}|\brgba?\(", path.read_text())


def test_no_other_module_of_figures_defines_a_colour():
    modules = [*(HELPERS / "figures").glob("*.py"), *(HELPERS / "lessons").rglob("*.py")]
    found = {path.name: literals(path) for path in modules}
    assert len(found.pop("style.py")) > 40
    assert found.pop("slides.py") == ['"white"']  # the name of a theme of reveal.js
    assert {name: colours for name, colours in found.items() if colours} == {}


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_bars_beside_the_source_stand_out_on_a_light_page_and_on_a_dark_one(page):
    for colour in (*style.HEAT.values(), style.EXCESS):
        assert contrast(colour, page) >= 3, colour  # WCAG's for graphics


def test_tints_are_light_enough_for_black_text_and_differ():
    for tints in (style.TINTS, style.SHADES, style.QUARTERS):
        assert all(contrast(style.INK, tint) >= 4.5 for tint in tints)
        assert all(a != b for a, b in itertools.pairwise(tints)) and len(set(tints)) == len(tints)


def test_names_in_a_lines_colour_can_be_read_and_no_rung_looks_like_a_peer():
    rungs, peers = ({colour for colour, *_ in looks} for looks in (style.RUNGS, style.PEERS.values()))
    for colour in rungs | peers:
        assert contrast(colour, style.CARD) >= 4.5, colour
    for ours, theirs in itertools.product(rungs, peers):
        assert np.abs(np.subtract(to_rgb(ours), to_rgb(theirs))).max() > 0.08, (ours, theirs)


def one_panel():
    figure, (ax,) = style.canvas(4, 3, title="Speed · NVIDIA H200")
    ax.plot([1, 2], [3.0, 6.0], label="ours")
    ax.set(xlabel="N", ylabel="TFLOP/s")
    return figure


def test_a_figure_brings_its_alternative_text_to_the_notebook_and_to_the_page():
    figure = one_panel()
    assert figure._repr_png_()[1]["alt"] == "Speed · NVIDIA H200. across: N; up: TFLOP/s; ours 3 to 6."
    figure.in_words = "Ours doubles\n  from 1 to 2."
    assert figure._repr_png_()[1]["alt"] == "Ours doubles from 1 to 2." and "Ours doubles" in repr(figure)
    assert 'alt="Ours doubles' in page("t", [figure])
    figure.in_words = "word " * 1000
    assert len(figure._repr_png_()[1]["alt"]) <= style.MOST_WORDS + 2


def test_bars_and_marks_are_described_with_what_they_stand_at():
    figure, (left, right) = style.canvas(6, 3, 2)
    left.bar([0, 1, 2], [2.0, 4.0, np.nan], label="bytes")
    left.set_xticks([0, 1, 2], ["Q", "K", "m"])
    right.plot([10.0, 20.0], [0.2, 0.8], "o", linestyle="", label="FLASH")
    right.set_yticks([0, 1], ["random", "zeros"])
    right.plot([30.0, 40.0], [0, np.nan], label="MATH")
    assert described(figure) == "bytes: Q 2, K 4. FLASH: random 10, zeros 20; MATH 0."
    figure, (ax,) = style.canvas(4, 3, title="Two boxes")
    for text in ("a", "HBM", "HBM", "shared memory"):
        ax.text(0, 0, text)
    assert described(figure) == "Two boxes. HBM; shared memory."


def test_a_line_is_described_with_its_ends_and_many_with_how_many_are_left_out():
    figure, (ax,) = style.canvas(4, 3)
    ax.plot([1, 2, 3], [6.0, 9.0, 3.0], label="ours")
    assert described(figure) == "ours 6 to 3."
    ax.lines[0].set_ydata([65536.0, 999.7, 0.0125])
    assert described(figure) == "ours 65,536 to 0.0125."
    ax.lines[0].set_ydata([999.7, 6.0, 3.0])
    assert described(figure) == "ours 1,000 to 3."
    for n in range(MOST + 2):
        ax.plot([1, 2], [n, n + 1], label=f"line {chr(65 + n)}")
    assert described(figure).endswith("; and 3 more.")


def test_notebooks_get_small_pictures_of_the_same_colours():
    figure = one_panel()
    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=style.DPI, bbox_inches="tight", pad_inches=0.15)
    data, size = figure._repr_png_()
    before, after = (np.asarray(Image.open(io.BytesIO(x)).convert("RGB")).astype(int) for x in (raw.getvalue(), data))
    assert len(data) < 0.6 * len(raw.getvalue()) and np.abs(before - after).max() <= 16
    assert size["width"] <= style.WIDEST


def test_a_drawing_says_what_to_see():
    """A drawing's parts don't say it, so whoever draws it does, by `canvas(..., words=...)`, `picture(...)` or `in_words`."""
    without = set()
    for path in sorted((HELPERS / "lessons" / "drawings").glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and any(
                "styled" == getattr(d, "id", "") for d in function.decorator_list
            ):
                text = ast.unparse(function)
                if "Picture" not in ast.unparse(function.returns) and not re.search(
                    r"in_words|words=|picture\(|_canvas\(", text
                ):
                    without.add(f"{path.stem}.{function.name}")
    assert not without


def test_rows_named_at_the_first_panel_are_those_of_all():
    """Panels side by side share their rows; only the first shows the names."""
    figure = style.Figure()
    for ax, names in zip(figure.subplots(1, 2), (["a sink", "one key"], ["", ""]), strict=True):
        ax.plot([1.0, 2.0], [0, 1], "o", label="ours")
        ax.set_yticks([0, 1], names)
    assert described(figure).count("one key") == 2
