"""What compute-sanitizer flagged on a GPU, the X-ray flags, in the record; and the record says what the X-ray says now.

The mutants themselves are run by test_mutants.
"""

import math
from fnmatch import fnmatch

import pandas as pd
import pytest
import torch

from helpers import load, record, rung, sanitize, xray
from helpers.evidence import disagreements, mutants, sanitizer_words, verdicts
from helpers.ladder.contract import prepare
from helpers.ladder.rung import INCLUDE
from helpers.run.reference import random_inputs

RECORD = sanitize.compared()
MUTANTS = {mutant.id: mutant for mutant in sanitize.chosen([]) if mutant.id in set(RECORD["mutant"])}
WRONG = [id for id in MUTANTS if not id.endswith(".original")]
# Rungs that compute-sanitizer has not looked at since their code changed: their row, and perhaps some of their mutants', wait for
# `python -m helpers record sanitizer` on a GPU.
WAITING: tuple[str, ...] = ()


def require_what_tools_flag(agreed: pd.DataFrame) -> None:
    missed = agreed[agreed["who"] == "GPU alone"]
    assert missed["why"].all() and set(missed["mutant"]) <= {"02.every-lane-writes", "33.original"}, missed
    both = agreed[agreed["who"] == "both"]
    assert len(both) >= 250 and both["stem"][~both["stem"].str[:2].isin(WAITING)].nunique() == 16 - len(WAITING)
    assert set(" ".join(both["gpu"]).split()) == set(sanitizer_words.TOOLS)


# What a tool says of a rung, and the line, fa::load4's: 33's finish reads dQ_sum, which bulk copies have written.
OF_A_RUNG = {("33.original", "initcheck"): "uninitialised: global read of 16 bytes, math.cuh line 13"}


def require_clean_rungs(agreed: pd.DataFrame) -> None:
    rungs = agreed[agreed["mutant"].str.endswith(".original")]
    assert len(rungs) == 16 - len(WAITING) and set(rungs["xray"]) == {sanitizer_words.CLEAN}
    said = sanitize.recorded().set_index("mutant")
    found = {
        (id, tool): said.loc[id, tool] for id, tools in zip(rungs["mutant"], rungs["gpu"]) for tool in tools.split()
    }
    assert found == {key: said for key, said in OF_A_RUNG.items() if key[0][:2] not in WAITING}


def require_explanations(agreed: pd.DataFrame) -> None:
    alone = agreed[agreed["who"].str.contains("alone")]
    assert alone["why"].all(), alone[alone["why"] == ""][["mutant", "gpu", "xray"]]
    said = sanitize.recorded().set_index("mutant")
    ended = said.loc[alone["mutant"][alone["why"] == disagreements.ENDED]]
    for id, row in ended[list(sanitizer_words.TOOLS)].iterrows():
        others = row[row != sanitizer_words.TIMEOUT]
        assert len(others) == 1, id
        for tool, words in others.items():
            assert words in (sanitizer_words.CLEAN, said.loc[f"{id[:2]}.original", tool]), id


def test_the_record_is_of_the_rungs_as_they_are():
    rungs = {mutant.id for mutant in sanitize.chosen([]) if mutant.id.endswith(".original")}
    assert {id[:2] for id in rungs - MUTANTS.keys()} == set(WAITING), (
        "rungs have changed: run `python -m helpers record sanitizer` on a GPU, then `record xray-of-mutants`"
    )
    assert len(WRONG) >= 350
    assert len(RECORD) == len(sanitize.recorded()), (
        "the X-ray has yet to look: `python -m helpers record xray-of-mutants`"
    )
    looked_at = (~sanitize.recorded()["mutant"].str.endswith(".original")).sum()
    assert f"{looked_at} kernels with a seeded bug" in " ".join((record.DATA.parent / "README.md").read_text().split())


def test_every_mutant_that_a_tool_flags_is_flagged():
    require_what_tools_flag(RECORD)


def test_no_rung_is_flagged_but_33_by_initcheck():
    require_clean_rungs(RECORD)
    [said] = OF_A_RUNG.values()
    lines = (INCLUDE / "fa/math.cuh").read_text().splitlines()
    [load4] = [number for number, line in enumerate(lines, 1) if "void load4(" in line]
    assert load4 < int(said.rpartition(" ")[2]) <= lines.index("}", load4)
    assert "fa::load4(x, dQ_sum" in rung("33_backward_wgmma").source


def test_what_initcheck_says_of_33_says_nothing_of_its_mutants():
    said = sanitize.recorded().set_index("mutant")["initcheck"].fillna("")
    same = said[said.str.startswith(*OF_A_RUNG.values()) & said.index.str.startswith("33.")]
    tools = RECORD.set_index("mutant")["gpu"]
    assert len(same) >= 10
    flagged = [id for id in same.index if "initcheck" in tools.get(id, "")]
    assert flagged == ["33.original"]


