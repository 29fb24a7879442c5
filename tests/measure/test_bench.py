"""The stopwatch, and the recording of a rung with the emulator in the GPU's place; on a GPU, that the clock is right."""

import itertools
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import sixteen
import torch

from helpers import Kernel, bench, record, reference, rung, workloads
from helpers.emulator import launcher
from helpers.ladder import rung as ladder
from helpers.measure import recording
from helpers.run import kernel as module

gpu = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "call", [lambda: bench.measure({"f": lambda: None}), bench.ceilings, lambda: bench.memory(len, [])]
)
def test_without_a_gpu_nothing_is_timed(call):
    with pytest.raises(RuntimeError, match="on a GPU only"):
        call()


def test_the_recorded_shapes_are_the_workloads():
    shapes = workloads.shapes("attention")
    assert len(shapes) == len(set(shapes))
    headline = [s for s in shapes if s[0] * s[2] == 16384 and s[1] * s[4] == 2048]
    assert {(n, d) for _, _, n, _, d in headline} == {(512 << i, d) for i in range(6) for d in (64, 128)}
    seeds = {(b, h, n, d) for b in (8, 16) for h in (8, 16) for n in (256, 512, 1024) for d in (64, 128)}
    assert seeds <= {(b, h, n, d) for b, h, n, _, d in shapes}
    rows = workloads.shapes("softmax")
    assert any(n % 4 for _, _, _, n, _ in rows)
    assert all(b == h == d == 1 and 2**25 < m * n <= 2**26 for b, h, m, n, d in rows)
    assert set(workloads.shapes("attention", quick=True)) < set(shapes)


def test_clocks_are_summarised_over_the_busy_moments():
    log = "345, 80.5, 0\n1500, 600.0, 100\n1800, 650.0, 98\n1600, 640.0, 100\n18"
    assert bench.summarise(log) == {
        "sm_clock_mhz": {"min": 1500, "median": 1600, "max": 1800},
        "power_w": {"min": 600, "median": 640, "max": 650},
    }
    assert bench.summarise("345, 80.5, 0\n") == {}


def nvidia_smi(folder, says):
    """A program in its place that says this, and then waits to be ended."""
    tool = folder / "nvidia-smi"
    then = f"print(flush=True)\nopen({str(folder / 'said')!r}, 'w')\ntime.sleep(60)"
    tool.write_text(f"#!{sys.executable}\nimport time\n{says}\n{then}\n")
    tool.chmod(0o755)
    return str(tool)


def test_clocks_are_watched_for_as_long_as_it_takes(monkeypatch, tmp_path):
    """More lines than a pipe holds, of which the last counts, too."""
    tool = nvidia_smi(tmp_path, "print('1500, 600.0, 100\\n' * 10_000 + '1800, 600.0, 100')")
    monkeypatch.setattr(record, "nvidia_smi", lambda: tool)
    with bench.watch() as seen:
        end = time.monotonic() + 30
        while not (tmp_path / "said").exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert seen["sm_clock_mhz"] == {"min": 1500, "median": 1500, "max": 1800}


def test_without_nvidia_smi_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(record, "nvidia_smi", lambda: None)
    with pytest.raises(RuntimeError, match="nvidia-smi"), bench.watch():
        pass


class FakeEvent:
    """A CUDA event on a clock that only the callables advance."""

    now = 0.0

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def fake_gpu(monkeypatch):
    """torch.cuda with a made-up clock: what measure() does with it is then exact."""

    class Properties:
        L2_cache_size = 1000

    held = []
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Properties)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append, raising=False)
    return held


def spending(ms, log=None, name=""):
    def call(*inputs):
        FakeEvent.now += ms
        if log is not None:
            log.append((name, *inputs))

    return call


def test_a_time_is_that_of_one_call(fake_gpu):
    frame = bench.measure({"slow": spending(50.0), "quick": spending(0.5)}, rounds=9)
    assert frame.groupby("name")["ms"].median().to_dict() == {"slow": 50.0, "quick": 0.5}
    assert frame.groupby("name").size().to_dict() == {"slow": 9, "quick": 9}
    assert "9 rounds" in frame.attrs["method"]


def test_the_callables_take_turns_in_random_order(fake_gpu):
    log = []
    names = "abcd"
    frame = bench.measure({n: spending(100.0, log, n) for n in names}, rounds=20)
    timed = [entry[0] for entry in log[-4 * 20 :]]
    orders = ["".join(timed[i : i + 4]) for i in range(0, 80, 4)]
    assert all(sorted(order) == list(names) for order in orders)  # once each in every round
    assert len(set(orders)) > 8
    assert frame["name"].tolist() == timed


