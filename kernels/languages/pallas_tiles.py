"""Pallas (JAX)

needs: jax
runs: GPU, through Triton; on the CPU by its interpreter
dtypes: fp16 bf16 fp32
D: 64 128
"""

import functools
import math

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

TILES = {64: (128, 64, 8, 3), 128: (128, 128, 8, 3)}  # D: queries and keys of a tile, warps, stages of the loop
ON_GPU = jax.default_backend() == "gpu"


# [region: kernel]
def kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, Nq, Nk, Br, Bc, scale, causal):
    """One query tile of one head: q_ref (Br, D), k_ref and v_ref (all keys, D)."""
    i = pl.program_id(1) * Br
    q, last = q_ref[...], i + jnp.arange(Br)[:, None] + (Nk - Nq if causal else Nk)  # the last key of each query

    def step(tile, state):
        o, l, m = state
        keys = pl.ds(tile * Bc, Bc)
        s = scale * gpu.dot(q, k_ref[keys, :], trans_b=True, precision="highest" if q.dtype == jnp.float32 else None)
        j = tile * Bc + jnp.arange(Bc)[None, :]
        s = jnp.where((j <= last) & (j < Nk), s, -math.inf)
        m_new = jnp.maximum(m, s.max(1))
        base = jnp.where(m_new == -math.inf, 0, m_new)  # a row that has seen no key yet
        alpha, p = jnp.exp(m - base), jnp.exp(s - base[:, None])
        v = v_ref[keys, :]
        o = alpha[:, None] * o + gpu.dot(p.astype(v.dtype), v, precision="highest" if v.dtype == jnp.float32 else None)
        return o, alpha * l + p.sum(1), m_new

    sees = jnp.clip(i + Br + Nk - Nq, 0, Nk) if causal else Nk  # keys that the tile's last query sees
    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros(Br, jnp.float32), jnp.full(Br, -math.inf, jnp.float32)
    o, l, m = jax.lax.fori_loop(0, pl.cdiv(sees, Bc), step, start)
    o_ref[...] = (o / jnp.where(l == 0, 1, l)[:, None]).astype(o_ref.dtype)
    lse_ref[...] = m + jnp.log(l)


# [end: kernel]


# [region: launch]
@functools.partial(jax.jit, static_argnames=("scale", "causal", "tile"))
def attention(q, k, v, scale, causal, tile):
    """q (BH,Nq,D), k and v (BH,Nk,D) give O and LSE. A block has to lie inside its array, so they are padded to whole tiles."""
    (BH, Nq, D), Nk = q.shape, k.shape[1]
    Br, Bc, warps, stages = tile
    q, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % n), (0, 0))) for x, n in ((q, Br), (k, Bc), (v, Bc)))
    rows, keys = q.shape[1], pl.BlockSpec((None, k.shape[1], D), lambda bh, i: (bh, 0, 0))
    o, lse = pl.pallas_call(
        functools.partial(kernel, Nq=Nq, Nk=Nk, Br=Br, Bc=Bc, scale=scale, causal=causal),
        grid=(BH, rows // Br),
        in_specs=[pl.BlockSpec((None, Br, D), lambda bh, i: (bh, i, 0)), keys, keys],
        out_specs=[
            pl.BlockSpec((None, Br, D), lambda bh, i: (bh, i, 0)),
            pl.BlockSpec((None, Br), lambda bh, i: (bh, i)),
        ],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((BH, rows), jnp.float32)],
        compiler_params=gpu.CompilerParams(num_warps=warps, num_stages=stages) if ON_GPU else None,
        interpret=not ON_GPU,
    )(q, k, v)
    return o[:, :Nq], lse[:, :Nq]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    heads = (jax.dlpack.from_dlpack(x.detach().contiguous().flatten(0, 1)) for x in (q, k, v))
    D = q.shape[-1]
    o, lse = attention(*heads, D**-0.5 if scale is None else scale, causal, TILES[D])
    return torch.from_dlpack(o).view(q.shape), torch.from_dlpack(lse).view(q.shape[:3])


# [end: launch]
