"""Small kernels for the emulator's tests: a body of CUDA, the tensors it touches, and what came of it."""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from helpers.emulator import Launcher
from helpers.emulator.trace import Trace
from helpers.ladder.contract import Call, FaArgs
from helpers.ladder.rung import Rung
from helpers.toolchain import nvcc

FILE = Path("somewhere/reader.cu")


def program(body: str, shape: str = "1, 32", before: str = "", launch: str = "") -> str:
    """A whole rung around a kernel body. It sees `out` (float), `in` (float), `n` (elements of out) and `a` (fa_args)."""
    return (
        f"#include <fa/args.cuh>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{textwrap.dedent(before)}\n"
        "__global__ void kernel(const fa_args a) {\n"
        "  [[maybe_unused]] float* out = static_cast<float*>(a.O);\n"
        "  [[maybe_unused]] const float* in = static_cast<const float*>(a.Q);\n"
        "  [[maybe_unused]] const int n = a.Nq;\n"
        f"{textwrap.dedent(body)}\n}}\n"
        'extern "C" cudaError_t fa_launch(const fa_args* args, cudaStream_t stream) {\n'
        "  const fa_args a = *args;\n"
        f"{launch or f'  kernel<<<{shape}>>>(a);'}\n"
        "  return cudaGetLastError();\n}\n"
    )


def programs(kernels: Sequence[tuple[str, str]]) -> str:
    """One rung around many kernels, each a body as in `program` and a shape, of which fa_args::H says the number."""
    declared = """
  [[maybe_unused]] float* out = static_cast<float*>(a.O);
  [[maybe_unused]] const float* in = static_cast<const float*>(a.Q);
  [[maybe_unused]] const int n = a.Nq;
"""
    each = "\n".join(
        f"__global__ void kernel_{i}(const fa_args a) {{{declared}{textwrap.dedent(body)}\n}}"
        for i, (body, _) in enumerate(kernels)
    )
    launches = [f"  if (a.H == {i}) kernel_{i}<<<{shape}>>>(a);" for i, (_, shape) in enumerate(kernels)]
    return program("", before=each, launch="\n".join(launches))


def build(source: str, device: str = "cpu") -> Launcher | nvcc.Launcher:
    """The launcher of a source on the emulator (where it is stopped after a minute) or, for "cuda", by nvcc. It is compiled
    for what is done with it first: a launch, a trace, or `compile` alone."""
    launcher = (Launcher if device == "cpu" else nvcc.Launcher)(Rung("test", FILE, source))
    launcher.timeout = 60
    return launcher


def call(out: torch.Tensor, H: int = 1, **tensors: torch.Tensor) -> Call:
    """A call that writes `out` (O) and is given the other tensors by name, with fa_args::H to choose by. What fa_args has no
    field for is workspace."""
    args = FaArgs(B=1, H=H, Nq=out.numel(), Nk=1, D=1, scale=1.0, O=out.data_ptr())
    inputs = {name: t for name, t in tensors.items() if hasattr(args, name)}
    workspace = {name: t for name, t in tensors.items() if name not in inputs}
    for name, t in inputs.items():
        setattr(args, name, t.data_ptr())
    args.workspace[: len(workspace)] = [t.data_ptr() for t in workspace.values()]
    return Call(args, inputs, {"O": out}, workspace)


def launch(launcher: Launcher, out: torch.Tensor, H: int = 1, **tensors: torch.Tensor) -> torch.Tensor:
    """Runs the kernel by `call`; gives back `out`."""
    launcher.launch(call(out, H, **tensors))
    return out


def trace(launcher: Launcher, out: torch.Tensor, H: int = 1, **tensors: torch.Tensor) -> Trace:
    """Traces the kernel by `call`."""
    return launcher.trace(call(out, H, **tensors))


def run(body: str, out: int | torch.Tensor = 32, *, shape: str = "1, 32", before: str = "", **tensors) -> torch.Tensor:
    """The output of a kernel with this body; unwritten elements stay NaN."""
    out = torch.full((out,), float("nan")) if isinstance(out, int) else out
    return launch(build(program(body, shape, before)), out, **tensors)


def line_of(source: str, mark: str = "// here") -> int:
    """The line of `source`, counted from 1, that holds `mark`."""
    lines = [i for i, line in enumerate(source.split("\n"), 1) if mark in line]
    assert len(lines) == 1, f"{mark!r} stands on lines {lines}"
    return lines[0]


@contextlib.contextmanager
def ctrl_c(seconds: float = 0.3) -> Iterator[None]:
    """Ctrl-C in the main thread after so many seconds; also where SIGINT is ignored, as in a job that a shell has put in
    the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)


def processor_seconds(call: Callable[[], object]) -> float:
    """Seconds that this process computes for during `call()`, in units of a loop in Python: about the same on a fast machine
    and on a slow one, alone or beside others."""
    start = time.process_time()
    sum(i % 7 for i in range(1_000_000))
    loop = time.process_time() - start
    start = time.process_time()
    call()
    return (time.process_time() - start) / loop
