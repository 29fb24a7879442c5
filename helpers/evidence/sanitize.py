"""compute-sanitizer and the X-ray on the same wrong kernels: who finds what.

`python -m helpers record sanitizer [ID...]` builds every mutant of mutants.py (and every rung as it is) into a small program, runs
it under each of compute-sanitizer's tools and records what they say; a mutant recorded already is left out. Needs a GPU.
`python -m helpers record xray-of-mutants` does the same with the X-ray, on any machine, and records both side by side.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..ladder.contract import TORCH_NAMES, FaBackwardArgs, workspace_shapes
from ..ladder.errors import KernelError
from ..ladder.rung import INCLUDE, rung, rungs
from ..run.kernel import Kernel, load
from ..toolchain.toolkit import architecture, find_toolkit, gencode
from .mutants import BATCH, Mutant, mutants, original

if TYPE_CHECKING:
    import pandas as pd

# memcheck: accesses out of bounds and misaligned ones. racecheck: unordered accesses to shared memory; an arrival on an
# mbarrier speaks, to it, for the thread that arrives and for no other, even behind a barrier of all, so that a TMA pipeline
# whose place one thread gives back for its readers is reported though it is right (tests/releases.cu; compute-sanitizer 13.0).
# initcheck: reads of global memory that nobody has written; it knows cp.async.bulk since 2025.4 (its release notes:
# https://docs.nvidia.com/compute-sanitizer/ReleaseNotes/). synccheck: barriers that some of their threads miss.
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLEAN, TIMEOUT, FAILED = "clean", "timeout", "failed"
SECONDS = 15  # for one program under one tool; a clean one takes a few
WORKERS = 8  # programs at a time: more only wait for the driver, which starts some three a second whatever the GPUs
SAVE_SECONDS = 10  # between two writings of the record
RETRY_SECONDS = 5  # once it has run out of time under another tool
PADDING = 1 << 16  # bytes that no tensor owns behind each allocation, as between tensors of the emulator
COLUMNS = ["mutant", "stem", "line", "bug", "digest", *TOOLS, "xray"]  # data/README.md has what they are
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
HOST = Path(__file__).with_name("calls.cpp")


def find_sanitizer() -> str:
    """Path of `compute-sanitizer`. Raises FileNotFoundError with the mend if it is not installed."""
    found = shutil.which("compute-sanitizer")
    found = found or shutil.which("compute-sanitizer", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    if found is None:
        raise FileNotFoundError("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    return found


def calls(mutant: Mutant) -> list[int]:
    """The 15 numbers per call that calls.cpp takes: one call for each of the mutant's shapes, in its first dtype."""
    about = rung(mutant.stem)
    dtype, numbers = about.dtypes[0], []
    causal, splits = mutant.options.get("causal", False), mutant.options.get("splits", 1)
    for B, H, Nq, Nk, D in _shapes(mutant):
        Hkv = 1 if about.op == "softmax" else mutant.heads[1]
        args = FaBackwardArgs(B=B, H=H, Hkv=Hkv, Nq=Nq, Nk=Nk, D=D, splits=splits)
        workspace = [4 * math.prod(shape) for shape in workspace_shapes(about, args).values()]
        numbers += [("attention", "softmax", "attention_backward").index(about.op), list(TORCH_NAMES).index(dtype)]
        numbers += [B, H, Hkv, Nq, Nk, D, ITEMSIZE[dtype], int(causal), splits]
        numbers += workspace + [0] * (4 - len(workspace))
    return numbers


def _shapes(mutant: Mutant) -> list[tuple[int, int, int, int, int]]:
    """(B, H, Nq, Nk, D) of every call; a softmax of Nq rows of Nk has B = H = D = 1."""
    if rung(mutant.stem).op == "softmax":
        return [(1, 1, rows, N, 1) for rows, N in mutant.shapes]
    return [(BATCH, mutant.heads[0], *shape) for shape in mutant.shapes]


