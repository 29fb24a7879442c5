"""One list of dependencies: environment.yml says the same as pyproject.toml, by conda's names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "nvidia-cuda-cuobjdump": "cuda-cuobjdump",
    "nvidia-cuda-nvdisasm": "cuda-nvdisasm",
}
CONDA_TOOLKIT = {"nvcc": "cuda-nvcc", "crt": "cuda-crt", "nvvm": "cuda-nvvm", "cudart": "cuda-cudart-dev"}
CONDA_TOOLKIT["cccl"] = "cuda-cccl"
CONDA_ONLY = {"python", "pip", "gxx"}  # what pip takes from the machine


def pip_side() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {}
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name == "cuda-toolkit":
            wanted |= {CONDA_TOOLKIT[extra]: requirement.specifier for extra in requirement.extras}
        else:
            wanted[CONDA_NAMES.get(requirement.name, requirement.name)] = requirement.specifier
    return wanted


def conda_side() -> dict[str, str]:
    specs = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    parsed = {}
    for spec in specs:
        match = re.fullmatch(
            r"([a-z0-9][a-z0-9._-]*?)\s*((?:==?|>=|<=|<|>|!=)[0-9][0-9.*]*(?:,(?:>=|<|<=|!=)[0-9.*]+)*)?", spec
        )
        assert match, f"environment.yml: {spec!r} is no conda spec"
        parsed[match[1]] = match[2] or ""
    return parsed


def test_the_names_agree():
    assert set(conda_side()) - CONDA_ONLY == set(pip_side())


def test_the_pins_agree():
    """What pip pins, conda pins to the same; conda's `=13.0` is pip's `==13.0.*`."""
    conda = conda_side()
    for name, specifier in pip_side().items():
        pinned = [s.version.removesuffix(".*") for s in specifier if s.operator == "=="]
        if pinned:
            assert conda[name] == f"={pinned[0]}", name


def test_torch_and_toolkit_are_pinned():
    assert str(pip_side()["pytorch"]) == "==2.13.0"
    assert str(pip_side()["cuda-nvcc"]) == "==13.0.*"


def test_ci_runs_the_readmes_test_command_and_nothing_else():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "make test" and "make test" in (ROOT / "README.md").read_text()
    assert all(line.startswith(("set ", "cd ", "make test")) for line in lines)


def test_the_readmes_commands_are_targets():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make (\w+)", (ROOT / "README.md").read_text())) <= targets


def test_make_alone_lists_every_target_and_installs_nothing(tmp_path):
    text = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(text)
    said = subprocess.run(
        ["make", "--no-print-directory"], capture_output=True, text=True, cwd=tmp_path, check=True
    ).stdout
    (targets,) = re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)
    assert [line.split()[:2] for line in said.splitlines()] == [["make", target] for target in targets.split()]
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_make_lab_needs_nothing_that_only_gnu_has(tmp_path):
    """With every recipe as it is but for JupyterLab, and an `install` as macOS has it, which knows no -D."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    shutil.copytree(ROOT / ".jupyterlab", tmp_path / ".jupyterlab")
    programs = {"bsd/install": "exit 64", ".venv/bin/python": "exit 0", ".venv/bin/jupyter": "echo lab is up"}
    for name, does in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bsd'}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(["make", "lab"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert said.returncode == 0 and "lab is up" in said.stdout, said.stderr
    (settings,) = (tmp_path / ".venv").rglob("overrides.d/*.json")
    assert settings.read_text() == (ROOT / ".jupyterlab" / "overrides.json").read_text()
