"""Attention over a sequence that is split over several ranks: ring attention, and the two ways that need no ring.

    o = ring.ring_attention(q, k, v, causal=True, layout="zigzag")

Every rank calls it with its own rows of q, k and v. K and V travel round the ring while the kernel works; (O, LSE) of what has passed
are merged (kernels/50_ring.cu). Ring Attention with Blockwise Transformers: arXiv 2310.01889; striped: arXiv 2311.09431.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import op
from .kernel import as_loaded
from .layouts import LAYOUTS, Block, block, pieces, require, split
from .ranks import Me, RanksError, launch

__all__ = ["LAYOUTS", "Block", "Me", "Plan", "RanksError", "agree", "all_gather_attention", "block", "forward_stem"]
__all__ += ["launch", "local", "ring_attention", "split", "ulysses_attention", "whole"]

FORWARD = {True: "32_ping_pong", False: "20_causal_gqa"}  # by whether the GPU has wgmma
FORWARD_FP32, BACKWARD_FP32 = "04_fa2_fp32", "22_backward_fp32"


@dataclass(frozen=True)
class Plan:
    """What the ranks have agreed on: `lengths`, the rows of each, and this one's number. `agree` makes one."""

    group: Any
    rank: int
    lengths: tuple[int, ...]
    layout: str
    causal: bool

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.lengths)

    def block(self, s: int) -> Block | None:
        """What this rank's queries see of rank s's keys."""
        return block(self.rank, s, self.lengths, self.layout, self.causal)


# Rows of a whole sequence


def local(x: Tensor, rank: int, ranks: int, layout: str = "contiguous") -> Tensor:
    """Rank's rows of x (B,H,N,D), in the order in which it has them."""
    return x[:, :, split(x.shape[2], ranks, layout)[rank]].contiguous()


def whole(parts: Sequence[Tensor], layout: str = "contiguous") -> Tensor:
    """The sequence (B,H,N,D) whose rows the ranks have: `local` undone."""
    places = _places([part.shape[2] for part in parts], layout, parts[0].device)
    return torch.cat(list(parts), 2)[:, :, places.argsort()]


# What the ranks have to agree on


