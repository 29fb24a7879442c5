"""The drawings of notebooks 00 to 04 say what the numbers and layouts they are given say."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from helpers import banks, draw
from helpers.figures.style import GREEN, ORANGE

BLOCKS = [[1.0, 0.2], [2.4, 1.4], [0.5, 2.0]]
VALUES = [[[0.9, 0.2], [0.1, 0.8]], [[0.2, 0.9], [0.5, 0.5]], [[0.8, 0.1], [0.3, 0.6]]]
FILL = pd.DataFrame({"N": [512, 1024], "share of SMs with work": [1.0, 0.5], "recorded TFLOP/s": [10.0, 5.0]})
BYTES = pd.DataFrame({"N": [64, 128], "by": "a", "counted": [1.0, 2.0], "predicted": [1.0, 2.0]})
FIGURES = {
    "flash_attention": lambda: draw.flash_attention(),
    "memory_hierarchy": lambda: draw.memory_hierarchy([("registers", "256 KiB", "33 MiB", "1,536", "own")], "title"),
    "seconds": lambda: draw.seconds({"cold": 1.0}, "title"),
    "threads": lambda: draw.threads(),
    "wedge": lambda: draw.wedge(),
    "exp_ranges": lambda: draw.exp_ranges({"fp16": (-17.0, 11.0)}),
    "running_state": lambda: draw.running_state([1.0, 0.2, 2.1]),
    "bracketings": lambda: draw.bracketings([1.0, 3.0], {"one": (0, 1)}),
    "butterfly": lambda: draw.butterfly([1.0, 3.0]),
    "rescaling": lambda: draw.rescaling(BLOCKS, VALUES),
    "tile_walk": lambda: draw.tile_walk("fa2"),
    "fa1_threads": lambda: draw.fa1_threads(),
    "bytes_against": lambda: draw.bytes_against(BYTES, "N", "by", "title"),
    "machine_fill": lambda: draw.machine_fill(FILL, "title"),
    "register_tiling": lambda: draw.register_tiling([(1, 1), (8, 8)]),
    "warp_tile": lambda: draw.warp_tile([i % 4 for i in range(32)], [i // 4 for i in range(32)], 64, 5),
}


def words(figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_to_see(name):
    figure = FIGURES[name]()
    assert len(figure.in_words) > 15 and figure.png().startswith(b"\x89PNG")


def test_all_drawings_of_the_module_are_tried():
    assert set(draw.__all__) - {"bytes_by_tensor"} == set(FIGURES)


def test_every_tensor_of_which_something_is_moved_has_its_number():
    kernels = {"one": {"Q": 4 << 20, "LSE": 4096, "m": 0}, "other": {"Q": 1 << 18, "LSE": 4096, "m": 1 << 19}}
    (ax,) = draw.bytes_by_tensor(kernels, "Bytes").axes
    assert [t.get_text() for t in ax.texts] == ["4", "0.004", "", "0.25", "0.004", "0.5"]
    assert [bar.get_height() for bar in ax.patches] == [4, 1 / 256, 0, 0.25, 1 / 256, 0.5]
    assert all(one.get_x() < other.get_x() for one, other in zip(ax.patches[:3], ax.patches[3:], strict=True))


def test_a_thread_computes_the_element_of_its_place_in_the_grid():
    figure = draw.threads()
    assert "threadIdx = (9, 5)\ncomputes S[21, 25]" in words(figure)  # of block (1, 1)
    names = {t.get_position(): t.get_text() for t in figure.axes[0].texts}
    assert names[8, 24] == "x = 1\ny = 0"  # below the first: blockIdx.x runs down the queries


def test_lines_are_what_their_numbers_say():
    small, large = draw.wedge(d=64).axes[1].lines
    assert small.get_ydata()[1] == large.get_ydata()[1] == 16 * 128 * 64  # they cross at N = 2 d
    assert "cross Q, K, V, O, 16 N d, at N = 128 " in draw.wedge(d=64).in_words
    apart = BYTES.assign(predicted=[3.0, 6.0])
    lines = draw.bytes_against(apart, "N", "by", "title").axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [[3, 6], [1, 2]]  # as predicted, then as counted
    assert draw.machine_fill(FILL, "title").axes[0].lines[1].get_ydata().tolist() == [1, 0.5]  # of the most
    assert FIGURES["exp_ranges"]().in_words.endswith("fp16 from -17.0 to 11.0")
    (ax,) = FIGURES["memory_hierarchy"]().axes
    at = {t.get_text(): t.get_position()[0] for t in ax.texts}
    assert at["256 KiB"] == at["in one SM"] < at["33 MiB"] == at["on the whole GPU"]


def test_every_way_to_merge_scores_ends_with_their_maximum_and_sum():
    s = np.array([1.0, 3.0, 0.0, 2.0])
    total = np.exp(s - 3).sum()
    lanes = {t.get_text() for t in draw.butterfly(s).axes[0].texts if t.get_position()[1] == -2}
    assert lanes == {f"3\n{total:.3f}"}
    trees = {"pairs": ((0, 1), (2, 3)), "one by one": (0, (1, (2, 3)))}
    assert words(draw.bracketings(s, trees)).count(f"3\n{total:.4f}") == 2
    rescaled = [said.split("\n")[0] for said in words(FIGURES["running_state"]()) if said.startswith("old × ")]
    assert "old × 0.33" in rescaled  # exp(1 - 2.1)


def test_a_lane_of_a_butterfly_reads_the_lane_that_its_step_says():
    (ax,) = draw.butterfly([1.0, 3.0, 0.0, 2.0]).axes
    assert [said for said in words(ax.figure) if said.startswith("xor")] == ["xor 2", "xor 1"]
    reads = [line.get_xdata() for line in ax.lines if line.get_linestyle() == "--"]
    assert [abs(other - lane) for other, lane in reads] == [2] * 4 + [1] * 4


@pytest.mark.parametrize(("order", "title", "moved"), [
    ("fa1", "step 2: i = 2, j = 1", ["$Q_2$ $O_2$ $m_2$ $l_2$", "$K_1$ $V_1$", "$O_2$ $m_2$ $l_2$"]),
    ("fa2", "step 2: i = 1, j = 2", ["$K_2$ $V_2$", "$Q_1$ $O_1$ $m_1$ $l_1$", "–"]),
])  # fmt: skip
def test_fa1_walks_down_the_queries_and_fa2_along_the_keys(order, title, moved):
    ax = draw.tile_walk(order).axes[1]
    said = [t.get_text() for t in ax.texts[-6:]]
    assert ax.get_title() == title and said[::2] == ["reads", "keeps", "writes"] and said[1::2] == moved


def test_blocks_are_rescaled_as_a_softmax_over_all_keys_says():
    *steps, last = draw.rescaling(BLOCKS, VALUES).axes
    s, v = np.concatenate(BLOCKS), np.concatenate(VALUES)
    p = np.exp(s - s.max())
    assert [bar.get_height() for bar in last.patches] == pytest.approx(p @ v / p.sum())
    tops = [
        bar.get_y() + bar.get_height() for bar in steps[-1].patches[3:6]
    ]  # kept, then this block's part: o_1, o_2, l
    assert tops == pytest.approx([*(p @ v), p.sum()])
    assert steps[1].get_title(loc="left") == "block 2: $m$ = 2.4, old × 0.25"  # exp(1 - 2.4)
    dashed = [len(ax.patches) - 6 for ax in steps]
    assert dashed == [0, 3, 0]  # the maximum rises in the second block alone


def test_each_lane_of_03_has_its_share_once():
    for ax, pieces in zip(draw.fa1_threads(rows=2, TX=8, Bc=32, d=64).axes, (4, 2), strict=True):
        said = [t.get_text() for t in ax.texts]
        assert all(said.count(str(lane)) == pieces for lane in range(32)) and len(said) == 32 * pieces


def test_a_tile_of_registers_is_orange_where_it_asks_for_more_than_an_sm_delivers():
    _, ax = draw.register_tiling([(1, 1), (16, 8)]).axes
    assert [bar.get_facecolor() for bar in ax.patches] == [to_rgba(ORANGE), to_rgba(GREEN)]


def test_a_lane_of_04_reads_the_rows_of_its_ty_and_the_columns_of_its_tx():
    (ax,) = draw.warp_tile([i // 4 for i in range(32)], [i % 4 for i in range(32)], 64, lane=6).axes
    assert {(-6, 4), (-6, 36), (8, -6), (40, -6)} <= {p.get_xy() for p in ax.patches}  # ty = 1, tx = 2


def test_04_needs_12_wavefronts_a_step_and_another_numbering_8():
    """What notebook 04 derives, and what the solution of its exercise 4.2 finds, by the rule in banks.py."""

    def wavefronts(places) -> int:
        return sum(2 * len(banks.wavefronts([16 * at for at in axis], 16)) for axis in zip(*places, strict=True))

    assert wavefronts([(i % 4, i // 4) for i in range(32)]) == 12
    places = [(i >> 1 & 1 | i >> 3 & 2, i & 1 | i >> 1 & 6) for i in range(32)]
    assert len(set(places)) == 32 and wavefronts(places) == 8
