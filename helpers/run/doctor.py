"""What this machine can run, and how to fix what it can't. Reports whatever is missing; never raises for it."""

from __future__ import annotations

import html
import importlib.util
import itertools
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..ladder import cards
from ..ladder.errors import CompileError, KernelError
from ..ladder.paths import KERNELS, NOTEBOOKS
from ..ladder.rung import Rung
from ..ladder.rung import rung as find_rung
from ..toolchain.compiler import emulators_compiler, find_compiler
from ..toolchain.lines import find_symbolizer
from ..toolchain.toolkit import ToolkitError, find_ninja, matching_toolkit
from . import kernel

# ValueError: of a setting that is no number, or of half a header block. OSError: of a folder that can't be written.
UNUSABLE = (ToolkitError, CompileError, KernelError, ValueError, OSError)


@dataclass(frozen=True)
class Fact:
    """One line of the report: what was looked at, what was found, and how to fix it if it is missing."""

    name: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Lane:
    """Where one notebook runs on this machine, and why there."""

    notebook: str
    back_end: str
    why: str


@dataclass(frozen=True)
class Machine:
    """`facts` about the machine, a `lane` for each notebook; prints as text, shows as tables in Jupyter, where neighbours that
    run in the same place for the same reason are one line."""

    facts: tuple[Fact, ...]
    lanes: tuple[Lane, ...]

    @property
    def ok(self) -> bool:
        """Every notebook can run somewhere, on a GPU or on the emulator."""
        emulator = next((f for f in self.facts if f.name == "emulator"), None)
        broken = emulator is not None and bool(emulator.fix)
        return not any(lane.back_end == "nowhere" or (broken and lane.back_end == "emulator") for lane in self.lanes)

    def __str__(self) -> str:
        lines = [f"{f.name:<20}{f.value}" + (f"\n{'':<20}-> {f.fix}" if f.fix else "") for f in self.facts]
        lines += ["", f"{'notebook':<26}{'runs on':<12}why"]
        lines += [f"{notebooks:<26}{back_end:<12}{why}" for notebooks, back_end, why in self._rows()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def table(rows: list[tuple[str, ...]]) -> str:
            cells = ("".join(f'<td style="text-align:left">{html.escape(c)}</td>' for c in row) for row in rows)
            shown = "<table>" + "".join(f"<tr>{c}</tr>" for c in cells) + "</table>"
            return re.sub(r"`([^`<]+)`", r"<code>\1</code>", shown)

        about = [(f.name, f.value + (f" → {f.fix}" if f.fix else "")) for f in self.facts]
        return table(about) + table([("notebook", "runs on", "why"), *self._rows()])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for (back_end, why), lanes in itertools.groupby(self.lanes, lambda lane: (lane.back_end, lane.why)):
            names = [lane.notebook for lane in lanes]
            yield names[0] if len(names) == 1 else f"{names[0][:2]} to {names[-1]}", back_end, why


def doctor() -> Machine:
    """Looks at GPU, driver, compilers and packages, and says which notebooks run here, on which back end, and why.

        doctor()

    What is missing stands in the report with its fix; nothing is raised for it.
    """
    facts = [
        Fact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _attempt("make", _make),
        _attempt("venv", _venv),
        *_gpu(),
        _attempt("nvcc", _nvcc),
        _attempt("C++ compiler", lambda: str(emulators_compiler())),
        _attempt("line numbers", find_symbolizer),
        _attempt("ninja", _ninja),
        _attempt("Python's headers", _headers),
        _attempt("emulator", _emulator),
    ]
    return Machine(tuple(facts), tuple(_lane(path.stem) for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))))


def _attempt(name: str, look: Callable[[], str]) -> Fact:
    try:
        return Fact(name, look())
    except UNUSABLE as error:
        return Fact(name, "missing or unusable", str(error))


def _gpu() -> list[Fact]:
    import torch

    version = Fact("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none: CPU build'})")
    if not torch.cuda.is_available():
        fix = "none needed: the emulator runs every notebook; with an NVIDIA GPU, check that `nvidia-smi` works"
        return [version, Fact("GPU", "none found", fix)]
    device = torch.cuda.get_device_properties(0)
    per_block = getattr(device, "shared_memory_per_block_optin", 0)
    return [
        version,
        Fact("GPU", f"{device.name}, {device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB"),
        Fact("compute capability", f"{device.major}.{device.minor}"),
        Fact("shared memory", f"{per_block / 1024:g} KB per block at most"),
        Fact("driver", _driver()),
    ]


def _driver() -> str:
    from ..record import query_gpu

    answer = query_gpu("driver_version")
    return answer[0] if answer else "unknown: nvidia-smi gives no version"


def _nvcc() -> str:
    import torch

    toolkit = matching_toolkit(torch.version.cuda)
    return f"{toolkit.version}, found by {toolkit.found_by}"


def _make() -> str:
    if found := shutil.which("make"):
        return found
    raise ToolkitError(
        "needed for `make lab` and the like alone: install it (Debian, Ubuntu: `apt install make`; Fedora, Red Hat: `dnf install "
        "make`; macOS: `xcode-select --install`; conda: `conda install -c conda-forge make`), or call `jupyter lab` yourself"
    )


def _venv() -> str:
    if importlib.util.find_spec("ensurepip"):
        return "python3 -m venv works"
    raise ToolkitError(
        "needed to make .venv alone: install it (Debian, Ubuntu: `apt install python3-venv`), or use conda's environment.yml"
    )


def _ninja() -> str:
    said = subprocess.run([find_ninja() / "ninja", "--version"], capture_output=True, text=True, check=False)
    return said.stdout.strip()


def _headers() -> str:
    """What torch.compile and Triton compile against, as in notebook 40; kernels of the series do not."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise ToolkitError(
            f"no {header}; optional: torch.compile and Triton use it, as in notebook 40 (Debian, Ubuntu: `apt install "
            "python3-dev`; Fedora, Red Hat: `dnf install python3-devel`)"
        )
    return f"Python.h of {platform.python_version()}"


def _emulator() -> str:
    """The proof is a run: the first rung, on 8 queries and keys."""
    import torch

    from . import reference

    q, k, v = torch.randn(3, 1, 1, 8, 32)
    error = (
        (kernel.load("01_naive", device="cpu", quiet=True)(q, k, v)[0] - reference.attention(q, k, v)[0]).abs().max()
    )
    return f"runs 01_naive, error {error:.1g}"


def _lane(stem: str) -> Lane:
    import torch

    path = KERNELS / f"{stem}.cu"
    try:
        # A notebook without a kernel of its own loads any of them.
        rung = find_rung(path) if path.is_file() else Rung(stem=stem, path=path, source="")
        find_compiler()
        find_ninja()
    except UNUSABLE as error:
        return Lane(stem, "nowhere", str(error))
    reason = kernel.cuda_refusal(rung)
    if not reason:
        taken = cards.on(rung, torch.cuda.get_device_capability()).dtypes
        alone = f", for {' and '.join(taken)} alone" if taken != rung.dtypes else ""
        return Lane(stem, "GPU", f"nvcc compiles for {torch.cuda.get_device_name(0)}{alone}")
    return Lane(stem, "emulator", reason)