@cache
def build_host(folder: Path) -> Path:
    """calls.cpp compiled, for every mutant to be linked with."""
    made = folder / "calls.o"
    _nvcc([find_toolkit().nvcc, "-std=c++17", "-O1", "-c", f"-I{INCLUDE}", HOST, "-o", made])
    return made


@cache
def _arch() -> str:
    """This GPU's architecture; empty without one."""
    from ..record import query_gpu

    answer = query_gpu("compute_cap")
    return architecture(*map(int, answer[0].split("."))) if answer else ""


def build(mutant: Mutant, folder: Path) -> Path:
    """The mutant as a program in `folder`, if it isn't there yet. RuntimeError with nvcc's words if it can't be compiled."""
    nvcc = find_toolkit().nvcc
    program = folder / mutant.digest
    if program.exists():
        return program
    source = folder / f"{mutant.digest}.sources" / f"{mutant.stem}.cu"
    source.parent.mkdir(exist_ok=True)
    source.write_text(mutant.source)
    arch = gencode(_arch() or rung(mutant.stem).arch)  # without a GPU it can be compiled all the same
    command = [nvcc, "-std=c++17", "-lineinfo", arch, f"-I{INCLUDE}", source, build_host(folder)]
    command += [f"-L{nvcc.parent.parent / 'lib'}"]  # where pip's toolkit has the runtime, which nvcc doesn't know
    _nvcc([*command, "-o", source.with_suffix("")])
    return source.with_suffix("").rename(program)


def _nvcc(command: list) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr + done.stdout).strip())


def sanitize(
    program: Path,
    numbers: list[int],
    tool: str,
    *,
    seconds: float = SECONDS,
    keep: Path | None = None,
    gpu: int | None = None,
) -> str:
    """What one tool says of a program: "clean", "timeout", or its first message in short.

    keep: a folder for the tool's own words. gpu: which one it runs on, if not on the first.
    """
    command = [find_sanitizer(), "--tool", tool, "--target-processes", "application-only", "--launch-timeout", "120"]
    command += ["--max-connections", "256", "--show-backtrace", "no", "--print-limit", "3"]
    if tool == "memcheck":
        command += ["--padding", str(PADDING)]
    command += [str(program), *map(str, numbers)]
    there = None if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=there
    )
    late = False
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)  # the program is a child of the tool, in the session started here
        said, _ = process.communicate()
    if keep is not None:
        (keep / f"{program.name}.{tool}.txt").write_text(said)
    found = read(said)
    return found if not late else TIMEOUT if found == CLEAN or found.startswith(FAILED) else f"{found}; {TIMEOUT}"


_PLACE = r"[^\n]* in (?P<{0}file>[\w.]+):(?P<{0}line>\d+)"
_ACCESS = re.compile(
    r"Invalid __(?P<space>\w+)__ (?P<verb>\w+) of size (?P<bytes>\d+) bytes\n(?:\s+at" + _PLACE.format("") + ")?"
)
_WHY = re.compile(r"\bis (?P<why>misaligned|out of bounds|accessed with a partial warp)|(?P<null>null pointer)")
_RACE = re.compile(
    r"(?P<level>Error|Warning): Race reported between (?P<verb>\w+) access at(?:" + _PLACE.format("") + r")?[^\n]*\n"
    r"\s*and (?P<other>\w+) access at(?:" + _PLACE.format("other") + r")?"
)
_UNWRITTEN = re.compile(
    r"Uninitialized __(?P<space>\w+)__ memory (?P<verb>\w+) of size (?P<bytes>\d+) bytes\n(?:\s+at"
    + _PLACE.format("")
    + ")?"
)
_BARRIER = re.compile(
    r"(?P<what>Barrier|Warpgroup MMA sequence) error detected\. (?P<why>[^\n]*?)\.?\n(?:\s+at"
    + _PLACE.format("")
    + ")?"
)
_CUDA = re.compile(r"\b(?P<error>cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+)\b")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")


