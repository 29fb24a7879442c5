"""The drawings of the tensor-core rungs say what the layouts they are given say."""

import pandas as pd
import pytest

from helpers import draw_mma, fragments

PNG = b"\x89PNG"


def words(figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def test_every_cell_of_a_fragment_names_its_lane_once():
    figure = draw_mma.fragments({"C (16 × 8)": (fragments.c_fragment, 4, 16, 8)}, lane=5)
    said = words(figure)
    assert len(said) == 128 and {f"c{i}" for i in range(4)} <= set(said)
    assert all(said.count(str(lane)) == 4 for lane in range(32) if lane != 5) and "5" not in said
    assert figure.png().startswith(PNG)


def test_a_tint_is_a_register():
    """Of two 16-bit elements, or one of C in fp32."""
    panels = {"C": (fragments.c_fragment, 4, 16, 8), "A": (fragments.a_fragment, 8, 16, 16)}
    for ax in draw_mma.fragments(panels).axes:
        assert len({patch.get_facecolor() for patch in ax.patches}) == 4 + 1  # and the colour of the lane that is shown


@pytest.mark.parametrize("chunks, place, wavefronts", [
    (8, lambda r, c: c ^ r % 8, 1),
    (8, lambda r, c: c ^ r % 4, 2),
    (4, lambda r, c: c ^ r // 2 % 4, 1),
    (16, lambda r, c: c ^ r % 8, 1),
])  # fmt: skip
def test_a_swizzle_is_labelled_with_its_wavefronts(chunks, place, wavefronts):
    plain, swizzled = draw_mma.swizzled_tile(place, chunks).axes
    assert plain.get_title(loc="left").split(": ")[2] == f"{4 if chunks == 4 else 8} wavefronts for these 8 rows"
    assert swizzled.get_title(loc="left").split(": ")[1].startswith(f"{wavefronts} wavefront")


def test_a_swizzle_names_its_banks_and_tells_what_it_spreads():
    figure = draw_mma.swizzled_tile(lambda r, c: c ^ r % 8, 8)
    assert [said for said in words(figure) if "–" in said] == 2 * [f"{4 * x}–{4 * x + 3}" for x in range(8)]
    told = "in 1 of the 8 groups of four banks if it is stored at place 0, and in 8 of them if it is swizzled"
    assert told in figure.in_words


def test_lanes_of_a_timeline():
    events = pd.DataFrame([("warp 0", "wait", 0, 3), ("warp 0", "mma", 3, 9)], columns=["lane", "kind", "begin", "end"])
    figure = draw_mma.timeline(events, "title", "clocks", "what to see")
    assert [p.get_width() for p in figure.axes[0].patches] == [3, 6] and figure.in_words == "what to see"
    assert figure.axes[0].yaxis_inverted()  # the first lane is on top
    assert len(draw_mma.timeline(events, "title", "", "").axes[0].get_xticks()) == 0
    assert draw_mma.timeline(events, "", "clocks", "", until=20).axes[0].get_xlim()[1] == pytest.approx(20.2)


def test_a_copy_ordered_ahead_leaves_only_the_first_wait():
    waits = {ahead: draw_mma.prescribed(ahead).query("kind == 'wait'") for ahead in (False, True)}
    assert len(waits[False]) == 3 and len(waits[True]) == 1
    late = draw_mma.prescribed(True, copy=7).query("kind == 'wait'")  # a copy longer than a tile's work is waited for
    assert (late["end"] - late["begin"]).tolist() == [7, 2, 2]
    for ahead in (False, True):
        warp = draw_mma.prescribed(ahead).query("lane == 'warp'")
        assert (
            warp["begin"].iloc[1:].to_numpy() == warp["end"].iloc[:-1].to_numpy()
        ).all()  # one thing after the other


@pytest.mark.parametrize("lane", [0, 5, 31])
@pytest.mark.parametrize("operand", draw_mma.OPERANDS)
def test_what_ldmatrix_hands_out_is_the_fragment_of_the_product(operand, lane):
    """Of Q the operand A; of K two operands B, whose k runs along d; of V two whose k runs along the keys."""
    layout = draw_mma.OPERANDS[operand][3]
    for register, places in enumerate(draw_mma.held(operand, lane)):
        if operand == "Q":
            wanted = [layout(lane, 2 * register + i) for i in range(2)]
        else:  # registers 0 and 1 are the first operand B, 2 and 3 that of the next eight columns
            k_n = [layout(lane, 2 * (register % 2) + i) for i in range(2)]
            wanted = [(n + register // 2 * 8, k) if operand == "K" else (k, n + register // 2 * 8) for k, n in k_n]
        assert places == wanted


def test_operands_name_their_lanes_and_axes():
    figure = draw_mma.operands(lane=5)
    assert [ax.get_title(loc="left")[0] for ax in figure.axes] == ["Q", "K", "V"]
    assert all({ax.get_ylabel(), ax.get_xlabel()} <= {"query", "key", "column (d)"} for ax in figure.axes)
    assert words(figure).count("5") == 3 * 8 and figure.png().startswith(PNG) and "trans" in figure.in_words
    matrices = [f"lanes {8 * n}–{8 * n + 7}\nregister {n}" for n in range(4)]
    assert [said for said in words(figure) if "register" in said] == 3 * matrices
    row, chunk = draw_mma.OPERANDS["K"][2](8)
    assert (row, chunk) == (0, 1) and "of K 8-15 name the upper right and 16-23 the lower left" in figure.in_words


def test_keys_are_split_into_columns_of_S_and_queries_into_rows():
    split = draw_mma.split_over_warps()
    assert [[t.get_text() for t in ax.texts].count("warp 0") for ax in split.axes] == [1, 2]  # of S; of S and of O
    of_s = [[patch.get_bbox().bounds for patch in ax.patches if patch.get_x() < 4] for ax in split.axes]
    assert of_s == [[(w, 0, 1, 4) for w in range(4)], [(0, w, 4, 1) for w in range(4)]]
    assert split.png().startswith(PNG)


def test_a_dot_for_each_label_and_dimension_on_an_honest_axis():
    frame = pd.DataFrame(
        {"label": ["a", "a", "b"], "D": [64, 128, 64], "ratio": [1.05, 0.92, 1.2], "kept": [True, True, False]}
    )
    figure = draw_mma.dots(frame, "title", "times", "what to see")
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.texts] == ["1.05", "0.92", "1.20"] and not ax.patches
    faces = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() in ("o", "s")]
    assert faces[0] != faces[1] and faces[2] not in faces[:2]  # by D, and hollow
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["D = 64", "D = 128", "did not stay"]
    looks = [[(m.get_marker(), m.get_color()) for m in marks] for marks in (ax.lines, figure.legends[0].legend_handles)]
    assert looks[0][:2] == looks[1][:2]
