"""The model of warpgroups that share an SM: counts that can be worked out by hand."""

import pytest

from helpers import overlap


def busy(groups, product, softmax, how, turns, tiles=64):
    work = overlap.jobs(groups, tiles, product, softmax, how)
    schedule = overlap.run(work, turns)
    assert len(schedule) == 3 * groups * tiles
    assert (schedule["end"] - schedule["begin"] >= [job.work - 1e-6 for job in work]).all()
    return overlap.multiplying(schedule, work)


def test_one_warpgroup_alone_does_one_thing_after_the_other():
    work = overlap.jobs(1, 2, 10, 6)
    schedule = overlap.run(work, turns=True)
    assert schedule["kind"].tolist() == ["scores", "softmax", "output", "scores", "softmax", "output"][:2] + [
        "output", "scores", "softmax", "output"]  # fmt: skip
    assert schedule["end"].max() == 52 and overlap.multiplying(schedule, work) == pytest.approx(40 / 52)


def test_warpgroups_that_start_together_stay_together():
    schedule = overlap.run(overlap.jobs(2, 3, 10, 6), turns=False)
    one, other = (schedule[schedule["group"] == g][["begin", "end"]].values for g in (0, 1))
    assert (one == other).all() and schedule["end"].max() == 2 * 3 * 26


@pytest.mark.parametrize("groups, product, softmax, how, turns, share", [
    (2, 512, 512, "none", False, 2 / 3),  # products and exponentials, one behind the other
    (2, 512, 512, "none", True, 1),  # one warpgroup's exponentials under the other's products
    (1, 512, 512, "next", True, 1),  # or under one's own
    (1, 512, 512, "none", True, 2 / 3),
    (3, 256, 512, "next", True, 1),
    (3, 256, 768, "next", True, 2 / 3),  # exponentials alone take longer: nobody can hide those
    (3, 256, 768, "none", True, 2 / 3),
])  # fmt: skip
def test_what_can_be_hidden(groups, product, softmax, how, turns, share):
    assert busy(groups, product, softmax, how, turns, 200) == pytest.approx(share, rel=0.015)


def test_a_softmax_that_waits_for_both_products_hides_nothing_of_its_own():
    assert busy(1, 512, 512, "early", True) == pytest.approx(2 / 3, rel=0.01)
    work = overlap.jobs(1, 3, 512, 512, "next")
    schedule = overlap.run(work, turns=True)
    second = schedule[(schedule["kind"] == "softmax")].iloc[1]
    output = schedule[(schedule["kind"] == "output")].iloc[0]
    assert second["begin"] == output["begin"]  # under it


def test_products_of_a_warpgroup_keep_their_order():
    schedule = overlap.run(overlap.jobs(2, 6, 512, 300, "next"), turns=True)
    for _, lane in schedule[schedule["kind"] != "softmax"].groupby("lane"):
        ordered = lane.sort_values("begin")
        assert ordered["kind"].tolist() == ["scores"] + ["scores", "output"] * 5 + ["output"]
        assert (ordered["end"].values[:-1] <= ordered["begin"].values[1:] + 1e-6).all()


def test_an_unknown_overlap_is_refused():
    with pytest.raises(ValueError, match="none, next or early, not 'all'"):
        overlap.jobs(1, 1, 1, 1, "all")
