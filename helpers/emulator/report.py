"""Findings in words: the sentence, the line of the reader's source, a hint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..toolchain.guard import HINTS as ENDS
from ..toolchain.lines import places
from . import trace
from .native import Fault, FoundRow

HINTS = {
    **ENDS,
    "out of bounds": "the access was stopped before it happened; check the index against the tensor's shape and strides, "
    "or the array's length",
    "null pointer": "the tensor this pointer should name was not passed, or the pointer was never set",
    "device memory": "launch a kernel, or use cudaMemcpyAsync or cudaMemsetAsync",
    "constant memory": "kernels can only read it, and the launcher fills it by cudaMemcpyToSymbol; what kernels write is a "
    "__device__ variable",
    "misaligned": "a vector access needs an address that is a multiple of its size: check the row length and the column",
    "uninitialised shared memory": "a store is missing, or the barrier between the store and this load, or the tail isn't "
    "zero-filled",
    "uninitialised memory": "outputs and workspace hold nothing until a kernel writes them: check that every element is written, "
    "and by whom",
    "race": "a __syncthreads() has to stand between the two, on every way from the one to the other",
    "race between blocks": "blocks run in any order, and together: give each its own part of the output, or use atomics, "
    "and clear what these add to before the launch",
    "race of flags": "the writer waits until what it writes is complete (a bulk copy: cp.async.bulk.wait_group, not .read) and sets a flag "
    "by st.release.gpu; the reader reads that by ld.acquire.gpu until it is set. Between GPUs .sys stands in place of .gpu",
    "proxy fence of flags": "a fence.proxy.async.global has to stand between the ld.acquire that sees the flag and the copy by TMA",
    "overwritten of flags": "a flag that lets another GPU overwrite a tensor is set when all copies of it have been waited for",
    "race in a warp": "lanes of a warp need a __syncwarp() between the two: they don't run in lock step",
    "in flight": "wait for the copy (cp.async.wait_group or wait_all; a bulk copy: on its mbarrier) or the product "
    "(wgmma.commit_group, then wgmma.wait_group), then let a barrier tell the other threads",
    "divergent barrier": "every thread of a block must come to the same __syncthreads(): move it out of the branch, and let "
    "no thread return before it",
    "deadlock": "every lane that the mask names must come to the same instruction with the same mask",
    "barrier deadlock": "bar.sync and bar.arrive of one barrier must name the same number of threads, and as many must come: "
    "count those of every branch",
    "mbarrier deadlock": "each phase needs its arrivals and, where copies report to it, exactly their bytes by expect_tx; a wait "
    "names the parity of the phase it waits for, 0 first",
    "barrier": "bar.sync a, b: a is 0 to 15, b the number of threads of all warps that come, a multiple of 32",
    "mbarrier": "mbarrier.init by one thread, a __syncthreads(), then as many arrivals per phase as it was initialised for",
    "overwritten": "wait until it has been read: wgmma.wait_group or cp.async.bulk.wait_group.read by who started it, then a "
    "barrier or an mbarrier that tells the writer",
    "proxy fence": "ordinary stores reach TMA and wgmma by a fence.proxy.async after them, before the barrier; an mbarrier's "
    "initialisation by fence.mbarrier_init",
    "bulk copy": "wait for it before the block ends: on its mbarrier, or with cp.async.bulk.wait_group.read",
    "tensor map": "make it with cuTensorMapEncodeTiled, and hand it over as a const __grid_constant__ parameter",
    "mask": "the mask of a warp instruction must name every lane that executes it",
    "shuffle": "only lanes that execute the same shuffle can be read",
    "local array overrun": "an index out of bounds is reported where it stands, a pointer into the array is not: look for a loop "
    "that takes one too far, here or in the function that ends here",
    "stack overflow": "a recursion without end, or local arrays that are too large",
    "fence": "wgmma.fence has to stand between the last use of registers and the first wgmma.mma_async that they belong to",
    "descriptor": 'compare start address, leading and stride byte offset and swizzle with the PTX ISA\'s "Matrix Descriptor Format"',
    "warpgroup": "all four warps of a warpgroup, of which the first's number is a multiple of 4, must execute the same instruction",
    "registers": "a multiple of 8 from 24 to 256, down by setmaxnreg.dec and up by setmaxnreg.inc; what all warps take together can't "
    "be more than the block was launched with, so what some take, others must have given back",
    "division by zero": "guard the divisor",
    "launch bounds": "a GPU refuses this launch: launch no more threads, or name as many in __launch_bounds__",
    "shared memory": "use smaller tiles, or dynamic shared memory with cudaFuncSetAttribute for more than 48 KB",
    "unsupported": "the emulator interprets the PTX of attention kernels up to Hopper's: if it is spelt as in the PTX "
    "ISA, it needs a GPU",
    "inline PTX": "ptxas refuses it too, or it is wrong on a GPU: compare with the instruction's section in the PTX ISA",
    "stopped": "a loop without end, or a size that is too large for an emulator; or a block that waits for one with a higher number, "
    "which may run only after it here",
}
PLACE = re.compile(r"\{(\d+)\|([^}]*)\}")  # an offset in the library, and what to say if no line is known for it


def finding_of(finding: Fault, library: Path) -> trace.Finding:
    """What stopped a kernel, as one of a trace's findings."""
    kind, sentence, place = _in_words(finding, library)
    file, _, line = place.rpartition(":")
    return trace.Finding(kind, sentence, file, int(line or 0), HINTS.get(kind, ""), 1, None, True)


