"""A trace's counts against those worked out by hand: helpers/evidence/microkernels.py has the kernels and the numbers."""

from dataclasses import replace

import pytest

from helpers import load
from helpers.emulator.trace import Trace
from helpers.evidence.microkernels import MICROS, Count, Micro, inputs, source
from helpers.ladder.contract import prepare
from helpers.run.kernel import Kernel

TEXT = source()


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return load(source=TEXT, device="cpu", quiet=True)


def trace(kernel: Kernel, micro: Micro) -> Trace:
    return kernel.launcher.trace(prepare(kernel.rung, "cpu", inputs(), scale=float(MICROS.index(micro))))


def found(traced: Trace, marks: dict[int, int]) -> list[Count]:
    """What the trace has of every marked line."""
    mark = {line: number for number, line in marks.items()}
    accesses = [a for a in traced.accesses if a.line in mark]
    return [
        Count(mark[a.line], a.op, a.space, a.width, a.requests, a.cost, a.ideal, a.bytes, a.target) for a in accesses
    ]


def lines(text: str, name: str) -> dict[int, int]:
    """The line of `text`, from `source()`, that each mark of a micro-kernel stands on."""
    micro = next(m for m in MICROS if m.name == name)
    begin = text.index(f"micro_{name}(const fa_args a)") - len(micro.before) - 20
    end = text.index("  out[threadIdx.y * blockDim.x + t] = x;\n}", begin)
    found = {}
    for number, line in enumerate(text[:end].split("\n"), 1):
        mark = line.rpartition("// ")[2]
        if number > text.count("\n", 0, begin) and line.rstrip().endswith(f"// {mark}") and mark.isdigit():
            found[int(mark)] = number
    return found


@pytest.mark.parametrize("micro", MICROS, ids=lambda m: m.name)
def test_counts_are_those_worked_out_by_hand(kernel, micro):
    marks = lines(TEXT, micro.name)
    assert {c.mark for c in micro.counts} <= marks.keys()
    for schedule, threads in ((0, 1), (7, 2)):
        kernel.launcher.schedule, kernel.launcher.threads = schedule, threads
        traced = trace(kernel, micro)
        counts = found(traced, marks)
        assert len(counts) == len(micro.counts)
        for wanted in micro.counts:
            assert wanted in [c if wanted.target else replace(c, target="") for c in counts]
        assert traced.findings == ()
        assert {a.kernel for a in traced.accesses} == {f"micro_{micro.name}"}
