"""What the compiler made of a kernel: registers, spills, shared memory and machine instructions, read from the cubin.

No GPU is needed: nvcc compiles for any architecture anywhere, with the flags a loaded kernel is compiled with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pandas as pd

from .build import cache_folder
from .errors import CompileError
from .ladder import INCLUDE, Rung
from .ladder import rung as find
from .toolkit import NVCC_FLAGS, ToolkitError, find_compiler, find_toolkit, gencode

COLUMNS = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "smem_bytes", "barriers")
# One entry function in ptxas's -v report (NVIDIA CUDA Compiler Driver, "--resource-usage").
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = {"registers": r"Used (\d+) registers", "barriers": r"used (\d+) barriers", "smem_bytes": r"(\d+) bytes smem"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<modifiers>[.\w]*)")


def cubin(rung: str | Rung, arch: str = "sm_90a") -> Path:
    """The rung compiled for `arch`; built once per source, headers, flags and nvcc, and kept in the build cache.

    CompileError with nvcc's words if it can't be compiled, ToolkitError if there is no nvcc.
    """
    return _compiled(rung, arch) / "kernel.cubin"


def _compiled(rung: str | Rung, arch: str) -> Path:
    """The folder with a rung's kernel.cubin and what ptxas said of it, ptxas.log."""
    rung = rung if isinstance(rung, Rung) else find(rung)
    toolkit = find_toolkit()
    flags = [*NVCC_FLAGS, gencode(arch)]
    key = hashlib.sha256(repr((rung.digest, flags, toolkit.version, str(toolkit.home))).encode()).hexdigest()[:12]
    folder = cache_folder() / f"{rung.stem}_{arch}_cubin_{key}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cubin-", dir=folder.parent) as private:
        source = Path(private) / f"{rung.stem}.cu"
        source.write_text(f'#line 1 "{rung.path}"\n{rung.source}')
        command = [toolkit.nvcc, "-cubin", *flags, f"-I{INCLUDE}", "-ccbin", find_compiler(), source]
        command += ["-o", Path(private) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError((done.stderr + done.stdout).strip())
        (Path(private) / "ptxas.log").write_text(done.stderr + done.stdout)
        with contextlib.suppress(OSError):  # another process was faster: its cubin is as good
            Path(private).rename(folder)
            Path(private).mkdir()  # for TemporaryDirectory to remove
    return folder


def resources(rung: str | Rung, arch: str = "sm_90a") -> pd.DataFrame:
    """Per kernel of a rung (index: its name): registers per thread, stack_bytes, spill_store_bytes and spill_load_bytes
    per thread, smem_bytes (static shared memory per block; dynamic is asked for at the launch) and barriers."""
    return parse_ptxas((_compiled(rung, arch) / "ptxas.log").read_text())


def parse_ptxas(log: str) -> pd.DataFrame:
    """What `ptxas -v` said of each entry function, as `resources` gives it. ValueError if it names none."""
    rows = {}
    starts = list(_ENTRY.finditer(log))
    for start, after in zip(starts, [*starts[1:], None], strict=False):
        text = log[start.start() : after.start() if after else None]
        row = dict.fromkeys(COLUMNS, 0)
        if spills := _SPILLS.search(text):
            row |= zip(COLUMNS[1:4], map(int, spills.groups()), strict=True)
        for column, pattern in _USED.items():
            if used := re.search(pattern, text):
                row[column] = int(used[1])
        rows[demangle(start["name"])] = row
    if not rows:
        raise ValueError(f"ptxas named no kernel in: {log[:300]!r}")
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS)).rename_axis("kernel")


def histogram(rung: str | Rung, arch: str = "sm_90a", modifiers: bool = False) -> pd.DataFrame:
    """How often each machine instruction is in the code of each kernel: index opcode, a column per kernel, most frequent
    first. Instructions in the code, not executed. NOPs, which pad it, are left out.

    modifiers: keep them ("LDS.128", not "LDS"). The opcodes are explained in CUDA Binary Utilities, "Instruction Sets".
    """
    listing = _disassembled(_compiled(rung, arch))
    return count_opcodes(listing, modifiers)


def count_opcodes(listing: str, modifiers: bool = False) -> pd.DataFrame:
    """The same from the text of `cuobjdump -sass`."""
    counts: dict[str, dict[str, int]] = {}
    kernel = None
    for line in listing.splitlines():
        if "Function :" in line:
            kernel = counts.setdefault(demangle(line.split(":", 1)[1].strip()), {})
        elif kernel is not None and (found := _INSTRUCTION.match(line)):
            name = found["opcode"] + (found["modifiers"] if modifiers else "")
            if found["opcode"] != "NOP":
                kernel[name] = kernel.get(name, 0) + 1
    frame = pd.DataFrame(counts).fillna(0).astype(int)
    order = frame.sum(axis=1).sort_values(ascending=False, kind="stable").index
    return frame.loc[order].rename_axis("opcode")


def _disassembled(folder: Path) -> str:
    listing = folder / "kernel.sass"
    if not listing.exists():
        bin_folder = find_toolkit().home / "bin"
        tool = shutil.which("cuobjdump", path=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")
        if tool is None:
            raise ToolkitError(
                "no cuobjdump beside nvcc or on PATH: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
            )
        environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}  # for nvdisasm
        command = [tool, "-sass", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode or "Function :" not in done.stdout:
            raise ToolkitError(f"cuobjdump could not read the cubin: {(done.stderr or done.stdout).strip()[:300]}")
        written = folder / f".{os.getpid()}.sass"
        written.write_text(done.stdout)
        written.rename(listing)
    return listing.read_text()


@functools.cache
def demangle(name: str) -> str:
    """`_Z8fa2_fp32ILi64EEv7fa_args` as `fa2_fp32<64>`: return type and arguments left out; other names as they are."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        function, free = library.__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return name
    function.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    status = ctypes.c_int()
    pointer = function(name.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return name
    text = ctypes.string_at(pointer).decode()
    free(pointer)
    text = text.replace("(anonymous namespace)::", "")
    text = re.sub(r"\((?:int|bool|unsigned int|long|unsigned long)\)(?=[\d-])", "", text)  # "(int)64" is 64
    depth, end = 0, len(text)
    for i, letter in enumerate(text):  # the argument list opens at the first bracket outside <>
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            end = i
            break
    return re.sub(r"^[\w ]*\s(?=[\w:]+(<|$))", "", text[:end])
