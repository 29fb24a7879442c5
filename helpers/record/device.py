"""The NVIDIA GPU of this machine, as nvidia-smi describes it: its name, and the conditions a figure is taken under."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shutil
import subprocess

NO_GPU = "timings are recorded on a GPU only, and this machine has none; the plots show the recorded ones of data/"


def slug(device: str) -> str:
    """The folder of a device: "NVIDIA H200" is "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def nvidia_smi() -> str | None:
    """Path of nvidia-smi: on PATH, or where NVIDIA's container images keep it; None without a driver."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin:/usr/bin")


def gpu_id() -> str:
    """The GPU that torch calls cuda:0, as nvidia-smi's option --id takes it: CUDA_VISIBLE_DEVICES may select another than 0."""
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
        raise RuntimeError(NO_GPU)
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
