"""What a record has to be: its two files, their names, columns and values, whatever card it is of.

data/README.md has the same in words. `faults` is what a contributed record is held against.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd

from ..ladder.rung import rungs
from .device import slug
from .workload import SHAPE

CONDITIONS = ("rung", "kind", "device", "driver", "memory_mib", "torch", "cuda", "python", "date")
SENSORS = ("sm_mhz", "watts", "throttle")  # where NVML can be read
BURST = ("round", "ms")
# Columns of each kind that `make bench` makes, and of those of the same form; a dtype was added to some later.
COLUMNS = {
    "forward": ("name", "dtype", *SHAPE, *BURST),
    "causal": ("name", "dtype", "causal", *SHAPE, *BURST),
    "backward": ("name", "dtype", "causal", *SHAPE, *BURST),
    "deterministic": ("name", "dtype", "causal", *SHAPE, "deterministic", *BURST),
    "matmul": ("name", "dtype", "causal", *SHAPE, "flops", *BURST),
    "groups": ("name", "dtype", "causal", *SHAPE, "Hkv", *BURST),
    "packed": ("dtype", "causal", "H", "D", "batch", "sequences", "tokens", *BURST, "padded_ms", "ideal_ms"),
    "decode": ("name", "dtype", *SHAPE, "Hkv", "splits", "chosen", "bytes", *BURST),
    "families": ("family", "name", "dtype", "causal", *SHAPE, *BURST),
    "layouts": ("layout", "name", "dtype", "causal", *SHAPE, "Hkv", *BURST),
    "one_sequence": ("dtype", "name", "causal", *SHAPE, *BURST),
    "stages": ("name", "dtype", *SHAPE, *BURST),
    "stalls": ("dtype", "B", "H", "N", "D", "kernel", "reason", "cycles", "warps", "instructions", "duration_ns"),
    "wgmma": ("dtype", "N", "warpgroups", "B_major", "A_in", "cycles"),
    "power": ("name", "inputs", "dtype", *SHAPE, *BURST, "joules", "mhz"),
    "at_once": ("name", "mib", "dtype", "causal", *SHAPE, *BURST),
    "timeline": ("warp", "tile", "kind", "begin", "end"),
    "ring": ("name", "ranks", "layout", "passes", "dtype", "causal", *SHAPE, "Hkv", *BURST),
    "link": ("name", "ranks", "copiers", "dtype", "H", "N", "D", "bytes", *BURST),
    "ring_memory": ("name", "ranks", "passes", "B", "H", "N", "D", "bytes"),
    "ring_largest": ("name", "ranks", "passes", "B", "H", "N", "D", "seconds", "bytes"),
    "ring_timeline": ("rank", "what", "begin", "end"),
    "tiles": ("dtype", *SHAPE, "warps", "Bc", "stages", "ctas", "Q_steps", *BURST),
    "error": ("dtype", "Nq", "Nk", "D", "output", "error", "pytorch_error", "budget"),
    "memory": ("name", "dtype", *SHAPE, "bytes"),
    "build": ("phase", "round", "seconds"),
    "ceilings": ("name", "unit", "round", "value"),
    "timings": ("language", "name", "dtype", "causal", *SHAPE, *BURST),
    "facts": ("language", "title", "version", "lines", "import_seconds", "first_seconds", "cases", "failed", "ended"),
}
LATER = {"error": "dtype", "memory": "dtype"}  # absent from records of fp32 alone
ROUNDS = {
    "families": 5,
    "layouts": 5,
    "one_sequence": 5,
    "build": 1,
    "ring": 3,
    "link": 3,
    "power": 3,
}  # at least; of the others 7
EMPTY = {("memory", "bytes"), ("ring", "layout")}  # cells that may be empty
EMPTY |= {("facts", column) for column in COLUMNS["facts"][1:]}
MEASURED = ("ms", "padded_ms", "ideal_ms", "seconds", "value", "joules", "mhz")
NOT_BELOW_0 = ("cycles",)
OF_OTHERS = ("timings", "link")  # kinds whose `name` is never that of the record itself
POSITIVE = (*MEASURED, "bytes", "flops", *SHAPE)


def faults(path: Path) -> list[str]:
    """What is wrong with the record whose samples are `path`, data/<device>/<stem>.<kind>.csv: a sentence each, none if it is
    sound. Of kinds that are not among COLUMNS only the conditions are looked at."""
    about = path.with_suffix(".json")
    if not about.is_file():
        return [f"{path.name} has no {about.name} beside it, which says what it was measured on"]
    try:
        known = json.loads(about.read_text())
    except ValueError as error:
        return [f"{about.name} is no JSON: {error}"]
    if missing := [name for name in CONDITIONS if name not in known]:
        return [f"{about.name} lacks {', '.join(missing)}"]
    found = _conditions(path, known)
    kind = known["kind"]
    if kind in COLUMNS and not found:
        found += _samples(path, pd.read_csv(path), known["rung"], kind)
    return found


def _conditions(path: Path, known: dict) -> list[str]:
    found = []
    stem, kind = known["rung"], known["kind"]
    if path.name != f"{stem}.{kind}.csv":
        found.append(
            f"{path.name} is said to be of rung {stem!r} and kind {kind!r}: its name would be {stem}.{kind}.csv"
        )
    if path.parent.name != slug(known["device"]):
        found.append(f"{path.name} is of {known['device']!r}: it belongs into data/{slug(known['device'])}/")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(known["date"])):
        found.append(f"{path.name} has the date {known['date']!r}; it is written like 2026-01-31")
    names = {rung.stem for rung in rungs()}
    if stem != "device" and not re.fullmatch(r"[0-9a-f]{64}", known.get("digest", "")):
        found.append(f"{path.name} has no digest of the source it was measured with")
    if stem != "device" and not {stem, *known.get("rungs", ())} & names:
        found.append(f"{path.name} is of {stem!r}, which is no rung")
    return found


def _samples(path: Path, frame: pd.DataFrame, stem: str, kind: str) -> list[str]:
    wanted = [c for c in COLUMNS[kind] if c in frame or c != LATER.get(kind)]
    columns = [c for c in frame if c not in SENSORS]
    if columns != wanted:
        return [f"{path.name} has the columns {', '.join(columns)}; a {kind!r} record has {', '.join(wanted)}"]
    found = []
    if frame.empty:
        return [f"{path.name} has no rows"]
    if empty := [c for c in columns if frame[c].isna().any() and (kind, c) not in EMPTY]:
        found.append(f"{path.name} has empty cells in {', '.join(empty)}")
    if wrong := [c for c in POSITIVE if c in columns and not frame[c].dropna().gt(0).all()]:
        found.append(f"{path.name} has numbers that are not above 0 in {', '.join(wrong)}")
    if negative := [c for c in NOT_BELOW_0 if c in columns and frame[c].lt(0).any()]:
        found.append(f"{path.name} has numbers below 0 in {', '.join(negative)}")
    if "name" in columns and stem != "device" and kind not in OF_OTHERS and stem not in set(frame["name"]):
        found.append(f"{path.name} has no row of {stem} itself")
    if kind == "error" and (frame["error"] > frame["budget"]).any():
        found.append(f"{path.name} has an error beyond its budget: a wrong kernel is not recorded")
    if "round" in columns:
        what = [c for c in columns if c not in ("round", *MEASURED)]
        least = frame.groupby(what)["round"].nunique().min()
        if least < (needed := ROUNDS.get(kind, 7)):
            found.append(f"{path.name} has {least} rounds of something; a {kind!r} record has at least {needed}")
    return found
