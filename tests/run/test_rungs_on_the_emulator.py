"""The rungs on the emulator: the same bits every time, little memory, and their traffic counted."""

import subprocess
import sys
import threading

import pytest
import torch

from helpers import load, reference, rungs, traffic
from helpers.run.kernel import cuda_refusal

FP32 = [r.stem for r in rungs() if r.op == "attention" and "fp32" in r.dtypes]
DTYPES = {r.stem: [reference.DTYPES[name] for name in r.dtypes] for r in rungs()}
ATTENTION = pytest.mark.parametrize(
    ("stem", "dtype"),
    [pytest.param(r.stem, d, id=f"{r.stem}-{d}") for r in rungs() if r.op == "attention" for d in DTYPES[r.stem]],
)


def inputs(B: int, H: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, N, D).to(dtype) for _ in range(3)]


@ATTENTION
def test_every_run_gives_the_same_bits_and_counts_on_any_number_of_threads(stem, dtype):
    kernel = load(stem, device="cpu", quiet=True)
    results = []
    for threads in (1, 2, 3, 2):
        kernel.launcher.threads = threads
        results.append((*kernel(*inputs(1, 2, 77, 64, dtype)), dict(kernel.launcher.counters)))
    for o, lse, counters in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1]) and counters == results[0][2]


@pytest.mark.gpu
@pytest.mark.parametrize(("rung", "dtype"), [pytest.param(r, d, id=f"{r.stem}-{d}") for r in rungs() for d in r.dtypes])
def test_the_gpu_gives_the_same_numbers(rung, dtype):
    """Up to rounding: nvcc contracts a multiply and an add into one FMA, its exp is not the C library's, and a tensor
    core adds in an order of its own. Where that turns the rounding of P or O the other way, 16 bits show it as one ulp; on
    the backward pass P and dS are rounded before they are multiplied, and a gradient is a sum of both signs: it may show more."""
    if refusal := cuda_refusal(rung):
        pytest.skip(refusal)
    both = [load(rung.stem, device=device, quiet=True) for device in ("cpu", "cuda")]
    tensors = reference.random_inputs(rung, (1, 1, 70, 300, 1) if rung.op == "softmax" else (1, 2, 77, 77, 64), dtype)
    more = 4 if rung.op == "attention_backward" else 1
    here, there = ([t.cpu() for t in kernel(*(x.to(kernel.device) for x in tensors))] for kernel in both)
    for emulated, real in zip(here, there):
        ulp = torch.finfo(emulated.dtype).eps
        rtol, atol = (4e-6, 1e-6) if emulated.dtype == torch.float32 else (2 * ulp, ulp)
        torch.testing.assert_close(emulated, real, rtol=more * rtol, atol=more * atol)


def test_memory_stays_below_a_gigabyte():
    program = f"""
import resource, torch
from helpers import load
kernels = [load(stem, device="cpu", quiet=True) for stem in {FP32!r}]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kernel in kernels:
    kernel(*torch.randn(3, 1, 2, 256, 64))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(grown.split()[-1]) < 1 << 20  # KB


def test_traffic_of_the_naive_kernel_is_what_its_formulas_say():
    B, H, N, D = 1, 2, 48, 32
    frame = traffic(load("01_naive", device="cpu", quiet=True), *inputs(B, H, N, D))
    pairs = B * H * N * N
    # Every score reads a row of Q and one of K, every element of O a row of P and a column of V.
    assert frame.bytes_read[["Q", "K", "V", "P"]].tolist() == [4 * pairs * D] * 4
    assert frame.bytes_written[["S", "P"]].tolist() == [4 * pairs] * 2
    assert frame.bytes_written[["O", "LSE"]].tolist() == [4 * B * H * N * D, 4 * B * H * N]
    assert frame.size_bytes["Q"] == 4 * B * H * N * D and frame.reads_per_byte["Q"] == N
    assert list(frame.columns) == ["bytes_read", "bytes_written", "size_bytes", "reads_per_byte"]


def test_traffic_of_a_kernel_that_copies():
    source = """#include <fa/args.cuh>
    __global__ void copy(const float4 *q, float4 *o, float *lse) {
      __shared__ float4 tile[64];
      tile[threadIdx.x] = q[threadIdx.x];             // 16 bytes of each of 64 threads
      __syncthreads();
      o[threadIdx.x] = tile[63 - threadIdx.x];
      if (threadIdx.x % 2) atomicAdd(lse, 1.0f);      // 32 times 4 bytes, read and written
    }
    extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
      copy<<<1, 64, 0, stream>>>(static_cast<const float4 *>(a->Q), static_cast<float4 *>(a->O), a->LSE);
      return cudaGetLastError();
    }"""
    frame = traffic(load(source=source, device="cpu", quiet=True), *inputs(1, 1, 8, 32))
    assert frame.loc["Q"].tolist() == [1024, 0, 1024, 1.0]
    assert frame.loc["K"].tolist() == [0, 0, 1024, 0.0]
    assert frame.loc["O"].tolist() == [0, 1024, 1024, 0.0]
    assert frame.loc["LSE"].tolist() == [128, 128, 32, 4.0]


def test_calls_from_several_python_threads():
    kernel = load(FP32[0], device="cpu", quiet=True)
    cases = [inputs(1, 1, n, 32) for n in (5, 33, 64, 17)]
    wanted = [kernel(*case)[0] for case in cases]
    got = [None] * len(cases)
    threads = [threading.Thread(target=lambda i=i: got.__setitem__(i, kernel(*cases[i])[0])) for i in range(len(cases))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
