"""nvcc and the host compiler: where they are looked for, and what is said when they won't do."""

import os
import stat
import sys
from pathlib import Path

import ninja
import pytest

from helpers.toolchain import toolkit
from helpers.toolchain.toolkit import ToolkitError

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V{version}"; fi
if [ "$1" = --dryrun ]; then echo "#$ _HERE_={home}/bin" >&2; fi
"""


def make(home: Path, version: str = "13.0.1", script: Path | None = None) -> Path:
    """A toolkit whose nvcc answers for itself."""
    nvcc = script or home / "bin" / "nvcc"
    for path in {home / "bin" / "nvcc", nvcc}:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NVCC.format(version=version, home=home))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No CUDA_HOME, no wheels, no nvcc on PATH."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    toolkit._find.cache_clear()
    yield tmp_path
    toolkit._find.cache_clear()


def test_the_order_is_cuda_home_then_wheels_then_path(bare, monkeypatch):
    make(bare / "path_home", "13.0.3", script=bare / "path" / "nvcc")
    assert toolkit.find_toolkit() == toolkit.Toolkit(bare / "path_home", "13.0.3", "PATH")
    make(bare / "site" / "nvidia" / "cu13", "13.0.2")
    toolkit._find.cache_clear()
    assert toolkit.find_toolkit().found_by == "pip"
    monkeypatch.setenv("CUDA_HOME", str(make(bare / "mine")))
    assert toolkit.find_toolkit() == toolkit.Toolkit(bare / "mine", "13.0.1", "CUDA_HOME")


def test_a_folder_of_packages_that_can_not_be_read_is_passed_over(bare, monkeypatch):
    glob = Path.glob

    def refusing(path, pattern):
        if path == bare / "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", refusing)
    monkeypatch.setattr(sys, "path", [str(bare / "closed"), str(bare / "site")])
    make(bare / "site" / "nvidia" / "cu13")
    assert toolkit.find_toolkit().found_by == "pip"


def test_no_nvcc_is_one_sentence_that_names_the_fix(bare):
    with pytest.raises(
        ToolkitError, match=r"no nvcc found in CUDA_HOME, among pip's packages or on PATH: run `make lab`"
    ):
        toolkit.find_toolkit()


def test_on_macos_no_nvcc_is_no_fault_of_the_reader_s(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ToolkitError, match="^there is no nvcc for macOS: machine code is not shown here"):
        toolkit.find_toolkit()


def test_a_toolkit_of_another_cuda_is_refused(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make(bare / "old", "12.4.99")))
    with pytest.raises(ToolkitError, match=r"nvcc 12\.4\.99 \(CUDA_HOME\) doesn't go with torch.*CUDA 13\.0: install"):
        toolkit.matching_toolkit("13.0")
    assert toolkit.matching_toolkit("12.1").major == 12


def test_the_toolkit_of_torch_s_major_version_goes_before_others(bare, monkeypatch):
    """Colab: PATH leads to CUDA 12.x, which torch there was built for; its minor version may be another."""
    monkeypatch.setenv("CUDA_HOME", str(make(bare / "new", "13.0.1")))
    make(bare / "path_home", "12.5.82", script=bare / "path" / "nvcc")
    assert toolkit.matching_toolkit("12.8") == toolkit.Toolkit(bare / "path_home", "12.5.82", "PATH")
    assert toolkit.matching_toolkit("13.0") == toolkit.matching_toolkit(None) == toolkit.find_toolkit()
    assert toolkit.find_toolkit().version == "13.0.1"


def test_a_package_of_ninja_without_its_program_is_none(bare, monkeypatch):
    monkeypatch.setenv("PATH", str(bare))
    for folder in ("", str(bare)):
        monkeypatch.setattr(ninja, "BIN_DIR", folder)
        with pytest.raises(ToolkitError, match="^no ninja found: `pip install ninja`"):
            toolkit.find_ninja()
    (bare / "ninja").touch(0o755)
    assert toolkit.find_ninja() == bare


@pytest.mark.parametrize(
    ("capability", "arch", "flag"),
    [
        ((7, 5), "sm_75", "-gencode=arch=compute_75,code=sm_75"),
        ((8, 0), "sm_80", "-gencode=arch=compute_80,code=sm_80"),
        ((9, 0), "sm_90a", "-gencode=arch=compute_90a,code=sm_90a"),
        ((12, 0), "sm_120", "-gencode=arch=compute_120,code=sm_120"),
    ],
)
def test_hopper_alone_gets_the_a(capability, arch, flag):
    assert toolkit.architecture(*capability) == arch
    assert toolkit.gencode(arch) == flag
