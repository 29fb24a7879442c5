"""A prediction is shown beside the answer; an empty one is no error, one of the wrong kind is."""

import numpy as np
import pytest

from helpers import predict


@pytest.mark.parametrize(
    ("guess", "answer", "said"),
    [
        (..., 4, "4 wavefronts. You entered no prediction."),
        (4, 4, "4 wavefronts: as you predicted (4)."),
        (4.3, 4, "4 wavefronts: as you predicted (4.3)."),
        (4.43, 4, "4 wavefronts: you predicted 4.43, 1.11 times too much."),  # within 10% of itself, not of the answer
        (1, 4, "4 wavefronts: you predicted 1, 4 times too little."),
        (8, 4, "4 wavefronts: you predicted 8, 2 times too much."),
        (0, 4, "4 wavefronts: you predicted 0."),
        (0, 0, "0 wavefronts: as you predicted (0)."),
        (3, 0, "0 wavefronts: you predicted 3."),
        (..., "slower", "slower wavefronts. You entered no prediction."),
        ("Slower ", "slower", "slower wavefronts: as you predicted."),
        ("faster", "slower", "slower wavefronts: you predicted faster."),
    ],
)
def test_what_is_said(guess, answer, said, capsys):
    predict(guess, answer, "wavefronts")
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize(("guess", "answer", "asked"), [("4", 4, "a number"), (4, "slower", "a word")])
def test_a_prediction_of_the_wrong_kind_is_refused(guess, answer, asked):
    with pytest.raises(TypeError, match=f"asked for is {asked}"):
        predict(guess, answer, "wavefronts")


@pytest.mark.parametrize(
    ("guess", "answer", "said"),
    [
        (..., np.int64(135168), "135,168 wavefronts. You entered no prediction."),
        (135168, 135168.0, "135,168 wavefronts: as you predicted (135,168)."),
        (100_000, 135168, "135,168 wavefronts: you predicted 100,000, 1.35 times too little."),
        (100, 135168, "135,168 wavefronts: you predicted 100, 1,352 times too little."),
        (-2000, 135168, "135,168 wavefronts: you predicted -2,000."),
        (0.12345, 0.25, "0.25 wavefronts: you predicted 0.1235, 2.03 times too little."),
        (1e30, 1, "1 wavefronts: you predicted 1e+30, 1e+30 times too much."),
    ],
)
def test_a_large_count_is_written_out(guess, answer, said, capsys):
    predict(guess, answer, "wavefronts")
    assert capsys.readouterr().out == said + "\n"
