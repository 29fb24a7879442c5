"""The command line: every command does its work and says by its exit code how it went; an error is a sentence, not a traceback."""

import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import sixteen
import torch

from helpers import commands, record, reference
from helpers.ladder import cards
from helpers.ladder.errors import CompileError, KernelError
from helpers.ladder.paths import KERNELS
from helpers.ladder.rung import rungs

ROOT = Path(__file__).parents[2]
STEM = "01_naive"
SMALL = ["--B", "1", "--H", "1", "--N", "8", "--D", "8"]
COMMANDS = [
    "doctor",
    "check",
    "xray",
    "run",
    "bench",
    "exercise",
    "grade",
    "record",
    "goals",
    "readme",
    "notebooks",
    "book",
    "course",
]
RECORDS = [
    "rungs",
    "builds",
    "counters",
    "stalls",
    "wgmma",
    "power",
    "at_once",
    "sanitizer",
    "xray-of-mutants",
    "verdicts",
    "roles",
    "stages",
    "timeline",
    "tiles",
    "training",
    "writing",
    "families",
    "layouts",
    "one_sequence",
    "ring",
    "heads",
    "languages",
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


def foreign(folder, extra=""):
    """mine.cu in `folder`: a kernel for 16-bit inputs without a header block, with `extra` at the start of each thread's work."""
    body = sixteen.SOURCE[sixteen.SOURCE.index("#include") :]
    start = "  const int i = row % a.Nq"
    assert start in body
    (folder / "mine.cu").write_text("#include <cstdio>\n" + body.replace(start, f"  {extra}\n{start}"))
    return "mine.cu"


def run(capsys, *line):
    """Exit code, stdout and stderr of one command line."""
    code = commands.main([str(word) for word in line])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def refused(capsys, *line):
    """stderr of a command line that argparse refuses."""
    with pytest.raises(SystemExit) as refusal:
        commands.main(list(line))
    assert refusal.value.code == 2
    return capsys.readouterr().err


# Help


@pytest.mark.parametrize(
    "line", [[], *([name] for name in COMMANDS), *(["record", name] for name in RECORDS)], ids=" ".join
)
def test_help_has_an_example(line, capsys):
    with pytest.raises(SystemExit) as done:
        commands.main([*line, "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    assert (
        f"\n  python -m helpers {' '.join(line)}" in text if line else all(f"    {name}" in text for name in COMMANDS)
    )
    assert "exit codes" in text or line


def test_the_module_runs_from_any_folder_and_its_help_needs_no_torch(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "helpers", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "python -m helpers COMMAND --help" in done.stdout
    assert not {"torch", "pandas"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def in_python(*line: str, **settings: str) -> subprocess.CompletedProcess:
    """A line of Python's, with settings in its environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run([sys.executable, *line], env=environment, capture_output=True, text=True)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("settings", "fix"),
    [({"PYTHONOPTIMIZE": "1"}, "unset"), ({"PYTHONOPTIMIZE": "2"}, "unset"), (ASCII, "set PYTHONUTF8=1")],
    ids=["-O", "-OO", "ASCII"],
)
def test_settings_of_python_that_the_house_can_not_live_with_are_refused_in_a_sentence(settings, fix):
    command = in_python("-m", "helpers", "doctor", **settings)
    assert command.returncode == 1 and command.stderr.count("\n") == 1 and fix in command.stderr
    notebook = in_python("-c", "from helpers import exercise", **settings)
    assert notebook.returncode == 1 and notebook.stderr.endswith(f"ToolkitError: {command.stderr}")


def test_letters_that_a_terminal_lacks_are_replaced():
    done = in_python("-m", "helpers", "goals", "04", PYTHONIOENCODING="ascii")
    assert done.returncode in (0, 1) and "?" in done.stdout and done.stderr == ""


def test_a_missing_record_names_the_command_that_makes_it():
    by_bench = {kind for one in rungs() for kind in record.kinds(one)} | {"error", "memory", "build", "ceilings"}
    for kind in {path.stem.split(".")[-1] for path in record.DATA.glob("nvidia-*/*.csv")}:
        said = record.maker("13_tuned", kind)
        if command := re.search(r"helpers record ([\w-]+)", said):
            assert command[1] in RECORDS, (kind, said)
        else:
            assert ("make bench" in said) == (kind in by_bench), (kind, said)


@pytest.mark.parametrize(
    "line", [[], ["nothing"], ["run", STEM, "--N", "0"], ["record"], ["record", "nothing"], ["xray"]]
)
def test_a_wrong_command_line_is_refused_with_2(line, capsys):
    assert "usage: python -m helpers" in refused(capsys, *line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["run", STEM, "--N", "99999999999"], "--N: 99999999999 is too large; every dimension has to be at most 2^30"),
        (["xray", STEM, "--seed", "99999999999999999999"], "has more than 64 bits; a seed is -2^63 to 2^64 - 1"),
        (["xray", STEM, "--seed", "one"], "one is no whole number"),
        (["grade", "mine.cu", "--jobs", "0"], "0 is no positive number"),
        (["record", "verdicts", "--workers", "-1"], "-1 is no positive number"),
        (["record", "sanitizer", "--workers", "0"], "0 is no positive number"),
        (["record", "ring", "--dry", "--ranks", "0"], "0 is no positive number"),
        (["grade", "--tasks", "04.1", "mine.cu"], "grade SUBMISSION [SUBMISSION ...] [options]"),
        (["course", "build", "--blank", "04.1", "out"], "build OUT [--blank TASK [TASK ...]]"),
    ],
)
def test_what_argparse_refuses_is_named_with_what_is_allowed(line, words, capsys):
    assert words in refused(capsys, *line)


# A kernel


def test_a_call_is_summarised(capsys):
    code, out, err = run(capsys, "run", STEM, *SMALL, "--device", "cpu")
    first, second, last = out.splitlines()
    assert code == 0 and first.startswith("o   (1, 1, 8, 8) float32  -") and second.startswith("lse (1, 1, 8) float32")
    assert last.endswith("s on the emulator") and f"{STEM} · emulator" in err


def test_shapes_and_seed_are_those_asked_for(capsys):
    line = ["run", STEM, "--device", "cpu", "--B", "2", "--H", "3", "--Nq", "5", "--Nk", "7", "--D", "16"]
    first, other, again = (run(capsys, *line, "--seed", seed)[1].splitlines()[0] for seed in (0, 1, 0))
    assert first.startswith("o   (2, 3, 5, 16) float32") and first == again != other


def test_what_a_kernel_prints_is_shown_before_its_outputs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = foreign(tmp_path, 'if (row == 0) printf("hello from row %d\\n", int(row));')
    code, out, _ = run(capsys, "run", name, *SMALL, "--dtype", "bf16", "--device", "cpu")
    hello, o, lse, _ = out.splitlines()
    assert code == 0 and hello == "hello from row 0"
    assert o.startswith("o   (1, 1, 8, 8) bfloat16  ") and lse.startswith("lse (1, 1, 8) float32  ")


def test_what_is_not_finite_is_counted():
    from helpers.commands.run import _summary

    output = torch.tensor([1.0, 3.0, torch.nan, torch.inf, -torch.inf])
    assert _summary("lse", output) == "lse (5,) float32  1 … 3, mean 2, 1 NaN, 2 infinite"
    assert _summary("o", output[2:3]) == "o   (1,) float32, 1 NaN"


def test_a_foreign_file_is_checked_from_another_folder(capsys, tmp_path, monkeypatch):
    """Without a header block; the command line says the dtype. A wrong kernel gives 1."""
    cases = reference.cases
    monkeypatch.setattr(reference, "cases", lambda *which: itertools.islice(cases(*which), 2))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    line = ["check", f"../{foreign(tmp_path)}", "--dtype", "fp16", "--device", "cpu"]
    code, out, _ = run(capsys, *line)
    assert code == 0 and "mine: right in 2 cases" in out
    foreign(tmp_path, "if (row == 3) return;")
    code, out, _ = run(capsys, *line)
    assert code == 1 and "mine: WRONG in" in out


@pytest.mark.parametrize(("device", "size"), [("cpu", "small"), ("cuda", "full")])
def test_a_gpu_is_given_the_full_set_of_cases(device, size, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("helpers.commands.check.loaded", lambda rung, _: SimpleNamespace(rung=rung, device=device))
    monkeypatch.setattr(reference, "cases", lambda _, *which: asked.append(which) or [])
    monkeypatch.setattr("helpers.run.check.check", lambda kernel, cases: SimpleNamespace(ok=not [*cases]))
    assert run(capsys, "check", STEM)[0] == 0 and asked == [(device, size)]


def test_an_xray_of_a_foreign_file_with_a_page(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "xray", foreign(tmp_path), *SMALL, "--dtype", "fp16", "--html", "x.html")
    assert code == 0 and "X-ray of mine · B=1 H=1 N=8 D=8 fp16" in out and "wrote x.html" in out
    page = (tmp_path / "x.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<title>X-ray of mine</title>" in page and "fa_launch" in page


def test_a_merge_is_run_checked_and_xrayed(capsys):
    assert commands.main(["run", "50"]) == 0 and "o   (1, 2, 256, 64) float32" in capsys.readouterr().out
    assert commands.main(["xray", "50"]) == 0 and "LSE_a" in capsys.readouterr().out
    assert commands.main(["check", "50"]) == 0 and "50_ring: right in" in capsys.readouterr().out


def test_a_merge_without_a_header_block_is_run_in_the_dtype_asked_for(capsys, tmp_path):
    lines = (KERNELS / "50_ring.cu").read_text().splitlines(keepends=True)
    path = tmp_path / "mine.cu"
    path.write_text("".join(itertools.dropwhile(lambda line: line.startswith("//"), lines)))
    for dtype in ([], ["--dtype", "fp16"]):
        code, out, _ = run(capsys, "run", path, "--op", "merge", "--N", "8", "--device", "cpu", *dtype)
        assert code == 0 and "o   (1, 2, 8, 64) float32" in out


@pytest.mark.parametrize("command", ["run", "xray", "check"])
def test_a_kernel_of_several_ranks_says_who_calls_it(command, capsys):
    assert commands.main([command, "51"]) == 2
    assert "51_one_sided takes the keys of other ranks: helpers.one_sided calls it" in capsys.readouterr().err


def test_an_xray_with_findings_gives_1(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = foreign(tmp_path, "a.LSE[0] = float(row);")  # eight threads write one word
    code, out, _ = run(capsys, "xray", name, *SMALL, "--dtype", "fp16")
    assert code == 1 and "✗ race" in out


def test_inputs_suit_the_header_block():
    """Dtype, head dimension, heads of K and V, and the single query of a decode step; options change them."""
    from helpers.commands import _parser
    from helpers.commands.arguments import described, inputs

    def shapes(*line):
        arguments = _parser().parse_args(["xray", *line])
        tensors, options = inputs(described(arguments), arguments, "cpu")
        return [tuple(t.shape) for t in tensors], tensors[0].dtype, options

    assert shapes("02_online_softmax") == ([(64, 1024)], torch.float32, {})
    assert shapes("03_fa1_fp32") == ([(1, 2, 256, 64)] * 3, torch.float32, {})
    assert shapes("13_tuned", "--dtype", "bf16", "--D", "128", "--N", "40")[:2] == (
        [(1, 2, 40, 128)] * 3,
        torch.bfloat16,
    )
    q, kv = (1, 2, 256, 64), (1, 1, 256, 64)
    assert shapes("20_causal_gqa", "--causal") == ([q, kv, kv], torch.float16, {"causal": True})
    assert shapes("21_split_kv", "--splits", "3") == (
        [(1, 2, 1, 64), (1, 1, 1024, 64), (1, 1, 1024, 64)],
        torch.float16,
        {"splits": 3},
    )
    found, dtype, options = shapes("22_backward_fp32", "--causal", "--window", "9", "--N", "32", "--Hkv", "2")
    assert found == [(1, 2, 32, 64)] * 4 + [(1, 2, 32), (1, 2, 32, 64)] and options == {"causal": True, "window": 9}


def test_O_and_LSE_of_a_backward_pass_are_those_under_its_mask():
    from helpers.commands import _parser
    from helpers.commands.arguments import described, inputs

    arguments = _parser().parse_args(["xray", "22", "--causal", "--N", "32"])
    (q, k, v, o, lse, _), _ = inputs(described(arguments), arguments, "cpu")
    exact = reference.attention(q, k, v, causal=True)
    assert all((x - y).abs().max() < 1e-5 for x, y in zip((o, lse), exact, strict=True))


def test_a_file_without_a_header_block_takes_what_the_command_line_says(tmp_path):
    from helpers.commands import _parser
    from helpers.commands.arguments import described

    path = tmp_path / foreign(tmp_path)
    arguments = _parser().parse_args(
        ["run", str(path), "--op", "softmax", "--dtype", "bf16", "--causal", "--splits", "2"]
    )
    rung = described(arguments)
    assert (rung.op, rung.dtypes, rung.features) == ("softmax", ("bf16",), ("causal", "splits"))


def test_as_many_hints_are_told_as_are_asked_for(capsys):
    for asked, told in (([], 1), ([1], 1), ([2], 2)):
        code, out, _ = run(capsys, "exercise", "hint", "04.1", *asked)
        assert code == 0 and out.count("hint ") == told


# Errors


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["run", "77_none"], "77_none"),
        (["xray", "no/such/file.cu"], "file.cu"),
        (["run", STEM, "--causal"], f"{STEM} takes no causal"),
        (["run", STEM, "--dtype", "fp16"], "allows fp32"),
        (["check", STEM, "--op", "softmax"], "allows attention"),
        (["check", "50", "--cases", "full"], "--cases full: 50_ring has one set of cases"),
        (["xray", STEM, "--html", "no/such/folder/x.html"], "there is no folder"),
        (["xray", STEM, "--html", "/"], "--html /: it is a folder"),
        (["run", "04", "--B", "1000000000", "--H", "1000000000"], "has 2e+22 elements; 2^40 are the most"),
        (["exercise", "new", "04", "nosuch"], "04_fa2_fp32 has no region 'nosuch'; it has tile"),
        (["exercise", "new", "case", "999"], "no case '999'; there are case.1"),
        (["exercise", "hint", "nosuch"], "no task 'nosuch'; there are 01.1"),
        (["course", "build", "/no/such/folder", "--blank", "nosuch"], "no task 'nosuch'; there are 01.1"),
        (["record", "sanitizer", "--build", "nosuch"], "no mutant 'nosuch'; ids read like 04.original or 04.*"),
        (["goals", "77_none"], "77_none"),
        (["record", "languages", "fortran"], "no implementation fortran; there are c_openmp, cute_dsl"),
        (
            ["record", "languages", "numpy_tiles", "--code"],
            "no implementation numpy_tiles; there are cute_dsl, cute_mma",
        ),
        (["notebooks", "77_none"], "no notebook 77_none; there are 00_start_here, 01_naive"),
    ],
)
def test_bad_usage_is_one_sentence_and_2(line, words, capsys):
    code, out, err = run(capsys, *line, *(["--device", "cpu"] if line[0] in ("run", "check") else []))
    assert code == 2 and out == "" and words in err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "error",
    [CompileError("line 3: error"), KernelError("CUDA error"), FileNotFoundError("no ncu"), KeyError("a thing")],
)
def test_an_error_is_its_sentence_and_1(error, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr("helpers.run.doctor.doctor", fails)
    assert run(capsys, "doctor") == (1, "", f"{error.args[0]}\n")
    with pytest.raises(type(error)):
        commands.main(["--traceback", "doctor"])


def test_a_file_that_does_not_compile_gives_1_and_its_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(
        capsys, "run", foreign(tmp_path, "int x = nonsense;"), *SMALL, "--dtype", "fp16", "--device", "cpu"
    )
    assert code == 1 and ".cu:16:" in err and "nonsense" in err


def test_a_warning_is_its_sentence(monkeypatch, capsys):
    def warns(_):
        warnings.warn("this may take minutes", stacklevel=1)
        return 0

    monkeypatch.setattr(commands.goals, "run", warns)
    assert run(capsys, "goals") == (0, "", "this may take minutes\n")


def test_ctrl_c_gives_130(monkeypatch, capsys):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr("helpers.run.doctor.doctor", stopped)
    assert run(capsys, "doctor") == (130, "", "stopped\n")


def test_a_closed_pipe_is_no_traceback():
    program = "from helpers import commands; commands.goals.run = lambda _: print('line\\n' * 100000); commands.main(['goals'])"
    command = f'{sys.executable} -c "{program}" | head -1'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("line\n", "")


# The machine


def test_the_doctor_says_what_runs_here(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "01_naive" in out and "C++ compiler" in out


def test_a_machine_on_which_nothing_runs_gives_1(monkeypatch, capsys):
    from helpers.run import doctor

    lanes = (doctor.Lane("01_naive", "nowhere", "no C++ compiler"),)
    monkeypatch.setattr(doctor, "doctor", lambda: doctor.Machine((), lanes))
    assert run(capsys, "doctor")[0] == 1
    broken = doctor.Fact("emulator", "missing or unusable", "a reason")
    assert not doctor.Machine((broken,), (doctor.Lane("01_naive", "emulator", ""),)).ok
    assert doctor.Machine((broken,), (doctor.Lane("01_naive", "GPU", ""),)).ok


@without_gpu
@pytest.mark.parametrize(
    "line",
    [
        ["bench"],
        ["bench", STEM],
        ["record", "rungs"],
        ["record", "sanitizer"],
        ["record", "roles", "32_ping_pong"],
        ["record", "tiles"],
        ["record", "training"],
        ["record", "writing"],
        ["record", "families", "13"],
        ["record", "layouts"],
        ["record", "one_sequence", "32"],
        ["record", "heads", "gpt"],
        ["record", "languages"],
        ["record", "languages", "triton_tiles", "--tune"],
    ],
    ids=" ".join,
)
def test_without_a_gpu_timing_is_one_sentence_and_1(line, capsys):
    code, out, err = run(capsys, *line)
    assert code == 1 and out == "" and err.count("\n") == 1 and "on a GPU only" in err


@without_gpu
def test_heads_without_a_gpu_names_the_model_that_needs_none(capsys):
    code, out, err = run(capsys, "record", "heads")
    assert code == 1 and out == "" and "gpt is trained on a GPU only" in err and "heads rxnmapper` needs none" in err


def test_counters_without_ncu_name_the_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    code, out, err = run(capsys, "record", "counters", STEM)
    assert code == 1 and out == "" and "install NVIDIA Nsight Compute" in err


# For maintainers: what is recorded is tested where it is made; here, that the command asks for it


@pytest.fixture
def asked(monkeypatch):
    """The recording functions replaced by a list of their calls."""
    calls = []
    for place in (
        "measure.recording.record_rung",
        "measure.recording.time_quickly",
        "evidence.counters.record_counters",
        "evidence.counters.record_singles",
        "evidence.sanitize.record_on_gpu",
        "evidence.sanitize.build_all",
        "evidence.sanitize.record_xray",
        "measure.roles.record_roles",
        "measure.tune.record_tiles",
        "lessons.train.record_training",
        "lessons.train.record_writing",
    ):
        name = place.rpartition(".")[2]
        monkeypatch.setattr(f"helpers.{place}", lambda *given, name=name: calls.append((name, *given)))
    monkeypatch.setattr("helpers.measure.bench.require_gpu", lambda: None)
    monkeypatch.setattr("helpers.run.kernel.cuda_refusal", lambda rung: "")
    return calls


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        (["counters", STEM, "04_fa2_fp32"], [("record_counters", STEM), ("record_counters", "04_fa2_fp32")]),
        (["counters", "--singles", "async", "copies", "--new"], [("record_singles", "async", True), ("record_singles", "copies", True)]),
        (["xray-of-mutants", "04.*", "--workers", "3", "--missing"], [("record_xray", ["04.*"], 3, True)]),
        (["roles", "31_warp_specialized", "32_ping_pong"], [("record_roles", "31_warp_specialized"), ("record_roles", "32_ping_pong")]),
        (["tiles", "--rounds", "9"], [("record_tiles", "13_tuned", 9)]),
        (["training"], [("record_training",)]),
        (["writing"], [("record_writing",)]),
    ],
)  # fmt: skip
def test_a_record_is_asked_for(line, calls, asked, capsys):
    assert run(capsys, "record", *line)[0] == 0
    assert asked == calls


def test_the_sanitizer_records_or_only_builds(asked, capsys, tmp_path):
    line = ["record", "sanitizer", "04.*", "--programs", str(tmp_path / "built")]
    assert run(capsys, *line, "--seconds", "600", "--gpus", "2")[0] == 0
    assert run(capsys, *line, "--build", "--workers", "1")[0] == 0
    programs = tmp_path / "built"
    assert asked == [("record_on_gpu", ["04.*"], 8, 600.0, programs, None, 2), ("build_all", ["04.*"], 1, programs)]


@pytest.mark.parametrize(("missed", "code"), [([], 0), (["04.1"], 1)])
def test_a_seeded_bug_that_nothing_notices_gives_1(missed, code, monkeypatch, capsys):
    monkeypatch.setattr("helpers.evidence.verdicts.record", lambda *_: missed)
    assert run(capsys, "record", "verdicts")[0] == code


def test_rungs_are_recorded_one_by_one_and_the_ceilings_with_all(asked, monkeypatch, capsys):
    from contextlib import nullcontext

    frame = pd.DataFrame({"name": ["copy"], "unit": ["TB/s"], "round": [0], "value": [4.0]})
    monkeypatch.setattr("helpers.measure.bench.watch", lambda: nullcontext({}))
    monkeypatch.setattr("helpers.measure.bench.ceilings", lambda: frame)
    saved = []
    monkeypatch.setattr(record, "save", lambda *given, **options: saved.append(given[:2]))
    assert run(capsys, "record", "rungs", STEM)[0] == 0
    assert asked == [("record_rung", STEM)] and not saved
    assert run(capsys, "record", "rungs")[0] == 0
    assert len(asked) >= 10 and saved == [("device", "ceilings")]


def test_what_a_gpu_can_not_run_is_left_out_with_a_sentence(asked, monkeypatch, capsys):
    monkeypatch.setattr("helpers.run.kernel.cuda_refusal", lambda rung: cards.refusal(rung, (7, 5)))
    code, out, _ = run(capsys, "bench")
    assert code == 0 and [rung.number for _, rung in asked] == ["01", "02", "03", "04", "10", "11"]
    assert "left out: 12_double_buffered needs compute capability 8.0, this GPU has 7.5" in out
    code, _, words = run(capsys, "record", "rungs", "32")
    assert code == 1 and "32_ping_pong needs compute capability 9.0 exactly" in words


def test_bench_takes_a_foreign_file(asked, capsys, tmp_path):
    path = tmp_path / foreign(tmp_path)
    code, out, _ = run(capsys, "bench", path)
    ((name, rung),) = asked
    assert code == 0 and name == "time_quickly" and rung.path == path and out == "mine\n"


@pytest.mark.parametrize(
    ("name", "words"), [("50", "no goal is set for 50_ring"), ("13_1", "is no rung"), ("mine.cu", "mine.cu is no rung")]
)
def test_goals_are_those_of_rungs_that_have_some(name, words, capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.cu").write_text((KERNELS / "04_fa2_fp32.cu").read_text())  # its header block names another
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "goals", name)
    assert code == 2 and not out and words in err
    assert run(capsys, "goals", "40")[1].count("40_every_language") >= 3


def test_goals_give_1_where_one_is_missed(monkeypatch, capsys):
    code, out, _ = run(capsys, "goals", "04_fa2_fp32")
    assert code == 0 and out.count("04_fa2_fp32") == 2
    missed = pd.DataFrame([("04_fa2_fp32", "missed")], columns=["rung", "verdict"])
    monkeypatch.setattr("helpers.record.goals.verdicts", lambda stems: missed)
    assert run(capsys, "goals")[0] == 1


def test_the_pages_are_compared_or_written(monkeypatch, capsys):
    from helpers import pages

    changes = {ROOT / "README.md": "-old\n+new"}
    monkeypatch.setattr(pages, "update", lambda check: changes)
    assert run(capsys, "readme", "--check") == (1, "-old\n+new\n", "")
    assert run(capsys, "readme") == (0, "wrote README.md\n", "")
    changes.clear()
    assert run(capsys, "readme", "--check") == (0, "all pages are up to date\n", "")


def test_notebooks_that_fail_give_1(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("helpers.lessons.execute.execute_all", lambda *given: asked.append(given) or len(asked) == 1)
    assert [run(capsys, "notebooks", STEM, "--inplace")[0] for _ in range(2)] == [0, 1]
    assert asked == [([STEM], True)] * 2


@pytest.mark.parametrize(("text", "why"), [("", "it is empty"), ("{", "Expecting property name")])
def test_a_file_that_is_no_notebook_is_named(text, why, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("helpers.lessons.execute.NOTEBOOKS", tmp_path)
    (tmp_path / "41_mine.ipynb").write_text(text)
    for how in ([], ["--from-text"]):
        code, out, err = run(capsys, "notebooks", "41_mine", *how)
        assert code == 2 and not out and f"41_mine.ipynb is no notebook: {why}" in err


def test_a_book_is_made_where_it_is_asked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("helpers.lessons.book.build", lambda folder: folder / "html" / "index.html")
    assert run(capsys, "book", "--into", tmp_path) == (0, f"{tmp_path / 'html' / 'index.html'}\n", "")
    assert run(capsys, "book")[1] == f"{ROOT / 'build' / 'book' / 'html' / 'index.html'}\n"


def test_the_makefile_and_the_pages_name_commands_that_there_are():
    text = "".join((ROOT / name).read_text() for name in ("Makefile", "README.md", "CONTRIBUTING.md", "data/README.md"))
    named = re.findall(r"python -m helpers ([a-z]+)(?: ([a-z][a-z-]*))?", text)
    assert len(named) >= 5
    for name, what in named:
        assert name in COMMANDS and (name != "record" or what in RECORDS or not what), (name, what)
    assert not re.search(r"python -m helpers\.", text)
