"""One CTA pulls a peer's tiles by TMA into a local buffer and publishes each by a flag (fa/flags.cuh); another reads each once its
flag is set. Peers are tensors of the same process: K is the peer's, the buffer and the flags are workspace.

What a missing flag does to another block, the emulator doesn't follow yet (runtime/race_blocks.h): what a block does after it has
looked at a flag is left out. What the copying CTA does to itself is found.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_nvcc_takes_it(arch):
    used = sass.resources(parse(SOURCE, KERNELS / "pull.cu"), arch)
    assert {"clear", "pull"} <= {name.partition("(")[0] for name in used.index}
