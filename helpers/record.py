"""data/: the runs recorded on real devices, each with its conditions, and the arithmetic of reading them.

A record is two files, data/<device>/<stem>.<kind>.csv (the samples) and the same name with .json (the conditions they
were taken under). data/README.md documents every kind and column. Nothing else writes to data/, and nothing here needs
torch or a GPU.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from .ladder import Rung

DATA = Path(__file__).resolve().parent.parent / "data"
DEFAULT_DEVICE = "nvidia-h200"  # shown where this machine's own GPU has no records
FORWARD_FLOPS = "4*B*H*Nq*Nk*D"  # two products of 2*Nq*Nk*D each; the softmax is not counted
BACKWARD_FLOPS = "10*B*H*Nq*Nk*D"  # five products
SHAPE = ["B", "H", "Nq", "Nk", "D"]
CACHE = ["Hkv", "splits", "chosen", "bytes"]  # what a decode step has besides
CUBLAS = "cuBLAS"


def forward_flops(B: int, H: int, Nq: int, Nk: int, D: int) -> int:
    """Floating-point operations of attention's forward pass: 4·B·H·Nq·Nk·D, softmax not counted. Arrays work too."""
    return 4 * B * H * Nq * Nk * D


def attention_flops(B: int, H: int, Nq: int, Nk: int, D: int, causal: bool = False) -> float:
    """As forward_flops, and half of it under a causal mask. Arrays work too."""
    return forward_flops(B, H, Nq, Nk, D) / (1 + causal)


def backward_flops(B: int, H: int, Nq: int, Nk: int, D: int, causal: bool = False) -> float:
    """Floating-point operations of attention's backward pass: 2.5 times those of the forward pass. Arrays work too."""
    return 2.5 * attention_flops(B, H, Nq, Nk, D, causal)


def kv_bytes(B: int, Hkv: int, Nk: int, D: int, itemsize: int = 2) -> int:
    """Bytes of a cache's K and V, which a decode step has to read once."""
    return 2 * itemsize * B * Hkv * Nk * D


def forward_bytes(B: int, H: int, Nq: int, Nk: int, D: int, itemsize: int = 4) -> int:
    """Bytes no forward pass can avoid: Q, K, V read and O written once (`itemsize` each), LSE written in float32."""
    return B * H * (itemsize * D * (2 * Nq + 2 * Nk) + 4 * Nq)


def softmax_bytes(rows: int, N: int) -> int:
    """Bytes no float32 row softmax can avoid: S read, P written, LSE written."""
    return 4 * (2 * rows * N + rows)


def slug(device: str) -> str:
    """The folder of a device: "NVIDIA H200" is "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def nvidia_smi() -> str | None:
    """Path of nvidia-smi: on PATH, or where NVIDIA's container images keep it; None without a driver."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin:/usr/bin")


