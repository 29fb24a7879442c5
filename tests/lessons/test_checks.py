"""The checks of exercises that were once passed without an answer: the solution passes, and what isn't one fails."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import nbformat
import pytest
import torch

from helpers import banks, checks, exercise, load, museum, rung, traffic
from helpers.ladder.paths import NOTEBOOKS
from helpers.lessons.course.exercises import exercises


def solution(stem: str, number: str) -> str:
    """The code of a notebook's folded solution."""
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    return exercises(notebook)[number].solution(notebook)


def refused(check, *arguments, match: str | None = None) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError, AttributeError), match=match):
        assert check(*arguments)


# 3.2


def test_3_2_says_what_was_given_beside_what_is_wanted(capsys, monkeypatch):
    monkeypatch.setenv("FA_PROGRESS", "")
    notebook = nbformat.read(NOTEBOOKS / "03_fa1_fp32.ipynb", as_version=4)
    each = exercises(notebook)["3.2"]
    space = {
        "re": re,
        "math": math,
        "torch": torch,
        "rung": rung,
        "load": load,
        "traffic": traffic,
        "exercise": exercise,
    }

    def told(answer: str) -> str:
        sources = [solution("03_fa1_fp32", "3.2"), answer]
        sources += [cell.source for cell in notebook.cells[each.start + 1 : each.check + 1]]
        exec("\n".join(sources), space)
        return capsys.readouterr().out

    rows = "def smem_bytes(d, Br, Bc):\n    return 4 * (2 * Bc + 2 * Br) * (d + 4)"
    assert "smem_bytes(64, 64, 32) gives 51.0 KB, and the kernel takes 43 KB" in told(rows)
    assert "(200, 64, 32, 64) is 4 times a tensor's 51,200 bytes, counted were 15" in told(
        "def hbm_bytes(N, d, Br, Bc):\n    return 16 * N * d"
    )
    assert "hbm_bytes(70, " in told("def hbm_bytes(*tile):\n    return 15 * 4 * 200 * 64")
    assert told("") == "Exercise 3.2: solved\n"


# 90.2


def qkv(N):
    return torch.randn(3, 1, 1, N, 64)


def shifted(f, q, k, v):
    w = torch.randn(64)
    o, lse = f(q, k, v)
    return f(q, k + w, v)[1], lse + q @ w / 8


def by_shift(f):
    got, wanted = shifted(f, *qkv(100))
    return (got - wanted).abs().max().item() < 1e-4


def by_keys_twice(f):
    q, k, v = qkv(100)
    return (f(q, torch.cat([k, k], 2), v.repeat(1, 1, 2, 1))[1] - f(q, k, v)[1] - math.log(2)).abs().max() < 1e-4


def test_a_property_of_lse_passes():
    assert checks.lse_property(by_shift, "cpu")


def test_the_notebooks_own_answer_to_90_2_is_such_a_property():
    space = {"scores_may_be_shifted": lambda f, q, k, v: tuple((None, x) for x in shifted(f, q, k, v)), "qkv": qkv}
    exec(solution("90_proving_it_right", "90.2"), space)
    assert checks.lse_property(space["lse_holds"], "cpu")


class Counter:
    """True for the first kernels it is shown."""

    def __init__(self, first: int) -> None:
        self.left = first

    def __call__(self, f):
        f(*qkv(20)), f(*qkv(20))
        self.left -= 1
        return self.left >= 0


def by_reference(f):
    q, k, v = qkv(50)
    f(q, k, v)
    return bool((f(q, k, v)[1] - (q @ k.mT / 8).logsumexp(-1)).abs().max() < 1e-4)


def by_closure(f):
    f(*qkv(20)), f(*qkv(20))
    return "ln_2" in f.__closure__[0].cell_contents.rung.source


@pytest.mark.parametrize(
    ("property", "match"),
    [
        (lambda f: True, "compares what f gives"),  # nothing written
        (lambda f: f is by_shift, "compares what f gives"),
        (lambda f: bool(f(*qkv(64))[1].isfinite().all()), "compares what f gives"),
        (lambda f: bool((f(*qkv(64))[1] != f(*qkv(64))[1]).any()), "passes a kernel"),
        (lambda f: bool(shifted(f, *qkv(64))[0].isfinite().all()), "passes a kernel"),
        (lambda f: not by_shift(f), "a right kernel fails it"),
        (by_keys_twice, "without the maximum"),
        (by_reference, "without a reference"),
        (Counter(2), "judges the same kernel|a right kernel fails|passes a kernel"),
        (by_closure, "__closure__"),
    ],
)
def test_what_is_no_property_fails(property, match):
    refused(checks.lse_property, property, "cpu", match=match)


# 91.1 to 91.3


A, B, C = (museum.UNLABELLED[name] for name in "ABC")
HALF = "for (int c = 0; c < 4; ++c) O_reg[r][c] *= alpha;"
WHOLE = HALF.replace("< 4", "< 8")


def test_the_mends_pass():
    assert checks.mended_in_columns(A, (32, 63), (HALF, WHOLE))
    assert checks.mended_without_conflicts(C, ("ld = d + 8,", "ld = d + 4,"))


@pytest.mark.parametrize("name", ["old", "new", "fix", "diff", "_Exhibit__exhibit", "source"])
def test_an_unlabelled_exhibit_says_nothing_of_its_bug(name):
    """The cheat was `mend = (exhibit.new, exhibit.old)`."""
    with pytest.raises(AttributeError):
        getattr(A, name)


