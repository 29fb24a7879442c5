"""Loops of machine code: which one does the products, where it waits, and what runs while a product is under way."""

import pytest

from helpers.toolchain import loops


def code(*instructions):
    """Lines as `sass` lists them: one every 16 bytes."""
    return [(16 * i, *(text.partition(" ")[::2])) for i, text in enumerate(instructions)]


LOOPS = code(
    "MOV R1",
    "FFMA R0",  # 0x10: a loop without products
    "@P0",
    "BRA 0x10",
    "LDSM.16.M88.4 R4",  # 0x40: the outer loop
    "HMMA.16816.F32 R8",  # 0x50: the inner one, with both products
    "HMMA.16816.F32.BF16 R8",
    "BRA 0x50",
    "FADD R1",
    "BRA 0x40",
    "BRA 0xb0",  # forward
    "EXIT",
)


def test_the_main_loop_is_the_shortest_with_all_products():
    assert [opcode for _, opcode, _ in loops.main_loop(LOOPS)] == ["HMMA.16816.F32", "HMMA.16816.F32.BF16", "BRA"]
    without = [line for line in LOOPS if "HMMA" not in line[1]]
    assert loops.main_loop(without)[0][1] == "FFMA"
    with pytest.raises(ValueError, match="no loop"):
        loops.main_loop(code("MOV R1", "EXIT"))


def test_beside_hmmas_the_ffmas_of_a_softmax_are_no_products():
    lines = code("FFMA R0", "HMMA.16816.F32 R8", "BRA 0x10", "BRA 0x0")
    assert [opcode for _, opcode, _ in loops.main_loop(lines)] == ["HMMA.16816.F32", "BRA"]


WGMMA = code(
    "HGMMA.64x128x16.F32 R24",  # 0x0: before the loops
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0",  # 0x10: the loop over query tiles
    "HGMMA.64x128x16.F32 R24, gdesc[UR8]",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "HGMMA.64x128x16.F32 R24, gdesc[UR8]",  # 0x40: the loop over tiles of keys
    "HGMMA.64x128x16.F32 R88, R180, gdesc[UR8].tnspB, R88, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "FMNMX R1",
    "FMNMX3 R1",
    "MUFU.EX2 R1",
    "MUFU.RCP R1",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "MUFU.EX2 R1",
    "MUFU.EX2 R1",
    "F2FP.BF16.F32.PACK_AB R1",
    "BRA 0x40",
    "HGMMA.64x128x16.F32 R24",
    "BRA 0x10",
    "BRA 0x120",  # 0x120: a wait that isn't over
    "EXIT",
)


def test_a_loop_of_wgmma_is_cut_at_its_waits():
    loop = loops.main_loop(WGMMA)
    assert [loop[0][0], loop[-1][0]] == [0x40, 0xF0]
    frame = loops.cut_at_waits(loop)
    assert frame.index.tolist() == ["the loop begins", "all but 1 done", "all done"]
    assert frame["HGMMA"].tolist() == [2, 0, 0]
    assert frame["MUFU.EX2"].tolist() == [0, 1, 2]
    assert frame["FMNMX"].tolist() == [0, 1, 0] and frame["F2FP"].tolist() == [0, 0, 1]
    assert frame["all"].tolist() == [2, 5, 5] and frame["all"].sum() == len(loop)


# Two products of three instructions and one of two, which is waited for in the next turn
PRODUCTS = [
    "F2FP.F16.F32.PACK_AB R1",
    "HGMMA.64x96x16.F32 R24, gdesc[UR36].tnspA, RZ, !UPT",
    "HGMMA.64x96x16.F32 R24, gdesc[UR36].tnspA, R24, gsb0",
    "HGMMA.64x64x16.F32 R120, R192, gdesc[UR20].tnspB, R120, gsb0",
    "HGMMA.64x64x16.F32 R120, R196, gdesc[UR20].tnspB, R120, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "MUFU.EX2 R1, R1",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "STSM.16.MT88.4 [R1], R4",
    "HGMMA.64x48x16.F32 R24, gdesc[UR36], gdesc[UR40], R24, gsb0",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",
]


def test_products_are_under_way_until_a_wait_covers_them():
    found = loops.products(code(*PRODUCTS), ["S", "dV", "dQ"])
    assert found["instructions"].tolist() == [2, 2, 1] and found["shape"].tolist() == [
        "64x96x16",
        "64x64x16",
        "64x48x16",
    ]
    assert found[["A", "B"]].values.tolist() == [["MN-major", "K-major"], ["registers", "MN-major"], ["K-major"] * 2]
    assert found[["begin", "issued", "done"]].values.tolist() == [[1, 2, 5], [3, 4, 7], [9, 9, 11 + 5]]
    done = loops.work(code(*PRODUCTS), found)
    assert done.values.tolist() == [
        [0, "round to 16 bits", 1],  # under the one of the turn before
        [6, "exponentials", 1],
        [8, "write shared memory", 0],
        [10, "wait for other threads", 1],
    ]
    with pytest.raises(ValueError, match="the loop has 3 products, not 2"):
        loops.products(code(*PRODUCTS), ["S", "dV"])


def test_a_product_is_waited_for_with_its_group():
    """dV is committed with dK: the wait that leaves two groups, theirs and that of dQ, doesn't cover it."""
    lines = code(
        "HGMMA.64x128x16.F32 R24, gdesc[UR36], R24, gsb0",
        "HGMMA.64x64x16.F32 R120, R192, gdesc[UR20].tnspB, R120",
        "HGMMA.64x64x16.F32 R152, R196, gdesc[UR20].tnspB, R152, gsb0",
        "HGMMA.64x64x16.F32 R88, gdesc[UR36], gdesc[UR40], RZ, !UPT, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x2",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    )
    assert loops.products(lines, ["S", "dV", "dK", "dQ"])["done"].tolist() == [4, 5, 5, 5]


def test_the_loop_is_where_most_products_are_and_no_end_of_the_kernel():
    lines = code(
        "HGMMA.64x96x16.F32 R24, gsb0",
        "HGMMA.64x96x16.F32 R24, gsb0",  # 0x10: the loop
        "HGMMA.64x96x16.F32 R24, gsb0",
        "BRA 0x20",  # a small one in it
        "BRA 0x10",
        "HGMMA.64x96x16.F32 R24, gsb0",
        "EXIT ",
        "BRA 0x0",  # out of line
    )
    loop = loops.main_loop(lines)
    assert [loop[0][0], loop[-1][0]] == [0x10, 0x40]
    with pytest.raises(ValueError, match="the kernel has no loop"):
        loops.main_loop(lines[:3])


def test_two_registers_of_one_bank():
    """Even and odd numbers are a bank each. What is written, what .reuse has kept and uniform registers aren't fetched."""
    two = code("FFMA R1, R24, R9.reuse, -R16", "FFMA.FTZ R3, R7, R5, R2")
    one = code(
        "FFMA R2, R24, R9, UR16",
        "FFMA R0, R0, R0, R1",
        "FFMA R24, R24, UR8, -R13",
        "FFMA R0, R24.reuse, R9, -R16",
        "FMUL R0, R2, R4",
    )
    assert loops.from_one_bank(two) == 2 and loops.from_one_bank(one) == 0 and loops.from_one_bank(one, "FMUL") == 1
