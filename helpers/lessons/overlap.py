"""A model of warpgroups that share an SM: who multiplies and who takes exponentials, and when.

Two units, the tensor cores and what does the softmax, work on jobs; a job waits for those it needs. That is all there is to
the model: no latency, no instruction of any other kind, and no limit on what is under way at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

SCORES, SOFTMAX, OUTPUT = "scores", "softmax", "output"  # kinds of draw_hopper.KINDS


class Job(NamedTuple):
    """Something of `work` units of time, for a warpgroup, to be begun when the jobs `after` (their numbers) are done."""

    group: int
    kind: str
    work: float
    after: tuple[int, ...]


def jobs(groups: int, tiles: int, product: float, softmax: float, overlap: str = "none") -> list[Job]:
    """What `groups` warpgroups have to do for `tiles` tiles of keys each. product: the time of S = Q K^T, and of O += P V.

    overlap: "none", one after the other (31_warp_specialized); "next", the next S is started before O, and the softmax of that S
    waits for S alone (32_ping_pong); "early", the same with a softmax that waits for both products. ValueError for another word.
    """
    if overlap not in ("none", "next", "early"):
        raise ValueError(f"overlap is none, next or early, not {overlap!r}")
    found: list[Job] = []

    def add(group: int, kind: str, work: float, *after: int | None) -> int:
        found.append(Job(group, kind, work, tuple(job for job in after if job is not None)))
        return len(found) - 1

    for group in range(groups):
        p = add(group, SOFTMAX, softmax, add(group, SCORES, product))
        o = None
        for _ in range(tiles - 1):
            if overlap == "none":
                o = add(group, OUTPUT, product, p)
                p = add(group, SOFTMAX, softmax, add(group, SCORES, product, o))
            else:
                s = add(group, SCORES, product, p, o)
                o = add(group, OUTPUT, product, p, o)
                p = add(group, SOFTMAX, softmax, s, o if overlap == "early" else None)
        add(group, OUTPUT, product, p, o)
    return found


def run(work: Sequence[Job], turns: bool) -> pd.DataFrame:
    """A row per job: group, lane ("consumer 0", ...), kind, begin and end.

    turns: the tensor cores finish what one warpgroup has asked for before they begin with the next one's; without turns all
    that have asked get equal shares. A warpgroup's own products come in the order in which it asked for them. Who does softmax
    at the same time always gets equal shares.
    """
    left, asked = [job.work for job in work], {}
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    time = 0.0
    while len(end) < len(work):
        asked |= {i: time for i, job in enumerate(work) if i not in asked and all(j in end for j in job.after)}
        waiting = sorted((time, work[i].group, i) for i, time in asked.items() if i not in end)
        first = {group: i for _, group, i in reversed(waiting) if work[i].kind != SOFTMAX}  # product of each group
        oldest = [i for _, _, i in waiting if i in first.values()]
        share = [i for _, _, i in waiting if work[i].kind == SOFTMAX]
        rates = {i: 1 / len(side) for side in (oldest[:1] if turns else oldest, share) for i in side}
        step = min(left[i] / rate for i, rate in rates.items())
        for i, rate in rates.items():
            begin.setdefault(i, time)
            left[i] -= step * rate
            if left[i] < 1e-9:
                end[i] = time + step
        time += step
    rows = [(job.group, f"consumer {job.group}", job.kind, begin[i], end[i]) for i, job in enumerate(work)]
    return pd.DataFrame(rows, columns=["group", "lane", "kind", "begin", "end"])


def multiplying(schedule: pd.DataFrame, work: Sequence[Job]) -> float:
    """The share of the time in which the tensor cores have something to do."""
    return sum(job.work for job in work if job.kind != SOFTMAX) / float(schedule["end"].max())
