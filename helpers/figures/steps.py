"""What the steps of an optimisation reached beside a peer: dots with their numbers, or a mark for each head dimension.

Each takes a frame of a `steps` record: step, what, kept ("yes…", "in part…", "at D = …", or why not), D, ratio (peer's time
/ its time) and, in some, ratio_causal. Steps that stayed are filled.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .style import BLUE, CARD, GREEN, INK, MUTED, ORANGE, Figure, canvas, styled
from .words import cut


def stays(kept: str, D: int) -> bool:
    """Whether a step stayed in the kernel for this head dimension."""
    return kept.startswith(("yes", "in part", f"at D = {D}"))


def _panel(ax: Axes, D: int, part: pd.DataFrame, most: int, fontsize: float) -> list[bool]:
    """A dot per step at its ratio, filled where the step stayed; the steps' names cut to `most` characters. Returns which stayed."""
    kept = [stays(str(word), D) for word in part["kept"]]
    for stayed, face in ((True, GREEN), (False, CARD)):
        at = [i for i, yes in enumerate(kept) if yes == stayed]
        look = {
            "markerfacecolor": face,
            "markeredgecolor": INK,
            "markersize": 8,
            "label": "stayed" if stayed else "did not stay",
        }
        ax.plot(part["ratio"].iloc[at], at, "o", linestyle="", zorder=4.5, **look)
    names = [f"{step} · {cut(what, most)}" for step, what in zip(part["step"], part["what"], strict=True)]
    ax.set_yticks(range(len(part)), names, color=INK, fontsize=fontsize)
    ax.set_title(f"D = {D}", color=MUTED)
    ax.grid(axis="y", visible=False)
    return kept


@styled
def beside(frame: pd.DataFrame, title: str, peer: str) -> Figure:
    """A panel for each D, a dot for each step at its ratio to `peer`; a diamond where there is a ratio_causal, too."""
    parts = list(frame.groupby("D"))
    rows = max(len(part) for _, part in parts)
    figure, axes = canvas(5.6 * len(parts) + 1.6, 1.3 + 0.3 * rows, len(parts), title=title, sharex=True)
    values = frame[[c for c in ("ratio", "ratio_causal") if c in frame]]
    low, high = min(0.9, values.min().min() - 0.08) - 0.04, values.max().max() + 0.07
    for ax, (D, part) in zip(axes, parts, strict=True):
        kept = _panel(ax, D, part, 45, 8)
        if "ratio_causal" in part:
            ax.plot(part["ratio_causal"], range(len(part)), "D", color=ORANGE, markersize=4.5, zorder=5)
            ax.lines[-1].set_label("under a causal mask")
        for at, (yes, ratio) in enumerate(zip(kept, part["ratio"], strict=True)):
            weight = "bold" if yes else "normal"
            ax.text(low + 0.005, at, f"{ratio:.2f}", va="center", fontsize=8, fontweight=weight)
        ax.axvline(1, color=INK, linewidth=1, linestyle="--", zorder=3)
        ax.set(xlim=(low, high), xlabel=f"times as fast as {peer}", ylim=(rows - 0.4, -0.6))
    dot = {"marker": "o", "linestyle": "", "markeredgecolor": INK, "markersize": 8}
    handles = [
        Line2D([], [], markerfacecolor=c, label=t, **dot) for c, t in ((GREEN, "stayed"), (CARD, "did not stay"))
    ]
    if "ratio_causal" in frame:
        causal = {"marker": "D", "linestyle": "", "color": ORANGE, "markersize": 4.5}
        handles.append(Line2D([], [], label="under a causal mask", **causal))
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


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
    return figure


def _mark_handles(looks: dict[int, tuple[str, str]]) -> Sequence[Line2D]:
    handles = [
        Line2D([], [], linestyle="", marker=m, color=c, markersize=7, label=f"D = {D}") for D, (m, c) in looks.items()
    ]
    hollow = {"marker": "o", "color": MUTED, "markerfacecolor": CARD, "label": "hollow: did not stay"}
    return [*handles, Line2D([], [], linestyle="", **hollow)]
