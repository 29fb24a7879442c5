"""The C++ compiler of this machine: where it is looked for, which one it is, and what to install where there is none."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..ladder.errors import ToolkitError
from ..ladder.paths import cache_folder

# The emulator's range: older ones lack flags that it builds kernels with. tests/release/compilers.py tries the newer ones.
# clang before LLVM's 16 copies a struct past the runtime, by memcpy() instead of __tsan_memcpy(). Apple numbers its clang by Xcode:
# its 15 has what LLVM's 16 has.
OLDEST = {"g++": 11, "clang": 16, "Apple clang": 15}
_RANGE = f"g++ {OLDEST['g++']}, clang {OLDEST['clang']} (Apple's: {OLDEST['Apple clang']}) or newer"
INSTALL = (
    "Debian, Ubuntu: `apt install g++`; Fedora, Red Hat: `dnf install gcc-c++`; macOS: `xcode-select --install` or "
    "`brew install llvm`; conda: `conda install -c conda-forge cxx-compiler`; anywhere, without root: `pip install ziglang`"
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, its kind ("gcc" or "clang") and version as its preprocessor defines them."""

    path: str
    kind: str
    version: tuple[int, int, int]
    apple: bool = False

    @property
    def name(self) -> str:
        """As people call it: "g++", "clang" or "Apple clang"."""
        return "Apple clang" if self.apple else {"gcc": "g++", "clang": "clang"}[self.kind]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))} ({self.path})"

    @property
    def new_enough(self) -> bool:
        """For the emulator; nvcc takes older ones."""
        return self.version[0] >= OLDEST[self.name]


def programs(*patterns: str) -> Iterator[str]:
    """Programs on PATH, then in this Python's own environment (a conda environment's, where it isn't activated), in the order
    of the patterns; of several versions of one pattern the newest first."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.prefix) / "bin")]
    for pattern in patterns:
        for folder in filter(None, folders):
            try:
                found = [path for path in Path(folder).glob(pattern) if os.access(path, os.X_OK) and path.is_file()]
            except OSError:  # a folder that this user can't read
                continue
            newest = sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)], reverse=True)
            yield from map(str, newest)


def find_compiler() -> str:
    """The path of the C++ compiler: CXX; else the first new enough for the emulator of c++, g++, clang++, their numbered names,
    conda's and pip's ziglang; else the first of them. Raises ToolkitError if there is none, or none where CXX points."""
    if name := os.environ.get("CXX"):
        if found := shutil.which(name):
            return found
        raise ToolkitError(
            f"CXX is {name!r}, and there is no such program: name a C++ compiler, without arguments (for ccache: a link to it named g++), or unset it"
        )
    first = None
    for path in _candidates():
        first = first or path
        try:
            if identify(path).new_enough:
                return path
        except ToolkitError:
            continue
    if first is None:
        raise ToolkitError(f"no C++ compiler found: install one ({INSTALL}), or name yours in CXX")
    return first


def _candidates() -> Iterator[str]:
    yield from programs("c++", "g++", "clang++", "g++-[0-9]*", "clang++-[0-9]*", "*-conda-*-c++", "*-conda-*-clang++")
    if importlib.util.find_spec("ziglang"):
        yield _ziglang()


def _ziglang() -> str:
    """A program that is the clang of pip's ziglang, which is a command of `python -m ziglang` and none by itself. (Its clang
    optimizes without assert(), and traps what -fsanitize=undefined finds, unless told otherwise.)"""
    script = cache_folder() / "ziglang-c++"
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang c++ -UNDEBUG -fno-sanitize=undefined "$@"\n'
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        new = script.with_name(f"{script.name}-{os.getpid()}")
        new.write_text(text)
        new.chmod(0o755)
        new.rename(script)
    return str(script)


@cache
def identify(path: str) -> Compiler:
    """Asks the compiler's preprocessor: what `--version` says differs from vendor to vendor. Raises ToolkitError if it is
    neither gcc nor clang."""
    try:
        command = [path, "-x", "c++", "-dM", "-E", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolkitError(f"{path} can't be run ({error}): {_WANTED}") from None
    defined = dict(re.findall(r"^#define (\w+) (\d+)$", said, re.MULTILINE))

    def version(*names: str) -> tuple[int, int, int]:
        major, minor, patch = (int(defined.get(name, 0)) for name in names)
        return major, minor, patch

    if "__clang_major__" in defined:
        number = version("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
        return Compiler(path, "clang", number, "__apple_build_version__" in defined)
    if "__GNUC__" in defined and "__EDG__" not in defined:  # NVIDIA's and Intel's classic compilers call themselves gcc
        return Compiler(path, "gcc", version("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__"))
    raise ToolkitError(f"{path} is neither gcc nor clang: {_WANTED}")


_WANTED = f"the emulator needs {_RANGE}; name one in CXX"


def emulators_compiler() -> Compiler:
    """The compiler that kernels for the emulator are built with. Raises ToolkitError if there is none, or if it is too old."""
    compiler = identify(find_compiler())
    if not compiler.new_enough:
        raise ToolkitError(
            f"the emulator needs {_RANGE}, and this is {compiler}: "
            f"install a newer one ({INSTALL}), or name yours in CXX"
        )
    return compiler
