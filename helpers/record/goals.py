"""What each rung is meant to reach on an H200, beside what its records say; `python -m helpers goals` prints both.

A goal is a ratio, a peer's time over the rung's unless said otherwise: a geometric mean over the headline shapes with
N >= 1024, every dtype and both head dimensions, with the worst shape beside it. No torch and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .. import record
from .workload import CUDNN, EFFICIENT, FLASH, FROM_N, MATH


@dataclass(frozen=True)
class Goal:
    """`rung` against `peer` in its record of `kind`: at least `goal`, and in no case below `floor`. only: which of the samples
    count, a pandas query; N: this length alone."""

    rung: str
    kind: str
    peer: str
    goal: float
    floor: float
    only: str = ""
    N: int | None = None

    def points(self, root: Path = record.DATA) -> pd.Series:
        """The ratio at each shape that counts. LookupError where nothing of the kind is recorded."""
        samples = record.load(self.rung, self.kind, record.DEFAULT_DEVICE, root)
        samples = samples.query(self.only) if self.only else samples
        if self.kind == "groups":
            return record.grouped(samples, self.rung)["ratio"]
        if self.kind == "packed":
            return record.ratio_to_ideal(samples)["ratio"]
        if self.kind == "matmul":
            return record.ratio_to_cublas(samples, self.rung)["ratio"]
        if self.kind == "decode":
            table = record.bandwidths(samples)
            column = {"copy": "of_copy", FLASH: "to_flash"}[self.peer]
            return table.groupby(["dtype", *record.SHAPE, "Hkv"])[column].max()  # at the best number of splits
        ratios = record.ratio(record.headline(samples), self.rung, self.peer)
        return ratios.loc[ratios["Nk"].eq(self.N) if self.N else ratios["Nk"] >= FROM_N, "ratio"]


GOALS = [
    Goal("02_online_softmax", "forward", "torch.softmax", 1.0, 0.95),
    Goal("02_online_softmax", "forward", "copy", 0.85, 0.85),
    Goal("03_fa1_fp32", "forward", MATH, 0.15, 0.1),
    Goal("04_fa2_fp32", "forward", MATH, 1.5, 1.0),
    Goal("04_fa2_fp32", "forward", EFFICIENT, 1.0, 0.7),
    Goal("10_fa2_mma_fp16", "forward", FLASH, 0.25, 0.15),
    Goal("11_swizzled", "forward", FLASH, 0.65, 0.55),
    Goal("12_double_buffered", "forward", FLASH, 0.90, 0.80),
    Goal("13_tuned", "forward", FLASH, 1.10, 1.0, "D == 64"),
    Goal("13_tuned", "forward", FLASH, 1.20, 1.10, "D == 128"),
    Goal("20_causal_gqa", "causal", FLASH, 1.20, 1.0),
    Goal("20_causal_gqa", "groups", "as many heads", 0.98, 0.98),
    Goal("20_causal_gqa", "packed", "ideal", 0.90, 0.90),
    Goal("21_split_kv", "decode", "copy", 0.85, 0.75),
    Goal("21_split_kv", "decode", FLASH, 1.5, 1.0),
    Goal("22_backward_fp32", "backward", MATH, 1.0, 0.8),
    Goal("23_backward_mma", "backward", FLASH, 1.05, 0.95, "causal == 0"),
    Goal("23_backward_mma", "backward", FLASH, 1.05, 0.95, "causal == 1"),
    Goal("30_tma_wgmma", "forward", FLASH, 1.4, 1.25),
    Goal("30_tma_wgmma", "causal", FLASH, 1.4, 1.25),
    Goal("30_tma_wgmma", "forward", CUDNN, 0.75, 0.65),
    Goal("30_tma_wgmma", "causal", CUDNN, 0.75, 0.65),
    Goal("31_warp_specialized", "forward", CUDNN, 0.95, 0.85),
    Goal("31_warp_specialized", "causal", CUDNN, 0.95, 0.85),
    Goal("32_ping_pong", "forward", CUDNN, 1.15, 1.05, "D == 64"),
    Goal("32_ping_pong", "forward", CUDNN, 1.10, 1.05, "D == 128"),
    Goal("32_ping_pong", "causal", CUDNN, 1.15, 1.05, "D == 64"),
    Goal("32_ping_pong", "causal", CUDNN, 1.10, 1.05, "D == 128"),
    Goal("32_ping_pong", "forward", CUDNN, 0.90, 0.90, N=512),
    Goal("32_ping_pong", "causal", CUDNN, 0.90, 0.90, N=512),
    Goal("32_ping_pong", "matmul", record.CUBLAS, 0.85, 0.85, "causal == 0"),
    Goal("33_backward_wgmma", "backward", CUDNN, 1.10, 0.95, "causal == 0"),
    Goal("33_backward_wgmma", "backward", CUDNN, 1.10, 0.95, "causal == 1"),
]


def verdicts(stems: Sequence[str] = (), root: Path = record.DATA) -> pd.DataFrame:
    """A row per goal (of these rungs; of all): rung, what, goal, floor, mean, worst, verdict: "reached", "above the floor",
    "missed", or "not recorded"."""
    rows = []
    for goal in GOALS:
        if stems and goal.rung not in stems:
            continue
        what = " ".join(filter(None, [goal.kind, "×", goal.peer, goal.only, goal.N and f"N == {goal.N}"]))
        row = {"rung": goal.rung, "what": what, "goal": goal.goal, "floor": goal.floor, "verdict": "not recorded"}
        try:
            points = goal.points(root).dropna()
        except LookupError:
            points = pd.Series(dtype=float)
        if len(points):
            mean = record.geometric_mean(points)
            reached = "reached" if mean >= goal.goal else "above the floor" if mean >= goal.floor else "missed"
            row |= {"mean": round(mean, 3), "worst": round(points.min(), 3), "verdict": reached}
        rows.append(row)
    return pd.DataFrame(rows, columns=["rung", "what", "goal", "floor", "mean", "worst", "verdict"])
