"""The drawings of notebook 24: loss curves, steps beside what their kernels take, and how far two ways to write a text differ."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ...figures.style import BLUE, GREEN, INK, MAGENTA, MUTED, PEERS, Figure, canvas, styled
from ..train import RUN, WARM_UP, by_run, differences, label

# colour, dash, width, and which lies on top: a thin dashed line on a thick one shows both
LOOKS = {
    "rungs 20 and 23": (BLUE, "-", 3.4, 2.0),
    "causal": (BLUE, "-", 1.8, 2.0),
    "rungs 20 and 23, again": (BLUE, ":", 1.6, 2.5),
    "rungs 32 and 33": (MAGENTA, "-", 2.2, 2.2),
    "rungs 32 and 33, again": (MAGENTA, ":", 1.6, 2.5),
    "SDPA FLASH": (PEERS["SDPA FLASH"][0], "--", 1.4, 3.0),
    "SDPA FLASH, again": (PEERS["SDPA FLASH"][0], ":", 1.6, 3.0),
    "SDPA FLASH, seed 1": (MUTED, "-", 1.0, 1.9),
}


def _look(run: str) -> dict:
    way = run.split(",")[0]
    colour, dash, width, order = LOOKS.get(run) or LOOKS.get(way) or (PEERS.get(way, (GREEN,))[0], "-.", 1.4, 2.5)
    return {"color": colour, "linestyle": dash, "linewidth": width, "zorder": order, "label": run}


def _curves(ax: Axes, frame: pd.DataFrame, ylabel: str) -> None:
    for run in frame:
        ax.plot(frame.index, frame[run], **_look(run))
    ax.set(xlabel="step", ylabel=ylabel)


@styled
def losses(training: pd.DataFrame, title: str, smooth: int = 1) -> Figure:
    """Left the loss of every run without a graph by step; right by how much each differs from the first SDPA FLASH; running means
    over `smooth` steps. training: name, seed, round, graph, step, loss."""
    training = training[training["graph"] == 0]
    figure, (left, right) = canvas(10.4, 4.0, 2, title=title)
    _curves(left, by_run(training).rolling(smooth, min_periods=1).mean(), "loss, nats per byte")
    apart = differences(training).rolling(smooth, min_periods=1).mean()
    _curves(right, apart.loc[:, apart.max() > 0], "difference from SDPA FLASH, nats")
    right.set_yscale("log")
    figure.legend(handles=left.get_lines(), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    told = [f"{run} {apart[run].mean():.2g}" for run in apart]
    figure.in_words = f"{title}. Left the losses by step, right their difference from SDPA FLASH, log scale; means: {', '.join(told)}."
    return figure


@styled
def waits(training: pd.DataFrame, kernels: pd.Series, title: str) -> Figure:
    """A dot per step of every run with the first seed, at its time, the first step on top; a bar at what the kernels of a step take
    together. training: name, seed, round, graph, step, ms; kernels: ms by name. What lies past the right edge is counted there."""
    timed = training[(training["step"] >= WARM_UP) & (training["seed"] == 0)].astype({"ms": "float64"})
    runs = [*timed.groupby(RUN, sort=False)]
    runs.sort(key=lambda of_run: [*kernels.index].index(of_run[0][0]))
    figure, (ax,) = canvas(9.6, 0.9 + 0.62 * len(runs), title=title)
    right = timed["ms"].quantile(0.98) * 1.05
    for y, (of_run, steps) in enumerate(runs):
        look, at = _look(label(*of_run)), kernels[of_run[0]]
        heights = y + 0.8 * (steps["step"] / steps["step"].max() - 0.5)
        ax.scatter(steps["ms"], heights, s=5, color=look["color"], linewidths=0)
        ax.plot([at, at], [y - 0.42, y + 0.42], color=INK, linewidth=2.5, solid_capstyle="butt")
        if beyond := (steps["ms"] > right).sum():
            ax.text(1.01, y, f"+ {beyond}", transform=ax.get_yaxis_transform(), va="center", fontsize=8.5, color=INK)
    ax.set(xlim=(kernels.min() - 1, right), ylim=(len(runs) - 0.5, -0.5), xlabel="a step, ms; the bar: its kernels")
    ax.set_yticks(range(len(runs)), [label(*of_run) for of_run, _ in runs])
    ax.grid(False, axis="y")
    told = [
        f"{label(*of_run)}: median {steps['ms'].median():.1f} ms, kernels {kernels[of_run[0]]:.1f} ms"
        for of_run, steps in runs
    ]
    figure.in_words = f"{title}: the time of every step beside what its kernels take. {'; '.join(told)}."
    return figure


@styled
def curves(frame: pd.DataFrame, title: str) -> Figure:
    """A curve for each column of losses, by step (index)."""
    figure, (ax,) = canvas(6.2, 3.6, title=title)
    _curves(ax, frame, "loss, nats per byte")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    told = [f"{name} ends at {values.iloc[-1]:.2f}" for name, values in frame.items()]
    figure.in_words = f"{title}. Loss by step, nats per byte: {', '.join(told)}."
    return figure


@styled
def margins(text: pd.DataFrame, title: str) -> Figure:
    """A dot per byte written: by how much the likeliest byte led, against how far the two ways' logits were apart. A byte right of
    and below the line could have come out differently. text: margin, apart."""
    figure, (ax,) = canvas(6.2, 4.2, title=title)
    known = text.dropna(subset=["margin"])
    known = known[known["apart"] > 0]  # equal to the last bit: no place on a logarithmic axis, and no tie
    low, high = known["apart"].min() / 2, known["apart"].max() * 2
    ax.scatter(known["apart"], known["margin"], s=14, color=BLUE, alpha=0.6, linewidths=0)
    ax.plot([low, high], [2 * low, 2 * high], color=INK, linewidth=1, linestyle="--")
    ax.annotate(
        "below: a tie, by twice the difference",
        (0.98, 0.03),
        xycoords="axes fraction",
        ha="right",
        fontsize=9,
        color=INK,
    )
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, known["margin"].max() * 2),
        xlabel="largest difference of a logit between the two ways",
        ylabel="lead of the likeliest byte",
    )
    below = (known["margin"] < 2 * known["apart"]).sum()
    figure.in_words = (
        f"{title}. Of {len(known)} bytes {below} lie below the line, where the difference could have changed them."
    )
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the dots lie within a decade
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    return figure
