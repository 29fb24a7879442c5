"""The X-ray finds reads of what no kernel has written: outputs and workspace come as torch.empty gives them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from emulated import build, launch, line_of, program, trace

from helpers import KernelError, load, rung, xray
from helpers.emulator import Launcher

HEADER = """#include <fa/args.cuh>
__global__ void write(const fa_args a) { static_cast<float *>(a.O)[threadIdx.x] = 1.f; }
__global__ void read(const fa_args a) {
  float *O = static_cast<float *>(a.O);
  O[threadIdx.x] = O[threadIdx.x + @] + static_cast<const float *>(a.Q)[threadIdx.x];
}
extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
"""


def findings(launches: str, ahead: int = 0) -> list[tuple[str, int, str]]:
    kernel = load(
        source=HEADER.replace("@", str(ahead)) + launches + " return cudaGetLastError(); }", device="cpu", quiet=True
    )
    found = xray(kernel, *(torch.ones(1, 1, 2, 32) for _ in range(3))).findings
    return [(f.kind, f.line, f.text) for f in found if f.kind != "race"]  # between lanes, which is another matter


def test_an_output_holds_nothing_before_it_is_written():
    [(kind, line, text)] = findings("read<<<1, 32, 0, stream>>>(*a);")
    assert (kind, line) == ("uninitialised memory", 5)
    assert text == "thread 0 of block 0 reads 4 bytes at O + 0 bytes, which no kernel has written"


def test_what_an_earlier_launch_wrote_is_there():
    assert findings("write<<<1, 32, 0, stream>>>(*a); read<<<1, 32, 0, stream>>>(*a);") == []
    [(_, _, text)] = findings("write<<<1, 32, 0, stream>>>(*a); read<<<1, 32, 0, stream>>>(*a);", ahead=1)
    assert text == "thread 31 of block 0 reads 4 bytes at O + 128 bytes, which no kernel has written"


def test_what_the_launcher_cleared_is_there():
    clear = "cudaMemsetAsync(a->O, 0, 256, stream);"
    assert findings(clear + "read<<<1, 32, 0, stream>>>(*a);", ahead=32) == []
    assert len(findings(clear.replace("256", "128") + "read<<<1, 32, 0, stream>>>(*a);", ahead=32)) == 1


STRUCTS = """
struct Best { float value; short index; };
struct Late { char flag; double value; };
"""
COPIED = {
    "at the end": "__shared__ Best s[64]; s[t].value = t; s[t].index = t; __syncthreads(); const Best b = s[63 - t]; x = b.value;",
    "in the middle": "__shared__ Late s[64]; s[t].flag = 1; s[t].value = t; __syncthreads(); const Late b = s[63 - t]; x = b.value;",
}
MISSING = {
    "a vector": ("__shared__ float4 s[64]; if (t < 9) s[t] = float4{1, 2, 3, 4}; __syncthreads(); const float4 v = s[63 - t]; x = v.x;", "which"),
    "half a vector": ("__shared__ float4 s[64]; s[t].x = s[t].y = t; __syncthreads(); const float4 v = s[63 - t]; x = v.x + v.z;", "(8 of )?which"),
    "a quarter": ("__shared__ float4 s[64]; s[t].x = s[t].y = s[t].w = t; __syncthreads(); const float4 v = s[63 - t]; x = v.x;", "(4 of )?which"),
    "half a double": ("__shared__ double s[64]; reinterpret_cast<float *>(s)[2 * t] = 1; __syncthreads(); x = s[63 - t];", "4 of which"),
    "half a float": ("__shared__ float s[64]; reinterpret_cast<short *>(s)[2 * t] = 1; __syncthreads(); x = s[63 - t];", "2 of which"),
    "a field": ("__shared__ Best s[64]; s[t].index = 1; __syncthreads(); x = s[63 - t].value;", "which"),
}  # fmt: skip


@cache
def structs() -> Launcher:
    bodies = [*COPIED.values(), *(body for body, _ in MISSING.values())]
    each = "\n".join(f"if (a.H == {i}) {{ {body} }}" for i, body in enumerate(bodies))
    return build(program(f"const int t = threadIdx.x; float x = 0;\n{each}\nout[t] = x;", "1, 64", STRUCTS))


@pytest.mark.parametrize("number", range(len(COPIED)), ids=COPIED)
def test_padding_of_a_struct_needs_no_value(number):
    assert launch(structs(), torch.zeros(64), H=number).tolist() == [63.0 - t for t in range(64)]
    assert trace(structs(), torch.zeros(64), H=number).findings == ()


@pytest.mark.parametrize("name", MISSING)
def test_what_is_no_padding_does(name):
    number, words = len(COPIED) + list(MISSING).index(name), MISSING[name][1]
    with pytest.raises(KernelError, match=rf"reads \d+ bytes at s \+ \d+ bytes, {words} nobody has written"):
        launch(structs(), torch.zeros(64), H=number)
    assert {f.kind for f in trace(structs(), torch.zeros(64), H=number).findings} == {"uninitialised shared memory"}


def test_where_nothing_is_looked_for_is_said():
    variable = """#include <fa/args.cuh>
    __device__ float sums[64];
    __global__ void add(const fa_args a) { sums[0] = threadIdx.x; static_cast<float *>(a.O)[threadIdx.x] = sums[0]; }
    extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t s) { add<<<1, 64, 0, s>>>(*a); return cudaGetLastError(); }"""
    ray = xray(load(source=variable, device="cpu", quiet=True), *(torch.ones(1, 1, 2, 32) for _ in range(3)))
    assert "no findings in shared memory and tensors: no race" in str(ray)
    assert any(note.startswith("__device__ variables are counted") for note in ray.notes)


def test_a_workspace_read_before_it_is_written():
    bug = rung("03_fa1_fp32").replace("m[i] = -FA_INFINITY, l[i] = 0.f;", "m[i] = -FA_INFINITY;")
    found = xray(load(source=bug, device="cpu", quiet=True), *(torch.randn(1, 1, 40, 32) for _ in range(3))).findings
    assert [(f.kind, f.line) for f in found] == [("uninitialised memory", line_of(bug, "l_old[r] = "))]
    assert " l + " in found[0].text
