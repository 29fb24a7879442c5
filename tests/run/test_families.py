"""Families of inputs: the same for the same seed, finite, as peaked as their names say, and in reach of a mask."""

import math

import pytest
import torch

from helpers import reference
from helpers.run import families
from helpers.run.families import FAMILIES, peakedness

SHAPE = (1, 8, 200, 200, 64)


def inputs(name, shape=SHAPE, dtype="fp32", **options):
    return FAMILIES[name].inputs(shape, dtype, **options)


def p_of(q, k, causal=False):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    seen = reference.visible(q.shape[2], k.shape[2], causal)
    return torch.softmax(s.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_shape_is_finite_and_the_same_again(name, causal):
    q, k, v, do = made = inputs(name, (2, 4, 33, 70, 64), "fp16", seed=3, Hkv=2, causal=causal, gradient=True)
    assert q.shape == do.shape == (2, 4, 33, 64) and k.shape == v.shape == (2, 2, 70, 64)
    assert all(x.dtype == torch.float16 and x.isfinite().all() for x in made)
    assert (q.float() @ k.float().mT.repeat_interleave(2, 1)).abs().max() < torch.finfo(torch.float16).max * 64
    again = inputs(name, (2, 4, 33, 70, 64), "fp16", seed=3, Hkv=2, causal=causal, gradient=True)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))
    other = inputs(name, (2, 4, 33, 70, 64), "fp16", seed=4, Hkv=2, causal=causal)
    assert not torch.equal(other[0], q)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_inputs_stay_finite_in_fp16(name):
    q, k, _ = inputs(name, (1, 1, 1, 16384, 64), "fp16")
    assert k.isfinite().all() and (q.float() @ k.float().mT).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_one_key_dominates_and_is_seen(causal):
    q, k, _ = inputs("one key", causal=causal)
    p = p_of(q, k, causal)
    assert p.amax(-1).median() > 0.99
    keys = p.argmax(-1)
    if not causal:  # a permutation, another one for each head
        assert all(sorted(row.tolist()) == list(range(200)) for row in keys[0, :2])
        assert not torch.equal(keys[0, 0], keys[0, 1])
    else:  # spread over what each query sees
        assert (keys <= torch.arange(200)).all()
        assert 0.4 < (keys[..., 1:] / torch.arange(1, 200)).mean() < 0.6


def test_one_key_of_a_group_and_of_fewer_keys_than_queries():
    q, k, _ = inputs("one key", (1, 4, 50, 20, 64), Hkv=2)
    assert p_of(q, k).amax(-1).median() > 0.99
    q, k, _ = inputs("one key", (1, 2, 50, 20, 64), causal=True)
    assert q.isfinite().all()  # the first 30 queries see nothing


def test_the_biased_families_have_their_bias():
    rows = torch.arange(200.0)
    for name, expected in (("sink", 12.0 * (rows == 0)), ("sawtooth", rows % 192 / 8)):
        q, k, _ = inputs(name)
        assert torch.allclose(q[..., :1] @ k[..., :1].mT / 8, expected.expand(1, 8, 200, 200))
    for name, bias in (("growing", rows - 199), ("falling", -rows)):
        q, k, _ = inputs(name)
        slopes = 2.0 ** -torch.arange(1, 9)[:, None, None]
        assert torch.allclose(q[..., :1] @ k[..., :1].mT / 8, (slopes * bias).expand(1, 8, 200, 200), rtol=1e-5)
    q, k, _ = inputs("sink", (1, 2, 8, 16384, 64))
    assert p_of(q, k)[..., 0].median() > 0.8


def test_the_effective_number_of_keys():
    k = torch.zeros(1, 1, 64, 64)
    q = torch.randn(1, 1, 64, 64)
    assert peakedness(q, k).keys == pytest.approx(64, rel=1e-4)
    assert peakedness(q, k).top == pytest.approx(1 / 64, rel=1e-4)
    assert peakedness(q, k, causal=True).top > 1 / 64
    counted = [peakedness(*inputs(f"Q × {n}")[:2]).keys for n in (2, 4, 8)]
    assert counted == sorted(counted, reverse=True)


