"""Timing on a GPU: samples, never conclusions.

Callables run interleaved in random order over at least seven rounds, in bursts between two CUDA events, on inputs that
rotate past the L2 cache. data/README.md says why each of these. `python -m helpers.bench` records every rung on this
machine's GPU; there are no CPU timings: a CPU time beside a GPU time means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from .. import record
from ..ladder.paths import ROOT
from ..ladder.rung import Which
from ..record import SHAPE, forward_bytes, forward_flops, ratio, softmax_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ceilings",
    "forward_bytes",
    "forward_flops",
    "measure",
    "memory",
    "peers",
    "ratio",
    "softmax_bytes",
    "softmax_peers",
]

NO_GPU = "timings are recorded on a GPU only, and this machine has none; the plots show the recorded ones of data/"
TOKENS, WIDTH = 16384, 2048  # B*N and H*D of the headline workload
DEVICE = "cuda"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BURST_MS = {"fp32": 10.0, "fp16": 5.0, "bf16": 5.0}  # two dtypes in the time of one
MATH_MAX_N = 2048  # in 16 bits SDPA MATH forms S in float32: beyond this it costs more time than all others together


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)


def _ring(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The inputs and as many copies as together fill the L2 twice; none if they exceed it alone (at most 64)."""
    import torch

    if not inputs:
        return [()]
    size = sum(x.numel() * x.element_size() for x in inputs)
    cache = torch.cuda.get_device_properties(inputs[0].device).L2_cache_size
    copies = 1 if size > 2 * cache else min(64, 1 + -(-2 * cache // size))
    return [tuple(inputs)] + [tuple(x.clone() for x in inputs) for _ in range(copies - 1)]


def measure(
    callables: dict[str, Callable | Which],
    inputs: Sequence[Tensor] = (),
    rounds: int = 7,
    *,
    burst_ms: float = 10.0,
    idle_ms: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Times each callable on `inputs`; returns a row per name and round: name, round, ms (milliseconds per call).

        bench.measure({"ours": "04", "SDPA": scaled_dot_product_attention}, (q, k, v))

    callables: functions of the inputs, or what `load` takes. A kernel whose file has changed is compiled again before it is timed.
    A burst is as many calls as take about `burst_ms` (1 to 100) between two CUDA events. In each round every callable
    has one burst, in an order shuffled anew; `idle_ms` of rest may go before each (60 keeps a power-capped card cool).
    Where the host needs longer to issue calls than the GPU to run them, the GPU is held till the burst is queued.
    The frame's attrs["method"] says which of this was done. RuntimeError without a GPU; ValueError for no rounds.
    """
    import torch

    from ..run.kernel import as_loaded, load
    from ..run.reference import full_fp32

    _require_gpu()
    if rounds < 1 or not callables:
        raise ValueError(f"measure() needs callables and at least one round, got {len(callables)} and {rounds}")
    callables = {name: c if callable(c) else load(c, device=DEVICE, quiet=True) for name, c in callables.items()}
    ring = _ring(inputs)
    names, rows = list(callables), []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    kilohertz = getattr(torch.cuda.get_device_properties(0), "clock_rate", 2_000_000)

    def burst(call: Callable, calls: int, hold_ms: float) -> tuple[float, float]:
        """ms per call on the GPU and on the host."""
        if hold_ms:
            torch.cuda._sleep(int(hold_ms * kilohertz))
        start.record()
        before = time.perf_counter()
        for i in range(calls):
            call(*ring[i % len(ring)])
        host = (time.perf_counter() - before) * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls, host / calls

    with full_fp32():
        for call in callables.values():  # the common warm-up, in which kernels notice that their files have changed
            burst(call, 1, 0)
    with full_fp32(), as_loaded():
        plan = {}
        for name, call in callables.items():  # how long each takes
            gpu, host = burst(call, 1, 0)
            calls = max(1, min(100, round(burst_ms / gpu)))
            if calls > 1:
                gpu, host = min(burst(call, calls, 0) for _ in range(2))
                calls = max(1, min(100, round(burst_ms / gpu)))
            plan[name] = calls, 2 * calls * host if calls > 1 and host > gpu / 2 else 0.0
        shuffle = random.Random(seed)
        for r in range(rounds):
            shuffle.shuffle(names)
            for name in names:
                time.sleep(idle_ms / 1e3)
                rows.append((name, r, burst(callables[name], *plan[name])[0]))
    frame = pd.DataFrame(rows, columns=["name", "round", "ms"])
    rest = f", {idle_ms:g} ms idle before each" if idle_ms else ""
    frame.attrs["method"] = (
        f"CUDA events, bursts of about {burst_ms:g} ms interleaved in random order, {rounds} rounds{rest}; "
        "inputs rotated past the L2; TF32 off"
    )
    return frame


def peers(q: Tensor, k: Tensor, v: Tensor, without: Sequence[str] = ()) -> dict[str, Callable]:
    """The public kernels that accept these inputs (B,H,N,D), by name; each is called as f(q, k, v) and returns O.

    PyTorch's scaled_dot_product_attention with each back end by itself, and flash_attn where it can be imported (it
    wants (B,N,H,D): the transposes are views). One that raises on these inputs is left out, out of memory included, and
    so are the names in `without`, untried. FLASH and CUDNN take 16-bit inputs only.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _require_gpu()

    def sdpa(backend, q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    backends = {
        "SDPA MATH": SDPBackend.MATH,
        "SDPA EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA FLASH": SDPBackend.FLASH_ATTENTION,
        "SDPA CUDNN": SDPBackend.CUDNN_ATTENTION,
    }
    found = {name: functools.partial(sdpa, backend) for name, backend in backends.items()}
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        def flash_attn(q, k, v):
            return flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

        found["flash_attn"] = flash_attn
    return {name: call for name, call in found.items() if name not in without and _refusal(call, q, k, v) is None}


def softmax_peers(s: Tensor) -> dict[str, Callable]:
    """torch.softmax over the last dimension of s (..., N), and a plain copy of s, which no softmax can outrun."""
    import torch

    _require_gpu()
    return {"torch.softmax": lambda s: torch.softmax(s, -1), "copy": lambda s: s.clone()}


def _refusal(call: Callable, *inputs: Tensor) -> str | None:
    """Why `call` can't take these inputs; None if it can."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SDPA explains each refusal in warnings
            call(*inputs)
            torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def memory(call: Callable, inputs: Sequence[Tensor]) -> int | None:
    """Peak bytes one call allocates beyond what was there before, outputs included; None if it ran out of memory."""
    import torch

    _require_gpu()
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


def ceilings(rounds: int = 7, idle_ms: float = 60.0) -> pd.DataFrame:
    """What this GPU gives at best, measured: name, unit, round, value.

    copy: 1 GiB copied on the device, read + written bytes in TB/s. fp32 matmul (TF32 off) and fp16 matmul: 8192³ by
    cuBLAS, TFLOP/s.
    """
    import torch

    _require_gpu()
    n = 8192
    randn = _randn(0)
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
    """Watches the GPU's clock and power draw; the dict it yields holds what a record keeps of them after the block."""
    seen: dict = {}
    fields = "clocks.sm,power.draw,utilization.gpu"
    command = [
        record.nvidia_smi(),
        f"--id={record.gpu_id()}",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield seen
    finally:
        process.terminate()
        seen.update(summarise(process.communicate()[0]))


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


# Recording


def shapes(op: str, quick: bool = False, headline: bool = False) -> list[tuple[int, int, int, int, int]]:
    """(B, H, Nq, Nk, D) of every recorded shape: the headline workload and, unless `headline`, the grid of the LeetCUDA log;
    for softmax (B = H = D = 1) 2^26 elements in rows of 256 to 1 M, and three lengths that are no multiple of 4."""
    if op == "softmax":
        even = [256 << i for i in range(0, 13, 2 if quick else 1)]
        return [(1, 1, (1 << 26) // n, n, 1) for n in [*even, *([] if quick else [1023, 4097, 50257])]]
    lengths = LENGTHS[1:4] if quick else LENGTHS
    found = [(TOKENS // n, WIDTH // d, n, n, d) for d in (64, 128) for n in lengths]
    if not quick and not headline:
        found += [(b, h, n, n, d) for d in (64, 128) for b in (8, 16) for h in (8, 16) for n in (256, 512, 1024)]
    return list(dict.fromkeys(found))


def _randn(seed: int) -> Callable[..., Tensor]:
    import torch

    return functools.partial(torch.randn, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def _inputs(op: str, shape: tuple[int, int, int, int, int], dtype: str = "fp32") -> list[Tensor]:
    from ..run.reference import DTYPES

    B, H, Nq, Nk, D = shape
    make = _randn(0)
    made = [make(Nq, Nk)] if op == "softmax" else [make(B, H, Nq, D), make(B, H, Nk, D), make(B, H, Nk, D)]
    return [x.to(DTYPES[dtype]) for x in made]


def forward(
    kernel: Callable,
    stem: str,
    op: str,
    quick: bool = False,
    dtypes: Sequence[str] = ("fp32",),
    headline: bool = False,
) -> tuple[pd.DataFrame, list[str]]:
    """Samples of the kernel and its peers at every shape and dtype, and what was skipped and why."""
    import torch

    frames, skipped = [], []
    for dtype, shape in ((d, s) for d in dtypes for s in shapes(op, quick, headline)):
        inputs = _inputs(op, shape, dtype)
        costly = ("SDPA MATH",) if dtype != "fp32" and shape[3] > MATH_MAX_N else ()
        others = softmax_peers(*inputs) if op == "softmax" else peers(*inputs, without=costly)
        refusal = _refusal(kernel, *inputs)
        if refusal:
            skipped.append(f"{stem} at (B,H,Nq,Nk,D) = {shape}, {dtype}: {refusal}")
        callables = ({} if refusal else {stem: kernel}) | others
        frame = measure(callables, inputs, burst_ms=BURST_MS[dtype])
        frame = frame.assign(dtype=dtype, **dict(zip(SHAPE, shape, strict=True)))
        frames.append(frame[["name", "dtype", *SHAPE, "round", "ms"]])
        best = frame.groupby("name", sort=False)["ms"].median()
        print(f"  {dtype} {shape}: " + ", ".join(f"{n} {x:.3f} ms" for n, x in best.items()), flush=True)
        del inputs
        torch.cuda.empty_cache()
    result = pd.concat(frames, ignore_index=True)
    result.attrs = frame.attrs
    if not quick and op == "attention" and any(d != "fp32" for d in dtypes):
        skipped.append(f"SDPA MATH beyond N = {MATH_MAX_N} in 16 bits, where it would take most of the time")
    return result, skipped


def beside_flash(kernel: Callable, name: str, dtype: str, dims: Sequence[int] = (64, 128)) -> pd.DataFrame:
    """Samples of a kernel and of SDPA FLASH (in fp32, of SDPA EFFICIENT) at the headline workload from N = 1024 on.

    RuntimeError with the kernel's own words if it takes none of these shapes.
    """
    others = ("SDPA MATH", "SDPA CUDNN", "flash_attn", *(["SDPA EFFICIENT"] if dtype != "fp32" else []))
    frames, refusals = [], []
    for shape in shapes("attention"):
        B, H, N, _, D = shape
        if B * N != TOKENS or H * D != WIDTH or N < LENGTHS[1] or D not in dims:
            continue
        inputs = _inputs("attention", shape, dtype)
        if refusal := _refusal(kernel, *inputs):
            refusals.append(refusal)
            continue
        frame = measure({name: kernel} | peers(*inputs, without=others), inputs, burst_ms=BURST_MS[dtype])
        frames.append(frame.assign(dtype=dtype, **dict(zip(SHAPE, shape, strict=True))))
    if not frames:
        raise RuntimeError(f"{name} takes no shape of the headline workload: {refusals[0]}")
    return pd.concat(frames, ignore_index=True)


def errors(
    kernel: Callable,
    op: str,
    lengths: Sequence[int] = tuple(256 << i for i in range(9)),
    dtypes: Sequence[str] = ("fp32",),
) -> pd.DataFrame:
    """Error, PyTorch's error at the same precision and the budget against N, for each dtype: two heads of Nq = 256
    queries over N keys (softmax: 64 rows; backward: N up to 16384, the reference forms S whole)."""
    from ..run.check import compare
    from ..run.reference import DTYPES, Case

    rows, back = [], op == "attention_backward"
    for dtype, D in ((t, d) for t in dtypes for d in ((1,) if op == "softmax" else (64, 128))):
        for n in (n for n in lengths if not back or n <= 16384):
            make = _randn(n)
            sizes = [(64, n)] if op == "softmax" else [(1, 2, 256, D), (1, 2, n, D), (1, 2, n, D)]
            x = [make(*size).to(DTYPES[dtype]) for size in (*sizes, *(sizes[:1] if back else ()))]
            case = Case(f"N={n}", s=x[0]) if op == "softmax" else Case(f"N={n}", *x[:3], do=x[3] if back else None)
            for c in compare(case, kernel(*case.inputs)):
                rows.append((dtype, sizes[0][-2], n, D, c.output, c.error, c.pytorch_error, c.budget))
    return pd.DataFrame(rows, columns=["dtype", "Nq", "Nk", "D", "output", "error", "pytorch_error", "budget"])


def memories(
    kernel: Callable,
    stem: str,
    lengths: Sequence[int] = tuple(512 << i for i in range(8)),
    dtypes: Sequence[str] = ("fp32",),
) -> pd.DataFrame:
    """Peak memory of the kernel and its peers for one head of D = 64, for each dtype."""
    rows = []
    for dtype, n in ((t, n) for t in dtypes for n in lengths):
        shape = (1, 1, n, n, 64)
        inputs = _inputs("attention", shape, dtype)
        for name, call in ({stem: kernel} | peers(*inputs)).items():
            rows.append((name, dtype, *shape, memory(call, inputs)))
    return pd.DataFrame(rows, columns=["name", "dtype", *SHAPE, "bytes"]).astype({"bytes": "Int64"})


BUILD = """
import sys, time
from helpers import load
from helpers import rung
import torch
stem, device = sys.argv[1:]
torch.zeros(1, device=device)
start = time.perf_counter()
import pandas, torch.utils.cpp_extension
print("import", time.perf_counter() - start)
source = rung(stem).source
edited = source.replace("fa_launch(", "fa_launch(/* an edit */ ")
for phase, text in (("cold", source), ("edit", edited), ("unchanged", edited), ("reverted", source)):
    start = time.perf_counter()
    load(source=text, device=device, quiet=True)
    print(phase, time.perf_counter() - start, flush=True)
"""


def builds(which: str, times: int = 1) -> pd.DataFrame:
    """Of the rung `which` (a stem or a path): seconds of a load in a new process with an empty cache: cold, after an edit, unchanged, reverted; and of the
    imports that come before the first one, paid once (phase import)."""
    rows = []
    for i in range(times):
        cache = tempfile.mkdtemp(prefix="fa-bench-")
        try:
            done = subprocess.run(
                [sys.executable, "-c", BUILD, which, DEVICE],
                check=False,
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | {"FA_CACHE": cache},
            )
            if done.returncode:
                raise RuntimeError(f"building {which} failed: {done.stderr.strip()[-800:]}")
        finally:
            shutil.rmtree(cache, ignore_errors=True)
        rows += [(phase, i, float(s)) for phase, s in (line.split() for line in done.stdout.splitlines()[-5:])]
    return pd.DataFrame(rows, columns=["phase", "round", "seconds"])


def record_rung(stem: str, quick: bool = False) -> None:
    """Checks a rung, then measures and records it and its peers; `quick` times a few shapes and records nothing.

    AssertionError if the rung is wrong: a wrong kernel has no speed.
    """
    from ..ladder.rung import rung
    from ..record import goals
    from ..run import reference
    from ..run.check import check
    from ..run.kernel import load
    from . import workloads as bench_model

    found, kernel = rung(stem), load(stem, device=DEVICE, quiet=True)
    stem = found.stem
    print(check(kernel, reference.cases(found, DEVICE, "small")).require(), flush=True)
    for kind in record.kinds(found):
        skipped: list[str] = []
        with watch() as seen:
            if kind == "forward":
                headline = bool(found.features)  # the grid of the LeetCUDA log is for kernels of its kind
                frame, skipped = forward(kernel, stem, found.op, quick, found.dtypes, headline)
            else:
                frame = bench_model.table(kind, kernel, found, quick)
        if not quick:  # at once: what has been measured is kept, however the rest ends
            extra = seen | ({"skipped": skipped} if kind == "forward" else {})
            print("  wrote", record.save(stem, kind, frame, extra=extra).name, flush=True)
        if kind == "decode":
            print(record.bandwidths(frame).query("chosen == 1").round(3).to_string(index=False), flush=True)
        elif {stem, "SDPA FLASH"} <= set(frame["name"] if "name" in frame else ()):
            print(kind, record.summary(frame, stem, "SDPA FLASH").round(3).to_string(index=False), flush=True)
    if quick:
        return
    if len(verdicts := goals.verdicts([stem])):
        print(verdicts.to_string(index=False), flush=True)
    rest: dict[str, Callable[[], pd.DataFrame]] = {"error": lambda: errors(kernel, found.op, dtypes=found.dtypes)}
    if found.op == "attention" and "forward" in record.kinds(found):
        rest["memory"] = lambda: memories(kernel, stem, dtypes=found.dtypes)
    rest["build"] = lambda: builds(str(found.path))
    for kind, made in rest.items():
        print("  wrote", record.save(stem, kind, made()).name, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m helpers.bench [stems] [--quick]`; 0, or 1 with one sentence where there is no GPU."""
    import torch

    from ..ladder.rung import rungs

    parser = argparse.ArgumentParser(
        prog="python -m helpers.bench", description="Record every rung on this GPU in data/."
    )
    parser.add_argument("stems", nargs="*", help="rungs to record (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few shapes, printed and not recorded")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 1
    begun = time.perf_counter()
    with watch() as seen:
        frame = ceilings()
    print(frame.groupby(["name", "unit"])["value"].median().to_string(), flush=True)
    if not options.quick and not options.stems:
        record.save("device", "ceilings", frame, extra=seen)
    for stem in options.stems or [r.stem for r in rungs()]:
        before = time.perf_counter()
        print(stem, flush=True)
        record_rung(stem, options.quick)
        print(f"  {time.perf_counter() - before:.0f} s", flush=True)
    print(f"done in {time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