def test_a_kernel_is_timed_by_its_name(fake_gpu, monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    seen = []
    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *inputs: seen.append(kernel.rung.stem) or spending(50.0)())
    monkeypatch.setattr(Kernel, "compile", lambda kernel: None)
    frame = bench.measure({"by name": "naive", "a rung": rung("04"), "a function": spending(70.0)}, rounds=2)
    assert frame.groupby("name")["ms"].median().to_dict() == {"a function": 70.0, "a rung": 50.0, "by name": 50.0}
    assert set(seen) == {"01_naive", "04_fa2_fp32"}
    with pytest.raises(ValueError, match="no kernel 'nave'; did you mean 01_naive"):
        bench.measure({"x": "nave"})


def test_a_changed_file_is_noticed_before_the_clock_runs_and_not_while_it_does(fake_gpu, monkeypatch, tmp_path, capsys):
    mine, stats, timed = tmp_path / "mine.cu", [], []
    mine.write_text(rung("01").source.replace("// 01_naive:", "// mine:"))
    kernel = Kernel(rung(mine), "cpu")
    monkeypatch.setattr(Kernel, "compile", lambda kernel: setattr(kernel.launcher, "cached", False))
    monkeypatch.setattr(Kernel, "_run", lambda kernel, call: timed.append(kernel.source) or spending(20.0)())
    stamp = module._stamp
    monkeypatch.setattr(module, "_stamp", lambda path: stats.append(path) or stamp(path))
    mine.write_text(edited := mine.read_text() + "// edited\n")
    time.sleep(2 * module.LOOK_AGAIN)

    def call(*inputs):
        kernel(*inputs)
        if len(timed) == 5:
            mine.write_text(edited + "// and edited again\n")
            stats.clear()

    bench.measure({"call": call}, [torch.zeros(1, 1, 8, 32)] * 3, rounds=9)
    assert set(timed) == {edited} and len(timed) > 9
    assert stats == []
    assert capsys.readouterr().out.count("has changed since it was loaded") == 1


def test_small_inputs_rotate_past_the_cache_and_large_ones_stay(fake_gpu):
    for numel, copies in ((50, 11), (10, 51), (375, 3), (600, 1)):  # of 4 bytes, and a cache of 1000
        log = []
        bench.measure({"f": spending(0.2, log)}, [torch.zeros(numel)])
        assert len({x.data_ptr() for _, x in log}) == min(copies, 50)


def test_a_method_speaks_of_rotated_inputs_only_where_it_was_given_some(fake_gpu):
    given, none = (bench.measure({"f": spending(1)}, inputs).attrs["method"] for inputs in ([torch.zeros(50)], []))
    assert "rotated past" in given and "rotated" not in none and none.endswith("7 rounds; TF32 off")


def test_the_gpu_is_held_until_a_burst_is_queued(fake_gpu):
    bench.measure({"short": spending(1e-4)}, rounds=2)  # 100 ns on the GPU: any Python call takes longer
    assert len(fake_gpu) >= 2 and min(fake_gpu) > 0


def test_a_burst_that_the_host_disturbed_is_taken_again(fake_gpu):
    """Four calls plan the bursts, the fifth is the first that counts: there the host is away for 50 ms, and the GPU waits."""
    count = itertools.count(1)

    def call():
        if next(count) == 5:
            time.sleep(0.05)
            FakeEvent.now += 50.0
        FakeEvent.now += 10.0

    assert bench.measure({"f": call}, rounds=3)["ms"].tolist() == [10.0] * 3
    always = bench.measure({"f": lambda: time.sleep(random.choice((0, 0.002))) or spending(10.0)()}, rounds=3)
    assert always["ms"].tolist() == [10.0] * 3  # a host that is never steady gets its samples, too


def test_a_burst_is_steady_if_all_its_calls_were_queued_while_the_gpu_was_held(fake_gpu, monkeypatch):
    taken, watch = [], bench._Stopwatch(())

    def burst(self, call, calls=1, hold_ms=0.0, meanwhile=lambda: None):
        meanwhile()
        return 1.0, 1.0  # ms on the GPU and on the host

    monkeypatch.setattr(bench._Stopwatch, "burst", burst)
    for calls, tries in ((5, 1), (6, bench.TRIES)):
        taken.clear()
        watch.undisturbed(None, calls, 5.0, lambda: taken.append(1))
        assert len(taken) == tries
    assert watch.plan(None, 10.0) == (10, 2 * 10 * 1.0)


