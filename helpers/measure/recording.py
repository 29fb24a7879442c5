"""The record of a rung: its timings, its error against float64, its memory and how long it takes to build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from .. import record
from ..ladder.paths import ROOT
from ..ladder.rung import Rung, Which, rung, rungs, stages
from ..record import FLASH, SHAPE
from ..run.check import check, compare
from ..run.kernel import Kernel, load
from ..toolchain.cores import cores
from . import bench, by_family, layouts, one_sequence, workloads

BUILD = """
import sys, time
from helpers import load
from helpers import rung
import torch
stem, device = sys.argv[1:]
torch.zeros(1, device=device)
start = time.perf_counter()
import pandas, torch.utils.cpp_extension
print("import", time.perf_counter() - start)
source = rung(stem).source
edited = source.replace("fa_launch(", "fa_launch(/* an edit */ ")
for phase, text in (("cold", source), ("edit", edited), ("unchanged", edited), ("reverted", source)):
    start = time.perf_counter()
    load(source=text, device=device, quiet=True)
    print(phase, time.perf_counter() - start, flush=True)
"""


def record_rung(which: Which) -> None:
    """Checks a rung, then measures and records it and its peers; prints what it wrote and how it stands to its goals.

    AssertionError if the rung is wrong: a wrong kernel has no speed.
    """
    kernel = right(which)
    rung = kernel.rung
    for kind, frame, seen in timings(kernel):  # saved at once: what has been measured is kept, however the rest ends
        _wrote(record.save(rung.stem, kind, frame, extra=seen))
        show(kind, frame, rung.stem)
    _held_against_goals(rung.stem)
    _wrote(record.save(rung.stem, "error", errors(kernel, rung.op, dtypes=rung.dtypes)))
    if rung.op == "attention" and "forward" in record.kinds(rung):
        _wrote(record.save(rung.stem, "memory", memories(kernel, rung.stem, dtypes=rung.dtypes)))
    record_builds(rung.stem)


def record_builds(which: Which) -> None:
    """Measures and records how long a load of a rung takes; prints what it wrote and the seconds after an edit.

    How many cores compile is kept beside it: instances are compiled apart where there are enough.
    """
    found = rung(which)
    frame = builds(str(found.path))
    _wrote(record.save(found.stem, "build", frame, extra={"cores": cores()}))
    edits = frame.loc[frame["phase"] == "edit", "seconds"]
    print(f"  {found.stem}: an edit takes {', '.join(f'{seconds:.2f}' for seconds in edits)} s", flush=True)


def record_families(which: Which) -> None:
    """Checks a rung, then measures and records its speed and its error by family of inputs, beside the rung before it and the fast peers.

    AssertionError if the rung is wrong.
    """
    kernel = right(which)
    rung = kernel.rung
    own = by_family.kernels(kernel, rung)
    before = {"before": [stem for stem in own if stem != rung.stem]}
    with bench.watch() as seen:
        frame = by_family.timings(own, rung)
    extra = before | _versions(frame)
    _wrote(record.save(rung.stem, "families", frame, extra=seen | extra))
    print(record.spread(frame, rung.stem).round(3).to_string(index=False), flush=True)
    _wrote(record.save(rung.stem, "accuracy", by_family.errors(own, rung), extra=extra))


def record_layouts(which: Which) -> None:
    """Checks a rung, then measures and records it beside the fast peers in every layout, and prints how it stands to its goals.

    AssertionError if the rung is wrong.
    """
    _held_against_goals(_beside_peers(which, "layouts", layouts.timings))


def record_one_sequence(which: Which) -> None:
    """Checks a rung, then measures and records it beside the fast peers on one sequence of few heads.

    AssertionError if the rung is wrong.
    """
    _beside_peers(which, "one_sequence", one_sequence.timings)


def _beside_peers(which: Which, kind: str, measured: Callable[[Kernel, Rung], pd.DataFrame]) -> str:
    """Checks a rung and records the samples that `measured` takes of it as this kind. Returns its stem."""
    kernel = right(which)
    with bench.watch() as seen:
        frame = measured(kernel, kernel.rung)
    _wrote(record.save(kernel.rung.stem, kind, frame, extra=seen | _versions(frame)))
    return kernel.rung.stem


def record_stages(which: Which) -> None:
    """Checks the stages of a rung, then measures and records them beside the rung, the one before it and SDPA FLASH.

    ValueError for a rung without stages, AssertionError if one of them is wrong.
    """
    last = rung(which)
    if not (between := stages(last)):
        raise ValueError(f"{last.stem} has no stages in kernels/stages/")
    before = [r for r in rungs() if r.op == last.op and r.number < last.number][-1]
    chain = [before, *between, last]
    own = {r.stem: right(r) for r in chain}
    with bench.watch() as seen:
        frame = workloads.stages(own, last)
    extra = {"op": last.op} | seen | _versions(frame)
    _wrote(record.save(last.stem, "stages", frame, rungs=list(own), extra=extra))
    for stem in own:
        print(record.summary(frame, stem, FLASH).round(3).assign(stage=stem).to_string(index=False), flush=True)


TRACED = (8, 16, 2048, 64)  # B, H, N, D of a timeline: some 2,000 CTAs, so that every SM is full


def record_timeline(which: Which) -> None:
    """Checks a rung, then records when the warps of one of its CTAs copy, wait and compute (`timeline.times`), in fp16.

    AssertionError if the rung is wrong.
    """
    from . import timeline

    kernel = right(which)
    B, H, N, D = TRACED
    q, k, v = workloads.random_tensors("fp16", (B, H, N, D), 3)
    frame = timeline.times(kernel.rung.stem, q, k, v)
    extra = {"shape": f"B = {B}, H = {H}, N = {N}, D = {D}, fp16", "unit": "SM clocks"}
    _wrote(record.save(kernel.rung.stem, "timeline", frame, extra=extra))


def _held_against_goals(stem: str) -> None:
    """Prints how the rung stands to its goals on this card: nothing on one that has none."""
    from ..record import goals

    device = record.slug(record.this_device() or "")
    if device in record.DEVICES and len(verdicts := goals.verdicts([stem], device=device)):
        print(verdicts.to_string(index=False), flush=True)


def time_quickly(which: Which) -> None:
    """Checks a kernel, times it at a few shapes beside its peers and prints the ratios; records nothing.

    AssertionError if the kernel is wrong.
    """
    kernel = right(which)
    for kind, frame, _ in timings(kernel, quick=True):
        for line in frame.attrs.get("skipped", ()):
            print(f"  skipped: {line}", flush=True)
        show(kind, frame, kernel.rung.stem)


def right(which: Which) -> Kernel:
    """The kernel, loaded for the GPU and checked on the small cases. AssertionError if it is wrong."""
    from ..run import reference

    kernel = load(which, device=bench.DEVICE, quiet=True)
    print(check(kernel, reference.cases(kernel.rung, bench.DEVICE, "small")).require(), flush=True)
    return kernel


def timings(kernel: Kernel, quick: bool = False) -> Iterator[tuple[str, pd.DataFrame, dict]]:
    """Each kind of timing that the kernel's rung calls for: the kind, the samples, and clocks and power seen meanwhile with the
    versions of the peers."""
    for kind in record.kinds(kernel.rung):
        with bench.watch() as seen:
            frame = workloads.samples(kind, kernel, kernel.rung, quick)
        yield kind, frame, seen | _versions(frame)


def _versions(frame: pd.DataFrame) -> dict:
    """Of samples, what a record says of its peers' versions: nothing, where all are PyTorch's."""
    found = bench.versions(frame["name"].unique()) if "name" in frame else {}
    return {"peers": found} if found else {}


def show(kind: str, frame: pd.DataFrame, stem: str) -> None:
    """Prints what the samples of one kind say: bandwidths of a decode step, else the ratio to a peer."""
    if kind == "decode":
        print(record.bandwidths(frame).query("chosen == 1").round(3).to_string(index=False), flush=True)
        return
    names = set(frame["name"]) if "name" in frame else set()
    if {stem, FLASH} <= names:
        print(kind, record.summary(frame, stem, FLASH).round(3).to_string(index=False), flush=True)


def _wrote(path: os.PathLike) -> None:
    print("  wrote", os.path.basename(path), flush=True)


def errors(
    kernel: Callable,
    op: str,
    lengths: Sequence[int] = tuple(256 << i for i in range(9)),
    dtypes: Sequence[str] = ("fp32",),
) -> pd.DataFrame:
    """Error, PyTorch's error at the same precision and the budget against N, for each dtype: two heads of Nq = 256
    queries over N keys (softmax: 64 rows; backward: N up to 16384, the reference forms S whole)."""
    from ..run.reference import DTYPES, Case

    rows, back = [], op == "attention_backward"
    for dtype, D in ((t, d) for t in dtypes for d in ((1,) if op == "softmax" else (64, 128))):
        for n in (n for n in lengths if not back or n <= 16384):
            make = bench.random_numbers(n)
            sizes = [(64, n)] if op == "softmax" else [(1, 2, 256, D), (1, 2, n, D), (1, 2, n, D)]
            x = [make(*size).to(DTYPES[dtype]) for size in (*sizes, *(sizes[:1] if back else ()))]
            case = Case(f"N={n}", s=x[0]) if op == "softmax" else Case(f"N={n}", *x[:3], do=x[3] if back else None)
            for c in compare(case, kernel(*case.inputs)):
                rows.append((dtype, sizes[0][-2], n, D, c.output, c.error, c.pytorch_error, c.budget))
    return pd.DataFrame(rows, columns=["dtype", "Nq", "Nk", "D", "output", "error", "pytorch_error", "budget"])


def memories(
    kernel: Callable,
    stem: str,
    lengths: Sequence[int] = tuple(512 << i for i in range(8)),
    dtypes: Sequence[str] = ("fp32",),
) -> pd.DataFrame:
    """Peak memory of the kernel and its peers for one head of D = 64, for each dtype; none of what runs out of memory."""
    rows = []
    for dtype, n in ((t, n) for t in dtypes for n in lengths):
        shape = (1, 1, n, n, 64)
        inputs = workloads.random_tensors(dtype, (1, 1, n, 64), 3)
        others = bench.attentions().items()
        taken = {name: call for name, call in others if bench.refusal(call, *inputs) in (None, bench.OUT_OF_MEMORY)}
        for name, call in ({stem: kernel} | taken).items():
            rows.append((name, dtype, *shape, bench.memory(call, inputs)))
    return pd.DataFrame(rows, columns=["name", "dtype", *SHAPE, "bytes"]).astype({"bytes": "Int64"})


def builds(which: str, times: int = 3) -> pd.DataFrame:
    """Of the rung `which` (a stem or a path), the seconds of a load in a new process with an empty cache: cold, after an edit,
    unchanged, reverted; and of the imports before the first load, paid once (phase import)."""
    rows = []
    for i in range(times):
        cache = tempfile.mkdtemp(prefix="fa-bench-")
        try:
            done = subprocess.run(
                [sys.executable, "-c", BUILD, which, bench.DEVICE],
                check=False,
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | {"FA_CACHE": cache},
            )
            if done.returncode:
                raise RuntimeError(f"building {which} failed: {done.stderr.strip()[-800:]}")
        finally:
            shutil.rmtree(cache, ignore_errors=True)
        rows += [(phase, i, float(s)) for phase, s in (line.split() for line in done.stdout.splitlines()[-5:])]
    return pd.DataFrame(rows, columns=["phase", "round", "seconds"])
