"""data/: the runs recorded on real devices, each with its conditions, and the arithmetic of reading them.

A record is two files, data/<device>/<stem>.<kind>.csv (the samples) and the same name with .json (the conditions they
were taken under). data/README.md documents every kind and column. Nothing else writes to data/<device>/, and nothing here
needs torch or a GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..ladder.paths import DATA, KERNELS
from ..ladder.rung import rung
from .device import conditions, slug, this_device
from .schema import COLUMNS
from .workload import BACKWARD_FLOPS, FORWARD_FLOPS

# The GPUs whose records are shown where this machine's own has none: each record as it is of the first whose is not stale.
DEVICES = ("nvidia-h200", "nvidia-h100-80gb-hbm3")
DEFAULT_DEVICE = DEVICES[0]
SHOWN = "shown"  # the device to ask for such a record whatever GPU this machine has; "shown-x2" for two of a host
# What follows `python -m helpers record` to record a kind; a kind that is in neither table is recorded by `make bench`
_OF_A_RUNG = (
    "families",
    "stages",
    "layouts",
    "one_sequence",
    "counters",
    "stalls",
    "power",
    "roles",
    "timeline",
    "tiles",
)
COMMANDS = {
    **{kind: f"{kind} {{stem}}" for kind in _OF_A_RUNG},
    **{kind: kind for kind in ("wgmma", "at_once", "sanitizer", "training", "writing", "ring")},
    "accuracy": "families {stem}",
    **dict.fromkeys(("patterns", "async", "microkernels", "copies"), "counters --singles"),
    **dict.fromkeys(("runs", "profile", "text"), "training"),
    **dict.fromkeys(("ring_memory", "ring_timeline", "link"), "ring"),
    "ring_largest": "ring --largest",
    **dict.fromkeys(("timings", "facts"), "languages"),
}
BY_HAND = ("steps", "loop_order")


def save(
    stem: str,
    kind: str,
    frame: pd.DataFrame,
    *,
    extra: dict | None = None,
    known: dict | None = None,
    root: Path = DATA,
    rungs: Sequence[str] = (),
) -> Path:
    """Writes `frame` as the record (stem, kind) of this device, replacing an older one, and returns the .csv's path.

    extra: what to keep beside the conditions (how it was measured, clocks seen, what was skipped). known: the conditions,
    by default `conditions()` of this machine. The source digest of the rung is added; stem "device" has none. rungs: those
    that ran, where the stem is no rung but a notebook about several; the digest is that of all their sources.
    Raises RuntimeError without an NVIDIA GPU whose conditions could be known, ValueError for a stem that no kernel has.
    """
    known = dict(conditions() if known is None else known)
    folder = root / slug(known["device"])
    folder.mkdir(parents=True, exist_ok=True)
    of_rungs = {"rungs": list(rungs), "digest": _digest(rungs)} if rungs else _of_rung(stem)
    about = {"rung": stem, "kind": kind} | of_rungs | known | dict(frame.attrs) | (extra or {})
    path = folder / f"{stem}.{kind}.csv"
    texts = {path: frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")}
    texts[path.with_suffix(".json")] = json.dumps(about, indent=2) + "\n"
    for file, text in texts.items():
        _beside(file).write_text(text)
    for file in texts:  # both at once: samples of today are not to stand under yesterday's digest
        _beside(file).replace(file)
    return path


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.new")


def _of_rung(stem: str) -> dict:
    if stem == "device":
        return {}
    found = rung(stem)
    flops = {"attention": FORWARD_FLOPS, "attention_backward": BACKWARD_FLOPS}
    work = {"flops": flops[found.op]} if found.op in flops else {"bytes": "4*(2*Nq*Nk+Nq)"}
    return {"op": found.op, "digest": found.digest, **work}


def _digest(rungs: Sequence[str]) -> str:
    """Of one rung its own, of several one of all together."""
    found = [rung(stem).digest for stem in rungs]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def folder_of(stem: str | None, kind: str, device: str | None, root: Path) -> Path:
    """Where `load` finds a record; DEFAULT_DEVICE's folder if nobody has it."""
    if device is not None and not device.startswith(SHOWN):
        return root / slug(device)
    here = slug(this_device() or "") if device is None else ""
    several = (device or "").removeprefix(SHOWN)
    stale = {}
    for folder in filter(None, (here, *(one + several for one in DEVICES))):
        if found := list((root / folder).glob(f"{stem or '*'}.{kind}.json")):
            stale[folder] = folder != here and any(is_stale(json.loads(path.read_text())) for path in found)
    fresh = [folder for folder, old in stale.items() if not old]
    return root / [*fresh, *stale, DEFAULT_DEVICE + several][0]


