"""One warp, one access, any pattern of addresses: what the X-ray's counts are held against, pattern by pattern.

A pattern is data: the kernel below reads each lane's address from Q, so hundreds of patterns are one compilation.
`python -m helpers record counters --singles patterns` records what a GPU counts for each; agreement.py puts the X-ray's counts beside it.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..emulator.banks import LINE
from ..ladder.rung import Rung, parse

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
    **{f"stmatrix{n}": 16 for n in (1, 2, 4)},  # Hopper (sm_90) has it
    "stmatrix4t": 16,
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
    """Row addresses for ldmatrix and stmatrix, of every lane (those beyond 8 per matrix are ignored)."""
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
SHORT = ("copy4", "copy16", "atomic4", "ldmatrix4t", "stmatrix4t", "global_load8", "global_store8")


def _all() -> Iterator[Pattern]:
    for op, width in WIDTHS.items():
        places = _matrix_places(int(op[8])) if "matrix" in op else _places(width)
        for name, to in places.items():
            if op not in SHORT or name in FEW:
                yield Pattern(f"{op}: {name}", op, to)
    yield from _copies()
    yield from _past_L1()


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
            "a diagonal": _lanes(lambda l, w=width: l * LINE + l * w % LINE),
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
    # Banks that are wanted more than once at both ends, the sources in one to three lines, some lanes with zeros or none.
    for op, seed in itertools.product(("copy4", "copy8", "copy16"), range(16)):
        width, chance = WIDTHS[op], random.Random(f"{op} {seed}")
        columns = min(3 + seed, LINE // width)
        to, source = ([chance.randrange(columns) * width for _ in range(32)] for _ in range(2))
        lines = [LINE * chance.randrange(1 + seed % 3) for _ in range(32)]
        read = tuple(0 if seed % 4 == 3 and chance.random() < 0.3 else width for _ in range(32))
        taking_part = [seed % 2 == 0 or chance.random() < 0.7 for _ in range(32)]
        yield Pattern(
            f"{op}: both ends {seed}",
            op,
            _lanes(lambda l, to=to, part=taking_part: LINE * l + to[l] if part[l] else None),
            read,
            _lanes(lambda l, source=source, lines=lines: lines[l] + source[l]),
        )


def _past_L1() -> Iterator[Pattern]:
    """cp.async.cg alone: in how many wavefronts is what comes from the L2 written, when do lanes share one?

    Named by what differs from a copy of 512 bytes as they lie, in each quarter of the warp alike. "columns" and "rows": to
    which 16 bytes of a row of 128, and to which of several rows, each of its eight lanes goes; "from": likewise where from.
    """
    row = _lanes(lambda l: 16 * l)

    def pattern(name: str, to: Lanes, source: Lanes | None = None, read: tuple[int, ...] | None = None) -> Pattern:
        return Pattern(f"copy16g: {name}", "copy16g", to, read, source)

    def quarters(columns: str = "01234567", rows: str = "00000000") -> Lanes:
        """`columns`: - for a lane that takes no part. Rows 1 and 2 of a quarter are 32 and 64 rows further down."""
        chosen = [None if c == "-" else 16 * int(c) + 4096 * int(r) for c, r in zip(columns, rows, strict=True)]
        return _lanes(lambda l: None if chosen[l % 8] is None else l // 8 * 128 + chosen[l % 8])

    # Neighbours with something else between them: another row, another line, nothing, zeros.
    for rows in ("01010101", "00110011", "00001111", "01100110", "00010000", "00100100", "01210121"):
        yield pattern(f"rows {rows}", quarters(rows=rows))
        if rows in ("01010101", "00110011", "00010000"):
            yield pattern(f"from rows {rows}", row, quarters(rows=rows))
    for columns in ("012-4567", "-123456-", "01--4567", "0-2-4-6-", "0--34--7"):
        yield pattern(f"columns {columns}", quarters(columns))
    yield pattern("columns 012-4567, rows 00000111", quarters("012-4567", "00000111"))
    third, even = (tuple(0 if l % n == k else 16 for l in range(32)) for n, k in ((8, 3), (2, 0)))
    yield pattern("lane 3 zeros", row, read=third)
    yield pattern("lane 3 zeros, from rows 00010000", row, quarters(rows="00010000"), third)
    yield pattern("lane 3 zeros, rows 00010000", quarters(rows="00010000"), read=third)
    yield pattern("even lanes zeros, from rows 10101010", row, quarters(rows="10101010"), even)
    yield pattern("all zeros from stride 128", row, _lanes(lambda l: 128 * l), (0,) * 32)

    # Sectors that move whole, with their halves swapped, or each half elsewhere.
    whole = ("23456701", "01452367", "23014567", "45016723", "67230145")
    swapped = ("32761054", "01324567", "10235467")
    apart = ("03254761", "07254361", "05274163", "41630527", "23674501", "05432761", "47032165")
    for columns in (*whole, *swapped, *apart):
        yield pattern(f"columns {columns}", quarters(columns))
    for columns in ("01010101", "01014545", "03254761", "02134657", "00224466"):
        yield pattern(f"from columns {columns}", row, quarters(columns))
    yield pattern("columns 0123----, from 0347----", quarters("0123----"), quarters("0347----"))
    yield pattern("columns 0347----, from 0123----", quarters("0347----"), quarters("0123----"))

    # Lines and rows that don't end where a quarter of the warp does.
    for to, source in ((64, 64), (16, 16), (64, 0), (0, 64), (32, 0), (0, 32), (16, 0), (0, 16), (48, 16)):
        name = f"shifted by {to} bytes, from {source}"
        yield pattern(name, _lanes(lambda l, s=to: s + 16 * l), _lanes(lambda l, s=source: s + 16 * l))
    yield pattern("lanes 4 to 11", _lanes(lambda l: 16 * l if 4 <= l < 12 else None))
    yield pattern(
        "lanes 4 to 11, shifted by 64 bytes", _lanes(lambda l: 16 * l + 64 if 4 <= l < 12 else None), row[4:] + row[:4]
    )

    # Lanes that others overwrite: of the same quarter, of another.
    for columns in ("01244567", "01254567", "01274567", "44234567"):
        yield pattern(f"columns {columns}", quarters(columns))
    yield pattern("columns 01274567, rows 00010001", quarters("01274567", "00010001"))
    for lane, over in ((3, 11), (3, 19), (11, 3), (3, 12)):
        name = f"lane {lane} where lane {over} goes"
        yield pattern(name, _lanes(lambda l, a=lane, b=over: 16 * (b if l == a else l)))
    again = _places(16)["random 1"]
    for first, last in ((0, 8), (8, 16), (16, 24), (24, 32), (16, 32)):
        name = f"random 1, lanes {first} to {last - 1}"
        yield pattern(name, _lanes(lambda l, a=first, b=last: again[l] if a <= l < b else None))
    yield pattern(
        "random 1, overwritten lanes left out", _lanes(lambda l: None if again[l] in again[l + 1 :] else again[l])
    )

    # Columns that are wanted more than once at both ends: from as many lines as lanes, or one line for each quarter.
    for seed in range(24):
        chance = random.Random(seed)
        to, source = ([chance.randrange(3 + seed % 6) for _ in range(8)] for _ in range(2))
        columns, lines = ("".join(map(str, of)) for of in (to, source)), 32 if seed % 4 else 4
        yield pattern(
            "columns {} of 32 rows, from {} of {} lines".format(*columns, lines),
            _lanes(lambda l, of=to: 128 * l + 16 * of[l % 8]),
            _lanes(lambda l, of=source, each=32 // lines: 128 * (l // each) + 16 * of[l % 8]),
        )

    # Anything, with and without lanes that overwrite each other, and runs of lanes that stay in one row.
    for seed in range(6, 12):
        yield pattern(f"random {seed}", _random(16, seed, 512 * (seed % 3 + 1), 1.0))
    for seed in range(6):
        yield pattern(f"random runs {seed}", _runs(seed), _shuffled(row, seed) if seed % 3 == 2 else None)


def _runs(seed: int) -> Lanes:
    """No two lanes in one place; seven in ten stay in their neighbour's row, an odd number of 16 bytes further on."""
    chance = random.Random(seed)
    free, found = set(range(128)), [0]  # places of 16 bytes, in 16 rows
    for _ in range(31):
        free.discard(found[-1])
        near = [p for p in sorted(free) if p // 8 == found[-1] // 8 and (p - found[-1]) % 2]
        found.append(chance.choice(near if near and chance.random() < 0.7 else sorted(free)))
    return tuple(16 * p for p in found)