def findings_of(rows: Iterable[FoundRow], library: Path) -> tuple[trace.Finding, ...]:
    """What went wrong without stopping the kernel, once for each pair of lines, in the order of the lines."""
    rows = sorted(rows, key=lambda row: (row.launch, row.block, row.pc, row.other_pc))
    at = places(library, {pc for row in rows for pc in (row.pc, row.other_pc)} - {0})
    pairs: dict[tuple, list[FoundRow]] = {}
    for row in rows:
        both = frozenset(at.get(pc, ("", 0)) for pc in (row.pc, row.other_pc or row.pc))
        pairs.setdefault((row.kind.decode(), both), []).append(row)
    found = []
    for (kind, _), group in pairs.items():
        file, line = at.get(group[0].pc, ("", 0))
        other_file, other_line = at.get(group[0].other_pc, ("", 0))
        place = f"line {other_line}" if other_file == file else f"{other_file}:{other_line}"
        text = group[0].text.decode(errors="replace").replace("{other}", place if other_line else "a line unknown")
        apart = max(row.apart for row in group)
        races = ("race in a warp", "race", "race between blocks", "race of flags")
        hint = HINTS.get(races[apart] if kind == "race" else f"{kind} of flags" if apart == 3 else kind, "")
        count = sum(row.count for row in group)
        found.append(trace.Finding(kind, text, file, line, hint, count, other_line or None, False))
    return tuple(sorted(found, key=lambda f: (f.file, f.line, f.other_line or 0, f.kind)))


def report(finding: Fault, library: Path) -> str:
    """The text of the KernelError that a finding in a kernel of ``library`` becomes."""
    kind, sentence, place = _in_words(finding, library)
    head = (f"{place}: " if place else "") + f"{kind} in {finding.kernel.decode()}: {sentence}"
    return head + (f"\n  hint: {HINTS[kind]}" if kind in HINTS else "")


def _in_words(finding: Fault, library: Path) -> tuple[str, str, str]:
    """Kind, sentence and place (``file:line``, or empty)."""
    kind, sentence, file = finding.kind.decode(), finding.text.decode(errors="replace"), finding.file.decode()
    place = f"{file}:{finding.line}" if file else ""
    at: dict[int, tuple[str, int]] = {}
    if Path(finding.module.decode()).name == library.name:  # its folder may have been renamed since it was loaded
        calls = [pc for pc in (finding.offset, *finding.outer) if pc]
        at = places(library, {*calls, *(int(pc) for pc, _ in PLACE.findall(sentence))})
        reader, line = next((at[pc] for pc in calls if at[pc][1]), ("", 0))
        place = f"{reader}:{line}" if line else ""

    def named(found: re.Match[str]) -> str:
        reader, line = at.get(int(found[1]), ("", 0))
        return f"{reader}:{line}" if line else found[2]

    sentence = PLACE.sub(named, sentence)
    return kind, sentence, place
