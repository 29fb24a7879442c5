"""What `make installed` chooses, and what an installed package needs: its own files, a checkout, and the packages it imports."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import containers
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = SpecifierSet(PYPROJECT["project"]["requires-python"])


# make installed


@pytest.fixture
def machine(tmp_path):
    """A machine without a driver: a folder of programs that comes first on PATH, and an environment whose Python tells what it
    was called with, and fails if one of the words in FAILS is among it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    told = 'echo "python $@"; for word in $FAILS; do case " $@ " in *" $word "*) exit 1;; esac; done'
    program(tmp_path / "venv" / "bin" / "python", told)
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def installed(machine: Path, *options: str, fails: str = "", **environment: str) -> tuple[int, str]:
    """Exit code of `make installed` there, and what it and the environment's Python said."""
    command = ["make", "-s", "installed", f"VENV={machine / 'venv'}", *options]
    env = {"PATH": f"{machine / 'bin'}{os.pathsep}{os.environ['PATH']}", "FAILS": fails, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (machine / "venv" / "installed").exists() == (done.returncode == 0)
    return done.returncode, done.stdout + done.stderr


def pip_alone(said: str) -> bool:
    """Did pip install everything, and were all cores told to write the bytecode that it left out?"""
    pip, bytecode = said.splitlines()[-2:]
    return pip == "python -m pip install --quiet --disable-pip-version-check --no-compile -e ." and (
        re.fullmatch(r"python -m compileall -qq -j 0 .*/venv/lib", bytecode) is not None
    )


needs_no_driver = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a driver here")


@needs_no_driver
def test_without_a_driver_it_is_the_cpu_build_and_says_so(machine):
    code, said = installed(machine)
    assert code == 0 and "TORCH=cpu, the default without an NVIDIA driver" in said
    assert "-m uv pip install" in said and "--torch-backend=cpu -e ." in said
    assert said.count("python -m") == 2  # uv, then all by uv


@needs_no_driver
@pytest.mark.parametrize("fails", ["--torch-backend=cpu", "uv"])
def test_where_uv_or_its_index_is_out_of_reach_it_is_the_build_on_pypi(machine, fails):
    code, said = installed(machine, fails=fails)
    assert code == 0 and "PyTorch's CPU build could not be installed, see above. Now PyPI's build" in said
    assert pip_alone(said)


def test_nothing_counts_as_installed_if_pip_fails_too(machine):
    assert installed(machine, "TORCH=cpu", fails="-e")[0] != 0


def test_files_for_another_python_that_can_not_be_compiled_are_no_failure(machine):
    code, said = installed(machine, "TORCH=cuda", fails="compileall")
    assert code == 0 and pip_alone(said)


def test_with_a_driver_it_is_the_cuda_build(machine):
    program(machine / "bin" / "nvidia-smi", "echo 'GPU 0: Tesla T4'")
    code, said = installed(machine)
    assert code == 0 and "TORCH=cuda, the default with an NVIDIA driver" in said
    assert " uv " not in said and pip_alone(said)


@pytest.mark.parametrize("driver", ["/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1"])
def test_with_a_driver_and_the_cpu_build_the_fix_is_torch_cuda(monkeypatch, driver):
    """The second is where WSL2 has Windows' driver."""
    from helpers.run.kernel import cuda_refusal

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == driver)
    assert cuda_refusal(None).endswith("`rm -r .venv`, then `make lab TORCH=cuda`")


def test_the_reader_s_choice_wins_before_make_and_behind_it(machine):
    assert "--torch-backend" not in installed(machine, "TORCH=cuda")[1]
    (machine / "venv" / "installed").unlink()
    assert "--torch-backend" not in installed(machine, TORCH="cuda")[1]


@pytest.mark.parametrize("build", ["rocm", "cpu cuda"])
def test_another_build_is_refused_in_a_sentence(machine, build):
    for code, said in (installed(machine, f"TORCH={build}"), installed(machine, TORCH=build)):
        assert code != 0 and f"TORCH={build}: allowed are cpu and cuda, the builds of PyTorch" in said


def test_an_environment_without_pip_is_given_one(machine):
    """As `uv sync` makes it."""
    pip = machine / "venv" / "pip"
    python = f'case "$*" in "-m ensurepip") touch {pip};; "-m pip"*) test -e {pip} || exit 1;; esac; echo "python $@"'
    program(machine / "venv" / "bin" / "python", python)
    code, said = installed(machine, "TORCH=cuda")
    assert code == 0 and pip_alone(said)


def test_where_there_is_no_way_to_pip_the_sentence_says_so(machine):
    program(machine / "venv" / "bin" / "python", "exit 1")
    code, said = installed(machine)
    assert code != 0 and "and ensurepip failed: remove" in said and "PyTorch" not in said


@pytest.mark.parametrize("version, refused", [((3, 9), True), ((3, 10), False), ((3, 14), False), ((3, 15), True)])
def test_make_and_pip_take_the_same_pythons(version, refused):
    text = (ROOT / "Makefile").read_text()
    condition = text.split("sys.exit(not ")[1].split(")' ||")[0]
    assert (not eval(condition, {"sys": type("sys", (), {"version_info": (*version, 0)})})) == refused
    assert PYTHONS.contains(".".join(map(str, version))) != refused


