"""Is a reader's kernel right, and what does it cost? Runs on inputs drawn from a seed, in two halves that know nothing of each other.

`observe` runs a kernel, traced, and gives what came out; it knows no answers, and may run where the reader's code can do no harm.
`judge` compares that with float64 and with what the rung itself costs on the same inputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..emulator.launcher import Launcher
from ..emulator.trace import Access
from ..ladder.contract import prepare
from ..ladder.errors import CompileError, KernelError
from ..ladder.rung import Rung
from ..ladder.rung import rung as find
from ..run import merging
from ..run.check import bits, compare
from ..run.reference import Case
from . import handed
from .inputs import draw, instance

Item = TypeVar("Item")
SECONDS = 120.0  # a run may take, on the emulator
REORDERED = (
    "one tile",
    "a ragged",
    "many tiles",
    "several warps",
    "in place",
)  # cases that are run in other orders of threads, too
# Cases in which threads do what they do in another one, with other numbers or strides: run, but not traced, which takes a tenth.
UNTRACED = (
    "several tiles",
    "scores that fall",
    "one key",
    "a negative",
    "very large",
    "scores about",
    "strided",
    "few keys",
    "keys of -inf",
)
ANOTHER = 1  # order of threads for a case that asks for the same bits every time, where none is drawn
MOST_FINDINGS = 20
# The tensors that a call is given; others are a workspace.
GIVEN = frozenset("Q K V O dO LSE dQ dK dV O_a LSE_a O_b LSE_b".split())
NEAR = 1.02  # as costly as the rung
TIMES = 2  # the error allowed, in budgets of `check`: nobody has looked at these inputs, and the rungs use up to 1.3 on some


@dataclass(frozen=True)
class Run:
    """What one launch gave: outputs, or why there are none; findings in words; requests of memory. Wavefronts are counted, and races
    and uninitialized reads found, where it was traced."""

    case: int
    schedule: int
    outputs: tuple[Tensor, ...] | None
    error: str = ""
    findings: tuple[str, ...] = ()
    wavefronts: int = 0
    ideal: int = 0  # wavefronts without bank conflicts
    bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # tensor -> read, written by threads
    sizes: dict[str, int] = field(default_factory=dict)  # tensor -> its bytes


@dataclass(frozen=True)
class Job:
    """One launch to make: inputs and options of a call, outputs to write into, the order of threads, and whether to trace it.
    in_place: of a merge that writes into copies of its first inputs, as `merging.over` makes them."""

    case: int
    schedule: int
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    outputs: tuple[Tensor, ...]
    traced: bool = True
    in_place: bool = False


@dataclass(frozen=True)
class Costs:
    """Summed over the cases in the threads' own order. sizes: of the tensors, in bytes, where `one` has measured them."""

    wavefronts: int
    ideal: int
    bytes: dict[str, tuple[int, int]]
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts have added."""
        return self.wavefronts - self.ideal

    @property
    def traffic(self) -> int:
        """Bytes read and written in global memory."""
        return sum(read + written for read, written in self.bytes.values())

    @property
    def keys(self) -> int:
        """Bytes of K and V that are read."""
        return sum(self.bytes[name][0] for name in "KV" if name in self.bytes)


@dataclass(frozen=True)
class Judgement:
    """`cases`: name and, where it is wrong, why. findings: races and the like in words, each once. idle: tensors that the rung's
    threads read or write and the reader's don't."""

    cases: tuple[tuple[str, str], ...]
    findings: tuple[str, ...]
    costs: Costs
    rungs: Costs
    idle: tuple[str, ...] = ()

    @property
    def right(self) -> int:
        """How many cases are right."""
        return sum(not why for _, why in self.cases)

    @property
    def correct(self) -> bool:
        """All cases are right, and the kernel's threads have read and written the tensors."""
        return self.right == len(self.cases) and not self.idle

    @property
    def wrong(self) -> str:
        """The first case that is wrong and why, or else the first finding; empty if there is neither."""
        return next((f"{name}: {why}" for name, why in self.cases if why), "".join(self.findings[:1]))

    @property
    def ok(self) -> bool:
        """Right, and nothing was found."""
        return self.correct and not self.findings


def jobs(cases: Sequence[Case], schedules: Sequence[int] = (0,)) -> list[Job]:
    """The launches of some cases: every case in the threads' own order, those of REORDERED in the others, too, and deterministic ones in
    ANOTHER.

    Other orders are not traced: a race is one in every order, and here it is outputs that may differ.
    """
    made = []
    for n, case in enumerate(cases):
        more = [ANOTHER] * getattr(case, "deterministic", False)
        for schedule in schedules if case.name.startswith(REORDERED) else [schedules[0], *more]:
            traced = schedule == schedules[0] and not case.name.startswith(UNTRACED)
            in_place = getattr(case, "in_place", False)
            made.append(Job(n, schedule, case.inputs, case.options, case.empty_outputs(), traced, in_place))
    return made


