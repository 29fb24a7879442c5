"""Compiling ahead: a hint, which changes when something is compiled and nothing else."""

import time
from pathlib import Path

import pytest

from helpers import CompileError, load, rung
from helpers.emulator import Launcher
from helpers.run import ahead as module
from helpers.run.ahead import compile_ahead

PLAIN = """#include <fa/args.cuh>
extern "C" cudaError_t fa_launch(const fa_args *, cudaStream_t) { return cudaErrorInvalidValue; }
"""


def settled(cache: Path) -> bool:
    """Is nothing being built any more, after ten minutes at most?"""
    deadline = time.monotonic() + 600
    while (busy := not module._waiting.empty() or any(cache.glob(".building-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not busy


def test_what_is_compiled_ahead_is_there_when_it_is_needed(cache):
    texts = [PLAIN, PLAIN.replace("InvalidValue", "NotSupported")]
    compile_ahead(texts, "run", "xray")
    kernels = [load(source=text, device="cpu", quiet=True) for text in texts]
    for kernel in kernels:
        kernel.launcher.compile_traced()
    assert len(list(cache.glob("cell_*"))) == 4
    assert Launcher(kernels[0].rung).compile_traced()[0].cached
    assert not list(cache.glob(".building-*"))


def test_an_error_is_raised_where_the_kernel_is_loaded(cache):
    wrong = PLAIN.replace("return", "return nothing +")
    compile_ahead([wrong, PLAIN], "run")
    with pytest.raises(CompileError, match=r"cell:2:\d+: error"):
        load(source=wrong, device="cpu", quiet=True)
    load(source=PLAIN, device="cpu", quiet=True)
    assert settled(cache)


def test_rungs_are_compiled_for_their_machine_code_too(cache, monkeypatch):
    made = []
    monkeypatch.setattr(module.sass, "cubin", lambda *given: made.append(("cubin", *given)))
    monkeypatch.setattr(module.sass, "disassembly", lambda *given: made.append(("sass", *given)))
    compile_ahead(["01_naive", rung("04_fa2_fp32")], "cubin", "sass", arch="sm_80")
    deadline = time.monotonic() + 600
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    one, two = rung("01_naive"), rung("04_fa2_fp32")
    assert sorted((what, r.stem, arch) for what, r, arch in made) == [
        (what, r.stem, "sm_80") for what in ("cubin", "sass") for r in (one, two)
    ]


@pytest.mark.parametrize("which", ["nosuch", "no/such.cu", Path("no/such.cu")])
def test_a_single_name_is_one_kernel(which):
    with pytest.raises(ValueError, match=f"no kernel 'nosuch'|there is no file '{which}'"):
        compile_ahead(which, "run")


@pytest.mark.parametrize("which", ["01", rung("01").path, rung("01")])
def test_a_single_kernel_needs_no_list(which, monkeypatch):
    jobs = []
    monkeypatch.setattr(module, "_begin", jobs.append)
    compile_ahead(which, "run", "xray")
    assert len(jobs) == 2 and jobs[0].args == (rung("01"),)


@pytest.mark.parametrize(
    ("needs", "words"), [(("speed",), "'speed'"), ((), "what to compile for: run, xray, cubin, sass")]
)
def test_an_unknown_need_and_none_at_all_are_named(needs, words):
    with pytest.raises(ValueError, match=words):
        compile_ahead(["01_naive"], *needs)
