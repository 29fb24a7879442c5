"""Which CTA runs when: a model of the order in which a GPU takes up the blocks of a grid.

A GPU has a number of places for CTAs, so many per SM. Blocks start in the order of their numbers, each at the place that
is free first, and stay until they are done. CUDA promises no order; this is how one observes GPUs to do it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import pandas as pd


def run(work: Sequence[float], places: int) -> pd.DataFrame:
    """A row per CTA: place, begin, end. work: how long each takes, in any unit, in the order of blockIdx.

    Every CTA is taken to run at the same speed, whoever shares its SM, and to start without delay.
    """
    free = [(0.0, place) for place in range(places)]
    rows = []
    for length in work:
        begin, place = heapq.heappop(free)
        rows.append((place, begin, begin + length))
        heapq.heappush(free, (begin + length, place))
    return pd.DataFrame(rows, columns=["place", "begin", "end"])


def makespan(work: Sequence[float], places: int) -> float:
    """When the last CTA is done."""
    return float(run(work, places)["end"].max())


def busy(schedule: pd.DataFrame) -> pd.Series:
    """How many places are at work from each point in time on (the index) until the next."""
    times = np.concatenate([schedule["begin"], schedule["end"]])
    steps = np.concatenate([np.ones(len(schedule), int), -np.ones(len(schedule), int)])
    return pd.Series(steps).groupby(times).sum().cumsum().rename_axis("time")


def shared(work: Sequence[float], places: int, enough: int) -> float:
    """How long CTAs take that wait for memory alone, in units of what the whole bandwidth moves in a unit of time.

    work: what each has to read. All that are at work, at most `places`, get equal shares; `enough` of them draw the whole
    bandwidth together, fewer draw less in proportion.
    """
    time = each = 0.0  # each: what every CTA that has been there from the start would have read by now
    running: list[float] = []
    waiting = [length for length in reversed(work) if length > 0]
    while waiting or running:
        while waiting and len(running) < places:
            heapq.heappush(running, each + waiting.pop())
        at_work = len(running)
        done = heapq.heappop(running)
        time += (done - each) * max(at_work, enough)
        each = done
    return time
