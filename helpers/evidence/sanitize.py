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
from ..toolchain.cores import cores
from ..toolchain.toolkit import architecture, find_toolkit, gencode
from . import verdicts
from .disagreements import RETURNED, explain
from .mutants import Mutant, mutants, original
from .sanitizer_words import CLEAN, FAILED, TIMEOUT, TOOLS, flagged, flagging, read

if TYPE_CHECKING:
    import pandas as pd

SECONDS = 15  # for one program under one tool; a clean one takes a few
WORKERS = 8  # programs at a time: more only wait for the driver, which starts some three a second whatever the GPUs
SAVE_SECONDS = 10  # between two writings of the record
RETRY_SECONDS = 5  # once it has run out of time under another tool
PADDING = 1 << 16  # bytes that no tensor owns behind each allocation, as between tensors of the emulator
COLUMNS = ["mutant", "stem", "line", "bug", "digest", *TOOLS, "xray"]  # data/README.md has what they are
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
HOST = Path(__file__).with_name("calls.cpp")


def find_sanitizer() -> str:
    """Path of `compute-sanitizer`. Raises FileNotFoundError with the fix if it is not installed."""
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
    for B, H, Nq, Nk, D in mutant.calls:
        Hkv = 1 if about.op == "softmax" else mutant.heads[1]
        args = FaBackwardArgs(B=B, H=H, Hkv=Hkv, Nq=Nq, Nk=Nk, D=D, splits=splits)
        workspace = [4 * math.prod(shape) for shape in workspace_shapes(about, args).values()]
        numbers += [("attention", "softmax", "attention_backward").index(about.op), list(TORCH_NAMES).index(dtype)]
        numbers += [B, H, Hkv, Nq, Nk, D, ITEMSIZE[dtype], int(causal), splits]
        numbers += workspace + [0] * (4 - len(workspace))
    return numbers


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


def _code_for(mutant: Mutant) -> list[str]:
    """nvcc's flags for this GPU; without one, for the rung's architecture, with PTX that later ones can compile."""
    if arch := _arch():
        return [gencode(arch)]
    arch = rung(mutant.stem).arch
    return [gencode(arch), gencode(arch).replace("code=sm_", "code=compute_")]


def build(mutant: Mutant, folder: Path) -> Path:
    """The mutant as a program in `folder`, if it isn't there yet. RuntimeError with nvcc's words if it can't be compiled."""
    nvcc = find_toolkit().nvcc
    program = folder / mutant.digest
    if program.exists():
        return program
    source = folder / f"{mutant.digest}.sources" / f"{mutant.stem}.cu"
    source.parent.mkdir(exist_ok=True)
    source.write_text(mutant.source)
    command = [nvcc, "-std=c++17", "-lineinfo", *_code_for(mutant), f"-I{INCLUDE}", source, build_host(folder)]
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
    """The rungs themselves and their mutants, or those whose id one of `patterns` ("04.*") matches. ValueError for a pattern that
    matches none."""
    everything = [*(original(each.stem) for each in rungs()), *mutants().values()]
    for pattern in patterns:
        if not any(fnmatch(m.id, pattern) for m in everything):
            raise ValueError(f"no mutant {pattern!r}; ids read like 04.original or 04.*")
    return [m for m in everything if not patterns or any(fnmatch(m.id, pattern) for pattern in patterns)]


def recorded(device: str | None = None) -> pd.DataFrame:
    """The rows of mutants that are still the same: COLUMNS. Of one device, or of all: what a tool says of a program doesn't depend
    on the card. LookupError if there is no record."""
    import pandas as pd

    from .. import record

    if device is None:
        return pd.concat(map(recorded, _devices())).drop_duplicates("mutant", ignore_index=True)
    frame = record.load("device", "sanitizer", device)
    current = {m.id: m.digest for m in chosen([])}
    fresh = [current.get(id) == digest for id, digest in zip(frame["mutant"], frame["digest"])]
    frame = frame[fresh].reindex(columns=COLUMNS).reset_index(drop=True)
    return frame.astype({"xray": "object"}).fillna({"xray": ""})


def _devices() -> list[str]:
    """The folders of data/ with a record. LookupError if there is none."""
    from .. import record

    if not (found := sorted(path.parent.name for path in record.DATA.glob("*/device.sanitizer.csv"))):
        record.load("device", "sanitizer")  # says what is missing
    return found


