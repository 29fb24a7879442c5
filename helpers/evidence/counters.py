"""Hardware counters of every rung, read once with Nsight Compute and recorded.

`python -m helpers record counters [KERNEL...]` starts a Python of its own under `ncu` for each rung, profiles one call of the rung
at each size after a warm-up, and records the counters. `--singles` does so with kernels of one access each: patterns.py's and
microkernels.py's; with `--new`, of patterns those that are not recorded yet. Needs a GPU whose counters may be read.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..ladder.paths import ROOT
from ..ladder.rung import Rung, parse, rung

if TYPE_CHECKING:
    import pandas as pd


# Name in the record -> ncu's metric (Nsight Compute, "Metrics Reference"). Bytes, sectors of 32 bytes, nanoseconds.
METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_load_instructions": "smsp__inst_executed_op_shared_ld.sum",
    "shared_store_instructions": "smsp__inst_executed_op_shared_st.sum",
    "ldmatrix_instructions": "smsp__inst_executed_op_ldsm.sum",  # their wavefronts are among shared_load_wavefronts
    "async_copy_instructions": "smsp__inst_executed_op_ldgsts.sum",  # cp.async
    "async_copy_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    "duration_ns": "gpu__time_duration.sum",
}

# Of single accesses also those of atomics, and all wavefronts of shared memory: there are none of cp.async by itself.
SINGLE_METRICS = {
    **{name: metric for name, metric in METRICS.items() if not name.startswith(("dram", "duration"))},
    "atomic_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_atom.sum",
    "atomic_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_atom.sum",
    "atomic_instructions": "smsp__inst_executed_op_shared_atom.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}

KINDS = ("patterns", "async", "microkernels", "copies")
ASYNC_METRICS = {
    "wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    "conflicts": "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    "sectors": "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
}

# (B, H, N, D). At N = 256 the emulator counts in a notebook; at N = 4096, S in float32 no longer fits in any L2.
SIZES = [(1, 2, 256, 64), (1, 16, 1024, 64), (1, 16, 4096, 64)]
SIZES_16_BIT = [*SIZES, (1, 2, 256, 128), (1, 16, 4096, 128)]
BETWEEN = "elementwise_kernel"  # in the name of PyTorch's kernel between two sizes (ncu leaves namespaces out)


def find_ncu() -> str:
    """Path of `ncu`. Raises FileNotFoundError with the fix if Nsight Compute is not installed."""
    found = shutil.which("ncu") or shutil.which("ncu", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    if found is None:
        raise FileNotFoundError("ncu is not on PATH: install NVIDIA Nsight Compute, or put its folder on PATH")
    return found


def sizes(rung: Rung) -> list[tuple[int, int, int, int]]:
    """(B, H, N, D) of every profiled call of a rung, at head dimensions that it takes."""
    return [s for s in (SIZES if "fp32" in rung.dtypes else SIZES_16_BIT) if not rung.D or s[3] in rung.D]


def options(rung: Rung) -> dict[str, int]:
    """What every profiled call asks for, so that it is the same call on every machine."""
    return {"splits": 4} if "splits" in rung.features else {}


def profile(stem: str) -> pd.DataFrame:
    """The counters of one call of rung `stem` at each of its sizes, with inputs of its first dtype: one row per CUDA kernel
    it launches. A counter that this GPU doesn't have is left empty.

    Raises RuntimeError with ncu's own words if the counters can't be read.
    """
    found = rung(stem)
    table = counted(METRICS, f"call_once({stem!r})", stem)
    between = table["Kernel Name"].str.contains(BETWEEN, regex=False)
    if between.sum() != len(sizes(found)):
        raise RuntimeError(f"ncu profiled {between.sum()} of the {len(sizes(found))} sizes of {stem}")
    frame = _named(table, METRICS)
    size = between.cumsum() - between  # each size ends in one of PyTorch's kernels
    for i, column in enumerate("BHND"):
        frame.insert(i, column, [sizes(found)[n][i] for n in size])
    frame.insert(0, "dtype", found.dtypes[0])
    return frame[~between].reset_index(drop=True)


def counted(metrics: dict[str, str], call: str, what: str, module: str = __name__) -> pd.DataFrame:
    """What ncu counts while a Python of its own runs `call`, an expression with the names of `module`: its raw table, a row per
    launch. RuntimeError with ncu's own words if it can't; `what` names the profiled."""
    import pandas as pd

    command = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(metrics.values())]
    command += [sys.executable, "-c", f"from {module} import *; {call}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        raise RuntimeError(f"ncu could not profile {what}: {(done.stdout + done.stderr).strip()[-800:]}")
    return pd.read_csv(io.StringIO(done.stdout[start:]), skiprows=[1], thousands=",")


def _named(table: pd.DataFrame, metrics: dict[str, str]) -> pd.DataFrame:
    """The kernels' names and the counters under ours; a counter that this GPU doesn't have is left empty."""
    import pandas as pd

    frame = pd.DataFrame({"kernel": table["Kernel Name"].str.replace(r"\(.*", "", regex=True)})
    for name, metric in metrics.items():
        column = table[metric] if metric in table else pd.Series(pd.NA, index=table.index)
        frame[name] = pd.to_numeric(column, errors="coerce").astype("Int64")
    return frame


def _known(metrics: dict[str, str]) -> dict[str, str]:
    """Those of `metrics` that this machine's ncu lists for its GPU; all of METRICS in any case."""
    done = subprocess.run([find_ncu(), "--query-metrics"], capture_output=True, text=True)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.split()}
    ours = set(METRICS.values())
    return {name: m for name, m in metrics.items() if m in ours or m.removesuffix(".sum") in listed}


