"""A kernel whose file has changed since it was loaded is compiled again before it is used, and says so."""

import dataclasses
import os
import shutil
import time

import pytest
import torch

from helpers import Case, CompileError, check, load, reference, rung, show, traffic, xray
from helpers.ladder import paths
from helpers.ladder.paths import INCLUDE
from helpers.run import kernel as module

# O is 1 everywhere and LSE 2, or what an edit makes of them.
SOURCE = """// mine: a kernel of few lines
#include <fa/args.cuh>
__global__ void fill(fa_args a) {
  const int n = a.B * a.H * a.Nq;
  for (int i = threadIdx.x; i < n * a.D; i += 32) static_cast<float*>(a.O)[i] = 1.f;
  for (int i = threadIdx.x; i < n; i += 32) static_cast<float*>(a.LSE)[i] = 2.f;
}
extern "C" cudaError_t fa_launch(const fa_args* a, cudaStream_t stream) {
  fill<<<1, 32, 0, stream>>>(*a);
  return cudaGetLastError();
}
"""
QKV = tuple(torch.zeros(3, 1, 1, 4, 8))


def write(path, old="", new=""):
    """The file with `old` replaced, at another time than before, and after a call of the kernel may look again."""
    time.sleep(2 * module.LOOK_AGAIN)
    path.write_text(SOURCE.replace(old, new))
    later = time.time_ns() + write.calls * 1_000_000
    write.calls += 1
    os.utime(path, ns=(later, later))


write.calls = 1


@pytest.fixture
def mine(tmp_path):
    write(tmp_path / "mine.cu")
    return tmp_path / "mine.cu"


@pytest.fixture
def kernel(mine):
    return load(mine, device="cpu", quiet=True)


def ones(kernel):
    return kernel(*QKV)[0].unique().tolist()


