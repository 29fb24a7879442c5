"""The README's ladder table, written from data/: `python -m helpers readme`."""

from __future__ import annotations

import difflib
from pathlib import Path

import pandas as pd

from .. import record
from ..ladder.paths import NOTEBOOKS, ROOT
from ..ladder.rung import Rung, rungs
from .workload import N

README = ROOT / "README.md"
BEGIN, END = "<!-- ladder -->", "<!-- /ladder -->"
DEVICE = record.DEFAULT_DEVICE
STALE = " (stale: the kernel has changed since)"


def table(root: Path = record.DATA) -> str:
    """The ladder as a Markdown table: rung, idea, speed at the headline workload, ratio to each peer."""
    device = _device_name(root)
    head = [
        f"| rung | the one idea | {device} | against its peers |",
        "|---|---|---|---|",
    ]
    foot = (
        f"\nTFLOP/s at B·N = 16384, H·D = 2048, N = {N}, for D = 64 and 128 (softmax: TB/s of S read and P written, at the "
        "same N). A ratio is the peer's time over the kernel's, so above 1 is faster than the peer: geometric mean over "
        "N ≥ 1024, with the worst and the best shape. From 10 on, inputs are fp16 and bf16; both speed and ratio are given for "
        "each, at D = 64 · 128. A causal mask halves the FLOPs that are counted; the backward pass counts 2.5 times the "
        "forward pass. Decode: TB/s of keys and values read, one query per sequence, at the best number of pieces."
    )
    return "\n".join([*head, *(_row(r, root) for r in rungs()), foot])


def _device_name(root: Path) -> str:
    try:
        return record.load(None, "forward", DEVICE, root)["device"].iloc[0]
    except LookupError:
        return "NVIDIA H200"


def _row(rung: Rung, root: Path) -> str:
    name = f"[{rung.stem}](kernels/{rung.stem}.cu)"
    if (NOTEBOOKS / f"{rung.stem}.ipynb").exists():
        name += f" · [notebook](notebooks/{rung.stem}.ipynb)"
    return f"| {name} | {rung.idea} | {' | '.join(_figures(rung, root))} |"


def _figures(rung: Rung, root: Path) -> tuple[str, str]:
    """Speed, and ratios to the peers, of every kind of timing that is recorded."""
    speeds, ratios = [], []
    for kind in record.kinds(rung):
        try:
            samples = record.load(rung.stem, kind, DEVICE, root)
        except LookupError:
            continue
        if kind == "groups":
            points = record.grouped(samples, rung.stem)
            ratios.append(
                _span(
                    points["ratio"], f"itself with {points['many'][0]} heads of K and V instead of {points['few'][0]}"
                )
            )
        elif kind == "packed":
            ratios.append(
                _span(record.ratio_to_ideal(samples)["ratio"], "full batches, packed sequences of random lengths")
            )
        elif kind == "matmul":
            for words, part in _masks(kind, samples):
                beside = record.ratio_to_cublas(part, rung.stem)["ratio"]
                ratios.append(words + _span(beside, "cuBLAS bf16, D = 128, N ≥ 4096"))
        elif kind == "decode":
            speed, beside = _decode(samples)
            speeds.append(speed), ratios.extend(beside)
        else:
            for words, part in _masks(kind, samples):
                speed, beside = _timings(rung, part)
                speeds.append(words + speed), ratios.extend(words + line for line in beside)
    return "<br>".join(speeds) or "not recorded yet", "<br>".join(ratios)


def _masks(kind: str, samples: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The samples with and without a causal mask, each with the words that go in front of its figures."""
    back = "backward, " if kind == "backward" else ""
    if "causal" not in samples:
        return [("", samples)]
    words = {0: back and "backward: ", 1: f"{back}causal: "}
    return [(words[causal], part) for causal, part in samples.groupby("causal")]


def _span(ratios: pd.Series, peer: str) -> str:
    return f"{record.geometric_mean(ratios):.2f} × {peer} ({ratios.min():.2f}–{ratios.max():.2f})"


def _decode(samples: pd.DataFrame) -> tuple[str, list[str]]:
    table = record.bandwidths(samples)
    best = table.loc[table.groupby(["dtype", *record.SHAPE, "Hkv"])["tb_per_s"].idxmax()]
    speed = f"{best['tb_per_s'].min():.2f}–{best['tb_per_s'].max():.2f} TB/s"
    stale = STALE if samples["stale"].any() else ""
    return speed + stale, [_span(best["of_copy"], "copy"), _span(best["to_flash"], "SDPA FLASH")]


def _timings(rung: Rung, samples: pd.DataFrame) -> tuple[str, list[str]]:
    medians = record.medians(record.headline(samples))
    here = medians[(medians["name"] == rung.stem) & (medians["Nk"] == N)].sort_values("D")
    dtypes = list(samples["dtype"].unique())
    if rung.op == "softmax":
        speed = " · ".join(f"{x:.2f}" for x in here["tb_per_s"]) + " TB/s"
    else:
        values = {t: " · ".join(f"{x:.3g}" for x in here.loc[here["dtype"] == t, "tflops"]) for t in dtypes}
        speed = _by_dtype(values) + " TFLOP/s"
    ratios = [_ratio(samples, rung.stem, peer, dtypes) for peer in _peers(samples, rung.stem)]
    return speed + (STALE if samples["stale"].any() else ""), ratios


def _by_dtype(values: dict[str, str]) -> str:
    """ "42.9 · 46.3" of fp32 alone, "fp16 160 · 170, bf16 159 · 170" of several dtypes."""
    return ", ".join(values.values() if list(values) == ["fp32"] else (f"{t} {x}" for t, x in values.items()))


def _peers(samples: pd.DataFrame, stem: str) -> list[str]:
    """The peers a row names: all of an fp32 rung; of a 16-bit one the two fast ones, with FLASH in front."""
    peers = [p for p in samples["name"].unique() if p != stem]
    fast = [p for p in ("SDPA FLASH", "SDPA CUDNN") if p in peers]
    return peers if "fp32" in set(samples["dtype"]) or not fast else fast


def _ratio(samples: pd.DataFrame, stem: str, peer: str, dtypes: list[str]) -> str:
    mean, low, high = record.overall(samples, stem, peer)
    if dtypes == ["fp32"]:
        return f"{mean:.2f} × {peer} ({low:.2f}–{high:.2f})"
    found = record.summary(samples, stem, peer).sort_values("D")
    means = {t: " · ".join(f"{x:.2f}" for x in found.loc[found["dtype"] == t, "mean"]) for t in dtypes}
    return f"{_by_dtype(means)} × {peer} ({low:.2f}–{high:.2f})"


def rewritten(text: str, root: Path = record.DATA) -> str:
    """A README's text with the table between its markers renewed. ValueError if the markers aren't there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(root)}\n{END}{rest.split(END)[1]}"


def update(path: Path = README, check: bool = False) -> str:
    """Renews a README's table and returns the lines that change, as a diff; `check`: changes nothing. Empty if it is up to date."""
    old = path.read_text()
    new = rewritten(old)
    if not check:
        path.write_text(new)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), path.name, "from data/", lineterm="", n=0)
    return "\n".join(lines)
