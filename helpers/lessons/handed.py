"""What a tree that was handed out knows of rungs whose regions it leaves blank: course/costs.json, which `course build` writes."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from typing import Any

from ..ladder.paths import ROOT
from ..ladder.rung import Rung, parse

BLANK = '#error "task '  # what stands in place of a blank region


@cache
def _all() -> dict[str, Any]:
    path = ROOT / "course" / "costs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def known(number: str) -> dict[str, Any] | None:
    """What the rung with this number costs, as `course.trees.costs` gives it; None where the rung is whole."""
    return _all().get(number)


def packed(source: str) -> str:
    """A rung's text as it is kept in a tree where the rung is blank: not hidden, but not read by accident."""
    return base64.b64encode(zlib.compress(source.encode(), 9)).decode()


def rest(rung: Rung) -> Rung:
    """The rung into which a region is typed: the whole one where others of its regions are blank too, so that each can be typed and
    judged by itself; the rung as it is elsewhere."""
    kept = (known(rung.number) or {}).get("rest")
    if kept is None or BLANK not in rung.source:
        return rung
    return parse(zlib.decompress(base64.b64decode(kept)).decode(), rung.path)
