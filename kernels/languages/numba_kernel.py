"""Numba-CUDA

needs: numba-cuda
runs: GPU; on the CPU by its simulator
dtypes: fp32
D: 64 128
"""

import math

import numpy as np
import torch
from numba import cuda, float32

Br, Bc = 64, 32  # queries of a block, one per thread; keys of a tile


# [region: kernel]
def attention(d):
    """The kernel for one head dimension: the sizes of arrays are constants in Numba."""

    @cuda.jit
    def kernel(Q, K, V, O, LSE, scale, causal):
        t, bh = cuda.threadIdx.x, cuda.blockIdx.y
        i, Nq, Nk = cuda.blockIdx.x * Br + t, Q.shape[1], K.shape[1]
        last = i + Nk - Nq if causal else Nk - 1  # the last key that this query sees
        most = min(Nk, (cuda.blockIdx.x + 1) * Br + Nk - Nq) if causal else Nk  # keys that the block's last query sees
        k = cuda.shared.array((Bc, d), float32)  # on lines of their own: by them the simulator knows them apart
        v = cuda.shared.array((Bc, d), float32)
        q, o, s = cuda.local.array(d, float32), cuda.local.array(d, float32), cuda.local.array(Bc, float32)
        m, l = float32(-math.inf), float32(0)
        for c in range(d):
            q[c] = Q[bh, i, c] * scale if i < Nq else float32(0)
            o[c] = float32(0)
        for j0 in range(0, most, Bc):
            cuda.syncthreads()  # everyone has read the tile before
            for e in range(t, Bc * d, Br):
                j, c = e // d, e % d
                k[j, c] = K[bh, j0 + j, c] if j0 + j < Nk else float32(0)
                v[j, c] = V[bh, j0 + j, c] if j0 + j < Nk else float32(0)
            cuda.syncthreads()  # the tile has been written
            m_new = m
            for j in range(Bc):
                x = float32(0)
                for c in range(d):
                    x += q[c] * k[j, c]
                s[j] = x if j0 + j <= last and j0 + j < Nk else float32(-math.inf)
                m_new = max(m_new, s[j])
            if m_new > -math.inf:  # this query has seen a key
                alpha = math.exp(m - m_new)
                l *= alpha
                for c in range(d):
                    o[c] *= alpha
                for j in range(Bc):
                    p = math.exp(s[j] - m_new)
                    l += p
                    for c in range(d):
                        o[c] += p * v[j, c]
                m = m_new
        if i < Nq:
            for c in range(d):
                O[bh, i, c] = o[c] / l if l > 0 else float32(0)
            LSE[bh, i] = m + math.log(l) if l > 0 else float32(-math.inf)

    return kernel


KERNELS = {d: attention(d) for d in (64, 128)}
# [end: kernel]


# [region: launch]
def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) and LSE (B,H,Nq) in float32."""
    B, H, Nq, D = q.shape
    o, lse = torch.empty(q.shape, device=q.device), torch.empty(B, H, Nq, device=q.device)
    heads = [x.contiguous().flatten(0, 1).detach() for x in (q, k, v)]
    outs = [o.flatten(0, 1), lse.flatten(0, 1)]
    arrays = [cuda.as_cuda_array(x) if x.is_cuda else x.numpy() for x in (*heads, *outs)]
    grid = (Nq + Br - 1) // Br, B * H
    KERNELS[D][grid, Br](*arrays, np.float32(D**-0.5 if scale is None else scale), causal)
    return o, lse


# [end: launch]
