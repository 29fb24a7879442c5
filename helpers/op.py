"""Every rung as a PyTorch operator `fa::<stem>`: torch.compile, torch.export and nn.Module see an ordinary op.

An operator's name can't open with a digit, so 03_fa1_fp32 is `torch.ops.fa._03_fa1_fp32`. Importing this module
registers them all; a rung is compiled at the operator's first call on a device.
"""

from __future__ import annotations

from functools import cache

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
    """The operator of a rung: `operator("04_fa2_fp32")(q, k, v, scale)` gives (o, lse); a softmax rung takes s. O has the inputs'
    dtype, one of the rung's; LSE is float32.

    Raises ValueError for a stem that is no rung; so does the operator, traced or run, for a dtype that the rung doesn't take.
    """
    if stem not in OPERATORS:
        raise ValueError(f"no rung {stem!r}; the rungs are {', '.join(OPERATORS)}")
    return OPERATORS[stem]


def _no_gradient(stem: str) -> None:
    """A rung is a forward kernel: a gradient asked of it is an error that says so, not silence."""

    def backward(ctx: object, *gradients: Tensor) -> None:
        raise NotImplementedError(f"{stem} has no backward kernel; call it on q.detach(), or under torch.no_grad()")

    torch.library.register_autograd(f"fa::{name(stem)}", backward)


def _require_dtypes(rung: Rung, *tensors: Tensor) -> None:
    """What a kernel would refuse when it runs, refused while a graph is traced. ValueError names what is allowed."""
    allowed = [TORCH_NAMES[name] for name in rung.dtypes]
    for t in tensors:
        if str(t.dtype).removeprefix("torch.") not in allowed:
            raise ValueError(f"an input is {t.dtype}; {rung.stem} takes {', '.join(allowed)}")
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"the inputs have dtypes {', '.join(str(t.dtype) for t in tensors)}; they have to be the same")


def _register_attention(rung: Rung) -> None:
    stem = rung.stem

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        return _kernel(stem, q.device.type)(q, k, v, scale=scale)

    def fake(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        _require_dtypes(rung, q, k, v)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)

    schema = "(Tensor q, Tensor k, Tensor v, float? scale=None) -> (Tensor, Tensor)"
    torch.library.custom_op(f"fa::{name(stem)}", attention, mutates_args=(), schema=schema).register_fake(fake)
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
    (_register_softmax if _rung.op == "softmax" else _register_attention)(_rung)
    OPERATORS[_rung.stem] = getattr(torch.ops.fa, name(_rung.stem))
