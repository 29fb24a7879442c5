"""Numbers in prose that name where they come from."""

import pytest

from helpers import record
from helpers.lessons.numbers import draft, ratio, renewed, tflops


def test_a_number_is_written_anew_and_nothing_else():
    text = 'It is **9.99<!--= ratio("13", "FLASH", 64):.2f --> times** as fast (<!--= 2 + 1 -->), 4.5 of it.'
    assert renewed(text) == (
        f'It is **{ratio("13", "FLASH", 64):.2f}<!--= ratio("13", "FLASH", 64):.2f --> times** as fast (3<!--= 2 + 1 -->), 4.5 of it.'
    )
    assert renewed(renewed(text)) == renewed(text)


def test_an_expression_that_fails_is_named():
    with pytest.raises(ValueError, match=r'ratio\("13", "FLASH", 65\)|NaN'):
        renewed('1<!--= ratio("13", "FLASH", 65)["x"] -->')


def test_a_ratio_and_a_speed_are_the_records():
    samples = record.load("13_tuned", device=record.DEFAULT_DEVICE).query("D == 64 and dtype == 'fp16'")
    medians = record.medians(record.headline(samples)).query("Nk == 4096").set_index("name")
    assert (
        tflops("13", 64) == medians["tflops"]["13_tuned"]
        and tflops("13", 64, of="FLASH") == medians["tflops"][record.FLASH]
    )
    assert ratio("13", "FLASH", 64, 4096) == pytest.approx(
        medians["ms"][record.FLASH] / medians["ms"]["13_tuned"], rel=0.02
    )


def test_a_draft_is_the_record_s():
    steps = record.load("22_backward_fp32", "steps", record.DEFAULT_DEVICE).set_index(["step", "D"])
    assert draft("22", 6, 128) == steps.ratio[6, 128] != draft("22", 6, 64)
    assert draft("22", 6, 64, "ratio_causal") == steps.ratio_causal[6, 64]
    with pytest.raises(ValueError):
        draft("22", 99, 64)
