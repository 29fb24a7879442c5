"""The contracts of pyproject.toml on who may import whom are broken by an import that breaks them. `make test` runs them on the house."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = "each room imports only those below it"
CIRCLES = "no circle, neither of rooms nor of modules inside a room"


def lint(root: Path) -> str:
    """What lint-imports says of the helpers/ in `root`."""
    run = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache', '--no-logo'])"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=root, capture_output=True, text=True, env={"PYTHONPATH": "."}
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "module, line, contract, said",
    [
        ("ladder/paths.py", "from ..lessons import gpt", LAYERS, "helpers.ladder.paths -> helpers.lessons.gpt"),
        ("ladder/paths.py", "def late():\n    from ..run import op", LAYERS, "helpers.ladder.paths -> helpers.run.op"),
        ("ladder/paths.py", "from . import show", CIRCLES, "No cycles are allowed in helpers.ladder."),
        ("record/workload.py", "from . import ratios", CIRCLES, "No cycles are allowed in helpers.record."),
    ],
)
def test_an_import_upwards_or_in_a_circle_is_seen(module, line, contract, said, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "helpers", tmp_path / "helpers", ignore=shutil.ignore_patterns("__pycache__", "runtime"))
    assert said not in lint(tmp_path)
    with (tmp_path / "helpers" / module).open("a") as file:
        file.write(f"\n\n{line}\n")
    words = lint(tmp_path)
    assert f"{contract} BROKEN" in words and said in words, words
