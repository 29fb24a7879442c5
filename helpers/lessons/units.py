"""What a tile asks of an SM's four units, from counts that need no GPU: wavefronts on the emulator, machine instructions in nvcc's code.

For the rungs with mma.sync and cp.async, 10 to 13, and their stages. `figures.budget` draws it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .. import record
from ..figures import budget
from ..figures import stalls as reasons
from ..figures.steps import stays
from ..figures.style import Picture
from ..ladder.rung import Rung, Which
from ..ladder.rung import rung as find
from ..record.workload import N as LENGTH
from ..record.workload import forward_flops
from ..toolchain import sass
from ..toolchain.loops import Line, target
from .wgmma_units import SMS

GHZ = 1.98  # of an H200, its highest clock
MMA_SYNC = 641  # TFLOP/s of mma.sync alone on it, operands in registers: the "ceilings" of data/nvidia-h200/13_tuned.steps.json
ISSUED = 4  # warp instructions per clock of an SM, one by each of its four schedulers
MUFU = 2  # clocks for a warp's 32 exponentials: "CUDA C++ Programming Guide", "Arithmetic Instructions", 16 per clock
KEYS = 64
MASKED = 16  # selections: 32 or 64 of them set the columns past the last key to -inf


def clocks_of_mma(tflops: float = MMA_SYNC) -> float:
    """Clocks of an SM for one mma.m16n8k16 at this rate of the whole card, in TFLOP/s."""
    return 2 * 16 * 8 * 16 * SMS * GHZ * 1e9 / (tflops * 1e12)


def usual_path(which: Which, D: int = 128, dtype: str = "fp16") -> list[Line]:
    """The instructions of a kernel's tile loop that a whole tile of random inputs runs through: without the code behind a branch
    that masks columns, which is a ragged tile's, and of 13 that of a tile whose maximum was missed, too."""
    lines, found, resume = sass.loop_lines(which, D, dtype), [], 0
    for address, opcode, operands in lines:
        if address < resume:
            continue
        found.append((address, opcode, operands))
        end = target(opcode, operands) or 0
        if sum(name.startswith("FSEL") for at, name, _ in lines if address < at < end) >= MASKED:
            resume = end
    return found


