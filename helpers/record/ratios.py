"""What the samples of a record say: medians, and ratios that are formed within a round."""

from __future__ import annotations

import math

import pandas as pd

from .workload import CACHE, CUBLAS, FLASH, FROM_N, SHAPE, attention_flops, headline, softmax_bytes


def _keys(samples: pd.DataFrame) -> list[str]:
    known = ("rung", "op", "device", "stale", "family", "layout", "dtype", "causal", *SHAPE, *CACHE, "flops")
    return [c for c in known if c in samples]


def geometric_mean(values: pd.Series) -> float:
    """The geometric mean of positive numbers; NaN of none."""
    return math.exp(values.map(math.log).mean()) if len(values) else math.nan


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per name and shape of samples of timings: ms (median), ms_low and ms_high (the rounds' extremes), and with
    them tflops (attention, by 4·B·H·Nq·Nk·D, backward 2.5 times it, half of it if `causal`; by `flops` where there is such a
    column) or tb_per_s (softmax and copy, by the bytes no softmax can avoid; decode, by `bytes`). Where the sensors were read also
    the medians sm_mhz and watts."""
    columns = {"ms": ("ms", "median"), "ms_low": ("ms", "min"), "ms_high": ("ms", "max")}
    if "watts" in samples:
        columns |= {name: (name, "median") for name in ("sm_mhz", "watts")}
    frame = samples.groupby([*_keys(samples), "name"], sort=False, dropna=False).agg(**columns).reset_index()
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
    for name, column in (("copy", "rate"), (FLASH, "ms")):
        other = frame.loc[frame["name"] == name, [*place, "round", column]].rename(columns={column: name})
        frame = frame.merge(other, on=[*place, "round"], how="left")
    frame = frame[frame["splits"] > 0]
    frame = frame.assign(of_copy=frame["rate"] / frame["copy"], to_flash=frame[FLASH] / frame["ms"])
    grouped = frame.groupby([*place, "splits", "chosen", "bytes"], sort=False, dropna=False)
    values = grouped[["ms", "rate", "of_copy", "to_flash"]].median().rename(columns={"rate": "tb_per_s"})
    return values.reset_index()


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


def price_of_order(samples: pd.DataFrame) -> pd.DataFrame:
    """Of `deterministic` samples, a row per shape and name: `ratio`, the time with the same bits every time over the time without,
    median of the rounds, `low`, `high`."""
    keys = ["name", "dtype", "causal", *SHAPE]
    wide = samples.pivot_table(index=[*keys, "round"], columns="deterministic", values="ms", sort=False)
    ratios = (wide[1] / wide[0]).rename("ratio").reset_index()
    return ratios.groupby(keys, sort=False)["ratio"].agg(ratio="median", low="min", high="max").reset_index()


def ratio_to_ideal(samples: pd.DataFrame) -> pd.DataFrame:
    """Of `packed` samples, a row per batch: `ratio`, the time its sequences would take at the rate of full batches over its
    own, median of the rounds with `low` and `high`, and `to_padded`, the time of the same sequences padded over its own."""
    keys = ["dtype", "causal", "H", "D", "batch", "sequences", "tokens"]
    frame = samples.assign(ratio=samples["ideal_ms"] / samples["ms"], to_padded=samples["padded_ms"] / samples["ms"])
    found = frame.groupby(keys, sort=False).agg(
        ratio=("ratio", "median"), low=("ratio", "min"), high=("ratio", "max"), to_padded=("to_padded", "median")
    )
    return found.reset_index()


def ratio_to_cublas(samples: pd.DataFrame, ours: str) -> pd.DataFrame:
    """Of `matmul` samples, a row per shape: `ratio`, the rung's TFLOP/s over cuBLAS's beside it, median of the rounds, `low`, `high`."""
    keys = [c for c in ("rung", "device", "stale", "dtype", "causal", *SHAPE) if c in samples]
    frame = samples.assign(rate=samples["flops"] / samples["ms"])
    wide = frame.pivot_table(index=[*keys, "round"], columns="name", values="rate", sort=False)
    ratios = (wide[ours] / wide[CUBLAS]).rename("ratio").reset_index()
    return ratios.groupby(keys, sort=False)["ratio"].agg(ratio="median", low="min", high="max").reset_index()


def per_tile(samples: pd.DataFrame, warp: int = 0) -> pd.Series:
    """Of `timeline` samples, clocks that one warp spends per tile, the mean of all tiles: by kind ("wait", "mma", "softmax"), and "all",
    from the first tile's begin to the last one's end."""
    own = samples[(samples["warp"] == warp) & (samples["kind"] != "load")]
    clocks = (own["end"] - own["begin"]).groupby(own["kind"]).sum()
    clocks["all"] = own["end"].max() - own["begin"].min()
    return clocks / own["tile"].nunique()


def stalled(samples: pd.DataFrame, D: int, *reasons: str) -> float:
    """Of `stalls` samples, the share of a warp's time between two instructions that it waits for these reasons, Nsight Compute's names.
    LookupError for a reason that was not recorded."""
    cycles = samples[samples["D"] == D].set_index("reason")["cycles"]
    if missing := set(reasons) - set(cycles.index):
        raise LookupError(f"no {', '.join(sorted(missing))}; there are {', '.join(cycles.index)}")
    return cycles[list(reasons)].sum() / cycles.sum()


def step_table(steps: pd.DataFrame, *measured: str) -> pd.DataFrame:
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


def ratio_of_language(samples: pd.DataFrame, language: str, name: str = "") -> pd.DataFrame:
    """Of the `timings` of notebook 40: how many times as fast as SDPA FLASH a language was (or `name`, which ran in its process), at
    each shape and mask, as `ratio` has it. The two may differ in dtype. LookupError if there is none."""
    part = samples[samples["language"] == language]
    return ratio(part.assign(dtype="", rung=name or language), name or language, FLASH)


def ratio_of_errors(errors: pd.DataFrame, ours: str, peer: str) -> pd.DataFrame:
    """Of an `accuracy` record, a row per input and output: `ratio`, the peer's error over that of `ours`, above 1 where `ours` is closer
    to float64. LookupError if they have none in common."""
    keys = [*_keys(errors), "output"]
    wide = errors.pivot_table(index=keys, columns="name", values="error", sort=False, dropna=False)
    if ours not in wide or peer not in wide:
        raise LookupError(f"no errors of {ours} beside {peer}; there are those of {', '.join(errors['name'].unique())}")
    return (wide[peer] / wide[ours]).dropna().rename("ratio").reset_index()


def spread(samples: pd.DataFrame, ours: str) -> pd.DataFrame:
    """Of `families` samples, a row per family, mask and D, and a column per peer: the ratio of its time to that of `ours`, geometric
    mean over lengths and dtypes. NaN where they did not run side by side."""
    by = ["family", "causal", "D"]
    peers = [name for name in samples["name"].unique() if name != ours]
    columns = {p: ratio(samples, ours, p).groupby(by, sort=False)["ratio"].agg(geometric_mean) for p in peers}
    return pd.DataFrame(columns).reset_index()


def summary(samples: pd.DataFrame, ours: str, peer: str, from_n: int = FROM_N) -> pd.DataFrame:
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
        rows.append((*key, geometric_mean(long), long.min(), long.max(), worst["ratio"], shape))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "worst", "at"])


def overall(samples: pd.DataFrame, ours: str, peer: str, from_n: int = FROM_N) -> tuple[float, float, float]:
    """`ours` against `peer` in three numbers: the geometric mean of the ratio over the headline shapes with N >= from_n,
    and the worst and best shape. LookupError where nothing was measured."""
    points = ratio(headline(samples), ours, peer)
    points = points.loc[points["Nk"] >= from_n, "ratio"]
    if points.empty:
        raise LookupError(f"no samples of {ours} beside {peer} with N >= {from_n}")
    return geometric_mean(points), points.min(), points.max()
