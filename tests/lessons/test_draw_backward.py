"""The drawings of notebooks 22, 23 and 33 say what the numbers they are given say, and the numbers of 33 what its code says."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import FancyArrowPatch

from helpers import draw_backward, sass
from helpers.figures.style import BLUE, ORANGE
from helpers.ladder.rung import rung

PNG = b"\x89PNG"


def words(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def arrows(ax) -> list[FancyArrowPatch]:
    return [p for p in ax.patches if isinstance(p, FancyArrowPatch)]


def test_points_carry_their_bytes():
    frame = pd.DataFrame({"P": [2.0**31, 2.0**32], "LSE": [2.0**21, 1536.0]}, index=[1024, 2048])
    figure = draw_backward.stored_bytes(frame, "title")
    assert words(figure.axes[0]) == ["2 GiB", "4 GiB", "2 MiB", "1.5 KiB"]
    assert figure.axes[0].get_yscale() == "log" and not figure.axes[0].patches  # a bar has no length on such an axis
    assert "P from 2 GiB to 4 GiB" in figure.in_words
    assert figure.png().startswith(PNG)


@pytest.mark.parametrize(("panel", "across", "last"), [(0, 0, "37"), (1, 3, "31"), (2, 3, "13")])
def test_an_order_marks_the_sums_that_cross_ctas(panel, across, last):
    """3 x 3 tiles: none cross in one CTA; a CTA per column lets the three of dQ cross, one per row those of dK and dV."""
    ax = draw_backward.loop_orders(3).axes[panel]
    crossing = [a for a in arrows(ax) if a.get_edgecolor()[:3] == pytest.approx(_rgb(ORANGE))]
    assert len(arrows(ax)) == 6 and len(crossing) == across
    numbers = [int(w) for w in words(ax) if w.isdigit()]
    assert len(numbers) == 9 and max(numbers) == (9 if panel == 0 else 3)
    at = {t.get_position(): t.get_text() for t in ax.texts}
    assert at[0.2, 2.22] + at[2.2, 0.22] == last  # down the first column, along the first row
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
    assert {"2   dV$_j$ += Pᵀ dO$_i$", "4   dK$_j$ += dSᵀ Q$_i$", "5   dQ$_i$ += dS K$_j$"} <= {*words(figure.axes[0])}
    with pytest.raises(ValueError, match="ways has to name one of registers"):
        draw_backward.dataflow(ways | {("S", "P"): "the post"}, {}, "title")
    with pytest.raises(ValueError, match="ways has to name"):
        draw_backward.dataflow({("S", "P"): "registers"}, {}, "title")


def test_a_block_bears_the_number_of_its_warp():
    blocks = np.array([[0, 1], [2, 3], [4, 5]])
    lines = {"d = 64": {("dS", "keys", "queries"): blocks}, "d = 128": {("dQ", "queries", "d"): blocks.T}}
    figure = draw_backward.owners(lines, {"d = 64": 1, "d = 128": 2})
    first, second = figure.axes
    assert words(first) == ["0", "1", "2", "3", "4", "5", "dS", "queries", "keys"]
    assert words(second) == ["0", "2", "4", "1", "3", "5", "dQ", "d", "queries"]
    assert [len({patch.get_facecolor() for patch in ax.patches}) for ax in (first, second)] == [6, 6]
    assert figure.png().startswith(PNG)


def test_a_lane_of_a_hand_over_has_its_work_its_wait_and_its_turn():
    steps = pd.DataFrame([(0, 3, 0, 4, 4, 5), (1, 3, 0, 4, 5, 6)], columns="cta tile begin ready turn end".split())
    figure = draw_backward.hand_over(steps, "title")
    (ax,) = figure.axes
    assert figure.in_words.endswith("they wait, CTA by CTA: 0, 1.")
    assert [p.get_width() for p in ax.patches] == [4, 0, 1, 4, 1, 1]
    assert words(ax) == ["3", "3"]


def test_stripes_run_along_k_or_across_it():
    """A's k runs across the page and B's down it: rows along k are lines across in A and lines down in B."""
    products = {
        "C += A B": (("A", "m", "k", True), ("B", "n", "k", False)),
        "C = A B": (("A", "m", "k", None), ("B", "n", "k", True)),
    }
    figure = draw_backward.operands(products)
    first, second = figure.axes
    across = [line.get_ydata()[0] == line.get_ydata()[1] for line in first.lines]
    in_a = [line.get_xdata()[0] < 1.5 for line in first.lines]
    assert across == [True] * len(across) and any(in_a) and not all(in_a)  # A along its k, B across its k: both lie
    assert all(line.get_xdata()[0] == line.get_xdata()[1] and line.get_xdata()[0] > 1.5 for line in second.lines)
    assert "+=" in words(first) and "=" in words(second)
    told = "C += A B: A rows run along k: ldmatrix, B rows run across k: ldmatrix.trans"
    assert draw_backward.operands({"C += A B": products["C += A B"]}).in_words == f"{told}."
    assert f"{told}; C = A B: A in registers already, B" in figure.in_words
    along, across_k, registers = (patch.get_facecolor() for patch in figure.legends[0].legend_handles)
    faces = [patch.get_facecolor() for ax in (first, second) for patch in ax.patches[:2]]
    assert faces == [along, across_k, registers, along]


# 33_backward_wgmma


@pytest.mark.parametrize("d", [64, 128])
def test_parts_of_33_add_up_to_what_its_header_says(d):
    whole = rung("33_backward_wgmma")
    values = draw_backward.constants(whole.source, d)
    parts = draw_backward.parts(values)
    assert set(parts) >= {"K", "V", "Q", "dO"} and sum(parts.values()) == values["smem_bytes"]
    said = sass.tile(whole, d)
    assert (values["Br"], values["Bc"], values["threads"]) == (said["Br"], said["Bc"], said["threads"])
    assert -(-values["smem_bytes"] // 1024) == said["smem_kb"]


def test_shared_memory_is_as_long_as_its_parts():
    (ax,) = draw_backward.shared_memory({"d = 64": {"K": 16384, "barriers": 64}}, "title").axes
    assert [p.get_width() for p in ax.patches] == [16, 64 / 1024]
    assert "17 KB" in words(ax) and "K\n16" in words(ax)  # a KB that has begun counts
    assert "barriers: 0.0625" in words(ax)  # too narrow for a name


# Two products of three instructions and one of two, which is waited for in the next turn
LOOP = [
    "F2FP.F16.F32.PACK_AB R1",
    "HGMMA.64x96x16.F32 R24, gdesc[UR36].tnspA, RZ, !UPT",
    "HGMMA.64x96x16.F32 R24, gdesc[UR36].tnspA, R24, gsb0",
    "HGMMA.64x64x16.F32 R120, R192, gdesc[UR20].tnspB, R120, gsb0",
    "HGMMA.64x64x16.F32 R120, R196, gdesc[UR20].tnspB, R120, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "MUFU.EX2 R1, R1",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "STSM.16.MT88.4 [R1], R4",
    "HGMMA.64x48x16.F32 R24, gdesc[UR36], gdesc[UR40], R24, gsb0",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",
]


def lines(*instructions: str):
    return [(16 * i, *text.split(" ", 1)) for i, text in enumerate(instructions)]


def test_a_program_shows_its_products_and_the_work_under_none():
    found = draw_backward.products(lines(*LOOP), ["S", "dV", "dQ"])
    (ax,) = draw_backward.program(found, draw_backward.work(lines(*LOOP), found), len(LOOP), "title").axes
    bars = [(p.get_x(), p.get_width()) for p in ax.patches]
    assert (0, 5) in bars and (9, 2) in bars and (1, 4) in bars  # of dQ both ends, of S all
    orange = [c for c in ax.collections if c.get_colors()[0][:3] == pytest.approx(_rgb(ORANGE))]
    assert sum(len(c.get_segments()) for c in orange) == 1  # the write alone
    assert [t.get_text() for t in ax.get_yticklabels()][:3] == ["S", "dV", "dQ"]
    done = pd.DataFrame({"kind": [next(iter(draw_backward.WORK))] * 4, "at": range(4), "under_way": [1, 1, 1, 0]})
    assert "under no product: 25% of" in draw_backward.program(found, done, len(LOOP), "title").in_words


@pytest.mark.parametrize(("d", "pieces_of_dv"), [(64, [5, 3]), (128, [4])])
def test_the_loop_of_33_has_its_five_products(d, pieces_of_dv):
    """At d = 64 dV's second piece comes with dK."""
    whole = rung("33_backward_wgmma")
    names = draw_backward.accumulators(whole.source, d)
    assert names == ["dP", "dV", "S", *["dV"] * (len(pieces_of_dv) - 1), "dK", "dQ"]
    found = draw_backward.products(draw_backward.main_loop(whole, d), names).set_index("name")
    assert (found.loc[["dV", "dK"], "A"] == "registers").all() and (found.loc[["S", "dP"], "A"] == "K-major").all()
    values = draw_backward.constants(whole.source, d)
    assert found.loc["S", "shape"] == f"64x{values['Br']}x16" and set(found.loc[["dV"], "shape"]) == {f"64x{d}x16"}
    assert found.loc[["dV"], "instructions"].tolist() == pieces_of_dv and sum(pieces_of_dv) == values["Br"] // 16
    assert found.loc["dP", "instructions"] == d // 16
    assert found["done"].loc[["dV"]].iloc[-1] == found["done"]["dK" if len(pieces_of_dv) > 1 else "dV"]


