"""An H200 for the nvcc back end of a machine that has none: builds, and host code that calls nothing of CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.toolchain import nvcc, toolkit


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that says it sees an H200, and a runtime of CUDA that says that all is well."""
    monkeypatch.setattr(torch.version, "cuda", ".".join(toolkit.find_toolkit().version.split(".")[:2]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    runtime = SimpleNamespace(cudaSetDevice=lambda device: 0, cudaGetLastError=lambda: 0)
    monkeypatch.setattr(nvcc, "_cudart", lambda: runtime)
