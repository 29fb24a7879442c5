"""`%%region RUNG REGION`: what a reader has typed for a region of a rung, compiled, checked, X-rayed and timed beside the rung's own.

%%region 04_fa2_fp32 online_update
for (int r = 0; r < 8; ++r) { ... }

Several regions stand between their markers; `kernel` is all of the rung behind its header block. The kernel is bound to the
region's name, or to another one: `%%region 04 online_update -> mine`.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..ladder.errors import CompileError, KernelError, ToolkitError
from ..ladder.rung import Rung
from ..ladder.rung import rung as find
from ..run import merging
from ..run.check import Report, check
from ..run.kernel import Kernel, load, summary
from ..run.reference import cases, random_inputs
from ..run.xray import Xray, xray
from . import handed
from .forms import contract
from .grading.allowed import strange, unfit
from .inputs import SKIPPED, uneven
from .judge import SECONDS, Costs, Judgement, locally, until_stopped, wasted
from .progress import keep
from .regions import Filled, RegionError, Typed, fill, head, read, require_without, span
from .tasks.catalogue import about
from .tasks.task import Task


@dataclass(frozen=True)
class Score:
    """A reader's kernel against the rung's own, by one X-ray on the same inputs and, on a GPU, by one timing each.

    rows: (what, the reader's, the rung's). ok: right, and nothing found.
    """

    task: Task | None
    report: Report
    ray: Xray | None
    rows: tuple[tuple[str, str, str], ...] = ()
    workload: str = ""
    steps: tuple[str, ...] = ()
    lean: tuple[tuple[str, Costs, Costs], ...] = ()  # of a lean task: at which call, the reader's, the rung's
    elsewhere: tuple[str, ...] = ()  # findings of the X-ray at other calls, each behind its call

    @property
    def wasted(self) -> str:
        """The first thing that a lean task forbids, in words; empty if there is none."""
        return next((f"{where}: {said}" for where, *both in self.lean for said in wasted(*both) if said), "")

    @property
    def ok(self) -> bool:
        """Right in all cases, without a finding."""
        return self.report.ok and self.ray is not None and self.ray.ok and not self.elsewhere and not self.wasted

    def __str__(self) -> str:
        if self.ray is None:
            return "\n".join([*self.steps, str(self.report)])
        lines = [str(self.report).splitlines()[0], f"{f'X-ray, {self.workload}':<38}{'yours':>14}{'the rung':>14}"]
        lines += [f"  {what:<36}{mine:>14}{rungs:>14}" for what, mine, rungs in self.rows]
        lines += [*map(str, self.ray.findings), *self.elsewhere][:3]
        if self.wasted:
            lines.append(f"the result is right, but not as lean as the task asks for. {self.wasted}")
        return "\n".join(lines)


@dataclass
class Attempt:
    """What came of a cell or file: the kernel if it compiles, its score, and what to say."""

    filled: Filled | None = None
    kernel: Kernel | None = None
    score: Score | None = None
    error: Exception | None = None
    said: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Solved."""
        return self.score is not None and self.score.ok

    def __str__(self) -> str:
        return "\n".join(self.said)


