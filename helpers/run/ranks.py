"""Several ranks from a notebook: each is a process, and none is left behind.

    results = launch(program, 2, 512)

runs `program(me, 512)` as ranks 0 and 1 of a process group, and gives what they return. A rank that dies, raises or hangs ends the run
with a sentence.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..ladder.paths import ROOT
from ..toolchain.cores import cores

PREAMBLE = "import os\nimport torch\nimport torch.distributed as dist\nfrom helpers import load, reference, ring\n\n\n"
POLL = 0.02  # seconds
IN_A_RANK = "FA_IN_A_RANK"  # set in the environment of every rank
START = 180  # seconds that the ranks have to import torch and to meet
GRACE = 1.0  # seconds that the other ranks have to say what they saw, once one has failed
LINES = 12  # of a traceback, at most


class RanksError(RuntimeError):
    """A run of several ranks that didn't end well: which rank, and how."""


@dataclass(frozen=True)
class Me:
    """What a program is told of its place: its `rank`, how many `ranks` there are, and the `device` of its tensors."""

    rank: int
    ranks: int
    device: str

    def say(self, text: str) -> None:
        """Prints a line in the notebook, with this rank's number."""
        print(text, flush=True)


def placement(ranks: int, gpus: int) -> tuple[str, list[str]]:
    """The back end of torch.distributed, and the device of each rank: NCCL where each has a GPU of its own; gloo where several share
    one, because NCCL refuses that, and where there is none."""
    if gpus == 0:
        return "gloo", ["cpu"] * ranks
    return "nccl" if gpus >= ranks else "gloo", [f"cuda:{r % gpus}" for r in range(ranks)]


def launch(
    program: Callable | str | Path,
    ranks: int = 2,
    *args: Any,
    device: str | None = None,
    timeout: float = 120,
    quiet: bool = False,
) -> list:
    """Runs `program(me, *args)` as so many ranks, each a process, and returns what each returned, in order.

        launch(program, 2, 512)

    program: a function that needs nothing but its arguments and what its file imports (one of a notebook has os, torch, dist,
    load, reference and ring), or "file.py:function". args and results have to be what torch.save takes. device: "cpu" for gloo and the
    emulator, "cuda"; by default GPUs if there are any. timeout: seconds from when the ranks have met. Lines that a rank prints are shown with
    its number unless `quiet`. Raises RanksError where a rank is killed, exits, raises or hangs: the sentence names it; ValueError for no
    ranks, no GPU or a program that can't be imported, RuntimeError inside a rank. However it ends, also by Ctrl-C, no process is left.
    """
    import torch

    if IN_A_RANK in os.environ:
        raise RuntimeError(
            "a rank has called launch, as it imported the file of its function: in that file, put the call "
            'under `if __name__ == "__main__":`'
        )
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: it takes at least one")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError("there is no GPU here; device='cpu' runs the ranks on the emulator")
    backend, devices = placement(ranks, gpus)
    with tempfile.TemporaryDirectory(prefix="fa-ranks-") as name:
        folder = Path(name)
        file, function = _written(program, folder)
        plan = {"file": str(file), "function": function, "backend": backend, "devices": devices, "timeout": timeout}
        (folder / "plan.json").write_text(json.dumps(plan))
        torch.save(args, folder / "args.pt")
        with _Ranks(folder, ranks, quiet) as running:
            running.wait(timeout)
        return [torch.load(folder / f"result.{r}.pt", weights_only=False) for r in range(ranks)]


def _written(program: Callable | str | Path, folder: Path) -> tuple[Path, str]:
    """The file that a rank imports, or a package's module, and the function's name in it."""
    if isinstance(program, str | Path):
        path, _, function = str(program).rpartition(":")
        if not path or not Path(path).is_file():
            raise ValueError(f"program is {str(program)!r}; it has to be a function, or 'file.py:function'")
        return Path(path).resolve(), function
    if program.__qualname__ != program.__name__:
        raise ValueError(f"{program.__qualname__} is defined inside another function; ranks can't import it from there")
    if "." in (program.__module__ or ""):  # of a package, whose modules import each other
        return Path(program.__module__), program.__name__
    source = inspect.getsourcefile(program)
    if source and Path(source).is_file() and "ipykernel" not in source:
        return Path(source).resolve(), program.__name__
    file = folder / "program.py"
    file.write_text(PREAMBLE + textwrap.dedent(inspect.getsource(program)))
    return file, program.__name__


