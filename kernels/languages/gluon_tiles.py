"""Gluon (Triton's lower level)

needs: triton
runs: GPU of the Hopper generation
dtypes: fp16 bf16
D: 64 128
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634
TILES = {64: (128, 64), 128: (128, 128)}  # D: queries and keys of a tile
STAGES = 2  # tiles of K and of V in shared memory
WARPS = 8
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.8


# [region: copy]
@gluon.jit
def fetch(box, head, row, bars, tiles, n, STAGES: gl.constexpr):
    """Starts the copy of the n-th tile into its stage, whose barrier counts the bytes that arrive."""
    bar, target = bars.index(n % STAGES), tiles.index(n % STAGES)
    mbarrier.expect(bar, box.block_type.nbytes)
    async_load(box, [head, row, 0], bar, target)


# [end: copy]


# [region: softmax]
@gluon.jit
def online_softmax(S, m, l, o, keys, last, scale_log2, masked, P_layout: gl.constexpr, dtype: gl.constexpr):
    """S becomes P, in the layout of the next product's left side. The state of each row: m, the maximum so far, l, the sum, and o."""
    if masked:
        S = gl.where(keys[None, :] <= last[:, None], S, float("-inf"))
    m_new = gl.maximum(m, gl.max(S, 1) * scale_log2)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    alpha = gl.exp2(m - base)
    P = gl.exp2(S * scale_log2 - base[:, None])
    l = l * alpha + gl.sum(P, 1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    return gl.convert_layout(P.to(dtype), P_layout), m_new, l, o


# [end: softmax]


# [region: kernel]
@gluon.jit
def kernel(
    q,
    k,
    v,
    o_out,
    lse,
    scale_log2,
    Nq,
    Nk,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    Br: gl.constexpr,
    Bc: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Br queries of one head. S of the next tile is multiplied while the softmax of this one runs."""
    dtype: gl.constexpr = q.dtype
    S_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, Bc, 16])
    O_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    P_layout: gl.constexpr = gl.DotOperandLayout(0, O_layout, 2)
    S_rows: gl.constexpr = gl.SliceLayout(1, S_layout)
    O_rows: gl.constexpr = gl.SliceLayout(1, O_layout)

    i = (gl.num_programs(0) - 1 - gl.program_id(0)) * Br  # the longest first, where the mask is causal
    head = gl.program_id(1)
    rows = i + gl.arange(0, Br, S_rows)
    cols = gl.arange(0, Bc, gl.SliceLayout(0, S_layout))
    last = gl.full([Br], Nk - 1, gl.int32, S_rows)  # the last key that each query sees
    end, whole = Nk, Nk // Bc  # tiles before `whole` need no mask
    if CAUSAL:
        last = gl.minimum(last, rows + (Nk - Nq))
        end = gl.maximum(0, gl.minimum(Nk, i + Br + Nk - Nq))
        whole = gl.maximum(0, gl.minimum(Nk, i + 1 + Nk - Nq)) // Bc
    tiles = gl.cdiv(end, Bc)

    sQ = gl.allocate_shared_memory(dtype, q.block_type.shape, q.layout)
    sK = gl.allocate_shared_memory(dtype, [STAGES] + k.block_type.shape, k.layout)
    sV = gl.allocate_shared_memory(dtype, [STAGES] + v.block_type.shape, v.layout)
    Q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    K_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    V_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(Q_bar, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(K_bars.index(stage), count=1)
        mbarrier.init(V_bars.index(stage), count=1)
    mbarrier.expect(Q_bar, q.block_type.nbytes)
    async_load(q, [head, i, 0], Q_bar, sQ)
    for stage in gl.static_range(STAGES):
        if stage < tiles:
            fetch(k, head, stage * Bc, K_bars, sK, stage, STAGES)
            fetch(v, head, stage * Bc, V_bars, sV, stage, STAGES)

    m = gl.full([Br], float("-inf"), gl.float32, S_rows)
    l = gl.zeros([Br], gl.float32, S_rows)
    o = gl.zeros([Br, D], gl.float32, O_layout)
    zero = gl.zeros([Br, Bc], gl.float32, S_layout)
    Q = sQ.reshape([Br, D])
    mbarrier.wait(Q_bar, 0)
    if tiles > 0:
        mbarrier.wait(K_bars.index(0), 0)
        S = warpgroup_mma(Q, sK.index(0).reshape([Bc, D]).permute((1, 0)), zero, use_acc=False)
        if STAGES < tiles:
            fetch(k, head, STAGES * Bc, K_bars, sK, STAGES, STAGES)
        for n in range(tiles - 1):
            mbarrier.wait(K_bars.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1)
            K = sK.index((n + 1) % STAGES).reshape([Bc, D]).permute((1, 0))
            S_next = warpgroup_mma(Q, K, zero, use_acc=False, is_async=True)  # runs beside the softmax below
            P, m, l, o = online_softmax(S, m, l, o, n * Bc + cols, last, scale_log2, n >= whole, P_layout, dtype)
            S = warpgroup_mma_wait(0, deps=(S_next,))
            if n + 1 + STAGES < tiles:
                fetch(k, head, (n + 1 + STAGES) * Bc, K_bars, sK, n + 1 + STAGES, STAGES)
            mbarrier.wait(V_bars.index(n % STAGES), (n // STAGES) & 1)
            o = warpgroup_mma(P, sV.index(n % STAGES).reshape([Bc, D]), o)
            if n + STAGES < tiles:
                fetch(v, head, (n + STAGES) * Bc, V_bars, sV, n + STAGES, STAGES)
        n = tiles - 1
        P, m, l, o = online_softmax(S, m, l, o, n * Bc + cols, last, scale_log2, n >= whole, P_layout, dtype)
        mbarrier.wait(V_bars.index(n % STAGES), (n // STAGES) & 1)
        o = warpgroup_mma(P, sV.index(n % STAGES).reshape([Bc, D]), o)

    l_safe = gl.convert_layout(gl.where(l == 0, 1.0, l), O_rows)
    at_rows = i + gl.arange(0, Br, O_rows)
    at_cols = gl.arange(0, D, gl.SliceLayout(0, O_layout))
    at = o_out + (head.to(gl.int64) * Nq + at_rows[:, None]) * D + at_cols[None, :]
    gl.store(at, (o / l_safe[:, None]).to(dtype), mask=at_rows[:, None] < Nq)
    gl.store(lse + head * Nq + rows, (m + gl.log2(l)) * 0.6931471805599453, mask=rows < Nq)


# [end: kernel]


# [region: launch]
def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    if scale <= 0:  # the maximum is taken before S is scaled, and a masked score is -inf before and after
        q, scale = -q if scale else torch.zeros_like(q), -scale or 1.0
    Br, Bc = TILES[D]
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B, H, Nq, device=q.device)
    type16 = gl.float16 if q.dtype == torch.float16 else gl.bfloat16
    boxes = []
    for x, n in ((q, Br), (k, Bc), (v, Bc)):
        heads, layout = x.contiguous().flatten(0, 1), gl.NVMMASharedLayout.get_default_for([1, n, D], type16)
        boxes.append(TensorDescriptor(heads, list(heads.shape), list(heads.stride()), [1, n, D], layout))
    grid = triton.cdiv(Nq, Br), B * H
    kernel[grid](*boxes, o, lse, scale * LOG2_E, Nq, Nk, D, causal, Br, Bc, STAGES, num_warps=WARPS)
    return o, lse


# [end: launch]
