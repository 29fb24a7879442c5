"""What power has to do with a kernel's speed: clock, joules and time of long bursts, on random numbers and on zeros.

Zeros ask for the same instructions and need less power. `python -m helpers record power` records it, on a GPU whose energy can be read.
The clock is counted on the SMs (clock64 against the global timer), by a tiny kernel before and after each burst.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.rung import Rung, parse
from ..record import CUDNN, EFFICIENT, FA2, FLASH, MATH, SHAPE
from ..record.workload import TOKENS, WIDTH, N
from . import bench, workloads

if TYPE_CHECKING:
    from torch import Tensor

HEADER = """// stamps: each SM's clock, and the time
// idea: two of them tell the clock between them.
// op: attention
// dtypes: fp32
"""
CTAS, COLUMNS = 4096, 8  # enough for every SM to run one; 8 floats are four 64-bit numbers
DTYPE, SECONDS, ROUNDS = "fp16", 1.0, 3
INPUTS = ("random", "zeros")


def stamps() -> Rung:
    """The kernel that notes the clocks, as what `load` takes."""
    return parse(HEADER + "\n" + Path(__file__).with_name("stamps.cu").read_text(), Path("stamps"))


def megahertz(before: Tensor, after: Tensor) -> float:
    """The clock between two notes of `stamps`, (CTAs, 4) int64 each: the median over the SMs that are in both.

    RuntimeError where the notes are no clock's, such as of a counter that began anew in between.
    """
    first, last = (_by_sm(notes) for notes in (before, after))
    both = first.index.intersection(last.index)
    passed = last.loc[both] - first.loc[both]
    found = (1e3 * passed["clocks"] / passed["ns"]).median() if len(both) and passed["ns"].gt(0).all() else 0.0
    if not 100 < found < 4000:
        raise RuntimeError(f"the SMs' counters give {found:.0f} MHz: they can't be read across kernels on this GPU")
    return float(found)


def _by_sm(notes: Tensor) -> pd.DataFrame:
    frame = pd.DataFrame(notes.cpu().numpy()[:, :3], columns=["sm", "clocks", "ns"])
    return frame.groupby("sm").first()


def clock() -> Callable[[], Callable[[], float]]:
    """A function that notes the clocks of all SMs, in the stream, and gives one that notes them again and tells the MHz between."""
    import torch

    from ..run.kernel import load

    kernel = load(stamps(), device=bench.DEVICE, quiet=True)
    x = torch.zeros(1, 1, CTAS, COLUMNS, device=bench.DEVICE)

    def note() -> Tensor:
        return kernel(x, x, x)[0].view(torch.int64).view(CTAS, 4)

    def begin() -> Callable[[], float]:
        before = note()
        return lambda: megahertz(before, note())

    return begin


def timings(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """The rung and its peers (`_calls`) at N = 4096 in fp16, on random numbers and on zeros: name, inputs, dtype, B H Nq Nk D, round, ms and
    joules (per call), mhz (counted), and of the sensors sm_mhz and throttle during the burst; watts is the mean, joules over time."""
    import torch

    frames, counted = [], clock()
    for D in (64, 128):
        shape = (TOKENS // N, WIDTH // D, N, N, D)
        random = workloads.random_tensors(DTYPE, (TOKENS // N, WIDTH // D, N, D), 4)
        given = dict(zip(INPUTS, (random, [torch.zeros_like(x) for x in random]), strict=True))
        calls = {
            (name, inputs): call
            for inputs, tensors in given.items()
            for name, call in _calls(kernel, rung, *tensors).items()
        }
        frame = bench.energy(calls, (), SECONDS, ROUNDS, clock=counted)
        frame.insert(1, "inputs", [inputs for _, inputs in frame["name"]])
        frame["name"] = [name for name, _ in frame["name"]]
        frames.append(frame.assign(dtype=DTYPE, **dict(zip(SHAPE, shape, strict=True))))
        del random, given, calls
        torch.cuda.empty_cache()
    columns = ["name", "inputs", "dtype", *SHAPE, "round", "ms", "joules", "mhz"]
    result = workloads.joined(frames, columns)
    result.attrs["method"] = (
        f"CUDA events, bursts of {SECONDS:g} s in random order, {ROUNDS} rounds; clock64 over globaltimer"
    )
    return result


def _calls(
    kernel: Callable, rung: Rung, q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> dict[str, Callable[[], object]]:
    """What takes power: a forward pass beside SDPA CUDNN's; a backward pass beside those of CUDNN and, where they can be imported,
    FlashAttention-3 and -4."""
    from ..run.reference import same_precision

    if rung.op == "attention":
        attend = {rung.stem: kernel, CUDNN: functools.partial(bench.sdpa, CUDNN)}
        return {name: functools.partial(call, q, k, v) for name, call in attend.items()}
    o, lse = same_precision(q, k, v)
    others = workloads.backward_peers(q, k, v, do, causal=False, without=(MATH, EFFICIENT, FLASH, FA2))
    return {rung.stem: functools.partial(kernel, q, k, v, o, lse, do), **others}


def record_power(which: str = "32_ping_pong") -> None:
    """Checks a rung of attention, then records its power beside its peers'. AssertionError if the rung is wrong; RuntimeError where
    the GPU's energy can't be read."""
    from .. import record
    from . import recording

    kernel = recording.right(which)
    frame = timings(kernel, kernel.rung)
    path = record.save(kernel.rung.stem, "power", frame, extra={"peers": bench.versions(frame["name"].unique())})
    columns = ["ms", "joules", "mhz", "watts"]
    print(frame.groupby(["D", "name", "inputs"])[columns].median().round(3).to_string(), flush=True)
    print("  wrote", path.name, flush=True)
