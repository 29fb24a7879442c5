"""What is timed: the shapes, the inputs, and the samples of each kind of record.

The headline workload, causal masks, groups of heads, packed batches, decode steps against a long cache, and the backward
pass. Each function returns the samples of one kind (data/README.md has the columns): a rung and its peers, interleaved in
random order, on a GPU only. record.kinds says which kinds a rung's features call for.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.rung import Rung
from ..record import (
    BACK_ENDS,
    CUBLAS,
    EFFICIENT,
    FA2,
    FA3,
    FA4,
    FLASH,
    FROM_N,
    LENGTHS,
    MATH,
    SHAPE,
    TOKENS,
    WIDTH,
    attention_flops,
    kv_bytes,
)
from . import bench, libraries, sensors
from .bench import attentions, measure, peers, random_numbers, refusal, sdpa, softmax_peers

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int, int, int, int]  # B, H, Nq, Nk, D

BURST_MS = {"fp32": 10.0, "fp16": 5.0, "bf16": 5.0}  # two dtypes in the time of one
MATH_MAX_N = 2048  # in 16 bits SDPA MATH forms S in float32: beyond this it costs more time than all others together
GROUPS = (64, 8)  # query heads, heads of K and V
IN_ORDER = (1024, 4096, 16384)  # N of `deterministic`
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
MOST_PIECES = 2500  # of all heads together: beyond it only the merge is timed


def samples(kind: str, kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The samples of one kind of record.kinds; `quick`: of fewer shapes, where a kind has many."""
    every = {
        "forward": functools.partial(forward, quick=quick),
        "causal": functools.partial(causal, quick=quick),
        "decode": functools.partial(decode, quick=quick),
        "backward": functools.partial(backward, quick=quick),
        "groups": groups,
        "packed": packed,
        "matmul": matmul,
        "deterministic": deterministic,
    }
    return every[kind](kernel, rung)


