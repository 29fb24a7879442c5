"""Points for a submission: compiled and run in a sandbox on inputs drawn from a seed, compared here with float64 and with the rungs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...ladder.paths import HELPERS, INCLUDE, ROOT
from ...ladder.rung import Rung
from ...ladder.rung import rung as find
from .. import judge
from ..inputs import draw, instance
from ..regions import Filled, RegionError
from . import sandbox
from .allowed import unfit
from .assignments import Assignment, Criterion, assignment
from .submission import Answer, answers, why_none

STRICT = True  # kernels say and call only what `allowed` has; without it, the sandbox alone holds them
MEMORY = 3 << 30  # bytes that a kernel's process may take besides what it begins with
SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/opt",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
)
SYSTEM += ("/dev/urandom", "/proc/stat", "/proc/sys/vm/overcommit_memory")


@dataclass(frozen=True)
class Patience:
    """Seconds: of the clock for one launch and for all of a task, of the processor for all of a task, of the clock for a submission."""

    launch: float = 60
    task: float = 240
    processor: int = 180
    submission: float = 1800


@dataclass(frozen=True)
class Graded:
    """A task's criteria."""

    task: str
    criteria: tuple[Criterion, ...]

    @property
    def points(self) -> float:
        return sum(each.points for each in self.criteria)

    @property
    def most(self) -> float:
        return sum(each.most for each in self.criteria)


@dataclass(frozen=True)
class Grade:
    """A submission's points, the same for the same seed. submission: its path, as it was given."""

    submission: str
    seed: int
    tasks: tuple[Graded, ...]

    @property
    def points(self) -> float:
        return sum(each.points for each in self.tasks)

    @property
    def most(self) -> float:
        return sum(each.most for each in self.tasks)

    def as_json(self) -> dict:
        """Everything, the seed too, for the instructor's machines."""
        tasks = [
            {"task": t.task, "points": t.points, "most": t.most, "criteria": [asdict(c) for c in t.criteria]}
            for t in self.tasks
        ]
        return {
            "submission": self.submission,
            "seed": self.seed,
            "points": self.points,
            "most": self.most,
            "tasks": tasks,
        }

    def as_gradescope(self) -> dict:
        """The same as Gradescope's autograders write it to results.json, which students see: without the seed."""
        tests = [
            {
                "name": f"{t.task} {c.name}",
                "score": c.points,
                "max_score": c.most,
                "output": c.said,
                "visibility": "visible",
            }
            for t in self.tasks
            for c in t.criteria
        ]
        return {"score": self.points, "output": "", "tests": tests}

    def __str__(self) -> str:
        lines = [f"{self.submission}: {self.points:g} of {self.most:g} points"]
        for t in self.tasks:
            lines.append(f"  {t.task}: {t.points:g} of {t.most:g}")
            lines += [f"    {c.points:g}/{c.most:g} {c.name}: {c.said.splitlines()[0]}" for c in t.criteria]
        return "\n".join(lines)


def refusal() -> str:
    """Why nothing can be graded here, in a sentence; empty if it can be done."""
    lacking = "grading needs nm, which tells what a compiled kernel calls, and it is not on PATH: install binutils"
    return sandbox.refusal() or ("" if shutil.which("nm") else lacking)


