"""What can go wrong with a kernel, as exceptions; a call that breaks a shape contract raises ValueError."""

from __future__ import annotations


class CompileError(RuntimeError):
    """The compiler refused the source. The text is the compiler's own, with the reader's file and line."""

    def _render_traceback_(self) -> list[str]:
        """Jupyter shows this in place of a stack of build machinery."""
        return [f"CompileError: {self}"]


class KernelError(RuntimeError):
    """A launch failed: CUDA's error with its name and text, or what the emulator found."""
