"""A notebook alone in a folder, as on Colab: its first cell fetches the series, installs what is missing, and the kernel runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import hosted
from helpers.lessons import pairs
from helpers.run import kernel

ROOT = Path(__file__).parents[2]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
# Runs the first cells of a notebook as IPython does, and gives back what `load` gave and which torch it was.
CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cells = [c for c in json.load(open("01_naive.ipynb"))["cells"] if c["cell_type"] == "code"]
for cell in cells[:2]:
    assert shell.run_cell("".join(cell["source"])).success
import helpers, torch
print("from", helpers.__file__, "torch", torch.__version__, shell.user_ns["kernel"])
"""
# The first cell before an address is given, and again after.
AGAIN = """
import json
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cell = next("".join(c["source"]) for c in json.load(open("01_naive.ipynb"))["cells"] if c["cell_type"] == "code")
assert not shell.run_cell(cell).success
shell.run_cell("%env FA_REPOSITORY={address}")
assert shell.run_cell(cell).success
"""


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """A git repository with what a clone of this checkout has of use for a kernel."""
    folder = tmp_path_factory.mktemp("remote")
    for part in ("helpers", "kernels", "data"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / file, folder)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with torch and Jupyter, but with neither ninja nor this package."""
    venv = tmp_path_factory.mktemp("hosted")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("ninja", "flashattention", "__editable__", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder for pip with a package `ninja`, which leads to the ninja of these tests."""
    import ninja

    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "ninja-1.99-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ninja/__init__.py", f"BIN_DIR = {ninja.BIN_DIR!r}")
        wheel.writestr("ninja-1.99.dist-info/METADATA", "Metadata-Version: 2.1\nName: ninja\nVersion: 1.99\n")
        wheel.writestr("ninja-1.99.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("ninja-1.99.dist-info/RECORD", "")
    return folder


def opened(python: Path, folder: Path, cells: str = CELLS, **env: str) -> subprocess.CompletedProcess:
    """01 in `folder`, its first two code cells run there, or what else `cells` runs."""
    shutil.copy(ROOT / "notebooks" / "01_naive.ipynb", folder)
    ours = ("PYTHONPATH", "PIP_FIND_LINKS", "VIRTUAL_ENV")  # IPython looks for packages in the last, too
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run([python, "-c", cells], cwd=folder, env=kept | env, capture_output=True, text=True)


def test_a_notebook_alone_fetches_the_series_and_only_what_is_missing(remote, python, wheels, tmp_path):
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    done = opened(python, tmp_path, FA_REPOSITORY=f"file://{remote}", **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing ninja>=1.11\n" in done.stdout
    assert f"from {tmp_path}/series/helpers/__init__.py torch {torch.__version__} Kernel('01_naive'" in done.stdout
    assert hosted.where() in done.stdout  # which back end it will be
    assert subprocess.run(["git", "-C", tmp_path / "series", "status", "--short"], capture_output=True).stdout == b""
    again = opened(python, tmp_path, **offline)  # the kernel restarted: nothing is fetched or installed again
    assert again.returncode == 0 and "installing" not in again.stdout and "fatal" not in again.stdout + again.stderr


def test_a_notebook_in_a_checkout_takes_that(remote, python, wheels, tmp_path):
    """A hub: the reader has cloned the series and opens a notebook with a kernel that doesn't have it."""
    subprocess.run([*GIT, "clone", "-q", remote, tmp_path / "clone"], check=True)
    (tmp_path / "clone" / "notebooks").mkdir()
    done = opened(python, tmp_path / "clone" / "notebooks", PYTHONPATH=str(next(wheels.glob("*.whl"))))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from {tmp_path}/clone/helpers/__init__.py" in done.stdout and "installing" not in done.stdout


def test_without_an_address_it_says_so(python, tmp_path):
    done = opened(python, tmp_path)
    assert done.returncode != 0 and "FA_REPOSITORY: no address" in done.stdout + done.stderr
    assert "no series" in done.stdout + done.stderr and "No module" not in done.stdout + done.stderr


def test_the_cell_runs_again_once_it_has_an_address(remote, python, wheels, tmp_path):
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    done = opened(python, tmp_path, AGAIN.format(address=f"file://{remote}"), **offline)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_pip_can_not_install_is_one_sentence(monkeypatch):
    monkeypatch.setattr(hosted, "NEEDED", ("torch", "ninja"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "ninja")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(hosted, "requirement", lambda name: f"{name}>=99")
    with pytest.raises(hosted.ToolkitError, match=r"pip could not install ninja>=99: ERROR: No matching distribution"):
        hosted.prepare()


def test_a_pip_that_fails_without_a_word_is_one_sentence_too(monkeypatch):
    monkeypatch.setattr(hosted, "NEEDED", ("ninja",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(hosted.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr=""))
    with pytest.raises(hosted.ToolkitError, match="pip could not install ninja"):
        hosted.prepare()


def test_what_it_installs_is_what_pyproject_says():
    assert hosted.requirement("torch") == "torch==2.13.0"
    assert all(hosted.requirement(name).startswith(name) for name in hosted.NEEDED)


def card(monkeypatch, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(kernel, "matching_toolkit", lambda cuda: None)


def test_on_a_t4_it_names_the_rungs_that_run_live(monkeypatch):
    card(monkeypatch, (7, 5), "Tesla T4")
    said = hosted.where()
    assert said.startswith("Tesla T4: it runs rungs 01, 02, 03, ") and " 12" not in said.partition("(")[0]
    assert "the others take the emulator (" in said and "needs compute capability 8.0, this GPU has 7.5" in said


def test_on_an_h100_all_of_them(monkeypatch):
    card(monkeypatch, (9, 0), "NVIDIA H100")
    assert hosted.where() == "NVIDIA H100: it runs every rung."


def test_where_nvcc_does_not_fit_torch_none(monkeypatch):
    def refuse(cuda):
        raise hosted.ToolkitError("nvcc 11.8 (PATH) doesn't go with torch, which was built for CUDA 12.6")

    card(monkeypatch, (7, 5), "Tesla T4")
    monkeypatch.setattr(kernel, "matching_toolkit", refuse)
    assert hosted.where().startswith("Tesla T4: it runs none of the rungs, they take the emulator (nvcc 11.8 (PATH)")


def test_elsewhere_the_cell_does_nothing(monkeypatch):
    monkeypatch.setattr(hosted, "prepare", lambda: pytest.fail("it was called"))
    exec(pairs.FIRST_CELL, {})


def test_the_address_is_that_of_the_project():
    """There is none yet. Once pyproject.toml has one (urls.Repository), it stands in the cell and in CITATION.cff too."""
    from test_install import PYPROJECT  # one reader of pyproject.toml

    address = PYPROJECT["project"].get("urls", {}).get("Repository")
    wanted = f"${{FA_REPOSITORY:-{address}}}" if address else "${FA_REPOSITORY:?no address}"
    assert wanted in pairs.FIRST_CELL
    assert (f'repository-code: "{address}"' in (ROOT / "CITATION.cff").read_text()) == bool(address)
