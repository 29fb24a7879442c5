"""The X-ray's counts beside the hardware's: every rung, and every kernel of one access.

`rungs()` and `singles()` give a row per kernel and counter: what the X-ray counts now, what Nsight Compute counted when
the record was made (data/), their difference, and why they differ where they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from . import ladder, record
from .emulator.trace import Access, Trace

if TYPE_CHECKING:
    import pandas as pd

SIZE = (1, 2, 256, 64)  # B, H, N, D: the recorded size that the emulator counts in a second


def counters(accesses: Iterable[Access]) -> dict[str, int]:
    """What ncu would count for these accesses, under the names of helpers/counters.py."""
    found = dict.fromkeys(
        [f"global_{op}_{what}" for op in ("load", "store") for what in ("requests", "sectors")]
        + [f"shared_{op}_{what}" for op in ("load", "store") for what in ("instructions", "wavefronts", "conflicts")]
        + ["ldmatrix_instructions"]
        + [f"async_copy_{what}" for what in ("instructions", "wavefronts", "conflicts")]
        + [f"atomic_{what}" for what in ("instructions", "wavefronts", "conflicts")],
        0,
    )
    for a in accesses:
        if a.space == "global":
            if a.op in ("load", "store"):
                found[f"global_{a.op}_requests"] += a.requests
                found[f"global_{a.op}_sectors"] += a.cost
            continue
        name = {"cp.async": "async_copy", "atomic": "atomic", "store": "shared_store", "stmatrix": "shared_store"}
        kind = name.get(a.op, "shared_load")  # ncu's shared loads are those of ldmatrix too
        found[f"{kind}_wavefronts"] += a.cost
        found[f"{kind}_conflicts"] += a.cost - a.ideal
        found["ldmatrix_instructions" if a.op == "ldmatrix" else f"{kind}_instructions"] += a.requests
    return found


def _beside(name: str, kernel: str, ours: dict[str, int], theirs: pd.Series) -> list[dict]:
    import pandas as pd

    return [
        {"name": name, "kernel": kernel, "metric": metric, "xray": count, "hardware": int(theirs[metric])}
        for metric, count in ours.items()
        if metric in theirs and not pd.isna(theirs[metric])
    ]


def _frame(rows: list[dict]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=["name", "kernel", "metric", "xray", "hardware"])
    frame["difference"] = frame["hardware"] - frame["xray"]
    frame["why"] = [
        explain(row.name, row.kernel, row.metric) if row.difference else "" for row in frame.itertuples(index=False)
    ]
    return frame


def rungs(device: str | None = None) -> pd.DataFrame:
    """Every rung with recorded counters: a row per CUDA kernel and counter at (B, H, N, D) = SIZE.

    Columns: name (the rung), kernel, metric, xray, hardware, difference (hardware − xray), why.
    """
    rows = []
    for rung in ladder.rungs():
        try:
            table = record.load(rung.stem, "counters", device)
        except LookupError:
            continue
        table = table[(table[["B", "H", "N", "D"]] == list(SIZE)).all(axis=1)]
        trace = traced(rung.stem)
        for row in table.to_dict("records"):
            kernel = re.sub(r"^void |<.*", "", row["kernel"])
            ours = [a for a in trace.accesses if re.sub(r"<.*", "", a.kernel) == kernel]
            rows += _beside(rung.stem, kernel, counters(ours), row)
    return _frame(rows)


@cache
def traced(stem: str) -> Trace:
    """The rung's trace at SIZE, in its first dtype."""
    from .counters import options
    from .reference import random_inputs
    from .xray import xray

    rung = ladder.rung(stem)
    B, H, N, D = SIZE
    return xray(rung, *random_inputs(rung, (B, H, N, N, D)), **options(rung)).trace


