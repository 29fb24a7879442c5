"""Figures say what they show: units, device, names, and what is stale; and the data is where it belongs."""

import io
import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text

from helpers import plot, record
from helpers.figures import style
from helpers.figures.bars import beside_minimum
from helpers.figures.lines import device, of_dtype, power_of_two_axis, short

PEERS = {"SDPA MATH": 20.0, "SDPA EFFICIENT": 40.0}


def forward(rung="04_fa2_fp32", tflops=30.0, stale=False, peers=PEERS):
    """Made-up samples of the headline workload: three rounds that spread by 10 %."""
    rows = []
    for D in (64, 128):
        for N in (512, 2048, 16384):
            B, H = 16384 // N, 2048 // D
            for name, speed in ({rung: tflops} | peers).items():
                for r, wobble in enumerate((1.0, 0.9, 1.1)):
                    ms = 4 * B * H * N * N * D / (speed * wobble) / 1e9
                    rows.append((rung, "attention", "NVIDIA H200", stale, name, "fp32", B, H, N, N, D, r, ms))
    columns = ["rung", "op", "device", "stale", "name", "dtype", "B", "H", "Nq", "Nk", "D", "round", "ms"]
    return pd.DataFrame(rows, columns=columns)


CEILINGS = pd.DataFrame(
    [
        ("NVIDIA H200", n, u, r, v)
        for n, u, v in (("copy", "TB/s", 4.0), ("fp32 matmul", "TFLOP/s", 50.0))
        for r in range(3)
    ],
    columns=["device", "name", "unit", "round", "value"],
)
MEMORY = pd.DataFrame(
    [
        ("NVIDIA H200", "04_fa2_fp32", False, name, 1, 1, n, n, 64, b)
        for n in (1024, 4096, 16384)
        for name, b in (("04_fa2_fp32", 300 * n), ("SDPA MATH", 12.0 * n * n if n < 16384 else None))
    ],
    columns=["device", "rung", "stale", "name", "B", "H", "Nq", "Nk", "D", "bytes"],
)
ERROR = pd.DataFrame(
    [
        ("NVIDIA H200", "04_fa2_fp32", False, 256, n, D, output, 3e-7, 2e-7, 8e-7)
        for n in (1024, 4096)
        for D in (64, 128)
        for output in ("o", "lse")
    ],
    columns=["device", "rung", "stale", "Nq", "Nk", "D", "output", "error", "pytorch_error", "budget"],
)
TRAFFIC = pd.DataFrame({"bytes_read": [1000, 8000, 0], "bytes_written": [0, 0, 1000]}, index=["Q", "K", "O"])
POINTS = pd.DataFrame(
    {"name": ["01_naive", "04_fa2_fp32"], "flops": [1e12, 1e12], "bytes": [5e10, 1e9], "ms": [500, 30]}
)

FIGURES = {
    "throughput": lambda: plot.throughput(forward()),
    "ratio": lambda: plot.ratio(forward(), "04_fa2_fp32", list(PEERS)),
    "roofline": lambda: plot.roofline(POINTS, CEILINGS),
    "memory": lambda: plot.memory(MEMORY),
    "error": lambda: plot.error(ERROR),
}


