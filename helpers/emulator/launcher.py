"""Builds a rung for the CPU and runs it, watched: progress, Ctrl-C, findings as exceptions, bytes by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..ladder.contract import Call, FaArgs
from ..ladder.errors import CompileError, Interrupted, KernelError
from ..ladder.instances import Instance, apart, asked_for
from ..ladder.paths import INCLUDE as KERNEL_INCLUDE
from ..ladder.rung import Rung
from ..toolchain.compile import Built, build, each_instance
from ..toolchain.compiler import emulators_compiler
from ..toolchain.cores import cores
from ..toolchain.guard import HEADER, WRAPPED
from ..toolchain.lines import places
from ..toolchain.progress import telling
from . import fragments, host_code
from .hints import INCLUDE, explained
from .native import Counter, Fault, FoundRow, Region, TraceCount, TraceRow, open_runtime
from .report import finding_of, findings_of, report
from .trace import Access, Request, Trace
from .translate import TranslationError, unit

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent

MOST_THREADS = 16  # each takes up to 9 MB of stacks and shared memory
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-g1", "-pthread", "-fno-semantic-interposition", "-ffp-contract=off"]
# Instrumented, so that the runtime sees every load and store (and, by -fsanitize=bounds, every index that leaves an array on
# the stack, where it lets loads and stores pass), and with integers, pointers and loops that behave as on a GPU where C++ leaves
# it open, chars and products as on any other machine. A struct that a call takes or gives by value is copied by loads and stores
# of its own (-fno-elide-constructors): none are seen in the call itself. (addr2line takes DWARF 5's first file for the temporary
# one that #line renames.)
KERNEL_FLAGS = """
    -std=c++17 -O2 -g1 -gdwarf-4 -fsanitize=thread -fno-optimize-sibling-calls -fstack-clash-protection -fno-strict-aliasing -fwrapv
    -fno-delete-null-pointer-checks -fno-math-errno -ffp-contract=off -fsigned-char -fno-elide-constructors
    -Werror=return-type