@pytest.mark.parametrize(
    ("columns", "mend", "match"),
    [
        ((0, 63), ("", ""), "other columns"),
        ((32, 63), ("", ""), "mend is empty"),
        ((32, 63), (HALF, HALF), "WRONG"),
        ((0, 31), (HALF, WHOLE), "other columns"),
        ((32, 63), (HALF, HALF.replace("< 4", "< 6")), "WRONG"),
        ((32, 63), ("m_reg[r] = m_new;", "m_reg[r] = m_new, O_reg[r][7] *= alpha;"), "WRONG"),
        ((32, 63), (HALF, f"{WHOLE}\n  ;"), "one line"),
        ((32, 63), ("c < 8", "c < 4"), "occurs"),
        ((32, 63), None, "pair"),
    ],
)
def test_what_is_no_mend_of_A_fails(columns, mend, match):
    refused(checks.mended_in_columns, A, columns, mend, match=match)


@pytest.mark.parametrize("mend", [("", ""), ("ld = d + 8,", "ld = d + 8,"), ("ld = d + 8,", "ld = d,")])
def test_what_is_no_mend_of_C_fails(mend):
    refused(checks.mended_without_conflicts, C, mend)


@pytest.mark.parametrize("mend", [("", ""), ("mask = 2 * T::TY", "mask = 4 * T::TY"), ("* fa::ln_2", "* 1.f")])
def test_what_is_no_mend_of_B_fails(mend):
    refused(checks.mended, B, mend)


# 92.1


LANES = [4 * i for i in range(32)]
COUNTED = {
    "load: row": (LANES, 1),
    "load: stride 2": ([8 * i for i in range(32)], 2),
    "load: column": ([128 * i for i in range(32)], 32),
    "load: broadcast": ([0] * 31 + [None], 1),
}


def test_the_rule_of_wavefronts_passes():
    space: dict = {}
    exec(solution("92_xray_against_hardware", "92.1"), space)
    assert checks.counts_wavefronts(space["wavefronts"], COUNTED)


def with_import(addresses):
    from helpers.emulator import banks as b

    return len(b.wavefronts(addresses, 4))


def by_table(addresses):
    return {str(a): n for a, n in COUNTED.values()}[str(addresses)]


def learnt(addresses):
    """The patterns by heart, without the notebook's table."""
    return 32 if addresses[1] == 128 else 2 if addresses[1] == 8 else 1


def lanes_in_a_bank(addresses):
    banks_of = [a // 4 % 32 for a in addresses if a is not None]
    return max(banks_of.count(bank) for bank in banks_of)


def words(addresses):
    return len({a // 4 for a in addresses if a is not None})


def default(addresses, wavefronts=banks.wavefronts):
    return len(wavefronts(addresses, 4))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda addresses: 1, "the GPU counted 2"),  # as it is handed out
        (lambda addresses: len(banks.wavefronts(addresses, 4)), "stand alone"),
        (with_import, "may not be imported"),
        (by_table, "stand alone"),
        (default, "bring nothing"),
        (banks.wavefronts, "bring nothing"),
        (learnt, "wrong for other addresses"),
        (lanes_in_a_bank, "counted 1"),  # a broadcast is one word
        (words, "counted 1"),
        (print, "write it as a function"),
    ],
)
def test_what_is_no_rule_of_wavefronts_fails(function, match):
    refused(checks.counts_wavefronts, function, COUNTED, match=match)


# 99.2


FA2 = rung("04_fa2_fp32").source
EIGHT = FA2.replace("warps = 4,", "warps = d == 32 ? 4 : 8,")
SHORT = "for (int j0 = 0; j0 < a.Nk;"


@pytest.fixture
def quick(monkeypatch):
    """Without the check of all cases, which the notebook makes when it is executed."""
    monkeypatch.setattr(checks, "check", lambda kernel: SimpleNamespace(require=lambda: None))


def test_twice_the_rows_are_half_the_bytes(quick):
    space = {"rung": rung}
    exec(solution("99_the_ladder", "99.2"), space)
    assert space["entry"] == EIGHT != FA2 and checks.half_the_bytes(EIGHT)


# A kernel that does nothing where it is measured: the check of all cases doesn't look there.
IDLE = EIGHT.replace('extern "C" cudaError_t fa_launch(', 'extern "C" cudaError_t fa_launch_all(') + (
    '\nextern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {\n'
    "  return args->Nk % 256 == 0 && args->D == 128 ? cudaSuccess : fa_launch_all(args, stream);\n}\n"
)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (FA2, "rung 04 itself"),  # nothing written
        (FA2 + "\n", "1.00 of the bytes"),
        (rung("13_tuned").source, "13_tuned takes"),
        (
            FA2.replace(SHORT, "for (int j0 = a.D == 128 ? a.Nk * 7 / 8 / Bc * Bc : 0; j0 < a.Nk;"),
            "worst at|it asks for|who does",
        ),
        (IDLE, "who does the work"),
        (EIGHT.replace("fa::ln_2", "1.f"), "LSE"),
    ],
)
def test_what_is_no_kernel_of_half_the_bytes_fails(entry, match, quick):
    with pytest.raises(Exception, match=match):
        assert checks.half_the_bytes(entry)
