"""The stopwatch: times callables on a GPU, and knows the public kernels to time them beside.

Callables run interleaved in random order over several rounds (seven unless told otherwise), in bursts between two CUDA events; inputs that they are given
rotate past the L2 cache. data/README.md gives the reasons. CPU times are never taken: beside a GPU time they mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from .. import record
from ..ladder.rung import Which
from ..record import BACK_ENDS, CUDNN, NO_GPU, forward_bytes, forward_flops, ratio, softmax_bytes
from . import libraries, sensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "attentions",
    "ceilings",
    "energy",
    "forward_bytes",
    "forward_flops",
    "measure",
    "memory",
    "peers",
    "ratio",
    "require_gpu",
    "sdpa",
    "softmax_bytes",
    "softmax_peers",
    "versions",
    "watch",
]

DEVICE = "cuda"
OUT_OF_MEMORY = "out of memory"  # a refusal


def require_gpu() -> None:
    """RuntimeError with one sentence where this machine has no GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)


TRIES, LEAST_HOLD_MS = 5, 0.2  # at a burst; of the GPU before it


class _Stopwatch:
    """Times bursts of calls between two CUDA events, on inputs that rotate past the L2 cache."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        import torch

        self.ring = _ring(inputs)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.kilohertz = getattr(torch.cuda.get_device_properties(0), "clock_rate", 2_000_000)

    def burst(
        self, call: Callable, calls: int = 1, hold_ms: float = 0.0, meanwhile: Callable | None = None
    ) -> tuple[float, float]:
        """Milliseconds per call on the GPU and on the host; the GPU starts after `hold_ms`. `meanwhile` is called when all is queued,
        while the GPU runs."""
        import torch

        if hold_ms:
            torch.cuda._sleep(int(hold_ms * self.kilohertz))
        self.start.record()
        before = time.perf_counter()
        for i in range(calls):
            call(*self.ring[i % len(self.ring)])
        host = (time.perf_counter() - before) * 1e3
        self.end.record()
        if meanwhile:
            meanwhile()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / calls, host / calls

    def undisturbed(
        self, call: Callable, calls: int, hold_ms: float, meanwhile: Callable[[], Any] = lambda: None
    ) -> tuple[float, Any]:
        """Milliseconds per call on the GPU, and what `meanwhile` gave. A burst that the host had not queued when the GPU began may
        have left it waiting, and is taken again; the last of `TRIES` stands as it is."""
        seen: list[Any] = []
        for _ in range(TRIES):
            gpu, host = self.burst(call, calls, hold_ms, lambda: seen.append(meanwhile()))
            if calls * host <= hold_ms:
                break
        return gpu, seen[-1]

    def plan(self, call: Callable, burst_ms: float) -> tuple[int, float]:
        """How many calls take about `burst_ms`, and how long the GPU is to be held: twice as long as the host needs to queue them."""
        calls = _calls(burst_ms, self.burst(call)[0])
        again = [self.burst(call, calls) for _ in range(2)]
        calls = _calls(burst_ms, min(gpu for gpu, _ in again))
        return calls, max(LEAST_HOLD_MS, 2 * calls * min(host for _, host in again))


def _calls(burst_ms: float, ms: float) -> int:
    return max(1, min(100, round(burst_ms / ms)))


def _ring(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The inputs and as many copies as alone fill the L2 twice, at most 63; none if the inputs are larger than that."""
    import torch

    if not inputs:
        return [()]
    size = sum(x.numel() * x.element_size() for x in inputs)
    cache = torch.cuda.get_device_properties(inputs[0].device).L2_cache_size
    copies = 1 if size > 2 * cache else min(64, 1 + -(-2 * cache // size))
    return [tuple(inputs)] + [tuple(x.clone() for x in inputs) for _ in range(copies - 1)]


def _callable(which: Callable | Which) -> Callable:
    """A function as it is; a kernel by its name, compiled and up to date."""
    from ..run.kernel import Kernel, load

    if isinstance(which, Kernel):
        return which.current()
    return which if callable(which) else load(which, device=DEVICE, quiet=True)


def measure(
    callables: dict[str, Callable | Which],
    inputs: Sequence[Tensor] = (),
    rounds: int = 7,
    *,
    burst_ms: float = 10.0,
    idle_ms: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Times each callable on `inputs`; returns a row per name and round: name, round, ms (milliseconds per call), and where NVML can be
    read sm_mhz, watts and throttle (`sensors`), as they were during the burst.

        bench.measure({"ours": "04", "SDPA": scaled_dot_product_attention}, (q, k, v))

    callables: functions of the inputs, or what `load` takes. A kernel whose file has changed is compiled again before it is timed.
    A burst is as many calls as take about `burst_ms` (1 to 100) between two CUDA events. In each round every callable
    has one burst, in an order shuffled anew; `idle_ms` of rest may go before each (60 keeps a power-capped card cool).
    The GPU is held until the host has queued a burst; one for which that took too long is taken again.
    The frame's attrs["method"] says which of this was done. RuntimeError without a GPU; ValueError for no rounds.
    """
    from ..run.kernel import as_loaded
    from ..run.reference import full_fp32

    require_gpu()
    if rounds < 1 or not callables:
        raise ValueError(f"measure() needs callables and at least one round, got {len(callables)} and {rounds}")
    callables = {name: _callable(c) for name, c in callables.items()}
    stopwatch, names, rows, seen = _Stopwatch(inputs), list(callables), [], []
    read = sensors.reader() or (lambda: None)
    with full_fp32():  # the common warm-up, in which a kernel within a function notices that its file has changed
        for call in callables.values():
            stopwatch.burst(call)
    with full_fp32(), as_loaded():
        plans = {name: stopwatch.plan(call, burst_ms) for name, call in callables.items()}
        shuffle = random.Random(seed)
        for r in range(rounds):
            shuffle.shuffle(names)
            for name in names:
                time.sleep(idle_ms / 1e3)
                ms, found = stopwatch.undisturbed(callables[name], *plans[name], read)
                rows.append((name, r, ms))
                seen.append(found)
    frame = pd.DataFrame(rows, columns=["name", "round", "ms"])
    if seen[0] is not None:
        frame[list(sensors.COLUMNS)] = seen
    rest = f", {idle_ms:g} ms idle before each" if idle_ms else ""
    rotated = "inputs larger than the L2 or rotated past it; " if inputs else ""
    frame.attrs["method"] = (
        f"CUDA events, bursts of about {burst_ms:g} ms, queued before the GPU begins, interleaved in random order, {rounds} rounds{rest}; "
        f"{rotated}TF32 off"
    )
    return frame


def energy(
    callables: dict[str, Callable | Which],
    inputs: Sequence[Tensor] = (),
    seconds: float = 0.5,
    rounds: int = 3,
    seed: int = 0,
    clock: Callable[[], Callable[[], float]] | None = None,
) -> pd.DataFrame:
    """Energy of a call, each callable running alone for `seconds`: name, round, ms (per call), joules (per call), watts.

    The names take turns in random order. clock: called before a burst; what it gives, called after it, tells the SMs' MHz in between
    (`power.clock`): then there are mhz, and sm_mhz and throttle as the sensors saw them during the burst. RuntimeError without a GPU,
    or where NVML doesn't tell the energy.
    """
    require_gpu()
    if (used := sensors.energy()) is None:
        raise RuntimeError("this GPU's energy can't be read: it takes `pip install nvidia-ml-py` and a data-centre GPU")
    from ..run.kernel import as_loaded
    from ..run.reference import full_fp32

    callables = {name: _callable(c) for name, c in callables.items()}
    stopwatch, names, rows = _Stopwatch(inputs), list(callables), []
    read, seen = sensors.reader() if clock else None, []
    look = (lambda: seen.append(read())) if read else None
    with full_fp32():
        plans = {}
        for name, call in callables.items():
            stopwatch.burst(call)
            plans[name] = max(1, round(1e3 * seconds / stopwatch.burst(call, 3)[0]))
    with full_fp32(), as_loaded():
        shuffle = random.Random(seed)
        for r in range(rounds):
            shuffle.shuffle(names)
            for name in names:
                stopwatch.burst(callables[name], max(1, plans[name] // 5))  # the power settles
                counted = clock() if clock else None
                before = used()
                ms, _ = stopwatch.burst(callables[name], plans[name], meanwhile=look)
                joules = (used() - before) / plans[name]
                rows.append((name, r, ms, joules, 1e3 * joules / ms, *([counted()] if counted else [])))
    frame = pd.DataFrame(rows, columns=["name", "round", "ms", "joules", "watts", *(["mhz"] if clock else [])])
    if seen:
        frame[["sm_mhz", "throttle"]] = [(mhz, throttle) for mhz, _, throttle in seen]
    return frame


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's scaled_dot_product_attention with one back end, a key of record.BACK_ENDS; k and v may have fewer heads than q."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, BACK_ENDS[backend])):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def attentions(without: Sequence[str] = (), *, causal: bool = False) -> dict[str, Callable]:
    """The public kernels by name, each called as f(q, k, v) on (B,H,N,D): PyTorch's scaled_dot_product_attention with each back end
    by itself, and FlashAttention-2, -3 and -4 where they can be imported (`libraries`). Nothing of `without` is touched."""
    found: dict[str, Callable] = {
        name: functools.partial(sdpa, name, causal=causal) for name in BACK_ENDS if name not in without
    }
    return found | libraries.found(without, causal=causal)


def peers(q: Tensor, k: Tensor, v: Tensor, without: Sequence[str] = (), *, causal: bool = False) -> dict[str, Callable]:
    """The `attentions` that accept these inputs (B,H,N,D), by name; each is called as f(q, k, v) and returns O.

    One that raises on these inputs is left out, out of memory included, and so are the names in `without`, untried. FLASH,
    CUDNN and FlashAttention take 16-bit inputs only. What a peer compiles at its first call it compiles here.
    """
    require_gpu()
    found = attentions(without, causal=causal)
    return {name: call for name, call in found.items() if refusal(call, q, k, v) is None}


def versions(names: Sequence[str]) -> dict[str, str]:
    """Of the peers with these names, the versions of those that are no part of PyTorch's own version: cuDNN and `libraries`."""
    import torch

    cudnn = torch.backends.cudnn.version() if CUDNN in names else None
    return ({CUDNN: f"cuDNN {cudnn}"} if cudnn else {}) | libraries.versions(names)


def softmax_peers(s: Tensor) -> dict[str, Callable]:
    """torch.softmax over the last dimension of s (..., N), and a plain copy of s, which no softmax can outrun."""
    import torch

    require_gpu()
    return {"torch.softmax": lambda s: torch.softmax(s, -1), "copy": lambda s: s.clone()}


def refusal(call: Callable, *inputs: Tensor) -> str | None:
    """Why `call` can't take these inputs; None if it can."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SDPA explains each refusal in warnings
            call(*inputs)
            torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return OUT_OF_MEMORY
    except Exception as error:  # every package has exceptions of its own
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def memory(call: Callable, inputs: Sequence[Tensor]) -> int | None:
    """Peak bytes one call allocates beyond what was there before, outputs included; None if it ran out of memory."""
    import torch

    require_gpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        call(*inputs)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return torch.cuda.max_memory_allocated() - before


def random_numbers(seed: int) -> Callable[..., Tensor]:
    """torch.randn on the GPU with a generator of its own, the same numbers for the same seed."""
    import torch

    return functools.partial(torch.randn, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def ceilings(rounds: int = 7, idle_ms: float = 60.0) -> pd.DataFrame:
    """What this GPU gives at best, measured: name, unit, round, value.

    copy: 1 GiB copied on the device, read + written bytes in TB/s. fp32 matmul (TF32 off) and fp16 matmul: 8192³ by
    cuBLAS, TFLOP/s.
    """
    import torch

    require_gpu()
    n = 8192
    randn = random_numbers(0)
    source, a, b = randn(1 << 28), randn(n, n), randn(n, n)
    target = torch.empty_like(source)
    a16, b16 = a.half(), b.half()
    work = {
        "copy": (lambda: target.copy_(source), 8 * source.numel(), "TB/s"),
        "fp32 matmul": (lambda: a @ b, 2 * n**3, "TFLOP/s"),
        "fp16 matmul": (lambda: a16 @ b16, 2 * n**3, "TFLOP/s"),
    }
    samples = measure({name: call for name, (call, _, _) in work.items()}, rounds=rounds, idle_ms=idle_ms)
    frame = samples[["name", "round"]].copy()
    frame.insert(1, "unit", [work[name][2] for name in samples["name"]])
    frame["value"] = [work[name][1] / ms / 1e9 for name, ms in zip(samples["name"], samples["ms"], strict=True)]
    frame.attrs = samples.attrs
    return frame


@contextlib.contextmanager
def watch() -> Iterator[dict]:
    """Watches the GPU's clock and power draw; the dict it yields holds what a record keeps of them after the block.
    RuntimeError without nvidia-smi."""
    if (tool := record.nvidia_smi()) is None:
        raise RuntimeError("no nvidia-smi, which clock and power are read with: it comes with NVIDIA's driver")
    seen: dict = {}
    fields = "clocks.sm,power.draw,utilization.gpu"
    command = [
        tool,
        f"--id={record.gpu_id()}",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    ]
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads is full after some minutes
        process = subprocess.Popen(command, stdout=log)
        try:
            yield seen
        finally:
            process.terminate()
            process.wait()
            log.seek(0)
            seen.update(summarise(log.read()))


def summarise(log: str) -> dict:
    """Minimum, median and maximum of the lines "SM clock in MHz, power in W, utilisation in %", idle ones left out."""
    rows = []
    for line in log.splitlines():
        try:
            clock, watts, busy = (float(x) for x in line.split(","))
        except ValueError:
            continue  # the last line, cut off
        if busy > 0:
            rows.append((clock, watts))
    if not rows:
        return {}
    columns = zip(("sm_clock_mhz", "power_w"), zip(*rows, strict=True), strict=True)
    return {k: {"min": min(x), "median": statistics.median(x), "max": max(x)} for k, x in columns}
