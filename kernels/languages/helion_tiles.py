"""Helion

needs: helion
runs: GPU
dtypes: fp16 bf16
D: 64 128
tried: its Triton was generated and read, without and with a mask; not yet run on a GPU
"""

import helion
import helion.language as hl
import torch

LOG2_E = 1.4426950408889634


# [region: kernel]
@helion.kernel(config=helion.Config(block_sizes=[1, 128, 64], num_warps=8, num_stages=3), static_shapes=False)
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_log2: float, causal: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (BH,Nq,D), k and v (BH,Nk,D). Sizes of tiles, indices and the order of CTAs are the compiler's, or the tuner's, to choose."""
    BH, Nq, D = q.shape
    Nk, D = k.size(1), hl.specialize(D)
    o, lse = torch.empty_like(q), torch.empty([BH, Nq], dtype=torch.float32, device=q.device)
    for head, rows in hl.tile([BH, Nq]):
        Q = q[head, rows, :]
        m = hl.full([head, rows], float("-inf"), dtype=torch.float32)
        l = hl.zeros([head, rows], dtype=torch.float32)
        acc = hl.zeros([head, rows, D], dtype=torch.float32)
        end = min(Nk, rows.end + Nk - Nq) if causal else Nk  # keys that the tile's last query sees
        for keys in hl.tile(0, end):
            start = hl.zeros([head, rows, keys], dtype=torch.float32)  # without it S would be rounded to q's dtype
            S = scale_log2 * torch.baddbmm(start, Q, k[head, keys, :].transpose(1, 2))
            last = rows.index[:, None] + (Nk - Nq if causal else Nk)  # the last key that each query sees
            sees = (keys.index[None, :] < Nk) & (keys.index[None, :] <= last)
            S = torch.where(sees[None, :, :], S, float("-inf"))
            m_new = torch.maximum(m, torch.amax(S, -1))
            base = torch.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
            alpha, P = torch.exp2(m - base), torch.exp2(S - base[:, :, None])
            l = l * alpha + P.sum(-1)
            acc = torch.baddbmm(acc * alpha[:, :, None], P.to(v.dtype), v[head, keys, :])
            m = m_new
        o[head, rows, :] = (acc / torch.where(l == 0, 1.0, l)[:, :, None]).to(o.dtype)
        lse[head, rows] = (m + torch.log2(l)) / LOG2_E
    return o, lse


# [end: kernel]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    o, lse = attention(*heads, (q.shape[-1] ** -0.5 if scale is None else scale) * LOG2_E, causal)
    return o.view(q.shape), lse.view(q.shape[:3])
