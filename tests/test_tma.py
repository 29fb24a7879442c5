"""Tensor maps and bulk copies: boxes against their definition in numpy, what is wrong with them, what a trace counts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from emulated import build
from tma import box_of, launch, of_map, program, swizzled


def tensor_ptx(rank: int) -> str:
    """A load, a store and a sum of this rank, at the coordinates `at`."""
    inputs = ", ".join(f'"r"(at[{d}])' for d in range(rank))
    there, back = (", ".join(f"%{first + d}" for d in range(rank)) for first in (3, 2))
    out = f'[%0, {{{back}}}], [%1];" ::"l"(&map), "r"(place(box)), {inputs} : "memory")'
    return f"""
  if (rank == {rank} && way == 0) asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {{{there}}}], [%2];" ::"r"(place(box)), "l"(&map), "r"(place(&full)), {inputs} : "memory"); // load
  if (rank == {rank} && way == 1) asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group {out};
  if (rank == {rank} && way == 2) asm volatile("cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group {out};"""


# a.H: bytes of the box; a.K[24]: 0 to load and give back what lies in shared memory, 1 to store V there first, 2 to add.
EVERY_RANK = program(
    r"""
  extern __shared__ __align__(1024) unsigned char box[];
  __shared__ uint64_t full;
  const int *k = static_cast<const int *>(a.K), way = k[24], *at = k + 25, rank = k[0];
  if (t == 0) {
    fa::mbarrier_init(place(&full), 1);
    fa::fence_mbarrier_init();
  }
  if (way > 0) for (int i = t; i < a.H; i += 32) box[i] = static_cast<const unsigned char *>(a.Q)[i];
  fa::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    if (way == 0) fa::mbarrier_arrive_expect_tx(place(&full), a.H);
"""
    + "".join(tensor_ptx(n) for n in range(1, 6))
    + r"""
    bulk_commit();
    bulk_wait<0>();
  }
  if (way == 0) {
    fa::mbarrier_wait(place(&full), 0);
    for (int i = t; i < a.H; i += 32) static_cast<unsigned char *>(a.O)[i] = box[i];
  }
""",
    dynamic=65536,
)


@cache
def every_rank():
    return build(EVERY_RANK)


def elements(sizes, strides) -> int:
    return sum((n - 1) * s for n, s in zip(sizes, (1, *strides))) + 1


# dtype, sizes, strides in elements, box, steps, coordinates
BOXES = {
    "a row": ("float32", (64,), (), (32,), (1,), (8,)),
    "a row that begins before the tensor": ("float32", (64,), (), (32,), (1,), (-12,)),
    "a row that ends behind it": ("uint8", (200,), (), (64,), (1,), (160,)),
    "rows inside": ("float16", (64, 40), (64,), (32, 8), (1, 1), (16, 5)),
    "rows before and behind": ("float16", (64, 10), (72,), (64, 16), (1, 1), (0, -3)),
    "a corner": ("float32", (20, 10), (24,), (8, 8), (1, 1), (16, 6)),
    "outside altogether": ("float32", (20, 10), (24,), (8, 8), (1, 1), (40, -20)),
    "every second row": ("float16", (64, 33), (64,), (16, 15), (1, 2), (0, 3)),
    "three dimensions": ("float32", (8, 6, 5), (16, 100), (8, 4, 3), (1, 1, 1), (0, 4, 3)),
    "strides not in order": ("float16", (64, 6, 3), (192, 64), (64, 4, 2), (1, 1, 1), (0, 1, 2)),
    "four, with steps": ("float64", (4, 5, 4, 6), (4, 20, 80), (4, 3, 4, 5), (1, 1, 3, 2), (0, -1, 1, 2)),
    "five": ("float16", (64, 7, 2, 3, 2), (128, 64, 904, 2800), (64, 4, 2, 1, 1), (1, 1, 1, 1, 1), (0, 5, 0, 1, 1)),
}  # fmt: skip
KINDS = {"uint8": 0, "float16": 6, "float32": 7, "float64": 8}


def case(name, swizzle=0):
    dtype, sizes, strides, box, steps, at = BOXES[name]
    item = np.dtype(dtype).itemsize
    ints = of_map(len(sizes), KINDS[dtype], item, swizzle, sizes, [s * item for s in strides], box, steps)
    return np.dtype(dtype), sizes, strides, box, steps, at, ints


def loaded(memory: np.ndarray, ints: list[int], at, nbytes: int) -> np.ndarray:
    k = torch.tensor([*ints, 0, *at], dtype=torch.int32)
    out = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
    launch(every_rank(), out, H=nbytes, Q=torch.from_numpy(memory.view(np.uint8).copy()), K=k)
    return out.numpy()


@pytest.mark.parametrize("name", BOXES)
def test_a_box_is_what_its_definition_says(name):
    dtype, sizes, strides, box, steps, at, ints = case(name)
    memory = np.random.default_rng(0).integers(1, 100, elements(sizes, strides)).astype(dtype)
    expected = box_of(memory, sizes, strides, box, steps, at)
    assert (loaded(memory, ints, at, expected.nbytes).view(dtype) == expected.reshape(-1)).all()


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_swizzles_follow_their_formula(mode, columns):
    if columns * 2 > 16 << mode:
        return
    memory = np.arange(1, 64 * 40 + 1).astype(np.uint16).view(np.float16)
    ints = of_map(2, 6, 2, mode, (64, 40), (128,), (columns, 24))
    expected = memory.view(np.uint16).reshape(40, 64)[5:29, :columns].copy()
    assert (loaded(memory.view(np.uint16), ints, (0, 5), expected.nbytes) == swizzled(expected.reshape(-1), mode)).all()
