"""What each rung is meant to reach on an H100 or H200, beside what its records say; `python -m helpers goals` prints both.

A goal is a ratio, a peer's time over the rung's unless said otherwise: a geometric mean over the headline shapes with
N >= 1024, every dtype and both head dimensions, with the worst shape beside it. In `layouts` (both layouts of memory, as many heads
of K and V or a quarter) N = 1000 counts, too. By family (kinds `families`, and `accuracy`, where
the ratio is that of the errors) the mean of each family, head dimension, mask and output has to reach the goal: the least of them is
shown. Notebook 40's languages are no rungs, but have goals, too. A peer that isn't in the record leaves its goals not recorded. No torch and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .. import record
from .workload import CUDNN, EFFICIENT, FA3, FA4, FLASH, FROM_N, MATH

BY = ["family", "D", "causal"]
FOUR = [f"D == {D} and causal == {causal}" for D in (64, 128) for causal in (0, 1)]
# An error may be 1.1 times as large as SDPA FLASH's, that of a gradient 1.05 times.
ERROR = round(1 / 1.1, 3)
GRADIENTS = round(1 / 1.05, 3)


@dataclass(frozen=True)
class Goal:
    """`rung` against `peer` in its record of `kind`: the mean reaches `goal`, or at least `floor`, whatever the worst shape is. only:
    which of the samples count, a pandas query; N: this length alone."""

    rung: str
    kind: str
    peer: str
    goal: float
    floor: float
    only: str = ""
    N: int | None = None

    def mean(self, points: pd.Series) -> float:
        """The geometric mean of `points`; by family the least of the families, head dimensions, masks and outputs."""
        by_family = self.kind in ("families", "accuracy")
        groups = points.groupby(level=points.index.names) if by_family else [("", points)]
        return min(record.geometric_mean(part) for _, part in groups)

    def points(self, root: Path = record.DATA, device: str = record.SHOWN) -> pd.Series:
        """The ratio at each shape that counts. LookupError where nothing of the kind is recorded."""
        samples = record.load(self.rung, self.kind, device, root)
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
        if self.kind == "timings":
            if samples.empty:
                raise LookupError(f"no timings of {self.only}")
            ratios = record.ratio_of_language(samples, samples["language"].iloc[0])
            return ratios.loc[ratios["Nk"] >= FROM_N, "ratio"]
        if self.kind == "families":
            return record.ratio(samples, self.rung, self.peer).set_index(BY)["ratio"]
        if self.kind == "accuracy":
            return record.ratio_of_errors(samples, self.rung, self.peer).set_index([*BY, "output"])["ratio"]
        samples = samples if self.kind == "layouts" else record.headline(samples)
        ratios = record.ratio(samples, self.rung, self.peer)
        long = ratios["Nk"] >= (1000 if self.kind == "layouts" else FROM_N)
        return ratios.loc[ratios["Nk"].eq(self.N) if self.N else long, "ratio"]


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
    *(Goal("32_ping_pong", "layouts", FA3, 1.05, 1.0, four) for four in FOUR),
    *(Goal("32_ping_pong", "layouts", FA4, 1.08, 1.05, four) for four in FOUR),
    *(
        Goal("32_ping_pong", "layouts", peer, 1.0, 1.0, f"causal == {c}", 512)
        for c in (0, 1)
        for peer in (CUDNN, FA3, FA4)
    ),
    Goal("32_ping_pong", "matmul", record.CUBLAS, 0.95, 0.85, "causal == 0"),
    Goal("33_backward_wgmma", "backward", CUDNN, 1.10, 0.95, "causal == 0"),
    Goal("33_backward_wgmma", "backward", CUDNN, 1.10, 0.95, "causal == 1"),
    *(Goal("33_backward_wgmma", "layouts", peer, 1.03, 0.98, four) for peer in (FA3, FA4) for four in FOUR),
    *(Goal("33_backward_wgmma", "layouts", peer, 1.0, 1.0, N=512) for peer in (CUDNN, FA3, FA4)),
    Goal("13_tuned", "families", FLASH, 1.0, 1.0),
    Goal("13_tuned", "families", "12_double_buffered", 1.0, 1.0),
    Goal("20_causal_gqa", "families", FLASH, 1.0, 1.0),
    Goal("20_causal_gqa", "families", "13_tuned", 1.0, 1.0),
    Goal("23_backward_mma", "families", FLASH, 1.0, 1.0),
    Goal("32_ping_pong", "families", CUDNN, 1.0, 1.0),
    Goal("32_ping_pong", "families", FA3, 0.97, 0.97),
    Goal("33_backward_wgmma", "families", CUDNN, 1.0, 1.0),
    Goal("33_backward_wgmma", "families", FA3, 0.97, 0.97),
    Goal("40_every_language", "timings", FLASH, 1.3, 1.0, "language == 'triton_tiles'"),
    Goal("40_every_language", "timings", FLASH, 0.9, 0.8, "language == 'cute_mma'"),
    Goal("40_every_language", "timings", FLASH, 0.9, 0.8, "language == 'cute_dsl'"),
    *(Goal(rung, "accuracy", FLASH, ERROR, ERROR) for rung in ("13_tuned", "20_causal_gqa", "32_ping_pong")),
    *(Goal(rung, "accuracy", FLASH, GRADIENTS, GRADIENTS) for rung in ("23_backward_mma", "33_backward_wgmma")),
]


def verdicts(stems: Sequence[str] = (), root: Path = record.DATA, device: str = record.SHOWN) -> pd.DataFrame:
    """A row per goal (of these rungs; of all): rung, what, goal, floor, mean, worst, verdict: "reached", "above the floor",
    "missed", or "not recorded", and record: the device, and "stale" where the kernel has changed since. device: as `record.load` takes it."""
    rows = []
    for goal in GOALS:
        if stems and goal.rung not in stems:
            continue
        what = " ".join(filter(None, [goal.kind, "×", goal.peer, goal.only, goal.N and f"N == {goal.N}"]))
        row = {"rung": goal.rung, "what": what, "goal": goal.goal, "floor": goal.floor, "verdict": "not recorded"}
        try:
            points = goal.points(root, device).dropna()
        except LookupError:
            points = pd.Series(dtype=float)
        if len(points):
            mean = goal.mean(points)
            reached = "reached" if mean >= goal.goal else "above the floor" if mean >= goal.floor else "missed"
            row |= {"mean": round(mean, 3), "worst": round(points.min(), 3), "verdict": reached}
            known = record.about(goal.rung, goal.kind, device, root)
            row["record"] = known["device"] + (", stale" if record.is_stale(known) else "")
        rows.append(row)
    return pd.DataFrame(rows, columns=["rung", "what", "goal", "floor", "mean", "worst", "verdict", "record"])
