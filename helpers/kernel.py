"""A loaded kernel: the shape and dtype contract, allocation and one call, the same on both back ends."""

from __future__ import annotations

import ctypes
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ladder import MAX_WORKSPACE, Rung, parse
from .ladder import rung as find_rung
from .toolkit import OLDEST_ARCH, ToolkitError, matching_toolkit

if TYPE_CHECKING:
    from torch import Tensor

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


def load(
    which: str | Path | None = None, *, source: str | None = None, device: str | None = None, quiet: bool = False
) -> Kernel:
    """Compiles a kernel and gives it back ready to call.

    `which` is a rung's stem ("03_fa1_fp32") or the path of a `.cu`; or `source` is the text of one. `device` is "cuda"
    (nvcc) or "cpu" (the emulator); by default "cuda" where this machine can, else "cpu". Prints one line unless `quiet`.
    Raises ValueError for an unknown rung, CompileError with the reader's file and line, ToolkitError if a compiler is
    missing.
    """
    if (which is None) == (source is None):
        raise ValueError("load takes either a rung (a stem or the path of a .cu) or source=..., one of the two")
    rung = find_rung(which) if which is not None else parse(source, Path("cell"))
    chosen, why_not = (device, "") if device else default_device(rung)
    if chosen not in ("cuda", "cpu"):
        raise ValueError(f"device {device!r}: allowed are 'cuda' (nvcc) and 'cpu' (the emulator)")
    if chosen == "cuda":
        from . import jit as back_end

        if reason := cuda_refusal(rung):
            raise ToolkitError(reason)
    else:
        from . import emulator as back_end
    start = time.perf_counter()
    launcher = back_end.load(rung, rung.source)
    kernel = Kernel(rung, chosen, launcher, time.perf_counter() - start)
    if not quiet:
        print(summary(kernel) + (f" ({why_not})" if why_not else ""))
    return kernel


def cuda_refusal(rung: Rung) -> str:
    """Why this machine's GPU can't run `rung`, in one sentence that names the mend; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        if not Path("/proc/driver/nvidia/version").exists():
            return "no GPU found: with an NVIDIA GPU in this machine, install its driver; without, use the emulator"
        if torch.version.cuda is None:
            return "there is a GPU, but this torch was built without CUDA: install torch 2.13.0 in its CUDA build"
        return "torch can't use the GPU: check with `nvidia-smi` that the driver works and is new enough for CUDA 13"
    major, minor = torch.cuda.get_device_capability()
    needed = max(int(rung.arch.removeprefix("sm_").rstrip("a")), OLDEST_ARCH)
    if 10 * major + minor < needed:
        return f"{rung.stem} needs compute capability {needed / 10}, this GPU has {major}.{minor}: it takes the emulator lane"
    if rung.arch.endswith("a") and 10 * major + minor != needed:
        return f"{rung.stem} needs compute capability {needed / 10} exactly, this GPU has {major}.{minor}: it takes the emulator lane"
    try:
        matching_toolkit(torch.version.cuda)
    except ToolkitError as error:
        return str(error)
    return ""


def default_device(rung: Rung) -> tuple[str, str]:
    """The device a rung is loaded for unless told otherwise, and why it isn't "cuda" although there is a GPU."""
    import torch

    reason = cuda_refusal(rung)
    return ("cpu", reason if torch.cuda.is_available() else "") if reason else ("cuda", "")


def summary(kernel: Kernel) -> str:
    """One line on a build: how long it took and what the compiler made of it."""
    launcher = kernel.launcher
    line = f"{kernel.rung.stem} · {launcher.backend} · {'unchanged' if launcher.cached else 'compiled'}, {kernel.seconds:.2f} s"
    if launcher.resources is not None:
        most = launcher.resources.max()
        spilled = most["spill_store_bytes"] + most["spill_load_bytes"]
        line += f" · {most['registers']} registers, {f'{spilled} bytes spilled' if spilled else 'no spills'}"
        line += f", {most['smem_bytes'] / 1024:.3g} KB static shared memory"
    return line


