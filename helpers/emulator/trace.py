"""What one traced run of a kernel did to memory, as data. Counts are exact and the same on every machine.

Importable without torch and without a compiler: pictures and tests build these by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One warp request, the worst of its kind: what pictures are drawn from.

    ``addresses``: of the 32 lanes, byte offsets from the start of the tensor ("shared": from the start of shared memory);
    None where a lane takes no part.
    """

    kernel: str
    block: int
    warp: int
    addresses: tuple[int | None, ...]
    width: int
    cost: int
    ideal: int


@dataclass(frozen=True)
class Access:
    """One source line × operation × space × width × target, over all warps of a run."""

    kernel: str
    file: str
    line: int
    op: str  # "load" "store" "ldmatrix" "stmatrix" "cp.async" "atomic"; of TMA "cp.async.bulk.tensor", "cp.reduce.async.bulk" …
    space: str  # "shared" "global"
    target: str  # tensor ("K") or shared array ("K_smem")
    width: int  # bytes per lane; of TMA bytes of an element
    requests: int  # warp requests
    bytes: int  # bytes asked by all lanes
    cost: int  # shared: wavefronts, of TMA 0: in what portions it goes there is not known; global: 32-byte sectors
    ideal: int  # the same for a conflict-free or fully coalesced request of as many bytes
    worst: int  # most wavefronts or sectors of one request
    worst_request: Request


@dataclass(frozen=True)
class Finding:
    """Something wrong: a race, an uninitialised read, an access out of bounds. ``error``: it stopped the kernel."""

    kind: str
    text: str
    file: str
    line: int
    hint: str
    count: int
    other_line: int | None
    error: bool

    def __str__(self) -> str:
        place = f" at {self.file}:{self.line}" if self.line else ""
        return f"{self.kind}{place}: {self.text}" + (f"\n  hint: {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Trace:
    """A whole run: what ``Launcher.trace`` gives back."""

    accesses: tuple[Access, ...]
    findings: tuple[Finding, ...]
    tensors: dict[str, tuple[int, int, int]]  # name -> bytes read, written, size
    instructions: dict[str, int]  # warp instructions by name: ldmatrix, mma.sync, cp.async, bar.sync …
    seconds: float
