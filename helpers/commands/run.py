"""Calls a kernel once on random inputs and summarises its outputs; exits with 1 if it fails.

Prints what the kernel printed, the shape and range of each output, and the seconds on the emulator or the milliseconds on a
GPU, where the call is repeated for its time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .arguments import add_device, add_inputs, add_kernel, described, inputs, loaded

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES = ("run 04", "run mine.cu --B 2 --H 8 --N 1024 --D 128 --dtype bf16 --causal")


def options(parser: argparse.ArgumentParser) -> None:
    add_kernel(parser)
    add_device(parser)
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..run.reference import OUTPUTS

    kernel = loaded(described(arguments), arguments.device)
    tensors, asked = inputs(kernel.rung, arguments, kernel.device)
    start = time.perf_counter()
    outputs = kernel(*tensors, **asked)
    took = f"{time.perf_counter() - start:.2f} s on the emulator"
    if kernel.device == "cuda":
        took = f"{_milliseconds(lambda: kernel(*tensors, **asked)):.3f} ms on the GPU"
    for name, output in zip(OUTPUTS[kernel.rung.op], outputs, strict=True):
        print(_summary(name, output))
    print(took)
    return 0


def _milliseconds(call: Callable) -> float:
    """GPU time of one more call: the first one has loaded the module."""
    import torch

    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _summary(name: str, output: Tensor) -> str:
    """ "o  (1, 2, 256, 64) float32  -0.42 … 0.39, mean 0.001"; the range is that of the finite elements."""
    finite = output[output.isfinite()].double()
    text = f"{name:<4}{tuple(output.shape)} {str(output.dtype).removeprefix('torch.')}"
    if finite.numel():
        text += f"  {finite.min():.4g} … {finite.max():.4g}, mean {finite.mean():.4g}"
    counts = {"NaN": output.isnan().sum().item(), "infinite": output.isinf().sum().item()}
    return text + "".join(f", {count} {what}" for what, count in counts.items() if count)
