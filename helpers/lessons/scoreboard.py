"""Every rung side by side, from data/ alone; a new rung appears by itself, one without records says so.

Nothing is timed here, except by `place`: the reader's own kernel. No torch is needed for the rest, and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from .. import record
from ..figures.style import Picture
from ..ladder.rung import Rung, code, rungs
from ..record.workload import FROM_N, TOKENS, WIDTH, N
from .drawings import mma

if TYPE_CHECKING:
    from ..run.kernel import Kernel

BESIDE = ("SDPA FLASH", "SDPA CUDNN")
PUBLISHED = ("Triton tutorial 06",)
SUMMIT = (record.FA3, record.FA4)
DATASHEET = "datasheet"
# TFLOP/s of dense 16-bit products: the 1,979 of NVIDIA's datasheets of the H100 and the H200, SXM both, are with sparsity, which
# doubles them.
LIMIT = {"NVIDIA H100 80GB HBM3": 1979 / 2, "NVIDIA H200": 1979 / 2}
COLUMNS = ["name", "kind", "dtype", "D", "tflops", "to_flash", "low", "high", "device", "stale", "beside"]


def _device(device: str | None, root: Path) -> str:
    """One folder of data/ for the whole board: figures of two cards never stand on one staircase."""
    return record.folder_of(None, "forward", device, root).name


def speeds(
    dtype: str = "fp16", device: str | None = None, root: Path = record.DATA, summit: bool = False
) -> pd.DataFrame:
    """The staircase: a row for each attention rung and D, then the peers.

    kind: "rung", "peer" (SDPA FLASH and CUDNN, from the records of the last rung that ran beside them), "published"
    (the study of public kernels on an H200, beside records of an H200 only). summit: with the peers FlashAttention-3 and -4 too, where
    they ran beside a rung, and rows of kind "ceiling", which is no attention: cuBLAS's product of two square matrices and what the card's datasheet promises. dtype: of the rungs that take it, the others
    keep their own. tflops: at the headline workload and N = 4096. to_flash: SDPA FLASH's time over this one's, measured side by
    side in one process, geometric mean over N >= 1024, with `low` and `high`; it is missing for fp32, which FLASH doesn't
    take. A rung without records has one row for each D, with neither. stale: of a rung whose kernel has changed since. beside:
    of a peer, the number of the rung in whose session it ran.
    """
    folder = _device(device, root)
    wanted = (*BESIDE, *SUMMIT) if summit else BESIDE
    rows: list[dict] = []
    beside: dict[tuple[str, int], dict] = {}
    for rung in rungs():
        if record.kinds(rung)[0] != "forward" or rung.op != "attention":
            continue
        try:
            samples = record.load(rung.stem, "forward", folder, root)
        except LookupError:
            kept = dtype if dtype in rung.dtypes else rung.dtypes[0]
            rows += [{"name": rung.stem, "kind": "rung", "dtype": kept, "D": D} for D in (64, 128)]
            continue
        here = samples[samples["dtype"] == (dtype if dtype in set(samples["dtype"]) else samples["dtype"].iloc[0])]
        found = _of_session(here)
        rows += [row | {"kind": "rung"} for row in found if row["name"] == rung.stem]
        beside |= {
            (r["name"], r["D"]): r | {"kind": "peer", "stale": False, "beside": rung.number}
            for r in found
            if r["name"] in wanted and r["dtype"] == dtype
        }
    rows += [row for _, row in sorted(beside.items())]
    if folder == record.DEFAULT_DEVICE:
        others = [name for name in (*PUBLISHED, *BESIDE) if name not in {n for n, _ in beside}]
        rows += _published(dtype, root, others)
    rows += _ceilings(dtype, folder, root) if summit else []
    return pd.DataFrame(rows, columns=COLUMNS)


def _of_session(samples: pd.DataFrame) -> list[dict]:
    """A row per name and D of the samples of one rung's session, in one dtype."""
    medians = record.medians(record.headline(samples)).query("Nk == @N")
    rows = medians[["name", "dtype", "D", "tflops", "device", "stale"]].to_dict("records")
    for row in rows:
        here = samples[samples["D"] == row["D"]]
        try:
            row["to_flash"], row["low"], row["high"] = (
                (1.0, 1.0, 1.0)
                if row["name"] == "SDPA FLASH"
                else record.overall(here, row["name"], "SDPA FLASH", FROM_N)
            )
        except LookupError:  # fp32: FLASH isn't there
            pass
    return rows