def attempt(stem: str, regions: tuple[str, ...], text: str, name: str = "cell", line: int = 2) -> Attempt:
    """Everything that is done with what a reader typed; errors of theirs are said, not raised.

    stem: the rung; text: the cell or file, its first line is number `line` of `name`.
    """
    made = Attempt()
    task: Task | None = None
    empty: list[str] = []
    try:
        rung = find(stem)
        task = about(rung, regions)
        empty = list(regions[:1]) if Typed("", text).empty else []
        for region in () if empty else regions:
            span(rung, region)  # KeyError names those there are
        bodies = {} if empty else read(text, regions, name, line)
        if empty := empty or [typed.region for typed in bodies.values() if typed.empty]:
            raise RegionError(f"nothing is typed in the region {empty[0]!r}")
        made.said += contract(rung, regions)
        for typed in bodies.values():
            require_without(typed, task.without if task else ())
        made.filled = fill(rung, bodies)
        made.kernel = load(made.filled.rung, quiet=True)
        if made.kernel.device == "cpu":
            made.kernel.launcher.timeout = SECONDS
        made.said.append(summary(made.kernel))
        made.score = score(made.kernel, rung, task)
        made.said.append(made.filled.located(str(made.score)))
    except (CompileError, KernelError, ToolkitError, ValueError, LookupError) as error:
        words = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
        located = made.filled.located(words) if made.filled else words
        made.error = error if located == words else type(error)(located)
        made.said.append(located)
    if task is not None and made.ok:
        made.said.append(f"Task {task.id}: solved")
        if refused := next(filter(None, map(unfit, bodies.values())), "") or _strange(made.kernel):
            made.said.append(f"before it is handed in: {refused}")
        keep(f"task {task.id}")
    elif task is not None:  # the reason of an empty one fits on the same line
        words = f"Task {task.id}: not solved yet"
        made.said = [f"{words}; {made.said[0]}"] if empty else [*made.said, words]
    return made


def _strange(kernel: Kernel) -> str:
    """What a grader refuses of what a kernel calls, in a clause; empty if nothing, or where it can't be told: of a GPU's kernel, and
    without nm."""
    if kernel.device != "cpu" or sys.platform != "linux" or shutil.which("nm") is None:
        return ""
    return next(filter(None, (strange(built.path) for built in kernel.launcher._compiled.values())), "")


