"""Timing of what models ask for: causal masks, groups of heads, packed batches, decode against a long cache, and the way back.

Each function gives the samples of one kind of record (data/README.md), taken as helpers.bench takes its own: rungs and peers
interleaved in random order, on a GPU only. record.kinds says which a rung's features call for.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.rung import Rung
from ..record import CUBLAS, SHAPE, attention_flops, kv_bytes
from .bench import BURST_MS, DEVICE, LENGTHS, MATH_MAX_N, TOKENS, WIDTH, _randn, _refusal, measure

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = (64, 8)  # query heads, heads of K and V
GROUPED = ((2, 2048), (1, 4096), (1, 8192))  # (B, N)
BATCHES = 3  # of packed sequences, by seed
SEQUENCES = 16  # in each, with lengths drawn evenly from SHORTEST to LONGEST
SHORTEST, LONGEST = 128, 4096
# (B, H, Hkv, Nk, D) of a decode step, one new query per sequence: caches of 256 MB to 1 GB, many sequences and few
CACHES = (
    (64, 32, 8, 4096, 128),
    (8, 32, 8, 32768, 128),
    (1, 32, 8, 131072, 128),
    (16, 32, 32, 2048, 128),
    (3, 40, 5, 40000, 128),
    (1, 16, 16, 65536, 128),
    (140, 8, 1, 8192, 128),
    (16, 32, 8, 16384, 64),
    (32, 32, 32, 2048, 64),
    (4, 32, 8, 32768, 64),
)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
COPIED = 1 << 28  # floats: 1 GiB
SQUARE = 8192  # of cuBLAS's matrices
BACK_ENDS = {
    "SDPA MATH": "MATH",
    "SDPA EFFICIENT": "EFFICIENT_ATTENTION",
    "SDPA FLASH": "FLASH_ATTENTION",
    "SDPA CUDNN": "CUDNN_ATTENTION",
}
MOST_PIECES = 2500  # of all heads together: beyond it only the merge is timed


def table(kind: str, kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The samples of one kind; `quick`: of fewer shapes, where a kind has many."""
    if kind in ("groups", "packed", "matmul"):
        return {"groups": groups, "packed": packed, "matmul": matmul}[kind](kernel, rung)
    return {"causal": causal, "decode": decode, "backward": backward}[kind](kernel, rung, quick)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's FlashAttention-2; k and v may have fewer heads than q."""
    return _sdpa("FLASH_ATTENTION", q, k, v, causal)


