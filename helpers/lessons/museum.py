"""The exhibits of notebook 91: bugs of one line that attention kernels have had, or could have.

Each is a rung with one place changed, what it hides behind and what catches it; tests/lessons/test_museum.py holds all three
against runs. Exhibits always run on the emulator: on a GPU several would be right by luck, and one could ruin what runs after it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..evidence.mutants import change
from ..ladder import show
from ..ladder.instances import for_d64
from ..ladder.rung import Rung, parse
from ..run import reference
from ..run.check import Report, check
from ..run.kernel import Kernel, load
from ..run.reference import DTYPES, Case
from ..run.xray import Xray, xray
from .drawings import proof as draw_proof

if TYPE_CHECKING:
    from ..figures.style import Figure
    from ..ladder.show import Listing


# Inputs, each with one thing about it. dtype: that of the tensors; every one is the same on every machine.


def _qkv(N: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random q, k and v (1,1,N,64)."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, N, 64, generator=random).to(dtype) for _ in range(3)]


def _shifted(by: float, dtype: torch.dtype) -> Case:
    """Random inputs with every score larger by `by`, which changes neither P nor O."""
    q, k, v = _qkv(128, dtype)
    q[..., 0], k[..., 0] = 32.0, by / 4  # scale 1/8
    return Case(f"all scores shifted by {by:g}", q, k, v)


def _softmax(masked: bool) -> Case:
    s = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    if masked:
        s[5::4] = -torch.inf
    return Case("rows fully masked" if masked else "random rows", s=s)


INPUTS: dict[str, Callable[[torch.dtype], Case]] = {
    "one tile": lambda t: Case("one tile, N = 64", *_qkv(64, t)),
    "short": lambda t: Case("64 queries, 20 keys", _qkv(64, t)[0], *_qkv(20, t)[1:]),
    "random": lambda t: Case("random, N = 128", *_qkv(128, t)),
    "several tiles": lambda t: Case("random, N = 256", *_qkv(256, t)),
    "not a multiple": lambda t: Case("N = 100", *_qkv(100, t)),
    "very negative": lambda t: _shifted(-1e4, t),
    "very large": lambda t: _shifted(1e4, t),
    "softmax": lambda t: _softmax(False),
    "masked rows": lambda t: _softmax(True),
}


@dataclass(frozen=True)
class Exhibit:
    """`rung` with its one occurrence of `old` replaced by `new`.

    hides: inputs (names in INPUTS) whose every output is right all the same. shows: the input to look at. caught_by:
    "check", a wrong output; "emulator", which stops the kernel; "xray", a finding; "conflicts", the X-ray's count of those.
    sign: a pattern (re.search) in what the check, the emulator or the X-ray says. tile: query rows per CTA, for the lines of the map.
    """

    name: str
    title: str
    rung: str
    old: str
    new: str
    hides: tuple[str, ...]
    shows: str
    caught_by: str
    sign: str
    dtype: str = "fp32"
    tile: int = 0

    @cached_property
    def source(self) -> str:
        """The file for D = 64, with the bug."""
        return for_d64(self.rung).replace(self.old, self.new)

    @cached_property
    def kernel(self) -> Kernel:
        """Built for the emulator; a launch that takes a minute is stopped."""
        return _build(self.rung, self.source)

    def build(self, source: str) -> Kernel:
        """Another text of the same rung, built as the exhibit is."""
        return _build(self.rung, source)

    @cached_property
    def broken(self) -> Rung:
        """The rung as the exhibit has it; `show.region(exhibit.broken, "scores")` shows a part of it."""
        return parse(self.source, Path(f"{self.rung}.cu"))

    def diff(self) -> Listing:
        """From the rung to the exhibit."""
        return show.Listing(
            f"{self.rung}.cu · {self.title}", show.diff(for_d64(self.rung), self.broken, context=3).lines
        )

    def case(self, name: str = "") -> Case:
        """An input by its name; the one that shows the bug if none is given."""
        return INPUTS[name or self.shows](DTYPES[self.dtype])

    def report(self, name: str = "") -> Report:
        """The check of one input."""
        return check(self.kernel, [self.case(name)])

    def xray(self, name: str = "") -> Xray:
        """The X-ray of one input."""
        return xray(self.kernel, *self.case(name).inputs)

    def in_other_orders(self, count: int = 4, name: str = "") -> list[bool]:
        """Whether the output is right when the emulator's threads take turns in other orders, drawn from seeds 1 to `count`;
        prints each verdict."""
        verdicts = []
        for seed in range(1, count + 1):
            self.kernel.launcher.schedule = seed
            try:
                report = self.report(name)
            finally:
                self.kernel.launcher.schedule = 0
            verdict = "right" if report.ok else f"WRONG, by {report.worst:,.0f} budgets"
            print(f"{self.case(name).name}, order {seed}: {verdict}")
            verdicts.append(report.ok)
        return verdicts

    def outputs(self, name: str = "") -> tuple[np.ndarray, np.ndarray]:
        """O of its first head as the kernel computes it and as float64 has it, two arrays (N, D)."""
        case = self.case(name)
        got, expected = self.kernel(*case.inputs)[0], reference.attention(*case.inputs)[0]
        return got[0, 0].double().cpu().numpy(), expected[0, 0].cpu().numpy()

    def right_rows(self, name: str = "") -> int:
        """How many rows of O have no element that is wrong."""
        wrong = self.report(name).comparisons[0].wrong
        return int((~wrong.any(axis=-1)).sum())

    def visit(self) -> Figure | None:
        """Prints what the check says of inputs that hide the bug and of the one that shows it, and what the X-ray finds if
        that is what catches it; gives back the error map if it shows a pattern."""
        for name in self.hides:
            print(f"{self.case(name).name}: {'right' if self.report(name).ok else 'WRONG'}")
        report, name = self.report(), self.case().name
        if self.caught_by == "emulator":
            print(f"{name}: stopped")
            for line in report.failures[0].problem.partition(": ")[2].splitlines():
                print(textwrap.fill(line, 116, initial_indent="  ", subsequent_indent="    "))
            return None
        if self.caught_by == "check":
            print("\n".join(c.explain() for c in report.failures))
            return self.map() if self.has_pattern else None
        print(f"{name}: {'right' if report.ok else 'WRONG'}\n\n{self.evidence()}")
        return None if report.ok else self.map()

    def fix(self, was: str = "", becomes: str = "") -> None:
        """Puts the rung's own text back or, where given, `becomes` for `was` in the text that has the bug; then looks again
        at all inputs of `visit`, and prints "fixed" or what is still wrong. ValueError if the bug's text has no `was`."""
        if was not in self.new:
            raise ValueError(f"{was!r} isn't in the text that has the bug, {self.new!r}")
        fixed = replace(self, new=self.new.replace(was, becomes) if was else self.old)
        names = dict.fromkeys((*self.hides, self.shows))
        wrong = [c.explain() for name in names for c in fixed.report(name).failures] or [fixed.evidence()]
        if any(wrong):
            print("not fixed\n" + "\n".join(wrong))
            return
        print("fixed: right on " + "; ".join(self.case(name).name for name in names))
        if self.caught_by in ("xray", "conflicts"):
            print("the X-ray finds nothing")

    def map(self) -> Figure:
        """Where the outputs are wrong, on the input that shows it."""
        o, *lse = self.report().comparisons
        return draw_proof.error_map(o, lse[0] if lse else None, self.tile, f"{self.title} · {o.case}")

    @property
    def has_pattern(self) -> bool:
        """Whether a map of O shows more than one shade: it is neither right nor all NaN."""
        o = self.report().comparisons[0]
        return o.wrong is not None and bool(o.wrong.any()) and not np.isnan(o.error_map).all()

    def evidence(self) -> str:
        """What its catcher says of the input that shows the bug; empty if that says nothing."""
        if self.caught_by == "xray":
            ray = self.xray()
            return "\n".join(ray.report(f) for f in ray.findings)
        if self.caught_by == "conflicts":
            ray, whole = self.xray(), xray(_build(self.rung, for_d64(self.rung).source), *self.case().inputs)
            words = f"{ray.conflicts:,} wavefronts lost to bank conflicts; {whole.conflicts:,} in the rung"
            return f"{words}\n{ray.line(ray.worst('shared').line)}" if ray.conflicts > 2 * whole.conflicts else ""
        return "\n".join(c.explain() for c in self.report().failures)

    @property
    def caught(self) -> bool:
        """Caught by what is said to catch it, with the sign that is stated."""
        return re.search(self.sign, self.evidence()) is not None


