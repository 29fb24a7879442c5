"""Compiling ahead: what a notebook is about to need, in the background and side by side."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..emulator import Launcher
from ..ladder.rung import Rung, Which, rung
from ..toolchain import sass
from ..toolchain.cores import cores

_waiting: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
_workers: list[threading.Thread] = []


def compile_ahead(kernels: Which | Iterable[Which], *needs: str, arch: str = "sm_90a") -> None:
    """Begins to compile kernels in the background, as many at a time as there are cores.

        compile_ahead(["03", "04"], "run", "xray")

    Comes back at once. Whoever needs one of them meanwhile waits until it is there; an error is raised then, and not here.
    kernels: each what `rung` takes, or a single one. needs: what for, at least one of "run" (on the emulator), "xray", "cubin" (its
    registers, for `arch`) and "sass" (its machine code); ValueError for another word, or for none.
    """
    make: dict[str, Callable[[Rung], Any]] = {
        "run": lambda one: Launcher(one).compile(),
        "xray": lambda one: Launcher(one).compile_traced(),
        "cubin": lambda one: sass.cubin(one, arch),
        "sass": lambda one: sass.disassembly(one, arch),
    }
    if not needs:
        raise ValueError(f"compile_ahead takes what to compile for: {', '.join(make)}")
    if unknown := set(needs) - set(make):
        raise ValueError(f"nothing is compiled for {sorted(unknown)}: {', '.join(make)} are known")
    for which in kernels if isinstance(kernels, Iterable) and not isinstance(kernels, str) else [kernels]:
        one = rung(which)
        for need in needs:
            _begin(partial(make[need], one))


def _begin(job: Callable[[], Any]) -> None:
    _waiting.put(job)
    if len(_workers) < cores():
        _workers.append(threading.Thread(target=_work, name="compile ahead", daemon=True))
        _workers[-1].start()


def _work() -> None:
    while True:
        job = _waiting.get()
        with contextlib.suppress(Exception):  # who needs it compiles it again, and is told
            job()
