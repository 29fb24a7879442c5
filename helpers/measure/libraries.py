"""Attention of packages beside PyTorch: FlashAttention-2, -3 and -4, each where it can be imported.

They take (B,N,H,D): the transposes here are views, so that a kernel and its peers read the same tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..record import FA2, FA3, FA4

if TYPE_CHECKING:
    from torch import Tensor

# Name in a record -> the module with flash_attn_func, and the distribution it comes from.
PACKAGES = {
    FA2: ("flash_attn", "flash-attn"),
    FA3: ("flash_attn_interface", "flash-attn-3"),
    FA4: ("flash_attn.cute", "flash-attn-4"),  # in the namespace of FA2, which may be absent
}


def module(name: str) -> ModuleType | None:
    """The module of a key of PACKAGES; None where it, or a library it needs, is missing."""
    try:
        found = importlib.import_module(PACKAGES[name][0])
    except (ImportError, OSError):  # OSError: a shared library
        return None
    return found if hasattr(found, "flash_attn_func") else None


def found(without: Sequence[str] = (), *, causal: bool = False, **options: Any) -> dict[str, Callable]:
    """The packages there are, by name; each is called as f(q, k, v) with q (B,H,Nq,D), k and v (B,Hkv,Nk,D), and returns O (B,H,Nq,D)
    with a gradient. FA4 compiles its kernels at the first call of each kind. What is in `without` isn't imported; `options` go to
    flash_attn_func."""
    there = {name: module(name) for name in PACKAGES if name not in without}
    calls = {name: functools.partial(m.flash_attn_func, causal=causal, **options) for name, m in there.items() if m}
    return {name: functools.partial(_attend, call) for name, call in calls.items()}


def _attend(function: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = function(*(x.transpose(1, 2) for x in (q, k, v)))
    o = o[0] if isinstance(o, tuple) else o  # some versions return (O, LSE)
    return o.transpose(1, 2)


def versions(names: Sequence[str]) -> dict[str, str]:
    """The version of each of these packages, and what compiled it where it says so."""
    there = {name: module(name) for name in PACKAGES if name in names}
    return {name: _version(name, m) for name, m in there.items() if m}


def _version(name: str, module: ModuleType) -> str:
    try:
        version = importlib.metadata.version(PACKAGES[name][1])
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    compiler = getattr(module, "__compiler__", None)
    return f"{version}, {compiler}" if compiler else version
