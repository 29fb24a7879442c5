"""An H200 for the nvcc back end of a machine that has none: builds, and host code that calls nothing of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.toolchain import toolkit


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A torch that says it sees an H200, and empty files in place of the CUDA libraries that a CPU build of torch lacks:
    load_inline names them to the linker, though no rung needs them."""
    for name in ("c10_cuda", "torch_cuda"):
        (folder / f"lib{name}.so").write_text("/* nothing */")
    monkeypatch.setenv("LIBRARY_PATH", str(folder))
    monkeypatch.setattr(torch.version, "cuda", ".".join(toolkit.find_toolkit().version.split(".")[:2]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
