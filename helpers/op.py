"""Every rung as a PyTorch operator `fa::<stem>`: torch.compile, torch.export and nn.Module see an ordinary op.

An operator's name can't open with a digit, so 03_fa1_fp32 is `torch.ops.fa._03_fa1_fp32`. Importing this module
registers them all; a rung is compiled at the operator's first call on a device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .contract import TORCH_NAMES
from .kernel import Kernel, load
from .ladder import Rung, rungs


@cache
def _kernel(stem: str, device: str) -> Kernel:
    return load(stem, device=device, quiet=True)


def name(stem: str) -> str:
    """The operator's name in namespace fa: the stem, with an underscore before a leading digit."""
    return f"_{stem}" if stem[:1].isdigit() else stem


def operator(stem: str) -> torch._ops.OpOverloadPacket:
    """The operator of a rung: `operator("04_fa2_fp32")(q, k, v, scale, causal, window)` gives (o, lse), and o has a gradient where
    there is a backward rung of its dtype; a softmax rung takes s; a backward rung takes q, k, v, o, lse, do and the same
    options, and gives dq, dk, dv. O has the inputs' dtype, one of the rung's; LSE is float32.

    Raises ValueError for a stem that is no rung; so does the operator, traced or run, for a dtype that the rung doesn't take.
    """
    if stem not in OPERATORS:
        raise ValueError(f"no rung {stem!r}; the rungs are {', '.join(OPERATORS)}")
    return OPERATORS[stem]


def _no_gradient(stem: str) -> None:
    """A softmax and a backward rung go one way: a gradient asked of them is an error that says so, not silence."""

    def backward(ctx: object, *gradients: Tensor) -> None:
        raise NotImplementedError(f"{stem} has no backward kernel; call it on q.detach(), or under torch.no_grad()")

    torch.library.register_autograd(f"fa::{name(stem)}", backward)


def backward_rung(dtype: torch.dtype, D: int) -> Rung:
    """The rung that goes back from an attention of this dtype and head dimension. NotImplementedError names those there are."""
    ways = [r for r in rungs() if r.op == "attention_backward"]
    for r in ways:
        if str(dtype).removeprefix("torch.") in [TORCH_NAMES[name] for name in r.dtypes] and D in r.D:
            return r
    known = "; ".join(f"{r.stem}: {', '.join(r.dtypes)}, D in {', '.join(map(str, r.D))}" for r in ways)
    raise NotImplementedError(f"no backward kernel for {dtype} and D={D} ({known}); call it under torch.no_grad()")


def _gradient(stem: str) -> None:
    """An attention rung's gradient is the backward rung of its dtype, given O and LSE. LSE itself has no gradient."""

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, scale, causal, window = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.options = {"scale": scale, "causal": causal, "window": window}
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, do: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        rung = backward_rung(q.dtype, q.shape[-1])
        grads = operator(rung.stem)(q, k, v, o, lse, _in_rows(do), **ctx.options)
        return *grads, None, None, None

    torch.library.register_autograd(f"fa::{name(stem)}", backward, setup_context=setup_context)


def _in_rows(x: Tensor) -> Tensor:
    """x with rows that a kernel can read 16 bytes at a time: itself where they are, and a copy of a sum's gradient, say, which is
    one element under all strides."""
    steps = [step * x.element_size() % 16 for step in x.stride()[:-1]]
    return x if x.stride(-1) == 1 and not any(steps) else x.contiguous()


def _require_dtypes(rung: Rung, *tensors: Tensor) -> None:
    """What a kernel would refuse when it runs, refused while a graph is traced. ValueError names what is allowed."""
    allowed = [TORCH_NAMES[name] for name in rung.dtypes]
    for t in tensors:
        if str(t.dtype).removeprefix("torch.") not in allowed:
            raise ValueError(f"an input is {t.dtype}; {rung.stem} takes {', '.join(allowed)}")
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"the inputs have dtypes {', '.join(str(t.dtype) for t in tensors)}; they have to be the same")


OPTIONS = "float? scale=None, bool causal=False, int? window=None"


def _register_attention(rung: Rung) -> None:
    stem = rung.stem

    def attention(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return _kernel(stem, q.device.type)(q, k, v, scale=scale, causal=causal, window=window)

    def fake(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        _require_dtypes(rung, q, k, v)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)

    schema = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)"
    torch.library.custom_op(f"fa::{name(stem)}", attention, mutates_args=(), schema=schema).register_fake(fake)
    _gradient(stem)


def _register_backward(rung: Rung) -> None:
    stem = rung.stem

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        scale: float | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _kernel(stem, q.device.type)(q, k, v, o, lse, do, scale=scale, causal=causal, window=window)

    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        scale: float | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _require_dtypes(rung, q, k, v, o, do)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    schema = f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
    torch.library.custom_op(f"fa::{name(stem)}", backward, mutates_args=(), schema=schema).register_fake(fake)
    _no_gradient(stem)


def _register_softmax(rung: Rung) -> None:
    stem = rung.stem

    def softmax(s: Tensor) -> tuple[Tensor, Tensor]:
        return _kernel(stem, s.device.type)(s)

    def fake(s: Tensor) -> tuple[Tensor, Tensor]:
        _require_dtypes(rung, s)
        return s.new_empty(s.shape), s.new_empty(s.shape[:-1], dtype=torch.float32)

    schema = "(Tensor s) -> (Tensor, Tensor)"
    torch.library.custom_op(f"fa::{name(stem)}", softmax, mutates_args=(), schema=schema).register_fake(fake)
    _no_gradient(stem)


OPERATORS: dict[str, torch._ops.OpOverloadPacket] = {}
for _rung in rungs():
    _register = {"softmax": _register_softmax, "attention_backward": _register_backward}.get(
        _rung.op, _register_attention
    )
    _register(_rung)
    OPERATORS[_rung.stem] = getattr(torch.ops.fa, name(_rung.stem))
