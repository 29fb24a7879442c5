"""GPU tests are left out where there is no GPU; everything else runs everywhere, with a build cache of its own."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run everything of what is otherwise sampled")
    parser.addoption("--seed", default="", help="draw the sample as at another commit (its first 12 digits)")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Which of the seeded bugs were run, so that the same can be run again, and whether their record is stale."""
    seen = [report.nodeid for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    if any("test_a_seeded_bug_is_noticed" in nodeid for nodeid in seen):
        from helpers.evidence import verdicts

        terminalreporter.write_line(str(verdicts.choose(config.option.all, config.option.seed)))


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
