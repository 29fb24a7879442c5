"""Where the cycles between two instructions of a warp go: a strip for each kernel, made of the reasons why its warps wait."""

from __future__ import annotations

import pandas as pd

from .style import AMBER, BLUE, CARD, GREEN, INK, MAGENTA, MINT, OUTLINE, SAND, SHADES, VIOLET, Picture, styled

# Nsight Compute's names for what a warp is at ("Kernel Profiling Guide", "Warp Scheduler States"): ours, colour and hatch, from the
# left of a strip to its right. Reasons that are not here are OTHERS.
REASONS = {
    "selected": ("issues an instruction", INK, ""),
    "not_selected": ("ready, but another warp's turn", OUTLINE, ""),
    "math_pipe_throttle": ("unit busy, e.g. the tensor cores (math pipe throttle)", BLUE, ""),
    "wait": ("fixed latency of the last instruction (wait)", SHADES[1], "//"),
    "gmma": ("wgmma, or a wait for one (gmma)", VIOLET, ".."),
    "short_scoreboard": ("result of shared memory or MUFU (short scoreboard)", AMBER, ""),
    "mio_throttle": ("queue to shared memory and MUFU full (MIO throttle)", SAND, "\\\\"),
    "long_scoreboard": ("global memory (long scoreboard)", MAGENTA, ""),
    "barrier": ("a barrier of the CTA (barrier)", GREEN, ""),
}
OTHERS = ("all else", MINT, "xx")


def by_reason(frame: pd.DataFrame, column: str = "kernel") -> pd.DataFrame:
    """Cycles per instruction, a row per `column`, a column per reason of REASONS and OTHERS in their order and words, without those
    that are 0 everywhere. frame: columns `column`, reason, cycles. ValueError if a kernel has a reason twice."""
    if frame.duplicated([column, "reason"]).any():
        raise ValueError(f"a {column} has a reason twice")
    words = {reason: said for reason, (said, _, _) in REASONS.items()}
    said = frame["reason"].map(words).fillna(OTHERS[0])
    table = frame.assign(reason=said).pivot_table(
        index=column, columns="reason", values="cycles", aggfunc="sum", sort=False
    )
    order = [word for word in (*words.values(), OTHERS[0]) if word in table and table[word].gt(0).any()]
    return table[order].fillna(0.0)


@styled
def strips(table: pd.DataFrame, title: str) -> Picture:
    """A horizontal strip for each row of `by_reason`, as long as all its cycles together, with the sum at its end.

    The alternative text has each row's sum and its longest three reasons.
    """
    looks = {said: (colour, hatch) for said, colour, hatch in (*REASONS.values(), OTHERS)}
    figure = Picture(figsize=(9.4, 1.9 + 0.42 * len(table)), layout="constrained")
    figure.in_words = in_words(table, title)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    ax, left, most = figure.subplots(), pd.Series(0.0, table.index), table.sum(axis=1).max()
    for reason, cycles in table.items():
        colour, hatch = looks[reason]
        ax.barh(range(len(table)), cycles, 0.62, left=left, color=colour, hatch=hatch, edgecolor=CARD, label=reason)
        for y, (begin, n) in enumerate(zip(left, cycles, strict=True)):
            if n > 0.06 * most:
                about = {"facecolor": CARD, "edgecolor": "none", "pad": 0.8}
                ax.text(begin + n / 2, y, f"{n:.1f}", ha="center", va="center", fontsize=8, color=INK, bbox=about)
        left = left + cycles
    for y, total in enumerate(left):
        ax.text(total + 0.01 * most, y, f"{total:.1f}", va="center", fontsize=9, fontweight="bold", color=INK)
    ax.set_yticks(range(len(table)), table.index, color=INK)
    ax.set(xlim=(0, 1.09 * most), xlabel="cycles of a warp per instruction that is issued")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8.5)
    return figure


def in_words(table: pd.DataFrame, title: str) -> str:
    """The strips in a sentence per row: the sum, and the three reasons with most cycles."""
    said = []
    for name, cycles in table.iterrows():
        longest = ", ".join(f"{n:.1f} {reason}" for reason, n in cycles.nlargest(3).items())
        said.append(f"{name}: {cycles.sum():.1f} cycles, most of them {longest}.")
    return f"{title}. Cycles of a warp per instruction. {' '.join(said)}"