class _Ranks:
    """The processes of one run. Leaving the context ends all that still run."""

    def __init__(self, folder: Path, ranks: int, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet
        self.processes: list[subprocess.Popen] = []
        self.shown = [0] * ranks  # bytes of each rank's output
        self.ranks = ranks

    def __enter__(self) -> _Ranks:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment[IN_A_RANK] = "1"
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # NCCL has 32 channels, and sends a message of up to 16 MB per channel by 32 / ranks of them: on eight GPUs by four, which reach
        # a fifth of the link's rate. A channel is a CTA; 16 of them fill the link. There are at most 64 channels.
        environment.setdefault("NCCL_MIN_P2P_NCHANNELS", str(min(64, 16 * self.ranks)))
        try:
            self._start(environment)
        except BaseException:  # then __exit__ isn't called
            self.__exit__()
            raise
        return self

    def _start(self, environment: dict[str, str]) -> None:
        for rank in range(self.ranks):
            out, err = (open(self.folder / f"{kind}.{rank}.txt", "wb") for kind in ("out", "err"))
            with out, err:
                command = [
                    sys.executable,
                    "-c",
                    "from helpers.run.ranks import main; main()",
                    str(self.folder),
                    str(rank),
                ]
                # Its own session: Ctrl-C comes to us alone. Its stdin is a pipe from us: it ends when we do (see _with_parent).
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment, start_new_session=True
                )
            self.processes.append(process)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()

    def wait(self, timeout: float) -> None:
        """Until all are done. Raises RanksError."""
        end, met = time.monotonic() + START, False
        while True:
            self._show()
            if not met and all((self.folder / f"met.{rank}").exists() for rank in range(self.ranks)):
                end, met = time.monotonic() + timeout, True
            codes = [process.poll() for process in self.processes]
            if any(codes):  # neither None nor 0
                raise RanksError(self._failure(codes))
            if not any(code is None for code in codes):
                self._show()
                return
            if time.monotonic() > end:
                raise RanksError(
                    self._hung([r for r, code in enumerate(codes) if code is None], timeout if met else START)
                )
            time.sleep(POLL)

    def _show(self) -> None:
        if self.quiet:
            return
        for rank in range(self.ranks):
            with open(self.folder / f"out.{rank}.txt", "rb") as file:
                file.seek(self.shown[rank])
                whole = file.read().rpartition(b"\n")
            self.shown[rank] += len(whole[0]) + len(whole[1])
            for line in whole[0].decode(errors="replace").splitlines() if whole[1] else ():
                print(f"rank {rank}: {line}", flush=True)

    def _failure(self, codes: list[int | None]) -> str:
        """The rank that failed first: one that was killed or left without a word, or else the first to raise."""
        first = next(r for r, code in enumerate(codes) if code)
        if self._raised(first):  # perhaps because another died: that one may take a moment longer to be gone
            end = time.monotonic() + GRACE
            while time.monotonic() < end and any(process.poll() is None for process in self.processes):
                time.sleep(POLL)
        codes = [process.poll() for process in self.processes]
        self._show()
        for rank, code in enumerate(codes):
            if code and not self._raised(rank):
                return f"rank {rank} {_ended(code)}{self._last_words(rank)}"
        errors = {rank: error for rank in range(self.ranks) if (error := self._raised(rank))}
        rank = min(errors, key=lambda r: errors[r]["time"])
        same = [r for r, error in errors.items() if error["text"] == errors[rank]["text"]]
        who = "every rank" if len(same) == self.ranks > 1 else f"rank {rank}"
        return f"{who} raised {errors[rank]['text']}\n{errors[rank]['trace']}"

    def _raised(self, rank: int) -> dict | None:
        file = self.folder / f"error.{rank}.json"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads(file.read_text())
        return None

    def _last_words(self, rank: int) -> str:
        text = (self.folder / f"err.{rank}.txt").read_text(errors="replace").strip()
        return "\n" + "\n".join(text.splitlines()[-LINES:]) if text else ""

    def _hung(self, left: list[int], timeout: float) -> str:
        """Which of those that have not ended isn't waiting for another, and where it is."""
        for rank in left:
            self.processes[rank].send_signal(signal.SIGUSR1)  # faulthandler writes the stack
        time.sleep(0.3)
        stacks = {rank: _stack(self.folder / f"stack.{rank}.txt") for rank in left}
        waiting = [rank for rank, (_, waits) in stacks.items() if waits]
        stuck = [rank for rank in left if rank not in waiting] or left
        places = ", ".join(f"rank {rank} is at {stacks[rank][0]}" for rank in stuck)
        others = [rank for rank in waiting if rank not in stuck]
        told = f"; {_numbered(others)} for a message" if others else ""
        return f"after {timeout:g} s {_numbered(left, 'is', 'are')} not done: {places}{told}"


