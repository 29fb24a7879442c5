"""The X-ray's counts against what Nsight Compute counted on an H200 (data/): equal, or the difference is explained."""

from __future__ import annotations

import pandas as pd
import pytest

from helpers import agreement, record
from helpers.emulator.trace import Access


@pytest.fixture(scope="module")
def patterns():
    return agreement.singles("patterns")


def unexplained(frame):
    return frame[(frame["difference"] != 0) & (frame["why"] == "")]


def test_rungs_have_the_counters_that_the_xray_predicts():
    frame = agreement.rungs()
    assert frame["name"].nunique() >= 4
    assert unexplained(frame).empty, unexplained(frame)
    assert (agreement.totals(frame)["unexplained_percent"] == 0).all()


def test_every_pattern_of_addresses_costs_what_the_hardware_counts(patterns):
    assert patterns["name"].nunique() >= 700
    assert unexplained(patterns).empty, unexplained(patterns)


def test_wavefronts_are_exact(patterns):
    """Of loads, stores, ldmatrix, atomics, and of cp.async through the L1."""
    counted = patterns[patterns["metric"].str.endswith("_wavefronts")]
    assert (counted["difference"] == 0).all()
    copies = counted[(counted["metric"] == "async_copy_wavefronts") & counted["kernel"].eq("copy")]
    assert copies["name"].nunique() == 102 and copies["hardware"].nunique() > 10


def test_micro_kernels_have_the_counters_that_the_xray_predicts():
    frame = agreement.singles("microkernels")
    assert frame["name"].nunique() >= 60
    assert unexplained(frame).empty, unexplained(frame)


@pytest.mark.parametrize("stem", ["21_split_kv", "22_backward_fp32"])
def test_rungs_that_models_need_are_counted_kernel_by_kernel(stem, tmp_path, monkeypatch):
    """With a record made up of the X-ray's own counts, and one of them off by one: every kernel and counter is beside its own."""
    B, H, N, D = agreement.SIZE
    names = {"21_split_kv": ["split_kv", "merge_splits"], "22_backward_fp32": ["prepare", "backward_fp32"]}[stem]
    rows = []
    for name in names:
        accesses = [a for a in agreement.traced(stem).accesses if a.kernel.startswith(f"{name}<")]
        rows.append(
            {"dtype": "fp16", "B": B, "H": H, "N": N, "D": D, "kernel": f"void {name}<{D}>"}
            | agreement.counters(accesses)
        )
    rows[1]["global_load_sectors"] += 1
    known = {"device": "NVIDIA H200", "date": "2026-01-01"}
    record.save(stem, "counters", pd.DataFrame(rows), known=known, root=tmp_path)
    load = record.load
    monkeypatch.setattr(record, "load", lambda stem, kind, device: load(stem, kind, "NVIDIA H200", tmp_path))
    monkeypatch.setattr(agreement.ladder, "rungs", lambda: [agreement.ladder.rung(stem)])
    frame = agreement.rungs()
    assert set(frame["kernel"]) == set(names)
    assert unexplained(frame)[["kernel", "metric", "difference"]].values.tolist() == [
        [names[1], "global_load_sectors", 1]
    ]


def test_a_difference_is_seen_and_nothing_explains_it_away():
    access = Access("k", "k.cu", 1, "load", "shared", "X_smem", 4, 10, 1280, 30, 10, 4, None)
    ours = agreement.counters([access])
    assert (ours["shared_load_wavefronts"], ours["shared_load_conflicts"], ours["shared_load_instructions"]) == (
        30,
        20,
        10,
    )
    theirs = {"shared_load_wavefronts": 31, "shared_load_conflicts": 20, "global_load_sectors": float("nan")}
    frame = agreement._frame(agreement._beside("05_new", "k", ours, theirs))
    assert frame[["metric", "difference", "why"]].values.tolist() == [
        ["shared_load_wavefronts", 1, ""],
        ["shared_load_conflicts", 0, ""],
    ]
    assert agreement.totals(frame)["unexplained_percent"].item() == pytest.approx(100 / 51)
