"""Exercises that check themselves.

In a notebook an exercise is a text cell with the task, a hint and a folded solution, a cell for the reader to change that
opens with `# Exercise 2.1`, and a cell that ends in `exercise.verify("2.1", ...)`. The solution, put in place of the
reader's cell, has to make that line say "solved"; a test runs every one.
"""

from __future__ import annotations

from collections.abc import Callable


def verify(number: str, passed: bool | Callable[[], bool], hint: str = "") -> None:
    """Prints "Exercise 2.1: solved", or "not solved yet" with the reason, if there is one, and the hint.

    passed: the verdict, or a function that returns it. What the function raises (an AssertionError with a message, a
    kernel that doesn't compile) is the reason, of which the first lines are printed; nothing is raised here. Python's own
    errors are named: of a KeyError the text alone would be a bare 'LSE'.
    """
    reasons: list[str] = []
    if callable(passed):
        try:
            passed = passed()
        except Exception as error:
            own = isinstance(error, AssertionError | RuntimeError) and str(error).strip()
            passed, reasons = False, (own or f"{type(error).__name__}: {error}").splitlines()[:3]
    if passed:
        print(f"Exercise {number}: solved")
        return
    print(f"Exercise {number}: not solved yet")
    for line in [*reasons, *([f"hint: {hint}"] if hint else [])]:
        print(f"  {line.strip()}")
