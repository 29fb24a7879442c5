"""What a call of a kernel takes: shapes, dtypes, strides and features, checked before the launch with words that say what
came and what is allowed; and the structs of kernels/include/fa that carry it, mirrored with ctypes.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import CallError
from .rung import IN_TILES, MAX_WORKSPACE, Rung

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 2**30  # of any dimension: kernels add up a few positions in 32 bits
MOST_RANKS, MOST_COPIERS = 8, 32  # as many as fa_peers_args has room for
SIGNALS = MOST_RANKS * (1 + MOST_COPIERS)  # flags of one rank: fa::signals_per_rank
STEPS = {"announce": 1, "attend": 2, "settle": 4, "fetch": 8}  # fa::step
INPUTS_ONLY = {  # what a kernel without features takes, by operation; any other takes q, k, v and a scale
    "softmax": "scores s only",
    "merge": "o_a, lse_a, o_b, lse_b only",
    "attention_backward": "q, k, v, o, lse, do and a scale only",
}
TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # in the order of fa_dtype in fa/args.cuh


class FaArgs(ctypes.Structure):
    """`fa_args` of kernels/include/fa/args.cuh, field by field."""

    _fields_ = [
        ("Q", ctypes.c_void_p),
        ("K", ctypes.c_void_p),
        ("V", ctypes.c_void_p),
        ("O", ctypes.c_void_p),
        ("LSE", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p * MAX_WORKSPACE),
        ("Q_stride", ctypes.c_int64 * 3),
        ("K_stride", ctypes.c_int64 * 3),
        ("V_stride", ctypes.c_int64 * 3),
        ("O_stride", ctypes.c_int64 * 3),
        ("B", ctypes.c_int32),
        ("H", ctypes.c_int32),
        ("Nq", ctypes.c_int32),
        ("Nk", ctypes.c_int32),
        ("D", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class FaModelArgs(FaArgs):
    """`fa_model_args` of kernels/include/fa/model.cuh, field by field."""

    _fields_ = [
        ("q_starts", ctypes.c_void_p),
        ("k_starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("sequences", ctypes.c_int32),
        ("max_pages", ctypes.c_int32),
        ("page", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("Hkv", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("window", ctypes.c_int32),
    ]


class FaBackwardArgs(FaModelArgs):
    """`fa_backward_args` of kernels/include/fa/model.cuh, field by field."""

    _fields_ = [
        ("dO", ctypes.c_void_p),
        ("dQ", ctypes.c_void_p),
        ("dK", ctypes.c_void_p),
        ("dV", ctypes.c_void_p),
        ("dO_stride", ctypes.c_int64 * 3),
        ("dQ_stride", ctypes.c_int64 * 3),
        ("dK_stride", ctypes.c_int64 * 3),
        ("dV_stride", ctypes.c_int64 * 3),
        ("deterministic", ctypes.c_int32),
    ]


class FaPeersArgs(FaModelArgs):
    """`fa_peers_args` of kernels/include/fa/peers.cuh, field by field."""

    _fields_ = [
        ("peer_K", ctypes.c_void_p * MOST_RANKS),
        ("peer_V", ctypes.c_void_p * MOST_RANKS),
        ("signals", ctypes.c_void_p * MOST_RANKS),
        ("near_K", ctypes.c_void_p),
        ("near_V", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("copiers", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("epoch", ctypes.c_uint32),
    ]


class FaMergeArgs(FaArgs):
    """`fa_merge_args` of kernels/include/fa/merge.cuh, field by field."""

    _fields_ = [
        ("O_a", ctypes.c_void_p),
        ("O_b", ctypes.c_void_p),
        ("LSE_a", ctypes.c_void_p),
        ("LSE_b", ctypes.c_void_p),
        ("O_a_stride", ctypes.c_int64 * 3),
        ("O_b_stride", ctypes.c_int64 * 3),
        ("LSE_a_stride", ctypes.c_int64 * 2),
        ("LSE_b_stride", ctypes.c_int64 * 2),
        ("LSE_stride", ctypes.c_int64 * 2),
        ("a_fp32", ctypes.c_int32),
        ("o_fp32", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Peers:
    """What one call of a kernel that fetches other ranks' keys itself (51) is told of them; `helpers.one_sided` makes it.

    keys, values: of each rank (B,Hkv,n,D), contiguous; this rank's own may be None. signals: of each rank int32 (SIGNALS), zeros before
    the first call. near_k, near_v: room for (B,Hkv,far_rows,D) of the others' keys and values; arrived: int32, zeros before the first
    call, at least B * Hkv * far_rows / 128. epoch: the number of the call, from 1, the same on all ranks. steps: of STEPS; "fetch" copies and does
    no more.
    """

    rank: int
    keys: tuple[Tensor | None, ...]
    values: tuple[Tensor | None, ...]
    signals: tuple[Tensor, ...]
    near_k: Tensor
    near_v: Tensor
    arrived: Tensor
    epoch: int
    copiers: int = 1
    steps: tuple[str, ...] = ("announce", "attend", "settle")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.signals)


def far_rows(rank: int, ranks: int, n: int, causal: bool) -> int:
    """Keys of other ranks that a rank sees, each having n: all, and in zigzag under a causal mask of each earlier rank half."""
    early = rank if causal else 0
    return early * (n // 2) + (ranks - 1 - early) * n


@dataclass(frozen=True)
class Call:
    """One call, checked and ready to launch: `args` for fa_launch, and every tensor it points at by its name there.

    `inputs` hold what the caller gave, `outputs` are what the kernel writes, in the order in which a caller gets them, and
    `workspace` is fp32 scratch memory in the order of the header block. Outputs and workspace are not initialised. `flags`, which a
    kernel reads and writes, are initialised; `scratch` is not. Names like "peer_K[1]" are elements of a field. `over`: by output, the
    input in whose memory it lies.
    """

    args: FaArgs
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    workspace: dict[str, Tensor] = field(default_factory=dict)
    flags: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Tensor] = field(default_factory=dict)
    far: frozenset[str] = frozenset()  # of the inputs those that another GPU writes
    over: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them: inputs, outputs, workspace, flags, scratch. Of an input and an output in one memory, the input."""
        outputs = {name: t for name, t in self.outputs.items() if name not in self.over}
        return {**self.inputs, **outputs, **self.workspace, **self.flags, **self.scratch}

    def point(self, args: FaArgs, name: str, address: int) -> None:
        """Sets the field of `args`, this call's or a copy, that points at the tensor of this name, and those of outputs over it."""
        for output in (output for output, of in self.over.items() if of == name):
            setattr(args, output, address)
        if name in self.workspace:
            args.workspace[list(self.workspace).index(name)] = address
        elif "[" in name:
            array, _, index = name.rstrip("]").partition("[")
            getattr(args, array)[int(index)] = address
        else:
            setattr(args, name, address)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What the caller gets."""
        return tuple(self.outputs.values())


def prepare(
    rung: Rung,
    device: str,
    inputs: tuple[Tensor, ...],
    *,
    scale: float | None = None,
    out: tuple[Tensor, ...] | None = None,
    **features: Any,
) -> Call:
    """Checks one call of `rung` on `device` ("cuda" or "cpu"), allocates what it writes, and fills the arguments in.

    Attention: q (B,H,Nq,D), k and v (B,Hkv,Nk,D) -> o (B,H,Nq,D), lse (B,H,Nq) fp32. Softmax: s (..., N) -> p, lse (...).
    Backward: q, k, v, o, lse, do -> dq, dk, dv. Merge: o_a, lse_a, o_b, lse_b -> o, lse. One-sided: as attention, with `peers`. Each in the rung's dtypes; `features` (FEATURES of rung.py) as
    Kernel.__call__ describes them. CallError names what came and what is allowed.
    """
    kind = {"softmax": _softmax, "attention_backward": _backward, "merge": _merge, "one_sided": _one_sided}.get(
        rung.op, _attention
    )
    count = 3 if rung.op == "attention_backward" else 2
    if out is not None and not (isinstance(out, tuple | list) and len(out) == count):
        given = len(out) if isinstance(out, tuple | list) else type(out).__name__
        raise CallError(f"out takes {'three' if count == 3 else 'two'} tensors; got {given}")
    asked = {name: value for name, value in features.items() if value is not None and value is not False}
    for name in asked:
        feature = {"cu_seqlens": "varlen"}.get(name, name)
        if feature not in rung.features:
            otherwise = INPUTS_ONLY.get(rung.op, "q, k, v and a scale only")
            raise CallError(f"{rung.stem} takes no {name}; it takes {', '.join(rung.features) or otherwise}")
    return kind(rung, device, inputs, scale, out, asked)


def _attention(rung: Rung, device: str, inputs: tuple, scale: float | None, out: Any, asked: dict) -> Call:
    import torch

    q, k, v = _qkv(rung, device, inputs, "q, k, v")
    args, given = _arguments(rung, q, k, v, scale, asked)
    if out is None:
        o, lse = room(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    else:
        o, lse = out
        _require_out("o", o, q.shape, q)
        _require_out("lse", lse, q.shape[:3], q, torch.float32, contiguous=True)
    _point(rung, args, O=o)
    args.LSE = lse.data_ptr()
    return Call(args, given, {"O": o, "LSE": lse}, _workspace(rung, args, q))


def _one_sided(rung: Rung, device: str, inputs: tuple, scale: float | None, out: Any, asked: dict) -> Call:
    """Attention to a rank's own keys and those of its peers."""
    peers = asked.pop("peers", None)
    if not isinstance(peers, Peers):
        raise CallError(f"{rung.stem} takes peers=, of helpers.one_sided; got {type(peers).__name__}")
    one = _attention(rung, device, inputs, scale, out, asked)
    q, k = inputs[:2]
    args = FaPeersArgs()
    ctypes.memmove(ctypes.byref(args), ctypes.byref(one.args), ctypes.sizeof(FaModelArgs))
    ranks, n = peers.ranks, k.shape[2]
    if not 1 <= ranks <= MOST_RANKS or not 1 <= peers.copiers <= MOST_COPIERS or not 0 <= peers.rank < ranks:
        raise CallError(
            f"rank {peers.rank} of {ranks}, {peers.copiers} copiers; there can be at most {MOST_RANKS} ranks and {MOST_COPIERS} copiers"
        )
    if peers.epoch < 1:
        raise CallError(f"epoch is {peers.epoch}; calls are numbered from 1: with 0 no rank would wait for another")
    whole = 256 if args.causal else 128
    if ranks > 1 and (q.shape[2] != n or n % whole):
        mask = " under a causal mask" if args.causal else ""
        raise CallError(
            f"{q.shape[2]} queries and {n} keys of each rank; {rung.stem} takes the same multiple of {whole}{mask}"
        )
    rows = far_rows(peers.rank, ranks, n, bool(args.causal))
    far = {}
    for letter, tensors in (("K", peers.keys), ("V", peers.values)):
        for r, t in enumerate(tensors):
            if r == peers.rank:
                continue
            if t is None or t.shape != k.shape or t.dtype != k.dtype or not t.is_contiguous():
                what = "missing" if t is None else f"{t.dtype} {tuple(t.shape)}, strides {t.stride()}"
                raise CallError(f"{letter} of rank {r} is {what}; it has to be contiguous {k.dtype} {tuple(k.shape)}")
            if at := t.data_ptr() % 16:
                raise CallError(
                    f"{letter} of rank {r} starts at address {at} modulo 16; it has to start at a multiple of 16"
                )
            far[f"peer_{letter}[{r}]"] = t
    heads = k.shape[0] * k.shape[1]
    scratch = {"near_K": peers.near_k, "near_V": peers.near_v} if rows else {}
    for name, t in scratch.items():
        if t.numel() != heads * rows * k.shape[3] or t.dtype != k.dtype or not t.is_contiguous():
            shape = (*k.shape[:2], rows, k.shape[3])
            raise CallError(f"{name} is {t.dtype} {tuple(t.shape)}; it has to be contiguous {k.dtype} {shape}")
    _require_flags("arrived", peers.arrived, heads * rows // 128)
    for r, t in enumerate(peers.signals):
        _require_flags(f"signals of rank {r}", t, SIGNALS)
    flags = {f"signals[{r}]": t for r, t in enumerate(peers.signals)} | {"arrived": peers.arrived}
    call = Call(args, one.inputs | far, one.outputs, one.workspace, flags, scratch, frozenset(far))
    for name, t in {**far, **flags, **scratch}.items():
        call.point(args, name, t.data_ptr())
    args.rank, args.ranks, args.copiers = peers.rank, ranks, peers.copiers
    args.steps, args.epoch = sum(STEPS[step] for step in peers.steps), peers.epoch
    return call


def _require_flags(name: str, t: Tensor, least: int) -> None:
    import torch

    if t.dtype != torch.int32 or t.numel() < least or not t.is_contiguous():
        raise CallError(f"{name}: {t.dtype} {tuple(t.shape)}; it has to be contiguous int32, at least {least}")


def _backward(rung: Rung, device: str, inputs: tuple, scale: float | None, out: Any, asked: dict) -> Call:
    import torch

    if len(inputs) != 6:
        raise CallError(f"{rung.stem} takes q, k, v, o, lse, do; got {len(inputs)}")
    q, k, v = _qkv(rung, device, inputs[:3], "q, k, v, o, lse, do")
    o, lse, do = inputs[3:]
    for letter, t in (("o", o), ("do", do)):
        _require_tensor(rung, device, letter, t)
        if t.shape != q.shape or t.dtype != q.dtype or t.device != q.device:
            raise CallError(
                f"{letter} is {t.dtype} {tuple(t.shape)} on {t.device}; it has to be as q: {q.dtype} {tuple(q.shape)} on {q.device}"
            )
    if not isinstance(lse, torch.Tensor):
        raise CallError(f"lse is a {type(lse).__name__}; {rung.stem} takes torch tensors")
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or lse.device != q.device or not lse.is_contiguous():
        raise CallError(
            f"lse is {lse.dtype} {tuple(lse.shape)} on {lse.device}; it has to be contiguous float32 {tuple(q.shape[:3])} on {q.device}"
        )
    args, given = _arguments(rung, q, k, v, scale, asked)
    if out is None:
        dq, dk, dv = room(q), room(k), room(v)
    else:
        dq, dk, dv = out
        for letter, result, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            _require_out(letter, result, like.shape, like)
    _point(rung, args, O=o, dO=do, dQ=dq, dK=dk, dV=dv)
    args.LSE = lse.data_ptr()
    given |= {"O": o, "LSE": lse, "dO": do}
    return Call(args, given, {"dQ": dq, "dK": dk, "dV": dv}, _workspace(rung, args, q))


def _softmax(rung: Rung, device: str, inputs: tuple, scale: float | None, out: Any, asked: dict) -> Call:
    import torch

    name = rung.stem
    if len(inputs) != 1:
        raise CallError(f"{name} takes one tensor of scores s; got {len(inputs)}")
    if scale is not None:
        raise CallError(f"{name} takes no scale; scale the scores first")
    (s,) = inputs
    _require_tensor(rung, device, "s", s)
    if s.dim() == 0 or s.numel() == 0:
        raise CallError(f"s has shape {tuple(s.shape)}; {name} takes (..., N) with every dimension at least 1")
    if not s.is_contiguous():
        raise CallError(
            f"s has shape {tuple(s.shape)} and strides {s.stride()}; it has to be contiguous: s.contiguous()"
        )
    N = s.shape[-1]
    rows = s.numel() // N
    if max(rows, N) >= 2**31:
        raise CallError(f"s has {rows} rows of {N}; both have to be below 2^31")
    p, lse = out or (torch.empty_like(s), s.new_empty(s.shape[:-1], dtype=torch.float32))
    _require_out("p", p, s.shape, s, contiguous=True)
    _require_out("lse", lse, s.shape[:-1], s, torch.float32, contiguous=True)
    args = FaBackwardArgs(Q=s.data_ptr(), O=p.data_ptr(), LSE=lse.data_ptr(), B=1, H=1, Nq=rows, Nk=N, D=1, scale=1.0)
    args.dtype, args.Hkv = _dtype_code(s), 1
    args.Q_stride[:] = args.O_stride[:] = [0, 0, N]
    return Call(args, {"Q": s}, {"O": p, "LSE": lse}, _workspace(rung, args, s))


def _merge(rung: Rung, device: str, inputs: tuple, scale: float | None, out: Any, asked: dict) -> Call:
    """(O, LSE) of two sets of keys, merged. O_b has one of the rung's dtypes; O_a and O have it too or are float32; without
    `out`, O is float32. Every LSE may be rows of a larger one. `out` may be the tensors o_a, lse_a."""
    import torch

    if len(inputs) != 4:
        raise CallError(f"{rung.stem} takes o_a, lse_a, o_b, lse_b; got {len(inputs)}")
    if scale is not None:
        raise CallError(f"{rung.stem} takes no scale")
    o_a, lse_a, o_b, lse_b = inputs
    _require_tensor(rung, device, "o_b", o_b)
    _require_tensor(rung if "fp32" in rung.dtypes else replace(rung, dtypes=("fp32", *rung.dtypes)), device, "o_a", o_a)
    if o_b.dim() != 4 or o_b.numel() == 0:
        raise CallError(f"o_b has shape {tuple(o_b.shape)}; it has to be (B, H, N, D), every dimension at least 1")
    if rung.D and o_b.shape[3] not in rung.D:
        raise CallError(f"head dimension {o_b.shape[3]}: {rung.stem} takes D in {', '.join(map(str, rung.D))}")
    if out is None:
        out = o_b.new_empty(o_b.shape, dtype=torch.float32), o_b.new_empty(o_b.shape[:3], dtype=torch.float32)
    o, lse = out
    for name, t in (("o_a", o_a), ("out: o", o)):
        if not isinstance(t, torch.Tensor):
            raise CallError(f"{name} is a {type(t).__name__}; {rung.stem} takes torch tensors")
        if t.shape != o_b.shape or t.dtype not in (torch.float32, o_b.dtype) or t.device != o_b.device:
            raise CallError(
                f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}; it has to be {o_b.dtype} or torch.float32 "
                f"{tuple(o_b.shape)} on {o_b.device}, as o_b"
            )
    for name, t in (("lse_a", lse_a), ("lse_b", lse_b), ("out: lse", lse)):
        if not isinstance(t, torch.Tensor) or t.shape != o_b.shape[:3] or t.dtype != torch.float32 or t.stride(2) != 1:
            what = (
                f"{t.dtype} {tuple(t.shape)}, strides {t.stride()}" if isinstance(t, torch.Tensor) else type(t).__name__
            )
            raise CallError(f"{name} is {what}; it has to be float32 {tuple(o_b.shape[:3])} with contiguous rows")
        if t.device != o_b.device:
            raise CallError(f"{name} is on {t.device}; it has to be on {o_b.device}")
    B, H, N, D = o_b.shape
    args = FaMergeArgs(B=B, H=H, Nq=N, Nk=N, D=D, dtype=_dtype_code(o_b), scale=1.0)
    args.a_fp32, args.o_fp32 = (int(t.dtype == torch.float32) for t in (o_a, o))
    _point(rung, args, O_a=o_a, O_b=o_b, O=o)
    for name, t in (("LSE_a", lse_a), ("LSE_b", lse_b), ("LSE", lse)):
        setattr(args, name, t.data_ptr())
        getattr(args, f"{name}_stride")[:] = t.stride()[:2]
    inputs, outputs = {"O_a": o_a, "LSE_a": lse_a, "O_b": o_b, "LSE_b": lse_b}, {"O": o, "LSE": lse}
    over = {name: f"{name}_a" for name, t in outputs.items() if _same_memory(t, inputs[f"{name}_a"])}
    return Call(args, inputs, outputs, over=over)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Element by element."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def _qkv(rung: Rung, device: str, inputs: tuple, names: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v that go together, apart from their lengths."""
    if len(inputs) != 3:
        raise CallError(f"{rung.stem} takes {names}; got {len(inputs)}")
    q, k, v = inputs
    for letter, t in zip("qkv", inputs, strict=True):
        _require_tensor(rung, device, letter, t)
        if t.dim() != 4:
            raise CallError(f"{letter} has shape {tuple(t.shape)}; {rung.stem} takes four dimensions (B, H, N, D)")
        if t.numel() == 0:
            raise CallError(
                f"{letter} has shape {tuple(t.shape)}, which is empty; every dimension has to be at least 1"
            )
        if max(t.shape) > MOST:
            raise CallError(f"{letter} has shape {tuple(t.shape)}; every dimension has to be at most 2^30")
    if not q.device == k.device == v.device:
        raise CallError(f"q, k, v are on {q.device}, {k.device}, {v.device}; they have to be on one device")
    if not q.dtype == k.dtype == v.dtype:
        raise CallError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they have to be the same")
    if k.shape != v.shape:
        raise CallError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they have to be the same")
    if rung.D and q.shape[3] not in rung.D:
        raise CallError(f"head dimension {q.shape[3]}: {rung.stem} takes D in {', '.join(map(str, rung.D))}")
    return q, k, v


