"""When a kernel's warps wait and when they compute, noted by the kernel itself (clocks.py).

`instrument` puts a line into a rung's text at each marker of its tile loop: one thread of every warp of one CTA notes the
SM's clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..ladder.rung import Which, rung
from ..run.kernel import load
from .clocks import declare, since_first, workspace_index

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

# Markers of a rung's text, in the order in which a tile meets them, and what begins there. The time between the top of the
# loop and `scores` is what a tile's data is waited for.
MARKS = {
    r"for \(int j0 = .*\{": "wait",
    r"// \[region: scores\]": "mma",
    r"// \[region: online_update\]": "softmax",
    r"// \[region: output\]": "mma",
    r"// \[end: output\]": "end",
}
TILES = 32  # of which times are kept
NOTE = """
__device__ __forceinline__ void note_time(const fa_args &a, int tile, int mark) {
  if (blockIdx.x != gridDim.x / 2 || threadIdx.x %% 32 != 0 || tile >= %(tiles)d) return;
  static_cast<float *>(a.workspace[%(index)d])[(threadIdx.x / 32 * %(tiles)d + tile) * %(marks)d + mark] =
      __uint_as_float(unsigned(clock64()));
}
"""


def instrument(source: str) -> str:
    """A rung's text with its tile loop noting times in a workspace tensor `times` (Nq, D). ValueError names a marker that
    isn't there once."""
    lines = source.splitlines()
    include = max(i for i, line in enumerate(lines) if line.startswith("#include"))
    index = workspace_index(source)
    for mark, pattern in enumerate(MARKS):
        found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
        if len(found) != 1:
            raise ValueError(f"the marker {pattern!r} has to be there once; it is there {len(found)} times")
        lines.insert(found[0] + 1, f"note_time(a, j0 / Bc, {mark});")
    lines[include] += NOTE % {"tiles": TILES, "marks": len(MARKS), "index": index}
    declare(lines, "times (Nq,D) fp32")
    return "\n".join(lines) + "\n"


def times(kernel: Which, q: Tensor, k: Tensor, v: Tensor) -> pd.DataFrame:
    """A row per warp, tile and phase of one CTA in the middle of the grid: warp, tile, kind ("wait", "mma", "softmax"), begin
    and end, counted from the CTA's first note: SM clocks on a GPU, places in the order of events on the emulator. "load" is
    the time a tile's copy has: from its order to its use (when it lands in between, no thread can see).

    At least 640 elements of (Nq, D); the first 32 tiles are kept.
    """
    import pandas as pd
    import torch

    source = rung(kernel).source
    run = load(source=instrument(source), device=q.device.type, quiet=True)
    run(q, k, v)  # the first call of a module is slow
    raw = run.tensors(q, k, v)["times"].flatten()
    warps, marks = 4, len(MARKS)
    tile = int(re.search(r"int Bc = (\d+)", source)[1])
    tiles = min(TILES, -(-k.shape[2] // tile))
    clock = raw[: warps * TILES * marks].view(torch.int32).cpu().to(torch.int64) & 0xFFFFFFFF
    clock = clock.reshape(warps, TILES, marks)[:, :tiles].contiguous()
    clock = since_first(clock, clock[0, 0, 0])
    if q.device.type != "cuda":
        clock = clock.flatten().argsort().argsort().reshape(clock.shape)
    rows = []
    for w in range(warps):
        for j in range(tiles):
            for mark, kind in enumerate(list(MARKS.values())[:-1]):
                rows.append((w, j, kind, int(clock[w, j, mark]), int(clock[w, j, mark + 1])))
            if "cp_async" not in source:
                rows.append((w, j, "load", int(clock[w, j, 0]), int(clock[w, j, 1])))
            elif j > 0:  # ordered before the scores of the tile before, needed by this one's
                rows.append((w, j, "load", int(clock[w, j - 1, 1]), int(clock[w, j, 1])))
    return pd.DataFrame(rows, columns=["warp", "tile", "kind", "begin", "end"])
