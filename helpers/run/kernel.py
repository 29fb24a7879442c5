"""A loaded kernel: compiling and calling it, the same on both back ends, and noticing that its file has changed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ladder import cards
from ..ladder.contract import Call, Peers
from ..ladder.errors import CallError, ToolkitError
from ..ladder.paths import from_root
from ..ladder.plans import Plans
from ..ladder.rung import Rung, Which, digest_of, parse
from ..ladder.rung import rung as find_rung
from ..toolchain.toolkit import matching_toolkit

if TYPE_CHECKING:
    from torch import Tensor


def load(which: Which = None, *, source: str | None = None, device: str | None = None, quiet: bool = False) -> Kernel:
    """Compiles a kernel and gives it back ready to call.

        kernel = load("04")
        o, lse = kernel(q, k, v)

    which: a rung's stem ("04_fa2_fp32") or a part of one that fits no other, the path of a `.cu`, a text of more than one line,
    a Rung, or a Kernel, which comes back itself if it is for this device (see Kernel.current). source: a text, named as such.
    device: "cuda" (nvcc) or "cpu" (the emulator); by default "cuda" where this machine can, else "cpu". Prints one line unless
    `quiet`. Raises ValueError for a name that no kernel has, CompileError with the reader's file and line, ToolkitError if a
    compiler is missing.
    """
    if (which is None) == (source is None):
        raise ValueError("load takes either a kernel (a stem, a .cu's path or text, ...) or source=..., one of the two")
    if isinstance(which, Kernel) and device in (None, which.device):
        return which.current()
    rung = find_rung(which) if which is not None else parse(source, Path("cell"))
    chosen, why_not = (device, "") if device else default_device(rung)
    kernel = Kernel(rung, chosen)
    kernel.compile()
    if not quiet:
        print(summary(kernel) + (f" ({why_not})" if why_not else ""))
    return kernel


DRIVER = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")  # where there is NVIDIA's driver: Linux, WSL2


def cuda_refusal(rung: Rung) -> str:
    """Why this machine's GPU can't run `rung`, in one sentence that names the fix; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        if not any(Path(trace).exists() for trace in DRIVER):
            return "no GPU found: with an NVIDIA GPU in this machine, install its driver; without, use the emulator"
        if torch.version.cuda is None:
            return "there is a GPU, but this PyTorch was built without CUDA: `rm -r .venv`, then `make lab TORCH=cuda`"
        return "torch can't use the GPU: check with `nvidia-smi` that the driver works and is new enough for CUDA 13"
    if reason := cards.refusal(rung, torch.cuda.get_device_capability()):
        return reason
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


LOOK_AGAIN = 0.01  # seconds: calls that follow each other faster look for changed files no more often
_frozen: ContextVar[bool] = ContextVar("_frozen", default=False)


@contextlib.contextmanager
def as_loaded() -> Iterator[None]:
    """Inside, kernels run as they were loaded and no call looks for changed files: for whoever calls a kernel many times, times
    it or not, and has brought it up to date before (`Kernel.current`)."""
    token = _frozen.set(True)
    try:
        yield
    finally:
        _frozen.reset(token)


