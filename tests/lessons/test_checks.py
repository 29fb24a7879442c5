"""The checks of exercises that were once passed without an answer: the solution passes, and what isn't one fails."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

from helpers import (
    KernelError,
    banks,
    checks,
    exercise,
    fewest_pieces,
    fragments,
    gpt,
    languages,
    load,
    museum,
    reference,
    rung,
    traffic,
    train,
)
from helpers.ladder.paths import NOTEBOOKS
from helpers.lessons.course.exercises import exercises
from helpers.run.report import Comparison


def solution(stem: str, number: str) -> str:
    """The code of a notebook's folded solution."""
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    return exercises(notebook)[number].solution(notebook)


@pytest.fixture
def told(capsys, monkeypatch):
    """What an exercise says to an answer: told(stem, number, answer, space), `space` being what its cells know of the notebook."""
    monkeypatch.setenv("FA_PROGRESS", "")

    def say(stem: str, number: str, answer: str, space: dict) -> str:
        notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
        each = exercises(notebook)[number]
        sources = [answer, *(cell.source for cell in notebook.cells[each.start + 1 : each.check + 1])]
        exec("\n".join(sources), space | {"exercise": exercise})
        return capsys.readouterr().out

    return say


def refused(check, *arguments, match: str | None = None) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError, AttributeError), match=match):
        assert check(*arguments)


# 3.2


def test_3_2_says_what_was_given_beside_what_is_wanted(told):
    space = {"re": re, "math": math, "torch": torch, "rung": rung, "load": load, "traffic": traffic}
    right = solution("03_fa1_fp32", "3.2")

    def said(answer: str) -> str:
        return told("03_fa1_fp32", "3.2", f"{right}\n{answer}", space)

    rows = "def smem_bytes(d, Br, Bc):\n    return 4 * (2 * Bc + 2 * Br) * (d + 4)"
    assert "smem_bytes(64, 64, 32) gives 51 KB, and the kernel takes 43 KB" in said(rows)
    assert "(200, 64, 32, 32) is 4 times a tensor's 51,200 bytes, counted were 24" in said(
        "def hbm_bytes(N, d, Br, Bc):\n    return 16 * N * d"
    )
    assert "hbm_bytes(70, " in said("def hbm_bytes(*tile):\n    return 24 * 4 * 200 * 64")
    more = "ours = smem_bytes\ndef smem_bytes(d, Br, Bc):\n    return ours(d, Br, Bc) + 4 * Br"  # an array more
    assert "smem_bytes(32, 64, 32) gives 27.25 KB, and the kernel takes 27 KB" in said(more)
    columns = "ours = hbm_bytes\ndef hbm_bytes(N, d, Br, Bc):\n    return ours(N, d, Br, d)"
    assert "hbm_bytes(200, 64, 32, 32) is" in said(columns)
    for Bc, where in ((32, "70, 32, 32, 64"), (64, "200, 64, 32, 32")):
        fixed = f"ours = hbm_bytes\ndef hbm_bytes(N, d, Br, Bc):\n    return ours(N, d, Br, {Bc})"
        assert f"hbm_bytes({where}) is" in said(fixed)
    for fixed, kb in (("ours(d, Br, 32)", 30), ("{32: 27, 64: 43, 128: 54}[d] * 1024", 43)):
        smem = f"ours = smem_bytes\ndef smem_bytes(d, Br, Bc):\n    return {fixed}"
        assert f"smem_bytes(64, 32, 64) gives {kb} KB, and the kernel takes 51 KB" in said(smem)
    assert said("") == "Exercise 3.2: solved\n"


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


def by_identity(f):
    """One call: O is P where V is the identity."""
    q, k, _ = qkv(64)
    p, lse = f(q, k, torch.eye(64)[None, None])
    return bool((p.log() + lse[..., None] - q @ k.mT / 8).abs().max() < 1e-4)


@pytest.mark.parametrize("property", [by_shift, by_identity])
def test_a_property_of_lse_passes(property):
    assert checks.lse_property(property, "cpu")


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
        (lambda f: True, "f was not called"),  # nothing written
        (lambda f: f is by_shift, "f was not called"),
        (lambda f: bool(f(*qkv(64))[1].isfinite().all()), "passes a kernel"),
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


def test_the_fixes_pass():
    assert checks.fixed_in_columns(A, (32, 63), (HALF, WHOLE))
    assert checks.fixed_without_conflicts(C, ("ld = d + 8,", "ld = d + 4,"))


@pytest.mark.parametrize("name", ["old", "new", "fix", "diff", "_Exhibit__exhibit", "source"])
def test_an_unlabelled_exhibit_says_nothing_of_its_bug(name):
    """The cheat was `fix = (exhibit.new, exhibit.old)`."""
    with pytest.raises(AttributeError):
        getattr(A, name)


@pytest.mark.parametrize(
    ("columns", "fix", "match"),
    [
        ((0, 63), ("", ""), "other columns"),
        ((32, 63), ("", ""), "fix is empty"),
        ((32, 63), (HALF, HALF), "WRONG"),
        ((0, 31), (HALF, WHOLE), "other columns"),
        ((32, 63), (HALF, HALF.replace("< 4", "< 6")), "WRONG"),
        ((32, 63), ("m_reg[r] = m_new;", "m_reg[r] = m_new, O_reg[r][7] *= alpha;"), "WRONG"),
        ((32, 63), (HALF, f"{WHOLE}\n  ;"), "one line"),
        ((32, 63), ("c < 8", "c < 4"), "occurs"),
        ((32, 63), None, "pair"),
    ],
)
def test_what_is_no_fix_of_A_fails(columns, fix, match):
    refused(checks.fixed_in_columns, A, columns, fix, match=match)


@pytest.mark.parametrize("fix", [("", ""), ("ld = d + 8,", "ld = d + 8,"), ("ld = d + 8,", "ld = d,")])
def test_what_is_no_fix_of_C_fails(fix):
    refused(checks.fixed_without_conflicts, C, fix)


@pytest.mark.parametrize("fix", [("", ""), ("mask = 2 * T::TY", "mask = 4 * T::TY"), ("* fa::ln_2", "* 1.f")])
def test_what_is_no_fix_of_B_fails(fix):
    refused(checks.fixed, B, fix)


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
        (rung("04_fa2_fp32"), "rung 04 itself"),  # a rung is taken for its source
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


# 51.1


SWAPPED = "fa::await_sys(a.signals[tile.rank] + a.rank, a.epoch);"  # this rank's own flag, in the other's memory
WRONG_FLAGS = [
    ("A", SWAPPED),
    ("A", "fa::await_sys(a.signals[a.rank] + tile.rank, a.epoch - 1);"),  # of the call before
    ("C", "if (!there) fa::await_gpu(arrived, a.epoch - 1);"),
]


@pytest.fixture
def told_51(told):
    """The same of 51.1, with an X-ray that finds nothing: where one rank attends after the other, all flags have been set."""
    seen = SimpleNamespace(xrayed=lambda *_, **__: SimpleNamespace(findings=[]))
    space = {"broken": checks.without_waits(), "checks": checks, "one_sided": seen, "queries": [], "rooms": []}
    return lambda answer: told("51_one_sided", "51.1", answer, space | {"load": lambda **_: None})


def test_the_answer_to_51_1_waits_for_the_flags_of_its_call(told_51):
    assert told_51(solution("51_one_sided", "51.1")) == "Exercise 51.1: solved\n"


@pytest.mark.parametrize(("place", "statement"), WRONG_FLAGS)
def test_a_wait_for_the_wrong_flag_is_none(place, statement, told_51):
    fixes = checks.WAITS | {f"/* {place} */": statement}
    assert f"{place}: it goes on although" in told_51(f"fixes = {fixes}")


# What cells check by themselves, with stand-ins for kernels: what is meant is understood in any form, what is wrong gets a reason.


def shows(verdict: str, **_) -> SimpleNamespace:
    """A kernel that is as its source says."""
    outputs = {"stop": 0}.get(verdict, 3)
    found = [1] if verdict == "reported" else []
    return SimpleNamespace(comparisons=[SimpleNamespace(ok=verdict != "wrong")] * outputs, findings=found)


def stopped_from_289(q, k, v):
    if k.shape[2] > 288:
        raise KernelError("in flight")


class Said(str):
    """A report by its words."""

    @property
    def ok(self) -> bool:
        return self == "right"


found = SimpleNamespace(kind="race", line=3, other_line=4)
LETTERS = dict(zip("abc", "abc"))
NUMBERED = {"kernel 1": "scale", "kernel 2": "rescale", "kernel 3": "tail"}
ONES = np.ones((300, 64))
SHAPES = {"torch": torch, "device": "cpu", "reference": reference, "kernel": "right"}


def used_values(q, K, V, lengths, pages=None):
    """In place of a kernel: the values in use, in order."""
    V = V if pages is None else V[pages.long()].transpose(1, 2).flatten(2, 3)
    return torch.cat([of[:, :n] for of, n in zip(V, lengths)], 1), None


PAGES = """def allocate(lengths, page, free):
    counts = [-(-n // PAGE) for n in lengths]
    table, free = torch.zeros(len(lengths), MOST, dtype=torch.int32), iter(free)
    for row, count in zip(table, counts):
        row[:count] = torch.tensor([next(free) for _ in range(count)])
    return table"""
CELLS = {
    "0.2": (
        "00_start_here",
        {
            "load": lambda source, **_: source,
            "check": lambda said: SimpleNamespace(failures=[Comparison("one key", "o", 0, 0, 0, problem=said)]),
        },
    ),
    "1.1": ("01_naive", SHAPES | {"traffic": lambda *_: pd.DataFrame({"bytes_read": 8, "bytes_written": 0}, ["Q"])}),
    "2.1": (
        "02_online_softmax",
        {"np": np, "part": lambda q, K, V: (0.0, float(len(K)), V.sum(0)), "q": None, "K": ONES, "V": ONES},
    ),
    "2.2": ("02_online_softmax", {"np": np, "permutations": permutations}),
    "3.1": (
        "03_fa1_fp32",
        SHAPES
        | {
            "rung": lambda _: SimpleNamespace(replace=lambda *_: ""),
            "load": lambda **_: lambda q, k, v: (v if v.shape[2] == 32 else 33 / 64 * v, None),
        },
    ),
    "4.1": ("04_fa2_fp32", {"lineup": NUMBERED}),
    "4.2": ("04_fa2_fp32", {"np": np, "banks": banks}),
    "10.6": (
        "10_fa2_mma_fp16",
        {
            "torch": torch,
            "rung": rung,
            "load": lambda source, **_: source,
            "xray": lambda source, *_: SimpleNamespace(
                findings=[] if "return row * 72 +" in source else ["another stride"],
                total=lambda **_: SimpleNamespace(cost=1, ideal=1),
            ),
        },
    ),
    "10.5": (
        "10_fa2_mma_fp16",
        SHAPES
        | {
            "forgotten": "",
            "check": lambda *_: SimpleNamespace(ok=True),
        },
    ),
    "11.5": ("11_swizzled", {}),
    "13.4": (
        "13_tuned",
        SHAPES | {"stale": {15: 15, 20: 20}, "check": lambda run, _: SimpleNamespace(ok=run != 20)},
    ),
    "13.5": ("13_tuned", {}),
    "20.3": (
        "20_causal_gqa",
        SHAPES
        | {
            "late": "late",
            "check": lambda run, cases: SimpleNamespace(ok=run == "right" or cases[0].k.shape[2] % 64 != 1),
        },
    ),
    "21.4": ("21_split_kv", {"fewest_pieces": fewest_pieces, "kernel": SimpleNamespace(rung=rung("21_split_kv"))}),
    "21.5": ("21_split_kv", {"torch": torch, "device": "cpu", "kernel": used_values}),
    "11.4": ("11_swizzled", SHAPES | {"one_sided": "", "check": lambda *_: SimpleNamespace(ok=True)}),
    "22.4": ("22_backward_fp32", {"bugs": LETTERS, "broken": {"a": {"dk"}, "b": {"dq", "dk"}, "c": set()}.get}),
    "22.5": (
        "22_backward_fp32",
        {
            "hand_over": lambda _, queries: queries(3)[0],
            "waiting": lambda first: 1 if first == 3 else 0.1,
            "upwards": lambda j: range(j, 16),
        },
    ),
    "23.3": ("23_backward_mma", {}),
    "23.4": ("23_backward_mma", {"budget": lambda *_, **__: {"KB in all": 113}}),
    "24.3": ("24_in_a_model", {"gpt": gpt, "train": train, "torch": torch, "replace": replace}),
    "30.4": ("30_tma_wgmma", {"fragments": fragments}),
    "30.5": ("30_tma_wgmma", {"torch": torch, "KernelError": KernelError, "one_lap": stopped_from_289}),
    "31.4": ("31_warp_specialized", {"in_some_order": [3, 1, 2]}),
    "32.4": (
        "32_ping_pong",
        {
            "torch": torch,
            "edits": {"a": ("x", "deadlock"), "b": ("x", "right"), "c": ("x", "right")},
            "single": lambda *_: "x",
            "compile_ahead": lambda *_: None,
            "Case": lambda *_: None,
            "load": lambda source, **_: source,
            "check": lambda said, _: Said(said),
        },
    ),
    "33.3": (
        "33_backward_wgmma",
        {
            "breaks": {"a": ("x", "wrong"), "b": ("x", "stop"), "c": ("x", "reported")},
            "source": "x",
            "case": SimpleNamespace(inputs=()),
            "compile_ahead": lambda *_: None,
            "load": lambda source, **_: shows(source),
            "check": lambda run, _: run,
            "xray": lambda run: run,
        },
    ),
    "40.2": (
        "40_every_language",
        {
            "candidates": ["cute_mma", "gluon_tiles", "numba_kernel", "triton_tiles"],
            "languages": languages,
            "re": re,
        },
    ),
    "51.3": ("51_one_sided", {}),
    "90.1": (
        "90_proving_it_right",
        {
            "qkv": qkv,
            "Case": lambda _, *inputs: inputs,
            "right": "right",
            "suspect": "suspect",
            "check": lambda run, cases: SimpleNamespace(ok=run == "right" or cases[0][1].abs().max() < 100),
        },
    ),
    "90.3": (
        "90_proving_it_right",
        {
            "bugs": LETTERS,
            "table": pd.DataFrame({"by −1e4": [2, 2, 0], "one-hot": [0, 0, 2], "N = 100": [0, 2, 0]}, list("abc")),
        },
    ),
    "92.2": ("92_xray_against_hardware", {"more_requests": 384, "more_sectors": 6144}),
    "92.3": ("92_xray_against_hardware", {"findings": lambda N: [found] if N > 64 else []}),
    "99.3": ("99_the_ladder", {"hashlib": hashlib}),
}
PLACE = solution("04_fa2_fp32", "4.2").replace("return ty, tx", "return {}")
BYTES = "def cache_bytes(layers, kv_heads, D, N, itemsize=2):\n    return 2 * layers * kv_heads * {} * itemsize\n"
STEP = "step6 = fragments.Descriptor(start=0x8000 + 128 * 128 + 2 * 32, {}, stride=1024, swizzle=128)"
WAY = solution("23_backward_mma", "23.3")
SCOPES = solution("51_one_sided", "51.3")
FIT = "s = train.SMALL.size\ngrouped, ungrouped = (2**30 // cache_bytes(s.layers, h, 64, 4096) for h in (s.kv_heads, s.heads))"


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        ("0.2", "only_lse = 'out of bounds\\nat line 7'", "one key: out of bounds\n"),
        ("1.1", "def bytes_by_tensor(*_):\n    return None", "give a dict: tensor -> bytes"),
        ("1.1", "def bytes_by_tensor(*_):\n    return {'Q': 8}", "solved"),
        ("2.1", "def merge_outputs(a, b):\n    return ()", "give three: m, l and O"),
        ("2.1", solution("02_online_softmax", "2.1"), "solved"),
        ("2.1", solution("02_online_softmax", "2.1").replace(" - m)", ") / np.exp(m)"), "every m larger by 1000: "),
        ("2.2", "def expected_maxima(N):\n    return sum(1 / np.arange(1, N + 1, dtype='f'))", "solved"),
        (
            "2.2",
            "def expected_maxima(N):\n    return sum(1 / k for k in range(1, N + 1)) + 1e-4",
            "1.000100, on average it is 1.0000",
        ),
        (
            "2.2",
            "from fractions import Fraction\ndef expected_maxima(N):\n    return sum(Fraction(1, k) for k in range(1, N + 1))",
            "solved",
        ),
        ("3.1", "from fractions import Fraction\no_32, o_64 = 1, Fraction(33, 64)", "solved"),
        ("3.1", "o_32, o_64 = 1, 0.516", "solved"),
        ("3.1", "o_32, o_64 = 1, 0.515", "N = 64: not 0.515"),
        ("3.1", "o_32, o_64 = 1, None", "N = 64: not None"),
        ("4.1", f"answer = {dict(zip(NUMBERED, (' Scale', 'RESCALE', 'tail')))}", "solved"),
        ("4.1", f"answer = {dict(zip(NUMBERED, ('scale', 'tail', 'rescale')))}", "1 of the three are right"),
        ("4.2", PLACE.format("[ty, tx]"), "solved"),
        ("4.2", PLACE.format("np.array([ty, tx])"), "solved"),
        ("4.2", PLACE.format("ty"), "give (ty, tx)"),
        ("4.2", PLACE.format("ty, ty"), "not every place has one lane"),
        ("10.5", "V = torch.eye(64)", "solved"),
        ("10.5", "import numpy as np\nV = np.eye(64)", "solved"),
        ("10.5", "V = torch.full((64, 64), torch.nan)", "spread by nan only"),
        ("10.5", "V = 1 + 1e-3 * torch.randn(64, 64)", "spread by 0.001 only"),
        ("10.5", "V = 100 + 0.2 * torch.randn(64, 64)", "spread by 0.2 only, about 1e+02"),
        ("10.6", "stride, smem_bytes = 144 / 2, 27648", "solved"),
        ("10.6", "stride, smem_bytes = '72', 27648", "a whole number of elements, not '72'"),
        ("10.6", "stride, smem_bytes = None, 27648", "a whole number of elements, not None"),
        ("10.6", "stride, smem_bytes = 72.5, 27648", "a whole number of elements, not 72.5"),
        ("11.5", solution("11_swizzled", "11.5"), "solved"),
        ("11.5", "def place96(row, chunk):\n    return chunk ^ row // 2", "row 8: not a permutation"),
        ("11.5", "def place96(row, chunk):\n    return None", "row 0: not a permutation"),
        (
            "11.5",
            "def place96(row, chunk):\n    return chunk ^ row // 2 % 4 if row < 8 else chunk",
            "chunk 0 of rows 8 to 15 lies in only 2",
        ),
        (
            "11.5",
            "def place96(row, chunk):\n    return ({3: 4, 4: 3}.get(chunk, chunk) if row > 7 else chunk) ^ row // 2 % 4",
            "eight chunks of rows 8 to 15 share columns",
        ),
        (
            "13.4",
            "q_mine = k_mine = torch.zeros(1, 1, 64, 64)\nsafe = '2**15'",
            "'2**15' isn't the largest bound (a number, not",
        ),
        ("13.4", "q_mine = k_mine = torch.zeros(1, 1, 64, 64)\nsafe = 2**15", "solved"),
        (
            "13.5",
            "arrays = {64: 244, 32: 196}\nS_and_P_at_least = {64: 96, 32: 32}",
            "S_and_P_at_least: not 96 at Bc = 64",
        ),
        ("13.5", "arrays = S_and_P_at_least = {64: 236, 32: 196}", "arrays: not 236 at Bc = 64"),
        ("11.4", solution("11_swizzled", "11.4"), "solved"),
        ("11.4", "q_mine = torch.randn(64, 64)", "q is (64, 64), not (1, 1, 64, 64)"),
        ("11.4", "q_mine = torch.randn(1, 1, 9, 8).repeat(1, 1, 1, 8)", "q is (1, 1, 9, 64)"),
        ("11.4", "q_mine = torch.zeros(1, 1, 64, 64)\nq_mine[:, :, ::8] = 2 * torch.randn(64)", "some row of q"),
        ("13.5", "arrays = [244, 196]", "give two dicts: Bc -> registers"),
        ("20.3", "Nq_mine, Nk_mine = 128.0, 129.0", "solved"),
        ("20.3", "Nq_mine, Nk_mine = 128, 128.5", "two whole numbers from 1 to 200"),
        ("20.3", "Nq_mine, Nk_mine = 128, 128", "there its result is right"),
        ("21.4", "by_hand = {'a': 15, 'b': 8.0, 'c': 23}", "solved"),
        ("21.4", "by_hand = {'a': 15, 'b': 16, 'c': 23}", "(b): 16 is not what the rung takes"),
        ("21.4", "by_hand = {'a': None, 'b': 8, 'c': 23}", "(a): a whole number from 1 to 128, not None"),
        ("21.4", "by_hand = {'a': '15', 'b': 8, 'c': 23}", "(a): a whole number from 1 to 128, not '15'"),
        ("21.5", "def allocate(lengths, page, free):\n    next(iter(()))", "more than the 8 free pages"),
        ("21.5", solution("21_split_kv", "21.5"), "solved"),
        ("21.5", PAGES.replace("PAGE", "page").replace("MOST", "max(counts)"), "solved"),
        ("21.5", PAGES.replace("PAGE", "16").replace("MOST", "max(counts)"), "page = 48: (3, 4), not (3, 2)"),
        ("21.5", PAGES.replace("PAGE", "page").replace("MOST", "4"), "page = 48: (3, 4), not (3, 2)"),
        ("21.5", "def allocate(lengths, page, free):\n    return [[7, 2, 9, 0]] * 3", "give an int32 tensor"),
        ("22.4", "wrong = {'a': 'dK', 'b': ['dK', 'dQ'], 'c': {}}", "solved"),
        ("22.4", "wrong = {'a': ('dk',), 'b': {'dk', 'dq'}, 'c': None}", "solved"),
        ("22.4", "wrong = {'a': {}, 'b': {'dk', 'dq'}, 'c': set()}", "a: none is not what breaks"),
        ("22.4", "wrong = {'a': 'dk', 'b': ['dV', 'dK'], 'c': None}", "b: dK, dV is not what breaks"),
        ("22.5", "def queries(j):\n    return range(15, j - 1, -1)\nsteps = 15", "solved"),  # a name of other cells
        ("22.5", "def queries(j):\n    return range(j, 16)", "100% of the time is still waiting"),
        ("23.3", WAY, "solved"),
        ("23.3", f"{WAY}\ncomes = dict.fromkeys(comes, ())", "S = Q K^T: two words, for A and for B"),
        ("23.3", f"{WAY}\ncomes['dQ = dS K'] = ('registers',)", "dQ = dS K: two words"),
        ("23.3", f"{WAY}\ncomes['dK = dS^T Q'] = 'trans'", "dK = dS^T Q: two words"),
        ("23.3", f"{WAY}\ncomes['dQ = dS K'] = ('registers', 'plain')", "operand B (K): plain is wrong"),
        ("23.4", "smem_kb, ctas, additions = 113, 2, 2", "solved"),
        ("23.4", "smem_kb, ctas, additions = '113', 2, 2", "'113' is wrong, in KB"),
        ("23.4", "smem_kb, ctas, additions = 113 * 1024, 2, 2", "115712 is wrong, in KB"),
        ("23.4", "smem_kb, ctas, additions = 113, 1, 2", "1 CTAs is wrong: how many times do 113 KB and 1 KB"),
        ("23.4", "smem_kb, ctas, additions = 113, 2, 4", "4 times is wrong"),
        ("24.3", BYTES.format("N * D") + FIT, "solved"),
        ("24.3", BYTES.format("N * N") + FIT, "another amount"),
        ("24.3", BYTES.format("N * D").replace("itemsize\n", "2\n") + FIT, "another amount in torch.float32"),
        ("24.3", BYTES.format("D * D") + FIT, "another amount"),
        ("30.4", solution("30_tma_wgmma", "30.4"), "solved"),
        ("30.4", STEP.format("leading=32"), "solved"),
        ("30.4", STEP.format("leading=-5"), "no descriptor can say"),
        ("30.4", STEP.format("leading=1 << 20"), "no descriptor can say"),
        ("30.4", STEP.format("leading=16, base_offset=8"), "no descriptor can say"),
        ("30.4", STEP.format("leading=16, base_offset=1"), "your descriptor finds"),
        ("30.5", "smallest = 289", "solved"),
        ("30.5", "smallest = 289.0", "solved"),
        ("30.5", "smallest = None", "a whole number of keys below 1000, not None"),
        ("30.5", "smallest = 288.5", "a whole number of keys below 1000, not 288.5"),
        ("30.5", "smallest = 97", "isn't caught yet"),
        ("30.5", "smallest = 385", "at a smaller Nk already"),
        ("31.4", "bug_of = {'Z': 2, 'Y': 1, 'X': 3}", "solved"),
        ("31.4", "bug_of = {'X': 3, 'Y': 1, 'Z': 1}", "each of the bugs 1, 2 and 3"),
        ("31.4", "bug_of = {'X': None, 'Y': None, 'Z': None}", "each of the bugs 1, 2 and 3"),
        ("31.4", "bug_of = {'X': 3, 'Y': 2, 'Z': 1}", "at least two"),
        ("32.4", "predicted = {'a': 'hangs', 'b': 'right', 'c': 'right'}", "solved"),
        ("32.4", "predicted = {'a': 'hangs', 'b': 'hangs', 'c': 'right'}", "behaves in another way"),
        ("32.4", "predicted = {'a': 'hang', 'b': 'right', 'c': 'right'}", 'each is "right" or "hangs"'),
        ("32.4", "predicted = dict.fromkeys('abc')", 'each is "right" or "hangs"'),
        ("33.3", "outcome = {'c': 'reported', 'a': 'wrong', 'b': 'stop'}", "solved"),
        ("33.3", "outcome = {'a': 'stop', 'b': 'wrong', 'c': 'reported'}", "another way"),
        ("40.2", "cannot_wait = ['triton_tiles', 'numba_kernel']", "solved"),
        ("40.2", "cannot_wait = {'triton_tiles', 'numba_kernel', 'cuda'}", "cuda is none of the candidates"),
        ("40.2", "cannot_wait = {'triton_tiles'}", "1 more"),
        ("40.2", "cannot_wait = {'cute_mma'}", "look for a wait in cute_mma"),
        ("51.3", SCOPES, "solved"),
        ("51.3", f"{SCOPES}\nscopes = dict(reversed(scopes.items()))", "solved"),
        ("51.3", "scopes = {}", "not yet: to tell the CTAs of its GPU"),
        ("51.3", "scopes = dict(zip('abcd', ('gpu', 'sys', 'cta', 'sys')))", "not yet"),
        ("51.3", f"{SCOPES}\nscopes.popitem()", "not yet: to tell the owner of K"),
        ("51.3", SCOPES.replace("cta", "gpu"), "not yet: to tell the consumers of its CTA"),
        ("90.1", solution("90_proving_it_right", "90.1"), "solved"),
        ("90.1", "q, k, v = qkv(128)", "the suspect passes it"),
        ("90.1", "q, k, v = qkv(128)\nk[..., 40, 0] = float('inf')", "finite inputs"),
        ("90.3", "suite = {'by -1e4', 'one-hot'}", "solved"),
        ("90.3", "suite = ['by −1e4', 'one-hot']", "solved"),
        ("90.3", "suite = ['N = 100', 'by -1e4']", "not caught: c"),
        ("92.2", "cut_by_requests, cut_by_sectors = 128, 128", "solved"),
        ("92.2", "cut_by_requests, cut_by_sectors = 96, 128", "by the requests, 96 is wrong"),
        ("92.2", "cut_by_requests, cut_by_sectors = 128, 384", "by the sectors, 384 is wrong"),
        ("92.3", "N = 64", "solved"),
        ("92.3", "N = 256", "N = 256: race, lines 3 and 4"),
        ("99.3", "fair = {'d': 1, 'a': True, 'c': 0, 'b': False}", "solved"),
        ("99.3", "fair = {'a': True, 'b': False, 'c': None, 'd': True}", "one of the four is judged otherwise"),
    ],
)
def test_what_a_cell_says_to_an_answer(number, answer, said, told):
    stem, space = CELLS[number]
    assert said in told(stem, number, answer, space).removeprefix(f"Exercise {number}: not solved yet")
