"""What drawings tell in words is what they show, and what they write can be read at a notebook's width."""

import math

import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from helpers import draw, draw_backward, draw_hopper, draw_masks, draw_mma, draw_pingpong, draw_ring
from helpers.emulator.trace import Access, Request
from helpers.figures import steps, style
from helpers.figures.access_maps import address_map, bank_map
from helpers.lessons import languages_timed

STEPS = pd.DataFrame(
    [
        (1, "one buffer", "no, surpassed", 64, 0.8, 0.9),
        (1, "one buffer", "no, surpassed", 128, 0.7, math.nan),
        (2, "two buffers", "yes", 64, 1.1, 1.2),
    ],
    columns=["step", "what", "kept", "D", "ratio", "ratio_causal"],
)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def on_the_page(figure, points: float) -> float:
    """CSS pixels of a type of so many points in a notebook."""
    width = int.from_bytes(figure.png()[16:20], "big") * style.CSS_DPI / style.DPI
    return points * style.CSS_DPI / 72 * min(1, style.WIDEST / width)


def test_lanes_tell_the_part_of_the_time_that_is_shown():
    rows = [("consumer 0", "scores", 0, 10), ("consumer 0", "softmax", 10, 20), ("consumer 0", "wait", 20, 100)]
    frame = pd.DataFrame(rows, columns=["lane", "kind", "begin", "end"])
    words = draw_pingpong.lanes({"all": frame}, "clocks", (0, 20)).in_words
    assert "S = Q Kᵀ 50%" in words and "softmax 50%" in words and "barrier" not in words


def test_steps_tell_their_ratios_with_a_mask_and_without():
    told = "one buffer: 0.80 at D = 64 (causal 0.90), 0.70 at D = 128; two buffers: 1.10 at D = 64 (causal 1.20)."
    figures = [steps.marks(STEPS, "title", "SDPA CUDNN"), draw_backward.steps_taken(STEPS, "title", "SDPA CUDNN")]
    for figure in figures:
        assert figure.in_words.startswith("title") and figure.in_words.endswith(f"as fast as SDPA CUDNN. {told}")
        assert legend(figure)[-1] == "hollow: surpassed or did not stay"
    without = steps.marks(STEPS.drop(columns="ratio_causal"), "title", "SDPA CUDNN").in_words
    assert "one buffer: 0.80 at D = 64, 0.70 at D = 128" in without
    drawn = {ax.get_title(loc="left"): [line.get_xdata()[0] for line in ax.lines[::2]] for ax in figures[0].axes}
    assert drawn == {"without a mask": [0.8, 1.1], "causal": [0.9, 1.2]}
    kept = [said for said in ("yes", "in part", "at D = 64", "at D = 128", "no") if steps.stays(said, 64)]
    assert kept == ["yes", "in part", "at D = 64"]


def test_a_ring_s_speedup_tells_what_was_measured_and_its_memory_an_h200_s():
    model = pd.DataFrame({"zigzag": [1.0, 1.9]}, [1024, 65536])
    words = draw_ring.speedups(model, 2, "two", {"zigzag": [(65536, 1.8), (16384, 1.7)]}).in_words
    assert words.endswith("zigzag, measured: 1.70 at 16k, 1.80 at 64k")
    (ax,) = draw_ring.memory(None, [16384, 65536]).axes
    assert ax.lines[-1].get_ydata()[0] == pytest.approx(140.4, abs=0.01)  # as many MiB as the records say


def test_the_steps_of_33_have_the_names_of_the_figure_in_their_words():
    rows = [("consumer 0", "dS", 0, 10), ("consumer 0", "softmax", 10, 20), ("consumer 0", "send dQ", 20, 30)]
    rows += [(f"consumer {n}", "products", 30, 40) for n in (0, 1)]
    rows += [("consumer 1", kind, 40, 50) for kind in ("dS", "softmax", "send dQ")]
    again = [(lane, kind, 50 * n + begin, 50 * n + end) for n in range(8) for lane, kind, begin, end in rows]
    events = pd.DataFrame(again, columns=["lane", "kind", "begin", "end"])
    words = draw_hopper.steps(events, "title", "clocks").in_words
    assert "consumer 0's P lies" in words and "consumer 1's dQ lies" in words and "send" not in words


