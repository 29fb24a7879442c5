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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import op
from .kernel import as_loaded
from .layouts import IN_L2, LAYOUTS, Block, block, cut, pieces, require, split
from .ranks import Me, RanksError, launch

__all__ = ["LAYOUTS", "Block", "Me", "Plan", "RanksError", "agree", "all_gather_attention", "block", "forward_stem"]
__all__ += ["launch", "local", "ring_attention", "split", "ulysses_attention", "whole"]

FORWARD = {True: "32_ping_pong", False: "20_causal_gqa"}  # by whether the GPU has wgmma
FORWARD_FP32 = "04_fa2_fp32"


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
    """The sequence (B,H,N,D) whose rows the ranks have: `local` undone. ValueError for lengths that the layout doesn't give."""
    lengths = tuple(part.shape[2] for part in parts)
    require(lengths, layout, causal=True)
    places = _places(lengths, layout, parts[0].device)
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
    dtypes = ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')}" for name, x in zip("qkv", (q, k, v)))
    mine["mixed"] = "" if q.dtype == k.dtype == v.dtype else dtypes
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
        if theirs["mixed"]:
            raise ValueError(f"rank {other}: {theirs['mixed']}; they have to be the same")
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


def _planned(
    q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool | None, layout: str | None, plan: Plan | None
) -> Plan:
    """The plan of a call: the one given, or what the ranks agree on. ValueError where the call is of other lengths, mask or layout."""
    if plan is None:
        return agree(q, k, v, group, bool(causal), "contiguous" if layout is None else layout)
    rows = plan.lengths[plan.rank]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] != rows:
            raise ValueError(f"{name} has {x.shape[2]} rows, the plan {rows}; `agree` makes a plan for each length")
    for name, asked, planned in (("causal", causal, plan.causal), ("layout", layout, plan.layout)):
        if asked is not None and asked != planned:
            raise ValueError(f"{name} is {asked!r}, the plan's {planned!r}; leave {name} out, or make a plan with it")
    return plan


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
    causal: bool | None = None,
    layout: str | None = None,
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
    plan: Plan | None = None,
    kernel: str | None = None,
) -> Tensor:
    """O (B,H,n,D) of this rank's queries and the keys of all ranks, with a gradient.

    q (B,H,n,D), k and v (B,Hkv,n,D): this rank's rows, fp16 or bf16 (float32 without a mask and grouped heads), D 64 or 128; which rows
    of the sequence they are, `layout` says (`split`). plan: from `agree`, for calls that come again and again; it says what group,
    mask and layout are. Without one, the ranks agree first, which costs a round of messages; by default without a mask, contiguous.
    kernel: the stem of the rung that attends, by default `forward_stem`; its backward rung is that of `helpers.op`. deterministic: the
    gradients have the same bits every time, as O always has; None: where the rung can do that, which 22 and 33 can, and 23 can not.
    Memory: this rank's rows, up to two more pairs of K and V, and O in float32 where it has more than two parts.
    Raises ValueError for shapes that don't go together, as `agree` does, and for a plan of other lengths, mask or layout.
    """
    plan = _planned(q, k, v, group, causal, layout, plan)
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
    blocks = [cut(seen, most_keys(q)) if (seen := plan.block(rank)) else [] for rank in range(plan.ranks)]
    order = [(plan.rank - step) % plan.ranks for step in range(plan.ranks)]
    output = Output(q, stem, scale, [blocks[owner] for owner in order])
    with _link(plan, q) as link:
        moving = [k.contiguous(), v.contiguous()]
        for owner in order:
            coming = link.send((owner, moving)) if owner != order[-1] else None  # on its way while the kernel works
            for seen in blocks[owner]:
                output.add(seen, *moving)
            (moving,) = coming.wait() if coming else (moving,)
    return output.result()


