"""What a right answer is: attention and softmax in float64, the same in plain PyTorch at the input's own precision, and the inputs worth trying.

Notation as in FlashAttention (arXiv 2205.14135, section 3.1): S = scale Q Kᵀ, P = softmax(S) by rows, O = P V, and
LSE_i = log Σ_j exp(S_ij), the natural logarithm. A row of S that is −inf throughout has P = 0, O = 0 and LSE = −inf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 25  # elements of S held at a time: 256 MB in float64
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EDGES = (31, 32, 33, 63, 64, 65, 127, 128, 129)  # tile edges, and one off them


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """P and LSE of the last dimension of `s`, at the precision of `s`."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)  # a fully masked row: exp(-inf - 0) = 0, never exp(-inf + inf)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    return torch.where(l > 0, p / l, 0.0), (m + torch.log(l)).squeeze(-1)


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """float32 products in float32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _by_query_rows(q: Tensor, k: Tensor, v: Tensor, one_chunk) -> tuple[Tensor, Tensor]:
    """O and LSE of `one_chunk(q rows, k, v)`, called on as many query rows as keep S within CHUNK elements."""
    rows = max(1, CHUNK // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    with full_fp32():
        parts = [one_chunk(q[:, :, i : i + rows], k, v) for i in range(0, q.shape[2], rows)]
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q Kᵀ) V and its LSE, in `dtype` throughout.

    q (B,H,Nq,D), k and v (B,H,Nk,D) with Nk >= 1, any strides; scale defaults to 1/√D.
    Returns O (B,H,Nq,D) and LSE (B,H,Nq), both `dtype`. S is formed for some query rows at a time, so memory is O(N).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k.to(dtype), v.to(dtype)

    def rows(q, k, v):
        p, lse = _softmax((q.to(dtype) @ k.mT) * scale)
        return p @ v, lse

    return _by_query_rows(q, k, v, rows)


def softmax(s: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """softmax(s) along the last dimension and its LSE, in `dtype`. s (..., N), finite or −inf; P (..., N), LSE (...)."""
    return _softmax(s.to(dtype))


def same_precision(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention as plain PyTorch computes it at the inputs' own precision (TF32 off): the yardstick of the error rule.

    float32 inputs: everything in float32. 16-bit inputs: what tensor cores do, products of 16-bit numbers summed in
    float32, P and O rounded to 16 bits (stricter than rounding S to 16 bits too, which no fused kernel does).
    Shapes as in `attention`; O has the inputs' dtype, LSE is float32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype

    def rows(q, k, v):
        s = (q.float() @ k.float().mT) * scale
        p = torch.softmax(s, -1).nan_to_num(0.0)
        return (p.to(dtype).float() @ v.float()).to(dtype), torch.logsumexp(s, -1)

    return _by_query_rows(q, k, v, rows)


def same_precision_softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """torch.softmax and torch.logsumexp of s (..., N) at its own precision; fully masked rows give 0 and −inf."""
    return torch.softmax(s, -1).nan_to_num(0.0), torch.logsumexp(s, -1)


@dataclass(frozen=True)
class Case:
    """One input to try. Attention: q, k, v (B,H,N,D) and scale (None: 1/√D). Softmax: s (..., N)."""

    name: str
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    s: Tensor | None = None
    scale: float | None = None

    @property
    def op(self) -> str:
        """ "softmax" or "attention"."""
        return "attention" if self.s is None else "softmax"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors a kernel is called with, in order."""
        return (self.q, self.k, self.v) if self.s is None else (self.s,)

    @property
    def options(self) -> dict[str, float]:
        """The keyword arguments a kernel is called with."""
        return {} if self.scale is None else {"scale": self.scale}

    def empty_outputs(self, fill: float = torch.nan) -> tuple[Tensor, Tensor]:
        """O (or P) and LSE of this case's shapes, full of `fill`."""
        first = self.inputs[0]
        o = torch.full(first.shape, fill, dtype=first.dtype, device=first.device)
        return o, torch.full(first.shape[:-1], fill, dtype=torch.float32, device=first.device)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The float64 answer."""
        return softmax(self.s) if self.s is not None else attention(self.q, self.k, self.v, self.scale)

    def baseline(self) -> tuple[Tensor, Tensor]:
        """The answer of plain PyTorch at the inputs' precision."""
        if self.s is not None:
            return same_precision_softmax(self.s)
        return same_precision(self.q, self.k, self.v, self.scale)

    def magnitude(self) -> tuple[float, float]:
        """The size of what is summed on the way to O and to LSE, whose float32 rounding no kernel can avoid.

        O is a sum of P_ij V_jd: max of Σ_j P_ij |V_jd|. LSE inherits the rounding of the dot products: the bound
        scale · max ‖q_i‖ · max ‖k_j‖ on every score (Cauchy-Schwarz), or 1 where that is less.
        Softmax: max P, which is at most 1, and the largest finite |s|, at least 1.
        """
        if self.s is not None:
            finite = self.s.double().abs()
            return 1.0, max(1.0, finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0)
        scale = abs(self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        score = scale * self.q.double().norm(dim=-1).max().item() * self.k.double().norm(dim=-1).max().item()
        o, _ = attention(self.q, self.k, self.v.abs(), self.scale, dtype=torch.float32)
        return o.max().item(), max(1.0, score)


def cases(rung=None, device: str | torch.device = "cpu", size: str = "small") -> Iterator[Case]:
    """The inputs every kernel must survive, the same on every machine (fixed seeds).

    rung: anything with `op`, `dtypes` and `D` (a Rung; an empty or missing `D` allows any); None: float32 attention.
    size: "small" has N up to 130 and runs on the emulator in seconds; "full" is for a GPU and adds long rows, more heads
    than a grid dimension holds (65 535) and larger batches.
    Attention scores stay finite in float32. Softmax scores are finite or −inf, and a row may be −inf throughout.
    Raises ValueError for another size or an operation other than attention and softmax.
    """
    if size not in ("small", "full"):
        raise ValueError(f'cases() has size "small" and "full", not {size!r}')
    op = getattr(rung, "op", "attention")
    if op not in ("attention", "softmax"):
        raise ValueError(f"no cases for the operation {op!r}; there are attention and softmax")
    dtypes = tuple(getattr(rung, "dtypes", ()) or ("fp32",))
    D = tuple(getattr(rung, "D", ()) or (32, 64, 128))
    for name in dtypes:
        made = _softmax_cases(size) if op == "softmax" else _attention_cases(D, size, DTYPES[name])
        suffix = "" if len(dtypes) == 1 else f", {name}"
        for case in made:
            moved = {f: _move(getattr(case, f), DTYPES[name], device) for f in "qkvs" if getattr(case, f) is not None}
            yield Case(case.name + suffix, scale=case.scale, **moved)


def _move(x: Tensor, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """x in another dtype and place with the strides it has (a plain .to() would drop the gaps of a packed layout)."""
    if x.dtype == dtype and x.device == torch.device(device):
        return x
    length = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((length,), (1,)).to(device=device, dtype=dtype)
    return flat.as_strided(x.shape, x.stride(), 0)


def _attention_cases(D: tuple[int, ...], size: str, dtype: torch.dtype) -> Iterator[Case]:
    full = size == "full"
    n = 1000 if full else 70  # never a multiple of a tile
    B, H = (2, 8) if full else (1, 2)
    seed = 0

    def randn(*shape: int) -> Tensor:
        nonlocal seed
        seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def qkv(Nq: int, Nk: int, d: int, B: int = B, H: int = H) -> tuple[Tensor, Tensor, Tensor]:
        return randn(B, H, Nq, d), randn(B, H, Nk, d), randn(B, H, Nk, d)

    for d in D:
        yield Case(f"random, D={d}", *qkv(n, n, d))
    d = 64 if 64 in D else D[0]

    for shift, words in (
        (100.0, "all scores shifted by 100"),
        (-1e4, "all scores about -1e4"),
        (1e4, "all scores about 1e4"),
    ):
        q, k, v = qkv(n, n, d)
        q[..., 0], k[..., 0] = 1.0, shift * d**0.5  # adds `shift` to every score: P and O don't change
        if dtype == torch.float16 and k.abs().max() > 6e4:  # the same product of two smaller factors
            q[..., 0], k[..., 0] = 32.0, shift * d**0.5 / 32
        yield Case(words, q, k, v)

    q, k, v = qkv(n, n, d)
    yield Case("very large scores of both signs", 30 * q, 30 * k, v)

    k = torch.sign(randn(B, H, n, d))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    yield Case("one-hot rows", 50 / d**0.5 * k[:, :, order], k, randn(B, H, n, d))  # row i attends to key order[i]

    q, k, v = qkv(n, n, d)
    q[..., 0], k[..., 0] = d**0.5, torch.linspace(0, 0.5 * n if not full else 60, n)
    yield Case("scores rise along the keys", q, k, v)  # the running max changes at every tile
    yield Case("scores fall along the keys", q, k.flip(2), v.flip(2))

    yield Case("zeros", torch.zeros(B, H, n, d), torch.zeros(B, H, n, d), torch.zeros(B, H, n, d))
    yield Case("equal scores", torch.zeros(B, H, n, d), randn(B, H, n, d), randn(B, H, n, d))  # O is the mean of V
    yield Case("scale 0.3", *qkv(n, n, d), scale=0.3)

    for N in (1, 2, *EDGES):
        yield Case(f"N={N}", *qkv(N, N, d, B=1, H=4 if N < 3 or full else 1))
    for Nq, Nk in ((1, 130), (130, 1), (5, 97), (97, 5)):
        yield Case(f"Nq={Nq}, Nk={Nk}", *qkv(Nq, Nk, d, B=1, H=2))

    n = 200 if full else 40
    q, k, v = randn(2, n, 3, d), randn(2, n, 3, d), randn(2, n, 3, d)
    yield Case("strided (B,N,H,D)", q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    q, k, v = randn(2, n, 3, 2, d).permute(2, 0, 3, 1, 4)  # one projection's output, (B, N, 3, H, D)
    yield Case("strided, packed QKV", q, k, v)
    yield Case(
        "strided, three layouts",
        randn(2, 3, n, d),
        randn(3, 2, n, d).transpose(0, 1),
        randn(2, n, 3, d).transpose(1, 2),
    )

    if not full:
        yield Case("long keys", *qkv(3, 700, d, B=1, H=1))
        return
    for d in D:
        yield Case(f"N=4096, D={d}", *qkv(4096, 4096, d, B=1, H=4))
    d = 64 if 64 in D else D[0]
    yield Case("N=16384", *qkv(16384, 16384, d, B=1, H=1))
    yield Case("Nq=64, Nk=65537", *qkv(64, 65537, d, B=1, H=2))
    yield Case("Nq=65537, Nk=64", *qkv(65537, 64, d, B=1, H=2))
    yield Case("B*H=66049", *qkv(5, 7, D[0], B=257, H=257))


def _softmax_cases(size: str) -> Iterator[Case]:
    full = size == "full"
    seed = 100

    def randn(*shape: int) -> Tensor:
        nonlocal seed
        seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    N, rows = (4099, 300) if full else (203, 5)
    for n in (1, 2, 3, 5, *EDGES, 256, 1023, 1025):
        yield Case(f"N={n}", s=randn(rows, n))
    yield Case("three leading dimensions", s=randn(2, 3, 2, 70))
    yield Case("all scores shifted by 100", s=randn(rows, N) + 100)
    yield Case("all scores about -1e4", s=randn(rows, N) - 1e4)
    yield Case("very large scores of both signs", s=1e4 * randn(rows, N))
    yield Case("the largest floats", s=torch.finfo(torch.float32).max * torch.tanh(randn(rows, N)))
    yield Case("zeros", s=torch.zeros(rows, N))
    yield Case("scores rise along the row", s=randn(rows, N) + torch.linspace(0, 500, N))
    yield Case("scores fall along the row", s=randn(rows, N) - torch.linspace(0, 500, N))
    one_hot = randn(rows, N)
    one_hot[torch.arange(rows), torch.arange(rows) * 37 % N] = 80.0
    yield Case("one-hot rows", s=one_hot)
    some = randn(rows, N)
    yield Case("-inf scattered", s=some.masked_fill(randn(rows, N) > 0, -torch.inf))
    late = randn(rows, N)
    late[:, :-3] = -torch.inf  # every thread but a few sees nothing but -inf
    yield Case("-inf but for the last three", s=late)
    masked = randn(rows, N)
    masked[1::2] = -torch.inf
    yield Case("rows fully masked", s=masked)
    yield Case("long row", s=randn(1, 1 << 24) if full else randn(1, 5003))
    if full:
        yield Case("many rows", s=randn(70001, 33))
        yield Case("16384 x 4096", s=randn(16384, 4096))
        yield Case("long rows", s=randn(5, 1 << 20))
