"""The drawings of notebook 20 say what they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from helpers import draw_masks, reference, schedule

PNG = b"\x89PNG"


def titles(figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def test_a_mask_has_as_many_blue_cells_as_pairs_that_are_seen():
    seen = reference.visible(3, 5, causal=True).numpy()
    (ax,) = draw_masks.masks({"bottom right": seen}).axes
    blue = to_rgb(draw_masks.LOOKS[3][0])
    assert [p.get_facecolor()[:3] == blue for p in ax.patches] == seen.ravel().tolist()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("00000", "nothing"),
        ("01000", "k1"),
        ("11111", "k0 to k4"),
        ("11001", "k0 and k1 and k4"),
        ("11101", "k0 to k2 and k4"),
    ],
)
def test_a_mask_tells_which_keys_each_query_sees(row, said):
    seen = np.array([[int(x) for x in row], [1] * 5], dtype=bool)
    assert draw_masks.masks({"a": seen}).in_words.endswith(f"a: q0 sees {said}, q1 sees k0 to k4.")


def test_a_tile_map_paints_each_kind_where_it_is():
    kinds = np.arange(16).reshape(8, 2) % 4
    figure = draw_masks.tile_map({"a": kinds, "b": kinds[:4]})
    first, second = figure.axes
    faces = [to_rgb(face) for face, _ in draw_masks.LOOKS]
    assert [faces.index(p.get_facecolor()[:3]) for p in first.patches] == kinds.ravel().tolist()
    assert first.patches[3].get_xy() == (64, 32) and len(second.patches) == 8
    assert len(first.lines) == 3 and len(second.lines) == 2  # borders of CTAs of 128 queries
    assert [t.get_text() for t in figure.legends[0].get_texts()] == list(draw_masks.KINDS)[::-1]
    assert figure.in_words.endswith("b: " + ", ".join(f"2 {kind}" for kind in draw_masks.KINDS) + ".")
    assert (first.get_xlabel(), first.get_ylabel()) == ("key j", "query i")


def test_heads_lead_to_the_head_that_the_kernel_reads():
    figure = draw_masks.heads(6, (6, 2, 1))
    assert titles(figure) == ["Hkv = 6: multi-head", "Hkv = 2: grouped-query", "Hkv = 1: multi-query"]
    ends = [[line.get_xdata()[1] for line in ax.lines] for ax in figure.axes]
    assert ends[1] == [1.5] * 3 + [4.5] * 3 and ends[2] == [3] * 6
    *of_q, first, second = (patch.get_facecolor() for patch in figure.axes[1].patches)
    assert of_q == [first] * 3 + [second] * 3
    assert "; 2 heads of K and V, 3 query heads to each; " in figure.in_words


def test_packed_rows_and_wasted_ones():
    figure = draw_masks.packed([3, 5, 1])
    assert titles(figure) == ["padded: 3 × 5 = 15 rows, hatched wasted", "packed: 9 rows"]
    wasted = [p.get_width() for p in figure.axes[0].patches if p.get_hatch()]
    packed = figure.axes[1]
    assert wasted == [2, 0, 4] and packed.get_xticks().tolist() == [0, 3, 8, 9]
    assert [t.get_text() for t in packed.get_xticklabels()] == ["0", "3", "8", "9"]


def test_occupancy_names_each_order_s_end():
    orders = {"good": schedule.run([5, 3, 1, 1], 2), "bad": schedule.run([1, 1, 3, 5], 2)}
    figure = draw_masks.occupancy(orders, 2)
    said = [t.get_text() for t in figure.legends[0].get_texts()]
    assert said == ["good: done at 5, 0.0% above the ideal", "bad: done at 6, 20.0% above the ideal"]
    assert figure.png(dpi=40).startswith(PNG)
    assert figure.axes[0].lines[0].get_drawstyle() == "steps-post"  # as many until the next one is done
    (busy,) = figure.axes[1].texts
    assert all(line.endswith(" ") for line in busy.get_text().split("\n"))  # off the line that it stands beside
