"""What data/ says of the ladder, as tables for README.md and data/README.md and as figures for the staircase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from .. import record
from ..ladder.paths import NOTEBOOKS
from ..ladder.rung import Rung, rungs
from .goals import GOALS
from .workload import N

BESIDE = {record.CUDNN: "cuDNN", record.FA3: "FA3", record.FA4: "FA4"}  # as they ran beside a rung
PUBLISHED = {"Triton tutorial 06": "Triton"}  # of the study of public kernels
LANGUAGES = {
    "triton_tiles": "Triton",
    "gluon_tiles": "Gluon",
    "cutile_tiles": "cuTile",
    "helion_tiles": "Helion",
    "flex_attention": "FlexAttention",
    "cute_mma": "CuTe in C++",
    "pallas_tiles": "Pallas",
    "cute_dsl": "CuTe DSL",
}
SEVERAL_N = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
STALE = " (stale: the kernel has changed since)"


def figures(root: Path = record.DATA) -> pd.DataFrame:
    """What a rung reaches without a causal mask, in fp16 where it takes it: a row for each rung and D.

    Columns: rung, group ("forward", "decode" or "backward"), op, dtype, D; speed at the headline workload and N = 4096 (of
    decode the least) in `unit`; flash and cudnn, the time of SDPA FLASH and of SDPA CUDNN over the rung's, side by side,
    geometric mean over N >= 1024, NaN where they did not run; stale. A rung without records has one row, with neither.
    """
    rows = []
    for rung in rungs():
        group = record.kinds(rung)[0]
        try:
            samples = record.load(rung.stem, group, card(root), root)
        except LookupError:
            rows.append({"rung": rung.stem, "group": group, "op": rung.op})
            continue
        dtype = "fp16" if "fp16" in set(samples["dtype"]) else samples["dtype"].iloc[0]
        samples = samples[samples["dtype"] == dtype]
        samples = samples[samples["causal"] == 0] if "causal" in samples else samples
        found = _decoding(samples) if group == "decode" else _computing(samples, rung)
        every = {"rung": rung.stem, "group": group, "op": rung.op, "dtype": dtype, "stale": samples["stale"].any()}
        rows += [every | row for row in found.reset_index().to_dict("records")]
    columns = ["rung", "group", "op", "dtype", "D", "speed", "unit", "flash", "cudnn", "stale"]
    return pd.DataFrame(rows, columns=columns)


def _computing(samples: pd.DataFrame, rung: Rung) -> pd.DataFrame:
    here = record.medians(record.headline(samples)).query("name == @rung.stem and Nk == @N").set_index("D")
    unit = "TB/s" if rung.op == "softmax" else "TFLOP/s"
    found = pd.DataFrame({"speed": here["tb_per_s" if unit == "TB/s" else "tflops"], "unit": unit})
    for column, peer in (("flash", record.FLASH), ("cudnn", record.CUDNN)):
        try:
            found[column] = record.summary(samples, rung.stem, peer).set_index("D")["mean"]
        except LookupError:  # fp32, which they don't take
            pass
    return found


def _decoding(samples: pd.DataFrame) -> pd.DataFrame:
    best = _best_splits(samples).groupby("D")
    flash = best["to_flash"].agg(record.geometric_mean)
    return pd.DataFrame({"speed": best["tb_per_s"].min(), "unit": "TB/s", "flash": flash})


def caches(stem: str, root: Path = record.DATA) -> str:
    """Between which lengths the caches are of which a decoding rung's ratio is a mean: "2048 to 131072 keys"."""
    keys = record.load(stem, "decode", card(root), root)["Nk"]
    return f"{keys.min()} to {keys.max()} keys"


def peers(root: Path = record.DATA) -> pd.DataFrame:
    """Public kernels beside SDPA FLASH in fp16 without a causal mask: name, group ("forward", "backward"), D, flash as in
    `figures`. cuDNN, FlashAttention-3 and -4 as they ran beside the last rung of the group that they ran beside, if any; the
    others from published/h200_peers.csv."""
    rows = []
    for group, direction in (("forward", "fwd"), ("backward", "bwd")):
        try:
            every = record.load(None, group, card(root), root).query("dtype == 'fp16'")
        except LookupError:
            continue
        every = every[every["causal"] == 0] if "causal" in every else every
        for peer, short in BESIDE.items():
            beside = every.loc[every["name"] == peer, "rung"]
            if len(beside):
                found = record.summary(every[every["rung"] == beside.max()], peer, record.FLASH)
                rows += [(short, group, D, mean) for D, mean in zip(found["D"], found["mean"], strict=True)]
        table = record.headline(record.public_kernels(direction, root=root)).query(
            "dtype == 'fp16' and Nk >= @record.FROM_N"
        )
        for name, short in PUBLISHED.items():
            for D, part in table[table["name"] == name].groupby("D"):
                rows.append((short, group, D, record.geometric_mean(part["to_flash"])))
    return pd.DataFrame(rows, columns=["name", "group", "D", "flash"])