def read(said: str) -> str:
    """The first message of a tool's output, in short and without paths: "out of bounds: global read of 16 bytes, line 84".

    "clean" if its summary counts nothing and the program ended well; "failed: …" if the tool itself did not get that far.
    """
    text = re.sub(r"^=+ ?", "", said, flags=re.MULTILINE)
    if found := _ACCESS.search(text):
        why = _WHY.search(text, found.end())
        why = "null pointer" if why and why["null"] else why["why"] if why else "invalid"
        return f"{why}: {found['space']} {found['verb']} of {found['bytes']} bytes{_at(found)}"
    if found := _RACE.search(text):
        places = f"{found['verb'].lower()}{_at(found)} and {found['other'].lower()}{_at(found, 'other')}"
        return f"race{' (warning)' if found['level'] == 'Warning' else ''}: {places}"
    if found := _UNWRITTEN.search(text):
        return f"uninitialised: {found['space']} {found['verb']} of {found['bytes']} bytes{_at(found)}"
    if found := _BARRIER.search(text):
        return f"{found['what'].lower()}: {found['why'].lower()}{_at(found)}"
    if found := _CUDA.search(text):
        return f"CUDA error: {found['error']}"
    summary = _SUMMARY.search(text)
    if summary and int(summary["count"]) == 0:
        return CLEAN
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("COMPUTE-SANITIZER")]
    return f"{FAILED}: {' '.join(lines)[:120]}"


def _at(found: re.Match[str], which: str = "") -> str:
    """ ", line 84" of the kernel's file, or ", math.cuh line 14"."""
    if not found[f"{which}line"]:
        return ""
    header = "" if found[f"{which}file"].endswith(".cu") else f" {found[f'{which}file']}"
    return f",{header} line {found[f'{which}line']}"


def flagged(message: str) -> bool:
    """Whether a tool's message, or the X-ray's, says that something is wrong. That a tool ran out of time, or could not do its
    work, says nothing of the program: each slows it down, racecheck and initcheck most."""
    return message not in (CLEAN, TIMEOUT) and not message.startswith(FAILED)


def flagging(row: dict, of_rung: dict | None = None) -> list[str]:
    """The tools that flag a mutant, of a row of the record: those that say something, and all of them where none has seen
    the program's end. That one hangs, whoever watches.

    of_rung: the row of the rung itself, whose lines have the same numbers. What a tool says of that, too, in the same words,
    is none of the mutant's bug."""
    if all(row[tool] == TIMEOUT for tool in TOOLS):
        return list(TOOLS)
    found = {tool: row[tool].removesuffix(f"; {TIMEOUT}") for tool in TOOLS}
    return [tool for tool in TOOLS if flagged(found[tool]) and not (of_rung and found[tool] == of_rung[tool])]


def look(mutant: Mutant, programs: Path, keep: Path | None = None, gpu: int | None = None) -> dict:
    """A row of the record: the mutant built and run under every tool."""
    row = {"mutant": mutant.id, "stem": mutant.stem, "line": mutant.line, "bug": mutant.bug, "digest": mutant.digest}
    program = build(mutant, programs)
    for tool in TOOLS:
        late = any(TIMEOUT in row.get(t, "") for t in TOOLS)
        for _ in range(2):  # the tool itself may not have got its turn
            seconds = RETRY_SECONDS if late else SECONDS
            row[tool] = sanitize(program, calls(mutant), tool, seconds=seconds, keep=keep, gpu=gpu)
            if not row[tool].startswith(FAILED):
                break
    return row


def chosen(patterns: list[str]) -> list[Mutant]:
    """The rungs themselves and their mutants, or those whose id one of `patterns` ("04.*") matches."""
    everything = [*(original(each.stem) for each in rungs()), *mutants().values()]
    return [m for m in everything if not patterns or any(fnmatch(m.id, pattern) for pattern in patterns)]


def recorded(device: str | None = None) -> pd.DataFrame:
    """The record's rows of mutants that are still the same: COLUMNS. LookupError if there is no record."""
    from .. import record

    frame = record.load("device", "sanitizer", device)
    current = {m.id: m.digest for m in chosen([])}
    fresh = [current.get(id) == digest for id, digest in zip(frame["mutant"], frame["digest"])]
    frame = frame[fresh].reindex(columns=COLUMNS).reset_index(drop=True)
    return frame.astype({"xray": "object"}).fillna({"xray": ""})


