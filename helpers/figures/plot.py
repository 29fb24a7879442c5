"""Figures from records. Each function takes a DataFrame of record.py's and returns a Figure; none needs torch or a GPU.

Figures are drawn on a light card of their own, so that they read the same on a white page, a dark one and in print;
lines differ in colour (Okabe and Ito's, told apart by colour-blind readers), marker and dash, and carry their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from .. import record
from .style import CARD, INK, MUTED, PEERS, RUNGS, Figure, styled

T = TypeVar("T")


def recorded(stem: str, kind: str, draw: Callable[[pd.DataFrame], T], by: str = "make bench") -> T | None:
    """What `draw` makes of a record, record.load(stem, kind); where there is none, a sentence that says so is printed instead, with
    what makes one."""
    try:
        samples = record.load(stem, kind)
    except LookupError:
        print(f"{stem} has no {kind!r} record yet; `{by}` on a machine with a GPU makes one")
        return None
    return draw(samples)


def _figure(columns: int, width: float = 4.6, height: float = 3.4, **options: object) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    return figure, list(axes)


def _looks(names: Iterable[str]) -> dict[str, tuple]:
    """A look for each name: peers keep theirs in every figure, rungs take the next free one in order."""
    names = list(dict.fromkeys(names))
    free = iter(RUNGS * (1 + len(names) // len(RUNGS)))
    return {name: PEERS[name] if name in PEERS else next(free) for name in names}


def _line(ax: Axes, x: Sequence[float], y: Sequence[float], look: tuple, ours: bool, **options: object) -> None:
    colour, marker, dash = look
    filled = {"markeredgecolor": CARD, "markeredgewidth": 0.8} if marker not in "x+1234|_" else {"markeredgewidth": 1.5}
    options = {"linewidth": 2.3 if ours else 1.5, "zorder": 3 if ours else 3.5, "linestyle": dash} | filled | options
    ax.plot(x, y, color=colour, marker=marker, **options)


def _name_lines(ax: Axes, ends: dict[str, tuple[float, float]], looks: Mapping[str, tuple], gap: float = 0.075) -> None:
    """Writes each line's name right of its last point, moved apart where two would overlap."""
    to_axes = ax.transAxes.inverted()
    where = {n: to_axes.transform(ax.transData.transform(end)) for n, end in ends.items()}
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
            fontweight="normal" if looks[name] in PEERS.values() else "bold",
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


def _power_of_two_axis(ax: Axes, values: Iterable[float], label: str) -> None:
    ticks = sorted(set(values))
    while len(ticks) > 8:
        ticks = ticks[::-2][::-1]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
    ax.set_xlabel(label)


def _log_ticks(ax: Axes, unit: str = "") -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    steps = (1,) if high / low > 300 else (1, 3) if high / low > 30 else (1, 2, 5)
    ticks = [m * 10.0**e for e in range(-12, 15) for m in steps]
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}{unit}"))


