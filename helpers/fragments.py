"""Which element of a matrix each lane of a warp holds: the layouts of ldmatrix, stmatrix, movmatrix and mma.sync.

The one definition: the emulator's C++ tables are made from these functions when its runtime is built (`tables`), and the
pictures are drawn from them. A fragment's element is named by the lane (0 to 31) and ``i``, which counts the elements
that the lane holds: two to a 32-bit register of 16-bit elements, the lower half first, else one. Every function gives
(row, column) of the matrix that the instruction multiplies: A (16, k), B (k, 8), C and D (16, 8).

PTX ISA, chapter "Warp Level Matrix Instructions"; the figures' groupID is lane / 4, their threadID_in_group lane % 4.
"""

from __future__ import annotations

LANES = 32


def a_fragment(lane: int, i: int) -> tuple[int, int]:
    """Element ``i`` of the operand A of mma.m16n8k16 (i < 8) and, its first half, m16n8k8 (i < 4), fp16 and bf16.

    PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "... mma.m16n8k8"."""
    group, thread = divmod(lane, 4)
    return group + 8 * (i // 2 % 2), 2 * thread + i % 2 + 8 * (i // 4)


def b_fragment(lane: int, i: int) -> tuple[int, int]:
    """Element ``i`` of the operand B of mma.m16n8k16 (i < 4) and, its first half, m16n8k8 (i < 2), fp16 and bf16.

    PTX ISA, as for `a_fragment`."""
    group, thread = divmod(lane, 4)
    return 2 * thread + i % 2 + 8 * (i // 2), group


def c_fragment(lane: int, i: int) -> tuple[int, int]:
    """Element ``i`` (i < 4) of C and D, the same for every mma.m16n8kX: fp32 one to a register, fp16 two.

    PTX ISA, as for `a_fragment`."""
    group, thread = divmod(lane, 4)
    return group + 8 * (i // 2), 2 * thread + i % 2


def a_fragment_tf32(lane: int, i: int) -> tuple[int, int]:
    """Element ``i`` (i < 4) of the operand A of mma.m16n8k8 with tf32, one to a register.

    PTX ISA, "Matrix Fragments for mma.m16n8k8"."""
    group, thread = divmod(lane, 4)
    return group + 8 * (i % 2), thread + 4 * (i // 2)


def b_fragment_tf32(lane: int, i: int) -> tuple[int, int]:
    """Element ``i`` (i < 2) of the operand B of mma.m16n8k8 with tf32, one to a register.

    PTX ISA, "Matrix Fragments for mma.m16n8k8"."""
    group, thread = divmod(lane, 4)
    return thread + 4 * i, group


def ldmatrix_row(lane: int) -> tuple[int, int]:
    """(matrix, row) whose 16 bytes the address of this lane names: .x1 looks at lanes 0 to 7, .x2 at 0 to 15.

    PTX ISA, "Warp-level matrix load instruction: ldmatrix"; stmatrix alike."""
    return lane // 8, lane % 8


def ldmatrix_fragment(lane: int, i: int, trans: bool = False) -> tuple[int, int]:
    """Element ``i`` (i < 2) that the lane receives of each 8 x 8 matrix of 16-bit elements; register r is matrix r.

    PTX ISA, "Warp-level matrix load instruction: ldmatrix"; stmatrix alike, and movmatrix, which takes one
    form and gives the other."""
    group, thread = divmod(lane, 4)
    row, column = group, 2 * thread + i
    return (column, row) if trans else (row, column)


def tables() -> str:
    """The same as C++, for the emulator: ``kA16[lane][i]`` is the element's place, row * columns + column."""

    def table(name: str, elements: int, columns: int, place) -> str:
        rows = (
            "{" + ", ".join(str(r * columns + c) for r, c in (place(lane, i) for i in range(elements))) + "}"
            for lane in range(LANES)
        )
        return f"constexpr unsigned char {name}[{LANES}][{elements}] = {{" + ", ".join(rows) + "};\n"

    found = [
        table("kA16", 8, 16, a_fragment),
        table("kB16", 4, 8, b_fragment),
        table("kA8", 4, 8, a_fragment),
        table("kB8", 2, 8, b_fragment),
        table("kA8tf32", 4, 8, a_fragment_tf32),
        table("kB8tf32", 2, 8, b_fragment_tf32),
        table("kC", 4, 8, c_fragment),
        table("kLdmatrixRow", 1, 8, lambda lane, i: ldmatrix_row(lane)),
        table("kLdmatrix", 2, 8, ldmatrix_fragment),
        table("kLdmatrixTrans", 2, 8, lambda lane, i: ldmatrix_fragment(lane, i, trans=True)),
    ]
    return f"namespace emu {{\n{''.join(found)}}}\n"
