"""FlashAttention, one kernel at a time: load a kernel, check it, time it, look inside it.

Functions: `load`, `check`, `doctor`, `rung`, `rungs`. Modules: `bench`, `plot`, `show`, `record`, `sass`, `reference`.
Importing this package doesn't import torch.
"""

from __future__ import annotations

from .errors import CompileError, KernelError
from .kernel import Kernel, load
from .ladder import Rung, rung, rungs

__all__ = ["CompileError", "Kernel", "KernelError", "Rung", "load", "rung", "rungs"]
