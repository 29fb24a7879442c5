"""Attention over several GPUs by one kernel, without a communication library inside the step: kernels/51_one_sided.cu.

    room = one_sided.share(k, plan)
    room.k.copy_(k), room.v.copy_(v)  # or computed there in the first place
    o, lse = one_sided.attend(q, room)

K and V lie in symmetric memory, which every GPU of the host can read over NVLink; some CTAs of each rank's kernel fetch the other
ranks' tiles. `together` runs all ranks in one process, one after the other: on the emulator, or on a single GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ladder.contract import SIGNALS, Peers, far_rows
from . import op, ring
from .kernel import Kernel, as_loaded
from .layouts import Block, cut
from .xray import Xray, xray

STEM = "51_one_sided"
COPIERS = 16  # CTAs that fetch, on a GPU; 1 on the emulator, where a block can't wait for one with a higher number


@dataclass
class Room:
    """What one rank keeps from call to call: `k` and `v` (B,Hkv,n,D), which the other ranks read and the caller fills; what it knows of
    theirs; memory for copies, and flags. `share` and `rooms` make one. Calls on one room follow each other on one stream."""

    rank: int
    causal: bool
    k: Tensor
    v: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    signals: tuple[Tensor, ...]
    near: Tensor  # (2, B * Hkv * far_rows * D)
    arrived: Tensor
    copiers: int
    plan: ring.Plan | None = None
    mapped: Any = None  # keeps k, v and the others' tensors mapped, which are mere views
    epoch: int = 0

    def peers(self, *steps: str) -> Peers:
        """For one call that does these steps, by default announce, attend and settle; a new epoch begins with `announce`."""
        if not steps or "announce" in steps:
            self.epoch += 1
        told = {"steps": steps} if steps else {}
        near_k, near_v = self.near
        return Peers(
            self.rank,
            self.keys,
            self.values,
            self.signals,
            near_k,
            near_v,
            self.arrived,
            self.epoch,
            self.copiers,
            **told,
        )

    def forget(self) -> None:
        """Sets this rank's flags as they were before the first call. All ranks have to, at a time when none attends."""
        self.epoch = 0
        for flags in (self.signals[self.rank], self.arrived):
            flags.zero_()


