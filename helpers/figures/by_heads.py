"""Speed on one sequence by its number of heads: a line for a rung and for each that ran beside it."""

from __future__ import annotations

import pandas as pd

from .. import record
from .lines import device, draw_line, looks_of, name_lines, power_of_two_axis
from .style import MUTED, PEERS, Figure, canvas, styled


@styled
def by_heads(samples: pd.DataFrame, N: int = 2048, causal: bool = False) -> Figure:
    """TFLOP/s by heads at one sequence length, medians of the rounds, a panel per D. samples: record.load(stem, "one_sequence").

    ValueError where nothing was recorded.
    """
    table = record.medians(samples[(samples["causal"] == int(causal)) & (samples["Nk"] == N)])
    if table.empty:
        raise ValueError(f"nothing recorded at N = {N} {'under a' if causal else 'without a'} causal mask")
    looks = looks_of(table["name"])
    figure, axes = canvas(5.0 * table["D"].nunique(), 3.4, table["D"].nunique())
    for ax, (D, part) in zip(axes, table.groupby("D"), strict=True):
        ends = {}
        for name, line in part.groupby("name", sort=False):
            line = line.sort_values("H")
            draw_line(ax, line["H"], line["tflops"], looks[name], name not in PEERS)
            ends[name] = (line["H"].iloc[-1], line["tflops"].iloc[-1])
        power_of_two_axis(ax, part["H"], "heads")
        ax.set_ylim(bottom=0)
        ax.set_title(f"D = {D}", color=MUTED)
        figure.draw_without_rendering()
        name_lines(ax, ends, looks)
    axes[0].set_ylabel("TFLOP/s")
    words = f"One sequence of {N} tokens, {' and '.join(dict.fromkeys(table['dtype']))}{', causal' * causal}"
    figure.suptitle(f"{words} · {device(samples)}", x=0.01, ha="left", fontsize=11)
    return figure
