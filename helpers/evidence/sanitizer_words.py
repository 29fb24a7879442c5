"""What compute-sanitizer's tools say, in short: the first message of an output, and whether it flags anything."""

from __future__ import annotations

import re

# memcheck: accesses out of bounds and misaligned ones. racecheck: unordered accesses to shared memory; an arrival on an
# mbarrier speaks, to it, for the thread that arrives and for no other, even behind a barrier of all, so that a TMA pipeline
# whose place one thread gives back for its readers is reported though it is right (tests/evidence/releases.cu; compute-sanitizer 13.0).
# initcheck: reads of global memory that nobody has written; it knows cp.async.bulk since 2025.4 (its release notes:
# https://docs.nvidia.com/compute-sanitizer/ReleaseNotes/). synccheck: barriers that some of their threads miss.
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLEAN, TIMEOUT, FAILED = "clean", "timeout", "failed"

_PLACE = r"[^\n]* in (?P<{0}file>[\w.]+):(?P<{0}line>\d+)"
_ACCESS = re.compile(
    r"Invalid __(?P<space>\w+)__ (?P<verb>\w+) of size (?P<bytes>\d+) bytes\n(?:\s+at" + _PLACE.format("") + ")?"
)
_WHY = re.compile(r"\bis (?P<why>misaligned|out of bounds|accessed with a partial warp)|(?P<null>null pointer)")
_RACE = re.compile(
    r"(?P<level>Error|Warning): Race reported between (?P<verb>\w+) access at(?:" + _PLACE.format("") + r")?[^\n]*\n"
    r"\s*and (?P<other>\w+) access at(?:" + _PLACE.format("other") + r")?"
)
_UNWRITTEN = re.compile(
    r"Uninitialized __(?P<space>\w+)__ memory (?P<verb>\w+) of size (?P<bytes>\d+) bytes\n(?:\s+at"
    + _PLACE.format("")
    + ")?"
)
_BARRIER = re.compile(
    r"(?P<what>Barrier|Warpgroup MMA sequence) error detected\. (?P<why>[^\n]*?)\.?\n(?:\s+at"
    + _PLACE.format("")
    + ")?"
)
_CUDA = re.compile(r"\b(?P<error>cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+)\b")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")


def read(said: str) -> str:
    """The first message of a tool's output, in short and without paths: "out of bounds: global read of 16 bytes, line 84".

    "clean" if its summary counts nothing and the program ended well; "failed: …" if the tool itself did not get that far.
    """
    text = re.sub(r"^=+ ?", "", said, flags=re.MULTILINE)
    if found := _ACCESS.search(text):
        why = _WHY.search(text, found.end())
        why = "null pointer" if why and why["null"] else why["why"] if why else "invalid"
        return f"{why}: {found['space']} {found['verb']} of {found['bytes']} bytes{_at(found)}"
    if found := _RACE.search(text):
        places = f"{found['verb'].lower()}{_at(found)} and {found['other'].lower()}{_at(found, 'other')}"
        return f"race{' (warning)' if found['level'] == 'Warning' else ''}: {places}"
    if found := _UNWRITTEN.search(text):
        return f"uninitialised: {found['space']} {found['verb']} of {found['bytes']} bytes{_at(found)}"
    if found := _BARRIER.search(text):
        return f"{found['what'].lower()}: {found['why'].lower()}{_at(found)}"
    if found := _CUDA.search(text):
        failed = found["error"] == "cudaErrorNoKernelImageForDevice"  # the program was built for another GPU
        return f"{FAILED if failed else 'CUDA error'}: {found['error']}"
    summary = _SUMMARY.search(text)
    if summary and int(summary["count"]) == 0:
        return CLEAN
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("COMPUTE-SANITIZER")]
    return f"{FAILED}: {' '.join(lines)[:120]}"


def _at(found: re.Match[str], which: str = "") -> str:
    """ ", line 84" of the kernel's file, or ", math.cuh line 14"."""
    if not found[f"{which}line"]:
        return ""
    header = "" if found[f"{which}file"].endswith(".cu") else f" {found[f'{which}file']}"
    return f",{header} line {found[f'{which}line']}"


def flagged(message: str) -> bool:
    """Whether a tool's message, or the X-ray's, says that something is wrong. That a tool ran out of time, or could not do its
    work, says nothing of the program: each slows it down, racecheck and initcheck most."""
    return message not in (CLEAN, TIMEOUT) and not message.startswith(FAILED)


def flagging(row: dict, of_rung: dict | None = None) -> list[str]:
    """The tools that flag a mutant, of a row of the record: those that say something, and all of them where none has seen
    the program's end. That one hangs, whoever watches.

    of_rung: the row of the rung itself, whose lines have the same numbers. What a tool says of that, too, in the same words,
    is none of the mutant's bug."""
    if all(row[tool] == TIMEOUT for tool in TOOLS):
        return list(TOOLS)
    found = {tool: row[tool].removesuffix(f"; {TIMEOUT}") for tool in TOOLS}
    return [tool for tool in TOOLS if flagged(found[tool]) and not (of_rung and found[tool] == of_rung[tool])]
