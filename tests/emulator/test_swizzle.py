"""Where a tile's chunks lie in shared memory: rung 10's rows, rung 11's swizzle. Computed by the rungs' own `at`."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from emulated import run

from helpers import rung, xray

SWIZZLED = ["11_swizzled", "12_double_buffered"]
ROWS = 64


@functools.cache
def places(stem: str, d: int) -> list[list[int]]:
    """places[row][chunk]: the chunk's place in a (64, d) tile, counted in chunks of 16 bytes."""
    function = re.search(r"template <int d> __device__ constexpr int at\(.*?}\n", rung(stem).source, re.DOTALL)
    assert function, f"{stem} has no at<d>(row, chunk)"
    chunks = d // 8
    body = f"for (int i = threadIdx.x; i < n; i += 32) out[i] = at<{d}>(i / {chunks}, i % {chunks});"
    elements = run(body, ROWS * chunks, before=function[0]).to(torch.int64).view(ROWS, chunks)
    assert (elements % 8 == 0).all(), "a chunk starts at a multiple of 16 bytes"
    return (elements // 8).tolist()


def ways(places: list[int]) -> int:
    """How many of these chunks, asked for at once, share their four banks: the wavefronts they take."""
    banks = [place % 8 for place in places]
    return max(banks.count(b) for b in banks)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("stem", ["10_fa2_mma_fp16", *SWIZZLED])
def test_every_chunk_has_a_place_of_its_own(stem, d):
    table = places(stem, d)
    assert sorted(sum(table, [])) == list(range(ROWS * d // 8))
    line = max(d // 8, 8)  # a row, or the rows that share 128 bytes: what it holds stays in it
    assert all(place // line == (row * d // 8) // line for row, r in enumerate(table) for place in r)


def columns(table: list[list[int]]) -> list[list[int]]:
    """What ldmatrix reads at once: one chunk of 8 rows, from any multiple of 8 on."""
    return [[table[row + i][chunk] for i in range(8)] for row in range(0, ROWS, 8) for chunk in range(len(table[0]))]


@pytest.mark.parametrize("d", [32, 64, 128])
def test_rows_below_each_other_share_their_banks(d):
    expected = min(8, d // 8)  # of d = 32 two rows fill the banks, so 4 of 8 are above each other
    assert {ways(column) for column in columns(places("10_fa2_mma_fp16", d))} == {expected}


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("stem", SWIZZLED)
def test_swizzled_they_never_do(stem, d):
    assert {ways(column) for column in columns(places(stem, d))} == {1}


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("stem", ["10_fa2_mma_fp16", *SWIZZLED])
def test_tiles_are_written_without_conflicts(stem, d):
    """Eight threads in a row write 16 bytes each at once."""
    flat = sum(places(stem, d), [])
    assert {ways(flat[i : i + 8]) for i in range(0, len(flat), 8)} == {1}


@pytest.mark.parametrize(("d", "left"), [(64, 2), (128, 2)])
def test_a_swizzle_over_half_of_the_banks_leaves_conflicts(d, left, monkeypatch):
    """The tests above bite."""
    half = rung("11_swizzled").replace("% (d < 64 ? d / 8 : 8)", "% 4")
    monkeypatch.setattr("test_swizzle.rung", lambda stem: SimpleNamespace(source=half))
    table = places.__wrapped__("11_swizzled", d)
    assert {ways(column) for column in columns(table)} == {left}


# --- counted: the same through the X-ray, on every request that the kernels make


def requests(stem: str, d: int, dtype: torch.dtype = torch.float16) -> list:
    """Every access to shared memory of one call, Nq = 70 and Nk = 150 (tails, and more tiles than buffers)."""
    torch.manual_seed(d)
    q, k, v = (torch.randn(1, 2, n, d).to(dtype) for n in (70, 150, 150))
    result = xray(stem, q, k, v)
    assert result.ok, result
    return [access for access in result.trace.accesses if access.space == "shared"]


@pytest.mark.parametrize("d", [32, 64, 128])
def test_row_major_every_ldmatrix_conflicts_and_no_store_does(d):
    found = {op: [a for a in requests("10_fa2_mma_fp16", d) if a.op == op] for op in ("ldmatrix", "store")}
    assert len(found["ldmatrix"]) >= 3 and found["store"]  # Q, K and V
    assert {a.cost / a.ideal for a in found["ldmatrix"]} == {min(8, d // 8)}
    assert all(a.cost == a.ideal for a in found["store"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize(("stem", "op"), [("11_swizzled", "store"), ("12_double_buffered", "cp.async")])
def test_swizzled_nothing_conflicts(stem, op, d, dtype):
    accesses = requests(stem, d, dtype)
    assert {a.op for a in accesses} == {"ldmatrix", op}
    assert all(a.cost == a.ideal and a.worst == a.ideal // a.requests for a in accesses), accesses
