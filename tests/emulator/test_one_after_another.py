"""Kernels one after another in a process: none leaves anything behind that changes what is found in, or comes out of, the next."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated import build, call, launch, program

from helpers.emulator.trace import Trace


def traced(source: str, threads: int, far: tuple[str, ...] = ()) -> tuple[Trace, torch.Tensor]:
    """The trace, on the one OS thread that all of them run on, and the output."""
    launcher, out = build(source), torch.zeros(threads)
    launcher.threads = 1
    return launcher.trace(replace(call(out, Q=torch.ones(64)), far=far)), out


def kinds(source: str, threads: int = 32) -> list[str]:
    return [finding.kind for finding in traced(source, threads)[0].findings]


# A thread of the larger block reads what another writes, with a flag between the two and no fence.
IN_A_PROCESS = """
import sys
sys.path.append("../tools")
from test_one_after_another import kinds, program

flag = "__shared__ int flag, s; if (threadIdx.x == 0) flag = 0; __syncthreads(); if (threadIdx.x == 64) s = 7, atomicExch(&flag, 1);"
waits = "if (threadIdx.x == 0) { while (atomicAdd(&flag, 0) == 0) {} out[0] = s; }"
assert kinds(program("if (threadIdx.x < 16) __syncwarp(0xffffu);")) == []
print(kinds(program(flag + waits, "1, 128"), 128))
"""


def test_a_smaller_block_does_not_order_the_threads_of_a_later_one():
    filled = os.environ | {"MALLOC_PERTURB_": "1"}  # by glibc, what is allocated, with 0xfe: later than any time
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=filled, capture_output=True, text=True, timeout=600)
    assert done.stdout == "['race']\n", done.stderr


def test_flags_do_not_order_the_blocks_of_a_later_kernel():
    blocks = program("if (threadIdx.x == 0) out[0] = blockIdx.x;", "4, 32")
    flag = 'if (threadIdx.x == 0) asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(out), "r"(1) : "memory");'
    assert kinds(blocks) == ["race"]
    assert kinds(program(flag)) == []
    assert kinds(blocks) == ["race"]


SHARED = """
  __shared__ __align__(128) float s[64];
  const unsigned at = unsigned(__cvta_generic_to_shared(s));
"""
# After it, what another GPU writes may be read.
ACQUIRES = 'int flag; asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(flag) : "l"(out) : "memory");'
COPIES = """
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + 4 * threadIdx.x), "l"(in + threadIdx.x) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  out[threadIdx.x] = s[threadIdx.x];
"""


def test_a_bulk_copy_that_is_stopped_says_nothing_of_a_later_copy():
    no_mbarrier = """
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(at), "l"(in), "r"(64), "r"(at + 128) : "memory");
"""
    stopped, _ = traced(program(SHARED + ACQUIRES + no_mbarrier), 32, far=("Q",))
    assert any(finding.error for finding in stopped.findings)
    found, out = traced(program(SHARED + COPIES), 32)
    assert not found.findings and out.tolist() == [1] * 32


def test_a_bulk_store_says_nothing_of_a_later_copy():
    stores = """
  s[threadIdx.x] = 1;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                 ::"l"(in), "r"(at), "r"(128) : "memory");
  __syncthreads();
"""
    found, out = traced(program(SHARED + ACQUIRES + stores + COPIES), 32, far=("Q",))
    assert not any(finding.error for finding in found.findings) and out.tolist() == [1] * 32


@pytest.mark.parametrize("size", [64, 8, 4])
def test_local_variables_do_not_start_as_an_earlier_kernel_left_them(size):
    forgets = program(f"""
  float sum[{size}];  // not zeroed
  for (int i = 0; i < 64; ++i) sum[i * n % {size}] += in[i];
  out[threadIdx.x] = sum[n % {size}];
""")
    leaves = program("""
  float x[64], sum = 0;
  for (int i = 0; i < 64; ++i) x[i * n % 64] = in[i];
  for (int i = 0; i < 64; ++i) sum += x[i * n % 64];
  out[threadIdx.x] = sum;
""")
    for source in (forgets, leaves, forgets):
        out = launch(build(source), torch.zeros(37), Q=torch.ones(64))[:32]
        assert out.isnan().all() if source == forgets else out.tolist() == [64] * 32
