"""Keeps a kernel's host code from ending Python: where it calls exit(), abort() and the like, only fa_launch ends.

Both back ends link a kernel with WRAPPED, so that it calls the functions of guard.h in place of the C and C++ libraries'.
nvcc's libraries take them from a small library of their own (guard.cpp), built once; the emulator's from its runtime.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char, c_int32, c_uint64
from functools import cache
from pathlib import Path

from .compile import build
from .lines import CHECKOUT, places

HERE = Path(__file__).parent
HEADER = HERE / "guard.h"
FUNCTIONS = "exit _exit _Exit quick_exit abort __assert_fail _ZSt9terminatev".split()
# So that the line of a throw is known, and a static variable whose initialiser didn't return can be initialised again.
FUNCTIONS += "__cxa_throw __cxa_guard_acquire __cxa_guard_release __cxa_guard_abort".split()
# macOS's linker has no --wrap: there guard.h's functions have the names themselves.
WRAPPED = [] if sys.platform == "darwin" else [f"-Wl,--wrap={function}" for function in FUNCTIONS]
HINTS = {"exit": "what it printed before says why; return the error from fa_launch instead, and it is shown here"}


class End(ctypes.Structure):
    """How a launch ended, if not with cudaSuccess: guard.cpp's End."""

    _fields_ = [
        ("code", c_int32),
        ("line", c_int32),
        ("offset", c_uint64),
        ("kind", c_char * 16),
        ("text", c_char * 1024),
        ("file", c_char * 1024),
    ]

    def sentence(self, library: Path) -> str:
        """What ended the launcher in `library` and where, in a line and, for some, a hint; empty if it returned `code`."""
        kind, text, file = (said.decode(errors="replace") for said in (self.kind, self.text, self.file))
        if not kind:
            return ""
        line = self.line
        if not file and self.offset:
            file, line = places(library, [self.offset])[self.offset]
        place = f"{file.removeprefix(CHECKOUT)}:{line}: " if line else ""
        return f"{place}{kind} in the launcher: fa_launch {text}" + (
            f"\n  hint: {HINTS[kind]}" if kind in HINTS else ""
        )


@cache
def guard() -> tuple[Path, ctypes.CDLL]:
    """The guard's library: its path, and what calls `fa_guarded(fa_launch, args, stream)`, which gives an End or None.
    Built when its source has changed. Raises CompileError or ToolkitError as `build` does."""
    built = build(
        "guard",
        cpp=f'#include "{HERE / "guard.cpp"}"\n',
        flags=["-std=c++17", "-O1"],
        depends=[HEADER.read_text(), (HERE / "guard.cpp").read_text()],
    )
    library = ctypes.CDLL(str(built.path))
    library.fa_guarded.argtypes = [ctypes.c_void_p] * 3
    library.fa_guarded.restype = ctypes.POINTER(End)
    return built.path, library