def grade(path: Path, seed: int = 0, tasks: Sequence[str] = (), patience: Patience | None = None) -> Grade:
    """Grades one submission: see `submission.answers` for what it may be.

    tasks: ids, each of which counts once; by default those that the submission answers, blank forms left out unless all are. RuntimeError
    where there is no sandbox or no nm, or if the grader's own process fails; ValueError if there is no submission, or no answer in it
    and no tasks are named.
    """
    if reason := refusal():
        raise RuntimeError(reason)
    patience = patience or Patience()
    given = answers(path)
    others = why_none(path)
    if not given and not tasks:
        raise ValueError(f"it holds no answer: {others}")
    filled = [id for id, answer in given.items() if not answer.blank]
    wanted = [assignment(id) for id in dict.fromkeys(tasks) or sorted(filled or given)]
    ready: dict[str, tuple[Rung, Filled]] = {}
    refused: dict[str, str] = {}
    for task in wanted:
        try:
            ready[task.id] = _ready(task, given.get(task.id), seed)
        except ValueError as error:
            answered = task.id in given and not given[task.id].blank
            refused[task.id] = str(error) if answered or not others else f"{error}: {others}"
    with tempfile.TemporaryDirectory(prefix="grading-") as name:
        folder = Path(name).resolve()
        late = _work(folder, [task for task in wanted if task.id in ready], ready, seed, patience)
        graded = []
        for task in wanted:
            answer = given.get(task.id)
            if task.id in refused:
                criteria = task.nothing(refused[task.id], answer)
            else:
                criteria = _graded(task, folder, ready[task.id][1], answer, seed, late)
            graded.append(Graded(task.id, tuple(criteria)))
    return Grade(str(path), seed, tuple(graded))


def _ready(task: Assignment, answer: Answer | None, seed: int) -> tuple[Rung, Filled]:
    """The kernel to compile, with one instance unless the task has every_D, and the rung with the answer in it. RegionError where there is
    nothing to compile."""
    if answer is None:
        raise RegionError("nothing was handed in")
    if answer.problem:
        raise RegionError(answer.problem)
    if any(typed.empty for typed in answer.bodies.values()):
        raise RegionError("the region is empty")
    for typed in answer.bodies.values():
        if STRICT and (refused := unfit(typed)):
            raise RegionError(refused)
    drawn = draw(find(task.number), seed)
    filled = task.filled(answer)
    return filled.rung if task.every_D else instance(filled.rung, drawn.D, drawn.dtype), filled


def _schedules(seed: int) -> tuple[int, ...]:
    """Orders of threads: their own, and two drawn from the seed."""
    dice = torch.Generator().manual_seed(seed)
    return (0, *(int(n) for n in torch.randint(1, 1 << 20, (2,), generator=dice)))


def _jobs(task: Assignment, seed: int) -> list[judge.Job]:
    cases, _ = judge.own(task.number, seed, task.every_D)
    return judge.jobs(cases, _schedules(seed))


def _work(
    folder: Path, wanted: list[Assignment], ready: dict[str, tuple[Rung, Filled]], seed: int, patience: Patience
) -> bool:
    """Has everything compiled and run in the sandbox; whether it took too long."""
    if not wanted:
        return False
    from ...emulator.launcher import _runtime

    runtime = _runtime()[0].parent
    shutil.copytree(runtime, folder / "cache" / runtime.name)
    sources = []
    for task in wanted:
        rung, _ = ready[task.id]
        jobs, inputs = _jobs(task, seed), task.number + "_every_D" * task.every_D
        for n, job in enumerate(jobs):
            saved = folder / f"{inputs}_{n}.pt"
            if not saved.exists():
                torch.save(dict(vars(job)), saved)
        (folder / task.id).mkdir()
        (folder / task.id / "kernel.cu").write_text(rung.source)
        limits = {"seconds": patience.launch, "total": patience.task, "processor": patience.processor, "memory": MEMORY}
        sources.append({"id": task.id, "name": f"{rung.stem}.cu", "inputs": inputs, "jobs": len(jobs), **limits})
    rooms = [each for each in HELPERS.iterdir() if each.name not in ("evidence", "__pycache__")]
    readable = [*SYSTEM, sys.prefix, sys.base_prefix, *rooms, HELPERS / "__init__.py", INCLUDE]
    limits = {"seconds": int(patience.submission), "memory": 4 * MEMORY}
    work = {"readable": [str(path) for path in readable], "limits": limits, "sources": sources, "strict": STRICT}
    (folder / "work.json").write_text(json.dumps(work))
    return _confined(folder, patience.submission)


