"""Every rung as a PyTorch operator `fa::<stem>`: torch.compile, torch.export and nn.Module see an ordinary op.

An operator's name can't open with a digit, so 03_fa1_fp32 is `torch.ops.fa._03_fa1_fp32`. Importing this module
registers them all; a rung is compiled at the operator's first call on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ladder.contract import TORCH_NAMES, room
from ..ladder.paths import KERNELS
from ..ladder.rung import Rung, Which, rung, rungs
from .kernel import Kernel, load


@cache
def loaded(stem: str, device: str) -> Kernel:
    """A rung's kernel on this kind of device, loaded once."""
    return load(stem, device=device, quiet=True)


def name(stem: str) -> str:
    """The operator's name in namespace fa: the stem, with an underscore before a leading digit."""
    return f"_{stem}" if stem[:1].isdigit() else stem


def operator(which: Which) -> torch._ops.OpOverloadPacket:
    """The operator of a rung, as torch.compile and nn.Module take it.

        o, lse = op.operator("04")(q, k, v, scale, causal, window)

    which: what `rung` takes; it has to be one of the ladder. An attention rung gives (o, lse), and both have a
    gradient where there is a backward rung of its dtype; a softmax rung takes s; a backward rung takes q, k, v, o, lse, do and
    the same options, and gives dq, dk, dv. O has the inputs' dtype, one of the rung's; LSE is float32.

    Options are those of Kernel.__call__, by name, as far as the rung's features go: q_starts and k_starts for its cu_seqlens
    (k_starts: those of the queries unless given), lengths, pages and splits for decode.
    Raises ValueError for a kernel that is no rung; so does the operator, traced or run, for a dtype that the rung doesn't take.
    """
    if isinstance(which, str) and which in OPERATORS:  # a whole stem, which torch.compile can trace: it opens no file
        return OPERATORS[which]
    found = rung(which)
    if found.file is None or found.file.parent != KERNELS or found.stem not in OPERATORS:
        raise ValueError(f"{found.path.name} is no rung of the ladder, and only those are operators")
    return OPERATORS[found.stem]


def _no_gradient(stem: str) -> None:
    """A softmax and a backward rung go one way: a gradient asked of them is an error that says so, not silence."""

    def backward(ctx: object, *gradients: Tensor) -> None:
        raise NotImplementedError(f"{stem} has no backward kernel; call it on q.detach(), or under torch.no_grad()")

    torch.library.register_autograd(f"fa::{name(stem)}", backward)


@cache  # asked at every step of a training, of the files that were there at the first
def backward_rung(dtype: torch.dtype, D: int, stem: str = "2", needs: frozenset[str] = frozenset()) -> Rung:
    """The rung that goes back from rung `stem`: the last one, in its decade or the twenties, for this dtype, with these
    features, and with a head dimension of at least D. NotImplementedError names those there are."""
    ways = [r for r in rungs() if r.op == "attention_backward"]
    for r in reversed(ways):
        fits = dtype in [getattr(torch, TORCH_NAMES[name]) for name in r.dtypes] and D <= max(r.D)
        if fits and needs <= {*r.features} and r.stem[0] <= max(stem[0], "2"):
            return r
    known = "; ".join(
        f"{r.stem}: {', '.join(r.dtypes)}, D in {', '.join(map(str, r.D))}, {', '.join(r.features)}" for r in ways
    )
    asked = "".join(f", {name}" for name in sorted(needs))
    raise NotImplementedError(
        f"no backward kernel for {dtype} and D={D}{asked} ({known}); call it under torch.no_grad()"
    )


