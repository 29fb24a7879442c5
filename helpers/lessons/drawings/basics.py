"""The drawings of notebooks 00 to 04: memories, threads, tiles, the online softmax, and bytes against predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ...figures import words
from ...figures.bars import bytes_by_tensor
from ...figures.style import AMBER, BLUE, CARD, GREEN, INK, MUTED, ORANGE, PALEST, SAND, SHADES, Picture, blank, styled

__all__ = [
    "bracketings",
    "butterfly",
    "bytes_against",
    "bytes_by_tensor",
    "exp_ranges",
    "fa1_threads",
    "flash_attention",
    "machine_fill",
    "memory_hierarchy",
    "register_tiling",
    "rescaling",
    "running_state",
    "seconds",
    "threads",
    "tile_walk",
    "warp_tile",
    "wedge",
]


def canvas(
    in_words: str, width: float, height: float, columns: int = 1, title: str = "", rows: int = 1, **options: object
) -> tuple[Picture, list[Axes]]:
    """A picture of rows x columns axes, in inches, and what is to be seen in it; options go to `subplots`."""
    figure = Picture(figsize=(width, height), layout="constrained")
    figure.in_words = in_words
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, axes


# 00_start_here


def _box(ax: Axes, x: float, y: float, width: float, height: float, face: str, edge: str = INK, **look: object) -> None:
    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": face, "edgecolor": edge, "linewidth": 1} | look))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, style: str = "-|>") -> None:
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    )


@styled
def flash_attention(tiles: int = 5, i: int = 1, j: int = 2) -> Picture:
    """FlashAttention in one picture: what lies in HBM, in shared memory and in registers while query tile i meets key tile j."""
    told = (
        f"FlashAttention in one picture. Left, HBM: Q, K, V and O, each cut into {tiles} tiles. Right, one SM. "
        f"Query tile {i + 1} came in once and stays in shared memory; tiles of K and V follow one another, now tile {j + 1}. "
        "In registers: the tile of scores S, which becomes P and is forgotten, and O, m and l of the query tile. "
        "O leaves once, after the last tile of keys. The whole of S and P, N by N, exists nowhere."
    )
    figure, (ax,) = canvas(told, 10.4, 5.3, title="FlashAttention in one picture")
    blank(ax).set(xlim=(-0.5, 104.5), ylim=(-0.5, 52))
    for x, width, name in ((0, 43, "HBM: large, far away"), (57, 47, "one SM: small, close to the arithmetic")):
        _box(ax, x, 0, width, 51, "none", MUTED, linestyle="--")
        ax.text(x + width / 2, 48, name, ha="center", va="center", fontsize=10.5, fontweight="bold")
    high = 30 / tiles
    for x, name, here, colour in ((4, "Q", i, AMBER), (14, "K", j, BLUE), (23, "V", j, BLUE), (34, "O", i, AMBER)):
        ax.text(x + 2.5, 44, name, ha="center", fontsize=11, fontweight="bold")
        for t in range(tiles):
            seen = name in "KV" and t < here
            face = colour if t == here and name != "O" else SHADES[0] if seen else CARD
            _box(
                ax,
                x,
                12 + (tiles - 1 - t) * high,
                5,
                high * 0.92,
                face,
                hatch="///" if t == here and name == "O" else "",
            )
    _arrow(ax, (21, 41), (21, 13), BLUE)
    ax.text(21, 8.5, "one tile after\nthe other", ha="center", va="center", fontsize=9, color=BLUE)
    ax.text(21.5, 3, "no S, no P: nothing here is N × N", ha="center", va="center", fontsize=9.5)

    for x, width, name in ((59, 17, "shared memory"), (80, 22, "registers")):
        _box(ax, x, 12, width, 32, PALEST, MUTED)
        ax.text(x + width / 2, 41.5, name, ha="center", va="center", fontsize=10)
    for y, name, colour in ((31, "$Q_i$", AMBER), (22.5, "$K_j$", BLUE), (14, "$V_j$", BLUE)):
        _box(ax, 62, y, 11, 7, colour)
        ax.text(67.5, y + 3.5, name, ha="center", va="center", fontsize=11, color=CARD)
    _box(ax, 82, 27, 11, 11, GREEN)
    ax.text(87.5, 32.5, "$S$, then $P$", ha="center", va="center", fontsize=10, color=CARD)
    ax.text(97.5, 32.5, "forgotten\nafter the\nstep", ha="center", va="center", fontsize=8.5)
    _box(ax, 82, 14, 11, 9, SAND, hatch="///")
    ax.text(
        87.5,
        18.5,
        "$O_i$",
        ha="center",
        va="center",
        fontsize=11,
        bbox={"facecolor": SAND, "edgecolor": "none", "pad": 2},
    )
    ax.text(97.5, 18.5, "$m_i$  $l_i$", ha="center", va="center", fontsize=11)
    ax.text(
        80.5,
        7,
        "each step:  $S = Q_i K_j^\\top$,  rescale $l_i$ and $O_i$,  $O_i$ += $P V_j$",
        ha="center",
        va="center",
        fontsize=10,
    )
    for y, words_, colour in ((34.5, "$Q_i$: once", AMBER), (22, "$K_j, V_j$:\nevery step", BLUE)):
        _arrow(ax, (43, y), (59, y), colour)
        ax.text(50, y + 1.2, words_, ha="center", va="bottom", fontsize=9.5, color=colour)
    ax.plot([87.5, 87.5], [14, 10], color=AMBER, linewidth=2)
    ax.plot([87.5, 50], [10, 10], color=AMBER, linewidth=2)
    _arrow(ax, (52, 10), (43, 10), AMBER)
    ax.text(50, 8.6, "$O_i$: once,\nat the end", ha="center", va="top", fontsize=9.5, color=AMBER)
    return figure


@styled
def memory_hierarchy(levels: Sequence[tuple[str, str, str, str, str]], title: str) -> Picture:
    """The memories of a GPU under each other, the nearest to the arithmetic on top.

    levels: (name, size in one SM, size on the whole GPU, bytes per clock for each SM, what it is for), nearest first.
    """
    told = []
    for name, one, whole, speed, _ in levels:
        number, comma, remark = speed.partition(", ")
        rate = f"{number} bytes per clock and SM{comma}{remark}" if speed else ""
        told.append(", ".join(filter(None, [f"{name}: {whole} in all", f"{one} per SM" if one else "", rate])))
    figure, (ax,) = canvas(f"{title}. {'; '.join(told)}.", 9.6, 1.0 + 0.62 * len(levels), title=title)
    blank(ax).set(xlim=(-1.1, 28.2), ylim=(-len(levels) - 0.1, 0.95))
    heads = ((6.8, "in one SM"), (11.4, "on the whole GPU"), (16.6, "bytes per clock and SM"), (23.6, ""))
    for x, head in heads:
        ax.text(x, 0.45, head, ha="center", va="center", fontsize=9, color=MUTED)
    for k, (name, *cells) in enumerate(levels):
        y = -k - 1
        _box(ax, 0, y + 0.05, 28, 0.9, SHADES[::-1][k % len(SHADES)], linewidth=0.8)
        ax.text(0.25, y + 0.5, name, va="center", fontweight="bold", fontsize=9)
        for (x, _), text in zip(heads, cells, strict=True):
            ax.text(x, y + 0.5, text, ha="center", va="center", fontsize=9)
    ax.annotate("", (-0.4, 0), (-0.4, -len(levels)), arrowprops={"arrowstyle": "-|>", "color": MUTED})
    ax.text(-0.75, -len(levels) / 2, "faster", rotation=90, ha="center", va="center", color=MUTED, fontsize=9)
    return figure


@styled
def seconds(times: Mapping[str, float], title: str) -> Picture:
    """Horizontal bars of seconds, each with its number."""
    told = f"{title}: " + ", ".join(f"{name} {value:.2g} s" for name, value in times.items()) + "."
    figure, (ax,) = canvas(told, 7.4, 0.9 + 0.45 * len(times), title=title)
    most = max(times.values())
    for k, value in enumerate(times.values()):
        ax.barh(k, value, 0.6, color=BLUE, edgecolor=INK, linewidth=0.8)
        ax.text(value + 0.01 * most, k, f"{value:.2g} s", va="center", fontsize=9)
    ax.set(xlim=(0, most * 1.12), xlabel="seconds")
    ax.set_yticks(range(len(times)), list(times), color=INK)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    return figure


# 01_naive


@styled
def threads(N: int = 48, tile: int = 16, block: tuple[int, int] = (1, 1), thread: tuple[int, int] = (9, 5)) -> Picture:
    """Who computes which element of S (N, N): the grid of blocks, and one block with its threads and warps.

    block: (x, y) of the one drawn large; thread: (x, y) of the one marked in it.
    """
    told = (
        f"Left: S, {N} by {N}, cut into blocks of {tile} by {tile}; blockIdx.x runs down the queries, blockIdx.y along the keys. "
        f"Right: one block, {tile * tile} threads in warps of 32, each warp two rows of {tile}; one thread is marked with the "
        "element of S that it computes."
    )
    figure, (left, right) = canvas(told, 9.4, 4.5, 2, "One thread per element of S")
    cells = -(-N // tile)
    for y in range(cells):
        for x in range(cells):
            chosen = (x, y) == block
            face = SHADES[2] if chosen else SHADES[0]
            left.add_patch(Rectangle((x * tile, y * tile), tile, tile, facecolor=face, edgecolor=INK, linewidth=1))
            where = ((x + 0.5) * tile, (y + 0.5) * tile)
            left.text(*where, f"x = {y}\ny = {x}", ha="center", va="center", fontsize=9)
    left.set(xlim=(-1, N + 1), ylim=(N + 1, -1), aspect="equal", xlabel="key j", ylabel="query i")
    left.set_title(f"S, N = {N}: {cells * cells} blocks, named by blockIdx", color=MUTED)
    for t in range(tile * tile):
        x, y = t % tile, t // tile
        marked = (x, y) == thread
        face = SAND if marked else SHADES[0] if t // 32 % 2 else SHADES[1]
        right.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor=CARD, linewidth=0.8))
    for warp in range(tile * tile // 32):
        right.text(tile + 0.4, (warp + 0.5) * 32 / tile, f"warp {warp}", va="center", fontsize=8, color=MUTED)
    i, j = block[1] * tile + thread[1], block[0] * tile + thread[0]
    note = f"threadIdx = ({thread[0]}, {thread[1]})\ncomputes S[{i}, {j}]"
    right.annotate(
        note,
        (thread[0] + 0.5, thread[1] + 0.5),
        (thread[0] - 3.5, thread[1] + 5.2),
        fontsize=9,
        ha="center",
        bbox={"facecolor": CARD, "edgecolor": INK, "boxstyle": "round,pad=0.3"},
        arrowprops={"arrowstyle": "-", "color": INK},
    )
    right.set(
        xlim=(-0.3, tile + 3.2), ylim=(tile + 0.3, -0.3), aspect="equal", xlabel="threadIdx.x", ylabel="threadIdx.y"
    )
    right.set_title(f"one block: {tile} × {tile} threads, {tile * tile // 32} warps of 32", color=MUTED)
    for ax in (left, right):
        ax.grid(False)
    left.set_xticks(range(0, N + 1, tile)), left.set_yticks(range(0, N + 1, tile))
    right.set_xticks([0, tile // 2, tile]), right.set_yticks([0, tile // 2, tile])
    return figure


@styled
def wedge(d: int = 64, N: int = 512, lengths: Sequence[int] = tuple(2**k for k in range(6, 18))) -> Picture:
    """The N² wedge of one fp32 head: the tensors to scale at one N, and their bytes against N."""
    told = (
        f"Left, to scale at N = {N}: Q, K, V and O are narrow strips of {d} columns; S and P, hatched, are squares. Right: bytes "
        f"against N, both axes logarithmic. S and P, 8 N², cross Q, K, V, O, 16 N d, at N = {2 * d} and rise twice as steeply."
    )
    figure, (left, right) = canvas(
        told,
        10.6,
        4.3,
        2,
        f"One head, d = {d}, fp32: what has to exist, and what the naive kernel adds",
        width_ratios=(1.25, 1),
    )
    blank(left)
    x = 0.0
    for name, width, face, hatch in (
        *((name, d, SHADES[3], "") for name in "QKVO"),
        *((name, N, SAND, "///") for name in "SP"),
    ):
        left.add_patch(Rectangle((x, 0), width, N, facecolor=face, edgecolor=INK, hatch=hatch, linewidth=0.9))
        left.text(x + width / 2, -0.04 * N, name, ha="center", fontweight="bold", fontsize=11)
        x += width + 0.09 * N
    left.text(-0.03 * N, N / 2, f"N = {N}", rotation=90, ha="right", va="center", fontsize=9)
    left.text(d / 2, N * 1.08, f"d = {d}", ha="center", fontsize=9)
    left.text(x - N * 0.59, N * 1.08, f"N = {N}", ha="center", fontsize=9)
    left.set(xlim=(-0.15 * N, x), ylim=(N * 1.15, -0.12 * N), aspect="equal")
    left.set_title(f"areas to scale at N = {N}", color=MUTED)

    lengths = np.asarray(lengths, dtype=float)
    small, large = 4 * 4 * lengths * d, 2 * 4 * lengths**2
    right.loglog(lengths, small, color=BLUE, marker="o", base=2)
    right.loglog(lengths, large, color=ORANGE, marker="s", linestyle="--", base=2)
    right.fill_between(lengths, small, large, where=large >= small, color=SAND, alpha=0.3, linewidth=0)
    right.text(lengths[-1] * 1.15, small[-1], "Q K V O\n16 N d", color=BLUE, va="center", fontsize=9)
    right.text(lengths[-1] * 1.15, large[-1], "S and P\n8 N²", color=ORANGE, va="center", fontsize=9)
    ticks = lengths[::2]
    right.set_xticks(ticks, [f"{n / 1024:g}k" if n >= 1024 else f"{n:g}" for n in ticks])
    ticks = [2.0**e for e in (15, 20, 25, 30, 35)]
    right.set_yticks(ticks, [words.size(n) for n in ticks])
    right.minorticks_off()
    right.set(xlabel="sequence length N", xlim=(lengths[0] / 1.3, lengths[-1] * 8))
    right.set_title("bytes against N", color=MUTED)
    return figure


# 02_online_softmax


@styled
def exp_ranges(formats: Mapping[str, tuple[float, float]]) -> Picture:
    """For which x exp(x) is neither 0 nor inf. formats: name -> (smallest x, largest x)."""
    told = "Where exp(x) is neither 0 nor infinite: " + ", ".join(
        f"{name} from {low:.1f} to {high:.1f}" for name, (low, high) in formats.items()
    )
    figure, (ax,) = canvas(
        told, 8.2, 0.9 + 0.55 * len(formats), title="Where exp(x) is a number: left of a bar 0, right of it inf"
    )
    for k, (low, high) in enumerate(formats.values()):
        ax.barh(k, high - low, 0.5, left=low, color=SHADES[2], edgecolor=INK, linewidth=0.8)
        ax.text(low - 2, k, f"{low:.1f}", ha="right", va="center", fontsize=9)
        ax.text(high + 2, k, f"{high:.1f}", ha="left", va="center", fontsize=9)
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_yticks(range(len(formats)), list(formats), color=INK)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    lows, highs = zip(*formats.values(), strict=True)
    ax.set(xlabel="x", xlim=(min(lows) - 18, max(highs) + 18))
    return figure


@styled
def running_state(scores: Sequence[float]) -> Picture:
    """The online softmax over one row, step by step: the running maximum above, the rescaled sum below.

    Each bar of the lower panel is l after that step, stacked from the shares exp(s_j − m) of the scores seen so far; a new
    maximum shrinks every share that was there.
    """
    s = np.asarray(scores, dtype=float)
    steps = np.arange(1, len(s) + 1)
    m = np.maximum.accumulate(s)
    rises = [int(k) + 1 for k in range(1, len(s)) if m[k] > m[k - 1]]
    told = (
        "Above: scores as they arrive, and the running maximum. Below: l after each step as a stack of one layer per score. "
        f"At steps {' and '.join(map(str, rises))} the maximum rises and every older layer shrinks by the same factor; at the "
        "others the stack only grows."
    )
    options = {"sharex": True, "height_ratios": (1, 1.25)}
    figure, (top, bottom) = canvas(told, 8.6, 5.2, title="One row, one score at a time", rows=2, **options)
    top.vlines(steps, min(0, s.min()), s, color=MUTED, linewidth=1)
    top.plot(steps, s, "o", color=BLUE, label="score $s_k$")
    top.step(steps, m, where="post", color=ORANGE, linestyle="--", label="running max $m_k$")
    top.set_ylabel("score")
    top.set_ylim(top=1.25 * s.max())
    top.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    for k in range(len(s)):
        shares = np.exp(s[: k + 1] - m[k])
        edges = np.concatenate([[0], np.cumsum(shares)])
        for j, share in enumerate(shares):
            face, hatch = (SAND, "///") if j == k else (SHADES[j % 2 * 2], "")
            bottom.bar(steps[k], share, 0.62, bottom=edges[j], color=face, edgecolor=INK, linewidth=0.6, hatch=hatch)
        text = f"$l$ = {edges[-1]:.2f}"
        if k and m[k] > m[k - 1]:
            text = f"old × {np.exp(m[k - 1] - m[k]):.2g}\n" + text
        bottom.text(steps[k], edges[-1] + 0.06, text, ha="center", va="bottom", fontsize=8.5)
    most = max(np.exp(s[: k + 1] - m[k]).sum() for k in range(len(s)))
    bottom.set(xlabel="step k", ylabel="$l_k$, stacked from $e^{s_j - m_k}$", ylim=(0, most * 1.3), xticks=steps)
    bottom.grid(axis="x", visible=False)
    return figure


def _merged(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    m = max(a[0], b[0])
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


@styled
def bracketings(scores: Sequence[float], trees: Mapping[str, tuple], leaf: str = "one score each, l = 1") -> Picture:
    """Merging the states of single scores along different trees; every node shows its (m, l).

    trees: title -> nested pairs of indices into scores, for example ((0, 1), (2, 3)). leaf: what the bottom row is, in words.
    """
    told = (
        f"{len(trees)} trees of merges over the scores {', '.join(f'{x:g}' for x in scores)}. The states on the way differ; the "
        "roots are equal."
    )
    figure, axes = canvas(told, 3.55 * len(trees), 3.9, len(trees))

    def leaves(tree) -> list[int]:
        return [tree] if isinstance(tree, int) else [i for part in tree for i in leaves(part)]

    for ax, (title, tree) in zip(axes, trees.items(), strict=True):
        blank(ax).set_title(title, color=MUTED)
        place = {leaf: x for x, leaf in enumerate(leaves(tree))}

        def node(tree, ax=ax, place=place) -> tuple[float, float, tuple[float, float]]:
            """Draws the subtree; returns where its root is and its state."""
            if isinstance(tree, int):
                x, y, state, face = place[tree], 0.0, (scores[tree], 1.0), SHADES[0]
            else:
                parts = [node(part) for part in tree]
                x, y = sum(p[0] for p in parts) / 2, max(p[1] for p in parts) + 1.0
                state, face = _merged(parts[0][2], parts[1][2]), SAND
                for px, py, _ in parts:
                    ax.plot([px, x], [py, y], color=MUTED, linewidth=1, zorder=1)
            box = {"facecolor": face, "edgecolor": INK, "boxstyle": "round,pad=0.3", "linewidth": 0.8}
            ax.text(x, y, f"{state[0]:g}\n{state[1]:.4f}", ha="center", va="center", fontsize=8.5, bbox=box)
            return x, y, state

        _, height, _ = node(tree)
        ax.set(xlim=(-0.6, len(place) - 0.4), ylim=(-0.5, height + 0.5))
    figure.supxlabel(f"each box: m above, l below; bottom row: {leaf}", fontsize=9, color=MUTED)
    return figure


@styled
def butterfly(scores: Sequence[float]) -> Picture:
    """How a warp merges its lanes' states: at step `mask`, lane i reads lane i xor mask. Drawn with 2^k lanes."""
    lanes = len(scores)
    masks = [lanes >> k for k in range(1, lanes.bit_length())]
    told = (
        f"A butterfly over {lanes} lanes: at each of {len(masks)} steps every lane merges its state with that of the lane whose "
        "number differs in one bit. In the last row all lanes hold the same state."
    )
    figure, (ax,) = canvas(
        told,
        8.6,
        1.1 + 1.05 * len(masks),
        title=f"A butterfly over {lanes} lanes: each box is a state, m above, l below",
    )
    blank(ax)
    states = [(float(s), 1.0) for s in scores]
    for row in range(len(masks) + 1):
        for lane, (m, l) in enumerate(states):
            face = SAND if row == len(masks) else SHADES[min(row, 2)]
            box = {"facecolor": face, "edgecolor": INK, "boxstyle": "round,pad=0.28", "linewidth": 0.8}
            ax.text(lane, -row, f"{m:g}\n{l:.3f}", ha="center", va="center", fontsize=8.5, bbox=box, zorder=3)
        if row < len(masks):
            ax.text(lanes - 0.35, -row - 0.5, f"xor {masks[row]}", va="center", fontsize=9, color=MUTED)
            for lane in range(lanes):
                ax.plot([lane, lane], [-row, -row - 1], color=MUTED, linewidth=1)
                ax.plot([lane ^ masks[row], lane], [-row, -row - 1], color=ORANGE, linewidth=0.9, linestyle="--")
            states = [_merged(state, states[lane ^ masks[row]]) for lane, state in enumerate(states)]
    for lane in range(lanes):
        ax.text(lane, 0.42, f"lane {lane}", ha="center", fontsize=8.5, color=MUTED)
    ax.set(xlim=(-0.6, lanes + 0.4), ylim=(-len(masks) - 0.45, 0.65))
    return figure