def test_make_kernel_registers_the_environment_for_a_hub(machine):
    said = subprocess.run(
        ["make", "-s", "kernel", f"VENV={machine / 'venv'}", "TORCH=cuda"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert said.splitlines()[-1].startswith("python -m ipykernel install --user --name flashattention-notebooks")


# Containers: tests/release/containers.py carries out their steps, which takes a quarter of an hour


def test_the_container_s_steps_are_those_that_are_tried_before_a_release():
    steps = containers.instructions((ROOT / "Dockerfile").read_text())
    assert [text for name, text in steps if name == "FROM"] == ["debian:bookworm-slim AS system", "system"]
    assert [text for name, text in steps if name == "USER"] == ["reader"]  # it goes on in the second stage
    assert ("RUN", "make installed TORCH=$TORCH") in steps and ("EXPOSE", str(containers.PORT)) in steps
    assert json.loads(steps[-1][1]) == ["make", "lab", f"LAB=--ip=0.0.0.0 --port={containers.PORT} --no-browser"]


def test_a_step_that_could_not_be_tried_is_refused():
    assert containers.instructions("# x\nRUN a && \\\n    b\n\nUSER c\n") == [("RUN", "a && b"), ("USER", "c")]
    with pytest.raises(ValueError, match=r"Dockerfile: VOLUME is unknown here, add it to containers\.py"):
        containers.instructions("FROM x\nVOLUME /data\n")


def test_every_way_in_is_a_target_of_make():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    binder = (ROOT / ".binder" / "postBuild").read_text()
    assert container["postCreateCommand"] == "make installed" and container["build"]["target"] == "system"
    assert binder.splitlines()[-1] == 'make installed VENV="$NB_PYTHON_PREFIX"'
    assert os.access(ROOT / ".binder" / "postBuild", os.X_OK)


# The package


def run_elsewhere(code: list[str], package: Path, cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run([sys.executable, *code], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package as `pip install .` copies it: without a checkout around it."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(ROOT / "helpers", folder / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_an_installed_package_finds_the_checkout_it_is_started_in(package):
    code = (
        "import helpers; from helpers.ladder import paths; print(helpers.__file__, paths.ROOT, helpers.rung('01').path)"
    )
    said = run_elsewhere(["-c", code], package, ROOT / "kernels" / "include").stdout.split()
    assert said == [str(package / "helpers" / "__init__.py"), str(ROOT), str(ROOT / "kernels" / "01_naive.cu")]


def test_an_installed_package_without_a_checkout_says_so(package, tmp_path):
    done = run_elsewhere(["-m", "helpers", "doctor"], package, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kernels/ and data/ are not part of the installed package: start in a checkout")
    assert done.stderr.count("\n") == 1


def test_the_package_takes_all_its_files_along():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [p for p in (ROOT / "helpers").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert len([p for p in files if p.suffix == ".h"]) > 20
    assert [p for p in files if p.suffix != ".py" and not any(fnmatch(p.name, pattern) for pattern in patterns)] == []


# What it imports

OPTIONAL = {
    "pynvml",
    "flash_attn",
    "flash_attn_interface",
    "cuda",  # cuda-tile, of the extra `languages`
    "triton",
}  # said or done without, where they are missing


NAMES = {"PIL": "pillow"}  # of the package, where it is not the module's


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_used():
    names = {Requirement(r).name.lower() for r in PYPROJECT["project"]["dependencies"]}
    files = [*(ROOT / "helpers").rglob("*.py"), *(ROOT / "notebooks" / "src").glob("*.py")]
    used = (
        {NAMES.get(name, name.lower()) for path in files for name in imported(path)}
        - set(sys.stdlib_module_names)
        - OPTIONAL
    )
    programs = {"jupyterlab", "ipykernel"} | {name for name in names if name.startswith(("cuda-", "nvidia-"))}
    assert used - {"helpers"} == names - programs


def test_each_requirement_has_a_lower_bound():
    """tests/release/pythons.sh installs these very versions and runs tests with them."""
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"]):
        assert any(s.operator in (">=", "==") for s in requirement.specifier), str(requirement)


def newer_than_the_oldest(*paths: Path) -> str:
    """What these files use of a standard library newer than the oldest Python. (Syntax: ruff's target, in `make test`.)"""
    oldest = next(s.version for s in PYTHONS if s.operator == ">=")
    vermin = [sys.executable, "-c", "from vermin import main; main()", "-q", "--no-tips", "--violations"]
    options = [f"-t={oldest}-", "--eval-annotations", "--exclude", "long"]  # a tensor's long() isn't Python 2's
    done = subprocess.run([*vermin, *options, *paths], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_oldest_python_has_all_that_is_used():
    assert newer_than_the_oldest(ROOT / "helpers", ROOT / "notebooks" / "src", ROOT / "tests") == ""


@pytest.mark.parametrize("code", ["import math\nmath.cbrt(8)", "import tomllib", "from typing import Self"])
def test_what_it_lacks_is_seen(code, tmp_path):
    (tmp_path / "new.py").write_text(code)
    assert "requires !2, 3.11" in newer_than_the_oldest(tmp_path / "new.py")
