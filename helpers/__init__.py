"""FlashAttention, one kernel at a time: load a kernel, check it, look at what it does to memory, time it.

    from helpers import check, load, xray
    kernel = load("04_fa2_fp32")
    check(kernel)
    xray(kernel, q, k, v)

Importing this package is quick and imports neither torch nor pandas; a name is imported when it is first used. In Jupyter,
`%load_ext helpers` adds the cell magic `%%kernel`.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> where it is: "module" or "module:attribute". `record` is a package of its own.
_PUBLIC = {
    # a kernel
    "load": "run.kernel:load",
    "check": "run.check:check",
    "xray": "run.xray:xray",
    "doctor": "run.doctor:doctor",
    "rung": "ladder.rung:rung",
    "rungs": "ladder.rung:rungs",
    "compile_ahead": "run.ahead:compile_ahead",
    "single": "ladder.instances:single",
    "for_d64": "ladder.instances:for_d64",
    "fewest_pieces": "ladder.contract:fewest_pieces",
    "compare": "run.check:compare",
    "traffic": "run.traffic:traffic",
    "Case": "run.reference:Case",
    "Kernel": "run.kernel:Kernel",
    "Rung": "ladder.rung:Rung",
    "Xray": "run.xray:Xray",
    "CompileError": "ladder.errors:CompileError",
    "KernelError": "ladder.errors:KernelError",
    # what is in it, and how fast it is
    "show": "ladder.show",
    "sass": "toolchain.sass",
    "op": "run.op",
    "reference": "run.reference",
    "banks": "emulator.banks",
    "fragments": "emulator.fragments",
    "bench": "measure.bench",
    "tune": "measure.tune",
    "workloads": "measure.workloads",
    "roles": "measure.roles",
    "timeline": "measure.timeline",
    "record": "record",
    "plot": "figures.plot",
    # of the notebooks
    "exercise": "lessons.exercise",
    "draw": "lessons.draw",
    "draw_backward": "lessons.draw_backward",
    "draw_decode": "lessons.draw_decode",
    "draw_hopper": "lessons.draw_hopper",
    "draw_masks": "lessons.draw_masks",
    "draw_mma": "lessons.draw_mma",
    "draw_pingpong": "lessons.draw_pingpong",
    "draw_proof": "lessons.draw_proof",
    "draw_training": "lessons.draw_training",
    "gpt": "lessons.gpt",
    "museum": "lessons.museum",
    "overlap": "lessons.overlap",
    "schedule": "lessons.schedule",
    "scoreboard": "lessons.scoreboard",
    "train": "lessons.train",
    "agreement": "evidence.agreement",
    "patterns": "evidence.patterns",
    "sanitize": "evidence.sanitize",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    module, _, attribute = _PUBLIC[name].partition(":")
    found = importlib.import_module(f".{module}", __name__)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_PUBLIC)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext helpers` calls: registers `%%kernel`."""
    from .magic import register

    register(shell)
