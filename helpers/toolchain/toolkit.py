"""The CUDA toolkit of this machine, ninja, and how nvcc is called. Imports without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..ladder.errors import ToolkitError

# What every kernel is compiled with, by nvcc.py and by sass.py alike.
# --split-compile=0: a rung's instances (one per D) are optimised side by side, which takes a third off 04's build.
# --threads=2: the host's half of a source is compiled beside the GPU's. No -O3: it would speak of the host's half alone, and
# costs a tenth of the time; GPU code is optimised anyway.
NVCC_FLAGS = ["-std=c++17", "-lineinfo", "--split-compile=0", "--threads=2", "-Xptxas", "-v"]


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its root folder, its version as nvcc prints it, and where it was found."""

    home: Path
    version: str
    found_by: str

    @property
    def nvcc(self) -> Path:
        """The compiler driver."""
        return self.home / "bin" / "nvcc"

    @property
    def major(self) -> int:
        """13 of "13.0.88"."""
        return int(self.version.split(".")[0])


def _version(nvcc: Path) -> str | None:
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match[1] if match else None


def _home_of(nvcc: str) -> Path:
    """The toolkit's root: the parent of what nvcc calls _HERE_, since the nvcc on PATH may be a script elsewhere."""
    said = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    match = re.search(r"^#\$ _HERE_=(.*)$", said, re.MULTILINE)
    return Path(match[1].strip() if match else Path(nvcc).resolve().parent).resolve().parent


def _candidates() -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    if home := os.environ.get("CUDA_HOME"):
        found.append((Path(home), "CUDA_HOME"))
    for folder in sys.path:
        with contextlib.suppress(OSError):  # a folder that this user can't read
            wheels = sorted(Path(folder or ".").glob("nvidia/cu[0-9]*"), reverse=True)
            found += [(wheel, "pip") for wheel in wheels]
    if on_path := shutil.which("nvcc"):
        found.append((_home_of(on_path), "PATH"))
    return found


@cache
def _find(cuda_home: str | None, path: str | None) -> tuple[Toolkit, ...]:
    found = [(home, by, home / "bin" / "nvcc") for home, by in _candidates()]
    return tuple(Toolkit(home, v, by) for home, by, nvcc in found if nvcc.is_file() and (v := _version(nvcc)))


def find_toolkit(major: int | None = None) -> Toolkit:
    """The toolkit to use: CUDA_HOME, then pip's wheels, then nvcc on PATH; the first of CUDA `major` if there is one, else the
    first of all. Raises ToolkitError if there is none."""
    toolkits = _find(os.environ.get("CUDA_HOME"), os.environ.get("PATH"))
    if not toolkits and sys.platform == "darwin":
        raise ToolkitError("there is no nvcc for macOS: machine code is not shown here, kernels run on the emulator")
    if not toolkits:
        raise ToolkitError(
            "no nvcc found in CUDA_HOME, among pip's packages or on PATH: run `make lab` (it installs nvcc from pip), "
            "or `pip install 'cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*'`"
        )
    return next((toolkit for toolkit in toolkits if toolkit.major == major), toolkits[0])


def matching_toolkit(cuda_of_torch: str | None) -> Toolkit:
    """The toolkit, if torch can call it and was built with CUDA of its major version; else ToolkitError."""
    major = int(cuda_of_torch.split(".")[0]) if cuda_of_torch else None
    toolkit = find_toolkit(major)
    if major not in (None, toolkit.major):
        raise ToolkitError(
            f"nvcc {toolkit.version} ({toolkit.found_by}) doesn't go with torch, which was built for CUDA "
            f"{cuda_of_torch}: install `cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]=={cuda_of_torch}.*`, "
            "or point CUDA_HOME at a toolkit of that version"
        )
    if " " in str(toolkit.home):  # torch doesn't quote it for the shell
        raise ToolkitError(f"nvcc can't be called in {str(toolkit.home)!r}: move it to a path without blanks")
    return toolkit


def find_ninja() -> Path:
    """The folder of ninja, which load_inline calls: pip's package, which an unactivated environment doesn't have on
    PATH, else PATH. Raises ToolkitError if there is none."""
    if importlib.util.find_spec("ninja"):
        import ninja

        if ninja.BIN_DIR and (Path(ninja.BIN_DIR) / "ninja").is_file():  # a package may have lost its program
            return Path(ninja.BIN_DIR)
    if found := shutil.which("ninja"):
        return Path(found).parent
    raise ToolkitError("no ninja found: `pip install ninja`, or `make lab`, which installs all of pyproject.toml")


def architecture(major: int, minor: int) -> str:
    """The real architecture to compile for: sm_90a on 9.0 (wgmma and setmaxnreg need the `a`), else sm_XY."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def gencode(arch: str) -> str:
    """nvcc's flag for one architecture ("sm_90a"). `-arch=sm_90a` would add a plain sm_90 pass, which can't compile wgmma."""
    return f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
