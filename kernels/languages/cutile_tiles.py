"""cuTile

needs: cuda-tile
runs: GPU
dtypes: fp16 bf16
D: 64 128
"""

import cuda.tile as ct
import torch

LOG2_E = 1.4426950408889634
MINUS_INFINITY = float("-inf")
TILES = {64: (128, 128), 128: (128, 128)}  # D: queries and keys of a tile


# [region: step]
def step(
    Q,
    k,
    v,
    head,
    j,
    m,
    l,
    acc,
    last,
    Nk,
    scale_log2,
    D: ct.Constant[int],
    Bc: ct.Constant[int],
    MASK: ct.Constant[bool],
):
    """One tile of keys: what is summed so far becomes what is summed with it. A load names a tile; past the end it gives zeros."""
    K = ct.load(k, (head, 0, j), (1, D, Bc), order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO).reshape((D, Bc))
    S = ct.mma(Q, K, ct.zeros((Q.shape[0], Bc), ct.float32))
    if MASK:
        keys = j * Bc + ct.arange(Bc, dtype=ct.int32)[None, :]
        S = ct.where((keys < Nk) & (keys <= last), S, MINUS_INFINITY)
    m_new = ct.maximum(m, ct.max(S, 1, keepdims=True) * scale_log2)
    base = ct.where(m_new == MINUS_INFINITY, 0.0, m_new) if MASK else m_new  # a row that has seen no key yet
    alpha, P = ct.exp2(m - base), ct.exp2(S * scale_log2 - base)
    l = l * alpha + ct.sum(P, 1, keepdims=True)
    V = ct.load(v, (head, j, 0), (1, Bc, D), padding_mode=ct.PaddingMode.ZERO).reshape((Bc, D))
    return m_new, l, ct.mma(P.astype(v.dtype), V, acc * alpha)


# [end: step]


# [region: kernel]
@ct.kernel(num_worker_warps=8)
def kernel(
    q,
    k,
    v,
    o,
    lse,
    scale_log2: float,
    Nq: int,
    Nk: int,
    D: ct.Constant[int],
    Br: ct.Constant[int],
    Bc: ct.Constant[int],
    CAUSAL: ct.Constant[bool],
):
    """One tile of queries of one head: q, o (BH,Nq,D), k, v (BH,Nk,D), lse (BH,Nq)."""
    tile, head = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1)  # the longest first, where the mask is causal
    Q = ct.load(q, (head, tile, 0), (1, Br, D), padding_mode=ct.PaddingMode.ZERO).reshape((Br, D))
    m = ct.full((Br, 1), MINUS_INFINITY, ct.float32)
    l = ct.zeros((Br, 1), ct.float32)
    acc = ct.zeros((Br, D), ct.float32)
    last = ct.full((Br, 1), Nk, ct.int32)  # the last key that each query sees
    end, whole = Nk, Nk // Bc  # tiles before `whole` need no mask
    if CAUSAL:
        last = tile * Br + ct.arange(Br, dtype=ct.int32)[:, None] + (Nk - Nq)
        end = max(0, min(Nk, (tile + 1) * Br + Nk - Nq))
        whole = max(0, min(Nk, tile * Br + 1 + Nk - Nq)) // Bc
    for j in range(whole):
        m, l, acc = step(Q, k, v, head, j, m, l, acc, last, Nk, scale_log2, D, Bc, False)
    for j in range(whole, ct.cdiv(end, Bc)):
        m, l, acc = step(Q, k, v, head, j, m, l, acc, last, Nk, scale_log2, D, Bc, True)
    acc = acc / ct.where(l == 0.0, 1.0, l)
    ct.store(o, (head, tile, 0), acc.astype(o.dtype).reshape((1, Br, D)))
    ct.store(lse, (head, tile), ((m + ct.log2(l)) / LOG2_E).reshape((1, Br)))


# [end: kernel]


# [region: launch]
def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    if scale <= 0:  # the maximum is taken before S is scaled, and a masked score is -inf before and after
        q, scale = -q if scale else torch.zeros_like(q), -scale or 1.0
    Br, Bc = TILES[D]
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B * H, Nq, device=q.device)
    heads = [x.contiguous().flatten(0, 1) for x in (q, k, v, o)]
    grid, stream = (-(-Nq // Br), B * H), torch.cuda.current_stream().cuda_stream
    ct.launch(stream, grid, kernel, (*heads, lse, scale * LOG2_E, Nq, Nk, D, Br, Bc, causal))
    return o, lse.view(B, H, Nq)


# [end: launch]