def words(figure):
    """Every text of a figure, titles and labels included."""
    figure.draw_without_rendering()
    return [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")) if t.get_text()]


def lines(ax):
    """A panel's drawn lines that carry data, as {(colour, marker): (x, y)}."""
    return {(l.get_color(), l.get_marker()): l.get_xydata().T for l in ax.lines if l.get_marker() not in ("None", "")}


@pytest.mark.parametrize("name", FIGURES)
def test_the_device_is_in_the_title_and_the_units_on_the_axes(name):
    figure = FIGURES[name]()
    assert "NVIDIA H200" in figure.get_suptitle()
    units = {
        "throughput": "TFLOP/s",
        "ratio": "peer's time / its time",
        "roofline": "TFLOP/s",
        "memory": "memory",
        "error": "|error|",
    }
    assert units[name] in figure.axes[0].get_ylabel()
    assert all(ax.get_xlabel() for ax in figure.axes)


@pytest.mark.parametrize(
    ("op", "causal", "flops"),
    [("attention", 0, 4), ("attention", 1, 2), ("attention_backward", 0, 10), ("attention_backward", 1, 5)],
)
def test_the_axis_says_how_many_flops_are_counted(op, causal, flops):
    label = plot.throughput(forward().assign(op=op, causal=causal)).axes[0].get_ylabel()
    assert label == f"TFLOP/s  ({flops}·B·H·N²·D / time)"


@pytest.mark.parametrize("name", FIGURES)
def test_every_line_is_named_beside_it(name):
    text = words(FIGURES[name]())
    expected = {
        "ratio": set(PEERS),
        "roofline": {"01_naive", "04_fa2_fp32", "copy 4 TB/s", "fp32 matmul 50 TFLOP/s"},
        "memory": {"04_fa2_fp32", "SDPA MATH", "∝ N", "∝ N²", "out of memory above"},
        "error": {"04_fa2_fp32", "plain PyTorch", "budget"},
    }.get(name, {"04_fa2_fp32", *PEERS})
    for label in expected:
        assert any(label in t for t in text), label


def test_the_words_of_memory_have_units_and_say_what_runs_out():
    figure = FIGURES["memory"]()
    assert figure.in_words.endswith(
        "peak memory of one call, N from 1024 to 16384, both axes logarithmic: 04_fa2_fp32 from 300 KiB to 4.69 MiB, "
        "SDPA MATH from 12 MiB to 192 MiB at N = 4096, out of memory above."
    )
    assert words(figure).count("out of memory above") == 1


def test_the_points_are_the_medians():
    figure = plot.throughput(forward(tflops=30.0))
    for ax, D in zip(figure.axes, (64, 128), strict=True):
        assert ax.get_title(loc="left") == f"D = {D}"
        (x, y), *_ = lines(ax).values()
        np.testing.assert_array_equal(x, [512, 2048, 16384])
        np.testing.assert_allclose(y, 30.0)


def test_a_ratio_shows_its_spread():
    figure = plot.ratio(forward(tflops=30.0), "04_fa2_fp32", "SDPA MATH")
    (_, y), *_ = lines(figure.axes[0]).values()
    np.testing.assert_allclose(y, 1.5)
    assert all(
        any(np.array_equal(l.get_ydata(), [1, 1]) for l in ax.lines) for ax in figure.axes
    )  # as fast as the peer
    assert figure.axes[0].containers  # the error bars
    assert figure.get_supxlabel() == "marks: median of the rounds; whiskers: lowest, highest"


def test_whiskers_reach_from_the_lowest_to_the_highest_round():
    samples = forward(tflops=30.0)
    own = samples["name"] == "04_fa2_fp32"  # as fast in every round; the peer wobbles from 0.9 to 1.1
    samples.loc[own, "ms"] = samples[own].groupby(["D", "Nk"])["ms"].transform("median")
    (bars,) = plot.ratio(samples, "04_fa2_fp32", "SDPA MATH").axes[0].containers
    ends = [[y for _, y in whisker] for whisker in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[1.5 / 1.1, 1.5 / 0.9]] * 3)


def test_a_ratio_is_of_the_rung_s_own_session():
    both = pd.concat([forward("03_fa1_fp32", 5.0), forward("04_fa2_fp32", 30.0)])
    (_, y), *_ = lines(plot.ratio(both, "03_fa1_fp32", "SDPA MATH").axes[0]).values()
    np.testing.assert_allclose(y, 0.25)


def test_a_stale_record_is_shown_as_stale():
    assert "STALE: 04_fa2_fp32 changed since" in plot.throughput(forward(stale=True)).get_suptitle()
    assert "STALE" not in plot.throughput(forward()).get_suptitle()
    mixed = pd.concat([forward("03_fa1_fp32", 5.0), forward(stale=True)])
    assert "STALE: 04_fa2_fp32 changed" in plot.throughput(mixed).get_suptitle()


