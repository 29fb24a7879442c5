"""How long ring attention takes: a model of a few numbers, to be held against measurements and then to plan with.

    time = ring_time.seconds(ring_time.Problem(N=65536), ring_time.Machine(), ranks=8, layout="zigzag")

Each rank computes one block at a time at the kernel's rate, while the next K and V come over its link. A block begins when the one
before it is done and its keys are there. Nothing else is modelled: not that short blocks run at a lower rate, nor that messages and
kernels share a GPU's SMs and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from .layouts import LAYOUTS


@dataclass(frozen=True)
class Machine:
    """A GPU and its link. rate: FLOP/s of the kernel; backward: of the backward pass; link: bytes/s each way; latency: seconds from
    the start of a message to its first byte; memory: bytes/s, for merges; launch: seconds that a kernel takes beyond its work."""

    rate: float = 700e12
    backward: float = 560e12
    link: float = 290e9
    latency: float = 60e-6
    memory: float = 4e12
    launch: float = 10e-6


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
    """What each rank does when: columns rank, step, what ("kernel": with its merge; "transfer": of the next K and V; "grads": of dK
    and dV), begin and end in seconds. Of the forward pass, or of the backward pass alone."""
    found = []
    for what, step, begin, end in _events(problem, machine, ranks, layout, backward):
        found += [(rank, step, what, b, e) for rank, (b, e) in enumerate(zip(begin, end)) if e > b]
    return pd.DataFrame(found, columns=["rank", "step", "what", "begin", "end"])


def _events(problem: Problem, machine: Machine, ranks: int, layout: str, backward: bool) -> Iterator[tuple]:
    """Those of timeline, of all ranks at a time: what, step, and begin and end by rank; where these are equal, nothing happens."""
    n, p = problem.N / ranks, problem
    rate, flops = (machine.backward, 10.0) if backward else (machine.rate, 4.0)
    shares = share(ranks, layout, p.causal)
    rows = p.B * p.H * n * p.D
    passes = 14.0 if backward else 10.0  # bytes of each number that is added up: fp32 read and written, a part read
    work = shares * flops * p.B * p.H * n * n * p.D / rate + (shares > 0) * machine.launch
    work += (shares > 0) * (np.arange(ranks) > 0) * (rows * passes / machine.memory + machine.launch)
    numbers = 2 * p.B * p.Hkv * n * p.D
    carry, back = (machine.latency + numbers * size / machine.link for size in (p.itemsize, 4))
    end, arrived = np.zeros(ranks), np.zeros(ranks)
    for t in range(ranks):
        begin = np.maximum(end, arrived)
        done = begin + work[:, t]
        yield "kernel", t, begin, done
        if backward and t:  # dK and dV so far come from the rank before, once it has added its part
            sent = np.maximum(np.roll(end, 1), arrived)
            yield "grads", t, sent, sent + back
            done = np.maximum(done, sent + back)
        end = done
        if t < ranks - 1:  # a message begins when both ends have come to it
            start = np.maximum(begin, np.roll(begin, 1))
            arrived = start + carry
            yield "transfer", t, start, arrived
    if backward and ranks > 1:
        sent = np.roll(end, 1)
        yield "grads", ranks, sent, sent + back


def seconds(problem: Problem, machine: Machine, ranks: int, layout: str = "zigzag", backward: bool = False) -> float:
    """Of the forward pass; backward: of both passes."""
    both = (False, True) if backward else (False,)
    return float(sum(max(e[-1].max() for e in _events(problem, machine, ranks, layout, back)) for back in both))


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
    """Bytes that a rank's forward pass holds: Q, its own K and V and two pairs that travel, O, the part that is merged, O in float32
    with more than two ranks, and two LSE."""
    n = problem.N / ranks
    q, kv = (problem.B * heads * n * problem.D * problem.itemsize for heads in (problem.H, problem.Hkv))
    summed = problem.B * problem.H * n * problem.D * 4 if ranks > 2 else 0
    return 3 * q + 2 * kv * (1 if ranks == 1 else 3) + summed + 2 * problem.B * problem.H * n * 4


def without_latency(machine: Machine) -> Machine:
    """The same with messages that begin at once and kernels without a beginning and an end: what the limits are."""
    return replace(machine, latency=0.0, launch=0.0, memory=math.inf)