def _short(n: float) -> str:
    """512, 1k, 16k, 1M: powers of 1024, otherwise the number itself."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= size and n % size == 0:
            return f"{n / size:g}{suffix}"
    return f"{n:g}"


def _device(frame: pd.DataFrame) -> str:
    """The devices of a frame for its title, and which of its rungs have changed since they were recorded."""
    words = " and ".join(dict.fromkeys(frame["device"])) if "device" in frame else "this GPU"
    if "stale" in frame and frame["stale"].any():
        old = ", ".join(dict.fromkeys(frame.loc[frame["stale"].astype(bool), "rung"]))
        words += f" · STALE: {old} changed since"
    return words


def _of_dtype(frame: pd.DataFrame, dtype: str | None) -> pd.DataFrame:
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


def _select(samples: pd.DataFrame, dtype: str | None = None) -> pd.DataFrame:
    """The rows a line can be drawn through: attention where both operations are there, one dtype, one shape per N and D (of
    softmax the lengths that are powers of two), and each peer from one session only. ValueError where the shapes don't
    decide that."""
    samples = _of_dtype(samples, dtype)
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
        return f"{_short(float((frame['Nq'] * frame['Nk']).max()))} elements"
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


def _against_n(samples: pd.DataFrame, column: str, label: str, log: bool, dtype: str | None) -> Figure:
    table = record.medians(_select(samples, dtype))
    softmax = (table["D"] == 1).all()
    looks = _looks(table["name"])
    figure, axes = _figure(table["D"].nunique(), width=5.0)
    for ax, (d, part) in zip(axes, table.groupby("D"), strict=True):
        ends = {}
        for name, line in part.groupby("name", sort=False):
            line = line.sort_values("Nk")
            _line(ax, line["Nk"], line[column], looks[name], name not in PEERS)
            ends[name] = (line["Nk"].iloc[-1], line[column].iloc[-1])
        _power_of_two_axis(ax, part["Nk"], "row length N" if softmax else "sequence length N")
        if log:
            _log_ticks(ax)
        else:
            ax.set_ylim(bottom=0)
        ax.set_title("" if softmax else f"D = {d}", color=MUTED)
        figure.draw_without_rendering()
        _name_lines(ax, ends, looks)
    axes[0].set_ylabel(label)
    figure.suptitle(
        f"{_pass(table)}, {_what(table)}, {_workload(table)} · {_device(samples)}", x=0.01, ha="left", fontsize=11
    )
    return figure


@styled
def latency(samples: pd.DataFrame, dtype: str | None = None) -> Figure:
    """Milliseconds per call against N, a panel per D. samples: record.load("04_fa2_fp32"), of one or several rungs.
    dtype: which ("bf16"); by default the first each rung was recorded in.

    Frames with several batch and head counts per N show the headline workload (B·N = 16384, H·D = 2048).
    """
    return _against_n(samples, "ms", "time per call (ms)", True, dtype)


@styled
def throughput(samples: pd.DataFrame, dtype: str | None = None) -> Figure:
    """TFLOP/s against N, a panel per D (softmax: TB/s of the bytes no softmax can avoid). Arguments as in `latency`."""
    table = _select(samples, dtype)
    if (table["D"] == 1).all():
        return _against_n(samples, "tb_per_s", "S read + P written (TB/s)", False, dtype)
    flops = (10 if "backward" in _pass(table) else 4) // (2 if "causal" in _pass(table) else 1)
    return _against_n(samples, "tflops", f"TFLOP/s  ({flops}·B·H·N²·D / time)", False, dtype)


@styled
def ratio(samples: pd.DataFrame, ours: str, peers: str | Sequence[str], dtype: str | None = None) -> Figure:
    """How many times faster `ours` is than each peer, against N: median of the rounds, bars to their lowest and highest.
    dtype as in `latency`."""
    names = [peers] if isinstance(peers, str) else list(peers)
    if "rung" in samples and ours in set(samples["rung"]):
        samples = samples[samples["rung"] == ours]  # other rungs' sessions had the peers at other times
    samples = _select(samples, dtype)
    tables = {name: record.ratio(samples, ours, name) for name in names}
    dims = sorted(set().union(*(set(t["D"]) for t in tables.values())))
    looks = _looks(names)
    figure, axes = _figure(len(dims), width=5.0)
    for ax, d in zip(axes, dims, strict=True):
        ends = {}
        for name, table in tables.items():
            line = table[table["D"] == d].sort_values("Nk")
            if line.empty:
                continue
            _line(ax, line["Nk"], line["ratio"], looks[name], False)
            spread = [line["ratio"] - line["low"], line["high"] - line["ratio"]]
            ax.errorbar(line["Nk"], line["ratio"], spread, fmt="none", ecolor=looks[name][0], elinewidth=1.1, capsize=3)
            ends[name] = (line["Nk"].iloc[-1], line["ratio"].iloc[-1])
        ax.axhline(1, color=INK, linewidth=1, zorder=1)
        ax.set_ylim(0, max(1.15, 1.08 * max(t["high"].max() for t in tables.values())))
        lengths = set().union(*(set(t.loc[t["D"] == d, "Nk"]) for t in tables.values()))
        _power_of_two_axis(ax, lengths, "row length N" if d == 1 else "sequence length N")
        if d != 1:
            ax.set_title(f"D = {d}", color=MUTED)
        figure.draw_without_rendering()
        _name_lines(ax, {f"{n}": e for n, e in ends.items()}, looks)
    axes[0].set_ylabel(f"speed of {ours}\n(peer's time / its time)")
    causal = ", causal" if "causal" in _pass(samples) else ""
    figure.suptitle(
        f"{ours} beside its peers, {_what(samples)}{causal} · {_device(samples)}", x=0.01, ha="left", fontsize=11
    )
    return figure


@styled
def roofline(points: pd.DataFrame, ceilings: pd.DataFrame, roofs: Sequence[str] = ("fp32 matmul",)) -> Figure:
    """Attainable TFLOP/s against arithmetic intensity, under this machine's measured ceilings, with kernels as points.

    points: name, flops, bytes (moved to and from HBM), ms. ceilings: record.load("device", "ceilings"); "copy" is the
    slope, `roofs` the flat parts.
    """
    top = ceilings.groupby("name")["value"].median()
    missing = {"copy", *roofs} - set(top.index)
    if missing:
        raise ValueError(f"ceilings lack {sorted(missing)}; there are {sorted(top.index)}")
    x, y = points["flops"] / points["bytes"], points["flops"] / points["ms"] / 1e9
    ridge = max(top[r] for r in roofs) / top["copy"]
    low, high = min(x.min() / 3, ridge / 30), max(x.max() * 4, ridge * 10)
    figure, (ax,) = _figure(1, width=6.6, height=4.0)
    for roof in roofs:
        edge = top[roof] / top["copy"]
        xs = np.array([low, edge, high])
        ax.plot(xs, np.minimum(xs * top["copy"], top[roof]), color=INK, linewidth=1.6, zorder=2)
        ax.text(high, top[roof] * 1.08, f"{roof} {top[roof]:.3g} TFLOP/s", ha="right", va="bottom", fontsize=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(min(y.min() / 3, low * top["copy"]), max(top[r] for r in roofs) * 3)
    looks = _looks(points["name"])
    for name, px, py in zip(points["name"], x, y, strict=True):
        ax.plot([px, px], [ax.get_ylim()[0], py], color=looks[name][0], linewidth=0.8, linestyle=":", zorder=1)
        _line(ax, [px], [py], looks[name], True, markersize=8, linestyle="")
        side = -1 if px > (low * high) ** 0.5 else 1
        under_roof = py > 0.6 * min(px * top["copy"], max(top[r] for r in roofs))  # the label goes below the line
        under_label = any(px < a < 4 * px and py < b < 2 * py for a, b in zip(x, y, strict=True))  # a neighbour's
        ax.annotate(
            f"{name}\n{py:.3g} TFLOP/s",
            (px, py),
            (9 * side, -3 if under_roof or under_label else 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="top" if under_roof or under_label else "center",
            fontsize=9,
            color=looks[name][0],
            bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
        )
    start, limits = low * 1.3, ax.get_ylim()
    figure.draw_without_rendering()
    a, b = ax.transData.transform([(start, start * top["copy"]), (start * 4, start * 4 * top["copy"])])
    ax.text(
        start,
        start * top["copy"] * 1.35,
        f"copy {top['copy']:.3g} TB/s",
        rotation=float(np.degrees(np.arctan2(*(b - a)[::-1]))),
        rotation_mode="anchor",
        fontsize=9,
    )
    ax.set_ylim(limits)
    plain = FuncFormatter(lambda v, _: f"{v:g}")
    ax.xaxis.set_major_formatter(plain)
    ax.yaxis.set_major_formatter(plain)
    ax.set_xlabel("arithmetic intensity (FLOP per byte of HBM traffic)")
    ax.set_ylabel("TFLOP/s")
    figure.suptitle(f"Roofline · {_device(ceilings)}, ceilings measured", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def memory(frame: pd.DataFrame, dtype: str | None = None) -> Figure:
    """Peak memory of one call against N, with slopes of N and N² to compare. frame: record.load(kind="memory"). dtype as in
    `latency`."""
    frame = _of_dtype(frame, dtype)
    if "rung" in frame:
        last = frame.groupby("name")["rung"].transform("max")
        frame = frame[(frame["rung"] == last) | (frame["name"] == frame["rung"])]
    looks = _looks(frame["name"])
    figure, (ax,) = _figure(1, width=6.8, height=4.0)
    ends = {}
    for name, line in frame.groupby("name", sort=False):
        line = line.sort_values("Nk")
        fits = line[line["bytes"].notna()]
        _line(ax, fits["Nk"], fits["bytes"].astype(float), looks[name], name not in PEERS)
        if len(fits):
            ends[name] = (fits["Nk"].iloc[-1], float(fits["bytes"].iloc[-1]))
        if 0 < len(fits) < len(line):
            ends_at = ends[name]
            ax.annotate("out of memory above", ends_at, (0, 9), textcoords="offset points", fontsize=8, ha="right")
    _power_of_two_axis(ax, frame["Nk"], "sequence length N")
    _log_ticks(ax)
    low, high = ax.get_ylim()
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    ticks = [2.0**e for e in range(10, 50, 3 if high / low > 1e4 else 2)]
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: next((f"{v / u:g} {n}" for u, n in units if v >= u), f"{v:g} B"))
    )
    N = np.array(sorted(set(frame["Nk"])), dtype=float)
    for power, anchor in ((1, min(e[1] for e in ends.values())), (2, max(e[1] for e in ends.values()))):
        guide = anchor * (N / N[-1]) ** power * (0.45 if power == 1 else 2.2)
        ax.plot(N, guide, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        ax.annotate(
            "∝ N" if power == 1 else "∝ N²",
            (N[len(N) // 2], guide[len(N) // 2]),
            (0, -11 if power == 1 else 7),
            textcoords="offset points",
            color=MUTED,
            fontsize=9,
            ha="right",
        )
    ax.set_ylim(low / 3, high * 3)
    ax.set_ylabel("peak memory of one call")
    figure.draw_without_rendering()
    _name_lines(ax, ends, looks, gap=0.06)
    shape = ", ".join(filter(None, [_what(frame), *(f"{c} = {int(frame[c].iloc[0])}" for c in "BHD")]))
    figure.suptitle(f"Memory beyond the inputs, {shape} · {_device(frame)}", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def error(frame: pd.DataFrame, D: int | None = None, dtype: str | None = None) -> Figure:
    """Largest absolute error against N beside the budget of the error rule. frame: record.load(stem, "error").

    D: which head dimension (default: the smallest recorded); dtype as in `latency`.
    """
    frame = _of_dtype(frame, dtype)
    D = int(frame["D"].min()) if D is None else D
    part = frame[frame["D"] == D]
    if part.empty:
        raise ValueError(f"no errors recorded for D = {D}; there are {sorted(set(frame['D']))}")
    if "rung" in part and part["rung"].nunique() > 1:
        raise ValueError(f"the errors of one rung at a time, not of {', '.join(part['rung'].unique())}")
    rung = part["rung"].iloc[0] if "rung" in part else "kernel"
    outputs = list(dict.fromkeys(part["output"]))
    looks = {rung: RUNGS[0], "plain PyTorch": PEERS["SDPA MATH"], "budget": (MUTED, "", "-")}
    figure, axes = _figure(len(outputs), width=5.0)
    for ax, output in zip(axes, outputs, strict=True):
        line = part[part["output"] == output].sort_values("Nk")
        N = line["Nk"]
        ax.plot(N, line["budget"], color=MUTED, linewidth=1.2)
        lines = {rung: line["error"], "plain PyTorch": line["pytorch_error"], "budget": line["budget"]}
        for name, y in list(lines.items())[:2]:
            _line(ax, N, y, looks[name], name == rung)
        _power_of_two_axis(ax, N, "sequence length N")
        _log_ticks(ax)
        high = ax.get_ylim()[1]
        ax.fill_between(N, line["budget"], high * 3, color=MUTED, alpha=0.15, linewidth=0)
        ax.set_ylim(ax.get_ylim()[0] / 1.5, high * 3)
        ax.text(N.iloc[0], high * 1.6, " wrong", color=MUTED, fontsize=9, va="center")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0e}".replace("e-0", "e-")))
        ax.set_title(OUTPUTS[output], color=MUTED)
        figure.draw_without_rendering()
        _name_lines(ax, {n: (N.iloc[-1], y.iloc[-1]) for n, y in lines.items()}, looks)
    axes[0].set_ylabel("largest |error| against float64")
    shape = (f", {_what(part)}" if _what(part) else "") + ("" if D == 1 else f", D = {D}")
    figure.suptitle(f"Error of {rung}{shape} · {_device(part)}", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def budget(frame: pd.DataFrame) -> Figure:
    """Each rung's largest error as a share of what the error rule allows, over every recorded N and D: a dot for each dtype and
    output. frame: record.load(kind="error")."""
    shares = (
        (frame["error"] / frame["budget"]).groupby([frame[c] for c in ("rung", "dtype", "output")], sort=False).max()
    )
    rungs = list(dict.fromkeys(frame["rung"]))
    dtypes = [d for d in ("fp32", "fp16", "bf16") if d in set(frame["dtype"])]
    looks = dict(zip(("fp32", "fp16", "bf16"), (("#333333", "D"), ("#0072b2", "o"), ("#d55e00", "s")), strict=True))
    there = set(frame["output"])
    panels = [
        [o for o in group if o in there] for group in (("o", "p"), ("lse",), ("dq", "dk", "dv")) if {*group} & there
    ]
    figure, axes = _figure(len(panels), width=4.6, height=1.1 + 0.32 * len(rungs), sharey=True)
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
        ax.text(1.75, -0.55, "wrong", color=MUTED, fontsize=9, ha="center")
        ax.xaxis.set_major_locator(FixedLocator([0.01, 0.1, 1]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        ax.set_xlabel("largest error, share of its budget")
        ax.set_title(", ".join(OUTPUTS[x] for x in outputs), color=MUTED)
    axes[0].set_yticks(range(len(rungs)), rungs, color=INK)
    axes[0].set_ylim(len(rungs) - 0.4, -0.9)
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([handles[d] for d in dtypes], dtypes, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Error of every rung · {_device(frame)}", x=0.01, ha="left", fontsize=11)
    return figure


OUTPUTS = {"o": "O", "lse": "LSE", "p": "P", "dq": "dQ", "dk": "dK", "dv": "dV"}
UNITS = {"tflops": "TFLOP/s", "to_flash": "speed beside SDPA FLASH\n(its time / this one's)"}


@styled
def staircase(table: pd.DataFrame, unit: str = "tflops") -> Figure:
    """Every rung a step, the peers and ceilings lines across, a panel per D. table: scoreboard.speeds(), with rows of kind
    "yours" added or not. unit: "tflops" (logarithmic where steps differ by more than 30) or "to_flash", the ratio to SDPA FLASH with bars
    to its worst and best shape; rungs that FLASH can't run beside (fp32) are left out of it.

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
            if row is None or pd.isna(row[unit]):
                why = "not recorded yet" if row is not None else f"not at D = {D}"
                ax.text(
                    x, 0.03, why, rotation=90, color=MUTED, fontsize=9, ha="center", transform=ax.get_xaxis_transform()
                )
                continue
            _step(ax, x, row, unit, low)
        ends = {}
        for _, line in lines[lines["D"] == D].iterrows():
            colour, _, dash = PEERS[line["name"]]
            ax.axhline(line[unit], color=CARD, linewidth=2.2, zorder=2.5)  # so that it reads on a step, too
            ax.axhline(line[unit], color=colour, linestyle=dash, linewidth=1.4, zorder=3)
            said = f"{line[unit]:.2f}" if unit == "to_flash" else f"{line[unit]:.3g}"
            ends[f"{line['name']} {said}"] = (len(names) - 0.4, line[unit])
        ax.set_xticks(range(len(names)), ["\n".join(n.split("_")) for n in names], fontsize=8.5, color=INK)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"D = {D}", color=MUTED)
        if log:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        figure.draw_without_rendering()
        _name_lines(ax, ends, {name: PEERS[name.rpartition(" ")[0]] for name in ends}, gap=0.06)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(UNITS[unit])
    figure.suptitle(_staircase_title(table, steps, unit), x=0.01, ha="left", fontsize=11)
    return figure


