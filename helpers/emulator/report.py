"""Findings in words: the sentence, the line of the reader's source, a hint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .native import Finding

HINTS = {
    "out of bounds": "the access was stopped before it happened; check the index against the tensor's shape and strides",
    "null pointer": "the tensor this pointer should name was not passed, or the pointer was never set",
    "misaligned": "a vector access needs an address that is a multiple of its size: check the row length and the column",
    "uninitialised shared memory": "a store is missing, or the barrier between the store and this load, or the tail isn't "
    "zero-filled",
    "divergent barrier": "every thread of a block must come to the same __syncthreads(): move it out of the branch, and let "
    "no thread return before it",
    "deadlock": "every lane that the mask names must come to the same instruction with the same mask",
    "mask": "the mask of a warp instruction must name every lane that executes it",
    "shuffle": "only lanes that execute the same shuffle can be read",
    "stack overflow": "a recursion without end, or local arrays that are too large",
    "division by zero": "guard the divisor",
    "shared memory": "use smaller tiles, or dynamic shared memory with cudaFuncSetAttribute for more than 48 KB",
    "unsupported": "the emulator interprets no inline PTX: this kernel needs a GPU",
    "stopped": "a loop without end, or a size that is too large for an emulator",
}
INCLUDE = str(Path(__file__).parent / "include")
CHECKOUT = f"{Path(__file__).resolve().parent.parent.parent}/"


def source_line(library: Path, offset: int) -> str:
    """``file:line`` of the call that returns to ``offset`` in ``library``; what the emulator's own headers
    wrap is named by the place that uses it. Empty if nothing is known."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ""
    command = [tool, "-i", "-e", str(library), hex(offset - 1)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    # A name that is no absolute path (a notebook's cell) comes with the folder of the build before it.
    places = [re.sub(r".*/\.building-[^/]*/| \(.*", "", line) for line in lines if re.search(r":[1-9]\d*( \(|$)", line)]
    return next((place for place in places if not place.startswith(INCLUDE)), "")


def report(finding: Finding, library: Path) -> str:
    """The text of the KernelError that a finding in a kernel of ``library`` becomes."""
    kind, sentence, file = finding.kind.decode(), finding.text.decode(errors="replace"), finding.file.decode()
    sentence = sentence.replace(f" {CHECKOUT}", " ")
    place = f"{file}:{finding.line}" if file else ""
    if Path(finding.module.decode()).name == library.name:  # its folder may have been renamed since it was loaded
        place = source_line(library, finding.offset)
    place = place.removeprefix(CHECKOUT)
    head = (f"{place}: " if place else "") + f"{kind} in {finding.kernel.decode()}: {sentence}"
    return head + (f"\n  hint: {HINTS[kind]}" if kind in HINTS else "")