class _Record:
    """The record of this machine's GPU while it grows: what was in it before, and rows to be added. What is recorded as
    failed is left out, to be run again. LookupError from record.conditions() without a GPU."""

    def __init__(self) -> None:
        import pandas as pd

        from .. import record

        self.known = record.conditions()
        try:
            before = recorded(self.known["device"])
        except LookupError:
            before = pd.DataFrame(columns=COLUMNS)
        self.before = before[~before[list(TOOLS)].apply(lambda said: said.str.startswith(FAILED)).any(axis=1)]
        said = subprocess.run([find_sanitizer(), "--version"], capture_output=True, text=True).stdout
        version = re.search(r"Version ([\d.]+)", said)
        self.about = {"compute_sanitizer": version[1] if version else said}
        self.order = {m.id: n for n, m in enumerate(chosen([]))}
        self.saved = time.monotonic()

    def save(self, rows: list[dict]) -> pd.DataFrame:
        """Writes what was there and `rows`, in the order of the rungs, and gives it back."""
        import pandas as pd

        from .. import record

        self.saved = time.monotonic()
        frame = pd.concat([self.before, pd.DataFrame(rows, columns=COLUMNS)], ignore_index=True)
        frame = frame.sort_values("mutant", key=lambda ids: ids.map(self.order)).reset_index(drop=True)
        record.save("device", "sanitizer", frame, known=self.known, extra=self.about)
        return frame

    def now_and_then(self, rows: list[dict]) -> None:
        """Saves every SAVE_SECONDS: what has been found is kept, however the run ends."""
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save(rows)


def record_on_gpu(
    patterns: list[str], workers: int, seconds: float, programs: Path, keep: Path | None, gpus: int = 1
) -> None:
    """Runs what is not recorded yet, for at most `seconds` in all, and records it. gpus: so many of this machine's, alike."""
    mutants = chosen(patterns)
    kept = _Record()
    wanted = [m for m in mutants if m.id not in set(kept.before["mutant"])]
    wanted.sort(key=lambda m: m.digest)  # in any order: what there is no time for is missing everywhere alike
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    build_host(programs)
    start = time.monotonic()
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

    rows, wrong = in_parallel(in_time, wanted, workers, kept.now_and_then)
    frame = kept.save(rows)
    failed = [f"{row['mutant']} {t}: {row[t]}" for row in frame.to_dict("records") for t in TOOLS if FAILED in row[t]]
    print(*wrong, *failed, sep="\n")
    took = time.monotonic() - start
    print(f"{len(rows)} of {len(wanted)} run in {took:.0f} s, {len(wrong)} not compiled, {len(frame)} recorded")
    print(*(f"{tool}: {sum(map(flagged, frame[tool]))} flagged" for tool in TOOLS), sep=", ")


def build_all(patterns: list[str], workers: int | None, programs: Path) -> None:
    """Builds what there is to run, `workers` at a time (by default as many as there are cores), and runs nothing."""
    wanted = chosen(patterns)
    build_host(programs)
    start = time.monotonic()
    built, wrong = in_parallel(lambda mutant: build(mutant, programs), wanted, workers or cores())
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
    try:
        found = verdicts.findings(mutant)
    except KernelError as error:
        return f"{str(error).splitlines()[0]}"
    if not found:
        return CLEAN
    kind, line, other_line = found[0]
    return f"{kind}, line {line}" + (f" and line {other_line}" if other_line else "")


def record_xray(patterns: list[str], workers: int | None = None, missing: bool = False) -> None:
    """Puts what the X-ray says now beside what the tools said on the GPU; it is saved as it goes. workers: how many at a time,
    by default as many as there are cores. missing: only where it has said nothing yet."""
    for device in _devices():
        _record_xray(device, patterns, workers, missing)


def _record_xray(device: str, patterns: list[str], workers: int | None, missing: bool) -> None:
    from .. import record

    frame, known = recorded(device), record.about("device", "sanitizer", device)
    rows = {id: row for row, id in enumerate(frame["mutant"]) if not (missing and frame["xray"][row])}
    wanted = [mutant for mutant in chosen(patterns) if mutant.id in rows]
    saved = time.monotonic()
    # Processes, because each has an emulator of its own; started afresh, because torch has threads.
    with ProcessPoolExecutor(workers or cores(), get_context("spawn")) as pool:
        futures = {pool.submit(xrayed, mutant): mutant.id for mutant in wanted}
        for future in as_completed(futures):
            id = futures[future]
            frame.loc[rows[id], "xray"] = future.result()
            print(f"{id}: {frame['xray'][rows[id]]}", flush=True)
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                record.save("device", "sanitizer", frame, known=known)
    record.save("device", "sanitizer", frame, known=known)


def compared() -> pd.DataFrame:
    """Who flags which mutant or rung, of those that both have looked at: columns mutant, stem, line, bug, gpu (the tools that
    do), xray (what it says), who ("both", "neither", "X-ray alone", "GPU alone") and why, for those that one alone flags."""
    import pandas as pd

    frame = recorded()
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


def by_rule(compared: pd.DataFrame) -> pd.DataFrame:
    """`compared()` with `who` "X-ray's stricter rule" where the X-ray alone flags that threads have returned before a barrier, which
    no GPU since Volta minds: a barrier waits for the threads of the block that have not exited."""
    return compared.assign(who=compared["who"].mask(compared["why"] == RETURNED, "X-ray's stricter rule"))
