"""Clocks that a kernel reads itself: what roles and timeline share.

Both put notes into a rung's text: a thread writes the SM's clock and what begins into a workspace tensor of its own. On a GPU
these are SM clocks. The emulator has no such clock; there only the order of the notes means something.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")  # a torch.Tensor or a pandas.Series of integers
KEY = "// workspace:"


def workspace_index(source: str) -> int:
    """The index in fa_args::workspace of a tensor declared after those that the header block names."""
    line = next((line for line in source.splitlines() if line.startswith(KEY)), "")
    return sum(1 for part in line.removeprefix(KEY).split(";") if part.strip())


def declare(lines: list[str], tensor: str) -> None:
    """Adds a workspace tensor, like "notes (4,2048) fp32", to the header block of a text, in place."""
    at = next((i for i, line in enumerate(lines) if line.startswith(KEY)), None)
    if at is None:
        lines[0] += f"\n{KEY} {tensor}"
    else:
        lines[at] += f"; {tensor}"


def since_first(clocks: T, first: int) -> T:
    """32-bit clocks counted from the earliest, which is less than 2^31 clocks before `first`: the counter may have wrapped around."""
    clocks = (clocks - first + 2**31) % 2**32
    return clocks - clocks.min()
