"""%%kernel: one line when all is well, a short text when not, and never an exception."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from helpers import (
    CompileError,
    Kernel,
    KernelError,
    Rung,
    bench,
    check,
    load,
    magic,
    rung,
    sass,
    show,
    traffic,
    xray,
)


def test_a_right_kernel_is_bound_and_described_in_one_line(shell, capsys):
    shell.run_cell_magic("kernel", "mine", rung("03_fa1_fp32").source)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("mine: 03_fa1_fp32 · ") and " of the budget" in line
    assert isinstance(shell.user_ns["mine"], Kernel)


def test_a_kernel_that_merges_is_checked_in_the_cases_of_a_merge(shell, capsys):
    shell.run_cell_magic("kernel", "", rung("50_ring").replace("fmaxf(lse_a, lse_b)", "lse_a"))
    assert "b far above a" in capsys.readouterr().out


def test_the_name_is_kernel_unless_given(shell, capsys):
    shell.run_cell_magic("kernel", "", rung("02_online_softmax").source)
    assert isinstance(shell.user_ns["kernel"], Kernel)


def test_a_wrong_kernel_is_bound_too_and_the_report_says_where_it_is_wrong(shell, capsys):
    wrong = rung("01_naive").replace("a.scale", "a.scale * 2.f")
    shell.run_cell_magic("kernel", "", wrong)
    said = capsys.readouterr().out
    assert "worst at O[" in said and "x the budget" in said
    assert isinstance(shell.user_ns["kernel"], Kernel)


WRONG = "#include <fa/args.cuh>\nint one = two;\n"
WHERE = r"cell(:3:11|\(3\)): error"  # as g++ and as nvcc write it


def test_a_compile_error_names_the_cells_line(shell, capsys):
    shell.run_cell_magic("kernel", "", WRONG)
    said = capsys.readouterr().out
    assert re.search(WHERE, said) and "3 | int one = two;" in said  # line 1 is the magic's
    assert "Traceback" not in said and "ninja" not in said


USES = {
    "called": lambda kernel: kernel(*torch.zeros(3, 1, 1, 8, 32)),
    "asked for its tensors": lambda kernel: kernel.tensors(*torch.zeros(3, 1, 1, 8, 32)),
    "checked": check,
    "X-rayed": lambda kernel: xray(kernel, *torch.zeros(3, 1, 1, 8, 32)),
    "counted": lambda kernel: traffic(kernel, *torch.zeros(3, 1, 1, 8, 32)),
    "timed": lambda kernel: bench.measure({"kernel": kernel}),
    "loaded": load,
    "loaded for another device": lambda kernel: load(kernel, device="cpu"),
    "disassembled": sass.resources,
    "shown": show.source,
    "read": lambda kernel: kernel.source,
}


def test_a_cell_that_does_not_compile_leaves_no_kernel_behind(shell, capsys, monkeypatch):
    shell.run_cell_magic("kernel", "mine", rung("03_fa1_fp32").source)
    capsys.readouterr()
    shell.run_cell_magic("kernel", "mine", WRONG)
    broken = shell.user_ns["mine"]
    for name, stand_in in {"Event": Mock, "get_device_properties": Mock}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    for use in USES.values():
        with pytest.raises(CompileError, match=WHERE):
            use(broken)
    shown, _ = shell.display_formatter.format(broken)
    assert re.match("a kernel that was not loaded: using it raises\nCompileError: " + WHERE, shown["text/plain"])
    shell.run_cell_magic("kernel", "mine", rung("03_fa1_fp32").source)
    assert shell.user_ns["mine"](*torch.zeros(3, 1, 1, 8, 32))[0].eq(0).all()


@pytest.mark.parametrize(
    ("cell", "error", "words"),
    [
        ("#include <fa/args.cuh>\n", KernelError, "has no `extern"),
        ("// mine: x\n// colour: red\n", ValueError, "unknown key 'colour'"),
    ],
)
def test_a_cell_that_can_not_be_loaded_does_not_either(shell, capsys, cell, error, words):
    shell.user_ns["kernel"] = "yesterday's"
    shell.run_cell_magic("kernel", "", cell)
    assert words in capsys.readouterr().out
    with pytest.raises(error, match=words):
        shell.user_ns["kernel"](torch.zeros(1))


def test_nor_does_one_that_is_interrupted(shell, monkeypatch):
    shell.user_ns["mine"] = "yesterday's"

    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(magic, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        magic.run_cell(shell, "mine", rung("01_naive").source)
    with pytest.raises(KernelError, match="%%kernel mine was stopped before it had compiled"):
        shell.user_ns["mine"](torch.zeros(1))


def test_a_wrong_name_is_refused(shell, capsys):
    shell.run_cell_magic("kernel", "not a name", rung("01_naive").source)
    assert "takes one name" in capsys.readouterr().out


@pytest.mark.parametrize(("D", "taken"), [((), 64), ((32, 64), 64), ((128,), 128)])
def test_it_is_timed_at_a_head_dimension_it_takes(D, taken):
    assert magic.timed(Rung(stem="mine", path=Path("mine.cu"), source="", D=D)) == (1, 8, 1024, 1024, taken)


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "time"), [("32, 64, 128", "B1 H8 N1024 D64"), ("128", "B1 H8 N1024 D128")])
def test_on_a_gpu_the_line_ends_with_a_time(shell, capsys, D, time):
    shell.run_cell_magic("kernel", "", rung("03_fa1_fp32").replace("// D:         32, 64, 128", f"// D:         {D}"))
    assert capsys.readouterr().out.rstrip().endswith(f" ms at {time}")


@pytest.mark.gpu
def test_a_kernel_that_refuses_the_timed_size_is_not_timed(shell, capsys):
    refuses = "if (!fa::is_fp32(a) || a.Nq == 1024) return cudaErrorInvalidValue;"
    source = rung("01_naive").replace("if (!fa::is_fp32(a)) return cudaErrorInvalidValue;", refuses)
    shell.run_cell_magic("kernel", "", source)
    assert "not timed: CUDA error: invalid argument" in capsys.readouterr().out
