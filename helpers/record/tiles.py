"""The tile shapes that were recorded as fastest on a GPU, as the macro FA_TILES that a rung is compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..ladder.rung import KERNELS, Rung
from . import store

if TYPE_CHECKING:
    import pandas as pd

MACRO = "FA_TILES"
COLUMNS = ("warps", "Bc", "stages", "ctas", "Q_steps")  # of a row of FA_TILES

Shape = tuple[int, ...]


def definition(rung: Rung, root: Path = store.DATA) -> str:
    """The line that makes a rung use the shapes recorded as best on this machine's GPU; empty where the source's own
    count: it can't be tuned, is not the rung as it stands, or was never tuned on this GPU as it stands."""
    if f"#ifndef {MACRO}" not in rung.source or rung.path.parent != KERNELS or rung.file is None:
        return ""
    device = store.this_device()
    if device is None or not (root / store.slug(device) / f"{rung.stem}.tiles.csv").exists():
        return ""
    samples = store.load(rung.stem, "tiles", device, root)
    if samples["stale"].any():
        return ""
    winners = best(samples)
    cells = [(dtype, D) for dtype in rung.dtypes for D in rung.D]
    return line([winners[cell] for cell in cells]) if all(cell in winners for cell in cells) else ""


def line(shapes: Sequence[Shape]) -> str:
    """The macro for these shapes: fp16 at each D in the rung's order, then bf16."""
    return f"#define {MACRO} {', '.join('{' + ', '.join(map(str, s)) + '}' for s in shapes)}\n"


def best(samples: pd.DataFrame) -> dict[tuple[str, int], Shape]:
    """The fastest shape for each (dtype, D): the least geometric mean over the lengths of the median time. A shape that
    lacks a length is out."""
    medians = samples.groupby(["dtype", "D", *COLUMNS, "Nk"])["ms"].median().unstack("Nk").dropna()
    means = medians.prod(axis=1) ** (1 / medians.shape[1])
    return {
        (dtype, int(D)): tuple(int(x) for x in group.idxmin()[2:]) for (dtype, D), group in means.groupby(level=[0, 1])
    }


def with_shapes(rung: Rung, shapes: Sequence[Shape]) -> str:
    """The rung's source with these shapes in place of its own."""
    return rung.replace(f"#ifndef {MACRO}", f"{line(shapes)}#ifndef {MACRO}")
