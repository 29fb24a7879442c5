"""Why the warps of a rung wait, by Nsight Compute: cycles per issued instruction, by reason.

`python -m helpers record stalls 10 11 12 13` profiles one call of each in one process, on the headline workload at N = 4096. Hardware
counters, not samples of the program counter. Needs a GPU whose counters may be read.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import pandas as pd

from ..ladder.rung import rung
from ..record.workload import TOKENS, WIDTH, N
from . import counters

METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active"
# Of compute capability 9.0 (Nsight Compute, section "Warp State Statistics"). What a GPU lists is asked for; these where it lists none.
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait",
)  # fmt: skip
WORK = {
    "warps": "smsp__warps_active.avg.per_cycle_active",  # of one scheduler
    "instructions": "smsp__inst_issued.sum",  # all warps of all SMs
    "duration_ns": "gpu__time_duration.sum",
}
SIZES = tuple((TOKENS // N, WIDTH // D, N, D) for D in (64, 128))  # B, H, N, D
DTYPE = "fp16"


def reasons() -> tuple[str, ...]:
    """The reasons that this machine's ncu knows of its GPU."""
    done = subprocess.run([counters.find_ncu(), "--query-metrics"], capture_output=True, text=True)
    listed = re.findall("^" + METRIC.format(r"(\w+?)") + r"\b", done.stdout, re.MULTILINE)
    return tuple(dict.fromkeys(listed)) or REASONS


def profile(stems: Sequence[str]) -> pd.DataFrame:
    """Why the warps of these rungs wait, at every one of SIZES: stem, dtype, B H N D, kernel, reason, cycles (of a warp per instruction
    that its scheduler issues), and on every row of a launch `WORK`.

    RuntimeError with ncu's own words if the counters can't be read, and where ncu saw other launches than one for each size.
    """
    known = reasons()
    metrics = {reason: f"{METRIC.format(reason)}.ratio" for reason in known} | WORK
    table = counters.counted(metrics, f"call_stalled({list(stems)!r})", ", ".join(stems), __name__)
    calls = [(stem, DTYPE, *size) for stem in stems for size in SIZES]
    if len(table) != len(calls):
        raise RuntimeError(f"ncu profiled {len(table)} launches of {', '.join(stems)}; there are {len(calls)}")
    rows = []
    for call, (_, launch) in zip(calls, table.iterrows(), strict=True):
        found = {name: pd.to_numeric(launch.get(metric), errors="coerce") for name, metric in metrics.items()}
        kernel, work = re.sub(r"\(.*", "", launch["Kernel Name"]), [found[name] for name in WORK]
        rows += [(*call, kernel, reason, found[reason], *work) for reason in known if pd.notna(found[reason])]
    frame = pd.DataFrame(rows, columns=["stem", "dtype", *"BHND", "kernel", "reason", "cycles", *WORK])
    if missing := set(stems) - set(frame["stem"]):
        raise RuntimeError(f"ncu told no reason for {', '.join(sorted(missing))}: {', '.join(metrics.values())}")
    return frame


def call_stalled(stems: Sequence[str]) -> None:
    """Runs each rung at each of SIZES, once outside and once inside the profiled range."""
    import torch

    from ..run.kernel import load
    from ..run.reference import random_inputs

    for stem in stems:
        kernel = load(stem, device="cuda", quiet=True)
        for B, H, length, D in SIZES:
            inputs = random_inputs(kernel.rung, (B, H, length, length, D), DTYPE, device="cuda")
            kernel(*inputs)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            kernel(*inputs)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def record_stalls(stems: Sequence[str]) -> None:
    """Profiles rungs of the forward pass on 16-bit inputs that launch one kernel, and records each.

    ValueError for another kind of rung; RuntimeError with ncu's own words if it can't.
    """
    from .. import record
    from ..run.kernel import load

    if other := [
        s for s in stems if rung(s).op != "attention" or DTYPE not in rung(s).dtypes or "splits" in rung(s).features
    ]:
        raise ValueError(f"stalls are of forward passes on 16-bit inputs in one launch, not of {', '.join(other)}")
    for stem in stems:
        load(stem, device="cuda", quiet=True)  # compiles it: under ncu that would take longer
    frame = profile(stems)
    for stem, rows in frame.groupby("stem", sort=False):
        record.save(
            stem, "stalls", rows.drop(columns="stem"), extra={"unit": "cycles of a warp per issued instruction"}
        )
        print(rows.pivot(index="reason", columns="D", values="cycles").round(2).to_string(), flush=True)
        print(f"{stem}: {rows['D'].nunique()} launches profiled", flush=True)
