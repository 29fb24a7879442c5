"""The look of figures is defined in one place, and its colours can be told apart and read."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

import helpers
from helpers.figures import style

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
    assert {name: colours for name, colours in found.items() if colours} == {}


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_bars_beside_the_source_stand_out_on_a_light_page_and_on_a_dark_one(page):
    for colour in (*style.HEAT.values(), style.EXCESS):
        assert contrast(colour, page) >= 3, colour  # WCAG's for graphics


def test_tints_are_light_enough_for_black_text_and_differ():
    for tints in (style.TINTS, style.SHADES, style.QUARTERS):
        assert all(contrast(style.INK, tint) >= 4.5 for tint in tints)
        assert all(a != b for a, b in itertools.pairwise(tints)) and len(set(tints)) == len(tints)