def attempt_file(path: Path) -> Attempt:
    """The same for a file whose first line is `// region: RUNG REGION ..`, as `blank` forms for editors have it. ValueError if it
    isn't, or if there is no file."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    text = path.read_text("utf-8-sig")
    opening = head(text, cell=False)
    if opening is None:
        raise ValueError(
            f"{path}:1: the first line has to be `// region: RUNG REGION`, like `// region: 04 online_update`"
        )
    return attempt(opening.rung, opening.regions, text, str(path), 1)


def score(kernel: Kernel, rung: Rung, task: Task | None = None) -> Score:
    """Checks a kernel on all cases and on uneven head dimensions, X-rays it at every head dimension and beside the rung that it stands
    for and, on a GPU, times both."""
    report, steps = _checked(kernel, rung), ()
    if task is not None and kernel.device == "cpu" and (task.stepwise or not report.ok):
        judged = locally(kernel.rung, rung.number)
        steps = tuple(plan(judged))
        if not judged.ok:
            return Score(task, report, None, steps=steps)
    if not report.ok:
        return Score(task, report, None, steps=steps)
    every, given = rays(kernel, rung), handed.known(rung.number)
    mine = every[f"d = {rung.usual_D}"]
    elsewhere = tuple(f"{where}: {found}" for where, ray in every.items() if ray is not mine for found in ray.findings)
    inputs, options = workload(rung)
    theirs = dict(counts(xray(rung, *inputs, **options))) if given is None else given["counts"]
    rows = [(what, f"{a:,}", f"{theirs[what]:,}") for what, a in counts(mine)]
    if kernel.device == "cuda" and given is None:
        rows.append(("milliseconds on this GPU", *_times(kernel, rung)))
    both = beside_the_rung(every, rung) if task is not None and task.lean else ()
    return Score(task, report, mine, tuple(rows), mine.workload, steps, both, elsewhere)


def beside_the_rung(every: dict[str, Xray], rung: Rung) -> tuple[tuple[str, Costs, Costs], ...]:
    """What a kernel costs by its `rays`, and the rung that it stands for: (the call, the kernel's, the rung's)."""
    given = handed.known(rung.number)
    own = lean_costs(rung, rung) if given is None else {where: Costs(**each) for where, each in given["lean"].items()}
    return tuple((where, _costs(ray), own[where]) for where, ray in every.items())


def lean_costs(kernel: Kernel | Rung, rung: Rung) -> dict[str, Costs]:
    """What a kernel costs by call, of those of `rays`, by which a lean task is judged."""
    return {where: _costs(ray) for where, ray in rays(kernel, rung).items()}


def rays(kernel: Kernel | Rung, rung: Rung) -> dict[str, Xray]:
    """The X-ray of a kernel by call: a small one at every head dimension that the rung names, or at the usual one, and SKIPPED, of a rung
    with windows."""
    calls = {f"d = {D}": workload(rung, D) for D in rung.D or (rung.usual_D,)}
    if "window" in rung.features:
        Nq, Nk, window = SKIPPED
        options = {"causal": True, "window": window}
        inputs = random_inputs(rung, (1, 2, Nq, Nk, rung.usual_D), **options)
        calls[f"Nq = {Nq}, Nk = {Nk}, window {window}"] = inputs, options
    return {where: xray(kernel, *inputs, **options) for where, (inputs, options) in calls.items()}


def _costs(ray: Xray) -> Costs:
    shared, moved = ray.total(space="shared"), ray.tensors[["bytes_read", "bytes_written"]].astype(int)
    return Costs(shared.cost, shared.ideal, {name: (read, written) for name, read, written in moved.itertuples()})


def _checked(kernel: Kernel, rung: Rung) -> Report:
    if rung.op == "merge":
        return check(kernel)
    size = "small" if kernel.device == "cpu" else "full"
    every = itertools.chain(cases(kernel.rung, kernel.device, size), uneven(rung, kernel.device))
    return check(kernel, until_stopped(every, SECONDS) if kernel.device == "cpu" else every)


def plan(judged: Judgement) -> list[str]:
    """The cases one after the other, up to the first that is wrong; where all are right, the first finding, and the tensors that the
    kernel leaves alone."""
    lines = []
    for name, why in judged.cases:
        lines.append(f"  {'✗' if why else '✓'} {name}" + (f": {why.splitlines()[0]}" if why else ""))
        if why:
            return lines
    lines += [f"  ✗ {finding}" for finding in judged.findings[:1]]
    return lines + [f"  ✗ the kernel leaves {', '.join(judged.idle)} alone: who did the work?"] * bool(judged.idle)


def workload(rung: Rung, D: int | None = None) -> tuple[tuple, dict]:
    """Inputs and options of a small call at which a rung's lines are all at work. D: head dimension, by default the usual one."""
    options = {"causal": True} if "causal" in rung.features else {}
    if rung.op == "softmax":
        return random_inputs(rung, (1, 1, 64, 1024, 1)), {}
    D = D or rung.usual_D
    if rung.op == "merge":
        inputs = merging.workload((1, 2, 256, D))
        return inputs, {"out": inputs[:2]}
    if "splits" in rung.features:
        return random_inputs(rung, (1, 2, 4, 1024, D), Hkv=1, **options), options | {"splits": 4}
    return random_inputs(rung, (1, 2, 256, 256, D), **options), options


def counts(ray: Xray) -> list[tuple[str, int]]:
    """What is counted, in words, and how much of it."""
    shared, moved = ray.total(space="shared"), ray.tensors
    return [
        ("races and other findings", len(ray.findings)),
        ("wavefronts of shared memory", shared.cost),
        ("of them bank conflicts", shared.excess),
        ("bytes read in global memory", int(moved.bytes_read.sum())),
        ("bytes written there", int(moved.bytes_written.sum())),
    ]


def _times(kernel: Kernel, rung: Rung) -> tuple[str, str]:
    from ..measure import bench

    own = load(rung, quiet=True)
    if rung.op == "merge":
        inputs = merging.workload((1, 8, 1024, rung.usual_D), device="cuda")
    else:
        inputs = random_inputs(rung, (1, 8, 1024, 1024, rung.usual_D), device="cuda")
    samples = bench.measure({"mine": kernel, "rung": own}, inputs).groupby("name")["ms"].median()
    return f"{samples['mine']:.3f}", f"{samples['rung']:.3f}"