def _panels(panels: int, steps: int) -> tuple[Figure, list[Axes]]:
    """Side by side; one above the other where there are so many steps that names and figures would grow too small to read."""
    if steps <= 8:
        return _figure(panels, width=max(3.2, 0.72 * steps + 2.2), height=4.0, sharey=True)
    figure = Figure(figsize=(0.72 * steps + 2.2, 4.2 * panels + 0.6), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False, sharex=True, sharey=True)[:, 0])


def _step(ax: Axes, x: int, row: pd.Series, unit: str, low: float) -> None:
    colour, hatch = ("#d55e00", "") if row["kind"] == "yours" else ("#0072b2", "")
    if row["dtype"] == "fp32" and row["kind"] != "yours":
        colour, hatch = "#8bbcdd", "///"
    ax.bar(x, row[unit] - low, 0.9, bottom=low, color=colour, hatch=hatch, edgecolor=CARD, linewidth=0, zorder=2)
    if unit == "to_flash":
        ends = [[row[unit] - row["low"]], [row["high"] - row[unit]]]
        ax.errorbar(x, row[unit], ends, fmt="none", ecolor=INK, elinewidth=1.1, capsize=3, zorder=4)
    text = f"{row[unit]:.2f}" if unit == "to_flash" else f"{row[unit]:.3g}"
    inside = ax.transAxes.inverted().transform(ax.transData.transform((x, row[unit])))[1] > 0.1
    label = {"facecolor": colour if inside else CARD, "edgecolor": "none", "pad": 0.8}
    look = {"ha": "center", "fontsize": 9, "color": CARD if inside and not hatch else INK, "bbox": label, "zorder": 5}
    if inside:  # at the step's foot, where no peer's line passes
        ax.text(x, 0.025, text, transform=ax.get_xaxis_transform(), **look)
    else:
        top = row["high"] if unit == "to_flash" else row[unit]
        ax.annotate(text, (x, top), (0, 4), textcoords="offset points", **look)


