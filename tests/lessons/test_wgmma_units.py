"""The model of what a tile costs each unit of an SM."""

import pandas as pd
import pytest

from helpers import budget, draw_backward, rung, wgmma_units


def test_an_operand_in_registers_is_not_read_from_shared_memory():
    assert (
        wgmma_units.wgmma_bytes(128) == 2 * 16 * (128 + 64)
        and wgmma_units.wgmma_bytes(128, 8, True) == 8 * 2 * 16 * 128
    )


@pytest.mark.sampled
def test_a_tile_of_the_forward_pass():
    """64 rows and 128 keys at d = 128: Q and K read for S, V for O, and K and V written once for both warpgroups."""
    clocks = wgmma_units.forward("32_ping_pong", 128)
    assert clocks["tensor cores"] == 2 * 64 * 128 * 128 / 2048 == 1024 and clocks["MUFU"] == 512
    assert clocks["shared memory"] == ((64 + 128) * 128 * 2 + 128 * 128 * 2 + 2 * 128 * 128 * 2 / 2) / 128
    assert 300 < clocks["issue slots"] < 420
    assert wgmma_units.forward("31_warp_specialized", 64)["shared memory"] == pytest.approx(320 + 256 / 3)
    assert wgmma_units.forward("30_tma_wgmma", 64)["shared memory"] == pytest.approx(
        320 + 64 / 3 + 128
    )  # Q once for 96 keys; two warpgroups, not three


def test_a_step_of_the_backward_pass():
    source = rung("33_backward_wgmma").source
    names = draw_backward.accumulators(source, 64)
    found = draw_backward.products(draw_backward.main_loop("33_backward_wgmma", 64), names)
    parts = wgmma_units.backward(found, draw_backward.constants(source, 64), 64, wavefronts=1.0)
    assert parts["tensor cores"].sum() == 5 * 128 * 128 * 64 / 2048  # five products of Br = 128, Bc = 128, d = 64
    assert parts.loc["dS is written", "shared memory"] == 256
    assert len(parts) == 5 + 4 and len(found) == 6  # dV comes in two pieces, and is one part


def test_a_step_s_copies_and_additions_go_by_its_queries():
    found = pd.DataFrame([("S", "64x96x16", 4, "K-major")], columns=["name", "shape", "instructions", "A"])
    parts = wgmma_units.backward(found, {"Br": 96}, 64, wavefronts=0.5)["shared memory"]
    assert parts.to_dict() == {
        "S": 2 * 4 * 2 * 16 * (96 + 64) / 128,
        "Q, dO arrive": 2 * 96 * 64 * 2 / 128,
        "LSE, delta are read": 0.5 * 96,
        "dS is written": 96 * 128 * 2 / 128,
        "dQ is written and fetched": 2 * 96 * 64 * 4 / 128,  # fp32
    }


def test_as_the_figure_takes_it():
    frame = wgmma_units.table({"a": pd.Series({"MUFU": 3.0}), "b": pd.Series({"MUFU": 4.0, "issue slots": 2.0})})
    assert frame.values.tolist() == [["a", "MUFU", 3.0], ["b", "MUFU", 4.0], ["b", "issue slots", 2.0]]
    assert budget.units(frame, "title", "text").png().startswith(b"\x89PNG")


def test_what_was_timed_stands_beside_the_model():
    columns = ["dtype", "N", "warpgroups", "B_major", "A_in", "cycles"]
    rows = [("fp16", N, 2, "K", A, N / 2 + 1) for A in ("shared", "registers") for N in (64, 256)]
    timed = pd.DataFrame(
        [*rows, ("fp16", 64, 1, "K", "shared", 9.0), ("bf16", 64, 2, "K", "shared", 9.0)], columns=columns
    )
    table = wgmma_units.beside_the_model(timed)
    assert table.loc[("A in shared", 64)].tolist() == [32, 32, 33]  # 64 and 64 columns of 16 numbers: 4096 bytes
    assert table.loc[("A in registers", 256)].tolist() == [128, 64, 129] and len(table) == 4


def test_measured_clocks_are_shared_out_among_the_tiles_of_an_SM():
    # 32 heads with 2 tiles of 192 queries and 3 of 128 keys each: 192 on 132 SMs
    calls = [("32_ping_pong", "random", 64, 1, 32, 200, 300, ms, 1000.0) for ms in (0.192, 0.192, 9.0)]
    calls += [("32_ping_pong", "zeros", 64, 1, 32, 200, 300, 5.0, 1000.0), ("SDPA CUDNN", *calls[0][1:7], 7.0, 1000.0)]
    timed = pd.DataFrame(calls, columns=["name", "inputs", "D", "B", "H", "Nq", "Nk", "ms", "mhz"])
    assert wgmma_units.per_tile(timed, "32").to_dict() == {64: pytest.approx(192_000 * 132 / 192)}
