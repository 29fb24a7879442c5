"""`%%kernel [name]`: compiles the CUDA in the cell, checks it against the reference, times it, and prints one line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .check import check
from .errors import CompileError, KernelError
from .kernel import Kernel, load, summary
from .toolkit import ToolkitError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

TIMED = (1, 8, 1024, 64)  # B, H, N, D of the one timing, on a GPU only


def register(shell: InteractiveShell) -> None:
    """Makes `%%kernel` known to IPython; `%load_ext helpers` calls it."""

    def kernel(line: str, cell: str) -> None:
        run_cell(shell, line, cell)

    kernel.__doc__ = __doc__
    shell.register_magic_function(kernel, "cell", "kernel")


def run_cell(shell: InteractiveShell, line: str, cell: str) -> None:
    """Builds the cell and binds the Kernel to the name on the magic's line (`kernel` if there is none).

    What goes wrong is printed and never raised, and the name keeps what it was bound to when the cell doesn't compile.
    """
    name = line.strip() or "kernel"
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return print(f"%%kernel takes one name for the kernel, {name!r} came")
    try:
        built = load(source="\n" + cell, quiet=True)  # lines as the notebook counts them: the magic's is the first
    except (CompileError, KernelError, ToolkitError, ValueError) as error:
        return print(error)
    shell.user_ns[name] = built
    report = check(built)
    verdict = f"error {report.worst:.2g} of the budget" if report.ok else "wrong"
    called = "" if name == built.rung.stem else f"{name}: "
    print(f"{called}{summary(built)} · {verdict}{_time(built)}")
    if not report.ok:
        print(report)


def _time(kernel: Kernel) -> str:
    """The median time of one call, on a GPU; the emulator's time says nothing about a GPU's."""
    import torch

    from . import bench

    if kernel.backend != "nvcc":
        return ""
    B, H, N, D = TIMED
    shapes = [(B, H, N, N)] if kernel.rung.op == "softmax" else [(B, H, N, D)] * 3
    inputs = [torch.randn(shape, device="cuda") for shape in shapes]
    samples = bench.measure({"kernel": lambda: kernel(*inputs)})
    return f" · {samples['ms'].median():.3f} ms at B{B} H{H} N{N}" + ("" if kernel.rung.op == "softmax" else f" D{D}")
