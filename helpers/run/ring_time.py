"""How long ring attention takes: a model of a few numbers, to be held against measurements and then to plan with.

    time = ring_time.seconds(ring_time.Problem(N=65536), ring_time.Machine(), ranks=8, layout="zigzag")

Each rank computes one block at a time at the kernel's rate, while the next K and V come over its link. A block begins when the one
before it is done and its keys are there. While a message is under way, some SMs copy and don't compute. Nothing else is modelled: not
that short blocks run at a lower rate, nor that messages and kernels share a GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from .layouts import IN_L2, LAYOUTS


@dataclass(frozen=True)
class Machine:
    """A GPU and its link. rate: FLOP/s of the kernel; backward: of the backward pass; link: bytes/s each way; latency: seconds from
    the start of a message to its first byte; memory_bandwidth: bytes/s, for merges; launch: seconds that a kernel takes beyond its work;
    taken: the share of the GPU's SMs that copy while a message is under way, and so don't attend."""

    rate: float = 700e12
    backward: float = 560e12
    link: float = 290e9
    latency: float = 60e-6
    memory_bandwidth: float = 4e12
    launch: float = 10e-6
    taken: float = 16 / 132


@dataclass(frozen=True)
class Problem:
    """Attention over N tokens in all. Hkv: heads of K and V; itemsize: bytes of a number."""

    N: int
    H: int = 16
    Hkv: int = 16
    D: int = 128
    B: int = 1
    causal: bool = True
    itemsize: int = 2

    @property
    def flops(self) -> float:
        """Of the forward pass: 4·B·H·N·N·D, half of it under a causal mask."""
        return 4.0 * self.B * self.H * self.N * self.N * self.D / (2 if self.causal else 1)


def share(ranks: int, layout: str, causal: bool) -> np.ndarray:
    """How much of a whole block of scores each rank (row) computes in each step (column): 1, a half under the mask, or 0. In step t
    rank r has the keys of rank r - t. ValueError for another layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}; there are {', '.join(LAYOUTS)}")
    r, t = np.arange(ranks)[:, None], np.arange(ranks)[None, :]
    if not causal:
        return np.ones((ranks, ranks))
    if layout != "contiguous":
        return np.full((ranks, ranks), 0.5)
    return np.where(t == 0, 0.5, np.where(t <= r, 1.0, 0.0))


def timeline(
    problem: Problem, machine: Machine, ranks: int, layout: str = "zigzag", backward: bool = False
) -> pd.DataFrame:
    """What each rank does when: columns rank, step, what ("kernel": with its merge; "transfer": of the next K and V, and in the backward
    pass of the dK and dV behind them; "grads": of dK and dV alone), begin and end in seconds. Of the forward pass, or of the backward
    pass alone."""
    found = []
    for what, step, begin, end in (_backward if backward else _forward)(problem, machine, ranks, layout):
        found += [(rank, step, what, b, e) for rank, (b, e) in enumerate(zip(begin, end)) if e > b]
    return pd.DataFrame(found, columns=["rank", "step", "what", "begin", "end"])


Events = Iterator[
    tuple[str, int, np.ndarray, np.ndarray]
]  # of all ranks at a time; where begin is end, nothing happens


def _work(problem: Problem, machine: Machine, ranks: int, layout: str, flops: float, sums: float) -> np.ndarray:
    """Seconds that each rank (row) computes in each step (column). flops: of a score's head dimension; sums: bytes of each number of
    O that is added up, after the first step."""
    p, n = problem, problem.N / ranks
    shares = share(ranks, layout, p.causal)
    work = shares * flops * p.B * p.H * n * n * p.D / (machine.rate if flops == 4 else machine.backward)
    work += (shares > 0) * machine.launch
    merge = p.B * p.H * n * p.D * sums / machine.memory_bandwidth + machine.launch
    return work + (shares > 0) * (np.arange(ranks) > 0) * merge


def _message(problem: Problem, machine: Machine, ranks: int, size: float) -> float:
    """Seconds until K and V of a rank, `size` bytes a number, are with the next."""
    numbers = 2 * problem.B * problem.Hkv * problem.N / ranks * problem.D
    return machine.latency + numbers * size / machine.link


def _end(begin: np.ndarray, work: np.ndarray, start: np.ndarray, arrived: np.ndarray, taken: float) -> np.ndarray:
    """When `work` that is begun at `begin` is done, if a message takes a share of the SMs from `start` until it has arrived."""
    return begin + work + taken * np.maximum(0.0, np.minimum(arrived, begin + work) - start)


