"""Bytes that a kernel asks of each tensor, counted by the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ladder.rung import Which
from .kernel import load
from .xray import on_the_cpu

if TYPE_CHECKING:
    import pandas
    import torch


def traffic(kernel: Which, *inputs: torch.Tensor, **options: Any) -> pandas.DataFrame:
    """Bytes that the kernel's threads ask of each tensor, counted exactly by running it on the emulator.

        traffic("04", q, k, v)

    kernel: what `load` takes. inputs, options: those of a call, their tensors on any device. Index: tensor; columns: ``bytes_read``,
    ``bytes_written``, ``size_bytes`` and ``reads_per_byte`` (how often each byte is read). Caches are not modelled: these are requests.
    """
    import pandas

    kernel = load(kernel, device="cpu", quiet=True)
    copies: dict[int, torch.Tensor] = {}
    kernel(*on_the_cpu(inputs, copies), **{name: on_the_cpu(value, copies) for name, value in options.items()})
    launcher = kernel.launcher
    rows = {
        name: {
            "bytes_read": read,
            "bytes_written": written,
            "size_bytes": launcher.sizes[name],
            "reads_per_byte": read / size if (size := launcher.sizes[name]) else 0.0,
        }
        for name, (read, written) in launcher.counters.items()
    }
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("tensor")
