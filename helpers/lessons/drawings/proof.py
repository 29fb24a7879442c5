"""The drawings of notebooks 90 to 92: tolerances, what each test catches, and where a wrong kernel is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from ...figures.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    MAGENTA,
    MUTED,
    ORANGE,
    OVER,
    SAND,
    SHADES,
    Figure,
    Picture,
    blank,
    styled,
)

if TYPE_CHECKING:
    from ...run.check import Comparison


def _canvas(
    width: float, height: float, words: str, columns: int = 1, title: str = "", rows: int = 1, **options: object
) -> tuple[Picture, list[Axes]]:
    """A picture of rows × columns axes, in inches, that says in `words` what there is to see; options go to `subplots`."""
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = words
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).ravel())
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, axes


# 90_proving_it_right


@styled
def tolerances(frame: pd.DataFrame, fixed: float, title: str) -> Figure:
    """Errors and limits against N, a panel per dtype, both axes logarithmic.

    frame: columns dtype, N, `budget`, `right kernel` and `wrong kernel` (largest absolute errors). fixed: the tolerance
    that doesn't change with N or dtype.
    """
    groups = list(frame.groupby("dtype", sort=False))
    last = {dtype: part.iloc[-1] for dtype, part in groups}
    words = "; ".join(
        f"{dtype} wrong kernel {x['wrong kernel']:.1e}, budget {x['budget']:.1e}, right kernel {x['right kernel']:.1e}"
        for dtype, x in last.items()
    )
    words = f"{title}. Largest errors of O fall with N. At N = {frame['N'].max()}: {words}; fixed tolerance {fixed:g}."
    figure, axes = _canvas(3.5 * len(groups), 3.9, words, len(groups), title, sharey=True)
    looks = {
        "wrong kernel": (ORANGE, "s", "-", "wrong kernel: the last 8 keys dropped"),
        "budget": (INK, "", "--", "error budget: 2 × plain PyTorch + a few ulps"),
        "right kernel": (BLUE, "o", "-", "right kernel"),
    }
    for ax, (dtype, part) in zip(axes, groups, strict=True):
        ax.axhline(fixed, color=MUTED, linestyle=":", linewidth=2, label=f"fixed tolerance, atol = {fixed:g}")
        for column, (colour, marker, dash, label) in looks.items():
            ax.plot(part["N"], part[column], color=colour, marker=marker or None, linestyle=dash, label=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = sorted(set(part["N"]))[::2]
        ax.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else f"{n}" for n in ticks])
        ax.set(xlabel="keys N")
        ax.set_title(dtype, color=MUTED)
    axes[0].set_ylabel("largest |error| of O")
    handles, labels = axes[0].get_legend_handles_labels()
    order = [1, 0, 2, 3]
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside lower left", ncols=2, frameon=False
    )
    return figure


@styled
def catches(used: pd.DataFrame, title: str) -> Figure:
    """Which test (column) catches which bug (row). used: error / budget; above 1 is caught, infinite where a NaN or an
    infinity is misplaced or the kernel raised."""
    rows, columns = used.shape
    longest = max(len(str(name)) for name in used.index)
    seen = {name: ", ".join(used.columns[used.loc[name] > 1]) or "nothing" for name in used.index}
    words = f"{title}. Caught: " + "; ".join(f"{name}: by {by}" for name, by in seen.items()) + "."
    figure, (ax,) = _canvas(0.085 * longest + 0.62 * columns, 1.75 + 0.34 * rows, words, title=title)
    blank(ax)
    for y, x in np.ndindex(rows, columns):
        value = used.iat[y, x]
        caught = value > 1
        ax.add_patch(
            _cell(x, y, facecolor=BLUE if caught else "none", edgecolor=MUTED if not caught else CARD, linewidth=0.6)
        )
        text = "·" if not caught else "NaN" if not np.isfinite(value) else _times(value)
        ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=CARD if caught else MUTED)
    ax.set_yticks(np.arange(rows) + 0.5, list(used.index), color=INK)
    ax.set_xticks(
        np.arange(columns) + 0.5, list(used.columns), rotation=40, ha="left", rotation_mode="anchor", color=INK
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set(xlim=(0, columns), ylim=(rows, 0))
    return figure


def _cell(x: float, y: float, **look: object):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, **look)


def _times(value: float) -> str:
    """×12, ×3k, ×1e9: how many budgets."""
    if value >= 1e6:
        return f"×1e{int(np.log10(value))}"
    return f"×{value / 1000:.0f}k" if value >= 1000 else f"×{value:.2g}" if value < 10 else f"×{value:.0f}"


# 91_bug_museum

LIMITS = [1, 10, 100, 1e3, 1e4]


@styled
def error_map(o: Comparison, lse: Comparison | None = None, tile: int = 0, title: str = "") -> Figure:
    """Where an output is wrong: |error| of O (or P) in budgets, rows down and columns across, LSE as a strip beside it.

    o, lse: comparisons of one case; of several heads the one with the worst element is drawn. tile: rows per tile, drawn
    as lines; 0: none.
    """
    words = ". ".join([title, *(" ".join(_said(found).split()) for found in (o, lse) if found)])
    ratios = (11, 1) if lse else (1,)
    figure, axes = _canvas(5.6, 3.9, words, 2 if lse else 1, title, width_ratios=ratios, sharey=True)
    _paint(axes[0], o, tile)
    axes[0].set(xlabel=f"column of {o.output.upper()}", ylabel="row")
    if lse:
        _paint(axes[1], lse, tile)
        axes[1].set(xticks=[], xlabel="LSE")
    _budget_legend(figure)
    return figure


@styled
def gallery(maps: Mapping[str, Comparison], columns: int = 4, ticks: bool = False) -> Figure:
    """Many error maps side by side: name to a comparison of one output. ticks: with the numbers of rows and columns."""
    rows = -(-len(maps) // columns)
    words = "Error maps. " + " ".join(f"{name}: {' '.join(_said(found).split())}." for name, found in maps.items())
    wide, high = (2.9, 2.2) if ticks else (2.35, 1.95)
    figure, axes = _canvas(wide * columns, high * rows + 0.5, words, columns, rows=rows)
    for ax in axes:
        blank(ax)
    for ax, (name, found) in zip(axes, maps.items()):
        _paint(ax, found, 0)
        ax.set_title(name, fontsize=8.5)
        if ticks:
            down, across = found.error_map.shape[-2:]
            ax.set(xticks=[0, across], yticks=range(0, down + 1, 64), xlabel="column of D", ylabel="row")
    _budget_legend(figure)
    return figure


@styled
def ratios(outputs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """got / expected of every element, a panel per kernel. outputs: name to two arrays (rows, columns), `got` and `expected`."""
    quotients = {name: got / expected for name, (got, expected) in outputs.items()}
    spread = {name: float(np.median(np.ptp(q, axis=1))) for name, q in quotients.items()}
    words = "got / expected of each element of O. " + " ".join(
        f"{name}: {'one value per row' if spread[name] < 0.05 else 'any value, also within a row'}." for name in outputs
    )
    figure, axes = _canvas(3.3 * len(outputs), 3.3, words, len(outputs))
    for ax, (name, quotient) in zip(axes, quotients.items()):
        rows, across = quotient.shape
        shown = ax.imshow(
            quotient,
            cmap="cividis",
            vmin=0.5,
            vmax=1.5,
            aspect="auto",
            interpolation="nearest",
            extent=(0, across, rows, 0),
        )
        ax.grid(False)
        ax.set_title(name)
        ax.set(xlabel="column of O")
    axes[0].set_ylabel("row")
    figure.colorbar(shown, ax=axes, extend="both", label="got / expected (1: right)")
    return figure


def _said(found: Comparison) -> str:
    """Where an output is wrong, in a sentence."""
    return f"{found.output.upper()} within its budget" if found.ok else found.explain().partition(": ")[2]


def _paint(ax: Axes, found: Comparison, tile: int) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap

    lead = found.worst[: found.error_map.ndim - (1 if found.output == "lse" else 2)]
    picture = found.error_map[lead]
    picture = picture[:, None] if found.output == "lse" else picture
    used = np.where(np.isnan(picture), np.nan, picture / found.budget if found.budget else np.where(picture, np.inf, 0))
    colours = ListedColormap([SHADES[0], *OVER]).with_extremes(bad=INK)
    rows, across = used.shape
    ax.imshow(
        np.ma.masked_invalid(used),
        cmap=colours,
        norm=BoundaryNorm([0, *LIMITS, np.inf], len(OVER) + 1),
        aspect="auto",
        interpolation="nearest",
        extent=(0, across, rows, 0),
    )
    ax.grid(False)
    for y in range(tile, rows, tile) if tile else ():
        ax.axhline(y, color=INK, linewidth=1, linestyle="--")


def _budget_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    words = [
        "within the budget",
        "up to 10 budgets",
        "up to 100",
        "up to 1 000",
        "up to 10 000",
        "more",
        "NaN, infinite or never written",
    ]
    patches = [Patch(facecolor=c, edgecolor=MUTED, linewidth=0.5) for c in (SHADES[0], *OVER, INK)]
    figure.legend(patches, words, loc="outside lower left", ncols=4, frameon=False, fontsize=8)


# 92_xray_against_hardware

FAMILIES = {  # ending of a counter's name -> how it is drawn
    "sectors": (BLUE, "o"),
    "requests": (GREEN, "^"),
    "instructions": (GREEN, "^"),
    "wavefronts": (ORANGE, "s"),
    "conflicts": (MAGENTA, "D"),
}


@styled
def predicted_and_counted(panels: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Hardware counters against the X-ray's counts, a panel per frame; on the dashed line both are the same.

    panels: title to a frame with columns metric, xray, hardware. Points at one place are drawn as one; those off the line are
    hollow. What is zero on both sides is left out.
    """
    equal = {}
    for name, everything in panels.items():
        frame = everything[(everything["xray"] > 0) | (everything["hardware"] > 0)]
        equal[name] = f"{(frame['xray'] == frame['hardware']).sum()} of {len(frame)} equal"
    words = f"{title}. Counts of the X-ray against those of the GPU: " + "; ".join(
        f"{n}: {e}" for n, e in equal.items()
    )
    figure, axes = _canvas(4.3 * len(panels), 4.6, f"{words}. Filled markers lie on the diagonal.", len(panels), title)
    drawn = {}
    for ax, (name, everything) in zip(axes, panels.items(), strict=True):
        frame = everything[(everything["xray"] > 0) | (everything["hardware"] > 0)]
        top = 2 * max(frame[["xray", "hardware"]].max().max(), 1)
        ax.plot([0, top], [0, top], color=MUTED, linestyle="--", linewidth=1, zorder=1)
        family = frame["metric"].str.extract(f"({'|'.join(FAMILIES)})")[0].replace("requests", "instructions")
        for ending, part in frame.groupby(family, sort=False):
            colour, marker = FAMILIES[ending]
            at = part.groupby(["xray", "hardware"]).size()
            x, y = at.index.get_level_values(0), at.index.get_level_values(1)
            on = x == y
            drawn[ending] = ax.scatter(x[on], y[on], s=30, c=colour, marker=marker, alpha=0.8, linewidth=0, zorder=2)
            ax.scatter(x[~on], y[~on], s=26, facecolor="none", edgecolor=colour, marker=marker, linewidth=1, zorder=3)
        for axis, which in ((ax.set_xscale, ax.xaxis), (ax.set_yscale, ax.yaxis)):
            axis("symlog", linthresh=1, linscale=0.6)
            which.set_major_locator(FixedLocator([0, *(10.0**e for e in range(0, 10))]))
            which.set_minor_locator(NullLocator())
        ax.set(xlim=(-0.4, top), ylim=(-0.4, top), xlabel="counted by the X-ray", aspect="equal")
        ax.set_title(f"{name}: {equal[name]}", color=MUTED)
    axes[0].set_ylabel("counted by the GPU")
    words = {"instructions": "requests (instructions)"}
    labels = [f"{words.get(ending, ending)}, hollow: not equal" for ending in drawn]
    figure.legend(drawn.values(), labels, loc="outside lower left", ncols=4, frameon=False)
    return figure


