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


def test_ldmatrix_names_each_lanes_address_once():
    said = words(draw_mma.ldmatrix(fragments.a_fragment))
    assert sorted(t for t in said if "address" in t) == sorted(f"address from lane {lane}" for lane in range(32))


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


def test_lanes_of_a_timeline_and_steps():
    events = pd.DataFrame([("warp 0", "wait", 0, 3), ("warp 0", "mma", 3, 9)], columns=["lane", "kind", "begin", "end"])
    (ax,) = draw_mma.timeline(events, "title", "clocks").axes
    assert [p.get_width() for p in ax.patches] == [3, 6]
    frame = pd.DataFrame(
        {"step": [1, 2], "what": ["a", "b"], "kept": ["yes", "no: slower"], "D": 64, "ratio": [1.05, 1.02]}
    )
    (ax,) = draw_mma.steps(frame, "title").axes
    assert [t.get_text() for t in ax.texts] == ["1.05", "1.02"]
    assert ax.patches[0].get_facecolor() != ax.patches[1].get_facecolor()
