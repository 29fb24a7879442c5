"""Hardware counters: what ncu prints becomes one row per launch; what it can't do is said."""

import stat

import pandas as pd
import pytest
import sixteen

from helpers import patterns, record
from helpers.evidence import counters
from helpers.ladder import rung as ladder


def fake_ncu(tmp_path, output: str, code: int = 0):
    """A program that prints `output` in place of Nsight Compute, and its arguments to a file."""
    script = tmp_path / "ncu"
    (tmp_path / "output").write_text(output)
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/output\nexit {code}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, T2, T3)"


def listing(*kernels: str) -> str:
    """ncu's --csv --page raw: its own lines, a row of names, a row of units, a row per launch with counts 1000, 1001, …"""
    names = ",".join(f'"{n}"' for n in ("ID", "Kernel Name", *counters.METRICS.values()))
    units = ",".join(['""'] * (2 + len(counters.METRICS)))
    rows = [
        ",".join([f'"{i}"', f'"{kernel}"', *(f'"{1000 + k:,}"' for k in range(len(counters.METRICS)))])
        for i, kernel in enumerate(kernels)
    ]
    return "\n".join(["==PROF== Connected to process 7", names, units, *rows]) + "\n"


def test_a_row_per_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "SIZES", [(1, 2, 256, 64), (1, 16, 1024, 64)])
    two = ("scores(fa_args)", "softmax(fa_args)", FILL, "scores(fa_args)", FILL)  # another number of launches each
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, listing(*two))))
    frame = counters.profile("01_naive")
    assert frame[["dtype", "B", "H", "N", "D", "kernel"]].values.tolist() == [
        ["fp32", 1, 2, 256, 64, "scores"],
        ["fp32", 1, 2, 256, 64, "softmax"],
        ["fp32", 1, 16, 1024, 64, "scores"],
    ]
    assert frame[list(counters.METRICS)].iloc[1].tolist() == [1000 + k for k in range(len(counters.METRICS))]
    arguments = (tmp_path / "arguments").read_text()
    assert "call_once('01_naive')" in arguments and "--clock-control none" in arguments
    assert "smsp__inst_executed_op_ldsm.sum" in arguments


def test_a_sixteen_bit_rung_is_profiled_in_fp16_at_both_head_dimensions(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "KERNELS", tmp_path / "kernels")
    stem = sixteen.make_rung(ladder.KERNELS, "77_sixteen")
    calls = [name for size in counters.SIZES_16_BIT for name in (f"fa2<{size[3]}>(fa_args)", FILL)]
    text = listing(*calls).replace('"1,013"', '"n/a"')  # a counter that this GPU doesn't have
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, text)))
    frame = counters.profile(stem)
    assert set(frame["dtype"]) == {"fp16"}
    assert [f"fa2<{d}>" for d in frame["D"]] == frame["kernel"].tolist()
    assert set(frame["D"]) == {64, 128}
    assert frame["async_copy_instructions"].isna().all() and frame["ldmatrix_instructions"].notna().all()


def test_sizes_that_ncu_missed_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, listing("scores(fa_args)", FILL))))
    with pytest.raises(RuntimeError, match="1 of the 3 sizes of 01_naive"):
        counters.profile("01_naive")


@pytest.mark.parametrize(
    ("output", "code"), [("==ERROR== ERR_NVGPUCTRPERM", 1), ("==WARNING== No kernels were profiled.", 0)]
)
def test_what_ncu_could_not_do_is_said_in_its_words(tmp_path, monkeypatch, output, code):
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, output, code)))
    with pytest.raises(RuntimeError, match=f"ncu could not profile 01_naive: {output}"):
        counters.profile("01_naive")


def test_a_missing_ncu_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match="ncu is not on PATH: install NVIDIA Nsight Compute"):
        counters.find_ncu()


def patterns_listing(names: list[str]) -> str:
    text = listing(*(f"void {name}<float4>(fa_args)" for name in names))
    extra = [m for m in counters.SINGLE_METRICS.values() if m not in counters.METRICS.values()]
    head, *rest = text.split("\n", 1)
    lines = rest[0].splitlines()
    added = [",".join(f'"{m}"' for m in extra), ",".join('""' for _ in extra)] + [",".join('"7"' for _ in extra)] * len(
        names
    )
    return "\n".join([head, *(f"{line},{more}" for line, more in zip(lines, added, strict=True))]) + "\n"


def test_a_row_per_pattern(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_known", lambda metrics: metrics)
    monkeypatch.setattr(
        counters, "find_ncu", lambda: str(fake_ncu(tmp_path, patterns_listing(counters.singles("patterns").kernels)))
    )
    frame = counters.profile_singles("patterns")
    assert frame["name"].tolist() == [p.name for p in patterns.patterns()]
    assert frame["kernel"][0] == "void load<float4>" and (frame["atomic_wavefronts"] == 7).all()
    assert "call_singles('patterns', " in (tmp_path / "arguments").read_text()


def test_rows_that_are_known_are_kept_and_only_the_others_profiled(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_known", lambda metrics: metrics)
    every = counters.singles("patterns")
    known = pd.DataFrame({"name": ["gone", *every.names[3:]], "kernel": "before", "shared_wavefronts": 1})
    text = patterns_listing(every.kernels[:3])
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, text)))
    frame = counters.profile_singles("patterns", known)
    assert frame["name"].tolist() == every.names
    assert frame["shared_wavefronts"].tolist() == [7] * 3 + [1] * (len(every.names) - 3)
    again = counters.profile_singles("patterns", frame)
    assert again is frame


def test_rows_recorded_under_other_conditions_are_not_kept(monkeypatch):
    about = record.about("device", "async", "nvidia-h200")
    now = {what: about[what] for what in ("device", "driver", "torch", "cuda")} | {"date": "2030-01-01"}
    monkeypatch.setattr(record, "conditions", lambda: now)
    assert len(counters.recorded("async")) >= 72
    assert list(counters.recorded("async").columns) == ["name", "kernel", "wavefronts", "conflicts", "sectors"]
    monkeypatch.setattr(record, "conditions", lambda: now | {"driver": "1.0"})
    assert counters.recorded("async") is None


def test_a_row_per_microkernel(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_known", lambda metrics: metrics)
    made = counters.singles("microkernels")
    text = patterns_listing(made.kernels).replace("<float4>", "")
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, text)))
    frame = counters.profile_singles("microkernels")
    assert len(frame) >= 60 and frame["name"][0] == "contiguous" and frame["kernel"][0] == "void micro_contiguous"


def test_launches_that_are_not_the_patterns_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_known", lambda metrics: metrics)
    names = counters.singles("patterns").kernels[1:]
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, patterns_listing(names))))
    with pytest.raises(RuntimeError, match="not those of the"):
        counters.profile_singles("patterns")


def test_only_counters_that_ncu_lists_are_asked_for(tmp_path, monkeypatch):
    listed = "l1tex__data_pipe_lsu_wavefronts_mem_shared  Counter  # of wavefronts"
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, listed)))
    known = counters._known(counters.SINGLE_METRICS)
    assert "shared_wavefronts" in known and "atomic_wavefronts" not in known
    assert set(counters.METRICS) - {"dram_read_bytes", "dram_write_bytes", "duration_ns"} < set(known)