def test_how_peaked_rows_are_is_the_median_of_the_rows():
    x = torch.zeros(1, 1, 6, 1)
    found = peakedness(x, x, causal=True)  # of rows that see 1 to 6 keys, all alike, the median is the third
    assert (found.keys, found.top) == pytest.approx((3, 1 / 4), rel=1e-5)


def test_heads_of_a_group_are_as_peaked_as_with_keys_of_their_own():
    q = torch.randn(1, 4, 40, 32) * torch.tensor([1.0, 1.0, 4.0, 4.0])[:, None, None]
    k = torch.randn(1, 2, 40, 32) * torch.tensor([1.0, 9.0])[:, None, None]
    assert peakedness(q, k) == peakedness(q, k.repeat_interleave(2, 1))


def test_a_maximum_rises_where_a_later_tile_exceeds_it():
    """One feature: the score of key j is k[j]. Tiles of 4 keys, the last one first, in log2 units."""
    log2 = math.log(2)
    k = torch.zeros(1, 1, 16, 1)
    k[0, 0, [13, 9, 5, 1], 0] = (
        torch.tensor([1.0, 3.0, 20.0, 22.0]) * log2
    )  # the maxima of the four tiles as they are taken
    q = torch.ones(1, 1, 4, 1)
    rises = peakedness(q, k, scale=1.0, rows=(2, 4), tiles=(4,), bounds=(0.0, 2.5, 15.0, 30.0)).rises
    # of 3 pairs per block of rows: all rise; 1 -> 3 stays, 1 -> 20, 20 -> 22 stays; 1 -> 20; none
    assert {bound: rises[2, 4, bound] for bound in (0.0, 2.5, 15.0, 30.0)} == {
        0.0: 1.0,
        2.5: pytest.approx(1 / 3),
        15.0: pytest.approx(1 / 3),
        30.0: 0.0,
    }
    q[0, 0, 0] = 2.0  # one row with twice the scores asks for all four: 2, 6, 40, 44
    rises = peakedness(q, k, scale=1.0, rows=(1, 4), tiles=(4,), bounds=(3.5, 30.0)).rises
    assert rises[4, 4, 3.5] == pytest.approx(3 / 3) and rises[1, 4, 30.0] == pytest.approx(1 / 12)


def test_a_tile_that_a_row_does_not_see_is_no_pair():
    k = torch.zeros(1, 1, 8, 1)
    k[0, 0, 0] = 100.0
    q = torch.ones(1, 1, 8, 1)
    # under a mask rows 0..3 see the first of two tiles alone: only rows 4..7 have a tile after their first
    rises = peakedness(q, k, causal=True, scale=1.0, rows=(4,), tiles=(4,), bounds=(15.0,)).rises
    assert rises[4, 4, 15.0] == 1.0


def test_ragged_tiles_and_blocks_count():
    """Six keys in tiles of four, the last two first; three rows in blocks of two, of which the second makes its maximum rise."""
    q, k = torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 6, 1)
    q[0, 0, 2], k[0, 0, 0] = 1.0, 100.0
    assert peakedness(q, k, scale=1.0, rows=(2,), tiles=(4,), bounds=(15.0,)).rises == {(2, 4, 15.0): 1 / 2}


def test_falling_scores_rise_from_tile_to_tile_and_growing_ones_never():
    rises = {name: peakedness(*inputs(name)[:2], tiles=(64,), rows=(16,)).rises for name in ("growing", "falling")}
    assert rises["growing"][16, 64, 15.0] == 0 and rises["falling"][16, 64, 15.0] > 0.3
    assert set(families.BOUNDS) == {bound for *_, bound in rises["falling"]}
