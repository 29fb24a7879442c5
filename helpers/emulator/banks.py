"""How shared memory serves a warp: 32 banks of 4 bytes, and what one wavefront can hand out.

A wavefront gives each bank's word once, to every lane that wants it. Lanes that want different words of one bank take
turns: a bank conflict. Requests of 8 bytes per lane go by half warps, those of 16 (and ldmatrix) by quarters; loads whose
neighbours ask for the same address go two parts at a time; atomics take turns even at one word. Pure Python, of one
request; the emulator counts by the same rule, and for cp.async by the banks of its sources besides.
"""

from __future__ import annotations

from collections.abc import Sequence

BANKS, WORD = 32, 4
LINE, SECTOR = 128, 32  # bytes of global memory that are looked up, and moved, together

Wavefront = dict[int, list[int]]  # bank -> lanes that it serves


def parts(addresses: Sequence[int | None], width: int, op: str = "load") -> list[range]:
    """The lanes that are served together: all 32, or halves (8 bytes per lane) or quarters (16) of the warp. Of loads, two
    halves, or the two quarters of a half, go together when their lanes share addresses two by two."""
    if width <= WORD or op == "atomic":
        return [range(32)]
    size = LINE // width
    found = []
    for first in range(0, 32, 2 * size):
        both, low, high = (range(first + a * size, first + b * size) for a, b in ((0, 2), (0, 1), (1, 2)))
        takes_part = all(any(addresses[lane] is not None for lane in lanes) for lanes in (low, high))
        found += [both] if op == "load" and takes_part and _in_pairs(addresses, both) else [low, high]
    return found


def _in_pairs(addresses: Sequence[int | None], lanes: range) -> bool:
    """Whether every lane has its neighbour's address, by the one pairing (lane ^ 1) or by the other (lane ^ 2)."""
    return any(
        all(addresses[i] == addresses[i ^ bit] for i in lanes if None not in (addresses[i], addresses[i ^ bit]))
        for bit in (1, 2)
    )


def served(addresses: Sequence[int | None], width: int, op: str = "load") -> list[list[Wavefront]]:
    """The wavefronts of one request, part by part of the warp, each with the lanes that every bank serves.

    addresses: of 32 lanes, bytes from the start of shared memory, None where a lane takes no part. width: bytes per lane.
    Parts in which no lane takes part are left out.
    """
    span = max(width, WORD) // WORD  # words, and so banks, per lane
    found = []
    for lanes in parts(addresses, width, op):
        queues: dict[int, list[int]] = {}  # first bank -> the different words that are wanted of it, in order
        part: list[Wavefront] = []
        for lane in lanes:
            address = addresses[lane]
            if address is None:
                continue
            word = address // WORD // span * span
            queue = queues.setdefault(word % BANKS, [])
            if word not in queue or op == "atomic":  # changing a word is not shared
                queue.append(word)
            turn = len(queue) - 1 if op == "atomic" else queue.index(word)
            if turn == len(part):
                part.append({})
            for bank in range(word % BANKS, word % BANKS + span):
                part[turn].setdefault(bank, []).append(lane)
        if part:
            found.append(part)
    return found


def wavefronts(addresses: Sequence[int | None], width: int, op: str = "load") -> list[Wavefront]:
    """The wavefronts of one request, in order (`served`, all parts of the warp together)."""
    return [wavefront for part in served(addresses, width, op) for wavefront in part]


def sectors(addresses: Sequence[int | None], width: int) -> list[int]:
    """The 32-byte sectors of global memory that one request touches, by number, ascending."""
    touched = set()
    for address in addresses:
        if address is not None:
            touched |= set(range(address // SECTOR, (address + width - 1) // SECTOR + 1))
    return sorted(touched)


def runs(lanes: Sequence[int]) -> str:
    """'0–7', '0, 8, 16, 24', '0–3, 8–11': lanes in words."""
    lanes, words = sorted(set(lanes)), []
    start = previous = lanes[0]
    for lane in [*lanes[1:], None]:
        if lane is not None and lane == previous + 1:
            previous = lane
            continue
        words.append(
            f"{start}"
            if start == previous
            else f"{start}–{previous}"
            if previous - start > 1
            else f"{start}, {previous}"
        )
        start = previous = lane
    return ", ".join(words)
