"""The ladder at a glance: a step for each rung, and published steps beside ours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..record.workload import N
from .lines import name_lines
from .style import BLUE, CARD, INK, MUTED, ORANGE, PEERS, SHADES, Figure, canvas, styled

UNITS = {"tflops": "TFLOP/s", "to_flash": "speed beside SDPA FLASH\n(its time in the same session / this one's)"}


@styled
def staircase(table: pd.DataFrame, unit: str = "tflops") -> Figure:
    """Every rung a step (a dot where the axis is logarithmic), the peers and ceilings lines across, a panel per D.

    table: scoreboard.speeds(), with rows of kind "yours" added or not. unit: "tflops" (logarithmic where the largest is more
    than 30 times the smallest) or "to_flash", the ratio to SDPA FLASH with bars to its worst and best shape; rungs that FLASH
    can't run beside (fp32) are left out of it.

    A rung without records keeps its place, marked so. ValueError for another unit or where nothing was recorded.
    """
    if unit not in UNITS:
        raise ValueError(f"the staircase has the units {', '.join(UNITS)}, not {unit!r}")
    steps = table[table["kind"].isin(["rung", "yours"])]
    if unit == "to_flash":
        steps = steps[steps["dtype"] != "fp32"]
    names = list(dict.fromkeys(steps["name"]))
    if not names or steps[unit].isna().all():
        raise ValueError(f"no rung has {unit} recorded; there are {', '.join(names) or 'no rungs'}")
    lines = table[table["kind"].isin(["peer", "published", "ceiling"]) & table[unit].notna()]
    dims = sorted(set(table["D"]))
    most = max(table[unit].max(), 1.0 if unit == "to_flash" else 0.0)
    log = unit == "tflops" and most > 30 * steps[unit].min()
    low = steps[unit].min() / 3 if log else 0.0
    figure, axes = _panels(len(dims), len(names))
    for ax, D in zip(axes, dims, strict=True):
        if log:
            ax.set_yscale("log")
        ax.set(xlim=(-0.6, len(names) - 0.4), ylim=(low, most * (1.5 if log else 1.12)))
        at = steps[steps["D"] == D].drop_duplicates("name", keep="last").set_index("name")
        for x, name in enumerate(names):
            row = at.loc[name] if name in at.index else None
            if row is not None and pd.notna(row[unit]):
                _step(ax, x, row, unit, low)
                continue
            why = {"s": "not recorded yet" if row is not None else f"not at D = {D}", "rotation": 90}
            ax.text(x, 0.03, **why, color=MUTED, fontsize=9, ha="center", transform=ax.get_xaxis_transform())
        ends = _across(ax, lines[lines["D"] == D], unit, len(names) - 0.4)
        ax.set_xticks(range(len(names)), ["\n".join(n.split("_")) for n in names], fontsize=8.5, color=INK)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"D = {D}", color=MUTED)
        if log:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        figure.draw_without_rendering()
        name_lines(ax, ends, {name: PEERS[name.rpartition(" ")[0]] for name in ends}, gap=0.06)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(UNITS[unit])
    title = _staircase_title(table, steps, unit, log)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.in_words = f"{title}. {_in_words(steps, lines, dims, unit)}"
    return figure


def _in_words(steps: pd.DataFrame, lines: pd.DataFrame, dims: list[int], unit: str) -> str:
    """Every rung's and peer's number, a sentence per D."""
    rows = pd.concat([steps[steps[unit].notna()], lines]).drop_duplicates(["name", "D"], keep="last")
    parts = [(D, rows[rows["D"] == D].itertuples()) for D in dims]
    said = [f"D = {D}: " + ", ".join(f"{r.name} {_said(getattr(r, unit), unit)}" for r in part) for D, part in parts]
    return ". ".join(said) + "."


def _panels(panels: int, steps: int) -> tuple[Figure, list[Axes]]:
    """Side by side; one above the other where there are so many steps that names and figures would grow too small to read."""
    wide = max(3.2, 0.72 * steps + 2.2)
    if wide * panels <= 12:
        return canvas(wide * panels, 4.0, panels, sharey=True)
    figure = Figure(figsize=(wide, 4.2 * panels + 0.6), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False, sharex=True, sharey=True)[:, 0])


def _across(ax: Axes, lines: pd.DataFrame, unit: str, right: float) -> dict[str, tuple[float, float]]:
    """A line across for each peer. Returns what is written at its right end, with its place."""
    ends = {}
    for _, line in lines.iterrows():
        colour, _, dash = PEERS[line["name"]]
        ax.axhline(line[unit], color=CARD, linewidth=2.2, zorder=2.5)  # so that it reads on a step, too
        ax.axhline(line[unit], color=colour, linestyle=dash, linewidth=1.4, zorder=3)
        ends[f"{line['name']} {_said(line[unit], unit)}"] = (right, line[unit])
    return ends


def _said(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "to_flash" else f"{value:.3g}"


def _step(ax: Axes, x: int, row: pd.Series, unit: str, low: float) -> None:
    colour, hatch = (ORANGE, "") if row["kind"] == "yours" else (BLUE, "")
    if row["dtype"] == "fp32" and row["kind"] != "yours":
        colour, hatch = SHADES[2], "///"
    if low:  # a logarithmic axis has no 0 for a bar to stand on
        face = CARD if hatch else colour
        ax.plot(x, row[unit], "o", markersize=10, markerfacecolor=face, markeredgecolor=INK, zorder=4)
        look = {"ha": "center", "fontsize": 9, "color": INK, "zorder": 5}
        label = {"facecolor": CARD, "edgecolor": "none", "pad": 0.6}
        ax.annotate(_said(row[unit], unit), (x, row[unit]), (0, 8), textcoords="offset points", bbox=label, **look)
        return
    ax.bar(x, row[unit], 0.9, color=colour, hatch=hatch, edgecolor=CARD, linewidth=0, zorder=2)
    if unit == "to_flash":
        ends = [[row[unit] - row["low"]], [row["high"] - row[unit]]]
        ax.errorbar(x, row[unit], ends, fmt="none", ecolor=INK, elinewidth=1.1, capsize=3, zorder=4)
    text = _said(row[unit], unit)
    inside = ax.transAxes.inverted().transform(ax.transData.transform((x, row[unit])))[1] > 0.1
    label = {"facecolor": colour if inside else CARD, "edgecolor": "none", "pad": 0.8}
    look = {"ha": "center", "fontsize": 9, "color": CARD if inside and not hatch else INK, "bbox": label, "zorder": 5}
    if inside:  # at the step's foot, where no peer's line passes
        ax.text(x, 0.025, text, transform=ax.get_xaxis_transform(), **look)
    else:
        top = row["high"] if unit == "to_flash" else row[unit]
        ax.annotate(text, (x, top), (0, 4), textcoords="offset points", **look)


def _staircase_title(table: pd.DataFrame, steps: pd.DataFrame, unit: str, log: bool) -> str:
    """What and where: the reader's own kernel may have run on another card than the recorded ones."""
    what = f"TFLOP/s at N = {N}" if unit == "tflops" else "Geometric mean over N ≥ 1024, worst and best"
    recorded = table[table["device"].notna()]
    devices = dict.fromkeys(recorded.loc[recorded["kind"] != "yours", "device"])
    words = " and ".join(devices)
    if yours := [d for d in dict.fromkeys(recorded.loc[recorded["kind"] == "yours", "device"]) if d not in devices]:
        words += f", yours on {yours[0]}"
    old = steps.loc[steps["stale"].eq(True), "name"].unique()
    fp32 = "open" if log else "hatched"
    dtypes = f", {fp32}: fp32" if {"fp32"} < set(steps["dtype"]) else ""
    stale = f" · STALE: {', '.join(old)} changed since" if len(old) else ""
    return f"{what}{dtypes} · {words}{stale}"


