"""A call carries its inputs, outputs and workspace apart, by the names of fa_args."""

import pytest
import torch

from helpers import rung
from helpers.ladder.contract import prepare

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


def test_pages_make_the_keys_that_a_sequence_has_room_for():
    pages = torch.tensor([[4, 1, 0]], dtype=torch.int32)
    keys, lengths = torch.zeros(5, 2, 16, 64).half(), torch.tensor([48], dtype=torch.int32)
    args = prepare(rung("21"), "cpu", (X.half()[:, :, :1], keys, keys), lengths=lengths, pages=pages).args
    assert (args.Nk, args.page, args.max_pages, args.sequences) == (48, 16, 3, 1)
    with pytest.raises(ValueError, match=r"lengths are \[49\]; they have to be 0 to 48"):
        prepare(rung("21"), "cpu", (X.half()[:, :, :1], keys, keys), lengths=lengths + 1, pages=pages)
