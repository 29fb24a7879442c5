"""All region tasks, by id and by rung."""

from __future__ import annotations

from functools import cache

from ...ladder.rung import Which, rung
from . import fp32, hopper, ring, shapes, tensor_cores
from .task import Task


@cache
def tasks() -> dict[str, Task]:
    """Every task by id, in the order of the rungs."""
    every = [*fp32.TASKS, *tensor_cores.TASKS, *shapes.TASKS, *hopper.TASKS, *ring.TASKS]
    return {task.id: task for task in every}


def task(which: str | Task) -> Task:
    """The task with this id. KeyError names those of the same rung."""
    if isinstance(which, Task):
        return which
    if which not in tasks():
        of = [id for id in tasks() if id.startswith(which.partition(".")[0].zfill(2))]
        raise KeyError(f"no task {which!r}; there are {', '.join(of or tasks())}")
    return tasks()[which]


def of_rung(which: Which) -> list[Task]:
    """A rung's tasks."""
    return [task for task in tasks().values() if task.number == rung(which).number]


def about(which: Which, regions: tuple[str, ...]) -> Task | None:
    """The task on exactly these regions of a rung; None if there is none."""
    return next((task for task in of_rung(which) if set(task.regions) == set(regions)), None)
