"""The drawings of notebook 21: what a decode step is bound by, its pieces on the machine, its bandwidth, and a paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ...figures.lines import device as device_of
from ...figures.style import BLUE, CARD, FAINT, GREEN, INK, MUTED, ORANGE, SAND, SHADES, Figure, blank, canvas, styled


@styled
def roofline(intensities: Mapping[str, float], copy: float, matmul: float, device: str) -> Figure:
    """The most TFLOP/s that a device allows at each arithmetic intensity, FLOPs per byte of HBM. copy: TB/s, the slope;
    matmul: TFLOP/s, the flat part; both measured on `device`."""
    figure, (ax,) = canvas(8.2, 3.9, title=f"What the memory allows · {device}, ceilings measured")
    x = np.geomspace(0.4, 4 * matmul / copy, 200)
    ax.plot(x, np.minimum(x * copy, matmul), color=INK, linewidth=1.8)
    card = {"facecolor": CARD, "edgecolor": "none", "pad": 1}  # no line runs through a label
    for n, (name, intensity) in enumerate(intensities.items()):
        y = min(intensity * copy, matmul)
        colour, marker = (BLUE, ORANGE, GREEN)[n % 3], "osD"[n % 3]
        ax.plot([intensity] * 2, [1, y], color=colour, linewidth=1, linestyle=":")
        ax.plot(intensity, y, marker, color=colour, markersize=8, zorder=4)
        text = f"{name}: {y:.3g} TFLOP/s at most, {y / matmul:.1%}"
        right = intensity < matmul / copy / 4
        where = {"xytext": (9, -13), "ha": "left"} if right else {"xytext": (-12, 3), "ha": "right"}
        ax.annotate(text, (intensity, y), textcoords="offset points", fontsize=9, color=colour, bbox=card, **where)
    ax.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(1, matmul * 3))
    ax.set(xlabel="arithmetic intensity (FLOP per byte from HBM)", ylabel="TFLOP/s")
    ax.text(x[-1], matmul * 1.15, f"fp16 matrix product {matmul:.0f} TFLOP/s ", ha="right", fontsize=9)
    ax.text(2.6, 2.6 * copy * 1.3, f"copy {copy:.2f} TB/s", fontsize=9, ha="right")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda v, _: f"{v:g}")
    told = [f"{name}: {min(x * copy, matmul):.3g} TFLOP/s" for name, x in intensities.items()]
    figure.in_words = (
        f"Roofline of {device}: a copy's {copy:.2f} TB/s up to {matmul:.0f} TFLOP/s. At most {'; '.join(told)}."
    )
    return figure


@styled
def pieces(runs: Mapping[str, pd.DataFrame], places: int, per_sm: int) -> Figure:
    """Where and when each piece of the keys is worked on, a panel per number of splits. runs: title -> schedule.run(...) with
    a column `split`; places are SMs times `per_sm`. The tint is the piece; white is a place with nothing to do."""
    figure, axes = canvas(3.6 * len(runs), 3.9, len(runs), sharey=True, sharex=True)
    last, told = max(frame["end"].max() for frame in runs.values()), []
    for ax, (title, frame) in zip(axes, runs.items(), strict=True):
        for place, begin, end, split in frame[["place", "begin", "end", "split"]].itertuples(index=False):
            face = (*SHADES, SAND)[int(split) % 5]
            ax.add_patch(Rectangle((begin, place), end - begin, 1, facecolor=face, edgecolor=INK, linewidth=0.6))
        used = (frame["end"] - frame["begin"]).sum() / (places * frame["end"].max())
        ax.axvline(frame["end"].max(), color=ORANGE, linewidth=1.6, linestyle="--")
        ax.set(xlim=(0, last * 1.03), ylim=(places, 0), xlabel="time (keys)")
        ax.set_yticks(range(0, places + 1, per_sm), [f"SM {i}" for i in range(places // per_sm)] + [""], va="top")
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{title}: {used:.0%} of the places at work", color=MUTED)
        told.append(f"{title}: done at {frame['end'].max():.0f}, {used:.0%} of the places at work")
    most = max(int(frame["split"].max()) for frame in runs.values()) + 1
    handles = [Patch(facecolor=(*SHADES, SAND)[n % 5], edgecolor=INK, label=f"piece {n}") for n in range(most)]
    handles.append(Line2D([], [], color=ORANGE, linewidth=1.6, linestyle="--", label="all are done"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    figure.in_words = f"Pieces of the keys on {places} places over time. {'; '.join(told)}."
    return figure


@styled
def bandwidth(predicted: pd.DataFrame, chosen: int, title: str, measured: pd.DataFrame | None = None) -> Figure:
    """Bandwidth of a decode step against the number of splits, as a share of that of a copy.

    predicted: index splits, a column for each assumption of the model. chosen: the rung's own number. measured: columns splits
    and of_copy (record.bandwidths of one shape and dtype), or None.
    """
    figure, (ax,) = canvas(8.6, 4.0, title=title)
    dashes = ("--", ":", "-.", (0, (5, 1, 1, 1)))
    for (name, values), colour, dash in zip(predicted.items(), (BLUE, GREEN, MUTED, INK), dashes, strict=False):
        ax.plot(values.index, values, color=colour, linestyle=dash, linewidth=1.6, label=f"model: {name}")
    if measured is not None:
        points = measured.sort_values("splits")
        ax.plot(
            points["splits"],
            points["of_copy"],
            "o-",
            color=ORANGE,
            linewidth=2.2,
            label=f"measured · {device_of(points)}",
        )
    ax.axvline(chosen, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    ax.text(chosen, 0.03, f" {chosen} by itself", fontsize=9, transform=ax.get_xaxis_transform())
    ax.axhline(1, color=INK, linewidth=1)
    top = max(predicted.max(axis=None), 1.0 if measured is None else measured["of_copy"].max())
    ax.set(
        xscale="log",
        ylim=(0, 1.12 * top),
        xlabel="splits (pieces of the keys)",
        ylabel="K and V per second, share of a copy",
    )
    ticks = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= predicted.index.max()]
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    told = [f"{name}: at most {x.max():.2f} of a copy, with {x.idxmax()} splits" for name, x in predicted.items()]
    if measured is not None:
        best = measured.loc[measured["of_copy"].idxmax()]
        told.append(f"measured: at most {best['of_copy']:.2f}, with {best['splits']:.0f}")
    figure.in_words = f"{title}. Bandwidth against the number of splits. {'; '.join(told)}. The rung takes {chosen}."
    return figure


@styled
def block_table(table: np.ndarray, lengths: Sequence[int], page: int, pages: int) -> Figure:
    """A paged cache: left, the pages of memory; right, each sequence's row of the table. Pages and entries carry the same tint
    for the same sequence; hatched is room of a page not in use, white a page that is free."""
    figure, (left, right) = canvas(10.2, 0.9 + 0.46 * max(len(lengths) + 1, -(-pages // 6)), 2, width_ratios=(1, 1.35))
    tints = [*SHADES, SAND]
    owner = {}
    for s, n in enumerate(lengths):
        for order in range(-(-n // page)):
            owner[int(table[s][order])] = (s, order, min(page, n - order * page))
    columns = 6
    blank(left).set(xlim=(-0.1, columns + 0.1), ylim=(-(-pages // columns) + 0.1, -0.1))
    for p in range(pages):
        x, y = p % columns, p // columns
        left.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=CARD, edgecolor=MUTED, linewidth=0.7))
        if p in owner:
            s, _, used = owner[p]
            box = {"height": 0.84, "edgecolor": INK, "linewidth": 0.7}
            left.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92 * used / page, facecolor=tints[s % 5], **box))
            if used < page:
                start = x + 0.04 + 0.92 * used / page
                left.add_patch(
                    Rectangle((start, y + 0.08), 0.92 * (1 - used / page), facecolor=CARD, hatch="////", **box)
                )
        behind = {
            "facecolor": CARD,
            "edgecolor": "none",
            "pad": 1,
            "alpha": 0.85,
        }  # a number on hatching is hard to read
        left.text(x + 0.5, y + 0.5, p, ha="center", va="center", fontsize=9, bbox=behind)
    left.set_title(f"K and V: {pages} pages of {page} keys", color=MUTED)
    most = table.shape[1]
    blank(right).set(xlim=(-2.6, most + 0.1), ylim=(len(lengths) + 0.1, -0.8))
    for s, n in enumerate(lengths):
        right.text(-0.15, s + 0.5, f"sequence {s}, {n} keys", ha="right", va="center", fontsize=9)
        for order in range(most):
            used = order < -(-n // page)
            face = tints[s % 5] if used else CARD
            right.add_patch(
                Rectangle((order + 0.04, s + 0.1), 0.92, 0.8, facecolor=face, edgecolor=MUTED, linewidth=0.7)
            )
            right.text(order + 0.5, s + 0.5, int(table[s][order]), ha="center", va="center", fontsize=9,
                       color=INK if used else FAINT)  # fmt: skip
    for order in range(most):
        right.text(order + 0.5, -0.3, f"{order * page}…", ha="center", va="center", fontsize=8, color=MUTED)
    right.set_title("the block table: which page holds keys …", color=MUTED)
    handles = [Line2D([], [], color=tints[s % 5], linewidth=7, label=f"sequence {s}") for s in range(len(lengths))]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(lengths), frameon=False, fontsize=9)
    told = [
        f"sequence {s}, {n} keys, on pages {', '.join(str(int(p)) for p in table[s][: -(-n // page)])}"
        for s, n in enumerate(lengths)
    ]
    figure.in_words = f"{pages} pages of {page} keys and the block table. {'; '.join(told)}."
    return figure
