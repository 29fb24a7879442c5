"""A call carries its inputs, outputs and workspace apart, by the names of fa_args."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import rung, rungs
from helpers.ladder.contract import prepare
from helpers.ladder.errors import CallError

X = torch.zeros(1, 2, 40, 64)


@pytest.mark.parametrize(
    ("which", "inputs", "options", "names"),
    [
        ("04", [X] * 3, {}, ["Q K V", "O LSE", ""]),
        ("03", [X] * 3, {}, ["Q K V", "O LSE", "m l"]),
        ("02", [torch.zeros(3, 40)], {}, ["Q", "O LSE", ""]),
        ("22", [X, X, X, X, X[..., 0].contiguous(), X], {}, ["Q K V O LSE dO", "dQ dK dV", "delta turn ticket"]),
        (
            "20",
            [X.half()] * 3,
            {"cu_seqlens": (torch.tensor([0, 9, 40], dtype=torch.int32),) * 2},
            ["Q K V q_starts k_starts", "O LSE", ""],
        ),
        (
            "21",
            [X.half()[:, :, :1], torch.zeros(5, 2, 16, 64).half(), torch.zeros(5, 2, 16, 64).half()],
            {"lengths": torch.tensor([20], dtype=torch.int32), "pages": torch.tensor([[4, 1]], dtype=torch.int32)},
            ["Q K V lengths pages", "O LSE", "*"],
        ),
        ("50", [X, X[..., 0].contiguous(), X.half(), X[..., 0].contiguous()], {}, ["O_a LSE_a O_b LSE_b", "O LSE", ""]),
    ],
)
def test_what_is_given_and_what_is_written(which, inputs, options, names):
    call = prepare(rung(which), "cpu", tuple(inputs), **options)
    for tensors, wanted in zip((call.inputs, call.outputs, call.workspace), names, strict=True):
        wanted = [name for name, _ in rung(which).workspace] if wanted == "*" else wanted.split()
        assert list(tensors) == wanted
    assert list(call.tensors) == [*call.inputs, *call.outputs, *call.workspace]
    assert all(a is b for a, b in zip(call.results, call.outputs.values(), strict=True))
    for name, tensor in {**call.inputs, **call.outputs}.items():
        assert getattr(call.args, name) == tensor.data_ptr()
    assert [*call.args.workspace][: len(call.workspace)] == [t.data_ptr() for t in call.workspace.values()]


@pytest.mark.parametrize(
    ("out", "over"),
    [
        (lambda o, lse: (o, lse), {"O": "O_a", "LSE": "LSE_a"}),
        (lambda o, lse: (o.clone(), lse), {"LSE": "LSE_a"}),
        (lambda o, lse: (o.transpose(1, 2).contiguous().transpose(1, 2), lse.clone()), {}),
    ],
)
def test_a_merge_in_place_has_one_tensor_for_an_input_and_an_output(out, over):
    o, lse = torch.zeros(1, 2, 40, 64), torch.zeros(1, 2, 40)
    call = prepare(rung("50"), "cpu", (o, lse, X, lse.clone()), out=out(o, lse))
    assert call.over == over and list(call.outputs) == ["O", "LSE"]
    assert set(call.tensors) == {*call.inputs, *call.outputs} - over.keys()
    for output, of in over.items():
        call.point(call.args, of, 4096)
        assert getattr(call.args, output) == getattr(call.args, of) == 4096


def test_pages_make_the_keys_that_a_sequence_has_room_for():
    pages = torch.tensor([[4, 1, 0]], dtype=torch.int32)
    keys, lengths = torch.zeros(5, 2, 16, 64).half(), torch.tensor([48], dtype=torch.int32)
    args = prepare(rung("21"), "cpu", (X.half()[:, :, :1], keys, keys), lengths=lengths, pages=pages).args
    assert (args.Nk, args.page, args.max_pages, args.sequences) == (48, 16, 3, 1)
    with pytest.raises(ValueError, match=r"lengths are \[49\]; they have to be 0 to 48"):
        prepare(rung("21"), "cpu", (X.half()[:, :, :1], keys, keys), lengths=lengths + 1, pages=pages)


NUMBERS = torch.tensor([0, 40], dtype=torch.int32)
ASKED = {  # feature -> how a call asks for it
    "window": {"causal": True, "window": 8},
    "varlen": {"cu_seqlens": (NUMBERS, NUMBERS)},
    "lengths": {"lengths": NUMBERS[1:]},
    "pages": {"lengths": NUMBERS[1:], "pages": NUMBERS[:1, None]},
}
OF_A_MODEL = [r for r in rungs() if r.features]


@pytest.mark.parametrize(("one", "feature"), [(r, f) for r in OF_A_MODEL for f in ASKED if f not in r.features])
def test_what_a_rung_does_not_take_is_refused_by_name(one, feature):
    """Before its launcher, which refuses it too (test_rungs)."""
    x = X.to(torch.float32 if "fp32" in one.dtypes else torch.float16)
    inputs = (x, x, x) + ((x, X[..., 0].contiguous(), x) if one.op == "attention_backward" else ())
    prepare(one, "cpu", inputs)
    with pytest.raises(CallError, match=f"{one.stem} takes no (window|cu_seqlens|lengths|pages); it takes causal, "):
        prepare(one, "cpu", inputs, **ASKED[feature])


@pytest.mark.parametrize(
    ("lse", "words"),
    [
        (None, "lse is a NoneType; 22_backward_fp32 takes torch tensors"),
        (X[..., 0].contiguous().to("meta"), r"on meta; it has to be contiguous float32 \(1, 2, 40\) on cpu"),
        (X[..., 0], "it has to be contiguous float32"),
    ],
)
def test_an_lse_that_is_none_or_lies_elsewhere_is_refused(lse, words):
    with pytest.raises(CallError, match=words):
        prepare(rung("22"), "cpu", (X, X, X, X, lse, X))


def test_lists_in_place_of_tensors_are_refused_by_name():
    x = X.half()
    with pytest.raises(CallError, match="cu_seqlens takes two tensors"):
        prepare(rung("20"), "cpu", (x, x, x), cu_seqlens=([0, 40], [0, 40]))
    with pytest.raises(CallError, match="pages is list; it has to be a contiguous int32 tensor"):
        prepare(rung("21"), "cpu", (x, x, x), lengths=NUMBERS[1:], pages=[[0]])


def integers(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([[0, -1]], "pages names page -1; k and v have pages 0 to 4"),
        ([[0, 5]], "pages names page 5; k and v have pages 0 to 4"),
        (3, r"pages is torch.int32 \(\); it has to be a contiguous int32 tensor \(1, 1\)"),
        ([[]], r"pages is torch.int32 \(1, 0\); it has to be a contiguous int32 tensor \(1, 1\)"),
    ],
)
def test_wrong_pages_are_refused_by_their_number_or_shape(pages, words):
    keys = torch.zeros(5, 2, 16, 64).half()
    with pytest.raises(CallError, match=words):
        prepare(rung("21"), "cpu", (X.half()[:, :, :1], keys, keys), lengths=integers([3]), pages=integers(pages))


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (np.array([0, 40], dtype=np.int32), "cu_seqlens takes two tensors"),
        (integers([]), r"cu_seqlens, q is torch.int32 \(0,\); it has to be a contiguous int32 tensor \(2,\)"),
    ],
)
def test_row_numbers_that_are_no_tensors_or_empty_are_refused(starts, words):
    with pytest.raises(CallError, match=words):
        prepare(rung("20"), "cpu", (X.half(),) * 3, cu_seqlens=(starts, starts))


@pytest.mark.parametrize(
    ("which", "options", "words"),
    [
        ("20", {"causal": True, "window": np.int64(3)}, r"int64\(3\) and causal True; a window is an int, at least 1 key, and needs causal"),
        ("21", {"splits": np.int64(3)}, r"int64\(3\); it has to be an int, 1 to 1024"),
        ("20", {"out": 5}, "out takes two tensors; got int"),
    ],
)  # fmt: skip
def test_an_option_of_another_type_is_refused_with_the_right_one(which, options, words):
    with pytest.raises(CallError, match=words):
        prepare(rung(which), "cpu", (X.half(),) * 3, **options)


LSE = X[..., 0].contiguous()


@pytest.mark.parametrize(
    ("which", "inputs", "takes"),
    [
        ("02", [X], "scores s only"),
        ("04", [X] * 3, "q, k, v and a scale only"),
        ("50", [X, LSE, X, LSE], "o_a, lse_a, o_b, lse_b only"),
        ("22", [X, X, X, X, LSE, X], "q, k, v, o, lse, do and a scale only"),
    ],
)
def test_a_kernel_without_features_says_what_it_takes(which, inputs, takes):
    with pytest.raises(CallError, match=f"takes no causal; it takes {takes}"):
        prepare(replace(rung(which), features=()), "cpu", tuple(inputs), causal=True)


def test_a_merge_takes_any_head_dimension_and_fp32_partial_results_where_its_header_block_is_silent():
    merge = replace(rung("50"), D=(), dtypes=("fp16",))
    x = torch.zeros(1, 2, 40, 24)
    assert prepare(merge, "cpu", (x, LSE, x.half(), LSE)).args.D == 24
    with pytest.raises(CallError, match="o_a is torch.bfloat16; 50_ring takes float32, float16"):
        prepare(merge, "cpu", (x.bfloat16(), LSE, x.half(), LSE))
    with pytest.raises(CallError, match="out: o is a int; 50_ring takes torch tensors"):
        prepare(merge, "cpu", (x, LSE, x.half(), LSE), out=(5, LSE))


@pytest.mark.parametrize("keys", [2**30 + 1, 2**32 + 5])
def test_more_than_an_int_can_count_is_refused(keys):
    """The struct has 32 bits for each dimension: of 2^32 + 5 keys it would say that they are 5."""
    many = X[:, :, :1].expand(1, 2, keys, 64)
    with pytest.raises(CallError, match=r"k has shape \(1, 2, .*every dimension has to be at most 2\^30"):
        prepare(rung("04"), "cpu", (X, many, many))
    pages = torch.zeros(1, 2, dtype=torch.int32)
    many = X[:, :, :1].half().expand(1, 2, 2**30, 64)
    with pytest.raises(CallError, match=r"pages has room for 2 pages of 1073741824 keys; 2\^30 keys are the most"):
        prepare(rung("21"), "cpu", (X.half(), many, many), lengths=NUMBERS[1:], pages=pages)
