"""An X-ray in words: its summary, its findings, what its counts cannot know, and its costliest lines as text."""

from __future__ import annotations

import textwrap

from ..emulator.trace import Finding
from ..figures.tables import access_text
from ..figures.words import SPACES, UNIT, share, size
from .counts import Counts

MOST_FINDINGS = 6  # that are written out
MOST_LINES = 5  # of each space
WIDE = 118  # characters of a line of text


def whole(counts: Counts) -> str:
    """Summary, findings, the costliest lines of each space, and notes."""
    parts = head(counts)
    for space in SPACES:
        if rows := counts.of(space):
            parts.append(access_text(rows[:MOST_LINES], space, counts.code_of, WIDE))
            if len(rows) > MOST_LINES:
                parts.append(f"  … and {len(rows) - MOST_LINES} more: to_frame() has all")
    indent = {"initial_indent": "  ", "subsequent_indent": "    "}
    parts += [textwrap.fill(f"note: {note}", WIDE, **indent) for note in notes(counts)]
    return "\n".join(parts)


def head(counts: Counts) -> list[str]:
    """Summary and findings, which text and HTML have in common."""
    parts = [summary(counts)]
    if counts.stopped:
        parts.append("  The kernel was stopped: counts are those up to there.")
    parts += [report(counts, f) for f in counts.findings[:MOST_FINDINGS]] or [
        f"  no findings{' in shared memory and tensors' * bool(_beside(counts))}: no race, nothing out of bounds, nothing "
        "read before it was written"
    ]
    if len(counts.findings) > MOST_FINDINGS:
        parts.append(f"  … and {len(counts.findings) - MOST_FINDINGS} more in `findings`")
    return parts


def summary(counts: Counts) -> str:
    """The totals, a line each for shared memory, global memory and bytes by tensor."""
    title = f"X-ray of {counts.rung.stem} · {counts.workload}"
    if len(counts.kernels) > 1:
        title += f" · {len(counts.kernels)} kernels"
    lines = [title + f" · {counts.trace.seconds:.2g} s on the emulator"]
    for space, needless, none in (
        ("shared", "bank conflicts", "no bank conflicts"),
        ("global", "more than the bytes need", "as few as can be"),
    ):
        total = counts.total(space=space)
        if total.requests:
            over = f"{total.excess:,} {needless} ({share(total.excess / total.cost)})" if total.excess else none
            requests = f"{total.requests:,} request{'s' * (total.requests > 1)}"
            lines.append(f"  {space}  {total.cost:,} {UNIT[space]} for {requests}: {over}")
    if moved := [_moved(counts, *item) for item in counts.trace.tensors.items() if any(item[1][:2])]:
        lines.append("  bytes   " + "  ".join(moved) + ("" if counts.stopped else "   (× the least possible)"))
    if counts.trace.instructions:
        most = sorted(counts.trace.instructions.items(), key=lambda item: -item[1])[:6]
        lines.append("  warp instructions  " + "  ".join(f"{name} {count:,}" for name, count in most))
    return "\n".join(lines)


def _moved(counts: Counts, name: str, bytes_: tuple[int, int, int]) -> str:
    """Bytes of one tensor, and how often the least possible, where that is known."""
    read, written, whole = bytes_
    least = 0 if name in counts.workspace or counts.stopped else whole
    times = f" (×{(read + written) / least:.3g})" if least else ""
    return f"{name} {size(read + written)}{times}"


def report(counts: Counts, finding: Finding) -> str:
    """One finding: the sentence, the lines it names, the hint."""
    place = f"line {finding.line}" if counts.file.holds(finding.file) else f"{finding.file}:{finding.line}"
    times = f" ({finding.count:,} times)" if finding.count > 1 else ""
    at = f", {place}" if finding.line else ""
    lines = [f"✗ {finding.kind}{at}{times}: {finding.text}"]
    numbers = dict.fromkeys(n for n in counts.file.named(finding) if counts.code(n))
    lines += [f"  {n:>5} | {counts.code(n).strip()}" for n in numbers]
    return "\n".join(lines + ([f"        hint: {finding.hint}"] if finding.hint else []))


def _beside(counts: Counts) -> list[str]:
    """What is looked for less in the global memory that the kernel uses beside tensors."""
    targets = {a.target.split()[0] for a in counts.accesses if a.target}
    beside = {
        "cudaMalloc": "memory that the launcher takes by cudaMalloc is held against its bounds only",
        "__device__": "__device__ variables are counted, and not held against their bounds",
    }
    return [less for target, less in beside.items() if target in targets]


def notes(counts: Counts) -> tuple[str, ...]:
    """What the counts cannot know, where it bears on these."""
    found = []
    narrow = [a for a in counts.of("shared") if a.op in ("load", "store") and a.width < 16]
    narrow, least = sorted(narrow, key=lambda a: a.line), 0.1 * counts.total(space="shared").cost
    lines = dict.fromkeys(counts.file.place(a) for a in narrow if a.cost >= least)
    if lines:
        at = f"line{'s' * (len(lines) > 1)} {', '.join(lines)}"
        widths = sorted({a.width for a in narrow if counts.file.place(a) in lines})
        each = " or ".join(map(str, widths)) + (" byte" if widths == [1] else " bytes")
        found.append(
            f"{at}: counted as written, {each} per lane; nvcc may fuse a thread's neighbouring accesses of shared "
            "memory into fewer, wider ones, and takes out of a loop what does not change in it"
        )
    engines = ["TMA"] if any(".bulk" in a.op for a in counts.accesses) else []
    engines += ["wgmma"] if any(name.startswith("wgmma") for name in counts.trace.instructions) else []
    if engines:
        found.append(
            f"wavefronts of shared memory are those of threads; in what portions {' and '.join(engines)} "
            f"{'go' if len(engines) > 1 else 'goes'} there is not known, and no conflicts are counted there"
        )
    if any(read > size_ for read, _, size_ in counts.trace.tensors.values()):
        found.append("sectors and bytes are what threads request; what the caches L1 and L2 catch never reaches HBM")
    found += [
        f"{less}: races there, and reads of what nobody has written, are looked for in outputs and in tensors of the header's "
        "`workspace`"
        for less in _beside(counts)
    ]
    if counts.spilled:
        found.append(f"nvcc spills registers, {counts.spilled} bytes per thread: that traffic is not in these counts")
    return tuple(found)
