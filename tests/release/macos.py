"""Builds the emulator's runtime and a kernel for macOS on arm64, without a Mac, and checks what they are bound to.

    pip install ziglang; python tests/release/macos.py

ziglang is clang with macOS's headers and a linker for it. What is shown: the sources compile and link with the flags that a Mac
would get; the kernel finds the runtime by its install name; exit() and abort() of a kernel's host code are bound to the
runtime's functions and not to the system's. (Exceptions are not shown: ziglang links a libc++ of its own.) Nothing runs. Needs llvm-nm. Exits with 1 if something is wrong.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.platform = "darwin"  # before helpers decides

from helpers.emulator import fragments, launcher  # noqa: E402
from helpers.emulator.translate import unit  # noqa: E402
from helpers.ladder.paths import INCLUDE  # noqa: E402
from helpers.ladder.rung import rung  # noqa: E402
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
]
BOUND = ("_exit", "_abort", "___tsan_read4", "___sanitizer_cov_trace_pc")


def compiled(source: Path, flags: list[str]) -> Path:
    made = source.with_suffix(".o")
    subprocess.run([*CLANG, *flags, "-c", source, "-o", made], check=True)
    return made


def linked(name: str, objects: list[Path], rest: list[str], folder: Path) -> Path:
    made = folder / f"{name}.so"
    subprocess.run([*CLANG, "-shared", *objects, *_linker_flags(name, False), *rest, "-o", made], check=True)
    return made


def main() -> int:
    kinds = [
        *launcher.KERNEL_FLAGS,
        *launcher.COMPILER_FLAGS["clang"],
        *launcher.TRACE_FLAGS["clang"],
        f"-I{launcher.INCLUDE}",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder, halves = Path(name), []
        for half in ("emulator", "interpreter"):
            source = folder / f"{half}.cpp"
            source.write_text(f'{fragments.tables()}#include "{launcher.HERE}/runtime/{half}.cpp"\n')
            halves.append(compiled(source, launcher.RUNTIME_FLAGS))
        runtime = linked("emulator", halves, [], folder)
        found = rung("01_naive")
        text = unit(found.source, str(found.path), INCLUDE)
        text += '#include <cstdlib>\nextern "C" void emu_ends(int i) { if (i == 1) exit(7); if (i == 2) abort(); throw i; }\n'
        (folder / "kernel.cpp").write_text(text)
        kernel = linked(
            "kernel", [compiled(folder / "kernel.cpp", kinds)], [*WRAPPED, str(runtime), "-Wl,-rpath,/x"], folder
        )
        tool = next(programs("llvm-nm", "llvm-nm-[0-9]*"))
        said = subprocess.run([tool, "-m", kernel], capture_output=True, text=True, check=True).stdout
    bound = dict(re.findall(r"\(undefined\) external (\S+) \(from (.*)\)", said))
    wrong = [symbol for symbol in BOUND if bound.get(symbol) != "@rpath/emulator.so"]
    for symbol in BOUND:
        print(f"{symbol:<28}{bound.get(symbol, 'not there')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