def _published(dtype: str, root: Path, wanted: list[str]) -> list[dict]:
    table = record.public_kernels(root=root)
    table = record.headline(table[table["name"].isin(wanted) & (table["dtype"] == dtype)])
    rows = []
    for (name, D), part in table.groupby(["name", "D"], sort=False):
        ratios = part.loc[part["Nk"] >= FROM_N, "to_flash"].dropna()
        row = {"name": name, "kind": "published", "dtype": dtype, "D": D, "device": "NVIDIA H200", "stale": False}
        row["tflops"] = part.loc[part["Nk"] == N, "tflops"].squeeze()
        if len(ratios):
            row |= {"to_flash": record.geometric_mean(ratios), "low": ratios.min(), "high": ratios.max()}
        rows.append(row)
    return rows


def _ceilings(dtype: str, folder: str, root: Path) -> list[dict]:
    """cuBLAS in bf16 as it ran beside the last Hopper rung, in fp16 from the device's own record; and the datasheet."""
    if dtype not in ("fp16", "bf16"):
        return []
    found = {}
    try:
        if dtype == "fp16":
            measured = record.load("device", "ceilings", folder, root).query("name == 'fp16 matmul'")
            found[record.CUBLAS] = measured["value"].median(), measured["device"].iloc[0]
        else:
            measured = record.load(None, "matmul", folder, root).query("name == @record.CUBLAS")
            measured = measured[measured["rung"] == measured["rung"].max()]
            found[record.CUBLAS] = (measured["flops"] / measured["ms"]).median() / 1e9, measured["device"].iloc[0]
    except LookupError:
        pass
    for card, limit in LIMIT.items():
        if record.slug(card) == folder:
            found[DATASHEET] = limit, card
    return [
        {"name": name, "kind": "ceiling", "dtype": dtype, "D": D, "tflops": tflops, "device": device, "stale": False}
        for name, (tflops, device) in found.items()
        for D in (64, 128)
    ]


def draw(board: pd.DataFrame) -> Picture:
    """The speeds of `speeds`, a dot for each name and D on a logarithmic axis: first the rungs, then the others, then the reader's own.
    What has no speed is left out; a rung that has changed since says so, a peer beside which rung it ran."""
    kinds = ["rung", "published", "peer", "ceiling", "yours"]
    known = board[board["tflops"].notna()]
    known = known.assign(order=known["kind"].map(kinds.index)).sort_values("order", kind="stable")
    label = known["name"].where(known["dtype"] != "fp32", known["name"] + " (fp32)")
    label = label.where(known["stale"].ne(True), label + " (stale)")
    label = label.where(known["beside"].isna(), label + " (beside " + known["beside"].astype(str) + ")")
    frame = known.assign(label=label, ratio=known["tflops"], kept=True)
    device = known["device"].dropna().iloc[0]
    text = "; ".join(f"{row.label}, D = {row.D}: {row.ratio:.3g}" for row in frame.itertuples())
    dtypes = " and ".join(dict.fromkeys(known.loc[known["dtype"] != "fp32", "dtype"])) or "fp32"
    title = f"Attention forward pass, {dtypes}, B·N = {TOKENS}, H·D = {WIDTH}, N = {N} · {device}"
    return mma.dots(frame, title, "TFLOP/s (logarithmic)", text, log=True, line=None, digits=".3g")


def lines(rung: Rung) -> int:
    """Lines of code of a rung's own file: neither comments nor blank lines, nor the headers it includes."""
    return len(code(rung.source).splitlines())


