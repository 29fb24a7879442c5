"""The budget of an SM: how long each of its units is busy with a piece of work, for kernels side by side.

The units work at the same time. The longest bar is the least that the work can take; the kernel takes longer where they wait
for each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .style import BLUE, CARD, INK, MUTED, ORANGE, SHADES, Picture, styled

UNITS = ("shared memory", "tensor cores", "issue slots", "MUFU")  # from the top; others follow


@styled
def units(frame: pd.DataFrame, title: str, text: str, measured: Mapping[str, float] | None = None) -> Picture:
    """A panel for each kernel, in it a bar for each unit on one scale, the longest marked.

    frame: columns kernel, unit (UNITS and others) and clocks (of one SM, for the work that the title names), one row for each
    kernel and unit. text: what to see, the alternative text. measured: kernel to the clocks that the same work took, a dashed
    line where there is one. ValueError if a kernel has a unit twice, or `measured` has a kernel that `frame` hasn't.
    """
    if frame.duplicated(["kernel", "unit"]).any():
        raise ValueError("a kernel has a unit twice")
    kernels = list(dict.fromkeys(frame["kernel"]))
    if unknown := set(measured or {}) - set(kernels):
        raise ValueError(f"measured are {sorted(unknown)}, but the budget is of {kernels}")
    order = sorted(set(frame["unit"]), key=lambda unit: (UNITS.index(unit) if unit in UNITS else len(UNITS), unit))
    most = max([frame["clocks"].max(), *(measured or {}).values()])
    width, height = min(10.5, 2.4 + 3.4 * len(kernels)), 1.5 + 0.36 * len(order)
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = text
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes = figure.subplots(1, len(kernels), squeeze=False, sharex=True, sharey=True)[0]
    for ax, kernel in zip(axes, kernels, strict=True):
        clocks = frame[frame["kernel"] == kernel].set_index("unit")["clocks"].reindex(order)
        _panel(ax, kernel, clocks, most)
        if kernel in (measured or {}):
            ax.axvline(measured[kernel], color=ORANGE, linestyle="--", linewidth=1.6)
            ax.text(measured[kernel], -0.62, f"took {measured[kernel]:.0f} ", color=ORANGE, fontsize=8.5, ha="right")
    axes[0].set_yticks(range(len(order)), order, color=INK)
    axes[0].set_ylim(len(order) - 0.5, -1.0)
    axes[0].set_xlim(0, 1.17 * most)
    handles = [Patch(color=BLUE, label="the longest"), Patch(color=SHADES[1], label="the other units")]
    if measured:
        handles.append(axes[0].plot([], [], color=ORANGE, linestyle="--", label="measured, all of it")[0])
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


def _panel(ax: Axes, kernel: str, clocks: pd.Series, most: float) -> None:
    """The bars of one kernel, with their numbers, the longest filled and its number bold. clocks: by unit, in order."""
    longest = clocks.max()
    for y, value in enumerate(clocks):
        if pd.isna(value):
            continue
        first = value == longest
        ax.barh(y, value, 0.66, color=BLUE if first else SHADES[1], edgecolor=CARD)
        weight = "bold" if first else "normal"
        ax.text(value + 0.012 * most, y, f"{value:.0f}", va="center", fontsize=9, fontweight=weight, color=INK)
    ax.set_title(kernel, color=MUTED)
    ax.set_xlabel("clocks of one SM")
    ax.grid(axis="y", visible=False)
