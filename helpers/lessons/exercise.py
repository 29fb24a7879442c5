"""Exercises that check themselves.

In a notebook an exercise is a text cell with the task, a folded hint and a folded solution, a cell for the reader to change that
opens with `# Exercise 2.1`, and a cell that ends in `exercise.verify("2.1", ...)`. The solution, put in place of the
reader's cell, has to make that line say "solved"; a test runs every one. What is solved is noted: see `progress`.
"""

from __future__ import annotations

from collections.abc import Callable

from .progress import keep


class Verdict:
    """True if an exercise is solved; as the last value of a cell it shows nothing more than what has been printed."""

    def __init__(self, solved: bool) -> None:
        self._solved = solved

    def __bool__(self) -> bool:
        return self._solved

    def __repr__(self) -> str:
        return "solved" if self._solved else "not solved yet"

    def _ipython_display_(self) -> None:
        """Nothing."""


def verify(number: str, passed: bool | Callable[[], bool]) -> Verdict:
    """Prints "Exercise 2.1: solved", or "not solved yet" with the reason, if there is one; gives the verdict.

    passed: the verdict, or a function that returns it; `...` is no answer. What the function raises (an AssertionError with a
    message, a kernel that doesn't compile) is the reason, of which the first lines are printed; nothing is raised here. Python's own
    errors are named: of a KeyError the text alone would be a bare 'LSE'.
    """
    reasons: list[str] = []
    if callable(passed):
        try:
            passed = passed()
        except Exception as error:
            own = isinstance(error, AssertionError | RuntimeError) and str(error).strip()
            passed, reasons = False, (own or f"{type(error).__name__}: {error}").splitlines()[:3]
    if passed is not ... and passed:
        print(f"Exercise {number}: solved")
        keep(f"exercise {number}")
        return Verdict(True)
    print(f"Exercise {number}: not solved yet")
    for line in reasons:
        print(f"  {line.strip()}")
    return Verdict(False)
