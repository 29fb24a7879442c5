"""What all tests share: which of them run, in which order, and an empty build cache for those that ask for one.

Tests that need a GPU are left out where there is none. Of tests whose verdict can't have changed only a share runs; `--all`
runs every one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

# Workers share the cores: a worker's idle OpenMP threads would keep them busy waiting. (Notebooks inherit it.)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also what has not changed since it was last recorded as passed"
    )
    parser.addoption("--record", action="store_true", help="run what has changed, and record what passed")
    parser.addoption(
        "--seed", default="", help="draws the share of what has not changed; by default the commit's digest"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.seed:
        config.option.seed = "none"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no checkout of it
            command = ["git", "rev-parse", "--short=12", "HEAD"]
            config.option.seed = subprocess.check_output(
                command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL
            ).strip()


def pytest_report_header(config: pytest.Config) -> str:
    return f"--seed={config.option.seed}" + " --all" * config.option.all


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Which of the seeded bugs were run, so that the same can be run again, and whether their record is stale."""
    seen = [report.nodeid for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    if any("test_a_seeded_bug_is_noticed" in nodeid for nodeid in seen):
        from helpers.evidence import verdicts

        terminalreporter.write_line(str(verdicts.choose(config.option.seed, config.option.all)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        without, needing = [], []
        for item in items:
            (needing if item.get_closest_marker("gpu") else without).append(item)
        items[:] = without
        config.hook.pytest_deselected(items=needing)
    # Notebooks take the longest: they begin first, so that no worker is left with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("notebooks") is None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty build cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA_CACHE", str(folder))
    return folder