def test_a_call_takes_the_new_text_and_says_so_once(mine, kernel, capsys):
    assert ones(kernel) == [1.0] and capsys.readouterr().out == ""
    write(mine, "1.f", "3.f")
    assert ones(kernel) == [3.0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{mine} has changed since it was loaded: compiled again, ") and line.endswith(" s")
    assert ones(kernel) == [3.0] and capsys.readouterr().out == ""
    assert "= 3.f" in kernel.source and kernel.file == mine and kernel.digest == rung(mine).digest
    write(mine)
    assert ones(kernel) == [1.0] and "loaded again" in capsys.readouterr().out  # that build is in the cache


def test_a_mark_that_an_editor_writes_before_the_text_is_no_change(mine, kernel, capsys):
    mine.write_text(SOURCE, encoding="utf-8-sig")
    assert ones(kernel) == [1.0] and capsys.readouterr().out == ""
    assert ones(load(mine, device="cpu", quiet=True)) == [1.0]


def test_a_rung_of_the_ladder_is_named_by_its_place_in_the_checkout(mine, kernel, capsys, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", mine.parent)
    write(mine, "1.f", "3.f")
    kernel.current()
    assert capsys.readouterr().out.startswith("mine.cu has changed since it was loaded: ")


OF_THE_BUILD = {  # what shows which text was compiled, or is shown
    "check": lambda kernel: "never written" in check(kernel, [Case("zeros", *QKV)]).comparisons[0].problem,
    "xray": lambda kernel: xray(kernel, *QKV).tensors.loc["O", "bytes_written"] == 32,
    "traffic": lambda kernel: traffic(kernel, *QKV).loc["O", "bytes_written"] == 32,
    "tensors": lambda kernel: bool(kernel.tensors(*QKV)["O"][0, 0, 0, 0] == 3),
    "show": lambda kernel: "3.f" in show.source(kernel).text,
    "rung": lambda kernel: "3.f" in rung(kernel).source,
    "load": lambda kernel: "3.f" in load(kernel).source,
}


@pytest.mark.parametrize("what", OF_THE_BUILD)
def test_every_use_takes_the_new_text(what, mine, kernel, capsys):
    assert not OF_THE_BUILD[what](kernel) and capsys.readouterr().out == ""
    write(mine, "static_cast<float*>(a.O)[i] = 1.f", "if (i < 8) static_cast<float*>(a.O)[i] = 3.f")
    assert OF_THE_BUILD[what](kernel)
    assert capsys.readouterr().out.count("has changed since it was loaded") == 1


def test_a_comment_moves_the_x_rays_lines(mine, kernel):
    before = xray(kernel, *QKV).to_frame()["line"].tolist()
    write(mine, "__global__", "// one more line\n__global__")
    assert xray(kernel, *QKV).to_frame()["line"].tolist() == [line + 1 for line in before]


def test_a_header_counts_as_the_file_does(tmp_path, monkeypatch, capsys):
    shutil.copytree(INCLUDE, tmp_path / "include")
    monkeypatch.setattr("helpers.ladder.rung.INCLUDE", tmp_path / "include")
    monkeypatch.setattr("helpers.emulator.launcher.KERNEL_INCLUDE", tmp_path / "include")
    header = tmp_path / "include" / "fa" / "mine.cuh"
    header.write_text("#pragma once\n#define ONE 1.f\n")
    source = SOURCE.replace("= 1.f", "= ONE").replace("#include", "#include <fa/mine.cuh>\n#include", 1)
    (tmp_path / "mine.cu").write_text(source)
    kernels = [load(which, device="cpu", quiet=True) for which in (tmp_path / "mine.cu", source)]
    assert [ones(kernel) for kernel in kernels] == [[1.0], [1.0]]
    time.sleep(2 * module.LOOK_AGAIN)
    header.write_text("#pragma once\n#define ONE 13.f\n")
    assert [ones(kernel) for kernel in kernels] == [[13.0], [13.0]]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [f"{header} has changed since mine was loaded"] * 2


def test_a_text_that_does_not_compile_is_an_error_at_every_use_until_it_is_fixed(mine, kernel, capsys):
    write(mine, "1.f;", "1.f +;")
    uses = [
        lambda: kernel(*QKV),
        lambda: kernel.tensors(*QKV),
        lambda: check(kernel, [Case("zeros", *QKV)]),
        lambda: xray(kernel, *QKV),
        lambda: load(kernel),
        lambda: kernel(*QKV),
    ]
    for use in uses:
        with pytest.raises(CompileError, match=r"mine.cu:5:\d+: error"):
            use()
    assert capsys.readouterr().out == ""
    write(mine, "1.f", "5.f")
    assert ones(kernel) == [5.0]


def test_a_file_that_is_gone_is_an_error(mine, kernel):
    time.sleep(2 * module.LOOK_AGAIN)
    mine.unlink()
    for _ in range(3):  # soon after each other
        with pytest.raises(ValueError, match=r"there is no file '.*mine\.cu'"):
            kernel(*QKV)


def test_calls_that_follow_each_other_fast_look_only_once(kernel, monkeypatch):
    clock, stats, stamp = [time.monotonic()], [], module._stamp
    monkeypatch.setattr(module, "_stamp", lambda path: stats.append(path) or stamp(path))
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.Kernel, "_run", lambda *_: None)
    for seconds in (1, 0.004, 0.004, 0.004, 0.02, 0):
        clock[0] += seconds
        kernel(*QKV)
    files = 1 + len(kernel.rung.includes)
    assert len(stats) == 3 * files  # at 1 s, 1.012 s and 1.032 s
    check(kernel, [Case("zeros", *QKV)])
    assert len(stats) == 4 * files  # whatever the time


def test_a_file_saved_without_a_change_is_not_compiled(mine, kernel, capsys):
    launcher = kernel.launcher
    write(mine)
    assert ones(kernel) == [1.0]
    assert kernel.launcher is launcher and capsys.readouterr().out == ""


def test_a_text_has_no_file_and_never_changes(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cell").write_text(SOURCE)  # the name that a text is compiled under
    of_text = load(source=SOURCE.replace("1.f", "4.f"), device="cpu", quiet=True)
    edited = load(dataclasses.replace(rung(mine), source=SOURCE.replace("1.f", "6.f")), device="cpu", quiet=True)
    assert of_text.file is None and edited.file is None
    (tmp_path / "cell").write_text("nothing")
    write(mine, "1.f", "3.f")
    assert (ones(of_text), ones(edited)) == ([4.0], [6.0]) and capsys.readouterr().out == ""


def test_what_was_set_on_the_emulator_stays(mine, kernel):
    kernel.launcher.timeout, kernel.launcher.threads, kernel.launcher.schedule = 7, 1, 5
    write(mine, "1.f", "3.f")
    kernel.current()
    assert (kernel.launcher.timeout, kernel.launcher.threads, kernel.launcher.schedule) == (7, 1, 5)


def test_a_check_is_of_one_build(mine, kernel, capsys):
    """The file changes between the first case and the second."""

    def cases():
        yield Case("first", *QKV)
        write(mine, "1.f", "3.f")
        yield Case("second", *QKV)

    assert [c.got for c in check(kernel, cases()).comparisons if c.output == "o"] == [1.0, 1.0]
    assert capsys.readouterr().out == ""
    assert ones(kernel) == [3.0]


def test_load_gives_a_kernel_back_itself(mine, kernel, capsys):
    assert load(kernel) is kernel and load(kernel, device="cpu") is kernel
    write(mine, "1.f", "3.f")
    assert load(kernel) is kernel and "has changed" in capsys.readouterr().out
    assert ones(kernel) == [3.0]


@pytest.mark.parametrize("which", ["01", "naive", "kernels/01_naive.cu", "path", "text", "rung", "kernel"])
def test_everything_takes_the_same_things(which, monkeypatch):
    naive = rung("01_naive")
    monkeypatch.chdir(naive.path.parents[1])
    made = {"path": naive.path, "text": naive.source, "rung": naive}
    given = load("01", device="cpu", quiet=True) if which == "kernel" else made.get(which, which)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # check loads for the CPU
    inputs = reference.random_inputs(naive, (1, 1, 8, 8, 32))
    assert load(given, device="cpu", quiet=True).source == naive.source
    assert check(given, [Case("small", *inputs)]).ok
    assert xray(given, *inputs).rung.source == naive.source
    assert traffic(given, *inputs).loc["Q", "bytes_read"] > 0
    assert show.region(given, "scores").text and show.changed(given, "01") == 0