def room(t: Tensor) -> Tensor:
    """For a result of t's shape (B,H,N,D), in t's order: where the heads of a token lie side by side in t, they do in it."""
    B, H, N, D = t.shape
    return t.new_empty(B, N, H, D).transpose(1, 2) if t.stride(1) < t.stride(2) else t.new_empty(t.shape)


def _arguments(
    rung: Rung, q: Tensor, k: Tensor, v: Tensor, scale: float | None, asked: dict
) -> tuple[FaBackwardArgs, dict[str, Tensor]]:
    """The struct with everything about the inputs, and the input tensors by name."""
    _require_matching(rung, q, k, paged="pages" in asked)
    B, H, Nq, D = q.shape
    args = FaBackwardArgs(B=B, H=H, Hkv=k.shape[1], Nq=Nq, Nk=k.shape[2], D=D, dtype=_dtype_code(q), sequences=B)
    args.scale = D**-0.5 if scale is None else _number("scale", scale)
    _point(rung, args, Q=q, K=k, V=v)
    _mask(args, asked)
    args.deterministic = int(bool(asked.get("deterministic", False)))
    given = {"Q": q, "K": k, "V": v, **_packed(args, q, asked), **_cached(args, q, k, asked)}
    args.splits = _splits(rung, args, q, asked)
    return args, given