def _numbered(ranks: list[int], one: str = "waits", many: str = "wait") -> str:
    told = ", ".join(map(str, ranks))
    return f"rank {told} {one}" if len(ranks) == 1 else f"ranks {told} {many}"


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"left with exit code {code}"


def _stack(file: Path) -> tuple[str, bool]:
    """Of a stack that faulthandler wrote, the innermost place outside libraries, and whether the rank waits for a message there."""
    lines = [line.strip() for line in file.read_text().splitlines()] if file.exists() else []
    current = lines[next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0) :]
    frames = [line for line in current if line.startswith("File ")]
    waits = any("distributed" in frame or ("ring.py" in frame and " in wait" in frame) for frame in frames[:3])
    own = next((f for f in frames if "site-packages" not in f and "lib/python" not in f), "a place unknown")
    if found := re.match(r'File "([^"]+)", line (\d+) in (\w+)', own):
        own = f"{Path(found[1]).name}:{found[2]}, in {found[3]}"
    return own, waits


# What runs in a rank


def main() -> None:
    """One rank: `python -c ... FOLDER RANK`, started by launch."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    _with_parent()
    stacks = open(folder / f"stack.{rank}.txt", "w")  # kept open: faulthandler writes there
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    try:
        _run(folder, rank)
    except BaseException as error:
        _tell(folder, rank, error)
        sys.stdout.flush()
        os._exit(1)  # not by way of torch's threads, which may wait for a rank that is gone
    sys.stdout.flush()
    os._exit(0)


def _run(folder: Path, rank: int) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    device, ranks = plan["devices"][rank], len(plan["devices"])
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, load() would take it

    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(max(1, cores() // ranks))
    else:
        torch.cuda.set_device(device)
    program = getattr(_imported(plan["file"]), plan["function"])
    args = torch.load(folder / "args.pt", weights_only=False)
    own = {"device_id": torch.device(device), "pg_options": first_of_all()} if plan["backend"] == "nccl" else {}
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        plan["backend"], meeting, timedelta(seconds=START + plan["timeout"]), world_size=ranks, rank=rank, **own
    )
    (folder / f"met.{rank}").touch()
    result = program(Me(rank, ranks, device), *args)
    torch.save(result, folder / f"result.{rank}.pt")
    dist.barrier()  # nobody leaves while another still needs its messages
    dist.destroy_process_group()


def first_of_all() -> Any:
    """Options of an NCCL group whose messages get the SMs that become free before a kernel that is already running does."""
    from torch.distributed import ProcessGroupNCCL

    return ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _imported(file: str) -> Any:
    if not file.endswith(".py"):
        return importlib.import_module(file)
    spec = importlib.util.spec_from_file_location("program_of_ranks", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _with_parent() -> None:
    """This process ends when the one that started it does: then the pipe to its stdin is closed."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _tell(folder: Path, rank: int, error: BaseException) -> None:
    trace = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in trace if "site-packages" not in frame.filename and not frame.filename.endswith("ranks.py")
    ]
    lines = [f"  {Path(frame.filename).name}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in own[-3:]]
    told = {"time": time.time(), "text": f"{type(error).__name__}: {error}", "trace": "\n".join(lines)}
    unfinished = folder / f"error.{rank}.tmp"
    unfinished.write_text(json.dumps(told))
    unfinished.rename(folder / f"error.{rank}.json")
