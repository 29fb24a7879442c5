"""Fences between blocks, which run on OS threads of their own: a CPU's cores, too, make stores visible late."""

import pytest
import torch
from emulated import build, launch, program

ROUNDS = 4000
FENCES = {
    "__threadfence": "__threadfence();",
    "fence.sc": 'asm volatile("fence.sc.gpu;" ::: "memory");',
    "a fence of C++": "std::atomic_thread_fence(std::memory_order_seq_cst);",
}
# Store buffering: each of two blocks stores to its own flag and then reads the other's. With a fence between the two, at least
# one of them sees what the other has stored. Rounds begin together, at a line of memory that each block counts them in.
BODY = """
  volatile int *begun = reinterpret_cast<int *>(out);
  int *flag = reinterpret_cast<int *>(out) + 64;
  const int me = 32 * blockIdx.x, other = 32 - me;
  for (int round = 1; round <= n / 64 - 1; ++round, flag += 64) {
    begun[me] = round;
    while (begun[other] < round);
    flag[me] = 1;
    FENCE
    flag[me + 1] = flag[other] == 0;
  }
"""


@pytest.mark.parametrize("name", FENCES)
def test_a_store_before_a_fence_is_seen_by_who_stores_before_one(name):
    launcher = build(program(BODY.replace("FENCE", FENCES[name]), "2, 1", before="#include <atomic>"))
    launcher.threads = 2
    out = launch(launcher, torch.zeros(64 * (ROUNDS + 1))).view(torch.int32)
    rounds = out.view(-1, 2, 32)[1:]
    assert (rounds[:, :, 0] == 1).all()
    both_missed = int((rounds[:, :, 1] == 1).all(dim=1).sum())
    assert both_missed == 0
