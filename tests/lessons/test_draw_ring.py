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
    assert "3 ms" in draw_ring.timelines({"recorded": recorded}, unit=1).in_words


def test_a_record_is_drawn_as_points_and_beside_its_peers():
    frame = pd.concat([samples(1.9), samples(1.5).replace({measured.STEM: "all-gather"}).query("layout != ''")])
    frame = frame.assign(device="NVIDIA H200 x2")
    points = draw_ring.measured(frame, ranks=2, D=128, causal=1, passes="forward")
    assert points == {"zigzag": [(65536, pytest.approx(1.9))]}
    assert "50_ring 1.90" in draw_ring.beside_peers(frame, ranks=2).in_words
    once = (frame["name"] == "all-gather") & (frame["round"] == 0)
    slow = draw_ring.beside_peers(frame.assign(ms=frame["ms"].where(~once, 100 * frame["ms"])), ranks=2).in_words
    assert "all-gather (1 slow round left out) 1.50" in slow
    model = pd.DataFrame({"zigzag": [1.0, 1.9]}, [1024, 65536])
    assert "zigzag 1.00 at N = 1k, 1.90 at 64k" in draw_ring.speedups(model, 2, "two", points).in_words


def test_without_a_record_a_sentence_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record.load, "__defaults__", (None, "forward", None, tmp_path))
    assert draw_ring.recorded("ring") is None
    assert "python -m helpers record ring" in capsys.readouterr().out
    assert draw_ring.measured(None, 2) == {}