@styled
def rescaling(scores: Sequence[Sequence[float]], values: Sequence[Sequence[Sequence[float]]]) -> Picture:
    """How o and l of one row take in blocks of keys: what was there shrinks when the maximum rises, then the block's part is added.

    scores: of each block its keys' scores. values: of each block its keys' v, rows of as many numbers as o has.
    """
    m, l, o, steps = -np.inf, 0.0, np.zeros(len(values[0][0])), []
    for s, v in zip(scores, values, strict=True):
        m_new = max(m, *s)
        factor, p = np.exp(m - m_new), np.exp(np.asarray(s) - m_new)
        steps.append((np.append(o, l), factor, np.append(p @ np.asarray(v), p.sum()), m_new))
        m, l, o = m_new, factor * l + p.sum(), factor * o + p @ np.asarray(v)
    told = "One query, blocks of keys one after the other. " + " ".join(
        f"Block {k + 1}: m = {m_:g}, what was there is multiplied by {f:.2g}, the block's part is added."
        for k, (_, f, _, m_) in enumerate(steps)
    )
    told += " Right: O = o / l, the weighted mean of all values."
    widths = [1.0] * len(steps) + [0.85]
    figure, axes = canvas(
        told, 10.2, 3.7, len(steps) + 1, "One row takes in its keys block by block", width_ratios=widths
    )
    names = [f"$o_{c + 1}$" for c in range(len(o))] + ["$l$"]
    at, top = np.arange(len(names)), max(max((old * f + new).max(), old.max()) for old, f, new, _ in steps)
    for k, (ax, (old, factor, new, m_new)) in enumerate(zip(axes, steps, strict=False)):
        kept = old * factor
        ax.bar(at, kept, 0.62, color=SHADES[2], edgecolor=INK, linewidth=0.7, label="kept: old × factor")
        ax.bar(
            at, new, 0.62, bottom=kept, color=SAND, hatch="///", edgecolor=INK, linewidth=0.7, label="this block's part"
        )
        before = {"facecolor": "none", "edgecolor": ORANGE, "linestyle": "--", "linewidth": 1.3}
        if k and factor < 1:
            ax.bar(at, old, 0.76, label="old, before rescaling", **before)
        ax.set_title(f"block {k + 1}: $m$ = {m_new:g}" + (f", old × {factor:.2g}" if k else ""), color=MUTED)
        ax.set(ylim=(0, 1.08 * top), xticks=at)
        ax.set_xticklabels(names, color=INK)
        ax.grid(axis="x", visible=False)
    last = axes[-1]
    last.bar(at[:-1], o / l, 0.62, color=GREEN, edgecolor=INK, linewidth=0.7)
    last.set_title("at the end: $O = o / l$", color=MUTED)
    last.set(xticks=at[:-1], ylim=(0, 1))
    last.set_xticklabels([f"$O_{c + 1}$" for c in range(len(o))], color=INK)
    last.grid(axis="x", visible=False)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return figure


