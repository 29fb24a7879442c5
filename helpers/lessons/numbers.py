"""Numbers in a notebook's prose that come from the records.

Behind such a number stands, invisible on the page, what it is: `1.24<!--= ratio("13", "FLASH", 64):.2f -->`. The expression and
its format are those of an f-string, with `record` and this module's public functions at hand. `python -m helpers notebooks
--from-text` writes the numbers anew, and a test fails where one is not what the records say.
"""

from __future__ import annotations

import re
from functools import cache

import pandas as pd

from .. import record
from ..ladder.rung import rung
from ..measure import ring
from ..record.workload import N as LENGTH
from . import wgmma_units

NUMBER = re.compile(r"(?P<shown>[-+\d.,]*)<!--= (?P<what>.+?) -->")
PEERS = {"FLASH": record.FLASH, "CUDNN": record.CUDNN, "EFFICIENT": record.EFFICIENT, "MATH": record.MATH}


def ratio(
    which: str, peer: str, D: int, N: int | None = None, causal: int = 0, dtype: str = "fp16", kind: str = ""
) -> float:
    """How many times as fast as `peer` ("FLASH", "CUDNN", "FA3", …) a rung was on the headline workload: the geometric mean over
    N >= 1024, or at one N. kind: of the record; by default the one that the rung is judged by."""
    stem, samples = _samples(which, D, causal, dtype, kind)
    found = record.ratio(record.headline(samples), stem, PEERS.get(peer, peer))
    return record.geometric_mean(found.loc[found["Nk"] == N if N else found["Nk"] >= record.FROM_N, "ratio"])


def tflops(
    which: str, D: int, N: int = LENGTH, causal: int = 0, dtype: str = "fp16", kind: str = "", of: str = ""
) -> float:
    """TFLOP/s of a rung, or of the peer `of` beside it, on the headline workload at one N."""
    stem, samples = _samples(which, D, causal, dtype, kind)
    found = record.medians(record.headline(samples))
    (speed,) = found.loc[(found["name"] == (PEERS.get(of, of) or stem)) & (found["Nk"] == N), "tflops"]
    return speed


def step(which: str, number: int, D: int, column: str = "ratio") -> float:
    """What a step of a rung's `steps` record reached: `ratio` beside its peer, or another column, at one D."""
    steps = record.load(rung(which).stem, "steps", record.SHOWN)
    (found,) = steps.loc[(steps["step"] == number) & (steps["D"] == D), column]
    return found


def power(which: str, column: str, D: int, inputs: str = "random", of: str = "") -> float:
    """What a rung's long bursts took on "random" numbers or "zeros", or those of the peer `of` beside it: the median of `ms`, `joules`,
    `mhz` (counted), `sm_mhz` (NVML's) or `watts` of the rung's `power` record, or `Mclk`, million clocks per call."""
    samples = record.load(rung(which).stem, "power", record.SHOWN)
    samples = samples.assign(Mclk=samples["ms"] * samples["mhz"] / 1000)
    name = PEERS.get(of, of) or rung(which).stem
    return samples[(samples["name"] == name) & (samples["D"] == D) & (samples["inputs"] == inputs)][column].median()


def clocks(which: str, D: int) -> float:
    """Clocks per tile of keys of a consumer in a rung's long bursts on random numbers (`wgmma_units.per_tile`)."""
    return wgmma_units.per_tile(record.load(rung(which).stem, "power", record.SHOWN), which)[D]


def family(which: str, peer: str, of: str, D: int, causal: int = 0) -> float:
    """How many times as fast as `peer` a rung was on a family of inputs ("one key"): the geometric mean over lengths and dtypes."""
    stem = rung(which).stem
    found = record.spread(record.load(stem, "families", record.SHOWN), stem)
    (value,) = found.loc[
        (found["family"] == of) & (found["D"] == D) & (found["causal"] == causal), PEERS.get(peer, peer)
    ]
    return value


def one_sequence(which: str, peer: str, D: int, causal: int = 0, N: int | None = None) -> pd.Series:
    """How many times as fast as `peer` a rung was on one sequence, by length and number of heads; at one length N by number of heads."""
    stem = rung(which).stem
    found = record.ratio(record.load(stem, "one_sequence", record.SHOWN), stem, PEERS.get(peer, peer))
    found = found[(found["D"] == D) & (found["causal"] == causal)].set_index(["Nk", "H"])["ratio"]
    return found[N] if N else found


def stage(of: str, which: str, before: str, D: int) -> float:
    """Among the stages of a rung, how many times as fast one ("13_2"), or a rung that ran beside them, was as another or as SDPA FLASH ("FLASH"),
    in fp16: the geometric mean over N >= 1024, by the ratios of both to SDPA FLASH."""
    samples = record.load(rung(of).stem, "stages", record.SHOWN)
    samples = samples[(samples["D"] == D) & (samples["dtype"] == "fp16")]
    to_flash = [
        1.0 if name == "FLASH" else record.summary(samples, rung(name).stem, record.FLASH)["mean"].item()
        for name in (which, before)
    ]
    return to_flash[0] / to_flash[1]


def tile(which: str, kind: str) -> float:
    """Clocks that a warp of a rung spends per tile in "wait", "mma", "softmax" or "all", as its timeline was recorded."""
    return record.per_tile(record.load(rung(which).stem, "timeline", record.SHOWN))[kind]


