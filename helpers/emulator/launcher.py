"""Builds a rung for the CPU and runs it, watched: progress, Ctrl-C, findings as exceptions, bytes by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build import build
from ..errors import CompileError, KernelError
from ..ladder import INCLUDE as KERNEL_INCLUDE
from ..toolkit import ToolkitError, compiler_version, find_compiler
from .native import Counter, Finding, Region, open_runtime
from .report import report
from .translate import TranslationError, unit

if TYPE_CHECKING:
    import pandas
    import torch

HERE = Path(__file__).parent
INCLUDE = HERE / "include"

MOST_THREADS = 16  # each takes up to 9 MB of stacks and shared memory
OLDEST = {"clang": 14, "gcc": 12}  # whose -fsanitize=thread calls what the runtime has
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-g1", "-pthread"]
# Instrumented, so that the runtime sees every load and store, and with integers, pointers and loops that behave as on a
# GPU where C++ leaves it open. (addr2line takes DWARF 5's first file for the temporary one that #line renames.)
KERNEL_FLAGS = """
    -std=c++17 -O2 -g1 -gdwarf-4 -fsanitize=thread -fno-optimize-sibling-calls -fstack-clash-protection -fno-strict-aliasing -fwrapv
    -fno-delete-null-pointer-checks -fno-math-errno -ffp-contract=off
""".split()
# With the passes off that would split, merge or move accesses.
COMPILER_FLAGS = {
    "clang": """
    -fno-vectorize -fno-slp-vectorize -fno-finite-loops -mllvm -tsan-instrument-func-entry-exit=0
    -mllvm -tsan-distinguish-volatile=1
    """.split(),
    "gcc": """
    --param tsan-distinguish-volatile=1 --param tsan-instrument-func-entry-exit=0 -fno-gnu-unique -fno-finite-loops
    -fno-tree-sra -fno-ipa-sra -fno-tree-vectorize -fno-tree-slp-vectorize -fno-store-merging
    -fno-tree-loop-distribute-patterns -fno-reorder-blocks -fno-reorder-blocks-and-partition -fno-thread-jumps
    -fno-split-paths -fno-tree-tail-merge -fno-crossjumping -fno-tree-dominator-opts -fno-tree-vrp -fno-tree-cselim
    -fno-tree-sink
    """.split(),
}

_one_at_a_time = threading.RLock()


def _compiler_flags() -> list[str]:
    """What this machine's compiler must be told. Raises ToolkitError if it is too old or none of those known."""
    said = compiler_version(find_compiler())
    kind = "clang" if "clang" in said else "gcc"
    version = re.search(r"(\d+)\.\d+", said.split(")")[-1])
    if version is None or int(version[1]) < OLDEST[kind]:
        raise ToolkitError(
            f"the emulator needs g++ 12 or clang 14 or newer, and this is {said!r}: name a newer one in CXX"
        )
    return COMPILER_FLAGS[kind]


def _texts(folder: Path) -> list[str]:
    return [f.read_text() for f in sorted(folder.rglob("*")) if f.suffix in (".h", ".cpp")]


def _quoting(words: str, path: Path, source: str) -> str:
    """The compiler's words, with the lines that it couldn't quote because their source is in no file."""
    if path.exists():
        return words
    lines = source.splitlines()

    def quote(found: re.Match[str]) -> str:
        number = int(found["line"])
        return f"{found[0]}\n{number:>5} | {lines[number - 1]}" if number <= len(lines) else found[0]

    return re.sub(rf"^{re.escape(path.name)}:(?P<line>\d+):.*$(?!\n *\d+ \|)", quote, words, flags=re.MULTILINE)


@cache
def _runtime() -> tuple[Path, ctypes.CDLL]:
    """The runtime's library, built when its source has changed."""
    built = build(
        "emulator",
        cpp=f'#include "{HERE / "runtime" / "emulator.cpp"}"\n',
        flags=RUNTIME_FLAGS,
        depends=[*_texts(HERE / "runtime"), (INCLUDE / "emulator" / "runtime.h").read_text()],
    )
    return built.path, open_runtime(str(built.path))


def load(rung: Any, source: str) -> Launcher:
    """Compiles ``source`` (CUDA C++; ``rung`` says its name and path) for the CPU.

    Raises CompileError with the compiler's words and the reader's own file and line.
    """
    return Launcher(rung, source)


