"""Rungs on GPUs that have less: tiles for 99 and 64 KB of shared memory, and tensor cores of Turing.

On the emulator, which pretends to be such a GPU; and on any GPU, for which the driver translates the PTX of the older one."""

from __future__ import annotations

import pytest
import torch

from helpers import CallError, KernelError, check, reference, rung
from helpers.emulator import Launcher as Emulator
from helpers.ladder import cards
from helpers.ladder.contract import prepare
from helpers.ladder.instances import of_head_dimension, single
from helpers.ladder.rung import Rung, parse
from helpers.run.kernel import Kernel
from helpers.run.reference import Case
from helpers.toolchain.nvcc import Launcher as Nvcc

# The instances that differ there: (stem, D, dtype, architecture, query rows and keys of a tile)
DIFFER = [
    ("04_fa2_fp32", 64, "fp32", "sm_75", 128, 64),
    ("04_fa2_fp32", 128, "fp32", "sm_75", 64, 128),
    ("10_fa2_mma_fp16", 64, "fp16", "sm_75", 64, 64),
    ("11_swizzled", 128, "fp16", "sm_75", 64, 64),
    ("13_tuned", 128, "fp16", "sm_86", 256, 32),
    ("22_backward_fp32", 128, "fp32", "sm_86", 64, 64),
    ("23_backward_mma", 128, "bf16", "sm_86", 32, 64),
]


def instance(stem: str, D: int, dtype: str) -> Rung:
    return of_head_dimension(stem, D) if dtype == "fp32" else single(stem, D, dtype)


def on_the_emulator(its: Rung, arch: str) -> Kernel:
    kernel = Kernel(its, "cpu")
    kernel.launcher = Emulator(its, arch)
    return kernel


def edges(its: Rung, D: int, dtype: str, Br: int, Bc: int) -> list[Case]:
    """One row and one key short of whole tiles, and one more; under a causal mask with grouped heads where there is one."""

    def case(Nq: int, Nk: int, **options: object) -> Case:
        heads = 1 if options else 2
        sizes = [(1, 2, Nq, D), (1, heads, Nk, D), (1, heads, Nk, D), (1, 2, Nq, D)]
        q, k, v, do = (torch.randn(size).to(reference.DTYPES[dtype]) for size in sizes)
        back = {"do": do} if its.op == "attention_backward" else {}
        return Case(f"Nq={Nq}, Nk={Nk}, {options}", q, k, v, **back, **options)

    torch.manual_seed(D)
    found = [case(Br - 1, 2 * Bc + 1), case(Br + 1, 2 * Bc - 1), case(2 * Br, 2 * Bc)]
    return found + ([case(2 * Br + 1, 3 * Bc - 1, causal=True)] if "causal" in its.features else [])


@pytest.mark.sampled
@pytest.mark.parametrize(("stem", "D", "dtype", "arch", "Br", "Bc"), DIFFER)
def test_a_smaller_card_gets_it_right(stem, D, dtype, arch, Br, Bc):
    its = instance(stem, D, dtype)
    check(on_the_emulator(its, arch), edges(its, D, dtype, Br, Bc)).require()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stem", "arch"), [*dict.fromkeys((stem, arch) for stem, _, _, arch, *_ in DIFFER), ("20_causal_gqa", "sm_86")]
)
def test_the_code_for_a_smaller_card_is_right_on_this_gpu(stem, arch):
    its = cards.on(rung(stem), cards.capability(arch))
    kernel = Kernel(its, "cuda")
    kernel.launcher = Nvcc(its, arch=arch.replace("sm_", "compute_"))
    check(kernel, reference.cases(its, "cuda", "small")).require()


def test_a_tile_that_a_card_has_no_place_for_is_refused():
    """So what is right above is the small tile: the large one would not have run."""
    whole = single("23_backward_mma", 128, "fp16")
    its = parse(whole.replace("d == 128 && FA_SMEM_KB < 161", "0"), whole.path)
    with pytest.raises(
        AssertionError, match="164864 bytes of dynamic shared memory asked for; at most 101376 can be had"
    ):
        check(on_the_emulator(its, "sm_86"), edges(whole, 128, "fp16", 32, 64)[:1]).require()


def test_turing_has_no_bf16():
    q, k, v = torch.randn(3, 1, 1, 16, 64).bfloat16()
    its = of_head_dimension("10_fa2_mma_fp16", 64)
    with pytest.raises(KernelError, match="invalid argument"):  # the launcher's own word
        on_the_emulator(its, "sm_75")(q, k, v)
    with pytest.raises(CallError, match="takes float16: this GPU's tensor cores have no bf16"):
        prepare(cards.on(its, (7, 5)), "cpu", (q, k, v))
    assert cards.on(its, (8, 0)).dtypes == ("fp16", "bf16")
    assert cards.on(rung("04"), (7, 5)).dtypes == ("fp32",)


def test_every_rung_says_where_it_runs():
    """By compute capability, from Turing to Blackwell."""
    runs = {
        has: [r.number for r in map(rung, ("04", "11", "12", "23", "32")) if not cards.refusal(r, has)]
        for has in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    }
    ampere = ["04", "11", "12", "23"]
    assert runs.pop((7, 0)) == [] and runs.pop((7, 5)) == ["04", "11"] and runs.pop((9, 0)) == [*ampere, "32"]
    assert all(found == ampere for found in runs.values()), runs
    assert "needs compute capability 9.0 exactly, this GPU has 12.0" in cards.refusal(rung("32"), (12, 0))
    assert "device='cpu'" in cards.refusal(rung("32"), (12, 0))