""".split()
# On AArch64 a division by zero raises no signal, and how deep a call is (EMU_FRAME) is known by the frame pointer.
ARM = platform.machine() in ("aarch64", "arm64")
MACHINE_FLAGS = ["-fsanitize=integer-divide-by-zero", "-fno-omit-frame-pointer"] if ARM else []
# A second build marks basic blocks too. (A frame that isn't built at once would look like a call of another depth.)
TRACE_FLAGS = {
    "clang": ["-fsanitize-coverage=bb,no-prune,trace-pc"],
    "gcc": ["-fsanitize-coverage=trace-pc", "-fno-shrink-wrap"],
}
OPS = tuple(re.findall(r"x\(\w+, \"(.+)\"\)", (HERE / "runtime" / "ops.h").read_text()))  # in the order of enum Op
# Instructions by which blocks are ordered: then races between blocks are followed past them (runtime/race_flags.h).
ORDERS_BLOCKS = re.compile(r"\.(acquire|release|acq_rel)\.(gpu|sys)\b")
BULK = tuple(op for op in OPS if ".bulk" in op)
# A variable of the kernel's own comes before the C library's function of its name ("error"), as on macOS.
OWN_NAMES = [] if sys.platform == "darwin" else ["-Wl,-Bsymbolic"]
# With the passes off that would split, merge or move accesses. (And, of gcc's, the one that follows variables for a debugger: a
# fifth of its time, for nothing that the emulator asks of it.) gcc guards the ends of local arrays in kernels and in what is
# __noinline__; guarding all functions would take a tenth more of its time.
COMPILER_FLAGS = {
    # Since clang merges what branches have in common, duplicates what follows them, and leaves out loads that a store to the
    # same place follows; tests/release/counts.py shows what each is for. (It warns of a flag that it has no use for on this machine.)
    "clang": """
    -Wno-unused-command-line-argument
    -fsanitize=array-bounds -fstack-protector-strong -fno-vectorize -fno-slp-vectorize -fno-finite-loops -fno-builtin-memset
    -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-distinguish-volatile=1 -mllvm -tsan-instrument-read-before-write=1
    -mllvm -disable-loop-idiom-all -mllvm -disable-vector-combine -mllvm -disable-block-placement
    -mllvm -sink-common-insts=false -mllvm -hoist-common-insts=false -mllvm -instcombine-code-sinking=false
    -mllvm -phi-node-folding-threshold=0 -mllvm -two-entry-phi-node-folding-threshold=0 -mllvm -jump-threading-threshold=0
    -mllvm -simplifycfg-merge-cond-stores=false -mllvm -simplifycfg-hoist-cond-stores=false
    -mllvm -enable-load-pre=false -mllvm -enable-pre=false -mllvm -enable-tail-merge=0
    """.split(),
    "gcc": """
    -fsanitize=bounds-strict -fstack-protector-explicit
    --param tsan-distinguish-volatile=1 --param tsan-instrument-func-entry-exit=0
    -fno-gnu-unique -fno-finite-loops -fno-tree-sra -fno-ipa-sra -fno-tree-vectorize -fno-tree-slp-vectorize -fno-store-merging
    -fno-tree-loop-distribute-patterns -fno-reorder-blocks -fno-reorder-blocks-and-partition -fno-thread-jumps
    -fno-split-paths -fno-tree-tail-merge -fno-crossjumping -fno-tree-dominator-opts -fno-tree-vrp -fno-tree-cselim
    -fno-tree-sink -fno-var-tracking-assignments
    """.split(),
}

# Passes of gcc's that take a sixth of the runtime's compilation and make it no faster.
RUNTIME_COMPILER_FLAGS = {
    "clang": ["-Wno-unused-command-line-argument"],
    "gcc": "-fno-tree-pre -fno-tree-vrp -fno-gcse -fno-schedule-insns2".split(),
}

_one_at_a_time = threading.RLock()


def _texts(folder: Path) -> list[str]:
    return [f.read_text() for f in sorted(folder.rglob("*")) if f.suffix in (".h", ".cpp")]


def _quoting(words: str, path: Path, source: str) -> str:
    """The compiler's words, with the lines that it couldn't quote because their source is in no file."""
    if path.exists():
        return words
    lines = source.split("\n")  # as compilers count them

    def quote(found: re.Match[str]) -> str:
        number = int(found["line"])
        return f"{found[0]}\n{number:>5} | {lines[number - 1]}" if number <= len(lines) else found[0]

    return re.sub(rf"^{re.escape(path.name)}:(?P<line>\d+):.*$(?!\n *\d+ \|)", quote, words, flags=re.MULTILINE)


@cache
def _runtime() -> tuple[Path, ctypes.CDLL]:
    """The runtime's library, built when its source has changed."""
    halves = [HERE / "runtime" / name for name in ("emulator.cpp", "interpreter.cpp")]
    built = build(
        "emulator",
        cpp=[f'{fragments.tables()}#include "{half}"\n' for half in halves],
        flags=[*RUNTIME_FLAGS, *RUNTIME_COMPILER_FLAGS[emulators_compiler().kind]],
        depends=[*_texts(HERE / "runtime"), *_texts(INCLUDE / "emulator"), HEADER.read_text()],
    )
    return built.path, open_runtime(str(built.path))


def pretending(arch: str | None) -> list[str]:
    """The compiler's flag by which CUDA's headers, as they are here, are those of another GPU than Hopper's ("sm_86")."""
    return [f"-D__CUDA_ARCH_LIST__={arch.removeprefix('sm_').rstrip('a')}0"] if arch else []


def _threads() -> int:
    """As many as FA_EMULATOR_THREADS says; by default, and for 0, as many as there are cores. ValueError if it says no number."""
    asked = os.environ.get("FA_EMULATOR_THREADS", "").strip() or "0"
    if not asked.isdecimal():
        raise ValueError(f"FA_EMULATOR_THREADS is {asked!r}: it has to be a number of threads")
    return int(asked) or min(cores(), MOST_THREADS)


