"""One CTA pulls a peer's tiles by TMA into a local buffer and publishes each by a flag (fa/flags.cuh); another reads each once its
flag is set. Peers are tensors of the same process: K is the peer's, the buffer and the flags are workspace. What flags order between
blocks is followed (runtime/race_flags.h): whatever is left out is found, and the flag is named.
"""

from __future__ import annotations

import re

import pytest
import torch

from helpers import load, sass, xray
from helpers.ladder.paths import KERNELS
from helpers.ladder.rung import parse

SOURCE = r"""// pull: a peer's tiles by way of a local buffer
//
// op:        attention
// workspace: buffer (B,H,Nk,D) fp32; flags (Nk) fp32
// arch:      sm_90a
#include <fa/args.cuh>
#include <fa/bulk.cuh>
#include <fa/flags.cuh>
#include <fa/sm80.cuh>
#include <fa/sm90.cuh>

constexpr int rows = 8; // of a tile

__global__ void clear(const fa_args a) { // before the kernel: no flag is set
  unsigned *flags = static_cast<unsigned *>(a.workspace[1]);
  for (int i = threadIdx.x; i < a.Nk; i += blockDim.x) flags[i] = 0;
}

__global__ void pull(const fa_args a) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(8) uint64_t barrier_at;
  const uint32_t tile = fa::smem_address(smem), barrier = fa::smem_address(&barrier_at);
  const int tiles = a.Nk / rows, bytes = rows * a.D * 4;
  const float *K = static_cast<const float *>(a.K);
  float *buffer = static_cast<float *>(a.workspace[0]), *O = static_cast<float *>(a.O);
  unsigned *flags = static_cast<unsigned *>(a.workspace[1]);
  if (blockIdx.x == 0) { // the copier: every remote byte crosses the link once
    if (threadIdx.x > 0) return;
    fa::mbarrier_init(barrier, 1);
    fa::fence_mbarrier_init();
    for (int n = 0; n < tiles; ++n) {
      fa::mbarrier_arrive_expect_tx(barrier, bytes);
      fa::cp_async_bulk(tile, K + n * rows * a.D, bytes, barrier);
      fa::mbarrier_wait(barrier, n % 2);
      fa::cp_async_bulk_store(buffer + n * rows * a.D, tile, bytes);
      fa::cp_async_bulk_commit_group();
      fa::cp_async_bulk_wait_group<0>(); // it is there
      fa::publish_gpu(flags + n, 1);
    }
    return;
  }
  for (int n = 0; n < tiles; ++n) { // a reader
    fa::await_gpu(flags + n, 1);
    for (int i = threadIdx.x; i < rows * a.D; i += blockDim.x) O[n * rows * a.D + i] = buffer[n * rows * a.D + i];
  }
  for (int i = threadIdx.x; i < a.Nq; i += blockDim.x) a.LSE[i] = 0.f;
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  clear<<<1, 32, 0, stream>>>(*args);
  pull<<<2, 64, rows * args->D * 4, stream>>>(*args);
  return cudaGetLastError();
}
"""


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, 1, 64, 32) for _ in range(3))


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_every_tile_arrives_and_nothing_is_found(scope):
    q, k, v = inputs()
    source = SOURCE.replace("publish_gpu", f"publish_{scope}").replace("await_gpu", f"await_{scope}")
    o, _ = load(source=source, device="cpu", quiet=True)(q, k, v)
    assert torch.equal(o, k)
    seen = xray(source, q, k, v)
    assert not seen.findings
    assert seen.tensors.loc["K", "bytes_read"] == k.numel() * 4  # every remote byte once


def test_a_tile_that_is_not_waited_for_is_found():
    """Published while it may still be on its way: the next tile overwrites what is being read."""
    wait = "      fa::cp_async_bulk_wait_group<0>(); // it is there\n"
    assert SOURCE.count(wait) == 1
    found = "\n".join(str(f) for f in xray(SOURCE.replace(wait, ""), *inputs()).findings)
    assert "while the bulk copy of thread 0" in found and "no cp.async.bulk.wait_group has covered it" in found


def test_a_flag_that_nobody_sets_ends_at_the_time_limit_on_the_line_that_waits():
    kernel = load(source=SOURCE.replace("      fa::publish_gpu(flags + n, 1);\n", ""), device="cpu", quiet=True)
    kernel.launcher.timeout = 3
    (found,) = xray(kernel, *inputs()).findings
    assert "stopped at" in str(found)


WAIT = "      fa::cp_async_bulk_wait_group<0>(); // it is there\n"
SET = "      fa::publish_gpu(flags + n, 1);\n"
READ = "    fa::await_gpu(flags + n, 1);\n"
RELAXED_SET = '      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flags + n), "r"(1) : "memory");\n'
RELAXED_READ = """    unsigned seen;
    do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flags + n) : "memory");
    while (seen == 0);
"""
FENCE = '      asm volatile("fence.acq_rel.gpu;" ::: "memory");\n'
SEEDED = {  # what is changed, and what is said of it
    "no wait for the flag": (
        {READ: ""},
        r"reads buffer \+ \d+ B, which a bulk copy of thread 0 of block 0 writes.*is flags\[0\], which block 1",
    ),
    "read without acquire": ({READ: RELAXED_READ}, r"is flags\[0\], which block 1 has not read with an acquire"),
    "set without release": ({SET: RELAXED_SET}, "no flag is set by a release once that is complete"),
    "set before the copy's end": ({WAIT + SET: SET + WAIT}, r"is flags\[1\], which block 1 has not read"),
    "only the reading of the copy awaited": (
        {WAIT: WAIT.replace("wait_group<0>", "wait_group_read<0>")},
        "nothing orders the two",
    ),
    "a flag of the block": (
        {READ: RELAXED_READ.replace("relaxed.gpu", "acquire.cta")},
        r"is flags\[0\], which block 1",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_left_out_between_blocks_is_found_and_its_flag_named(name, threads):
    edits, words = SEEDED[name]
    source = SOURCE
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    kernel = load(source=source, device="cpu", quiet=True)
    kernel.launcher.threads = threads  # whether the blocks run one after the other or at once
    found = [f for f in xray(kernel, *inputs()).findings if f.kind == "race"]
    assert found and all(re.search(words, f.text) for f in found[:1])
    assert "st.release.gpu" in found[0].hint and found[0].other_line


@pytest.mark.parametrize("threads", [1, 2])
def test_fences_beside_relaxed_flags_order_as_well(threads):
    source = SOURCE.replace(SET, FENCE + RELAXED_SET).replace(READ, RELAXED_READ + FENCE)
    kernel = load(source=source, device="cpu", quiet=True)
    kernel.launcher.threads = threads
    assert not xray(kernel, *inputs()).findings


def test_a_thread_that_is_told_by_no_barrier_is_found():
    """Only thread 0 reads the flag; the others need a __syncthreads to learn of it."""
    alone = SOURCE.replace(READ, "    if (threadIdx.x == 0) fa::await_gpu(flags + n, 1);\n")
    assert "race" in [f.kind for f in xray(alone, *inputs()).findings]
    told = alone.replace("flags + n, 1);\n    for", "flags + n, 1);\n    __syncthreads();\n    for")
    assert told != alone and not xray(told, *inputs()).findings


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_nvcc_takes_it(arch):
    used = sass.resources(parse(SOURCE, KERNELS / "pull.cu"), arch)
    assert {"clear", "pull"} <= {name.partition("(")[0] for name in used.index}
