"""The record of notebook 50 without a GPU: every implementation of ours runs, and what is made of the samples is right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import ring_programs as programs
import torch
from ring_samples import samples

from helpers import record
from helpers.measure import ring as measured
from helpers.record import schema
from helpers.run import ring_time
from helpers.run.ranks import launch

CONDITIONS = {"device": "NVIDIA H200 x2", "driver": "1", "memory_mib": 1.0, "torch": "2", "cuda": "13", "python": "3"}


@cache
def results() -> tuple:
    """Of two ranks, what programs.recorded gives, each of its things for both."""
    return tuple(zip(*launch(programs.recorded, 2, device="cpu", quiet=True, timeout=300), strict=True))


def test_everything_of_ours_runs_on_the_emulator_and_is_checked():
    runs, *_ = results()
    names = {row[0] for row in runs[0]["times"]}
    assert names == {measured.ONE, measured.STEM, measured.ANY, "all-gather", "Ulysses"}
    (left,) = runs[0]["skipped"]  # of the rungs that the emulator takes by default, the backward one can't
    assert left.startswith(measured.SAME) and "no backward kernel" in left
    assert "against float64" in runs[0]["checked"]
    assert [row[:-1] for row in runs[0]["times"]] == [row[:-1] for row in runs[1]["times"]]


def test_all_ranks_know_the_slowest_time_and_the_least_value():
    _, slowest, least, _ = results()
    assert (slowest, least) == ((1, 1), (0, 0))


def test_a_ring_with_wrong_gradients_is_not_recorded():
    *_, said = results()
    assert all("gradients, contiguous: error" in each for each in said)


def test_a_bursts_time_is_that_of_one_call(monkeypatch):
    clock = [0.0]  # in seconds; only the calls advance it

    def call() -> None:
        clock[0] += 0.02

    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=lambda seconds: None))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    assert measured._burst(SimpleNamespace(device="cpu"), measured._ready(call), 10, True) == pytest.approx(20)


def test_speedups_are_formed_within_a_round():
    (row,) = measured.summary(samples()).itertuples()
    assert (row.speedup, row.lowest, row.highest) == pytest.approx((1.9, 1.9, 1.9))


def test_the_model_is_held_against_them():
    problem = ring_time.Problem(N=65536)
    told = ring_time.speedup(problem, ring_time.Machine(), 2)
    (row,) = measured.model_error(samples(told / 2)).itertuples()
    assert row.error == pytest.approx(1) and row.predicted == pytest.approx(told)
    assert row.predicted_ms == pytest.approx(1e3 * ring_time.seconds(problem, ring_time.Machine(), 2))


def test_the_model_is_of_gradients_summed_in_any_order():
    both = samples().assign(passes="both")
    assert measured.model_error(both).empty
    assert len(measured.model_error(both.replace({measured.STEM: measured.ANY}))) == 1


def test_goals_are_held_against_the_least_that_was_reached():
    peers = [
        samples(speedup).replace({measured.STEM: f"context_parallel {method}"}).query("layout != ''")
        for method, speedup in (("allgather", 1.6), ("alltoall", 1.2))  # the faster one counts
    ]
    table = measured.goals(pd.concat([samples(1.9), *peers])).set_index("what")
    assert not table.loc["forward, N from 65536, over one GPU", "reached"]  # 1.92
    assert table.loc["forward, over context_parallel", "least"] == pytest.approx(1.9 / 1.6)
    assert table.loc["forward, over context_parallel", "reached"]


def test_goals_are_of_zigzag_and_of_as_many_heads_of_K_and_V():
    ring = samples(0.5).query("layout != ''")
    slow = [ring.assign(layout="striped"), ring.assign(layout="contiguous"), samples(0.5).assign(Hkv=2)]
    table = measured.goals(pd.concat([samples(1.9), *slow])).set_index("what")
    assert table.loc["forward, N from 65536, over one GPU", "least"] == pytest.approx(1.9)


def test_51_is_held_against_50_in_the_same_layout():
    far = samples(1.96).replace({measured.STEM: measured.FAR}).query("layout != ''")
    table = measured.goals(pd.concat([samples(1.9), far])).set_index("what")
    row = table.loc["51_one_sided over 50_ring, N from 65536"]
    assert row.least == pytest.approx(1.96 / 1.9) and row.reached
    short = pd.concat([samples(1.9), far]).assign(Nq=16384, Nk=16384)
    assert not measured.goals(short).set_index("what").loc["51_one_sided over 50_ring, N to 32768", "reached"]  # 1.05


def test_the_cases_come_shortest_first_and_tiny_in_a_dry_run():
    lengths = [case["N"] for case in measured.cases(2, False)]
    assert lengths == sorted(lengths) and {*lengths} == {*measured.LENGTHS}
    assert (
        {case["N"] for case in measured.cases(2, True)}
        == {*measured.TINY}
        == {case["N"] for case in measured.cases(4, True)}
    )


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_show_how_the_time_scales(ranks):
    cases = measured.cases(ranks, False)
    lengths = [case["N"] for case in cases]
    assert lengths == sorted(lengths) and {16384 * ranks, 65536, 262144, 1048576} == {*lengths} <= {*measured.ROUNDS}
    assert {(case["causal"], case["passes"]) for case in cases if case["N"] == 16384 * ranks} == {
        (causal, passes) for causal in (True, False) for passes in ("forward", "both")
    }
    goal = measured.goals(samples(ranks - 0.1).assign(ranks=ranks, Nq=262144, Nk=262144)).set_index("what")
    assert goal.loc[f"forward, N = 262144, {ranks} GPUs over one", "reached"]
    narrow = samples(ranks * 0.85).assign(D=64, H=32, Hkv=32)
    slow = pd.concat([samples(ranks - 0.1), narrow]).assign(ranks=ranks, Nq=262144, Nk=262144)
    assert not measured.goals(slow)["reached"].any()  # the slower head dimension counts


def test_rows_of_some_lengths_are_renewed(monkeypatch):
    old = pd.concat([samples(1.9), samples(1.5).assign(Nq=16384, Nk=16384)]).assign(stale=False)
    monkeypatch.setattr(record, "load", lambda *_, **__: old)
    found = measured.summary(measured._renewed(samples(1.95), "NVIDIA H200 x2")).set_index("Nq")["speedup"]
    assert found.to_dict() == pytest.approx({16384: 1.5, 65536: 1.95})
    old["stale"] = True
    with pytest.raises(RuntimeError, match="of other kernels: record all lengths"):
        measured._renewed(samples(), "NVIDIA H200 x2")


def test_gradients_with_the_same_bits_are_held_against_those_of_one_gpu():
    """Both passes of the ring with the same bits every time beside one GPU's with the same bits; in any order beside any order."""
    base = samples(1.8).assign(passes="both")
    same = base[base["name"] == measured.ONE].assign(name=measured.SAME, ms=lambda x: 1.2 * x["ms"])
    found = measured.summary(pd.concat([base, same])).set_index("name")
    assert found.loc[measured.STEM, "speedup"] == pytest.approx(1.2 * 1.8)
    assert found.loc[measured.STEM, "beside"] == measured.SAME
    any_order = base.replace({measured.STEM: measured.ANY})
    assert measured.summary(pd.concat([any_order, same]))["speedup"].tolist() == pytest.approx([1.8])
    goal = measured.goals(pd.concat([base, same, any_order.query("layout != ''")])).set_index("what")["least"]
    assert goal["both, N from 65536, over one GPU"] == pytest.approx(1.8)
    assert goal["both, N from 65536, over one GPU, same bits"] == pytest.approx(1.2 * 1.8)