class Unlabelled:
    """An exhibit that a reader has to fix: it can be looked at, and says neither what was changed nor where."""

    __slots__ = ("__exhibit",)

    def __init__(self, exhibit: Exhibit) -> None:
        self.__exhibit = exhibit

    @property
    def title(self) -> str:
        return self.__exhibit.title

    @property
    def broken(self) -> Rung:
        """The rung as the exhibit has it; `show.region(exhibit.broken, "scores")` shows a part of it."""
        return self.__exhibit.broken

    @property
    def kernel(self) -> Kernel:
        """Built for the emulator."""
        return self.__exhibit.kernel

    def build(self, source: str) -> Kernel:
        """Another text of the same rung, built as the exhibit is."""
        return self.__exhibit.build(source)

    def case(self, name: str = "") -> Case:
        """An input by its name; the one that shows the bug if none is given."""
        return self.__exhibit.case(name)

    def report(self, name: str = "") -> Report:
        """The check of one input."""
        return self.__exhibit.report(name)

    def outputs(self, name: str = "") -> tuple[np.ndarray, np.ndarray]:
        """O as the kernel computes it and as float64 has it: see Exhibit."""
        return self.__exhibit.outputs(name)

    def visit(self) -> Figure | None:
        """What the check and the X-ray say: see Exhibit."""
        return self.__exhibit.visit()