def _confined(folder: Path, seconds: float) -> bool:
    """Runs the worker; whether it had to be ended. RuntimeError if it failed by itself: that is no kernel's doing, each of which runs in
    a process below it."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONUTF8", "CXX") if name in os.environ}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "FA_CACHE": str(folder / "cache"),
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "FA_PROGRESS": ""}
    command = [
        sys.executable,
        "-P" if sys.version_info >= (3, 11) else "-s",
        "-m",
        f"{__package__}.worker",
        str(folder),
    ]
    with (folder / "words").open("wb") as words:
        worker = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=words,
            stderr=words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if worker.wait(seconds) > 0:
                said = (folder / "words").read_text(errors="replace").strip()
                raise RuntimeError(f"the grader's own process failed: {said[-500:]}")
            return False
        except subprocess.TimeoutExpired:
            return True
        finally:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            worker.wait()


def _graded(
    task: Assignment, folder: Path, filled: Filled, answer: Answer, seed: int, late: bool
) -> Iterable[Criterion]:
    out = folder / task.id
    said = _json(out / "said.json")
    if "compile" in said:
        words = filled.located(str(said["compile"])).replace(str(folder), "")
        first = next((line for line in words.splitlines() if "error" in line), words)
        return task.nothing(f"it does not compile: {first}", answer)
    if "refused" in said:
        return task.nothing(str(said["refused"]), answer)
    cases, costs = judge.own(task.number, seed, task.every_D)
    jobs = _jobs(task, seed)
    runs = list(_runs(out, jobs, cases))
    verdict = judge.judge(cases, runs, len(jobs), costs)
    how = _how(_json(folder / f"{task.id}.json"), late)
    if how and len(runs) < len(jobs):
        return task.nothing(how, answer)
    if verdict.idle:
        return task.nothing(f"the kernel's threads leave {', '.join(verdict.idle)} alone: who did the work?", answer)
    return task.criteria(verdict, filled, answer)


def _how(ended: dict, late: bool) -> str:
    """How a kernel's process came to a bad end; empty if it didn't."""
    number = ended.get("signal", 0)
    if number == signal.SIGSYS:
        return "stopped: it tried to start a program, to fork, to trace, to connect or to send a signal; a kernel does none of that"
    if number == signal.SIGXCPU or number == signal.SIGKILL or late:
        return "stopped: it took too long"
    if number == signal.SIGXFSZ:
        return "stopped: it wrote too much"
    if number:
        return f"it crashed ({signal.Signals(number).name})"
    if ended.get("code", 1):
        return "it ended before it had run all inputs" if ended else "it could not be run"
    return ""


def _runs(out: Path, jobs: Sequence[judge.Job], cases: list) -> Iterable[judge.Run]:
    """What the worker has left, taken as data that may be anything."""
    for n, job in enumerate(jobs):
        seen = _json(out / f"{n}.json")
        if not seen:
            return
        try:
            error, findings = str(seen["error"]), tuple(str(each) for each in seen["findings"])[: judge.MOST_FINDINGS]
            moved = {str(name): (int(read), int(written)) for name, (read, written) in seen["bytes"].items()}
            outputs = (
                None if error else tuple(_tensor(out / f"{n}_{i}.bin", like) for i, like in enumerate(job.outputs))
            )
            costs = int(seen["wavefronts"]), int(seen["ideal"])
        except (KeyError, TypeError, ValueError, AttributeError, OSError):
            yield judge.Run(job.case, job.schedule, None, "what came back can't be read")
            continue
        yield judge.Run(job.case, job.schedule, outputs, error, findings, *costs, moved)


def _tensor(path: Path, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    if path.stat().st_size != size:
        raise ValueError("an output of another size")
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=like.dtype).view(like.shape)


def _json(path: Path) -> dict:
    try:
        if path.stat().st_size > 4 << 20 or path.is_symlink():
            return {}
        found = json.loads(path.read_text(errors="replace"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