def singles(kind: str, device: str | None = None) -> pd.DataFrame:
    """Every recorded kernel of one access, of a kind ("patterns", "microkernels"): columns as of `rungs`."""
    from . import emulator
    from .contract import prepare
    from .counters import singles as all_of
    from .kernel import Kernel

    table, made = record.load("device", kind, device).set_index("name"), all_of(kind)
    if kind == "patterns":
        # ncu has no counter for the wavefronts of cp.async: they are those of shared memory that nothing else accounts
        # for. The kernel has four more: one at the start of every warp, and three loads that no lane executes.
        past_L1 = table.index.str.startswith("copy16g")
        table["async_copy_wavefronts"] = (table["shared_wavefronts"] - 4).where(
            table["kernel"].str.contains("copy") & ~past_L1
        )
    kernel = Kernel(made.rung, "cpu", emulator.load(made.rung, made.rung.source), 0.0)
    rows = []
    for name, function, (inputs, scale) in zip(made.names, made.kernels, made.calls, strict=True):
        if name in table.index:
            call = prepare(made.rung, "cpu", inputs, scale=scale)
            ours = counters(kernel.launcher.trace(call.args, call.tensors).accesses)
            rows += _beside(name, function, ours, table.loc[name])
    return _frame(rows)


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Per name: the counters' sum on both sides, the difference in percent of the hardware's, and that of the part which
    nobody has explained."""
    unexplained = frame[frame["why"] == ""].groupby("name", sort=False)["difference"].agg(lambda d: d.abs().sum())
    sums = frame.groupby("name", sort=False)[["xray", "hardware"]].sum()
    off = frame.assign(off=frame["difference"].abs()).groupby("name", sort=False)["off"].sum()
    sums["percent"] = 100 * off / sums["hardware"]
    sums["unexplained_percent"] = 100 * unexplained.reindex(sums.index, fill_value=0) / sums["hardware"]
    return sums


# (name, kernel, metric, why), each a regular expression matched in full; the first that fits explains a difference.
EXPLANATIONS: list[tuple[str, str, str, str]] = [
    (
        "04_fa2_fp32",
        "fa2_fp32",
        "shared_load_(wavefronts|conflicts)",
        "two in 98306 requests take a second wavefront, at longer N up to 2 in 10000: the addresses are the same in all",
    ),
    (
        "copy.*|1[2-9]_.*",
        ".*copy.*|fa2_mma.*",
        "shared_load_instructions",
        "nvcc puts loads that no lane executes (@!PT LDS) before a cp.async: instructions, but no requests",
    ),
    (
        "copy16g.*",
        "copy",
        "global_load_sectors",
        "cp.async.cg asks the L2 for each 32 bytes of its destination, and once more where they come from two lines of "
        "128 bytes: lanes that another lane overwrites are never read, and scattered destinations read a sector twice",
    ),
    (
        "copy.*",
        "copy",
        "global_load_sectors",
        "nvcc reads the second and third number of a lane's row only for lanes that take part",
    ),
    (
        "copy16g.*",
        "copy",
        "async_copy_conflicts",
        "what cp.async.cg writes on its way from the L2 is not counted, except zeros",
    ),
    (
        "copy.*",
        ".*copy.*",
        "async_copy_conflicts",
        "the counter allows a wavefront for every four lines of the source, and one for zeros, before it calls it a conflict",
    ),
    (
        "(store|atomic).*",
        "micro_.*",
        "shared_load_instructions",
        "a load that no lane executes (its condition is false for all) is an instruction, but no request",
    ),
    ("atomic_one_word", ".*", "atomic_.*", "nvcc adds up the lanes' numbers first and lets one lane do the atomic"),
    ("two_branches", ".*", ".*", "nvcc makes one load, and one store, of those of the two branches"),
    ("half_warps_that_sync", ".*", "global_store_requests", "nvcc makes one store of those of the two branches"),
    (
        "trips_by_lane",
        ".*",
        "shared_load_.*",
        "nvcc unrolls the loop, and lanes with different numbers of trips no longer meet in each load",
    ),
    (
        "loop_in_a_loop",
        ".*",
        "shared_load_instructions",
        "nvcc peels a load off the loop that no lane executes: an instruction, but no request",
    ),
    (
        "03_fa1_fp32",
        "fa1_fp32",
        "global_store_(requests|sectors)",
        "nvcc cuts each 16-byte store of zeros before the loop into two of 8 (STG.E.64): both touch all of its sectors",
    ),
    (
        "04_fa2_fp32",
        "fa2_fp32",
        "global_store_(requests|sectors)",
        "nvcc cuts half of the 16-byte stores of O into four of 4 (STG.E): each touches all of the store's sectors",
    ),
]


def explain(name: str, kernel: str, metric: str) -> str:
    """Why the hardware's figure isn't the X-ray's; empty if nobody has said."""
    for *fits, why in EXPLANATIONS:
        if all(re.fullmatch(pattern, text) for pattern, text in zip(fits, (name, kernel, metric))):
            return why
    return ""
