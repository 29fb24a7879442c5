"""Speed on one sequence by its number of heads: a line for a rung and for each that ran beside it."""

from __future__ import annotations

import pandas as pd

from .. import record
from .lines import device, draw_panels
from .style import Figure, styled


@styled
def by_heads(samples: pd.DataFrame, N: int = 2048, causal: bool = False) -> Figure:
    """TFLOP/s by heads at one sequence length, medians of the rounds, a panel per D. samples: record.load(stem, "one_sequence").

    ValueError where nothing was recorded.
    """
    table = record.medians(samples[(samples["causal"] == int(causal)) & (samples["Nk"] == N)])
    if table.empty:
        raise ValueError(f"nothing recorded at N = {N} {'under a' if causal else 'without a'} causal mask")
    figure = draw_panels(table, "H", "heads", "tflops", "TFLOP/s")
    words = f"One sequence of {N} tokens, {' and '.join(dict.fromkeys(table['dtype']))}{', causal' * causal}"
    figure.suptitle(f"{words} · {device(samples)}", x=0.01, ha="left", fontsize=11)
    return figure