def test_a_draft_is_where_its_ratio_is_and_filled_if_it_stayed():
    rows = [(1, "base", "yes", 64, 0.9), (1, "base", "yes", 128, 1.1), (2, "more", "at D = 64", 64, 1.0), (2, "more", "at D = 64", 128, 0.8)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["step", "what", "kept", "D", "ratio"])
    figure = draw_backward.drafts(frame, "title", "SDPA CUDNN")
    (ax,) = figure.axes
    assert ax.get_xlabel() == "times as fast as SDPA CUDNN"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "D = 64",
        "D = 128",
        "hollow: surpassed or did not stay",
    ]
    marks = [(line.get_xdata()[0], line.get_ydata()[0], line.get_markerfacecolor()) for line in ax.lines[:4]]
    assert [m[:2] for m in marks] == [(0.9, 0), (1.1, 0), (1.0, 1), (0.8, 1)]
    assert [m[2] for m in marks] == [BLUE, ORANGE, BLUE, draw_backward.CARD]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1 · base", "2 · more"]


def steps() -> pd.DataFrame:
    rows = [
        (1, "first", "no", 64, 0.8, 1.4),
        (1, "first", "no", 128, 0.6, 1.1),
        (2, "second", "at D = 64", 64, 0.9, 1.5),
    ]
    frame = pd.DataFrame(rows, columns=["step", "what", "kept", "D", "ratio", "ratio_causal"])
    return frame.assign(device="NVIDIA H200", stale=False, rung="22_backward_fp32")