def test_of_a_record_of_several_rungs_none_is_named_as_the_one_that_changed():
    ring = pd.DataFrame(
        {"rung": ["50_ring"] * 2, "op": [None] * 2, "device": ["NVIDIA H200 x4"] * 2, "stale": [True] * 2}
    )
    words = "STALE: a kernel of 50_ring's record changed since"
    assert words in device(ring)
    both = pd.concat([ring, forward(stale=True)])
    assert "50_ring's record, 04_fa2_fp32 changed since" in device(both)
    two = pd.concat([ring, ring.assign(device="NVIDIA H200 x2", stale=False)])
    assert "x2 · STALE on NVIDIA H200 x4: a kernel" in device(two), "one device's record is as old, the other's is not"


def test_rungs_and_peers_of_several_sessions_share_a_figure():
    both = pd.concat([forward("03_fa1_fp32", 5.0), forward("04_fa2_fp32", 30.0)])
    assert device(both.assign(device=np.where(both["rung"] == "03_fa1_fp32", "A", "B"))) == "A and B"
    figure = plot.throughput(both)
    assert len(lines(figure.axes[0])) == 4  # two rungs and each peer once


def test_a_peer_is_that_of_the_last_session():
    of_03, of_04 = forward("03_fa1_fp32", 5.0, peers={"SDPA MATH": 10.0}), forward(peers={"SDPA MATH": 20.0})
    speeds = [y[0] for _, y in lines(plot.throughput(pd.concat([of_03, of_04])).axes[0]).values()]
    assert sorted(speeds) == pytest.approx([5, 20, 30])
    of_03 = MEMORY.replace("04_fa2_fp32", "03_fa1_fp32").assign(bytes=7 * MEMORY["bytes"])
    sizes = [y[0] for _, y in lines(plot.memory(pd.concat([of_03, MEMORY])).axes[0]).values()]
    assert sorted(sizes) == [300 * 1024, 7 * 300 * 1024, 12 * 1024**2]


def test_shapes_that_share_an_n_are_not_mixed():
    other = forward().assign(B=3, H=3)
    figure = plot.throughput(pd.concat([forward(), other]))
    assert "B·N = 16384, H·D = 2048" in figure.get_suptitle()
    with pytest.raises(ValueError, match="several"):
        plot.throughput(pd.concat([other, other.assign(B=4)]))
    with pytest.raises(ValueError, match="both with and without a causal mask"):
        plot.throughput(pd.concat([forward().assign(causal=causal) for causal in (0, 1)]))


def test_one_dtype_at_a_time():
    both = pd.concat([forward(tflops=30.0).assign(dtype="fp16"), forward(tflops=60.0).assign(dtype="bf16")])
    for dtype, speed in ((None, 30.0), ("fp16", 30.0), ("bf16", 60.0)):
        figure = plot.throughput(both, dtype)
        assert f", {dtype or 'fp16'}, " in figure.get_suptitle()
        (x, y), *_ = lines(figure.axes[0]).values()
        np.testing.assert_array_equal(x, [512, 2048, 16384])
        np.testing.assert_allclose(y, speed)
    (_, y), *_ = lines(plot.ratio(both, "04_fa2_fp32", "SDPA MATH", dtype="bf16").axes[0]).values()
    np.testing.assert_allclose(y, 3.0)
    for draw, frame in ((plot.memory, MEMORY), (plot.error, ERROR)):
        frame = pd.concat([frame.assign(dtype="fp16"), frame.assign(dtype="bf16")])
        assert ", bf16, " in draw(frame, dtype="bf16").get_suptitle()
        assert ", fp16, " in draw(frame).get_suptitle()
    rungs = pd.DataFrame({"rung": ["04", "12", "12"], "dtype": ["fp32", "fp16", "bf16"]})
    assert of_dtype(rungs, None)["dtype"].tolist() == ["fp32", "fp16"]  # each rung's first
    with pytest.raises(ValueError, match="nothing recorded for fp32; there is fp16, bf16"):
        plot.throughput(both, "fp32")


