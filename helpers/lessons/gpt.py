"""A small GPT over bytes, in plain PyTorch, whose attention can be exchanged; and text from it with a KV cache.

Shapes: B sequences of N tokens; H query heads on Hkv heads of K and V, D numbers each. The layout is GPT-2's (Radford et al.
2019) with grouped queries (Ainslie et al. 2023, arXiv 2305.13245) and rotary positions (Su et al. 2021, arXiv 2104.09864).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..run.op import loaded, operator

BYTES = 256  # the vocabulary
D = 64  # of a head


@dataclass(frozen=True)
class Attention:
    """The two ways in which a model attends.

    whole: q (B,H,N,D), k and v (B,Hkv,N,D) -> o (B,H,N,D), causal, with a gradient: training, and the reading of a prompt.
    step: q (B,H,N,D), k and v (B,Hkv,capacity,D), lengths (B) int32 -> o (B,H,N,D): the N newest tokens of each sequence, mostly one,
    against the first `lengths` rows of its cache, their own included; each sees those up to its own.
    """

    whole: Callable[[Tensor, Tensor, Tensor], Tensor]
    step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sdpa(backend: SDPBackend | None = None) -> Attention:
    """PyTorch's own; `backend` is the one that `whole` has to use. A step takes whichever accepts a mask."""

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend else nullcontext():
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        ends = lengths[:, None] - torch.arange(
            q.shape[2] - 1, -1, -1, device=q.device
        )  # (B, N): the keys of each query
        seen = torch.arange(k.shape[2], device=k.device) < ends[:, None, :, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    return Attention(whole, step)


def kernels(forward: str = "20_causal_gqa") -> Attention:
    """Ours: rung `forward` and the rung of its backward pass, 23_backward_mma (for 32_ping_pong, which needs a Hopper GPU:
    33_backward_wgmma); 21_split_kv for a step. 16-bit tensors only."""
    causal = operator(forward)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v, causal=True)[0]

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return loaded("21_split_kv", q.device.type)(q, k, v, lengths=lengths, causal=q.shape[2] > 1)[0]

    return Attention(whole, step)


class Cache:
    """K and V (B,Hkv,capacity,D) of every layer, and how many rows of each sequence are in use: lengths (B) int32. `empty` says of
    all of them that none is, without asking the GPU."""

    def __init__(self, size: Size, B: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (size.layers, B, size.kv_heads, size.context, D)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths, self.empty = torch.zeros(B, dtype=torch.int32, device=device), True
        self.rows = torch.arange(B, device=device)[:, None]

    def positions(self, N: int) -> Tensor:
        """(B,N): where the next N tokens of each sequence go."""
        return self.lengths[:, None] + torch.arange(N, device=self.lengths.device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts k and v (B,Hkv,N,D) there; the layer's whole K and V."""
        at = self.positions(k.shape[2])
        self.k[layer][self.rows, :, at] = k.transpose(1, 2)
        self.v[layer][self.rows, :, at] = v.transpose(1, 2)
        return self.k[layer], self.v[layer]

    def keep(self, count: Tensor | int) -> None:
        """So many rows more of each sequence, (B) or one number, are in use. In place: a step that is captured finds them there."""
        self.lengths += count
        self.empty = False


@dataclass(frozen=True)
class Size:
    """Of a model: its width is heads * D."""

    layers: int
    heads: int
    kv_heads: int
    context: int  # positions there are

    @property
    def width(self) -> int:
        return self.heads * D


def turns(positions: int) -> Tensor:
    """(positions, D/2) complex: pair j of a row at position n is multiplied by e^(i n theta_j), theta_j = 10000^(-2j/D)."""
    theta = 10_000 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), theta)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x (...,N,heads,D), its pairs of numbers as complex ones multiplied by turns (...,N,D/2), in fp32; in x's dtype again."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns.unsqueeze(-2)).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """Attention, then a perceptron, each of a normed x (B,N,width) and added to it."""

    def __init__(self, size: Size, layer: int) -> None:
        super().__init__()
        width, self.layer, self.kv_heads = size.width, layer, size.kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (size.heads + 2 * size.kv_heads) * D, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, turns: Tensor, attention: Attention, cache: Cache | None = None) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, D))  # (B, N, H + 2 Hkv, D)
        qk, v = heads.tensor_split([-self.kv_heads], dim=2)
        q, k = rotate(qk, turns).tensor_split([-self.kv_heads], dim=2)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or Hkv, N, D), no copy
        if cache is not None:
            K, V = cache.write(self.layer, k, v)
        if cache is None or cache.empty:
            o = attention.whole(q, k, v)
        else:
            o = attention.step(q, K, V, cache.lengths + x.shape[1])
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """tokens (B,N) -> logits (B,N,256) fp32. `attention` may be exchanged at any time: it has no parameters."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.size, self.attention = size, attention
        self.token = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size, layer) for layer in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)  # a product is then as large as what goes in
        self.register_buffer("turns", turns(size.context), persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        N = tokens.shape[1]
        turns = self.turns[:N] if cache is None else self.turns[cache.positions(N)]
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, turns, self.attention, cache)
        with torch.autocast(x.device.type, enabled=False):  # 16-bit logits would tie
            return self.head(self.norm(x))


@torch.no_grad()
def generate(
    model: GPT, prompts: Sequence[bytes], count: int, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """The likeliest next byte, `count` times, after each prompt: tokens (B,count), and the logits (B,count,256) they come from.

    Products and the cache are in `dtype`. ValueError for an empty prompt, or where prompt and text exceed the context.
    """
    size, device = model.size, model.head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=device)
    longest = max(len(p) for p in prompts)
    if not all(prompts) or longest + count > size.context:
        raise ValueError(f"prompts of {lengths.tolist()} bytes and {count} more; a context has 1 to {size.context}")
    padded = torch.tensor([list(p.ljust(longest, b"\0")) for p in prompts], device=device)
    cache, logits = Cache(size, len(prompts), dtype, device), []
    with torch.autocast(device.type, dtype):
        # What stands behind a shorter prompt is seen by none of its bytes, and is overwritten by its own next ones.
        logits.append(model(padded, cache)[cache.rows[:, 0], lengths.long() - 1])
        cache.keep(lengths)
        for _ in range(count - 1):
            logits.append(model(logits[-1].argmax(-1, keepdim=True), cache)[:, 0])
            cache.keep(1)
    found = torch.stack(logits, 1)
    return found.argmax(-1), found