def test_ceilings_count_bytes_and_flops(fake_gpu, monkeypatch):
    def measure(calls, **_):
        return pd.DataFrame({"name": list(calls), "round": 0, "ms": 2.0})

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "random_numbers", lambda seed: lambda *shape: torch.zeros(4, 4))
    found = bench.ceilings().set_index("name")["value"].to_dict()
    matmul = 2 * 8192**3 / 2e-3 / 1e12
    copy = 2 * 4 * 16 / 2e-3 / 1e12  # 16 floats, read and written
    assert found == pytest.approx({"copy": copy, "fp32 matmul": matmul, "fp16 matmul": matmul})


def test_measure_wants_callables_and_rounds(fake_gpu):
    with pytest.raises(ValueError, match="at least one round"):
        bench.measure({"f": spending(1)}, rounds=0)
    with pytest.raises(ValueError, match="callables"):
        bench.measure({})


@gpu
def test_events_measure_what_the_gpu_spends():
    """Twice the work takes twice the time, however much the host spends on issuing it."""
    a, b = (torch.randn(n, 4096, device="cuda") for n in (4096, 8192))
    frame = bench.measure({"one": lambda: a @ a, "two": lambda: b @ a})
    median = frame.groupby("name")["ms"].median()
    assert 1.7 < median["two"] / median["one"] < 2.3

    def dawdles():
        sum(random.random() for _ in range(2000))  # about 0.1 ms of the host's
        return x + 1

    x = torch.zeros(1 << 20, device="cuda")
    frame = bench.measure({"dawdles": dawdles, "quick": lambda: x + 1})
    median = frame.groupby("name")["ms"].median()
    assert median["dawdles"] < 1.5 * median["quick"]


@gpu
def test_peers_answer_as_the_reference_does():
    from helpers import reference

    q, k, v = (torch.randn(2, 3, 128, 64, device="cuda") for _ in range(3))
    o, _ = reference.attention(q, k, v)
    found = bench.peers(q, k, v)
    assert {"SDPA MATH", "SDPA EFFICIENT"} <= set(found)
    assert "SDPA FLASH" not in found  # 16-bit only
    for name, call in found.items():
        assert (call(q, k, v) - o).abs().max() < 1e-5, name


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_peers_in_sixteen_bits(dtype):
    from helpers import reference

    q, k, v = (torch.randn(2, 3, 128, 64, device="cuda", dtype=dtype) for _ in range(3))
    o, _ = reference.attention(q, k, v)
    found = bench.peers(q, k, v)
    assert {"SDPA MATH", "SDPA EFFICIENT", "SDPA FLASH"} <= set(found)
    assert "SDPA MATH" not in bench.peers(q, k, v, without=["SDPA MATH"])
    for name, call in found.items():
        assert (call(q, k, v) - o).abs().max() < 4 * torch.finfo(dtype).eps, name


@gpu
def test_memory_is_the_peak_of_one_call():
    x = torch.zeros(1 << 20, device="cuda")
    assert bench.memory(lambda x: (x + 1) * 2, [x]) == 2 * 4 << 20
    assert bench.memory(lambda x: x.expand(1 << 20, -1).contiguous(), [x]) is None  # 4 TB


@gpu
def test_ceilings_are_those_of_a_gpu():
    frame = bench.ceilings(rounds=3, idle_ms=0)
    top = frame.groupby("name")["value"].median()
    assert top["copy"] > 0.1
    assert top["fp16 matmul"] > top["fp32 matmul"] > 1


@pytest.fixture
def stand_in(fake_gpu, monkeypatch, tmp_path):
    """The emulator in the GPU's place, with small shapes, so that recording runs from end to end, into tmp_path."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *lms*) echo "1500, 600, 90"; exec sleep 60;; *) echo "Stand-in, 1, 2, 3, 4, 5";; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    save = record.save
    monkeypatch.setattr(record, "save", lambda *args, **options: save(*args, **options, root=tmp_path))
    shapes = {"attention": [(1, 2, 64, 64, 64), (2, 1, 33, 33, 64)], "softmax": [(1, 1, 64, 40, 1)]}
    monkeypatch.setattr(workloads, "shapes", lambda op, quick=False, headline=False: shapes[op])
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    monkeypatch.setattr(FakeEvent, "record", lambda self: setattr(self, "at", time.perf_counter() * 1e3))
    monkeypatch.setattr(recording, "errors", lambda *args, **kw: errors(*args, lengths=(64, 128), **kw))
    monkeypatch.setattr(recording, "memories", lambda *args, **kw: memories(*args, lengths=(64,), **kw))
    phases = ["import", "cold", "edit", "unchanged", "reverted"]
    made_up = pd.DataFrame({"phase": phases, "round": 0, "seconds": 1.0})
    monkeypatch.setattr(recording, "builds", lambda stem: made_up)
    monkeypatch.setattr(bench, "versions", lambda names: {"FA3": "3.1"})
    return tmp_path


@pytest.fixture
def few_cases(monkeypatch):
    """Two of a rung's cases for the check before it is timed: that they all pass, tests/run/test_rungs.py says."""
    cases = reference.cases
    monkeypatch.setattr(reference, "cases", lambda *which: itertools.islice(cases(*which), 2))