def share(k: Tensor, plan: ring.Plan, copiers: int = COPIERS) -> Room:
    """Room for K and V like k (B,Hkv,n,D) on a GPU, in memory that all ranks of the plan's group can read. Every rank has to call it.
    copiers: CTAs that fetch, as many on each rank.

    Raises ValueError for a layout that 51 doesn't take, for CPU tensors and, on every rank, for other numbers of copiers, torch's own
    errors where GPUs can't read each other's memory.
    """
    _require_layout(plan)
    if not k.is_cuda:
        raise ValueError(
            "ranks in processes of their own need GPUs; `one_sided.together` runs all of them in one process"
        )
    _require_the_same(copiers, plan)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # plain reads and writes are all that is needed
    import torch.distributed._symmetric_memory as symmetric

    size, most = k.numel() * k.element_size(), SIGNALS * 4
    at = [0, -(-size // 1024) * 1024]
    at.append(2 * at[1])
    memory = symmetric.empty(at[2] + most, dtype=torch.uint8, device=k.device)
    memory[at[2] :].zero_()
    group = plan.group or dist.group.WORLD
    handle = symmetric.rendezvous(memory, group)
    parts: list[list[Tensor]] = [[], [], []]
    for r in range(plan.ranks):
        for found, begin in zip(parts[:2], at):
            found.append(handle.get_buffer(r, tuple(k.shape), k.dtype, begin // k.element_size()))
        parts[2].append(handle.get_buffer(r, (SIGNALS,), torch.int32, at[2] // 4))
    torch.cuda.synchronize(k.device)
    dist.barrier(group)  # all flags are zero before anyone sets one
    keys, values, signals = map(tuple, parts)
    own = keys[plan.rank], values[plan.rank]
    return Room(
        plan.rank,
        plan.causal,
        *own,
        keys,
        values,
        signals,
        *_near(k, plan.rank, plan.ranks, plan.causal),
        copiers,
        plan,
        (memory, handle),
    )


def attend(q: Tensor, room: Room, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """O (B,H,n,D) and LSE (B,H,n) of this rank's queries and the keys of all ranks. Every rank has to call it, as often as the others.
    When the call is over (on its stream), room.k and room.v may be overwritten. The kernel fills the GPU while it waits for other ranks: no
    collective that they need to come here may be under way on another stream. Where the L2 doesn't hold a head's keys, only the copies
    are this kernel's, and the blocks are the ring's. RuntimeError where a CUDA graph is being captured: each replay would be the same
    epoch, and wait for nobody."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{STEM} can't be captured in a CUDA graph: its flags count the calls, and replays would be one"
        )
    kernel = op.loaded(STEM, q.device.type)
    with as_loaded(), torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if _fits(q, room):
            return _run(kernel, q, room, scale)
        return _in_blocks(kernel, q, room, scale, "announce", "fetch", "settle")


def _run(kernel: Kernel, q: Tensor, room: Room, scale: float | None, *steps: str) -> tuple[Tensor, Tensor]:
    """The kernel, for one call that does these steps (`Room.peers`)."""
    epoch = room.epoch
    try:
        return kernel(q, room.k, room.v, scale=scale, causal=room.causal, peers=room.peers(*steps))
    except Exception:  # nothing was launched: the others count this call as the next one, too
        room.epoch = epoch
        raise


def _fits(q: Tensor, room: Room) -> bool:
    """Whether the L2 holds K and V of a head, of all that this rank sees."""
    return room.k.shape[2] + _far_rows(room) <= ring.most_keys(q)


def _far_rows(room: Room) -> int:
    return far_rows(room.rank, len(room.keys), room.k.shape[2], room.causal)


def _in_blocks(kernel: Kernel, q: Tensor, room: Room, scale: float | None, *steps: str) -> tuple[Tensor, Tensor]:
    """The copies on a stream of their own, while rung 32 attends to this rank's keys; then to the copies."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n, rows, most = q.shape[2], _far_rows(room), ring.most_keys(q)
    early = room.rank * (n // 2) if room.causal else rows  # of near_K's rows the last so many, which all queries see
    seen = [
        Block(slice(0, n), slice(rows - early, rows), False),
        Block(slice(n // 2, n), slice(0, rows - early), False),
    ]
    blocks = [
        cut(Block(slice(0, n), slice(0, n), room.causal), most),
        [part for each in seen for part in cut(each, most)],
    ]
    output = ring.Output(q, ring.forward_stem(q, room.k, room.causal), scale, blocks)
    with _aside(q) as copied:
        _run(kernel, q, room, scale, *steps)
    for each in blocks[0]:
        output.add(each, room.k, room.v)
    copied()
    near = [x.view(*room.k.shape[:2], rows, room.k.shape[3]) for x in room.near]
    for each in blocks[1]:
        output.add(each, *near)
    return output.result()


@contextlib.contextmanager
def _aside(like: Tensor) -> Iterator[Callable[[], None]]:
    """Inside, kernels are started on a stream that gets free SMs first, and what follows outside begins after them. Gives a function that
    makes what follows wait for their end."""
    if not like.is_cuda:
        yield lambda: None
        return
    here, aside = torch.cuda.current_stream(like.device), _stream(like.device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        yield lambda: here.wait_stream(aside)
    ring.let_messages_begin()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, room: Room, scale: float | None = None, deterministic: bool | None = None
) -> Tensor:
    """O (B,H,n,D) as `ring.ring_attention` gives it, with a gradient: the backward pass is that of the ring.

    k and v are copied into the room, unless they are the room's own: then the caller leaves them as they are until the backward pass.
    """
    if room.plan is None:
        raise ValueError("the room is of `rooms`: it has no group for the backward pass")
    return _OneSided.apply(q, k, v, room, q.shape[-1] ** -0.5 if scale is None else scale, deterministic)


class _OneSided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, room: Room, scale: float, same: bool | None) -> Tensor:
        for x, here in ((k, room.k), (v, room.v)):
            if x.data_ptr() != here.data_ptr():
                here.copy_(x)
        o, lse = attend(q, room, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.told = room.plan, scale, ring.forward_stem(q, k, room.causal), same
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple:
        with torch.no_grad(), as_loaded():
            grads = ring.backward_pass(*ctx.saved_tensors, do.contiguous(), *ctx.told)
        return *grads, None, None, None


# All ranks in one process


def rooms(
    keys: Sequence[Tensor], values: Sequence[Tensor], causal: bool = False, copiers: int | None = None
) -> list[Room]:
    """A room for each of the ranks that have these keys and values (B,Hkv,n,D), all on one device. copiers: on the emulator no more
    than blocks that run at a time (`Launcher.threads`), as they wait for each other once they have copied."""
    ranks, device = len(keys), keys[0].device
    copiers = copiers or (COPIERS if device.type == "cuda" else 1)
    signals = tuple(torch.zeros(SIGNALS, dtype=torch.int32, device=device) for _ in keys)
    given = tuple(keys), tuple(values), signals
    return [
        Room(r, causal, k, v, *given, *_near(k, r, ranks, causal), copiers)
        for r, (k, v) in enumerate(zip(keys, values))
    ]


def together(
    queries: Sequence[Tensor],
    its_rooms: Sequence[Room],
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """O and LSE of each rank, of which queries[r] (B,H,n,D) are one's. Ranks take turns: all say that their keys are there, then
    each attends, then each makes sure that the others have read its keys. After an error all begin anew."""
    kernel = kernel or op.loaded(STEM, queries[0].device.type)
    results: list[tuple[Tensor, Tensor]] = []
    try:
        for step in ("announce", "attend", "settle"):
            done = []
            for q, room in zip(queries, its_rooms):
                in_blocks = step == "attend" and not _fits(q, room)
                done.append(
                    _in_blocks(kernel, q, room, scale, "fetch") if in_blocks else _run(kernel, q, room, scale, step)
                )
            results = done if step == "attend" else results
    except BaseException:
        for room in its_rooms:
            room.forget()
        raise
    return results


def xrayed(
    queries: Sequence[Tensor],
    its_rooms: Sequence[Room],
    rank: int = 0,
    kernel: Kernel | None = None,
    scale: float | None = None,
) -> Xray:
    """The X-ray of one rank's kernel, on the emulator, after all ranks have said that their keys are there."""
    kernel = kernel or op.loaded(STEM, "cpu")
    for q, room in zip(queries, its_rooms):
        kernel(q, room.k, room.v, scale=scale, causal=room.causal, peers=room.peers("announce"))
    room = its_rooms[rank]
    return xray(kernel, queries[rank], room.k, room.v, scale=scale, causal=room.causal, peers=room.peers("attend"))


def _near(k: Tensor, rank: int, ranks: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Memory for copies of the others' keys and values, and flags of their tiles."""
    B, Hkv, n, D = k.shape
    rows = far_rows(rank, ranks, n, causal)
    arrived = torch.zeros(max(1, B * Hkv * rows // 128), dtype=torch.int32, device=k.device)
    return k.new_empty(2, B * Hkv * rows * D), arrived


def _require_the_same(copiers: int, plan: ring.Plan) -> None:
    """A rank waits for as many copiers of each other rank as it has itself."""
    all_of_them: list = [None] * plan.ranks
    dist.all_gather_object(all_of_them, copiers, group=plan.group)
    if len({*all_of_them}) > 1:
        raise ValueError(f"the ranks have {', '.join(map(str, all_of_them))} copiers; they have to be as many on each")


def _require_layout(plan: ring.Plan) -> None:
    if len({*plan.lengths}) > 1:
        raise ValueError(f"the ranks have {', '.join(map(str, plan.lengths))} rows; 51 takes the same number of each")
    if plan.causal and plan.layout != "zigzag" and plan.ranks > 1:
        raise ValueError(f"layout {plan.layout!r} under a causal mask; 51 takes zigzag")
