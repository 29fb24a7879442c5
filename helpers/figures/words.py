"""An access, a line of code and a number in words, the same in text, HTML and figures. Needs neither matplotlib nor pandas."""

from __future__ import annotations

from collections.abc import Sequence

from ..emulator import banks
from ..emulator.launcher import BULK
from ..emulator.trace import Access

SPACES = ("shared", "global")
SOURCES = "lanes take turns whose sources lie in the same banks"  # of a cp.async
UNIT = {"shared": "wavefronts", "global": "sectors"}
BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

# Numbers


def size(n: float, units: Sequence[tuple[float, str]] = BINARY, digits: str = ".3g", gap: str = " ") -> str:
    """Bytes in the largest of `units` that is not above them: 1.5 MiB, 64 KiB, 17 B. `digits` formats the number."""
    for unit, name in units:
        if n >= unit:
            return f"{_plain(n / unit, digits)}{gap}{name}"
    return f"{n:.0f}{gap}B"


def count(n: int) -> str:
    """1024, 65.5k, 1.2M: a number that fits beside a line."""
    for unit, suffix in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if n >= unit:
            return f"{_plain(n / (1000 if suffix == 'k' else unit), '.3g')}{suffix}"
    return str(n)


def _plain(x: float, digits: str) -> str:
    """Without an exponent: 1000, not 1e+03."""
    text = f"{x:{digits}}"
    return f"{x:.0f}" if "e" in text else text


def share(x: float) -> str:
    """A fraction as a percentage without decimals: 70%, <1%."""
    return "<1%" if x < 0.005 else f"{x:.0%}"


def many(n: int, what: str) -> str:
    """1 sector, 2,000 sectors."""
    return f"{n:,} {what}{'s' * (n != 1)}"


# Code


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters, the last of them … where some are left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def statement(code: str) -> str:
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


# Accesses


def place(access: Access, at: str = "") -> str:
    """Where an access is and what it does, for the head of a figure. at: what to call its line, if not by the number."""
    return f"line {at or access.line}: {access.op} of {access.width} bytes per lane, {access.target}"


def words(access: Access) -> str:
    """One access in a sentence: how many requests, what they cost against the ideal, and what the worst of them does."""
    a, worst, cost = access, access.worst_request, many(access.cost, UNIT[access.space].removesuffix("s"))
    few = ", as few as can be" if a.cost == a.ideal else f" where {a.ideal:,} would do"
    if a.op in BULK:
        text = f"{a.op}, {a.target}: {many(a.requests, 'request')} of TMA, {many(a.bytes, 'byte')}"
        return text + (f", {cost}{few}" if a.space == "global" else "")
    copied = "to" if a.space == "shared" else "from"
    to = {"store": "to", "stmatrix": "to", "cp.async": copied, "atomic": "on"}.get(a.op, "from")
    text = f"{a.op} of {a.width} bytes per lane {to} {a.target}: {many(a.requests, 'request')}, {cost}{few}"
    if a.cost == a.ideal:
        return text
    text += f"; the worst takes {worst.cost} instead of {worst.ideal}: "
    if a.space == "global":
        lines = len({s // 4 for s in banks.sectors(worst.addresses, worst.width)})
        lanes = sum(x is not None for x in worst.addresses)
        asks = f"{many(lanes, 'lane')} ask{'s' * (lanes == 1)} for {many(lanes * worst.width, 'byte')}"
        return text + f"{asks} in {many(lines, 'line')} of 128"
    rows = len(banks.wavefronts(worst.addresses, worst.width, a.op))
    why = [crowd(worst.addresses, worst.width, a.op)] if rows > worst.ideal or rows == worst.cost else []
    return text + "; ".join(why + [SOURCES] * (worst.cost > rows))


def crowd(addresses: Sequence[int | None], width: int, op: str) -> str:
    """The fullest bank of a request in words: which lanes want different words of it, or, of an atomic, take turns at it."""
    turns, bank, first = 0, 0, [0]
    for part in banks.served(addresses, width, op):
        for here in sorted({b for wavefront in part for b in wavefront}):
            waiting = [wavefront[here][0] for wavefront in part if here in wavefront]
            if len(waiting) > turns:
                turns, bank, first = len(waiting), here, waiting
    bank -= bank % max(1, width // banks.WORD)
    where = f"bank {bank}" if width <= banks.WORD else f"banks {bank}–{bank + width // banks.WORD - 1}"
    return f"lanes {banks.runs(first)} {'take turns at' if op == 'atomic' else 'want different words of'} {where}"
