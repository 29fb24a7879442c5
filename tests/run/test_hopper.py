"""Rungs 30 to 32 and the headers they are written with: generated code in step with its generator, and what nvcc makes
of the kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest
import torch

from helpers import check, load, reference, rungs, sass, single, xray
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
    under_way = "          exponentials();\n"
    early = dataclasses.replace(rung, source=rung.replace(under_way, "          O_reg[0][0] += 1.f;\n" + under_way))
    assert TOLD.search((sass.cubin(early).parent / "ptxas.log").read_text())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stem", ["31_warp_specialized", "32_ping_pong"])
def test_a_cta_that_works_on_one_query_tile_after_another_is_right_and_races_nowhere(stem, causal):
    """One CTA for all of them: what the cases are too small for where an SM is given one each."""
    alone = single(stem, 64, "fp16").replace("int64_t(sms)", "int64_t(1)")
    kernel = load(source=alone, device="cpu", quiet=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (600, 768, 768))
    check(kernel, [Case("one CTA", q, k, v, causal=causal)]).require()
    assert not xray(kernel, q, k, v, causal=causal).findings


@each
def test_the_cases_cover_what_hopper_adds(rung):
    names = [case.name for case in reference.cases(rung)]
    for words in ("Nq=129, Nk=63", "causal, Nq=129, Nk=127", "6 heads on 3", "scale -0.3", "strided, three layouts"):
        assert any(words in name for name in names), words