def across_sessions(root: Path = record.DATA) -> pd.DataFrame:
    """fp32 rungs beside SDPA FLASH in fp16, which takes no fp32: rung, group, D, flash, the geometric mean over N >= 1024 of
    FLASH's median time, of the last rung it ran beside, over the fp32 rung's. Two sessions on one GPU, and two precisions."""
    rows = []
    for group in ("forward", "backward"):
        try:
            samples = record.load(None, group, card(root), root).query("op != 'softmax'")
        except LookupError:
            continue
        samples = samples[samples["causal"] == 0] if "causal" in samples else samples
        times = record.medians(record.headline(samples)).query("Nk >= @record.FROM_N")
        flash = times.query("name == @record.FLASH and dtype == 'fp16'")
        flash = flash[flash["rung"] == flash["rung"].max()].set_index(["D", "Nk"])["ms"]
        own = times[(times["dtype"] == "fp32") & (times["name"] == times["rung"])]
        for (stem, D), part in own.groupby(["rung", "D"]):
            ratios = (flash[D] / part.set_index("Nk")["ms"]).dropna() if len(flash) else part["ms"].iloc[:0]
            if len(ratios):
                rows.append((stem, group, D, record.geometric_mean(ratios)))
    return pd.DataFrame(rows, columns=["rung", "group", "D", "flash"])


def table(root: Path = record.DATA) -> str:
    """The ladder as a Markdown table: rung, idea, speed, ratio to FlashAttention-2 and cuDNN, for D = 64 · 128."""
    found = figures(root)
    head = [
        f"| rung | the idea | TFLOP/s, {device_name(root)} | × FlashAttention-2 | × cuDNN |",
        "|---|---|--:|--:|--:|",
    ]
    rows = [_short_row(r, found[found["rung"] == r.stem]) for r in rungs()]
    foot = (
        f"\nAt D = 64 · 128, in fp16 from 10 on except for 22, without a causal mask. TFLOP/s at B·N = 16384, H·D = 2048, N = {N}. "
        "02 and 21 are memory-bound and given in TB/s. The figure for 21 is its slowest cache shape, each shape at its best number of splits. × is how many times as fast: geometric mean over N ≥ 1024, measured "
        "side by side in one process. FlashAttention-2 and cuDNN are PyTorch's SDPA FLASH and SDPA CUDNN; they don't take "
        "fp32 (–). 22, 23 and 33 are backward passes, beside theirs. bf16, causal masks, other peers and the spread are in "
        "[data/README.md](data/README.md#every-rung-beside-its-peers)."
    )
    return "\n\n".join(
        filter(
            None,
            [
                "\n".join([*head, *rows, foot]),
                families(root),
                one_sequence(root),
                training(root),
                several_gpus(root),
                languages(root),
            ],
        )
    )


def _short_row(rung: Rung, found: pd.DataFrame) -> str:
    name = rung.stem
    if (NOTEBOOKS / f"{rung.stem}.ipynb").exists():
        name = f"[{name}](notebooks/{name}.ipynb)"
    name += f" ([.cu](kernels/{rung.stem}.cu))"
    if found["speed"].isna().all():
        return f"| {name} | {rung.title} | not recorded yet | – | – |"
    unit = " TB/s" if found["unit"].iloc[0] == "TB/s" else ""
    speed = " · ".join(f"{x:#.3g}".rstrip(".") for x in found["speed"]) + unit
    ratios = [" · ".join(f"{x:.2f}" for x in found[c].dropna()) or "–" for c in ("flash", "cudnn")]
    return f"| {name} | {rung.title} | {speed}{STALE if found['stale'].any() else ''} | {' | '.join(ratios)} |"


def families(root: Path = record.DATA) -> str:
    """How the speed of the rungs that have goals by family spreads over the families of inputs, as a sentence; empty where none is
    recorded."""
    names: set[str] = set()

    def found(samples: pd.DataFrame, stem: str, peer: str) -> pd.Series:
        means = record.spread(samples, stem)[peer]
        names.update(samples["family"])
        return means

    if not (parts := _least_to_largest("families", found, root)):
        return ""
    return (
        f"These are normal random inputs. Over up to {len(names)} families of inputs, among them one key that takes all of a row and heads of trained models, "
        f"the means over N lie between these: {parts} ([families](data/README.md#families-of-inputs))."
    )


