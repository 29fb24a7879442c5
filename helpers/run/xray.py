"""What a kernel does to memory, exactly, without a GPU: which line costs what, and what is wrong.

`xray(kernel, q, k, v)` runs the kernel on the emulator and counts every warp request: wavefronts of shared memory against
those a request without bank conflicts needs, 32-byte sectors of global memory against those of a coalesced one, bytes by
tensor; and it finds races, reads of nothing, accesses out of bounds. The counts are the same on every machine.
"""

from __future__ import annotations

import html
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..emulator import banks
from ..emulator.trace import Access, Finding, Trace
from ..ladder.contract import TORCH_NAMES, prepare
from ..ladder.rung import Rung, Which
from ..ladder.rung import rung as find_rung
from ..ladder.show import regions
from .kernel import Kernel

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from ..figures.xray_figures import HeatListing, Picture

SPACES = ("shared", "global")
OPS = ("load", "store", "ldmatrix", "stmatrix", "cp.async", "atomic")
UNIT = {"shared": "wavefronts", "global": "sectors"}
SMALL = 1 * 2 * 256 * 256 * 64  # B H Nq Nk D of an X-ray that is there at once
LARGE = 32 * SMALL
SECONDS = 0.3  # that a small one takes on two cores, more or less
MOST_FINDINGS = 6  # that are written out
WIDE = 118  # characters of a line of text
COLUMNS = ("line", "region", "op", "space", "target", "width", "requests", "cost", "ideal", "excess", "unit")
COLUMNS += ("mean", "worst", "ways", "bytes", "kernel", "code")


def xray(kernel: Which, *inputs: Tensor, **options: Any) -> Xray:
    """Runs a kernel once on the emulator, traced, and shows what it did to memory.

        xray("04", q, k, v)

    kernel: what `load` takes; a Kernel that is loaded for the GPU is compiled for the emulator.
    inputs, options: those of the kernel, on any device: q, k, v, or s for a softmax. Small ones do: B = 1, H = 2, N = 256 shows
    every line at work. Raises ValueError as a call of the kernel does. A kernel that the emulator stops gives an Xray too,
    with the reason as its first finding.
    """
    rung = find_rung(kernel)
    launcher = kernel.launcher if isinstance(kernel, Kernel) else None
    traced = kernel if launcher and kernel.device == "cpu" else Kernel(rung, "cpu")
    inputs = tuple(t.detach().cpu() if hasattr(t, "detach") else t for t in inputs)
    call = prepare(rung, "cpu", inputs, **options)
    if (warning := _too_large(rung, call.args)) is not None:
        warnings.warn(warning, stacklevel=2)
    return Xray(rung, _workload(rung, call.args), traced.launcher.trace(call), _spilled(launcher))


def _spilled(launcher: Any) -> int:
    """Bytes per thread that nvcc stores and loads because registers ran out; 0 where it has not been asked."""
    resources = None if launcher is None else launcher.resources
    return 0 if resources is None else int(resources[["spill_store_bytes", "spill_load_bytes"]].max().sum())


def _work(rung: Rung, args: Any) -> int:
    """Multiply-adds of one of attention's two products; a softmax touches each element a few times."""
    return args.Nq * args.Nk * 8 if rung.op == "softmax" else args.B * args.H * args.Nq * args.Nk * args.D


def _too_large(rung: Rung, args: Any) -> str | None:
    times = _work(rung, args) / SMALL
    if times * SMALL <= LARGE:
        return None
    small = "64 rows of 16384" if rung.op == "softmax" else "B=1 H=2 N=256"
    seconds = SECONDS * times
    takes = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return (
        f"an X-ray follows every load and store: {_workload(rung, args)} is some {times:,.0f} times the work of {small}, "
        f"which shows every line at work too. It may take on the order of {takes}; Ctrl-C stops it"
    )