def agree(q: Tensor, k: Tensor, v: Tensor, group: Any = None, causal: bool = False, layout: str = "contiguous") -> Plan:
    """A plan for calls with tensors of these shapes. Every rank has to call it: they tell each other what they have.

    q (B,H,n,D), k and v (B,Hkv,n,D), n a rank's own. Raises ValueError on every rank, with the same sentence, where one of them has
    other batches, heads, head dimensions, dtypes, mask or layout than rank 0, or where the layout doesn't allow the lengths.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape), "dtype": str(q.dtype)}
    mine |= {"causal": bool(causal), "layout": layout}
    all_of_them: list = [None] * ranks
    dist.all_gather_object(all_of_them, mine, group=group)
    for other, theirs in enumerate(all_of_them):
        for name, shape in (("q", theirs["q"]), ("k", theirs["k"]), ("v", theirs["v"])):
            if len(shape) != 4:
                raise ValueError(f"rank {other}: {name} has shape {shape}; ring attention takes (B, H, N, D)")
        (B, H, n, D), (Bk, Hkv, nk, Dk) = theirs["q"], theirs["k"]
        if (B, n, D) != (Bk, nk, Dk) or theirs["v"] != theirs["k"] or H % Hkv:
            told = ", ".join(f"{x} {theirs[x]}" for x in "qkv")
            raise ValueError(f"rank {other}: {told}; each rank has as many keys as queries, and H a multiple of Hkv")
        for name in mine:
            first, here = all_of_them[0][name], theirs[name]
            if name in ("q", "k", "v"):  # but for the length
                first, here = (*first[:2], "n", first[3]), (*here[:2], "n", here[3])
            if first != here:
                shown = [x if isinstance(x, str) else str(x).replace("'", "") for x in (here, first)]
                raise ValueError(f"rank {other} has {name} {shown[0]}, rank 0 {shown[1]}; they have to be the same")
    lengths = tuple(theirs["q"][2] for theirs in all_of_them)
    require(lengths, layout, causal)
    return Plan(group, rank, lengths, layout, bool(causal))


def forward_stem(q: Tensor, k: Tensor, causal: bool) -> str:
    """The rung that attends: 32 on Hopper, else 20; of float32 04, which knows neither a mask nor grouped heads: ValueError."""
    if q.dtype == torch.float32:
        if causal or q.shape[1] != k.shape[1]:
            what = "a causal mask" if causal else f"{q.shape[1]} heads on {k.shape[1]}"
            raise ValueError(f"float32 goes through {FORWARD_FP32}, which doesn't take {what}: use fp16 or bf16")
        return FORWARD_FP32
    return FORWARD[q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)]


def _backward_stem(q: Tensor, forward: str, deterministic: bool | None) -> str:
    """The backward rung. NotImplementedError where `deterministic` is asked for and none can do that."""
    needs = frozenset({"causal", "gqa"} | ({"deterministic"} if deterministic else set()))
    return op.backward_rung(q.dtype, q.shape[-1], forward, needs).stem


# The ring


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    causal: bool = False,
    layout: str = "contiguous",
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
    plan: Plan | None = None,
    kernel: str | None = None,
    cu_seqlens: Any = None,
) -> Tensor:
    """O (B,H,n,D) of this rank's queries and the keys of all ranks, with a gradient.

    q (B,H,n,D), k and v (B,Hkv,n,D): this rank's rows, fp16 or bf16 (float32 without a mask and grouped heads), D 64 or 128; which rows
    of the sequence they are, `layout` says (`split`). plan: from `agree`, for calls that come again and again; without one, the
    ranks agree first, which costs a round of messages. kernel: the stem of the rung that attends, by default `forward_stem`; its backward
    rung is that of `helpers.op`. deterministic: the gradients have the same bits every time, as O always has; None: where the rung
    can do that, which 22 and 33 can, and 23 can not.
    Memory: this rank's rows, two more pairs of K and V, and O in float32 where there are more than two ranks.
    Raises ValueError for shapes that don't go together, as `agree` does, and for cu_seqlens, which it doesn't take.
    """
    if cu_seqlens is not None:
        raise ValueError("ring attention takes no cu_seqlens (varlen): split the batch by sequences, or pad them")
    plan = plan or agree(q, k, v, group, causal, layout)
    stem = kernel or forward_stem(q, k, plan.causal)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(q, k, v, plan, scale, stem, deterministic)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, stem: str, same: bool | None
    ) -> Tensor:
        with as_loaded():
            o, lse = _forward(q, k, v, plan, scale, stem)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.told = plan, scale, stem, same
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple:
        with torch.no_grad(), as_loaded():
            return *backward_pass(*ctx.saved_tensors, do.contiguous(), *ctx.told), None, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, stem: str) -> tuple[Tensor, Tensor]:
    """O as q and LSE (B,H,n) of all keys: this rank's own first, then those of ranks r - 1, r - 2, … as they pass."""
    attend, merge = (op.loaded(which, q.device.type) for which in (stem, "50_ring"))
    options = {"scale": scale}
    o = lse = None
    with _link(plan, q) as link:
        moving = [k.contiguous(), v.contiguous()]
        for step in range(plan.ranks):
            coming = link.send(moving) if step < plan.ranks - 1 else None  # on its way while the kernel works
            seen = plan.block((plan.rank - step) % plan.ranks)
            if seen is not None:
                keys = [x[:, :, seen.keys] for x in moving]
                part = attend(q[:, :, seen.rows], *keys, **options, **({"causal": True} if seen.causal else {}))
                if o is None:
                    o, lse = part
                    o = o.float() if plan.ranks > 2 else o  # one merge is rounded once; more are summed up in fp32
                else:
                    rows = o[:, :, seen.rows], lse[:, :, seen.rows]
                    merge(*rows, *part, out=rows)
            moving = coming.wait() if coming else moving
    return o.to(q.dtype), lse


