"""The drawings of notebooks 22 and 23 say what the numbers they are given say."""

import pandas as pd
import pytest
from matplotlib.patches import FancyArrowPatch

from helpers import draw_backward
from helpers.draw import BLUE, ORANGE

PNG = b"\x89PNG"


def words(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def arrows(ax) -> list[FancyArrowPatch]:
    return [p for p in ax.patches if isinstance(p, FancyArrowPatch)]


def test_bars_carry_their_bytes():
    frame = pd.DataFrame({"P": [2.0**31, 2.0**32], "LSE": [2.0**21, 1536.0]}, index=[1024, 2048])
    figure = draw_backward.stored_bytes(frame, "title")
    assert words(figure.axes[0]) == ["2\nGiB", "4\nGiB", "2\nMiB", "1.5\nKiB"]
    assert figure.png().startswith(PNG)


@pytest.mark.parametrize(("panel", "across", "last"), [(0, 0, 12), (1, 3, 3), (2, 3, 3)])
def test_an_order_marks_the_sums_that_cross_ctas(panel, across, last):
    """3 x 3 tiles: none cross in one CTA; a CTA per column lets the three of dQ cross, one per row those of dK and dV."""
    ax = draw_backward.loop_orders(3).axes[panel]
    crossing = [a for a in arrows(ax) if a.get_edgecolor()[:3] == pytest.approx(_rgb(ORANGE))]
    assert len(arrows(ax)) == 6 and len(crossing) == across
    numbers = [int(w) for w in words(ax) if w.isdigit()]
    assert len(numbers) == 9 and max(numbers) == (9 if panel == 0 else 3)
    for arrow in crossing:  # across: the two ends differ in j for dQ, in i for dK and dV
        (x, y), (u, v) = arrow._posA_posB
        assert (y == v and x != u) if panel == 1 else (x == u and y != v)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_an_arrow_of_the_dataflow_says_where_it_goes():
    ways = dict.fromkeys(draw_backward.EDGES, "registers") | {("dS", "dQ"): "shared memory"}
    figure = draw_backward.dataflow(ways, {"dV": "here", "dK": "here", "dQ": "in HBM"}, "title")
    looks = [(a.get_edgecolor()[:3], a.get_linestyle()) for a in arrows(figure.axes[0])]
    assert looks.count((pytest.approx(_rgb(ORANGE)), "--")) == 1 and looks.count((pytest.approx(_rgb(BLUE)), "-")) == 5
    assert words(figure.axes[0]).count("here") == 2
    with pytest.raises(ValueError, match="ways has to name one of registers"):
        draw_backward.dataflow(ways | {("S", "P"): "the post"}, {}, "title")
    with pytest.raises(ValueError, match="ways has to name"):
        draw_backward.dataflow({("S", "P"): "registers"}, {}, "title")


def test_a_lane_of_a_hand_over_has_its_work_its_wait_and_its_turn():
    steps = pd.DataFrame([(0, 3, 0, 4, 4, 5), (1, 3, 0, 4, 5, 6)], columns="cta tile begin ready turn end".split())
    (ax,) = draw_backward.hand_over(steps, "title").axes
    assert [p.get_width() for p in ax.patches] == [4, 0, 1, 4, 1, 1]
    assert words(ax) == ["3", "3"]


def test_stripes_run_along_k_or_across_it():
    """A's k runs across the page and B's down it: rows along k are lines across in A and lines down in B."""
    products = {
        "C += A B": (("A", "m", "k", True), ("B", "n", "k", False)),
        "C = A B": (("A", "m", "k", None), ("B", "n", "k", True)),
    }
    first, second = draw_backward.operands(products).axes
    across = [line.get_ydata()[0] == line.get_ydata()[1] for line in first.lines]
    in_a = [line.get_xdata()[0] < 1.5 for line in first.lines]
    assert across == [True] * len(across) and any(in_a) and not all(in_a)  # A along its k, B across its k: both lie
    assert all(line.get_xdata()[0] == line.get_xdata()[1] and line.get_xdata()[0] > 1.5 for line in second.lines)
    assert "+=" in words(first) and "=" in words(second)