class Launcher:
    """A rung built for the emulator. ``launch`` runs it to its end, or raises KernelError.

    After a launch, ``counters`` maps each tensor's name to the bytes that threads asked to (read, write), and
    ``output`` is what the kernel printed. ``timeout`` (seconds) bounds a launch; None lets it run. ``threads`` is how
    many blocks run at a time: as many as there are cores, or FA_EMULATOR_THREADS; the results are the same.
    """

    backend = "emulator"

    def __init__(self, rung: Any, source: str) -> None:
        runtime, self._runtime = _runtime()
        try:
            text = unit(source, str(rung.path), KERNEL_INCLUDE)
        except TranslationError as error:
            raise CompileError(str(error)) from None
        try:
            built = build(
                f"{rung.stem}_cpu",
                cpp=text,
                flags=[*KERNEL_FLAGS, *_compiler_flags()],
                include=[INCLUDE],
                libraries=[runtime],
                depends=_texts(INCLUDE),
            )
        except CompileError as error:
            raise CompileError(_quoting(str(error), rung.path, source)) from None
        self._launch = built.fa_launch(rung.path.name)
        self.path, self.log, self.cached = built.path, built.log, built.cached
        self.resources = None  # registers and spills are the GPU compiler's to know
        self.threads = int(os.environ.get("FA_EMULATOR_THREADS", 0)) or min(os.cpu_count() or 1, MOST_THREADS)
        self.timeout: float | None = None
        self.counters: dict[str, tuple[int, int]] = {}
        self.sizes: dict[str, int] = {}
        self.output = ""

    def launch(self, args: ctypes.Structure, tensors: dict[str, torch.Tensor], stream: int = 0) -> None:
        """Runs ``fa_launch(args, stream)``; ``tensors`` are those that ``args`` points at, by name, workspace last.

        Raises KernelError: what the emulator found (with source line and hint), or the CUDA error of the launch.
        """
        with _one_at_a_time:
            arena = Arena(tensors)
            args = arena.redirect(args)
            regions = arena.regions()
            self._runtime.emu_begin(regions, len(regions), self.threads)
            try:
                code = self._watch(lambda: self._launch(ctypes.byref(args), ctypes.c_void_p(stream)))
                self._raise_finding()
                if code != 0:
                    name, text = (
                        f(code).decode() for f in (self._runtime.emu_error_name, self._runtime.emu_error_text)
                    )
                    hint = self._runtime.emu_hint().decode()
                    raise KernelError(f"CUDA error: {text} ({name})" + (f": {hint}" if hint else ""))
            finally:
                counters = (Counter * len(regions))()
                self._runtime.emu_counters(counters)
                self.sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
                self.counters = {name: (c.read, c.written) for name, c in zip(tensors, counters)}
                self.output = self._runtime.emu_output().decode(errors="replace")
                self._runtime.emu_end()
                arena.copy_back(name for name, (_, written) in self.counters.items() if written)
                if self.output:
                    print(self.output, end="")

    def _raise_finding(self) -> None:
        finding = Finding()
        if self._runtime.emu_finding(ctypes.byref(finding)):
            raise KernelError(report(finding, self.path))

    def _watch(self, call: Callable[[], int]) -> int:
        """``call()`` in a thread of its own, so that this one can show progress and hear Ctrl-C."""
        result: list[int] = []
        done = threading.Event()  # Thread.join takes a thread for ended when Ctrl-C interrupts it

        def work() -> None:
            try:
                result.append(call())
            finally:
                done.set()

        start = time.monotonic()
        progress = Progress(self._runtime, start)
        thread = threading.Thread(target=work, name="emulator", daemon=True)
        try:
            thread.start()
            while not done.wait(0.1):
                if self.timeout is not None and time.monotonic() - start > self.timeout:
                    self._stop(thread, done)
                    self._raise_finding()
                    raise KernelError(f"stopped after {self.timeout:g} s")
                progress.show()
        except BaseException:
            self._stop(thread, done)
            raise
        finally:
            progress.close()
        return result[0]

    def _stop(self, thread: threading.Thread, done: threading.Event) -> None:
        """Returns when the kernel runs no more, however often Ctrl-C is pressed meanwhile."""
        tries = 0
        while not done.is_set() and (thread.ident or tries < 50):  # a second for a thread that was just being started
            tries += 1
            with contextlib.suppress(KeyboardInterrupt):
                self._runtime.emu_stop()
                done.wait(0.02)