class Kernel:
    """A compiled rung. `o, lse = kernel(q, k, v)`, or `p, lse = kernel(s)` for a softmax rung.

    `rung`, `source`, `device` ("cuda" or "cpu"), `backend` ("nvcc" or "emulator"), `launcher`, and the `seconds` its
    loading took.
    """

    def __init__(self, rung: Rung, device: str, launcher: Any, seconds: float) -> None:
        self.rung, self.source, self.device, self.launcher = rung, rung.source, device, launcher
        self.seconds = seconds

    @property
    def backend(self) -> str:
        """ "nvcc" or "emulator"."""
        return self.launcher.backend

    def __repr__(self) -> str:
        return f"Kernel({self.rung.stem!r}, backend={self.backend!r})"

    def __call__(
        self, *inputs: Tensor, scale: float | None = None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the kernel; on CUDA it is queued on the current stream and not waited for.

        Attention: q (B,H,Nq,D), k and v (B,H,Nk,D), last dimension contiguous; scale defaults to 1/√D; gives
        o (B,H,Nq,D) and lse (B,H,Nq) in fp32. Softmax: s (…,N) contiguous fp32; gives p (…,N) and lse (…).
        `out` are tensors to write into. Raises ValueError that names what came and what is allowed, KernelError for
        CUDA's errors and the emulator's findings.
        """
        if out is not None and len(out) != 2:
            raise ValueError(f"out takes two tensors, {len(out)} came")
        prepare = _softmax_call if self.rung.op == "softmax" else _attention_call
        args, tensors, results = prepare(self, inputs, scale, out)
        self._run(args, tensors)
        return results

    def _run(self, args: FaArgs, tensors: dict[str, Tensor]) -> None:
        import torch

        if self.device == "cpu":
            return self.launcher.launch(args, tensors)
        with torch.cuda.device(tensors["Q"].device):
            self.launcher.launch(args, tensors, torch.cuda.current_stream().cuda_stream)


def _attention_call(kernel: Kernel, inputs: tuple[Tensor, ...], scale: float | None, out: Any) -> tuple:
    import torch

    name = kernel.rung.stem
    if len(inputs) != 3:
        raise ValueError(f"{name} takes q, k, v; {len(inputs)} inputs came")
    q, k, v = inputs
    for letter, t in zip("qkv", inputs):
        _require_tensor(kernel, letter, t)
        if t.dim() != 4:
            raise ValueError(f"{letter} has shape {tuple(t.shape)}; {name} takes four dimensions (B, H, N, D)")
        if t.numel() == 0:
            raise ValueError(
                f"{letter} has shape {tuple(t.shape)}, which is empty; every dimension has to be at least 1"
            )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; they have to be on one device")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they have to be the same")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they have to be the same")
    B, H, Nq, D = q.shape
    Nk = k.shape[2]
    if k.shape[:2] != (B, H) or k.shape[3] != D:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; batch, heads and head dimension have to agree "
            f"(k: ({B}, {H}, any, {D}))"
        )
    if kernel.rung.D and D not in kernel.rung.D:
        raise ValueError(f"head dimension {D}: {name} takes D in {', '.join(map(str, kernel.rung.D))}")
    scale = D**-0.5 if scale is None else _number("scale", scale)
    o, lse = (
        out
        if out is not None
        else (
            torch.empty(B, H, Nq, D, dtype=q.dtype, device=q.device),
            torch.empty(B, H, Nq, dtype=torch.float32, device=q.device),
        )
    )
    _require_out("o", o, (B, H, Nq, D), q)
    _require_out("lse", lse, (B, H, Nq), q, torch.float32, contiguous=True)
    for letter, t in zip(("q", "k", "v", "o"), (q, k, v, o)):
        _require_rows(kernel, letter, t)
    sizes = {"B": B, "H": H, "Nq": Nq, "Nk": Nk, "D": D}
    workspace = _workspace(kernel.rung, sizes, q)
    args = FaArgs(LSE=lse.data_ptr(), dtype=_dtype_code(q), scale=scale, **sizes)
    for letter, t in zip("QKVO", (q, k, v, o)):
        setattr(args, letter, t.data_ptr())
        getattr(args, f"{letter}_stride")[:] = [s if n > 1 else 0 for n, s in zip(t.shape[:3], t.stride()[:3])]
    args.workspace[: len(workspace)] = [t.data_ptr() for t in workspace.values()]
    return args, {"Q": q, "K": k, "V": v, "O": o, "LSE": lse, **workspace}, (o, lse)


def _softmax_call(kernel: Kernel, inputs: tuple[Tensor, ...], scale: float | None, out: Any) -> tuple:
    import torch

    name = kernel.rung.stem
    if len(inputs) != 1:
        raise ValueError(f"{name} takes one tensor of scores s; {len(inputs)} inputs came")
    if scale is not None:
        raise ValueError(f"{name} takes no scale; scale the scores first")
    (s,) = inputs
    _require_tensor(kernel, "s", s)
    if s.dim() == 0 or s.numel() == 0:
        raise ValueError(f"s has shape {tuple(s.shape)}; {name} takes (..., N) with every dimension at least 1")
    if not s.is_contiguous():
        raise ValueError(
            f"s has shape {tuple(s.shape)} and strides {s.stride()}; it has to be contiguous: s.contiguous()"
        )
    N = s.shape[-1]
    rows = s.numel() // N
    if max(rows, N) >= 2**31:
        raise ValueError(f"s has {rows} rows of {N}; both have to be below 2^31")
    p, lse = (
        out
        if out is not None
        else (torch.empty_like(s), torch.empty(s.shape[:-1], dtype=torch.float32, device=s.device))
    )
    _require_out("p", p, tuple(s.shape), s, contiguous=True)
    _require_out("lse", lse, tuple(s.shape[:-1]), s, torch.float32, contiguous=True)
    workspace = _workspace(kernel.rung, {"rows": rows, "N": N}, s)
    args = FaArgs(Q=s.data_ptr(), O=p.data_ptr(), LSE=lse.data_ptr(), B=1, H=1, Nq=rows, Nk=N, D=1, scale=1.0)
    args.dtype = _dtype_code(s)
    args.Q_stride[:] = args.O_stride[:] = [0, 0, N]
    args.workspace[: len(workspace)] = [t.data_ptr() for t in workspace.values()]
    return args, {"Q": s, "O": p, "LSE": lse, **workspace}, (p, lse)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; it has to be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it has to be finite")
    return number


def _dtype_code(t: Tensor) -> int:
    return list(TORCH_NAMES.values()).index(str(t.dtype).removeprefix("torch."))


def _require_tensor(kernel: Kernel, letter: str, t: Any) -> None:
    import torch

    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{letter} is a {type(t).__name__}; {kernel.rung.stem} takes torch tensors")
    allowed = [TORCH_NAMES[name] for name in kernel.rung.dtypes]
    if str(t.dtype).removeprefix("torch.") not in allowed:
        raise ValueError(f"{letter} is {t.dtype}; {kernel.rung.stem} takes {', '.join(allowed)}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{letter} asks for a gradient, and {kernel.rung.stem} has no backward: pass {letter}.detach(), "
            "or call it under torch.no_grad()"
        )
    if t.device.type != kernel.device:
        mend = f"{letter}.{'cuda' if kernel.device == 'cuda' else 'cpu'}()"
        raise ValueError(f"{letter} is on {t.device}, {kernel.rung.stem} was loaded for {kernel.device}: pass {mend}")


def _require_out(
    letter: str, t: Tensor, shape: tuple[int, ...], like: Tensor, dtype: Any = None, contiguous: bool = False
) -> None:
    import torch

    dtype = dtype or like.dtype
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"out: {letter} is a {type(t).__name__}; out takes two tensors")
    if tuple(t.shape) != shape or t.dtype != dtype or t.device != like.device:
        raise ValueError(
            f"out: {letter} is {t.dtype} {tuple(t.shape)} on {t.device}; it has to be {dtype} {shape} on {like.device}"
        )
    if contiguous and not t.is_contiguous():
        raise ValueError(f"out: {letter} has strides {t.stride()}; it has to be contiguous")
    if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride())):
        raise ValueError(f"out: {letter} has strides {t.stride()}; its elements have to have places of their own")


def _require_rows(kernel: Kernel, letter: str, t: Tensor) -> None:
    """Rows are contiguous; a rung with a list of D reads them 16 bytes at a time, so each has to start at a multiple."""
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{letter} has strides {t.stride()}; the last has to be 1: {letter}.contiguous()")
    if not kernel.rung.D:
        return
    steps = [s * t.element_size() for n, s in zip(t.shape[:3], t.stride()[:3]) if n > 1]
    if t.data_ptr() % 16 or any(step % 16 for step in steps):
        raise ValueError(
            f"{letter} starts at address {t.data_ptr() % 16} modulo 16 and has strides of {steps} bytes; "
            f"{kernel.rung.stem} reads 16 bytes at a time, so all of them have to be multiples of 16: {letter}.clone()"
        )


def _workspace(rung: Rung, sizes: dict[str, int], like: Tensor) -> dict[str, Tensor]:
    import torch

    return {
        name: torch.empty([sizes[word] for word in dims], dtype=torch.float32, device=like.device)
        for name, dims in rung.workspace
    }