def gpu_id() -> str:
    """The GPU that torch calls cuda:0, as nvidia-smi's option --id takes it: CUDA_VISIBLE_DEVICES may have chosen another than 0."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def query_gpu(*fields: str) -> list[str] | None:
    """That GPU's answer to `nvidia-smi --query-gpu=...`; None where there is no driver or GPU."""
    if (tool := nvidia_smi()) is None:
        return None
    command = [tool, f"--id={gpu_id()}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    answer = done.stdout.strip().splitlines()
    return [x.strip() for x in answer[0].split(",")] if done.returncode == 0 and answer else None


@functools.cache
def this_device() -> str | None:
    """The name of the GPU that torch calls cuda:0; None without one."""
    answer = query_gpu("name")
    return answer[0] if answer else None


def conditions() -> dict:
    """What a figure taken now on this machine depends on: device, clocks, power limit, driver, CUDA, torch, date.

    Raises RuntimeError where there is no NVIDIA GPU: timings are recorded on a GPU only.
    """
    fields = {
        "driver": "driver_version",
        "memory_mib": "memory.total",
        "power_limit_w": "power.limit",
        "sm_clock_max_mhz": "clocks.max.sm",
        "memory_clock_mhz": "clocks.mem",
    }
    answer = query_gpu("name", *fields.values())
    if answer is None:
        raise RuntimeError("timings are recorded on a GPU only, and nvidia-smi finds none on this machine")
    found = {"device": answer[0], **{k: _number(v) for k, v in zip(fields, answer[1:], strict=True)}}
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    except ImportError:
        found |= {"torch": None, "cuda": None}
    found |= {"python": platform.python_version(), "date": datetime.date.today().isoformat()}
    return found


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


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
    """
    known = dict(conditions() if known is None else known)
    folder = root / slug(known["device"])
    folder.mkdir(parents=True, exist_ok=True)
    of_rungs = {"rungs": list(rungs), "digest": _digest(rungs)} if rungs else _of_rung(stem)
    about = {"rung": stem, "kind": kind} | of_rungs | known | dict(frame.attrs) | (extra or {})
    path = folder / f"{stem}.{kind}.csv"
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    path.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
    return path


def _of_rung(stem: str) -> dict:
    if stem == "device":
        return {}
    from .ladder import rung

    found = rung(stem)
    flops = {"attention": FORWARD_FLOPS, "attention_backward": BACKWARD_FLOPS}
    work = {"flops": flops[found.op]} if found.op in flops else {"bytes": "4*(2*Nq*Nk+Nq)"}
    return {"op": found.op, "digest": found.digest, **work}


def _digest(rungs: Sequence[str]) -> str:
    """Of one rung its own, of several one of all together."""
    from .ladder import rung

    found = [rung(stem).digest for stem in rungs]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def devices(root: Path = DATA) -> list[str]:
    """The folders of data/ that hold records, the default device first."""
    found = sorted({p.parent.name for p in root.glob("*/*.json")})
    return sorted(found, key=lambda name: name != DEFAULT_DEVICE)


def _folder(stem: str | None, kind: str, device: str | None, root: Path) -> Path:
    if device is not None:
        return root / slug(device)
    here = slug(this_device() or "")
    found = here and any((root / here).glob(f"{stem or '*'}.{kind}.csv"))
    return root / (here if found else DEFAULT_DEVICE)


def about(stem: str, kind: str = "forward", device: str | None = None, root: Path = DATA) -> dict:
    """The conditions of one record. LookupError if there is none."""
    path = _folder(stem, kind, device, root) / f"{stem}.{kind}.json"
    if not path.exists():
        raise LookupError(_missing(stem, kind, path.parent.name, root))
    return json.loads(path.read_text())


def load(stem: str | None = None, kind: str = "forward", device: str | None = None, root: Path = DATA) -> pd.DataFrame:
    """The samples of one rung, or of all (stem None), with the columns rung, op, device and stale in front.

    stale is True where the rung has changed since. device: a name or folder of data/; by default this machine's GPU if it
    has this record, and "nvidia-h200" otherwise. LookupError names what is recorded if this is not.
    """
    folder = _folder(stem, kind, device, root)
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


def _missing(stem: str | None, kind: str, device: str, root: Path) -> str:
    there = ", ".join(sorted(p.name.removesuffix(".csv") for p in (root / device).glob("*.csv"))) or "nothing"
    what = f"{kind!r} record of {stem}" if stem else f"{kind!r} record"
    return f"no {what} on {device} (recorded there: {there}); `make bench` on a machine with that GPU makes it"


def published(name: str, root: Path = DATA) -> pd.DataFrame:
    """A table of data/published by its file's stem, e.g. "h200_peers". LookupError names those there are."""
    path = root / "published" / f"{name}.csv"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in (root / "published").glob("*.csv")))
        raise LookupError(f"no published table {name!r}; there are {known}")
    return pd.read_csv(path)


DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SHORT_NAMES = {
    "Triton tutorial 06 (autotuned)": "Triton tutorial 06",
    "flash_attention_from_scratch kernel 16": "flash_attention_from_scratch 16",
    "learn-cuda 07_attention": "learn-cuda 07",
}


