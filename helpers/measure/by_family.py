"""Speed and error by family of inputs (run/families.py): a rung, the rung before it and the fast peers, in one run.

`python -m helpers record families` records both. At N = 4096 each family runs in fp16 and in bf16, at the shortest and the
longest length in fp16, whose range is the narrower; heads of a trained model at the length and under the mask they had there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from .. import record
from ..ladder.rung import Rung
from ..record import EFFICIENT, FA2, MATH, SHAPE, TOKENS, WIDTH
from . import bench, workloads
from .bench import measure, refusal

if TYPE_CHECKING:
    from torch import Tensor

    from ..run.families import Family

LENGTHS = (1024, 4096, 16384)
IN_BOTH_DTYPES = 4096
BURST_MS, ROUNDS = 2.5, 5
HEADS, ERROR_N = 8, 4096  # whose errors are recorded; as many heads as there are slopes
WITHOUT = (MATH, EFFICIENT, FA2)


@dataclass(frozen=True)
class Cell:
    """One input that is timed: a family at one dtype, mask and shape (B, H, Nq, Nk, D)."""

    family: Family
    dtype: str
    causal: bool
    shape: tuple[int, int, int, int, int]

    @property
    def about(self) -> dict:
        """The columns that say which it is."""
        known = {"family": self.family.name, "dtype": self.dtype, "causal": int(self.causal)}
        return known | dict(zip(SHAPE, self.shape, strict=True))

    def tensors(self, gradient: bool) -> tuple[Tensor, ...]:
        """q, k, v, and with `gradient` dO, on the GPU."""
        return self.family.inputs(self.shape, self.dtype, bench.DEVICE, causal=self.causal, gradient=gradient)


def cells(rung: Rung, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Cell]:
    """What is timed of a rung: every family, head dimension and mask it takes."""
    from ..run import families

    for family in families.every().values():
        for N in lengths if family.N is None else (family.N,):
            for dtype in rung.dtypes if family.N or N == IN_BOTH_DTYPES else rung.dtypes[:1]:
                for D in (64, 128):
                    for causal in masks(rung):
                        if family.causal in (None, causal):
                            yield Cell(family, dtype, causal, (TOKENS // N, WIDTH // D, N, N, D))


def masks(rung: Rung) -> tuple[bool, ...]:
    """Without a causal mask, and with one where the rung takes it."""
    return (False, True) if "causal" in rung.features or rung.op == "attention_backward" else (False,)


def calls(
    kernels: dict[str, Callable], tensors: tuple[Tensor, ...], causal: bool, without: Sequence[str]
) -> dict[str, Callable]:
    """Kernels, by their rungs' stems, and the peers but for those in `without`, as far as they take these tensors: q, k, v and, for the
    backward pass, dO. They are called without arguments. A kernel gets the O of a backward pass in the layout that dO has."""
    options = {"causal": True} if causal else {}
    if len(tensors) == 3:
        own = {name: functools.partial(kernel, *tensors, **options) for name, kernel in kernels.items()}
        others = bench.peers(*tensors, without=without, causal=causal)
        others = {name: functools.partial(call, *tensors) for name, call in others.items()}
    else:
        import torch

        from ..run.reference import attention

        q, k, v, do = tensors
        o, lse = attention(q, k, v, causal=causal)  # rounded from float64: no forward pass's error enters delta
        o, lse = torch.empty_like(do).copy_(o), lse.float()
        own = {name: functools.partial(kernel, q, k, v, o, lse, do, **options) for name, kernel in kernels.items()}
        others = workloads.backward_peers(q, k, v, do, causal, without)
    return {name: call for name, call in own.items() if refusal(call) is None} | others


def kernels(kernel: Callable, rung: Rung) -> dict[str, Callable]:
    """The kernel, and that of the rung before it, by their stems."""
    from ..run.kernel import load

    before = record.rung_before(rung)
    return {rung.stem: kernel} | ({before.stem: load(before, device=bench.DEVICE, quiet=True)} if before else {})


def timings(own: dict[str, Callable], rung: Rung) -> pd.DataFrame:
    """Samples of `own`, a kernel of this rung first, and of the fast peers: family, name, dtype, causal, B H Nq Nk D, round, ms, and what
    the sensors show."""
    return at_each(cells(rung), own, rung, WITHOUT, BURST_MS)


def at_each(
    cells: Iterable, own: dict[str, Callable], rung: Rung, without: Sequence[str], burst_ms: float
) -> pd.DataFrame:
    """Samples of `own`, kernels of this rung's operation, and of the peers but for those in `without`, at every cell, this module's or
    one of layouts or one_sequence: the columns of its `about` with the name behind the first, round, ms, and what the sensors show."""
    import torch

    frames = []
    for cell in cells:
        tensors = cell.tensors(rung.op == "attention_backward")
        timed = calls(own, tensors, cell.causal, without)
        frame = measure(timed, (), ROUNDS, burst_ms=burst_ms).assign(**cell.about)
        frames.append(frame)
        best = frame.groupby("name", sort=False)["ms"].median()
        workloads.progress(f"  {cell.about}: " + ", ".join(f"{n} {x:.3f} ms" for n, x in best.items()))
        del timed, tensors
        torch.cuda.empty_cache()
    first, *others = cell.about
    return workloads.joined(frames, [first, "name", *others, "round", "ms"])


def errors(own: dict[str, Callable], rung: Rung) -> pd.DataFrame:
    """How far each of them is from float64: family, name, dtype, causal, B H Nq Nk D, output (o; dq, dk, dv), error: ‖x - exact‖ / ‖exact‖,
    Frobenius norms over one sequence of 8 heads."""
    from ..run.reference import Case

    rows = []
    for cell in cells(rung, (ERROR_N,)):
        cell = Cell(cell.family, cell.dtype, cell.causal, (1, HEADS, *cell.shape[2:]))
        tensors = cell.tensors(rung.op == "attention_backward")
        case = Case(cell.family.name, *tensors[:3], do=tensors[3] if tensors[3:] else None, causal=cell.causal)
        exact = case.exact()
        for name, call in calls(own, tensors, cell.causal, WITHOUT).items():
            found = call()
            found = (found,) if not isinstance(found, tuple) else found
            for output, x, right in zip(case.names, found, exact, strict=False):
                if output != "lse":
                    error = ((x.double() - right).norm() / right.norm()).item()
                    rows.append(cell.about | {"name": name, "output": output, "error": error})
    return pd.DataFrame(rows)[["family", "name", "dtype", "causal", *SHAPE, "output", "error"]]