def observe(rung: Rung, work: Iterable[Job], seconds: float = SECONDS) -> Iterable[Run]:
    """Runs a rung on the emulator and gives one Run per job, up to one that takes longer than `seconds`; nothing that a kernel does raises.

    Raises CompileError; ToolkitError where there is no compiler.
    """
    launcher = Launcher(rung, together=True)
    launcher.timeout = seconds
    launcher.compile_traced()
    for job in until_stopped(work, seconds):
        yield one(launcher, job)


def until_stopped(work: Iterable[Item], seconds: float = SECONDS) -> Iterator[Item]:
    """Items of work, but none behind one that took longer than `seconds`: its launch was stopped, and others would take as long."""
    for item in work:
        start = time.monotonic()
        yield item
        if time.monotonic() - start > seconds:
            return


def one(launcher: Launcher, job: Job) -> Run:
    """One launch; those that are traced and those that aren't run the same build."""
    launcher.schedule = job.schedule
    inputs, outputs = merging.over(*job.inputs) if job.in_place else (job.inputs, job.outputs)
    kept = inputs[len(outputs) :] if job.in_place else inputs
    before = [x.clone() for x in kept]
    accesses: tuple[Access, ...] = ()
    findings: tuple[str, ...] = ()
    try:
        call = prepare(launcher._rung, "cpu", inputs, out=outputs, **job.options)
        if job.traced:
            trace = launcher.trace(call)
            accesses, findings = trace.accesses, tuple(str(each) for each in trace.findings[:MOST_FINDINGS])
            if any(each.error for each in trace.findings):
                return Run(job.case, job.schedule, None, findings[0], findings)
        else:
            launcher.share_build()
            launcher.launch(call)
    except (KernelError, ValueError) as error:
        return Run(job.case, job.schedule, None, f"{error}")
    if not all(torch.equal(bits(x), bits(y)) for x, y in zip(kept, before)):
        return Run(job.case, job.schedule, None, "changed its inputs", findings)
    shared = [a for a in accesses if a.space == "shared"]
    moved, sizes = ({name: of[name] for name in call.tensors} for of in (launcher.counters, launcher.sizes))
    wavefronts, ideal = sum(a.cost for a in shared), sum(a.ideal for a in shared)
    return Run(job.case, job.schedule, call.results, "", findings, wavefronts, ideal, moved, sizes)


def judge(cases: Sequence[Case], runs: Iterable[Run], expected: int, rungs: Costs) -> Judgement:
    """Compares runs with float64. expected: how many runs there should be; those that are missing are wrong."""
    why: dict[int, str] = {}
    findings: dict[str, None] = {}
    first: dict[int, tuple[Tensor, ...]] = {}  # outputs of deterministic cases
    seen, total = [], []
    for run in runs:
        seen.append(run.case)
        findings |= dict.fromkeys(run.findings)
        if run.error:
            why.setdefault(run.case, run.error)
            continue
        bad = [c for c in compare(cases[run.case], run.outputs) if c.problem or c.used > TIMES]
        if bad:
            order = "" if run.schedule == 0 else f" with threads in another order ({run.schedule})"
            cause = "".join(f"; {finding.splitlines()[0]}" for finding in run.findings[:1])
            size, *where = bad[0].explain().removeprefix(f"{bad[0].case}: ").splitlines()
            why.setdefault(run.case, "\n".join([size + order + cause, *where]))
        elif getattr(cases[run.case], "deterministic", False):
            every = zip(("dQ", "dK", "dV"), first.setdefault(run.case, run.outputs), run.outputs)
            others = [name for name, x, y in every if not torch.equal(bits(x), bits(y))]
            why |= {run.case: f"with threads in another order {others[0]} has other bits"} if others else {}
        if run.schedule == 0:
            total.append(run)
    if len(seen) < expected:
        missing = [n for n in range(len(cases)) if n not in seen] or [len(cases) - 1]
        why |= {n: "not run, as the kernel had been stopped" for n in missing if n not in why}
    costs = sum_of(total)
    named = tuple((case.name, why.get(n, "")) for n, case in enumerate(cases))
    idle = () if why else tuple(name for name in rungs.bytes if _idle(costs, rungs, name))
    return Judgement(named, tuple(findings), costs, rungs, idle)


