"""What a right answer is: attention and softmax in float64, the same in plain PyTorch at the input's own precision, and the inputs worth trying.

Notation as in FlashAttention (arXiv 2205.14135, section 3.1): S = scale Q Kᵀ, P = softmax(S) by rows, O = P V, and
LSE_i = log Σ_j exp(S_ij), the natural logarithm. A row of S that is −inf throughout has P = 0, O = 0 and LSE = −inf.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ladder.contract import TORCH_NAMES, room
from ..ladder.rung import Rung
from .families import FAMILIES

CHUNK = 1 << 25  # elements of S held at a time: 256 MB in float64
DTYPES = {name: getattr(torch, long) for name, long in TORCH_NAMES.items()}
OUTPUTS = {
    "softmax": ("p", "lse"),
    "attention": ("o", "lse"),
    "attention_backward": ("dq", "dk", "dv"),
    "merge": ("o", "lse"),
}  # in order
EDGES = (31, 32, 33, 63, 64, 65, 127, 128, 129)  # tile edges, and one off them
MANY = 385  # queries: several tiles of 64, 96, 128 and 192, and one more


def _largest(x: Tensor) -> float:
    """The largest finite number of a tensor; 0 if there is none."""
    finite = x[x.isfinite()]
    return finite.max().item() if len(finite) else 0.0


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """P and LSE of the last dimension of `s`, at the precision of `s`."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)  # a fully masked row: exp(-inf - 0) = 0, never exp(-inf + inf)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    return torch.where(l == 0, 0.0, p / l), (m + torch.log(l)).squeeze(-1)


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """float32 products in float32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def visible(
    Nq: int, Nk: int, causal: bool = False, window: int | None = None, first: int = 0, rows: int | None = None
) -> Tensor:
    """Which keys a query sees, as a boolean (rows, Nk) for the queries from `first` on: with `causal`, query i sees the keys up to
    i + Nk - Nq (the last query sees the last key); with `window`, of those the last `window` ones. ValueError for a window without
    `causal`: no kernel has that."""
    if window and not causal:
        raise ValueError(f"window={window} needs causal=True: a window is counted back from a query's last key")
    rows = Nq - first if rows is None else rows
    last = torch.arange(first, first + rows)[:, None] + (Nk - Nq)
    j = torch.arange(Nk)
    seen = (j <= last) if causal else torch.ones(rows, Nk, dtype=torch.bool)
    return seen & (j > last - window) if window else seen


def _heads(x: Tensor, H: int) -> Tensor:
    """K or V (B,Hkv,N,D) with a head for each of the H query heads: head h is head h // (H / Hkv)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def _by_query_rows(
    q: Tensor, k: Tensor, v: Tensor, one_chunk, causal: bool = False, window: int | None = None
) -> tuple:
    """The results of `one_chunk(rows, k, v, seen)`, called on as many query rows as keep S within CHUNK elements; `rows` is a
    slice of q's rows, `seen` what they see, or None for everything."""
    Nq, Nk = q.shape[2], k.shape[2]
    rows = max(1, CHUNK // max(1, q.shape[0] * q.shape[1] * Nk))
    parts = []
    with full_fp32():
        for i in range(0, Nq, rows):
            n = min(rows, Nq - i)
            seen = visible(Nq, Nk, causal, window, i, n).to(q.device) if causal or window else None
            parts.append(one_chunk(slice(i, i + n), k, v, seen))
    return tuple(torch.cat(part, 2) for part in zip(*parts, strict=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q Kᵀ) V and its LSE, in `dtype` throughout.

    q (B,H,Nq,D), k and v (B,Hkv,Nk,D) with Nk >= 1 and Hkv a divisor of H, any strides; scale defaults to 1/√D; causal and
    window as `visible` has them. Returns O (B,H,Nq,D) and LSE (B,H,Nq), both `dtype`. S is formed for some query rows at a
    time, so memory is O(N).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = _heads(k.to(dtype), q.shape[1]), _heads(v.to(dtype), q.shape[1])

    def rows(part, k, v, seen):
        s = (q[:, :, part].to(dtype) @ k.mT) * scale
        p, lse = _softmax(s if seen is None else s.masked_fill(~seen, -torch.inf))
        return p @ v, lse

    return _by_query_rows(q, k, v, rows, causal, window)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (B,H,Nq,D), dK and dV (B,Hkv,Nk,D) in float64, by the five products of FlashAttention's Algorithm 4
    (arXiv 2205.14135, appendix B.4): with delta = rowsum(dO o O), dV = P^T dO, dP = dO V^T, dS = P o (dP - delta),
    dQ = scale dS K, dK = scale dS^T Q. Shapes and options as in `attention`; do (B,H,Nq,D). Small sizes: S is formed whole."""
    return _gradients(q, k, v, do, scale, causal, window, torch.float64, lambda x: x)


def same_precision_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as plain PyTorch computes it at the inputs' precision, the yardstick of the error rule: sums in float32, and
    with 16-bit inputs P, dS and O rounded to 16 bits before they are multiplied, and the gradients at the end."""
    rounded = _gradients(q, k, v, do, scale, causal, window, torch.float32, lambda x: x.to(q.dtype).float())
    return tuple(x.to(q.dtype) for x in rounded)


def _gradients(q, k, v, do, scale, causal, window, dtype, rounded) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, Nq, Hkv = *q.shape[:3], k.shape[1]
    Q, K, V, dO = q.to(dtype), _heads(k.to(dtype), H), _heads(v.to(dtype), H), do.to(dtype)
    with full_fp32():
        s = (Q @ K.mT) * scale
        if causal or window:
            s = s.masked_fill(~visible(Nq, k.shape[2], causal, window).to(q.device), -torch.inf)
        p, _ = _softmax(s)
        o = rounded(rounded(p) @ V)
        dv = rounded(p).mT @ dO
        ds = p * (dO @ V.mT - (dO * o).sum(-1, keepdim=True))
        dq, dk = (rounded(ds) @ K) * scale, (rounded(ds).mT @ Q) * scale
    group = lambda x: x.view(B, Hkv, H // Hkv, *x.shape[2:]).sum(2)  # noqa: E731
    return dq, group(dk), group(dv)


def softmax(s: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """softmax(s) along the last dimension and its LSE, in `dtype`. s (..., N), finite or −inf; P (..., N), LSE (...)."""
    return _softmax(s.to(dtype))


def same_precision(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as plain PyTorch computes it at the inputs' own precision (TF32 off): the yardstick of the error rule.

    float32 inputs: everything in float32. 16-bit inputs: what tensor cores do, products of 16-bit numbers summed in
    float32, P and O rounded to 16 bits (stricter than rounding S to 16 bits too, which no fused kernel does).
    Shapes as in `attention`; O has the inputs' dtype, LSE is float32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype
    k, v = _heads(k, q.shape[1]), _heads(v, q.shape[1])

    def rows(part, k, v, seen):
        s = (q[:, :, part].float() @ k.float().mT) * scale
        s = s if seen is None else s.masked_fill(~seen, -torch.inf)
        p = torch.softmax(s, -1).nan_to_num(0.0)
        return (p.to(dtype).float() @ v.float()).to(dtype), torch.logsumexp(s, -1)

    return _by_query_rows(q, k, v, rows, causal, window)


def same_precision_softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """torch.softmax and torch.logsumexp of s (..., N) at its own precision; fully masked rows give 0 and −inf."""
    return torch.softmax(s, -1).nan_to_num(0.0), torch.logsumexp(s, -1)


@dataclass(frozen=True)
class Case:
    """One input to try. Attention: q (B,H,Nq,D), k, v (B,Hkv,Nk,D), scale (None: 1/√D), and what a rung's `features` allow:
    causal, window, cu_seqlens, lengths, pages, splits, deterministic, as Kernel.__call__ takes them. With do (B,H,Nq,D), the backward pass of
    the same. Softmax: s (..., N)."""

    name: str
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    s: Tensor | None = None
    scale: float | None = None
    do: Tensor | None = None
    causal: bool = False
    window: int | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    lengths: Tensor | None = None
    pages: Tensor | None = None
    splits: int | None = None  # makes no difference to the answer, nor does
    deterministic: bool = False

    @property
    def op(self) -> str:
        """ "softmax", "attention" or "attention_backward"."""
        return "softmax" if self.s is not None else "attention" if self.do is None else "attention_backward"

    @property
    def names(self) -> tuple[str, ...]:
        """What a kernel gives back, in order."""
        return OUTPUTS[self.op]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors a kernel is called with, in order. A backward pass gets O and LSE as plain PyTorch computes them, O where a
        forward pass puts it."""
        if self.s is not None:
            return (self.s,)
        if self.do is None:
            return (self.q, self.k, self.v)
        o, lse = same_precision(self.q, self.k, self.v, self.scale, self.causal, self.window)
        return (self.q, self.k, self.v, room(self.q).copy_(o), lse, self.do)

    @property
    def options(self) -> dict:
        """The keyword arguments a kernel is called with."""
        names = ("scale", "causal", "window", "cu_seqlens", "lengths", "pages", "splits", "deterministic")
        return {name: value for name in names if (value := getattr(self, name)) is not None and value is not False}

    def empty_outputs(self, fill: float = torch.nan) -> tuple[Tensor, ...]:
        """O (or P) and LSE, or dQ, dK, dV, of this case's shapes and with the strides of a call without `out`, full of `fill`."""
        if self.do is not None:
            return tuple(room(x).fill_(fill) for x in (self.q, self.k, self.v))
        if self.s is None:
            return room(self.q).fill_(fill), self.q.new_full(self.q.shape[:3], fill, dtype=torch.float32)
        skip = self.s.storage_offset()  # P starts where S does in its memory
        p = self.s.new_full((skip + self.s.numel(),), fill)[skip:].view(self.s.shape)
        return p, self.s.new_full(self.s.shape[:-1], fill, dtype=torch.float32)

    def exact(self) -> tuple[Tensor, ...]:
        """The float64 answer."""
        if self.s is not None:
            return softmax(self.s)
        return self._by_sequence(attention) if self.do is None else self._backward(attention_backward)

    def baseline(self) -> tuple[Tensor, ...]:
        """The answer of plain PyTorch at the inputs' precision."""
        if self.s is not None:
            return same_precision_softmax(self.s)
        return self._by_sequence(same_precision) if self.do is None else self._backward(same_precision_backward)

    def magnitude(self) -> tuple[float, ...]:
        """The size of what is summed on the way to each output, whose float32 rounding no kernel can avoid.

        O is a sum of P_ij V_jd: max of Σ_j P_ij |V_jd|. LSE inherits the rounding of the dot products: the bound
        scale · max ‖q_i‖ · max ‖k_j‖ on every score (Cauchy-Schwarz), or 1 where that is less.
        Softmax: max P, which is at most 1, and the largest finite |s|, at least 1.
        Backward: each gradient's sums with all terms taken positive, and dP - delta bounded by the sum of their sizes.
        """
        if self.s is not None:
            return 1.0, max(1.0, _largest(self.s.double().abs()))
        if self.do is not None:
            return self._backward_magnitude()
        scale = abs(self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        score = scale * _largest(self.q.double().norm(dim=-1)) * _largest(self.k.double().norm(dim=-1))
        o, _ = replace(self, v=self.v.abs())._by_sequence(attention)
        return _largest(o), max(1.0, score)

    def _backward(self, function) -> tuple[Tensor, ...]:
        return function(self.q, self.k, self.v, self.do, self.scale, self.causal, self.window)

    def _backward_magnitude(self) -> tuple[float, float, float]:
        q, k, v, do = (x.double() for x in (self.q, self.k, self.v, self.do))
        H, scale = q.shape[1], abs(q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        s = (q @ _heads(k, H).mT) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.causal:
            s = s.masked_fill(~visible(q.shape[2], k.shape[2], True, self.window).to(q.device), -torch.inf)
        p, _ = _softmax(s)
        dp = do.abs() @ _heads(v, H).abs().mT
        ds = p * (dp + (p * dp).sum(-1, keepdim=True))
        sums = (scale * ds @ _heads(k, H).abs(), scale * ds.mT @ q.abs(), p.mT @ do.abs())
        score = max(1.0, scale * _largest(q.norm(dim=-1)) * _largest(k.norm(dim=-1)))  # P's relative error, in ulps
        return tuple(score * _largest(x) * (H // self.k.shape[1] if i else 1) for i, x in enumerate(sums))

    def _by_sequence(self, function) -> tuple[Tensor, Tensor]:
        """O and LSE of `function`, called on one sequence after the other where the batch is packed, cut short or paged."""
        options = (self.scale,), {"causal": self.causal, "window": self.window}
        if self.cu_seqlens is None and self.lengths is None:
            return function(self.q, self.k, self.v, *options[0], **options[1])
        pieces = []
        for index, q, k, v in self._sequences():
            if k.shape[2] == 0:  # nothing to attend to
                pieces.append((index, (torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device=q.device))))
            elif q.shape[2]:
                pieces.append((index, function(q, k, v, *options[0], **options[1])))
        dtypes = next((o.dtype, lse.dtype) for _, (o, lse) in pieces[::-1])
        o = torch.zeros(self.q.shape, dtype=dtypes[0], device=self.q.device)
        lse = torch.zeros(self.q.shape[:3], dtype=dtypes[1], device=self.q.device)
        for (b, rows), (o_piece, lse_piece) in pieces:
            o[b, :, rows], lse[b, :, rows] = o_piece[0].to(dtypes[0]), lse_piece[0].to(dtypes[1])
        return o, lse

    def _sequences(self) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor, Tensor]]:
        """Where each sequence's rows of O are, and its q, k, v (1,H,n,D)."""
        if self.cu_seqlens is not None:
            starts = [list(zip(x.tolist(), x.tolist()[1:])) for x in self.cu_seqlens]
            for (q0, q1), (k0, k1) in zip(*starts, strict=True):
                yield (0, slice(q0, q1)), self.q[:, :, q0:q1], self.k[:, :, k0:k1], self.v[:, :, k0:k1]
            return
        for b, length in enumerate(self.lengths.tolist()):
            k, v = self.k[b : b + 1], self.v[b : b + 1]
            if self.pages is not None:
                order = self.pages[b].long()
                k, v = (torch.cat(list(x[order]), 1)[None] for x in (self.k, self.v))
            yield (b, slice(None)), self.q[b : b + 1], k[:, :, :length], v[:, :, :length]


def random_inputs(
    rung,
    shape: tuple[int, int, int, int, int],
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    Hkv: int | None = None,
    **options,
) -> tuple[Tensor, ...]:
    """Random inputs of whatever a rung takes, the same on every machine for one kind of device.

    shape: (B, H, Nq, Nk, D). Attention: q, k, v; backward: q, k, v, o, lse, do, with O and LSE as plain PyTorch computes them;
    softmax: s of B·H·Nq rows of Nk. dtype: one of the rung's, "fp16"; by default its first. Hkv: heads of K and V, by default
    H. options: those of the forward pass that O and LSE are of (causal, window, scale).
    """
    B, H, Nq, Nk, D = shape
    generator = torch.Generator(device).manual_seed(seed)
    kind = DTYPES[dtype or rung.dtypes[0]]

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(kind)

    if rung.op == "softmax":
        return (randn(B * H * Nq, Nk),)
    q, k, v = (randn(B, heads, n, D) for heads, n in ((H, Nq), (Hkv or H, Nk), (Hkv or H, Nk)))
    do = randn(B, H, Nq, D) if rung.op == "attention_backward" else None
    return Case("random", q, k, v, do=do, **options).inputs


def cases(rung=None, device: str | torch.device = "cpu", size: str = "small") -> Iterator[Case]:
    """The inputs every kernel must survive, the same on every machine (fixed seeds).

    rung: anything with `op`, `dtypes` and `D` (a Rung; an empty or missing `D` allows any); None: float32 attention.
    size: "small" has up to 700 keys (a softmax has rows of up to 32,771) and runs on the emulator in seconds; "full" is for a GPU and adds long rows, more heads
    than a grid dimension holds (65 535) and larger batches.
    Attention scores stay below 1e8: past that a rounded maximum is so far off that an fp16 P overflows in 13 and up. Softmax scores are finite or −inf, and a row may be
    −inf throughout; one case of a Rung's attention has such rows, too, but none of an implementation's in another language.
    Raises ValueError for another size or an operation other than attention, its backward pass and softmax.
    """
    if size not in ("small", "full"):
        raise ValueError(f'cases() has size "small" and "full", not {size!r}')
    op = getattr(rung, "op", "attention")
    if op not in ("attention", "softmax", "attention_backward"):
        raise ValueError(f"no cases for the operation {op!r}; there are attention, softmax and attention_backward")
    dtypes = tuple(getattr(rung, "dtypes", ()) or ("fp32",))
    D = tuple(getattr(rung, "D", ()) or (32, 64, 128))
    features = tuple(getattr(rung, "features", ()))
    for name in dtypes:
        if op == "softmax":
            made = _softmax_cases(size)
        else:
            forward = itertools.chain(
                _attention_cases(D, size, DTYPES[name]), _model_cases(D, size, features), _joint_cases(D, features)
            )
            if name != "fp32":
                forward = itertools.chain(forward, _family_cases(D, size, features, name))
            if isinstance(rung, Rung) and op == "attention":
                forward = itertools.chain(forward, _hidden_cases(D))
            made = forward if op == "attention" else itertools.chain(_with_gradient(forward), _steep_cases(D))
        suffix = "" if len(dtypes) == 1 else f", {name}"
        for case in made:
            floats = ("q", "k", "v", "s", "do")
            there = {f: moved(x, DTYPES[name], device) for f in floats if (x := getattr(case, f)) is not None}
            there |= {f: x.to(device) for f in ("lengths", "pages") if (x := getattr(case, f)) is not None}
            if case.cu_seqlens is not None:
                there["cu_seqlens"] = tuple(x.to(device) for x in case.cu_seqlens)
            yield replace(case, name=case.name + suffix, **there)


def moved(x: Tensor, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """x in another dtype and place with the strides and the first element it has (a plain .to() would drop the gaps of a
    packed layout)."""
    if x.dtype == dtype and x.device == torch.device(device):
        return x
    first = x.storage_offset()
    length = first + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((length,), (1,), 0).to(device=device, dtype=dtype)
    return flat.as_strided(x.shape, x.stride(), first)


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
    for scale in (0.3, -0.3, 0.0):  # n is no multiple of a tile: what is masked must stay masked when it is scaled
        yield Case(f"scale {scale:g}", *qkv(n, n, d), scale=scale)

    for N in (1, 2, *EDGES):
        yield Case(f"N={N}", *qkv(N, N, d, B=1, H=4 if N < 3 or full else 1))
    for Nq, Nk in ((1, 130), (130, 1), (5, 97), (MANY, 5)):
        yield Case(f"Nq={Nq}, Nk={Nk}", *qkv(Nq, Nk, d, B=1, H=2))
    for other in D:  # each D is a kernel with tiles of its own: one row or key off each edge, in turn
        for Nq, Nk in ((1, 1), (63, 129), (65, 127), (127, 65), (MANY, 63)) if other != d else ():
            yield Case(f"Nq={Nq}, Nk={Nk}, D={other}", *qkv(Nq, Nk, other, B=1, H=1))

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


def _with_gradient(made: Iterator[Case]) -> Iterator[Case]:
    """The attention cases with a gradient of O to go back from, of strides that neither q nor O has where q, k or v is strided."""
    for seed, case in enumerate(made, 1000):
        if case.q.shape[2] * case.k.shape[2] * case.q.shape[0] * case.q.shape[1] > CHUNK:
            continue  # the reference forms S whole
        generator = torch.Generator().manual_seed(seed)
        do = torch.randn(case.q.shape, generator=generator)
        whole = all(x.is_contiguous() for x in (case.q, case.k, case.v))
        yield replace(case, do=do if whole else by_head(do))


def by_head(x: Tensor) -> Tensor:
    """x (B,H,N,D), in memory as (H,B,N,D): a layout that no call gives O."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def hide(q: Tensor, k: Tensor) -> None:
    """Changes q (B,H,Nq,D) and k (B,H,Nk,D) so that scores are -inf, and none NaN: three quarters of the keys, the first ones in even
    heads and the last ones in odd heads; and of every seventh query all."""
    most = 3 * k.shape[2] // 4
    q[..., 0] = k[..., 1] = 1.0
    k[:, ::2, :most, 0] = k[:, 1::2, -most:, 0] = -torch.inf
    q[:, :, ::7, 1] = -torch.inf


def _hidden_cases(D: tuple[int, ...]) -> Iterator[Case]:
    """Whole tiles of scores of -inf, before and behind others."""
    d = 64 if 64 in D else D[0]
    generator = torch.Generator().manual_seed(900)
    q, k, v = (torch.randn(1, 2, n, d, generator=generator) for n in (40, 200, 200))
    hide(q, k)
    yield Case("keys of -inf, rows fully masked", q, k, v)


def steepen(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> float:
    """Multiplies random q, k, v and do in place, so that sums of dS K and dS^T Q pass the largest number of fp16, 65504; returns the
    scale by which dQ and dK do not."""
    for x, factor in ((q, 16.0), (k, 16.0), (v, 16.0), (do, 128.0)):
        x *= factor
    return 2.0**-12


def _steep_cases(D: tuple[int, ...]) -> Iterator[Case]:
    """Gradients that fit 16 bits only once they are scaled."""
    d = 64 if 64 in D else D[0]
    generator = torch.Generator().manual_seed(950)
    q, k, v, do = (torch.randn(1, 2, n, d, generator=generator) for n in (70, 90, 90, 70))
    scale = steepen(q, k, v, do)
    yield Case("dQ and dK beyond 65504 before they are scaled", q, k, v, do=do, scale=scale)


def _model_cases(D: tuple[int, ...], size: str, features: tuple[str, ...]) -> Iterator[Case]:
    """What the features of a rung add: masks on every tile edge, groups of heads, packed, cut short and paged batches."""
    full = size == "full"
    d = 64 if 64 in D else D[0]
    seed = 500

    def randn(*shape: int) -> Tensor:
        nonlocal seed
        seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def qkv(
        Nq: int, Nk: int, B: int = 1, H: int = 2, Hkv: int | None = None, d: int = d
    ) -> tuple[Tensor, Tensor, Tensor]:
        return randn(B, H, Nq, d), randn(B, Hkv or H, Nk, d), randn(B, Hkv or H, Nk, d)

    edges = [(1, 1), (1, 70), (70, 1), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (128, 129), (129, 127)]
    edges += [(130, 300)] + ([(1000, 1000), (777, 2049), (2049, 777)] if full else [(5, 200)])
    if "causal" in features:
        for Nq, Nk in edges:
            yield Case(f"causal, Nq={Nq}, Nk={Nk}", *qkv(Nq, Nk), causal=True)
        for other in D:
            yield Case(f"causal, D={other}", *qkv(MANY, MANY, H=1, d=other), causal=True)
        for scale in (-0.3, 0.0):
            yield Case(f"causal, scale {scale}", *qkv(70, 150), causal=True, scale=scale)
    if "window" in features:
        for window in (1, 17, 64, 65, 128, 1000):
            yield Case(f"causal, window {window}", *qkv(200, 230), causal=True, window=window)
        # Query 128, the first of a tile, sees key 63, the last of one.
        yield Case("causal, window 66", *qkv(200, 200), causal=True, window=66)
        # Its edge is past tiles that whole warps see whole.
        yield Case("causal, window 200", *qkv(300, 330), causal=True, window=200)
        yield Case("causal, window 33, more queries than keys", *qkv(150, 70), causal=True, window=33)
    if "gqa" in features:
        for Hkv in (1, 2, 3):
            yield Case(f"6 heads on {Hkv}", *qkv(70, 90, B=2, H=6, Hkv=Hkv))
        if "causal" in features:
            yield Case("8 heads on 2, causal", *qkv(130, 130, B=2, H=8, Hkv=2), causal=True)
    if "deterministic" in features:
        for Nq, Nk in ((300, 300), (130, 400), (400, 130)):
            for causal in (False, True):
                name = f"deterministic, Nq={Nq}, Nk={Nk}" + ", causal" * causal
                yield Case(name, *qkv(Nq, Nk), causal=causal, deterministic=True)
    if "varlen" in features:
        lens = [(5, 5), (0, 3), (70, 130), (1, 64), (64, 1), (129, 65), (3, 0)] + (
            [(777, 1000), (4, 2049)] if full else []
        )
        starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lens, strict=True)]
        for causal in (False, True) if "causal" in features else (False,):
            q, k, v = qkv(int(starts[0][-1]), int(starts[1][-1]))
            yield Case("packed sequences" + ", causal" * causal, q, k, v, cu_seqlens=tuple(starts), causal=causal)
        starts = torch.tensor([0, *itertools.accumulate(i * 7 % 11 for i in range(75))], dtype=torch.int32)
        q, k, v = qkv(int(starts[-1]), int(starts[-1]), H=1)
        yield Case("75 packed sequences", q, k, v, cu_seqlens=(starts, starts))
    if "lengths" in features:
        for Nq in (1, 4, 16):
            q, k, v = qkv(Nq, 300, B=4, H=4, Hkv=2 if "gqa" in features else None)
            lengths = torch.tensor([300, 1, 129, 0], dtype=torch.int32)
            yield Case(f"keys cut short, Nq={Nq}", q, k, v, lengths=lengths)
            if "causal" in features:
                lengths = torch.tensor([300, 16, 129, 64], dtype=torch.int32)
                yield Case(f"keys cut short, causal, Nq={Nq}", q, k, v, lengths=lengths, causal=True)
    if "pages" in features:
        for page in (16, 64, 48):
            q, (k, v) = randn(3, 4, 2, d), (randn(20, 2 if "gqa" in features else 4, page, d) for _ in range(2))
            order = torch.randperm(20, generator=torch.Generator().manual_seed(page))[:18].reshape(3, 6).to(torch.int32)
            lengths = torch.tensor([6 * page, 1, 2 * page + 5], dtype=torch.int32)
            yield Case(f"pages of {page}", q, k, v, lengths=lengths, pages=order)
    if "splits" in features:
        for splits in (1, 2, 5, 11, 64):  # of 700 keys: the last pieces are short, or empty
            yield Case(f"{splits} splits", *qkv(3, 700, H=4), splits=splits)
        if "lengths" in features:
            lengths = torch.tensor([300, 1, 129, 0], dtype=torch.int32)
            yield Case("3 splits of keys cut short", *qkv(2, 300, B=4), lengths=lengths, splits=3)


def _joint_cases(D: tuple[int, ...], features: tuple[str, ...]) -> Iterator[Case]:
    """All that a rung's features allow in one call, with a scale and strides, at every D: a kernel that ignores an argument where another
    is set is wrong."""
    generator = torch.Generator().manual_seed(980)
    options = {"scale": 0.3} | ({"causal": True} if "causal" in features else {})
    window = {"window": 37} if "window" in features else {}
    H, Hkv = 4, 2 if "gqa" in features else 4

    def by_token(B: int, N: int, heads: int) -> Tensor:
        return torch.randn(B, N, heads, d, generator=generator).transpose(1, 2)

    for d in D:
        q, k, v = by_token(2, 40, H), by_token(2, 90, Hkv), by_token(2, 90, Hkv)
        for deterministic in (False, True) if "deterministic" in features else (False,):
            name = f"all at once, D={d}" + ", deterministic" * deterministic
            yield Case(name, q, k, v, **options, **window, deterministic=deterministic)
        if "varlen" in features:
            starts = tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 70, 99], [0, 150, 153, 160]))
            q, k, v = by_token(1, 99, H), by_token(1, 160, Hkv), by_token(1, 160, Hkv)
            yield Case(f"all at once, packed, D={d}", q, k, v, cu_seqlens=starts, **options, **window)
        if "splits" in features and "lengths" in features:
            q, k, v = by_token(3, 4, H), by_token(3, 800, Hkv), by_token(3, 800, Hkv)
            lengths = torch.tensor([800, 4, 333], dtype=torch.int32)
            yield Case(f"all at once, cut short, D={d}", q, k, v, lengths=lengths, splits=3, **options)
            if "pages" in features:
                k, v = by_token(40, 64, Hkv), by_token(40, 64, Hkv)
                pages = torch.randperm(40, generator=generator)[:36].reshape(3, 12).to(torch.int32)
                lengths = torch.tensor([768, 4, 333], dtype=torch.int32)
                yield Case(f"all at once, pages, D={d}", q, k, v, lengths=lengths, pages=pages, splits=3, **options)


def _family_cases(D: tuple[int, ...], size: str, features: tuple[str, ...], dtype: str) -> Iterator[Case]:
    """The families of inputs that are made of random numbers, over more tiles of keys than a rung may treat as a short row; under a mask
    and at every D those in which a row's maximum rises late. And a sink in a tile that rungs take late."""
    H, Nq, Nk = (8, 1000, 1000) if size == "full" else (2, 70, 700)
    d = 64 if 64 in D else D[0]
    for seed, (name, family) in enumerate(FAMILIES.items(), 2000):
        late = name in ("sink", "one key", "falling")
        for own in D if late else (d,):
            for causal in (False, True) if late and own == d and "causal" in features else (False,):
                q, k, v = family.inputs((1, H, Nq, Nk, own), dtype, seed=seed, causal=causal)
                words = f"family {name}" + f", D={own}" * (own != d) + ", causal" * causal
                yield Case(words, q, k, v, causal=causal)
    for own in D:
        q, k, v = FAMILIES["sink"].inputs((1, H, Nq, Nk, own), dtype, seed=2100)
        k[:, :, [0, Nk // 4]] = k[:, :, [Nk // 4, 0]]
        yield Case("a sink at a quarter of the keys" + f", D={own}" * (own != d), q, k, v)


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
    yield Case("long rows", s=randn(5, 1 << 20) if full else randn(2, 32771))  # more than a block of 1024 threads holds
    yield Case("more rows than columns", s=randn(1030, 9))  # and than a block has threads
    yield Case("starts at an odd element", s=randn(rows * N + 1)[1:].view(rows, N))
