"""A rung with some of its instances: the same code on the same lines, and only what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import for_d64, rung, rungs, single
from helpers.ladder.contract import FaArgs
from helpers.ladder.instances import apart, asked_for, of_head_dimension
from helpers.ladder.rung import Rung, code, parse

STEMS = [r.stem for r in rungs()]
FP16, BF16 = 1, 2  # of fa_dtype in fa/args.cuh


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


def test_a_single_instance_is_for_fp16_by_default_and_of_a_rung_without_it_for_what_it_takes():
    assert single("13", 64) == single("13", 64, "fp16")
    assert single("04", 64) == of_head_dimension("04", 64) != rung("04")


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
    found = apart(whole, 6)
    assert list(found) == [(D, dtype) for D in whole.D for dtype in (FP16, BF16)]
    for (D, dtype), part in found.items():
        assert code(part.source) == code(single(stem, D, "fp16" if dtype == FP16 else "bf16").source)
        assert on_its_lines(part, whole)


def on_its_lines(part: Rung, whole: Rung) -> bool:
    lines = zip(whole.source.splitlines(), part.source.splitlines(), strict=True)
    return all(a == b or not b or "launch<" in a for a, b in lines)


@pytest.mark.parametrize(("most", "sources"), [(1, 1), (2, 2), (3, 2), (5, 2), (6, 6), (64, 6)])
def test_there_are_no_more_sources_than_asked_for_and_each_instance_is_in_its_own(most, sources):
    whole = rung("20")
    found = apart(whole, most)
    assert len(set(found.values())) == sources
    for D, dtype in [(64, FP16), (96, BF16), (128, BF16)]:
        part = found[asked_for(FaArgs(D=D, dtype=dtype), found)]
        kept = {int(d) for d in re.findall(r"^    return launch<(\d+)>", part.source, re.MULTILINE)}
        assert D in kept and len(kept) == (1 if sources == 6 else 3) and on_its_lines(part, whole)
        assert sources == 1 or f"return launch<d, fa::{'fp16' if dtype == FP16 else 'bf16'}>(a, stream);" in part.source


def test_what_is_asked_for_is_what_comes_apart():
    again = rung("13").source[rung("13").source.index("  switch") :]
    assert len(apart(parse(f"{rung('13').source}#if 0\n{again}#endif\n", Path("cell")), 4)) == 4
    assert list(apart(of_head_dimension("20", 96), 2)) == [(96, FP16), (96, BF16)]
    assert all(apart(one, 64) == {None: one} for one in (*map(rung, ("01", "04", "22", "50")), single("20", 64)))


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
    assert len(apart(parse(rung("13").source, Path("cell")), 4)) == 4 and apart(mine, 4) == {None: mine}
