"""What each language's compiler makes of the same algorithm: registers and instructions, compiled for Hopper without a GPU.

`record` writes data/languages.csv; it needs the languages' packages, which `python -m pip install '.[languages]'` brings. Each is
compiled in a process of its own, since their packages take the same names for different things, or want to be told of the
architecture before they are imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..ladder.paths import DATA, ROOT
from ..toolchain import sass
from ..toolchain.nvcc import UNDEFINED
from ..toolchain.toolkit import NVCC_FLAGS, find_toolkit
from . import languages

if TYPE_CHECKING:
    from types import ModuleType

ARCH = "sm_90a"
DIMENSIONS = (64, 128)
RECORD = DATA / "languages.csv"
INSTRUCTIONS = (
    "HGMMA",
    "HMMA",
    "UTMALDG",
    "LDGSTS",
    "LDSM",
    "MUFU",
)  # wgmma, mma.sync, TMA, cp.async, ldmatrix, exp2 and 1/x
COLUMNS = ["name", "version", "D", "causal", "registers", "stack_bytes", *INSTRUCTIONS, "all"]


def record(names: list[str] | None = None, path: Path = RECORD) -> pd.DataFrame:
    """Compiles each (all of COMPILERS by default), for fp16, D 64 and 128, with and without a mask, and writes the record; rows of
    others in it are kept. What can't be compiled here is told on stderr and left out."""
    rows = [load(path)] if path.exists() else []
    for name in names or list(COMPILERS):
        with tempfile.TemporaryDirectory() as folder:
            call = f"from helpers.lessons import machine_code; machine_code.compile({name!r}, {folder!r})"
            environment = languages.environment(name)
            done = subprocess.run(
                [sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, env=environment
            )
            if done.returncode:
                print(f"{name}: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}", file=sys.stderr)
                continue
            rows.append(pd.DataFrame([_facts(name, cubin) for cubin in sorted(Path(folder).glob("*.cubin"))]))
    frame = pd.concat(rows, ignore_index=True).drop_duplicates(["name", "D", "causal"], keep="last")
    frame = frame.sort_values(["name", "D", "causal"], ignore_index=True)[COLUMNS]
    frame.to_csv(path, index=False, lineterminator="\n")
    return frame


def load(path: Path = RECORD) -> pd.DataFrame:
    """The record: name, version (of its package), D, causal, registers (of a thread), stack_bytes (of a thread: spilled registers
    as a rule), how many of each of INSTRUCTIONS are in the code, and of all."""
    return pd.read_csv(path)


def _facts(name: str, cubin: Path) -> dict:
    D, causal = map(int, cubin.stem.split("_"))
    code = sass.count_opcodes(sass.cuobjdump(cubin, "-sass")).sum(axis=1)
    used = sass.cuobjdump(cubin, "-res-usage")
    counts = {opcode: int(code.get(opcode, 0)) for opcode in INSTRUCTIONS}
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", used))) for what in ("REG", "STACK"))
    version = languages.versions(languages.implementation(name).needs)
    about = {"name": name, "version": version, "D": D, "causal": causal, "registers": registers, "stack_bytes": stack}
    return about | counts | {"all": int(code.sum())}


def compile(name: str, folder: str) -> None:
    """Writes D_causal.cubin for each D and mask into `folder`. KernelError if the language isn't installed."""
    found = languages.implementation(name)
    if found.absent:
        languages.refuse(found)
    COMPILERS[name](found, Path(folder))


def _cute_cpp(found: languages.Implementation, folder: Path) -> None:
    """Each instance of the template alone: the file's own launcher is left out."""
    source = found.path.read_text().split("// [region: launch]")[0]
    for D in DIMENSIONS:
        for causal in (0, 1):
            one = f"template __global__ void kernel<half_t, {D}, {str(bool(causal)).lower()}>(const Arguments);"
            text = folder / f"{D}_{causal}.cu"
            text.write_text(f"{source}\n{one}\n")
            flags = [f for f in NVCC_FLAGS if not f.startswith(("-lineinfo", "-Xptxas", "-v"))]
            command = [find_toolkit().nvcc, "-cubin", f"-arch={ARCH}", *flags, *languages.CUTLASS_FLAGS, *UNDEFINED]
            command += [f"-I{languages.cutlass_headers()}", text, "-o", text.with_suffix(".cubin")]
            subprocess.run(command, check=True, capture_output=True)


def _triton(found: languages.Implementation, folder: Path) -> None:
    """By `warmup`, which compiles and does not run; the driver is a stand-in that names the architecture."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    module = languages.module(found.path)
    kernel = module.kernel

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: object, **options: object) -> None:
                code = kernel.warmup(*args, grid=grid, **options).asm["cubin"]
                (folder / f"{D}_{causal}.cubin").write_bytes(code)

            return launch

    module.kernel = Compiled()
    for D in DIMENSIONS:
        for causal in (0, 1):
            q = torch.zeros(1, 2, 512, D, dtype=torch.float16)
            module.forward(q, q, q, None, bool(causal))


def _cute_dsl(found: languages.Implementation, folder: Path) -> None:
    import torch

    os.environ |= {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    module = languages.module(found.path)
    for D in DIMENSIONS:
        for causal in (0, 1):
            before = set(folder.glob("*.cubin"))
            module.compiled(torch.float16, D, bool(causal), module.TILES[D])
            (made,) = set(folder.glob("*.cubin")) - before
            shutil.move(made, folder / f"{D}_{causal}.cubin")


def _cutile(found: languages.Implementation, folder: Path) -> None:
    import cuda.tile as ct
    from cuda.tile import compilation as to

    module: ModuleType = languages.module(found.path)

    def array(dtype: object, dims: int) -> to.ArrayConstraint:
        """Dense, aligned to 16 bytes, as torch's are."""
        return to.ArrayConstraint(
            dtype,
            dims,
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=(*[None] * (dims - 1), 1),
            stride_divisible_by=(*[8] * (dims - 1), 1) if dims > 2 else 1,
            base_addr_divisible_by=16,
        )

    scalars = [to.ScalarConstraint(x) for x in (ct.float32, ct.int32, ct.int32)]
    for D in DIMENSIONS:
        for causal in (0, 1):
            fixed = [to.ConstantConstraint(x) for x in (D, *module.TILES[D], bool(causal))]
            arrays = [*[array(ct.float16, 3)] * 4, array(ct.float32, 2)]
            v1 = to.CallingConvention.cutile_python_v1()
            signature = to.KernelSignature([*arrays, *scalars, *fixed], calling_convention=v1, symbol="kernel")
            file = str(folder / f"{D}_{causal}.cubin")
            to.export_kernel(module.kernel, [signature], file, gpu_code="sm_90", output_format="cubin")


COMPILERS: dict[str, Callable[[languages.Implementation, Path], None]] = {
    "cute_dsl": _cute_dsl,
    "cute_mma": _cute_cpp,
    "cutile_tiles": _cutile,
    "gluon_tiles": _triton,
    "triton_tiles": _triton,
}
