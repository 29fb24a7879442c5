"""Builds the emulator's runtime and kernels for macOS on arm64, without a Mac, and checks what they are bound to.

    pip install ziglang; python tests/release/macos.py    # every rung
    python tests/release/macos.py 01 33                   # these

ziglang is clang with macOS's headers and a linker for it. What is shown: the sources compile and link with the flags that a Mac
would get, and clang has nothing to say of them; each kernel finds the runtime by its install name; exit() and abort() of a kernel's
host code are bound to the runtime's functions and not to the system's. (Exceptions are not shown: ziglang links a libc++ of its
own.) Nothing runs. Needs llvm-nm. Exits with 1 if something is wrong.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.platform, platform.machine = "darwin", lambda: "arm64"  # before helpers decides

from helpers.emulator import fragments, launcher  # noqa: E402
from helpers.emulator.translate import unit  # noqa: E402
from helpers.ladder.paths import INCLUDE  # noqa: E402
from helpers.ladder.rung import Rung, rung, rungs  # noqa: E402
from helpers.toolchain.compile import _linker_flags  # noqa: E402
from helpers.toolchain.compiler import programs  # noqa: E402
from helpers.toolchain.guard import WRAPPED  # noqa: E402

CLANG = [
    sys.executable,
    "-m",
    "ziglang",
    "c++",
    "-target",
    "aarch64-macos",
    "-UNDEBUG",
    "-fno-sanitize=undefined",
    "-fPIC",
    "-Werror=unused-command-line-argument",
]
BOUND = ("_exit", "_abort", "___tsan_read4", "___sanitizer_cov_trace_pc")


def compiled(source: Path, flags: list[str]) -> Path:
    made = source.with_suffix(".o")
    subprocess.run([*CLANG, *flags, "-c", source, "-o", made], check=True)
    return made


def linked(name: str, objects: list[Path], rest: list[str], folder: Path) -> Path:
    made = folder / f"{name}.so"
    subprocess.run([*CLANG, "-shared", *objects, *_linker_flags(name), *rest, "-o", made], check=True)
    return made


def bound(found: Rung, runtime: Path, folder: Path) -> dict[str, str]:
    """Symbol -> the library that a kernel, as a Mac would build it, takes it from."""
    kinds = [
        *launcher.KERNEL_FLAGS,
        *launcher.MACHINE_FLAGS,
        *launcher.COMPILER_FLAGS["clang"],
        *launcher.TRACE_FLAGS["clang"],
        f"-I{launcher.INCLUDE}",
    ]
    text = unit(found.source, str(found.path), INCLUDE)
    text += (
        '#include <cstdlib>\nextern "C" void emu_ends(int i) { if (i == 1) exit(7); if (i == 2) abort(); throw i; }\n'
    )
    source = folder / f"{found.stem}.cpp"
    source.write_text(text)
    kernel = linked(found.stem, [compiled(source, kinds)], [*WRAPPED, str(runtime), "-Wl,-rpath,/x"], folder)
    tool = next(programs("llvm-nm", "llvm-nm-[0-9]*"))
    said = subprocess.run([tool, "-m", kernel], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"\(undefined\) external (\S+) \(from (.*)\)", said))


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder, halves = Path(name), []
        for half in ("emulator", "interpreter"):
            source = folder / f"{half}.cpp"
            source.write_text(f'{fragments.tables()}#include "{launcher.HERE}/runtime/{half}.cpp"\n')
            halves.append(compiled(source, [*launcher.RUNTIME_FLAGS, *launcher.RUNTIME_COMPILER_FLAGS["clang"]]))
        runtime = linked("emulator", halves, [], folder)
        for found in map(rung, sys.argv[1:]) if sys.argv[1:] else rungs():
            libraries = bound(found, runtime, folder)
            elsewhere = [symbol for symbol in BOUND if libraries.get(symbol) != "@rpath/emulator.so"]
            print(found.stem, *(f"{symbol}: {libraries.get(symbol, 'not there')}" for symbol in elsewhere), flush=True)
            wrong += len(elsewhere)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
