"""The drawings of notebooks 50 and 51: which rank computes which part of the mask, the ring step by step, timelines, what it is worth."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.patches import Patch, Polygon, Rectangle

from ... import record
from ...figures import lanes
from ...figures.lines import device, looks_of, power_of_two_axis, short
from ...figures.style import (
    BLUE,
    CARD,
    INK,
    MUTED,
    ORANGE,
    PALE,
    QUARTERS,
    SHADES,
    TINTS,
    Picture,
    blank,
    picture,
    styled,
)
from ...figures.words import many
from ...measure.ring import SAME, WIDTH, model_error, summary
from ...run import ring_time
from ...run.layouts import LAYOUTS, block, split

H200 = 143771 / 1024  # GiB of memory, as the driver reports it
LOOKS = {  # of the lanes of a timeline
    "kernel": (SHADES[2], "", "attention and merge"),
    "attention": (SHADES[2], "", "attention"),
    "merge": (BLUE, "", "merge"),
    "transfer": (TINTS[1], "", "K and V from the rank before"),
    "grads": (TINTS[3], "", "dK and dV from the rank before"),
    "other": (PALE, "", "other"),
}


def _axes(figure: Picture, columns: int, **options: object) -> list:
    """In place of a Picture's one axes, as many side by side."""
    figure.clear()
    return list(figure.subplots(1, columns, squeeze=False, **options)[0])


@styled
def masks(N: int = 16, ranks: int = 4) -> Picture:
    """A causal mask of N tokens under each layout. A cell is a query (row) and a key (column); its tint and the number left of the row
    say which rank computes it, its own number in which step of the ring; white is masked."""
    totals = {}
    figure, _ = picture("", 9.6, 4.0)
    for ax, layout in zip(_axes(figure, 3), LAYOUTS):
        rows = split(N, ranks, layout)
        owner = {i: r for r, of_rank in enumerate(rows) for i in of_rank}
        work = [0] * ranks
        for i in range(N):
            ax.text(-0.3, i + 0.53, owner[i], ha="right", va="center", fontsize=6, color=MUTED)
            for j in range(i + 1):
                face = QUARTERS[owner[i] % 4]
                ax.add_patch(Rectangle((j, i), 1, 1, facecolor=face, edgecolor=CARD, linewidth=0.5))
                step = (owner[i] - owner[j]) % ranks
                ax.text(j + 0.5, i + 0.53, step, ha="center", va="center", fontsize=6)
                work[owner[i]] += 1
        blank(ax).set(xlim=(0, N), ylim=(N, 0), aspect="equal")
        ax.set_title(layout)
        told = ", ".join(map(str, work))
        ax.set_xlabel(f"keys\nscores of ranks 0 to {ranks - 1}: {told}", fontsize=9)
        totals[layout] = told
    figure.axes[0].set_ylabel("queries, and the rank that has them", fontsize=9, labelpad=12)
    handles = [Patch(facecolor=QUARTERS[r % 4], edgecolor=INK, label=f"rank {r} computes") for r in range(ranks)]
    figure.legend(handles=handles, ncols=ranks, frameon=False, fontsize=9, loc="outside lower center")
    figure.in_words = (
        f"The causal mask of {N} tokens on {ranks} ranks, each score tinted by the rank that computes it and numbered by the step. "
        + "; ".join(f"{layout}: {told} scores by rank" for layout, told in totals.items())
        + ". Contiguous gives the last rank most of the work, zigzag and striped give all about the same."
    )
    return figure