class Launcher:
    """A kernel for the emulator, compiled when it first runs. ``launch`` runs it to its end, or raises KernelError.

    After a launch, ``counters`` maps each tensor's name to the bytes that threads asked to (read, write), and
    ``output`` is what the kernel printed. ``timeout`` (seconds) bounds a launch; None lets it run. ``threads`` is how
    many blocks run at a time: as many as there are cores, or FA_EMULATOR_THREADS; the results are the same, and so they
    are whatever ``schedule`` is: 0 lets a block's threads take turns in order, another number in an order drawn from it.
    ``sms`` is what the device says that it has of SMs, an H200's 132; whether the source asks is ``asks_for_sms``.
    ``arch``, "sm_75" for instance, is the GPU to pretend to be: what it has of instructions and shared memory decides which
    of its paths a source takes. By default a Hopper GPU.

    A rung's instances (one per head dimension and dtype) are compiled side by side, each into a library of its own, or with
    fewer cores those of a dtype; for ``trace``, each when it is first called. With ``together`` there is one library of all.
    """

    backend = "emulator"

    def __init__(self, rung: Rung, arch: str | None = None, together: bool = False) -> None:
        self._rung, self._arch, self._together = rung, arch, together
        _, self._runtime = _runtime()
        self._compiled: dict[Instance, Built] = {}  # until it is compiled
        texts = (rung.source, *(header.read_text() for header in rung.includes))
        self._flags = any(map(ORDERS_BLOCKS.search, texts))
        self.asks_for_sms = any("cudaDevAttrMultiProcessorCount" in text for text in texts)
        self._to_trace, self._traced = self._parts(sys.maxsize), dict[Instance, Built]()
        self.resources = None  # registers and spills are the GPU compiler's to know
        self.threads = _threads()
        self.timeout: float | None = None
        self.schedule = 0
        self.sms = 132
        self.counters: dict[str, tuple[int, int]] = {}
        self.sizes: dict[str, int] = {}
        self.output = ""

    def compile(self) -> None:
        """Makes what ``launch`` runs. Raises CompileError with the compiler's words and the reader's own file and line."""
        parts = self._parts(cores())
        made = each_instance(lambda part: self._build(part, tracing=False), parts, self._rung.stem)
        for built in made.values():
            built.fa_launch(self._rung.path.name)
        self.cached = all(built.cached for built in made.values())
        self._compiled = made

    def compile_traced(self) -> list[Built]:
        """Makes all that ``trace`` may run, builds of their own, and gives them. Raises CompileError."""
        if missing := {key: part for key, part in self._to_trace.items() if key not in self._traced}:
            self._traced |= each_instance(lambda part: self._build(part, tracing=True), missing, self._rung.stem)
        return list(self._traced.values())

    def share_build(self) -> None:
        """Lets ``launch`` run what ``trace`` runs: one compilation for both, and launches that take twice as long. Raises
        CompileError."""
        self.compile_traced()
        self._compiled = self._traced

    def _parts(self, most: int) -> dict[Instance, Rung]:
        return {None: self._rung} if self._together else apart(self._rung, most)

    def _build(self, part: Rung, tracing: bool) -> Built:
        try:
            text = unit(part.source, str(part.path), KERNEL_INCLUDE)
            host_code.refuse(part.source, str(part.path), [KERNEL_INCLUDE, INCLUDE])
        except TranslationError as error:
            raise CompileError(str(error)) from None
        kind = emulators_compiler().kind
        try:
            return build(
                f"{self._rung.stem}_{'xray' if tracing else 'cpu'}",
                cpp=text,
                flags=[
                    *KERNEL_FLAGS,
                    *MACHINE_FLAGS,
                    *COMPILER_FLAGS[kind],
                    *(TRACE_FLAGS[kind] if tracing else []),
                    *pretending(self._arch),
                ],
                include=[INCLUDE],
                libraries=[_runtime()[0]],
                link=[*WRAPPED, *OWN_NAMES],
                depends=_texts(INCLUDE),
            )
        except CompileError as error:
            raise CompileError(_quoting(explained(str(error)), self._rung.path, self._rung.source)) from None

    def launch(self, call: Call, stream: int = 0) -> None:
        """Runs ``fa_launch(&call.args, stream)`` on copies of the call's tensors, and copies back what it has written.

        Raises KernelError: what the emulator found (with source line and hint), or the CUDA error of the launch.
        """
        if not self._compiled:
            self.compile()
        library = self._compiled[asked_for(call.args, self._compiled)]
        launch = library.fa_launch(self._rung.path.name)
        with self._session(call, tracing=False) as args:
            code = self._watch(lambda: self._call(launch, args, stream), library.path)
            self._raise_finding(library.path)
            self._raise_error(code)

    def trace(self, call: Call) -> Trace:
        """Runs the kernel as ``launch`` does, and counts every request that its warps make of memory.

        What the emulator finds wrong is among the trace's findings; nothing of it raises. Raises KernelError if
        nothing could be launched, CompileError as ``compile`` does: the first trace of an instance builds it once more.
        """
        chosen = asked_for(call.args, self._to_trace)
        if chosen not in self._traced:
            self._traced[chosen] = self._build(self._to_trace[chosen], tracing=True)
        library = self._traced[chosen]
        launch = library.fa_launch(self._rung.path.name)
        start = time.monotonic()
        with self._session(call, tracing=True) as args:
            try:
                code = self._watch(lambda: self._call(launch, args), library.path)
                stopped = False
            except KernelError:  # a time-out, which is among the findings if it has stopped a kernel
                stopped, code = True, 0
            errors = [f for f in [self._finding()] if f is not None]
            if not errors:
                if stopped:
                    raise KernelError(f"stopped after {self.timeout:g} s")
                self._raise_error(code)
            rows = self._rows()
            accesses = _accesses(rows, library.path)
            findings = tuple(finding_of(f, library.path) for f in errors)
            findings += findings_of(self._found(), library.path)
            instructions = _instructions(self._instructions(), rows)
        counted = {name: (*self.counters[name], self.sizes[name]) for name in call.tensors}
        return Trace(accesses, findings, counted, instructions, time.monotonic() - start)

    @contextlib.contextmanager
    def _session(self, call: Call, tracing: bool) -> Iterator[FaArgs]:
        """The runtime, with the tensors in places of their own: gives arguments that point there."""
        with _one_at_a_time:
            arena, tensors = Arena(call), call.tensors
            regions = arena.regions()
            self._runtime.emu_begin(regions, len(regions), self.threads, tracing, self.schedule, self._flags, self.sms)
            try:
                yield arena.redirect()
            finally:
                counters = (Counter * len(regions))()
                self._runtime.emu_counters(counters)
                self.sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
                self.counters = {name: (c.read, c.written) for name, c in zip(tensors, counters)}
                self.output = self._runtime.emu_output().decode(errors="replace")
                self._runtime.emu_end()
                arena.copy_back(name for name, c in zip(tensors, counters) if c.written or c.by_host)
                if self.output:
                    print(self.output, end="")

    def _call(self, launch: ctypes._CFuncPtr, args: ctypes.Structure, stream: int = 0) -> int:
        return self._runtime.emu_call(ctypes.cast(launch, ctypes.c_void_p), ctypes.byref(args), stream)

    def _finding(self) -> Fault | None:
        finding = Fault()
        return finding if self._runtime.emu_finding(ctypes.byref(finding)) else None

    def _raise_finding(self, library: Path) -> None:
        if (finding := self._finding()) is not None:
            raise KernelError(report(finding, library))

    def _raise_error(self, code: int) -> None:
        if code == 0:
            return
        name, text = (f(code).decode() for f in (self._runtime.emu_error_name, self._runtime.emu_error_text))
        hint = self._runtime.emu_hint().decode()
        raise KernelError(f"CUDA error: {text} ({name})" + (f": {hint}" if hint else ""))

    def _rows(self) -> list[TraceRow]:
        rows = ctypes.POINTER(TraceRow)()
        return [rows[i] for i in range(self._runtime.emu_trace_rows(ctypes.byref(rows)))]

    def _found(self) -> list[FoundRow]:
        rows = ctypes.POINTER(FoundRow)()
        return [rows[i] for i in range(self._runtime.emu_found(ctypes.byref(rows)))]

    def _instructions(self) -> dict[str, int]:
        counts = ctypes.POINTER(TraceCount)()
        found = range(self._runtime.emu_instructions(ctypes.byref(counts)))
        return {counts[i].name.decode(): counts[i].count for i in found}

    def _watch(self, call: Callable[[], int], library: Path) -> int:
        """``call()``, which runs a kernel of ``library``, in a thread of its own, so that this one can show progress and hear Ctrl-C."""
        result: list[int] = []
        done = threading.Event()  # Thread.join takes a thread for ended when Ctrl-C interrupts it

        def work() -> None:
            try:
                result.append(call())
            finally:
                done.set()

        start = time.monotonic()
        thread = threading.Thread(target=work, name="emulator", daemon=True)
        try:
            with telling(self._progress, after=2.0):
                thread.start()
                while not done.wait(0.1):
                    if self.timeout is not None and time.monotonic() - start > self.timeout:
                        self._stop(thread, done)
                        self._raise_finding(library)
                        raise KernelError(f"stopped after {self.timeout:g} s")
        except BaseException as error:
            self._stop(thread, done)
            if isinstance(error, KeyboardInterrupt):
                finding = self._finding()  # which line it was that took so long
                raise Interrupted(report(finding, library) if finding else "the kernel was stopped") from None
            raise
        return result[0]

    def _progress(self) -> str:
        """How many blocks of the kernel that runs have finished."""
        finished, blocks, kernel = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.create_string_buffer(64)
        if not self._runtime.emu_progress(ctypes.byref(finished), ctypes.byref(blocks), kernel, len(kernel)):
            return "emulator"
        bar = "#" * int(20 * finished.value / max(blocks.value, 1))
        return f"emulator: {kernel.value.decode()} [{bar:<20}] {finished.value} of {blocks.value} blocks"

    def _stop(self, thread: threading.Thread, done: threading.Event) -> None:
        """Returns when the kernel runs no more, however often Ctrl-C is pressed meanwhile."""
        tries = 0
        while not done.is_set() and (thread.ident or tries < 50):  # a second for a thread that was just being started
            tries += 1
            with contextlib.suppress(KeyboardInterrupt):
                self._runtime.emu_stop()
                done.wait(0.02)