def test_a_draft_has_its_whole_name_and_a_dot_for_each_number():
    long = "one " * 40
    figure = draw_backward.steps_taken(steps(), "Drafts", "SDPA MATH", {1: "first", 2: long})
    labels = [t.get_text().replace("\n", " ") for t in figure.axes[0].get_yticklabels()]
    assert labels == ["1 · first", f"2 · {long.strip()}"]
    for ax, column in zip(figure.axes, ("ratio", "ratio_causal")):
        dots = np.concatenate([c.get_offsets()[:, 0] for c in ax.collections])
        assert sorted(dots) == sorted(steps()[column]) and not [p for p in ax.patches if p.get_width()]
    assert "H200" in figure.get_suptitle() and "0.80 at D = 64" in figure.in_words
    assert len(draw_backward.steps_taken(steps(), "Drafts", "SDPA MATH", {2: "second"}).axes[0].get_yticks()) == 1


def test_an_addition_touches_the_sectors_that_it_says():
    lanes = {"rows": [64 * (lane // 4) + 2 * (lane % 4) for lane in range(32)], "neighbours": list(range(32))}
    figure = draw_backward.additions(lanes, "title")
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "rows: 8 sectors, 50% of their bytes added to",
        "neighbours: 4 sectors, 100% of their bytes added to",
    ]
    assert all({str(lane) for lane in range(32)} <= set(words(ax)) for ax in figure.axes)
    assert "8 lines, 8 sectors" in figure.in_words
    begins = [[said for said in words(ax) if said.startswith("byte")] for ax in figure.axes]
    assert begins == [[f"byte {256 * n}" for n in range(8)], ["byte 0"]]
