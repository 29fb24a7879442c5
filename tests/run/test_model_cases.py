"""The reference of what models ask for: masks, groups of heads, packed, cut short and paged batches, gradients; held against
PyTorch's own attention and autograd, and against wrong kernels that have to fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers import check, reference
from helpers.ladder.rung import FEATURES

RUNG = SimpleNamespace(op="attention", dtypes=("fp32",), D=(64,), features=FEATURES)
BACKWARD = SimpleNamespace(op="attention_backward", dtypes=("fp32",), D=(64,), features=("causal", "window", "gqa"))


def sdpa(
    q,
    k,
    v,
    scale=None,
    causal=False,
    window=None,
    cu_seqlens=None,
    lengths=None,
    pages=None,
    splits=None,
    deterministic=False,
    late=0,
):
    """PyTorch's attention with an explicit mask; `late` shifts the causal diagonal, a bug."""
    if cu_seqlens is not None:
        o, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
        (qs, ks) = (x.tolist() for x in cu_seqlens)
        for a, b, c, d in zip(qs, qs[1:], ks, ks[1:], strict=False):
            o[:, :, a:b], lse[:, :, a:b] = sdpa(
                q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], scale, causal, window, late=late
            )
        return o, lse
    if lengths is not None:
        outs = []
        for b, n in enumerate(lengths.tolist()):
            kb, vb = k[b : b + 1], v[b : b + 1]
            if pages is not None:
                kb, vb = (torch.cat([x[p] for p in pages[b].tolist()], 1)[None] for x in (k, v))
            outs.append(sdpa(q[b : b + 1], kb[:, :, :n], vb[:, :, :n], scale, causal, window, late=late))
        return tuple(torch.cat(x) for x in zip(*outs, strict=True))
    Nq, Nk = q.shape[2], k.shape[2]
    if Nq * Nk == 0:
        return torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    i, j = torch.arange(Nq)[:, None] + Nk - Nq + late, torch.arange(Nk)
    seen = (j <= i) & (j > i - (window or 10**9)) if causal else torch.ones(Nq, Nk, dtype=torch.bool)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = s.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return torch.where(lse.isinf()[..., None], 0.0, o), lse


def backward(q, k, v, o, lse, do, scale=None, causal=False, window=None, delta=True):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves, scale=scale, causal=causal, window=window)[0]
    grads = torch.autograd.grad(out, leaves, do)
    return tuple(x.nan_to_num(0.0) for x in grads)


def model_cases(rung):
    """The cases that the features add."""
    words = ("causal", "heads on", "packed", "cut short", "pages", "splits")
    return [c for c in reference.cases(rung) if any(w in c.name for w in words)]


def test_every_feature_has_cases():
    assert {"causal", "window", "cu_seqlens", "lengths", "pages", "splits"} <= {
        o for c in model_cases(RUNG) for o in c.options
    }


def test_pytorchs_attention_passes():
    check(sdpa, model_cases(RUNG)).require()


def test_pytorchs_gradients_pass():
    check(backward, reference.cases(BACKWARD)).require()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, **o: sdpa(q, k, v, late=1, **o),  # a query sees one key of the future
        lambda q, k, v, **o: sdpa(q, k, v, late=-1, **o),
        lambda q, k, v, causal=False, **o: sdpa(q, k, v, causal=causal and q.shape[2] == k.shape[2], **o),
        lambda q, k, v, window=None, **o: sdpa(q, k, v, window=window and window + 1, **o),
    ],
)
def test_a_wrong_mask_fails(wrong):
    assert not check(wrong, [c for c in model_cases(RUNG) if c.causal and c.cu_seqlens is None]).ok


def test_heads_in_the_wrong_groups_fail():
    def interleaved(q, k, v, **options):
        groups = q.shape[1] // k.shape[1]
        return sdpa(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), **options)

    assert not check(interleaved, [c for c in model_cases(RUNG) if "8 heads on 2" in c.name]).ok


def test_top_left_alignment_is_not_ours():
    """Nq != Nk: the last query sees the last key, not the first query the first key only."""
    q, k, v = torch.randn(1, 1, 3, 64), *(torch.randn(1, 1, 10, 64) for _ in range(2))
    ours = reference.attention(q, k, v, causal=True, dtype=torch.float32)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    last = torch.nn.functional.scaled_dot_product_attention(q[:, :, 2:], k, v)
    assert torch.allclose(ours[:, :, 2:], last, atol=1e-6) and not torch.allclose(ours, theirs)


@pytest.mark.parametrize("gone", range(3))
def test_a_wrong_gradient_fails(gone):
    def wrong(*inputs, **options):
        grads = list(backward(*inputs, **options))
        grads[gone] = grads[gone] * 1.001
        return tuple(grads)

    assert not check(wrong, itertools_first(reference.cases(BACKWARD), 3)).ok


def itertools_first(cases, n):
    return [c for c, _ in zip(cases, range(n), strict=False)]
