"""kernels/50_ring.cu, which merges partial results: right, in place too, race-free, and no byte moved twice."""

from __future__ import annotations

import pytest
import torch

from helpers import CallError, Kernel, check, load, rung, sass, xray
from helpers.run import merging

EMULATOR_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def parts(D: int = 64, N: int = 40, kind: torch.dtype = torch.float16, device: str = "cpu") -> tuple:
    torch.manual_seed(D + N)
    o, lse = torch.randn(2, 1, 3, N, D, device=device), torch.randn(2, 1, 3, N, device=device)
    return o[0], lse[0], o[1].to(kind, copy=True), lse[1].clone()


@EMULATOR_AND_GPU
def test_every_case_is_within_the_error_budget(device):
    check(load("50_ring", device=device, quiet=True), merging.cases(device=device)).require()


def test_a_case_keeps_its_strides_wherever_it_is_moved():
    here, there = (
        [x.stride() for case in merging.cases(device=device) for x in case.inputs] for device in ("cpu", "meta")
    )
    assert here == there


@EMULATOR_AND_GPU
def test_in_place_it_gives_the_same_bits_and_leaves_other_rows(device):
    kernel, (o_a, lse_a, o_b, lse_b) = load("50_ring", device=device, quiet=True), parts(device=device)
    o, lse = kernel(o_a, lse_a, o_b, lse_b)
    whole, its_lse = torch.cat([o_a, o_a], 2), torch.cat([lse_a, lse_a], 2)
    rows = whole[:, :, 40:], its_lse[:, :, 40:]
    kernel(*rows, o_b, lse_b, out=rows)
    assert torch.equal(whole[:, :, 40:], o) and torch.equal(its_lse[:, :, 40:], lse)
    assert torch.equal(whole[:, :, :40], o_a) and torch.equal(its_lse[:, :, :40], lse_a)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_moves_once_and_nothing_is_wrong(kind):
    """N = 37: no multiple of the rows of a block."""
    inputs = parts(N=37, kind=kind)
    seen = xray("50_ring", *inputs)
    assert not seen.findings and seen.total(space="global").excess == 0
    moved = seen.tensors
    sizes = {"O_a": 4, "O_b": inputs[2].element_size(), "O": 4}
    for name, size in sizes.items():
        assert moved.loc[name, ["bytes_read", "bytes_written"]].sum() == 3 * 37 * 64 * size
    for name in ("LSE_a", "LSE_b", "LSE"):
        assert moved.loc[name, ["bytes_read", "bytes_written"]].sum() == 3 * 37 * 4


READ = """    if (column == 0) lse_a = a.LSE_a[lse_at(a.LSE_a_stride)], lse_b = a.LSE_b[lse_at(a.LSE_b_stride)];
  }
  lse_a = __shfl_sync(0xffffffff, lse_a, 0, lanes), lse_b = __shfl_sync(0xffffffff, lse_b, 0, lanes);
"""
EVERY_LANE = "    lse_a = a.LSE_a[lse_at(a.LSE_a_stride)], lse_b = a.LSE_b[lse_at(a.LSE_b_stride)];\n  }\n"
ORDERED = EVERY_LANE + "  __syncwarp();\n"


@pytest.mark.parametrize(
    ("new", "races"), [(READ, 0), (EVERY_LANE, 1), (ORDERED, 0)], ids=["one lane reads", "every lane", "ordered"]
)
def test_a_race_in_place_is_found_and_none_where_there_is_none(new, races):
    inputs, out = merging.over(*parts(N=37))
    kernel = Kernel(rung(rung("50_ring").replace(READ, new)), "cpu")
    seen = xray(kernel, *inputs, out=out)
    assert [found.kind for found in seen.findings] == ["race"] * races
    assert set(seen.tensors.index) == {"O_a", "LSE_a", "O_b", "LSE_b"}
    assert seen.tensors.bytes_written[["O_a", "LSE_a"]].tolist() == [3 * 37 * 64 * 4, 3 * 37 * 4]
    assert not xray(kernel, *parts(N=37)).findings


def test_what_is_wrong_in_place_alone_is_noticed():
    wrong = load(source=rung("50_ring").replace(READ, EVERY_LANE), device="cpu", quiet=True)
    assert check(wrong, merging.cases()).ok
    failures = check(wrong).failures
    assert failures and all(failure.case.startswith("in place: ") for failure in failures)
    right = check(load("50_ring", device="cpu", quiet=True))
    assert right.require() and {c.case.startswith("in place: ") for c in right.comparisons} == {True, False}


def test_a_kernel_in_place_gives_its_tensors_by_all_names():
    inputs, out = merging.over(*parts())
    seen = load("50_ring", device="cpu", quiet=True).tensors(*inputs, out=out)
    assert seen["O"] is out[0] and seen["LSE"] is out[1] and seen["O_a"] is inputs[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("m == -FA_INFINITY ? 0.f : m", "m", "without a key"),
        ("l > 0.f ? 1.f / l : 0.f", "1.f / l", "both without a key"),
        ("w_a * x_a[e] + w_b * x_b[e]", "w_a * x_a[e] + x_b[e]", "a far above b"),
        ("fmaxf(lse_a, lse_b)", "lse_a", "b far above a"),
        ("if (!inside) return;", "", "N=1"),
    ],
)
def test_the_cases_notice_a_seeded_bug(old, new, case):
    kernel = load(source=rung("50_ring").replace(old, new), device="cpu", quiet=True)
    failures = check(kernel, merging.cases(("fp16",))).failures
    assert any(case in failure.case for failure in failures)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvcc_compiles_it_without_spills(arch):
    used = sass.resources(rung("50_ring"), arch)
    assert len(used) == 27  # 3 D; fp32 alone, and 4 mixtures of each 16-bit type with it
    assert used["registers"].max() <= 40, "256 threads of 40 registers: six blocks share the 65,536 of an SM"
    assert not used[["spill_store_bytes", "spill_load_bytes", "stack_bytes"]].any(axis=None)


def test_what_it_does_not_take_is_said():
    kernel, (o_a, lse_a, o_b, lse_b) = load("50_ring", device="cpu", quiet=True), parts()
    for inputs, words in (
        ((o_a, lse_a, o_b), "takes o_a, lse_a, o_b, lse_b; got 3"),
        ((o_a.bfloat16(), lse_a, o_b, lse_b), "o_a is torch.bfloat16.*has to be torch.float16 or torch.float32"),
        ((o_a[:, :, 1:], lse_a, o_b, lse_b), r"o_a is .*\(1, 3, 39, 64\)"),
        ((o_a, lse_a.double(), o_b, lse_b), "lse_a is torch.float64"),
        ((o_a, lse_a, o_b, lse_b[:, :, 1:]), "lse_b is"),
        ((o_a[..., :48], lse_a, o_b[..., :48], lse_b), "head dimension 48"),
    ):
        with pytest.raises(CallError, match=words):
            kernel(*inputs)