def _staircase_title(table: pd.DataFrame, steps: pd.DataFrame, unit: str) -> str:
    """What and where: the reader's own kernel may have run on another card than the recorded ones."""
    what = "TFLOP/s at N = 4096" if unit == "tflops" else "Geometric mean over N ≥ 1024, worst and best"
    recorded = table[table["device"].notna()]
    devices = dict.fromkeys(recorded.loc[recorded["kind"] != "yours", "device"])
    words = " and ".join(devices)
    if yours := [d for d in dict.fromkeys(recorded.loc[recorded["kind"] == "yours", "device"]) if d not in devices]:
        words += f", yours on {yours[0]}"
    old = steps.loc[steps["stale"].eq(True), "name"].unique()
    dtypes = ", hatched: fp32" if {"fp32"} < set(steps["dtype"]) else ""
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
    figure, (ax,) = _figure(1, width=8.6, height=0.9 + 0.27 * (len(y) + 1))
    published = y < len(steps)
    ax.barh(
        y[published], values[published], 0.8, color="#8bbcdd", label="flash_attention_from_scratch, A100 (published)"
    )
    ax.plot(steps["rtx3090"], y[published], "D", color=INK, markersize=4.5, label="the same, RTX 3090 (published)")
    ax.barh(y[~published], np.nan_to_num(values[~published]), 0.8, color="#0072b2", label=f"this series, {device}")
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
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=3, frameon=False, fontsize=8.5)
    return figure


