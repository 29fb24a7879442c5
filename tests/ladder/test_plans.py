"""A planned call is the checked one: the same arguments but for addresses, the same results, the same refusals."""

import ctypes
import gc
import weakref

import pytest
import torch

from helpers import load, rung, rungs
from helpers.ladder import plans
from helpers.ladder.contract import prepare
from helpers.ladder.errors import CallError
from helpers.ladder.plans import Plan, Plans
from helpers.run.reference import random_inputs

SHAPE = (1, 4, 40, 56, 64)
ADDRESSES = "Q K V O LSE dO dQ dK dV workspace q_starts k_starts lengths pages O_a O_b LSE_a LSE_b".split()


def values(args) -> dict:
    """Its fields but the addresses."""
    fields = {
        name: getattr(args, name)
        for kind in reversed(type(args).__mro__)
        for name, *_ in vars(kind).get("_fields_", ())
    }
    return {
        name: [*value] if isinstance(value, ctypes.Array) else value
        for name, value in fields.items()
        if name not in ADDRESSES
    }


def merged() -> tuple:
    o, lse = torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40)
    return o, lse, o.half(), lse + 1


CALLS = [(r.stem, {}) for r in rungs()] + [
    ("20", {"causal": True, "window": 7, "scale": 2}),
    ("21", {"causal": True, "splits": 3}),
    ("33", {"causal": True, "deterministic": True}),
    ("50", {}),
]


@pytest.mark.parametrize(("which", "options"), CALLS, ids=[f"{which} {[*options]}" for which, options in CALLS])
def test_the_second_call_has_the_arguments_of_a_checked_one(which, options):
    found = rung(which)
    given = [merged() if found.op == "merge" else random_inputs(found, SHAPE, seed=seed) for seed in (0, 1)]
    planned = Plans(found, "cpu")
    planned.prepare(given[0], **options)
    second, checked = planned.prepare(given[1], **options), prepare(found, "cpu", given[1], **options)
    assert len(planned._plans) == 1
    assert values(second.args) == values(checked.args)
    for mine, theirs in ((second.outputs, checked.outputs), (second.workspace, checked.workspace)):
        assert list(mine) == list(theirs)
        for a, b in zip(mine.values(), theirs.values(), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    assert list(second.inputs) == list(checked.inputs)
    assert all(a is b for a, b in zip(second.inputs.values(), checked.inputs.values(), strict=True))
    for name, t in {**second.inputs, **second.outputs}.items():
        assert getattr(second.args, name) == t.data_ptr()
    for address, t in zip(second.args.workspace, second.workspace.values()):
        assert (address or 0) == t.data_ptr()  # ctypes gives None for 0, the address of an empty one
    assert all(t.isnan().all() for t in second.workspace.values()), (
        "the emulator finds what is read before it is written"
    )


@pytest.mark.parametrize("which", ["04", "12", "22", "02", "21"])
def test_the_second_call_has_the_results_of_the_first(which):
    kernel = load(which, device="cpu", quiet=True)
    inputs = random_inputs(kernel.rung, SHAPE)
    first, second = kernel(*inputs), kernel(*(x.clone() for x in inputs))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_one_tensor_for_three_inputs_is_no_plan_for_the_next_three():
    planned = Plans(rung("12"), "cpu")
    q, k, v = (torch.randn(1, 2, 40, 64).half() for _ in range(3))
    planned.prepare((q, q, q))
    args = planned.prepare((q, k, v)).args
    assert len(planned._plans) == 1 and (args.Q, args.K, args.V) == (q.data_ptr(), k.data_ptr(), v.data_ptr())


def test_where_the_rows_of_a_cache_lie_is_part_of_a_plan_on_a_gpu():
    """Tensors that are read on the CPU aren't on a GPU; "meta" stands for it."""
    planned = Plans(rung("21"), "meta")
    q, keys = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((2, 2, 1, 64), (5, 2, 16, 64)))
    whole = torch.empty(2, 2, 80, 64, dtype=torch.float16, device="meta")
    lengths, pages = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2,), (2, 2)))
    for _ in range(2):
        for inputs, given in (
            ((q, keys, keys), {"lengths": lengths, "pages": pages}),
            ((q, whole, whole), {"lengths": lengths}),
            ((q, whole, whole), {}),
        ):
            call = planned.prepare(inputs, **dict(lengths=None, pages=None) | given)
            assert list(call.inputs) == ["Q", "K", "V", *given]
            assert all(call.inputs[name] is t for name, t in given.items())
            assert values(call.args) == values(prepare(rung("21"), "meta", inputs, **given).args)
    assert len(planned._plans) == 3
    with pytest.raises(CallError, match="pages needs lengths"):
        planned.prepare((q, whole, whole), lengths=None, pages=lengths)
    starts = [torch.empty(3, dtype=torch.int32, device="meta") for _ in range(3)]
    packed, x = Plans(rung("20"), "meta"), torch.empty(1, 2, 40, 64, dtype=torch.float16, device="meta")
    packed.prepare((x, x, x), cu_seqlens=(starts[0], starts[0]))
    call = packed.prepare((x, x, x), cu_seqlens=(starts[1], starts[2]))
    assert len(packed._plans) == 1 and call.inputs["q_starts"] is starts[1] and call.inputs["k_starts"] is starts[2]


