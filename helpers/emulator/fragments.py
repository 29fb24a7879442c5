"""Which element of a matrix each lane holds, and where operands lie: ldmatrix, stmatrix, movmatrix, mma.sync and wgmma.

The one definition: the emulator's C++ tables are made from these functions when its runtime is built (`tables`), and the
pictures are drawn from them. A fragment's element is named by the lane (0 to 31) and ``i``, which counts the elements
that the lane holds: two to a 32-bit register of 16-bit elements, the lower half first, else one. Every function gives
(row, column) of the matrix that the instruction multiplies: A (16, k), B (k, 8), C and D (16, 8).

PTX ISA, chapter "Warp Level Matrix Multiply-Accumulate Instructions"; the figures' groupID is lane / 4, their threadID_in_group lane % 4.

wgmma.mma_async multiplies A (64, k) by B (k, N); its fragments are named by the thread of the warpgroup (0 to 127).
An operand in shared memory is found through a descriptor: `Descriptor`. PTX ISA, chapter "Asynchronous Warpgroup Level
Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from dataclasses import dataclass

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


def wgmma_d(thread: int, i: int) -> tuple[int, int]:
    """Element ``i`` (i < N / 2) of the accumulator D (64, N) of wgmma: fp32 one to a register, fp16 two.

    PTX ISA, "Register Fragments and Shared Memory Matrix Layouts", "Accumulator D"."""
    warp, lane = divmod(thread, LANES)
    row, column = c_fragment(lane, i % 4)
    return 16 * warp + row, 8 * (i // 4) + column


def wgmma_a(thread: int, i: int) -> tuple[int, int]:
    """Element ``i`` (i < 8) of the operand A (64, 16) of wgmma in registers, fp16 and bf16.

    PTX ISA, as for `wgmma_d`."""
    warp, lane = divmod(thread, LANES)
    row, column = a_fragment(lane, i)
    return 16 * warp + row, column


SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # a descriptor's swizzle mode: bytes of a row that trade places


def swizzled(address: int, width: int, base_offset: int = 0) -> int:
    """The address in shared memory at which the byte is found: chunks of 16 bytes trade places within ``width`` bytes (0,
    32, 64 or 128), by the number of their 128-byte line; ``base_offset`` is the number of the pattern's first line.

    PTX ISA, "Shared Memory Matrix Layout", "Swizzling modes" and "Matrix Descriptor Format"."""
    line = (address >> 7) - base_offset
    return address ^ ((line & (width // 16 - 1)) << 4 if width else 0)


def operand_chunk(swizzle: int, mn_major: bool, mn: int, k: int) -> tuple[int, int, int]:
    """Where a chunk of 16 bytes of an operand lies, before the swizzle: (bytes, leading, stride), which stands for the start
    address + bytes + leading * leading dimension byte offset + stride * stride dimension byte offset.

    K-major: the chunk is ``k`` (0 or 1) of row ``mn``. MN-major: chunk ``mn`` of row ``k`` (0 to 15), so that 8 consecutive
    rows or columns of 16-bit elements lie in it. swizzle: 0, 32, 64 or 128 bytes.
    PTX ISA, "Major-ness supported by Strides" and "Canonical layouts"."""
    if not mn_major:
        row, group = mn % 8, mn // 8
        return (row * 16, k, group) if swizzle == 0 else (row * swizzle + k * 16, 0, group)
    row, group = k % 8, k // 8
    if swizzle == 0:
        return row * 16, group, mn
    wide = swizzle // 16  # chunks in a row of the pattern
    return row * swizzle + mn % wide * 16, mn // wide, group


@dataclass(frozen=True)
class Descriptor:
    """What a wgmma descriptor's 64 bits say. ``start``, ``leading`` and ``stride`` are bytes, multiples of 16 below 2^18;
    ``swizzle`` is 0, 32, 64 or 128 bytes. PTX ISA, "Matrix Descriptor Format"."""

    start: int
    leading: int
    stride: int
    base_offset: int = 0
    swizzle: int = 0

    # field: (lowest bit, bits)
    FIELDS = {"start": (0, 14), "leading": (16, 14), "stride": (32, 14), "base_offset": (49, 3), "swizzle": (62, 2)}

    def encode(self) -> int:
        """The 64 bits. ValueError if a field can't hold its value."""
        mode = next((m for m, width in SWIZZLES.items() if width == self.swizzle), None)
        bytes_ = (self.start, self.leading, self.stride)
        if mode is None or any(b % 16 or not 0 <= b < 1 << 18 for b in bytes_) or not 0 <= self.base_offset < 8:
            raise ValueError(f"no descriptor can say {self}")
        values = [b >> 4 for b in bytes_] + [self.base_offset, mode]
        return sum(value << low for value, (low, _) in zip(values, self.FIELDS.values(), strict=True))

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """What these 64 bits say."""
        start, leading, stride, base, mode = (bits >> low & (1 << n) - 1 for low, n in cls.FIELDS.values())
        return cls(start << 4, leading << 4, stride << 4, base, SWIZZLES[mode])

    def address(self, mn_major: bool, mn: int, k: int, item: int = 2) -> int:
        """The address in shared memory of element (mn, k): a row of A and a column of its (64, 16), or a column of B and
        a row of its (16, N). item: bytes of an element."""
        per_chunk = 16 // item
        within = (mn if mn_major else k) % per_chunk * item
        chunk = (mn // per_chunk, k) if mn_major else (mn, k // per_chunk)
        bytes_, leading, stride = operand_chunk(self.swizzle, mn_major, *chunk)
        plain = self.start + bytes_ + leading * self.leading + stride * self.stride
        return swizzled(plain, self.swizzle, self.base_offset) + within


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
    return f"namespace emu {{\n{''.join(found)}{_operand_tables()}}}\n"


def _operand_tables() -> str:
    def chunks(width: int, mn_major: int) -> str:
        places = (
            [(mn, k) for mn in range(32) for k in range(16)]
            if mn_major
            else [(mn, k) for mn in range(256) for k in range(2)]
        )
        offsets = (operand_chunk(width, bool(mn_major), mn, k) for mn, k in places)
        return "{" + ", ".join(f"{{{b}, {leading}, {stride}}}" for b, leading, stride in offsets) + "}"

    modes = ("{" + ",\n".join(chunks(width, mn_major) for width in SWIZZLES.values()) + "}" for mn_major in range(2))
    return (
        f"constexpr unsigned kSwizzleWidth[4] = {{{', '.join(str(width) for width in SWIZZLES.values())}}};\n"
        "// [MN-major][swizzle mode][chunk]: bytes, leading and stride offsets; the chunk is 2 mn + k, MN-major 16 mn + k\n"
        "constexpr unsigned short kOperandChunk[2][4][512][3] = {" + ",\n".join(modes) + "};\n"
    )
