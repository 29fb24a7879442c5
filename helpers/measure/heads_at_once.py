"""How many heads at once: rung 20 under a causal mask, its heads taken one at a time, as many as 32 MiB of keys and values belong to (as
the rung does), other shares of the L2, and all of them side by side. `python -m helpers record at_once` records it, on a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace

import pandas as pd

from ..ladder.instances import single
from ..ladder.rung import Rung
from ..record import SHAPE
from ..record.workload import TOKENS, WIDTH
from . import bench, workloads

STEM, DTYPE = "20_causal_gqa", "fp16"
SHARE = "(a.causal ? 32 : 12) << 20"  # bytes of keys and values, in the rung's launcher
MIB = (0, 8, 16, 32, 64, 1 << 20)  # 0: one head at a time; the last: all heads
LENGTHS = (4096, 16384)
BURST_MS = 10.0


def variant(mib: int, D: int) -> Rung:
    """The rung for one D in fp16 with another share of the L2."""

    one = single(STEM, D, DTYPE)
    return replace(one, source=one.replace(SHARE, f"int64_t({mib}) << 20"))


def timings() -> pd.DataFrame:
    """name, mib (of keys and values that may be at work at once), dtype, causal, B H Nq Nk D, round, ms, and what the sensors show."""
    import torch

    from ..run.kernel import load

    wanted = [(mib, D) for D in (64, 128) for mib in MIB]
    kernels = {which: load(variant(*which), device=bench.DEVICE, quiet=True) for which in wanted}
    frames = []
    for D in (64, 128):
        for N in LENGTHS:
            B, H, *_ = shape = (TOKENS // N, WIDTH // D, N, N, D)
            given = workloads.random_tensors(DTYPE, (B, H, N, D), 3)
            calls = {mib: functools.partial(kernels[mib, D], causal=True) for mib in MIB}
            frame = bench.measure(calls, given, burst_ms=BURST_MS).rename(columns={"name": "mib"})
            frames.append(frame.assign(name=STEM, dtype=DTYPE, causal=1, **dict(zip(SHAPE, shape, strict=True))))
            del given
            torch.cuda.empty_cache()
    return workloads.joined(frames, ["name", "mib", "dtype", "causal", *SHAPE, "round", "ms"])


def record_at_once() -> None:
    """Records `timings` and prints their medians. The variants have the rung's code but for one number, and are not checked again."""
    from .. import record

    frame = timings()
    path = record.save(STEM, "at_once", frame)
    print(frame.groupby(["D", "Nk", "mib"])["ms"].median().unstack("mib").round(4).to_string(), flush=True)
    print("  wrote", path.name, flush=True)