def _require_matching(rung: Rung, q: Tensor, k: Tensor, paged: bool) -> None:
    """Batch, heads and head dimension of q and k agree; pages are of no batch, and with gqa heads share keys."""
    B, H, _, D = q.shape
    Bk, Hkv, _, Dk = k.shape
    heads = Hkv == H or ("gqa" in rung.features and H % Hkv == 0)
    if not heads or Dk != D or (not paged and Bk != B):
        kv_heads = f"a divisor of {H}" if "gqa" in rung.features else str(H)
        raise CallError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; batch, heads and head dimension have to agree "
            f"(k: ({'any' if paged else B}, {kv_heads}, any, {D}))"
        )


def _mask(args: FaBackwardArgs, asked: dict) -> None:
    """Which keys a query sees: `causal`, and `window` of those."""
    args.causal = int(bool(asked.get("causal", False)))
    if "window" in asked:
        window = asked["window"]
        if not args.causal or not isinstance(window, int) or window < 1:
            raise CallError(
                f"window is {window!r} and causal {bool(args.causal)}; a window is an int, at least 1 key, and needs causal=True"
            )
        args.window = min(window, MOST)  # no more keys than that


def _packed(args: FaBackwardArgs, q: Tensor, asked: dict) -> dict[str, Tensor]:
    """Of a packed batch (`cu_seqlens`), the row numbers at which sequences begin in q and in k."""
    import torch

    if "cu_seqlens" not in asked:
        return {}
    starts = asked["cu_seqlens"]
    if args.B != 1 or "pages" in asked or "lengths" in asked:
        raise CallError("cu_seqlens goes with a batch dimension of 1, in which all sequences lie one behind the other")
    pair = isinstance(starts, tuple | list) and len(starts) == 2 and all(isinstance(x, torch.Tensor) for x in starts)
    if not pair or starts[0].shape != starts[1].shape:
        raise CallError(
            "cu_seqlens takes two tensors of (sequences + 1) row numbers each, of the queries and of the keys"
        )
    given = dict(zip(("q_starts", "k_starts"), starts, strict=True))
    for (name, t), rows in zip(given.items(), (args.Nq, args.Nk), strict=True):
        _require_integers(f"cu_seqlens, {name[0]}", t, q, (max(2, t.numel()),))
        if t.device.type == "cpu" and (t[0] != 0 or t[-1] != rows or (t.diff() < 0).any()):
            raise CallError(f"cu_seqlens is {t.tolist()}; it has to rise from 0 to {rows}, the number of rows")
        setattr(args, name, t.data_ptr())
    args.sequences = starts[0].shape[0] - 1
    return given