def _accesses(rows: list[TraceRow], library: Path) -> tuple[Access, ...]:
    """Rows of instructions and OS threads added up by source line, the costliest line first."""
    at = places(library, {row.pc for row in rows})
    found: dict[tuple, list[TraceRow]] = {}
    for row in rows:
        file, line = at[row.pc] if at[row.pc][1] else (row.file.decode(), row.line)
        space = "shared" if row.shared else "global"
        key = (row.kernel.decode(), file, line, OPS[row.op], space, row.target.decode(), row.width)
        found.setdefault(key, []).append(row)
    accesses = []
    for key, group in found.items():
        worst = min(group, key=lambda r: (-r.worst, r.worst_ideal, r.launch, r.block, r.warp, r.pc))
        addresses = tuple(None if a < 0 else a for a in worst.address)
        request = Request(key[0], worst.block, worst.warp, addresses, key[-1], worst.worst, worst.worst_ideal)
        sums = [sum(getattr(row, name) for row in group) for name in ("requests", "bytes", "cost", "ideal")]
        accesses.append(Access(*key, *sums, worst.worst, request))
    return tuple(
        sorted(accesses, key=lambda a: (a.space != "shared", -a.cost, a.file, a.line, a.op, a.target, a.width))
    )


PTX_NAMES = {
    "__syncthreads": "bar.sync", "__syncwarp": "bar.warp.sync", "__shfl": "shfl.sync", "__match": "match.sync",
    "__reduce": "redux.sync", "__all": "vote.sync", "__any": "vote.sync", "__uni": "vote.sync", "__ballot": "vote.sync",
}  # fmt: skip
ACCESS_NAMES = {"load": "ld", "store": "st", "atomic": "atom"}


