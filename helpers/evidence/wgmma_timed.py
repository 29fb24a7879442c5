"""How long a wgmma takes an SM, by N and by where its operands lie: what the budgets of notebooks 30 to 33 assume, measured.

`python -m helpers record wgmma` runs wgmma_timed.cu, on a GPU of compute capability 9.0.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pandas as pd

from ..ladder.paths import INCLUDE
from ..ladder.rung import Rung, parse

DTYPES, COLUMNS = ("fp16", "bf16"), (64, 128, 256)
RUNS = 5
HEADER = """// wgmma_timed: clocks of an SM per wgmma
// idea: a warpgroup that issues wgmma and nothing else shows what reads of shared memory add to the products.
// op: attention
// dtypes: fp32
// arch: sm_90a
"""


def source() -> str:
    """The text of the `.cu`, with wgmma of 256 columns from the generator of fa/wgmma.cuh."""
    spec = importlib.util.spec_from_file_location("wgmma", INCLUDE / "fa" / "wgmma.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    wider = "\n".join(made.function(256, in_registers) for in_registers in (False, True))
    return f"{HEADER}\n#include <fa/wgmma.cuh>\n\nnamespace fa {{\n{wider}}}\n\n{Path(__file__).with_suffix('.cu').read_text()}"


def kernel() -> Rung:
    """It as what `load` takes."""
    return parse(source(), Path("wgmma_timed"))


def variants() -> list[tuple]:
    """(dtype, N, warpgroups, B_major, A_in) of each: B_major is "K" where the summed dimension is contiguous in memory, "MN" where the other is;
    A_in "shared" or "registers". The place in the list is the scale of its call."""
    return list(itertools.product(DTYPES, COLUMNS, (1, 2), ("K", "MN"), ("shared", "registers")))


def times() -> pd.DataFrame:
    """dtype, N, warpgroups, B_major, A_in, cycles: clocks of one SM per wgmma of M = 64 and K = 16, the least of RUNS runs."""
    import torch

    from ..run.kernel import load

    timed = load(kernel(), device="cuda", quiet=True)
    x = torch.zeros(1, 1, 16, 16, device="cuda")
    rows = [
        (*variant, min(float(timed(x, x, x, scale=float(i))[0].view(-1)[0]) for _ in range(RUNS)))
        for i, variant in enumerate(variants())
    ]
    return pd.DataFrame(rows, columns=["dtype", "N", "warpgroups", "B_major", "A_in", "cycles"])


def record_wgmma() -> None:
    """Records `times` and prints them, beside the clocks that the products alone need at 2048 multiply-adds per clock."""
    from .. import record

    frame = times()
    record.save("device", "wgmma", frame, extra={"unit": "clocks of one SM per wgmma, M = 64, K = 16"})
    table = frame.pivot(index=["dtype", "B_major", "A_in", "warpgroups"], columns="N", values="cycles").round(1)
    print(table.to_string(), flush=True)
    print("products alone:", {N: 64 * N * 16 // 2048 for N in COLUMNS}, flush=True)