def test_softmax_is_shown_by_its_bytes():
    rows = forward("02_online_softmax", peers={"torch.softmax": 1.0, "copy": 2.0})
    rows = rows[rows["D"] == 64].assign(op="softmax", B=1, H=1, Nq=lambda f: 2**26 // f["Nk"], D=1)
    figure = plot.throughput(pd.concat([rows, rows[rows["Nk"] == 512].assign(Nk=1023)]))
    assert "TB/s" in figure.axes[0].get_ylabel()
    assert "row softmax" in figure.get_suptitle() and ", 64M elements ·" in figure.get_suptitle()
    assert figure.axes[0].get_xlabel() == "row length N"
    both = plot.throughput(pd.concat([forward(), rows]))  # attention where both are there
    assert [ax.get_xlabel() for ax in both.axes] == ["sequence length N"] * 2
    assert all(list(x) == [512, 2048, 16384] for x, _ in lines(figure.axes[0]).values())  # not 1023


def board(stale=False, yours=None):
    """What scoreboard.speeds() gives: two fp32 rungs, two of 16 bits, one without records, and the peers."""
    rows = []
    for D in (64, 128):
        fp32 = {"kind": "rung", "dtype": "fp32", "D": D, "device": "NVIDIA H200", "stale": stale}
        rows += [fp32 | {"name": "01_naive", "tflops": 1.5}, fp32 | {"name": "04_fa2_fp32", "tflops": 45.0}]
        for name, tflops, ratio in (("10_mma", 80.0, 0.25), ("11_swizzled", 200.0, 0.65), ("12_waits", None, None)):
            row = fp32 | {"name": name, "dtype": "fp16", "tflops": tflops, "to_flash": ratio}
            rows.append(row | ({"low": ratio - 0.1, "high": ratio + 0.1} if ratio else {"device": None, "stale": None}))
        for name, tflops, ratio in (("SDPA FLASH", 300.0, 1.0), ("Triton tutorial 06", 450.0, 1.5)):
            rows.append(fp32 | {"name": name, "kind": "peer", "dtype": "fp16", "tflops": tflops, "to_flash": ratio})
    return pd.DataFrame([*rows, *([yours] if yours else [])])


def test_the_staircase_has_a_step_for_every_rung_and_a_line_for_every_peer():
    figure = plot.staircase(board())
    text = words(figure)
    assert {"1.5", "45", "80", "200", "SDPA FLASH 300", "Triton tutorial 06 450", "01\nnaive", "12\nwaits"} <= set(text)
    assert text.count("not recorded yet") == 2
    assert "open: fp32" in figure.get_suptitle() and "NVIDIA H200" in figure.get_suptitle()
    dots = [[line for line in ax.lines if line.get_marker() == "o"] for ax in figure.axes]
    assert [len(found) for found in dots] == [4, 4] and not figure.axes[0].patches, "no bars without a 0 to stand on"
    assert figure.axes[0].get_yscale() == "log"
    assert "D = 64: 01_naive 1.5, " in figure.in_words and "SDPA FLASH 300" in figure.in_words


def test_a_long_staircase_has_its_panels_one_above_the_other_and_ceilings_have_no_ratio():
    more = [{"name": f"3{i}_more", "kind": "rung", "dtype": "fp16", "D": d} for i in range(6) for d in (64, 128)]
    top = [{"name": "cuBLAS", "kind": "ceiling", "dtype": "fp16", "D": d, "tflops": 745.0} for d in (64, 128)]
    table = pd.concat([board(), pd.DataFrame([*more, *top])], ignore_index=True)
    figure = plot.staircase(table)
    assert [ax.get_subplotspec().rowspan.start for ax in figure.axes] == [0, 1]
    assert words(figure).count("cuBLAS 745") == 2 and words(figure).count("not recorded yet") == 14
    eight = plot.staircase(table[~table["name"].isin([f"3{i}_more" for i in range(3, 6)])])
    assert eight.get_figwidth() < 10  # inches of 96 pixels; a notebook has 940 and would shrink the names
    assert all(ax.get_ylim()[1] > 745 for ax in figure.axes)
    assert not any("cuBLAS" in word for word in words(plot.staircase(table, "to_flash")))


def test_the_staircase_of_ratios_leaves_fp32_out_and_shows_the_spread():
    yours = {"name": "yours", "kind": "yours", "dtype": "bf16", "D": 64, "tflops": 250.0, "to_flash": 0.8, "low": 0.7}
    figure = plot.staircase(board(yours=yours | {"high": 0.95, "device": "NVIDIA A10", "stale": False}), "to_flash")
    text = words(figure)
    assert {"0.25", "0.65", "0.80", "yours", "not at D = 128"} <= set(text)
    assert "01\nnaive" not in text
    assert "yours on NVIDIA A10" in figure.get_suptitle()
    errors = [bars for bars in figure.axes[0].containers if isinstance(bars, ErrorbarContainer)]
    whiskers = [[y for _, y in bars.lines[2][0].get_segments()[0]] for bars in errors]
    assert whiskers == [pytest.approx(ends) for ends in ([0.15, 0.35], [0.55, 0.75], [0.7, 0.95])]
    assert figure.axes[0].containers and figure.axes[0].get_yscale() == "linear"
    assert "its time in the same session / this one's" in figure.axes[0].get_ylabel()


def test_the_staircase_says_what_is_stale_and_what_is_missing():
    assert "STALE: 01_naive, 04_fa2_fp32" in plot.staircase(board(stale=True)).get_suptitle()
    with pytest.raises(ValueError, match="units tflops, to_flash, not 'ms'"):
        plot.staircase(board(), "ms")
    none = board().query("name == '12_waits' or kind == 'peer'")
    with pytest.raises(ValueError, match="no rung has tflops recorded; there are 12_waits"):
        plot.staircase(none)


def test_the_lines_of_errors_are_the_rung_s_and_pytorch_s():
    figure = plot.error(ERROR)
    drawn = {look: y.tolist() for look, (_, y) in lines(figure.axes[0]).items()}
    assert drawn == {style.RUNGS[0][:2]: [3e-7] * 2, style.PEERS["SDPA MATH"][:2]: [2e-7] * 2}
    assert figure.get_suptitle() == "Error of 04_fa2_fp32, D = 64 · NVIDIA H200"


def test_every_rung_s_error_is_a_share_of_its_budget():
    frame = pd.concat([ERROR.assign(dtype=d, error=e) for d, e in (("fp16", 4e-7), ("bf16", 2e-7))])
    figure = plot.budget(frame)
    assert {"04_fa2_fp32", "O", "LSE", "fp16", "bf16", "wrong"} <= set(words(figure))
    assert "NVIDIA H200" in figure.get_suptitle()
    drawn = sorted(l.get_xdata()[0] for l in figure.axes[0].lines)
    assert drawn == pytest.approx([0.25, 0.5])
    assert "fp16: 04_fa2_fp32 0.5; bf16: 04_fa2_fp32 0.25" in figure.words()  # beside their row, not on it
    figure.draw_without_rendering()
    for ax in figure.axes:
        (wrong,) = ax.texts
        assert wrong.get_window_extent().y1 <= ax.get_window_extent().y1  # whole, below the panel's upper edge


def test_a_share_of_the_budget_is_the_largest_and_is_wrong_above_1():
    figure = plot.budget(ERROR.assign(dtype="fp16", error=np.where(ERROR["Nk"] == 1024, 2e-7, 6e-7)))
    for ax in figure.axes:
        assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([0.75])
        (wrong,) = ax.patches
        assert (wrong.get_x(), wrong.get_x() + wrong.get_width()) == (1, ax.get_xlim()[1])


def by_family(causal=0):
    """Two families at two lengths, and heads of a model at theirs: a rung, the one before it and a peer that is missing once."""
    speeds = {"13_tuned": 400.0, "12_double_buffered": 300.0, "SDPA FLASH": 350.0}
    rows = [
        (
            "13_tuned",
            "attention",
            "NVIDIA H200",
            False,
            family,
            name,
            "bf16",
            causal,
            1,
            1,
            n,
            n,
            D,
            r,
            4e-9 * n * n * D / tflops,
        )
        for family, lengths in (("randn", (1024, 4096)), ("one key", (1024, 4096)), ("heads of x", (512,)))
        for n in lengths
        for D in (64, 128)
        for name, tflops in speeds.items()
        if (family, name) != ("one key", "SDPA FLASH")
        for r in range(3)
    ]
    columns = [
        "rung",
        "op",
        "device",
        "stale",
        "family",
        "name",
        "dtype",
        "causal",
        "B",
        "H",
        "Nq",
        "Nk",
        "D",
        "round",
        "ms",
    ]
    return pd.DataFrame(rows, columns=columns)


def test_a_family_is_a_row_at_one_length_and_a_missing_peer_a_missing_point():
    figure = plot.families(by_family(), ["13_tuned", "SDPA FLASH", "FA3"])
    left, right = figure.axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["randn", "one key", "heads of x, N = 512"]
    points = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in right.lines}
    assert points == {
        "13_tuned": ([pytest.approx(400)] * 3, [0, 1, 2]),
        "SDPA FLASH": ([pytest.approx(350)] * 2, [0, 2]),
    }
    ours, flash = ({line.get_label(): line for line in right.lines}[name] for name in ("13_tuned", "SDPA FLASH"))
    assert flash.get_zorder() > ours.get_zorder() and flash.get_markersize() < ours.get_markersize()  # both can be seen
    (ax, _) = plot.families(by_family().replace("SDPA FLASH", "FA3")).axes
    tall = {line.get_label(): line.get_markersize() for line in ax.lines}
    assert tall["FA3"] > 1.5 * tall["13_tuned"]  # a bar is seen above and below a point
    assert {t.get_text() for t in figure.legends[0].get_texts()} == set(points)
    assert "bf16, N = 4096 · NVIDIA H200" in figure.get_suptitle() and right.get_xlabel() == "TFLOP/s"
    assert {line.get_label() for line in plot.families(by_family()).axes[0].lines} == {*points, "12_double_buffered"}
    with pytest.raises(ValueError, match="nothing recorded in bf16 under a causal mask"):
        plot.families(by_family(), causal=True)