def _both(x: np.ndarray) -> np.ndarray:
    """When both ends of each message are there: this rank and the one before."""
    return np.maximum(x, np.roll(x, 1))


def _forward(problem: Problem, machine: Machine, ranks: int, layout: str) -> Events:
    work = _work(problem, machine, ranks, layout, 4.0, 10.0)  # fp32 read and written, a part read
    end, arrived = np.zeros(ranks), np.zeros(ranks)
    for t in range(ranks):
        begin = np.maximum(end, arrived)
        end = begin + work[:, t]
        if t < ranks - 1:
            start = _both(begin)
            arrived = start + _message(problem, machine, ranks, problem.itemsize)
            end = _end(begin, work[:, t], start, arrived, machine.taken)
            yield "transfer", t, start, arrived
        yield "kernel", t, begin, end


def _backward(problem: Problem, machine: Machine, ranks: int, layout: str) -> Events:
    """A rank's own block comes in two halves: under the first message and under the last (helpers.ring.backward_pass)."""
    work = _work(problem, machine, ranks, layout, 10.0, 14.0)
    end = np.zeros(ranks)
    if ranks == 1:
        yield "kernel", 0, end, end + work[:, 0]
        return
    halves, few, many = work[:, 0] / 2, problem.itemsize, 4  # bytes of a number: of a part; of a sum in float32
    arrived = end + _message(problem, machine, ranks, few)
    yield "transfer", 0, end, arrived
    begin, end = end, _end(end, halves, end, arrived, machine.taken)
    yield "kernel", 0, begin, end
    for t in range(1, ranks):
        begin = np.maximum(end, arrived)
        end = begin + work[:, t]
        size = few * (t < ranks - 1) + (t > 1) * (few if t == 2 else many)  # K and V; dK and dV
        if size:
            start = _both(begin)
            arrived = start + _message(problem, machine, ranks, size)
            end = _end(begin, work[:, t], start, arrived, machine.taken)
            yield "transfer" if t < ranks - 1 else "grads", t, start, arrived
        yield "kernel", t, begin, end
        end = np.maximum(end, arrived)
    start = _both(end)
    home = start + _message(problem, machine, ranks, few if ranks == 2 else many)
    yield "grads", ranks, start, home
    yield "kernel", ranks, end, _end(end, halves, start, home, machine.taken)


def seconds(problem: Problem, machine: Machine, ranks: int, layout: str = "zigzag", backward: bool = False) -> float:
    """Of the forward pass; backward: of both passes."""
    passes = (_forward, _backward) if backward else (_forward,)
    return float(sum(max(e[-1].max() for e in events(problem, machine, ranks, layout)) for events in passes))


def speedup(problem: Problem, machine: Machine, ranks: int, layout: str = "zigzag", backward: bool = False) -> float:
    """How many times as fast as one GPU."""
    return seconds(problem, machine, 1, layout, backward) / seconds(problem, machine, ranks, layout, backward)


def break_even(problem: Problem, machine: Machine, layout: str = "zigzag") -> float:
    """Tokens per rank from which on the kernel takes as long as the next K and V: with more, the transfer is hidden. The number of
    ranks makes no difference to it."""
    part = 0.5 if problem.causal and layout != "contiguous" else 1.0  # of a block: all, or what the mask leaves of each
    a = part * 4.0 * problem.B * problem.H * problem.D / machine.rate
    b = 2.0 * problem.B * problem.Hkv * problem.D * problem.itemsize / machine.link
    return (b + math.sqrt(b * b + 4 * a * machine.latency)) / (2 * a)


def memory(problem: Problem, ranks: int) -> float:
    """Bytes that a rank's forward pass holds: Q, its own K and V and up to two pairs that travel, O, the part that is merged, O in
    float32 where it has more than two parts, and two LSE."""
    n = problem.N / ranks
    q, kv = (problem.B * heads * n * problem.D * problem.itemsize for heads in (problem.H, problem.Hkv))
    parts = ranks * max(1.0, 2 * n * problem.D * problem.itemsize / IN_L2) if ranks > 1 else 1
    summed = problem.B * problem.H * n * problem.D * 4 if parts > 2 else 0
    return (2 + (ranks > 1)) * q + 2 * kv * (1 + min(2, ranks - 1)) + summed + 2 * problem.B * problem.H * n * 4


def without_latency(machine: Machine) -> Machine:
    """The same with messages that begin at once and take no SMs, and kernels without a beginning and an end: what the limits are."""
    return replace(machine, latency=0.0, launch=0.0, taken=0.0, memory_bandwidth=math.inf)
