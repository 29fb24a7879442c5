"""The nvcc back end as far as a machine without a GPU can take it: builds, names and error texts."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hopper import pretend
from torch.utils import cpp_extension

from helpers import CompileError, KernelError, rung
from helpers.ladder import rung as ladder
from helpers.ladder.contract import Call, FaArgs
from helpers.ladder.instances import of_head_dimension
from helpers.toolchain import nvcc as jit
from helpers.toolchain import toolkit
from helpers.toolchain.compiler import find_compiler


@pytest.fixture(autouse=True)
def hopper(cache, monkeypatch):
    pretend(monkeypatch)


def load(source: str, path: Path = Path("cell")) -> jit.Launcher:
    launcher = jit.Launcher(ladder.parse(source, path))
    launcher.compile()
    return launcher


def naive(old: str = "", new: str = "") -> str:
    return rung("01_naive").replace(old, new) if old else rung("01_naive").source


HEAD = 'extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {'


def test_unchanged_edited_and_reverted(cache):
    loaded = [load(source) for source in (naive(), naive() + "// edited\n", naive())]
    assert [launcher.cached for launcher in loaded] == [False, False, True]
    assert loaded[0].arch == "sm_90a" and (loaded[0].resources["registers"] > 0).all()


def test_the_library_needs_the_cuda_runtime_and_nothing_of_torch(cache):
    load(naive())
    (library,) = cache.glob("01_naive_*/*.so")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert f"libcudart.so.{toolkit.find_toolkit().major}" in needed
    assert "torch" not in needed and "c10" not in needed


def test_another_architecture_is_another_build(cache, monkeypatch):
    load(naive())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")  # has no say
    there = load(naive())
    assert (there.arch, there.cached) == ("sm_80", False)


def test_half_arithmetic_is_as_the_cuda_headers_have_it(cache):
    operators = (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n__device__ __half h(__half a, __half b) { return a * b; }\n"
    )
    operators += "__device__ float f(__nv_bfloat16 a) { return a; }\n"
    load(naive("#include <fa/args.cuh>\n", operators + "#include <fa/args.cuh>\n"))


def test_a_compile_error_names_the_cells_line_once(cache):
    with pytest.raises(CompileError) as caught:
        load("#include <fa/args.cuh>\n__global__ void k() { undeclared = 1; }\n")
    text = str(caught.value)
    assert text.startswith('cell(2): error: identifier "undeclared" is undefined') and text.count("undeclared") == 2
    assert str(cache) not in text and "ninja" not in text and "ptxas" not in text


def test_a_rungs_own_error_names_its_file_in_the_checkout(cache):
    broken = rung("01_naive")
    with pytest.raises(CompileError, match=r"^kernels/01_naive\.cu\(\d+\): error: expected a \";\""):
        load(broken.replace("float s = 0.f;", "float s = 0.f"), broken.path)


def test_a_function_nobody_defines_is_named_and_ptxas_is_silent(cache):
    with pytest.raises(CompileError, match=r"undefined reference to `nobody\(\)'") as caught:
        load(naive(HEAD, f"void nobody();\n{HEAD} nobody();"))
    assert "ptxas" not in str(caught.value) and "FAILED" not in str(caught.value)


def test_nvcc_calls_the_host_compiler_that_was_chosen(cache, monkeypatch, tmp_path):
    mine, log = tmp_path / "my-g++", tmp_path / "calls"
    mine.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {find_compiler()} "$@"\n')
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    load(naive())
    assert "-D__CUDACC__" in log.read_text()


def test_torch_is_left_as_it_was(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    before = dict(os.environ), cpp_extension.CUDA_HOME
    load(naive())
    assert (dict(os.environ), cpp_extension.CUDA_HOME) == before


# Chooses as the ladder's launchers do, and answers with an error that says which instance it is.
CHOOSES = """// mine: as the ladder's
// dtypes: fp16, bf16
// D: 64, 128
#include <fa/args.cuh>
#include <fa/half.cuh>
template <int d, class T> __global__ void kernel() {}
template <int d, class T> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  if (a.B < 0) kernel<d, T><<<1, 1, 0, stream>>>();
  return cudaError_t(1000 * d + std::is_same<T, fa::bf16>::value);
}
template <int d> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  switch (a.D) {
  case 64:
    return launch<64>(a, stream);
  case 128:
    return launch<128>(a, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
"""


def said(launcher: jit.Launcher, D: int, dtype: int) -> str:
    with pytest.raises(KernelError) as caught:
        launcher.launch(Call(FaArgs(B=1, H=1, Nq=1, Nk=1, D=D, dtype=dtype, scale=1.0), {}, {}))
    return str(caught.value)


@pytest.mark.parametrize(("cores", "libraries"), [(1, 1), (2, 2), (3, 2), (4, 4), (64, 4)])
def test_instances_are_compiled_in_as_many_libraries_as_there_are_cores_for(cache, monkeypatch, cores, libraries):
    monkeypatch.setattr(jit, "cores", lambda: cores)
    monkeypatch.setattr(jit, "cuda_error", "CUDA error {}".format)
    launcher = load(CHOOSES)
    assert len(list(cache.glob("mine_*/*.so"))) == libraries and not launcher.cached and load(CHOOSES).cached
    answers = {(D, dtype): said(launcher, D, dtype) for D in (64, 128) for dtype in (1, 2)}
    assert answers == {(D, dtype): f"CUDA error {1000 * D + dtype - 1}" for D, dtype in answers}
    assert len(launcher.resources) == 4
    assert said(launcher, 96, 1) == "CUDA error 1"  # cudaErrorInvalidValue: the launcher's own answer
    next(cache.glob("mine_*/done")).unlink()
    assert not load(CHOOSES).cached  # one of them had to be compiled again


def test_apart_ptxas_says_the_same_of_every_kernel(cache, monkeypatch):
    one = of_head_dimension("12", 64)
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(jit, "cores", lambda cores=cores: cores)
        launcher = jit.Launcher(one)
        launcher.compile()
        found.append(launcher.resources.sort_index())
    assert len(list(cache.glob("12_*/*.so"))) == 3 and len(found[0]) == 2 and found[0].equals(found[1])


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "void kernel() {}",
            "void kernel() { undeclared = 1; }",
            'cell(6): error: identifier "undeclared" is undefined',
        ),
        ("void kernel() {}", "void kernel() { static_assert(d < 128); }", "cell(6): error: static assertion failed"),
        ("  }\n}\n", "  }\n  undeclared = 1;\n}\n", 'cell(24): error: identifier "undeclared" is undefined'),
    ],
)
def test_apart_a_compile_error_is_told_once_with_its_line(cache, monkeypatch, old, new, error):
    monkeypatch.setattr(jit, "cores", lambda: 4)
    with pytest.raises(CompileError) as caught:
        load(CHOOSES.replace(old, new))
    assert str(caught.value).startswith(error) and str(caught.value).count("error:") == 1
