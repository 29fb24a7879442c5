"""The budget of an SM's units: the longest is marked for each kernel by itself, and no kernel or unit is dropped in silence."""

import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from helpers.figures import budget
from helpers.figures.style import BLUE

FRAME = pd.DataFrame(
    [("12", "MUFU", 68), ("12", "shared memory", 256), ("12", "tensor cores", 214)]
    + [("13", "shared memory", 320), ("13", "tensor cores", 428), ("13", "leaving", 4)],
    columns=["kernel", "unit", "clocks"],
)


def bold(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]


def test_each_kernel_has_its_own_longest_and_all_its_bars():
    figure = budget.units(FRAME, "Clocks", "what to see", measured={"13": 600.0})
    assert figure.in_words == "what to see"
    panels = figure.axes
    assert [ax.get_title(loc="left") for ax in panels] == ["12", "13"]
    assert [bold(ax) for ax in panels] == [["256"], ["428"]]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "shared memory",
        "tensor cores",
        "MUFU",
        "leaving",
    ]
    assert [len(ax.patches) for ax in panels] == [3, 3]
    longest = [[bar.get_width() for bar in ax.patches if bar.get_facecolor() == to_rgba(BLUE)] for ax in panels]
    assert longest == [[256], [428]]
    assert {ax.get_xlabel() for ax in panels} == {"clocks of one SM"}  # of what, the title says: a tile, a step
    assert panels[0].get_xlim() == panels[1].get_xlim() and panels[0].get_xlim()[0] == 0
    assert panels[0].get_xlim()[1] > 600  # the measured time is in the picture
    assert figure.png()


@pytest.mark.parametrize("measured", [None, {"13": 600.0}, {"12": 300.0, "13": 600.0}])
def test_what_a_kernel_took_is_a_line_in_its_own_panel(measured):
    figure = budget.units(FRAME, "Clocks", "", measured)
    drawn = [(ax.get_title(loc="left"), line.get_xdata()) for ax in figure.axes for line in ax.lines]
    took = {kernel: x[0] for kernel, x in drawn if len(x)}  # the legend's has no place
    assert took == (measured or {})
    assert [t.get_text() for t in figure.legends[0].get_texts()][2:] == ["measured, all of it"] * bool(measured)


def test_a_unit_twice_or_a_kernel_without_a_budget_is_refused():
    with pytest.raises(ValueError, match="twice"):
        budget.units(pd.concat([FRAME, FRAME.head(1)]), "Clocks", "")
    with pytest.raises(ValueError, match="'14'"):
        budget.units(FRAME, "Clocks", "", measured={"14": 1.0})
