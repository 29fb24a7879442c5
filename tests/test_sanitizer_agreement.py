"""What compute-sanitizer flagged on a GPU, the X-ray flags: the record against the X-ray as it is now.

The whole record takes minutes: every twelfth mutant is run, and all with FA_ALL_MUTANTS=1.
"""

import os

import pytest

from helpers import sanitize

RECORD = sanitize.agreement()
MUTANTS = {mutant.id: mutant for mutant in sanitize.chosen([]) if mutant.id in set(RECORD["mutant"])}
WRONG = [id for id in MUTANTS if not id.endswith(".original")]
SOME = WRONG if os.environ.get("FA_ALL_MUTANTS") else WRONG[::12]


def test_the_record_is_of_the_rungs_as_they_are():
    assert len(WRONG) >= 100, "rungs have changed: run `python -m helpers.sanitize` on a GPU, then with --xray"


def test_every_mutant_that_a_tool_flags_is_flagged():
    missed = RECORD[RECORD["who"] == "GPU alone"]
    assert missed["why"].all(), missed[missed["why"] == ""]
    flagged = RECORD[RECORD["gpu"] != ""]
    assert len(flagged) >= 100 and set(" ".join(flagged["gpu"]).split()) == set(sanitize.TOOLS)


def test_no_rung_is_flagged():
    """By the X-ray; and by a tool only where somebody has said why it is mistaken."""
    rungs = RECORD[RECORD["mutant"].str.endswith(".original")]
    assert len(rungs) and (rungs["xray"] == sanitize.CLEAN).all()
    assert set(rungs.loc[rungs["gpu"] != "", "mutant"]) <= {"33.original"}


def test_what_one_of_the_two_alone_flags_is_explained():
    alone = RECORD[RECORD["who"].str.contains("alone")]
    assert alone["why"].all(), alone[alone["why"] == ""][["mutant", "gpu", "xray"]]


@pytest.mark.parametrize("id", SOME)
def test_the_xray_still_says_so(id):
    said = RECORD.set_index("mutant").loc[id, "xray"]
    assert sanitize.xrayed(MUTANTS[id]).split(",")[0] == said.split(",")[0]
