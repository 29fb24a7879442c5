"""Predictions: the reader writes one down before a cell shows the answer, and it stays in the notebook.

In a notebook `guess = ...` stands in a cell of its own above the measurement, and a cell below it ends in
`predict(guess, measured, "wavefronts per request")`.
"""

from __future__ import annotations

from types import EllipsisType


def predict(guess: float | str | EllipsisType, answer: float | str, of: str, within: float = 0.1) -> None:
    """Prints the reader's prediction beside what came out.

    guess: what the reader wrote; `...` where nothing was entered, which is no error. of: what is predicted, with its unit
    ("wavefronts per request"). within: how far from the answer a number may be and count as right, as a share of the answer.
    TypeError if a number was asked for and something else was written, or the other way round.
    """
    shown = answer if isinstance(answer, str) else _number(answer)
    if guess is ...:
        print(f"{shown} {of}. You entered no prediction.")
        return
    if isinstance(guess, str) != isinstance(answer, str):
        raise TypeError(
            f"the prediction is {guess!r}; asked for is {'a word' if isinstance(answer, str) else 'a number'}"
        )
    if isinstance(answer, str):
        verdict = "as you predicted" if guess.strip().lower() == answer.lower() else f"you predicted {guess}"
    elif abs(guess - answer) <= within * abs(answer):
        verdict = f"as you predicted ({_number(guess)})"
    elif guess > 0 and answer > 0:
        times = max(guess / answer, answer / guess)
        off = "too much" if guess > answer else "too little"
        verdict = f"you predicted {_number(guess)}, {_number(times, 3)} times {off}"
    else:
        verdict = f"you predicted {_number(guess)}"
    print(f"{shown} {of}: {verdict}.")


def _number(x: float, digits: int = 4) -> str:
    """From 1000 on to the unit, as counts are written: 135,168. Below in so many digits."""
    return f"{x:,.0f}" if 999.5 <= abs(x) < 1e15 else f"{x:.{digits}g}"