def _instructions(counts: dict[str, int], rows: list[TraceRow]) -> dict[str, int]:
    """Warp instructions by the PTX ISA's names; those that touch memory from their requests."""
    copies = {row.pc for row in rows if OPS[row.op] == "cp.async"}  # where what is read is the instruction's other end
    found: dict[str, int] = {}
    for what, count in counts.items():
        known = [ptx for prefix, ptx in PTX_NAMES.items() if what.startswith(prefix)]
        name = known[0] if known else next((op for op in OPS if what.split(".")[0] == op), what)
        if name not in OPS or name in BULK:
            found[name] = found.get(name, 0) + count
    for row in rows:
        op, space = OPS[row.op], "shared" if row.shared else "global"
        if op in BULK or (op == "load" and row.pc in copies):  # both its ends are among the requests
            continue
        name = f"{ACCESS_NAMES[op]}.{space}" if op in ACCESS_NAMES else op
        found[name] = found.get(name, 0) + row.requests
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


class Arena:
    """The tensors of one launch, each in a place of its own with a gap on both sides: an access beyond the end of one
    can't land in the next, and tensors that share memory (Q, K and V cut from one projection) are told apart."""

    GAP = 1 << 16

    def __init__(self, call: Call) -> None:
        import torch

        self.call, tensors = call, call.tensors
        spans = {name: _span(t) for name, t in tensors.items()}
        total = self.GAP + sum(-(-span // 256) * 256 + 256 + self.GAP for span in spans.values())
        self.memory = torch.empty(total + 256, dtype=torch.uint8)
        at = self.GAP + (-self.memory.data_ptr()) % 256
        self.copies = {}
        for name, t in tensors.items():
            shift = self.shift(t)
            at += shift
            place = self.memory[at : at + spans[name]].view(t.dtype)
            self.copies[name] = place.as_strided(t.shape, t.stride(), place.storage_offset())
            _copy(self.copies[name], t)
            at += -(-spans[name] // 256) * 256 + self.GAP - shift

    @staticmethod
    def shift(t: torch.Tensor) -> int:
        """Bytes from a 256-byte boundary to where the tensor begins: as on a GPU, where storage begins at a boundary."""
        offset = t.storage_offset() * t.element_size() % 256
        return offset - offset % 16 + t.data_ptr() % 16

    def redirect(self) -> FaArgs:
        """A copy of the call's arguments that points at the copies."""
        moved = type(self.call.args).from_buffer_copy(self.call.args)
        for name, copy in self.copies.items():
            self.call.point(moved, name, copy.data_ptr())
        return moved

    def regions(self) -> ctypes.Array[Region]:
        regions = (Region * len(self.copies))()
        for region, (name, t) in zip(regions, self.copies.items()):
            # By stride, the largest first. One of size 1 may have any: last, where nothing is left of an offset into the view.
            order = sorted(range(t.dim()), key=lambda d: (t.shape[d] == 1, -t.stride(d)))
            region.name, region.base, region.bytes = name.encode(), t.data_ptr(), _span(t)
            region.item, region.contiguous, region.dims = t.element_size(), t.is_contiguous(), t.dim()
            # Outputs, workspace and scratch come as torch.empty gives them.
            far, both = 3 if name in self.call.far else 1, {*self.call.flags, *self.call.over.values()}
            region.given = 2 if name in both else far if name in self.call.inputs else 0
            region.size[: t.dim()] = [t.shape[d] for d in order]
            region.stride[: t.dim()] = [t.stride(d) for d in order]
        return regions

    def copy_back(self, names: Iterable[str]) -> None:
        for name in names:
            _copy(self.call.tensors[name], self.copies[name])


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size() if t.numel() else 0


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    for d in range(to.dim()):
        if to.stride(d) == 0:  # an expanded dimension is one element in memory
            to, source = to.narrow(d, 0, 1), source.narrow(d, 0, 1)
    to.copy_(source)