def clocks(which: Which, D: int = 128, rows: int = 32, dtype: str = "fp16") -> pd.Series:
    """How long each unit of an SM is busy with `rows` query rows and 64 keys, in clocks: index budget.UNITS.

    The issue slots are those of the tile loop in the code for sm_90a. rows: a multiple of the 16 or 32 that a warp of the kernel has.
    """
    rung = find(which)
    lines = usual_path(rung, D, dtype)
    products, exponentials = (sum(opcode.startswith(name) for _, opcode, _ in lines) for name in ("HMMA", "MUFU.EX2"))
    warps = rows / 16 * (2 * KEYS // 8 * D // 16) / products  # as many as have these rows
    per_warp = {
        "tensor cores": products * clocks_of_mma(),
        "issue slots": len(lines) / ISSUED,
        "MUFU": exponentials * MUFU,
    }
    found = {unit: warps * n for unit, n in per_warp.items()} | {"shared memory": _wavefronts(rung, D, rows, dtype)}
    return pd.Series(found, name=rung.stem).reindex(budget.UNITS)


def _wavefronts(rung: Rung, D: int, rows: int, dtype: str) -> float:
    """Wavefronts of shared memory for these rows and 64 keys, one clock each: the difference that more keys make."""
    import torch

    from ..run.reference import DTYPES
    from ..run.xray import xray

    torch.manual_seed(0)
    cost, tiles, queries = [], (3, 5), 128
    for n in tiles:
        q, k, v = (torch.randn(1, 1, m, D).to(DTYPES[dtype]) for m in (queries, n * KEYS, n * KEYS))
        cost.append(xray(rung, q, k, v).total(space="shared").cost)
    return (cost[1] - cost[0]) / (tiles[1] - tiles[0]) * rows / queries


def took(tflops: float, D: int = 128, rows: int = 32) -> float:
    """Clocks of one SM that the same work takes at this speed of the whole card."""
    return forward_flops(1, 1, rows, KEYS, D) * SMS * GHZ * 1e9 / (tflops * 1e12)


def table(kernels: Sequence[Which], D: int = 128, rows: int = 32, beside: Which | None = None) -> pd.DataFrame:
    """A row for each kernel, the clocks of each unit, and `took`: those it took when it was recorded, where it was.

    beside: the rung among whose stages the kernels ran side by side; without it each kernel's own record is taken, a stage's of its rung.
    """
    frame = pd.DataFrame([clocks(one, D, rows) for one in kernels])
    return frame.assign(took=[_recorded(find(one).stem, D, rows, beside) for one in kernels])


def _recorded(stem: str, D: int, rows: int, beside: Which | None) -> float:
    """What the work took at the headline workload and N = 4096 in fp16, NaN where that isn't recorded."""
    staged = re.fullmatch(r"(\d\d)_\d_\w+", stem)
    of = beside or (staged and staged[1])
    try:
        which, kind = (find(of).stem, "stages") if of else (stem, "forward")
        samples = record.load(which, kind, record.SHOWN)  # SMS and GHZ are this card's
    except LookupError:
        return float("nan")
    found = record.medians(record.headline(samples))
    found = found[(found["name"] == stem) & (found["D"] == D) & (found["Nk"] == LENGTH) & (found["dtype"] == "fp16")]
    return took(found["tflops"].iloc[0], D, rows) if len(found) else float("nan")


def draw(frame: pd.DataFrame, title: str) -> Picture:
    """The budget of `table`'s kernels as a figure, its numbers in words beside it."""
    long = (
        frame.drop(columns="took")
        .rename_axis("kernel")
        .reset_index()
        .melt("kernel", var_name="unit", value_name="clocks")
    )
    return budget.units(long, title, words(frame), frame["took"].dropna().to_dict())


def words(frame: pd.DataFrame) -> str:
    """`table`'s numbers in a sentence for each kernel."""
    sentences = []
    for name, row in frame.iterrows():
        units = ", ".join(f"{unit} {row[unit]:.0f}" for unit in budget.UNITS)
        took = f"; it took {row['took']:.0f}" if row["took"] == row["took"] else ""
        sentences.append(f"{name}: clocks of {units}; the longest is {row[list(budget.UNITS)].idxmax()}{took}.")
    return " ".join(sentences)


def stalls(stems: Sequence[str], D: int, device: str | None = None) -> Picture:
    """Why the warps of these rungs wait, as recorded: a strip for each. LookupError where one has no `stalls` record."""
    samples = pd.concat([record.load(stem, "stalls", device) for stem in stems], ignore_index=True)
    samples = samples[samples["D"] == D]
    card, N = samples["device"].iloc[0], samples["N"].iloc[0]
    old = " (stale)" if samples["stale"].any() else ""
    table = reasons.by_reason(samples, "rung")
    return reasons.strips(table, f"Between two instructions of a warp, d = {D}, N = {N}, fp16 · {card}{old}")


def drafts(numbers: Sequence[int] | None = None) -> pd.DataFrame:
    """The recorded drafts of 13 for `drawings.mma.dots`, those of these numbers or all, 12 first: label, D, ratio (SDPA FLASH's time
    over theirs, fp16), kept; and also, what else sets a draft apart beside what its label says."""
    steps = record.load("13_tuned", "steps", record.SHOWN)
    if numbers is not None:
        steps = steps[steps["step"].isin(numbers)]
    rung_12 = record.load("12_double_buffered", device=record.SHOWN)
    before = record.summary(rung_12[rung_12["dtype"] == "fp16"], "12_double_buffered", record.FLASH)
    rows = [("12_double_buffered", row.D, row.mean, True, "") for row in before.itertuples()]
    also = {
        number: "; ".join(_also(row) for row in part.itertuples() if _also(row))
        for number, part in steps.groupby("step")
    }
    for row in steps.sort_values(["step", "D"]).itertuples():
        label = f"{row.step} · {row.what}" + (f" (also {also[row.step]})" if also[row.step] else "")
        rows.append((label, row.D, row.ratio, stays(row.kept, row.D), _also(row)))
    return pd.DataFrame(rows, columns=["label", "D", "ratio", "kept", "also"])


def _also(row: Any) -> str:
    """How a draft differs from the one before beyond its name, by what its code counts."""
    found = []
    if row.D == 128 and row.LDGSTS == 8 and "32 keys" not in row.what and "8 warps" not in row.what:
        found.append("32 keys per tile")
    if row.FADD <= 16 and "row sums" not in row.what:
        found.append("row sums by mma.sync")
    return f"at D = {row.D}: {', '.join(found)}" if found else ""