def _workload(rung: Rung, args: Any) -> str:
    dtype = list(TORCH_NAMES)[args.dtype]
    if rung.op == "softmax":
        return f"{args.Nq} rows of {args.Nk} {dtype}"
    length = f"N={args.Nq}" if args.Nq == args.Nk else f"Nq={args.Nq} Nk={args.Nk}"
    return f"B={args.B} H={args.H} {length} D={args.D} {dtype}"


@dataclass(frozen=True)
class Total:
    """A sum over accesses: `requests` of warps; `cost` and `ideal` in wavefronts (shared) or sectors (global); `bytes`."""

    requests: int
    cost: int
    ideal: int
    bytes: int

    @property
    def excess(self) -> int:
        """cost − ideal: in shared memory the bank conflicts."""
        return self.cost - self.ideal


@dataclass(frozen=True)
class Xray:
    """What one run did to memory. `findings` are what is wrong, those that stopped the kernel first.

    Shown by itself it is a summary with the costliest lines; `to_frame()` has all of them. `source()`, `bank_map()`,
    `address_map()` and `traffic()` draw; `line()`, `total()` and `diff()` answer.
    """

    rung: Rung = field(repr=False)
    workload: str
    trace: Trace = field(repr=False)
    spilled: int = 0  # bytes per thread, of a kernel that nvcc has compiled

    # Numbers

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong; what stopped the kernel comes first."""
        return tuple(sorted(self.trace.findings, key=lambda f: not f.error))

    @property
    def ok(self) -> bool:
        """Nothing was found to be wrong."""
        return not self.trace.findings

    @property
    def stopped(self) -> bool:
        """The kernel did not run to its end, so the counts are those up to there."""
        return any(f.error for f in self.trace.findings)

    @property
    def conflicts(self) -> int:
        """Wavefronts of shared memory beyond those that the same requests would take without bank conflicts."""
        return self.total(space="shared").excess

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every access, the largest excess first, then the largest cost."""
        return tuple(sorted(self.trace.accesses, key=lambda a: (a.ideal - a.cost, -a.cost, a.line, a.op, a.target)))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The `__global__` functions that ran, in the order in which they stand in the file."""
        return tuple(dict.fromkeys(a.kernel for a in sorted(self.trace.accesses, key=lambda a: a.line)))

    def to_frame(self) -> pd.DataFrame:
        """A row per line, operation, target and width, sorted by excess, then cost.

        `cost`, `ideal`, `excess` and `worst` (of one request) count wavefronts where `space` is "shared" and 32-byte
        sectors where it is "global"; `mean` is cost / requests, `ways` the worst request's cost / its ideal (the ways of a
        bank conflict); `width` is bytes per lane, `bytes` those of all lanes.
        """
        import pandas as pd

        rows = [
            (a.line, self.region(a.line), a.op, a.space, a.target, a.width, a.requests, a.cost, a.ideal)
            + (
                a.cost - a.ideal,
                UNIT[a.space],
                a.cost / a.requests,
                a.worst,
                _ways(a),
                a.bytes,
                a.kernel,
                self.code(a.line).strip(),
            )
            for a in self.accesses
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """Bytes by tensor: those that threads asked to read and write, and the least an attention has to move.

        Columns: `bytes_read`, `bytes_written`, `size_bytes`, `reads_per_byte` (how often each byte is read),
        `minimum_bytes` (inputs read once, outputs written once, a workspace not at all).
        """
        import pandas as pd

        rows = {
            name: (read, written, size, read / size if size else 0.0, 0 if name in self._workspace else size)
            for name, (read, written, size) in self.trace.tensors.items()
        }
        names = ["bytes_read", "bytes_written", "size_bytes", "reads_per_byte", "minimum_bytes"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("tensor")

    @property
    def _workspace(self) -> set[str]:
        return {name for name, _ in self.rung.workspace}

    def total(
        self,
        *,
        space: str | None = None,
        op: str | None = None,
        target: str | None = None,
        line: int | str | None = None,
        region: str | None = None,
        kernel: str | None = None,
    ) -> Total:
        """requests, cost, ideal and bytes of the accesses that fit: `total(space="shared", op="ldmatrix").excess`.

        Costs of shared memory (wavefronts) and of global memory (sectors) don't add up: name a space where you read one.
        Raises ValueError for a name that is none; one that this kernel doesn't use gives zeros.
        """
        _require("space", space, SPACES)
        _require("op", op, OPS)
        _require("region", region, self._regions)
        wanted = {"space": space, "op": op, "target": target, "kernel": kernel}
        wanted["line"] = None if line is None else self._number(line)
        found = [
            a
            for a in self.trace.accesses
            if all(value is None or getattr(a, name) == value for name, value in wanted.items())
            and (region is None or self._within(a.line, region))
        ]
        return Total(*(sum(getattr(a, f) for a in found) for f in ("requests", "cost", "ideal", "bytes")))

    def line(self, which: int | str) -> Line:
        """What one line does, in words: `which` is its number, or a piece of its text that no other line has."""
        number = self._number(which)
        found = tuple(a for a in self.accesses if a.line == number)
        return Line(self.rung.path.name, number, self.code(number), found)

    def diff(self, other: Xray) -> pd.DataFrame:
        """What became of each target's cost from this X-ray to `other`: a row per region, target, operation and space.

        Columns: `cost_before`, `cost_after`, `excess_before`, `excess_after`, the largest change of excess first. Lines are
        put together by the region they stand in, as their numbers change with every edit.
        """
        import pandas as pd

        from ..figures.xray_figures import Table

        if not isinstance(other, Xray):
            raise ValueError(f"diff takes another Xray; this is a {type(other).__name__}")
        if other.workload != self.workload:
            raise ValueError(f"one X-ray is of {self.workload}, the other of {other.workload}: take the same inputs")
        sums: dict[tuple, list[int]] = {}
        for at, ray in enumerate((self, other)):
            for a in ray.trace.accesses:
                row = sums.setdefault((ray.region(a.line), a.target, a.op, a.space), [0] * 4)
                row[at] += a.cost
                row[2 + at] += a.cost - a.ideal
        order = sorted(sums, key=lambda k: (-abs(sums[k][3] - sums[k][2]), -abs(sums[k][1] - sums[k][0]), k))
        index = pd.MultiIndex.from_tuples(order, names=["region", "target", "op", "space"]) if order else None
        columns = ["cost_before", "cost_after", "excess_before", "excess_after"]
        return Table([sums[k] for k in order], index=index, columns=columns)

    # The source

    @cached_property
    def _lines(self) -> list[str]:
        return self.rung.source.splitlines()

    @cached_property
    def _regions(self) -> dict[str, tuple[int, int]]:
        try:
            return regions(self.rung)
        except ValueError:  # a reader's own markers may be half edited
            return {}

    def _within(self, line: int, region: str) -> bool:
        first, last = self._regions[region]
        return first <= line <= last

    def code(self, line: int) -> str:
        """The text of a line; empty for one that isn't there."""
        return self._lines[line - 1] if 0 < line <= len(self._lines) else ""

    def region(self, line: int) -> str:
        """The innermost region a line stands in; empty if none."""
        around = [(last - first, name) for name, (first, last) in self._regions.items() if first <= line <= last]
        return min(around)[1] if around else ""

    def _number(self, which: int | str) -> int:
        if isinstance(which, str):
            found = [n for n, text in enumerate(self._lines, 1) if which in text]
            if len(found) != 1:
                at = f"lines {', '.join(map(str, found))}" if found else "no line"
                raise ValueError(f"{which!r} stands on {at} of {self.rung.path.name}; it has to stand on one")
            return found[0]
        if isinstance(which, bool) or not isinstance(which, int) and not hasattr(which, "__index__"):
            raise ValueError(f"a line is a number or a piece of its text; this is a {type(which).__name__}")
        if not 0 < which <= len(self._lines):
            raise ValueError(f"{self.rung.path.name} has {len(self._lines)} lines; there is no line {which}")
        return int(which)

    def worst(
        self, space: str, line: int | str | None = None, op: str | None = None, target: str | None = None
    ) -> Access:
        """The access whose worst request costs most beyond its ideal; of a line, an operation or a target, if named.

        Raises ValueError that names the lines there are, if none fits.
        """
        _require("op", op, OPS)
        number = None if line is None else self._number(line)
        here = [a for a in self.accesses if a.space == space]
        fits = [a for a in here if number in (None, a.line) and op in (None, a.op) and target in (None, a.target)]
        if not fits:
            what = f"{op or 'request'} of {target or f'{space} memory'}" + (f" on line {number}" if number else "")
            others = sorted({a.line for a in here if op in (None, a.op) and target in (None, a.target)})
            raise ValueError(f"there is no {what}; lines with one: {', '.join(map(str, others)) or 'none'}")
        if number is None:
            return fits[0]  # the most excess in all
        return max(fits, key=lambda a: (a.worst_request.cost - a.worst_request.ideal, a.worst))

    # Pictures

    def source(self, region: str | None = None) -> HeatListing:
        """The `.cu`, or one region of it, with what each line costs beside it; text in a terminal, HTML in a notebook."""
        from ..figures.xray_figures import heat

        _require("region", region, self._regions)
        return heat(self, region)

    def bank_map(self, line: int | str | None = None, op: str | None = None, target: str | None = None) -> Picture:
        """The worst request of a line to shared memory: 32 banks across, a row per wavefront, lanes in the cells.

        line: its number or a piece of its text; by default the one with the most conflicts. `op` and `target` choose among
        the requests of a line that makes several.
        """
        from ..figures.xray_figures import bank_map

        return bank_map(self.worst("shared", line, op, target))

    def address_map(self, line: int | str | None = None, op: str | None = None, target: str | None = None) -> Picture:
        """The worst request of a line to global memory, over lines of 128 bytes and sectors of 32.

        line: its number or a piece of its text; by default the one with the most sectors beyond the ideal. `op` and
        `target` choose among the requests of a line that makes several.
        """
        from ..figures.xray_figures import address_map

        return address_map(self.worst("global", line, op, target))

    def traffic(self) -> Picture:
        """Bytes by tensor, read and written, beside the theoretical minimum."""
        from ..figures.xray_figures import traffic

        return traffic(self)

    # Words

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the counts cannot know, where it bears on these."""
        found = []
        narrow = [a for a in self.accesses if a.space == "shared" and a.op in ("load", "store") and a.width < 16]
        lines = sorted({a.line for a in narrow if a.cost >= 0.1 * self.total(space="shared").cost})
        if lines:
            at = f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
            widths = sorted({a.width for a in narrow if a.line in lines})
            each = " or ".join(map(str, widths)) + (" byte" if widths == [1] else " bytes")
            found.append(
                f"{at}: counted as written, {each} per lane; nvcc may fuse a thread's neighbouring accesses of shared "
                "memory into fewer, wider ones"
            )
        engines = ["TMA"] if any(".bulk" in a.op for a in self.accesses) else []
        engines += ["wgmma"] if any(name.startswith("wgmma") for name in self.trace.instructions) else []
        if engines:
            found.append(
                f"wavefronts of shared memory are those of threads; in what portions {' and '.join(engines)} "
                f"{'go' if len(engines) > 1 else 'goes'} there is not known, and no conflicts are counted there"
            )
        if any(read > size for read, _, size in self.trace.tensors.values()):
            found.append(
                "sectors and bytes are what threads request; what the caches L1 and L2 catch never reaches HBM"
            )
        if any(a.target == "cudaMalloc" for a in self.accesses):
            found.append(
                "memory that the launcher takes by cudaMalloc is held against its bounds only: races there, and reads of what "
                "nobody has written, are looked for in outputs and in tensors of the header's `workspace`"
            )
        if self.spilled:
            found.append(f"nvcc spills registers, {self.spilled} bytes per thread: that traffic is not in these counts")
        return tuple(found)

    def summary(self) -> str:
        """The totals, a line each for shared memory, global memory and bytes by tensor."""
        head = f"X-ray of {self.rung.stem} · {self.workload}"
        if len(self.kernels) > 1:
            head += f" · {len(self.kernels)} kernels"
        lines = [head + f" · {self.trace.seconds:.2g} s on the emulator"]
        for space, wasted in (("shared", "bank conflicts"), ("global", "more than the bytes need")):
            total = self.total(space=space)
            if total.requests:
                over = (
                    f"{total.excess:,} {wasted} ({_share(total.excess / total.cost)})"
                    if total.excess
                    else f"no {wasted}"
                )
                over = "as few as can be" if space == "global" and not total.excess else over
                lines.append(f"  {space}  {total.cost:,} {UNIT[space]} for {total.requests:,} requests: {over}")
        moved = []
        for name, (read, written, size) in self.trace.tensors.items():
            if read or written:
                least = 0 if name in self._workspace or self.stopped else size
                moved.append(
                    f"{name} {_bytes(read + written)}" + (f" (×{_short((read + written) / least)})" if least else "")
                )
        if moved:
            lines.append("  bytes   " + "  ".join(moved) + ("" if self.stopped else "   (× the least possible)"))
        if self.trace.instructions:
            most = sorted(self.trace.instructions.items(), key=lambda item: -item[1])[:6]
            lines.append("  warp instructions  " + "  ".join(f"{name} {count:,}" for name, count in most))
        return "\n".join(lines)

    def report(self, finding: Finding) -> str:
        """One finding: the sentence, the lines it names, the hint."""
        here = not finding.file or Path(finding.file).name == self.rung.path.name
        place = f"line {finding.line}" if here else f"{finding.file}:{finding.line}"
        times = f" ({finding.count:,} times)" if finding.count > 1 else ""
        lines = [
            f"✗ {finding.kind}, {place}{times}: {finding.text}"
            if finding.line
            else f"✗ {finding.kind}{times}: {finding.text}"
        ]
        numbers = dict.fromkeys(n for n in (finding.line, finding.other_line) if n and here and self.code(n))
        lines += [f"  {n:>5} | {self.code(n).strip()}" for n in numbers]
        return "\n".join(lines + ([f"        hint: {finding.hint}"] if finding.hint else []))

    def _words(self) -> list[str]:
        """Summary and findings: what text and HTML have in common."""
        parts = [self.summary()]
        if self.stopped:
            parts.append("  The kernel was stopped: counts are those up to there.")
        parts += [self.report(f) for f in self.findings[:MOST_FINDINGS]] or [
            "  no findings: no race, nothing out of bounds, nothing read before it was written"
        ]
        if len(self.findings) > MOST_FINDINGS:
            parts.append(f"  … and {len(self.findings) - MOST_FINDINGS} more in `findings`")
        return parts

    def __str__(self) -> str:
        parts = self._words()
        for space in SPACES:
            rows = [a for a in self.accesses if a.space == space]
            if rows:
                shown = rows[:5]
                parts.append(_table(shown, space, self))
                if len(rows) > len(shown):
                    parts.append(f"  … and {len(rows) - len(shown)} more: to_frame() has all")
        parts += [_wrapped(f"note: {note}") for note in self.notes]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from ..figures.xray_figures import table_html

        style = "margin:0;word-break:normal;white-space:pre-wrap"
        parts = [f"<pre style='{style}'>{html.escape(chr(10).join(self._words()))}</pre>"]
        parts += [table_html(self, space) for space in SPACES if any(a.space == space for a in self.accesses)]
        if self.notes:
            parts.append(f"<pre style='{style}'>{html.escape(chr(10).join(f'note: {n}' for n in self.notes))}</pre>")
        return "".join(parts)

    def step(self) -> Any:
        """A widget that steps through the worst request of every line; needs ipywidgets, and says so where it isn't."""
        from ..figures.xray_figures import step

        return step(self)


