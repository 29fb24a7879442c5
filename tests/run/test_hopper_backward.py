"""Rung 33: what nvcc makes of it, a few of its cases on the emulator, and bugs that these catch."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from helpers import Kernel, KernelError, check, draw_backward, load, sass, single, xray
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
    (One move is of the place of an mbarrier.)"""
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


@pytest.mark.parametrize("scale", [-0.0, 1e-40, -1e-40])
def test_scales_by_which_lse_cannot_be_divided(scale):
    """With a ragged last tile of queries, whose rows past the end begin with an infinity of the right sign."""
    kernel = load(source=single(STEM, 64, "fp16").source, device="cpu", quiet=True)
    check(kernel, [case(1, 1, 1, 130, 150, 64, torch.float16, scale=scale)]).require()


def test_the_sign_of_a_scale_of_0_does_not_choose_the_infinity():
    """The test above can fail."""
    one = single(STEM, 64, "fp16")
    by_its_sign = one.source.replace("copysignf(FA_INFINITY, -scale_of(a))", "copysignf(FA_INFINITY, -a.scale)")
    assert by_its_sign != one.source
    kernel = load(source=by_its_sign, device="cpu", quiet=True)
    assert not check(kernel, [case(1, 1, 1, 130, 150, 64, torch.float16, scale=-0.0)]).ok


# --- as exact as rung 23


