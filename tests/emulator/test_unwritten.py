"""The X-ray finds reads of what no kernel has written: outputs and workspace come as torch.empty gives them."""

from __future__ import annotations

import torch
from emulated import line_of

from helpers import load, rung, xray

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


def test_a_workspace_read_before_it_is_written():
    bug = rung("03_fa1_fp32").replace("m[i] = -FA_INFINITY, l[i] = 0.f;", "m[i] = -FA_INFINITY;")
    found = xray(load(source=bug, device="cpu", quiet=True), *(torch.randn(1, 1, 40, 32) for _ in range(3))).findings
    assert [(f.kind, f.line) for f in found] == [("uninitialised memory", line_of(bug, "l_old[r] = "))]
    assert " l + " in found[0].text
