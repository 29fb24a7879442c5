"""PyTorch, the formula under torch.compile

needs: torch
runs: any machine
dtypes: fp32 fp16 bf16
"""

import torch


# [region: kernel]
def product(a, b):
    """a (BH,M,K) times b (BH,K,N), summed and kept in float32, which `a @ b` would round to a's dtype."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.compile
def attention(q, k, v, scale, causal):
    """The whole of S is formed: two products, and what lies between them as one kernel of the compiler's own making."""
    s = product(q, k.mT) * scale
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in s.shape[-2:])
        s = torch.where(j <= i[:, None] + (len(j) - len(i)), s, -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(m == -torch.inf, 0, m))  # a row that sees no key has m = -inf
    l = p.sum(-1, keepdim=True)
    return product((p / torch.where(l == 0, 1, l)).to(v.dtype), v), (m + torch.log(l)).squeeze(-1)


# [end: kernel]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    o, lse = attention(*heads, q.shape[-1] ** -0.5 if scale is None else scale, causal)
    return o.to(q.dtype).view(q.shape), lse.view(q.shape[:3])