def record_on_gpu(
    patterns: list[str], workers: int, seconds: float, programs: Path, keep: Path | None, gpus: int = 1
) -> None:
    """Runs what is not recorded yet, for at most `seconds` in all, and records it. gpus: so many of this machine's, alike."""
    import pandas as pd

    from .. import record

    known = record.conditions()
    try:
        before = recorded(known["device"])
    except LookupError:
        before = pd.DataFrame(columns=COLUMNS)
    before = before[~before[list(TOOLS)].apply(lambda said: said.str.startswith(FAILED)).any(axis=1)]
    wanted = [m for m in chosen(patterns) if m.id not in set(before["mutant"])]
    wanted.sort(key=lambda m: m.digest)  # in any order: what there is no time for is missing everywhere alike
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    build_host(programs)
    start = saved = time.monotonic()
    order = {m.id: n for n, m in enumerate(chosen([]))}
    said = subprocess.run([find_sanitizer(), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"Version ([\d.]+)", said)

    free = SimpleQueue()  # a GPU for each worker
    for worker in range(workers):
        free.put(worker % gpus if gpus > 1 else None)

    def in_time(mutant: Mutant) -> dict | None:
        if time.monotonic() - start >= seconds:
            return None
        gpu = free.get()
        try:
            return look(mutant, programs, keep, gpu)
        finally:
            free.put(gpu)

    def save(rows: list[dict]) -> pd.DataFrame:
        frame = pd.concat([before, pd.DataFrame(rows, columns=COLUMNS)], ignore_index=True)
        frame = frame.sort_values("mutant", key=lambda ids: ids.map(order)).reset_index(drop=True)
        about = {"compute_sanitizer": version[1] if version else said}
        record.save("device", "sanitizer", frame, known=known, extra=about)
        return frame

    def now_and_then(rows: list[dict]) -> None:  # what has been found is kept, however this ends
        nonlocal saved
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(rows)

    rows, wrong = in_parallel(in_time, wanted, workers, now_and_then)
    frame = save(rows)
    failed = [f"{row['mutant']} {t}: {row[t]}" for row in frame.to_dict("records") for t in TOOLS if FAILED in row[t]]
    print(*wrong, *failed, sep="\n")
    took = time.monotonic() - start
    print(f"{len(rows)} of {len(wanted)} run in {took:.0f} s, {len(wrong)} not compiled, {len(frame)} recorded")
    print(*(f"{tool}: {sum(map(flagged, frame[tool]))} flagged" for tool in TOOLS), sep=", ")


def build_all(patterns: list[str], workers: int, programs: Path) -> None:
    """Builds what there is to run, and runs nothing."""
    build_host(programs)
    start = time.monotonic()
    built, wrong = in_parallel(lambda mutant: build(mutant, programs), chosen(patterns), workers)
    print(*wrong, f"{len(built)} programs built in {time.monotonic() - start:.0f} s", sep="\n")


def in_parallel(
    do: Callable, mutants: list[Mutant], workers: int, after_each: Callable[[list], None] = lambda done: None
) -> tuple[list, list[str]]:
    """What `do` gives of each mutant, None left out; and what nvcc said of those that it refused. after_each is called with
    what there is so far."""
    done, wrong = [], []
    _arch(), find_toolkit()  # once, before there are threads
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(do, mutant): mutant for mutant in mutants}
        for future in as_completed(futures):
            try:
                if (result := future.result()) is not None:
                    done.append(result)
                    after_each(done)
            except RuntimeError as error:
                wrong.append(f"{futures[future].id}: {str(error)[:300]}")
    return done, wrong


# The X-ray's side


