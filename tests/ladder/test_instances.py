"""A rung with some of its instances: the same code on the same lines, and only what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import for_d64, rung, rungs, single
from helpers.ladder.rung import parse

STEMS = [r.stem for r in rungs()]


@pytest.mark.parametrize("stem", STEMS)
def test_for_d64_only_leaves_instances_out(stem):
    whole, cut = rung(stem), for_d64(stem)
    left_out = [line for line in whole.source.splitlines() if line not in cut.source.splitlines()]
    assert all(re.fullmatch(r"// D:.*|  case \d+:|    return launch<\d+>\(a, stream\);", line) for line in left_out)
    assert cut.D == ((64,) if whole.D else ()) and bool(left_out) == (whole.D not in ((), (64,)))
    assert not whole.D or ("return launch<64>(a, stream);" in cut.source and "launch<128>" not in cut.source)


@pytest.mark.parametrize("stem", ["10_fa2_mma_fp16", "21_split_kv", "33_backward_wgmma"])
def test_a_single_instance_of_a_rung(stem):
    whole, one = rung(stem), single(stem, 64, "bf16")
    assert (one.D, one.dtypes, one.stem, one.path) == ((64,), ("bf16",), stem, whole.path)
    assert "launch<128>" not in one.source and "launch<d, fa::fp16>" not in one.source
    assert "return launch<d, fa::bf16>(a, stream);" in one.source and "return launch<64>(a, stream);" in one.source
    again = parse(one.source, Path("cell"))
    assert (again.D, again.dtypes, again.stem) == (one.D, one.dtypes, stem)
    places = [
        next(n for n, line in enumerate(s.splitlines()) if "__global__" in line) for s in (whole.source, one.source)
    ]
    assert places[0] == places[1]


def test_a_single_instance_keeps_float32_where_a_kernel_takes_both():
    one = single("50_ring", 64, "bf16")
    assert one.dtypes == parse(one.source, Path("cell")).dtypes == ("fp32", "bf16") and one.D == (64,)
    assert "launch<d, fa::fp16>" not in one.source and "return launch<d, float>(a, stream);" in one.source


@pytest.mark.parametrize(
    ("stem", "D", "dtype"),
    [("04_fa2_fp32", 64, "fp32"), ("13_tuned", 96, "fp16"), ("13_tuned", 64, "fp32"), ("50_ring", 64, "fp32")],
)
def test_what_cannot_be_taken_alone_is_refused(stem, D, dtype):
    with pytest.raises(ValueError, match=f"{stem} has no instance for D = {D}, {dtype}"):
        single(stem, D, dtype)
