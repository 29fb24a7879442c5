"""Speed by family of inputs: a row for each family, a point for a rung and for each that ran beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .. import record
from .lines import device, draw_line, looks_of
from .style import GRID, MUTED, PEERS, Figure, canvas, styled

N = 4096  # families of random numbers are shown at this length, heads of a trained model at their own


@styled
def families(samples: pd.DataFrame, names: Sequence[str] = (), causal: bool = False, dtype: str = "bf16") -> Figure:
    """TFLOP/s on every family, medians of the rounds, a panel per D. samples: record.load(stem, "families").

    names: whose points, default everybody's; those that did not run are left out. ValueError where nothing was recorded.
    """
    asked = samples[(samples["causal"] == int(causal)) & (samples["dtype"] == dtype)]
    asked = asked[asked["name"].isin(names)] if names else asked
    at_N = asked.groupby("family")["Nk"].transform(lambda lengths: (lengths == N).any())
    table = record.medians(asked[~at_N | (asked["Nk"] == N)])
    if table.empty:
        raise ValueError(f"nothing recorded in {dtype} {'under a' if causal else 'without a'} causal mask")
    looks = looks_of(names or asked["name"])
    rows = {family: y for y, family in enumerate(dict.fromkeys(table["family"]))}
    lengths = table.drop_duplicates("family").set_index("family")["Nk"]
    figure, axes = canvas(4.6 * table["D"].nunique(), 1.3 + 0.34 * len(rows), table["D"].nunique(), sharey=True)
    for ax, (D, part) in zip(axes, table.groupby("D"), strict=True):
        for family, line in part.groupby("family"):
            ax.hlines(rows[family], line["tflops"].min(), line["tflops"].max(), color=GRID, linewidth=3, zorder=1)
        for name, line in part.groupby("name", sort=False):
            y = line["family"].map(rows)
            look = looks[name][:2] + ("",)
            ours = name not in PEERS  # its points lie under the others', which are thinner, and show around them
            size = 9 if ours else 15 if look[1] == "|" else 7
            draw_line(ax, line["tflops"], y, look, ours, markersize=size)
            ax.lines[-1].set_label(name)
        ax.set_yticks(list(rows.values()), [f"{f}, N = {n}" if n != N else f for f, n in lengths.items()])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.set_xlim(left=0)
        ax.set_xlabel("TFLOP/s")
        ax.set_title(f"D = {D}", color=MUTED)
    drawn = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    handles = {name: drawn[name] for name in looks if name in drawn}
    figure.legend(handles.values(), handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    words = f"Speed by family of inputs, {dtype}{', causal' * causal}, N = {N}"
    figure.suptitle(f"{words} · {device(samples)}", x=0.01, ha="left", fontsize=11)
    return figure
