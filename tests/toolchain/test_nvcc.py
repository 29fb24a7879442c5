"""The nvcc back end as far as a machine without a GPU can take it: builds, names and error texts."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hopper import pretend
from torch.utils import cpp_extension

from helpers import CompileError, rung
from helpers.ladder import rung as ladder
from helpers.toolchain import nvcc as jit
from helpers.toolchain import toolkit
from helpers.toolchain.compiler import find_compiler


@pytest.fixture(autouse=True)
def hopper(cache, monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(jit, "_cudart", lambda: None)


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
