"""A rung beside cuDNN and FlashAttention-3 and -4 in both layouts of memory, with a quarter of the heads for K and V, and at odd lengths.

`python -m helpers record layouts` records it. "BHND": the heads of Q, K, V (and dO) one after the other in memory; "BNHD": the
numbers of a token together, as FlashAttention takes them. All read the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.contract import TORCH_NAMES
from ..ladder.rung import Rung
from ..record import EFFICIENT, FA2, FLASH, MATH, SHAPE, TOKENS, WIDTH
from . import bench, by_family

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("BHND", "BNHD")
LENGTHS = (512, 1000, 1024, 4096, 4097, 16384)
GROUP = 4  # query heads on one of K and V
BURST_MS = 3.0
WITHOUT = (MATH, EFFICIENT, FLASH, FA2)


@dataclass(frozen=True)
class Cell:
    """One input that is timed: normal random numbers in one layout."""

    layout: str
    dtype: str
    causal: bool
    N: int
    D: int
    group: int

    @property
    def about(self) -> dict:
        """The columns that say which it is."""
        H = WIDTH // self.D
        shape = dict(zip(SHAPE, (TOKENS // self.N, H, self.N, self.N, self.D), strict=True))
        known = {"layout": self.layout, "dtype": self.dtype, "causal": int(self.causal)}
        return known | shape | {"Hkv": H // self.group}

    def tensors(self, gradient: bool) -> tuple[Tensor, ...]:
        """q (B,H,N,D), k and v (B,Hkv,N,D), and with `gradient` dO (B,H,N,D), on the GPU."""
        import torch

        about = self.about
        B, H, Hkv = about["B"], about["H"], about["Hkv"]
        swapped = self.layout == "BNHD"
        make = bench.random_numbers(0)
        made = []
        for heads in (H, Hkv, Hkv, H)[: 4 if gradient else 3]:
            middle = (self.N, heads) if swapped else (heads, self.N)
            x = make(B, *middle, self.D).to(getattr(torch, TORCH_NAMES[self.dtype]))
            made.append(x.transpose(1, 2) if swapped else x)
        return tuple(made)


def cells(rung: Rung) -> Iterator[Cell]:
    """What is timed of a rung."""
    groups = (1, GROUP) if "gqa" in rung.features else (1,)
    for dtype in rung.dtypes:
        for D in rung.D or (64, 128):
            for causal in by_family.masks(rung):
                for group in groups:
                    for layout in LAYOUTS:
                        for N in LENGTHS:
                            yield Cell(layout, dtype, causal, N, D, group)


def timings(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Samples of the rung and of the fast peers: layout, name, dtype, causal, B H Nq Nk D, Hkv, round, ms, and what the sensors show."""
    return by_family.at_each(cells(rung), {rung.stem: kernel}, rung, WITHOUT, BURST_MS)
