"""The model of a grid on a GPU, held against cases worked out by hand."""

import pytest

from helpers import schedule


def test_blocks_take_the_place_that_is_free_first():
    run = schedule.run([3, 1, 1, 5], places=2)
    assert run.values.tolist() == [[0, 0, 3], [1, 0, 1], [1, 1, 2], [1, 2, 7]]


def test_what_is_long_and_late_runs_alone():
    assert schedule.makespan([5, 3, 1, 1], 2) == 5 and schedule.makespan([1, 1, 3, 5], 2) == 6
    assert schedule.busy(schedule.run([1, 1, 3, 5], 2)).to_dict() == {0: 2, 1: 2, 4: 1, 6: 0}


@pytest.mark.parametrize("enough, time", [(1, 12), (2, 12), (4, 24)])
def test_places_share_the_bandwidth(enough, time):
    """Two CTAs at a time, six units each way: twelve units in all, at the whole bandwidth or half of it."""
    assert schedule.shared([3, 3, 3, 3, 0], places=2, enough=enough) == time


def test_a_lonely_one_draws_no_more_than_its_part():
    """Both until 1 is done: 2 units of data in 2 units of time. Then the other alone: 3 units at half the bandwidth."""
    assert schedule.shared([4, 1], places=2, enough=2) == 2 + 6
    assert schedule.shared([4, 1], places=2, enough=1) == 5