class Output:
    """O (B,H,n,D) and LSE (B,H,n) of a rank's queries and the keys so far, block by block. blocks: all that will come, in groups in the
    order in which they do; the first group has all queries."""

    def __init__(self, q: Tensor, stem: str, scale: float, blocks: list[list[Block]]) -> None:
        self.q, self.options, self.summed = q, {"scale": scale}, _summed(q, blocks)
        self.attend, self.merge = (op.loaded(which, q.device.type) for which in (stem, "50_ring"))
        self.o = self.lse = None
        self.left = sum(map(len, blocks))
        if len(blocks[0]) > 1:  # the first block hasn't all queries
            self.o = torch.zeros(q.shape, dtype=self.summed, device=q.device)
            self.lse = torch.full(q.shape[:3], -torch.inf, device=q.device)

    def add(self, seen: Block, k: Tensor, v: Tensor) -> None:
        """What seen.rows of the queries see of seen.keys of these k and v."""
        masked = {"causal": True} if seen.causal else {}
        keys = (x[:, :, seen.keys] for x in (k, v))
        part = self.attend(self.q[:, :, seen.rows], *keys, **self.options, **masked)
        self.left -= 1
        if self.o is None:
            self.o, self.lse = part
            return
        kind = self.summed if self.left else self.q.dtype
        if part[0].shape == self.o.shape and kind != self.o.dtype:  # a merge of all queries rounds on its way
            into = torch.empty_like(self.o, dtype=kind)
            self.merge(self.o, self.lse, *part, out=(into, self.lse))
            self.o = into
            return
        self.o = self.o.to(self.summed)
        rows = self.o[:, :, seen.rows], self.lse[:, :, seen.rows]
        self.merge(*rows, *part, out=rows)

    def result(self) -> tuple[Tensor, Tensor]:
        """O as q, and LSE."""
        return self.o.to(self.q.dtype), self.lse


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

    dK and dV travel behind their K and V: each rank adds its part and passes them on, and the last one sends them home. A rank's own block
    waits for no message: half of its heads come first, while the first keys arrive, the others last, while dK and dV come home.
    """
    kernel = op.loaded(_backward_stem(q, stem, deterministic), q.device.type)
    options = {"scale": scale}
    if deterministic is not False and "deterministic" in kernel.rung.features:
        options["deterministic"] = True
    Hkv, group, last = k.shape[1], q.shape[1] // k.shape[1], plan.ranks - 1
    blocks = [cut(seen, most_keys(q), most_keys(q)) if (seen := plan.block(rank)) else [] for rank in range(plan.ranks)]
    dq = torch.zeros(q.shape, dtype=_summed(q, blocks), device=q.device)

    def gradients(seen: Block, keys: list[Tensor], heads: slice, out: list[Tensor]) -> None:
        """dK and dV of what these heads' queries see of keys; their dQ is added up."""
        its = slice(heads.start * group, heads.stop * group), seen.rows
        of_q, of_o, of_lse, of_do, sums = (x[:, its[0], its[1]] for x in (q, o, lse, do, dq))
        masked = {"causal": True} if seen.causal else {}
        of_keys = [x[:, heads, seen.keys] for x in keys]
        dq_part = torch.empty_like(of_q)
        kernel(of_q, *of_keys, of_o, of_lse.contiguous(), of_do, out=(dq_part, *out), **options, **masked)
        sums += dq_part

    def part(rank: int, keys: list[Tensor], heads: slice) -> list[Tensor]:
        """dK and dV of that rank's keys, 0 where these queries see none; in float32 where a key has more than one block."""
        seen = blocks[rank]
        alone = len({each.keys.start for each in seen}) == len(seen)
        sums = [torch.zeros_like(x[:, heads], dtype=k.dtype if alone else torch.float32) for x in keys]
        for each in seen:
            totals = [x[:, :, each.keys] for x in sums]
            found = totals if alone else [torch.empty_like(x, dtype=k.dtype) for x in totals]
            gradients(each, keys, heads, found)
            for total, x in zip(totals, [] if alone else found):
                total += x
        return sums

    mine, first = [k.contiguous(), v.contiguous()], slice(0, (Hkv + 1) // 2)
    if plan.ranks == 1:
        dk, dv = part(0, mine, slice(0, Hkv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    with _link(plan, q) as link:
        coming = link.send((plan.rank, mine))
        halves = [(first, part(plan.rank, mine, first))]
        (keys,), sums = coming.wait(), []
        for step in range(1, plan.ranks):
            owner = (plan.rank - step) % plan.ranks
            onward = [(owner, keys)] if step < last else []
            onward += [((owner + 1) % plan.ranks, sums)] if sums else []
            coming = link.send(*onward)
            parts = part(owner, keys, slice(0, Hkv))
            arrived = coming.wait()
            if sums:
                sums = [x.float().add_(of_keys) for x, of_keys in zip(arrived.pop(), parts)]
            else:  # nobody has been here before
                sums = [x.to(k.dtype) for x in parts]
            keys = arrived.pop() if arrived else []
        coming = link.send(((plan.rank + 1) % plan.ranks, sums))
        if (rest := slice(first.stop, Hkv)).stop > rest.start:
            halves.append((rest, part(plan.rank, mine, rest)))
        (home,) = coming.wait()
    grads = [torch.empty_like(x) for x in mine]
    for heads, parts in halves:
        for whole, of_others, of_mine in zip(grads, home, parts):
            torch.add(of_others[:, heads], of_mine, out=whole[:, heads])
    return dq.to(q.dtype), *grads


def most_keys(q: Tensor) -> int:
    """Keys of a block, at most. With more, K and V of a head don't stay in the L2: the CTAs drift apart, and read them from HBM again
    and again. That takes time, and power which the tensor cores then lack."""
    return max(1, IN_L2 // (2 * q.shape[3] * q.element_size()))


def _summed(q: Tensor, blocks: list[list[Block]]) -> torch.dtype:
    """Of sums over blocks: two parts of a row, which the kernel has rounded, are added and rounded once; more are summed up in float32."""
    parts = sum(len({each.keys.start for each in of_rank}) for of_rank in blocks)
    return torch.float32 if parts > 2 else q.dtype


# Without a ring


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    causal: bool | None = None,
    layout: str | None = None,
    *,
    scale: float | None = None,
    plan: Plan | None = None,
    attend: Callable | None = None,
) -> Tensor:
    """The same O by gathering all keys first: every rank holds K and V of the whole sequence.

    Arguments as of ring_attention. attend: `(q, k, v, causal, scale) -> o` in place of our kernels. ValueError for striped under a
    mask: a rank's rows have to be runs of the sequence, of which each is one causal call.
    """
    plan = _planned(q, k, v, group, causal, layout, plan)
    if plan.causal and plan.layout == "striped":
        raise ValueError("all_gather_attention takes contiguous and zigzag under a causal mask, not striped")
    attend = attend or _by_operator(forward_stem(q, k, plan.causal))
    k, v = (_Gather.apply(x, plan) for x in (k, v))
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
    causal: bool | None = None,
    layout: str | None = None,
    *,
    scale: float | None = None,
    plan: Plan | None = None,
    attend: Callable | None = None,
) -> Tensor:
    """The same O by exchanging heads for rows: each rank attends for H / ranks heads over the whole sequence (DeepSpeed-Ulysses,
    arXiv 2309.14509). Arguments as of all_gather_attention. ValueError where the ranks don't divide H and Hkv."""
    plan = _planned(q, k, v, group, causal, layout, plan)
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


def _runs(plan: Plan) -> list[tuple[int, slice]]:
    """Rows of which rank, and which of them, one run after the other: without a mask rank by rank, under one as the sequence goes."""
    found = []
    for rank, of_rank in enumerate(pieces(plan.lengths, plan.layout if plan.causal else "contiguous")):
        begin = 0
        for run in of_rank:
            found.append((run.start, rank, slice(begin, begin + len(run))))
            begin += len(run)
    return [run for _, *run in sorted(found, key=lambda x: x[0])]


class _Gather(torch.autograd.Function):
    """x (B,H,n,D) of each rank -> (B,H,N,D), run by run. Back, each rank gets the sum of what all say of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan, n = plan, max(plan.lengths)
        mine = _messages(torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[2])).contiguous(), plan)
        gathered = mine.new_empty(plan.ranks * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(gathered, mine, group=plan.group)
        of_ranks = gathered.chunk(plan.ranks)
        return torch.cat([of_ranks[rank][:, :, rows] for rank, rows in _runs(plan)], 2).to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        plan, (B, H, _, D) = ctx.plan, grad.shape
        sums = grad.new_zeros(plan.ranks * B, H, max(plan.lengths), D, dtype=torch.float32)
        of_ranks, begin = sums.chunk(plan.ranks), 0
        for rank, rows in _runs(plan):
            of_ranks[rank][:, :, rows] = grad[:, :, begin : (begin := begin + rows.stop - rows.start)]
        sums = _messages(sums, plan)
        mine = torch.empty_like(sums[:B])
        dist.reduce_scatter_tensor(mine, sums, group=plan.group)
        return mine[:, :, : plan.lengths[plan.rank]].to(grad), None


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
    return x if _by_nccl(plan.group, x.device) else x.cpu()


# Messages


def _by_nccl(group: Any, device: torch.device) -> bool:
    """Whether NCCL moves tensors of this device in the group, which may have a back end for each kind of device; gloo moves those of
    CPUs."""
    back_ends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return back_ends.get(device.type) == "nccl"


Load = tuple[int, list[Tensor]]  # the rank whose rows these are, and tensors (B,H,n,D) of them


@dataclass
class _Coming:
    """What is on its way to this rank, load by load, and what it sends meanwhile."""

    link: _Link
    loads: list[list[Tensor]]
    works: list
    held: list[Tensor]  # until they have been sent

    def wait(self) -> list[list[Tensor]]:
        """The loads, once they are there; on a GPU only its current stream waits."""
        for work in self.works:
            work.wait()
        device = self.link.device
        return [[x.to(device) for x in load] for load in self.loads]


class _Link:
    """To the next rank and from the one before. NCCL has a stream of its own: the kernel that is started after `send` runs beside the
    messages. gloo moves CPU tensors only: those of a GPU go through the CPU."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.group = plan.group or dist.group.WORLD
        self.next, self.last = (dist.get_global_rank(self.group, (plan.rank + i) % plan.ranks) for i in (1, -1))
        self.nccl = _by_nccl(self.group, device)
        self.sent = 0  # messages so far: the tag of the next, by which gloo tells them apart

    def send(self, *loads: Load) -> _Coming:
        """Starts to send `loads` to the next rank, as one message, and to receive what the one before sends: as many tensors, of the
        rows that are one rank further back."""
        lengths, place = self.plan.lengths, self.device if self.nccl else "cpu"
        out = [x.to(place) for _, load in loads for x in load]
        into = [
            [x.new_empty(*x.shape[:2], lengths[(owner - 1) % self.plan.ranks], x.shape[3], device=place) for x in load]
            for owner, load in loads
        ]
        ends = ((dist.isend, self.next, out), (dist.irecv, self.last, [x for load in into for x in load]))
        ops = [
            dist.P2POp(which, x, rank, self.group, self.sent + i)
            for which, rank, tensors in ends
            for i, x in enumerate(tensors)
        ]
        self.sent += len(out)
        works = dist.batch_isend_irecv(ops) if ops else []
        if works and self.nccl:
            let_messages_begin()
        return _Coming(self, into, works, out)


def let_messages_begin() -> None:
    """The kernel that follows may fill the GPU. If it came first, no SM would be left for messages until it is done: so it comes some
    5 microseconds later, which is more than NCCL needs to begin."""
    torch.cuda._sleep(10_000)  # cycles


@contextlib.contextmanager
def _link(plan: Plan, like: Tensor) -> Iterator[_Link]:
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        yield _Link(plan, like.device)