def empty_but_for_the_emulator(prefix="", **where):
    """A new folder; as a build cache it has the emulator itself, which takes half a minute to compile and isn't timed."""
    folder = mkdtemp(prefix=prefix, **where)
    if prefix == "fa-bench-":
        built = launcher._runtime()[0].parent
        Path(folder, built.name).symlink_to(built)
    return folder


errors, memories, mkdtemp = recording.errors, recording.memories, tempfile.mkdtemp


@pytest.mark.parametrize("stem", ["02_online_softmax", "04_fa2_fp32"])
def test_recording_runs_from_end_to_end(stand_in, few_cases, stem, capsys):
    recording.record_rung(stem)
    assert "verdict" not in capsys.readouterr().out  # the goals are those of another card
    kinds = {"forward", "error", "build"} | ({"memory"} if stem.startswith("04") else set())
    assert {p.name for p in stand_in.glob("stand-in/*.csv")} == {f"{stem}.{kind}.csv" for kind in kinds}
    forward = record.load(stem, device="stand-in", root=stand_in)
    assert stem in set(forward["name"])
    assert ("torch.softmax" if stem.startswith("02") else "SDPA MATH") in set(forward["name"])
    assert forward.groupby(["name", "B", "Nk"]).size().eq(7).all()
    about = record.about(stem, device="stand-in", root=stand_in)
    assert about["power_w"]["median"] == 600
    assert about["skipped"] == [] and about["peers"] == {"FA3": "3.1"}
    assert "random order" in about["method"]
    error = record.load(stem, "error", "stand-in", stand_in)
    assert (error["error"] <= error["budget"]).all()
    assert set(record.load(stem, "build", "stand-in", stand_in)["seconds"]) == {1.0}


