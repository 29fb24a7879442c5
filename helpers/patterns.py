"""One warp, one access, any pattern of addresses: what the X-ray's counts are held against, pattern by pattern.

A pattern is data: the kernel below reads each lane's address from Q, so hundreds of patterns are one compilation.
`python -m helpers.counters --singles patterns` records what a GPU counts for each; agreement.py puts the X-ray's counts beside it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .ladder import Rung, parse

if TYPE_CHECKING:
    from torch import Tensor

ROOM = 16384  # bytes of shared memory, of the source in K and of the target in O that a pattern may touch
PATH = Path(__file__).with_name("patterns.cu")
# Operation -> bytes per lane; the order is that of the launcher's cases.
WIDTHS = {
    **{f"load{n}": n for n in (4, 8, 16)},
    **{f"store{n}": n for n in (4, 8, 16)},
    **{f"copy{n}": n for n in (4, 8, 16)},  # cp.async.ca
    "copy16g": 16,  # cp.async.cg
    **{f"ldmatrix{n}": 16 for n in (1, 2, 4)},
    "ldmatrix4t": 16,
    "atomic4": 4,
    **{f"global_load{n}": n for n in (4, 8, 16)},
    **{f"global_store{n}": n for n in (4, 8, 16)},
}
Lanes = tuple[int | None, ...]


@dataclass(frozen=True)
class Pattern:
    """`to`: each of 32 lanes' byte offset in shared memory (K or O for a global operation), None where it takes no part.
    `read` and `source`: of a cp.async, how many bytes it reads (the rest is filled with zeros) and where from in K."""

    name: str
    op: str
    to: Lanes
    read: tuple[int, ...] | None = None
    source: Lanes | None = None

    @property
    def width(self) -> int:
        """Bytes per lane."""
        return WIDTHS[self.op]

    @property
    def kernel(self) -> str:
        """The `__global__` function that runs it, without template arguments."""
        return re.sub(r"\d+[gt]?$", "", self.op).replace("ldmatrix", "matrix")


def kernel() -> Rung:
    """The kernel that runs every pattern."""
    return parse(PATH.read_text(), PATH)


def call(pattern: Pattern) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """The inputs q, k, v that make the kernel run this pattern, and its `scale`, which says what operation it is."""
    import torch

    q = torch.zeros(1, 1, ROOM // 16, 4)
    for lane in range(32):
        q[0, 0, lane, 0] = -1 if pattern.to[lane] is None else pattern.to[lane]
        q[0, 0, lane, 1] = pattern.width if pattern.read is None else pattern.read[lane]
        q[0, 0, lane, 2] = lane * pattern.width if pattern.source is None else pattern.source[lane] or 0
    k = torch.ones(1, 1, ROOM // 16, 4)
    return (q, k, k), float(list(WIDTHS).index(pattern.op))


def _lanes(place: Callable[[int], int | None]) -> Lanes:
    return tuple(place(lane) for lane in range(32))


def _shuffled(lanes: Lanes, seed: int) -> Lanes:
    return tuple(random.Random(seed).sample(lanes, 32))


def _random(width: int, seed: int, room: int, share: float) -> Lanes:
    """Anywhere in the first `room` bytes, the given share of the lanes."""
    chance = random.Random(100 * width + seed)
    return _lanes(lambda l: chance.randrange(room // width) * width if chance.random() < share else None)


@cache
def _places(width: int) -> dict[str, Lanes]:
    """Patterns of one address per lane, each a multiple of `width` below ROOM."""
    row = _lanes(lambda l: l * width)
    found = {"contiguous": row, "reversed": row[::-1], "rotated": row[5:] + row[:5]}
    found |= {f"stride {s}": _lanes(lambda l, s=s: l * s) for s in (8, 16, 32, 64, 128, 256, 512) if s > width}
    found |= {f"stride {s}": _lanes(lambda l, s=s: l * s) for s in (3 * width, 128 + width, 256 + width, 128 + 16)}
    found |= {f"permuted {n}": _shuffled(row, n) for n in range(2)}
    found |= {
        "broadcast": _lanes(lambda l: 64),
        "pairs": _lanes(lambda l: l // 2 * width),
        "pairs, stride 128": _lanes(lambda l: l // 2 * 128),
        "l and l ^ 2": _lanes(lambda l: (l & ~2) * width),
        "quads": _lanes(lambda l: l // 4 * width),
        "halves alike": _lanes(lambda l: l % 16 * width),
        "quarters alike": _lanes(lambda l: l % 8 * width),
        "two rows": _lanes(lambda l: l % 16 * width + l // 16 * 4096),
        "alternate rows": _lanes(lambda l: l // 2 * width + l % 2 * 4096),
        "alternate rows, shifted": _lanes(lambda l: l // 2 * width + l % 2 * (4096 + 64)),
        "column of 128-byte rows": _lanes(lambda l: l % 8 * 128 + l // 8 * 16),
        "column, swizzled": _lanes(lambda l: l % 8 * 128 + (l // 8 ^ l % 8) * 16),
        "tile, row-major": _lanes(lambda l: l // 8 * 128 + l % 8 * 16),
        "tile, swizzled": _lanes(lambda l: l // 8 * 128 + (l % 8 ^ l // 8) * 16),
        "tile of 64-byte rows, swizzled": _lanes(lambda l: l // 4 * 64 + (l % 4 ^ l // 8 % 4) * 16),
    }
    partial = {
        "one lane": lambda l: l == 7,
        "half a warp": lambda l: l < 16,
        "odd lanes": lambda l: l % 2 == 1,
        "a quarter and one": lambda l: l < 9,
        "one lane of each quarter": lambda l: l % 8 == 3,
    }
    for name, takes_part in partial.items():
        found[name] = _lanes(lambda l, t=takes_part: row[l] if t(l) else None)
        found[f"{name}, stride 128"] = _lanes(lambda l, t=takes_part: l * 128 if t(l) else None)
    for seed in range(6):
        found[f"random {seed}"] = _random(width, seed, 512 * (1 + seed), 1.0 if seed < 3 else 0.6)
    return found


def _matrix_places(matrices: int) -> dict[str, Lanes]:
    """Row addresses for ldmatrix, of every lane (those beyond 8 per matrix are ignored)."""
    found = {
        name: lanes for name, lanes in _places(16).items() if None not in lanes and not name.startswith("permuted 1")
    }
    found["rows of 144 bytes"] = _lanes(lambda l: l % 16 * 144 + l // 16 * 16)
    found["rows of 128 bytes, swizzled"] = _lanes(lambda l: l % 16 * 128 + (l // 16 ^ l % 8) * 16)
    found["rows of 64 bytes"] = _lanes(lambda l: l % 16 * 64 + l // 16 * 16)
    found["rows of 256 bytes"] = _lanes(lambda l: l % 16 * 256 + l // 16 * 16)
    keep = list(found) if matrices == 4 else ["contiguous", "stride 128", "rows of 144 bytes", "broadcast", "random 1"]
    return {name: found[name] for name in keep}


def patterns() -> list[Pattern]:
    """All of them, in the order in which they are run and recorded."""
    return list(_all())


# Of the places, those for operations whose cost has a simple rule, or the rule of another.
FEW = (
    "contiguous",
    "reversed",
    "stride 32",
    "stride 64",
    "stride 128",
    "stride 144",
    "permuted 0",
    "broadcast",
    "pairs",
)
FEW += ("halves alike", "two rows", "odd lanes", "half a warp, stride 128", "random 1", "random 4")
SHORT = ("copy4", "copy16", "atomic4", "ldmatrix4t", "global_load8", "global_store8")


def _all() -> Iterator[Pattern]:
    for op, width in WIDTHS.items():
        places = _matrix_places(int(op[8])) if op.startswith("ldmatrix") else _places(width)
        for name, to in places.items():
            if op not in SHORT or name in FEW:
                yield Pattern(f"{op}: {name}", op, to)
    yield from _copies()


def _copies() -> Iterator[Pattern]:
    """cp.async with sources that aren't contiguous, and with zeros filled in."""
    for op in ("copy4", "copy8", "copy16g"):
        width = WIDTHS[op]
        row, column = _lanes(lambda l, w=width: l * w), _lanes(lambda l: l * 128)
        sources = {
            "the same place": _lanes(lambda l: 0),
            "stride 128": column,
            "reversed": row[::-1],
            "permuted": _shuffled(row, 7),
            "8 rows of 256 bytes": _lanes(lambda l, w=width: l // 4 * 256 + l % 4 * w),
        }
        for name, source in sources.items():
            yield Pattern(f"{op}: contiguous from {name}", op, row, source=source)
            if name in ("stride 128", "permuted"):
                yield Pattern(f"{op}: stride 128 from {name}", op, column, source=source)
        nothing, some = (0,) * 32, tuple(width if lane < 20 else 0 for lane in range(32))
        yield Pattern(f"{op}: all zeros", op, row, read=nothing)
        yield Pattern(f"{op}: all zeros, stride 128", op, column, read=nothing)
        yield Pattern(f"{op}: 12 lanes of zeros", op, row, read=some)
        yield Pattern(f"{op}: 12 lanes of zeros, stride 128", op, column, read=some)
        alternate = tuple(width if lane % 2 else 0 for lane in range(32))
        yield Pattern(f"{op}: alternate lanes of zeros", op, row, read=alternate)
        yield Pattern(f"{op}: half of the bytes", op, row, read=(width // 2,) * 32)
