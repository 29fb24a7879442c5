"""A notebook without the package around it, on Colab, Kaggle or a hub: what is missing is installed, and it says what runs where."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

from .ladder.errors import ToolkitError
from .ladder.paths import ROOT

NEEDED = ("torch", "numpy", "pandas", "matplotlib", "ninja")  # Jupyter's own packages are there


def prepare() -> None:
    """What the first cell of a notebook calls where `helpers` isn't installed.

    Installs those of NEEDED that can't be imported, each in the version of pyproject.toml, and leaves alone what is there:
    a hosted notebook's torch fits its driver. Raises ToolkitError if pip can't. Prints one line on which rungs run on the GPU.
    """
    if missing := [requirement(name) for name in NEEDED if not importlib.util.find_spec(name)]:
        print("installing", ", ".join(missing))
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", *missing], capture_output=True, text=True
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise ToolkitError(f"pip could not install {', '.join(missing)}: {why}")
        importlib.invalidate_caches()
    print(where())


def requirement(name: str) -> str:
    """A package with its version, as pyproject.toml has it ("ninja>=1.11")."""
    return re.search(rf'^  "({name}\b[^"]*)",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def where() -> str:
    """One sentence on which rungs run on this machine's GPU and which on the emulator."""
    import torch

    from .ladder.rung import rungs
    from .run.kernel import cuda_refusal

    if not torch.cuda.is_available():
        return "No GPU here: every kernel runs on the emulator, and timings shown were recorded on a GPU."
    name, ladder = torch.cuda.get_device_name(), rungs()
    refused = [reason for rung in ladder if (reason := cuda_refusal(rung))]
    live = [rung.stem[:2] for rung in ladder if not cuda_refusal(rung)]
    if not refused:
        return f"{name}: it runs every rung."
    if not live:
        return f"{name}: it runs none of the rungs, they take the emulator ({refused[0]})."
    return f"{name}: it runs rungs {', '.join(live)}, the others take the emulator ({refused[0]})."
