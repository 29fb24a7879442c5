"""The walk of one block over the tiles of Q, K and V, step by step, as a traced launch on the emulator recorded it.

A step is what lies between two `__syncthreads()`; one in which nothing is moved, used or kept in shared memory is left out. The emulator sees loads and
stores, not registers: a row that was read and isn't in shared memory is in registers, or was used at once.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from ctypes import c_int, c_int32, c_int64, c_uint64
from functools import cache
from typing import TYPE_CHECKING, Any

from ..emulator import launcher as emulator
from ..emulator.steps import Rows, Step, Walk
from ..ladder.contract import prepare
from ..ladder.rung import Which
from ..ladder.rung import rung as find_rung
from ..toolchain.compile import build
from .kernel import Kernel
from .xray import on_the_cpu

if TYPE_CHECKING:
    from torch import Tensor

    from ..figures.player import Player

HERE = emulator.HERE.parent / "run"
KINDS = ("read", "written", "resident", "used")


class _Row(ctypes.Structure):
    _fields_ = [("step", c_int32), ("tensor", c_int32), ("kind", c_int32), ("spare", c_int32)]
    _fields_ += [("first", c_int64), ("last", c_int64), ("bytes", c_uint64)]


@cache
def _library() -> ctypes.CDLL:
    path, _ = emulator._runtime()
    runtime = emulator.HERE / "runtime"
    built = build(
        "walk",
        cpp=f'#include "{HERE / "walk.cpp"}"\n',
        flags=emulator.RUNTIME_FLAGS,
        include=[runtime, emulator.INCLUDE / "emulator"],
        libraries=[path],
        depends=[(HERE / "walk.cpp").read_text(), *emulator._texts(runtime)],
    )
    library = ctypes.CDLL(str(built.path))
    library.walk_begin.argtypes = [c_uint64, c_int, ctypes.POINTER(c_uint64)]
    library.walk_begin.restype = None
    library.walk_end.argtypes = [ctypes.POINTER(ctypes.POINTER(_Row))]
    return library


def walk(kernel: Which, *inputs: Tensor, block: int = 0, **options: Any) -> Walk:
    """Runs a kernel once on the emulator, traced, and gives the steps of one of its blocks.

        walk("04", q, k, v)

    kernel, inputs, options: as `xray` takes them; tensors are made contiguous. block: its number in the grid, x fastest. Raises
    ValueError for a softmax, for a block that isn't in the grid, and for a kernel whose blocks have no `__syncthreads()` between tiles (TMA's
    barriers divide no steps).
    """
    rung = find_rung(kernel)
    if rung.op == "softmax":
        raise ValueError(f"{rung.stem} is a softmax: there are no tiles of Q, K and V to walk over")
    copies: dict[int, Tensor] = {}
    inputs = tuple(t.contiguous() for t in on_the_cpu(inputs, copies))
    call = prepare(rung, "cpu", inputs, **{name: on_the_cpu(value, copies) for name, value in options.items()})
    launcher = (kernel if isinstance(kernel, Kernel) and kernel.device == "cpu" else Kernel(rung, "cpu")).launcher
    names, tensors = list(call.tensors), call.tensors
    row_bytes = [t.shape[-1] * t.element_size() if t.dim() == 4 else t.element_size() for t in tensors.values()]
    library = _library()
    found = ctypes.POINTER(_Row)()
    with emulator._one_at_a_time:
        library.walk_begin(block, len(names), (c_uint64 * len(names))(*row_bytes))
        try:
            trace = launcher.trace(call)
        finally:
            rows = [_copy(found[i]) for i in range(library.walk_end(ctypes.byref(found)))]
    if not rows:
        raise ValueError(f"{rung.stem} has no block {block} on these inputs, or it moves nothing")
    a, q = call.args, inputs[0]
    lengths = {name: t.shape[-2] if t.dim() == 4 else a.Nq for name, t in tensors.items()}
    steps = _steps(rows, names, lengths)
    if len(steps) < 2:
        raise ValueError(
            f"{rung.stem}: its blocks have no __syncthreads() between tiles, so there are no steps to show"
        )
    moved = {name: (read, written) for name, (read, written, _) in trace.tensors.items()}
    return Walk(rung.stem, block, a.Nq, a.Nk, a.D, str(q.dtype).removeprefix("torch."), steps, moved)


def _copy(row: _Row) -> tuple[int, int, str, int, int, int]:
    return row.step, row.tensor, KINDS[row.kind], row.first, row.last, row.bytes


def _steps(
    rows: list[tuple[int, int, str, int, int, int]], names: list[str], lengths: dict[str, int]
) -> tuple[Step, ...]:
    """Rows by step, numbered anew: a step in which nothing is moved, used or kept in shared memory is left out."""
    by_step: dict[int, dict[str, dict[str, Rows]]] = defaultdict(lambda: {kind: {} for kind in KINDS})
    for step, tensor, kind, first, last, size in rows:
        name = names[tensor]
        N = lengths[name]
        by_step[step][kind][name] = Rows(first % N, last % N, size)
    steps, hbm = [], 0
    for number in sorted(by_step):
        parts = by_step[number]
        hbm += sum(r.bytes for kind in ("read", "written") for r in parts[kind].values())
        steps.append(Step(len(steps), **parts, hbm=hbm))
    return tuple(steps)


def tile_player(kernel: Which, *inputs: Tensor, block: int = 0, **options: Any) -> Player:
    """The walk of one block as a player in a notebook: a scrubber over its steps, and a strip of frames for print.

        tile_player("04", q, k, v)

    Arguments and errors are those of `walk`.
    """
    from ..figures.player import Player

    return Player(walk(kernel, *inputs, block=block, **options))
