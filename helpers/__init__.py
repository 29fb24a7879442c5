"""FlashAttention, one kernel at a time: load a kernel, check it, time it, look inside it.

Functions: `load`, `check`, `xray`, `doctor`, `rung`, `rungs`. Modules: `bench`, `plot`, `show`, `record`, `sass`, `reference`.
Importing this package doesn't import torch. In Jupyter, `%load_ext helpers` adds the cell magic `%%kernel`.
"""

from __future__ import annotations

from typing import Any

# `check`, `doctor` and `xray` are modules too: importing them here, before the functions are bound, keeps the functions.
from .check import check
from .doctor import doctor
from .errors import CompileError, KernelError
from .kernel import Kernel, load
from .ladder import Rung, rung, rungs
from .xray import Xray, xray

__all__ = ["CompileError", "Kernel", "KernelError", "Rung", "Xray", "check", "doctor", "load", "rung", "rungs", "xray"]


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext helpers` calls: registers `%%kernel`."""
    from .magic import register

    register(shell)
