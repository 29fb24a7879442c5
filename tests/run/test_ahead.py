"""Compiling ahead: a hint, which changes when something is compiled and nothing else."""

import time
from pathlib import Path

import pytest

from helpers import CompileError, load, rung
from helpers.emulator import Launcher
from helpers.ladder.rung import parse
from helpers.run import ahead as module
from helpers.run.ahead import compile_ahead, single

PLAIN = """#include <fa/args.cuh>
extern "C" cudaError_t fa_launch(const fa_args *, cudaStream_t) { return cudaErrorInvalidValue; }
"""


def settled(cache: Path) -> bool:
    """Is nothing being built any more, after two minutes at most?"""
    deadline = time.monotonic() + 120
    while (busy := not module._waiting.empty() or any(cache.glob(".building-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not busy


def test_what_is_compiled_ahead_is_there_when_it_is_needed(cache):
    texts = [PLAIN, PLAIN.replace("InvalidValue", "NotSupported")]
    compile_ahead(texts, "run", "xray")
    kernels = [load(source=text, device="cpu", quiet=True) for text in texts]
    for kernel in kernels:
        assert kernel.launcher.compile_traced().path != kernel.launcher.path
    assert len(list(cache.glob("cell_*"))) == 4
    assert Launcher(kernels[0].rung).compile_traced().cached
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
    deadline = time.monotonic() + 60
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    one, two = rung("01_naive"), rung("04_fa2_fp32")
    assert sorted((what, r.stem, arch) for what, r, arch in made) == [
        (what, r.stem, "sm_80") for what in ("cubin", "sass") for r in (one, two)
    ]


def test_an_unknown_need_is_named():
    with pytest.raises(ValueError, match="'speed'"):
        compile_ahead(["01_naive"], "speed")


@pytest.mark.parametrize("stem", ["10_fa2_mma_fp16", "21_split_kv", "33_backward_wgmma"])
def test_a_single_instance_of_a_rung(stem):
    whole, one = rung(stem), single(stem, 64, "bf16")
    assert (one.D, one.dtypes, one.stem, one.path) == ((64,), ("bf16",), stem, whole.path)
    assert "launch<128>" not in one.source and "launch<d, fa::fp16>" not in one.source
    assert "return launch<d, fa::bf16>(a, stream);" in one.source and "return launch<64>(a, stream);" in one.source
    again = parse(one.source, Path("cell"))
    assert (again.D, again.dtypes, again.stem) == (one.D, one.dtypes, stem)
    places = [
        next(n for n, line in enumerate(s.splitlines()) if "__global__" in line) for s in (whole.source, one.source)
    ]
    assert places[0] == places[1]


def test_what_cannot_be_taken_alone_is_refused():
    for stem, D, dtype in (("04_fa2_fp32", 64, "fp32"), ("13_tuned", 96, "fp16"), ("13_tuned", 64, "fp32")):
        with pytest.raises(ValueError, match=f"{stem} has no instance for D = {D}, {dtype}"):
            single(stem, D, dtype)