@pytest.mark.parametrize(
    ("tensor", "shape", "wanted"), [("dK_dV", (1, 2, 150, 64), "dk dv"), ("dQ_sum", (1, 2, 256, 64), "dq")]
)
def test_what_33_adds_up_has_been_written(tensor, shape, wanted):
    """At the record's shape, with NaN in all of a workspace tensor that bulk copies write, or zeros: the same gradients."""
    kernel, found = load("33_backward_wgmma", device="cpu", quiet=True), []
    [original] = [mutant for mutant in sanitize.chosen([]) if mutant.id == "33.original"]
    [inputs] = original.inputs()
    for fill in (math.nan, 0.0):
        call = prepare(kernel.rung, "cpu", inputs, causal=True)
        assert call.workspace[tensor].fill_(fill).shape == shape
        kernel.launcher.launch(call)
        found.append([x for name, x in zip(("dq", "dk", "dv"), call.results, strict=True) if name in wanted])
    for with_nan, with_zeros in zip(*found, strict=True):
        assert with_nan.isfinite().all() and torch.equal(with_nan, with_zeros)


def test_what_one_of_the_two_alone_flags_is_explained():
    require_explanations(RECORD)


@pytest.mark.parametrize("fused", [False, True])
def test_lanes_with_one_sum_race_where_the_sum_is_an_fma(fused):
    """Writes of one value are no race. nvcc makes an FMA of one of the sum's two products; with it, the lanes' sums differ."""
    mutant = MUTANTS["02.every-lane-writes"]
    of_products = "a.l * expf(a.m - m_finite) + b.l * expf(b.m - m_finite)"
    assert mutant.source.count(of_products) == 1
    fma = "fmaf(a.l, expf(a.m - m_finite), b.l * expf(b.m - m_finite))"
    kernel = load(source=mutant.source.replace(of_products, fma if fused else of_products), device="cpu", quiet=True)
    inputs = random_inputs(kernel.rung, (1, 1, 3, 1023, 1))
    lines = [(f.kind, f.line, f.other_line) for f in xray(kernel, *inputs).findings]
    assert lines == ([("race", mutant.line, mutant.line)] if fused else [])


def test_every_explanation_is_of_something():
    alone = [row for row in RECORD.itertuples() if "alone" in row.who]
    gone = {
        m.id for m in sanitize.chosen([]) if m.id[:2] not in set(RECORD["mutant"].str[:2])
    }  # of rungs that have changed
    for id, said, side, why in disagreements.DISAGREEMENTS:
        fits = [a for a in alone if a.who == side and fnmatch(a.mutant, id) and fnmatch(a.xray, said)]
        assert fits or any(fnmatch(other, id) for other in gone), why


# (of which kind, column, what it says instead) -> the requirement that fails
BITES = {
    "the X-ray misses one": ("both", "xray", "clean", require_what_tools_flag),
    "the X-ray flags a rung": ("original", "xray", "race, line 1", require_clean_rungs),
    "a tool flags a rung": ("original", "racecheck", "race: write, line 1 and read, line 2", require_clean_rungs),
    "the X-ray says what nobody explained": ("neither", "xray", "race, line 1", require_explanations),
    "a tool says what nobody explained": ("neither", "memcheck", "out of bounds: read, line 1", require_explanations),
}


@pytest.mark.parametrize("bite", BITES)
def test_these_tests_bite(bite, monkeypatch):
    which, column, said, require = BITES[bite]
    rows = sanitize.recorded()
    of_rungs = RECORD["mutant"].str.endswith(".original")
    chosen = RECORD[of_rungs if which == "original" else ~of_rungs & (RECORD["who"] == which)]
    rows.loc[rows["mutant"] == chosen["mutant"].iloc[-1], column] = said
    monkeypatch.setattr(sanitize, "recorded", lambda *_: rows)
    with pytest.raises(AssertionError):
        require(sanitize.compared())


def test_the_record_says_what_the_xray_says_now():
    """By the recorded verdict, which names the finding that has to be found: in some mutants another one comes first."""
    now = verdicts.read()
    first = {row.mutant: row.xray.split(",")[0] for row in RECORD.itertuples()}
    other = {id for id, said in first.items() if now[id].noticed != (said if said == "clean" else f"xray: {said}")}
    assert all(MUTANTS[id].must == mutants.UNORDERED and first[id].startswith("uninitialised") for id in other)
    assert len(other) <= 20 and len(first) >= 350


def test_the_rule_that_is_stricter_than_the_hardware_is_counted_apart():
    """Threads that have returned before a barrier: no GPU since Volta minds."""
    apart = sanitize.by_rule(RECORD)
    moved = apart["who"] != RECORD["who"]
    assert moved.sum() >= 10 and set(RECORD["why"][moved]) == {disagreements.RETURNED}
    assert set(RECORD["who"][moved]) == {"X-ray alone"} and set(apart["who"][moved]) == {"X-ray's stricter rule"}
    assert disagreements.RETURNED not in set(apart["why"][apart["who"] == "X-ray alone"])