def backward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    plan: Plan,
    scale: float,
    stem: str,
    deterministic: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of this rank. With the LSE of all keys and the whole O, each block's part is what a kernel for one GPU computes.
    dK and dV travel with their K and V, each rank adds its part, and after a whole round they are home."""
    kernel = op.loaded(_backward_stem(q, stem, deterministic), q.device.type)
    options = {"scale": scale}
    if deterministic is not False and "deterministic" in kernel.rung.features:
        options["deterministic"] = True
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    with _link(plan, q) as link:
        moving, grads, home = [k.contiguous(), v.contiguous()], None, None
        for step in range(plan.ranks):
            coming = link.send(moving) if step < plan.ranks - 1 else None
            seen = plan.block((plan.rank - step) % plan.ranks)
            parts = None
            if seen is not None:
                of_q = [x[:, :, seen.rows] for x in (q, o, lse, do)]
                keys = [x[:, :, seen.keys] for x in moving]
                masked = {"causal": True} if seen.causal else {}
                parts = kernel(of_q[0], *keys, of_q[1], of_q[2].contiguous(), of_q[3], **options, **masked)
                dq[:, :, seen.rows] += parts[0]
            grads = (
                [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in moving]
                if home is None
                else home.wait()
            )
            if parts is not None:
                for total, part in zip(grads, parts[1:]):
                    total[:, :, seen.keys] += part
            home = link.send(grads, (plan.rank - step) % plan.ranks)
            moving = coming.wait() if coming else moving
        dk, dv = home.wait()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# Without a ring


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    causal: bool = False,
    layout: str = "contiguous",
    *,
    scale: float | None = None,
    plan: Plan | None = None,
    attend: Callable | None = None,
) -> Tensor:
    """The same O by gathering all keys first: every rank holds K and V of the whole sequence.

    Arguments as of ring_attention. attend: `(q, k, v, causal, scale) -> o` in place of our kernels. ValueError for striped under a
    mask: a rank's rows have to be runs of the sequence, of which each is one causal call.
    """
    plan = plan or agree(q, k, v, group, causal, layout)
    if plan.causal and layout == "striped":
        raise ValueError("all_gather_attention takes contiguous and zigzag under a causal mask, not striped")
    attend = attend or _by_operator(forward_stem(q, k, plan.causal))
    k, v = (_in_order(_Gather.apply(x, plan), plan) for x in (k, v))
    if not plan.causal:
        return attend(q, k, v, False, scale)
    begin, done = 0, []
    for run in pieces(plan.lengths, plan.layout)[plan.rank]:  # the last query of a run sees the last key that is given
        of_q, begin = q[:, :, begin : begin + len(run)], begin + len(run)
        done.append(attend(of_q, k[:, :, : run.stop], v[:, :, : run.stop], True, scale))
    return torch.cat(done, 2)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    causal: bool = False,
    layout: str = "contiguous",
    *,
    scale: float | None = None,
    plan: Plan | None = None,
    attend: Callable | None = None,
) -> Tensor:
    """The same O by exchanging heads for rows: each rank attends for H / ranks heads over the whole sequence (DeepSpeed-Ulysses,
    arXiv 2309.14509). Arguments as of all_gather_attention. ValueError where the ranks don't divide H and Hkv."""
    plan = plan or agree(q, k, v, group, causal, layout)
    if q.shape[1] % plan.ranks or k.shape[1] % plan.ranks:
        raise ValueError(
            f"{plan.ranks} ranks share out {q.shape[1]} query heads and {k.shape[1]} of K and V; they have to divide both"
        )
    attend = attend or _by_operator(forward_stem(q, k, plan.causal))
    q, k, v = (_in_order(_Swap.apply(x, plan, True), plan) for x in (q, k, v))
    o = attend(q, k, v, plan.causal, scale)
    if plan.causal and plan.layout != "contiguous":  # as the rows came
        o = o[:, :, _places(plan.lengths, plan.layout, o.device)]
    return _Swap.apply(o, plan, False)


def _by_operator(stem: str) -> Callable:
    return lambda q, k, v, causal, scale: op.operator(stem)(q, k, v, scale, causal)[0]


def _places(lengths: Sequence[int], layout: str, device: torch.device) -> Tensor:
    """Of all rows, rank by rank, their places in the sequence."""
    runs = [run for of_rank in pieces(lengths, layout) for run in of_rank]
    return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in runs])


def _in_order(x: Tensor, plan: Plan) -> Tensor:
    """Rows of x (B,H,N,D), which come rank by rank, in the order of the sequence."""
    if plan.layout == "contiguous" or not plan.causal:
        return x
    return x[:, :, _places(plan.lengths, plan.layout, x.device).argsort()]