def shapes(op: str, quick: bool = False, headline: bool = False) -> list[Shape]:
    """(B, H, Nq, Nk, D) of every recorded shape: the headline workload and, unless `headline`, the grid of the LeetCUDA log;
    for softmax (B = H = D = 1) 2^26 elements in rows of 256 to 1 M, and three lengths that are no multiple of 4."""
    if op == "softmax":
        even = [256 << i for i in range(0, 13, 2 if quick else 1)]
        return [(1, 1, (1 << 26) // n, n, 1) for n in [*even, *([] if quick else [1023, 4097, 50257])]]
    found = [_headline(N, D) for D in (64, 128) for N in _lengths(quick)]
    if not quick and not headline:
        found += [(b, h, n, n, d) for d in (64, 128) for b in (8, 16) for h in (8, 16) for n in (256, 512, 1024)]
    return list(dict.fromkeys(found))


def _headline(N: int, D: int) -> Shape:
    return TOKENS // N, WIDTH // D, N, N, D


def _lengths(quick: bool) -> Sequence[int]:
    return LENGTHS[1:4] if quick else LENGTHS


def random_tensors(dtype: str, shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
    """`count` tensors of normal random numbers on the GPU, the same for the same shape and count."""
    from ..run.reference import DTYPES

    make = random_numbers(sum(shape) + count)
    return tuple(make(*shape).to(DTYPES[dtype]) for _ in range(count))


def forward(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The forward pass at every shape and dtype of a rung, beside every peer that takes them: name, dtype, B H Nq Nk D, round,
    ms. attrs["skipped"]: what was not measured, and why."""
    import torch

    from ..run.reference import random_inputs

    frames, skipped = [], []
    headline = bool(rung.features)  # the grid of the LeetCUDA log is for kernels of its kind
    for dtype, shape in ((d, s) for d in rung.dtypes for s in shapes(rung.op, quick, headline)):
        given = random_inputs(rung, shape, dtype, bench.DEVICE)
        costly = (MATH,) if dtype != "fp32" and shape[3] > MATH_MAX_N else ()
        others = softmax_peers(*given) if rung.op == "softmax" else peers(*given, without=costly)
        if why := refusal(kernel, *given):
            skipped.append(f"{rung.stem} at (B,H,Nq,Nk,D) = {shape}, {dtype}: {why}")
        frames.append(_timed(({} if why else {rung.stem: kernel}) | others, given, dtype, shape))
        del given
        torch.cuda.empty_cache()
    result = joined(frames, ["name", "dtype", *SHAPE, "round", "ms"])
    if not quick and rung.op == "attention" and any(d != "fp32" for d in rung.dtypes):
        skipped.append(f"SDPA MATH beyond N = {MATH_MAX_N} in 16 bits, where it would take most of the time")
    result.attrs["skipped"] = skipped
    return result


def beside_flash(kernel: Callable, name: str, dtype: str) -> pd.DataFrame:
    """Samples of a kernel and of SDPA FLASH (in fp32, of SDPA EFFICIENT) at the headline workload from N = 1024 on.

    RuntimeError with the kernel's own words if it takes none of these shapes.
    """
    beside = EFFICIENT if dtype == "fp32" else FLASH
    without = [*(name for name in BACK_ENDS if name != beside), FA2, FA3, FA4]
    frames, refusals = [], []
    for shape in (_headline(N, D) for D in (64, 128) for N in LENGTHS if N >= FROM_N):
        B, H, N, _, D = shape
        given = random_tensors(dtype, (B, H, N, D), 3)
        if why := refusal(kernel, *given):
            refusals.append(why)
            continue
        frames.append(_timed({name: kernel} | peers(*given, without=without), given, dtype, shape))
    if not frames:
        raise RuntimeError(f"{name} takes no shape of the headline workload: {refusals[0]}")
    return pd.concat(frames, ignore_index=True)


def stages(own: dict[str, Callable], rung: Rung) -> pd.DataFrame:
    """The stages of a rung, by their stems, beside SDPA FLASH in one process, on the headline workload from N = 1024 on: name, dtype,
    B H Nq Nk D, round, ms."""
    import torch

    from ..run.reference import random_inputs

    without, frames = [*(name for name in BACK_ENDS if name != FLASH), FA2, FA3, FA4], []
    for dtype, D, N in ((t, d, n) for t in rung.dtypes for d in rung.D for n in LENGTHS if n >= FROM_N):
        given = random_inputs(rung, _headline(N, D), dtype, bench.DEVICE)
        frames.append(_timed(own | peers(*given, without=without), given, dtype, _headline(N, D)))
        del given
        torch.cuda.empty_cache()
    return joined(frames, ["name", "dtype", *SHAPE, "round", "ms"])


def causal(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The headline workload under a causal mask, beside SDPA FLASH, CUDNN and EFFICIENT and FlashAttention-3 and -4: name, dtype,
    causal (1), B H Nq Nk D, round, ms."""
    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for shape in (_headline(N, D) for D in (64, 128) for N in _lengths(quick)):
            B, H, N, _, D = shape
            given = random_tensors(dtype, (B, H, N, D), 3)
            calls = {rung.stem: functools.partial(kernel, causal=True)} | _causal_peers(*given)
            frames.append(_timed(calls, given, dtype, shape).assign(causal=1))
    return joined(frames, ["name", "dtype", "causal", *SHAPE, "round", "ms"])


def _causal_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable]:
    return peers(q, k, v, without=(MATH, FA2), causal=True)


def groups(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Causal attention with 64 query heads on 8 heads of K and V, and on 64: the same FLOPs; beside SDPA FLASH and CUDNN and
    FlashAttention-3 and -4 on 8. Q and the 8 heads rotate past the L2, in which they would fit at D = 64; the 64 heads exceed it.
    name, dtype, causal, B H Hkv Nq Nk D, round, ms."""
    H, few = GROUPS
    frames = []
    for dtype in rung.dtypes:
        for D in (64, 128):
            for B, N in GROUPED:
                q, k, v = (*random_tensors(dtype, (B, H, N, D), 1), *random_tensors(dtype, (B, few, N, D), 2))
                K, V = random_tensors(dtype, (B, H, N, D), 2)
                many = functools.partial(lambda K, V, q, *_: kernel(q, K, V, causal=True), K, V)
                calls = {(rung.stem, few): functools.partial(kernel, causal=True), (rung.stem, H): many}
                calls |= {(name, few): call for name, call in _causal_peers(q, k, v).items()}
                frame = _timed(calls, (q, k, v), dtype, (B, H, N, N, D)).assign(causal=1)
                names = frame["name"]
                frames.append(frame.assign(name=[n for n, _ in names], Hkv=[h for _, h in names]))
    return joined(frames, ["name", "dtype", "causal", *SHAPE, "Hkv", "round", "ms"])


def packed(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """Packed batches of random lengths, a row per round: dtype, causal, H, D, batch (its seed), sequences, tokens, round, and ms of
    the packed call, `padded_ms` of the same sequences padded to the longest, and `ideal_ms`: every sequence at the
    TFLOP/s that the kernel reaches in that round on a full batch of such sequences."""
    frames = []
    lengths = [SHORTEST << i for i in range(int(math.log2(LONGEST // SHORTEST)) + 1)]
    for dtype in rung.dtypes:
        for D in (64, 128):
            for is_causal in (True, False):
                call = functools.partial(kernel, causal=is_causal)
                dense = {N: random_tensors(dtype, (TOKENS // N, WIDTH // D, N, D), 3) for N in lengths}
                full = {f"N={N}": functools.partial(call, *x) for N, x in dense.items()}
                for seed in range(BATCHES):
                    own, calls = _packed_and_padded(call, dtype, D, seed)
                    timed = measure(full | calls, burst_ms=BURST_MS[dtype] / 2)
                    wide = timed.pivot(index="round", columns="name", values="ms")
                    flops = functools.partial(attention_flops, H=WIDTH // D, D=D, causal=is_causal)
                    rates = {N: flops(TOKENS // N, Nq=N, Nk=N) / wide[f"N={N}"] for N in lengths}
                    ideal = sum(flops(1, Nq=n, Nk=n) / _rate(rates, n) for n in own)
                    made = pd.DataFrame({"ms": wide["packed"], "padded_ms": wide["padded"], "ideal_ms": ideal})
                    about = dict(dtype=dtype, causal=int(is_causal), H=WIDTH // D, D=D, batch=seed)
                    frames.append(made.reset_index().assign(**about, sequences=SEQUENCES, tokens=sum(own)))
                    frames[-1].attrs = timed.attrs
    keys = ["dtype", "causal", "H", "D", "batch", "sequences", "tokens", "round"]
    return joined(frames, [*keys, "ms", "padded_ms", "ideal_ms"])


def _packed_and_padded(call: Callable, dtype: str, D: int, seed: int) -> tuple[list[int], dict[str, Callable]]:
    """The lengths of one batch's sequences, and the calls that take them packed and padded to the longest."""
    import torch

    H = WIDTH // D
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    starts = torch.tensor([0, *own]).cumsum(0).to(torch.int32).to(bench.DEVICE)
    x = random_tensors(dtype, (1, H, sum(own), D), 3)
    y = random_tensors(dtype, (SEQUENCES, H, max(own), D), 3)
    return own, {
        "packed": functools.partial(call, *x, cu_seqlens=(starts, starts)),
        "padded": functools.partial(call, *y),
    }


def _rate(rates: dict[int, pd.Series], n: int) -> pd.Series:
    """The rate at length n, between those at the powers of two next to it."""
    low = max(N for N in rates if N <= n)
    if low == n or 2 * low not in rates:
        return rates[low]
    share = math.log2(n / low)
    return rates[low] ** (1 - share) * rates[2 * low] ** share


def backward(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """The headline workload's backward pass with and without a causal mask, beside that of SDPA's back ends and of FlashAttention-3
    and -4: name, dtype, causal, B H Nq Nk D, round, ms. The kernel gets O and LSE, autograd what each forward pass has kept
    for it. In 16 bits MATH and EFFICIENT, which would take most of the time, run up to MATH_MAX_N."""
    import torch

    from ..run.reference import same_precision

    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for is_causal in (False, True):
            for shape in (_headline(N, D) for D in (64, 128) for N in _lengths(quick)):
                B, H, N, _, D = shape
                q, k, v, do = random_tensors(dtype, (B, H, N, D), 4)
                o, lse = same_precision(q, k, v, causal=is_causal)
                calls = {rung.stem: functools.partial(kernel, q, k, v, o, lse, do, causal=is_causal)}
                costly = (MATH, EFFICIENT) if dtype != "fp32" and N > MATH_MAX_N else ()
                calls |= backward_peers(q, k, v, do, is_causal, (*costly, FA2))
                frames.append(_timed(calls, (), dtype, shape).assign(causal=int(is_causal)))
                del calls, q, k, v, o, lse, do  # what MATH has kept is most of a GPU's memory
                torch.cuda.empty_cache()
    return joined(frames, ["name", "dtype", "causal", *SHAPE, "round", "ms"])


def backward_peers(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, without: Sequence[str] = (FA2,)
) -> dict[str, Callable]:
    """The backward pass alone, by autograd, of each of `bench.attentions` that takes these inputs, but for those in `without`. Each is
    called without arguments and returns dQ, dK, dV."""

    found = {name: _backward(attend, q, k, v, do) for name, attend in attentions(without, causal=causal).items()}
    return {name: call for name, call in found.items() if call}


def _backward(attend: Callable, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable | None:
    """The backward pass of `attend` alone, called without arguments; None where it doesn't take these inputs."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if refusal(attend, *leaves) is not None:
        return None
    call = functools.partial(torch.autograd.grad, attend(*leaves), leaves, do, retain_graph=True)
    return call if refusal(call) is None else None


def deterministic(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """What it costs that a backward pass gives the same bits every time: the rung and FlashAttention-3 (where it can be imported) with
    `deterministic` 0 and 1, on bf16 of the headline workload. name, dtype, causal, B H Nq Nk D, deterministic, round, ms."""
    from ..run.reference import same_precision

    frames = []
    for is_causal in (False, True):
        for B, H, N, _, D in (_headline(N, D) for D in (64, 128) for N in IN_ORDER):
            q, k, v, do = random_tensors("bf16", (B, H, N, D), 4)
            o, lse = same_precision(q, k, v, causal=is_causal)
            calls = {}
            for same in (False, True):
                calls[rung.stem, same] = functools.partial(
                    kernel, q, k, v, o, lse, do, causal=is_causal, deterministic=same
                )
                others = libraries.found((FA2, FA4), causal=is_causal, deterministic=same)
                calls |= {(name, same): call for name, f in others.items() if (call := _backward(f, q, k, v, do))}
            frame = _timed(calls, (), "bf16", (B, H, N, N, D)).assign(causal=int(is_causal))
            names = frame["name"]
            frames.append(frame.assign(name=[n for n, _ in names], deterministic=[int(same) for _, same in names]))
    return joined(frames, ["name", "dtype", "causal", *SHAPE, "deterministic", "round", "ms"])


def matmul(kernel: Callable, rung: Rung) -> pd.DataFrame:
    """The headline workload at D = 128, N >= 4096, beside cuBLAS's product of two square bf16 matrices: name, dtype, causal,
    B H Nq Nk D, flops (per call), round, ms."""
    import torch

    a, b = random_tensors("bf16", (SQUARE, SQUARE), 2)
    frames = []
    for is_causal in (False, True) if "causal" in rung.features else (False,):
        for shape in (_headline(N, 128) for N in LENGTHS if N >= 4096):
            B, H, N, _, D = shape
            given = random_tensors("bf16", (B, H, N, D), 3)
            options = {"causal": True} if is_causal else {}
            calls = {rung.stem: functools.partial(kernel, *given, **options), CUBLAS: lambda: torch.mm(a, b)}
            frame = _timed(calls, (), "bf16", shape).assign(causal=int(is_causal))
            flops = {rung.stem: attention_flops(*shape, is_causal), CUBLAS: 2 * SQUARE**3}
            frames.append(frame.assign(flops=frame["name"].map(flops)))
    return joined(frames, ["name", "dtype", "causal", *SHAPE, "flops", "round", "ms"])


def decode(kernel: Callable, rung: Rung, quick: bool = False) -> pd.DataFrame:
    """One query per sequence against a cache, for several numbers of splits, beside SDPA FLASH and a copy.

    name, dtype, B H Nq Nk D, Hkv, splits (0: not the rung), chosen (1: the splits the rung takes by itself), bytes (of K and V;
    of the copy, read and written), round, ms.
    """
    import torch

    from ..ladder.contract import prepare

    source = torch.randn(COPIED, device=bench.DEVICE)
    target = torch.empty_like(source)
    frames = []
    for dtype in rung.dtypes[: 1 if quick else None]:
        for B, H, Hkv, Nk, D in CACHES[: 3 if quick else None]:
            (q,) = random_tensors(dtype, (B, H, 1, D), 1)
            k, v = random_tensors(dtype, (B, Hkv, Nk, D), 2)
            own = prepare(rung, bench.DEVICE, (q, k, v)).args.splits
            tried = [s for s in SPLITS if s == 1 or (s * B * Hkv <= MOST_PIECES and s <= Nk // 128)]
            calls = {s: functools.partial(kernel, q, k, v, splits=s) for s in sorted({own, *tried})}
            calls["copy"] = lambda: target.copy_(source)
            calls[FLASH] = functools.partial(sdpa, FLASH, q, k, v)
            frame = _timed(calls, (), dtype, (B, H, 1, Nk, D))
            splits = [name if isinstance(name, int) else 0 for name in frame["name"]]
            size = {"copy": 2 * source.numel() * source.element_size()}
            frame["bytes"] = [size.get(name, kv_bytes(B, Hkv, Nk, D)) for name in frame["name"]]
            frame["name"] = [rung.stem if s else name for s, name in zip(splits, frame["name"], strict=True)]
            frames.append(frame.assign(Hkv=Hkv, splits=splits, chosen=[int(s == own) for s in splits]))
            progress(f"  decode {dtype} {(B, H, Hkv, Nk, D)}: {own} splits by itself")
    return joined(frames, ["name", "dtype", *SHAPE, "Hkv", "splits", "chosen", "bytes", "round", "ms"])


def progress(line: str) -> None:
    """A line for whoever waits, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _timed(calls: dict, given: Sequence[Tensor], dtype: str, shape: Shape) -> pd.DataFrame:
    frame = measure(calls, given, burst_ms=BURST_MS[dtype])
    best = frame.groupby("name", sort=False)["ms"].median()
    progress(f"  {dtype} {shape}: " + ", ".join(f"{n} {x:.3f} ms" for n, x in best.items()))
    return frame.assign(dtype=dtype, **dict(zip(SHAPE, shape, strict=True)))


def joined(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """One frame of these columns and of those that the sensors have filled."""
    columns = [*columns, *(c for c in sensors.COLUMNS if c in frames[0] and c not in columns)]
    result = pd.concat(frames, ignore_index=True)[columns]
    result.attrs = dict(frames[0].attrs)
    return result
