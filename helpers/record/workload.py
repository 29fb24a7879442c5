"""What is measured: the headline workload, the kinds of record a rung calls for, and the FLOPs and bytes of a call."""

from __future__ import annotations

import pandas as pd

from ..ladder.rung import Rung, rungs

FORWARD_FLOPS = "4*B*H*Nq*Nk*D"  # two products of 2*Nq*Nk*D each; the softmax is not counted
BACKWARD_FLOPS = "10*B*H*Nq*Nk*D"  # five products
SHAPE = ["B", "H", "Nq", "Nk", "D"]
CACHE = ["Hkv", "splits", "chosen", "bytes"]  # what a decode step has besides
TOKENS, WIDTH = 16384, 2048  # B*N and H*D of the headline workload
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # its N
N = 4096  # where one length stands for all
FROM_N = 1024  # mean ratios are over N >= FROM_N
CUBLAS = "cuBLAS"
# PyTorch's back ends of scaled_dot_product_attention by their names in records -> members of torch.nn.attention.SDPBackend.
MATH, EFFICIENT, FLASH, CUDNN = "SDPA MATH", "SDPA EFFICIENT", "SDPA FLASH", "SDPA CUDNN"
BACK_ENDS = {
    MATH: "MATH",
    EFFICIENT: "EFFICIENT_ATTENTION",
    FLASH: "FLASH_ATTENTION",
    CUDNN: "CUDNN_ATTENTION",
}
FORM_S = ("01_naive", MATH)  # these write S and P to memory
FA2, FA3, FA4 = "flash_attn", "FA3", "FA4"  # FlashAttention-2, -3 and -4 of their own packages


def forward_flops(B: int, H: int, Nq: int, Nk: int, D: int) -> int:
    """Floating-point operations of attention's forward pass: 4·B·H·Nq·Nk·D, softmax not counted. Arrays work too."""
    return 4 * B * H * Nq * Nk * D


def attention_flops(B: int, H: int, Nq: int, Nk: int, D: int, causal: bool = False) -> float:
    """As forward_flops, and half of it under a causal mask. Arrays work too."""
    return forward_flops(B, H, Nq, Nk, D) / (1 + causal)


def kv_bytes(B: int, Hkv: int, Nk: int, D: int, itemsize: int = 2) -> int:
    """Bytes of a cache's K and V, which a decode step has to read once."""
    return 2 * itemsize * B * Hkv * Nk * D


def forward_bytes(B: int, H: int, Nq: int, Nk: int, D: int, itemsize: int = 4) -> int:
    """Bytes no forward pass can avoid: Q, K, V read and O written once (`itemsize` each), LSE written in float32."""
    return B * H * (itemsize * D * (2 * Nq + 2 * Nk) + 4 * Nq)


def least_bytes(name: str, B: int, H: int, Nq: int, Nk: int, D: int, itemsize: int = 4) -> int:
    """Bytes that have to cross to and from HBM for a kernel of this kind, whatever the caches hold.

    Those of forward_bytes; and for the kernels that form S and P (01_naive, SDPA MATH) both matrices, written and read once.
    """
    formed = 4 * itemsize * B * H * Nq * Nk if name in FORM_S else 0
    return forward_bytes(B, H, Nq, Nk, D, itemsize) + formed


def softmax_bytes(rows: int, N: int) -> int:
    """Bytes no float32 row softmax can avoid: S read, P written, LSE written."""
    return 4 * (2 * rows * N + rows)


def headline(samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of the headline workload: B·N = 16384 tokens, H·D = 2048; for softmax the same N, 512 to 16384 by twos."""
    attention = (samples["B"] * samples["Nq"] == TOKENS) & (samples["H"] * samples["D"] == WIDTH)
    softmax = (samples["D"] == 1) & samples["Nk"].isin(LENGTHS)
    return samples[attention | softmax]


def kinds(rung: Rung) -> tuple[str, ...]:
    """The kinds of timings that a rung's operation and features call for, the one it is judged by first."""
    if rung.op == "attention_backward":
        in_order = "deterministic" in rung.features and "fp16" in rung.dtypes  # 22 always adds in one order
        return ("backward", "deterministic") if in_order else ("backward",)
    if "splits" in rung.features:
        return ("decode",)
    hopper = rung.arch == "sm_90a"
    asked = {"causal": "causal" in rung.features, "groups": "gqa" in rung.features, "packed": "varlen" in rung.features}
    return "forward", *(kind for kind, yes in asked.items() if yes), *(("matmul",) if hopper else ())


def timed_by_family(rung: Rung) -> bool:
    """Whether a rung is timed by family of inputs: attention on 16-bit inputs, but for a decode step."""
    return "fp16" in rung.dtypes and rung.op != "softmax" and "splits" not in rung.features


def rung_before(rung: Rung) -> Rung | None:
    """The rung before this one among those that are timed by family and do the same operation; None before the first."""
    found = [r for r in rungs() if timed_by_family(r) and r.op == rung.op and r.number < rung.number]
    return found[-1] if found else None