def test_a_memory_s_rate_has_its_unit_before_the_remark():
    levels = [("shared memory", "228 KiB", "29 MiB", "128, with L1", "tiles"), ("HBM", "", "140 GiB", "", "tensors")]
    words = draw.memory_hierarchy(levels, "title").in_words
    assert "128 bytes per clock and SM, with L1; HBM: 140 GiB in all." in words


def test_the_line_across_keeps_clear_of_the_numbers_over_bars():
    _, ax = draw.register_tiling([(1, 1), (16, 8)]).axes
    (number,) = (text for text in ax.texts if text.get_text() == "0.375")
    ax.figure.draw_without_rendering()
    assert number.get_bbox_patch().get_window_extent().width > Text.get_window_extent(number).width + 6


def test_both_axes_of_packed_sequences_count_rows():
    left, right = draw_masks.packed([3, 5]).axes
    assert left.get_xlabel() == "rows" and "row" in right.get_xlabel()


def test_lane_numbers_of_three_matrices_side_by_side_can_be_read():
    shapes = {
        name: (lambda lane, i: (lane // 4, lane % 4), 1, 16, wide) for name, wide in (("A", 16), ("B", 8), ("C", 8))
    }
    figure = draw_mma.fragments(shapes)
    assert on_the_page(figure, min(text.get_fontsize() for ax in figure.axes for text in ax.texts)) >= 9


def access(space: str, addresses: tuple[int | None, ...], width: int, cost: int, ideal: int) -> Access:
    request = Request("k", 0, 0, addresses, width, cost, ideal)
    return Access("k", "k.cu", 1, "load", space, "K", width, 1, 32 * width, cost, ideal, cost, request)


def test_a_lane_of_a_bank_map_is_as_wide_as_its_banks_and_a_line_parts_the_parts_of_a_warp():
    figure = bank_map(access("shared", tuple(16 * lane for lane in range(32)), 16, 4, 4))
    assert [patch.get_width() for patch in figure.axes[0].patches] == [4] * 32
    crowded = tuple((128 if lane < 8 else 16) * lane for lane in range(32))  # the first quarter takes eight wavefronts
    (ax,) = bank_map(access("shared", crowded, 16, 11, 4)).axes
    assert [line.get_ydata()[0] for line in ax.lines] == [8, 9, 10]


def test_an_address_map_shows_the_line_the_sector_and_the_words_that_are_asked_for():
    one = access("global", (1280 + 32, *[None] * 31), 8, 1, 1)
    figure = address_map(one)
    (ax,) = figure.axes
    assert "+1,280" in [text.get_text() for text in ax.texts]  # bytes
    faces = [patch.get_facecolor() for patch in ax.patches[:4]]
    assert faces == [to_rgba(colour) for colour in (style.PALEST, style.WASTED, style.PALEST, style.PALEST)]
    assert str(figure).splitlines()[2].split("|")[2].split() == ["0", "0", *"~" * 6]  # 8 of 32 bytes


def test_the_foot_of_an_address_map_explains_what_is_drawn():
    def foot(addresses) -> str:
        return address_map(access("global", addresses, 4, 4, 4)).get_supxlabel()

    each = foot(tuple(4 * lane for lane in range(32)))
    assert "+" not in each and "Orange" not in each
    shared = foot(tuple(256 * (lane // 2) for lane in range(32)))
    assert "+: other lanes too" in shared and "Orange without a lane: in the sector, not asked for here." in shared


def test_a_slow_language_stands_above_the_axis_and_no_name_on_a_line(monkeypatch):
    monkeypatch.setattr(languages_timed, "stale", lambda: [])
    rows = [
        ("numba", 59.0, 0.02),
        ("gluon", 124.0, 1.21),
        ("13_tuned", math.nan, 1.22),
        ("32_ping_pong", math.nan, 2.1),
    ]
    found = pd.DataFrame(rows, columns=["name", "lines", "ratio"]).assign(D=128, causal=0, lengths=5)
    (ax,) = languages_timed.scatter(found).axes
    assert ax.get_ylim()[0] < -0.1 * 0.5
    ax.figure.draw_without_rendering()
    (gluon,) = (Text.get_window_extent(text) for text in ax.texts if text.get_text() == "gluon")
    assert gluon.y1 < ax.transData.transform((0, 1.22))[1]
