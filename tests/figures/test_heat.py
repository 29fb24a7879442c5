"""The bars beside a source: each part of a cost that is not zero has a cell."""

import pytest

from helpers.emulator.trace import Access
from helpers.figures.heat import HeatListing, heat


@pytest.mark.parametrize(
    ("cost", "excess", "bar"),
    [
        (800, 0, "████████"),
        (800, 400, "████░░░░"),
        (800, 1, "███████░"),
        (800, 799, "█░░░░░░░"),
        (800, 800, "░░░░░░░░"),  # nothing had to be
        (100, 0, "█"),
        (100, 50, "█░"),  # not of one colour
        (2, 1, "█░"),
        (1, 1, "░"),
        (0, 0, ""),
    ],
)
def test_a_bar_has_a_cell_for_either_part_of_a_cost(cost, excess, bar):
    listing = HeatListing("", ((7, "x = y;"),), {7: {"shared": (cost, excess)}}, {"shared": 800}, {})
    must, needless, _ = listing.bar(7, "shared")
    assert must + needless == bar


def test_a_line_costs_what_all_its_accesses_cost():
    a, b = (
        Access("k", "k.cu", 7, "load", "shared", target, 4, 1, 4, cost, 1, cost, None)
        for target, cost in (("a", 5), ("b", 3))
    )
    assert heat("", [(7, "x")], [a, b], []).costs == {7: {"shared": (8, 6)}}
