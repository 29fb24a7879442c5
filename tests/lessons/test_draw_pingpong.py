"""The drawings of what runs under what say what they are given."""

import re

import pandas as pd
from matplotlib.colors import to_rgba

from helpers import draw_pingpong, overlap, rung
from helpers.figures.style import SAND
from helpers.lessons.drawings.hopper import KINDS

PNG = b"\x89PNG"


def words(figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def test_lanes_stand_above_each_other_and_what_overlaps_has_half_a_lane():
    one = overlap.run(overlap.jobs(2, 3, 10, 6), turns=True)
    both = overlap.run(overlap.jobs(2, 3, 10, 6, "next"), turns=True)
    figure = draw_pingpong.lanes({"one after the other": one, "under each other": both}, "clocks")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["one after the other", "under each other"]
    assert [len(ax.patches) for ax in figure.axes] == [18, 18]
    assert {round(p.get_height(), 6) for p in figure.axes[0].patches} == {0.8}
    assert {round(p.get_height(), 6) for p in figure.axes[1].patches} == {0.4}
    halves = {(p.get_facecolor() == to_rgba(SAND), round(p.get_y(), 6) % 1 < 0.5) for p in figure.axes[1].patches}
    assert halves == {(True, True), (False, False)}  # softmax below the product that it is under
    assert figure.axes[1].get_xlabel() == "clocks" and figure.png().startswith(PNG)


def test_a_part_of_the_time():
    frame = pd.DataFrame([("producer", "copy", 0, 4), ("consumer 0", "wait", 2, 9), ("consumer 0", "scores", 20, 30)],
                         columns=["lane", "kind", "begin", "end"])  # fmt: skip
    figure = draw_pingpong.lanes({"all": frame}, "clocks", span=(1, 8))
    ax = figure.axes[0]
    assert [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches] == [(0, 3), (1, 7)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["producer", "consumer 0"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [KINDS["copy"][2], KINDS["wait"][2]]


LINES = [(16 * i, *text.split(" ", 1)) for i, text in enumerate([
    "HGMMA.64x128x16.F32 R24", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MUFU.EX2 R1", "MUFU.EX2 R2", "MUFU.RCP R2",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MUFU.EX2 R1", "F2FP.BF16 R1", "BRA 0x0",
])]  # fmt: skip


def test_a_loop_is_cut_at_its_waits_and_counted():
    figure = draw_pingpong.loop({"a kernel": LINES, "another": LINES[:3]})
    assert words(figure) == [
        "0",
        "2",
        "1",
        "1",
        "0",
        "1",
        "1",
    ]  # exponentials of the pieces, groups left behind the first wait
    first = figure.axes[0]
    assert len(first.patches) == 1 + 1 + 3 + 1  # the loop, a product, exponentials, a rounding
    assert [(line.get_linestyle(), line.get_xdata()[0]) for line in first.lines] == [("--", 1), ("-", 5)]
    assert "2 exponentials before a wait until 0 groups" in figure.in_words
    short = draw_pingpong.loop({"a wait near the end": [LINES[0]] * 120 + [LINES[1], LINES[7]]})
    assert words(short) == ["0", "1"]  # no zero on the line of the wait
    assert figure.png().startswith(PNG)


def test_a_solid_line_is_a_wait_for_all_products():
    (legend,) = draw_pingpong.loop({"a kernel": LINES}).legends
    told = [text.get_text() for text in legend.get_texts()[-2:]]
    assert [line.get_linestyle() for line in legend.get_lines()] == ["--", "-"]
    assert told == ["waits until n of its groups of products are left", "waits for all of them"]


def test_every_state_has_a_box_and_every_way_an_arrow():
    figure = draw_pingpong.states()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text[:3] for text in texts if text.startswith("(")] == [f"({n})" for n in range(1, 8)]
    assert len(figure.axes[0].patches) == 11 == len(texts) - 7
    always = {(a, b) for a, b, *_, held, _, _ in draw_pingpong.WAYS if held}
    assert always == {(2, 3), (2, 4), (2, 6)}  # from the turn to its passing
    sometimes = {(a, b) for a, b, *_, held, _, _ in draw_pingpong.WAYS if held is None}
    assert (
        sometimes == {(6, 1), (1, 2)} and "keeps the turn" in figure.in_words
    )  # a vote was found at the turn, or at (5)
    assert [patch.get_linestyle() for patch in figure.axes[0].patches].count("--") == len(always)
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == [label for *_, label in draw_pingpong.HELD.values()]
    assert figure.png().startswith(PNG)


def test_the_states_are_those_that_the_kernel_numbers():
    text = rung("32_ping_pong").source
    numbered = set(re.findall(r"// \((\d)\) ([a-zO ]+?)[.:,;]", text))
    assert numbered == {(str(n), name) for n, (name, _, _) in draw_pingpong.STATES.items()}