def _sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def causal(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The headline workload under a causal mask, beside SDPA FLASH, CUDNN and EFFICIENT: name, dtype, causal (1), B H Nq Nk D,
    round, ms."""
    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for D in (64, 128):
            for N in LENGTHS[1:4] if quick else LENGTHS:
                shape = (TOKENS // N, WIDTH // D, N, N, D)
                inputs = _made(dtype, (shape[0], shape[1], N, D), 3)
                calls = {rung.stem: functools.partial(kernel, causal=True)} | _peers(*inputs, causal=True)
                frames.append(_samples(calls, inputs, dtype, shape).assign(causal=1))
    return _joined(frames, ["name", "dtype", "causal", *SHAPE, "round", "ms"])


def groups(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Causal attention with 64 query heads on 8 heads of K and V, and on 64: the same FLOPs. name, dtype, causal, B H Hkv Nq Nk D,
    round, ms."""
    H, few = GROUPS
    frames = []
    for dtype in rung.dtypes:
        for D in (64, 128):
            for B, N in GROUPED:
                q, k, v = (*_made(dtype, (B, H, N, D), 1), *_made(dtype, (B, few, N, D), 2))
                K, V = _made(dtype, (B, H, N, D), 2)
                ours = functools.partial(kernel, causal=True)
                calls = {
                    (rung.stem, few): functools.partial(ours, q, k, v),
                    (rung.stem, H): functools.partial(ours, q, K, V),
                    ("SDPA FLASH", few): functools.partial(flash, q, k, v, causal=True),
                }
                frame = _samples(calls, (), dtype, (B, H, N, N, D)).assign(causal=1)
                names = frame["name"]
                frames.append(frame.assign(name=[n for n, _ in names], Hkv=[h for _, h in names]))
    return _joined(frames, ["name", "dtype", "causal", *SHAPE, "Hkv", "round", "ms"])


def packed(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Packed batches of random lengths, a row per round: dtype, causal, H, D, batch (its seed), sequences, tokens, round, and ms of
    the packed call, `padded_ms` of the same sequences padded to the longest, and `ideal_ms`: every sequence at the
    TFLOP/s that the kernel reaches in that round on a full batch of such sequences."""
    import torch

    frames = []
    lengths = [SHORTEST << i for i in range(int(math.log2(LONGEST // SHORTEST)) + 1)]
    for dtype in rung.dtypes:
        for D in (64, 128):
            H = WIDTH // D
            for is_causal in (True, False):
                dense = {N: _made(dtype, (TOKENS // N, H, N, D), 3) for N in lengths}
                for seed in range(BATCHES):
                    own = torch.randint(
                        SHORTEST, LONGEST + 1, (SEQUENCES,), generator=torch.Generator().manual_seed(seed)
                    ).tolist()
                    starts = torch.tensor([0, *own]).cumsum(0).to(torch.int32).to(DEVICE)
                    x = _made(dtype, (1, H, sum(own), D), 3)
                    y = _made(dtype, (SEQUENCES, H, max(own), D), 3)
                    calls = {f"N={N}": functools.partial(kernel, *x, causal=is_causal) for N, x in dense.items()}
                    calls["packed"] = functools.partial(kernel, *x, causal=is_causal, cu_seqlens=(starts, starts))
                    calls["padded"] = functools.partial(kernel, *y, causal=is_causal)
                    samples = measure(calls, burst_ms=BURST_MS[dtype] / 2)
                    wide = samples.pivot(index="round", columns="name", values="ms")
                    rates = {N: attention_flops(TOKENS // N, H, N, N, D, is_causal) / wide[f"N={N}"] for N in lengths}
                    ideal = sum(attention_flops(1, H, n, n, D, is_causal) / _rate(rates, n) for n in own)
                    made = pd.DataFrame({"ms": wide["packed"], "padded_ms": wide["padded"], "ideal_ms": ideal})
                    about = dict(dtype=dtype, causal=int(is_causal), H=H, D=D, batch=seed)
                    frames.append(made.reset_index().assign(**about, sequences=SEQUENCES, tokens=sum(own)))
                    frames[-1].attrs = samples.attrs
    keys = ["dtype", "causal", "H", "D", "batch", "sequences", "tokens", "round"]
    return _joined(frames, [*keys, "ms", "padded_ms", "ideal_ms"])


def backward(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The headline workload's backward pass with and without a causal mask, beside that of SDPA's back ends: name, dtype,
    causal, B H Nq Nk D, round, ms. The kernel gets O and LSE, autograd what each forward pass has kept for it."""
    import torch

    from ..run.reference import same_precision

    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for is_causal in (False, True):
            for D in (64, 128):
                for N in LENGTHS[1:4] if quick else LENGTHS:
                    shape = (TOKENS // N, WIDTH // D, N, N, D)
                    q, k, v, do = _made(dtype, (shape[0], shape[1], N, D), 4)
                    o, lse = same_precision(q, k, v, causal=is_causal)
                    calls = {rung.stem: functools.partial(kernel, q, k, v, o, lse, do, causal=is_causal)}
                    calls |= _backward_peers(q, k, v, do, is_causal, dtype)
                    frames.append(_samples(calls, (), dtype, shape).assign(causal=int(is_causal)))
                    del calls, q, k, v, o, lse, do  # what MATH has kept is most of a GPU's memory
                    torch.cuda.empty_cache()
    return _joined(frames, ["name", "dtype", "causal", *SHAPE, "round", "ms"])


def _backward_peers(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, dtype: str) -> dict[str, Callable]:
    """The backward pass alone of each of SDPA's back ends that takes these inputs; in 16 bits MATH and EFFICIENT, which would take
    most of the time, up to MATH_MAX_N."""
    import torch

    calls = {}
    for name, backend in BACK_ENDS.items():
        if name in ("SDPA MATH", "SDPA EFFICIENT") and dtype != "fp32" and q.shape[2] > MATH_MAX_N:
            continue
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SDPA explains each refusal in warnings
                o = _sdpa(backend, *leaves, causal)
        except RuntimeError:  # out of memory is one too
            continue
        call = functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
        if _refusal(call) is None:
            calls[name] = call
    return calls


def matmul(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """The headline workload at D = 128, N >= 4096, beside cuBLAS's product of two square bf16 matrices: name, dtype, causal,
    B H Nq Nk D, flops (per call), round, ms."""
    import torch

    a, b = _made("bf16", (SQUARE, SQUARE), 2)
    frames = []
    for is_causal in (False, True) if "causal" in rung.features else (False,):
        for N in (N for N in LENGTHS if N >= 4096):
            shape = (TOKENS // N, WIDTH // 128, N, N, 128)
            inputs = _made("bf16", (shape[0], shape[1], N, 128), 3)
            options = {"causal": True} if is_causal else {}
            calls = {rung.stem: functools.partial(kernel, *inputs, **options), CUBLAS: lambda: torch.mm(a, b)}
            frame = _samples(calls, (), "bf16", shape).assign(causal=int(is_causal))
            flops = {rung.stem: attention_flops(*shape, is_causal), CUBLAS: 2 * SQUARE**3}
            frames.append(frame.assign(flops=frame["name"].map(flops)))
    return _joined(frames, ["name", "dtype", "causal", *SHAPE, "flops", "round", "ms"])


def _rate(rates: dict[int, pd.Series], n: int) -> pd.Series:
    """The rate at length n, between those at the powers of two next to it."""
    low = max(N for N in rates if N <= n)
    if low == n or 2 * low not in rates:
        return rates[low]
    share = math.log2(n / low)
    return rates[low] ** (1 - share) * rates[2 * low] ** share


def decode(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """One query per sequence against a cache, for several numbers of splits, beside SDPA FLASH and a copy.

    name, dtype, B H Nq Nk D, Hkv, splits (0: not the rung), chosen (1: the splits the rung takes by itself), bytes (of K and V;
    of the copy, read and written), round, ms.
    """
    import torch

    from ..ladder.contract import prepare

    source = torch.randn(COPIED, device=DEVICE)
    target = torch.empty_like(source)
    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for B, H, Hkv, Nk, D in CACHES[: 3 if quick else None]:
            (q,) = _made(dtype, (B, H, 1, D), 1)
            k, v = _made(dtype, (B, Hkv, Nk, D), 2)
            own = prepare(rung, DEVICE, (q, k, v)).args.splits
            tried = [s for s in SPLITS if s == 1 or (s * B * Hkv <= MOST_PIECES and s <= Nk // 128)]
            calls = {s: functools.partial(kernel, q, k, v, splits=s) for s in sorted({own, *tried})}
            calls["copy"] = lambda: target.copy_(source)
            calls["SDPA FLASH"] = functools.partial(flash, q, k, v)
            frame = _samples(calls, (), dtype, (B, H, 1, Nk, D))
            splits = [name if isinstance(name, int) else 0 for name in frame["name"]]
            size = {"copy": 2 * source.numel() * source.element_size()}
            frame["bytes"] = [size.get(name, kv_bytes(B, Hkv, Nk, D)) for name in frame["name"]]
            frame["name"] = [rung.stem if s else name for s, name in zip(splits, frame["name"], strict=True)]
            frames.append(frame.assign(Hkv=Hkv, splits=splits, chosen=[int(s == own) for s in splits]))
            print(f"  decode {dtype} {(B, H, Hkv, Nk, D)}: {own} splits by itself", flush=True)
    return _joined(frames, ["name", "dtype", *SHAPE, "Hkv", "splits", "chosen", "bytes", "round", "ms"])


def _made(dtype: str, shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
    from ..run.reference import DTYPES

    make = _randn(sum(shape) + count)
    return tuple(make(*shape).to(DTYPES[dtype]) for _ in range(count))


def _peers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable]:
    """SDPA's back ends but MATH as far as they take these inputs."""
    calls = {
        name: functools.partial(_sdpa, backend, causal=causal)
        for name, backend in BACK_ENDS.items()
        if name != "SDPA MATH"
    }
    return {name: call for name, call in calls.items() if _refusal(call, q, k, v) is None}


def _samples(calls: dict, inputs: Sequence[Tensor], dtype: str, shape: tuple[int, ...]) -> pd.DataFrame:
    frame = measure(calls, inputs, burst_ms=BURST_MS[dtype])
    best = frame.groupby("name", sort=False)["ms"].median()
    print(f"  {dtype} {shape}: " + ", ".join(f"{n} {x:.3f} ms" for n, x in best.items()), flush=True)
    return frame.assign(dtype=dtype, **dict(zip(SHAPE, shape, strict=True)))


def _joined(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    result = pd.concat(frames, ignore_index=True)[columns]
    result.attrs = frames[0].attrs
    return result
