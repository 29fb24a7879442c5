"""Swim lanes (a Gantt chart): what each warp or warpgroup does over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .style import INK

Look = tuple[str, str, str]  # face, hatch, and what the legend says
HEIGHT = 0.62  # of a bar; lanes are 1 apart


def draw(
    ax: Axes,
    events: pd.DataFrame,
    lanes: Sequence[str],
    looks: Mapping[str, Look],
    where: Callable[[str, str], tuple[float, float]] | None = None,
) -> list[Patch]:
    """A bar for each event in its lane, the first lane on top. Returns the legend's handles in the order of `looks`' kinds as
    they first appear.

    events: columns lane, kind (of `looks`), begin and end. where: a bar's middle and height by its lane and kind; by default
    the lane's number and HEIGHT.
    """
    seen: dict[str, Patch] = {}
    for lane, kind, begin, end in events[["lane", "kind", "begin", "end"]].itertuples(index=False):
        face, hatch, label = looks[kind]
        look = {"facecolor": face, "edgecolor": INK, "linewidth": 0.5, "hatch": hatch}
        y, height = where(lane, kind) if where else (lanes.index(lane), HEIGHT)
        ax.barh(y, end - begin, height, left=begin, **look)
        seen.setdefault(kind, Patch(label=label, **look))
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return list(seen.values())
