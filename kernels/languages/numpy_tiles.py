"""NumPy

needs: numpy
runs: any machine
dtypes: fp32
"""

import numpy as np
import torch

Br, Bc = 64, 64  # queries and keys of a tile


# [region: kernel]
def attention(Q, K, V, scale, causal):
    """One head: Q (Nq, d), K and V (Nk, d) give O (Nq, d) and LSE (Nq)."""
    O, LSE = np.zeros_like(Q), np.zeros(len(Q), Q.dtype)
    for i in range(0, len(Q), Br):
        q, last = (
            Q[i : i + Br],
            np.arange(i, min(i + Br, len(Q)))[:, None] + len(K) - len(Q),
        )  # the last key of each query
        o, l, m = np.zeros_like(q), np.zeros((len(q), 1), q.dtype), np.full((len(q), 1), -np.inf, q.dtype)
        for j in range(0, len(K), Bc):
            s = scale * (q @ K[j : j + Bc].T)
            if causal:
                s[np.arange(j, j + s.shape[1]) > last] = -np.inf
            m_new = np.maximum(m, s.max(1, keepdims=True))
            base = np.where(np.isinf(m_new), 0, m_new)  # a row that has seen no key yet
            alpha, p = np.exp(m - base), np.exp(s - base)
            l, o, m = alpha * l + p.sum(1, keepdims=True), alpha * o + p @ V[j : j + Bc], m_new
        O[i : i + Br] = o / np.where(l == 0, 1, l)
        with np.errstate(divide="ignore"):
            LSE[i : i + Br] = (m + np.log(l))[:, 0]
    return O, LSE


# [end: kernel]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) and LSE (B,H,Nq) of q (B,H,Nq,D), k and v (B,H,Nk,D)."""
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    heads = zip(*(x.numpy().reshape(-1, *x.shape[2:]) for x in (q, k, v)), strict=True)
    O, LSE = zip(*(attention(*head, scale, causal) for head in heads), strict=True)
    return torch.from_numpy(np.stack(O)).view(q.shape), torch.from_numpy(np.stack(LSE)).view(q.shape[:3])