def stalled(which: str, D: int, *reasons: str) -> float:
    """The share of a warp's time between two instructions that it waits for these reasons (`record.stalled`)."""
    return record.stalled(record.load(rung(which).stem, "stalls", record.SHOWN), D, *reasons)


def at_once(mib: int) -> list[float]:
    """How many times as long as with its own choice rung 20 takes with heads at work at once that have so many MiB of keys and values:
    a number for each shape, of the medians."""
    samples = record.load("20_causal_gqa", "at_once", record.SHOWN)
    ms = samples.groupby(["D", "Nk", "mib"])["ms"].median().unstack("mib")
    return list(ms[mib] / ms[32])


def trained(table: str, run: str | tuple, column: str) -> float:
    """A number of notebook 24's recorded model: of `train.yardstick`, `train.speeds` or `train.parts`, in the row of a run such as
    "rungs 20 and 23, again"; of `train.writing_speeds` ("writing"), in the row (B, filled, way)."""
    return _training(table).loc[run, column]


def language(name: str, D: int, causal: int = 0) -> float:
    """How many times as fast as SDPA FLASH a language of notebook 40 was, or "04_fa2_fp32", "13_tuned", … beside them: the
    geometric mean over N >= 1024."""
    samples = record.load("40_every_language", "timings", record.SHOWN)
    samples = samples[(samples["D"] == D) & (samples["causal"] == causal) & (samples["Nk"] >= record.FROM_N)]
    process = name if (samples["language"] == name).any() else "peers"
    return record.geometric_mean(record.ratio_of_language(samples, process, name)["ratio"])


def over_one_gpu(
    name: str,
    N: int,
    D: int = 128,
    causal: int = 1,
    passes: str = "forward",
    ranks: int = 2,
    layout: str = "",
    Hkv: int = 0,
) -> float:
    """How many times as fast as one GPU an implementation of notebook 50's record was on so many; by default in the layout that goes with
    the mask, with as many heads of K and V as of Q."""
    found = _ring(ranks)
    found = found[(found["name"] == name) & (found["Nq"] == N) & (found["D"] == D) & (found["causal"] == causal)]
    layout = layout or ("zigzag" if causal else "contiguous")
    found = found[
        (found["passes"] == passes) & (found["layout"] == layout) & (found["Hkv"] == (Hkv or ring.WIDTH // D))
    ]
    (speedup,) = found["speedup"]
    return speedup


def one_gpu(N: int, causal: int = 0, ranks: int = 4) -> float:
    """TFLOP/s of one GPU in the record of notebook 50 on so many, forward, D = 128."""
    samples = record.load(ring.STEM, "ring", f"{record.SHOWN}-x{ranks}")
    keep = (samples["name"] == ring.ONE) & (samples["Nq"] == N) & (samples["causal"] == causal) & (samples["D"] == 128)
    ms = samples.loc[keep & (samples["passes"] == "forward"), "ms"].median()
    return 4 * ring.WIDTH * N * N / (1 + causal) / ms / 1e9


def largest(column: str, ranks: int = 2) -> float:
    """Of notebook 50's largest run on so many GPUs: N, seconds, bytes."""
    (value,) = record.load(ring.STEM, "ring_largest", f"{record.SHOWN}-x{ranks}")[column]
    return value


def copied(copiers: int, D: int, N: int, ranks: int = 2) -> float:
    """GB/s into each GPU, of notebook 51's copies alone."""
    samples = record.load(ring.FAR, "link", f"{record.SHOWN}-x{ranks}").query("name == 'copies alone'")
    of_case = samples[(samples["copiers"] == copiers) & (samples["D"] == D) & (samples["N"] == N)]
    return (of_case["bytes"] / of_case["ms"]).median() / 1e6


@cache
def _ring(ranks: int) -> pd.DataFrame:
    return ring.summary(record.load(ring.STEM, "ring", f"{record.SHOWN}-x{ranks}"))


@cache
def _training(table: str) -> pd.DataFrame:
    from . import train  # takes torch, which nothing else here needs

    if table == "writing":
        return train.writing_speeds(record.load(train.STEM, "writing", record.SHOWN))
    frames = {kind: record.load(train.STEM, kind, record.SHOWN) for kind in ("training", "runs", "profile")}
    if table == "speeds":
        return train.speeds(frames["training"], frames["runs"])
    return train.yardstick(frames["training"]) if table == "yardstick" else train.parts(frames["profile"])


def _samples(which: str, D: int, causal: int, dtype: str, kind: str):
    found = rung(which)
    samples = record.load(found.stem, kind or record.kinds(found)[0], record.SHOWN)
    keep = (samples["D"] == D) & (samples["dtype"] == dtype)
    if "causal" in samples:
        keep &= samples["causal"] == causal
    return found.stem, samples[keep]


def renewed(text: str) -> str:
    """The text with each such number as the records give it. ValueError names the expression that fails."""
    known = {"record": record} | {
        one.__name__: one
        for one in (
            ratio,
            tflops,
            step,
            family,
            one_sequence,
            stage,
            power,
            clocks,
            tile,
            stalled,
            at_once,
            language,
            trained,
        )
    }
    known |= {one.__name__: one for one in (over_one_gpu, one_gpu, largest, copied)}

    def new(match: re.Match) -> str:
        try:
            shown = eval(f"f'''{{{match['what']}}}'''", dict(known))
        except Exception as error:
            raise ValueError(f"<!--= {match['what']} -->: {type(error).__name__}: {error}") from error
        return f"{shown}<!--= {match['what']} -->"

    return NUMBER.sub(new, text)