def _build(stem: str, source: str) -> Kernel:
    """A rung's text, changed, for the emulator, which names it by the rung's file."""
    built = load(parse(source, Path(f"{stem}.cu")), device="cpu", quiet=True)
    built.launcher.timeout = 60
    return built


def _exhibit(name: str, title: str, mutant: str, *rest: Any, **options: Any) -> Exhibit:
    """An exhibit of a bug in the catalogue, by its id there."""
    return Exhibit(name, title, *change(mutant), *rest, **options)


_EXHIBITS = [
    _exhibit("max_from_zero", "A maximum that starts at zero", "04.max-from-zero",
             ("random", "not a multiple"), "very negative", "check", "got 0, expected", tile=128),
    _exhibit("l_not_rescaled", "A sum that is not rescaled", "04.l-not-rescaled",
             ("one tile",), "several tiles", "check", "runs; column all", tile=128),
    _exhibit("tail_not_masked", "Zero is not nothing", "04.tail-not-masked",
             ("one tile", "random", "several tiles"), "not a multiple", "check", "row all; column all", tile=128),
    _exhibit("inf_minus_inf", "Infinity minus infinity", "02.inf-minus-inf",
             ("softmax",), "masked rows", "check", "elements NaN"),
    _exhibit("lse_in_log2", "The output nobody looks at", "04.lse-in-log2",
             (), "random", "check", r"\A.*\n.*worst at LSE", tile=128),
    _exhibit("no_opt_in", "The launch that never happened", "04.no-opt-in",
             (), "random", "check", "elements never written", tile=128),
    _exhibit("early_return", "A thread that returns early", "03.early-return",
             ("random", "several tiles"), "not a multiple", "emulator", "divergent barrier", tile=64),
    _exhibit("tail_not_filled", "Zero times garbage", "03.tail-not-filled",
             ("random", "not a multiple"), "short", "emulator", "uninitialised shared memory", tile=64),
    _exhibit("past_the_end", "Reading a little further", "04.past-the-end",
             (), "not a multiple", "emulator", "out of bounds", tile=128),
    _exhibit("no_last_barrier", "The barrier that nobody missed", "10.no-last-barrier",
             ("random", "not a multiple"), "several tiles", "xray", "race.*(\n.*)*__sync", dtype="fp16", tile=64),
    _exhibit("no_syncwarp", "In lock step", "03.no-syncwarp",
             ("not a multiple",), "random", "xray", "race.*(\n.*)*__syncwarp", tile=64),
    _exhibit("no_trans", "Five letters", "10.no-trans",
             (), "random", "check", r"\A.*\n.*\n.*row all; column all\Z", dtype="fp16", tile=64),
    _exhibit("one_sided_swizzle", "A swizzle on one side", "11.one-sided-swizzle",
             (), "random", "check", "row 1–7, 9–15, 17–23, 25–31", dtype="fp16", tile=64),
    _exhibit("waits_for_one_less", "Waiting for one less", "12.waits-for-one-less",
             (), "random", "emulator", "in flight", dtype="fp16", tile=64),
    _exhibit("rounded_scores", "65504", "10.rounded-scores",
             (), "very large", "check", "elements NaN", dtype="fp16", tile=64),
]  # fmt: skip
EXHIBITS = {e.name: e for e in _EXHIBITS}

_UNLABELLED = [
    _exhibit("A", "Exhibit A", "04.half-of-O-rescaled",
             ("one tile",), "random", "check", "column 32–63", tile=128),
    _exhibit("B", "Exhibit B", "04.half-row-sum",
             (), "random", "check", "row all; column all", tile=128),
    _exhibit("C", "Exhibit C", "03.pitch-of-8",
             ("not a multiple",), "random", "conflicts", "16,384 wavefronts lost to bank conflicts; 0 in the rung", tile=64),
]  # fmt: skip
UNLABELLED = {e.name: Unlabelled(e) for e in _UNLABELLED}
