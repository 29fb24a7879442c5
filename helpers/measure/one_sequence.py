"""A rung beside the fast peers on one sequence of few heads, where there may be fewer query tiles than SMs.

`python -m helpers record one_sequence` records it. Other timings of both passes are of the headline workload, whose 16,384 tokens keep every SM busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.contract import TORCH_NAMES
from ..ladder.rung import Rung
from ..record import EFFICIENT, FA2, MATH, SHAPE
from . import bench, by_family

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
HEADS = (4, 8, 16, 32, 64)
# Queries of all heads together: from about ten microseconds to half of the headline workload at D = 128
ROWS = (1 << 13, 1 << 17)
BURST_MS = 3.0
WITHOUT = (MATH, EFFICIENT, FA2)


@dataclass(frozen=True)
class Cell:
    """One input that is timed: normal random numbers."""

    dtype: str
    causal: bool
    H: int
    N: int
    D: int

    @property
    def about(self) -> dict:
        """The columns that say which it is."""
        shape = (1, self.H, self.N, self.N, self.D)
        return {"dtype": self.dtype, "causal": int(self.causal)} | dict(zip(SHAPE, shape, strict=True))

    def tensors(self, gradient: bool) -> tuple[Tensor, ...]:
        """q, k, v and with `gradient` dO, each (1,H,N,D), on the GPU."""
        import torch

        make, dtype = bench.random_numbers(0), getattr(torch, TORCH_NAMES[self.dtype])
        return tuple(make(1, self.H, self.N, self.D).to(dtype) for _ in range(4 if gradient else 3))


def cells(rung: Rung) -> Iterator[Cell]:
    """What is timed of a rung, in the last of its dtypes."""
    for D in (64, 128):
        for causal in by_family.masks(rung):
            for N in LENGTHS:
                for H in HEADS:
                    if ROWS[0] <= H * N <= ROWS[1]:
                        yield Cell(rung.dtypes[-1], causal, H, N, D)


def timings(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Samples of the rung and of the fast peers: dtype, name, causal, B H Nq Nk D, round, ms, and what the sensors show."""
    return by_family.at_each(cells(rung), {rung.stem: kernel}, rung, WITHOUT, BURST_MS)
