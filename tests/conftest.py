"""What all tests share: which of them run, in which order, an empty build cache and a shell for those that ask for one.

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
import unchanged  # noqa: E402

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
        whole = [ROOT / arg for arg in config.args] == [ROOT / "tests"]  # what is named is run
        if whole and not config.option.all and not config.option.record:
            _leave_a_share(config, items)
    # Notebooks take the longest: they begin first, so that no worker is left with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("notebooks") is None)


def _leave_a_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out most tests that are marked `sampled`, and most of files in which, and below which, nothing has changed (see
    tools/unchanged.py); none that is marked `always`."""
    recorded = unchanged.read()
    share = {file: unchanged.sampled(file, recorded) for file in {_file(item.nodeid) for item in items}}
    few = [item for item in items if share[_file(item.nodeid)] or item.get_closest_marker("sampled")]
    few = [item for item in few if not item.get_closest_marker("always")]
    out = [item for item in few if not unchanged.drawn(item.nodeid, config.option.seed)]
    left_out = set(out)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=out)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`--all --record`: keeps which files' tests have all passed. Not where some of a file's tests were chosen."""
    option = session.config.option
    chosen = option.keyword or option.markexpr or any("::" in arg for arg in session.config.args)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if option.all and option.record and not chosen and reporter and "PYTEST_XDIST_WORKER" not in os.environ:
        passed = {_file(report.nodeid) for report in reporter.getreports("passed")}
        failed = {_file(report.nodeid) for kind in ("failed", "error") for report in reporter.getreports(kind)}
        unchanged.keep(passed - failed)


@pytest.fixture
def shell():
    """An IPython shell with the magics of helpers."""
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell()
    made.run_line_magic("load_ext", "helpers")
    yield made
    InteractiveShell.clear_instance()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty build cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA_CACHE", str(folder))
    return folder
