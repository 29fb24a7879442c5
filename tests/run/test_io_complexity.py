"""The bytes that 03 and 04 ask of HBM are those of the IO formulas of FlashAttention 1 and 2, to the byte, whatever the
tile and the length; notebooks 03 and 04 draw them."""

from __future__ import annotations

import re
from math import ceil

import pytest
import torch

from helpers import load, rung, traffic

LENGTHS = (100, 256)  # the first is no multiple of any tile
D, LANES = 64, 8  # lanes of 03 that share a row ask for its m and l each


def requested(source: str, N: int) -> dict[str, tuple[int, int]]:
    """Elements read and written of each tensor, by one head."""
    torch.manual_seed(0)
    frame = traffic(load(source=source, device="cpu", quiet=True), *torch.randn(3, 1, 1, N, D)) // 4
    return {name: (int(row.bytes_read), int(row.bytes_written)) for name, row in frame.iterrows()}


def fa1(N: int, Bc: int) -> dict[str, tuple[int, int]]:
    passes, all_ = ceil(N / Bc), N * D
    state = (passes * N * LANES, (passes + 1) * N)
    large = {"Q": (passes * all_, 0), "K": (all_, 0), "V": (all_, 0), "O": (passes * all_, (passes + 1) * all_)}
    return large | {"LSE": (0, N), "m": state, "l": state}


def fa2(N: int, Br: int) -> dict[str, tuple[int, int]]:
    passes, all_ = ceil(N / Br), N * D
    return {"Q": (all_, 0), "K": (passes * all_, 0), "V": (passes * all_, 0), "O": (0, all_), "LSE": (0, N)}


def with_keys(Bc: int) -> str:
    return rung("03_fa1_fp32").replace("Bc = 32;", f"Bc = {Bc};")


def with_queries(Br: int) -> str:
    source = rung("04_fa2_fp32").replace("warps = 4", f"warps = {Br // 32}").replace("d == 64 ? 32 : 16", "16")
    return re.sub(r"  case (?!64)\d+:\n.*\n", "", source)  # other d have too few groups of four for these threads


@pytest.mark.parametrize("Bc", [32, 64, 128])
def test_flashattention_1(Bc):
    assert [requested(with_keys(Bc), N) for N in LENGTHS] == [fa1(N, Bc) for N in LENGTHS]


@pytest.mark.parametrize("Br", [64, 128, 256])
def test_flashattention_2(Br):
    assert [requested(with_queries(Br), N) for N in LENGTHS] == [fa2(N, Br) for N in LENGTHS]


def test_one_read_too_many_is_seen():
    source = with_keys(64).replace(
        "fa::load4(O_reg, o);", "fa::load4(O_reg, o); if (i == 0 && tx == 0) fa::load4(O_reg, o);"
    )
    assert requested(source, 100) != fa1(100, 64)
