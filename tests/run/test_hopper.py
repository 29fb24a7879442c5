"""Rungs 30 to 33 and the headers they are written with: generated code in step with its generator, what nvcc makes
of the kernels, and what their tiles may not be."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest
import torch

from helpers import CompileError, KernelError, check, load, reference, rung, rungs, sass, single, xray
from helpers.ladder.rung import INCLUDE
from helpers.run.reference import Case

HOPPER = [r for r in rungs() if r.arch == "sm_90a" and r.op == "attention"]
each = pytest.mark.parametrize("rung", HOPPER, ids=lambda r: r.stem)
# What ptxas says where it ignores setmaxnreg (C7508), serialises products (C7510 to C7515) or adds a wait (C7517)
TOLD = re.compile(r"\(C75\d\d\).*")


def generator():
    """kernels/include/fa/wgmma.py as a module."""
    spec = importlib.util.spec_from_file_location("wgmma", INCLUDE / "fa" / "wgmma.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wgmma_cuh_is_what_its_generator_writes():
    wgmma = generator()
    assert wgmma.HEADER.read_text() == wgmma.header(), "run: python kernels/include/fa/wgmma.py"


@pytest.mark.sampled
@each
def test_ptxas_keeps_the_products_asynchronous_and_spills_nothing(rung):
    """For D = 64 and 128 and both types: no warning, nothing in local memory, all products by wgmma, all tiles by TMA."""
    log = (sass.cubin(rung).parent / "ptxas.log").read_text()
    assert not TOLD.search(log), TOLD.search(log)
    used = sass.resources(rung)
    assert len(used) == 4 and (used[["spill_store_bytes", "spill_load_bytes", "stack_bytes"]] == 0).all(axis=None)
    opcodes = sass.histogram(rung)
    assert not {"LDL", "STL", "HMMA", "LDSM", "LDGSTS"} & set(opcodes.index)
    assert (opcodes.loc[["HGMMA", "UTMALDG", "SYNCS"]] > 0).all(axis=None)


def test_a_sum_touched_before_its_product_is_complete_is_told_by_ptxas():
    """The test above can fail."""
    rung = single("32_ping_pong", 64, "bf16")
    under_way = "          exponentials(0, 0, early);\n"
    early = dataclasses.replace(rung, source=rung.replace(under_way, "          O_reg[0][0] += 1.f;\n" + under_way))
    assert TOLD.search((sass.cubin(early).parent / "ptxas.log").read_text())


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "stem, D, ctas", [("31_warp_specialized", 64, 1), ("32_ping_pong", 64, 1), ("32_ping_pong", 128, 2)]
)
def test_a_cta_that_works_on_one_query_tile_after_another_is_right_and_races_nowhere(stem, D, ctas, causal):
    """Few CTAs for all of them: what the cases are too small for where an SM is given one each."""
    few = single(stem, D, "fp16").replace("int64_t(sms)", f"int64_t({ctas})")
    kernel = load(source=few, device="cpu", quiet=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, D).half() for n in (600, 768, 768))
    check(kernel, [Case("few CTAs", q, k, v, causal=causal)]).require()
    assert not xray(kernel, q, k, v, causal=causal).findings


@pytest.mark.parametrize("sms", [1, 3, 4])
def test_the_counter_is_left_alone_where_no_cta_has_a_second_query_tile(sms):
    """Of four query tiles each CTA begins with one. For the others, and to find that none is left, CTAs take numbers."""
    kernel = single("32_ping_pong", 64, "fp16").replace("int64_t(sms)", f"int64_t({sms})")
    clear = "cudaMemsetAsync(a.workspace[0], 0, 4, stream)"
    assert kernel.count(clear) == 1
    never = load(source=kernel.replace(clear, "cudaErrorNotSupported"), device="cpu", quiet=True)
    q, k, v = torch.zeros(3, 1, 1, 600, 64).half()
    if sms < 4:
        taken = load(source=kernel, device="cpu", quiet=True).tensors(q, k, v)["counter"]
        assert taken.view(torch.int32).item() == 4
        with pytest.raises(KernelError, match="cudaErrorNotSupported"):
            never(q, k, v)
    else:
        left = never.tensors(q, k, v)["counter"]
        before = torch.full_like(left, torch.nan)
        assert torch.equal(left.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("Nk, causal", [(1024, False), (1024, True), (1025, False)])
def test_without_a_mask_short_query_tiles_of_128_columns_are_dealt_out_beforehand(Nk, causal):
    """And the counter, which is not cleared for them, is left alone. One CTA has both query tiles."""
    kernel = single("32_ping_pong", 128, "fp16").replace("int64_t(sms)", "int64_t(1)")
    q, k, v = (torch.zeros(1, 1, n, 128).half() for n in (200, Nk, Nk))
    taken = load(source=kernel, device="cpu", quiet=True).tensors(q, k, v, causal=causal)["counter"]
    untouched = torch.full_like(taken, torch.nan).view(torch.int32).item()
    assert taken.view(torch.int32).item() == (untouched if (Nk, causal) == (1024, False) else 2)


@pytest.mark.parametrize("stem", ["32_5_sender", "32_ping_pong"])
def test_no_O_is_stored_before_the_one_before_it_is_sent(stem):
    """So the thread that sends them misses no phase of their barrier. Here it waits for the next O, too, before it sends one: for ever."""
    kernel = single(stem, 64, "fp16").replace("int64_t(sms)", "int64_t(1)")  # one CTA for all query tiles
    own = "fa::mbarrier_wait(O_full, Q_ring.stage);"
    assert kernel.count(own) == 1
    late = load(source=kernel.replace(own, own + own.replace("stage", "stage ^ 1")), device="cpu", quiet=True)
    q, k, v = torch.zeros(3, 1, 1, 1000, 64).half()
    with pytest.raises(
        KernelError, match=r"deadlock[\s\S]*thread 32 waits .* of the mbarrier O_full: 12 of 12 arrivals"
    ):
        late(q, k, v)


@each
def test_the_cases_cover_what_hopper_adds(rung):
    names = [case.name for case in reference.cases(rung)]
    for words in ("Nq=385, Nk=63", "causal, Nq=129, Nk=127", "6 heads on 3", "scale -0.3", "strided, three layouts"):
        assert any(words in name for name in names), words


# Edits of a Tile, and words of the assertion that says why it can't be
SWIZZLED = "tiles have to begin at multiples of 1024"
SIXTEEN = "Bc has to be a multiple of 16"
CTA = "a CTA has 227 KB of shared memory"
TAKEN = "the consumers take more registers than the producer gives back"
REFUSED = {
    "30_tma_wgmma": [
        ("int stages = 3;", "int stages = 1;", "there have to be two"),
        ("int Bc = d == 64 ? 96 :", "int Bc = d == 64 ? 56 :", SIXTEEN),
        ("int Q_bytes = 2 * Br * d;", "int Q_bytes = 2 * Br * d + 512;", SWIZZLED),
        ("int stages = 3;", "int stages = 5;", "an SM has 228 KB of shared memory"),
    ],
    "31_warp_specialized": [
        ("int Bc = 128;", "int Bc = 120;", SIXTEEN),
        ("K_at = 3 * Q_bytes,", "K_at = 3 * Q_bytes + 8,", SWIZZLED),
        ("int stages = d == 64 ? 4 :", "int stages = d == 64 ? 5 :", CTA),
        ("int registers = d == 64 ? 160 :", "int registers = d == 64 ? 168 :", TAKEN),
    ],
    "32_ping_pong": [
        ("int K_stages = d == 64 ? 5 :", "int K_stages = d == 64 ? 1 :", "there have to be two K_stages"),
        ("int V_stages = d == 64 ? 4 :", "int V_stages = d == 64 ? 3 :", "the number of V_stages has to be even"),
        ("int Bc = 128;", "int Bc = 120;", SIXTEEN),
        ("K_at = 2 * Q_bytes,", "K_at = 2 * Q_bytes + 16,", SWIZZLED),
        ("int V_stages = d == 64 ? 4 :", "int V_stages = d == 64 ? 8 :", CTA),
        ("int producer_registers = d == 64 ? 32 :", "int producer_registers = d == 64 ? 40 :", TAKEN),
    ],
    "33_backward_wgmma": [
        ("int Q_stages = 3;", "int Q_stages = 1;", "there have to be two stages"),
        ("int Bc = 128;", "int Bc = 192;", "Bc has to be 128"),
        ("int Br = d == 64 ? 128 :", "int Br = d == 64 ? 96 :", "Br has to be a part of that"),
        ("V = K + K_stages * kv_bytes;", "V = K + K_stages * kv_bytes + 16;", SWIZZLED),
        ("int Q_stages = 3;", "int Q_stages = 5;", CTA),
    ],
}


@pytest.mark.parametrize(("stem", "old", "new", "words"), [(stem, *edit) for stem in REFUSED for edit in REFUSED[stem]])
def test_a_tile_that_would_hang_or_be_wrong_does_not_compile(stem, old, new, words):
    with pytest.raises(CompileError, match=rf"static assertion failed.*{re.escape(words)}"):
        load(source=single(stem, 64, "fp16").replace(old, new), device="cpu", quiet=True)


@pytest.mark.parametrize("stem", REFUSED)
def test_every_assertion_of_a_tile_can_fail(stem):
    """The test above has an edit for each."""
    tile = rung(stem).source.partition("// [region: tile]")[2].partition("// [end: tile]")[0]
    messages = re.findall(r'static_assert\([^;"]*"([^"]*)"\);', tile)
    assert len(messages) == tile.count("static_assert") == len(REFUSED[stem])
    assert all(any(words in message for *_, words in REFUSED[stem]) for message in messages)


@pytest.mark.parametrize(("stem", "stages"), [("30_tma_wgmma", 2), ("31_warp_specialized", 1), ("32_ping_pong", 2)])
def test_the_fewest_stages_that_a_tile_may_have_are_enough(stem, stages):
    whole = single(stem, 64, "fp16").source
    source, edits = re.subn(r"int (K_|V_|)stages = [^;]+;", rf"int \1stages = {stages};", whole)
    assert edits == (2 if stem == "32_ping_pong" else 1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64).half() for n in (200, 900, 900))
    check(load(source=source, device="cpu", quiet=True), [Case(f"{stages} stages", q, k, v, causal=True)]).require()


def test_with_an_odd_number_of_V_stages_votes_would_race():
    """Why 32 refuses it: the last stage's tile and the first's would vote at one place. Of even ones the X-ray finds nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (200, 2600, 2600))
    k[0, 0, 128 + torch.randperm(1500)[:200]] = (
        3 * q[0, 0]
    )  # for each query, a key that passes its maximum in a late tile
    one = re.sub(r"  static_assert\([^;]*\);\n", "", single("32_ping_pong", 64, "fp16").source)
    for stages, races in ((2, False), (3, True)):
        source, edits = re.subn(r"int V_stages = [^;]+;", f"int V_stages = {stages};", one)
        assert edits == 1
        found = xray(load(source=source, device="cpu", quiet=True), q, k, v).findings
        assert any("race" in str(each) and "votes_smem" in str(each) for each in found) == races, found