@dataclass(frozen=True)
class Singles:
    """Kernels of one access each, one library: names for the record, the `__global__` functions, q k v and scale of calls."""

    rung: Rung
    names: list[str]
    kernels: list[str]
    calls: list[tuple]


def singles(kind: str, known: Collection[str] = ()) -> Singles:
    """Those of a kind: "patterns" (patterns.py), "async" (cp.async past the L1 among them, which the counters of the
    data pipe don't see: ncu counts it by instruction, which takes longer), "microkernels" (microkernels.py, those
    that nvcc compiles as written). known: names of patterns that are left out."""
    if kind in ("patterns", "async"):
        from . import patterns as made

        every = [p for p in made.patterns() if kind == "patterns" or p.op in ("copy16", "copy16g")]
        every = [p for p in every if p.name not in known]
        calls = [made.call(p) for p in every]
        return Singles(made.kernel(), [p.name for p in every], [p.kernel for p in every], calls)
    from . import microkernels

    inputs = microkernels.inputs()
    chosen = [(i, micro.name) for i, micro in enumerate(microkernels.MICROS) if micro.gpu]
    calls = [(inputs, float(i)) for i, _ in chosen]
    kernels = [f"micro_{name}" for _, name in chosen]
    return Singles(parse(microkernels.source(), Path("microkernels")), [name for _, name in chosen], kernels, calls)


def profile_singles(kind: str, known: pd.DataFrame | None = None) -> pd.DataFrame:
    """The counters of all kernels of a kind, a row for each: in one process, one launch after the other. Of patterns that
    `known` has a row of, that one.

    Raises RuntimeError if ncu saw other launches than those.
    """
    import pandas as pd

    names = [] if known is None else list(known["name"])
    made, metrics = singles(kind, names), ASYNC_METRICS if kind == "async" else SINGLE_METRICS
    if not made.names:
        return known
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(names, file)
        file.flush()
        frame = _named(counted(_known(metrics), f"call_singles({kind!r}, {file.name!r})", kind), metrics)
    if [name.removeprefix("void ").split("<")[0] for name in frame["kernel"]] != made.kernels:
        raise RuntimeError(
            f"ncu profiled {len(frame)} launches, and they are not those of the {len(made.names)} {kind}"
        )
    frame.insert(0, "name", made.names)
    if known is None:
        return frame
    order = {name: n for n, name in enumerate(singles(kind).names)}
    both = pd.concat([known[known["name"].isin(order)], frame], ignore_index=True)
    return both.sort_values("name", key=lambda names: names.map(order), ignore_index=True)


def recorded(kind: str) -> pd.DataFrame | None:
    """What is recorded of a kind under the conditions of today, the date aside; None if nothing is."""
    from .. import record

    now = record.conditions()
    try:
        before = record.about("device", kind, now["device"])
    except LookupError:
        return None
    if any(before.get(what) != value for what, value in now.items() if what != "date"):
        return None
    return record.load("device", kind, now["device"]).drop(columns=["rung", "op", "device", "stale"])


def call_singles(kind: str, known: str) -> None:
    """Runs all of a kind inside the profiled range, after one outside, but those whose names are in the JSON file `known`."""
    import torch

    from ..run.kernel import load

    made = singles(kind, json.loads(Path(known).read_text()))
    kernel = load(made.rung, device="cuda", quiet=True)
    calls = [(tuple(t.cuda() for t in inputs), scale) for inputs, scale in made.calls]
    kernel(*calls[0][0], scale=calls[0][1])
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for inputs, scale in calls:
        kernel(*inputs, scale=scale)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def time_copies() -> pd.DataFrame:
    """How many cycles every pattern's cp.async takes, one after the other from eight warps of an SM: name, cycles."""
    import pandas as pd

    from ..run.kernel import load
    from . import patterns

    kernel = load(patterns.PATH.with_name("patterns_timed.cu"), device="cuda", quiet=True)
    rows = []
    for pattern in patterns.patterns():
        if pattern.op.startswith("copy"):
            inputs, scale = patterns.call(pattern)
            inputs = tuple(t.cuda() for t in inputs)
            cycles = [float(kernel(*inputs, scale=scale)[0].view(-1)[0]) for _ in range(3)]
            rows.append((pattern.name, min(cycles)))
    return pd.DataFrame(rows, columns=["name", "cycles"])


def call_once(stem: str) -> None:
    """Runs the rung at each of its sizes, once outside and once inside the profiled range, and a kernel of PyTorch's after it."""
    import torch

    from ..run.kernel import load
    from ..run.reference import random_inputs

    kernel = load(stem, device="cuda", quiet=True)
    mark = torch.zeros(1, device="cuda")
    for B, H, N, D in sizes(kernel.rung):
        inputs = random_inputs(kernel.rung, (B, H, N, N, D), device="cuda")
        kernel(*inputs, **options(kernel.rung))
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        kernel(*inputs, **options(kernel.rung))
        mark.add_(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def record_counters(stem: str) -> None:
    """Profiles a rung and records the counters; RuntimeError with ncu's own words if it can't."""
    from .. import record

    frame = profile(stem)
    record.save(stem, "counters", frame)
    print(f"{stem}: {len(frame)} kernel launches profiled", flush=True)


def record_singles(kind: str, new: bool = False) -> None:
    """Profiles the kernels of a kind (of KINDS) and records the counters; `new`: of patterns and async, those not recorded yet."""
    from .. import record

    known = recorded(kind) if new and kind in ("patterns", "async") else None
    frame = time_copies() if kind == "copies" else profile_singles(kind, known)
    record.save("device", kind, frame)
    print(f"{len(frame)} {kind} recorded", flush=True)
