"""Which lane holds which element, against the formulas of the PTX ISA as it prints them, written out by hand here."""

import itertools

import pytest

from helpers import fragments

LANES = range(32)


def isa_a16(lane, i):
    """PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": A, .f16 and .bf16."""
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if 0 <= i < 2 or 4 <= i < 6 else group_id + 8
    col = thread_id_in_group * 2 + (i & 1) if i < 4 else thread_id_in_group * 2 + (i & 1) + 8
    return row, col


def isa_b16(lane, i):
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = thread_id_in_group * 2 + (i & 1) if i < 2 else thread_id_in_group * 2 + (i & 1) + 8
    return row, group_id


def isa_c(lane, i):
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if i < 2 else group_id + 8
    return row, thread_id_in_group * 2 + (i & 1)


def isa_a8(lane, i):
    """PTX ISA, "Matrix Fragments for mma.m16n8k8": A, .f16 and .bf16."""
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if i < 2 else group_id + 8
    return row, thread_id_in_group * 2 + (i & 1)


def isa_b8(lane, i):
    return (lane % 4) * 2 + i, lane >> 2


def isa_a8_tf32(lane, i):
    """The same section: A, .tf32."""
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if i in (0, 2) else group_id + 8
    col = thread_id_in_group if i in (0, 1) else thread_id_in_group + 4
    return row, col


def isa_b8_tf32(lane, i):
    return lane % 4 if i == 0 else lane % 4 + 4, lane >> 2


def isa_ldmatrix(lane, i):
    """PTX ISA, ldmatrix: thread 4 r + c holds the elements 2 c and 2 c + 1 of row r."""
    return lane // 4, 2 * (lane % 4) + i


