"""The drawings of the Hopper rungs say what fragments.py says."""

import numpy as np
import pandas as pd
import pytest

from helpers import draw_hopper, fragments
from helpers.emulator.fragments import Descriptor

PNG = b"\x89PNG"


def words(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_a_descriptors_fields_stand_with_their_bits_and_values():
    figure = draw_hopper.descriptor(Descriptor(0x8000, 16, 1024, 3, 128))
    said = words(figure.axes[0])
    for text in ("start address\nbits 13–0", "0x800", "= 0x8000", "leading offset\nbits 29–16", "= 16 B, not used here",
                 "0x40", "= 1024 B", "base offset\nbits 51–49", "= line 3", "swizzle\nbits 63–62", "= 128 B"):  # fmt: skip
        assert text in said, text
    told = "start address 0x8000, leading offset 16 bytes, stride offset 1024 bytes, swizzle 128 bytes"
    assert told in figure.in_words
    assert figure.png().startswith(PNG)


@pytest.mark.parametrize("d, mn_major, seen", [
    (Descriptor(0x8000, 16, 1024, 0, 128), False, 32),
    (Descriptor(0x8020, 16, 1024, 0, 128), False, 32),
    (Descriptor(0x8000, 128, 256), False, 128),
    (Descriptor(0x8000, 16384, 1024, 0, 128), True, 128),
])  # fmt: skip
def test_memory_shows_the_core_matrices_where_the_descriptor_finds_them(d, mn_major, seen):
    _, operand, memory = draw_hopper.descriptor(d, mn_major).axes
    assert [w for w in words(operand) if w.isdigit()] == [str(i) for i in range(16)]
    along = "k down, row to the right" if mn_major else "row down, k to the right"
    assert operand.get_title(loc="left") == f"the operand: {along}"
    shown = {(t.get_position(), t.get_text()) for t in memory.texts if "·" in t.get_text()}
    assert len(shown) == seen
    for mn in range(0, 16 if not mn_major else 64, 8 if mn_major else 1):
        for k in range(0, 16, 1 if mn_major else 8):
            line, byte = divmod(d.address(mn_major, mn, k) - d.start // 128 * 128, 128)
            core, row = (mn // 8 + k // 8 * 8, k % 8) if mn_major else (mn // 8 * 2 + k // 8, mn % 8)
            if line < 16:
                assert ((byte // 16 + 0.5, line + 0.5), f"{core}·{row}") in shown


def test_an_offset_that_is_used_has_its_arrow():
    assert "stride offset" in words(draw_hopper.descriptor(Descriptor(0, 16, 1024, 0, 128)).axes[2])
    both = words(draw_hopper.descriptor(Descriptor(0, 128, 256)).axes[2])
    assert {"stride offset", "leading offset"} <= set(both)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("extent", [64, 128])
def test_the_words_count_the_core_matrices_that_are_drawn(extent, mn_major):
    figure = draw_hopper.descriptor(Descriptor(0, 16384, 1024, 0, 128), mn_major, extent)
    drawn = [w for w in words(figure.axes[1]) if w.isdigit()]
    assert f"the operand's {len(drawn)} core matrices" in figure.in_words


def test_chunks_stand_where_they_lie_and_zeros_are_marked():
    lines = np.arange(24).reshape(3, 8) ^ np.arange(3)[:, None]
    lines[2] = -1
    figure = draw_hopper.chunks({"row by row": np.arange(24).reshape(3, 8), "swizzled": lines})
    for ax, places in zip(figure.axes, (np.arange(24).reshape(3, 8), lines), strict=True):
        shown = {(t.get_position(), t.get_text()) for t in ax.texts}
        for (line, box), number in np.ndenumerate(places):
            assert ((box + 0.5, line + 0.5), f"{number // 8}·{number % 8}" if number >= 0 else "0") in shown
    assert [p.get_hatch() for p in figure.axes[1].patches] == [""] * 16 + ["///"] * 8
    assert "row by row: 0·0 0·1 0·2" in figure.in_words and "; 0 0 0 0 0 0 0 0" in figure.in_words


def test_a_thread_holds_the_same_cells_of_S_and_of_A():
    figure = draw_hopper.accumulator(thread=70, step=2)
    _, s, a = figure.axes
    held, taken = ({t.get_position() for t in ax.texts if t.get_text()[0] in "da"} for ax in (s, a))
    assert held == taken and len(held) == 8
    row, column = fragments.wgmma_d(70, 16)
    assert ((column - 32 + 0.5, row - 32 + 0.5), "d16") in {(t.get_position(), t.get_text()) for t in s.texts}
    tints = [len({patch.get_facecolor() for patch in ax.patches}) for ax in (s, a)]
    assert tints == [8 + 1, 4 + 1]  # a register each; two elements of A share one; and the thread's own
    assert "elements d16 to d23 of columns 32 to 47" in figure.in_words


def test_lanes_of_warpgroups_and_their_registers():
    events = pd.DataFrame(
        [("producer", "copy", 0, 2), ("consumer", "wait", 0, 3), ("consumer", "scores", 3, 9)],
        columns=["lane", "kind", "begin", "end"],
    )
    lanes, file = draw_hopper.roles(events, {"producer": 24, "consumer": 240}, "title", "clocks").axes
    assert [p.get_width() for p in lanes.patches] == [2, 3, 6]
    assert "consumer: S = Q Kᵀ 67%, waits for a barrier 33%" in lanes.figure.in_words
    assert [p.get_width() for p in file.patches] == [100 * 24 / 512, 100 * 240 / 512]
    with pytest.raises(ValueError, match="71,680 registers"):
        draw_hopper.roles(events, {"producer": 80, "consumer": 240, "other": 240}, "title", "clocks")


def test_steps_of_33_say_how_much_lies_under_the_other_ones_products():
    rows = []
    for n in range(8):  # consumer 0 computes 0-10 of each step of 40, consumer 1 starts products at 5-25
        t = 40 * n
        rows += [("consumer 0", "dS", t, t + 10), ("consumer 0", "products", t + 10, t + 20)]
        rows += [("consumer 0", "softmax", t + 20, t + 30), ("consumer 0", "send dQ", t + 30, t + 40)]
        rows += [("consumer 1", "products", t + 5, t + 25), ("consumer 1", "dS", t + 25, t + 30)]
        rows += [("consumer 1", "softmax", t + 30, t + 35), ("consumer 1", "send dQ", t + 35, t + 40)]
        rows += [("producer", "copy", t, t + 4)]
    events = pd.DataFrame(rows, columns=["lane", "kind", "begin", "end"])
    shares = draw_hopper.covered(events)
    assert shares["consumer 0", "dS"] == 0.5 and shares["consumer 0", "softmax"] == 0.5
    assert shares["consumer 0", "send dQ"] == 0 == shares["consumer 1", "dS"]
    figure = draw_hopper.steps(events, "a title", "clocks", shown=2)
    lanes, side = figure.axes
    said = [[t.get_text() for t in lanes.texts if t.get_position()[1] == y] for y in (1, 2)]
    assert said == [["2", "3–5", "6", "7"] * 2, ["1", "2", "6", "7"] * 2]
    assert words(side)[0] == "(2) dS: 50%\n(6) P: 50%\n(7) dQ: 0%" and "consumer 0's dS" in figure.in_words