def _cached(args: FaBackwardArgs, q: Tensor, k: Tensor, asked: dict) -> dict[str, Tensor]:
    """Of keys in a cache, how many are in use (`lengths`) and in which pages they lie (`pages`); with pages, Nk becomes that of
    a sequence's pages together."""
    given = {name: asked[name] for name in ("lengths", "pages") if name in asked}
    if "lengths" in given:
        _require_integers("lengths", given["lengths"], q, (args.B,))
    if "pages" in given:
        pages = given["pages"]
        if "lengths" not in given:
            raise CallError("pages needs lengths, the number of keys in use of each sequence")
        columns = pages.shape[1] if getattr(pages, "ndim", 0) == 2 else 1
        _require_integers("pages", pages, q, (args.B, max(1, columns)))
        if pages.device.type == "cpu":
            _require_pages(pages, k.shape[0])
        if pages.shape[1] * k.shape[2] > MOST:
            raise CallError(f"pages has room for {pages.shape[1]} pages of {k.shape[2]} keys; 2^30 keys are the most")
        args.max_pages, args.page = pages.shape[1], k.shape[2]
        args.Nk = args.max_pages * args.page
    if "lengths" in given and (t := given["lengths"]).device.type == "cpu" and (t.min() < 0 or t.max() > args.Nk):
        raise CallError(f"lengths are {t.tolist()}; they have to be 0 to {args.Nk}")
    for name, t in given.items():
        setattr(args, name, t.data_ptr())
    return given


