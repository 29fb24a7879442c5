"""How many cores there are to compile and to emulate on."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """How many cores this process may use: those it is bound to, or its containers' share of them if that is less (of several
    limits the lowest, rounded up). os.cpu_count gives all that the machine has."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        found = os.cpu_count() or 1
    return min([found, *map(math.ceil, _quotas())])


def _quotas() -> list[float]:
    """Cores' worth of time that this process's control groups may use, where they are limited. Linux kernel, "Control Group
    v2", cpu.max; of version 1 ("CFS Bandwidth Control") the limit of the container as a whole."""
    found = []
    with contextlib.suppress(OSError):
        (own,) = [line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")] or ["/"]
        folder = CGROUPS / own.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(CGROUPS) and (each / "cpu.max").exists():
                found.append((each / "cpu.max").read_text().split())
    with contextlib.suppress(OSError):
        found.append([(CGROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")])
    return [int(quota) / int(period) for quota, period in found if quota not in ("max", "-1")]
