"""What a kernel does to memory, exactly, without a GPU: which line costs what, and what is wrong.

`xray(kernel, q, k, v)` runs the kernel on the emulator and counts every warp request: wavefronts of shared memory against
those a request without bank conflicts needs, 32-byte sectors of global memory against those of a coalesced one, bytes by
tensor; and it finds races, uninitialised reads and accesses out of bounds. The counts are the same on every machine.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..emulator.trace import Finding, Trace
from ..figures.words import SPACES
from ..ladder.contract import TORCH_NAMES, Call, prepare
from ..ladder.rung import Rung, Which
from ..ladder.rung import rung as find_rung
from . import xray_words
from .counts import Counts, require
from .kernel import Kernel

if TYPE_CHECKING:
    from torch import Tensor

    from ..figures.heat import HeatListing
    from ..figures.style import Picture

SMALL = 1 * 2 * 256 * 256 * 64  # B H Nq Nk D of an X-ray that is there at once
LARGE = 32 * SMALL
FEW = 2  # SMs: with as few, a CTA of a kernel that launches one for each comes to several tiles
SECONDS = 0.3  # that a small one takes on two cores, more or less


def xray(kernel: Which, *inputs: Tensor, **options: Any) -> Xray:
    """Runs a kernel once on the emulator, traced, and shows what it did to memory.

        xray("04", q, k, v)

    kernel: what `load` takes; a Kernel that is loaded for the GPU is compiled for the emulator.
    inputs, options: those of the kernel, their tensors on any device: q, k, v, or s for a softmax. Small ones do: B = 1, H = 2, N = 256. What is
    found is of this call: another head dimension, mask or sign of `scale` may take other lines. Raises ValueError as a call of the kernel does. A kernel that the emulator stops gives an Xray too,
    with the reason as its first finding.
    """
    rung = find_rung(kernel)
    launcher = kernel.launcher if isinstance(kernel, Kernel) else None
    traced = kernel if launcher and kernel.device == "cpu" else Kernel(rung, "cpu")
    copies: dict[int, Tensor] = {}
    inputs = on_the_cpu(inputs, copies)
    call = prepare(rung, "cpu", inputs, **{name: on_the_cpu(value, copies) for name, value in options.items()})
    if (warning := _too_large(rung, call.args)) is not None:
        warnings.warn(warning, stacklevel=2)
    return Xray(rung, _workload(rung, call.args), _traced(traced, call), _spilled(launcher))


def _traced(kernel: Kernel, call: Call) -> Trace:
    """The trace of a call. If nothing is wrong, a kernel that launches a CTA for each SM runs again with a `FEW`, for findings alone."""
    launcher = kernel.launcher
    trace = launcher.trace(call)
    if trace.findings or call.far or not launcher.asks_for_sms:
        return trace
    sms, launcher.sms = launcher.sms, FEW
    try:
        again = launcher.trace(call)
    finally:
        launcher.sms = sms
    found = (replace(f, text=f"{f.text} (on {FEW} SMs, where a CTA takes more tiles)") for f in again.findings)
    return replace(trace, findings=tuple(found), seconds=trace.seconds + again.seconds)


def on_the_cpu(value: Any, copies: dict[int, Tensor]) -> Any:
    """A value with its tensors, alone or in a tuple, on the CPU. copies: by the id of a tensor what stands for it, once for all."""
    if type(value) in (tuple, list):
        return type(value)(on_the_cpu(one, copies) for one in value)
    if not hasattr(value, "detach"):
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().cpu()
    return copies[id(value)]


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
        f"which shows the main loop at work too. It may take on the order of {takes}; Ctrl-C stops it"
    )


def _workload(rung: Rung, args: Any) -> str:
    dtype = list(TORCH_NAMES)[args.dtype]
    if rung.op == "softmax":
        return f"{args.Nq} rows of {args.Nk} {dtype}"
    length = f"N={args.Nq}" if args.Nq == args.Nk else f"Nq={args.Nq} Nk={args.Nk}"
    return f"B={args.B} H={args.H} {length} D={args.D} {dtype}"


class Xray(Counts):
    """What one run did to memory: its counts, and how it shows them.

    Shown by itself it is a summary with the costliest lines; `to_frame()` has all of them, `to_html(path)` writes a page.
    `source()`, `bank_map()`, `address_map()` and `traffic()` draw; `line()`, `total()` and `diff()` answer.
    """

    # Pictures

    def source(self, region: str | None = None) -> HeatListing:
        """The `.cu`, or one region of it, with what each line costs beside it; text in a terminal, HTML in a notebook."""
        from ..figures.heat import heat

        require("region", region, self.file.regions)
        first, last = self.file.span(region)
        title = f"{self.file.name} · {region + ' · ' if region else ''}lines {first}–{last} · {self.workload}"
        lines = [(n, self.code(n)) for n in range(first, last + 1)]
        marked = {n: f.kind for f in self.findings for n in self.file.named(f)}
        return heat(title, lines, [a for a in self.accesses if self.file.line_of(a)], marked)

    def bank_map(self, line: int | str | None = None, op: str | None = None, target: str | None = None) -> Picture:
        """The worst request of a line to shared memory: 32 banks across, a row per wavefront, lanes in the cells.

        line: its number or a piece of its text; by default the one with the most conflicts. `op` and `target` choose among
        the requests of a line that makes several. TMA has no warp requests to draw.
        """
        from ..figures.access_maps import bank_map

        worst = self.worst("shared", line, op, target)
        return bank_map(worst, self.file.place(worst))

    def address_map(self, line: int | str | None = None, op: str | None = None, target: str | None = None) -> Picture:
        """The worst request of a line to global memory, over lines of 128 bytes and sectors of 32.

        line: its number or a piece of its text; by default the one with the most sectors beyond the ideal. `op` and
        `target` choose among the requests of a line that makes several. TMA has no warp requests to draw.
        """
        from ..figures.access_maps import address_map

        worst = self.worst("global", line, op, target)
        return address_map(worst, self.file.place(worst))

    def traffic(self) -> Picture:
        """Bytes by tensor, read and written, beside the theoretical minimum."""
        from ..figures.bars import beside_minimum

        return beside_minimum(self.tensors, f"{self.rung.stem}, bytes requested · {self.workload}")

    # Words

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the counts cannot know, where it bears on these."""
        return xray_words.notes(self)

    def summary(self) -> str:
        """The totals, a line each for shared memory, global memory and bytes by tensor."""
        return xray_words.summary(self)

    def report(self, finding: Finding) -> str:
        """One finding: the sentence, the lines it names, the hint."""
        return xray_words.report(self, finding)

    def __str__(self) -> str:
        return xray_words.whole(self)

    __repr__ = __str__

    # Pages

    def _repr_html_(self) -> str:
        from ..figures.tables import access_html, preformatted

        parts = [preformatted("\n".join(xray_words.head(self)))]
        for space in SPACES:
            if rows := self.of(space):
                parts.append(access_html(rows, space, self.code_of))
        if self.notes:
            parts.append(preformatted("\n".join(f"note: {note}" for note in self.notes)))
        return "".join(parts)

    def to_html(self, path: str | Path) -> Path:
        """Writes the X-ray to a page of its own, and returns its path: summary, findings and tables, the source with its
        costs, the worst requests, and the bytes by tensor.

            xray("04", q, k, v).to_html("04.html")

        The page needs no other file and makes no request; it follows the reader's light or dark theme.
        """
        from ..figures.page import page

        pictures = [self.traffic()] if self.tensors[["bytes_read", "bytes_written"]].any(axis=None) else []
        pictures += [self.bank_map()] if self.of_warps("shared") else []
        pictures += [self.address_map()] if self.of_warps("global") else []
        path = Path(path)
        path.write_text(page(f"X-ray of {self.rung.stem}", [self, self.source(), *pictures]), encoding="utf-8")
        return path
