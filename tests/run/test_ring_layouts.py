"""Which rows a rank has and what it sees: every visible pair of the whole sequence in exactly one block, no other in any."""

from __future__ import annotations

import pytest
import torch

from helpers.run.layouts import LAYOUTS, Block, block, cut, require, split


def seen(N: int, ranks: int, layout: str, causal: bool) -> torch.Tensor:
    """How many blocks count each pair (query, key) of the sequence."""
    rows, count = split(N, ranks, layout), torch.zeros(N, N, dtype=torch.int)
    for r in range(ranks):
        for s in range(ranks):
            if (part := block(r, s, [len(x) for x in rows], layout, causal)) is None:
                continue
            q, k = torch.tensor(rows[r])[part.rows], torch.tensor(rows[s])[part.keys]
            ones = torch.ones(len(q), len(k), dtype=torch.int)
            assert not part.causal or len(q) == len(k)  # what every causal kernel of the series can do
            count[q[:, None], k[None, :]] += ones.tril() if part.causal else ones
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_visible_pair_is_in_one_block(layout, ranks):
    for N in (2 * ranks, 48, 53):
        if layout == "zigzag" and N % (2 * ranks):
            with pytest.raises(ValueError, match=f"zigzag cuts {N} rows into {2 * ranks} equal pieces"):
                split(N, ranks, layout)
            continue
        assert sorted(i for rows in split(N, ranks, layout) for i in rows) == list(range(N))
        assert (seen(N, ranks, layout, False) == 1).all()
        assert torch.equal(seen(N, ranks, layout, True), torch.ones(N, N, dtype=torch.int).tril())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("keys", "rows"), [(7, None), (5, 5), (5, 9), (100, None), (100, 100)])
def test_a_block_that_is_cut_counts_every_pair_once(keys, rows, causal):
    for whole in (Block(slice(3, 24), slice(1, 22), causal), Block(slice(0, 1), slice(0, 1), causal)):
        n, m = whole.rows.stop, whole.keys.stop
        count = torch.zeros(n, m, dtype=torch.int)
        for part in cut(whole, keys, rows):
            height, width = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
            assert 0 < width <= keys and 0 < height <= (rows or n) and (not part.causal or height == width)
            ones = torch.ones(height, width, dtype=torch.int)
            count[part.rows, part.keys] += ones.tril() if part.causal else ones
        ones = torch.ones(n - whole.rows.start, m - whole.keys.start, dtype=torch.int)
        expected = torch.zeros(n, m, dtype=torch.int)
        expected[whole.rows, whole.keys] = ones.tril() if causal else ones
        assert torch.equal(count, expected)


def test_runs_are_as_few_and_as_long_as_they_can_be():
    sizes = [part.keys.stop - part.keys.start for part in cut(Block(slice(0, 8), slice(0, 131072), False), 65536)]
    assert sizes == [65536, 65536]
    sizes = [part.keys.stop - part.keys.start for part in cut(Block(slice(0, 8), slice(0, 100_000), False), 65536)]
    assert sizes == [50048, 49952]  # the first a multiple of 128


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 7), ("zigzag", 4), ("striped", 4)])
def test_the_work_of_the_busiest_of_four_ranks(layout, most):
    """In units of a fourth of the scores of two ranks' whole rows: contiguous has the last rank work for nearly all."""
    rows = [len(x) for x in split(4096, 4, layout)]
    blocks = [[block(r, s, rows, layout, True) for s in range(4)] for r in range(4)]
    work = [sum(b.scores for b in row if b) / (1024 * 1024 / 2) for row in blocks]
    assert max(work) == pytest.approx(most, abs=0.01)


@pytest.mark.parametrize(
    ("lengths", "layout", "words"),
    [
        ([4, 6], "zigzag", "4, 6 rows; zigzag needs the same even number"),
        ([5, 5], "zigzag", "5, 5 rows; zigzag needs the same even number"),
        ([4, 5], "striped", "4, 5 rows; striped deals them out in turn"),
        ([6, 4], "striped", "6, 4 rows; striped"),
        ([0, 4], "contiguous", "0, 4 rows; each needs at least one"),
        ([4, 4], "zig", "layout 'zig'; there are contiguous, zigzag, striped"),
    ],
)
def test_lengths_that_do_not_fit_a_layout_are_refused(lengths, layout, words):
    with pytest.raises(ValueError, match=words):
        require(lengths, layout, causal=True)


def test_lengths_that_fit():
    for lengths, layout in (([3, 9, 1], "contiguous"), ([4, 4], "zigzag"), ([5, 5, 4], "striped")):
        require(lengths, layout, causal=True)
    require([3, 9], "zigzag", causal=False)
