"""What one block did between two barriers, as data: the rows of Q, K, V and O that it moved. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor's head, first and last, and the bytes that were moved of them (of `resident`: that lie there)."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Step:
    """What a block did between two barriers, by tensor: rows `read` from and `written` to HBM, rows whose copies are `resident` in
    shared memory at its end, and rows of which copies there were `used`. hbm: bytes that the block has moved so far."""

    number: int
    read: dict[str, Rows] = field(default_factory=dict)
    written: dict[str, Rows] = field(default_factory=dict)
    resident: dict[str, Rows] = field(default_factory=dict)
    used: dict[str, Rows] = field(default_factory=dict)
    hbm: int = 0


@dataclass(frozen=True)
class Walk:
    """All steps of one block. Nq, Nk: rows of Q and of K in its head. smem: bytes of shared memory that hold rows, at most.
    launch: bytes that all blocks together moved, by the emulator's counters, (read, written) by tensor."""

    kernel: str
    block: int
    Nq: int
    Nk: int
    D: int
    dtype: str
    steps: tuple[Step, ...]
    launch: dict[str, tuple[int, int]]

    @property
    def smem(self) -> int:
        """The most bytes of inputs' rows that lay in shared memory at the end of a step."""
        return max((sum(r.bytes for r in s.resident.values()) for s in self.steps), default=0)
