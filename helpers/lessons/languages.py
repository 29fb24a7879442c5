"""One algorithm in many languages: the implementations in kernels/languages/, each a file that can be read alone.

A file opens with a docstring (in C a comment): its language in the first line, then lines `needs:` (what has to be installed),
`runs:` (on a GPU, or anywhere), `dtypes:` and `D:` (what it takes; any D without such a line). A Python file has a function
`forward(q, k, v, scale=None, causal=False)` that gives O (B,H,Nq,D) and LSE (B,H,Nq); a `.c` or `.cu` file exports `attention`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pandas as pd
import torch
from torch import Tensor

from ..ladder.errors import KernelError
from ..ladder.paths import KERNELS, cache_folder, from_root
from ..ladder.show import Listing, regions_of
from ..toolchain.compile import Built, build, digest, making
from ..toolchain.compiler import find_compiler
from ..toolchain.nvcc import UNDEFINED, cuda_error
from ..toolchain.toolkit import NVCC_FLAGS, architecture, gencode, matching_toolkit

FOLDER = KERNELS / "languages"
HEAD = re.compile(r'(?:"""|/\*\s*)(.*?)(?:"""|\*/)', re.DOTALL)  # the opening lines: title, and a field a line
FIELD = re.compile(r"^(needs|runs|dtypes|D): (.+)$", re.MULTILINE)
C_FLAGS = "-x c -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared -lm".split()
# What makes a language run without a GPU. Read when its package is imported, so set before.
INTERPRETERS = {"TRITON_INTERPRET": "1", "NUMBA_ENABLE_CUDASIM": "1"}
# Packages whose module has another name. nvidia-cutlass brings the C++ headers, nvidia-cutlass-dsl the Python package.
MODULES = {"nvidia-cutlass": "cutlass_library", "nvidia-cutlass-dsl": "cutlass", "cuda-tile": "cuda.tile"}
DECISIONS = ["tile", "copy", "wait", "registers", "overlap"]
# What stands in each file where its author takes the decision; "" where a compiler or a library does; "–" where there is none.
SAID = {
    "numpy_tiles": ("Br, Bc = 64, 64", "–", "–", "–", "–"),
    "torch_eager": ("Bc = 512", "", "", "", ""),
    "torch_compile": ("", "", "", "", ""),
    "flex_attention": ("", "", "", "", ""),
    "helion_tiles": ("TILES = {", "", "", "", "num_stages=stages"),
    "triton_tiles": ("TILES = {", "TensorDescriptor.from_tensor(", "", "", "num_stages=stages"),
    "pallas_tiles": ("TILES = {", "", "", "", "num_stages=stages"),
    "cutile_tiles": ("TILES = {", "", "", "", ""),
    "gluon_tiles": ("TILES = {", "async_load(box", "mbarrier.wait(", "NVMMADistributedLayout(", "is_async=True"),
    "cute_dsl": ("TILES = {", "CopyG2SOp(", "cp_async_wait_group(0)", "make_tiled_mma(", "cp_async_commit_group()"),
    "cute_mma": ("Br = 128", "SM80_CP_ASYNC_", "cp_async_wait<0>()", "TiledMMA<", "cp_async_fence()"),
    "numba_kernel": ("Br, Bc = 64, 32", "k[j, c] = K[", "cuda.syncthreads()", "cuda.local.array(", "–"),
    "c_openmp": ("Br = 48", "memcpy(&b", "#pragma omp for", "vec C[MR][NV]", "–"),
}
CUTLASS_FLAGS = ("--expt-relaxed-constexpr", "-O3", "--use_fast_math")


@dataclass(frozen=True)
class Implementation:
    """The forward pass in one language. `check` takes it as it takes a kernel."""

    path: Path
    language: str
    needs: tuple[str, ...]
    runs: str
    dtypes: tuple[str, ...]
    D: tuple[int, ...]
    op: str = "attention"
    features: tuple[str, ...] = ("causal",)

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def rung(self) -> Implementation:
        """What it takes, as a Rung says it: op, dtypes, D, features."""
        return self

    @property
    def device(self) -> str:
        """Where it runs on this machine: "cuda" or "cpu"."""
        return "cuda" if torch.cuda.is_available() and self.path.suffix != ".c" and self.needs != ("numpy",) else "cpu"

    @property
    def absent(self) -> list[str]:
        """What it needs and this machine lacks."""
        return [name for name in self.needs if not _there(name)]

    @property
    def missing(self) -> str:
        """Why it can't run here, as a sentence; "" if it can."""
        if self.absent:
            return f"{', '.join(self.absent)} is not installed (python -m pip install '.[languages]')"
        if self.runs.startswith("GPU") and "CPU" not in self.runs and not torch.cuda.is_available():
            return "it needs a GPU"
        if "Hopper" in self.runs and torch.cuda.get_device_capability()[0] != 9:
            return "it needs a GPU of the Hopper generation"
        return ""

    @property
    def lines(self) -> int:
        """Lines of code, without blank ones, comments and docstrings."""
        text = re.sub(r'"""[\s\S]*?"""|/\*[\s\S]*?\*/', "", self.path.read_text())
        return sum(bool(line.strip()) and not line.strip().startswith(("#", "//")) for line in text.splitlines())

    @functools.cached_property
    def forward(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function, imported or compiled. KernelError if it can't run here."""
        if self.missing:
            refuse(self)
        return {".c": _of_c, ".cu": _of_cuda, ".py": _of_python}[self.path.suffix](self.path)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """O (B,H,Nq,D) and LSE (B,H,Nq) of q (B,H,Nq,D), k and v (B,H,Nk,D)."""
        return self.forward(q, k, v, scale, causal)


def implementations() -> dict[str, Implementation]:
    """All there are, by stem."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.*")) if path.suffix in (".py", ".c", ".cu")}


def implementation(stem: str) -> Implementation:
    """One of them. LookupError names those there are."""
    found = implementations()
    if stem not in found:
        raise LookupError(f"no implementation {stem!r} in kernels/languages; there are {', '.join(found)}")
    return found[stem]


def refuse(found: Implementation) -> None:
    """KernelError that says why it can't run, or what it lacks."""
    raise KernelError(f"{from_root(found.path)}: {found.missing}")


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES.get(package, package.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


def versions(names: Sequence[str]) -> str:
    """The installed ones of these packages as "name version, name version"."""
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def environment(name: str) -> dict[str, str]:
    """The environment for a process that compiles an implementation: this one's, for cuTile without CUDA_HOME and CUDA_PATH.

    tileiras takes ptxas and libnvvm from there rather than from beside itself, and with those of CUDA 13.0, which is torch's, ends
    in "failed to compile Tile IR program".
    """
    aside = ("CUDA_HOME", "CUDA_PATH") if "cuda-tile" in implementation(name).needs else ()
    return {key: value for key, value in os.environ.items() if key not in aside}


def region(stem: str, name: str) -> Listing:
    """The lines of an implementation in the region `name`. KeyError names the regions there are."""
    path = implementation(stem).path
    text = path.read_text()
    found = regions_of(text, from_root(path))
    if name not in found:
        raise KeyError(f"{path.name} has no region {name!r}; it has {', '.join(found) or 'none'}")
    first, last = found[name]
    lines = tuple((i, " ", line) for i, line in enumerate(text.splitlines(), 1) if first <= i <= last)
    language = {".py": "python", ".c": "c", ".cu": "cuda"}[path.suffix]
    return Listing(f"{path.name} · {name} · lines {first}–{last}", lines, language)


def table() -> pd.DataFrame:
    """Every implementation: language, lines of code, dtypes, and `here`: where it runs on this machine, or why it can't."""
    rows = [
        (one.stem, one.language, one.lines, " ".join(one.dtypes), one.missing or f"runs on the {one.device.upper()}")
        for one in implementations().values()
    ]
    return pd.DataFrame(rows, columns=["file", "language", "lines", "dtypes", "here"]).set_index("file")


def decisions() -> pd.DataFrame:
    """Who takes each of the DECISIONS: the words of the file where its author says it, "compiler" where the compiler or a library
    does, "–" where there is no such thing. test_languages.py holds the words against the files."""
    return pd.DataFrame.from_dict(SAID, orient="index", columns=DECISIONS).replace("", "compiler")


def variant(stem: str, changes: dict[str, str]) -> Implementation:
    """An implementation with these pieces of its text changed, in a file of its own. ValueError if a piece isn't there once."""
    one = implementation(stem)
    text = one.path.read_text()
    for before, after in changes.items():
        if text.count(before) != 1:
            raise ValueError(f"{one.path.name} has {before!r} {text.count(before)} times, not once")
        text = text.replace(before, after)
    path = cache_folder() / "variants" / f"{stem}_{digest(text)}{one.path.suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)  # another process may be importing it
    return replace(one, path=path)


def body(text: str) -> str:
    """An implementation without its opening lines."""
    head = HEAD.match(text)
    return text[head.end() :] if head else text


def _read(path: Path) -> Implementation:
    head = HEAD.match(path.read_text())
    fields = dict(FIELD.findall(head[1])) if head else {}
    if missing := {"needs", "runs", "dtypes"} - fields.keys():
        raise ValueError(f"{from_root(path)} does not say {', '.join(sorted(missing))} in its opening lines")
    needs = () if path.suffix == ".c" else tuple(fields["needs"].replace(",", " ").split())
    D = tuple(map(int, fields.get("D", "").split()))
    return Implementation(
        path, head[1].strip().splitlines()[0], needs, fields["runs"], tuple(fields["dtypes"].split()), D
    )


def _of_python(path: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    if not torch.cuda.is_available():
        for name, value in INTERPRETERS.items():
            os.environ.setdefault(name, value)
    return module(path).forward


def module(path: Path) -> ModuleType:
    """An implementation in Python, imported once."""
    name = f"language_{path.stem}"  # not its own name alone, which may be that of the package it uses
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def cutlass_headers() -> Path:
    """The include folder in the package nvidia-cutlass."""
    return Path(importlib.util.find_spec(MODULES["nvidia-cutlass"]).origin).parent / "source" / "include"


def built(path: Path) -> Built:
    """A `.cu` file as a shared library for this GPU, by nvcc, with CUTLASS's headers from their package.

    CompileError with nvcc's words, ToolkitError without nvcc.
    """
    text = path.read_text()
    arch = architecture(*torch.cuda.get_device_capability())
    flags = [*NVCC_FLAGS, *CUTLASS_FLAGS, gencode(arch), *UNDEFINED]
    depends = [importlib.metadata.version("nvidia-cutlass")]
    toolkit = matching_toolkit(torch.version.cuda)
    return build(path.stem, cuda=text, flags=flags, include=[cutlass_headers()], depends=depends, toolkit=toolkit)


def _of_cuda(path: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    return through(ctypes.CDLL(str(built(path).path)).attention)


def through(attention: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`forward` of what a `.cu` file exports: attention(q, k, v, o, lse, BH, Nq, Nk, D, scale, causal, bf16, stream), scale > 0."""

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False):
        (B, H, Nq, D), Nk = q.shape, k.shape[2]
        scale = D**-0.5 if scale is None else scale
        if scale <= 0:  # the maximum is taken before S is scaled, and a masked score is -inf before and after
            q, scale = -q if scale else torch.zeros_like(q), -scale or 1.0
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(B, H, Nq, device=q.device)
        tensors = [x.contiguous() for x in (q, k, v)]
        at = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, o, lse)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if q.is_cuda else 0)
        options = ctypes.c_float(scale), int(causal), int(q.dtype == torch.bfloat16), stream
        if error := attention(*at, B * H, Nq, Nk, D, *options):
            raise KernelError(cuda_error(error))
        return o, lse

    return forward


def _of_c(path: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    compiler, text = find_compiler(), path.read_text()
    # The compiler's version, and what -march=native finds in this processor.
    command = [compiler, *C_FLAGS, "-dM", "-E", os.devnull]
    defined = subprocess.run(command, capture_output=True, text=True).stdout
    folder = cache_folder() / f"{path.stem}_{digest(text, compiler, C_FLAGS, defined)}"
    library = folder / f"{path.stem}.so"
    with making(folder, path.name):
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = library.with_suffix(f".{os.getpid()}")
            lacking = "-fopenmp", "-march=native"  # clang may have no OpenMP library, nor know an Arm processor
            for without in range(3):
                flags = [flag for flag in C_FLAGS if flag not in lacking[:without]]
                command = [compiler, *flags[:2], str(path), *flags[2:], "-o", str(part)]
                done = subprocess.run(command, capture_output=True, text=True)
                if not done.returncode:
                    break
            if done.returncode:
                raise KernelError(f"{from_root(path)} does not compile: {done.stderr.strip()}")
            part.rename(library)
    attention = ctypes.CDLL(str(library)).attention

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False):
        (B, H, Nq, D), Nk = q.shape, k.shape[2]
        o, lse = torch.empty(B, H, Nq, D), torch.empty(B, H, Nq)
        tensors = [x.contiguous() for x in (q, k, v)]
        at = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, o, lse)]
        scale = ctypes.c_float(D**-0.5 if scale is None else scale)
        if attention(*at, B * H, Nq, Nk, D, scale, int(causal)):
            raise MemoryError("no memory for K transposed")
        return o, lse

    return forward