def one_sequence(root: Path = record.DATA) -> str:
    """How the speed of the same rungs spreads over one sequence of few heads, as a sentence; empty where none is recorded."""
    parts = _least_to_largest("one_sequence", lambda *given: record.ratio(*given)["ratio"], root)
    if not parts:
        return ""
    return (
        "One sequence of few heads may have fewer query tiles than the GPU has SMs. With 4 to 64 heads of 256 to 8,192 tokens (8,192 to 131,072 queries "
        f"in all), with and without a mask (13 only without), the ratios lie between these: {parts} ([notebook 99](notebooks/99_the_ladder.ipynb))."
    )


def _least_to_largest(kind: str, found: Callable[[pd.DataFrame, str, str], pd.Series], root: Path) -> str:
    """Of each rung with goals by family whose record of `kind` there is, the least and the largest ratio that `found` gives of its samples, its
    stem and its peer."""
    parts = []
    for rung in rungs():
        peer = record.CUDNN if rung.arch == "sm_90a" else record.FLASH
        if not any(goal.rung == rung.stem and goal.kind == "families" for goal in GOALS):
            continue
        try:
            ratios = found(samples := record.load(rung.stem, kind, card(root), root), rung.stem, peer)
        except LookupError:  # a KeyError, where the peer did not run, is one too
            continue
        short = {record.FLASH: "FlashAttention-2", record.CUDNN: "cuDNN"}[peer]
        stale = STALE if samples["stale"].any() else ""
        parts.append(f"{rung.number}: {ratios.min():.2f} to {ratios.max():.2f} × {short}{stale}")
    return ", ".join(parts)


def training(root: Path = record.DATA) -> str:
    """How much faster notebook 24's model trains with our kernels, as a sentence; empty where that isn't recorded."""
    try:
        steps = record.load("24_in_a_model", "training", card(root), root)
    except LookupError:
        return ""
    ms = steps[steps["seed"] == 0].groupby(["graph", "name"])["ms"].median().unstack()
    gain = ms[record.FLASH] / ms["rungs 32 and 33"]
    return (
        f"A small GPT trains {gain[1]:.2f} times as fast with 32 and 33 as with FlashAttention-2, each step a CUDA graph; with kernels "
        f"launched one by one {gain[0]:.2f} times, which depends on the host{STALE if steps['stale'].any() else ''} ([notebook 24](notebooks/24_in_a_model.ipynb))."
    )


def several_gpus(root: Path = record.DATA) -> str:
    """How many times as fast as one several GPUs attend: a table with a row for each number of them that is recorded, empty without any."""
    rows = []
    for gpus in (2, 4, 8):
        try:
            samples = record.load("50_ring", "ring", f"{record.SHOWN}-x{gpus}", root)
        except LookupError:
            continue
        samples = samples.query("causal == 1 and passes == 'forward' and D == 128 and Hkv == H")
        samples = samples[samples["layout"].isna() | (samples["layout"] == "zigzag")]
        ms = samples.pivot_table(index=["Nq", "round"], columns="name", values="ms")
        one, peer = ms["one GPU"], ms.filter(like="context_parallel").min(axis=1)
        ring, kernel = ((one / ms[name]).groupby("Nq").median() for name in ("50_ring", "51_one_sided"))
        beside = (peer / ms["50_ring"]).groupby("Nq").median()
        cells = [f"{ring[N]:.2f} ({kernel[N]:.2f})" if N in ring else "" for N in SEVERAL_N]
        stale = STALE if samples["stale"].any() else ""
        rows.append(f"| {gpus}{stale} | {' | '.join(cells)} | {beside.min():.2f} to {beside.max():.2f} |")
    if not rows:
        return ""
    lengths = " | ".join(f"{N >> 20}M" if N >> 20 else f"{N >> 10}k" for N in SEVERAL_N)
    return (
        "Speedup over one GPU with the ring of [notebook 50](notebooks/50_ring.ipynb); in brackets, with the kernel of "
        "[51](notebooks/51_one_sided.ipynb), which fetches the other GPUs' keys itself. Forward, causal, bf16, D = 128. "
        "On long sequences one GPU slows down, so that four can be more than four times as fast.\n\n"
        f"| GPUs | N = {lengths} | ring × PyTorch's `context_parallel` |\n|{'--:|' * (len(SEVERAL_N) + 2)}\n"
        + "\n".join(rows)
    )


def languages(root: Path = record.DATA) -> str:
    """How fast the forward pass of notebook 40 is in other languages, as a sentence, of those timed at every length; empty where none is
    recorded."""
    try:
        samples = record.load("40_every_language", "timings", record.SHOWN, root)
    except LookupError:
        return ""
    speeds = []
    for stem, name in LANGUAGES.items():
        timed = samples.loc[samples["name"] == stem, [*record.SHAPE, "causal"]].drop_duplicates()
        if len(timed) == 4 * len(record.LENGTHS):
            found = record.ratio_of_language(samples, stem)
            found = found[found["Nk"] >= record.FROM_N].groupby(["D", "causal"])["ratio"].agg(record.geometric_mean)
            speeds.append(f"{name} {found.min():.2f} to {found.max():.2f}")
    if not speeds:
        return ""
    return (
        f"The forward pass in other languages, × FlashAttention-2 over D = 64 and 128, with and without a causal mask: {', '.join(speeds)}"
        f"{STALE if samples['stale'].any() else ''} ([notebook 40](notebooks/40_every_language.ipynb))."
    )