def _gradient(stem: str) -> None:
    """An attention rung's gradient is the backward rung of its dtype, given O and LSE. A head dimension between those of the backward
    rung is filled up with zeros, which add nothing to any product. A loss that uses LSE, too, costs another forward and backward pass."""

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, scale, causal, window, q_starts, k_starts, lengths, _, _ = inputs
        ctx.save_for_backward(q, k, v, *output, q_starts, k_starts)
        ctx.options = {"scale": scale, "causal": causal, "window": window}
        ctx.cache = lengths is not None
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, *starts = ctx.saved_tensors
        if ctx.cache:
            raise NotImplementedError(f"{stem} has no backward for keys in a cache; call it under torch.no_grad()")
        D, options = int(q.shape[-1]), dict(ctx.options)
        needs = {name for name in ("causal", "window") if options[name]} | (
            {"gqa"} if q.shape[1] != k.shape[1] else set()
        )
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        needs |= {"deterministic"} if options["deterministic"] else set()
        rung = backward_rung(q.dtype, D, stem, frozenset(needs))
        options["scale"] = D**-0.5 if options["scale"] is None else options["scale"]
        missing = min(d for d in rung.D if d >= D) - D

        def back(o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
            wide = (torch.nn.functional.pad(x, (0, missing)) if missing else x for x in (q, k, v, o, do))
            *inputs, do = wide
            grads = OPERATORS[rung.stem](*inputs, lse, _in_rows(do), **options, q_starts=starts[0], k_starts=starts[1])
            return tuple(x[..., :D] if missing else x for x in grads)

        grads = (None,) * 3 if do is None else back(o, do)
        if dlse is not None:
            again = {name: options[name] for name in ("scale", "causal", "window")}
            mean_k, _ = OPERATORS[stem](q, k, k, **again, q_starts=starts[0], k_starts=starts[1])
            more = _of_lse(q, mean_k, lse, dlse, options["scale"], lambda do: back(torch.zeros_like(o), do)[2])
            grads = (*(x if g is None else g + x for g, x in zip(grads, more)), grads[2])
        return *grads, *[None] * 8

    _differentiable(stem, save, backward)


def _differentiable(stem: str, save: Callable[..., None], backward: Callable[..., tuple]) -> None:
    """Does what torch.library.register_autograd does, but doesn't read the schema at every call: with eleven arguments that takes longer
    than a launch."""
    overload = getattr(torch.ops.fa, name(stem)).default
    defaults = [argument.default_value for argument in overload._schema.arguments]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(*inputs)
            save(ctx, inputs, output)
            return output

    Differentiable.backward = staticmethod(backward)

    def attention(*inputs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            # The dispatcher drops arguments at the end that equal their defaults.
            return Differentiable.apply(*inputs, *defaults[len(inputs) :])
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*inputs)

    torch.library.impl(f"fa::{name(stem)}", "Autograd")(attention)


def _of_lse(
    q: Tensor, mean_k: Tensor, lse: Tensor, dlse: Tensor, scale: float, dv_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """What a gradient dlse (B,H,Nq) of LSE adds to dQ and dK: dS gets P dLSE, so dQ scale dLSE P K and dK scale P^T (dLSE Q).

    mean_k: P K, what the forward pass gives with K in the place of V. dv_of: do -> P^T do. Rows are scaled to at most 1 before they
    are rounded to 16 bits: the gradient of a mean is small.
    """
    dlse = torch.where(lse == -torch.inf, 0.0, dlse).unsqueeze(-1)  # a row that sees no key
    most = dlse.abs().amax().clamp(min=torch.finfo(dlse.dtype).tiny)
    dq = scale * dlse * mean_k
    dk = scale * most * dv_of((dlse / most * q).to(q.dtype)).to(dlse.dtype)
    return dq.to(q.dtype), dk.to(q.dtype)


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


def _starts(q_starts: Tensor | None, k_starts: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """cu_seqlens of Kernel.__call__. ValueError for those of the keys alone."""
    if q_starts is None:
        if k_starts is not None:
            raise ValueError("k_starts needs q_starts")
        return None
    return q_starts, q_starts if k_starts is None else k_starts


BACKWARD_OPTIONS = "bool deterministic=False"
OPTIONS = "float? scale=None, bool causal=False, int? window=None, Tensor? q_starts=None, Tensor? k_starts=None"
CACHE_OPTIONS = "Tensor? lengths=None, Tensor? pages=None, int? splits=None"


def _define(stem: str, schema: str, run: Callable, fake: Callable) -> None:
    """The operator fa::<stem>, with its implementation on both devices. torch.library.custom_op would check at every call whether an
    output is one of the inputs."""
    torch.library.define(f"fa::{name(stem)}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"fa::{name(stem)}", ("cpu", "cuda"))(torch.compiler.disable(run))
    torch.library.register_fake(f"fa::{name(stem)}", fake)


def _register_attention(rung: Rung) -> None:
    stem = rung.stem

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        causal: bool = False,
        window: int | None = None,
        q_starts: Tensor | None = None,
        k_starts: Tensor | None = None,
        lengths: Tensor | None = None,
        pages: Tensor | None = None,
        splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        masks = {"scale": scale, "causal": causal, "window": window, "cu_seqlens": _starts(q_starts, k_starts)}
        return loaded(stem, q.device.type)(q, k, v, **masks, lengths=lengths, pages=pages, splits=splits)

    def fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
        _require_dtypes(rung, q, k, v)
        return room(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    schema = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, {CACHE_OPTIONS}) -> (Tensor, Tensor)"
    _define(stem, schema, attention, fake)
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
        q_starts: Tensor | None = None,
        k_starts: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel, options = loaded(stem, q.device.type), {"scale": scale, "causal": causal, "window": window}
        options["deterministic"] = deterministic
        starts = _starts(q_starts, k_starts)
        if starts is None or "varlen" in rung.features:
            return kernel(q, k, v, o, lse, do, **options, cu_seqlens=starts)
        return _one_by_one(kernel, (q, k, v, o, lse, do), starts, options)

    def fake(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *options: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        _require_dtypes(rung, q, k, v, o, do)
        return room(q), room(k), room(v)

    schema = f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {OPTIONS}, {BACKWARD_OPTIONS}) -> (Tensor, Tensor, Tensor)"
    _define(stem, schema, backward, fake)
    _no_gradient(stem)


def _one_by_one(
    kernel: Kernel, inputs: tuple[Tensor, ...], starts: tuple[Tensor, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a packed batch by a backward rung that takes one sequence at a time, and so on a GPU waits for the row
    numbers. ValueError where they don't rise from 0 to the number of rows."""
    q, k, v, o, lse, do = inputs
    rows = [x.tolist() for x in starts]
    for x, n in zip(rows, (q.shape[2], k.shape[2]), strict=True):
        if q.shape[0] != 1 or x[0] != 0 or x[-1] != n or any(a > b for a, b in zip(x, x[1:])) or len(x) != len(rows[0]):
            raise ValueError(f"q_starts or k_starts is {x}; it has to rise from 0 to {n}, in a batch of 1")
    grads = tuple(room(x).zero_() for x in (q, k, v))
    for q0, q1, k0, k1 in zip(rows[0], rows[0][1:], rows[1], rows[1][1:]):
        if q0 < q1 and k0 < k1:
            of_q, of_k = ([x[:, :, a:b] for x in xs] for xs, a, b in (((q, o, lse, do), q0, q1), ((k, v), k0, k1)))
            out = grads[0][:, :, q0:q1], grads[1][:, :, k0:k1], grads[2][:, :, k0:k1]
            kernel(of_q[0], *of_k, of_q[1], of_q[2].contiguous(), of_q[3], **options, out=out)
    return grads


def _register_softmax(rung: Rung) -> None:
    stem = rung.stem

    def softmax(s: Tensor) -> tuple[Tensor, Tensor]:
        return loaded(stem, s.device.type)(s)

    def fake(s: Tensor) -> tuple[Tensor, Tensor]:
        _require_dtypes(rung, s)
        return s.new_empty(s.shape), s.new_empty(s.shape[:-1], dtype=torch.float32)

    schema = "(Tensor s) -> (Tensor, Tensor)"
    _define(stem, schema, softmax, fake)
    _no_gradient(stem)


OPERATORS: dict[str, torch._ops.OpOverloadPacket] = {}
for _rung in rungs():
    _register = {"softmax": _register_softmax, "attention_backward": _register_backward}.get(
        _rung.op, _register_attention
    )
    _register(_rung)
    OPERATORS[_rung.stem] = getattr(torch.ops.fa, name(_rung.stem))