# 03_fa1_fp32


@styled
def tile_walk(order: str = "fa1", tiles: int = 4, steps: Sequence[int] = (1, 2, 3, 4, 5, 16)) -> Picture:
    """The order in which a tiled attention loop visits the tiles of S, with what each step moves to and from HBM.

    order: "fa1" (K, V outside, FlashAttention's Algorithm 1) or "fa2" (Q outside, FlashAttention-2's). S is cut into
    tiles x tiles; `steps` (from 1) are the ones drawn, a panel each. ValueError for another order.
    """
    if order not in ("fa1", "fa2"):
        raise ValueError(f'order is "fa1" or "fa2", not {order!r}')
    pairs = [(b, a) if order == "fa1" else (a, b) for a in range(tiles) for b in range(tiles)]  # (i, j)
    told = f"S cut into {tiles} by {tiles} tiles, {len(steps)} steps of the walk. " + (
        "Down a column: K and V stay for a column, Q and O change at every step; O, m and l are read and written each time."
        if order == "fa1"
        else "Along a row: Q, O, m and l stay for a row, K and V change at every step; O and LSE are written when a row ends."
    )
    rows = 2 if len(steps) > 3 else 1
    columns = -(-len(steps) // rows)
    figure, axes = canvas(told, 3.0 * columns, 3.9 * rows, columns, rows=rows)
    for ax in axes[len(steps) :]:
        blank(ax)
    for ax, step in zip(axes, steps, strict=False):
        (i, j), before = pairs[step - 1], pairs[step - 2] if step > 1 else (-1, -1)
        _tile_grid(ax, pairs, step, tiles)
        ax.set_title(f"step {step}: i = {i + 1}, j = {j + 1}", loc="center", fontsize=10)
        q, kv = f"$O_{i + 1}$ $m_{i + 1}$ $l_{i + 1}$", f"$K_{j + 1}$ $V_{j + 1}$"
        row_ends = step == len(pairs) or pairs[step][0] != i
        if order == "fa1":
            moved = ("" if before[1] == j else kv + " ") + f"$Q_{i + 1}$ " + q, kv if before[1] == j else "", q
        else:
            here = f"$Q_{i + 1}$ " + q
            moved = ("" if before[0] == i else f"$Q_{i + 1}$ ") + kv, here if before[0] == i else "", ""
            moved = moved[:2] + (f"$O_{i + 1}$ $LSE_{i + 1}$" if row_ends else "",)
        for line, (label, names, colour) in enumerate(
            zip(("reads", "keeps", "writes"), moved, (BLUE, INK, ORANGE), strict=True)
        ):
            y = tiles + 0.8 + 0.68 * line
            ax.text(-1.8, y, label, fontsize=8.5, color=MUTED, va="center")
            ax.text(-0.1, y, names or "–", fontsize=9.5, color=colour if names else MUTED, va="center")
    return figure


def _tile_grid(ax: Axes, pairs: Sequence[tuple[int, int]], step: int, tiles: int) -> None:
    """S as tiles, numbered in the order of their visits up to `step`; the current Q, O and K, V tiles filled."""
    ax.set(xlim=(-1.9, tiles + 0.3), ylim=(tiles + 2.6, -1.7), aspect="equal")
    blank(ax)
    now = pairs[step - 1]
    for t in range(tiles):
        for on, corner, size, colour in (
            (t == now[1], (t + 0.06, -0.85), (0.88, 0.6), BLUE),
            (t == now[0], (-0.85, t + 0.06), (0.6, 0.88), AMBER),
        ):
            ax.add_patch(Rectangle(corner, *size, facecolor=colour if on else "none", edgecolor=colour))
            middle = [c + s / 2 for c, s in zip(corner, size, strict=True)]
            ax.text(*middle, t + 1, ha="center", va="center", fontsize=8, color=CARD if on else colour)
    ax.text(tiles / 2, -1.2, "$K_j$, $V_j$", ha="center", fontsize=9, color=BLUE)
    ax.text(-1.4, tiles / 2, "$Q_i$, $O_i$", ha="center", va="center", rotation=90, fontsize=9, color=AMBER)
    for n, (i, j) in enumerate(pairs, start=1):
        face = GREEN if n == step else SHADES[0] if n < step else "none"
        line = ":" if n > step else "-"
        ax.add_patch(
            Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, facecolor=face, edgecolor=MUTED, linewidth=0.8, linestyle=line)
        )
        if n <= step:
            colour, weight = (CARD, "bold") if n == step else (INK, "normal")
            ax.text(j + 0.5, i + 0.5, n, ha="center", va="center", fontsize=8, color=colour, fontweight=weight)