def _require_pages(pages: Tensor, there: int) -> None:
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= there:
        raise CallError(f"pages names page {low if low < 0 else high}; k and v have pages 0 to {there - 1}")


def _splits(rung: Rung, args: FaBackwardArgs, q: Tensor, asked: dict) -> int:
    """Pieces to cut the keys into: as asked, or the fewest, of at least 256 keys each, that leave no more than a tenth of the
    places for CTAs empty in the last wave; if there is no such number, the one that leaves fewest empty."""
    import torch

    if "splits" in asked:
        if not isinstance(asked["splits"], int) or not 1 <= asked["splits"] <= 1024:
            raise CallError(f"splits is {asked['splits']!r}; it has to be an int, 1 to 1024")
        return asked["splits"]
    if "splits" not in rung.features:
        return 1
    if q.is_cuda:
        gpu = torch.cuda.get_device_properties(q.device)
        places = gpu.multi_processor_count * rung.ctas(args.D, gpu.shared_memory_per_multiprocessor)
    else:
        places = 4 * rung.ctas(args.D)
    alone = args.B * args.Hkv * -(-args.Nq * (args.H // args.Hkv) // 16)
    return fewest_pieces(alone, places, max(1, min(args.Nk // 256, 1024)))


def fewest_pieces(ctas: int, places: int, most: int) -> int:
    """The smallest n up to `most` with which n * ctas CTAs fill nine tenths of the places of all their waves, or the best n."""

    def filled(n: int) -> float:
        return n * ctas / (-(-n * ctas // places) * places)

    return next((n for n in range(1, most + 1) if filled(n) >= 0.9), max(range(1, most + 1), key=filled))


def _point(rung: Rung, args: FaBackwardArgs, **tensors: Tensor) -> None:
    """Pointer and strides of each tensor (dimension of one element: stride 0). Rows have to be contiguous; a rung with a list of D
    reads them 16 bytes at a time, so each has to start at a multiple."""
    for letter, t in tensors.items():
        address, size, (*steps, last) = t.data_ptr(), t.element_size(), t.stride()
        if last != 1 and t.shape[-1] > 1:
            name = letter.lower()
            raise CallError(f"{name} has strides {t.stride()}; the last has to be 1: {name}.contiguous()")
        steps = [step if n > 1 else 0 for n, step in zip(t.shape, steps)]
        if rung.D and (address % 16 or any([step * size % 16 for step in steps])):
            raise CallError(
                f"{letter.lower()} starts at address {address % 16} modulo 16 and has strides of "
                f"{[step * size for step in steps if step]} bytes; {rung.stem} reads 16 bytes at a time, "
                f"so all of them have to be multiples of 16: {letter.lower()}.clone()"
            )
        setattr(args, letter, address)
        getattr(args, f"{letter}_stride")[:] = steps


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise CallError(f"{name} is {value!r}; it has to be a number") from None
    if not math.isfinite(ctypes.c_float(number * math.log2(math.e)).value):  # as kernels use it
        raise CallError(f"{name} is {number}; times log2(e) it has to be finite as a float32")
    return number


def _dtype_code(t: Tensor) -> int:
    return list(TORCH_NAMES.values()).index(str(t.dtype).removeprefix("torch."))


def _require_tensor(rung: Rung, device: str, letter: str, t: Any) -> None:
    import torch

    if not isinstance(t, torch.Tensor):
        raise CallError(f"{letter} is a {type(t).__name__}; {rung.stem} takes torch tensors")
    allowed = [TORCH_NAMES[name] for name in rung.dtypes]
    if str(t.dtype).removeprefix("torch.") not in allowed:
        told = re.search(r"^// dtypes:(.*)", rung.source, re.MULTILINE)
        why = "" if told else ": its header block has no line `// dtypes:`"
        if told and t.dtype == torch.bfloat16 and "bf16" in told[1]:
            why = ": this GPU's tensor cores have no bf16"
        raise CallError(f"{letter} is {t.dtype}; {rung.stem} takes {', '.join(allowed)}{why}")
    if t.requires_grad and torch.is_grad_enabled():
        raise CallError(
            f"{letter} asks for a gradient, and {rung.stem} has no backward: pass {letter}.detach(), "
            "or call it under torch.no_grad()"
        )
    if t.device.type != device:
        fix = f"{letter}.{'cuda' if device == 'cuda' else 'cpu'}()"
        raise CallError(f"{letter} is on {t.device}, {rung.stem} was loaded for {device}: pass {fix}")


def _require_integers(name: str, t: Any, like: Tensor, shape: tuple[int, ...]) -> None:
    import torch

    if not isinstance(t, torch.Tensor) or t.dtype != torch.int32 or tuple(t.shape) != shape or not t.is_contiguous():
        what = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise CallError(f"{name} is {what}; it has to be a contiguous int32 tensor {shape}")
    if t.device != like.device:
        raise CallError(f"{name} is on {t.device}; it has to be on {like.device}")


def _require_out(
    letter: str, t: Tensor, shape: tuple[int, ...], like: Tensor, dtype: Any = None, contiguous: bool = False
) -> None:
    import torch

    dtype = dtype or like.dtype
    if not isinstance(t, torch.Tensor):
        raise CallError(f"out: {letter} is a {type(t).__name__}; out takes tensors")
    if t.shape != shape or t.dtype != dtype or t.device != like.device:
        raise CallError(
            f"out: {letter} is {t.dtype} {tuple(t.shape)} on {t.device}; it has to be {dtype} {tuple(shape)} on {like.device}"
        )
    if t.data_ptr() == like.data_ptr():
        raise CallError(f"out: {letter} lies in the memory of an input; it has to have its own")
    if contiguous and not t.is_contiguous():
        raise CallError(f"out: {letter} has strides {t.stride()}; it has to be contiguous")
    if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride())):
        raise CallError(f"out: {letter} has strides {t.stride()}; its elements have to have places of their own")


def workspace_shapes(rung: Rung, args: FaBackwardArgs) -> dict[str, list[int]]:
    """The shape of each workspace tensor that the header block lists."""
    sizes = {"rows": args.Nq, "N": args.Nk} if rung.op == "softmax" else {}
    sizes |= {word: getattr(args, word) for word in ("B", "H", "Hkv", "Nq", "Nk", "D", "splits")}
    sizes["Hshared"] = args.H if args.H > args.Hkv else 0

    def size(word: str) -> int:
        if word in sizes:
            return sizes[word]
        tile = IN_TILES.fullmatch(word)
        return -(-args.Nq // int(tile[1])) * int(tile[1]) if tile else int(word)

    return {name: [size(word) for word in dims] for name, dims in rung.workspace}


def _workspace(rung: Rung, args: FaBackwardArgs, like: Tensor) -> dict[str, Tensor]:
    """The fp32 tensors the header block lists, allocated and pointed at."""
    return workspace_of(args, workspace_shapes(rung, args), like.device)


def workspace_of(args: FaArgs, shapes: dict[str, list[int]], device: torch.device) -> dict[str, Tensor]:
    """Fp32 tensors of these shapes, which `args.workspace` points at. For the emulator they are full of NaN, so that whoever reads
    what nobody has written gets a wrong result."""
    import torch

    tensors = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
    if device.type == "cpu":
        for t in tensors.values():
            t.fill_(torch.nan)
    args.workspace[: len(tensors)] = [t.data_ptr() for t in tensors.values()]
    return tensors