def test_speed_by_heads_has_a_line_for_each_that_ran_in_a_panel_for_each_D():
    samples = forward("32_ping_pong", 600.0, peers={"FA3": 500.0}).assign(dtype="bf16", causal=0, B=1)
    samples = pd.concat([samples.assign(H=H, ms=samples["ms"] * k) for H, k in ((4, 2.0), (16, 1.0))])
    figure = plot.by_heads(samples, 2048)
    speeds = record.medians(samples[samples["Nk"] == 2048])
    for ax, D in zip(figure.axes, (64, 128), strict=True):
        drawn = [line.get_xydata().T for line in ax.lines]
        assert len(drawn) == 2 and ax.get_title("left") == f"D = {D}"
        for name, (x, y) in zip(("32_ping_pong", "FA3"), drawn, strict=True):
            wanted = speeds[(speeds["name"] == name) & (speeds["D"] == D)].set_index("H")["tflops"]
            assert list(x) == [4, 16] and np.allclose(y, wanted[[4, 16]])
    assert {"32_ping_pong", "FA3", "heads", "One sequence of 2048 tokens, bf16 · NVIDIA H200"} <= set(words(figure))
    with pytest.raises(ValueError, match="nothing recorded at N = 2048 under a causal mask"):
        plot.by_heads(samples, causal=True)


