"""Hardware counters of every rung, read once with Nsight Compute and recorded.

`python -m helpers.counters [stem ...]` starts this module again under `ncu` for each rung and size, profiles one call of
the rung after a warm-up, and hands the counters to record.py. Needs a GPU whose counters may be read.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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
    "duration_ns": "gpu__time_duration.sum",
}

# (B, H, N, D). The first is what the emulator counts in a notebook; at the last, S no longer fits in any L2.
SIZES = [(1, 2, 256, 64), (1, 16, 1024, 64), (1, 16, 4096, 64)]


def find_ncu() -> str:
    """Path of `ncu`. Raises FileNotFoundError with the mend if Nsight Compute is not installed."""
    found = shutil.which("ncu") or shutil.which("ncu", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    if found is None:
        raise FileNotFoundError("ncu is not on PATH: install NVIDIA Nsight Compute, or put its folder on PATH")
    return found


def profile(stem: str, B: int, H: int, N: int, D: int) -> pd.DataFrame:
    """The counters of one call of rung `stem` at (B, H, N, D): one row per CUDA kernel it launches.

    Raises RuntimeError with ncu's own words if the counters can't be read.
    """
    import pandas as pd

    command = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "helpers.counters", "--call", stem, str(B), str(H), str(N), str(D)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        raise RuntimeError(f"ncu could not profile {stem}: {(done.stdout + done.stderr).strip()[-800:]}")
    table = pd.read_csv(io.StringIO(done.stdout[start:]), skiprows=[1], thousands=",")
    frame = pd.DataFrame({"kernel": table["Kernel Name"].str.replace(r"\(.*", "", regex=True)})
    for name, metric in METRICS.items():
        frame[name] = table[metric].astype("int64")
    frame.insert(0, "D", D), frame.insert(0, "N", N), frame.insert(0, "H", H), frame.insert(0, "B", B)
    return frame


def call_once(stem: str, B: int, H: int, N: int, D: int) -> None:
    """Runs the rung once outside and once inside the profiled range."""
    import torch

    from .kernel import load

    kernel = load(stem, device="cuda", quiet=True)
    torch.manual_seed(0)
    if kernel.rung.op == "softmax":
        inputs = [torch.randn(B, H, N, N, device="cuda")]
    else:
        inputs = [torch.randn(B, H, N, D, device="cuda") for _ in range(3)]
    kernel(*inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    kernel(*inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    import pandas as pd

    from . import record
    from .ladder import rungs

    parser = argparse.ArgumentParser(description="Record hardware counters of the rungs with Nsight Compute.")
    parser.add_argument("stems", nargs="*", help="rungs to profile; all of them by default")
    parser.add_argument("--call", nargs=5, metavar=("STEM", "B", "H", "N", "D"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        stem, *sizes = arguments.call
        return call_once(stem, *map(int, sizes))
    for stem in arguments.stems or [rung.stem for rung in rungs()]:
        frame = pd.concat([profile(stem, *size) for size in SIZES], ignore_index=True)
        record.save(stem, "counters", frame)
        print(f"{stem}: {len(frame)} kernel launches profiled", flush=True)


if __name__ == "__main__":
    main()
