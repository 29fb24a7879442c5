"""The doctor reports whatever is missing, with its fix, and never raises."""

import importlib
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import helpers

ROOT = Path(__file__).parents[2]


def test_doctor_and_check_are_functions_whatever_was_imported_first():
    code = "import helpers.run.doctor, helpers.run.check, sys; from helpers.run.check import Report; import helpers; "
    code += "assert callable(helpers.doctor) and callable(helpers.check); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (said.stdout.strip(), said.stderr) == ("False", "")


def test_every_notebook_has_a_lane_and_a_reason():
    report = helpers.doctor()
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    assert [lane.notebook for lane in report.lanes] == notebooks
    assert all(lane.back_end in ("GPU", "emulator") and lane.why for lane in report.lanes)
    assert {"Python", "make", "venv", "torch", "GPU", "nvcc", "C++ compiler", "line numbers", "ninja", "emulator"} <= {
        f.name for f in report.facts
    }
    (emulator,) = (f for f in report.facts if f.name == "emulator")
    assert emulator.value.startswith("runs 01_naive, error ") and float(emulator.value.split()[-1]) < 1e-5
    assert "<table>" in report._repr_html_()


def test_commands_are_code_in_a_notebook():
    doctor = importlib.import_module("helpers.run.doctor")
    fact = doctor.Fact("make", "missing", "install it (`apt install make`), or call `jupyter lab <x>` yourself")
    shown = doctor.Machine((fact,), ())._repr_html_()
    assert "<code>apt install make</code>), or call <code>jupyter lab &lt;x&gt;</code>" in shown


def test_neighbours_that_run_in_one_place_for_one_reason_are_one_line():
    lanes = [
        ("01_a", "GPU", "x"),
        ("02_b", "GPU", "x"),
        ("03_c", "GPU", "x"),
        ("04_d", "emulator", "y"),
        ("05_e", "GPU", "x"),
    ]
    doctor = importlib.import_module("helpers.run.doctor")
    report = doctor.Machine((), tuple(doctor.Lane(*lane) for lane in lanes))
    assert [line.split()[:3] for line in str(report).splitlines()[2:]] == [
        ["01", "to", "03_c"], ["04_d", "emulator", "y"], ["05_e", "GPU", "x"],
    ]  # fmt: skip


def test_as_a_command_it_prints_the_report_and_no_warning():
    said = subprocess.run([sys.executable, "-m", "helpers", "doctor"], capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 0 and said.stderr == "" and "C++ compiler" in said.stdout


def test_without_a_compiler_nothing_runs_and_the_fix_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    report = helpers.doctor()
    fixes = {f.name: f.fix for f in report.facts}
    assert "apt install g++" in fixes["C++ compiler"] and "make lab" in fixes["nvcc"]
    assert "apt install g++" in fixes["emulator"]
    assert "apt install make" in fixes["make"] and "apt install binutils" in fixes["line numbers"]
    assert all(lane.back_end == "nowhere" and "apt install g++" in lane.why for lane in report.lanes)


def test_a_setting_that_is_no_number_and_half_a_header_block_stand_in_the_report(monkeypatch, tmp_path):
    doctor = importlib.import_module("helpers.run.doctor")
    (tmp_path / "01_naive.cu").write_text("// 01_naive: half written\n//\n// arch:  sm_\n")
    monkeypatch.setattr(doctor, "KERNELS", tmp_path)
    monkeypatch.setenv("FA_EMULATOR_THREADS", "many")
    report = doctor.doctor()
    assert "FA_EMULATOR_THREADS" in next(fact.fix for fact in report.facts if fact.name == "emulator")
    (lane,) = (lane for lane in report.lanes if lane.notebook == "01_naive")
    assert lane.back_end == "nowhere" and "01_naive.cu" in lane.why


def test_missing_headers_of_python_are_named_with_their_package(monkeypatch, tmp_path):
    doctor = importlib.import_module("helpers.run.doctor")
    assert doctor._headers() == f"Python.h of {platform.python_version()}"
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    fact = doctor._attempt("Python's headers", doctor._headers)
    assert fact.fix.startswith(f"no {tmp_path}/Python.h; optional:") and "as in notebook 40" in fact.fix
    assert "apt install python3-dev" in fact.fix


@pytest.mark.parametrize(
    ("capability", "arch", "words"),
    [
        ((7, 0), "sm_75", "needs compute capability 7.5, this GPU has 7.0: it runs on the emulator"),
        ((7, 5), "sm_80", "needs compute capability 8.0, this GPU has 7.5: it runs on the emulator"),
        ((12, 0), "sm_90a", "needs compute capability 9.0 exactly, this GPU has 12.0"),
    ],
)
def test_a_gpu_that_is_too_old_or_too_new_takes_the_emulator(monkeypatch, capability, arch, words):
    from helpers.run.kernel import cuda_refusal, default_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    rung = helpers.Rung(stem="mine", path=Path("mine.cu"), source="", arch=arch)
    assert words in cuda_refusal(rung)
    assert default_device(rung)[0] == "cpu" and words in default_device(rung)[1]


def test_a_turing_card_runs_six_rungs_and_no_bf16(monkeypatch):
    """As the report has it: a T4, with the toolkit taken for granted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr("helpers.run.kernel.matching_toolkit", lambda version: None)
    lane_of = importlib.import_module("helpers.run.doctor")._lane
    lanes = {rung.number: lane_of(rung.stem) for rung in helpers.rungs()}
    assert [n for n, lane in lanes.items() if lane.back_end == "GPU"] == ["01", "02", "03", "04", "10", "11"]
    assert lanes["04"].why == "nvcc compiles for Tesla T4" and lanes["11"].why.endswith("Tesla T4, for fp16 alone")
    assert all(lane.back_end == "emulator" for n, lane in lanes.items() if n > "11")
    assert {lane_of(stem).back_end for stem in ("50_ring", "51_one_sided")} == {"emulator"}
    assert lane_of("40_every_language").back_end == "GPU"  # it has no kernel of its own


def test_an_old_compiler_and_a_python_without_venv_are_named_with_their_fixes(monkeypatch, tmp_path):
    old = tmp_path / "c++"
    old.write_text("#!/bin/sh\necho '#define __GNUC__ 9'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ensurepip" else find(name, *rest)
    )
    fixes = {f.name: f.fix for f in helpers.doctor().facts}
    assert "g++ 9.0.0" in fixes["C++ compiler"] and "dnf install gcc-c++" in fixes["C++ compiler"]
    assert "apt install python3-venv" in fixes["venv"]