class _Files:
    """The files that a kernel is compiled from, its own and the headers it includes, as they were when it was."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen = {path: (_stamp(path), path.read_text("utf-8-sig")) for path in paths}
        self.looked = time.monotonic()  # and found nothing changed

    def text(self, path: Path) -> str:
        """What was compiled of this file."""
        return self._seen[path][1]

    def changed(self) -> list[Path]:
        """Those whose text is another one now, or gone. A text is read only where size or time of change differ."""
        found = []
        for path, (stamp, text) in self._seen.items():
            try:
                if (now := _stamp(path)) == stamp:
                    continue
                if path.read_text("utf-8-sig") == text:
                    self._seen[path] = now, text
                    continue
            except FileNotFoundError:
                pass
            found.append(path)
        if not found:
            self.looked = time.monotonic()
        return found


def _stamp(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size


class Kernel:
    """A compiled kernel. `load` makes one.

        o, lse = kernel(q, k, v)
        p, lse = kernel(s)

    The second is a softmax's call. `rung` and `source` are what it was compiled from: the text of `file`, or one of its own (`file` is None);
    `digest` is that of the code, headers included, as recorded figures have it. `device` is "cuda" or "cpu", `backend` "nvcc" or
    "emulator", `seconds` the time that compiling took. If the file or a header changes, the next check, X-ray or timing, or a
    call from a hundredth of a second later on, compiles the kernel again and says so.
    """

    def __init__(self, rung: Rung, device: str) -> None:
        """Not compiled yet: that comes with the first call, or with `compile`."""
        if device not in ("cuda", "cpu"):
            raise ValueError(f"device {device!r}: allowed are 'cuda' (nvcc) and 'cpu' (the emulator)")
        self.file = rung.file
        self._files = _Files([*([self.file] if self.file else []), *rung.includes])
        self.rung, self.device, self.seconds = rung, device, 0.0
        if device == "cuda":
            self.rung, self.capability = _on_this_gpu(rung)
        self.launcher = _launcher(rung, device)
        self._plans = Plans(self.rung, device)

    @property
    def source(self) -> str:
        """The text it was compiled from."""
        return self.rung.source

    @property
    def digest(self) -> str:
        """sha256 of the code it was compiled from, headers included, as Rung.digest has it."""
        return digest_of([self.source, *map(self._files.text, self.rung.includes)])

    @property
    def backend(self) -> str:
        """ "nvcc" or "emulator"."""
        return self.launcher.backend

    def compile(self) -> None:
        """Compiles it now. Raises CompileError, KernelError if it has no launcher, ToolkitError if a compiler is missing or
        this machine's GPU can't run it."""
        if self.device == "cuda" and (reason := cuda_refusal(self.rung)):
            raise ToolkitError(reason)
        start = time.perf_counter()
        self.launcher.compile()
        self.seconds = time.perf_counter() - start

    def current(self) -> Kernel:
        """This kernel, compiled again if its file or a header that it includes has changed since it was loaded.

        It says so in one line. Raises CompileError if the new text doesn't compile, ValueError if the file is gone: then
        every use of the kernel does, until the file is fixed.
        """
        if not _frozen.get() and (changed := self._files.changed()):
            self._renew(changed)
        return self

    def _look(self) -> None:
        """`current`, for calls: a look costs 1 to 20 microseconds per file, more than a launch can spare each time."""
        if time.monotonic() - self._files.looked > LOOK_AGAIN:
            self.current()

    def _renew(self, changed: list[Path]) -> None:
        fresh = Kernel(find_rung(self.file) if self.file else replace(self.rung), self.device)
        for name in ("timeout", "threads", "schedule"):  # what may have been set on the emulator's
            if hasattr(self.launcher, name):
                setattr(fresh.launcher, name, getattr(self.launcher, name))
        fresh.compile()
        names = " and ".join(from_root(path) for path in changed)
        verb = "has" if len(changed) == 1 else "have"
        since = "it was" if changed == [self.file] else f"{self.rung.stem} was"
        done = "loaded" if fresh.launcher.cached else "compiled"
        print(f"{names} {verb} changed since {since} loaded: {done} again, {fresh.seconds:.1f} s")
        vars(self).update(vars(fresh))

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
        deterministic: bool = False,
        peers: Peers | None = None,
    ) -> tuple[Tensor, ...]:
        """Runs the kernel; on CUDA it is queued on the current stream and not waited for.

            o, lse = kernel(q, k, v, causal=True)

        Attention: q (B,H,Nq,D), k and v (B,H,Nk,D), last dimension contiguous; scale defaults to 1/√D; gives
        o (B,H,Nq,D) and lse (B,H,Nq) in fp32. Softmax: s (…,N) contiguous fp32; gives p (…,N) and lse (…).
        Backward: q, k, v, o, lse, do; gives dq, dk, dv. `out` are tensors to write into.

        The rest is for rungs whose header block lists it under `features`. gqa: k and v have Hkv heads, a divisor of H.
        causal: query i sees keys up to i + Nk − Nq; window: and of those the last `window`. cu_seqlens: int32 (S+1) row
        numbers of q and of k, a packed batch of S sequences (B = 1). lengths: int32 (B) keys in use. pages: int32
        (B,max_pages) with k and v (pages,Hkv,page,D): sequence b's keys are those of its pages, one after the other. splits: pieces
        that the keys are cut into. deterministic: the same bits every time. peers: other ranks' keys, from helpers.one_sided. Raises CallError, a ValueError, that names what came and what is allowed, KernelError for
        CUDA's errors and the emulator's findings.
        """
        features = dict(
            causal=causal,
            window=window,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            pages=pages,
            splits=splits,
            deterministic=deterministic,
            peers=peers,
        )
        self._look()
        call = self._plans.prepare(inputs, scale=scale, out=out, **features)
        self._run(call)
        return call.results

    def tensors(self, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
        """Runs the kernel like a call, and gives all the tensors it saw by name: inputs, outputs and workspace."""
        self._look()
        call = self._plans.prepare(inputs, **options)
        self._run(call)
        return call.tensors | call.outputs

    def _run(self, call: Call) -> None:
        import torch

        if self.device == "cpu":
            return self.launcher.launch(call)
        device = next(iter(call.inputs.values())).device
        if (here := _capability(device.index)) != self.capability:
            there = ".".join(map(str, self.capability or ()))
            raise CallError(
                f"{device} has compute capability {'.'.join(map(str, here))}, {self.rung.stem} was compiled for {there}: "
                f"load it under `with torch.cuda.device({device.index}):`"
            )
        with torch.cuda.device(device.index):
            # torch.cuda.current_stream() makes a Stream object, which takes longer than the rest of this method.
            self.launcher.launch(call, torch._C._cuda_getCurrentRawStream(device.index))


class BrokenKernel(Kernel):
    """What a name stands for whose kernel could not be loaded: any use of it raises the error that loading it raised."""

    def __init__(self, error: Exception) -> None:
        self._error = error.with_traceback(None)

    def current(self) -> Kernel:
        """Raises the error."""
        raise self._error

    _look = current

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python and Jupyter look for in any object
            raise AttributeError(name)
        raise self._error

    def __repr__(self) -> str:
        return f"a kernel that was not loaded: using it raises\n{type(self._error).__name__}: {self._error}"


@cache
def _capability(gpu: int) -> tuple[int, int]:
    """The compute capability of the GPU with this number."""
    import torch

    return torch.cuda.get_device_capability(gpu)


def _on_this_gpu(rung: Rung) -> tuple[Rung, tuple[int, int] | None]:
    """With the dtypes that the current GPU takes, and its compute capability; as it is, and None, without one."""
    import torch

    if not torch.cuda.is_available():
        return rung, None
    capability = torch.cuda.get_device_capability()
    return cards.on(rung, capability), capability


def _launcher(rung: Rung, device: str) -> Any:
    if device == "cpu":
        from .. import emulator

        return emulator.Launcher(rung)
    from ..record import tiles
    from ..toolchain import nvcc

    return nvcc.Launcher(rung, tiles.definition(rung))
