"""Tile shapes by measurement: which of a declared grid are fastest on this GPU, per dtype and head dimension.

`python -m helpers record tiles 13_tuned` measures the grid and records it as data/<device>/13_tuned.tiles.csv; from then on the
loader compiles the rung with the winners. A rung that can be tuned has its shapes in one macro, FA_TILES: a row of whole
numbers, in the order of COLUMNS, for each of its dtypes and head dimensions. Without a record of this very code on this very
GPU (and on the emulator) the rung's own rows count, and so they do for a source that a reader has edited.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .. import record
from ..ladder.errors import CompileError, KernelError
from ..ladder.rung import Rung
from ..ladder.rung import rung as find
from ..record.tiles import COLUMNS, Shape, best, with_shapes

if TYPE_CHECKING:
    import pandas as pd

    from ..run.kernel import Kernel

LENGTHS = (1024, 4096, 16384)  # headline shapes that decide
# What is tried for each head dimension. A shape that doesn't compile or asks for too much shared memory drops out.
GRID = {
    64: [
        *itertools.product([4], [64], [2, 3], [2], [2, 4]),
        *itertools.product([4], [32], [2, 3], [2, 3], [4]),
        *itertools.product([4], [128], [2], [2], [4]),
        *itertools.product([8], [64], [2, 3], [1], [4]),
    ],
    128: [
        *itertools.product([4], [64], [2], [2], [0, 1]),
        *itertools.product([4], [32], [2, 3], [2], [0, 4, 6]),
        *itertools.product([4], [48], [2], [2], [0, 2]),
        *itertools.product([8], [32, 64], [2], [1], [0]),
    ],
}


def measure(rung: Rung, rounds: int = 7, grid: dict[int, list[Shape]] = GRID) -> tuple[pd.DataFrame, list[str]]:
    """Samples of every shape of the grid that runs, at every dtype, D and length; and what dropped out, and why.

    One build serves one shape of every D. Needs a GPU.
    """
    kernels, skipped = _right(rung, grid)
    return _samples(rung, kernels, rounds), skipped


def _right(rung: Rung, grid: dict[int, list[Shape]]) -> tuple[dict[int, dict[Shape, Kernel]], list[str]]:
    """Kernels by D and shape that compile, run and are right; and the others, with the reason."""
    import torch

    from ..run.check import check
    from ..run.kernel import load
    from ..run.reference import DTYPES, Case

    kernels: dict[int, dict[Shape, Kernel]] = {D: {} for D in rung.D}
    skipped = []
    for i in range(max(len(grid[D]) for D in rung.D)):
        shapes = {D: grid[D][i] for D in rung.D if i < len(grid[D])}
        try:
            row = [shapes.get(D, grid[D][0]) for D in rung.D]
            kernel = load(source=with_shapes(rung, row * len(rung.dtypes)), device="cuda", quiet=True)
        except CompileError as error:
            skipped.append(f"{shapes}: {str(error).splitlines()[0]}")
            continue
        for D, shape in shapes.items():
            x = [torch.randn(1, 2, n, D, device="cuda").to(DTYPES[rung.dtypes[0]]) for n in (130, 300, 300)]
            try:
                check(kernel, [Case(f"{shape}", *x)]).require()
                kernels[D][shape] = kernel
            except (AssertionError, KernelError) as error:
                skipped.append(f"D={D} {shape}: {str(error).splitlines()[0]}")
    return kernels, skipped


def _samples(rung: Rung, kernels: dict[int, dict[Shape, Kernel]], rounds: int) -> pd.DataFrame:
    import pandas as pd
    import torch

    from ..run.reference import DTYPES
    from . import bench

    frames = []
    for dtype, D, N in itertools.product(rung.dtypes, rung.D, LENGTHS):
        B, H = record.TOKENS // N, record.WIDTH // D
        inputs = [torch.randn(B, H, N, D, device="cuda").to(DTYPES[dtype]) for _ in range(3)]
        frame = bench.measure(kernels[D], inputs, rounds, burst_ms=3, idle_ms=10)
        tiles = pd.DataFrame(frame.pop("name").tolist(), columns=list(COLUMNS))
        frames.append(pd.concat([tiles, frame], axis=1).assign(dtype=dtype, B=B, H=H, Nq=N, Nk=N, D=D))
    samples = pd.concat(frames, ignore_index=True)[["dtype", *record.SHAPE, *COLUMNS, "round", "ms"]]
    samples.attrs = frame.attrs
    return samples


def record_tiles(which: str, rounds: int = 7) -> None:
    """Measures the grid of a rung, records the samples and prints the winners. RuntimeError without a GPU."""
    from . import bench

    bench.require_gpu()
    rung = find(which)
    with bench.watch() as seen:
        samples, skipped = measure(rung, rounds)
    path = record.save(rung.stem, "tiles", samples, extra=seen | {"skipped": skipped})
    for (dtype, D), shape in best(samples).items():
        print(f"{dtype} D={D}: " + ", ".join(f"{n}={x}" for n, x in zip(COLUMNS, shape, strict=True)))
    print(f"wrote {path.name}; {len(skipped)} shapes dropped out")
