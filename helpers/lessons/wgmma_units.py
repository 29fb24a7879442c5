"""What a tile costs each unit of a Hopper SM, for the budgets of notebooks 30 to 33: a model, in clocks.

Per SM and clock: 2048 multiply-adds of 16-bit numbers on four tensor cores (NVIDIA H100 Tensor Core GPU Architecture), 16
exponentials and four instructions, one for each scheduler, 128 bytes of shared memory (CUDA C++ Programming Guide).
How often `wgmma` reads an operand in shared memory is not documented. The model counts once per instruction, at full width. On an H200
(record `device.wgmma`) no kind of wgmma takes longer than its multiply-adds, also where one reading of each operand takes as long
(N = 64, A in shared memory). So it isn't read more often; whether two warpgroups share a reading is not known.
"""

from __future__ import annotations

import pandas as pd

from ..ladder.constants import constants
from ..ladder.rung import Which, rung
from ..toolchain import sass

MULTIPLY_ADDS, EXPONENTIALS, BYTES = 2048, 16, 128  # per clock of an SM
SMS = 132  # of an H100 SXM or an H200
ROWS, KEYS = 64, 128  # of a warpgroup, and of the tile that budgets are given for


def wgmma_bytes(columns: int, steps: int = 1, a_in_registers: bool = False) -> int:
    """Bytes of shared memory that `steps` products (64, 16) by (16, columns) of 16-bit numbers read: B, and A if it is there."""
    return steps * 2 * 16 * (columns + 64 * (not a_in_registers))


def beside_the_model(timed: pd.DataFrame) -> pd.DataFrame:
    """Recorded clocks of an SM per wgmma (kind `wgmma`, fp16, two warpgroups, B K-major) beside what the model has for it: a row for
    each N and place of A, columns tensor cores, shared memory, the model's and measured (rounded)."""
    rows = {}
    chosen = timed[(timed["dtype"] == "fp16") & (timed["warpgroups"] == 2) & (timed["B_major"] == "K")]
    for each in chosen.sort_values(["A_in", "N"], ascending=[False, True]).itertuples():
        products, read = ROWS * each.N * 16 / MULTIPLY_ADDS, wgmma_bytes(each.N, 1, each.A_in == "registers") / BYTES
        clocks = {"tensor cores": products, "shared memory, if read once": read, "measured": each.cycles}
        rows[f"A in {each.A_in}", each.N] = clocks
    return pd.DataFrame(rows).T.rename_axis(["wgmma", "N"]).round(1)


def forward(which: Which, d: int, dtype: str = "bf16") -> pd.Series:
    """Clocks of each unit for a warpgroup's 64 rows and 128 keys, of a rung of the forward pass with wgmma, 30 to 32.

    Instructions are those of its main loop as compiled; a warpgroup has a warp on each scheduler, so n of them take n clocks.
    """
    text = rung(which).source
    tile = constants(text, d)
    groups = tile.get("consumers", tile.get("warpgroups"))
    reads = wgmma_bytes(tile["Bc"], d // 16) * KEYS / tile["Bc"] + wgmma_bytes(d, KEYS // 16, a_in_registers=True)
    arrives = 2 * 2 * KEYS * d / groups  # K and V, once for all warpgroups of a CTA
    return pd.Series(
        {
            "shared memory": (reads + arrives) / BYTES,
            "tensor cores": 2 * ROWS * KEYS * d / MULTIPLY_ADDS,
            "issue slots": len(sass.loop_lines(which, d, dtype)) * KEYS / tile["Bc"],
            "MUFU": ROWS * KEYS / EXPONENTIALS,
        }
    )


def per_tile(timed: pd.DataFrame, which: Which) -> pd.Series:
    """Measured clocks between two tiles of keys of a consumer, by D, in a whole call of a rung with one CTA per SM, 31 or 32.

    timed: its `power` record, of which the calls on random numbers are taken. An SM's consumers work on tiles side by side.
    """
    found, calls = rung(which), timed[timed["inputs"] == "random"]
    calls = calls[calls["name"] == found.stem]
    clocks = {}
    for D, part in calls.groupby("D"):
        tile, (first, *_) = constants(found.source, D), part.itertuples()
        tiles = first.B * first.H * -(-first.Nq // tile["Br"]) * -(-first.Nk // tile["Bc"])
        clocks[D] = (part["ms"] * part["mhz"]).median() * 1000 * SMS / tiles
    return pd.Series(clocks, name="clocks per tile").rename_axis("D")


def backward(products: pd.DataFrame, tile: dict[str, int], d: int, wavefronts: float) -> pd.DataFrame:
    """Clocks of the tensor cores and of shared memory for a step of rung 33, both warpgroups, a row for each part.

    products: `draw_backward.products` of its loop: name, shape, instructions, A. tile: the constants of its Tile.
    wavefronts: of shared memory for LSE and delta, per query.
    """
    rows, Br = {}, tile["Br"]
    for each in products.itertuples():
        columns, steps = int(each.shape.split("x")[1]), 2 * each.instructions
        read = wgmma_bytes(columns, steps, each.A == "registers") / BYTES
        before = rows.get(each.name, (0, 0))  # dV may come in two pieces
        rows[each.name] = before[0] + steps * ROWS * columns * 16 / MULTIPLY_ADDS, before[1] + read
    rows["Q, dO arrive"] = 0, 2 * 2 * Br * d / BYTES
    rows["LSE, delta are read"] = 0, wavefronts * Br
    rows["dS is written"] = 0, 2 * Br * 128 / BYTES
    rows["dQ is written and fetched"] = 0, 2 * 4 * Br * d / BYTES
    return pd.DataFrame(rows, index=["tensor cores", "shared memory"]).T.rename_axis("part of a step")


def table(budgets: dict[str, pd.Series]) -> pd.DataFrame:
    """Budgets by name as `budget.units` takes them: columns kernel, unit, clocks."""
    return pd.concat(
        [
            clocks.rename("clocks").rename_axis("unit").reset_index().assign(kernel=name)
            for name, clocks in budgets.items()
        ]
    )[["kernel", "unit", "clocks"]]
