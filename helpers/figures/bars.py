"""Bars: several columns side by side, and the bytes of each tensor, counted beside predicted ones or beside the least possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from .style import AMBER, BLUE, BROWN, CARD, GREEN, GRID, INK, MUTED, SAND, Figure, Picture, canvas, picture, styled
from .words import BINARY, DECIMAL, size


def grouped(
    ax: Axes,
    table: pd.DataFrame,
    looks: Sequence[tuple[str, str]],
    width: float,
) -> dict[str, BarContainer]:
    """The columns of `table` as bars side by side, a group for each row. Returns each column's bars.

    looks: colour and hatch of each column. width: of a group, groups being 1 apart. ValueError for more columns than looks.
    """
    columns = table.shape[1]
    if columns > len(looks):
        raise ValueError(f"{columns} columns side by side; there are looks for {len(looks)}")
    made = {}
    for n, ((name, values), (colour, hatch)) in enumerate(zip(table.items(), looks, strict=False)):
        at = np.arange(len(table)) + (n - (columns - 1) / 2) * (width / columns)
        made[name] = ax.bar(at, values, width / columns * 0.94, color=colour, hatch=hatch, edgecolor=CARD, label=name)
    return made


# Bytes by tensor


def _moved(ax: Axes, counted: pd.DataFrame, y: np.ndarray, height: float, border: float) -> np.ndarray:
    """Bars of the bytes read and, hatched and `border` points wide around, those written. Returns their sums."""
    read, written = (counted[c].to_numpy(dtype=float) for c in ("bytes_read", "bytes_written"))
    r, w = read > 0, written > 0
    ax.barh(y[r], read[r], height, color=BLUE, label="read")
    hatched = {"color": SAND, "hatch": "///", "edgecolor": BROWN, "linewidth": border}
    ax.barh(y[w], written[w], height, left=read[w], label="written", **hatched)
    return read + written


def _tensor_axes(ax: Axes, names: Sequence[str], most: float, units: Sequence[tuple[float, str]]) -> None:
    ax.set_yticks(range(len(names)), names, color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, most * 1.16)
    ax.xaxis.set_major_formatter(lambda v, _: size(v, units))


@styled
def traffic(counted: pd.DataFrame, predicted: Mapping[str, float] | None = None, title: str = "") -> Figure:
    """Bytes moved for each tensor, as counted, beside a prediction.

    counted: index tensor name, columns bytes_read and bytes_written (helpers.traffic). predicted: tensor name to bytes read
    and written together. Counts are the same on every machine, so no device is named. ValueError for a prediction of a
    tensor that was not counted.
    """
    unknown = set(predicted or {}) - set(counted.index)
    if unknown:
        raise ValueError(f"a prediction for {sorted(unknown)}, but counted were {list(counted.index)}")
    names = list(counted.index)
    guessed = [name for name in names if name in (predicted or {})]
    figure, (ax,) = canvas(6.8, 0.8 + 0.55 * len(names))
    y = np.arange(len(names), dtype=float)
    height = 0.36 if predicted else 0.6
    offset = height / 2 if predicted else 0.0
    total = _moved(ax, counted, y - offset, height, 1.0)
    most = max(total.max(), max((predicted or {"": 0}).values()))
    for i, name in enumerate(names):
        ax.text(total[i] + 0.01 * most, y[i] - offset, size(total[i], DECIMAL), va="center", fontsize=9)
        if name in guessed:
            guess = predicted[name]
            label = "predicted" if name == guessed[0] else None
            ax.barh(y[i] + offset, guess, height, facecolor="none", edgecolor=MUTED, linestyle="--", label=label)
            said = size(guess, DECIMAL)
            ax.text(guess + 0.01 * most, y[i] + offset, said, va="center", fontsize=9, color=MUTED)
    _tensor_axes(ax, names, most, DECIMAL)
    ax.set_xlabel("bytes requested by the kernel's threads")
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title or "Bytes by tensor, counted", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def beside_minimum(table: pd.DataFrame, title: str) -> Picture:
    """Bytes by tensor, read and written, beside the theoretical minimum.

    table: index tensor, columns bytes_read, bytes_written and minimum_bytes (`Xray.tensors`); tensors of which nothing was
    moved are left out.
    """
    table = table[(table["bytes_read"] + table["bytes_written"]) > 0]
    y = np.arange(len(table), dtype=float)
    figure, ax = picture(_minimum_text(table, title), 7.4, 1.3 + 0.55 * len(table), title)
    total, least = _moved(ax, table, y - 0.18, 0.36, 0.0), table["minimum_bytes"].to_numpy(dtype=float)
    most = max(total.max(), least.max()) if len(table) else 1
    ax.barh(y + 0.18, least, 0.3, color=MUTED, alpha=0.55, linewidth=0, label="theoretical minimum")
    for i in range(len(table)):
        ax.text(total[i] + 0.012 * most, y[i] - 0.18, size(total[i]), va="center", fontsize=9)
        said = _times(total[i], least[i])
        ax.text(least[i] + 0.012 * most, y[i] + 0.18, said, va="center", fontsize=9, color=MUTED)
    _tensor_axes(ax, list(table.index), most, BINARY)
    ax.set_xticks(np.arange(0, 1.16 * most, 2.0 ** np.ceil(np.log2(most / 6)) if most > 1 else 1))
    ax.spines["left"].set_color(GRID)
    figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


def _times(moved: float, least: float) -> str:
    return f"× {moved / least:.3g}" if least else "none needed"


def _minimum_text(table: pd.DataFrame, head: str) -> str:
    rows = [head, f"{'tensor':<8}{'read':>10}{'written':>10}{'minimum':>10}   × minimum"]
    for name, row in table.iterrows():
        read, written, least = row["bytes_read"], row["bytes_written"], row["minimum_bytes"]
        times = _times(read + written, least)
        rows.append(f"{name:<8}{size(read):>10}{size(written):>10}{size(least):>10}   {times}")
    return "\n".join(rows)


@styled
def bytes_by_tensor(kernels: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Bytes of each tensor, side by side for up to three kernels. kernels: name to bytes by tensor."""
    table = pd.DataFrame({name: dict(bytes_) for name, bytes_ in kernels.items()}) / 2**20
    figure, (ax,) = canvas(6.8, 3.2, title=title)
    most = table.max(axis=None)
    for name, bars in grouped(ax, table, [(BLUE, ""), (AMBER, "//"), (GREEN, "..")], 0.8).items():
        said = [f"{v:.3g}" if v > most / 50 else f"{v:.1g}" if v > 0 else "" for v in table[name]]
        ax.bar_label(bars, said, fontsize=8, color=MUTED, padding=1)
    ax.set_xticks(range(len(table)), table.index)
    ax.set(ylabel="MiB read + written", ylim=(0, 1.12 * most))
    ax.grid(axis="x", visible=False)
    ax.legend(facecolor=CARD, edgecolor="none", framealpha=1)
    return figure