@styled
def who_flags(counts: pd.DataFrame, title: str) -> Figure:
    """Mutants by who flags them: stacked bars, a row per rung. counts: index rung, columns "both", "X-ray alone", "X-ray's stricter
    rule", "GPU alone", "neither"."""
    looks = {
        "both": (BLUE, ""),
        "X-ray alone": (SHADES[1], "//"),
        "X-ray's stricter rule": (SAND, ".."),
        "GPU alone": (ORANGE, "\\\\"),
        "neither": (CARD, ""),
    }
    total = ", ".join(f"{counts[name].sum()} {name}" for name in looks if name in counts)
    figure, (ax,) = _canvas(
        8.6, 1.5 + 0.36 * len(counts), f"{title}. Of {counts.to_numpy().sum()}: {total}.", title=title
    )
    left = np.zeros(len(counts))
    for name, (colour, hatch) in looks.items():
        n = counts.get(name, pd.Series(0, counts.index)).to_numpy()
        bars = ax.barh(
            range(len(counts)), n, 0.66, left, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.7, label=name
        )
        ax.bar_label(bars, [f"{k}" if k else "" for k in n], label_type="center", fontsize=8.5,
                     color=CARD if name in ("both", "GPU alone") else INK,
                     bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8})  # fmt: skip
        left = left + n
    ax.set_yticks(range(len(counts)), list(counts.index), color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="mutants")
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure
