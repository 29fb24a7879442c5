"""Drawings for the Hopper rungs: a descriptor and the tile it describes, a warpgroup's registers, warpgroups side by side.

Where anything lies is asked of fragments.py, of which the emulator is made too, so that a picture can't disagree with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ...emulator import fragments
from ...emulator.fragments import Descriptor
from ...figures import lanes as swim
from ...figures.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    MINT,
    MUTED,
    ORANGE,
    OUTLINE,
    PALER,
    SAND,
    SHADES,
    TINTS,
    Figure,
    blank,
    canvas,
    styled,
)

FIELD_NAMES = {
    "start": "start address",
    "leading": "leading offset",
    "stride": "stride offset",
    "base_offset": "base offset",
    "swizzle": "swizzle",
}
REGISTER_FILE = 65536  # 32-bit registers of an SM (CUDA C++ Programming Guide, "Compute Capabilities", 9.0)


def _used(d: Descriptor, mn_major: bool, extent: int) -> set[str]:
    """Which of the two offsets the operand's chunks are found by: with one group or a swizzle they may not be needed."""
    numbers = [(mn, k) for mn in range(extent // 8 if mn_major else extent) for k in range(16 if mn_major else 2)]
    chunks = [fragments.operand_chunk(d.swizzle, mn_major, *number) for number in numbers]
    return {name for place, name in ((1, "leading"), (2, "stride")) if any(chunk[place] for chunk in chunks)}


def _bits(ax: Axes, d: Descriptor, used: set[str]) -> None:
    """The 64 bits, the highest to the left, each field with the number in it and what that stands for."""
    blank(ax).set(xlim=(-0.5, 64.5), ylim=(-1.0, 2.3))
    ax.add_patch(Rectangle((0, 0), 64, 1, facecolor=PALER, edgecolor=MUTED, linewidth=0.7))
    encoded = d.encode()
    for (field, (low, bits)), face in zip(Descriptor.FIELDS.items(), TINTS, strict=False):
        left, number = 64 - low - bits, encoded >> low & (1 << bits) - 1
        ax.add_patch(Rectangle((left, 0), bits, 1, facecolor=face, edgecolor=INK, linewidth=0.9))
        value = getattr(d, field)
        says = f"= {value} B"
        if field == "start":
            says = f"= {value:#x}"
        elif field == "base_offset":
            says = f"= line {value}"
        elif field == "swizzle" and value == 0:
            says = "= none"
        elif field in ("leading", "stride") and field not in used:
            says += ", not used here"
        at, side = (0, "left") if field == "swizzle" else (left + bits / 2, "center")
        ax.text(left + bits / 2, 0.5, f"{number:#x}" if bits > 3 else number, ha="center", va="center", fontsize=9)
        ax.text(at, 1.25, f"{FIELD_NAMES[field]}\nbits {low + bits - 1}–{low}", ha=side, va="bottom", fontsize=8.5)
        ax.text(at, -0.25, says, ha=side, va="top", fontsize=8.5, color=MUTED)


def _chunks(d: Descriptor, mn_major: bool, extent: int) -> dict[int, tuple[int, int]]:
    """Address -> (core matrix, its row) of every 16 bytes that one wgmma reads."""
    places = {}
    for mn in range(0, extent, 8 if mn_major else 1):
        for k in range(0, 16, 1 if mn_major else 8):
            if mn_major:
                places[d.address(True, mn, k)] = (mn // 8 + k // 8 * (extent // 8), k % 8)
            else:
                places[d.address(False, mn, k)] = (mn // 8 * 2 + k // 8, mn % 8)
    return places


def _operand(ax: Axes, mn_major: bool, extent: int, what: str) -> None:
    """The operand (mn, k) in its core matrices, with the dimension that is contiguous in memory to the right."""
    across, down = (extent // 8, 2) if mn_major else (2, extent // 8)
    blank(ax).set(xlim=(-0.35, across + 0.05), ylim=(down + 0.05, -0.3))
    for y in range(down):
        for x in range(across):
            core = y * across + x
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=TINTS[core % len(TINTS)], edgecolor=CARD, linewidth=1.5))
            ax.text(x + 0.5, y + 0.5, core, ha="center", va="center", fontsize=9, fontweight="bold")
        ax.text(-0.06, y + 0.5, f"{8 * y}–{8 * y + 7}", ha="right", va="center", fontsize=7.5, color=MUTED)
    for x in range(across):
        ax.text(x + 0.5, -0.06, f"{8 * x}–{8 * x + 7}", ha="center", va="bottom", fontsize=7.5, color=MUTED)
    rows, columns = ("k", what) if mn_major else (what, "k")
    ax.set_title(f"the operand: {rows} down, {columns} to the right", color=MUTED)


@styled
def descriptor(
    d: Descriptor, mn_major: bool = False, extent: int = 64, what: str = "row", lines: int = 16, title: str = ""
) -> Figure:
    """A wgmma descriptor taken apart, and what it describes: the operand's core matrices (8 rows of 16 bytes each), and
    the first ``lines`` lines of 128 bytes of shared memory with the 16-byte rows that lie there, numbered within their core
    matrix. extent: rows of A (64) or columns of B; what: "row" or "column", as that dimension is called; 16-bit elements.
    """
    figure = Figure(figsize=(10.4, 2.0 + 0.29 * lines), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    top, below = figure.add_gridspec(2, 1, height_ratios=[1.35, 0.29 * lines + 0.5])
    used = _used(d, mn_major, extent)
    _bits(figure.add_subplot(top), d, used)
    left, right = (figure.add_subplot(part) for part in below.subgridspec(1, 2, width_ratios=[1, 1.9]))
    _operand(left, mn_major, extent, what)
    places = _chunks(d, mn_major, extent)
    first = d.start // 128
    blank(right).set(xlim=(-1.3, 10.2), ylim=(lines + 0.1, -0.9))
    for line in range(lines):
        right.text(-0.12, line + 0.5, f"+{line * 128}", ha="right", va="center", fontsize=7.5, color=MUTED)
        for box in range(8):
            found = places.get((first + line) * 128 + 16 * box)
            face = CARD if found is None else TINTS[found[0] % len(TINTS)]
            right.add_patch(
                Rectangle((box + 0.03, line + 0.05), 0.94, 0.9, facecolor=face, edgecolor=OUTLINE, linewidth=0.6)
            )
            if found is not None:
                core, row = found
                right.text(box + 0.5, line + 0.5, f"{core}·{row}", ha="center", va="center", fontsize=8)
    for box in range(8):
        right.text(box + 0.5, -0.1, f"{4 * box}–{4 * box + 3}", ha="center", va="bottom", fontsize=7.5, color=MUTED)
    right.text(-0.12, -0.1, "banks", ha="right", va="bottom", fontsize=7.5, color=MUTED)
    for x, bytes_, name in ((8.35, d.stride, "stride"), (9.3, d.leading, "leading")):
        if name in used and 128 <= bytes_ <= 128 * (lines - 1):
            right.annotate("", (x, bytes_ / 128 + 0.5), (x, 0.5), arrowprops={"arrowstyle": "-|>", "color": ORANGE})
            right.text(x + 0.12, bytes_ / 256 + 0.5, f"{name} offset", rotation=90, ha="left", va="center", fontsize=8)
    right.set_title("shared memory, from the start address's line on: core matrix · its row", color=MUTED)
    first_line = [places.get(first * 128 + 16 * box) for box in range(8)]
    boxes = " ".join("–" if found is None else f"{found[0]}·{found[1]}" for found in first_line)
    figure.in_words = (
        f"{title or 'A descriptor'}. Its 64 bits: start address {d.start:#x}, leading offset {d.leading} bytes, stride offset "
        f"{d.stride} bytes, swizzle {d.swizzle} bytes. Below, the operand's {extent // 4} core matrices, and where their rows lie in "
        f"shared memory, as core matrix · row; the first line of 128 bytes: {boxes}."
    )
    return figure


@styled
def chunks(panels: Mapping[str, np.ndarray]) -> Figure:
    """Which 16 bytes of a tile lie where: lines of 128 bytes, eight chunks in each, tinted by their number in their row.

    panels: title -> (lines, 8) of 8 * row + chunk, -1 for a chunk of zeros.
    """
    lines = max(len(places) for places in panels.values())
    figure, axes = canvas(4.9 * len(panels), 0.8 + 0.27 * lines, len(panels))
    for ax, (title, places) in zip(axes, panels.items(), strict=True):
        blank(ax).set(xlim=(-1.1, 8.05), ylim=(lines + 0.1, -0.7))
        ax.set_title(title, color=MUTED)
        for (line, box), number in np.ndenumerate(places):
            zero = number < 0
            look = {"facecolor": CARD if zero else TINTS[number % 8], "hatch": "///" if zero else ""}
            ax.add_patch(Rectangle((box + 0.03, line + 0.05), 0.94, 0.9, edgecolor=OUTLINE, linewidth=0.6, **look))
            words = "0" if zero else f"{number // 8}·{number % 8}"
            ax.text(box + 0.5, line + 0.5, words, ha="center", va="center", fontsize=8)
        for line in range(len(places)):
            ax.text(-0.12, line + 0.5, f"+{line * 128}", ha="right", va="center", fontsize=7.5, color=MUTED)
        for box in range(8):
            ax.text(box + 0.5, -0.1, f"{4 * box}–{4 * box + 3}", ha="center", va="bottom", fontsize=7.5, color=MUTED)
        ax.text(-0.12, -0.1, "banks", ha="right", va="bottom", fontsize=7.5, color=MUTED)
    said = []
    for title, places in panels.items():
        rows = (" ".join("0" if n < 0 else f"{n // 8}·{n % 8}" for n in line) for line in places[:3])
        said.append(f"{title}: " + "; ".join(rows) + (" …" if len(places) > 3 else ""))
    figure.in_words = "Lines of shared memory, eight boxes of 16 bytes each, as row · chunk. " + ". ".join(said)
    return figure


@styled
def accumulator(thread: int = 37, columns: int = 64, step: int = 1) -> Figure:
    """S (64, columns) in a warpgroup's registers, and 16 columns of it as the operand A of the next product.

    Left: the 16 rows of each warp, and the elements that ``thread`` holds. Middle: columns 16 step to 16 step + 15 of its
    warp's rows, each with the lane that holds it; the thread's elements carry their number in d[]. Right: A of the second
    product's step, with the numbers in a[]; two 16-bit elements share a register, which the tint tells.
    """
    warp = thread // 32
    figure, (left, middle, right) = canvas(11.4, 5.4, 3, width_ratios=[1, 1.35, 1.35])
    blank(left).set(xlim=(0, columns), ylim=(64, 0), aspect="auto")
    for w in range(4):
        left.add_patch(Rectangle((0, 16 * w), columns, 16, facecolor=SHADES[w % 2], edgecolor=CARD, linewidth=1.5))
        left.text(columns - 1, 16 * w + 15, f"warp {w}", ha="right", va="bottom", fontsize=8.5, color=MUTED)
    for i in range(columns // 2):
        row, column = fragments.wgmma_d(thread, i)
        left.add_patch(Rectangle((column, row), 1, 1, facecolor=GREEN, edgecolor=GREEN))
    left.add_patch(Rectangle((16 * step, 16 * warp), 16, 16, fill=False, edgecolor=ORANGE, linewidth=2))
    left.set_title(f"S (64, {columns}); green: thread {thread}", color=MUTED)
    layouts = {
        f"columns {16 * step}–{16 * step + 15} of S: lanes of warp {warp}": (
            middle, "d", range(8 * step, 8 * step + 8), lambda t, i: (fragments.wgmma_d(t, i)[0], fragments.wgmma_d(t, i)[1] - 16 * step)),
        f"the operand A of step {step} of P V: lanes of warp {warp}": (right, "a", range(8), fragments.wgmma_a),
    }  # fmt: skip
    for title, (ax, name, elements, layout) in layouts.items():
        blank(ax).set(xlim=(-0.05, 16.05), ylim=(16.05, -0.05), aspect="equal", anchor="N")
        ax.set_title(title, color=MUTED)
        for lane in range(32):
            for i in elements:
                row, column = layout(32 * warp + lane, i)
                mine = lane == thread % 32
                register = (i % 8) // 2 if name == "a" else i % 8
                face = GREEN if mine else TINTS[register]
                ax.add_patch(Rectangle((column, row - 16 * warp), 1, 1, facecolor=face, edgecolor=CARD, linewidth=0.7))
                ax.text(column + 0.5, row - 16 * warp + 0.5, f"{name}{i}" if mine else lane, ha="center", va="center",
                        fontsize=7, color=CARD if mine else INK, fontweight="bold" if mine else "normal")  # fmt: skip
    figure.in_words = (
        f"Each of four warps has 16 of the 64 rows of S. Thread {thread} of warp {warp} holds elements d{8 * step} to d{8 * step + 7} "
        f"of columns {16 * step} to {16 * step + 15} in the same cells in which the operand A of step {step} has its a0 to a7."
    )
    return figure


KINDS = {
    "copy": (BLUE, "", "asks for tiles"),
    "wait": (CARD, "////", "waits for a barrier"),
    "product": (CARD, "....", "waits for a product"),
    "scores": (GREEN, "", "S = Q Kᵀ"),
    "softmax": (SAND, "", "softmax"),
    "output": (MINT, "", "O += P V"),
    "products": (MINT, "xxxx", "starts products"),
    "dS": (ORANGE, "", "dS"),
    "send dQ": (BLUE, "....", "writes dQ"),
}


def said(events: pd.DataFrame) -> str:
    """What each lane does with its time, in words: "consumer 0: softmax 42 %, S = Q Kᵀ 14 %". events: lane, kind, begin, end."""
    spent = (events["end"] - events["begin"]).groupby([events["lane"], events["kind"]]).sum()
    lanes = []
    for lane, of_lane in spent.groupby(level="lane"):
        mine = events[events["lane"] == lane]
        whole = mine["end"].max() - mine["begin"].min()
        shares = of_lane.droplevel("lane").sort_values(ascending=False) / whole
        lanes.append(f"{lane}: " + ", ".join(f"{KINDS[kind][2]} {share:.0%}" for kind, share in shares.items()))
    return "; ".join(lanes)


@styled
def roles(events: pd.DataFrame, registers: Mapping[str, int], title: str, unit: str) -> Figure:
    """Swim lanes of a CTA's warpgroups, and how they share the registers of an SM.

    events: columns lane (a warpgroup's name), kind (of KINDS), begin and end. registers: lane -> registers per thread, of
    128 threads each. ValueError if they come to more than an SM has.
    """
    total = 128 * sum(registers.values())
    if total > REGISTER_FILE:
        raise ValueError(f"{total:,} registers, and an SM has {REGISTER_FILE:,}")
    names = list(registers)
    figure, (lanes, file) = canvas(10.6, 1.3 + 0.62 * len(names), 2, title, width_ratios=[4.2, 1])
    handles = swim.draw(lanes, events, names, KINDS)
    lanes.set(xlabel=unit, xlim=(0, events["end"].max() * 1.01))
    lanes.legend(handles=handles, frameon=False, fontsize=9, ncols=5, loc="lower left", bbox_to_anchor=(0, 1.0))
    for at, each in enumerate(registers.values()):
        share = 128 * each / REGISTER_FILE
        file.barh(at, 100 * share, 0.62, color=SHADES[1], edgecolor=INK, linewidth=0.5)
        file.text(100 * share + 1, at, f"{each}", va="center", fontsize=9)
    file.set_yticks([])
    file.set_ylim(lanes.get_ylim())
    file.grid(axis="y", visible=False)
    file.set(xlabel="% of the SM's registers", xlim=(0, 60))
    file.set_title("registers per thread", color=MUTED)
    each = ", ".join(f"{name} {n}" for name, n in registers.items())
    figure.in_words = f"{title}. {said(events)}. Registers per thread: {each}."
    return figure


WORK = {"dS": "dS", "softmax": "P", "send dQ": "dQ"}  # of a consumer of 33, while it starts no products: kind -> name


def covered(events: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(consumer, kind of WORK) -> the share of its clocks during which the other consumer starts products.

    events: of one D, with columns lane ("consumer 0", "consumer 1", …), kind, begin and end.
    """
    found = {}
    for one, other in (("consumer 0", "consumer 1"), ("consumer 1", "consumer 0")):
        theirs = events[(events["lane"] == other) & (events["kind"] == "products")]
        for kind in WORK:
            mine = events[(events["lane"] == one) & (events["kind"] == kind)]
            until = np.minimum.outer(mine["end"].to_numpy(), theirs["end"].to_numpy())
            since = np.maximum.outer(mine["begin"].to_numpy(), theirs["begin"].to_numpy())
            found[one, kind] = (until - since).clip(0).sum() / (mine["end"] - mine["begin"]).sum()
    return found


# What a box of 33's lanes is in the kernel's comments; the two times that products are started have no number here.
NUMBERS = {"dS": "2", "softmax": "6", "send dQ": "7"}


@styled
def steps(events: pd.DataFrame, title: str, unit: str, shown: int = 3) -> Figure:
    """Some steps of 33's loop from the middle of a CTA's work: a lane for each warpgroup, and beside each consumer's lane how much
    of its own work lies under products that the other one starts.

    events: of one D, as `covered` takes them. Boxes carry the numbers of the kernel's comments: 2 dS, 6 P of the next step, 7
    dQ to shared memory; products are started for 1 (dP, dV), and for 3 to 5 (S, dK, dQ), in front of 6.
    """
    starts = events[(events["lane"] == "consumer 0") & (events["kind"] == "dS")]["begin"].to_numpy()
    first, last = (starts[len(starts) // 2 + n] for n in (0, shown))
    seen = events[(events["end"] > first) & (events["begin"] < last)]
    seen = seen.assign(begin=seen["begin"].clip(lower=first) - first, end=seen["end"].clip(upper=last) - first)
    names = ["producer", "consumer 0", "consumer 1"]
    figure, (lanes, side) = canvas(10.6, 3.3, 2, title, width_ratios=[4.4, 1])
    handles = swim.draw(lanes, seen, names, KINDS)
    lanes.set(xlabel=unit, xlim=(0, last - first))
    for lane, of_lane in seen[seen["lane"] != "producer"].groupby("lane"):
        for kind, begin, end in of_lane[["kind", "begin", "end"]].itertuples(index=False):
            ahead = of_lane[(of_lane["begin"] >= end) & of_lane["kind"].isin(["dS", "softmax"])]["kind"]
            which = {"dS": "1", "softmax": "3–5"}.get(ahead.iloc[0], "") if kind == "products" and len(ahead) else ""
            number = NUMBERS.get(kind, which)
            if number and end - begin > 0.02 * (last - first):
                box = {"facecolor": CARD, "edgecolor": "none", "pad": 0.8}
                place = (begin + end) / 2, names.index(lane)
                lanes.text(*place, number, ha="center", va="center", fontsize=8.5, bbox=box)
    shares = covered(events)
    blank(side).set(xlim=(0, 1), ylim=lanes.get_ylim())
    side.set_title("under the other's products", color=MUTED, fontsize=9)
    for lane in names[1:]:
        says = "\n".join(f"({NUMBERS[kind]}) {label}: {shares[lane, kind]:.0%}" for kind, label in WORK.items())
        side.text(0.02, names.index(lane), says, va="center", fontsize=9)
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9, ncols=6)
    figure.in_words = f"{title}: " + "; ".join(
        f"{lane}'s {WORK[kind]} lies under the other's products for {share:.0%} of its clocks"
        for (lane, kind), share in shares.items()
    )
    return figure
