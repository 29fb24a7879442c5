"""What a tree that was handed out knows of rungs whose regions it leaves blank: course/costs.json, which `course build` writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from ..ladder.paths import ROOT


@cache
def _all() -> dict[str, Any]:
    path = ROOT / "course" / "costs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def known(number: str) -> dict[str, Any] | None:
    """What the rung with this number costs, as `course.trees.costs` gives it; None where the rung is whole."""
    return _all().get(number)