class _Gather(torch.autograd.Function):
    """x (B,H,n,D) of each rank -> (B,H,N,D), rank by rank. Back, each rank gets the sum of what all say of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan, n = plan, max(plan.lengths)
        mine = _messages(torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[2])).contiguous(), plan)
        parts = [torch.empty_like(mine) for _ in plan.lengths]
        dist.all_gather(parts, mine, group=plan.group)
        return torch.cat([part[:, :, :rows] for part, rows in zip(parts, plan.lengths)], 2).to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        plan = ctx.plan
        total = _messages(grad.float().contiguous(), plan)
        dist.all_reduce(total, group=plan.group)
        begin = sum(plan.lengths[: plan.rank])
        return total[:, :, begin : begin + plan.lengths[plan.rank]].to(grad), None


class _Swap(torch.autograd.Function):
    """Heads for rows: (B,H,n,D) -> (B,H / ranks,N,D), rows rank by rank; not `there`: the other way. Each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, there: bool) -> Tensor:
        ctx.plan, ctx.there = plan, there
        B, H, _, D = x.shape
        n, h = plan.lengths[plan.rank], H // plan.ranks if there else H
        parts = x.split(h, 1) if there else x.split(plan.lengths, 2)
        shapes = [(B, h, rows if there else n, D) for rows in plan.lengths]
        sizes = [math.prod(shape) for shape in shapes]
        sent = _messages(torch.cat([part.reshape(-1) for part in parts]), plan)
        got = sent.new_empty(sum(sizes))
        dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], group=plan.group)
        pieces = [piece.view(shape) for piece, shape in zip(got.split(sizes), shapes)]
        return torch.cat(pieces, 2 if there else 1).to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Swap.apply(grad, ctx.plan, not ctx.there), None, None


def _messages(x: Tensor, plan: Plan) -> Tensor:
    """x where the group's messages can be sent from: gloo moves CPU tensors."""
    return x.cpu() if dist.get_backend(plan.group) == "gloo" else x


# Messages


@dataclass
class _Coming:
    """Tensors on their way to this rank."""

    link: _Link
    tensors: list[Tensor]
    works: list
    held: list[Tensor]  # what is being sent, until it has been

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there; on a GPU only its current stream waits."""
        return self.link.arrived(self)


class _Link:
    """To the next rank and from the one before. On CUDA messages have a stream of their own: the kernel that is started after `send` runs
    beside them. gloo moves CPU tensors only: those of a GPU go through the CPU."""

    def __init__(self, plan: Plan, like: Tensor) -> None:
        self.plan, self.ranks = plan, plan.ranks
        self.group = plan.group or dist.group.WORLD
        self.next, self.last = (dist.get_global_rank(self.group, (plan.rank + i) % plan.ranks) for i in (1, -1))
        self.stage = like.is_cuda and dist.get_backend(self.group) == "gloo"
        self.stream = _stream(like.device) if like.is_cuda and not self.stage else None
        self.at = plan.rank  # whose K and V this rank has
        self.sent = 0  # messages so far: the tag of the next, by which gloo tells them apart

    def send(self, tensors: list[Tensor], of: int | None = None) -> _Coming:
        """Starts to send `tensors` to the next rank; gives what comes from the one before. of: whose rows they are; of K and V, the
        link counts for itself."""
        if of is None:
            of, self.at = self.at, (self.at - 1) % self.ranks
        rows = self.plan.lengths[(of - 1) % self.ranks]  # what comes are those of the rank before
        into = [x.new_empty(*x.shape[:2], rows, x.shape[3]) for x in tensors]
        if self.ranks == 1:
            return _Coming(self, tensors, [], [])
        if self.stage:
            tensors, into = [x.cpu() for x in tensors], [x.cpu() for x in into]
        with self._on_its_stream():
            ops = [dist.P2POp(dist.isend, x, self.next, self.group, self.sent + i) for i, x in enumerate(tensors)]
            ops += [dist.P2POp(dist.irecv, x, self.last, self.group, self.sent + i) for i, x in enumerate(into)]
            works = dist.batch_isend_irecv(ops)
        self.sent += len(tensors)
        return _Coming(self, into, works, tensors)

    @contextlib.contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(
            torch.cuda.current_stream()
        )  # what is sent has been computed, what it overwrites been read
        with torch.cuda.stream(self.stream):
            yield

    def arrived(self, coming: _Coming) -> list[Tensor]:
        """See _Coming.wait."""
        if self.stream is None:
            for work in coming.works:
                work.wait()
            device = torch.device("cuda", torch.cuda.current_device()) if self.stage else None
            return [x.to(device) for x in coming.tensors] if self.stage else coming.tensors
        with torch.cuda.stream(self.stream):
            for work in coming.works:
                work.wait()
        torch.cuda.current_stream().wait_stream(self.stream)  # from here on, memory of what was sent may be used again
        return coming.tensors


@contextlib.contextmanager
def _link(plan: Plan, like: Tensor) -> Iterator[_Link]:
    device = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with device:
        yield _Link(plan, like)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
