"""The process in which submissions are compiled and run: `python -m helpers.lessons.grading.worker FOLDER`, confined before it begins.

FOLDER holds `work.json` (what is to be compiled, and for each source the launches to make) and the inputs; results are written
there. It knows no answers: not what the outputs should be, nor the rungs' own text. Each source is compiled without being loaded, and
runs in a child of its own that can't start anything.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from . import sandbox
from .allowed import strange

if TYPE_CHECKING:
    from ...emulator.launcher import Launcher

MOST = 4 << 20  # bytes of a message from a child
# What the emulator says of a launch that took too long: which thread was running then differs from time to time.
STOPPED = re.compile(r"stopped (?:while .*? was running|after \S+ s\b)")


def main(folder: Path) -> None:
    """Compiles everything in work.json, two sources at a time, then runs one after the other."""
    work = json.loads((folder / "work.json").read_text())
    readable = [Path(path) for path in work["readable"]]
    sandbox.confine(readable, folder, sandbox.Limits(**work["limits"]))
    import torch
    from torch.utils import cpp_extension

    torch.set_num_threads(1)
    cpp_extension._import_module_from_library = lambda *ignored: None  # what is built is not loaded here
    with ThreadPoolExecutor(2) as pool:
        launchers = list(
            pool.map(lambda job: _compiled(folder / job["id"], job["name"], work["strict"]), work["sources"])
        )
    for job, launcher in zip(work["sources"], launchers, strict=True):
        if launcher is not None:
            _apart(folder / job["id"], job, launcher, [*readable, folder])


def _compiled(out: Path, name: str, strict: bool) -> Launcher | None:
    """The launcher of out/kernel.cu; None, and a word in out/said.json, if it doesn't compile or, where `strict`, calls what it may not."""
    from ...emulator.launcher import Launcher
    from ...ladder.errors import CompileError, KernelError
    from ...ladder.rung import parse

    try:
        launcher = Launcher(parse((out / "kernel.cu").read_text(), Path(name)), together=True)
        (library,) = launcher.compile_traced()  # not loaded here
        if strict and (said := strange(library.path)):
            _write(out / "said.json", {"refused": said})
            return None
    except (CompileError, KernelError, ValueError) as error:
        _write(out / "said.json", {"compile": str(error)})
        return None
    return launcher


def _apart(out: Path, job: dict, launcher: Launcher, readable: list[Path]) -> None:
    """Runs a source in a child that writes to `out` alone, and notes beside it, where the child can't write, how it ended."""
    launcher.threads = 2
    launcher.timeout = job["seconds"]
    ask, answer = os.pipe(), os.pipe()  # lines of the source behind addresses: the child can't start addr2line itself
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ask[0]), os.close(answer[1])
            sandbox.confine(readable, out, sandbox.Limits(seconds=job["processor"], memory=job["memory"]))
            sandbox.lock()
            _run(launcher, out, job, ask[1], answer[0])
            code = 0
        finally:
            os._exit(code)
    os.close(ask[1]), os.close(answer[0])
    threading.Thread(target=_serve, args=(launcher, ask[0], answer[1]), daemon=True).start()
    status = _wait(child, job["total"])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    ended = {"signal": number, "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0}
    _write(out.parent / f"{out.name}.json", ended)


def _serve(launcher: Launcher, asked: int, answer: int) -> None:
    """Tells the child which lines belong to which addresses, until it has closed its end."""
    from ...toolchain.lines import places

    (library,) = launcher.compile_traced()
    with os.fdopen(asked, "rb") as questions, os.fdopen(answer, "wb") as answers:
        while (line := questions.readline(MOST)).endswith(b"\n"):
            try:
                offsets = [int(n) for n in json.loads(line)][:100_000]
                said = {str(offset): place for offset, place in places(library.path, offsets).items()}
                answers.write(json.dumps(said).encode() + b"\n")
                answers.flush()
            except (ValueError, TypeError, OSError):
                return


def _wait(child: int, seconds: float) -> int:
    """The child's status; it is ended when it doesn't end by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _run(launcher: Launcher, out: Path, job: dict, ask: int, answer: int) -> None:
    """In the child: every launch, its outputs as bytes and what was seen as JSON, written one by one."""
    import torch

    from ...emulator import launcher as emulator
    from ...emulator import report
    from .. import judge

    questions, answers = os.fdopen(ask, "wb"), os.fdopen(answer, "rb")

    def places(library: Path, offsets) -> dict[int, tuple[str, int]]:
        questions.write(json.dumps(sorted(offsets)).encode() + b"\n")
        questions.flush()
        said = json.loads(answers.readline())
        return {int(offset): (file, line) for offset, (file, line) in said.items()}

    emulator.places = report.places = places
    late = f"it took longer than {job['seconds']:g} seconds"
    for n in range(job["jobs"]):
        given = torch.load(out.parent / f"{job['inputs']}_{n}.pt", weights_only=True)
        run = judge.one(launcher, judge.Job(**given))
        error, *findings = (STOPPED.sub(late, said) for said in (run.error, *run.findings))
        seen = {
            "error": error,
            "findings": findings,
            "wavefronts": run.wavefronts,
            "ideal": run.ideal,
            "bytes": run.bytes,
        }
        for i, x in enumerate(run.outputs or ()):
            (out / f"{n}_{i}.bin").write_bytes(bytes(x.contiguous().view(torch.uint8).flatten().numpy()))
        _write(out / f"{n}.json", seen)
        if error != run.error:
            return  # the others would not end either


def _write(path: Path, what: dict) -> None:
    path.write_text(json.dumps(what))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
