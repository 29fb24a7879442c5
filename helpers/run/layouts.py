"""Which rows of a sequence each rank has, and which part of a pair of ranks a causal mask leaves.

Rank r's queries meet the keys of rank s, block by block. Under a causal mask, `block` says which of its rows and which of the keys
take part and whether the part is itself causal, so that every part is one that a kernel of the series can do: all of it, or
causal with as many queries as keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAYOUTS = ("contiguous", "zigzag", "striped")
IN_L2 = 32 << 20  # bytes of a head's K and V up to which a GPU reads them from its L2, and from HBM but once


@dataclass(frozen=True)
class Block:
    """Rows `rows` of a rank's queries against keys `keys` of another's; causal: query i of them sees keys up to i."""

    rows: slice
    keys: slice
    causal: bool

    @property
    def scores(self) -> float:
        """How many scores are not masked, a diagonal counted as half."""
        pairs = (self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start)
        return pairs / 2 if self.causal else float(pairs)


def split(N: int, ranks: int, layout: str = "contiguous") -> list[list[int]]:
    """The global positions of each rank's rows, in order. N: rows in all; contiguous: ranks in turn get a run, the first N % ranks
    one more; zigzag: of 2 * ranks equal pieces, rank r gets piece r and, from the end, piece r; striped: every ranks-th row.

    ValueError for another layout, fewer rows than ranks, or a zigzag of a number that 2 * ranks doesn't divide.
    """
    _known(layout)
    if ranks < 1 or N < ranks:
        raise ValueError(f"{N} rows for {ranks} ranks: each needs at least one")
    if layout == "zigzag" and N % (2 * ranks):
        raise ValueError(f"zigzag cuts {N} rows into {2 * ranks} equal pieces, and {N} is no multiple of {2 * ranks}")
    lengths = [N // ranks + (r < N % ranks) for r in range(ranks)]
    return [[i for run in runs for i in run] for runs in pieces(lengths, layout)]


def pieces(lengths: Sequence[int], layout: str = "contiguous") -> list[list[range]]:
    """As `split`, of ranks that have so many rows: each rank's places in the sequence as a few ranges."""
    _known(layout)
    N, ranks = sum(lengths), len(lengths)
    if layout == "striped":
        return [[range(r, N, ranks)] for r in range(ranks)]
    if layout == "zigzag":
        n = N // (2 * ranks)
        return [[range(i * n, (i + 1) * n) for i in (r, 2 * ranks - 1 - r)] for r in range(ranks)]
    ends = [sum(lengths[: r + 1]) for r in range(ranks)]
    return [[range(end - n, end)] for n, end in zip(lengths, ends)]


def block(r: int, s: int, lengths: Sequence[int], layout: str = "contiguous", causal: bool = False) -> Block | None:
    """What rank r's queries see of rank s's keys; None where nothing. lengths: rows of each rank, as `require` allows them."""
    _known(layout)
    mine, other = lengths[r], lengths[s]
    whole = Block(slice(0, mine), slice(0, other), False)
    if not causal:
        return whole
    if r == s:  # a rank's own rows stand in the order of the sequence, in every layout
        return Block(slice(0, mine), slice(0, other), True)
    if layout == "contiguous":
        return whole if s < r else None
    if layout == "zigzag" and s < r:  # all rows see an earlier rank's first piece
        return Block(slice(0, mine), slice(0, other // 2), False)
    if layout == "zigzag":  # the last piece sees all of a later rank
        return Block(slice(mine // 2, mine), slice(0, other), False)
    if s < r:  # striped: query i sees keys 0 .. i of an earlier rank, and of a later one 0 .. i - 1
        return Block(slice(0, mine), slice(0, mine), True)
    return Block(slice(1, mine), slice(0, mine - 1), True) if mine > 1 else None


def cut(seen: Block, keys: int, rows: int | None = None) -> list[Block]:
    """The same block in parts of at most so many keys, and rows if they are told. Along the diagonal of a causal block lie causal
    squares, and below each of them whole rectangles; so rows has to be at least keys there."""
    found = []
    for first, last in _runs(seen.keys, keys):
        top, end = seen.rows.start, seen.rows.stop
        if seen.causal:
            begin, top = top + first - seen.keys.start, top + last - seen.keys.start
            found.append(Block(slice(begin, top), slice(first, last), True))
        for begin, stop in _runs(slice(top, end), rows or max(1, end - top)):
            found.append(Block(slice(begin, stop), slice(first, last), False))
    return found


def _runs(of: slice, most: int) -> list[tuple[int, int]]:
    """As few runs of at most `most` as there can be, all about as long, with ends at multiples of 128 where that goes."""
    length = of.stop - of.start
    if length <= 0:
        return []
    size = -(-length // -(-length // most))
    size = -(-size // 128) * 128 if most % 128 == 0 else size
    return [(begin, min(begin + size, of.stop)) for begin in range(of.start, of.stop, size)]


def require(lengths: Sequence[int], layout: str, causal: bool) -> None:
    """ValueError, in a sentence, where ranks of so many rows can't be in this layout. Without a mask any lengths go, and so they do
    for contiguous; a causal zigzag needs one even number of all; striped, lengths that fall by one at most, once."""
    _known(layout)
    told = ", ".join(map(str, lengths))
    if min(lengths) < 1:
        raise ValueError(f"the ranks have {told} rows; each needs at least one")
    if not causal or layout == "contiguous":
        return
    if layout == "zigzag" and (len({*lengths}) > 1 or lengths[0] % 2):
        raise ValueError(f"the ranks have {told} rows; zigzag needs the same even number of each")
    if layout == "striped" and (lengths[0] - lengths[-1] > 1 or any(a < b for a, b in zip(lengths, lengths[1:]))):
        raise ValueError(
            f"the ranks have {told} rows; striped deals them out in turn, so that the first ranks may have one more"
        )


def _known(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}; there are {', '.join(LAYOUTS)}")