def public_kernels(direction: str = "fwd", causal: bool = False, root: Path = DATA) -> pd.DataFrame:
    """The study of public kernels on one H200 (published/h200_peers.csv), columns named as in a record: name, variant, dtype,
    B, H, Nq, Nk, D, ms, tflops, and to_flash, to_cudnn: the time of SDPA FLASH and SDPA CUDNN over the kernel's, side by side.

    SDPA FLASH and SDPA CUDNN have rows of their own, the median over the sessions they ran in beside the others; they have no ms.
    """
    table = published("h200_peers", root)
    table = table[(table["direction"] == direction) & (table["causal"] == int(causal)) & (table["correct"] == 1)]
    table = table.rename(columns={"peer": "name", "N": "Nk", "ratio_to_sdpa_flash": "to_flash"})
    table = table.rename(columns={"ratio_to_sdpa_cudnn": "to_cudnn"})
    table = table.assign(Nq=table["Nk"], dtype=table["dtype"].map(DTYPE_NAMES), name=table["name"].replace(SHORT_NAMES))
    keys, flash, cudnn = ["dtype", *SHAPE], "sdpa_flash_tflops", "sdpa_cudnn_tflops"
    both = table.dropna(subset=[flash, cudnn]).groupby(keys, sort=False)[[flash, cudnn]].median().reset_index()
    parts = [table]
    for name, own in (("SDPA FLASH", flash), ("SDPA CUDNN", cudnn)):
        ratios = {"to_flash": both[own] / both[flash], "to_cudnn": both[own] / both[cudnn]}
        parts.append(both[keys].assign(name=name, tflops=both[own], **ratios))
    columns = ["name", "variant", *keys, "ms", "tflops", "to_flash", "to_cudnn"]
    return pd.concat(parts, ignore_index=True)[columns]


def leetcuda_log(root: Path = DATA) -> pd.DataFrame:
    """LeetCUDA's log, a row per kernel and shape: name, dtype, B, H, Nq, Nk, D, ms, tflops, and to_unfused, the time of PyTorch's
    unfused attention over the kernel's."""
    table = published("leetcuda_readme_ada", root).rename(
        columns={"implementation": "name", "N": "Nk", "time_ms": "ms"}
    )
    table = table.assign(Nq=table["Nk"])
    keys = ["dtype", *SHAPE]
    ours, unfused = (table[(table["name"] == "PyTorch unfused") == which] for which in (False, True))
    found = ours.merge(unfused[[*keys, "ms"]], on=keys, suffixes=("", "_unfused"))
    found["tflops"] = forward_flops(*(found[c].astype("float64") for c in SHAPE)) / found["ms"] / 1e9
    found["to_unfused"] = found["ms_unfused"] / found["ms"]
    return found[["name", *keys, "ms", "tflops", "to_unfused"]]


def sixteen_steps(root: Path = DATA) -> pd.DataFrame:
    """flash_attention_from_scratch, step by step (index: kernel): change, and the speed after it in percent of FlashAttention-2
    on an A100 and an RTX 3090 (harmonic mean over N), with a100_gain, what the step brought there in percentage points."""
    table = published("flash_attention_from_scratch", root).query("kernel > 0").set_index("kernel")
    steps = table.rename(columns={"a100_harmonic_mean_percent": "a100", "rtx3090_harmonic_mean_percent": "rtx3090"})
    steps = steps[["change", "a100", "rtx3090"]].assign(change=steps["change"].str.replace("`", ""))
    return steps.assign(a100_gain=steps["a100"].diff())


