"""An exercise's verdict: solved, or not solved with the reason; never an exception."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import exercise
from helpers.lessons.progress import keep, solved


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_PROGRESS", str(tmp_path / "progress.json"))


def test_the_verdict_is_given_back_and_shows_nothing_more(capsys):
    assert exercise.verify("2.1", True) and not exercise.verify("2.1", False)
    assert exercise.verify("2.1", True)._ipython_display_() is None


def test_what_is_solved_is_noted(capsys):
    exercise.verify("2.1", True), exercise.verify("2.2", False)
    assert list(solved()) == ["exercise 2.1"]


def test_the_date_is_that_of_the_first_time(tmp_path):
    (tmp_path / "progress.json").write_text('{"task 04.1": "2026-01-31"}')
    keep("task 04.1")
    assert solved() == {"task 04.1": "2026-01-31"}


def test_of_two_that_are_solved_at_the_same_time_both_are_noted(monkeypatch):
    def slowly() -> dict[str, str]:
        found = solved()
        time.sleep(0.2)
        return found

    monkeypatch.setattr("helpers.lessons.progress.solved", slowly)
    names = ["exercise 2.1", "task 04.1"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(keep, names))
    assert sorted(solved()) == names


def verdict(capsys, passed):
    exercise.verify("2.1", passed)
    return capsys.readouterr().out


@pytest.mark.parametrize("passed", [True, lambda: True, 1])
def test_solved(capsys, passed):
    assert verdict(capsys, passed) == "Exercise 2.1: solved\n"


@pytest.mark.parametrize("passed", [False, lambda: False, lambda: None, ..., lambda: ...])
def test_not_solved(capsys, passed):
    assert verdict(capsys, passed) == "Exercise 2.1: not solved yet\n"


def test_what_a_check_raises_is_the_reason(capsys):
    def check():
        raise AssertionError("worst at O[0, 0, 3, 1]")

    assert verdict(capsys, check) == "Exercise 2.1: not solved yet\n  worst at O[0, 0, 3, 1]\n"


def test_an_error_of_python_s_is_named(capsys):
    assert verdict(capsys, lambda: {}["LSE"]) == "Exercise 2.1: not solved yet\n  KeyError: 'LSE'\n"


def test_an_answer_left_out_is_not_solved(capsys):
    assert "not solved yet" in verdict(capsys, lambda: abs(... - 4) < 1)
