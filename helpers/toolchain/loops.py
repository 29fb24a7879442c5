"""Loops of machine code: which one does the products, what lies between its waits, and what runs while a product is under way.

Everything here works on instructions as `sass` lists them, so it needs no compiler.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

Line = tuple[int, str, str]  # address, opcode with modifiers, operands

WAIT = "WARPGROUP.DEPBAR"  # wgmma.wait_group
BETWEEN = ("HGMMA", "MUFU.EX2", "FFMA", "FADD", "FMNMX", "FMUL", "F2FP")  # wgmma, and what a softmax is made of
WORK = {  # what threads do meanwhile: opcodes
    "exponentials": r"MUFU\.EX2",
    "multiply, add": r"FFMA|FMUL|FADD",
    "round to 16 bits": r"F2FP",
    "read shared memory": r"LDS",
    "write shared memory": r"STSM|STS",
    "wait for other threads": r"BAR\.|SYNCS\.PHASECHK",
}


def loops(lines: Sequence[Line]) -> list[list[Line]]:
    """All code between a backward branch and its target, in the order of the branches.

    Code with an EXIT in it is left out: waiting for an mbarrier continues in code behind the kernel's end, which branches
    back to where it came from.
    """
    found = []
    for address, opcode, operands in lines:
        start = target(opcode, operands)
        if start is not None and start < address:
            inside = [line for line in lines if start <= line[0] <= address]
            if not any(code == "EXIT" for _, code, _ in inside):
                found.append(inside)
    return found


def target(opcode: str, operands: str) -> int | None:
    """The address that a branch leads to; None of another instruction."""
    found = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
    return int(found[1], 16) if found else None


def main_loop(lines: Sequence[Line]) -> list[Line]:
    """The instructions of the loop that does the products.

    With HGMMAs, of which a kernel has some before and behind its tile loop too, the shortest loop that adds to two
    accumulators, such as S and O. Otherwise the shortest of those with the most products: HGMMAs, or HMMAs where there are
    none, or FFMAs. ValueError if there is no loop.
    """
    found = loops(lines)
    if not found:
        raise ValueError("the kernel has no loop")

    def count(loop: list[Line], name: str) -> int:
        return sum(opcode.startswith(name) for _, opcode, _ in loop)

    def most(loop: list[Line]) -> tuple[int, int, int, int]:
        hgmma, hmma = count(loop, "HGMMA"), count(loop, "HMMA")
        return hgmma, hmma, 0 if hmma else count(loop, "FFMA"), -len(loop)

    def accumulators(loop: list[Line]) -> int:
        return len({operands.split(",")[0] for _, opcode, operands in loop if opcode.startswith("HGMMA")})

    if both := [loop for loop in found if accumulators(loop) > 1]:
        return min(both, key=len)
    return max(found, key=most)


def waits(lines: Sequence[Line]) -> list[tuple[int, int]]:
    """The waits for products in a loop: the number of the instruction, and how many groups may still be under way after it."""
    return [
        (at, int(operands.rpartition(",")[2], 16))
        for at, (_, opcode, operands) in enumerate(lines)
        if opcode.startswith(WAIT)
    ]


def from_one_bank(lines: Sequence[Line], opcode: str = "FFMA") -> int:
    """How many of the instructions `opcode` fetch two registers or more from one bank of the register file, of which there are two:
    registers with even numbers, and with odd ones (Jia et al., arXiv 1804.06826, for Volta). An operand marked .reuse isn't counted, it
    is kept at hand; nor is a uniform register, which lies elsewhere."""
    fetched = [
        set(re.findall(r"(?<!U)R(\d+)(?!\d|\.reuse)", operands.partition(",")[2]))
        for _, name, operands in lines
        if is_named(name, opcode)
    ]
    return sum(len({int(number) % 2 for number in numbers}) < len(numbers) for numbers in fetched)


def is_named(opcode: str, pattern: str) -> bool:
    """Whether an opcode with its modifiers begins with `pattern` (a regular expression) as a whole name."""
    return re.match(rf"(?:{pattern})(?![A-Z0-9])", opcode) is not None


def cut_at_waits(lines: Sequence[Line]) -> pd.DataFrame:
    """A loop cut at its waits for products, a row for each piece in the order of the code.

    Index: what the piece begins with, "the loop begins", "all but 1 done", or "all done". Columns: how many of the
    instructions BETWEEN are in it, and of `all`.
    """
    names, rows, left_at = ["the loop begins"], [dict.fromkeys([*BETWEEN, "all"], 0)], dict(waits(lines))
    for at, (_, opcode, _) in enumerate(lines):
        if at in left_at:
            names.append(f"all but {left_at[at]} done" if left_at[at] else "all done")
            rows.append(dict.fromkeys([*BETWEEN, "all"], 0))
        for name in BETWEEN:
            rows[-1][name] += is_named(opcode, re.escape(name))
        rows[-1]["all"] += 1
    return pd.DataFrame(rows, index=pd.Index(names, name="behind"))


def products(lines: Sequence[Line], names: Sequence[str]) -> pd.DataFrame:
    """The products in a loop of machine code, a row for each of `names`, in the order in which they have to come.

    Columns: name; shape, of one instruction; instructions; A and B ("registers", "K-major", "MN-major"); begin and issued,
    the numbers of its first and last instruction in the loop; done, that of the wait that covers it, beyond the loop's length
    where that is in the next iteration. ValueError where the loop has more or fewer products than there are names.
    """
    found: list[dict] = []
    commits, into = [], ""
    for at, (_, opcode, operands) in enumerate(lines):
        if not opcode.startswith("HGMMA"):
            continue
        shape, fields = opcode.split(".")[1], [x.strip() for x in operands.split(",")]
        if fields[0] != into:
            majors = {side: "MN-major" if f"tnsp{side}" in operands else "K-major" for side in "AB"}
            a = "registers" if fields[1].startswith("R") else majors["A"]
            found.append({"shape": shape, "instructions": 0, "A": a, "B": majors["B"], "begin": at})
            into = fields[0]
        found[-1] |= {"instructions": found[-1]["instructions"] + 1, "issued": at}
        if "gsb0" in operands:
            commits.append(at)
    if len(found) != len(names):
        raise ValueError(f"the loop has {len(found)} products, not {len(names)}: {', '.join(names)}")
    n, here = len(lines), waits(lines)
    both_commits = commits + [at + n for at in commits]  # of this iteration and the next
    for row in found:
        # Where the group ends that it is in, perhaps with others
        closed = next((at for at in both_commits if at >= row["issued"]), row["issued"])
        later = [(at + turn, left) for turn in (0, n) for at, left in here if at + turn > closed]
        done = [at for at, left in later if sum(closed < commit < at for commit in both_commits) >= left]
        row["done"] = done[0] if done else 2 * n
    frame = pd.DataFrame(found)
    frame.insert(0, "name", list(names))
    return frame


def work(lines: Sequence[Line], found: pd.DataFrame) -> pd.DataFrame:
    """The instructions of WORK in a loop: at, its number; kind; and under_way, how many of the products `found` in the loop
    have begun by then and are not yet waited for."""
    rows, n = [], len(lines)
    for at, (_, opcode, _) in enumerate(lines):
        for kind, pattern in WORK.items():
            if re.match(pattern, opcode):
                spans = zip(found["begin"], found["done"], strict=True)
                rows.append((at, kind, sum(begin < at < done or at + n < done for begin, done in spans)))
    return pd.DataFrame(rows, columns=["at", "kind", "under_way"])