# name: (ours, the manual's, elements per lane, rows, columns)
TABLES = {
    "A of m16n8k16": (fragments.a_fragment, isa_a16, 8, 16, 16),
    "B of m16n8k16": (fragments.b_fragment, isa_b16, 4, 16, 8),
    "C of m16n8k16": (fragments.c_fragment, isa_c, 4, 16, 8),
    "A of m16n8k8": (fragments.a_fragment, isa_a8, 4, 16, 8),
    "B of m16n8k8": (fragments.b_fragment, isa_b8, 2, 8, 8),
    "A of m16n8k8, tf32": (fragments.a_fragment_tf32, isa_a8_tf32, 4, 16, 8),
    "B of m16n8k8, tf32": (fragments.b_fragment_tf32, isa_b8_tf32, 2, 8, 8),
    "ldmatrix": (fragments.ldmatrix_fragment, isa_ldmatrix, 2, 8, 8),
    "ldmatrix.trans": (lambda l, i: fragments.ldmatrix_fragment(l, i, trans=True), lambda l, i: isa_ldmatrix(l, i)[::-1], 2, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_lane_holds_what_the_manual_says(name):
    ours, manual, elements, _, _ = TABLES[name]
    for lane, i in itertools.product(LANES, range(elements)):
        assert ours(lane, i) == manual(lane, i), (lane, i)


@pytest.mark.parametrize("name", TABLES)
def test_the_warp_holds_every_element_once(name):
    ours, _, elements, rows, columns = TABLES[name]
    held = [ours(lane, i) for lane in LANES for i in range(elements)]
    assert sorted(held) == list(itertools.product(range(rows), range(columns)))


def test_each_matrix_of_ldmatrix_has_the_rows_of_eight_lanes():
    assert [fragments.ldmatrix_row(lane) for lane in LANES] == [(m, r) for m in range(4) for r in range(8)]


def test_an_accumulator_is_an_operand():
    """What FlashAttention rests on: the fragment C of S, two tiles side by side, is the fragment A of P."""
    for lane, tile, i in itertools.product(LANES, range(2), range(4)):
        row, column = fragments.c_fragment(lane, i)
        assert fragments.a_fragment(lane, 4 * tile + i) == (row, column + 8 * tile)


def test_ldmatrix_loads_the_operands_of_mma():
    """A tile of A is four 8 x 8 matrices, the lower one first; B's columns are rows in memory, or B's rows with .trans."""
    for lane, register, half in itertools.product(LANES, range(4), range(2)):
        row, column = fragments.ldmatrix_fragment(lane, half)
        assert fragments.a_fragment(lane, 2 * register + half) == (
            row + 8 * (register % 2),
            column + 8 * (register // 2),
        )
        if register < 2:
            assert fragments.b_fragment(lane, 2 * register + half) == (column + 8 * register, row)
            down, right = fragments.ldmatrix_fragment(lane, half, trans=True)
            assert fragments.b_fragment(lane, 2 * register + half) == (down + 8 * register, right)


def test_tables_are_the_functions():
    """The C++ that the emulator is built with, read back."""
    tables = {}
    for line in fragments.tables().splitlines():
        if not line.startswith("constexpr unsigned char "):
            continue
        head, values = line.removeprefix("constexpr unsigned char ").rstrip(";").split(" = ")
        tables[head.split("[")[0]] = [[int(v) for v in row.split(",")] for row in values[2:-2].split("}, {")]
    assert tables["kA16"] == [[16 * r + c for r, c in (isa_a16(lane, i) for i in range(8))] for lane in LANES]
    assert tables["kB8tf32"] == [[8 * r + c for r, c in (isa_b8_tf32(lane, i) for i in range(2))] for lane in LANES]
    assert tables["kLdmatrixTrans"] == [
        [8 * c + r for r, c in (isa_ldmatrix(lane, i) for i in range(2))] for lane in LANES
    ]
    assert tables["kLdmatrixRow"] == [[lane] for lane in LANES]
    assert set(tables) == {
        "kA16",
        "kB16",
        "kA8",
        "kB8",
        "kA8tf32",
        "kB8tf32",
        "kC",
        "kLdmatrixRow",
        "kLdmatrix",
        "kLdmatrixTrans",
    }


# ---- wgmma


def test_a_warpgroup_holds_every_element_once():
    """D (64, N) and A (64, 16), against the manual's formulas: 16 rows to a warp."""
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(8):
            row, column = isa_a16(lane, i)
            assert fragments.wgmma_a(thread, i) == (16 * warp + row, column)
        for i in range(128):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            assert fragments.wgmma_d(thread, i) == (row, 8 * (i // 4) + 2 * (lane % 4) + i % 2)
    held = [fragments.wgmma_d(thread, i) for thread in range(128) for i in range(20)]
    assert sorted(held) == list(itertools.product(range(64), range(40)))


def test_an_accumulator_of_wgmma_is_an_operand():
    """Columns 16 j to 16 j + 15 of S are a thread's elements 8 j to 8 j + 7: the operand A of step j of P V."""
    for thread, step, i in itertools.product(range(128), range(4), range(8)):
        row, column = fragments.wgmma_d(thread, 8 * step + i)
        assert fragments.wgmma_a(thread, i) == (row, column - 16 * step)


def test_a_descriptors_fields_are_the_manuals():
    """PTX ISA, "Matrix Descriptor Format": bits 13-0, 29-16, 45-32, 51-49 and 63-62."""
    d = fragments.Descriptor(start=0x12340, leading=0x2000, stride=0x400, base_offset=5, swizzle=64)
    assert d.encode() == 0x1234 | 0x200 << 16 | 0x40 << 32 | 5 << 49 | 2 << 62
    assert fragments.Descriptor.decode(d.encode()) == d
    for wrong in ({"start": 8}, {"leading": 1 << 18}, {"stride": -16}, {"base_offset": 8}, {"swizzle": 16}):
        with pytest.raises(ValueError, match="no descriptor"):
            fragments.Descriptor(**{"start": 0, "leading": 0, "stride": 0} | wrong).encode()


def swizzle_atom(width, row, chunk):
    """PTX ISA, "Swizzling modes", as its figures have it: which place a chunk of 16 bytes takes in its row of `width` bytes.
    128 B: chunk ^ row % 8; 64 B: chunk ^ row / 2 % 4; 32 B: chunk ^ row / 4 % 2."""
    return chunk ^ {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[width]


@pytest.mark.parametrize("width", [32, 64, 128])
def test_eight_rows_of_a_swizzled_operand_lie_as_in_the_manuals_figures(width):
    d = fragments.Descriptor(start=4096, leading=16, stride=8 * width, swizzle=width)
    for mn, k in itertools.product(range(64), range(16)):
        chunk = swizzle_atom(width, mn % 8, k // 8)
        assert d.address(False, mn, k) == 4096 + mn * width + chunk * 16 + k % 8 * 2
    d = fragments.Descriptor(start=4096, leading=16 * width, stride=8 * width, swizzle=width)
    for mn, k in itertools.product(range(128), range(16)):
        chunk = swizzle_atom(width, k % 8, mn % (width // 2) // 8)
        at = 4096 + mn // (width // 2) * 16 * width + k * width + chunk * 16 + mn % 8 * 2
        assert d.address(True, mn, k) == at


def test_an_operand_without_swizzle_is_core_matrices_of_128_bytes():
    d = fragments.Descriptor(start=0, leading=0x1000, stride=0x100)
    for mn, k in itertools.product(range(64), range(16)):
        assert d.address(False, mn, k) == mn // 8 * 0x100 + k // 8 * 0x1000 + mn % 8 * 16 + k % 8 * 2
        assert d.address(True, mn, k) == mn // 8 * 0x100 + k // 8 * 0x1000 + k % 8 * 16 + mn % 8 * 2


def test_a_base_offset_moves_the_pattern():
    """A tile that begins in line 3 of a 1024-byte block, laid out as if the pattern began with it."""
    at, moved = (fragments.Descriptor(start, 16, 1024, base, 128) for start, base in ((1024, 0), (1024 + 3 * 128, 3)))
    for mn, k in itertools.product(range(8), range(16)):
        assert moved.address(False, mn, k) - moved.start == at.address(False, mn, k) - at.start
