"""Rung 33: what nvcc makes of it, a few of its cases on the emulator, and bugs that these catch."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from helpers import check, draw_backward, load, reference, sass
from helpers.ladder.contract import prepare
from helpers.ladder.rung import rung
from helpers.run.reference import Case

STEM = "33_backward_wgmma"
# What ptxas says where it ignores setmaxnreg (C7508), serialises products (C7510 to C7515) or adds a wait (C7519)
TOLD = re.compile(r"\(C75\d\d\).*")


def case(B: int, H: int, Hkv: int, Nq: int, Nk: int, d: int, dtype: torch.dtype, **options) -> Case:
    torch.manual_seed(Nq + Nk)
    q, do = (torch.randn(B, H, Nq, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(B, Hkv, Nk, d).to(dtype) for _ in range(2))
    return Case(f"Nq={Nq}, Nk={Nk}, D={d}", q, k, v, do=do, **options)


# --- what nvcc makes of it


def test_ptxas_keeps_the_products_asynchronous_and_spills_nothing():
    """For D = 64 and 128 and both types: no warning, nothing in local memory, every product by wgmma, tiles by TMA."""
    log = (sass.cubin(STEM).parent / "ptxas.log").read_text()
    assert not TOLD.search(log), TOLD.search(log)
    used = sass.resources(STEM)
    assert len(used) == 16 and (used[["spill_store_bytes", "spill_load_bytes", "stack_bytes"]] == 0).all(axis=None)
    opcodes = sass.histogram(STEM)
    assert not {"LDL", "STL", "HMMA", "LDSM", "LDGSTS"} & set(opcodes.index)
    main = [kernel for kernel in opcodes if "backward_wgmma" in kernel]
    assert len(main) == 4
    # UTMALDG, UTMASTG: tiles in and out; UBLKCP: LSE and delta; UBLKRED: dQ; STSM: dS and the gradients
    assert (opcodes.loc[["HGMMA", "UTMALDG", "UTMASTG", "UBLKCP", "UBLKRED", "STSM"], main] > 0).all(axis=None)


def test_a_sum_touched_before_its_product_is_complete_is_told_by_ptxas():
    """The test above can fail."""
    whole = rung(STEM)
    end = "    // [end: dQ]\n"
    early = dataclasses.replace(whole, source=whole.replace(end, "    dQ_reg[0][0] += 1.f;\n" + end))
    assert TOLD.search((sass.cubin(early).parent / "ptxas.log").read_text())


def test_descriptors_are_formed_without_moves_to_uniform_registers():
    """In the loop, because the warpgroup's number comes from a vote. One that comes from threadIdx costs moves at every product.
    (One move is of the number of steps, with which a step is compared.)"""
    whole = rung(STEM)
    from_index = whole.replace("__any_sync(0xffffffff, threadIdx.x >= 256)", "threadIdx.x / 256")
    for d in (64, 128):
        loops = (draw_backward.main_loop(r, d) for r in (whole, dataclasses.replace(whole, source=from_index)))
        voted, moved = (sum(opcode.startswith("R2UR") for _, opcode, _ in loop) for loop in loops)
        assert voted <= 1 and moved > 16, (voted, moved)


# --- right on the emulator


@pytest.mark.parametrize(
    ("d", "causal", "dtype"),
    [(64, False, torch.bfloat16), (64, True, torch.float16), (128, False, torch.float16), (128, True, torch.bfloat16)],
)
def test_several_steps_tiles_and_heads_in_a_group(d, causal, dtype):
    """More steps than stages, so that every mbarrier comes round again; tails of queries and of keys."""
    kernel = load(STEM, device="cpu", quiet=True)
    check(kernel, [case(1, 2, 1, 200, 150, d, dtype, causal=causal)]).require()


def test_dk_and_dv_are_the_same_twice():
    """dQ is added up in no order, and the rung says so."""
    kernel = load(STEM, device="cpu", quiet=True)
    one = case(1, 1, 1, 130, 200, 64, torch.float16)
    first, second = (kernel(*one.inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[1:], second[1:], strict=True))
    assert "dQ is not" in kernel.rung.outputs


# --- does the check bite?

MUTANTS = [
    ("dS without delta", "product(dP_reg, smem + C::V, dO_smem, true)", "product(dP_reg, smem + C::V, dO_smem, false)"),
    ("dS as keys by queries", "fa::stmatrix_x4_trans(dS_row", "fa::stmatrix_x4(dS_row"),
    ("dS not fenced from the async proxy", "    fa::fence_proxy_async();\n    fa::bar_arrive(dS_full", "    fa::bar_arrive(dS_full"),
    ("dS read before the other warpgroup has written it", "    fa::bar_sync(dS_full + half, 256);", "    fa::bar_arrive(dS_full + half, 256);"),
    ("a stage waited for by the parity of another round", "Q_next.stage, Q_next.parity);", "Q_next.stage, Q_next.parity ^ 1);"),
    ("Q given back before dK has read it", "    fa::wgmma_wait_group<0>(); // dQ is there, dK has been added\n", ""),
    ("dQ written over the one that is being sent", "          fa::cp_async_bulk_wait_group_read<0>();\n", ""),
    ("a token too few", "  if (half == 1) pass_turn();", "  if (half == 2) pass_turn();"),
]  # fmt: skip


@pytest.mark.parametrize(("bug", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_a_seeded_bug_is_caught(bug, old, new):
    kernel = load(source=rung(STEM).replace(old, new), device="cpu", quiet=True)
    kernel.launcher.timeout = 60
    one = case(1, 1, 1, 200, 150, 64, torch.float16, causal=True)
    assert not check(kernel, [one]).ok or found(kernel), f"this bug passes, and the X-ray finds nothing: {bug}"


def found(kernel) -> bool:
    """Whether a traced call stops at an error, or its trace has a finding."""
    one = case(1, 1, 1, 200, 150, 64, reference.DTYPES[kernel.rung.dtypes[0]])
    call = prepare(kernel.rung, "cpu", one.inputs, scale=None)
    return bool(kernel.launcher.trace(call).findings)


def test_the_unmodified_rung_is_not():
    """Nothing is found in the rung itself: a finding says something of a mutant."""
    assert not found(load(STEM, device="cpu", quiet=True))
