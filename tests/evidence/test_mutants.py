"""Does the suite bite? Every seeded bug of the catalogue has a recorded verdict, and what may have changed is run again."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import rung, rungs
from helpers.emulator import fragments
from helpers.evidence import catalogue as tables
from helpers.evidence import mutants, verdicts
from helpers.evidence.mutants import Mutant, catalogue
from helpers.evidence.verdicts import Verdict
from helpers.ladder import rung as ladder
from helpers.ladder.paths import INCLUDE, KERNELS

RECORD = verdicts.read()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeded bugs that this run looks at: see verdicts.choose."""
    if "id" in metafunc.fixturenames:
        options = metafunc.config.option
        metafunc.parametrize("id", verdicts.choose(options.seed, options.all).ids)


def require_as_recorded(mutant: Mutant) -> None:
    assert mutant.id in RECORD, f"{mutant.id} ({mutant.bug}) has no recorded verdict: `make verdicts`"
    expected = RECORD[mutant.id]
    noticed = verdicts.see(mutant, expected.input)
    assert noticed == expected.noticed, f"{mutant.id} ({mutant.bug}) at {expected.input!r}"
    assert re.search(mutant.must, noticed), f"{mutant.id} ({mutant.bug}) has to be noticed as {mutant.must!r}"


def test_a_seeded_bug_is_noticed_as_recorded(id):
    require_as_recorded(catalogue()[id])


def test_a_seeded_bug_that_is_no_longer_noticed_fails():
    bug = catalogue()["04.past-the-end"]
    harmless = replace(bug, source=rung(bug.stem).source)
    with pytest.raises(AssertionError, match="assert 'clean' == 'emulator: out of bounds'"):
        require_as_recorded(harmless)
    with pytest.raises(AssertionError, match="has no recorded verdict"):
        require_as_recorded(replace(bug, id="04.new"))


# The record


def test_every_seeded_bug_is_recorded_and_noticed_by_what_must_notice_it():
    assert list(RECORD) == list(catalogue())
    missed = [row for id, row in RECORD.items() if not re.search(catalogue()[id].must, row.noticed)]
    assert not missed


def test_the_record_tells_a_mutant_that_nothing_notices():
    """The test above can fail: of each requirement there are mutants, and "clean" or another finding doesn't fit it."""
    musts = {mutant.must: mutant for mutant in catalogue().values()}
    assert set(musts) == {"", mutants.CLEAN, mutants.NOTICED, mutants.UNORDERED}
    fits = {must: [said for said in SAID if re.search(must, said)] for must in musts}
    assert fits[mutants.NOTICED] == SAID[1:] and fits[mutants.CLEAN] == SAID[:1]
    assert fits[mutants.UNORDERED] == SAID[4:] and fits[""] == SAID


SAID = ["clean", "check: wrong", "emulator: out of bounds", "xray: mask", "xray: race", "xray: in flight"]


def test_a_rung_without_one_of_its_barriers_races():
    """Of every line that waits for other threads, or for its own copies: the mutant without it, by its recorded verdict."""
    waits = re.compile(r"__sync(?:threads|warp)\(\);|fa::cp_async_wait<[^;]*>\(\);")
    lines = {
        (r.stem, number)
        for r in rungs()
        for number, line in enumerate(r.source.split("[region: launcher]")[0].splitlines(), 1)
        if waits.search(line.split("//")[0])
    }
    removed = {
        (m.stem, m.line): m for m in mutants.mutants().values() if re.match("(barrier|syncwarp|wait)-removed", m.rule)
    }
    assert set(removed) == lines and len(lines) >= 45
    unordered = {m.id for m in removed.values() if re.search(mutants.UNORDERED, RECORD[m.id].noticed)}
    assert {m.id for m in removed.values()} - unordered == mutants.ORDERS_NO_THREADS


def test_each_bug_is_in_the_catalogue_once():
    digests = [(m.digest, m.place, m.wrong_result) for m in catalogue().values()]
    assert len(set(digests)) == len(digests) >= 900
    assert tables.ELSEWHERE.keys() <= mutants.mutants().keys() and tables.INSTANCE.keys() <= catalogue().keys()


# What is run


