"""The checks of exercises that somebody could pass without an answer: each says what is wrong, and tests attack it.

They run in the reader's own process, so they stop shortcuts, not a determined cheat: points are given by `grading`, in a sandbox.
"""

from __future__ import annotations

import builtins
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..emulator import banks
from ..ladder.errors import KernelError
from ..ladder.instances import for_d64
from ..ladder.rung import Rung, rung
from ..run import one_sided, reference
from ..run.check import check, compare
from ..run.kernel import Kernel, load
from ..run.reference import Case
from ..run.xray import xray
from .museum import Unlabelled

IMPORTS = ("collections", "functools", "itertools", "math", "operator")
_KEPT_BACK = ("open", "eval", "exec", "compile", "globals", "locals", "vars", "input", "breakpoint", "help", "dir")
LSE = "(m_reg[r] + log2f(l)) * fa::ln_2"
LSE_BUGS = {
    "in units of log2": (LSE, "m_reg[r] + log2f(l)"),
    "without the maximum": (LSE, "log2f(l) * fa::ln_2"),
    "0 everywhere": (LSE, "0.f"),
    "a little too large": (LSE, f"1.01f * {LSE}"),
}


def alone(function: Callable) -> Callable:
    """The same function with nothing but Python's builtins, IMPORTS, and what it defines itself.

    AssertionError if it is no plain function, or brings something with it: default values, variables of a function around it.
    """
    assert isinstance(function, FunctionType), "write it as a function, def … or lambda"
    brought = function.__defaults__ or function.__kwdefaults__ or function.__closure__
    assert not brought, "the function may bring nothing with it: no default values, no variables from around it"

    def allowed(name: str, *rest: Any) -> Any:
        assert name.partition(".")[0] in IMPORTS, f"{name} may not be imported here, only {', '.join(IMPORTS)}"
        return __import__(name, *rest)

    kept = {name: each for name, each in vars(builtins).items() if name not in _KEPT_BACK}
    kept["__import__"] = allowed
    return FunctionType(function.__code__, {"__builtins__": kept}, function.__name__)


def counts_wavefronts(
    function: Callable[[list[int | None]], int], counted: Mapping[str, tuple[Sequence[int | None], float]]
) -> bool:
    """Exercise 92.1: whether `function` gives the wavefronts of a request of 4 bytes per lane.

    counted: name -> 32 byte offsets, and the wavefronts that a GPU counted. It has to be right for these and for 200 random
    requests, and is called without what the notebook knows (`alone`). AssertionError says where it is wrong.
    """
    mine = alone(function)

    def answer(addresses: Sequence[int | None]) -> int:
        try:
            return mine(list(addresses))
        except NameError as error:
            raise AssertionError(f"the function has to stand alone: {error}") from error

    for name, (addresses, wanted) in counted.items():
        found = answer(addresses)
        assert found == wanted, f"{name.partition(': ')[2] or name}: {found}, the GPU counted {wanted:g}"
    dice = random.Random(92)
    for _ in range(200):
        room, share = dice.choice((32, 64, 1024)), dice.choice((0.3, 1.0))
        lanes: list[int | None] = [4 * dice.randrange(room) if dice.random() < share else None for _ in range(32)]
        lanes[dice.randrange(32)] = 4 * dice.randrange(room)
        found, wanted = answer(lanes), len(banks.wavefronts(lanes, 4))
        assert found == wanted, f"right for the patterns, wrong for other addresses: {found}, it takes {wanted}"
    return True


# Exercise 90.2


class _Hidden:
    """A kernel as f(q, k, v) -> (o, lse), without a sign of which one; counts its calls."""

    __slots__ = ("_run", "calls")

    def __init__(self, kernel: Kernel) -> None:
        self._run, self.calls = (lambda *inputs: kernel(*inputs)), 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self._run(q, k, v)


@contextlib.contextmanager
def _without_reference() -> Iterator[None]:
    """Inside, what gives a softmax in one call raises AssertionError."""
    refuse = mock.Mock(side_effect=AssertionError("without a reference: no reference, no softmax of your own"))
    names = ("softmax", "log_softmax", "logsumexp")
    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.Tensor, torch.nn.functional):
            for name in names:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", refuse))
        stack.enter_context(mock.patch.object(reference, "attention", refuse))
        yield


def lse_property(holds: Callable[[Callable], bool], device: str | None = None) -> bool:
    """Exercise 90.2: whether `holds(f)` tells kernels with a right LSE from those with a wrong one, by a property.

    Every kernel is shown three times, in an order that `holds` can't know. AssertionError says which one it gets wrong.
    """
    source = for_d64("04_fa2_fp32")
    kernels = {"": [load(for_d64(stem), device=device, quiet=True) for stem in ("03_fa1_fp32", "04_fa2_fp32")]}
    for bug, edit in LSE_BUGS.items():
        kernels[bug] = [load(source=source.replace(*edit), device=device, quiet=True)]
    turns = [(bug, kernel) for bug, some in kernels.items() for kernel in some] * 3
    random.shuffle(turns)
    said: dict[str, bool] = {}
    for bug, kernel in turns:
        hidden = _Hidden(kernel)
        with _without_reference():
            verdict = bool(holds(hidden))
        assert hidden.calls >= 1, "a property is one of what f gives, and f was not called"
        said.setdefault(bug, verdict)
        assert said[bug] == verdict, "it judges the same kernel once so and once so"
    assert said.pop(""), "a right kernel fails it"
    assert not any(said.values()), f"it passes a kernel whose LSE is {next(bug for bug in said if said[bug])}"
    return True


