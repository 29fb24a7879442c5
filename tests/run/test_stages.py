"""The stages between two rungs: found beside the ladder and never on it, right, and as frugal as the rung they lead to."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
import unchanged

from helpers import check, load, record, reference, rung, rungs, sass, show, stages, xray
from helpers.ladder import rung as ladder
from helpers.ladder.contract import TORCH_NAMES
from helpers.ladder.paths import KERNELS, STAGES
from helpers.measure import bench, recording, workloads
from helpers.record import schema

LEADS_TO = [r.stem for r in rungs() if stages(r)]
EVERY = [stage.stem for stem in LEADS_TO for stage in stages(stem)]
MOST_NEW = 75  # lines of code from one to the next


def test_they_are_found_by_name_and_are_no_rungs():
    assert [stage.stem for stage in stages("13")][0] == "13_1_addresses" == rung("13_1").stem == rung("addresses").stem
    assert rung("13").stem == "13_tuned"  # a rung's own number is the rung's
    assert not set(EVERY) & {r.stem for r in rungs()} and sorted(EVERY) == sorted(p.stem for p in STAGES.glob("*.cu"))
    assert stages("04") == []
    with pytest.raises(ValueError, match="did you mean 13_2_rows"):
        rung("13_2_row5")


def test_a_file_that_is_no_stage_s_is_refused(tmp_path, monkeypatch):
    """A stage has a whole header block, as a rung has."""
    (tmp_path / "13_6_more.cu").write_text(rung("13_4").source)
    monkeypatch.setattr(ladder, "STAGES", tmp_path)
    with pytest.raises(ValueError, match="names '13_4_no_maximum', the file '13_6_more'"):
        stages("13")


@pytest.mark.parametrize("stem", EVERY)
def test_every_case_is_within_the_error_budget(stem, pytestconfig):
    """A share of the cases unless --all: what a stage computes, its neighbours on the ladder compute too."""
    kernel = load(stem, device="cpu", quiet=True)
    cases = unchanged.share(reference.cases(kernel.rung, "cpu", "small"), stem, pytestconfig, kernel.rung.dtypes)
    assert check(kernel, cases).require().comparisons


@pytest.mark.parametrize("stem", EVERY)
@pytest.mark.parametrize("D", [64, 128])
def test_the_xray_finds_nothing_wrong_and_no_bank_conflict(stem, D):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 200, D).half()
    ray = xray(load(stem, device="cpu", quiet=True), q, k, v)
    assert not ray.findings
    assert ray.total(space="shared").excess == 0


@pytest.mark.sampled
@pytest.mark.parametrize("stem", EVERY)
def test_nvcc_spills_no_more_than_for_the_rung(stem):
    """And the registers leave room for as many blocks as the header block says."""
    spilled = ["spill_store_bytes", "spill_load_bytes"]
    used, least = sass.resources(stem), sass.resources(stem[:2])
    assert (used[spilled].sum() <= least[spilled].sum()).all(), used.to_string()
    for name, row in used.iterrows():
        D = int(re.search(r"<(\d+)", name)[1])
        tile = sass.tile(rung(stem), D)
        assert -(-row.registers // 8) * 8 * tile["threads"] * tile["ctas"] <= 65536, name
        assert tile["smem_kb"] <= {"sm_80": 163, "sm_90a": 227}[rung(stem).arch]


@pytest.mark.parametrize("stem", LEADS_TO)
def test_from_one_to_the_next_is_a_short_way(stem):
    before = [r for r in rungs() if r.op == rung(stem).op and r.number < stem[:2]][-1]
    chain = [before, *stages(stem), rung(stem)]
    new = [show.changed(a, b) for a, b in zip(chain, chain[1:])]
    assert max(new) <= MOST_NEW < show.changed(before, stem), new


def test_one_command_records_them_beside_their_neighbours(monkeypatch, tmp_path, capsys):
    def measure(calls, given=(), **options):
        rows = [(name, n, 2.0 if name == "SDPA FLASH" else 1.0) for n in range(7) for name in calls]
        return pd.DataFrame(rows, columns=["name", "round", "ms"])

    monkeypatch.setattr(recording, "right", lambda which: lambda q, k, v: q)
    monkeypatch.setattr(reference, "random_inputs", lambda *_: (None,) * 3)
    monkeypatch.setattr(workloads, "peers", lambda *given, without: {"SDPA FLASH": None})
    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(bench, "watch", lambda: __import__("contextlib").nullcontext({}))
    save = record.save

    def kept(*what, **options):
        return save(
            *what,
            root=tmp_path,
            known=dict.fromkeys(schema.CONDITIONS[2:], "x") | {"device": "NVIDIA H200", "date": "2026-11-23"},
            **options,
        )

    monkeypatch.setattr(record, "save", kept)
    recording.record_stages("13")
    assert "13_2_rows" in capsys.readouterr().out
    path = tmp_path / "nvidia-h200" / "13_tuned.stages.csv"
    assert schema.faults(path) == []
    samples = record.load("13_tuned", "stages", "nvidia-h200", tmp_path)
    assert {"12_double_buffered", *(s.stem for s in stages("13")), "13_tuned", "SDPA FLASH"} == set(samples["name"])
    assert (
        not samples["stale"].any() and set(samples["op"]) == {"attention"} and set(samples["dtype"]) == {"fp16", "bf16"}
    )
    with pytest.raises(ValueError, match="04_fa2_fp32 has no stages"):
        recording.record_stages("04")


def test_their_record_is_stale_once_one_of_them_has_changed(tmp_path, monkeypatch):
    names = ["12_double_buffered", *(s.stem for s in stages("13"))]
    known = {"rung": "13_tuned", "rungs": names, "digest": record.store._digest(names)}
    assert not record.store.is_stale(known)
    copy = Path(shutil.copytree(STAGES, tmp_path / "stages"))
    text = (copy / "13_3_fma.cu").read_text()
    (copy / "13_3_fma.cu").write_text(text.replace("1e-30f", "1e-20f"))
    monkeypatch.setattr(ladder, "STAGES", copy)
    assert record.store.is_stale(known)


def test_the_dtypes_and_dimensions_are_those_of_the_rung():
    for stem in LEADS_TO:
        assert {(s.dtypes, s.D, s.op) for s in stages(stem)} == {(rung(stem).dtypes, rung(stem).D, rung(stem).op)}
        assert set(rung(stem).dtypes) <= set(TORCH_NAMES) and KERNELS / "stages" == STAGES
