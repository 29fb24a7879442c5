"""Notebook 91's exhibits: each hides, shows and is caught as its notebook says, and the rung it was made from is not."""

from __future__ import annotations

import itertools
import re

import pandas as pd
import pytest

from helpers import check, draw_proof, museum, rung
from helpers.evidence.mutants import catalogue
from helpers.ladder.rung import code
from helpers.lessons import execute

ALL = [*museum.EXHIBITS.values(), *museum._UNLABELLED]
every = pytest.mark.parametrize("exhibit", ALL, ids=lambda e: e.name)
TEXT = (execute.NOTEBOOKS / "src" / "91_bug_museum.py").read_text()


@pytest.mark.sampled
@every
def test_hides_where_it_is_said_to(exhibit):
    for name in exhibit.hides:
        exhibit.report(name).require()


@every
def test_is_caught_as_stated(exhibit):
    assert exhibit.caught, exhibit.evidence() or "nothing was said"
    problem = exhibit.report().comparisons[0].problem
    assert problem.startswith("raised KernelError") == (exhibit.caught_by == "emulator"), problem


@pytest.mark.sampled
@every
def test_its_fix_passes_and_the_bug_itself_is_no_fix(exhibit, capsys):
    """The fix of every exhibit is the rung's own text."""
    exhibit.fix()
    assert capsys.readouterr().out.startswith("fixed: right on ")
    exhibit.fix(exhibit.new, exhibit.new)
    assert capsys.readouterr().out.startswith("not fixed\n")
    with pytest.raises(ValueError, match="isn't in the text that has the bug"):
        exhibit.fix("no such text", "")


@pytest.mark.parametrize("exhibit", [e for e in ALL if e.caught_by in ("xray", "conflicts")], ids=lambda e: e.name)
def test_what_only_the_xray_sees_passes_every_check(exhibit):
    check(exhibit.kernel).require()


def test_another_order_of_threads_shows_the_missing_barrier_and_not_every_race(capsys):
    """And the order that everything else runs in is put back."""
    barrier, syncwarp = museum.EXHIBITS["no_last_barrier"], museum.EXHIBITS["no_syncwarp"]
    assert barrier.in_other_orders(2) == [False, False] and syncwarp.in_other_orders(2) == [True, True]
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"random, N = 256, order 1: WRONG, by [\d,]+ budgets", said[0]) and said[2].endswith(": right")
    assert barrier.kernel.launcher.schedule == 0 and barrier.report().ok


def test_rows_and_ratios_of_an_exhibit():
    assert museum.EXHIBITS["one_sided_swizzle"].right_rows() == 128 / 8
    exhibits = [museum.EXHIBITS[name] for name in ("tail_not_masked", "no_trans")]
    words = draw_proof.ratios({e.name: e.outputs() for e in exhibits}).in_words
    assert "tail_not_masked: one value per row" in words and "no_trans: any value" in words


def test_a_map_of_one_shade_is_not_drawn(capsys):
    assert museum.EXHIBITS["no_opt_in"].visit() is None and museum.EXHIBITS["lse_in_log2"].visit() is None
    assert museum.EXHIBITS["no_trans"].visit() is not None
    assert "8192 of 8192 elements never written" in capsys.readouterr().out


def test_the_notebook_shows_every_exhibit_under_its_title():
    for name, exhibit in museum.EXHIBITS.items():
        assert f"### {exhibit.title}\n" in TEXT and f'EXHIBITS["{name}"]' in TEXT, name
    assert set(re.findall(r'EXHIBITS\["(\w+)"\]', TEXT)) == set(museum.EXHIBITS)
    assert 10 <= len(museum.EXHIBITS) <= 15


def test_every_exhibit_is_in_the_catalogue_of_seeded_bugs():
    known = {(code(m.source), m.stem) for m in catalogue().values()}
    assert all((code(rung(e.rung).replace(e.old, e.new)), e.rung) in known for e in ALL)


def test_an_exhibit_that_is_right_is_not_called_caught():
    """A catcher that fires at everything would pass the tests above."""
    harmless = museum.Exhibit(
        "none", "No bug", "03_fa1_fp32", "ld = d + 4,", "ld = d + 12,", (), "random", "check", "", tile=64
    )
    assert not harmless.evidence()
    for catcher in ("check", "emulator", "xray", "conflicts"):
        same = museum.Exhibit(
            "none", "No bug", "03_fa1_fp32", "ld = d + 4,", "ld = d + 12,", (), "random", catcher, "wrong|race|lost"
        )
        assert not same.caught


def test_numbers_of_narrow_bars_do_not_cover_each_other():
    counts = {"both": [80, 39], "X-ray alone": [3, 1], "X-ray's stricter rule": [0, 1], "neither": [0, 3]}
    figure = draw_proof.who_flags(pd.DataFrame(counts, index=["long", "narrow"]), "title")
    figure.draw_without_rendering()
    texts = [t for t in figure.axes[0].texts if t.get_text()]
    rows = {}
    for box, number in sorted(
        ((t.get_bbox_patch().get_window_extent().extents.tolist(), t.get_window_extent()) for t in texts),
        key=lambda pair: pair[0],
    ):
        rows.setdefault(round(number.y0), []).append((box[0], number.x0, number.x1, box[2]))
    assert sorted(map(len, rows.values())) == [2, 4]
    for a, b in (pair for row in rows.values() for pair in itertools.pairwise(row)):
        assert a[2] < b[0] and a[3] < b[1]  # no box reaches the next number, nor the next box this one
