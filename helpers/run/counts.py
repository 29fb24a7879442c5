"""What one traced run of a kernel did to memory, as numbers: totals, tables, single lines, and the difference of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..emulator.launcher import BULK, OPS
from ..emulator.trace import Access, Finding, Trace
from ..figures.words import SPACES, UNIT, words
from ..ladder.rung import Rung
from ..ladder.show import regions

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("line", "region", "op", "space", "target", "width", "requests", "cost", "ideal", "excess", "unit")
COLUMNS += ("mean", "worst", "ways", "bytes", "kernel", "code")


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


@dataclass(frozen=True)
class SourceFile:
    """The text of a `.cu` by line number, and the regions that its markers name."""

    name: str
    text: tuple[str, ...]
    regions: dict[str, tuple[int, int]]  # name -> first and last line

    @classmethod
    def of(cls, rung: Rung) -> SourceFile:
        """Those of a rung; without regions where its markers don't pair, as a reader's own may be half edited."""
        try:
            found = regions(rung)
        except ValueError:
            found = {}
        lines = rung.source.replace("\r\n", "\n").removesuffix("\n").split("\n")  # as compilers count them
        return cls(rung.path.name, tuple(lines), found)

    def holds(self, file: str) -> bool:
        """Whether a trace's name of a file is this one's, or none."""
        return not file or Path(file).name == self.name

    def line_of(self, access: Access) -> int:
        """The line on which an access stands; 0 for one in another file, such as a header of the reader's."""
        return access.line if self.holds(access.file) else 0

    def place(self, access: Access) -> str:
        """The line of an access, with its file where that is another: 7, mine.cuh:4."""
        return str(access.line) if self.holds(access.file) else f"{Path(access.file).name}:{access.line}"

    def named(self, finding: Finding) -> list[int]:
        """The lines of this file that a finding names; its text names the other line's file where the two differ."""
        other = re.search(rf"(\S+):{finding.other_line}\b", finding.text)
        both = (finding.file, finding.line), (other[1] if other else finding.file, finding.other_line)
        return [line for file, line in both if line and self.holds(file)]

    def code(self, line: int) -> str:
        """The text of a line; empty for one that isn't there."""
        return self.text[line - 1] if 0 < line <= len(self.text) else ""

    def region(self, line: int) -> str:
        """The innermost region a line stands in; empty if none."""
        around = [(last - first, name) for name, (first, last) in self.regions.items() if first <= line <= last]
        return min(around)[1] if around else ""

    def span(self, region: str | None) -> tuple[int, int]:
        """First and last line of a region, or of the file."""
        return self.regions[region] if region else (1, len(self.text))

    def within(self, line: int, region: str) -> bool:
        """Whether a line stands in a region, however deep."""
        first, last = self.regions[region]
        return first <= line <= last

    def number(self, which: int | str) -> int:
        """The number of a line, given by its number or by a piece of its text that no other line has. ValueError otherwise."""
        if isinstance(which, str):
            found = [n for n, text in enumerate(self.text, 1) if which in text]
            if len(found) != 1:
                at = f"lines {', '.join(map(str, found))}" if found else "no line"
                raise ValueError(f"{which!r} stands on {at} of {self.name}; it has to stand on one")
            return found[0]
        if isinstance(which, bool) or not isinstance(which, int) and not hasattr(which, "__index__"):
            raise ValueError(f"a line is a number or a piece of its text; this is a {type(which).__name__}")
        if not 0 < which <= len(self.text):
            raise ValueError(f"{self.name} has {len(self.text)} lines; there is no line {which}")
        return int(which)


