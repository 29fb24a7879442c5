"""Rung 33: what nvcc makes of it, a few of its cases on the emulator, and bugs that these catch."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from emulated import build, program

from helpers import CompileError, KernelError, check, draw_backward, load, sass, single
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


# --- right where products of sizes leave 32 bits


def dq_of_the_last_queries(Nq: int, *edit: str) -> torch.Tensor:
    """dQ_sum of the last 128 of Nq queries, which alone see one of 128 keys, by the rung's products alone, with an edit of its
    text. dQ_sum has room for those 128: what comes before it is never touched. All queries are the same."""
    one = single(STEM, 128, "fp16")
    one = dataclasses.replace(one, source=one.replace(*edit)) if edit else one
    source, edits = re.subn(r"(prepare|finish)<d, T><<<.*?>>>\(a\);", ";", one.source)
    assert edits == 2
    begin = "own.workspace[0] = static_cast<float *>(a.workspace[0]) - int64_t(a.Nq - 128) * d;"
    source, edits = re.subn(
        r"backward_wgmma<d, T>(<<<.*?>>>)\(maps, a,", rf"{begin} backward_wgmma<d, T>\1(maps, own,", source
    )
    assert edits == 1
    kernel = load(source=source, device="cpu", quiet=True)

    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 128, 128).half() for _ in range(4))
    call = prepare(kernel.rung, "cpu", (q, k, v, q, torch.zeros(1, 1, 128), do), causal=True)
    call.args.Nq, call.args.Q_stride[2], call.args.dO_stride[2] = Nq, 0, 0
    call.workspace["stats"] = torch.ones(2, 1, 1, Nq)  # LSE and -delta
    call.workspace["dQ_sum"].zero_()
    kernel.launcher.launch(call)
    return call.workspace["dQ_sum"]


def test_more_than_an_int_of_elements_in_dq():
    """2^24 queries of 128 elements are 2^31."""
    near, far = dq_of_the_last_queries(128), dq_of_the_last_queries(2**24 + 128)
    assert near.abs().max() > 1 and torch.equal(near, far)
    with pytest.raises(KernelError, match="out of bounds in backward_wgmma.* writes 16384 bytes"):
        dq_of_the_last_queries(2**24 + 128, "int64_t(tile) * (Br * d)", "tile * (Br * d)")


def test_the_first_step_of_many_tiles_is_one_of_them():
    """The formula as a constant expression, which has to stay within its types: of 2^17 tiles of keys the last, of 2^17 of queries."""
    (formula,) = re.findall(r"const int start = a\.causal \? first : (.*);", rung(STEM).source)

    def compile(formula: str) -> None:
        function = f"constexpr int start(int j0, int Bc, int last, int key_tiles) {{ return {formula}; }}"
        holds = "static_assert(start((1 << 24) - 128, 128, 1 << 17, 1 << 17) == (1 << 17) - 1);"
        build(program("", before=f"{function}\n{holds}")).compile()

    compile(formula)
    with pytest.raises(CompileError, match="overflow"):
        compile(formula.replace("int64_t", ""))