def xrayed(mutant: Mutant) -> str:
    """What the X-ray says of a mutant at its shapes: "clean", or its first finding in short."""
    from ..run.xray import xray

    kernel = load(source=mutant.source, device="cpu", quiet=True)
    kernel.launcher.timeout = 60
    for inputs in emulator_inputs(kernel, mutant):
        try:
            found = xray(kernel, *inputs, **mutant.options).findings
        except KernelError as error:
            return f"{str(error).splitlines()[0]}"
        if found:
            other = f" and line {found[0].other_line}" if found[0].other_line else ""
            return f"{found[0].kind}, line {found[0].line}{other}"
    return CLEAN


def emulator_inputs(kernel: Kernel, mutant: Mutant) -> list[tuple]:
    """Random inputs for each of the mutant's shapes."""
    from ..run.reference import random_inputs

    options = {"Hkv": mutant.heads[1], "causal": mutant.options.get("causal", False)}
    return [random_inputs(rung(mutant.stem), shape, seed=i, **options) for i, shape in enumerate(_shapes(mutant))]


def record_xray(patterns: list[str], workers: int = 1, missing: bool = False) -> None:
    """Puts what the X-ray says now beside what the tools said on the GPU; it is saved as it goes. missing: only where it has
    said nothing yet."""
    from .. import record

    frame, known = recorded(), record.about("device", "sanitizer")
    rows = {id: row for row, id in enumerate(frame["mutant"]) if not (missing and frame["xray"][row])}
    wanted = [mutant for mutant in chosen(patterns) if mutant.id in rows]
    saved = time.monotonic()
    # Processes, because each has an emulator of its own; started afresh, because torch has threads.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(xrayed, mutant): mutant.id for mutant in wanted}
        for future in as_completed(futures):
            id = futures[future]
            frame.loc[rows[id], "xray"] = future.result()
            print(f"{id}: {frame['xray'][rows[id]]}", flush=True)
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                record.save("device", "sanitizer", frame, known=known)
    record.save("device", "sanitizer", frame, known=known)


def agreement(device: str | None = None) -> pd.DataFrame:
    """Who flags which mutant or rung, of those that both have looked at: columns mutant, stem, line, bug, gpu (the tools that
    do), xray (what it says), who ("both", "neither", "X-ray alone", "GPU alone") and why, for those that one alone flags."""
    import pandas as pd

    frame = recorded(device)
    rows = {row["mutant"]: row for row in frame.to_dict("records")}
    rung_of = {id: rows.get(f"{id[:2]}.original") for id in rows if not id.endswith(".original")}
    frame = frame[frame["xray"] != ""].reset_index(drop=True)
    tools = [" ".join(flagging(rows[id], rung_of.get(id))) for id in frame["mutant"]]
    seen = [flagged(message) for message in frame["xray"]]
    names = {(True, True): "both", (False, False): "neither", (False, True): "X-ray alone", (True, False): "GPU alone"}
    who = [names[bool(gpu), ours] for gpu, ours in zip(tools, seen)]
    why = [explain(row.mutant, row.xray, who) if " " in who else "" for row, who in zip(frame.itertuples(), who)]
    columns = {"gpu": tools, "xray": frame["xray"], "who": who, "why": why}
    return pd.concat([frame[["mutant", "stem", "line", "bug"]], pd.DataFrame(columns)], axis=1)