def test_published_steps_and_ours_share_no_axis_but_percent():
    figure = plot.percent_steps(record.sixteen_steps(), {"11_swizzled": 66.0, "12_waits": float("nan")}, "NVIDIA H200")
    text = words(figure)
    assert {"2 · Swizzling", "72.4", "11_swizzled", "66", "not recorded yet", "this series, NVIDIA H200"} <= set(text)
    assert "percent of FlashAttention-2" in figure.axes[0].get_xlabel()
    assert figure.get_suptitle().startswith("Percent of FlashAttention-2's speed") and "H200" in figure.get_suptitle()
    assert "A100 and RTX 3090: 1 · Base Implementation 16.6, 49.8; 2 · Swizzling 72.4, 98.6;" in figure.in_words
    assert "This series: 11_swizzled 66, 12_waits not recorded yet." in figure.in_words
    assert len(figure.in_words) < style.MOST_WORDS
    (theirs,) = (line for line in figure.axes[0].lines if line.get_label() == "the same, RTX 3090 (published)")
    assert theirs.get_xdata().tolist() == record.sixteen_steps()["rtx3090"].tolist()


def test_predictions_stand_beside_counts():
    figure = plot.traffic(TRAFFIC, {"Q": 1000, "K": 7000})
    text = words(figure)
    assert {"Q", "K", "O", "8 kB", "7 kB", "read", "written", "predicted"} <= set(text)
    assert "bytes" in figure.axes[0].get_xlabel()
    assert "predicted" not in words(plot.traffic(TRAFFIC))
    assert "predicted" in words(plot.traffic(TRAFFIC, {"K": 7000}))  # also without a guess for the first tensor
    with pytest.raises(ValueError, match=r"prediction for \['X'\], but counted were \['Q', 'K', 'O'\]"):
        plot.traffic(TRAFFIC, {"X": 1})


