"""The X-ray's counts beside the hardware's: every rung, and every kernel of one access.

`rungs()` and `singles()` give a row per kernel and counter: what the X-ray counts now, what Nsight Compute counted when
the record was made (data/), their difference, and why they differ where they do. A reason comes with a number: it explains
a rung's difference if that is what it is, to the digit, and no other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from .. import record
from ..emulator.banks import LINE, SECTOR
from ..emulator.trace import Access, Trace
from ..ladder import rung as ladder
from . import patterns
from .patterns import Pattern

if TYPE_CHECKING:
    import pandas as pd

SIZES = [(1, 2, 256, 64), (1, 2, 256, 128)]  # B, H, N, D: the recorded sizes that the emulator counts in a second


def counters(accesses: Iterable[Access]) -> dict[str, int]:
    """What ncu would count for these accesses, under the names of helpers/evidence/counters.py.

    They are of the pipe that loads, stores, ldmatrix and cp.async go through (LSU). What TMA moves and what wgmma reads goes
    past it and is in none of them; nor are mbarriers, and atomics on global memory.
    """
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
        if "async.bulk" in a.op:
            continue
        name = {"cp.async": "async_copy", "atomic": "atomic", "store": "shared_store", "stmatrix": "shared_store"}
        kind = name.get(a.op, "shared_load")  # ncu's shared loads are those of ldmatrix too
        found[f"{kind}_wavefronts"] += a.cost
        found[f"{kind}_conflicts"] += a.cost - a.ideal
        if a.op != "stmatrix":  # no counter has its instructions
            found["ldmatrix_instructions" if a.op == "ldmatrix" else f"{kind}_instructions"] += a.requests
    return found


def _beside(name: str, kernel: str, ours: dict[str, int], theirs: pd.Series, D: int = 0) -> list[dict]:
    import pandas as pd

    known = {metric: int(theirs[metric]) for metric in ours if metric in theirs and not pd.isna(theirs[metric])}
    rows = []
    for metric, hardware in known.items():
        wavefronts = known.get(metric.replace("conflicts", "wavefronts"), hardware)  # conflicts are some of them
        difference = hardware - ours[metric]
        reason = explain(name, kernel, metric, D, difference, wavefronts) if difference else None
        rest = difference - (reason.by or {}).get(D, 0) if reason else difference
        rows.append(
            {"name": name, "D": D, "kernel": kernel, "metric": metric, "xray": ours[metric], "hardware": hardware}
            | {"difference": difference, "rest": rest, "why": reason.why if reason else ""}
        )
    return rows


def _frame(rows: list[dict]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        rows, columns=["name", "D", "kernel", "metric", "xray", "hardware", "difference", "rest", "why"]
    )


def rungs(device: str | None = None) -> pd.DataFrame:
    """Every rung with recorded counters: a row per CUDA kernel and counter at each of SIZES that was recorded.

    Columns: name (the rung), D, kernel, metric, xray, hardware, difference (hardware − xray), rest (what of it the machine code
    doesn't account for to the digit), why. Wavefronts of kernels that use TMA are left out: beside TMA and wgmma the counter
    isn't one of addresses. In 32_ping_pong, whose loads are of one word for a whole warp and can't take two wavefronts, it has
    1.03 to 1.27 per load, hardly one of them called a conflict.
    """
    rows = []
    for rung in ladder.rungs():
        try:
            table = record.load(rung.stem, "counters", device)
        except LookupError:
            continue
        for size in SIZES:
            for row in table[(table[["B", "H", "N", "D"]] == list(size)).all(axis=1)].to_dict("records"):
                kernel = re.sub(r"^void |<.*", "", row["kernel"])
                ours = [a for a in traced(rung.stem, size).accesses if re.sub(r"<.*", "", a.kernel) == kernel]
                beside_TMA = any("async.bulk" in a.op for a in ours)
                compared = _beside(rung.stem, kernel, counters(ours), row, size[-1])
                rows += [r for r in compared if not (beside_TMA and r["metric"].endswith("_wavefronts"))]
    return _frame(rows)


@cache
def traced(stem: str, size: tuple[int, int, int, int] = SIZES[0]) -> Trace:
    """The rung's trace at (B, H, N, D) = size, in its first dtype."""
    from ..run.reference import random_inputs
    from ..run.xray import xray
    from .counters import options

    rung = ladder.rung(stem)
    B, H, N, D = size
    return xray(rung, *random_inputs(rung, (B, H, N, N, D)), **options(rung)).trace


@cache
def _of_singles(kind: str) -> dict[str, tuple[str, dict[str, int]]]:
    """Of every kernel of a kind the `__global__` function, and what ncu would count by the X-ray."""
    from ..ladder.contract import prepare
    from ..run.kernel import Kernel
    from .counters import singles as all_of

    made = all_of(kind)
    kernel = Kernel(made.rung, "cpu")
    found = {}
    for name, function, (inputs, scale) in zip(made.names, made.kernels, made.calls, strict=True):
        call = prepare(made.rung, "cpu", inputs, scale=scale)
        found[name] = function, counters(kernel.launcher.trace(call).accesses)
    return found


def singles(kind: str, device: str | None = None) -> pd.DataFrame:
    """Every recorded kernel of one access, of a kind ("patterns", "microkernels"): columns as of `rungs`."""
    table = record.load("device", kind, device).set_index("name")
    if kind == "patterns":
        # The counters of the data pipe have none for the wavefronts of cp.async: they are those of shared memory that nothing
        # else accounts for. The kernel has four more: one at the start of every warp, and three loads that no lane executes.
        past_L1 = table.index.str.startswith("copy16g")
        table["async_copy_wavefronts"] = (table["shared_wavefronts"] - 4).where(
            table["kernel"].str.contains("copy") & ~past_L1
        )
    rows = []
    for name, (function, ours) in _of_singles(kind).items():
        if name in table.index:
            rows += _beside(name, function, ours, table.loc[name])
    return _frame(rows)


def copies(device: str | None = None) -> pd.DataFrame:
    """Every recorded cp.async whose counters are those of its instruction, which see cp.async.cg too: columns as of `rungs`.

    xray is the X-ray's count, and of a cp.async.cg's wavefronts with those added in which what comes from the L2 is written."""
    table, ours = record.load("device", "async", device), _of_singles("patterns")
    every = {pattern.name: pattern for pattern in patterns.patterns()}
    rows = []
    for row in table.to_dict("records"):
        pattern, counted = every[row["name"]], ours[row["name"]][1]
        past_L1 = pattern.op == "copy16g"
        pieces, further = written_from_L2(pattern) if past_L1 else (_sectors(pattern), 0)
        expected = {"conflicts": counted["async_copy_conflicts"], "sectors": pieces}
        expected["wavefronts"] = counted["async_copy_wavefronts"] + further
        rows += _beside(pattern.name, "cp.async.cg" if past_L1 else "cp.async.ca", expected, row)
    return _frame(rows)


def _sectors(pattern: Pattern) -> int:
    return len({source // SECTOR for source, to in zip(_sources(pattern), pattern.to, strict=True) if to is not None})


def _sources(pattern: Pattern) -> list[int]:
    """Where each lane of a cp.async reads from (0 where it takes no part)."""
    own = pattern.source or [lane * pattern.width for lane in range(32)]
    return [source or 0 for source in own]


def written_from_L2(pattern: Pattern) -> tuple[int, int]:
    """How what a cp.async.cg asks of the L2 is written to shared memory: how many pieces of it move, in how many wavefronts.

    Number the 16 bytes of lines and of rows of shared memory from 0 to 7: a lane moves number s to number d. Where lanes have
    one destination, the lowest counts. Neighbours that move alike from one sector of 32 bytes to another are one piece (zeros
    make pieces too, but none that move). One wavefront writes pieces

    - of one line, to one row;
    - that fill the same halves of their sectors: both, the lower ones or the upper ones;
    - whose s ^ d are the same in the two lower bits, and the same in the third among all of the line's even sectors, and
      among all of its odd ones.
    """
    halves: dict[tuple, int] = defaultdict(int)  # of each piece: (sector from, sector to, swapped) -> of the latter
    moving, taken = set(), set()
    for lane, (source, to) in enumerate(zip(_sources(pattern), pattern.to, strict=True)):
        if to is None or to in taken:
            continue
        taken.add(to)
        s, d = source // 16, to // 16
        piece = s // 2, d // 2, (s ^ d) & 1
        halves[piece] |= 1 << d % 2
        if pattern.read is None or pattern.read[lane]:
            moving.add(piece)
    alike: dict[tuple, set] = defaultdict(set)  # of pieces that may share wavefronts: (odd sector, third bit)
    for (s, d, swapped), half in halves.items():
        alike[s // 4, d // 4, half, swapped, (s ^ d) & 1].add((s & 1, (s ^ d) & 2))
    return len(moving), sum(max(Counter(odd for odd, _ in ways).values()) for ways in alike.values())


def asked_of_L2(pattern: Pattern) -> int:
    """How many sectors a cp.async.cg asks the L2 for: each 32 bytes of its destination, once for every line of 128 bytes that
    they come from. What is filled with zeros, or overwritten by a later lane, is not asked for."""
    source = pattern.source or tuple(lane * pattern.width for lane in range(32))
    last = {to: lane for lane, to in enumerate(pattern.to) if to is not None}
    reads = [lane for lane in last.values() if pattern.read is None or pattern.read[lane]]
    return len({(source[lane] // LINE, pattern.to[lane] // SECTOR) for lane in reads})


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Per name: how many counters there are and how many are equal, their sum on both sides; and in percent of the hardware's
    sum: all differences, their rest beside what the machine code accounts for, and what nobody has explained."""
    frame = frame.assign(equal=frame["difference"] == 0, off=frame["difference"].abs(), rest=frame["rest"].abs())
    frame["unexplained"] = frame["off"].where(frame["why"] == "", 0)
    by_name = frame.groupby("name", sort=False)
    sums = by_name[["xray", "hardware"]].sum()
    sums.insert(0, "counters", by_name.size())
    sums.insert(1, "equal", by_name["equal"].sum())
    for column, what in {"percent": "off", "rest_percent": "rest", "unexplained_percent": "unexplained"}.items():
        sums[column] = 100 * by_name[what].sum() / sums["hardware"]
    return sums


class Reason(NamedTuple):
    """Why the hardware's count isn't the X-ray's. name, kernel and metric: regular expressions, matched in full."""

    name: str
    kernel: str
    metric: str
    why: str
    by: dict[int, int] | None = None  # by head dimension: how much more the hardware counts, to the digit
    timing: tuple[float, float] = (0.0, 0.0)  # what varies besides: from, to, as shares of the hardware's count

    def explains(self, D: int, difference: int, of: int) -> bool:
        """Whether the difference is the one that this is the reason of. Without numbers it is of any."""
        if self.by is None and not any(self.timing):
            return True
        rest = difference - (self.by or {}).get(D, 0)
        return self.timing[0] * of <= rest <= self.timing[1] * of


def explain(name: str, kernel: str, metric: str, D: int, difference: int, of: int) -> Reason | None:
    """Why the hardware's figure isn't the X-ray's, if somebody has said why by so much. of: what `timing` is a share of."""
    for reason in EXPLANATIONS:
        if all(re.fullmatch(pattern, text) for pattern, text in zip(reason, (name, kernel, metric), strict=False)):
            return reason if reason.explains(D, difference, of) else None
    return None


NO_LANE = (
    "nvcc puts three loads that no lane executes (@!PT LDS) before a batch of cp.async: instructions, but no requests"
)
TIMING = (
    "more wavefronts than the addresses ask for, and not the same share at every N, though the addresses are the same: "
    "several warps want the data pipe at once. Kernels of one warp never show it"
)
BESIDE_TMA = (
    "TMA and wgmma want the same shared memory at the same time: another number at every N, with the same addresses"
)
SMALL_STATE = (
    "a State is two loads of 4 bytes in the source (.m, .l), and merge, weight and the division each read it again; nvcc "
    "loads it once"
)
WHOLE_WORK = (
    "what each thread 0 leaves for its CTA, fields of 4 and 8 bytes, nvcc writes and reads in pieces of up to 16"
)


# The first whose names fit has the say. Those of rungs were found in the machine code (helpers/toolchain/sass.py) and counted there.
EXPLANATIONS = [
    Reason(
        "03_fa1_fp32",
        "fa1_fp32",
        "global_store_requests",
        "nvcc cuts each 16-byte store of zeros before the loop into two of 8 (STG.E.64)",
        {64: 256},
    ),
    Reason(
        "03_fa1_fp32",
        "fa1_fp32",
        "global_store_sectors",
        "nvcc cuts each 16-byte store of zeros before the loop into two of 8 (STG.E.64): both touch all of its 16 sectors",
        {64: 256 * 16},
    ),
    Reason(
        "04_fa2_fp32",
        "fa2_fp32",
        "global_store_requests",
        "nvcc cuts half of the 16-byte stores of O (128 requests) into four of 4 (STG.E)",
        {64: 128 * 3},
    ),
    Reason(
        "04_fa2_fp32",
        "fa2_fp32",
        "global_store_sectors",
        "nvcc cuts half of the 16-byte stores of O (128 requests) into four of 4 (STG.E): each touches all 16 sectors",
        {64: 128 * 3 * 16},
    ),
    Reason("12_double_buffered", "fa2_mma", "shared_load_instructions", NO_LANE, {64: 480, 128: 480}),
    Reason("13_tuned", "fa2_mma", "shared_load_instructions", NO_LANE, {64: 240, 128: 240}),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_load_instructions",
        f"{NO_LANE}, 5 times in each of 16 warps. And the 24 bytes of Work are read in two pieces (LDS.128, LDS), not in three",
        {D: 16 * (5 * 3 + 2 - 3) for D in (64, 128)},
    ),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_store_instructions",
        "thread 0's 24 bytes of Work leave in two pieces (STS.128, STS.64), not in three; all 16 warps come past them, 12 of "
        "them with no lane that takes part",
        {D: 16 * 2 - 4 * 3 for D in (64, 128)},
    ),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_store_wavefronts",
        "thread 0's 24 bytes of Work leave in two pieces (STS.128, STS.64), not in three",
        {D: 4 * (2 - 3) for D in (64, 128)},
    ),
    Reason(
        "21_split_kv",
        "split_kv",
        "shared_load_instructions",
        f"{SMALL_STATE} (4 LDS.64 for 15 loads). {NO_LANE}, 1 (D = 64) or 3 (D = 128) times in each of 512 warps",
        {64: 1024 * (4 - 15) + 512 * 3, 128: 2048 * (4 - 15) + 512 * 9},
    ),
    Reason(
        "21_split_kv",
        "split_kv",
        "shared_load_wavefronts",
        f"{SMALL_STATE} (4 LDS.64 for 15 loads)",
        {64: 1024 * (4 - 15), 128: 2048 * (4 - 15)},
        (0.0, 0.005),
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "shared_load_instructions",
        f"{SMALL_STATE}, two of them at a time (LDS.128): 1 + 3 loads for 14 (D = 64), 1 + 1 for 6 (D = 128), in 512 warps",
        {64: 512 * (4 - 14), 128: 512 * (2 - 6)},
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "shared_load_wavefronts",
        f"{SMALL_STATE}, two of them at a time (LDS.128), which for all 32 lanes (D = 128) takes two wavefronts",
        {64: 512 * (4 - 14), 128: 512 * (3 - 6)},
        (0.0, 0.01),
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "global_store_requests",
        "nvcc cuts the 8-byte store of O into two of 4 (STG.E)",
        {64: 512, 128: 512},
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "global_store_sectors",
        "nvcc cuts the 8-byte store of O into two of 4 (STG.E): both touch all of its sectors, 4 or 8",
        {64: 512 * 4, 128: 512 * 8},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_load_instructions",
        f"{NO_LANE}: 5888, with those that stand for fences. {WHOLE_WORK}: 320 fewer; and the 8 LSE of a thread come in two "
        "loads (LDS.128): 384 fewer",
        {64: 5888 - 320 - 384},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_load_wavefronts",
        f"{WHOLE_WORK}: 320 fewer, and 48 that are loaded for the last step only. The 8 LSE of a thread come in two loads "
        "(LDS.128) of two wavefronts: 256 fewer",
        {64: -320 - 48 - 256},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_store_(instructions|wavefronts)",
        f"{WHOLE_WORK}: 4 stores instead of 6 in 4 CTAs",
        {64: 4 * (4 - 6)},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "async_copy_conflicts",
        "the counter depends on when the lines arrive: it is off by -10 %, 0 and 1 % at N = 256, 1024 and 4096, where every step "
        "has the same addresses",
        timing=(-0.12, 0.02),
    ),
    Reason(
        "23_backward_mma",
        "backward_mma",
        "shared_load_instructions",
        f"{NO_LANE}: once in each warp, in each step of it, and in each step of the warp that fetches LSE and delta",
        {64: 3 * (16 + 64 + 16), 128: 3 * (32 + 128 + 16)},
    ),
    Reason(
        "32_ping_pong",
        "ping_pong",
        "shared_store_instructions",
        "stores of votes that no lane executes (@!P0 STS): at the beginning one in each warp but the first of a CTA, and "
        "one in each turn whose P stands",
        {64: 60 + 32, 128: 44 + 32},
    ),
    Reason("33_backward_wgmma", "backward_wgmma", "shared_store_conflicts", BESIDE_TMA, timing=(0.0, 0.05)),
    Reason("3[0-9]_.*", ".*", "shared_(load|store)_conflicts", BESIDE_TMA, timing=(0.0, 0.03)),
    Reason(r"[012]\d_.*", ".*", "shared_(load|store)_(wavefronts|conflicts)", TIMING, timing=(0.0, 0.015)),
    Reason("copy.*", "copy|micro_copy.*", "shared_load_instructions", NO_LANE),
    Reason(
        "copy16: both ends .*",
        "cp.async.ca",
        "conflicts|wavefronts",
        "the instruction's counter doesn't count how long lanes queue, as the data pipe's does, but how many share a bank with one of them",
    ),
    Reason(
        "copy16g: all zeros from stride 128",
        "cp.async.cg",
        "wavefronts",
        "zeros take turns by the places that they would come from, though nobody reads there; the counter of conflicts leaves "
        "that out, as the X-ray does",
        {0: 28},
    ),
    Reason(
        "copy16g.*",
        "copy",
        "global_load_sectors",
        "cp.async.cg asks the L2 for each 32 bytes of its destination, once for every line of 128 bytes that they come from; "
        "for what another lane overwrites it doesn't ask",
    ),
    Reason(
        "copy.*",
        "copy",
        "global_load_sectors",
        "nvcc reads the second and third number of a lane's row only for lanes that take part",
    ),
    Reason(
        "copy16g.*",
        "copy",
        "async_copy_conflicts",
        "this counter doesn't see cp.async.cg, except zeros; the one of instructions does (device.async.csv)",
    ),
    Reason(
        "copy.*",
        "copy|micro_copy.*",
        "async_copy_conflicts",
        "the counter allows a wavefront for every four lines of the source, and one for zeros, before it calls it a conflict",
    ),
    Reason(
        "(store|atomic).*",
        "micro_.*",
        "shared_load_instructions",
        "a load that no lane executes (its condition is false for all) is an instruction, but no request",
    ),
    Reason(
        "atomic_one_word", ".*", "atomic_.*", "nvcc adds up the lanes' numbers first and lets one lane do the atomic"
    ),
    Reason("two_branches", ".*", ".*", "nvcc makes one load, and one store, of those of the two branches"),
    Reason("half_warps_that_sync", ".*", "global_store_requests", "nvcc makes one store of those of the two branches"),
    Reason(
        "trips_by_lane",
        ".*",
        "shared_load_.*",
        "nvcc unrolls the loop, and lanes with different numbers of trips no longer meet in each load",
    ),
    Reason(
        "loop_in_a_loop",
        ".*",
        "shared_load_instructions",
        "nvcc peels a load off the loop that no lane executes: an instruction, but no request",
    ),
]