def errors(kernel, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Of dQ, dK and dV: the relative error (Frobenius norm)."""
    one = case(1, 2, 2, 200, 300, d, dtype)
    pairs = zip(kernel(*one.inputs), one.exact(), strict=True)
    return torch.stack([(got.double() - exact).norm() / exact.norm() for got, exact in pairs])


def over_23(kernel, d: int, dtype: torch.dtype) -> torch.Tensor:
    return errors(kernel, d, dtype) / errors(load("23_backward_mma", device="cpu", quiet=True), d, dtype)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ds_is_of_unrounded_p(dtype, d):
    """As 23's is."""
    assert (over_23(load(STEM, device="cpu", quiet=True), d, dtype) <= 1.05).all()


UNROUNDED = "dS_reg[k][e] = fa::pack2<T>(P[0] * dP[0], P[1] * dP[1]);"
ROUNDED = """const float2 R = fa::unpack2<T>(fa::pack2<T>(P[0], P[1]));
        dS_reg[k][e] = fa::pack2<T>(R.x * dP[0], R.y * dP[1]);"""


@pytest.mark.parametrize("d", [64, 128])
def test_p_rounded_for_ds_is_less_exact(d):
    """The test above can fail. `check` allows twice PyTorch's error and doesn't notice, so no seeded bug says it."""
    one = single(STEM, d, "bf16")
    rounded = load(source=one.replace(UNROUNDED, ROUNDED), device="cpu", quiet=True)
    assert (over_23(rounded, d, torch.bfloat16)[:2] > 1.2).all()
    check(rounded, [case(1, 2, 1, 200, 150, d, torch.bfloat16)]).require()


@pytest.mark.parametrize(
    "edit", [("d == 64 ? 5 : F", "F"), ("if constexpr (d == 64) // as one", "if constexpr (false) // as one")]
)
def test_what_unrounded_p_takes_at_d_64(edit):
    """All of dV with dP, or exponentials that ptxas may copy S for, and registers are spilled."""
    whole = rung(STEM)
    used = sass.resources(dataclasses.replace(whole, source=whole.replace(*edit)))
    spilled = used["spill_store_bytes"]
    assert spilled.loc[["64" in name for name in used.index]].max() > 0
    assert sass.resources(whole)["spill_store_bytes"].max() == 0


def test_dk_and_dv_are_the_same_twice():
    """dQ is added up in no order, unless that is asked for, and the rung says so."""
    kernel = load(STEM, device="cpu", quiet=True)
    one = case(1, 1, 1, 130, 200, 64, torch.float16)
    first, second = (kernel(*one.inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[1:], second[1:], strict=True))
    assert "dQ if deterministic" in kernel.rung.outputs


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_is_the_same_every_time(d, causal, device):
    """On any number of the emulator's threads, and on a GPU where hundreds of CTAs add to dQ."""
    kernel = load(STEM, device=device, quiet=True)
    B, H, Hkv, Nq, Nk = (1, 2, 1, 300, 520) if device == "cpu" else (4, 16, 4, 2048, 2500)
    inputs = [x.to(device) for x in case(B, H, Hkv, Nq, Nk, d, torch.bfloat16).inputs]
    first = kernel(*inputs, causal=causal, deterministic=True)
    for threads in (1, 2, 3, 5):
        if device == "cpu":
            kernel.launcher.threads = threads
        again = kernel(*inputs, causal=causal, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), threads


@pytest.mark.gpu
def test_dq_differs_where_it_may():
    """The test above can fail on a GPU."""
    kernel = load(STEM, device="cuda", quiet=True)
    inputs = [x.cuda() for x in case(4, 16, 4, 2048, 2500, 64, torch.bfloat16).inputs]
    first, *others = (kernel(*inputs)[0] for _ in range(10))
    assert not all(torch.equal(first, dq) for dq in others)


@pytest.mark.parametrize("causal", [False, True])
def test_later_keys_are_added_first(causal):
    """Their share of dQ is far below one unit in the last place of what the first keys add, and of what the second ones take away
    again: added to these it is gone, and so is dQ; added to nothing in between it would remain."""
    kernel = load(STEM, device="cpu", quiet=True)
    q, k, v, do = (torch.zeros(1, 1, 384, 64, dtype=torch.bfloat16) for _ in range(4))
    q[..., 383, 0], do[..., 383, 0] = 1.0, 1.0
    k[..., :128, 1], k[..., 128:256, 1], k[..., 256:, 1] = 2.0**100, -(2.0**100), 1.0
    v[..., ::2, 0] = 1.0
    v[..., 256::2, 0] = 2.0
    o, lse = torch.zeros_like(q), torch.full((1, 1, 384), 6.0)
    dq = kernel(q, k, v, o, lse, do, causal=causal, deterministic=True)[0]
    assert dq[0, 0, 383, 1] == 0


@pytest.mark.parametrize("queries", [100, 450, 5000])
def test_sets_of_heads_of_long_sequences(queries):
    """Of 5 heads under a mask, 1, 2 or 5 are a set, and the last set of two has only one: the answer is the same."""
    one = single(STEM, 64, "fp16")
    long = "(heads == 0 || a.Nk > 16384)) heads = min(16, (1 << 19) / a.Nq)"
    kernel = load(source=one.replace(long, f"true) heads = min(16, {queries} / a.Nq)"), device="cpu", quiet=True)
    check(kernel, [case(1, 5, 1, 200, 300, 64, torch.float16, causal=True)]).require()


# --- more items than CTAs, at D = 64


def on(ctas: int, *edit: str) -> Kernel:
    """The rung for D = 64 and fp16 on so many CTAs, with an edit of its text."""
    one = single(STEM, 64, "fp16")
    one = dataclasses.replace(one, source=one.replace(*edit)) if edit else one
    return load(
        source=one.replace("min(items, int64_t(sms))", f"min(items, int64_t({ctas}))"), device="cpu", quiet=True
    )


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize(("H", "Nq", "Nk"), [(1, 300, 520), (3, 100, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_one_item_after_another(ctas, H, Nq, Nk, causal):
    """Items of several steps, of different lengths under a mask, and of one step each: right, nothing is reported, and in one order
    they are the same bits as with a CTA for each."""
    kernel, one = on(ctas), case(1, H, 1, Nq, Nk, 64, torch.float16, causal=causal)
    check(kernel, [one]).require()
    assert not xray(kernel, *one.inputs, causal=causal).findings
    alone = on(132)(*one.inputs, causal=causal, deterministic=True)
    for threads in (1, 3):
        kernel.launcher.threads = threads
        again = kernel(*one.inputs, causal=causal, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(alone, again, strict=True))


@pytest.mark.parametrize(
    "dropped",
    [
        "fa::mbarrier_wait(smem + C::K_empty + 8 * stage, n / C::K_stages % 2 ^ 1);",
        "for (int e = 0; e < 4; ++e) dK_reg[n][e] = dV_reg[n][e] = 0.f;",
    ],
)
def test_what_stands_between_two_items(dropped):
    """The test above can fail: K is fetched over the one that is being read, or an item adds to the sums of the one before."""
    assert not check(on(1, dropped, ""), [case(1, 3, 1, 100, 300, 64, torch.float16)]).ok


@pytest.mark.parametrize(("places", "enough"), [(8, True), (3, False)])
def test_places_for_items(places, enough):
    """The producer writes an item where a sender may still be reading the one that was there. (Four are too few as well, which the
    X-ray doesn't see.)"""
    source = on(1).rung.source
    assert source.count("works[n % 8]") == 2
    kernel = load(source=source.replace("works[n % 8]", f"works[n % {places}]"), device="cpu", quiet=True)
    found = xray(kernel, *case(1, 3, 1, 100, 300, 64, torch.float16).inputs).findings
    assert (not found) == enough, found


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
    call.workspace["stats"] = torch.ones(3, 1, 1, Nq)  # turns, LSE and -delta
    call.workspace["dQ_sum"].zero_()
    kernel.launcher.launch(call)
    return call.workspace["dQ_sum"]


def test_more_than_an_int_of_elements_in_dq():
    """2^24 queries of 128 elements are 2^31."""
    near, far = dq_of_the_last_queries(128), dq_of_the_last_queries(2**24 + 128)
    assert near.abs().max() > 1 and torch.equal(near, far)
    with pytest.raises(KernelError, match="out of bounds in backward_wgmma.* writes 16384 bytes"):
        dq_of_the_last_queries(
            2**24 + 128, "int64_t(work.head * last + tile) * (Br * d)", "(work.head * last + tile) * (Br * d)"
        )
