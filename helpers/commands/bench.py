"""Times kernels beside their peers on this GPU, at a few shapes; records nothing.

A kernel is checked first: a wrong one is not timed and gives 1, as a machine without a GPU does. `record rungs` takes the
samples of every shape and records them.
"""

from __future__ import annotations

import argparse

from .arguments import add_kernels, for_this_gpu

EXAMPLES = ("bench 04", "bench mine.cu", "bench")


def options(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "all rungs that this GPU can run by default")


def run(arguments: argparse.Namespace) -> int:
    from ..measure import bench, recording

    bench.require_gpu()
    for rung in for_this_gpu(arguments.kernels):
        print(rung.stem, flush=True)
        recording.time_quickly(rung)
    return 0