@styled
def percent_steps(steps: pd.DataFrame, ours: Mapping[str, float], device: str) -> Figure:
    """Published steps towards FlashAttention-2 above, our rungs below, each in percent of FlashAttention-2 on its own card.

    steps: record.sixteen_steps(). ours: rung -> percent of SDPA FLASH on `device`, NaN where it isn't recorded.
    """
    labels = [f"{i} · {change}" for i, change in steps["change"].items()] + list(ours)
    values = np.array([*steps["a100"], *ours.values()], dtype=float)
    y = np.array([*range(len(steps)), *(len(steps) + 0.7 + i for i in range(len(ours)))])
    title = f"Percent of FlashAttention-2's speed, D = 128 · published on A100 and RTX 3090, ours on {device}"
    figure, (ax,) = canvas(8.6, 1.2 + 0.27 * (len(y) + 1), title=title)
    published = y < len(steps)
    a100 = ax.barh(y[published], values[published], 0.8, color=SHADES[2])
    a100.set_label("flash_attention_from_scratch, A100 (published)")
    (rtx3090,) = ax.plot(steps["rtx3090"], y[published], "D", color=INK, markersize=4.5)
    rtx3090.set_label("the same, RTX 3090 (published)")
    own = ax.barh(y[~published], np.nan_to_num(values[~published]), 0.8, color=BLUE, label=f"this series, {device}")
    for place, value in zip(y, values, strict=True):
        text = f"{value:.3g}" if np.isfinite(value) else "not recorded yet"
        inside = np.isfinite(value) and value > 20
        colour = (INK if place < len(steps) else CARD) if inside else MUTED
        ax.text(
            value - 4 if inside else 1 + np.nan_to_num(value),
            place,
            text,
            color=colour,
            fontsize=8.5,
            va="center",
            ha="right" if inside else "left",
        )
    ax.axvline(100, color=INK, linewidth=1, linestyle="--", zorder=4)
    ax.set_yticks(y, labels, color=INK, fontsize=8.5)
    ax.set_ylim(y[-1] + 0.7, -0.7)
    ax.set_xlim(0, max(110.0, np.nanmax(values) * 1.06))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("percent of FlashAttention-2's speed on the same card (D = 128)")
    figure.legend(handles=[a100, rtx3090, own], loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    theirs = zip(labels, steps["a100"], steps["rtx3090"], strict=False)
    mine = [f"{name} {v:.3g}" if np.isfinite(v) else f"{name} not recorded yet" for name, v in ours.items()]
    figure.in_words = f"{title}. A100 and RTX 3090: {'; '.join(f'{n} {a:.3g}, {r:.3g}' for n, a, r in theirs)}. "
    figure.in_words += f"This series: {', '.join(mine)}."
    return figure
