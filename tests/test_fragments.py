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
    for line in fragments.tables().splitlines()[1:-1]:
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