@dataclass(frozen=True)
class Counts:
    """What one run did to memory, counted. `findings` are what is wrong, those that stopped the kernel first."""

    rung: Rung = field(repr=False)
    workload: str
    trace: Trace = field(repr=False)
    spilled: int = 0  # bytes per thread, of a kernel that nvcc has compiled

    @cached_property
    def file(self) -> SourceFile:
        """The kernel's file, line by line."""
        return SourceFile.of(self.rung)

    def code(self, line: int) -> str:
        """The text of a line; empty for one that isn't there."""
        return self.file.code(line)

    def region(self, line: int) -> str:
        """The innermost region a line stands in; empty if none."""
        return self.file.region(line)

    def code_of(self, access: Access) -> str:
        """The text of an access's line; of one in another file, that file and the line's number."""
        return self.code(access.line) if self.file.holds(access.file) else self.file.place(access)

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

    def of(self, space: str) -> list[Access]:
        """The accesses of one space, the costliest first."""
        return [a for a in self.accesses if a.space == space]

    def of_warps(self, space: str) -> list[Access]:
        """The same without TMA's, which are no requests of warps."""
        return [a for a in self.of(space) if a.op not in BULK]

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
            (a.line, self.region(self.file.line_of(a)), a.op, a.space, a.target, a.width, a.requests, a.cost, a.ideal)
            + (a.cost - a.ideal, UNIT[a.space], a.cost / a.requests, a.worst, _ways(a), a.bytes, a.kernel)
            + (self.code_of(a).strip(),)
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
            name: (read, written, size, read / size if size else 0.0, 0 if name in self.workspace else size)
            for name, (read, written, size) in self.trace.tensors.items()
        }
        names = ["bytes_read", "bytes_written", "size_bytes", "reads_per_byte", "minimum_bytes"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("tensor")

    @property
    def workspace(self) -> set[str]:
        """Names of the tensors that the kernel needs besides its inputs and outputs."""
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
        require("space", space, SPACES)
        require("op", op, OPS)
        require("region", region, self.file.regions)
        wanted = {"space": space, "op": op, "target": target, "kernel": kernel}
        number = None if line is None else self.file.number(line)
        found = [
            a
            for a in self.trace.accesses
            if all(value is None or getattr(a, name) == value for name, value in wanted.items())
            and number in (None, self.file.line_of(a))
            and (region is None or self.file.within(self.file.line_of(a), region))
        ]
        return Total(*(sum(getattr(a, f) for a in found) for f in ("requests", "cost", "ideal", "bytes")))

    def line(self, which: int | str) -> Line:
        """What one line does, in words: `which` is its number, or a piece of its text that no other line has."""
        number = self.file.number(which)
        found = tuple(a for a in self.accesses if self.file.line_of(a) == number)
        return Line(self.rung.path.name, number, self.code(number), found)

    def diff(self, other: Counts) -> pd.DataFrame:
        """What became of each target's cost from this X-ray to `other`: a row per region, target, operation and space.

        Columns: `cost_before`, `cost_after`, `excess_before`, `excess_after`, the largest change of excess first. Lines are
        put together by the region they stand in, as their numbers change with every edit. ValueError for anything but an X-ray
        of the same workload.
        """
        import pandas as pd

        from ..figures.tables import Table

        if not isinstance(other, Counts):
            raise ValueError(f"diff takes another Xray; this is a {type(other).__name__}")
        if other.workload != self.workload:
            raise ValueError(f"one X-ray is of {self.workload}, the other of {other.workload}: take the same inputs")
        sums: dict[tuple, list[int]] = {}
        for at, ray in enumerate((self, other)):
            for a in ray.trace.accesses:
                row = sums.setdefault((ray.region(ray.file.line_of(a)), a.target, a.op, a.space), [0] * 4)
                row[at] += a.cost
                row[2 + at] += a.cost - a.ideal
        order = sorted(sums, key=lambda k: (-abs(sums[k][3] - sums[k][2]), -abs(sums[k][1] - sums[k][0]), k))
        index = pd.MultiIndex.from_tuples(order, names=["region", "target", "op", "space"]) if order else None
        columns = ["cost_before", "cost_after", "excess_before", "excess_after"]
        return Table([sums[k] for k in order], index=index, columns=columns)

    def worst(
        self, space: str, line: int | str | None = None, op: str | None = None, target: str | None = None
    ) -> Access:
        """The access whose worst request costs most beyond its ideal; of a line, an operation or a target, if named. TMA's
        have none.

        Raises ValueError that names the lines there are, if none fits.
        """
        require("op", op, OPS)
        number = None if line is None else self.file.number(line)
        here = [a for a in self.of(space) if op in (None, a.op) and target in (None, a.target)]
        found = [a for a in here if number in (None, self.file.line_of(a))]
        fits = [a for a in found if a.op not in BULK]
        if not fits:
            what = f"{op or 'request'} of {target or f'{space} memory'}" + (f" on line {number}" if number else "")
            others = sorted({self.file.line_of(a) for a in here if a.op not in BULK} - {0})
            by_tma = " by a warp, only by TMA" if found else ""
            raise ValueError(f"there is no {what}{by_tma}; lines with one: {', '.join(map(str, others)) or 'none'}")
        if number is None:
            return fits[0]  # the most excess in all
        return max(fits, key=lambda a: (a.worst_request.cost - a.worst_request.ideal, a.worst))


def _ways(a: Access) -> float:
    return a.worst_request.cost / a.worst_request.ideal if a.worst_request.ideal else float(a.worst_request.cost)


def require(what: str, value: str | None, allowed: Iterable[str]) -> None:
    """ValueError that names what is allowed, where a value is given that isn't."""
    if value is not None and value not in allowed:
        raise ValueError(f"{what} {value!r}: there are {', '.join(allowed) or 'none'}")
