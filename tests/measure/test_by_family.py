"""Timings and errors by family of inputs: what is timed, beside whom, and that the errors are those of what ran."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from helpers import bench, record, reference, rung, rungs
from helpers.commands import record as command
from helpers.measure import by_family, recording, sensors, workloads
from helpers.run import families

FEW = {name: families.FAMILIES[name] for name in ("randn", "one key")}


@pytest.fixture
def small(monkeypatch):
    """Two families at small sizes on the CPU, and a clock that knows the answer."""

    def measure(calls, inputs=(), rounds=2, **options):
        for call in calls.values():
            call(*inputs)
        speed = {"SDPA MATH": 3.0, "12_double_buffered": 1.5}
        rows = [(name, r, speed.get(name, 1.0), 1700.0, 650.0, "power_cap") for r in range(rounds) for name in calls]
        return pd.DataFrame(rows, columns=["name", "round", "ms", *sensors.COLUMNS])

    monkeypatch.setattr(by_family, "TOKENS", 64)
    monkeypatch.setattr(by_family, "WIDTH", 128)
    monkeypatch.setattr(by_family, "ERROR_N", 64)
    monkeypatch.setattr(by_family, "HEADS", 2)
    monkeypatch.setattr(by_family, "LENGTHS", (32, 64))
    monkeypatch.setattr(by_family, "IN_BOTH_DTYPES", 64)
    monkeypatch.setattr(by_family, "WITHOUT", ())
    monkeypatch.setattr(by_family.cells, "__defaults__", ((32, 64),))
    monkeypatch.setattr(families, "every", lambda: FEW)
    monkeypatch.setattr(by_family, "measure", measure)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def attention(q, k, v, causal=False):
    return reference.same_precision(q, k, v, causal=causal)


def test_the_grid_has_every_family_mask_and_dimension_and_both_dtypes_once():
    grid = pd.DataFrame([cell.about for cell in by_family.cells(rung("32_ping_pong"))])
    random = grid[grid["family"].isin(families.FAMILIES)]
    assert set(random["family"]) == set(families.FAMILIES)
    per = random.groupby(["family", "causal", "D", "Nk"])["dtype"].agg(" ".join).unstack("Nk")
    assert per[4096].eq("fp16 bf16").all() and per[1024].eq("fp16").all() and per[16384].eq("fp16").all()
    assert len(per) == 4 * len(families.FAMILIES)
    assert (grid["B"] * grid["Nq"] == 16384).all() and (grid["H"] * grid["D"] == 2048).all()
    assert set(pd.DataFrame([c.about for c in by_family.cells(rung("13_tuned"))])["causal"]) == {0}
    assert set(pd.DataFrame([c.about for c in by_family.cells(rung("33_backward_wgmma"))])["causal"]) == {0, 1}


def test_heads_of_a_model_are_timed_as_they_were_in_it(monkeypatch):
    one = replace(families.FAMILIES["randn"], name="heads of x", N=512, causal=True)
    monkeypatch.setattr(families, "every", lambda: {one.name: one})
    grid = pd.DataFrame([cell.about for cell in by_family.cells(rung("32_ping_pong"))])
    assert set(grid["Nk"]) == {512} and set(grid["causal"]) == {1} and set(grid["dtype"]) == {"fp16", "bf16"}
    assert not [*by_family.cells(rung("13_tuned"))]


def test_a_rung_is_timed_beside_the_one_before_it():
    assert {
        r.stem: b.stem for r in map(rung, ("11", "12", "13", "20", "32", "33")) if (b := record.rung_before(r))
    } == {
        "11_swizzled": "10_fa2_mma_fp16",
        "12_double_buffered": "11_swizzled",
        "13_tuned": "12_double_buffered",
        "20_causal_gqa": "13_tuned",
        "32_ping_pong": "31_warp_specialized",
        "33_backward_wgmma": "23_backward_mma",
    }
    assert record.rung_before(rung("10")) is None and record.rung_before(rung("23")) is None
    chosen = {
        r.stem[:2] for r in map(rung, ("04", "13", "20", "21", "22", "23", "33", "02")) if record.timed_by_family(r)
    }
    assert chosen == {"13", "20", "23", "33"}


def test_the_inputs_and_the_peers_of_a_cell_are_those_of_its_mask(small):
    cell = by_family.Cell(FEW["one key"], "fp16", True, (1, 2, 33, 33, 64))
    q, k, v = cell.tensors(False)
    assert torch.equal(q, cell.family.inputs(cell.shape, cell.dtype, causal=True)[0])
    o = by_family.calls({}, (q, k, v), cell.causal, ())["SDPA MATH"]()
    assert (o - reference.attention(q, k, v, causal=True)[0]).abs().max() < 1e-2


def test_timings_have_the_family_and_the_sensors(small):
    own = {"13_tuned": attention, "12_double_buffered": attention}
    frame = by_family.timings(own, rung("13_tuned"))
    assert list(frame) == ["family", "name", "dtype", "causal", *record.SHAPE, "round", "ms", *sensors.COLUMNS]
    assert {"13_tuned", "12_double_buffered", "SDPA MATH"} <= set(frame["name"])
    spread = record.spread(frame, "13_tuned")
    assert set(spread["family"]) == set(FEW) and set(spread["D"]) == {64, 128}
    assert spread["SDPA MATH"].tolist() == pytest.approx([3] * 4)
    assert spread["12_double_buffered"].tolist() == pytest.approx([1.5] * 4)
    made = record.medians(frame.assign(op="attention"))
    assert made["watts"].eq(650).all() and made["sm_mhz"].eq(1700).all()


def test_a_kernel_without_masks_is_not_asked_for_one(small):
    frame = by_family.timings({"20_causal_gqa": attention, "13_tuned": lambda q, k, v: attention(q, k, v)}, rung("20"))
    assert set(frame.loc[frame["name"] == "13_tuned", "causal"]) == {0}
    assert set(frame.loc[frame["name"] == "20_causal_gqa", "causal"]) == {0, 1}


def test_errors_are_relative_and_of_each(small):
    def twice(q, k, v, causal=False):
        o, lse = attention(q, k, v, causal)
        return o * 2, lse

    frame = by_family.errors({"20_causal_gqa": attention, "worse": twice}, rung("20_causal_gqa"))
    assert set(frame["output"]) == {"o"} and set(frame["B"]) == {1} and set(frame["H"]) == {2}
    error = frame.groupby(["name", "dtype"])["error"].median()
    assert 5e-5 < error["20_causal_gqa", "fp16"] < 1e-3 < error["20_causal_gqa", "bf16"] < 5e-3
    assert error["worse", "fp16"] == pytest.approx(1, rel=0.01)
    assert {"SDPA MATH", "SDPA FLASH"} & set(frame["name"])


def test_the_backward_pass_by_family(small):
    def backward(q, k, v, o, lse, do, causal=False):
        return reference.same_precision_backward(q, k, v, do, causal=causal)

    frame = by_family.errors({"23_backward_mma": backward}, rung("23_backward_mma"))
    assert set(frame["output"]) == {"dq", "dk", "dv"} and frame.query("family == 'randn'")["error"].max() < 0.02
    assert "SDPA MATH" in set(frame["name"])
    timed = by_family.timings({"23_backward_mma": backward}, rung("23_backward_mma"))
    assert {"23_backward_mma", "SDPA MATH"} <= set(timed["name"])


def test_both_records_are_written_and_the_command_chooses_the_rungs(small, monkeypatch, tmp_path, capsys):
    saved, asked = {}, []
    monkeypatch.setattr(recording, "right", lambda which: type("K", (), {"rung": rung(which), "__call__": None})())
    monkeypatch.setattr(by_family, "kernels", lambda kernel, r: {r.stem: attention, "12_double_buffered": attention})
    monkeypatch.setattr(bench, "watch", lambda: __import__("contextlib").nullcontext({"power_w": 1}))
    monkeypatch.setattr(bench, "versions", lambda names: {"FA3": "3.1"})

    def save(stem, kind, frame, extra):
        saved[kind] = (stem, frame, extra)
        return tmp_path / f"{stem}.{kind}.csv"

    monkeypatch.setattr(record, "save", save)
    recording.record_families("13_tuned")
    assert set(saved) == {"families", "accuracy"} and saved["families"][2]["before"] == ["12_double_buffered"]
    assert all(extra["peers"] == {"FA3": "3.1"} for *_, extra in saved.values())
    assert "one key" in capsys.readouterr().out
    monkeypatch.setattr(recording, "record_families", asked.append)
    monkeypatch.setattr(command, "for_this_gpu", lambda kernels: kernels or rungs())  # as on a GPU that runs them all
    arguments = type("A", (), {"kernels": []})()
    command.families(arguments)
    assert {"13_tuned", "33_backward_wgmma"} <= set(asked) and not {"04_fa2_fp32", "21_split_kv"} & set(asked)


def test_progress_of_a_cell_goes_to_stderr(small, capsys):
    by_family.timings({"13_tuned": attention}, rung("13_tuned"))
    assert "'family': 'one key'" in capsys.readouterr().err
    assert workloads.joined([pd.DataFrame({"a": [1], "watts": [2.0]})], ["a"]).columns.tolist() == ["a", "watts"]