@pytest.fixture
def fresh(monkeypatch) -> dict[str, Verdict]:
    """A record that is not stale."""
    emulator, checker = verdicts.digest_of_emulator(), verdicts.digest_of_checker()
    rows = {m.id: Verdict(m.id, m.digest, emulator, checker, "xray", "clean") for m in catalogue().values()}
    monkeypatch.setattr(verdicts, "read", lambda: rows)
    assert verdicts.stale(rows) == []
    return rows


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Changes a file of a copy of kernels/: path, old, new."""
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    monkeypatch.setattr(ladder, "KERNELS", copy)
    monkeypatch.setattr(ladder, "INCLUDE", copy / INCLUDE.relative_to(KERNELS))
    caches = (mutants.catalogue, mutants.mutants, mutants._of_headers)

    def change(path: str, old: str, new: str) -> None:
        text = (copy / path).read_text()
        assert text.count(old) >= 1
        (copy / path).write_text(text.replace(old, new, 1))
        for function in caches:
            function.cache_clear()

    yield change
    for function in caches:
        function.cache_clear()


def test_changing_a_kernel_runs_exactly_its_mutants(fresh, kernels):
    before = verdicts.choose("a")
    assert before.stale == 0 and len(before.ids) == verdicts.SHARE
    kernels(
        "12_double_buffered.cu",
        "    __syncthreads(); // this tile has landed for all warps, and all have read the one before",
        "    __syncthreads(); // once more",
    )
    assert verdicts.choose("a") == before, "a comment is no change"
    kernels("12_double_buffered.cu", "float m_reg[2] = {-FA_INFINITY", "float m_reg[2] = {-1.f * FA_INFINITY")
    its = {id for id in catalogue() if id.startswith("12.")}
    after = verdicts.choose("a")
    assert after.stale == len(its) >= 40 and its <= set(after.ids)
    assert len(set(after.ids) - its) == verdicts.SHARE and f"{len(its)} recorded verdicts were stale" in str(after)


def test_changing_a_header_runs_the_mutants_of_the_rungs_that_reach_it(fresh, kernels):
    reach = {r.number for r in rungs() if any(header.name == "sm90.cuh" for header in r.includes)}
    kernels("include/fa/sm90.cuh", "#pragma once", "#pragma once\nstruct Unused;")
    assert {id[:2] for id in verdicts.stale(fresh)} == reach == {"30", "31", "32", "33"}
    assert set(verdicts.stale(fresh)) == {id for id in catalogue() if id[:2] in reach}


def change_in(monkeypatch, tmp_path: Path, what: str, old: str, new: str) -> None:
    """Changes a file of the emulator's, or of the checker's."""
    folder = tmp_path / "emulator"
    if not folder.exists():
        shutil.copytree(verdicts.EMULATOR, folder)
        shutil.copytree(verdicts.CHECKER[0].parent, tmp_path / "run")
        monkeypatch.setattr(verdicts, "EMULATOR", folder)
        monkeypatch.setattr(verdicts, "CHECKER", tuple(tmp_path / "run" / path.name for path in verdicts.CHECKER))
    path = tmp_path / what
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("emulator/runtime/race.cpp", "#include", "struct Unused;\n#include"),
        ("emulator/include/cuda_runtime.h", "#pragma once", "#pragma once\nstruct Unused;"),
        ("emulator/translate.py", "import re\n", "import re, io\n"),
        ("run/check.py", "TIMES = 2", "TIMES = 3"),
        ("run/report.py", "self.used <= 1", "self.used <= 2"),
        ("run/reference.py", "EDGES = (31,", "EDGES = (30, 31,"),
    ],
)
def test_changing_the_emulator_or_the_checker_makes_every_verdict_stale(what, old, new, fresh, tmp_path, monkeypatch):
    """So many that one of each kind is run, and the output says so; `--all` runs every one."""
    change_in(monkeypatch, tmp_path, what, old, new)
    assert verdicts.stale(fresh) == list(catalogue())
    some, other, every = (
        verdicts.choose("a"),
        verdicts.choose("b"),
        verdicts.choose("a", everything=True),
    )
    assert every.ids == tuple(catalogue())
    assert len(some.ids) <= 160 and some.ids != other.ids and "`make verdicts` renews them" in str(some)
    for choice in (some, other):
        families = {(id[0], catalogue()[id].rule) for id in choice.ids if not catalogue()[id].wrong_result}
        rules = {
            (m.stem[0], m.rule) for m in mutants.mutants().values() if m.rule in tables.RULES | tables.LAUNCH_RULES
        }
        assert rules <= families and {id[:2] for id in choice.ids} == {r.number for r in rungs()}


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("emulator/runtime/race.cpp", "#include", "// a comment\n#include"),
        ("run/check.py", "TIMES = 2  #", "TIMES = 2    # another word,"),
        ("run/report.py", '"""Within the budget."""', '"""Not above the budget."""'),
    ],
)
def test_a_comment_makes_nothing_stale(what, old, new, fresh, tmp_path, monkeypatch):
    change_in(monkeypatch, tmp_path, what, old, new)
    assert verdicts.stale(fresh) == []


def test_a_compiler_flag_makes_every_verdict_stale(fresh, monkeypatch):
    from helpers.emulator import launcher

    monkeypatch.setattr(launcher, "KERNEL_FLAGS", [*launcher.KERNEL_FLAGS, "-fwhole-program"])
    assert verdicts.stale(fresh) == list(catalogue())


def test_the_share_is_the_same_for_a_commit_and_every_mutants_turn_comes(fresh):
    assert verdicts.choose("a").ids == verdicts.choose("a").ids
    assert verdicts.choose("a").ids != verdicts.choose("b").ids
    ids = list(catalogue())
    seen = {id for seed in range(800) for id in verdicts._drawn(ids, str(seed))[: verdicts.SHARE]}
    assert seen == set(ids)


def test_the_record_is_renewed_where_it_is_stale(tmp_path, monkeypatch):
    """Two rows of another emulator are run again, the others are kept; what is in no catalogue any more goes."""
    some = ["04.past-the-end", "01.scale-left-out", "01.barrier-removed.1"]
    chosen = {id: catalogue()[id] for id in ("04.past-the-end", "01.scale-left-out", "02.grid.1")}
    monkeypatch.setattr(verdicts, "catalogue", lambda: chosen)
    monkeypatch.setattr(verdicts, "PATH", tmp_path / "verdicts.csv")
    emulator, checker = verdicts.digest_of_emulator(), verdicts.digest_of_checker()
    kept = Verdict("02.grid.1", chosen["02.grid.1"].digest, emulator, checker, "xray", "as it was")
    verdicts.write(
        {id: replace(RECORD.get(id, kept), mutant=id, emulator="another") for id in some} | {"02.grid.1": kept}
    )
    assert verdicts.stale(verdicts.read()) == some[:2]
    assert verdicts.record(workers=1) == []
    assert verdicts.read() == {id: replace(RECORD[id], emulator=emulator, checker=checker) for id in some[:2]} | {
        "02.grid.1": kept
    }
    assert verdicts.stale(verdicts.read()) == []


def test_tables_that_python_writes_for_the_emulator_are_in_its_digest(monkeypatch):
    before = verdicts.digest_of_emulator()
    monkeypatch.setattr(fragments, "tables", lambda: "others")
    assert verdicts.digest_of_emulator() != before
