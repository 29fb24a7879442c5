"""What the steps of an optimisation reached beside a peer: a mark for each head dimension.

It takes a frame of a `steps` record: step, what, kept ("yes…", "in part…", "at D = …", or why not), D, ratio (peer's time
/ its time) and, in some, ratio_causal. Steps that stayed are filled.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D

from .style import BLUE, CARD, GREEN, INK, MUTED, ORANGE, Figure, canvas, styled


def stays(kept: str, D: int) -> bool:
    """Whether a step stayed in the kernel for this head dimension."""
    return kept.startswith(("yes", "in part", f"at D = {D}"))


@styled
def marks(frame: pd.DataFrame, title: str, peer: str) -> Figure:
    """A line for each step and on it a mark for each D, at its ratio to `peer`; with ratio_causal a second panel."""
    order = frame.drop_duplicates("step").sort_values("step")
    panels = {"ratio": "without a mask", "ratio_causal": "causal"} if "ratio_causal" in frame else {"ratio": ""}
    figure, axes = canvas(6.4 + 3.2 * len(panels), 1.5 + 0.28 * len(order), len(panels), title=title, sharey=True)
    places = {step: y for y, step in enumerate(order["step"])}
    looks = dict(zip(sorted(frame["D"].unique()), (("o", BLUE), ("s", ORANGE), ("D", GREEN)), strict=False))
    for row in frame.itertuples():
        marker, colour = looks[row.D]
        face = colour if stays(row.kept, row.D) else CARD
        look = {"marker": marker, "markeredgecolor": colour, "markerfacecolor": face}
        for ax, name in zip(axes, panels, strict=True):
            ax.plot(getattr(row, name), places[row.step], linestyle="", markersize=7, **look)
    for ax, said in zip(axes, panels.values(), strict=True):
        ax.axvline(1, color=MUTED, linewidth=1, linestyle="--")
        ax.set_title(said, color=MUTED)
        ax.set(xlabel=f"times as fast as {peer}", ylim=(len(order) - 0.4, -0.6))
    labels = [f"{step} · {textwrap.shorten(what, 62)}" for step, what in zip(order["step"], order["what"], strict=True)]
    axes[0].set_yticks(range(len(order)), labels, color=INK, fontsize=8)
    figure.legend(handles=_mark_handles(looks), loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.in_words = in_words(frame, title, peer, dict(zip(order["step"], order["what"], strict=True)))
    return figure


def in_words(frame: pd.DataFrame, title: str, peer: str, names: Mapping[int, str]) -> str:
    """Every step's ratios, under a causal mask in brackets where there are any. names: step -> what it is called."""
    told = []
    for step, what in names.items():
        ratios = []
        for row in frame[frame["step"] == step].itertuples():
            causal = getattr(row, "ratio_causal", math.nan)
            ratios.append(f"{row.ratio:.2f} at D = {row.D}" + f" (causal {causal:.2f})" * math.isfinite(causal))
        told.append(f"{what}: {', '.join(ratios)}")
    return f"{title}, times as fast as {peer}. {'; '.join(told)}."


def _mark_handles(looks: dict[int, tuple[str, str]]) -> Sequence[Line2D]:
    handles = [
        Line2D([], [], linestyle="", marker=m, color=c, markersize=7, label=f"D = {D}") for D, (m, c) in looks.items()
    ]
    hollow = {"marker": "o", "color": MUTED, "markerfacecolor": CARD, "label": "hollow: surpassed or did not stay"}
    return [*handles, Line2D([], [], linestyle="", **hollow)]
