"""The drawings of notebooks 00 to 04 say what the numbers and layouts they are given say."""

import numpy as np
import pandas as pd
import pytest

from helpers import banks, draw

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


def test_blocks_are_rescaled_as_a_softmax_over_all_keys_says():
    *steps, last = draw.rescaling(BLOCKS, VALUES).axes
    s, v = np.concatenate(BLOCKS), np.concatenate(VALUES)
    p = np.exp(s - s.max())
    assert [bar.get_height() for bar in last.patches] == pytest.approx(p @ v / p.sum())
    tops = [
        bar.get_y() + bar.get_height() for bar in steps[-1].patches[3:6]
    ]  # kept, then this block's part: o_1, o_2, l
    assert tops == pytest.approx([*(p @ v), p.sum()])
    dashed = [len(ax.patches) - 6 for ax in steps]
    assert dashed == [0, 3, 0]  # the maximum rises in the second block alone


def test_each_lane_of_03_has_its_share_once():
    for ax, pieces in zip(draw.fa1_threads(rows=2, TX=8, Bc=32, d=64).axes, (4, 2), strict=True):
        said = [t.get_text() for t in ax.texts]
        assert all(said.count(str(lane)) == pieces for lane in range(32)) and len(said) == 32 * pieces


def test_04_needs_12_wavefronts_a_step_and_another_numbering_8():
    """What notebook 04 derives, and what the solution of its exercise 4.2 finds, by the rule in banks.py."""

    def wavefronts(places) -> int:
        return sum(2 * len(banks.wavefronts([16 * at for at in axis], 16)) for axis in zip(*places, strict=True))

    assert wavefronts([(i % 4, i // 4) for i in range(32)]) == 12
    places = [(i >> 1 & 1 | i >> 3 & 2, i & 1 | i >> 1 & 6) for i in range(32)]
    assert len(set(places)) == 32 and wavefronts(places) == 8
