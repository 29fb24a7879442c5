"""A loaded kernel: the shape and dtype contract, allocation and one call, the same on both back ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ladder.contract import Call, prepare
from ..ladder.rung import Rung, parse
from ..ladder.rung import rung as find_rung
from ..toolchain.toolkit import OLDEST_ARCH, ToolkitError, matching_toolkit

if TYPE_CHECKING:
    from torch import Tensor


def described(which: str | Path) -> Rung:
    """The rung that `which` names (a stem, or the path of a `.cu`) or is: a string of more than one line is the text of one."""
    if isinstance(which, Rung):
        return which
    return parse(which, Path("cell")) if isinstance(which, str) and "\n" in which else find_rung(which)


def load(
    which: str | Path | None = None, *, source: str | None = None, device: str | None = None, quiet: bool = False
) -> Kernel:
    """Compiles a kernel and gives it back ready to call.

    `which` is a rung's stem ("03_fa1_fp32"), the path of a `.cu` or the text of one, which `source=` names as such. `device` is
    "cuda" (nvcc) or "cpu" (the emulator); by default "cuda" where this machine can, else "cpu". Prints one line unless `quiet`.
    Raises ValueError for an unknown rung, CompileError with the reader's file and line, ToolkitError if a compiler is
    missing.
    """
    if (which is None) == (source is None):
        raise ValueError("load takes either a rung (a stem, a .cu's path or text) or source=..., one of the two")
    rung = described(which) if which is not None else parse(source, Path("cell"))
    chosen, why_not = (device, "") if device else default_device(rung)
    if chosen not in ("cuda", "cpu"):
        raise ValueError(f"device {device!r}: allowed are 'cuda' (nvcc) and 'cpu' (the emulator)")
    if chosen == "cuda":
        from ..toolchain import nvcc as back_end

        if reason := cuda_refusal(rung):
            raise ToolkitError(reason)
    else:
        from .. import emulator as back_end
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
        self,
        *inputs: Tensor,
        scale: float | None = None,
        out: tuple[Tensor, ...] | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | None = None,
        pages: Tensor | None = None,
        splits: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Runs the kernel; on CUDA it is queued on the current stream and not waited for.

        Attention: q (B,H,Nq,D), k and v (B,H,Nk,D), last dimension contiguous; scale defaults to 1/√D; gives
        o (B,H,Nq,D) and lse (B,H,Nq) in fp32. Softmax: s (…,N) contiguous fp32; gives p (…,N) and lse (…).
        Backward: q, k, v, o, lse, do; gives dq, dk, dv. `out` are tensors to write into.

        The rest is for rungs whose header block lists it under `features`. gqa: k and v have Hkv heads, a divisor of H.
        causal: query i sees keys up to i + Nk − Nq; window: and of those the last `window`. cu_seqlens: int32 (S+1) row
        numbers of q and of k, a packed batch of S sequences (B = 1). lengths: int32 (B) keys in use. pages: int32
        (B,max_pages) with k and v (pages,Hkv,page,D): sequence b's keys are those of its pages, one after the other. splits: pieces that the keys are cut into.
        Raises ValueError that names what came and what is allowed, KernelError for CUDA's errors and the emulator's findings.
        """
        features = dict(
            causal=causal, window=window, cu_seqlens=cu_seqlens, lengths=lengths, pages=pages, splits=splits
        )
        call = prepare(self.rung, self.device, inputs, scale=scale, out=out, **features)
        self._run(call)
        return call.results

    def tensors(self, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
        """Runs the kernel like a call, and gives all the tensors it saw by name: inputs, outputs and workspace."""
        call = prepare(self.rung, self.device, inputs, **options)
        self._run(call)
        return call.tensors

    def _run(self, call: Call) -> None:
        import torch

        if self.device == "cpu":
            return self.launcher.launch(call.args, call.tensors)
        with torch.cuda.device(call.tensors["Q"].device):
            self.launcher.launch(call.args, call.tensors, torch.cuda.current_stream().cuda_stream)
