"""`%%kernel [name]`: compiles the CUDA in the cell, checks it against the reference, times it, and prints one line.

%%kernel mine
#include <fa/args.cuh>
...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.display import display

from .ladder.errors import CompileError, KernelError, ToolkitError
from .ladder.rung import Rung
from .run.check import check
from .run.kernel import BrokenKernel, Kernel, load, summary

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

B, H, N = 1, 8, 1024  # of the one timing, on a GPU only


def register(shell: InteractiveShell) -> None:
    """Makes `%%kernel` and `%%region` known to IPython; `%load_ext helpers` calls it."""

    def kernel(line: str, cell: str) -> None:
        run_cell(shell, line, cell)

    def region(line: str, cell: str) -> None:
        run_region(shell, line, cell)

    kernel.__doc__ = __doc__
    shell.register_magic_function(kernel, "cell", "kernel")
    from .lessons import typed

    region.__doc__ = typed.__doc__
    shell.register_magic_function(region, "cell", "region")


def run_region(shell: InteractiveShell, line: str, cell: str) -> None:
    """Judges the cell as the body of a rung's regions and binds the Kernel to the name behind `->`, by default the (first) region's.

    What goes wrong is printed and not raised, and the name then stands for something that raises the same error when it is used.
    """
    from .lessons import typed

    words, _, name = (part.strip() for part in line.partition("->"))
    rung, *regions = words.split() or [""]
    name = name or (regions[0] if regions else "")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return print(
            "%%region takes a rung, one or more of its regions and, behind ->, a name: %%region 04 online_update -> mine"
        )
    shell.user_ns[name] = BrokenKernel(KernelError(f"%%region {line} was stopped before it was judged; run it again"))
    made = typed.attempt(rung, tuple(regions), cell)
    shell.user_ns[name] = BrokenKernel(made.error) if made.error is not None or made.kernel is None else made.kernel
    print(made)


def run_cell(shell: InteractiveShell, line: str, cell: str) -> None:
    """Builds the cell and binds the Kernel to the name on the magic's line (`kernel` if there is none).

    What goes wrong is printed and not raised. If the cell can't be loaded, the name is bound to something that raises the same
    error when it is used: never to the kernel that an earlier run of the cell has made.
    """
    name = line.strip() or "kernel"
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return print(f"%%kernel takes one name for the kernel, got {name!r}")
    shell.user_ns[name] = BrokenKernel(KernelError(f"%%kernel {name} was stopped before it had compiled; run it again"))
    try:
        built = load(source="\n" + cell, quiet=True)  # lines as the notebook counts them: the magic's is the first
    except (CompileError, KernelError, ToolkitError, ValueError) as error:
        shell.user_ns[name] = BrokenKernel(error)
        return print(error)
    shell.user_ns[name] = built
    report = check(built)
    verdict = f"error {report.worst:.2g} of the budget" if report.ok else "wrong"
    called = "" if name == built.rung.stem else f"{name}: "
    print(f"{called}{summary(built)} · {verdict}{_time(built)}")
    if not report.ok:
        display(report)


def _time(kernel: Kernel) -> str:
    """The median time of one call, on a GPU; the emulator's time says nothing about a GPU's."""
    from .measure import bench
    from .run import merging
    from .run.reference import random_inputs

    if kernel.backend != "nvcc":
        return ""
    shape = timed(kernel.rung)
    if kernel.rung.op == "merge":
        inputs = merging.workload((*shape[:3], shape[4]), device="cuda")
    else:
        inputs = random_inputs(kernel.rung, shape, device="cuda")
    try:
        samples = bench.measure({"kernel": kernel}, inputs)
    except KernelError as error:  # a kernel that fails its check may fail here too
        return f" · not timed: {error}"
    D = "" if kernel.rung.op == "softmax" else f" D{shape[-1]}"
    return f" · {samples['ms'].median():.3f} ms at B{B} H{H} N{N}{D}"


def timed(rung: Rung) -> tuple[int, int, int, int, int]:
    """(B, H, Nq, Nk, D) that a rung is timed at, with a head dimension that it takes."""
    return B, H, N, N, rung.usual_D
