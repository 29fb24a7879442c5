"""FlashAttention, one kernel at a time: load a kernel, check it, look at what it does to memory, time it.

    from helpers import check, load, xray
    kernel = load("04")
    check(kernel)
    xray(kernel, q, k, v)

Whatever takes a kernel takes its stem or a part of it ("04", "ping_pong"; "13_1" for a stage), the path or the text of a `.cu`, a Rung, or a loaded
Kernel. Importing this package is quick and imports neither torch nor pandas; a name is imported when it is first used. In
Jupyter, `%load_ext helpers` adds the cell magic `%%kernel`.
"""

from __future__ import annotations

import importlib
import typing

# Public name -> where it is: "module" or "module:attribute". `record` is a package of its own.
_PUBLIC = {
    # a kernel
    "load": "run.kernel:load",
    "check": "run.check:check",
    "xray": "run.xray:xray",
    "show": "ladder.show",
    "sass": "toolchain.sass",
    "bench": "measure.bench",
    "rung": "ladder.rung:rung",
    "rungs": "ladder.rung:rungs",
    "stages": "ladder.rung:stages",
    "traffic": "run.traffic:traffic",
    "compile_ahead": "run.ahead:compile_ahead",
    "single": "ladder.instances:single",
    "op": "run.op",
    "doctor": "run.doctor:doctor",
    # what it is compared with
    "reference": "run.reference",
    "families": "run.families",
    "compare": "run.check:compare",
    "record": "record",
    "plot": "figures.plot",
    # what these give and raise
    "Kernel": "run.kernel:Kernel",
    "Rung": "ladder.rung:Rung",
    "Case": "run.reference:Case",
    "Xray": "run.xray:Xray",
    "CallError": "ladder.errors:CallError",
    "CompileError": "ladder.errors:CompileError",
    "KernelError": "ladder.errors:KernelError",
    "ToolkitError": "ladder.errors:ToolkitError",
}
# What single notebooks use. It is imported like the rest, and left out of `dir(helpers)`.
_LESSONS = {
    "for_d64": "ladder.instances:for_d64",
    "fewest_pieces": "ladder.contract:fewest_pieces",
    "banks": "emulator.banks",
    "budget": "figures.budget",
    "fragments": "emulator.fragments",
    "tune": "measure.tune",
    "workloads": "measure.workloads",
    "merging": "run.merging",
    "one_sided": "run.one_sided",
    "ring": "run.ring",
    "ring_time": "run.ring_time",
    "roles": "measure.roles",
    "timeline": "measure.timeline",
    "tile_player": "run.walk:tile_player",
    "exercise": "lessons.exercise",
    "blank": "lessons.forms:blank",
    "hint": "lessons.forms:hint",
    "tasks": "lessons.forms:tasks",
    "progress": "lessons.progress:progress",
    "checks": "lessons.checks",
    "detective": "lessons.detective:detective",
    "predict": "lessons.predict:predict",
    "draw": "lessons.drawings.basics",
    "draw_backward": "lessons.drawings.backward",
    "draw_decode": "lessons.drawings.decode",
    "draw_hopper": "lessons.drawings.hopper",
    "draw_masks": "lessons.drawings.masks",
    "draw_mma": "lessons.drawings.mma",
    "draw_pingpong": "lessons.drawings.pingpong",
    "draw_proof": "lessons.drawings.proof",
    "draw_ring": "lessons.drawings.ring",
    "draw_training": "lessons.drawings.training",
    "gpt": "lessons.gpt",
    "languages": "lessons.languages",
    "languages_timed": "lessons.languages_timed",
    "loop_order": "lessons.loop_order",
    "machine_code": "lessons.machine_code",
    "museum": "lessons.museum",
    "overlap": "lessons.overlap",
    "schedule": "lessons.schedule",
    "scoreboard": "lessons.scoreboard",
    "train": "lessons.train",
    "units": "lessons.units",
    "wgmma_units": "lessons.wgmma_units",
    "agreement": "evidence.agreement",
    "patterns": "evidence.patterns",
    "sanitize": "evidence.sanitize",
    "prepare": "hosted:prepare",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> typing.Any:
    where = _PUBLIC.get(name) or _LESSONS.get(name)
    if where is None:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    module, _, attribute = where.partition(":")
    found = importlib.import_module(f".{module}", __name__)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_PUBLIC)


def load_ipython_extension(shell: typing.Any) -> None:
    """What `%load_ext helpers` calls: registers `%%kernel` and `%%region`."""
    from .magic import register

    register(shell)
