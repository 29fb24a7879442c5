"""Figures that other people published, as tables: data/published/ (data/README.md names the sources)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ..ladder.contract import TORCH_NAMES
from .store import DATA
from .workload import SHAPE, forward_flops


def published(name: str, root: Path = DATA) -> pd.DataFrame:
    """A table of data/published by its file's stem, e.g. "h200_peers". LookupError names those there are."""
    path = root / "published" / f"{name}.csv"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in (root / "published").glob("*.csv")))
        raise LookupError(f"no published table {name!r}; there are {known}")
    return pd.read_csv(path)


_DTYPES = {long: short for short, long in TORCH_NAMES.items()}
SHORT_NAMES = {
    "Triton tutorial 06 (autotuned)": "Triton tutorial 06",
    "flash_attention_from_scratch kernel 16": "flash_attention_from_scratch 16",
    "learn-cuda 07_attention": "learn-cuda 07",
}


def public_kernels(direction: str = "fwd", causal: bool = False, root: Path = DATA) -> pd.DataFrame:
    """The study of public kernels on one H200 (published/h200_peers.csv), columns named as in a record: name, variant, dtype,
    B, H, Nq, Nk, D, ms, tflops, and to_flash: the time of SDPA FLASH over the kernel's, side by side.

    SDPA FLASH and SDPA CUDNN have rows of their own, the median over the sessions they ran in beside the others; they have no ms.
    """
    table = published("h200_peers", root)
    table = table[(table["direction"] == direction) & (table["causal"] == int(causal)) & (table["correct"] == 1)]
    table = table.rename(columns={"peer": "name", "N": "Nk", "ratio_to_sdpa_flash": "to_flash"})
    table = table.assign(Nq=table["Nk"], dtype=table["dtype"].map(_DTYPES), name=table["name"].replace(SHORT_NAMES))
    keys, flash, cudnn = ["dtype", *SHAPE], "sdpa_flash_tflops", "sdpa_cudnn_tflops"
    both = table.dropna(subset=[flash, cudnn]).groupby(keys, sort=False)[[flash, cudnn]].median().reset_index()
    parts = [table]
    for name, own in (("SDPA FLASH", flash), ("SDPA CUDNN", cudnn)):
        parts.append(both[keys].assign(name=name, tflops=both[own], to_flash=both[own] / both[flash]))
    columns = ["name", "variant", *keys, "ms", "tflops", "to_flash"]
    return pd.concat(parts, ignore_index=True)[columns]


def leetcuda_log() -> pd.DataFrame:
    """LeetCUDA's log, a row per kernel and shape: name, dtype, B, H, Nq, Nk, D, ms, tflops, and to_unfused, the time of PyTorch's
    unfused attention over the kernel's."""
    table = published("leetcuda_readme_ada").rename(columns={"implementation": "name", "N": "Nk", "time_ms": "ms"})
    table = table.assign(Nq=table["Nk"])
    keys = ["dtype", *SHAPE]
    ours, unfused = (table[(table["name"] == "PyTorch unfused") == which] for which in (False, True))
    found = ours.merge(unfused[[*keys, "ms"]], on=keys, suffixes=("", "_unfused"))
    found["tflops"] = forward_flops(*(found[c].astype("float64") for c in SHAPE)) / found["ms"] / 1e9
    found["to_unfused"] = found["ms_unfused"] / found["ms"]
    return found[["name", *keys, "ms", "tflops", "to_unfused"]]


def sixteen_steps() -> pd.DataFrame:
    """flash_attention_from_scratch, step by step (index: kernel): change, and the speed after it in percent of FlashAttention-2
    on an A100 and an RTX 3090 (harmonic mean over N), with a100_gain, what the step brought there in percentage points."""
    table = published("flash_attention_from_scratch").query("kernel > 0").set_index("kernel")
    steps = table.rename(columns={"a100_harmonic_mean_percent": "a100", "rtx3090_harmonic_mean_percent": "rtx3090"})
    steps = steps[["change", "a100", "rtx3090"]].assign(change=steps["change"].str.replace("`", ""))
    return steps.assign(a100_gain=steps["a100"].diff())
