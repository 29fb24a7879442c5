"""The forward pass in other languages: each that runs on this machine, against float64 by the rule that kernels are held to."""

import re

import pytest

from helpers import check, reference
from helpers.lessons import languages

EVERY = languages.implementations()
SLOW = ("flex_attention", "numba_kernel", "pallas_tiles", "torch_compile", "triton_tiles")  # a few cases, unless --all
FEW = ("random, D=64", "N=1", "causal, Nq=1, Nk=70", "causal, Nq=70, Nk=1", "scale 0", "scale -0.3")


@pytest.mark.parametrize("stem", EVERY)
def test_is_right(stem, request):
    found = EVERY[stem]
    if found.missing:
        pytest.skip(found.missing)
    cases = list(reference.cases(found, found.device))
    if found.device == "cpu" and stem == "triton_tiles":  # its interpreter has no products of bf16
        cases = [case for case in cases if "bf16" not in case.name]
    if stem in SLOW and not request.config.option.all:
        cases = [case for case in cases if re.sub(", (fp32|fp16)$", "", case.name) in FEW]
        assert len(cases) >= 5
    check(found, cases).require()


def test_one_that_is_wrong_is_seen():
    found = EVERY["numpy_tiles"]

    def without_the_last_key(q, k, v, scale=None, causal=False):
        return found(q, k[:, :, :-1], v[:, :, :-1], scale, causal) if k.shape[2] > 1 else found(q, k, v, scale, causal)

    without_the_last_key.rung = found
    assert not check(without_the_last_key).ok


def test_the_tile_does_not_change_the_answer(monkeypatch):
    found, case = EVERY["numpy_tiles"], next(reference.cases(EVERY["numpy_tiles"]))
    at_64, _ = found(case.q, case.k, case.v)
    monkeypatch.setitem(found.forward.__globals__, "Bc", 16)
    at_16, _ = found(case.q, case.k, case.v)
    assert not at_64.equal(at_16) and (at_64 - at_16).abs().max() < 1e-5


def test_the_reference_for_reading_is_short():
    assert EVERY["numpy_tiles"].lines < 40


def test_one_that_is_not_there_is_refused_by_name():
    with pytest.raises(LookupError, match="no implementation 'fortran'.*numpy_tiles"):
        languages.implementation("fortran")


def test_what_an_implementation_does_not_say_is_named(tmp_path):
    (tmp_path / "mine.py").write_text('"""Mine\n\nneeds: numpy\n"""\n')
    with pytest.raises(ValueError, match="does not say dtypes, runs"):
        languages._read(tmp_path / "mine.py")