def test_a_record_is_saved_beside_those_of_one_gpu_and_is_sound(tmp_path):
    known = CONDITIONS | {"date": "2026-11-23"}
    path = record.save("50_ring", "ring", samples(), known=known, root=tmp_path, rungs=["50_ring", *measured.HOPPER])
    assert path.parent.name == "nvidia-h200-x2" and schema.faults(path) == []
    found = record.load("50_ring", "ring", device="NVIDIA H200 x2", root=tmp_path)
    assert not found["stale"].any() and len(measured.summary(found)) == 1
    wrong = samples().query("round < 2")
    path = record.save("50_ring", "ring", wrong, known=known, root=tmp_path, rungs=["50_ring", *measured.HOPPER])
    assert "2 rounds of something" in schema.faults(path)[0]
    others = samples().query("name == 'one GPU'")
    path = record.save("50_ring", "ring", others, known=known, root=tmp_path, rungs=["50_ring", *measured.HOPPER])
    assert schema.faults(path) == ["50_ring.ring.csv has no row of 50_ring itself"]


@pytest.fixture
def timed(monkeypatch):
    """Runs one case of one implementation whose calls take these milliseconds, the last of them from then on: its rows, and how its bursts
    were made (calls, warm-up)."""

    def run(*ms: float, causal: bool = True) -> tuple[pd.DataFrame, set]:
        takes, bursts = [*ms], set()

        def next_of() -> float:
            return takes.pop(0) if len(takes) > 1 else takes[0]

        def burst(me, call, calls, warm, hold):
            bursts.add((calls, warm))
            return next_of()

        monkeypatch.setattr(measured, "implementations", lambda *_: ({measured.ONE: None}, {measured.ONE: ""}))
        monkeypatch.setattr(measured, "_attempt", lambda *_: ("", next_of()))
        monkeypatch.setattr(measured, "_timed", lambda *_: (next_of(), 0.0))
        monkeypatch.setattr(measured, "_slowest", lambda me, ms: ms)
        monkeypatch.setattr(measured, "_burst", burst)
        me = SimpleNamespace(ranks=2, device="cpu", rank=0)
        rows = measured._case(me, True, [], N=64, D=32, causal=causal, passes="forward", Hkv=1)
        return pd.DataFrame(rows, columns=measured.COLUMNS), bursts

    return run


