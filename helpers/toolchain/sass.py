"""What the compiler made of a kernel: registers, spills, shared memory and machine instructions, read from the cubin.

No GPU is needed: nvcc compiles for any architecture anywhere, with the flags a loaded kernel is compiled with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ..ladder.errors import CompileError, ToolkitError
from ..ladder.paths import from_root
from ..ladder.rung import INCLUDE, Rung, Which
from ..ladder.rung import rung as find
from .compile import cache_folder, digest, making
from .compiler import find_compiler
from .loops import Line, cut_at_waits, is_named, main_loop
from .toolkit import NVCC_FLAGS, find_toolkit, gencode

COLUMNS = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "smem_bytes", "barriers")
# One entry function in ptxas's -v report (NVIDIA CUDA Compiler Driver, "--resource-usage").
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = {"registers": r"Used (\d+) registers", "barriers": r"used (\d+) barriers", "smem_bytes": r"(\d+) bytes smem"}
_INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<modifiers>[.\w]*)(?P<operands>[^;]*)"
)
# What instructions are for; an opcode belongs to the first class that its name with modifiers matches. The opcodes are
# explained in CUDA Binary Utilities, "Instruction Set Reference".
CLASSES = {
    "HMMA": r"HMMA",  # mma.sync
    "HGMMA": r"HGMMA",  # wgmma
    "LDSM": r"LDSM",  # ldmatrix
    "LDGSTS": r"LDGSTS",  # cp.async
    "UTMALDG": r"UTMALDG",  # TMA
    "SYNCS": r"SYNCS",  # mbarrier
    "R2UR": r"R2UR",  # into a uniform register, which descriptors are read from
    "LDS": r"LDS",
    "STS": r"STS",
    "LDG": r"LDG",
    "STG": r"STG",
    "LDL": r"LDL",  # spilled registers, loaded
    "STL": r"STL",  # and stored
    "BAR": r"BAR",
    "SHFL": r"SHFL",
    "VOTE": r"VOTE",
    "FFMA": r"FFMA",
    "FMUL": r"FMUL",
    "FADD": r"FADD",
    "FMNMX": r"FMNMX",
    "MUFU": r"MUFU",  # exp2, reciprocal, logarithm
    "F2FP": r"F2FP",  # float32 to 16 bits, two at a time
    "MOV": r"U?MOV|IMAD\.U?MOV",
    "CS2R": r"CS2R",  # zeroes a pair of registers
    "IADD3": r"U?IADD3|VIADD|IMAD\.IADD",
    "IMAD": r"U?IMAD",
    "LOP3": r"U?LOP3|U?PLOP3",
    "SHF": r"U?SHF",
    "LEA": r"U?LEA",
    "SEL, SETP": r"[FI]?SEL|U?[FI]SETP|USEL",
    "BRA": r"BRA|BSSY|BSYNC|EXIT|CALL|RET|WARPSYNC",
}


def cubin(which: Which, arch: str = "sm_90a") -> Path:
    """A kernel compiled for `arch`; built once per source, headers, flags and nvcc, and kept in the build cache.

        sass.cubin("04", "sm_80")

    which: what `rung` takes.
    CompileError with nvcc's words if it can't be compiled, ToolkitError if there is no nvcc.
    """
    return _compiled(which, arch) / "kernel.cubin"


def _compiled(which: Which, arch: str) -> Path:
    """The folder with a kernel's kernel.cubin and what ptxas said of it, ptxas.log."""
    rung = find(which)
    toolkit = find_toolkit()
    flags = [*NVCC_FLAGS, gencode(arch)]
    key = digest(rung.digest, flags, toolkit.version, str(toolkit.home))
    folder = cache_folder() / f"{rung.stem}_{arch}_cubin_{key}"
    with contextlib.nullcontext() if _is_whole(folder) else making(folder, rung.stem):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            _compile(rung, toolkit.nvcc, flags, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Is all there that `_compile` leaves? What clears old files out of caches may have taken a part."""
    return (folder / "kernel.cubin").exists() and (folder / "ptxas.log").exists()


def _compile(rung: Rung, nvcc: Path, flags: list[str], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as private:
        source = Path(private) / f"{rung.stem}.cu"
        source.write_text(f'#line 1 "{from_root(rung.path)}"\n{rung.source}')
        command = [nvcc, "-cubin", *flags, f"-I{INCLUDE}", "-ccbin", find_compiler(), source]
        command += ["-o", Path(private) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError((done.stderr + done.stdout).strip())
        (Path(private) / "ptxas.log").write_text(done.stderr + done.stdout)
        with contextlib.suppress(OSError):  # another process was faster: its cubin is as good
            Path(private).rename(folder)
            Path(private).mkdir()  # for TemporaryDirectory to remove


def resources(which: Which, arch: str = "sm_90a") -> pd.DataFrame:
    """Registers, spills and shared memory of each `__global__` function, as ptxas reports them.

        sass.resources("04")

    which: what `rung` takes. Index: the function's name. Columns: registers per thread, stack_bytes, spill_store_bytes and
    spill_load_bytes per thread, smem_bytes (static shared memory per block; dynamic is asked for at the launch) and barriers.
    """
    return parse_ptxas((_compiled(which, arch) / "ptxas.log").read_text())


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


def histogram(which: Which, arch: str = "sm_90a", modifiers: bool = False) -> pd.DataFrame:
    """How often each machine instruction is in the code of each `__global__` function.

        sass.histogram("04").head()

    which: what `rung` takes. Index: opcode, most frequent first; a column per function. Counted are instructions in the code,
    not those executed; NOPs, which pad it, are left out. modifiers: keep them ("LDS.128", not "LDS"). The opcodes are explained in CUDA Binary Utilities, "Instruction Sets".
    """
    return count_opcodes(disassembly(which, arch), modifiers)


def count_opcodes(listing: str, modifiers: bool = False) -> pd.DataFrame:
    """The same from the text of `cuobjdump -sass`."""
    counts = {
        kernel: Counter(opcode if modifiers else opcode.partition(".")[0] for _, opcode, _ in lines)
        for kernel, lines in _code(listing).items()
    }
    frame = pd.DataFrame(counts).fillna(0).astype(int)
    order = frame.sum(axis=1).sort_values(ascending=False, kind="stable").index
    return frame.loc[order].rename_axis("opcode")


def opcodes(
    which: Which, D: int = 64, dtype: str = "fp16", arch: str = "sm_90a", loop: bool = False, kernel: str = ""
) -> pd.Series:
    """How many instructions of each class of CLASSES, and "other", are in the code of a kernel's instance for D and dtype.

        sass.opcodes("10", D=128, dtype="fp16")

    which: what `rung` takes. loop: only in the loop that does the products. kernel: a piece of the kernel's name, where D and dtype don't decide.
    ValueError names the kernels there are.
    """
    rung = find(which)
    code = _code(disassembly(rung, arch))
    name = instance(code, D, dtype, kernel)
    lines = main_loop(code[name]) if loop else code[name]
    counts = dict.fromkeys([*CLASSES, "other"], 0)
    for _, opcode, _ in lines:
        counts[_class(opcode)] += 1
    return pd.Series(counts, name=rung.stem).rename_axis("opcode")


def compare(
    *which: Which, D: int = 64, dtype: str = "fp16", arch: str = "sm_90a", loop: bool = False, kernel: str = ""
) -> pd.DataFrame:
    """`opcodes` of several kernels side by side, classes that none has left out; of two also the `change`.

        sass.compare("10", "11")

    which: each what `rung` takes.
    """
    columns: dict[str, pd.Series] = {}
    for one in which:
        counts = opcodes(one, D, dtype, arch, loop, kernel)
        name, again = str(counts.name), 2
        while name in columns:
            name, again = f"{counts.name} ({again})", again + 1
        columns[name] = counts
    frame = pd.DataFrame(columns)
    frame = frame[(frame > 0).any(axis=1)]
    frame.loc["all"] = frame.sum()
    if len(columns) == 2:
        before, after = frame.columns
        frame["change"] = frame[after] - frame[before]
    return frame


def instance(names: Iterable[str], D: int, dtype: str, kernel: str = "") -> str:
    """The one kernel for this D and dtype among demangled names such as `fa2_mma<64, fa::fp16>`: D is the first number among
    its template arguments, the dtype a type; a kernel without such an argument serves them all. ValueError if it isn't one."""
    names = list(names)
    types = {"fp16": "fa::fp16", "bf16": "fa::bf16", "fp32": "float"}

    def serves(name: str) -> bool:
        arguments = name.partition("<")[2]
        numbers = re.findall(r"(?<![\w.])\d+", arguments)
        typed = [t for t in types.values() if re.search(rf"\b{t}\b", arguments)]
        return kernel in name and (not numbers or int(numbers[0]) == D) and (not typed or types[dtype] in typed)

    found = [name for name in names if serves(name)]
    if len(found) != 1:
        what = f"{len(found)} kernels" if found else "no kernel"
        raise ValueError(
            f"{what} for D = {D}, {dtype}{f', {kernel!r}' if kernel else ''}; there are {', '.join(names)}"
        )
    return found[0]


def _code(listing: str) -> dict[str, list[Line]]:
    """The instructions of each kernel in the text of `cuobjdump -sass`, NOPs left out."""
    code: dict[str, list[Line]] = {}
    lines: list[Line] = []
    for line in listing.splitlines():
        if "Function :" in line:
            lines = code.setdefault(demangle(line.split(":", 1)[1].strip()), [])
        elif (found := _INSTRUCTION.match(line)) and found["opcode"] != "NOP":
            lines.append((int(found["address"], 16), found["opcode"] + found["modifiers"], found["operands"]))
    return code


def between_waits(which: Which, D: int = 128, dtype: str = "bf16") -> pd.DataFrame:
    """The main loop of a rung with wgmma, cut at its waits for products, a row for each piece in the order of the code.

    Index: what the piece begins with, "the loop begins", "all but 1 done", or "all done". Columns: how many of the instructions
    BETWEEN are in it, and of `all`. ValueError if there is no such kernel, or no such loop.
    """
    return cut_at_waits(loop_lines(which, D, dtype))


def loop_lines(which: Which, D: int, dtype: str = "fp16", arch: str = "sm_90a", kernel: str = "") -> list[Line]:
    """The main loop's instructions in the order of the code: address, opcode with modifiers, operands. kernel: a piece of the
    kernel's name, where D and dtype don't decide."""
    code = _code(disassembly(which, arch))
    return main_loop(code[instance(code, D, dtype, kernel)])


def _class(opcode: str) -> str:
    return next((name for name, pattern in CLASSES.items() if is_named(opcode, pattern)), "other")


def table(*which: Which, arch: str = "sm_90a") -> pd.DataFrame:
    """Registers, spills, shared memory and tiles of every instance of some kernels.

        sass.table("10", "11", "12")

    which: each what `rung` takes. Columns: rung, kernel, registers (per thread), spilled_bytes (stores and loads, per thread), and
    from the line of the header block's `tiles` for its D: Br, Bc, threads, smem_kb, ctas.
    """
    rows = []
    for one in which:
        rung = find(one)
        for name, row in resources(rung, arch).iterrows():
            numbers = re.findall(r"(?<![\w.])\d+", str(name).partition("<")[2])
            said = tile(rung, int(numbers[0])) if numbers else {}
            spilled = int(row["spill_store_bytes"] + row["spill_load_bytes"])
            order = (int(numbers[0]) if numbers else 0, "bf16" in str(name))
            rows.append((order, rung.stem, name, int(row["registers"]), spilled, *map(said.get, TILE_KEYS.values())))
    columns = ["order", "rung", "kernel", "registers", "spilled_bytes", *TILE_KEYS.values()]
    frame = pd.DataFrame(rows, columns=columns).sort_values(["rung", "order"], kind="stable").drop(columns="order")
    return frame.astype(dict.fromkeys(TILE_KEYS.values(), "Int64")).reset_index(drop=True)


TILE_KEYS = {"Br": "Br", "Bc": "Bc", "threads": "threads", "smem": "smem_kb", "CTAs/SM": "ctas"}


def tile(rung: Rung, D: int) -> dict[str, int]:
    """What a rung's header block says of its tiles for one D: Br, Bc, threads, smem_kb and ctas (per SM), as far as it does."""
    line = next((t for t in rung.tiles.splitlines() if re.match(rf"D={D}\b", t)), "")
    found = dict(re.findall(r"([\w/]+)=(\d+)", line))
    return {name: int(found[key]) for key, name in TILE_KEYS.items() if key in found}


def disassembly(which: Which, arch: str = "sm_90a") -> str:
    """The text of `cuobjdump -sass` for a kernel's cubin, kept beside it.

        print(sass.disassembly("04"))

    which: what `rung` takes.
    """
    folder = _compiled(which, arch)
    listing = folder / "kernel.sass"
    with contextlib.nullcontext() if listing.exists() else making(listing):
        if not listing.exists():
            _disassemble(folder / "kernel.cubin", listing)
    return listing.read_text()


def _disassemble(cubin: Path, listing: Path) -> None:
    written = listing.with_name(f".{os.getpid()}.sass")
    written.write_text(cuobjdump(cubin, "-sass"))
    written.rename(listing)


def cuobjdump(cubin: Path, what: str) -> str:
    """What cuobjdump says of machine code in a file: "-sass", its listing, or "-res-usage", registers and memory of each function.

    ToolkitError if there is no cuobjdump, or if it can't read the file.
    """
    bin_folder = find_toolkit().home / "bin"
    tool = shutil.which("cuobjdump", path=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")
    if tool is None:
        raise ToolkitError(
            "no cuobjdump beside nvcc or on PATH: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
        )
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}  # for nvdisasm
    done = subprocess.run([tool, what, cubin], capture_output=True, text=True, check=False, env=environment)
    if done.returncode or "Function" not in done.stdout:
        raise ToolkitError(f"cuobjdump could not read the cubin: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout


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
