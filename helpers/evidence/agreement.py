"""The X-ray's counts beside the hardware's: every rung, and every kernel of one access.

`rungs()` and `singles()` give a row per kernel and counter: what the X-ray counts now, what Nsight Compute counted when
the record was made (data/), their difference, and why they differ where they do. A reason comes with a number, and explains a
difference that is it, to the digit; or, where timing or addresses let it vary, with a range, which the difference has to lie in.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from .. import record
from ..emulator.banks import SECTOR
from ..emulator.trace import Access, Trace
from ..ladder import rung as ladder
from . import patterns
from .patterns import Pattern
from .reasons import explain

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
    more than one per load (notebook 92 shows how many), hardly one of them called a conflict.
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