def test_bytes_that_are_written_follow_those_read_and_a_prediction_stands_below():
    counted = pd.DataFrame({"bytes_read": [1000, 2000], "bytes_written": [500, 0]}, index=["m", "Q"])
    bars = plot.traffic(counted, {"Q": 900}).axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 1000), (0, 2000), (1000, 500), (0, 900)]
    assert bars[0].get_facecolor() == to_rgba(style.BLUE)
    assert bars[3].get_y() > bars[1].get_y()
    table = pd.DataFrame({"bytes_read": [2048], "bytes_written": [0], "minimum_bytes": [1024]}, index=["Q"])
    assert [bar.get_width() for bar in beside_minimum(table, "").axes[0].patches] == [2048, 1024]


def test_bad_requests_name_what_there_is():
    with pytest.raises(ValueError, match=r"D = 32; there are \[64, 128\]"):
        plot.error(ERROR, D=32)
    with pytest.raises(ValueError, match="one rung at a time, not of 04_fa2_fp32, 03_fa1_fp32"):
        plot.error(pd.concat([ERROR, ERROR.assign(rung="03_fa1_fp32")]))
    with pytest.raises(ValueError, match=r"lack \['fp64 matmul'\]"):
        plot.roofline(POINTS, CEILINGS, roofs=["fp64 matmul"])


def test_a_roofline_tells_its_ceilings_and_where_each_kernel_stands():
    words = plot.roofline(POINTS, CEILINGS).in_words
    assert "copy 4 TB/s, fp32 matmul 50 TFLOP/s from 12.5 FLOP per byte on. " in words
    assert words.endswith("01_naive 2 TFLOP/s at 20 FLOP per byte, 04_fa2_fp32 33.3 TFLOP/s at 1000 FLOP per byte.")
    rounds = CEILINGS["round"].map({0: 0.5, 1: 1.0, 2: 1.2})
    assert plot.roofline(POINTS, CEILINGS.assign(value=rounds * CEILINGS["value"])).in_words == words  # by the medians


def test_a_roofline_says_where_its_points_were_measured():
    shape = {"dtype": "fp32", "B": 4, "H": 32, "Nq": 2048, "Nk": 2048, "D": 64}
    title = plot.roofline(POINTS.assign(**shape), CEILINGS).get_suptitle()
    assert title.startswith("Roofline, fp32, B = 4, H = 32, N = 2048, D = 64 · NVIDIA H200")