def _idle(costs: Costs, rungs: Costs, name: str) -> bool:
    """Whether threads leave alone what the rung's threads read or write: then somebody else has done the work. Once is enough where the
    rung does it many times; O and LSE of a backward pass are left out, as they can be formed again from the others. Threads that touch
    everything have not done it for sure: the host may copy its own result over theirs (`grading/allowed.py`)."""
    mine, own = costs.bytes.get(name, (0, 0)), rungs.bytes[name]
    once = rungs.sizes.get(name, max(own))
    spared = name in ("O", "LSE") and own[1] == 0
    return (
        name in GIVEN
        and not spared
        and any(8 * here < min(theirs, once) for here, theirs in zip(mine, own) if theirs == max(own))
    )


def wasted(mine: Costs, rungs: Costs) -> tuple[str, str]:
    """What a lean task forbids, in words, of shared and of global memory: more bank conflicts than the rung has, and more of K and V
    than it reads. Empty where there is none."""
    conflicts = f"{mine.conflicts:,} bank conflicts, the rung has {rungs.conflicts:,}"
    keys = f"{mine.keys:,} bytes of K and V are read, the rung reads {rungs.keys:,}"
    return conflicts * (mine.conflicts > NEAR * rungs.conflicts), keys * (mine.keys > rungs.keys)


def sum_of(runs: Iterable[Run]) -> Costs:
    """The costs of several runs together."""
    moved: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    wavefronts = ideal = 0
    for run in runs:
        wavefronts, ideal = wavefronts + run.wavefronts, ideal + run.ideal
        for name, (read, written) in run.bytes.items():
            both = moved.setdefault(name, [0, 0])
            both[0], both[1] = both[0] + read, both[1] + written
        for name, size in run.sizes.items():
            sizes[name] = sizes.get(name, 0) + size
    return Costs(wavefronts, ideal, {name: (read, written) for name, (read, written) in moved.items()}, sizes)


def own(number: str, seed: int, every_D: bool = False) -> tuple[list[Case], Costs]:
    """The cases that a seed draws for a rung, and what the rung itself costs on them, as it stands now, or the whole one of `handed` where
    its regions are blank. every_D: as Task has it; then there are the cases of `Draw.others`, too. RuntimeError if the rung isn't right
    there."""
    rung = handed.rest(find(number))
    return _own(rung, rung.digest, seed, every_D)


@lru_cache(maxsize=64)
def _own(rung: Rung, digest: str, seed: int, every_D: bool) -> tuple[list[Case], Costs]:
    """digest: the rung's, which its headers are part of."""
    drawn = draw(rung, seed)
    cases = drawn.cases() + (drawn.others() if every_D else [])
    given = handed.known(rung.number)  # where the rung isn't whole in this tree
    if seed == 0 and not every_D and given is not None:
        return cases, Costs(**given["judged"])
    runs = list(observe(rung if every_D else drawn.instance, jobs(cases)))
    costs = sum_of(runs)
    verdict = judge(cases, runs, len(runs), costs)
    if not verdict.ok:
        raise RuntimeError(f"{rung.stem} itself fails with seed {seed}: {verdict.wrong}")
    return cases, costs


def fault(rung: Rung, number: str, seed: int = 0, lean: bool = False, schedules: Sequence[int] = (0,)) -> str:
    """The first thing that is wrong with a kernel on the inputs of a seed, in a sentence; empty if nothing is. lean: as Task has it.

    As `locally` does it, but no case is run behind the first that is wrong. A text that doesn't compile is wrong, too.
    """
    cases, costs = own(number, seed, lean)
    drawn, made = draw(find(number), seed), []
    work = jobs(cases, schedules)
    try:
        for run in observe(rung if lean else instance(rung, drawn.D, drawn.dtype), work):
            made.append(run)
            if wrong := judge(cases, [run], 1, Costs(0, 0, {})).wrong:
                return wrong
    except CompileError as error:
        return f"{error}"
    verdict = judge(cases, made, len(work), costs)
    if verdict.wrong or verdict.idle:
        return verdict.wrong or f"the kernel leaves {', '.join(verdict.idle)} alone"
    return next(filter(None, wasted(verdict.costs, costs)), "") if lean else ""


def locally(rung: Rung, number: str) -> Judgement:
    """Both halves in this process, on the inputs of seed 0: for a kernel that may be trusted, the reader's own on their own machine.

    rung: the kernel; number: the rung that it is held against. Raises CompileError and ToolkitError as `observe` does.
    """
    cases, costs = own(number, 0)
    drawn = draw(find(number), 0)
    work = jobs(cases)
    return judge(cases, observe(instance(rung, drawn.D, drawn.dtype), work), len(work), costs)
