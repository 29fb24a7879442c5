"""Rungs 20 and 21 beyond the common cases: heads in groups that don't come out even, pieces of keys, refusals."""

import pytest
import torch

from helpers import KernelError, check, load, reference, rung, single
from helpers.ladder.contract import fewest_pieces
from helpers.run.reference import Case

EMULATOR_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@EMULATOR_AND_GPU
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("stem", "share", "N", "keys"),
    [
        ("20_causal_gqa", "(a.causal ? 32 : 12) << 20", 150, 150),
        ("32_ping_pong", "int64_t(32) << 20", 400, 2048),  # by the rung's own rule as many heads as of 2048 keys
    ],
)
def test_heads_that_come_in_turns(stem, share, N, keys, heads, device):
    """The L2 made so small that it holds the keys of one head, or a few: the last group may have fewer than the others."""
    source = single(stem, 64, "fp16").replace(share, f"{heads} * 4 * {keys} * 64")
    kernel = load(source=source, device=device, quiet=True)
    torch.manual_seed(heads)
    q, k, v = (torch.randn(1, H, N, 64, device=device).half() for H in (10, 5, 5))
    check(kernel, [Case(f"causal {c}", q, k, v, causal=c) for c in (True, False)]).require()


@EMULATOR_AND_GPU
@pytest.mark.parametrize("window", [2**31, 2**40])
def test_a_window_of_any_size(window, device):
    q, k, v = (torch.randn(1, 1, 70, 64, device=device).half() for _ in range(3))
    kernel = load("20_causal_gqa", device=device, quiet=True)
    o, lse = kernel(q, k, v, causal=True, window=window)
    whole = kernel(q, k, v, causal=True)
    assert torch.equal(o, whole[0]) and torch.equal(lse, whole[1])


@EMULATOR_AND_GPU
def test_the_number_of_splits_makes_no_difference(device):
    kernel = load("21_split_kv", device=device, quiet=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, H, n, 128, device=device).half() for H, n in ((8, 2), (2, 500), (2, 500)))
    cases = [Case(f"{n} splits", q, k, v, causal=True, splits=n) for n in range(1, 12)]
    check(kernel, cases).require()


def test_splits_fill_the_machine():
    """On 264 places: 64 CTAs alone are cut in 4, one wave; 300 in 4, so that the last wave is nearly full; 264 stay whole."""
    assert [fewest_pieces(ctas, 264, 1024) for ctas in (64, 300, 264, 263, 16)] == [4, 4, 1, 1, 15]
    assert fewest_pieces(8, 264, 16) == 16  # no more than there are keys for
    # Of an H100's SM, an A100's and an RTX 4090's:
    assert [rung("21").ctas(64, kb << 10) for kb in (228, 164, 100)] == [3, 2, 1]


@EMULATOR_AND_GPU
def test_what_they_do_not_take_they_refuse(device):
    x = torch.zeros(1, 1, 4, 64, device=device).half()
    with pytest.raises(ValueError, match="takes no window"):
        load("21_split_kv", device=device, quiet=True)(x, x, x, causal=True, window=2)
    with pytest.raises(ValueError, match="takes no splits"):
        load("20_causal_gqa", device=device, quiet=True)(x, x, x, splits=2)
    with pytest.raises((KernelError, ValueError), match="48"):
        y = x[..., :48].contiguous()
        load("20_causal_gqa", device=device, quiet=True)(y, y, y)


def test_the_cases_cover_them():
    names = [c.name for stem in ("20_causal_gqa", "21_split_kv") for c in reference.cases(rung(stem))]
    for words in ("D=96", "window 65", "75 packed sequences", "5 splits", "pages of 48", "scale -0.3"):
        assert any(words in name for name in names), words