def test_builds_are_timed_in_a_process_of_their_own(monkeypatch):
    """A small kernel shows what is compiled and what is found: cold and edited, unchanged and reverted."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(recording.tempfile, "mkdtemp", empty_but_for_the_emulator)
    frame = recording.builds("01_naive", times=1)
    assert frame["phase"].tolist() == ["import", "cold", "edit", "unchanged", "reverted"]
    build = frame.set_index("phase")["seconds"]
    assert build["unchanged"] < 0.5 * build["cold"]
    assert build["reverted"] < 0.5 * build["edit"]


def test_a_build_that_fails_is_an_error(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no compiler")
    monkeypatch.setattr(recording.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="building 01_naive failed: no compiler"):
        recording.builds("01_naive", times=1)


def test_a_sixteen_bit_rung_is_recorded_in_both_its_dtypes(stand_in, few_cases, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(workloads, "MATH_MAX_N", 40)
    stem = sixteen.make_rung(ladder.KERNELS, "77_sixteen")
    recording.record_rung(stem)
    said = capsys.readouterr().out  # the CPU's SDPA FLASH stands in for the GPU's
    assert "worst" in said and ("B2 H1 N33" in said or "B1 H2 N64" in said)
    forward = record.load(stem, device="stand-in", root=stand_in)
    for dtype in ("fp16", "bf16"):
        here = forward[forward["dtype"] == dtype]
        assert here[here["name"] == stem].groupby("Nk").size().to_dict() == {33: 7, 64: 7}
        assert set(here.loc[here["name"] == "SDPA MATH", "Nk"]) == {33}  # costly beyond MATH_MAX_N
    (note,) = record.about(stem, device="stand-in", root=stand_in)["skipped"]
    assert "SDPA MATH beyond N = 40 in 16 bits" in note
    error = record.load(stem, "error", "stand-in", stand_in)
    assert error.groupby(["dtype", "D", "output"]).size().eq(2).all()
    assert set(error["dtype"]) == {"fp16", "bf16"} and set(error["D"]) == {64, 128}
    assert (error["error"] <= error["budget"]).all()
    o = error[error["output"] == "o"].set_index(["dtype", "Nk", "D"])["pytorch_error"]
    assert (o["bf16"] > 2 * o["fp16"]).all()  # three bits fewer
    memory = record.load(stem, "memory", "stand-in", stand_in)
    assert set(memory.loc[memory["name"] == stem, "dtype"]) == {"fp16", "bf16"}
    assert memory["bytes"].eq(5000 - 1000).all()  # the peak without what was there before
    assert len(record.load(stem, "build", "stand-in", stand_in)) == 5


@pytest.mark.sampled
@pytest.mark.parametrize(("stem", "kind"), [("21_split_kv", "decode"), ("22_backward_fp32", "backward")])
def test_recording_a_rung_that_models_need(stand_in, few_cases, stem, kind, monkeypatch, capsys):
    """From end to end as above: every record there is, and the goals."""
    small = {"TOKENS": 128, "WIDTH": 128, "LENGTHS": (64,), "COPIED": 1 << 10, "SPLITS": (1, 2)}
    for name, value in (small | {"CACHES": ((2, 4, 2, 300, 64),)}).items():
        monkeypatch.setattr(workloads, name, value)
    monkeypatch.setattr(record, "this_device", lambda: "NVIDIA H200")  # whose goals they are
    recording.record_rung(stem)
    assert {p.name for p in stand_in.glob("stand-in/*.csv")} == {f"{stem}.{k}.csv" for k in (kind, "error", "build")}
    samples = record.load(stem, kind, "stand-in", stand_in)
    assert samples["op"].eq("attention" if kind == "decode" else "attention_backward").all()
    assert {stem, "SDPA FLASH" if kind == "decode" else "SDPA MATH"} <= set(samples["name"])
    about = record.about(stem, kind, "stand-in", stand_in)
    assert about["flops"] == (record.FORWARD_FLOPS if kind == "decode" else record.BACKWARD_FLOPS)
    error = record.load(stem, "error", "stand-in", stand_in)
    assert set(error["output"]) == ({"o", "lse"} if kind == "decode" else {"dq", "dk", "dv"})
    assert (error["error"] <= error["budget"]).all()
    assert f"{kind} × " in capsys.readouterr().out  # a goal


def test_a_peer_that_runs_out_of_memory_is_recorded_and_one_that_refuses_is_not(stand_in, monkeypatch):
    def raising(error):
        def call(q, k, v):
            if q.shape[2] > 64:
                raise error

        return call

    peers = {"large": raising(torch.cuda.OutOfMemoryError("tried")), "picky": raising(RuntimeError("out of luck"))}
    monkeypatch.setattr(bench, "attentions", lambda *_, **__: peers)
    frame = memories(lambda q, k, v: q, "mine", lengths=(64, 128)).set_index(["name", "Nk"])["bytes"]
    assert frame[frame.isna()].index.tolist() == [("large", 128)]
    assert sorted(frame.dropna().index) == [("large", 64), ("mine", 64), ("mine", 128), ("picky", 64)]


def test_a_wrong_kernel_is_not_timed(stand_in, monkeypatch):
    class Wrong:
        rung = ladder.rung("04_fa2_fp32")

        def __call__(self, q, k, v, scale=None):
            return reference.same_precision(q, k, v)  # ignores the scale

    monkeypatch.setattr(recording, "load", lambda *_, **__: Wrong())
    with pytest.raises(AssertionError, match="scale 0.3"):
        recording.record_rung("04_fa2_fp32")
    assert not list(stand_in.glob("stand-in/*"))


def test_what_a_kernel_refuses_is_skipped_and_said(stand_in):
    def refuses(q, k, v):
        if q.shape[2] == 33:
            raise ValueError("N = 33 is not a multiple of 64")
        return q

    frame = workloads.forward(refuses, replace(ladder.rung("04_fa2_fp32"), stem="mine"))
    assert frame.attrs["skipped"] == [
        "mine at (B,H,Nq,Nk,D) = (2, 1, 33, 33, 64), fp32: N = 33 is not a multiple of 64"
    ]
    assert set(frame.loc[frame["name"] == "mine", "Nq"]) == {64}


def test_a_quick_timing_is_printed_and_not_recorded(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "KERNELS", tmp_path / "kernels")
    recording.time_quickly(sixteen.make_rung(ladder.KERNELS, "77_sixteen"))
    said = capsys.readouterr()
    assert "77_sixteen: right" in said.out and "worst" in said.out  # the CPU's SDPA FLASH stands in for the GPU's
    assert "77_sixteen" in said.err  # every shape as it is timed
    assert not list(stand_in.glob("stand-in/*"))
