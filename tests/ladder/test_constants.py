"""The constants of a kernel's text are those that a C++ compiler would find."""

import pytest

from helpers.ladder.constants import accumulators, constants, evaluate, parts
from helpers.ladder.rung import rungs

TILE = """template <int d> struct Tile {
  static constexpr int Br = d == 64 ? 96 : 64, half = Br / 2 - 1; // 3, 4
  static constexpr int stages = d == 64 && Br > 64 ? 3 : d == 128 ? 2 : 1;
  static constexpr int K = 0, Q = K + (stages != 1 && !(d < 0) ? (half + half) * d : 8 / 3);
  static constexpr int LSE = Q + stages * Br, smem_bytes = LSE + 4 * Br;
};
"""


def test_constants_are_what_cpp_would_make_of_them():
    values = constants(TILE, 64)
    assert [values[n] for n in ("Br", "half", "stages", "Q", "LSE", "smem_bytes")] == [96, 47, 3, 6016, 6304, 6688]
    assert [constants(TILE, 128)[n] for n in ("Br", "half", "stages")] == [64, 31, 2]
    assert constants(TILE, 32)["stages"] == 1
    assert constants(TILE, 64, stages=5)["smem_bytes"] == 6016 + 5 * 96 + 4 * 96
    assert parts(values) == {"K": 6016, "Q": 288, "LSE": 384}
    with pytest.raises(ValueError, match="no struct Tile"):
        constants("struct Other {", 64)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3 - 4 - 5", -2),
        ("-7 / 2", -3),  # towards zero
        ("-7 % 2", -1),
        ("0x10 / 3 % 4", 1),
        ("!(1 < 2) || 3 == 3", 1),
        ("1 || 0 && 0", 1),
        ("d >= 128 && d != 3", 1),
        ("d == 64 ? 96 : d == 128 ? (d > 1 ? 5 : 6) : 1", 5),
        ("(d ? 1 : 0) + (d ? (2 + 3) : 4)", 6),
        ("zero ? d / zero : 8 / 3", 2),  # only the branch that counts is evaluated
        ("zero && d / zero", 0),
    ],
)
def test_an_expression_has_the_value_of_cpp(expression, value):
    assert evaluate(expression, {"d": 128, "zero": 0}) == value


@pytest.mark.parametrize(
    "expression", ["1 +", "1 2", "(1", "1 / 0", "sizeof(float)", "1 ? 2", "", "a b", "1.5", "x = 1"]
)
def test_what_is_no_expression_of_whole_numbers_is_refused(expression):
    with pytest.raises(ValueError, match="has no value|is not an expression of whole numbers"):
        evaluate(expression, {"a": 1})


LOOP = """
  constexpr int F = Br / 16, unused = 1;
  constexpr int early = d == 64 ? 5 : Br / 16;
  constexpr bool no_number = true;
  // [region: tile_loop]
    product(dP_reg, smem + C::V, dO_smem);
    for (int k = 0; k < early; ++k)
      fa::wgmma_mma_async<T, 1>(dV_reg, P_reg[k], dO, true);
    start_S(k);
    for (int k = early; k < Br / 16; ++k)
      fa::wgmma_mma_async<T, 1>(dV_reg, P_reg[k], dO, true);
    for (int k = 0; k < 8; ++k)
      fa::wgmma_mma_async<T, 1, 0>(dQ_reg, K, dS, k > 0);
  // [end: tile_loop]
    product(dK_reg, smem, smem);
"""


def test_products_stand_where_their_loops_go_round():
    assert accumulators(TILE + LOOP, 64) == ["dP", "dV", "S", "dV", "dQ"]
    assert accumulators(TILE + LOOP, 128) == ["dP", "dV", "S", "dQ"]


def test_kernels_state_their_own_constants():
    """Of every kernel whose `struct Tile` has whole numbers alone, evaluated for a D of its header."""
    found = {}
    for rung in rungs():
        try:
            found[rung.stem] = constants(rung.source, 64)
        except ValueError:
            continue
    assert {"10_fa2_mma_fp16", "23_backward_mma", "32_ping_pong", "33_backward_wgmma"} <= set(found)
    assert all(values["d"] == 64 and values["threads"] % 32 == 0 for values in found.values() if "threads" in values)
