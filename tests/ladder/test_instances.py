"""A rung with some of its instances: the same code on the same lines, and only what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import for_d64, rung, rungs, single
from helpers.ladder.instances import apart, of_head_dimension
from helpers.ladder.rung import code, parse

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


@pytest.mark.parametrize("stem", [r.stem for r in rungs() if set(r.dtypes) == {"fp16", "bf16"}])
def test_each_instance_apart_is_the_single_one_with_every_line_at_its_place(stem):
    whole = rung(stem)
    found = apart(whole)
    assert list(found) == [(D, dtype) for D in whole.D for dtype in whole.dtypes]
    for (D, dtype), part in found.items():
        assert code(part.source) == code(single(stem, D, dtype).source)
        lines = zip(whole.source.splitlines(), part.source.splitlines(), strict=True)
        assert all(a == b or not b or "launch<" in a for a, b in lines)


def test_what_is_asked_for_is_what_comes_apart():
    again = rung("13").source[rung("13").source.index("  switch") :]
    assert len(apart(parse(f"{rung('13').source}#if 0\n{again}#endif\n", Path("cell")))) == 4
    assert list(apart(of_head_dimension("20", 96))) == [(96, "fp16"), (96, "bf16")]
    assert all(apart(rung(stem)) == {} for stem in ("01", "04", "22", "50")) and apart(single("20", 64)) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  case 64:\n    return launch<64>(a, stream);\n", "  case 64:\n"),  # runs into the next
        ("  case 64:\n    return launch<64>", "  case 64:\n    return launch<128>"),
        ("    return launch<64>(a, stream);\n", "    return launch<64>(a, stream);\n  case 80:\n"),
        ("    return cudaErrorInvalidValue;\n  }", "    return launch<128>(a, stream);\n  }"),
        ("  const fa_args &a = *args;", "  fa_args a = *args;\n  a.D = 128;"),
        (": launch<d, fa::bf16>(a, stream)", ": launch<d, fa::bf16>(a, nullptr)"),
        ("// D:         64, 128", "// D:         64, 96, 128"),
        ("// dtypes:    fp16, bf16", "// dtypes:    fp32, fp16, bf16"),
    ],
)
def test_a_launcher_that_chooses_in_another_way_stays_whole(old, new):
    """Else an instance alone would do other than the whole source."""
    mine = parse(rung("13").replace(old, new), Path("cell"))
    assert apart(parse(rung("13").source, Path("cell"))) and apart(mine) == {}
