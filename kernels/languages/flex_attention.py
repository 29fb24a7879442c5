"""PyTorch, FlexAttention

needs: torch
runs: any machine, compiled on a GPU
dtypes: fp32 fp16 bf16
"""

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

compiled = torch.compile(flex_attention, dynamic=False)
torch._dynamo.config.recompile_limit = (
    256  # each shape is compiled; past the limit, 8, the whole of S would be formed uncompiled
)


# [region: kernel]
@functools.lru_cache(maxsize=64)
def mask(Nq, Nk, device):
    """Which tiles are computed, which of them element by element."""
    return create_block_mask(lambda b, h, i, j: j <= i + (Nk - Nq), None, None, Nq, Nk, device=device)


def attention(q, k, v, scale, causal):
    """The mask is a Python function, which is compiled into the kernel; the kernel is PyTorch's own template in Triton."""
    run = compiled if q.is_cuda else flex_attention
    block_mask = mask(q.shape[2], k.shape[2], q.device) if causal else None
    return run(q, k, v, block_mask=block_mask, scale=scale, return_aux=AuxRequest(lse=True))


# [end: kernel]


def forward(q, k, v, scale=None, causal=False):
    """O (B,H,Nq,D) in q's dtype and LSE (B,H,Nq) in float32."""
    o, aux = attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal)
    return o, aux.lse
