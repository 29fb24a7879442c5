"""Small kernels for the emulator's tests: a body of CUDA, the tensors it touches, and what came of it."""

from __future__ import annotations

import textwrap
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


def build(source: str, device: str = "cpu") -> Launcher | nvcc.Launcher:
    """The launcher of a source, compiled for the emulator (where it is stopped after a minute) or, for "cuda", by nvcc."""
    launcher = (Launcher if device == "cpu" else nvcc.Launcher)(Rung("test", FILE, source))
    launcher.compile()
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