class Progress:
    """One line that counts blocks, for a launch that takes longer than two seconds; terminals and notebooks only."""

    def __init__(self, runtime: ctypes.CDLL, start: float) -> None:
        self.runtime, self.start, self.shown, self.width = runtime, start, 0.0, 0
        self.wanted = sys.stderr.isatty() or "ipykernel" in sys.modules

    def show(self) -> None:
        now = time.monotonic()
        if not self.wanted or now - self.start < 2 or now - self.shown < 0.5:
            return
        finished, blocks, kernel = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.create_string_buffer(64)
        if self.runtime.emu_progress(ctypes.byref(finished), ctypes.byref(blocks), kernel, len(kernel)):
            done = finished.value / max(blocks.value, 1)
            text = f"emulator: {kernel.value.decode()} [{'#' * int(20 * done):<20}] {finished.value} of {blocks.value} blocks"
            self._write(f"{text}, {now - self.start:.0f} s")
            self.shown = now

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = len(text)

    def close(self) -> None:
        if self.shown:
            self._write("")
            sys.stderr.write("\r")


class Arena:
    """The tensors of one launch, each in a place of its own with a gap on both sides: an access beyond the end of one
    can't land in the next, and tensors that share memory (Q, K and V cut from one projection) are told apart."""

    GAP = 1 << 16

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        import torch

        self.originals = tensors
        spans = {name: _span(t) for name, t in tensors.items()}
        total = self.GAP + sum(-(-span // 256) * 256 + self.GAP for span in spans.values())
        self.memory = torch.empty(total + 256, dtype=torch.uint8)
        at = self.GAP + (-self.memory.data_ptr()) % 256
        self.copies = {}
        for name, t in tensors.items():
            at += t.data_ptr() % 16  # a view that starts off a 16-byte boundary does so here too
            place = self.memory[at : at + spans[name]].view(t.dtype)
            self.copies[name] = place.as_strided(t.shape, t.stride(), place.storage_offset())
            _copy(self.copies[name], t)
            at += -(-spans[name] // 256) * 256 + self.GAP - t.data_ptr() % 16

    def redirect(self, args: ctypes.Structure) -> ctypes.Structure:
        """A copy of ``args`` that points at the copies."""
        moved = type(args).from_buffer_copy(args)
        extra = [name for name in self.copies if not hasattr(args, name)]
        for name in self.copies.keys() - set(extra):
            setattr(moved, name, self.copies[name].data_ptr())
        for i, name in enumerate(extra):
            moved.workspace[i] = self.copies[name].data_ptr()
        return moved

    def regions(self) -> ctypes.Array[Region]:
        regions = (Region * len(self.copies))()
        for region, (name, t) in zip(regions, self.copies.items()):
            order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
            region.name, region.base, region.bytes = name.encode(), t.data_ptr(), _span(t)
            region.item, region.contiguous, region.dims = t.element_size(), t.is_contiguous(), t.dim()
            region.size[: t.dim()] = [t.shape[d] for d in order]
            region.stride[: t.dim()] = [t.stride(d) for d in order]
        return regions

    def copy_back(self, names: Iterable[str]) -> None:
        for name in names:
            _copy(self.originals[name], self.copies[name])


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size() if t.numel() else 0


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    for d in range(to.dim()):
        if to.stride(d) == 0:  # an expanded dimension is one element in memory
            to, source = to.narrow(d, 0, 1), source.narrow(d, 0, 1)
    to.copy_(source)


def traffic(kernel: Any, *inputs: torch.Tensor) -> pandas.DataFrame:
    """Bytes that the kernel's threads ask of each tensor, counted exactly by running it on the emulator.

    ``inputs`` are those of ``kernel(...)``, on any device. Index: tensor; columns: ``bytes_read``, ``bytes_written``,
    ``size_bytes`` and ``reads_per_byte`` (how often each byte is read). Caches are not modelled: these are requests.
    """
    import pandas

    if kernel.backend != "emulator":
        from ..kernel import load as load_kernel

        kernel = load_kernel(source=kernel.source, device="cpu", quiet=True)
    kernel(*(t.detach().cpu() for t in inputs))
    launcher = kernel.launcher
    rows = {
        name: {
            "bytes_read": read,
            "bytes_written": written,
            "size_bytes": launcher.sizes[name],
            "reads_per_byte": read / launcher.sizes[name],
        }
        for name, (read, written) in launcher.counters.items()
    }
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("tensor")
