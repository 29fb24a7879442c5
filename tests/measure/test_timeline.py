"""A kernel that notes its own times: the same answer, every phase in order, and copies ahead of their use only where they are."""

import pytest
import torch

from helpers import load, record, rung, timeline, workloads
from helpers.measure import recording
from helpers.record import schema

STEMS = ["11_swizzled", "12_double_buffered"]


@pytest.fixture(scope="module")
def qkv():
    torch.manual_seed(0)
    return [torch.randn(1, 1, 256, 64).half() for _ in range(3)]


@pytest.mark.sampled
@pytest.mark.parametrize("stem", STEMS)
def test_noting_times_does_not_change_the_answer(stem, qkv):
    noting = load(source=timeline.instrument(rung(stem).source), device="cpu", quiet=True)
    plain = load(stem, device="cpu", quiet=True)
    for got, want in zip(noting(*qkv), plain(*qkv), strict=True):
        assert torch.equal(got, want)


def test_the_cta_in_the_middle_of_the_grid_notes_its_times():
    assert "if (blockIdx.x != gridDim.x / 2 || " in timeline.instrument(rung("12").source)


@pytest.mark.parametrize("stem", STEMS)
def test_a_warp_goes_through_its_phases_in_order(stem, qkv):
    times = timeline.times(stem, *qkv)
    assert set(times.warp) == {0, 1, 2, 3} and set(times.tile) == {0, 1, 2, 3}
    for _, warp in times[times.kind != "load"].groupby("warp"):
        assert list(warp.kind) == 4 * ["wait", "mma", "softmax", "mma"]
        assert (warp.begin < warp.end).all() and (warp.end[:-1].values <= warp.begin[1:].values).all()


def test_a_copy_runs_beside_the_products_only_with_two_stages(qkv):
    beside = {}
    for stem in STEMS:
        times = timeline.times(stem, *qkv).query("warp == 0")
        mma = times[times.kind == "mma"]
        loads = times[times.kind == "load"]
        beside[stem] = sum(
            ((mma.begin >= a) & (mma.end <= b)).any() for a, b in zip(loads.begin, loads.end, strict=True)
        )
    assert beside["11_swizzled"] == 0 and beside["12_double_buffered"] == 3


def test_a_text_without_its_markers_is_refused_by_name():
    with pytest.raises(ValueError, match="region: output.*is there 0 times"):
        timeline.instrument(rung("11_swizzled").source.replace("// [region: output]", ""))


def test_a_timeline_is_recorded_as_its_schema_says(monkeypatch, tmp_path):
    """On the emulator, whose places in the order of events stand for clocks."""
    kernel = load("12_double_buffered", device="cpu", quiet=True)
    save, known = record.save, dict.fromkeys(schema.CONDITIONS[2:], "x")
    known |= {"device": "NVIDIA H200", "date": "2026-11-23"}
    monkeypatch.setattr(recording, "right", lambda which: kernel)
    monkeypatch.setattr(recording, "TRACED", (1, 1, 256, 64))
    monkeypatch.setattr(workloads, "random_tensors", lambda dtype, shape, count: torch.randn(count, *shape).half())
    monkeypatch.setattr(record, "save", lambda *what, **options: save(*what, root=tmp_path, known=known, **options))
    recording.record_timeline("12")
    assert schema.faults(tmp_path / "nvidia-h200" / "12_double_buffered.timeline.csv") == []
    found = record.load("12_double_buffered", "timeline", "nvidia-h200", tmp_path)
    assert set(found["kind"]) == {"load", "wait", "mma", "softmax"} and set(found["warp"]) == set(range(4))
    assert (found["end"] >= found["begin"]).all() and not found["stale"].any()
