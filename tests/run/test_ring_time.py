"""The model of the time of ring attention: its limits are those that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.run import ring_time
from helpers.run.layouts import LAYOUTS, block
from helpers.run.ring_time import Machine, Problem, break_even, seconds, share, speedup

IDEAL = ring_time.without_latency(Machine())
LONG = Problem(N=1 << 22)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_those_of_the_blocks(layout, causal, ranks):
    n = 1000
    blocks = [[block(r, (r - t) % ranks, [n] * ranks, layout, causal) for t in range(ranks)] for r in range(ranks)]
    counted = np.array([[b.scores if b else 0 for b in row] for row in blocks]) / n**2
    assert share(ranks, layout, causal) == pytest.approx(counted, abs=2 / n)


def test_contiguous_stops_at_four_thirds_on_two_and_zigzag_reaches_two():
    assert speedup(LONG, IDEAL, 2, "contiguous") == pytest.approx(4 / 3)
    assert speedup(LONG, IDEAL, 2, "zigzag") == pytest.approx(2)
    assert speedup(LONG, IDEAL, 8, "contiguous") == pytest.approx(8**2 / (2 * 8 - 1))  # 4.27: half of a whole round
    for ranks in (2, 8, 64):
        assert speedup(LONG, IDEAL, ranks, "striped") == pytest.approx(ranks)
        assert speedup(LONG, IDEAL, ranks, "contiguous", backward=True) < 0.6 * ranks + 0.2


def test_one_rank_takes_the_kernel_s_time():
    assert seconds(LONG, IDEAL, 1) == pytest.approx(LONG.flops / IDEAL.rate)
    both = LONG.flops / IDEAL.rate + 2.5 * LONG.flops / IDEAL.backward
    assert seconds(LONG, IDEAL, 1, backward=True) == pytest.approx(both)


def test_break_even_lengths():
    """700 TFLOP/s and 290 GB/s: some 2,400 tokens a rank, an eighth of it with an eighth of the heads of K and V, twice under a mask;
    the latency of a message, 60 us, takes that to about 4,000 and, with few bytes, multiplies it."""
    full = Problem(N=1, causal=False)
    assert break_even(full, IDEAL) == pytest.approx(700e12 / 290e9)
    assert break_even(Problem(N=1, causal=False, Hkv=2), IDEAL) == pytest.approx(700e12 / 290e9 / 8)
    assert break_even(Problem(N=1), IDEAL) == pytest.approx(2 * 700e12 / 290e9)
    assert break_even(Problem(N=1), IDEAL, "contiguous") == pytest.approx(700e12 / 290e9)
    assert 3_000 < break_even(full, Machine()) < 4_500
    assert break_even(Problem(N=1, causal=False, Hkv=2), Machine()) > 5 * 300


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_at_the_break_even_length_transfer_and_kernel_take_as_long(ranks):
    """Just above it a ring without a mask is as fast as the ideal, just below it is not."""
    full = Problem(N=1, causal=False)
    n = break_even(full, IDEAL)
    above, below = (speedup(Problem(N=int(ranks * n * x), causal=False), IDEAL, ranks) for x in (1.02, 0.7))
    assert above == pytest.approx(ranks, rel=1e-6)
    assert below < 0.95 * ranks


def test_a_step_begins_when_its_keys_are_there_and_the_one_before_is_done():
    found = ring_time.timeline(Problem(N=8192), Machine(), 4, "contiguous")
    kernels = found[found["what"] == "kernel"].set_index(["rank", "step"])
    moved = found[found["what"] == "transfer"].set_index(["rank", "step"])
    for (rank, step), row in kernels.iterrows():
        assert step == 0 or row.begin >= moved.loc[(rank, step - 1), "end"]
        assert step == 0 or (rank, step - 1) not in kernels.index or row.begin >= kernels.loc[(rank, step - 1), "end"]
    assert set(kernels.index) == {(r, t) for r in range(4) for t in range(r + 1)}  # what the mask leaves, and no more


def test_a_message_begins_when_both_ranks_are_there():
    found = ring_time.timeline(Problem(N=1 << 17), Machine(), 4, "contiguous").set_index(["rank", "step"])
    kernels, moved = (found[found["what"] == what] for what in ("kernel", "transfer"))
    for (rank, step), row in moved.iterrows():
        both = [kernels.loc[at, "begin"] for at in ((rank, step), ((rank - 1) % 4, step)) if at in kernels.index]
        assert row.begin >= max(both, default=0)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, [2, 2]), (3, [2, 2, 2, 4]), (4, [2, 2, 4, 4, 4])])
def test_the_messages_of_a_backward_pass_in_bytes_of_a_number(ranks, sizes):
    """K and V in 16 bits, all but once around; dK and dV from the second step on: first a part in 16 bits, then a sum in float32."""
    slow = replace(IDEAL, rate=1e30, backward=1e30, link=1.0)
    found = ring_time.timeline(Problem(N=ranks, H=1, Hkv=1, D=1), slow, ranks, backward=True)
    sent = found[(found["rank"] == 0) & (found["what"] != "kernel")]
    assert (sent["end"] - sent["begin"]).tolist() == pytest.approx([2 * size for size in sizes])


def test_a_merge_moves_ten_bytes_for_a_number_of_O_and_backward_fourteen():
    """A sum in float32 is read and written, a part in 16 bits read; backward those of dK and dV come on top."""
    merging, n = replace(IDEAL, memory_bandwidth=4e12), LONG.N / 4 * LONG.H * LONG.D / 4e12
    more = [seconds(LONG, merging, 4, backward=b) - seconds(LONG, IDEAL, 4, backward=b) for b in (False, True)]
    assert more == pytest.approx([3 * 10 * n, 3 * (10 + 14) * n], rel=1e-3)


def test_slower_links_and_longer_messages_never_make_it_faster():
    base = speedup(Problem(N=32768), Machine(), 8)
    assert speedup(Problem(N=32768), Machine(link=29e9), 8) < base
    assert speedup(Problem(N=32768), Machine(latency=600e-6), 8) < base
    assert speedup(Problem(N=32768, Hkv=2), Machine(), 8) > base
    assert speedup(Problem(N=1 << 20), Machine(), 8) > base


def test_memory_is_that_of_the_tensors_that_can_be_counted():
    """In tensors like Q, of a rank's rows, and two LSE: one GPU has Q, K, V, O. Several have the part to be merged, too, O in float32, and
    K and V once more on two ranks, twice more on four."""
    like_q = LONG.N * LONG.H * LONG.D * LONG.itemsize
    lse = 2 * LONG.N * LONG.H * 4
    for ranks, tensors in ((1, 4), (2, 9), (4, 11), (8, 11)):
        assert ring_time.memory(LONG, ranks) == pytest.approx((tensors * like_q + lse) / ranks)
    short = Problem(N=65536)  # two parts, merged in 16 bits
    assert ring_time.memory(short, 2) == pytest.approx((7 * LONG.H * LONG.D * 2 + 8 * LONG.H) * short.N / 2)


def test_a_thousand_gpus_take_no_time():
    shares = [speedup(Problem(N=1 << 20, Hkv=2), Machine(), ranks) / ranks for ranks in (8, 64, 1024)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.95 > 0.2 > shares[-1]
    assert speedup(Problem(N=1 << 20), Machine(), 64) > speedup(Problem(N=1 << 20), Machine(), 64, "contiguous")
