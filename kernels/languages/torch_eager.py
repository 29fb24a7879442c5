"""PyTorch, a loop over tiles

needs: torch
runs: any machine
dtypes: fp32 fp16 bf16
"""

import torch

Bc = 512  # keys of a tile; all queries of all heads take part in each operation


# [region: kernel]
def product(a, b):
    """a (BH,M,K) times b (BH,K,N), summed and kept in float32, which `a @ b` would round to a's dtype."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def attention(q, k, v, scale, causal):
    """q (BH,Nq,D), k and v (BH,Nk,D) give O (BH,Nq,D) and LSE (BH,Nq,1), both float32."""
    Nq, Nk = q.shape[1], k.shape[1]
    last = torch.arange(Nq, device=q.device)[:, None] + (Nk - Nq)  # the last key of each query
    o, l = q.new_zeros(q.shape, dtype=torch.float32), q.new_zeros((*q.shape[:2], 1), dtype=torch.float32)
    m = torch.full_like(l, -torch.inf)
    for j in range(0, Nk, Bc):
        s = scale * product(q, k[:, j : j + Bc].mT)
        if causal:
            s.masked_fill_(torch.arange(j, j + s.shape[-1], device=q.device) > last, -torch.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = m_new.masked_fill(m_new == -torch.inf, 0)  # a row that has seen no key yet
        alpha, p = torch.exp(m - base), torch.exp(s - base)
        l = alpha * l + p.sum(-1, keepdim=True)
        o = alpha * o + product(p.to(v.dtype), v[:, j : j + Bc])
        m = m_new
    return o / l.masked_fill(l == 0, 1), m + torch.log(l)


# [end: kernel]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    o, lse = attention(*heads, q.shape[-1] ** -0.5 if scale is None else scale, causal)
    return o.to(q.dtype).view(q.shape), lse.view(q.shape[:3])