def test_a_first_call_that_compiles_for_seconds_is_no_sample_and_does_not_decide_how_the_rest_is_timed(timed):
    rows, bursts = timed(5000.0, 4.0)
    assert (rows["ms"].tolist(), bursts) == ([4.0, 4.0], {(5, True)})


def test_of_calls_over_a_second_the_second_is_the_first_rounds(timed):
    rows, bursts = timed(9000.0, 4000.0, 4001.0)
    assert (rows["ms"].tolist(), bursts) == ([4000.0, 4001.0], {(1, False)})


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_says_what_was_timed(timed, causal):
    first, _ = timed(4.0, causal=causal)[0].values.tolist()
    assert first == [measured.ONE, 2, "", "forward", "bf16", int(causal), 1, 2, 64, 64, 32, 1, 0, 4.0]


@pytest.mark.parametrize(("ranks", "launched"), [(None, 2), (3, 3), (0, 0)])
def test_a_dry_run_has_the_ranks_asked_for_and_two_by_default(ranks, launched, monkeypatch):
    asked = []
    found = {"N": 64, "ranks": 2, "H": 2, "D": 64, "seconds": 1.0, "bytes": 0}
    monkeypatch.setattr(measured, "launch", lambda program, ranks, **_: asked.append(ranks) or [found])
    measured.record_ring(dry=True, ranks=ranks, largest=True)
    assert asked == [launched]


@pytest.fixture
def saved(monkeypatch):
    """What record_ring saves on two GPUs where the ranks give these results: by kind the frame, the conditions and the rungs."""

    def run(*results: dict, **options) -> dict[str, SimpleNamespace]:
        found = {}

        def save(stem: str, kind: str, frame: pd.DataFrame, **told) -> Path:
            found[kind] = SimpleNamespace(frame=frame, **told)
            return Path(kind)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(measured, "_rungs", lambda device: measured.HOPPER)
        monkeypatch.setattr(measured, "load", lambda *_, **__: None)
        monkeypatch.setattr(measured, "launch", lambda *_, **__: results)
        monkeypatch.setattr(record, "conditions", lambda: CONDITIONS | {"device": "NVIDIA H200"})
        monkeypatch.setattr(record, "save", save)
        measured.record_ring(**options)
        return found

    return run


def result(frame: pd.DataFrame) -> dict:
    """What `measured.run` gives of a rank that took these times, and nothing else."""
    nothing = {name: [] for name in ("skipped", "link", "memory", "timeline")}
    return nothing | {"times": frame[measured.COLUMNS].values.tolist(), "rungs": [*measured.HOPPER], "checked": ""}


def test_a_bursts_time_is_the_slowest_ranks(saved):
    first, second = (samples().assign(ms=ms) for ms in ([1.0, 2.0] * 3, [2.0, 1.0] * 3))
    assert saved(result(first), result(second))["ring"].frame["ms"].eq(2).all()


def test_the_device_of_a_record_is_all_gpus(saved):
    largest = {"name": measured.STEM, "ranks": 2, "H": 2, "N": 64, "D": 64, "seconds": 1.0, "bytes": 0}
    for made in (saved(result(samples())), saved(largest, largest=True)):
        assert {each.known["device"] for each in made.values()} == {"NVIDIA H200 x2"}


@pytest.mark.parametrize("far", [True, False])
def test_a_record_of_some_lengths_belongs_to_51_as_long_as_it_has_rows_of_it(far, saved, monkeypatch):
    old = pd.concat([samples(), samples().replace({measured.STEM: measured.FAR})] if far else [samples()])
    monkeypatch.setattr(record, "load", lambda *_, **__: old.assign(stale=False))
    made = saved(result(samples().assign(Nq=16384, Nk=16384)), lengths=(16384,))
    assert [*made] == ["ring"] and made["ring"].rungs == [measured.STEM, *measured.HOPPER, *[measured.FAR] * far]