def test_a_line_that_ends_early_is_named_beside_its_last_point():
    samples = forward()
    samples = samples[(samples["name"] != "SDPA MATH") | (samples["Nk"] < 16384)]
    figure = plot.throughput(samples)
    ax = figure.axes[0]
    assert {text.get_text() for text in ax.texts if text.arrow_patch} == {"04_fa2_fp32", "SDPA EFFICIENT"}
    (math,) = (text for text in ax.texts if text.get_text() == "SDPA MATH")
    figure.draw_without_rendering()
    box, (x, y) = math.get_window_extent(), ax.transData.transform((2048, 20))
    assert x < box.x0 < x + 20 and box.y0 < y < box.y1


def test_a_kernel_s_name_keeps_clear_of_the_roof_over_it_even_if_there_is_a_higher_one():
    higher = pd.concat(
        [CEILINGS, pd.DataFrame({"name": ["fp16 matmul"], "value": [700.0], "device": CEILINGS.device[:1]})]
    )
    near = pd.DataFrame({"name": ["04_fa2_fp32"], "flops": [1e12], "bytes": [1e9], "ms": [22]})  # 45 TFLOP/s
    (ax,) = plot.roofline(near, higher, ["fp32 matmul", "fp16 matmul"]).axes
    (name,) = (t for t in ax.texts if t.get_text().startswith("04_fa2_fp32"))
    assert name.get_va() == "top"
    assert ax.get_ylim()[1] > 700  # the higher roof is in the panel, too


def test_the_guides_of_memory_rise_with_n_and_with_its_square():
    guides = {line.get_label(): line.get_xydata() for line in plot.memory(MEMORY).axes[0].lines}
    for label, power in (("∝ N", 1), ("∝ N²", 2)):
        first, *_, last = guides[label]
        assert last[1] / first[1] == pytest.approx((last[0] / first[0]) ** power)


def test_lengths_are_counted_in_powers_of_1024():
    lengths = (512, 1000, 1024, 1500, 4097, 16384, 1 << 20)
    assert [short(n) for n in lengths] == ["512", "1000", "1k", "1500", "4097", "16k", "1M"]


def test_an_axis_with_many_lengths_keeps_the_tick_of_the_longest():
    _, (ax,) = style.canvas(4, 3)
    power_of_two_axis(ax, [2**n for n in range(10)], "N")
    assert list(ax.xaxis.get_major_locator().locs) == [2, 8, 32, 128, 512]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(a, b):
    """Contrast ratio of two colours (WCAG 2.2, success criterion 1.4.3)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_read_on_the_card():
    assert contrast(plot.INK, plot.CARD) > 12
    assert contrast(plot.MUTED, plot.CARD) > 5
    for colour, _, _ in [*plot.RUNGS, *plot.PEERS.values()]:
        assert contrast(colour, plot.CARD) > 3, colour  # graphics and large text


def test_lines_differ_without_colour():
    looks = [*plot.RUNGS, *plot.PEERS.values()]
    assert (
        len({(marker, str(dash)) for _, marker, dash in looks}) == len(looks) - 1
    )  # SDPA MATH and torch.softmax: never together


def test_names_at_the_lines_ends_don_t_overlap():
    figure = plot.throughput(
        forward(tflops=39.9, peers={"SDPA MATH": 39.8, "SDPA EFFICIENT": 40.0, "SDPA FLASH": 40.1})
    )
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = sorted((Text.get_window_extent(t) for t in ax.texts), key=lambda box: box.y0)
        assert len(boxes) == 4
        assert all(a.y1 <= b.y0 + 1 for a, b in itertools.pairwise(boxes))


def test_a_figure_shows_itself_once_and_on_its_own_card():
    from PIL import Image

    figure = plot.throughput(forward())
    data, size = figure._repr_png_()
    image = Image.open(io.BytesIO(data))
    assert size["width"] == min(round(image.width * 96 / 144), 940) and size["height"] < image.height
    corner = image.convert("RGBA").getpixel((3, 3))
    assert corner[3] == 255
    np.testing.assert_allclose(np.array(corner[:3]) / 255, to_rgb(plot.CARD), atol=0.01)


def test_matplotlib_s_own_settings_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot.throughput(forward())
    assert dict(matplotlib.rcParams) == before