ASYNC = (
    "one of the two accesses is TMA's or wgmma's, made after their instruction: racecheck follows what cp.async.bulk writes, which "
    "it flags elsewhere in 33, but no tensor's copy and nothing that either of them reads"
)
GLOBAL = "a race in global memory: racecheck looks at shared memory alone"
RETURNED = (
    "threads that have returned no longer count at a barrier (since Volta), so that the GPU and its tools go on; the X-ray asks "
    "for every thread of the block, as the source reads"
)
LATE = "synccheck, whose matter it is, ran out of time, which says nothing"
ENDED = "three tools run out of time, which counts if all four do: under memcheck the program ended"
REGISTERS = "past an array in registers: nvcc has unrolled the loop, and no memory is touched"
# (id, what the X-ray says, who, why), patterns as of file names: the first that fits explains why one side alone speaks.
EXPLANATIONS = [
    ("*", "uninitialised shared memory*", "X-ray alone", "no tool of compute-sanitizer knows what of shared memory has been written"),
    ("02.barrier-*.2", "race*", "X-ray alone", GLOBAL),
    ("02.thread-index.[89]", "race*", "X-ray alone", GLOBAL),
    ("21.bound-off-by-one.2", "race*", "X-ray alone", GLOBAL),
    ("23.thread-index.1[16]", "race*", "X-ray alone", GLOBAL),
    ("33.thread-index.20", "race*", "X-ray alone", GLOBAL),
    ("*-returns.*", "divergent barrier*", "X-ray alone", RETURNED),
    ("02.barrier-in-a-branch.2", "divergent barrier*", "X-ray alone", RETURNED),
    ("21.barrier-in-a-branch.3", "divergent barrier*", "X-ray alone", RETURNED),
    ("*.shuffle-of-half.*", "mask*", "X-ray alone", "no tool of compute-sanitizer looks at a shuffle's mask"),
    ("0[12].shuffle-of-half.*", "shuffle*", "X-ray alone", "no tool of compute-sanitizer looks at a shuffle's mask"),
    ("33.syncwarp-of-half.1", "mask*", "X-ray alone", LATE),
    ("*.barrier-without-a-lane.1", "deadlock*", "X-ray alone", ENDED),
    ("[23]0.grid.1", "division by zero*", "X-ray alone", "an integer division by zero doesn't stop a GPU: the block goes on with some number, and touches nothing it "
     "shouldn't"),
    ("22.bound-*.[56]", "out of bounds*", "X-ray alone", REGISTERS),
    ("22.bound-too-wide.4", "local array overrun*", "X-ray alone", REGISTERS),
    ("2[02].thread-index.[29]", "out of bounds*", "X-ray alone", "what a block is to do is never written to shared memory, which no tool of compute-sanitizer knows; what a GPU has "
     "there leads to no wrong access"),
    ("21.thread-index.4", "out of bounds*", "X-ray alone", "one row past an array in shared memory: memcheck knows where a block's shared memory ends, not "
     "where an array in it does"),
    ("23.thread-index.14", "out of bounds*", "X-ray alone", "the last thread reads past the workspace, for a row that dQ doesn't have: nvcc reads only where the row exists"),
    ("3?.barrier-*.1", "race*", "X-ray alone", "the place of an mbarrier, used before it is initialised: no tool of compute-sanitizer looks there"),
    ("3?.*", "proxy fence*", "X-ray alone", "no tool of compute-sanitizer asks for the fence between ordinary accesses and those of TMA and wgmma"),
    ("3?.wgmma-wait-removed.*", "in flight*", "X-ray alone", "the accumulators of a product under way are used: those are registers, at which no tool of compute-sanitizer "
     "looks"),
    ("3?.*", "in flight*", "X-ray alone", ASYNC),
    ("3?.*", "overwritten*", "X-ray alone", ASYNC),
    ("3?.*", "bulk copy*", "X-ray alone", "a block ends and has not waited for its copies: no tool of compute-sanitizer asks for that"),
    ("33.named-barrier-removed.*", "race*", "X-ray alone", ASYNC),
    ("02.every-lane-writes", CLEAN, "GPU alone", "the lanes write one sum, and writes of one value are no race to either side; but nvcc makes an FMA of the sum's products, which "
     "rounds one of them and not the other, so that on the GPU the lanes' sums differ in their last digit"),
    ("33.original", CLEAN, "GPU alone", "not a bug: where heads share K and V, add_heads reads from the workspace what backward_wgmma sent there by TMA, and "
     "initcheck doesn't see TMA's writes. It knows cp.async.bulk since 2025.4, say its release notes; recorded was 2025.3.1"),
]  # fmt: skip


def explain(id: str, xray: str, who: str) -> str:
    """Why only the GPU's tools, or only the X-ray, flag a mutant; empty if nobody has said."""
    fits = (why for *two, side, why in EXPLANATIONS if side == who and all(map(fnmatch, (id, xray), two)))
    return next(fits, "")
