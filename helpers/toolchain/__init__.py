"""From a kernel's text to machine code: toolchains, compilation with nvcc or the host compiler, and the resulting SASS."""

from .compile import build
from .toolkit import matching_toolkit

__all__ = ["build", "matching_toolkit"]