@styled
def opcodes(frame: pd.DataFrame, title: str = "") -> Figure:
    """How many instructions of each class, a bar per kernel. frame: sass.compare(...); classes that no kernel has five of are
    left out. Counts of compiled code are the same on every machine, so no device is named."""
    columns = [c for c in frame.columns if c != "change"]
    frame = frame.drop(index=["all", "other"], errors="ignore")[columns]
    frame = frame[(frame >= 5).any(axis=1)]
    figure, (ax,) = _figure(1, width=7.2, height=0.9 + 0.2 * len(frame) * (0.5 + 0.5 * len(columns)))
    y, high = np.arange(len(frame), dtype=float), 0.84 / len(columns)
    for i, name in enumerate(columns):
        place = y + (i - (len(columns) - 1) / 2) * high
        hatch = ("", "///", "...", "xx")[i % 4]
        bars = ax.barh(
            place, frame[name], high, color=RUNGS[i % len(RUNGS)][0], hatch=hatch, edgecolor=CARD, label=name
        )
        ax.bar_label(bars, padding=3, fontsize=8, color=INK)
    ax.set_yticks(y, frame.index, color=INK)
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, frame.to_numpy().max() * 1.1)
    ax.set_xlabel("instructions in the code")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(columns), frameon=False, fontsize=9)
    figure.suptitle(title or "Instructions by class", x=0.01, ha="left", fontsize=11)
    return figure