@styled
def steps(ranks: int = 4, layout: str = "contiguous", causal: bool = True) -> Picture:
    """The ring as a table: a row for each rank, a column for each step. A square is the block of the rank's queries (down) and the keys
    that it holds in that step (across); its dark part is computed."""
    n = 2
    figure, ax = picture("", 0.9 + 1.35 * ranks, 0.6 + 0.98 * ranks)
    blank(ax).set(xlim=(-0.05, 1.5 * ranks), ylim=(1.25 * ranks, -0.45), aspect="equal")
    work = np.zeros((ranks, ranks))
    for r in range(ranks):
        ax.text(-0.08, 1.25 * r + 0.5, f"rank {r}", ha="right", va="center", fontsize=9.5)
        for t in range(ranks):
            s, x, y = (r - t) % ranks, 1.5 * t, 1.25 * r
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=CARD, edgecolor=MUTED, linewidth=0.8))
            if part := block(r, s, [n] * ranks, layout, causal):
                work[r, t] = part.scores / n**2 if layout != "striped" or not causal else 0.5
                if part.causal:
                    below = s > r and layout == "striped"  # the diagonal itself is masked
                    shape = Polygon([(x, y + 0.06 * below), (x + 1 - 0.06 * below, y + 1), (x, y + 1)])
                else:
                    (top, bottom), (left, right) = ((a.start / n, a.stop / n) for a in (part.rows, part.keys))
                    shape = Rectangle((x + left, y + top), right - left, bottom - top)
                shape.set(facecolor=SHADES[2], edgecolor=INK, linewidth=0.8)
                ax.add_patch(shape)
            ax.text(x + 0.5, y - 0.03, f"keys of {s}", ha="center", va="bottom", fontsize=7.5, color=MUTED)
    for t in range(ranks):
        ax.text(1.5 * t + 0.5, -0.28, f"step {t}", ha="center", fontsize=9.5, fontweight="bold")
    mask = "causal" if causal else "no mask"
    figure.suptitle(f"{layout}, {mask}: what each rank computes in each step", x=0.01, ha="left", fontsize=11)
    busiest, mean = work.sum(1).max(), work.sum(1).mean()
    figure.in_words = (
        f"{ranks} ranks in a ring, {layout}, {mask}: in step t rank r has the keys of rank r - t. Blocks computed by rank: "
        + ", ".join(f"{w:g}" for w in work.sum(1))
        + f"; the busiest has {busiest:g}, the mean is {mean:g}."
    )
    return figure


@styled
def timelines(runs: Mapping[str, pd.DataFrame], unit: float = 1e3, title: str = "") -> Picture:
    """Panels of swim lanes, two for each rank: what its GPU computes, and what comes over its link. runs: title -> columns rank, what,
    begin, end (ring_time.timeline, in seconds: unit 1e3 makes milliseconds)."""
    heights = [frame["rank"].max() + 1 for frame in runs.values()]
    figure, _ = picture("", 9.6, 1.2 + 0.46 * sum(heights))
    figure.clear()
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    handles, told = {}, []
    for ax, ranks, (name, frame) in zip(axes, heights, runs.items()):
        names = [f"rank {r} {what}" for r in range(ranks) for what in ("GPU", "link")]
        link = frame["what"].isin(["transfer", "grads"])
        lane = "rank " + frame["rank"].astype(str) + np.where(link, " link", " GPU")
        begin, end = ((frame[at] - frame["begin"].min()) * unit for at in ("begin", "end"))
        events = pd.DataFrame({"lane": lane, "kind": frame["what"], "begin": begin, "end": end})
        for handle in lanes.draw(ax, events, names, LOOKS):
            handles[handle.get_label()] = handle
        end, busy = end.max(), frame.loc[~link].eval("end - begin").sum() * unit / ranks
        ax.axvline(end, color=ORANGE, linewidth=1.3, linestyle="--")
        ax.set_title(f"{name}: done after {end:.3g} ms, GPUs at work {busy / end:.0%} of it", color=MUTED)
        told.append(f"{name}: {end:.3g} ms, GPUs at work {busy / end:.0%}")
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(
        handles=list(handles.values()), ncols=len(handles), frameon=False, fontsize=9, loc="outside lower center"
    )
    figure.in_words = "Timelines of each rank's GPU and link. " + "; ".join(told) + "."
    return figure


@styled
def speedups(
    predicted: pd.DataFrame, ranks: int, title: str, measured: Mapping[str, Sequence[tuple[float, float]]] | None = None
) -> Picture:
    """Speedup over one GPU against N. predicted: index N, a column for each name, drawn as lines; measured: points (N, speedup) by name."""
    looks = looks_of(predicted.columns)
    figure, ax = picture("", 8.6, 4.0, title)
    for name, values in predicted.items():
        colour, marker, _ = looks[name]
        ax.plot(
            values.index,
            values,
            color=colour,
            linestyle="--",
            linewidth=1.7,
            marker=marker,
            markersize=4,
            label=f"{name}, model",
        )
    for name, points in (measured or {}).items():
        colour, marker, _ = looks.get(name, (INK, "o", "-"))
        x, y = zip(*sorted(points))
        ax.plot(
            x, y, color=colour, marker=marker, markersize=8, linestyle="-", linewidth=2.2, label=f"{name}, measured"
        )
    ax.axhline(ranks, color=INK, linewidth=1)
    ax.text(predicted.index.min(), ranks, f"{ranks} GPUs, ideal", va="bottom", fontsize=9)
    power_of_two_axis(ax, predicted.index, "tokens of the whole sequence, N")
    ax.set(ylim=(0, 1.14 * ranks), ylabel=f"speedup over one GPU ({ranks} GPUs)")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    first, last = predicted.index.min(), predicted.index.max()
    figure.in_words = f"Speedup of {ranks} GPUs over one, by the model: " + "; ".join(
        f"{name} {values[first]:.2f} at N = {short(first)}, {values[last]:.2f} at {short(last)}"
        for name, values in predicted.items()
    )
    for name, points in (measured or {}).items():
        figure.in_words += f"; {name}, measured: " + ", ".join(f"{y:.2f} at {short(x)}" for x, y in sorted(points))
    return figure


