"""Helion

needs: helion
runs: GPU
dtypes: fp16 bf16
D: 64 128
"""

import functools

import helion
import helion.language as hl
import torch

LOG2_E = 1.4426950408889634
TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}  # D: queries and keys of a tile, warps, stages of the loop


# [region: kernel]
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_log2: float, causal: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (BH,Nq,D), k and v (BH,Nk,D). Sizes of tiles, indices and the order of CTAs are the compiler's, or the tuner's, to choose."""
    BH, Nq, D = q.shape
    Nk, D = k.size(1), hl.specialize(D)
    shift = Nk - Nq if causal else Nk  # query n sees the keys up to n + shift
    o, lse = torch.empty_like(q), torch.empty([BH, Nq], dtype=torch.float32, device=q.device)
    for head, rows in hl.tile([BH, Nq], block_size=[1, None]):
        at = head.begin
        Q = q[at, rows, :]
        m = hl.full([rows], float("-inf"), dtype=torch.float32)
        l = hl.zeros([rows], dtype=torch.float32)
        acc = hl.zeros([rows, D], dtype=torch.float32)
        for keys in hl.tile(0, min(Nk, rows.begin + rows.block_size + shift)):  # those that the tile's last query sees
            S = scale_log2 * hl.dot(Q, k[at, keys, :].T, out_dtype=torch.float32)
            sees = (keys.index[None, :] < Nk) & (keys.index[None, :] <= rows.index[:, None] + shift)
            S = torch.where(sees, S, float("-inf"))
            m_new = torch.maximum(m, torch.amax(S, -1))
            base = torch.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
            alpha, P = torch.exp2(m - base), torch.exp2(S - base[:, None])
            l = l * alpha + P.sum(-1)
            acc = hl.dot(P.to(v.dtype), v[at, keys, :], acc=acc * alpha[:, None])
            m = m_new
        o[at, rows, :] = (acc / torch.where(l == 0, 1.0, l)[:, None]).to(o.dtype)
        lse[at, rows] = (m + torch.log2(l)) / LOG2_E
    return o, lse


# [end: kernel]


@functools.cache
def compiled(dtype, D, causal, tile, device):
    """The kernel with these choices made; without them Helion's tuner makes them, in some minutes. Of its example's tensors it keeps
    that a length is 1, and that two are the same."""
    Br, Bc, warps, stages = tile
    config = helion.Config(block_sizes=[Br, Bc], num_warps=warps, num_stages=stages)
    q, k, v = (torch.empty(2, N, D, dtype=dtype, device=device) for N in (300, 500, 500))
    return helion.kernel(attention, config=config, static_shapes=False).bind((q, k, v, 1.0, causal))


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    D = q.shape[-1]
    run = compiled(q.dtype, D, causal, TILES[D], q.device)
    o, lse = run(*heads, (D**-0.5 if scale is None else scale) * LOG2_E, causal)
    return o.view(q.shape), lse.view(q.shape[:3])