def about(stem: str, kind: str = "forward", device: str | None = None, root: Path = DATA) -> dict:
    """The conditions of one record. LookupError if there is none."""
    path = folder_of(stem, kind, device, root) / f"{stem}.{kind}.json"
    if not path.exists():
        raise LookupError(_missing(stem, kind, path.parent.name, root))
    return json.loads(path.read_text())


def load(stem: str | None = None, kind: str = "forward", device: str | None = None, root: Path = DATA) -> pd.DataFrame:
    """The samples of one rung, or of all (stem None), with the columns rung, op, device and stale in front.

    stale is True where the rung has changed since. device: a name or folder of data/; by default this machine's GPU if it
    has this record, and else, or if it is SHOWN, the first of DEVICES whose record is not stale. LookupError names what is recorded
    if this is not.
    """
    folder = folder_of(stem, kind, device, root)
    paths = sorted(folder.glob(f"{stem or '*'}.{kind}.csv"))
    if not paths:
        raise LookupError(_missing(stem, kind, folder.name, root))
    return pd.concat([_read(p) for p in paths], ignore_index=True)


def _read(path: Path) -> pd.DataFrame:
    known = json.loads(path.with_suffix(".json").read_text())
    frame = pd.read_csv(path)
    if known["kind"] in ("error", "memory", "counters") and "dtype" not in frame:
        frame.insert(0, "dtype", "fp32")  # recorded when there were fp32 rungs alone
    for column, value in reversed(
        {"rung": known["rung"], "op": known.get("op"), "device": known["device"], "stale": is_stale(known)}.items()
    ):
        frame.insert(0, column, value)
    return frame


def is_stale(known: dict) -> bool:
    """Whether the rung whose conditions these are has changed, or gone, since it was recorded."""
    if "digest" not in known:
        return False
    try:
        return _digest(known.get("rungs", [known["rung"]])) != known["digest"]
    except (LookupError, ValueError, OSError):
        return True


def maker(stem: str | None, kind: str) -> str:
    """By which command a record of this kind is made, as a sentence's end. stem: None for that of any rung."""
    if kind in BY_HAND:
        return "records of this kind were made by hand, by no command"
    options = COMMANDS.get(kind, "").format(stem=stem or "KERNEL")
    gpus = "two GPUs or more" if options.startswith("ring") else "a GPU"
    return f"`{f'python -m helpers record {options}' if options else 'make bench'}` on a machine with {gpus} makes one"


def _missing(stem: str | None, kind: str, device: str, root: Path) -> str:
    """That there is no such record, which kinds there are, and what makes one if a command does."""
    if stem and stem not in _stems(root):
        return f"no records of {stem!r}: a record's stem is whole, like 04_fa2_fp32"
    kinds = ", ".join(sorted({p.stem.split(".")[-1] for p in (root / device).glob(f"{stem or '*'}.*.csv")}))
    there = f"; recorded {'of it' if stem else 'there'}: {kinds}" if kinds else ", nor one of another kind"
    said = f"no {kind!r} record{f' of {stem}' if stem else ''} on {device}{there}"
    return f"{said}; {maker(stem, kind)}" if kind in {*COMMANDS, *COLUMNS, *BY_HAND} else said


def _stems(root: Path) -> set[str]:
    """What there are records of, or may be: kernels, notebooks about several, and the device."""
    of_kernels = {path.stem for path in KERNELS.glob("[0-9][0-9]_*.cu")}
    return of_kernels | {path.stem.split(".")[0] for path in root.glob("*/*.*.csv")} | {"device"}