def properties(device: str | None = None, root: Path = record.DATA) -> pd.DataFrame:
    """What a rung costs besides time, index its stem: lines of code; cold_s and edit_s, seconds of a first build and of one
    after an edit; of_budget_o (of O, P, or a gradient) and of_budget_lse, the largest error as a share of what the error rule
    allows, over every N, D and dtype recorded; mib, what one head of N = 16384, D = 64 allocates. Empty where nothing is recorded."""
    folder = _device(device, root)
    rows = {}
    for rung in rungs():
        row: dict[str, float] = {"lines": lines(rung)}
        if (built := _record(rung.stem, "build", folder, root)) is not None:
            seconds = built.groupby("phase")["seconds"].median()
            row |= {"cold_s": seconds.get("cold"), "edit_s": seconds.get("edit")}
        if (error := _record(rung.stem, "error", folder, root)) is not None:
            shares = (error["error"] / error["budget"]).groupby(error["output"]).max()
            row |= {"of_budget_o": shares.drop("lse", errors="ignore").max(), "of_budget_lse": shares.get("lse")}
        if (memory := _record(rung.stem, "memory", folder, root)) is not None:
            own = memory[(memory["name"] == rung.stem) & (memory["Nk"] == 16384)]
            row["mib"] = own["bytes"].iloc[0] / 2**20 if len(own) else math.nan
        rows[rung.stem] = row
    columns = ["lines", "cold_s", "edit_s", "of_budget_o", "of_budget_lse", "mib"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("rung")


def _record(stem: str, kind: str, folder: str, root: Path) -> pd.DataFrame | None:
    try:
        return record.load(stem, kind, folder, root)
    except LookupError:
        return None


def unrecorded(device: str | None = None, root: Path = record.DATA) -> list[str]:
    """The rungs without timings on this device."""
    folder = _device(device, root)
    return [r.stem for r in rungs() if _record(r.stem, record.kinds(r)[0], folder, root) is None]


def others(device: str | None = None, root: Path = record.DATA) -> list[str]:
    """The other cards with forward records, as their folders of data/ are called: for `speeds(device=...)`."""
    recorded = sorted({path.parent.name for path in root.glob("*/*.forward.csv")})
    return [name for name in recorded if name != _device(device, root)]


def samples(device: str | None = None, root: Path = record.DATA) -> pd.DataFrame:
    """The forward samples of every recorded attention rung, and of SDPA FLASH and CUDNN: what the figures against N show."""
    frame = record.load(None, "forward", _device(device, root), root).query("op == 'attention'")
    return frame[(frame["name"] == frame["rung"]) | frame["name"].isin(BESIDE)]


def place(kernel: Kernel, name: str = "yours") -> pd.DataFrame:
    """Times the reader's kernel on this GPU: rows for the staircase, kind "yours", in its first dtype, beside SDPA FLASH.

    RuntimeError without a GPU or where it refuses every shape of the headline workload.
    """
    from ..measure import workloads

    frame = workloads.beside_flash(kernel, name, kernel.rung.dtypes[0])
    frame = frame.assign(op="attention", device=record.this_device() or "this GPU", stale=False)
    rows = [row | {"kind": "yours"} for row in _of_session(frame) if row["name"] == name]
    return pd.DataFrame(rows, columns=COLUMNS)


def xrays(kernels: Mapping[str, Kernel | str], B: int = 1, H: int = 2, N: int = 256, D: int = 64) -> pd.DataFrame:
    """What kernels do to memory, counted on the emulator, a row each: exact, the same on every machine, and no time.

    kernels: name -> what `rung` takes; inputs are random, of each kernel's first dtype. Columns: times_least, bytes requested
    from global memory over the least possible; wavefronts and conflicts (those beyond the ideal) of shared memory; sectors
    of global memory and excess_sectors; products, warp instructions mma.sync; findings, what is wrong.
    """
    from ..ladder.rung import rung
    from ..run.reference import random_inputs
    from ..run.xray import xray

    rows = {}
    for name, kernel in kernels.items():
        found = rung(kernel)
        ray = xray(kernel, *random_inputs(found, (B, H, N, N, D)))
        shared, sectors, tensors = ray.total(space="shared"), ray.total(space="global"), ray.tensors
        rows[name] = {
            "times_least": (tensors["bytes_read"] + tensors["bytes_written"]).sum() / tensors["minimum_bytes"].sum(),
            "wavefronts": shared.cost,
            "conflicts": shared.excess,
            "sectors": sectors.cost,
            "excess_sectors": sectors.excess,
            "products": sum(n for what, n in ray.trace.instructions.items() if "mma" in what),
            "findings": len(ray.findings),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("kernel")


def steps(dtype: str = "fp16", device: str | None = None, root: Path = record.DATA) -> pd.DataFrame:
    """What each rung brought over the one below it: changed lines of code, and for each D how many times faster it is, as the
    geometric mean over the headline shapes with N >= 1024 of the two records' medians (two sessions, not side by side)."""
    from ..ladder.show import changed

    folder = _device(device, root)
    ladder = [r for r in rungs() if r.op == "attention" and record.kinds(r)[0] == "forward"]
    times = {}
    for rung in ladder:
        if (found := _record(rung.stem, "forward", folder, root)) is not None:
            own = record.headline(found[found["name"] == rung.stem]).query("Nk >= @FROM_N")
            own = own[own["dtype"] == (dtype if dtype in set(own["dtype"]) else own["dtype"].iloc[0])]
            times[rung.stem] = record.medians(own).set_index(["D", "Nk"])["ms"]
    rows = []
    for before, after in zip(ladder, ladder[1:], strict=False):
        row = {"rung": after.stem, "over": before.stem, "changed_lines": changed(before, after)}
        if before.stem in times and after.stem in times:
            gains = (times[before.stem] / times[after.stem]).dropna().groupby("D").agg(record.geometric_mean)
            row |= {f"times_faster_D{D}": gain for D, gain in gains.items()}
        rows.append(row)
    columns = ["rung", "over", "changed_lines", "times_faster_D64", "times_faster_D128"]
    return pd.DataFrame(rows, columns=columns).set_index("rung")
