"""Figures from records. Each function takes a DataFrame of `record` and returns a Figure; none needs torch or a GPU.

Figures are drawn on a light card of their own, so that they read the same on a white page, a dark one and in print;
lines differ in colour (Okabe and Ito's, told apart by colour-blind readers), marker and dash, and carry their name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .. import record
from .bars import traffic
from .by_family import families
from .by_heads import by_heads
from .lines import device, draw_line, draw_panels, log_ticks, looks_of, name_lines, of_dtype, power_of_two_axis, short
from .stairs import percent_steps, staircase
from .style import BLUE, CARD, DARK, INK, MUTED, ORANGE, PEERS, RUNGS, Figure, canvas, styled
from .words import size

__all__ = [
    "budget",
    "by_heads",
    "error",
    "families",
    "memory",
    "percent_steps",
    "ratio",
    "recorded",
    "roofline",
    "staircase",
    "throughput",
    "traffic",
]
T = TypeVar("T")
OUTPUTS = {"o": "O", "lse": "LSE", "p": "P", "dq": "dQ", "dk": "dK", "dv": "dV"}


def recorded(stem: str, kind: str, draw: Callable[[pd.DataFrame], T]) -> T | None:
    """What `draw` makes of a record, record.load(stem, kind). Where there is none it prints a sentence that says so, with the
    command that makes one, and returns None."""
    try:
        samples = record.load(stem, kind)
    except LookupError:
        print(f"{stem} has no {kind!r} record; {record.maker(stem, kind)}")
        return None
    return draw(samples)


def _select(samples: pd.DataFrame, dtype: str | None = None) -> pd.DataFrame:
    """The rows a line can be drawn through: attention where both operations are there, one dtype, one shape per N and D (of
    softmax the lengths that are powers of two), and each peer from one session only. ValueError where the shapes don't
    decide that."""
    samples = of_dtype(samples, dtype)
    if "op" in samples and samples["op"].nunique() > 1:
        samples = samples[samples["op"] == "attention"]
    if "causal" in samples and samples["causal"].nunique() > 1:
        raise ValueError("both with and without a causal mask: select one, e.g. samples[samples.causal == 1]")
    keys = [c for c in ("dtype", "Nk", "D") if c in samples]
    if (samples.groupby(keys)[["B", "H", "Nq"]].nunique() > 1).any(axis=None):
        samples = record.headline(samples)
        if samples.empty or (samples.groupby(keys)[["B", "H", "Nq"]].nunique() > 1).any(axis=None):
            raise ValueError("several (B, H, Nq) share one N and D: select one, e.g. samples[samples.B == 8]")
    softmax = samples["D"] == 1
    samples = samples[~softmax | samples["Nk"].map(lambda n: n & (n - 1) == 0)]
    if "rung" in samples:
        last = samples.groupby("name")["rung"].transform("max")
        samples = samples[(samples["rung"] == last) | (samples["name"] == samples["rung"])]
    return samples


def _what(frame: pd.DataFrame) -> str:
    return " and ".join(dict.fromkeys(frame["dtype"])) if "dtype" in frame else ""


def _workload(frame: pd.DataFrame) -> str:
    """The part of the shape that does not change along a figure, in words."""
    if (frame["D"] == 1).all():
        return f"{short(float((frame['Nq'] * frame['Nk']).max()))} elements"
    if (frame["B"] * frame["Nq"]).nunique() == 1 and (frame["H"] * frame["D"]).nunique() == 1:
        return f"B·N = {int((frame['B'] * frame['Nq']).iloc[0])}, H·D = {int((frame['H'] * frame['D']).iloc[0])}"
    return ", ".join(f"{c} = {int(frame[c].iloc[0])}" for c in "BH" if frame[c].nunique() == 1)


def _pass(frame: pd.DataFrame) -> str:
    """What was timed, in words: "row softmax", "causal attention backward"."""
    if (frame["D"] == 1).all():
        return "row softmax"
    causal = "causal " if "causal" in frame and frame["causal"].all() else ""
    backward = "op" in frame and (frame["op"] == "attention_backward").all()
    return f"{causal}attention {'backward' if backward else 'forward'}"


def _against_n(samples: pd.DataFrame, column: str, label: str, dtype: str | None) -> Figure:
    table = record.medians(_select(samples, dtype))
    x_label = "row length N" if (table["D"] == 1).all() else "sequence length N"
    figure = draw_panels(table, "Nk", x_label, column, label)
    figure.suptitle(
        f"{_pass(table)}, {_what(table)}, {_workload(table)} · {device(samples)}", x=0.01, ha="left", fontsize=11
    )
    return figure


@styled
def throughput(samples: pd.DataFrame, dtype: str | None = None) -> Figure:
    """TFLOP/s against N, a panel per D (softmax: TB/s of the bytes no softmax can avoid). samples: record.load("04_fa2_fp32"),
    of one or several rungs. dtype: which ("bf16"); by default the first each rung was recorded in.

    Frames with several batch and head counts per N show the headline workload (B·N = 16384, H·D = 2048).
    """
    table = _select(samples, dtype)
    if (table["D"] == 1).all():
        return _against_n(samples, "tb_per_s", "S read + P written (TB/s)", dtype)
    flops = (10 if "backward" in _pass(table) else 4) // (2 if "causal" in _pass(table) else 1)
    return _against_n(samples, "tflops", f"TFLOP/s  ({flops}·B·H·N²·D / time)", dtype)


@styled
def ratio(samples: pd.DataFrame, ours: str, peers: str | Sequence[str], dtype: str | None = None) -> Figure:
    """How many times faster `ours` is than each peer, against N: median of the rounds, bars to their lowest and highest.
    dtype as in `throughput`."""
    names = [peers] if isinstance(peers, str) else list(peers)
    if "rung" in samples and ours in set(samples["rung"]):
        samples = samples[samples["rung"] == ours]  # other rungs' sessions had the peers at other times
    samples = _select(samples, dtype)
    tables = {name: record.ratio(samples, ours, name) for name in names}
    dims = sorted(set().union(*(set(t["D"]) for t in tables.values())))
    looks = looks_of(names)
    figure, axes = canvas(5.0 * len(dims), 3.4, len(dims))
    for ax, d in zip(axes, dims, strict=True):
        ends = {}
        for name, table in tables.items():
            line = table[table["D"] == d].sort_values("Nk")
            if line.empty:
                continue
            draw_line(ax, line["Nk"], line["ratio"], looks[name], False)
            spread = [line["ratio"] - line["low"], line["high"] - line["ratio"]]
            ax.errorbar(line["Nk"], line["ratio"], spread, fmt="none", ecolor=looks[name][0], elinewidth=1.1, capsize=3)
            ends[name] = (line["Nk"].iloc[-1], line["ratio"].iloc[-1])
        ax.axhline(1, color=INK, linewidth=1, zorder=1)
        ax.set_ylim(0, max(1.15, 1.08 * max(t["high"].max() for t in tables.values())))
        lengths = set().union(*(set(t.loc[t["D"] == d, "Nk"]) for t in tables.values()))
        power_of_two_axis(ax, lengths, "row length N" if d == 1 else "sequence length N")
        if d != 1:
            ax.set_title(f"D = {d}", color=MUTED)
        figure.draw_without_rendering()
        name_lines(ax, {f"{n}": e for n, e in ends.items()}, looks)
    axes[0].set_ylabel(f"speed of {ours}\n(peer's time / its time)")
    figure.supxlabel(
        "marks: median of the rounds; whiskers: lowest, highest", x=0.01, ha="left", fontsize=9, color=MUTED
    )
    causal = ", causal" if "causal" in _pass(samples) else ""
    figure.suptitle(
        f"{ours} beside its peers, {_what(samples)}{causal} · {device(samples)}", x=0.01, ha="left", fontsize=11
    )
    return figure


@styled
def roofline(points: pd.DataFrame, ceilings: pd.DataFrame, roofs: Sequence[str] = ("fp32 matmul",)) -> Figure:
    """Attainable TFLOP/s against arithmetic intensity, under this machine's measured ceilings, with kernels as points.

    points: name, flops, bytes (moved to and from HBM), ms; the title says their dtype and their B, H, Nk and D, where there
    are such columns. ceilings: record.load("device", "ceilings"); "copy" is the slope, `roofs` the flat parts. ValueError for
    a ceiling that is not in `ceilings`.
    """
    top = ceilings.groupby("name")["value"].median()
    missing = {"copy", *roofs} - set(top.index)
    if missing:
        raise ValueError(f"ceilings lack {sorted(missing)}; there are {sorted(top.index)}")
    x, y = points["flops"] / points["bytes"], points["flops"] / points["ms"] / 1e9
    highest = max(top[r] for r in roofs)
    ridge = highest / top["copy"]
    low, high = min(x.min() / 3, ridge / 30), max(x.max() * 4, ridge * 10)
    figure, (ax,) = canvas(6.6, 4.0)
    for roof in roofs:
        xs = np.array([low, top[roof] / top["copy"], high])
        ax.plot(xs, np.minimum(xs * top["copy"], top[roof]), color=INK, linewidth=1.6, zorder=2)
        ax.text(high, top[roof] * 1.08, f"{roof} {top[roof]:.3g} TFLOP/s", ha="right", va="bottom", fontsize=9)
    ax.set(xscale="log", yscale="log")
    ax.set_xlim(low, high)
    ax.set_ylim(min(y.min() / 3, low * top["copy"]), highest * 3)
    _kernels_under(ax, points["name"], x, y, lambda at, speed: _roof(at, speed, top, roofs))
    _name_slope(figure, ax, low * 1.3, top["copy"])
    plain = FuncFormatter(lambda v, _: f"{v:g}")
    ax.xaxis.set_major_formatter(plain)
    ax.yaxis.set_major_formatter(plain)
    ax.set_xlabel("arithmetic intensity (FLOP per byte of HBM traffic)")
    ax.set_ylabel("TFLOP/s")
    shape = [f"{c[0]} = {int(points[c].iloc[0])}" for c in ("B", "H", "Nk", "D") if c in points]
    words = ", ".join(filter(None, ["Roofline", _what(points), *shape]))
    title = f"{words} · {device(ceilings)}, ceilings measured"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    flat = [f"{r} {top[r]:.3g} TFLOP/s from {top[r] / top['copy']:.3g} FLOP per byte on" for r in roofs]
    kernels = [f"{n} {s:.3g} TFLOP/s at {i:.4g} FLOP per byte" for n, i, s in zip(points["name"], x, y, strict=True)]
    figure.in_words = f"{title}: copy {top['copy']:.3g} TB/s, {', '.join(flat)}. Below them {', '.join(kernels)}."
    return figure


def _roof(intensity: float, speed: float, top: pd.Series, roofs: Sequence[str]) -> float:
    """The lowest roof that is not below a point."""
    above = [min(intensity * top["copy"], top[roof]) for roof in roofs]
    return min((roof for roof in above if roof >= speed), default=max(above))


def _kernels_under(
    ax: Axes, names: Sequence[str], x: Sequence[float], y: Sequence[float], roof: Callable[[float, float], float]
) -> None:
    """A point for each kernel, with its name and speed where neither the roof nor a neighbour is in the way."""
    looks, (low, high) = looks_of(names), ax.get_xlim()
    for name, px, py in zip(names, x, y, strict=True):
        colour = looks[name][0]
        ax.plot([px, px], [ax.get_ylim()[0], py], color=colour, linewidth=0.8, linestyle=":", zorder=1)
        draw_line(ax, [px], [py], looks[name], True, markersize=8, linestyle="")
        side = -1 if px > (low * high) ** 0.5 else 1
        neighbour_above = any(px < a < 4 * px and py < b < 2 * py for a, b in zip(x, y, strict=True))
        below = py > 0.6 * roof(px, py) or neighbour_above
        ax.annotate(
            f"{name}\n{py:.3g} TFLOP/s",
            (px, py),
            (9 * side, -3 if below else 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="top" if below else "center",
            fontsize=9,
            color=colour,
            bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
        )


def _name_slope(figure: Figure, ax: Axes, start: float, copy: float) -> None:
    """Writes the bandwidth along the slope, from `start` on."""
    limits = ax.get_ylim()
    figure.draw_without_rendering()
    a, b = ax.transData.transform([(start, start * copy), (start * 4, start * 4 * copy)])
    angle = float(np.degrees(np.arctan2(*(b - a)[::-1])))
    ax.text(start, start * copy * 1.35, f"copy {copy:.3g} TB/s", rotation=angle, rotation_mode="anchor", fontsize=9)
    ax.set_ylim(limits)


@styled
def memory(frame: pd.DataFrame, dtype: str | None = None) -> Figure:
    """Peak memory of one call against N, with slopes of N and N² to compare. frame: record.load(kind="memory"). dtype as in
    `throughput`."""
    frame = of_dtype(frame, dtype)
    if "rung" in frame:
        last = frame.groupby("name")["rung"].transform("max")
        frame = frame[(frame["rung"] == last) | (frame["name"] == frame["rung"])]
    looks = looks_of(frame["name"])
    figure, (ax,) = canvas(6.8, 4.0)
    ends, said = {}, []
    for name, line in frame.groupby("name", sort=False):
        line = line.sort_values("Nk")
        fits = line[line["bytes"].notna()]
        draw_line(ax, fits["Nk"], fits["bytes"].astype(float), looks[name], name not in PEERS)
        if fits.empty:
            continue
        ends[name] = (fits["Nk"].iloc[-1], float(fits["bytes"].iloc[-1]))
        said.append(f"{name} from {size(fits['bytes'].iloc[0])} to {size(fits['bytes'].iloc[-1])}")
        if len(fits) < len(line):
            said[-1] += f" at N = {ends[name][0]}, out of memory above"
            ax.annotate("out of memory above", ends[name], (0, 9), textcoords="offset points", fontsize=8, ha="right")
    power_of_two_axis(ax, frame["Nk"], "sequence length N")
    log_ticks(ax)
    low, high = ax.get_ylim()
    ticks = [2.0**e for e in range(10, 50, 3 if high / low > 1e4 else 2)]
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v, digits="g")))
    _slopes(ax, np.array(sorted(set(frame["Nk"])), dtype=float), [e[1] for e in ends.values()])
    ax.set_ylim(low / 3, high * 3)
    ax.set_ylabel("peak memory of one call")
    figure.draw_without_rendering()
    name_lines(ax, ends, looks, gap=0.06)
    shape = ", ".join(filter(None, [_what(frame), *(f"{c} = {int(frame[c].iloc[0])}" for c in "BHD")]))
    title = f"Memory beyond the inputs, {shape} · {device(frame)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    N = f"N from {frame['Nk'].min()} to {frame['Nk'].max()}, both axes logarithmic"
    figure.in_words = f"{title}: peak memory of one call, {N}: {', '.join(said)}."
    return figure


def _slopes(ax: Axes, N: np.ndarray, ends: Sequence[float]) -> None:
    """Guides of slope N, below the lowest of `ends`, and N², above the highest."""
    for power, anchor in ((1, min(ends)), (2, max(ends))):
        guide = anchor * (N / N[-1]) ** power * (0.45 if power == 1 else 2.2)
        slope = "∝ N" if power == 1 else "∝ N²"
        ax.plot(N, guide, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1, label=slope)
        ax.annotate(
            slope,
            (N[len(N) // 2], guide[len(N) // 2]),
            (0, -11 if power == 1 else 7),
            textcoords="offset points",
            color=MUTED,
            fontsize=9,
            ha="right",
        )


@styled
def error(frame: pd.DataFrame, D: int | None = None, dtype: str | None = None) -> Figure:
    """Largest absolute error against N beside the budget of the error rule. frame: record.load(stem, "error").

    D: which head dimension (default: the smallest recorded); dtype as in `throughput`. ValueError where there is nothing of that D.
    """
    frame = of_dtype(frame, dtype)
    D = int(frame["D"].min()) if D is None else D
    part = frame[frame["D"] == D]
    if part.empty:
        raise ValueError(f"no errors recorded for D = {D}; there are {sorted(set(frame['D']))}")
    if "rung" in part and part["rung"].nunique() > 1:
        raise ValueError(f"the errors of one rung at a time, not of {', '.join(part['rung'].unique())}")
    rung = part["rung"].iloc[0] if "rung" in part else "kernel"
    outputs = list(dict.fromkeys(part["output"]))
    looks = {rung: RUNGS[0], "plain PyTorch": PEERS["SDPA MATH"], "budget": (MUTED, "", "-")}
    figure, axes = canvas(5.0 * len(outputs), 3.4, len(outputs))
    for ax, output in zip(axes, outputs, strict=True):
        line = part[part["output"] == output].sort_values("Nk")
        N = line["Nk"]
        ax.plot(N, line["budget"], color=MUTED, linewidth=1.2)
        lines = {rung: line["error"], "plain PyTorch": line["pytorch_error"], "budget": line["budget"]}
        for name, y in list(lines.items())[:2]:
            draw_line(ax, N, y, looks[name], name == rung)
        power_of_two_axis(ax, N, "sequence length N")
        log_ticks(ax)
        high = ax.get_ylim()[1]
        ax.fill_between(N, line["budget"], high * 3, color=MUTED, alpha=0.15, linewidth=0)
        ax.set_ylim(ax.get_ylim()[0] / 1.5, high * 3)
        ax.text(N.iloc[0], high * 1.6, " wrong", color=MUTED, fontsize=9, va="center")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0e}".replace("e-0", "e-")))
        ax.set_title(OUTPUTS[output], color=MUTED)
        figure.draw_without_rendering()
        name_lines(ax, {n: (N.iloc[-1], y.iloc[-1]) for n, y in lines.items()}, looks)
    axes[0].set_ylabel("largest |error| against float64")
    shape = (f", {_what(part)}" if _what(part) else "") + ("" if D == 1 else f", D = {D}")
    figure.suptitle(f"Error of {rung}{shape} · {device(part)}", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def budget(frame: pd.DataFrame) -> Figure:
    """Each rung's largest error as a share of what the error rule allows, over every recorded N and D.

    A dot for each dtype and output. frame: record.load(kind="error").
    """
    shares = (
        (frame["error"] / frame["budget"]).groupby([frame[c] for c in ("rung", "dtype", "output")], sort=False).max()
    )
    rungs = list(dict.fromkeys(frame["rung"]))
    dtypes = [d for d in ("fp32", "fp16", "bf16") if d in set(frame["dtype"])]
    looks = dict(zip(("fp32", "fp16", "bf16"), ((DARK, "D"), (BLUE, "o"), (ORANGE, "s")), strict=True))
    there = set(frame["output"])
    panels = [
        [o for o in group if o in there] for group in (("o", "p"), ("lse",), ("dq", "dk", "dv")) if {*group} & there
    ]
    figure, axes = canvas(4.6 * len(panels), 1.1 + 0.32 * len(rungs), len(panels), sharey=True)
    for ax, outputs in zip(axes, panels, strict=True):
        for (rung, dtype, output), share in shares.items():
            if output in outputs:
                own = [d for d in dtypes if (rung, d, output) in shares]
                y = rungs.index(rung) + 0.24 * (own.index(dtype) - (len(own) - 1) / 2)
                colour, marker = looks[dtype]
                ax.plot(share, y, marker, color=colour, markersize=6.5, label=dtype, zorder=3)
        ax.set_xscale("log")
        ax.set_xlim(0.008, 3)
        ax.axvspan(1, 3, color=MUTED, alpha=0.15, linewidth=0)
        where = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top"}
        ax.text(1.75, 0.98, "wrong", color=MUTED, fontsize=9, **where)
        ax.xaxis.set_major_locator(FixedLocator([0.01, 0.1, 1]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        ax.set_xlabel("largest error, share of its budget")
        ax.set_title(", ".join(OUTPUTS[x] for x in outputs), color=MUTED)
    axes[0].set_yticks(range(len(rungs)), rungs, color=INK)
    axes[0].set_ylim(len(rungs) - 0.4, -0.9)
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([handles[d] for d in dtypes], dtypes, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Largest errors · {device(frame)}", x=0.01, ha="left", fontsize=11)
    return figure
