"""The launcher of several ranks: results, lines, and every way in which a run can end badly, each in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ring_programs as programs

from helpers import ring
from helpers.run.ranks import placement


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and whose parent hasn't asked counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_and_lines_come_by_rank(capsys):
    assert ring.launch(programs.speaks, 2, 5, device="cpu") == [5, 6]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0: 5 of 2", "rank 1: 5 of 2"]


def test_ranks_on_the_cpu_see_no_gpu(monkeypatch):
    """`load` takes a GPU where it sees one, and their tensors are the CPU's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert ring.launch(programs.gpus, 2, device="cpu") == ["", ""]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (programs.dies, "^rank 1 was killed by SIGKILL"),
        (programs.leaves, "^rank 1 left with exit code 7"),
        (programs.raises, "^rank 1 raised KeyError: 'no such thing'\n  ring_programs.py:"),
        (programs.wrong_shape, r"^every rank raised ValueError: rank 1 has q \(1, 2, n, 32\), rank 0 \(1, 2, n, 64\)"),
    ],
)
def test_the_rank_that_fails_is_named(program, words):
    with pytest.raises(ring.RanksError, match=words):
        ring.launch(program, 2, device="cpu", quiet=True)


@pytest.mark.parametrize("program", [programs.hangs, programs.hangs_outside_the_ring])
def test_the_rank_that_hangs_is_named_and_not_the_one_that_waits(program):
    where = rf"rank 1 is at ring_programs.py:\d+, in {program.__name__}"
    with pytest.raises(
        ring.RanksError, match=f"^after 4 s ranks 0, 1 are not done: {where}; rank 0 waits for a message$"
    ):
        ring.launch(program, 2, device="cpu", timeout=4)


def pids(file: Path, processes: int) -> list[int]:
    """Of the ranks that run programs.waits, once they do."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        files = [Path(f"{file}.{rank}") for rank in range(processes)]
        if all(f.exists() and f.read_text() for f in files):
            return [int(f.read_text()) for f in files]
        time.sleep(0.05)
    raise AssertionError("the ranks didn't start")


STARTER = "import ring_programs, sys\nfrom helpers import ring\nring.launch(ring_programs.waits, 2, sys.argv[1], device='cpu')"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("signal", "words"), [(2, "KeyboardInterrupt"), (9, "")]
)  # Ctrl-C; a kill that nobody can answer
def test_no_rank_outlives_the_one_that_started_it(signal, words, tmp_path):
    where = os.pathsep.join([str(Path(programs.__file__).parent), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    command = [sys.executable, "-c", STARTER, str(tmp_path / "pid")]
    started = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": where}, stderr=subprocess.PIPE, text=True)
    ranks = pids(tmp_path / "pid", 2)
    started.send_signal(signal)
    assert words in started.communicate(timeout=20)[1]
    end = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, ranks))


def test_a_file_that_launches_as_it_is_imported_starts_no_ranks_of_ranks(tmp_path):
    """A rank imports the file of its function. Each would start ranks of its own, and so on without end."""
    file = tmp_path / "program.py"
    call = "ring.launch(program, 1, device='cpu', quiet=True)"
    text = f"from helpers import ring\n\n\ndef program(me):\n    return 7\n\n\nif {{}}:\n    print({call})\n"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    for when, words in (("True", 'put the call under `if __name__ == "__main__":`'), ("__name__ == '__main__'", "[7]")):
        file.write_text(text.format(when))
        done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=60)
        assert words in done.stdout + done.stderr, done.stderr


def test_what_it_does_not_take_is_said():
    def inner(me):
        return None

    for program, words in ((inner, "defined inside another function"), ("nowhere.py:f", "has to be a function")):
        with pytest.raises(ValueError, match=words):
            ring.launch(program, 2, device="cpu")
    with pytest.raises(ValueError, match="at least one"):
        ring.launch(programs.speaks, 0)


def test_a_function_of_a_notebook_is_taken_by_its_text(tmp_path, monkeypatch):
    import inspect

    text = 'def program(me, n):\n    """Sums."""\n    x = torch.ones(n)\n    dist.all_reduce(x)\n    return x.sum().item()\n'
    space: dict = {}
    exec(text, space)
    monkeypatch.setattr(inspect, "getsource", lambda _: text)
    monkeypatch.setattr(inspect, "getsourcefile", lambda _: None)
    assert ring.launch(space["program"], 2, 3, device="cpu") == [6.0, 6.0]


def test_where_ranks_are_placed():
    assert placement(2, 0) == ("gloo", ["cpu", "cpu"])
    assert placement(2, 2) == ("nccl", ["cuda:0", "cuda:1"])
    assert placement(4, 2) == ("gloo", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])  # NCCL refuses two ranks on one GPU


def test_where_a_rank_can_not_be_started_those_before_it_are_ended(monkeypatch, tmp_path):
    from helpers.run import ranks

    started, popen = [], subprocess.Popen

    def only_one(*arguments, **options):
        if started:
            raise OSError("no more processes")
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(ranks.subprocess, "Popen", only_one)
    with pytest.raises(OSError, match="no more processes"):
        ring.launch(programs.waits, 2, str(tmp_path / "pid"), device="cpu")
    assert started[0].returncode


def test_an_interrupt_in_the_waiting_thread_leaves_no_process(monkeypatch, tmp_path):
    """What a notebook's interrupt does: KeyboardInterrupt in the middle of `wait`."""
    from helpers.run import ranks

    found: list[int] = []
    show = ranks._Ranks._show

    def interrupt(self):
        show(self)
        if all(Path(f"{tmp_path / 'pid'}.{rank}").exists() for rank in range(2)):
            found.extend(process.pid for process in self.processes)
            raise KeyboardInterrupt

    monkeypatch.setattr(ranks._Ranks, "_show", interrupt)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        ring.launch(programs.waits, 2, str(tmp_path / "pid"), device="cpu")
    assert len(found) == 2 and not any(map(alive, found)) and threading.active_count() == threads
