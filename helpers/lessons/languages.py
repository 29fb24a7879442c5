"""One algorithm in many languages: the implementations in kernels/languages/, each a file that can be read alone.

A file opens with a docstring (in C a comment): its language in the first line, then lines `needs:` (what has to be installed),
`runs:` (on a GPU, or anywhere), `dtypes:` and `D:` (what it takes; any D without such a line). A Python file has a function
`forward(q, k, v, scale=None, causal=False)` that gives O (B,H,Nq,D) and LSE (B,H,Nq); a `.c` file exports `attention`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..ladder.errors import KernelError
from ..ladder.paths import KERNELS, cache_folder, from_root
from ..toolchain.compile import digest, making
from ..toolchain.compiler import find_compiler

FOLDER = KERNELS / "languages"
FIELD = re.compile(r"^(needs|runs|dtypes|D): (.+)$", re.MULTILINE)
C_FLAGS = "-x c -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared -lm".split()
# What makes a language run without a GPU. Read when its package is imported, so set before.
INTERPRETERS = {"TRITON_INTERPRET": "1", "NUMBA_ENABLE_CUDASIM": "1"}


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
        return (
            "cuda" if torch.cuda.is_available() and self.path.suffix != ".c" and self.stem != "numpy_tiles" else "cpu"
        )

    @property
    def missing(self) -> str:
        """Why it can't run here, as a sentence; "" if it can."""
        absent = [name for name in self.needs if not importlib.util.find_spec(name.replace("-", "_"))]
        if absent:
            return f"{', '.join(absent)} is not installed (python -m pip install '.[languages]')"
        if self.runs == "GPU" and not torch.cuda.is_available():
            return "it needs a GPU"
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
            raise KernelError(f"{from_root(self.path)}: {self.missing}")
        return _of_c(self.path) if self.path.suffix == ".c" else _of_python(self.path)

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


def _read(path: Path) -> Implementation:
    head = re.match(r'(?:"""|/\*\s*)(.*?)(?:"""|\*/)', path.read_text(), re.DOTALL)
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
    name = f"languages.{path.stem}"  # not its own name alone, which may be that of the package it uses
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.forward


def _of_c(path: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    compiler, text = find_compiler(), path.read_text()
    folder = cache_folder() / f"{path.stem}_{digest(text, compiler, C_FLAGS)}"
    library = folder / f"{path.stem}.so"
    with making(folder, path.name):
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = library.with_suffix(f".{os.getpid()}")
            done = subprocess.run(
                [compiler, *C_FLAGS[:2], str(path), *C_FLAGS[2:], "-o", str(part)], capture_output=True, text=True
            )
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
