"""Hardware counters: what ncu prints becomes one row per launch; what it can't do is said."""

import stat

import pytest

from helpers import counters


def fake_ncu(tmp_path, output: str, code: int = 0):
    """A program that prints `output` in place of Nsight Compute, and its arguments to a file."""
    script = tmp_path / "ncu"
    (tmp_path / "output").write_text(output)
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/output\nexit {code}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


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
    ncu = fake_ncu(tmp_path, listing("scores(fa_args)", "softmax(fa_args)"))
    monkeypatch.setattr(counters, "find_ncu", lambda: str(ncu))
    frame = counters.profile("01_naive", 1, 2, 256, 64)
    assert frame[["B", "H", "N", "D", "kernel"]].values.tolist() == [[1, 2, 256, 64, k] for k in ("scores", "softmax")]
    assert frame[list(counters.METRICS)].iloc[1].tolist() == [1000 + k for k in range(len(counters.METRICS))]
    arguments = (tmp_path / "arguments").read_text()
    assert "--call 01_naive 1 2 256 64" in arguments and "--clock-control none" in arguments


@pytest.mark.parametrize(
    ("output", "code"), [("==ERROR== ERR_NVGPUCTRPERM", 1), ("==WARNING== No kernels were profiled.", 0)]
)
def test_what_ncu_could_not_do_is_said_in_its_words(tmp_path, monkeypatch, output, code):
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, output, code)))
    with pytest.raises(RuntimeError, match=f"ncu could not profile 01_naive: {output}"):
        counters.profile("01_naive", 1, 2, 256, 64)


def test_a_missing_ncu_names_the_mend(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match="ncu is not on PATH: install NVIDIA Nsight Compute"):
        counters.find_ncu()