@styled
def bytes_against(frame: pd.DataFrame, x: str, by: str, title: str) -> Picture:
    """Counted bytes (markers) on predicted ones (lines) against column `x`, both axes logarithmic, a line per `by`.

    frame: columns x, by, counted (NaN where nothing was counted; dashed, a line without any) and predicted, in bytes.
    """
    told = f"{title}, against {x}, both axes logarithmic. Lines are predictions, markers are counts: they coincide."
    figure, (ax,) = canvas(told, 6.8, 4.6, title=title)
    looks = iter([(BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (INK, "D"), (AMBER, "v")])
    ring = {"linestyle": "", "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.6}
    ends = []
    for label, part in frame.groupby(by, sort=False):
        counted = part["counted"].notna().any()
        colour, marker = next(looks) if counted else (MUTED, "")
        ax.plot(part[x], part["predicted"], color=colour, linestyle="-" if counted else "--")
        ax.plot(part[x], part["counted"], color=colour, marker=marker, **ring)
        ends.append((part["predicted"].iloc[-1], label if isinstance(label, str) else f"{by} = {label}", colour))
    height, gap = 0.0, (frame["predicted"].max() / frame["predicted"].min()) ** 0.055
    for end, name, colour in sorted(ends):
        height = max(end, gap * height)  # names of neighbouring lines keep a distance
        ax.annotate(
            name, (frame[x].max(), height), (9, 0), textcoords="offset points", color=colour, va="center", fontsize=9
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(sorted(set(frame[x])), [f"{v:g}" for v in sorted(set(frame[x]))])
    ax.yaxis.set_major_formatter(lambda v, _: words.size(v, digits="g"))
    ax.set(xlabel=x, ylabel="bytes read + written")
    ax.margins(x=0.18)
    return figure


@styled
def machine_fill(fill: pd.DataFrame, title: str) -> Picture:
    """The share of SMs with work against N, and the recorded throughput scaled to its own maximum.

    fill: columns N, "share of SMs with work" (0 to 1) and "recorded TFLOP/s".
    """
    recorded = fill["recorded TFLOP/s"]
    told = f"{title}. " + "; ".join(
        f"N = {n}: {share:.0%} of the SMs have work, throughput {speed / recorded.max():.0%} of its maximum"
        for n, share, speed in zip(fill["N"], fill["share of SMs with work"], recorded, strict=True)
    )
    figure, (ax,) = canvas(told, 6.4, 3.4, title=title)
    ax.plot(
        fill["N"],
        fill["share of SMs with work"],
        color=MUTED,
        linestyle="--",
        label="predicted: share of SMs with a CTA",
    )
    ax.plot(fill["N"], recorded / recorded.max(), color=BLUE, marker="o", label="recorded throughput / its maximum")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(fill["N"]), [f"{n}" for n in fill["N"]])
    ax.set(ylim=(0, 1.08), xlabel="sequence length N", ylabel="share")
    ax.legend(frameon=False, loc="lower left")
    return figure


@styled
def fa1_threads(rows: int = 2, TX: int = 8, Bc: int = 32, d: int = 64, lane: int = 13) -> Picture:
    """Which lane of 03_fa1_fp32's first warp computes which elements of S and of O.

    rows: query rows per thread. TX: threads that share a row. Keys of a thread are TX apart, its columns of O are fours, 4 TX apart.
    """
    tall, tx = rows * 32 // TX, lane % TX
    told = (
        f"The first warp's part of a tile: {tall} rows. In S, {tall} by {Bc}, lane {lane} computes {rows} rows of the keys "
        f"{', '.join(str(tx + c * TX) for c in range(Bc // TX))}; in O, {tall} by {d}, the same rows of "
        f"{d // TX} columns in groups of four. Lanes in one row of the picture share a query row, lanes {TX} apart share keys."
    )
    title = f"03_fa1_fp32, d = {d}: the first of 8 warps; each number is a lane"
    figure, axes = canvas(told, 10.2, 4.6, title=title, rows=2)
    panels = (("S", Bc, 1, "key of the tile"), ("O", d, 4, "column of O"))
    for ax, (name, columns, wide, label) in zip(axes, panels, strict=True):
        for r in range(0, tall, rows):
            for c in range(0, columns, wide):
                n = r // rows * TX + c // wide % TX
                _box(ax, c, r, wide, rows, GREEN if n == lane else SHADES[n // TX % 2], MUTED, linewidth=0.6)
                look = {"color": CARD, "fontweight": "bold"} if n == lane else {"color": INK}
                ax.text(c + wide / 2, r + rows / 2, n, ha="center", va="center", fontsize=8, **look)
        ax.set(
            xlim=(-0.2, columns + 0.2),
            ylim=(tall + 0.2, -0.2),
            xlabel=label,
            ylabel="query row",
            yticks=range(0, tall + 1, rows),
        )
        ax.set_xticks(range(0, columns + 1, TX * wide))
        ax.set_title(f"{name}, {tall} × {columns}: lane {lane} has {rows} × {columns // TX} elements", color=MUTED)
        ax.grid(False)
    return figure


# 04_fa2_fp32


@styled
def register_tiling(tiles: Sequence[tuple[int, int]], supply: float = 0.5) -> Picture:
    """Left: the outer product of one thread's fragments. Right: bytes that a thread asks of shared memory per FLOP, by tile.

    supply: what an SM delivers, in bytes per FLOP (128 bytes and 256 fp32 FLOPs a clock on compute capability 9.0).
    """
    cost = [2 * (1 / m + 1 / n) for m, n in tiles]
    told = "Left: 8 values of Q and 8 of K make 64 multiply-adds. Right: bytes asked for per FLOP: " + ", ".join(
        f"{m} × {n}: {c:.3g}" for (m, n), c in zip(tiles, cost, strict=True)
    )
    told += f". An SM delivers {supply:g}."
    figure, (left, right) = canvas(told, 9.4, 3.5, 2, width_ratios=(1, 1.9))
    left.set(xlim=(-2.8, 8.6), ylim=(9.2, -3.0), aspect="equal")
    blank(left)
    for t in range(8):
        left.add_patch(Rectangle((-1.9, t), 0.9, 1, facecolor=AMBER, edgecolor=CARD))
        left.add_patch(Rectangle((t, -1.9), 1, 0.9, facecolor=BLUE, edgecolor=CARD))
        for s in range(8):
            left.add_patch(Rectangle((t, s), 1, 1, facecolor=GREEN, alpha=0.55, edgecolor=CARD))
    left.text(4, -2.25, "8 of K: 32 bytes", ha="center", fontsize=9, color=BLUE)
    left.text(-2.35, 4, "8 of Q: 32 bytes", va="center", ha="center", rotation=90, fontsize=9, color=AMBER)
    left.text(4, 8.75, "64 multiply-adds, 128 FLOPs", ha="center", fontsize=9, color=INK)
    more = [c > supply for c in cost]
    colours, hatches = [ORANGE if m else GREEN for m in more], ["//" if m else "" for m in more]
    bars = right.bar(range(len(tiles)), cost, 0.62, color=colours, hatch=hatches, edgecolor=CARD)
    right.bar_label(
        bars,
        [f"{c:.3g}" for c in cost],
        fontsize=9,
        padding=4,
        bbox={"facecolor": CARD, "edgecolor": "none", "pad": 3},  # keeps the dashed line from reading as a minus
    )
    right.axhline(supply, color=INK, linewidth=1.2, linestyle="--")
    right.text(
        1.02, supply, f"an SM\ndelivers {supply:g}", transform=right.get_yaxis_transform(), va="center", fontsize=9
    )
    right.set_xticks(range(len(tiles)), [f"{m} × {n}" for m, n in tiles])
    right.set(ylim=(0, 1.1 * max(cost)), xlabel="elements of S per thread", ylabel="bytes asked for per FLOP")
    right.grid(axis="x", visible=False)
    return figure


@styled
def warp_tile(ty: Sequence[int], tx: Sequence[int], d: int, lane: int) -> Picture:
    """One warp's part of S in 04_fa2_fp32: which lane computes which 4 x 4 piece, and what `lane` reads for one k.

    ty, tx: each lane's place in the warp's grid of threads, whose rows x columns is 32. S has d columns per warp.
    """
    rows = 8 * (max(ty) + 1)
    told = (
        f"One warp's part of S, {rows} by {d}, in pieces of 4 by 4, each with the number of its lane. Lane {lane} has four pieces; for "
        "one k it reads two groups of four of Q and two of K, half a tile apart."
    )
    figure, (ax,) = canvas(told, 7.4, 7.4 * (rows + 10) / (d + 10))
    ax.set(xlim=(-9, d + 0.5), ylim=(rows + 0.5, -9), aspect="equal")
    blank(ax)
    for n in range(32):
        mine = n == lane
        for x, y in product((4 * tx[n], 4 * tx[n] + d // 2), (4 * ty[n], 4 * ty[n] + rows // 2)):
            ax.add_patch(Rectangle((x, y), 4, 4, facecolor=GREEN if mine else CARD, edgecolor=MUTED, linewidth=0.7))
            ax.text(
                x + 2,
                y + 2,
                n,
                ha="center",
                va="center",
                fontsize=8.5,
                color=CARD if mine else INK,
                fontweight="bold" if mine else "normal",
            )
    for half in (0, 1):
        y, x = 4 * ty[lane] + half * rows // 2, 4 * tx[lane] + half * d // 2
        ax.add_patch(Rectangle((-6, y), 3, 4, facecolor=AMBER))
        ax.add_patch(Rectangle((x, -6), 4, 3, facecolor=BLUE))
        ax.plot([-3, 4 * tx[lane]], [y + 2] * 2, color=AMBER, linewidth=1, linestyle=":", zorder=0)
        ax.plot([x + 2] * 2, [-3, 4 * ty[lane]], color=BLUE, linewidth=1, linestyle=":", zorder=0)
    ax.add_patch(Rectangle((-6, 0), 3, rows, facecolor="none", edgecolor=AMBER))
    ax.add_patch(Rectangle((0, -6), d, 3, facecolor="none", edgecolor=BLUE))
    ax.text(d / 2, -7.2, f"column k of K: {d} keys", ha="center", fontsize=9.5, color=BLUE)
    ax.text(
        -7.8, rows / 2, f"column k of Q: {rows} rows", va="center", ha="center", rotation=90, fontsize=9.5, color=AMBER
    )
    return figure