def test_a_plan_points_at_the_new_row_numbers_lengths_and_pages():
    x, keys = torch.zeros(1, 2, 40, 64).half(), torch.zeros(5, 2, 16, 64).half()
    rows = [torch.tensor([0, 9, 40], dtype=torch.int32) for _ in range(4)]
    lengths, pages = ([torch.tensor(n, dtype=torch.int32) for _ in range(2)] for n in ([20], [[4, 1]]))
    for which, inputs, old, new in (
        ("20", (x, x, x), {"cu_seqlens": rows[:2]}, {"q_starts": rows[2], "k_starts": rows[3]}),
        ("21", (x, keys, keys), {"lengths": lengths[0], "pages": pages[0]}, {"lengths": lengths[1], "pages": pages[1]}),
    ):
        before = [t for value in old.values() for t in (value if type(value) is list else [value])]
        plan = Plan.of(prepare(rung(which), "cpu", inputs, **old), [*inputs, *before])
        args = plan.call([*inputs, *new.values()]).args
        assert {name: getattr(args, name) for name in new} == {name: t.data_ptr() for name, t in new.items()}


X = torch.zeros(1, 2, 40, 64).half()
SHIFTED = torch.zeros(X.numel() + 1).half()[1:].view(X.shape)
ROWS = torch.tensor([0, 9, 40], dtype=torch.int32)


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ({}, {"inputs": [SHIFTED, X, X]}, "q starts at address 2 modulo 16"),
        ({}, {"inputs": [X, X.transpose(2, 3).contiguous().transpose(2, 3), X]}, "k has strides"),
        ({}, {"inputs": [X, X, X.bfloat16()]}, "they have to be the same"),
        ({}, {"inputs": [X, X, X[:, :, 1:]]}, "they have to be the same"),
        ({}, {"inputs": [X, X, X.clone().requires_grad_()]}, "v asks for a gradient"),
        ({}, {"inputs": [X, X]}, "; got 2"),
        ({}, {"inputs": [X, X, None]}, "v is a NoneType"),
        ({}, {"inputs": [X, X, X.to("meta")]}, "v is on meta"),
        ({}, {"scale": float("nan")}, "scale is nan"),
        ({}, {"out": (X,)}, "out takes two tensors; got 1"),
        ({"causal": True, "window": 3}, {"causal": True, "window": 3.0}, "window is 3.0"),
        ({"causal": True, "window": False}, {"causal": True, "window": 0}, "window is 0"),
        ({"causal": True, "window": 3}, {"causal": False, "window": 3}, "window is 3 and causal False"),
        ({"cu_seqlens": (ROWS, ROWS)}, {"cu_seqlens": (ROWS, ROWS.flip(0))}, "it has to rise from 0 to 40"),
        ({"causal": True}, {"lengths": True}, "takes no lengths"),
        ({"causal": True, "window": 3}, {"causal": True, "window": (3,)}, r"window is \(3,\)"),
        ({"cu_seqlens": None}, {"cu_seqlens": (None,)}, "cu_seqlens takes two tensors"),
        (
            {"window": None, "cu_seqlens": None},
            {"window": (), "cu_seqlens": (None, None)},
            "window is|takes two tensors",
        ),
    ],
)
def test_what_was_refused_still_is_after_a_call_that_was_not(good, bad, words):
    planned = Plans(rung("20"), "cpu")
    for _ in range(2):
        planned.prepare((X, X, X), **good)
        with pytest.raises(CallError, match=words):
            planned.prepare(tuple(bad.get("inputs", (X, X, X))), **{n: v for n, v in bad.items() if n != "inputs"})


def test_under_no_grad_a_leaf_is_an_input_and_after_it_none():
    planned, leaf = Plans(rung("12"), "cpu"), X.clone().requires_grad_()
    with torch.no_grad():
        planned.prepare((leaf, X, X))
        planned.prepare((leaf, X, X))
    with pytest.raises(CallError, match="q asks for a gradient"):
        planned.prepare((leaf, X, X))


def test_plans_keep_no_tensor_and_no_more_than_their_number():
    planned = Plans(rung("12"), "cpu")
    x = torch.zeros(1, 2, 40, 64).half()
    call = planned.prepare((x, x, x))
    seen = [weakref.ref(t) for t in (x, *call.tensors.values())]
    del call, x
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
    for n in range(1, 2 * plans.MOST):
        planned.prepare((torch.zeros(1, 1, n, 64).half(),) * 3)
        assert len(planned._plans) <= plans.MOST
