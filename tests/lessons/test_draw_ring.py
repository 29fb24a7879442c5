"""The drawings of notebook 50 say what they show, and show what the model and the layouts give."""

from __future__ import annotations

import pandas as pd
import pytest
from ring_samples import samples

from helpers import draw_ring, record, ring_time
from helpers.measure import ring as measured


def test_the_masks_count_every_score_once():
    words = draw_ring.masks(N=16, ranks=4).in_words
    for layout, counts in (("contiguous", (10, 26, 42, 58)), ("zigzag", (34,) * 4), ("striped", (28, 32, 36, 40))):
        assert sum(counts) == 16 * 17 // 2
        assert f"{layout}: {', '.join(map(str, counts))} scores by rank" in words


def test_in_step_t_a_rank_has_the_keys_of_the_rank_t_before_it():
    steps = {t.get_position(): t.get_text() for t in draw_ring.masks(N=16, ranks=4).axes[0].texts}
    assert [steps[4 * s + 0.5, 12.53] for s in range(4)] == ["3", "2", "1", "0"]  # a row of rank 3, contiguous
    keys = "".join(t.get_text()[-1] for t in draw_ring.steps(4).axes[0].texts if t.get_text().startswith("keys of"))
    assert [keys[i : i + 4] for i in range(0, 16, 4)] == ["0321", "1032", "2103", "3210"]
    told = draw_ring.wanted(2, 4).in_words
    assert "Its early piece: own (half), rank 1 (half), rank 0 (half); " in told
    assert "its late piece: own (all), rank 1 (half), rank 0 (half), rank 3 (all)." in told


@pytest.mark.parametrize(("layout", "busiest"), [("contiguous", "3.5"), ("zigzag", "2"), ("striped", "2")])
def test_the_steps_say_who_has_most(layout, busiest):
    assert f"the busiest has {busiest}, the mean is 2." in draw_ring.steps(4, layout).in_words


def test_a_timeline_tells_when_it_is_done():
    frame = ring_time.timeline(ring_time.Problem(N=65536), ring_time.Machine(), 4, "contiguous")
    figure = draw_ring.timelines({"run": frame}, title="a title")
    assert f"{frame['end'].max() * 1e3:.3g} ms" in figure.in_words
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][:2] == ["rank 0 GPU", "rank 0 link"]
    recorded = pd.DataFrame(
        {"rank": [0, 1, 1], "what": ["attention", "transfer", "merge"], "begin": [0.0, 1, 2], "end": [2.0, 2, 3]}
    )
    figure = draw_ring.timelines({"recorded": recorded}, unit=1)
    assert "recorded: 3 ms, GPUs at work 50%" in figure.in_words  # 3 of the two ranks' 6 ms
    assert figure.axes[0].get_title(loc="left") == "recorded: done after 3 ms, GPUs at work 50% of it"
    comes = pd.DataFrame({"rank": 0, "what": ["attention", "grads"], "begin": [0.0, 0.0], "end": [1.0, 2.0]})
    assert "run: 2 ms, GPUs at work 50%" in draw_ring.timelines({"run": comes}, unit=1).in_words  # grads on the link


def test_a_record_is_drawn_as_points_and_beside_its_peers():
    frame = pd.concat([samples(1.9), samples(1.5).replace({measured.STEM: "all-gather"}).query("layout != ''")])
    frame = frame.assign(device="NVIDIA H200 x2")
    points = draw_ring.measured(frame, ranks=2, D=128, causal=1, passes="forward")
    assert points == {"zigzag": [(65536, pytest.approx(1.9))]}
    assert "50_ring 1.90" in draw_ring.beside_peers(frame, ranks=2).in_words
    twice = pd.concat([frame, frame.assign(round=frame["round"] + 3)])
    for rounds, left_out in ((frame, "1 slow round"), (twice, "2 slow rounds")):
        slow = (rounds["name"] == "all-gather") & (rounds["round"] % 3 == 0)
        told = draw_ring.beside_peers(rounds.assign(ms=rounds["ms"].where(~slow, 100 * rounds["ms"])), ranks=2).in_words
        assert f"all-gather ({left_out} left out) 1.50" in told
    model = pd.DataFrame({"zigzag": [1.0, 1.9]}, [1024, 65536])
    assert "zigzag 1.00 at N = 1k, 1.90 at 64k" in draw_ring.speedups(model, 2, "two", points).in_words


def test_whiskers_reach_from_the_slowest_to_the_fastest_round():
    times = pd.Series({0: 1.0, 1: 0.5, 2: 1.25})  # the ring's, times as long by round
    frame = samples(1.0).assign(device="NVIDIA H200 x2")
    frame["ms"] *= frame["round"].map(times).where(frame["name"] == measured.STEM, 1.0)
    (bars,) = draw_ring.beside_peers(frame, ranks=2).axes[0].containers
    (whisker,) = bars.lines[2][0].get_segments()
    assert [x for x, _ in whisker] == pytest.approx([1 / 1.25, 1 / 0.5])


def test_records_of_a_link_are_in_their_units(monkeypatch):
    rows = [("copies alone", 8192, 64, 8, 16, 2.0, 4e8), ("read directly", 16384, 128, 0, 16, 4.0, 0.0)]
    frame = pd.DataFrame(rows, columns=["name", "N", "D", "copiers", "H", "ms", "bytes"]).assign(device="NVIDIA H200")
    monkeypatch.setattr(draw_ring, "recorded", lambda *_: frame)
    assert "N = 8k, D = 64: 200 with 8" in draw_ring.recorded_link().in_words  # GB/s
    assert draw_ring.direct_reads().iloc[0, -1] == round(4 * 16 * 8192**2 * 128 / 4e-3 / 1e12)


def test_what_is_held_and_measured_is_told_for_each_number_of_gpus():
    frame = pd.DataFrame({"ranks": [2], "N": 16384, "bytes": 3 * 2**30})
    (ax,) = draw_ring.memory(frame, [16384, 65536]).axes
    assert [list(l.get_ydata()) for l in ax.lines if l.get_label() == "2 GPUs, measured"] == [[3.0]]  # GiB
    told = draw_ring.efficiency(pd.DataFrame({"64k": [1.0, 0.9]}, index=[1, 2]), "title").in_words
    assert told.endswith("64k: 100% on 1, 90% on 2")
    assert draw_ring.held(samples(1.9), (2,))["speedup"].tolist() == [1.9]  # zigzag, under a causal mask


def test_without_a_record_a_sentence_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record.load, "__defaults__", (None, "forward", None, tmp_path))
    assert draw_ring.recorded("ring") is None
    assert "python -m helpers record ring" in capsys.readouterr().out
    assert draw_ring.measured(None, 2) == {}