def headline(samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of the headline workload: B·N = 16384 tokens, H·D = 2048; for softmax the same N, 512 to 16384 by twos."""
    tokens = (samples["B"] * samples["Nq"] == 16384) & (samples["H"] * samples["D"] == 2048)
    softmax = (samples["D"] == 1) & samples["Nk"].isin([512 << i for i in range(6)])
    return samples[tokens | softmax]


def _keys(samples: pd.DataFrame) -> list[str]:
    return [c for c in ("rung", "op", "device", "stale", "dtype", "causal", *SHAPE, *CACHE, "flops") if c in samples]


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per name and shape of samples of timings: ms (median), ms_low and ms_high (the rounds' extremes), and with
    them tflops (attention, by 4·B·H·Nq·Nk·D, backward 2.5 times it, half of it if `causal`; by `flops` where there is such a
    column) or tb_per_s (softmax and copy, by the bytes no softmax can avoid; decode, by `bytes`)."""
    grouped = samples.groupby([*_keys(samples), "name"], sort=False, dropna=False)["ms"]
    frame = grouped.agg(ms="median", ms_low="min", ms_high="max").reset_index()
    softmax = frame["op"].eq("softmax") if "op" in frame else pd.Series(False, index=frame.index)
    causal = frame["causal"] if "causal" in frame else 0
    flops = attention_flops(*(frame[c].astype("float64") for c in SHAPE), causal)
    if "op" in frame:
        flops = flops.where(frame["op"] != "attention_backward", 2.5 * flops)
    flops = frame["flops"] if "flops" in frame else flops
    frame["tflops"] = (flops / frame["ms"] / 1e9).where(~softmax)
    frame["tb_per_s"] = (softmax_bytes(frame["Nq"].astype("float64"), frame["Nk"]) / frame["ms"] / 1e9).where(softmax)
    if "bytes" in frame:
        frame["tb_per_s"] = frame["bytes"] / frame["ms"] / 1e9
    return frame


def bandwidths(samples: pd.DataFrame) -> pd.DataFrame:
    """Of decode samples, a row per shape and number of splits of the rung: splits, chosen, bytes, ms (median), tb_per_s, of_copy (its
    bandwidth over that of the copy beside it), and to_flash (the time of SDPA FLASH over its own), within rounds."""
    place = [c for c in ("rung", "device", "stale", "dtype", *SHAPE, "Hkv") if c in samples]
    frame = samples.assign(rate=samples["bytes"] / samples["ms"] / 1e9)
    for name, column in (("copy", "rate"), ("SDPA FLASH", "ms")):
        other = frame.loc[frame["name"] == name, [*place, "round", column]].rename(columns={column: name})
        frame = frame.merge(other, on=[*place, "round"], how="left")
    frame = frame[frame["splits"] > 0]
    frame = frame.assign(of_copy=frame["rate"] / frame["copy"], to_flash=frame["SDPA FLASH"] / frame["ms"])
    grouped = frame.groupby([*place, "splits", "chosen", "bytes"], sort=False, dropna=False)
    values = grouped[["ms", "rate", "of_copy", "to_flash"]].median().rename(columns={"rate": "tb_per_s"})
    return values.reset_index()


def kinds(rung: Rung) -> tuple[str, ...]:
    """The kinds of timings that a rung's operation and features call for, the one it is judged by first."""
    if rung.op == "attention_backward":
        return ("backward",)
    if "splits" in rung.features:
        return ("decode",)
    hopper = rung.arch == "sm_90a"
    asked = {"causal": "causal" in rung.features, "groups": "gqa" in rung.features, "packed": "varlen" in rung.features}
    return "forward", *(kind for kind, yes in asked.items() if yes), *(("matmul",) if hopper else ())


def grouped(samples: pd.DataFrame, ours: str) -> pd.DataFrame:
    """Of `groups` samples, a row per shape: `few` and `many` heads of K and V, and how fast the rung is with few of them over
    the same FLOPs with many: ms with many / ms with few within each round, their median as `ratio`, the extremes as `low`, `high`."""
    keys = [c for c in ("dtype", "causal", *SHAPE) if c in samples]
    own = samples[samples["name"] == ours]
    few, many = own["Hkv"].min(), own["Hkv"].max()
    wide = own.pivot_table(index=[*keys, "round"], columns="Hkv", values="ms", sort=False)
    ratios = (wide[many] / wide[few]).rename("ratio").reset_index()
    found = ratios.groupby(keys, sort=False)["ratio"].agg(ratio="median", low="min", high="max").reset_index()
    return found.assign(few=few, many=many)


def of_ideal(samples: pd.DataFrame) -> pd.DataFrame:
    """Of `packed` samples, a row per batch: `ratio`, the time its sequences would take at the rate of full batches over its
    own, median of the rounds with `low` and `high`, and `to_padded`, the time of the same sequences padded over its own."""
    keys = ["dtype", "causal", "H", "D", "batch", "sequences", "tokens"]
    frame = samples.assign(ratio=samples["ideal_ms"] / samples["ms"], to_padded=samples["padded_ms"] / samples["ms"])
    found = frame.groupby(keys, sort=False).agg(
        ratio=("ratio", "median"), low=("ratio", "min"), high=("ratio", "max"), to_padded=("to_padded", "median")
    )
    return found.reset_index()


def of_matmul(samples: pd.DataFrame, ours: str) -> pd.DataFrame:
    """Of `matmul` samples, a row per shape: `ratio`, the rung's TFLOP/s over cuBLAS's beside it, median of the rounds, `low`, `high`."""
    keys = [c for c in ("rung", "device", "stale", "dtype", "causal", *SHAPE) if c in samples]
    frame = samples.assign(rate=samples["flops"] / samples["ms"])
    wide = frame.pivot_table(index=[*keys, "round"], columns="name", values="rate", sort=False)
    ratios = (wide[ours] / wide[CUBLAS]).rename("ratio").reset_index()
    return ratios.groupby(keys, sort=False)["ratio"].agg(ratio="median", low="min", high="max").reset_index()


def of_steps(steps: pd.DataFrame, *measured: str) -> pd.DataFrame:
    """Of `steps` samples, a row per step: what, reason, kept (all that is said, where heads of different size differ), and ratio,
    ratio_causal and the columns `measured` for each D, as "ratio, D = 64"."""
    said = steps.groupby("step")[["what", "reason", "kept"]].agg(lambda words: "; ".join(dict.fromkeys(words)))
    columns = [name for name in ("ratio", "ratio_causal", *measured) if name in steps]
    # convert_dtypes: integers stay integers beside a gap
    wide = steps.pivot(index="step", columns="D", values=columns).convert_dtypes()
    names = [(name, D) for D in sorted(set(steps["D"])) for name in columns]
    return said.join(pd.DataFrame({f"{name}, D = {D}": wide[name, D] for name, D in names}))


def ratio(samples: pd.DataFrame, ours: str, peer: str) -> pd.DataFrame:
    """How many times faster `ours` is than `peer`, per shape: peer's ms / our ms within each round (they ran side by
    side), their median as `ratio`, the rounds' extremes as `low` and `high`.

    Shapes where either is missing are left out; LookupError if that leaves none.
    """
    keys = _keys(samples)
    wide = samples[samples["name"].isin([ours, peer])]
    wide = wide.pivot_table(index=[*keys, "round"], columns="name", values="ms", sort=False, dropna=False)
    if ours not in wide or peer not in wide:
        raise LookupError(f"no samples of {ours} beside {peer}; there are {', '.join(samples['name'].unique())}")
    ratios = (wide[peer] / wide[ours]).dropna().rename("ratio").reset_index()
    found = ratios.groupby(keys, sort=False, dropna=False)["ratio"].agg(ratio="median", low="min", high="max")
    return found.reset_index()


def summary(samples: pd.DataFrame, ours: str, peer: str, from_n: int = 1024) -> pd.DataFrame:
    """`ours` against `peer` for each dtype and D (and for causal or not, where the samples say): `mean`, the geometric mean of
    the ratio over the headline shapes with N >= from_n, with `low` and `high` among them; and `worst`, the lowest of every
    recorded shape, which is `at`.

    LookupError where the two were never measured side by side.
    """
    found = ratio(samples, ours, peer)
    rows = []
    by = [c for c in ("dtype", "causal", "D") if c in found]
    for key, points in found.groupby(by, sort=False):
        long = headline(points).query("Nk >= @from_n")["ratio"]
        worst = points.loc[points["ratio"].idxmin()]
        shape = f"B{worst['B']} H{worst['H']} N{worst['Nk']}"
        mean = math.exp(long.map(math.log).mean()) if len(long) else math.nan
        rows.append((*key, mean, long.min(), long.max(), worst["ratio"], shape))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "worst", "at"])


def overall(samples: pd.DataFrame, ours: str, peer: str, from_n: int = 1024) -> tuple[float, float, float]:
    """`ours` against `peer` in three numbers: the geometric mean of the ratio over the headline shapes with N >= from_n,
    and the worst and best shape. LookupError where nothing was measured."""
    points = ratio(headline(samples), ours, peer)
    points = points.loc[points["Nk"] >= from_n, "ratio"]
    if points.empty:
        raise LookupError(f"no samples of {ours} beside {peer} with N >= {from_n}")
    return math.exp(points.map(math.log).mean()), points.min(), points.max()