def seeded(root: Path = record.DATA) -> str:
    """How many kernels with a seeded bug compute-sanitizer and the X-ray both looked at, as a sentence."""
    frames = [pd.read_csv(path) for path in sorted(root.glob("*/device.sanitizer.csv"))]
    if not frames:
        return ""
    mutants = pd.concat(frames)["mutant"].drop_duplicates()
    return (
        f"Its findings are compared with those of NVIDIA's compute-sanitizer for {(~mutants.str.endswith('.original')).sum()} "
        "kernels with a seeded bug ([notebook 92](notebooks/92_xray_against_hardware.ipynb))."
    )


def details(root: Path = record.DATA) -> str:
    """Every recorded speed and ratio of every rung as a Markdown table: each dtype and mask, with the spread."""
    head = [f"| rung | {device_name(root)} | beside its peers |", "|---|---|---|"]
    foot = (
        f"\nTFLOP/s at B·N = 16384, H·D = 2048, N = {N}, for D = 64 and 128 (softmax: TB/s of S read and P written, at the "
        "same N). A ratio is the peer's time over the kernel's, so above 1 is faster than the peer (beside a copy and cuBLAS, of rates; what "
        "deterministic costs, of its own times): geometric mean over N ≥ 1024, with the lowest and the highest shape. From 10 on, but for "
        "22, inputs are fp16 and bf16; both speed and ratio are given for "
        "each, at D = 64 · 128. A causal mask halves the FLOPs that are counted; the backward pass counts 2.5 times the "
        "forward pass. Decode: TB/s of keys and values read, one query per sequence, at the best number of splits."
    )
    return "\n".join([*head, *(_row(r, root) for r in rungs()), foot])


def card(root: Path = record.DATA) -> str:
    """The folder whose records of the rungs the tables show: one card for all."""
    return record.folder_of(None, "forward", record.SHOWN, root).name


def device_name(root: Path = record.DATA) -> str:
    """The name of the GPU whose records the tables show."""
    try:
        return record.load(None, "forward", card(root), root)["device"].iloc[0]
    except LookupError:
        return "NVIDIA H200"


def _row(rung: Rung, root: Path) -> str:
    return f"| [{rung.stem}](../kernels/{rung.stem}.cu) | {' | '.join(_figures(rung, root))} |"


def _figures(rung: Rung, root: Path) -> tuple[str, str]:
    """Speed, and ratios to the peers, of every kind of timing that is recorded."""
    speeds, ratios = [], []
    for kind in record.kinds(rung):
        try:
            samples = record.load(rung.stem, kind, card(root), root)
        except LookupError:
            continue
        if kind == "groups":
            points = record.grouped(samples, rung.stem)
            ratios.append(
                _span(
                    points["ratio"], f"itself with {points['many'][0]} heads of K and V instead of {points['few'][0]}"
                )
            )
        elif kind == "deterministic":
            for name, part in record.price_of_order(samples).groupby("name", sort=False):
                who = "it" if name == rung.stem else name
                ratios.append(f"deterministic, {who} takes {_span(part['ratio'], 'its time')}")
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


def _best_splits(samples: pd.DataFrame) -> pd.DataFrame:
    table = record.bandwidths(samples)
    return table.loc[table.groupby(["dtype", *record.SHAPE, "Hkv"])["tb_per_s"].idxmax()]


def _decode(samples: pd.DataFrame) -> tuple[str, list[str]]:
    best = _best_splits(samples)
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
    """The peers a row names: all of an fp32 rung; of a 16-bit one the fast ones, with FLASH in front."""
    peers = [p for p in samples["name"].unique() if p != stem]
    fast = [p for p in (record.FLASH, *BESIDE) if p in peers]
    return peers if "fp32" in set(samples["dtype"]) or not fast else fast


def _ratio(samples: pd.DataFrame, stem: str, peer: str, dtypes: list[str]) -> str:
    mean, low, high = record.overall(samples, stem, peer)
    if dtypes == ["fp32"]:
        return f"{mean:.2f} × {peer} ({low:.2f}–{high:.2f})"
    found = record.summary(samples, stem, peer).sort_values("D")
    means = {t: " · ".join(f"{x:.2f}" for x in found.loc[found["dtype"] == t, "mean"]) for t in dtypes}
    return f"{_by_dtype(means)} × {peer} ({low:.2f}–{high:.2f})"
