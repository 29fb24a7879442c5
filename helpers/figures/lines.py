"""Lines against a size: a look for each name, names at the lines' ends, axes in powers of two, and whose record it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from .style import CARD, MUTED, PEERS, RUNGS, Figure, canvas


def looks_of(names: Iterable[str]) -> dict[str, tuple]:
    """A look for each name: peers keep theirs in every figure, rungs take the next free one in order."""
    names = list(dict.fromkeys(names))
    free = iter(RUNGS * (1 + len(names) // len(RUNGS)))
    return {name: PEERS[name] if name in PEERS else next(free) for name in names}


def draw_line(ax: Axes, x: Sequence[float], y: Sequence[float], look: tuple, ours: bool, **options: object) -> None:
    colour, marker, dash = look
    filled = {"markeredgecolor": CARD, "markeredgewidth": 0.8} if marker not in "x+1234|_" else {"markeredgewidth": 1.5}
    options = {"linewidth": 2.3 if ours else 1.5, "zorder": 3 if ours else 3.5, "linestyle": dash} | filled | options
    ax.plot(x, y, color=colour, marker=marker, **options)


def name_lines(ax: Axes, ends: dict[str, tuple[float, float]], looks: Mapping[str, tuple], gap: float = 0.075) -> None:
    """Writes each line's name right of the panel, moved apart where two would overlap; of a line that ends before the right
    edge, beside its last point."""
    to_axes = ax.transAxes.inverted()
    where = {n: to_axes.transform(ax.transData.transform(end)) for n, end in ends.items()}
    for name in [n for n, (x, _) in where.items() if x <= 0.9]:
        look = {"color": looks[name][0], "fontsize": 9, "fontweight": _weight(looks[name]), "va": "center"}
        ax.annotate(name, where.pop(name), (8, 0), xycoords="axes fraction", textcoords="offset points", **look)
    order = sorted(where, key=lambda n: where[n][1])
    y = np.array([where[n][1] for n in order], dtype=float)
    for _ in range(200):  # push neighbours apart until they all fit
        for i in range(len(y) - 1):
            overlap = gap - (y[i + 1] - y[i])
            if overlap > 1e-4:
                y[i] -= overlap / 2
                y[i + 1] += overlap / 2
    for name, height in zip(order, y, strict=True):
        ax.annotate(
            name,
            xy=where[name],
            xytext=(1.045, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=looks[name][0],
            fontsize=9,
            fontweight=_weight(looks[name]),
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": looks[name][0],
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def _weight(look: tuple) -> str:
    return "normal" if look in PEERS.values() else "bold"


def draw_panels(table: pd.DataFrame, x: str, x_label: str, y: str, y_label: str) -> Figure:
    """A panel per D, in it a line per name: column `y` against column `x`, which goes up in powers of two."""
    looks = looks_of(table["name"])
    figure, axes = canvas(5.0 * table["D"].nunique(), 3.4, table["D"].nunique())
    for ax, (D, part) in zip(axes, table.groupby("D"), strict=True):
        ends = {}
        for name, line in part.groupby("name", sort=False):
            line = line.sort_values(x)
            draw_line(ax, line[x], line[y], looks[name], name not in PEERS)
            ends[name] = (line[x].iloc[-1], line[y].iloc[-1])
        power_of_two_axis(ax, part[x], x_label)
        ax.set_ylim(bottom=0)
        ax.set_title("" if D == 1 else f"D = {D}", color=MUTED)
        figure.draw_without_rendering()
        name_lines(ax, ends, looks)
    axes[0].set_ylabel(y_label)
    return figure


def power_of_two_axis(ax: Axes, values: Iterable[float], label: str) -> None:
    ticks = sorted(set(values))
    while len(ticks) > 8:
        ticks = ticks[::-2][::-1]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))
    ax.set_xlabel(label)


def log_ticks(ax: Axes) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    steps = (1,) if high / low > 300 else (1, 3) if high / low > 30 else (1, 2, 5)
    ticks = [m * 10.0**e for e in range(-12, 15) for m in steps]
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def short(n: float) -> str:
    """512, 1k, 16k, 1M: powers of 1024, otherwise the number itself."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= size and n % size == 0:
            return f"{n / size:g}{suffix}"
    return f"{n:g}"


def device(frame: pd.DataFrame) -> str:
    """The devices of a frame for its title, and which of its rungs have changed since they were recorded, and where, if not on all of
    them. Of a record of several rungs, which has no `op`, it isn't known which one has."""
    words = " and ".join(dict.fromkeys(frame["device"])) if "device" in frame else "this GPU"
    if "stale" in frame and frame["stale"].any():
        stale = frame[frame["stale"].astype(bool)]
        old = stale.drop_duplicates("rung")
        of_one = old["op"].notna() if "op" in old else pd.Series(True, old.index)
        names = old["rung"].where(of_one, "a kernel of " + old["rung"] + "'s record")
        some = "device" in frame and set(stale["device"]) != set(frame["device"])
        where = f" on {', '.join(dict.fromkeys(stale['device']))}" if some else ""
        words += f" · STALE{where}: {', '.join(names)} changed since"
    return words


def of_dtype(frame: pd.DataFrame, dtype: str | None) -> pd.DataFrame:
    """The rows of one dtype; None: of the first that each rung was recorded in. ValueError names the dtypes there are."""
    if "dtype" not in frame:
        return frame
    if dtype is not None:
        if dtype not in set(frame["dtype"]):
            raise ValueError(f"nothing recorded for {dtype}; there is {', '.join(dict.fromkeys(frame['dtype']))}")
        return frame[frame["dtype"] == dtype]
    if "rung" not in frame:
        return frame[frame["dtype"] == frame["dtype"].iloc[0]]
    return frame[frame["dtype"] == frame.groupby("rung")["dtype"].transform("first")]