@dataclass(frozen=True)
class Line:
    """What one source line does to memory; `accesses` are its entries in the X-ray, the costliest first."""

    file: str
    number: int
    code: str
    accesses: tuple[Access, ...]

    def __str__(self) -> str:
        head = f"{self.file}:{self.number} | {self.code.strip()}"
        return "\n".join(
            [head, *(f"  {words(a)}" for a in self.accesses)] if self.accesses else [head, "  touches no memory"]
        )

    __repr__ = __str__


def words(access: Access) -> str:
    """One access in a sentence: how many requests, what they cost against the ideal, and what the worst of them does."""
    a, worst, unit = access, access.worst_request, UNIT[access.space]
    to = {"store": "to", "stmatrix": "to", "cp.async": "to" if a.space == "shared" else "from", "atomic": "on"}.get(
        a.op, "from"
    )
    text = f"{a.op} of {a.width} bytes per lane {to} {a.target}: {a.requests:,} requests, {a.cost:,} {unit}"
    if a.cost == a.ideal:
        return text + ", as few as can be"
    text += f" where {a.ideal:,} would do; the worst takes {worst.cost} instead of {worst.ideal}: "
    if a.space == "global":
        lines = len({s // 4 for s in banks.sectors(worst.addresses, worst.width)})
        lanes = sum(x is not None for x in worst.addresses)
        return text + f"{lanes} lanes ask for {lanes * worst.width} bytes in {lines} lines of 128"
    return text + crowd(worst.addresses, worst.width, a.op)


def crowd(addresses: tuple[int | None, ...], width: int, op: str) -> str:
    """The fullest bank of a request in words: which lanes want different words of it."""
    turns, bank, first = 0, 0, [0]
    for part in banks.served(addresses, width, op):
        for here in sorted({b for wavefront in part for b in wavefront}):
            waiting = [wavefront[here][0] for wavefront in part if here in wavefront]
            if len(waiting) > turns:
                turns, bank, first = len(waiting), here, waiting
    bank -= bank % max(1, width // banks.WORD)
    where = f"bank {bank}" if width <= banks.WORD else f"banks {bank}–{bank + width // banks.WORD - 1}"
    return f"lanes {banks.runs(first)} want different words of {where}"


def _ways(a: Access) -> float:
    return a.worst_request.cost / a.worst_request.ideal if a.worst_request.ideal else float(a.worst_request.cost)


def _require(what: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{what} {value!r}: there are {', '.join(allowed) or 'none'}")


def _share(x: float) -> str:
    return "<1%" if x < 0.005 else f"{x:.0%}"


def _short(times: float) -> str:
    return f"{times:.3g}"


def _bytes(n: float) -> str:
    """64 KiB, 1.5 MiB: units of 1024, three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.0f} B"


def _table(rows: list[Access], space: str, ray: Xray) -> str:
    """The costliest lines of one space as text."""
    head = (" line", "operation", "width", "requests", UNIT[space], "ideal", "worst request", "")
    cells = [
        (f"{a.line:>5}", f"{a.op} {a.target}", f"{a.width} B", f"{a.requests:,}", f"{a.cost:,}", f"{a.ideal:,}")
        + (f"{a.worst_request.cost} for {a.worst_request.ideal}", _statement(ray.code(a.line)))
        for a in rows
    ]
    sizes = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    left = {1, 7}
    lines = [
        "  ".join(c.ljust(n) if i in left else c.rjust(n) for i, (c, n) in enumerate(zip(row, sizes))).rstrip()
        for row in (head, *cells)
    ]
    return "\n".join([f"costliest lines, {space} memory", *(_cut(line, WIDE) for line in lines)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDE, initial_indent="  ", subsequent_indent="    ")


def _statement(code: str) -> str:
    """A line of code for a table: of a loop with its body on the same line, the body."""
    code = code.strip()
    if code.startswith("for ("):
        depth = 0
        for i, letter in enumerate(code):
            depth += (letter == "(") - (letter == ")")
            if letter == ")" and depth == 0:
                body = code[i + 1 :].strip()
                return f"for (…) {body}" if body not in ("", "{") else code
    return code


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
