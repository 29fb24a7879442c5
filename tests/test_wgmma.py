"""Warpgroup instructions: wgmma through its descriptors against matmul, and every way of using it wrong that can be known."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from emulated import FILE, build, launch, line_of, program

from helpers import KernelError, fragments
from helpers.fragments import Descriptor

RANDOM = np.random.default_rng(0)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
START = 65536  # where the emulator's dynamic shared memory begins
BYTES = 65536

# Descriptors come as data (K: those of A and B, then scale-d), and shared memory is filled from Q, so that one kernel serves
# many layouts. D starts as 100 + its place, and goes to O as each thread holds it.
PRELUDE = """
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory"); }
template <int n> __device__ void proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
"""
SETUP = """
  extern __shared__ __align__(1024) uint32_t smem[];
  const int t = threadIdx.x;
  [[maybe_unused]] const uint64_t* given = static_cast<const uint64_t*>(a.K);
  [[maybe_unused]] const uint64_t da = given[0], db = given[1];
  [[maybe_unused]] const int added = int(given[2]);
  for (int i = t; i < 65536 / 4; i += blockDim.x) smem[i] = static_cast<const uint32_t*>(a.Q)[i];
  [[maybe_unused]] const uint32_t* ra = static_cast<const uint32_t*>(a.V) + 4 * t;
  __syncthreads();
"""


def wgmma(
    n: int, kind: str = "f16", to: str = "f32", tail: str | None = None, registers: bool = False, d: str = "d"
) -> str:
    """The asm statement of one product: D is ``d``, A is da or ra[0..3], B is db; tail: scale-a, scale-b and the transposes."""
    words = n // 2 if to == "f32" else n // 4
    tail = tail or {"tf32": "1, 1"}.get(kind, "1, 1, 0" if registers else "1, 1, 0, 0")
    first = words + (5 if registers else 2)
    a = "{" + ", ".join(f"%{words + i}" for i in range(4)) + "}" if registers else f"%{words}"
    outputs = ", ".join(f'"+{"f" if to == "f32" else "r"}"({d}[{i}])' for i in range(words))
    inputs = ", ".join([f'"r"(ra[{i}])' for i in range(4)] if registers else ['"l"(da)']) + ', "l"(db), "r"(added)'
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{first}, 0; "\n'
        f'"wgmma.mma_async.sync.aligned.m64n{n}k{8 if kind == "tf32" else 16}.{to}.{kind}.{kind} "\n'
        f'"{{{", ".join(f"%{i}" for i in range(words))}}}, {a}, %{first - 1}, p, {tail};}}" : {outputs} : {inputs});'
    )


def one_product(n: int, **options) -> str:
    """A kernel's body: one product, waited for."""
    words, kind = (n // 2, "float") if options.get("to", "f32") == "f32" else (n // 4, "uint32_t")
    return f"""
  {kind} d[{words}];
  for (int i = 0; i < {words}; ++i) d[i] = static_cast<const {kind}*>(a.workspace[0])[t * {words} + i];
  fence(); {wgmma(n, **options)} commit(); wait<0>();
  for (int i = 0; i < {words}; ++i) static_cast<{kind}*>(a.O)[t * {words} + i] = d[i];
"""


LAUNCH = "  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);\n  kernel<<<1, {threads}, 65536>>>(a);"


@cache
def built(body: str, threads: int = 128):
    return build(program(SETUP + body, before=PRELUDE, launch=LAUNCH.format(threads=threads)))


def start(
    body: str,
    image: np.ndarray,
    given: tuple,
    out: torch.Tensor,
    c: torch.Tensor | None = None,
    registers=None,
    threads=128,
    H=1,
):
    q, k = torch.from_numpy(image.view(np.int32)), torch.tensor([g - (1 << 64) if g >> 63 else g for g in given])
    v = torch.zeros(threads * 4, dtype=torch.int32) if registers is None else registers
    c = torch.zeros(1) if c is None else c
    return launch(built(body, threads), out, H=H, Q=q, K=k, V=v, c=c)


def image_of(operands: list[tuple[torch.Tensor, Descriptor, bool]]) -> np.ndarray:
    """Shared memory in which every operand (rows of A or columns of B first) lies where its descriptor says; NaNs elsewhere."""
    image = np.full(BYTES, 0xFF, np.uint8)
    for matrix, descriptor, mn_major in operands:
        item = matrix.element_size()
        raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, item)
        for mn, k in itertools.product(range(matrix.shape[0]), range(matrix.shape[1])):
            at = descriptor.address(mn_major, mn, k, item) - START
            image[at : at + item] = raw[mn, k]
    return image


def gathered(out: torch.Tensor, n: int) -> torch.Tensor:
    """D (64, N) of what the threads hold."""
    per = n // 2
    place = [fragments.wgmma_d(thread, i) for thread in range(128) for i in range(per)]
    d = torch.empty(64, n, dtype=out.dtype)
    rows, columns = zip(*place)
    d[list(rows), list(columns)] = out.flatten()
    return d


def test_smoke():
    n = 64
    A = torch.from_numpy(RANDOM.standard_normal((64, 16)).astype(np.float16))
    B = torch.from_numpy(RANDOM.standard_normal((n, 16)).astype(np.float16))
    da, db = Descriptor(START, 128, 256), Descriptor(START + 8192, 128, 256)
    out = start(
        one_product(n),
        image_of([(A, da, False), (B, db, False)]),
        (da.encode(), db.encode(), 1),
        torch.empty(128 * 32),
        torch.zeros(128 * 32),
    )
    torch.testing.assert_close(gathered(out, n), A.float() @ B.float().T)
