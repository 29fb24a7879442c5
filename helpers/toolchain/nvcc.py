"""The nvcc back end: a rung's CUDA source, compiled for this GPU and launched through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from ..ladder.contract import Call
from ..ladder.errors import KernelError
from ..ladder.instances import Instance, apart, asked_for
from ..ladder.paths import from_root
from ..ladder.rung import INCLUDE, Rung
from .compile import Built, build, each_instance
from .cores import cores
from .guard import WRAPPED, guard
from .sass import parse_ptxas
from .toolkit import NVCC_FLAGS, architecture, gencode, matching_toolkit

if TYPE_CHECKING:
    import pandas

# torch switches these conveniences of the CUDA headers off; a teaching kernel wants them.
UNDEFINED = [f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS")]
UNDEFINED.append("-U__CUDA_NO_BFLOAT16_CONVERSIONS__")

# So that an exit() in host code has a line. (addr2line takes DWARF 5's first file for the temporary one that #line renames.)
HOST_LINES = ["-Xcompiler=-g1,-gdwarf-4"]

# These leave the CUDA context unusable (CUDA Runtime API, "Error handling": sticky errors).
STICKY = {700, 702, 709, 710, 714, 715, 716, 717, 718, 719}


class Launcher:
    """A kernel for the current GPU's architecture, compiled when it first runs. `launch` starts it on a stream and doesn't wait.

    definitions: lines before the source, `#define`s as a rule. arch: another architecture to compile for: a virtual one,
    "compute_75", which the driver translates for this GPU. After `compile`, `resources` is sass.py's table of registers,
    spills and shared memory, `arch` the architecture, and `cached` is True if nothing had to be compiled.

    A rung's instances (one per head dimension and dtype) are compiled side by side, each into a library of its own, or with
    fewer cores those of a dtype. In one source they share nvcc's cicc, which takes half the time of a long kernel and,
    --split-compile or not, keeps few cores busy.
    """

    backend = "nvcc"

    def __init__(self, rung: Rung, definitions: str = "", arch: str = "") -> None:
        self._rung, self._definitions, self.arch = rung, definitions, arch
        # fa_launch of each instance and its library's path. Empty until it is compiled.
        self._compiled: dict[Instance, tuple[ctypes.c_void_p, Path]] = {}
        self.resources: pandas.DataFrame | None = None

    def compile(self) -> None:
        """Makes what `launch` runs, for the current CUDA device. Raises CompileError with the reader's own file and line,
        ToolkitError if nvcc is missing or doesn't go with torch."""
        import torch

        toolkit = matching_toolkit(torch.version.cuda)
        guard_library, self._guard = guard()
        self.arch = self.arch or architecture(*torch.cuda.get_device_capability())
        headers = [header.read_text() for header in self._rung.includes]

        def compiled(rung: Rung) -> Built:
            return build(
                rung.stem,
                cuda=f'{self._definitions}#line 1 "{from_root(rung.path)}"\n{rung.source}',
                flags=[*NVCC_FLAGS, *HOST_LINES, gencode(self.arch), *UNDEFINED],
                include=[INCLUDE],
                libraries=[guard_library],
                link=WRAPPED,
                depends=[self.arch, *headers],
                toolkit=toolkit,
            )

        made = each_instance(compiled, apart(self._rung, cores()), self._rung.stem)
        launchers = {
            instance: (ctypes.cast(built.fa_launch(self._rung.path.name), ctypes.c_void_p), built.path)
            for instance, built in made.items()
        }
        self._cudart = _cudart()
        self.cached = all(built.cached for built in made.values())
        if not self.arch.startswith("compute_"):  # of what the driver translates ptxas says nothing
            self.resources = parse_ptxas("".join(built.log for built in made.values()))
        self._compiled = launchers

    def launch(self, call: Call, stream: int = 0) -> None:
        """Calls `fa_launch(&call.args, stream)`. Raises KernelError with CUDA's name and text, or with what the host code did
        to end the process; the error is taken back, so that the next call starts afresh, unless CUDA can't go on in this
        process, which the text then says."""
        import torch

        if not self._compiled:
            self.compile()
        fa_launch, library = self._compiled[asked_for(call.args, self._compiled)]
        # In a thread that has called nothing of CUDA yet (autograd's, say) there is no context, and tensor maps can't be encoded.
        if code := self._cudart.cudaSetDevice(torch.cuda.current_device()):
            raise KernelError(cuda_error(code))
        end = self._guard.fa_guarded(fa_launch, ctypes.byref(call.args), stream)
        if end:
            last = self._cudart.cudaGetLastError()
            if not (ended := end.contents.sentence(library)):
                raise KernelError(cuda_error(end.contents.code))
            raise KernelError(ended + (f"\n  {cuda_error(last)}" if last else ""))


def cuda_error(code: int) -> str:
    """CUDA's words for an error code."""
    cudart = _cudart()
    name, text = cudart.cudaGetErrorName(code).decode(), cudart.cudaGetErrorString(code).decode()
    end = "; the CUDA context is lost: restart the kernel (the process) to go on" if code in STICKY else ""
    return f"CUDA error: {text} ({name}){end}"


def _cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has already loaded."""
    import torch

    torch.cuda.init()
    cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    cudart.cudaGetErrorName.restype = cudart.cudaGetErrorString.restype = ctypes.c_char_p
    return cudart
