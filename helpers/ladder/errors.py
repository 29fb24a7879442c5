"""What can go wrong with a kernel, as exceptions that a notebook shows in a few lines."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

HELPERS = Path(__file__).resolve().parents[1]


class CompileError(RuntimeError):
    """The compiler refused the source. The text is the compiler's own, with the reader's file and line."""

    def _render_traceback_(self) -> list[str]:
        """Jupyter shows this in place of a stack of build machinery."""
        return [f"CompileError: {self}"]


class KernelError(RuntimeError):
    """A launch failed: CUDA's error with its name and text, or what the emulator found."""

    def _render_traceback_(self) -> list[str]:
        return _in_short(self, "KernelError")


class ToolkitError(RuntimeError):
    """nvcc, a host compiler, torch or Python itself is missing or unusable. The text is one sentence and names the fix."""

    def _render_traceback_(self) -> list[str]:
        return [f"ToolkitError: {self}"]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the notebook's stop button. The text says what was being done; Jupyter shows it alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}" if str(self) else "KeyboardInterrupt"]


class CheckoutError(RuntimeError):
    """The package is installed, but there are no kernels and records. The text is one sentence and names the fix."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckoutError: {self}"]


class CallError(ValueError):
    """A call that a kernel's contract doesn't allow: what came, and what is allowed. It is a ValueError, and says so."""

    def _render_traceback_(self) -> list[str]:
        return _in_short(self, "ValueError")


def _in_short(error: Exception, name: str) -> list[str]:
    """What Jupyter shows: the reader's own line that called the kernel, and the sentence."""
    folders = (HELPERS, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    libraries = tuple(f"{folder}{os.sep}" for folder in folders)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame.line for frame in frames if frame.line and not frame.filename.startswith(libraries)]
    return [*(f"----> {line}" for line in theirs[-1:]), f"{name}: {error}"]
