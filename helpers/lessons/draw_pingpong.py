"""Drawings of what runs under what: warpgroups over time, and a loop's instructions between its waits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..figures.style import CARD, GRID, INK, MUTED, ORANGE, SAND, Figure, canvas, styled
from ..toolchain.sass import WAIT, Line
from .draw_hopper import KINDS


@styled
def lanes(cases: Mapping[str, pd.DataFrame], unit: str, span: tuple[float, float] | None = None) -> Figure:
    """Swim lanes one case above the other on one axis of time. cases: title -> lane, kind (of draw_hopper.KINDS), begin, end.

    span: the part of the time that is shown, from 0 on in the figure; by default all of it. Where a lane does softmax under a product of its own, the product
    has the upper half and the softmax the lower one.
    """
    names = [sorted(frame["lane"].unique(), key=lambda lane: (lane != "producer", lane)) for frame in cases.values()]
    first, last = span or (0, max(frame["end"].max() for frame in cases.values()))
    figure, _ = canvas(10.2, 0.9 + sum(0.55 + 0.34 * len(n) for n in names))
    figure.clear()
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False, height_ratios=[len(n) for n in names])[:, 0]
    seen: dict[str, Patch] = {}
    for ax, lanes_here, (title, frame) in zip(axes, names, cases.items(), strict=True):
        for lane, kind, begin, end in frame[["lane", "kind", "begin", "end"]].itertuples(index=False):
            begin, end = max(begin, first) - first, min(end, last) - first
            if begin >= end:
                continue
            face, hatch, label = KINDS[kind]
            look = {"facecolor": face, "edgecolor": INK, "linewidth": 0.5, "hatch": hatch}
            place, high = lanes_here.index(lane), 0.8
            if _at_once(frame[frame["lane"] == lane]):
                place, high = place + (0.2 if kind == "softmax" else -0.2), 0.4
            ax.barh(place, end - begin, high, left=begin, **look)
            seen.setdefault(kind, Patch(label=label, **look))
        ax.set_yticks(range(len(lanes_here)), lanes_here, color=INK, fontsize=8.5)
        ax.set(xlim=(0, last - first), ylim=(len(lanes_here) - 0.45, -0.55))
        ax.grid(axis="y", visible=False)
        ax.set_title(title, color=MUTED, fontsize=9.5)
    axes[-1].set_xlabel(unit)
    handles = [seen[kind] for kind in KINDS if kind in seen]
    figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False, fontsize=9)
    return figure


def _at_once(frame: pd.DataFrame) -> bool:
    """Whether a lane does several things at a time."""
    ordered = frame.sort_values(["begin", "end"])
    return bool((ordered["begin"].values[1:] < ordered["end"].cummax().values[:-1] - 1e-6).any())


# What is drawn of a loop's code: pattern of the opcode -> name, colour; the first that matches counts.
INSTRUCTIONS = {
    r"HGMMA": ("HGMMA, a product", "#1b9e77"),
    r"MUFU\.EX2": ("MUFU.EX2, an exponential", ORANGE),
    r"FMNMX": ("FMNMX, a maximum", "#5b5bd6"),
    r"FMUL": ("FMUL, mostly to rescale O", "#c2407a"),
    r"F2FP": ("F2FP, rounding P", SAND),
}


@styled
def loop(code: Mapping[str, Sequence[Line]]) -> Figure:
    """Loops as strips, an instruction next to the other in the order of the code, with their waits for products.

    code: name -> sass.loop_lines(...). Over each piece between waits stands its number of exponentials, under a wait how many
    groups of products may still be under way behind it, if any.
    """
    most = max(len(lines) for lines in code.values())
    figure, axes = canvas(10.2, 0.7 + 0.85 * len(code))
    figure.clear()
    axes = figure.subplots(len(code), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, lines) in zip(axes, code.items(), strict=True):
        ax.barh(0, len(lines), 1.0, left=0, color=GRID)
        for pattern, (_, colour) in INSTRUCTIONS.items():
            at = [i for i, (_, opcode, _) in enumerate(lines) if re.match(rf"{pattern}(?![A-Z0-9])", opcode)]
            ax.bar(at, 1.0, 1.0, bottom=-0.5, align="edge", color=colour)
        waits = [i for i, (_, opcode, _) in enumerate(lines) if opcode.startswith(WAIT)]
        for begin, end in zip([0, *waits], [*waits, len(lines)], strict=True):
            count = sum(opcode.startswith("MUFU.EX2") for _, opcode, _ in lines[begin:end])
            ax.text(
                (begin + end) / 2, 0.68, count, ha="center", va="bottom", fontsize=8.5, color=INK if count else MUTED
            )
        for i in waits:
            left = int(lines[i][2].rpartition(",")[2], 16)
            ax.plot([i, i], [-0.6, 0.95], color=INK, linewidth=1.6, linestyle="--" if left else "-")
            if left:
                ax.text(i, -0.66, left, ha="center", va="top", fontsize=8, color=INK)
        ax.set(xlim=(-1, most + 1), ylim=(-1.0, 1.25), yticks=[])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK)
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[-1].set_xlabel("instructions of the loop, in the order of the code")
    handles = [Patch(color=colour, label=label) for label, colour in INSTRUCTIONS.values()] + [
        Patch(color=GRID, label="others"),
        Line2D(
            [], [], color=INK, linewidth=1.6, linestyle="--", label="waits until n of its groups of products are left"
        ),
        Line2D([], [], color=INK, linewidth=1.6, label="waits for all of them"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8.5)
    return figure


@styled
def steps(frame: pd.DataFrame, title: str, peer: str) -> Figure:
    """What variants of a kernel reached beside a peer, a panel per D. frame: step, what, kept ("yes" or why not), D, and
    ratio (peer's time / its time), with ratio_causal where there is one: a dot. Variants that stayed are filled."""
    parts = list(frame.groupby("D"))
    rows = max(len(part) for _, part in parts)
    figure, axes = canvas(5.6 * len(parts) + 1.6, 1.3 + 0.3 * rows, len(parts), title=title, sharex=True)
    values = frame[[c for c in ("ratio", "ratio_causal") if c in frame]]
    low, high = min(0.9, values.min().min() - 0.08) - 0.04, values.max().max() + 0.07
    for ax, (D, part) in zip(axes, parts, strict=True):
        stays = part["kept"].astype(str).str.startswith("yes")
        faces = ["#1b9e77" if yes else CARD for yes in stays]
        ax.barh(range(len(part)), part["ratio"] - low, 0.66, left=low, color=faces, edgecolor=INK, linewidth=0.7)
        if "ratio_causal" in part:
            ax.plot(part["ratio_causal"], range(len(part)), "D", color=ORANGE, markersize=4.5, label="causal", zorder=4)
        for at, (ratio, yes) in enumerate(zip(part["ratio"], stays, strict=True)):
            ax.text(low + 0.005, at, f"{ratio:.2f}", va="center", fontsize=8, color=CARD if yes else INK)
        ax.axvline(1, color=INK, linewidth=1, linestyle="--", zorder=3)
        labels = [
            f"{step} · {what if len(what) < 46 else what[:44] + '…'}"
            for step, what in zip(part["step"], part["what"], strict=True)
        ]
        ax.set_yticks(range(len(part)), labels, color=INK, fontsize=8)
        ax.set(xlim=(low, high), xlabel=f"times as fast as {peer}", ylim=(rows - 0.4, -0.6))
        ax.set_title(f"D = {D}", color=MUTED)
        ax.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor="#1b9e77", edgecolor=INK, label="stayed"),
        Patch(facecolor=CARD, edgecolor=INK, label="did not"),
    ]
    if "ratio_causal" in frame:
        handles.append(
            Line2D([], [], marker="D", linestyle="", color=ORANGE, markersize=4.5, label="under a causal mask")
        )
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure
