"""Times the implementations in other languages on a GPU, each in a process of its own beside SDPA FLASH.

One that fails, hangs or takes the process with it costs its own rows. A ratio to SDPA FLASH is formed within a round of its own
process, and so is that of SDPA CUDNN and of this series' rungs, which run in one process more, named `peers`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from .. import record
from ..figures.style import MUTED, RUNGS, SHADES, Picture, picture, styled
from ..ladder.paths import ROOT
from ..measure import bench, sensors
from ..measure.workloads import progress, random_tensors
from ..record import CUDNN, FLASH, LENGTHS, SHAPE, TOKENS, WIDTH
from . import languages

STEM = "40_every_language"
PEERS = "peers"
BESIDE = {0: ("04_fa2_fp32", "13_tuned", "32_ping_pong"), 1: ("20_causal_gqa", "32_ping_pong")}  # without, with a mask
SECONDS = 400.0  # of all; no language is begun later
EACH = 40.0  # of one: what has been measured by then is kept
LONGER = {"flex_attention": 150.0}  # compiled anew for each shape
SLOWEST_MS = 150.0  # a shape whose call takes longer isn't timed, nor are longer ones
BURST_MS = 3.0
COLUMNS = ["language", "name", "dtype", "causal", *SHAPE, "round", "ms"]
# In a record's JSON; the rest are conditions.
OF_THE_RECORD = ("rung", "kind", "rungs", "digest", "method", "implementations", "earlier")
FACTS = ["language", "title", "version", "lines", "import_seconds", "first_seconds", "cases", "failed", "ended"]
# Tiles that are tried, as each language's documentation advises: what stands in its file as TILES.
OF_TRITON = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 3)]
CANDIDATES = {
    "triton_tiles": OF_TRITON,
    "pallas_tiles": OF_TRITON,
    "helion_tiles": OF_TRITON,
    "gluon_tiles": [(128, 128), (128, 64)],
    "cutile_tiles": [(128, 128), (128, 64), (64, 128), (64, 64), (256, 64)],
    "cute_dsl": [(128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 128, 4)],
}


def record_languages(names: Sequence[str] = ()) -> None:
    """Measures the languages `names` (all, and the peers, by default) and writes the records `timings` and `facts` of notebook 40;
    of those that aren't named the rows stay, with the conditions they were measured under. RuntimeError without a GPU."""
    bench.require_gpu()
    begun, every = time.perf_counter(), [PEERS, *_for_a_gpu()]
    timings, facts = [], []
    with bench.watch() as seen:
        for name in names or every:
            left = SECONDS - (time.perf_counter() - begun)
            told = _in_a_process(name, LONGER.get(name, EACH)) if left > 0 else {"ended": "no time was left"}
            timings.append(pd.DataFrame(told.pop("rows", []), columns=told.pop("columns", COLUMNS)))
            facts.append({"language": name} | told)
            progress(f"{name}: {len(timings[-1])} bursts, {told.get('ended') or 'complete'}")
    _save("timings", pd.concat([*_before("timings", names), *timings], ignore_index=True), seen, names)
    frame = pd.DataFrame(facts, columns=FACTS).query("language != @PEERS")
    _save("facts", pd.concat([*_before("facts", names), frame], ignore_index=True), seen, names)


def tune(names: Sequence[str] = ()) -> pd.DataFrame:
    """Tries CANDIDATES at N = 4096 and prints milliseconds: language, D, causal, tile, ms. The best belongs into the file's TILES."""
    bench.require_gpu()
    rows = []
    for name in names or CANDIDATES:
        with tempfile.TemporaryDirectory() as folder:
            done = _run("tune_one", name, folder, 5 * EACH)
            rows += _lines(Path(folder) / "told.jsonl")
            print(f"{name}: {done or 'complete'}", flush=True)
    frame = pd.DataFrame(rows, columns=["language", "D", "causal", "tile", "ms"])
    print(frame.sort_values(["language", "D", "causal", "ms"]).to_string(index=False), flush=True)
    return frame


def _for_a_gpu() -> list[str]:
    found = languages.implementations()
    return [stem for stem, one in found.items() if one.device == "cuda" and not one.missing]


def _save(kind: str, frame: pd.DataFrame, seen: dict, names: Sequence[str] = ()) -> None:
    """Writes the record. What is kept of it keeps its conditions (`earlier`), and unless the peers were measured again, the digest of
    the rungs stays as it is."""
    before = _about_before(kind) if names else {}
    sources = {stem: digest(one.path) for stem, one in languages.implementations().items()}
    sources |= {stem: was for stem, was in before.get("implementations", {}).items() if stem not in names}
    used = sorted({rung for found in BESIDE.values() for rung in found})
    method = f"CUDA events, bursts of about {BURST_MS:g} ms interleaved in random order, 7 rounds, a process for each language"
    extra = dict(seen) | {"method": method, "implementations": sources}
    if before and PEERS not in names:
        extra |= {key: before[key] for key in ("rungs", "digest")}
    if kept := [language for language in frame["language"].unique() if before and language not in names]:
        was = {key: value for key, value in before.items() if key not in OF_THE_RECORD}
        extra["earlier"] = {language: before.get("earlier", {}).get(language, was) for language in kept}
    print("  wrote", record.save(STEM, kind, frame, extra=extra, rungs=used).name, flush=True)


def _about_before(kind: str) -> dict:
    try:
        return record.about(STEM, kind, record.this_device())
    except LookupError:
        return {}


def _before(kind: str, names: Sequence[str]) -> list[pd.DataFrame]:
    """The rows of the record as it is of languages other than these; none where all are measured again."""
    try:
        frame = record.load(STEM, kind, record.this_device()) if names else None
    except LookupError:
        return []
    if frame is None:
        return []
    frame = frame.drop(columns=["rung", "op", "device", "stale"])
    return [frame[~frame["language"].isin(names)]]


def digest(path: Path) -> str:
    """SHA-256 of an implementation's text without its opening lines."""
    return hashlib.sha256(languages.body(path.read_text()).encode()).hexdigest()


def stale(device: str | None = None) -> list[str]:
    """The implementations that have changed since they were recorded. LookupError if there is no record."""
    known = record.about(STEM, "timings", device)["implementations"]
    now = languages.implementations()
    return [stem for stem, was in known.items() if stem not in now or digest(now[stem].path) != was]


def summary(device: str | None = None) -> pd.DataFrame:
    """Of the record, a row for each name, D and mask: `ratio`, SDPA FLASH's time over its own, geometric mean over N >= 1024, with the
    number of lengths that were timed, and `lines`, of code (none of the peers). LookupError if there is no record."""
    samples, facts = record.load(STEM, "timings", device), record.load(STEM, "facts", device).set_index("language")
    rows = []
    for language, part in samples.groupby("language", sort=False):
        for name in dict.fromkeys(part["name"]):
            if name == FLASH:
                continue
            found = record.ratio_of_language(part, language, name)
            found = found[found["Nk"] >= record.FROM_N]
            for (D, causal), some in found.groupby(["D", "causal"]):
                lines = facts["lines"].get(language)
                rows.append((name, D, causal, record.geometric_mean(some["ratio"]), len(some), lines))
    return pd.DataFrame(rows, columns=["name", "D", "causal", "ratio", "lengths", "lines"])


def fastest(D: int, causal: int = 0, among: Sequence[str] = ()) -> str:
    """The language that the record has as the fastest, `among` these. LookupError if there is no record."""
    found = summary()
    found = found[(found["D"] == D) & (found["causal"] == causal) & found["lines"].notna()]
    found = found[found["name"].isin(among)] if among else found
    return str(found.loc[found["ratio"].idxmax(), "name"])


@styled
def scatter(found: pd.DataFrame, D: int = 128, causal: int = 0, device: str = "NVIDIA H200") -> Picture:
    """Speed beside SDPA FLASH against lines of code: `summary`, one D, with or without a mask; this series' rungs and cuDNN as lines.
    One that has changed since it was recorded is a ring and says so."""
    every = found[(found["D"] == D) & (found["causal"] == causal)]
    points, peers = every[every["lines"].notna()].sort_values("ratio"), every[every["lines"].isna()]
    changed = stale()
    shown = {name: f"{name}, changed since" if name in changed else name for name in points["name"]}
    words = ", ".join(
        f"{shown[name]} {lines:.0f} lines {ratio:.2f}"
        for name, lines, ratio in points[["name", "lines", "ratio"]].values
    )
    beyond = ", ".join(f"{name} {ratio:.2f}" for name, ratio in peers[["name", "ratio"]].values)
    words += f". Lines across: {beyond}" if beyond else ""
    mask = "causal" if causal else "no mask"
    title = f"Lines of code and speed · {device}, D = {D}, {mask}, geometric mean over N = 1024 to 16384"
    figure, ax = picture(f"{title}. Speed over SDPA FLASH: {words}.", 8.6, 4.8, title)
    top = every["ratio"].max()
    for name, lines, ratio in points[["name", "lines", "ratio"]].values:
        beside = points[(points["lines"] > lines) & (points["lines"] < lines + 30)]["ratio"]
        beside = beside[(beside - ratio).abs() < 0.12 * top]  # points that its name would run into
        side = (
            0 if beside.empty else -1 if beside.mean() > ratio and ratio > 0.1 * top else 1
        )  # right of it, below, above
        if near := [across for across in (1.0, *peers["ratio"]) if abs(across - ratio) < 0.02 * top and not side]:
            side = -1 if ratio < near[0] else 1  # off the line across
        place = {"xytext": (-5 if side else 7, 7 * side), "va": ("top", "center", "bottom")[side + 1]}
        place["bbox"] = {"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 0.4}  # over the lines across
        face = "none" if name in changed else RUNGS[0][0]
        ax.plot(lines, ratio, "o", color=RUNGS[0][0], markerfacecolor=face, markersize=7)
        ax.annotate(shown[name], (lines, ratio), textcoords="offset points", fontsize=9, **place)
    for name, ratio in [(FLASH, 1.0), *peers[["name", "ratio"]].values]:
        ax.axhline(ratio, color=MUTED, linewidth=1, linestyle="--" if name == FLASH else ":", zorder=0)
        ax.text(1.005, ratio, name, transform=ax.get_yaxis_transform(), va="center", fontsize=9, color=MUTED)
    ax.set(xlabel="lines of code (comments and docstrings left out)", ylabel="speed over SDPA FLASH")
    ax.set_xlim(0, points["lines"].max() * 1.3)
    ax.set_ylim(-0.05 * top, 1.12 * max(top, 1))  # room for a point near 0
    return figure


def checked(facts: pd.DataFrame) -> pd.DataFrame:
    """Of the record's `facts`, by language: version, how many cases of the check were tried and which failed, and why something
    wasn't measured."""
    shown = facts.set_index("language")[["version", "cases", "failed", "ended"]]
    return shown.assign(cases=shown["cases"].astype("Int64")).astype(object).fillna("")


@styled
def waits(facts: pd.DataFrame, device: str = "NVIDIA H200") -> Picture:
    """Seconds to the first result, what an edit costs: of the import (in CuTe's C++ it includes nvcc) and of the first call, a bar for
    each language, from the record's `facts`."""
    known = facts.dropna(subset=["first_seconds"]).set_index("language")[["import_seconds", "first_seconds"]]
    known = known.loc[known.sum(axis=1).sort_values(ascending=False).index]
    title = f"Seconds to the first result, caches empty · machine with an {device}"
    words = ", ".join(f"{name} {a + b:.1f} ({a:.1f} + {b:.1f})" for name, a, b in known.itertuples())
    figure, ax = picture(f"{title}. Import and first call: {words}.", 8.2, 0.5 + 0.32 * len(known), title)
    ax.barh(known.index, known["import_seconds"], color=RUNGS[0][0], label="import")
    ax.barh(
        known.index,
        known["first_seconds"],
        left=known["import_seconds"],
        color=RUNGS[1][0],
        hatch="//",
        edgecolor=SHADES[0],
        label="first call",
    )
    for name, total in known.sum(axis=1).items():
        ax.text(total, name, f" {total:.1f}", va="center", fontsize=9)
    ax.set(xlabel="seconds")
    ax.set_xlim(0, 1.1 * known.sum(axis=1).max())
    ax.legend(loc="upper right")
    return figure


def _in_a_process(name: str, seconds: float) -> dict:
    """What the process of one language told, and `ended`: why it stopped, empty if it came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        ended = _run("measure_one", name, folder, 2 * seconds, seconds)
        told = {"rows": []}
        for line in _lines(Path(folder) / "told.jsonl"):
            told["rows"] += line.pop("rows", [])
            told |= line
        return told | {"ended": ended or told.get("ended", "")}


def _run(function: str, name: str, folder: str, limit: float, *rest: float) -> str:
    """Runs a function of this module for a language (name, folder, *rest) in a new process, with empty caches, for `limit` seconds
    at most; why it failed, or nothing."""
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    if name != PEERS:  # the rungs may have been compiled before
        caches["FA_CACHE"] = "built"
    given = dict(os.environ) if name == PEERS else languages.environment(name)
    environment = given | {key: str(Path(folder) / value) for key, value in caches.items()}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else JAX takes most of the memory
    call = f"languages_timed.{function}(*{(name, folder, *rest)!r})"
    command = [sys.executable, "-c", f"from helpers.lessons import languages_timed; {call}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    return _error(done.stderr) or f"exit status {done.returncode}" if done.returncode else ""


def _error(text: str) -> str:
    """What a failed process said: the exception that ended it, up to four lines of it, else the last line."""
    said = [line.rstrip() for line in text.splitlines() if line.strip()]
    inside = [at for at, line in enumerate(said) if line.startswith("  File ")]
    after = next((at for at in range(inside[-1], len(said)) if not said[at].startswith(" ")), -1) if inside else -1
    return " · ".join(line.strip() for line in said[after:][:4])[:300]


def _lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _tell(folder: str, **what: object) -> None:
    with (Path(folder) / "told.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


# What follows runs in a language's own process.


def measure_one(name: str, folder: str, seconds: float) -> None:
    """Time to the first result, speed at every shape, then the check, as far as `seconds` go; told line by line into `folder`."""
    begun = time.perf_counter()
    if name != PEERS:
        _first(name, folder)
    slow: dict[tuple, int] = {}
    skipped = []
    for N in LENGTHS:
        for causal in (0, 1):
            for D in (64, 128):
                if (D, causal) in slow or time.perf_counter() - begun > seconds:
                    skipped.append(f"N={N}, D={D}, causal={causal}")
                    continue
                frame = _timed(name, N, D, causal)
                columns = [*COLUMNS, *(c for c in sensors.COLUMNS if c in frame)]
                _tell(folder, rows=frame[columns].values.tolist(), columns=columns)
                if (
                    frame.loc[frame["name"] == name, "ms"].median() > SLOWEST_MS / 2
                ):  # twice as long at twice the length
                    slow[D, causal] = N
    if skipped:
        _tell(folder, ended=f"not timed: {'; '.join(skipped)}")
    if name != PEERS:
        _check(name, folder, begun + 1.3 * seconds)


def _first(name: str, folder: str) -> None:
    """Seconds of the import, and from then to the first result: what an edit costs."""
    import torch

    found = languages.implementation(name)
    q, k, v = random_tensors(_dtype(found), (1, 4, 1024, 64), 3)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run = found.forward
    imported = time.perf_counter()
    run(q, k, v)
    torch.cuda.synchronize()
    first = time.perf_counter()
    about = dict(title=found.language, lines=found.lines)
    version = languages.versions(found.needs)
    _tell(folder, **about, version=version, import_seconds=imported - start, first_seconds=first - imported)


def _dtype(found: languages.Implementation) -> str:
    return "fp16" if "fp16" in found.dtypes else "fp32"


def _timed(name: str, N: int, D: int, causal: int) -> pd.DataFrame:
    """Seven rounds of a language, or of the peers, beside SDPA FLASH. One in fp32 gets the same numbers in fp32."""
    B, H = TOKENS // N, WIDTH // D
    given = random_tensors("fp16", (B, H, N, D), 3)
    calls: dict[str, Callable] = {FLASH: functools.partial(bench.sdpa, FLASH, *given, causal=bool(causal))}
    types = dict.fromkeys(calls, "fp16")
    for each, call, dtype in _kernels(name, causal):
        inputs = [x.float() for x in given] if dtype == "fp32" else given
        mask = {"causal": True} if causal else {}
        run = functools.partial(call, *inputs, **mask)
        if why := bench.refusal(run):
            progress(f"  {each} at N={N}, D={D}, causal={causal}: {why}")
            continue
        calls[each], types[each] = run, dtype
    frame = bench.measure(calls, burst_ms=BURST_MS)
    shape = dict(zip(SHAPE, (B, H, N, N, D), strict=True))
    return frame.assign(language=name, dtype=[types[n] for n in frame["name"]], causal=causal, **shape)


def _kernels(name: str, causal: int) -> list[tuple[str, Callable, str]]:
    if name != PEERS:
        found = languages.implementation(name)
        return [(name, found, _dtype(found))]
    from ..run.kernel import load

    ours = [load(stem, device=bench.DEVICE, quiet=True) for stem in BESIDE[causal]]
    rungs = [(kernel.rung.stem, kernel, "fp32" if "fp16" not in kernel.rung.dtypes else "fp16") for kernel in ours]
    return [(CUDNN, functools.partial(bench.sdpa, CUDNN), "fp16"), *rungs]


def _check(name: str, folder: str, until: float) -> None:
    """The cases of the check, one after the other, as far as the time goes."""
    from ..run import reference
    from ..run.check import check

    found = languages.implementation(name)
    cases, failed = 0, []
    for case in reference.cases(found, bench.DEVICE):
        if time.perf_counter() > until:
            break
        try:
            right = check(found, [case]).ok
        except Exception as error:
            right = False
            progress(f"  {name}, {case.name}: {type(error).__name__}: {str(error)[:150]}")
        cases, failed = cases + 1, failed + [case.name] * (not right)
        _tell(folder, cases=cases, failed="; ".join(failed))


def tune_one(name: str, folder: str) -> None:
    """Times every candidate's tile of one language at N = 4096."""
    found, N = languages.implementation(name), 4096
    module = found.forward.__globals__
    for D in (64, 128):
        for causal in (0, 1):
            given = random_tensors("fp16", (TOKENS // N, WIDTH // D, N, D), 3)
            calls = {}
            for tile in CANDIDATES[name]:
                call = functools.partial(_with_tile, module, D, tile, found.forward, *given, causal=bool(causal))
                if why := bench.refusal(call):
                    progress(f"  {name}, D={D}, {tile}: {why[:150]}")
                else:
                    calls[str(tile)] = call
            if calls:
                medians = bench.measure(calls, burst_ms=BURST_MS).groupby("name")["ms"].median()
                for tile, ms in medians.items():
                    _tell(folder, language=name, D=D, causal=causal, tile=tile, ms=ms)


def _with_tile(module: dict, D: int, tile: tuple, forward: Callable, *args: object, **options: object) -> object:
    before, module["TILES"][D] = module["TILES"][D], tile
    try:
        return forward(*args, **options)
    finally:
        module["TILES"][D] = before
