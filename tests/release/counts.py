"""Prints a digest of what the X-ray counts, a line for each kernel: the same on every machine and with every compiler.

    python tests/release/counts.py > here; diff here there
    python tests/release/counts.py --rows 04_ micro      # every count of the kernels whose names begin so

Every rung at its smallest useful shapes, in each dtype and with each of its masks; every micro-kernel and access pattern of
helpers/evidence; every room of notebook 91's museum. What is counted: requests, bytes, wavefronts and sectors by source line
and tensor, bytes by tensor, instructions, findings.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator

from helpers.emulator.trace import Trace
from helpers.evidence import counters
from helpers.ladder.contract import prepare
from helpers.ladder.rung import rungs
from helpers.run.kernel import Kernel
from helpers.run.reference import random_inputs
from helpers.run.xray import xray

Run = tuple[str, Callable[[], Trace]]


def of_rungs() -> Iterator[Run]:
    for rung in rungs():
        kernel = Kernel(rung, "cpu")
        D = max(D for D in rung.D or (64,) if D <= 64)
        B, H, N = 1, 2, 150  # the last of several tiles is a part of one
        shape = (1, 1, 40, 300, 1) if rung.op == "softmax" else (B, H, N, N, D)
        for dtype in rung.dtypes:
            for causal in (False, True) if "causal" in rung.features else (False,):
                options = {**counters.options(rung), **({"causal": True} if causal else {})}
                name = f"{rung.stem} {dtype}" + " causal" * causal
                yield (
                    name,
                    lambda k=kernel, d=dtype, o=options, s=shape: xray(k, *random_inputs(k.rung, s, d), **o).trace,
                )


def of_single_accesses() -> Iterator[Run]:
    for kind in ("microkernels", "patterns"):
        made = counters.singles(kind)
        kernel = Kernel(made.rung, "cpu")
        for name, (inputs, scale) in zip(made.names, made.calls, strict=True):
            yield (
                f"{kind} {name}",
                lambda k=kernel, i=inputs, s=scale: k.launcher.trace(prepare(k.rung, "cpu", i, scale=s)),
            )


def rows(trace: Trace) -> list[str]:
    """Every count, a line each, in an order of their own."""
    found = [
        f"{a.kernel} {a.file}:{a.line} {a.op} {a.space} {a.target} {a.width}: "
        f"{a.requests} requests, {a.bytes} bytes, cost {a.cost}, ideal {a.ideal}, worst {a.worst}"
        for a in trace.accesses
    ]
    found += [f"{name}: {numbers}" for name, numbers in trace.tensors.items()]
    found += [f"instruction {name}: {count}" for name, count in trace.instructions.items()]
    found += [f"finding {f.kind} {f.file}:{f.line} {f.other_line} {f.count}" for f in trace.findings]
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="how a kernel's name begins; all by default")
    parser.add_argument("--rows", action="store_true", help="every count, not their digest alone")
    wanted = parser.parse_args()
    for runs in (of_rungs(), of_single_accesses()):
        for name, run in runs:
            if wanted.names and not name.startswith(tuple(wanted.names)):
                continue
            counted = rows(run())
            print(name, hashlib.sha256("\n".join(counted).encode()).hexdigest()[:12], flush=True)
            if wanted.rows:
                print(*(f"    {row}" for row in counted), sep="\n")


if __name__ == "__main__":
    main()
