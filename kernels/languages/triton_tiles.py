"""Triton

needs: triton
runs: GPU; on the CPU by its interpreter
dtypes: fp16 bf16
D: 64 128
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}  # D: queries and keys of a tile, warps, stages of the loop


# [region: step]
@triton.jit
def step(
    Q,
    k,
    v,
    b,
    h,
    j,
    o,
    l,
    m,
    last,
    Nk,
    scale_log2,
    D: tl.constexpr,
    Bc: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One tile of keys: what is summed so far becomes what is summed with it."""
    S = tl.dot(Q, k.load([b, h, j, 0]).reshape(Bc, D).T)
    if MASK:
        keys = j + tl.arange(0, Bc)
        sees = keys[None, :] < Nk
        if CAUSAL:
            sees = sees & (keys[None, :] <= last[:, None])
        S = tl.where(sees, S, float("-inf"))
    m_new = tl.maximum(m, tl.max(S, 1) * scale_log2)
    base = tl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
    P = tl.exp2(S * scale_log2 - base[:, None])
    alpha = tl.exp2(m - base)
    l = l * alpha + tl.sum(P, 1)
    V = v.load([b, h, j, 0]).reshape(Bc, D)
    o = tl.dot(P.to(V.dtype), V, o * alpha[:, None])
    return o, l, m_new


# [end: step]


# [region: kernel]
@triton.jit
def kernel(
    q,
    k,
    v,
    o_out,
    lse,
    scale_log2,
    H,
    Nq,
    Nk,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    Br: tl.constexpr,
    Bc: tl.constexpr,
):
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * Br  # the longest first, where the mask is causal
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    rows = i + tl.arange(0, Br)
    last = rows + (Nk - Nq)  # the last key that each query sees
    Q = q.load([b, h, i, 0]).reshape(Br, D)
    o = tl.zeros([Br, D], tl.float32)
    l = tl.zeros([Br], tl.float32)
    m = tl.full([Br], float("-inf"), tl.float32)
    end, whole = Nk, Nk // Bc * Bc  # tiles before `whole` need no mask
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(Nk, i + Br + Nk - Nq))
        whole = tl.maximum(0, tl.minimum(Nk, i + 1 + Nk - Nq)) // Bc * Bc
    for j in tl.range(0, whole, Bc):
        o, l, m = step(Q, k, v, b, h, j, o, l, m, last, Nk, scale_log2, D, Bc, False, CAUSAL)
    for j in tl.range(whole, end, Bc):
        o, l, m = step(Q, k, v, b, h, j, o, l, m, last, Nk, scale_log2, D, Bc, True, CAUSAL)
    o = o / tl.where(l == 0, 1.0, l)[:, None]
    o_out.store([b, h, i, 0], o.to(Q.dtype).reshape(1, 1, Br, D))
    tl.store(lse + tl.program_id(1) * Nq + rows, (m + tl.log2(l)) * 0.6931471805599453, mask=rows < Nq)


# [end: kernel]


# [region: launch]
def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    B, H, Nq, D = q.shape
    scale = D**-0.5 if scale is None else scale
    if scale <= 0:  # the maximum is taken before S is scaled, and a masked score is -inf before and after
        q, scale = -q if scale else torch.zeros_like(q), -scale or 1.0
    Br, Bc, warps, stages = TILES[D]
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B, H, Nq, device=q.device)
    boxes = [
        TensorDescriptor.from_tensor(x.contiguous(), [1, 1, n, D]) for x, n in ((q, Br), (k, Bc), (v, Bc), (o, Br))
    ]
    grid = triton.cdiv(Nq, Br), B * H
    kernel[grid](*boxes, lse, scale * LOG2_E, H, Nq, k.shape[2], D, causal, Br, Bc, num_warps=warps, num_stages=stages)
    return o, lse


# [end: launch]