@styled
def traffic(counted: pd.DataFrame, predicted: Mapping[str, float] | None = None, title: str = "") -> Figure:
    """Bytes moved for each tensor, as counted, beside a prediction.

    counted: index tensor name, columns bytes_read and bytes_written (helpers.emulator.traffic). predicted: tensor name to
    bytes read and written together. Counts are the same on every machine, so no device is named.
    """
    unknown = set(predicted or {}) - set(counted.index)
    if unknown:
        raise ValueError(f"a prediction for {sorted(unknown)}, but counted were {list(counted.index)}")
    names = list(counted.index)
    figure, (ax,) = _figure(1, width=6.8, height=0.8 + 0.55 * len(names))
    y = np.arange(len(names), dtype=float)
    high = 0.36 if predicted else 0.6
    offset = high / 2 if predicted else 0.0
    read, written = (counted[c].to_numpy(dtype=float) for c in ("bytes_read", "bytes_written"))
    r, w = read > 0, written > 0
    ax.barh(y[r] - offset, read[r], high, color="#0072b2", label="read")
    hatched = {"color": "#f0b060", "hatch": "///", "edgecolor": "#8a4b00"}
    ax.barh(y[w] - offset, written[w], high, left=read[w], label="written", **hatched)
    total = read + written
    most = max(total.max(), max((predicted or {"": 0}).values()))
    for i, name in enumerate(names):
        ax.text(total[i] + 0.01 * most, y[i] - offset, _bytes(total[i]), va="center", fontsize=9)
        if predicted and name in predicted:
            guess = predicted[name]
            label = "predicted" if i == 0 else None
            ax.barh(y[i] + offset, guess, high, facecolor="none", edgecolor=MUTED, linestyle="--", label=label)
            ax.text(guess + 0.01 * most, y[i] + offset, _bytes(guess), va="center", fontsize=9, color=MUTED)
    ax.set_yticks(y, names, color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, most * 1.16)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _bytes(v)))
    ax.set_xlabel("bytes requested by the kernel's threads")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title or "Bytes by tensor, counted", x=0.01, ha="left", fontsize=11)
    return figure


def _bytes(n: float) -> str:
    """1.5 MB: decimal units, three digits."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.0f} B"