@styled
def efficiency(table: pd.DataFrame, title: str) -> Picture:
    """Share of the ideal speedup against the number of GPUs: index ranks, a column for each N or setting."""
    looks = looks_of(table.columns)
    figure, ax = picture("", 8.6, 3.8, title)
    for name, values in table.items():
        colour, marker, _ = looks[name]
        ax.plot(values.index, values, color=colour, marker=marker, label=name)
    power_of_two_axis(ax, table.index, "GPUs")
    ax.set(ylim=(0, 1.05), ylabel="share of the ideal speedup")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    ax.legend(frameon=False, fontsize=9, loc="lower left")
    figure.in_words = "Share of the ideal speedup by number of GPUs. " + "; ".join(
        f"{name}: " + ", ".join(f"{v:.0%} on {i}" for i, v in values.items()) for name, values in table.items()
    )
    return figure


@styled
def wanted(rank: int = 1, ranks: int = 4) -> Picture:
    """Notebook 51: in which order a rank's two pieces of queries take keys in zigzag under a causal mask; a square is a piece of keys. Its
    own first, then those of the ring, and of an earlier rank the first piece only."""
    figure, ax = picture("", 9.6, 2.6)
    blank(ax).set(xlim=(-0.1, 2 * ranks + 0.1), ylim=(2.35, -0.45))
    told = []
    for piece in range(2):
        at = 0
        order = [(rank, 1 + piece)] + [(s, 1) for s in range(rank - 1, -1, -1)]
        order += [(s, 2) for s in range(ranks - 1, rank, -1)] * piece
        y, words = 1.2 * (1 - piece), f"queries of piece {(rank, 2 * ranks - 1 - rank)[piece]}"
        ax.text(-0.15, y + 0.5, words, ha="right", va="center", fontsize=9.5)
        for s, halves in order:
            face = SHADES[2] if s == rank else TINTS[s % len(TINTS)]
            for x, of in zip(range(at, at + halves), ((s,), (2 * ranks - 1 - s, s))[halves - 1]):
                ax.add_patch(Rectangle((x, y), 0.96, 1, facecolor=face, edgecolor=MUTED, linewidth=0.8))
                words = f"{'own' if s == rank else f'rank {s}'}\npiece {of}"
                ax.text(x + 0.48, y + 0.5, words, ha="center", va="center", fontsize=9)
            at += halves
        told.append(", ".join(f"{'own' if s == rank else f'rank {s}'} ({('half', 'all')[h - 1]})" for s, h in order))
    figure.suptitle(
        f"rank {rank} of {ranks}, zigzag, causal: pieces of keys in the order in which they are taken →",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    figure.in_words = (
        f"Keys that rank {rank} of {ranks} takes, in order. Its early piece: {told[0]}; its late piece: {told[1]}. Both begin with their own; "
        "the early piece never waits for a later rank."
    )
    return figure


@styled
def recorded_link(ranks: int = 2) -> Picture | None:
    """Of the record of notebook 51, GB/s over the link by the number of CTAs that copy, medians; None as `recorded`."""
    samples = recorded("link", (ranks,), "51_one_sided")
    if samples is None:
        return None
    medians = samples[samples["name"] == "copies alone"].groupby(["N", "D", "copiers"])[["ms", "bytes"]].median()
    rates = (medians["bytes"] / medians["ms"] / 1e6).unstack("copiers")
    looks = looks_of(rates.index)
    figure, ax = picture("", 8.6, 3.4, f"The copies alone · {device(samples)}")
    told = []
    for (N, D), row in rates.iterrows():
        colour, marker, _ = looks[N, D]
        ax.plot(row.index, row, color=colour, marker=marker, label=f"N = {short(N)}, D = {D}")
        told.append(
            f"N = {short(N)}, D = {D}: " + ", ".join(f"{rate:.0f} with {copiers}" for copiers, rate in row.items())
        )
    ax.set(xlabel="CTAs that copy", xticks=rates.columns, ylabel="GB/s into each GPU", ylim=(0, None))
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    figure.in_words = "GB/s over the link by the number of CTAs that copy. " + "; ".join(told) + "."
    return figure


def direct_reads(ranks: int = 2) -> pd.DataFrame | None:
    """Of the record of notebook 51, TFLOP/s of rung 32 that reads another GPU's keys where they are, beside those on its own, recorded
    on one GPU at N = 8192; None as `recorded`."""
    samples = recorded("link", (ranks,), "51_one_sided")
    if samples is None:
        return None
    own = record.medians(record.headline(record.load("32_ping_pong", device=record.DEFAULT_DEVICE)))
    own = own[(own["name"] == "32_ping_pong") & (own["dtype"] == "bf16") & (own["Nk"] == 8192)].set_index("D")["tflops"]
    samples = samples[samples["N"] == 8192 * ranks]
    rows = []
    for (N, D), of_case in samples[samples["name"] == "read directly"].groupby(["N", "D"]):
        n, heads = N // ranks, of_case["H"].iloc[0]
        tflops = 4 * heads * n * n * D / of_case["ms"].median() / 1e9
        rows.append((D, n, round(own[D]), round(tflops)))
    return pd.DataFrame(rows, columns=["D", "queries, keys", "TFLOP/s, own keys", "TFLOP/s, the other GPU's"])


def recorded_memory() -> pd.DataFrame | None:
    """What ranks have held in recorded forward passes, the largest ever run among them: ranks, N, bytes; None without a record."""
    found = []
    for kind in ("ring_memory", "ring_largest"):
        for ranks in (2, 4, 8):
            with contextlib.suppress(LookupError):
                found.append(record.load("50_ring", kind, device=f"{record.SHOWN}-x{ranks}"))
    return pd.concat(found, ignore_index=True) if found else None


@styled
def memory(samples: pd.DataFrame | None, lengths: Sequence[int], gpus: Sequence[int] = (1, 2, 4, 8)) -> Picture:
    """GiB that a rank holds in a causal forward pass of H·D = 2048, against N: the model's as lines, a record's as points."""
    figure, ax = picture("", 8.6, 3.8, "H·D = 2048, D = 128, 16 bits: what one GPU holds in a forward pass")
    names = {ranks: f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in gpus}
    looks = looks_of(names.values())
    told = []
    for ranks, name in names.items():
        colour, marker, _ = looks[name]
        held = [ring_time.memory(ring_time.Problem(N=N), ranks) / 2**30 for N in lengths]
        ax.plot(lengths, held, color=colour, linestyle="--", linewidth=1.7, label=f"{name}, model")
        told.append(f"{name} {held[-1]:.3g} GiB at N = {short(lengths[-1])}")
        if samples is not None and len(rows := samples[samples["ranks"] == ranks]):
            ax.plot(
                rows["N"],
                rows["bytes"] / 2**30,
                color=colour,
                marker=marker,
                markersize=8 if ranks == 1 else 6,
                markerfacecolor="none",
                linestyle="",
                label=f"{name}, measured",
            )
    ax.axhline(H200, color=INK, linewidth=1)
    ax.text(lengths[0], H200, "memory of an H200", va="bottom", fontsize=9)
    power_of_two_axis(ax, lengths, "tokens of the whole sequence, N")
    ax.set(yscale="log", ylabel="GiB")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    figure.in_words = "GiB that a GPU holds, by the model: " + "; ".join(told) + "."
    return figure


def recorded(kind: str, gpus: tuple[int, ...] = (2, 4, 8), stem: str = "50_ring") -> pd.DataFrame | None:
    """The record of notebook 50, or 51, of this kind, of as many GPUs as there are records of; without any, a sentence says so and None comes."""
    found = []
    for ranks in gpus:
        try:
            found.append(record.load(stem, kind, device=f"{record.SHOWN}-x{ranks}"))
        except LookupError:
            continue
    if found:
        return pd.concat(found, ignore_index=True)
    print("not recorded yet: `python -m helpers record ring` on a machine with two GPUs or more makes the record")
    return None


def measured(samples: pd.DataFrame | None, ranks: int, **of: object) -> dict[str, list[tuple[float, float]]]:
    """Of a record, points (N, speedup) of our ring for each layout: the median of a round's ratios to one GPU. of: the case, by column."""
    if samples is None:
        return {}
    found = summary(samples[samples["ranks"] == ranks])
    mine = found[found["name"] == "50_ring"]
    for column, value in of.items():
        mine = mine[mine[column] == value]
    mine = mine[mine["Hkv"] * mine["D"] == WIDTH]
    return {str(name): list(zip(rows["Nq"], rows["speedup"])) for name, rows in mine.groupby("layout")}


def held(samples: pd.DataFrame, gpus: Sequence[int] = (2, 4, 8)) -> pd.DataFrame:
    """Our ring's recorded times and speedups over one GPU beside the model's, as many heads of K and V as of Q, D = 128."""
    found = []
    for ranks in gpus:
        if len(of_ranks := samples[samples["ranks"] == ranks]):
            table = model_error(of_ranks[(of_ranks["D"] == 128) & (of_ranks["Hkv"] == 16)]).assign(GPUs=ranks)
            found.append(table[table["layout"] == np.where(table["causal"] == 1, "zigzag", "contiguous")])
    table = pd.concat(found)
    table["mask"] = np.where(table["causal"] == 1, "causal", "none")
    names = {"ms": "ms", "predicted_ms": "ms, model", "measured": "speedup", "predicted": "speedup, model"}
    table = table.rename(columns=names)[["GPUs", "N", "mask", "passes", *names.values()]].round(2)
    return table.sort_values(["GPUs", "N", "mask", "passes"], ignore_index=True)


def _told(row: pd.Series, slow: pd.Series, samples: pd.DataFrame) -> str:
    """An implementation's name in beside_peers, with what is peculiar to it."""
    of_it = (samples["name"] == row["name"]) & (samples["passes"] == row["passes"])
    of_it &= samples["layout"].fillna("") == row["layout"]
    words = row["name"] + ", striped" * (row["layout"] == "striped")
    words += " (÷ one GPU, same bits)" * (row["beside"] == SAME)
    return words + f" ({many(int(slow[of_it].sum()), 'slow round')} left out)" * bool(slow[of_it].any())


@styled
def beside_peers(samples: pd.DataFrame, ranks: int, N: int = 65536, D: int = 128) -> Picture:
    """Speedup over one GPU of every implementation in zigzag or striped, a panel each for the forward pass and both passes, under a causal
    mask; whiskers from the slowest to the fastest round, but for rounds of more than three times the median time, which are counted."""
    samples = samples[
        (samples["ranks"] == ranks) & (samples["causal"] == 1) & (samples["D"] == D) & (samples["Nq"] == N)
    ]
    samples = samples[(samples["Hkv"] * D == WIDTH) & ~samples["layout"].eq("contiguous")]
    cases = samples.fillna({"layout": ""}).groupby(["passes", "name", "layout"])["ms"]
    slow = samples["ms"] > 3 * cases.transform("median")
    found = summary(samples[~slow])
    figure, _ = picture("", 10.4, 3.4)
    told = []
    for ax, (passes, title) in zip(
        _axes(figure, 2, sharex=True), (("forward", "forward"), ("both", "forward and backward"))
    ):
        rows = found[found["passes"] == passes].sort_values("speedup")
        spread = (rows["speedup"] - rows["lowest"], rows["highest"] - rows["speedup"])
        names = [_told(row, slow, samples) for _, row in rows.iterrows()]
        ax.errorbar(rows["speedup"], names, xerr=spread, fmt="o", color=BLUE, ecolor=MUTED, capsize=3)
        ax.axvline(ranks, color=INK, linewidth=1)
        ax.set(xlim=(0, 1.1 * ranks), xlabel="speedup over one GPU")
        ax.set_title(title, color=MUTED)
        told.append(f"{title}: " + ", ".join(f"{n} {s:.2f}" for n, s in zip(names, rows["speedup"])))
    figure.suptitle(f"Causal, zigzag, N = {short(N)}, D = {D} · {device(samples)}", x=0.01, ha="left", fontsize=11)
    figure.in_words = "Speedup over one GPU. " + "; ".join(told) + "."
    return figure
