"""GPU tests are left out where there is no GPU; everything else runs everywhere, with a build cache of its own."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    without, needing = [], []
    for item in items:
        (needing if item.get_closest_marker("gpu") else without).append(item)
    items[:] = without
    config.hook.pytest_deselected(items=needing)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty build cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA_CACHE", str(folder))
    return folder
