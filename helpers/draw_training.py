"""The drawings of notebook 24: loss curves laid on each other, and by how much two ways to write a text differ."""

from __future__ import annotations

import pandas as pd

from .draw import BLUE, ORANGE, canvas
from .plot import INK, MUTED, PEERS, Figure, styled
from .train import differences, label

LOOKS = {"kernels": (BLUE, "-", 2.6), "kernels, again": (BLUE, ":", 1.6), "SDPA FLASH": (ORANGE, "--", 1.3)}
LOOKS |= {"SDPA FLASH, again": (ORANGE, ":", 1.6), "SDPA FLASH, seed 1": (MUTED, "-", 1.0)}


def _look(run: str) -> dict:
    colour, dash, width = LOOKS.get(run) or (PEERS[run][0], "-.", 1.4)
    return {"color": colour, "linestyle": dash, "linewidth": width, "label": run}


@styled
def losses(training: pd.DataFrame, title: str, smooth: int = 1) -> Figure:
    """Left the loss of every run by step; right by how much each differs from the first SDPA FLASH, a running mean over `smooth`
    steps. training: name, seed, round, step, loss."""
    figure, (left, right) = canvas(10.4, 4.0, 2, title=title)
    for of_run, run in training.groupby(["name", "seed", "round"], sort=False):
        left.plot(run["step"], run["loss"], **_look(label(*of_run)))
    apart = differences(training).rolling(smooth, min_periods=1).mean()
    for run in apart:
        if (apart[run] > 0).any():
            right.plot(apart.index, apart[run], **_look(run))
    right.set_yscale("log")
    left.set(xlabel="step", ylabel="loss, nats per byte")
    right.set(xlabel="step", ylabel="difference from SDPA FLASH, nats")
    left.legend(frameon=False, fontsize=8.5)
    right.legend(frameon=False, fontsize=8.5)
    return figure


@styled
def margins(text: pd.DataFrame, title: str) -> Figure:
    """A dot per byte written: by how much the likeliest byte led, against how far the two ways' logits were apart. A byte right of
    and below the line could have come out differently. text: margin, apart."""
    figure, (ax,) = canvas(6.2, 4.2, title=title)
    known = text.dropna(subset=["margin"])
    ax.scatter(known["apart"], known["margin"], s=14, color=BLUE, alpha=0.6, linewidths=0)
    low, high = known["apart"].min() / 2, known["apart"].max() * 2
    ax.plot([low, high], [2 * low, 2 * high], color=INK, linewidth=1, linestyle="--")
    ax.annotate("twice the difference: below, a tie", (high, 2 * high), ha="right", va="bottom", fontsize=9, color=INK)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="largest difference of a logit between the two ways",
        ylabel="lead of the likeliest byte",
    )
    return figure