# Exercises 91.1 to 91.3


def fixed(exhibit: Unlabelled, fix: tuple[str, str]) -> Kernel:
    """The exhibit's kernel after `fix`, (a piece of its text that occurs once, what belongs there instead), right on all inputs
    of `check`. AssertionError says what is wrong; ValueError if the piece doesn't occur once."""
    assert isinstance(fix, tuple | list) and len(fix) == 2, "fix is a pair: what is there, what belongs there"
    assert all(isinstance(text, str) and text.strip() for text in fix), "fix is empty"
    assert max(len(text.splitlines()) for text in fix) == 1, "one line is enough"
    kernel = exhibit.build(exhibit.broken.replace(*fix))
    check(kernel).require()
    return kernel


def fixed_in_columns(exhibit: Unlabelled, columns: tuple[int, int], fix: tuple[str, str]) -> bool:
    """Exercise 91.1: the fix, and the first and the last column that were wrong."""
    wrong = exhibit.report().comparisons[0].wrong[0, 0].any(0).nonzero()[0]
    assert tuple(columns) == (wrong.min(), wrong.max()), "other columns are wrong"
    return fixed(exhibit, fix) is not None


def fixed_without_conflicts(exhibit: Unlabelled, fix: tuple[str, str]) -> bool:
    """Exercise 91.3: the fix, and no wavefront is lost."""
    ray = xray(fixed(exhibit, fix), *exhibit.case().inputs)
    assert ray.conflicts == 0, f"{ray.conflicts:,} wavefronts are still lost"
    return True


# Exercise 51.1

WAITS = {  # of 51_one_sided, by the place where an exercise leaves them out
    "/* A */": "fa::await_sys(a.signals[a.rank] + tile.rank, a.epoch);",
    "/* B */": "fa::cp_async_bulk_wait_group<1>();",
    "/* C */": "if (!there) fa::await_gpu(arrived, a.epoch);",
}
FLAGS = ("signals[0][1]", "arrived[0]")  # that A and C wait for, in rank 0 of two
ARRIVED = "if (i > 0) fa::publish_gpu(a.arrived + blockIdx.x + (i - 1) * a.copiers, a.epoch);"


def without_waits() -> str:
    """51_one_sided's text with a mark in the place of each of three waits."""
    found = rung("51_one_sided")
    text = found.source
    for place, statement in WAITS.items():
        found.replace(statement, place)  # ValueError unless it occurs once
        text = text.replace(statement, place)
    return text


def waits_for_this_call(source: str) -> bool:
    """Exercise 51.1: whether 51_one_sided's text `source` waits for the flags of its own call, at A and at C, when those of the call
    before are set: first the other one of two ranks has not announced, then no tile's flag is set. AssertionError says what it
    doesn't wait for."""
    keys, values = torch.randn(2, 2, 1, 1, 128, 64).half()
    rooms = one_sided.rooms(keys, values)
    one_sided.together(keys, rooms)
    kernel = load(source=source.replace(ARRIVED, ""), device="cpu", quiet=True)
    kernel.launcher.timeout, kernel.launcher.threads = 2, 1
    for room, place, flag, silent in zip(rooms, "AC", FLAGS, ("the other rank", "the tile's copier")):
        kernel(keys[0], room.k, room.v, peers=room.peers("announce"))
        stopped = ""
        try:
            kernel(keys[0], keys[0], values[0], peers=rooms[0].peers("attend"))
        except KernelError as error:
            stopped = str(error)
        assert f"last looked at {flag}" in stopped, (
            f"{place}: it goes on although {silent} has said nothing in this call"
        )
    return True


# Exercise 99.2


def half_the_bytes(entry: str | Rung) -> bool:
    """Exercise 99.2: whether a kernel, given as source or rung, asks for at most half of what rung 04 asks for beside Q, at
    (1, 2, N, 128), for an N that is drawn; right there and by `check`, and without findings. AssertionError says what is wrong."""
    own = load("04_fa2_fp32", device="cpu", quiet=True)
    mine = load(source=entry if isinstance(entry, str) else entry.source, device="cpu", quiet=True)
    assert mine.rung.source != own.rung.source, "this is rung 04 itself"
    N = 256 * random.choice((1, 2))
    x = torch.randn(3, 1, 2, N, 128)
    asked, beside = [], []
    for kernel in (own, mine):
        ray = xray(kernel, *x)
        read = ray.tensors["bytes_read"]
        asked.append(read.reindex(["K", "V"]).fillna(0))
        beside.append(read.drop(["Q"], errors="ignore").sum())
    assert min(asked[1]) >= x[1].nbytes, "its threads don't read all of K and V: who does the work?"
    share = beside[1] / beside[0]
    assert share <= 1 / 2, f"N = {N}: it asks for {share:.2f} of the bytes that rung 04 asks for"
    assert ray.ok, str(ray.findings[0])
    wrong = [each for each in compare(Case(f"N = {N}", *x), mine(*x)) if not each.ok]
    assert not wrong, wrong[0].explain()
    check(mine).require()
    return True
