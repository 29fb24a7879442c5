"""Why compute-sanitizer flags a mutant and the X-ray doesn't, or the X-ray does and compute-sanitizer doesn't."""

from __future__ import annotations

from fnmatch import fnmatch

from .sanitizer_words import CLEAN

ASYNC = (
    "one of the two accesses is TMA's or wgmma's, made after their instruction: racecheck follows what cp.async.bulk writes, which "
    "it flags elsewhere in 33, but no tensor's copy and nothing that either of them reads"
)
GLOBAL = "a race in global memory: racecheck looks at shared memory alone"
RETURNED = (
    "threads that have returned no longer count at a barrier (since Volta), so that the GPU and its tools go on; the X-ray asks "
    "for every thread of the block, as the source reads"
)
ENDED = "three tools run out of time, which counts only if all four do: under the fourth the program ended"
REGISTERS = "past an array in registers: nvcc has unrolled the loop, and no memory is touched"
# (id, what the X-ray says, who, why), patterns as of file names: the first that fits explains why one side alone speaks.
DISAGREEMENTS = [
    ("*", "uninitialised shared memory*", "X-ray alone", "no tool of compute-sanitizer knows what of shared memory has been written"),
    ("02.barrier-*.2", "race*", "X-ray alone", GLOBAL),
    ("02.thread-index.[89]", "race*", "X-ray alone", GLOBAL),
    ("21.bound-off-by-one.2", "race*", "X-ray alone", GLOBAL),
    ("23.thread-index.1[16]", "race*", "X-ray alone", GLOBAL),
    ("*-returns.*", "divergent barrier*", "X-ray alone", RETURNED),
    ("02.barrier-in-a-branch.2", "divergent barrier*", "X-ray alone", RETURNED),
    ("21.barrier-in-a-branch.3", "divergent barrier*", "X-ray alone", RETURNED),
    ("*.shuffle-of-half.*", "mask*", "X-ray alone", "no tool of compute-sanitizer looks at a shuffle's mask"),
    ("0[12].shuffle-of-half.*", "shuffle*", "X-ray alone", "no tool of compute-sanitizer looks at a shuffle's mask"),
    ("*.barrier-without-a-lane.1", "deadlock*", "X-ray alone", ENDED),
    ("33.named-barrier-removed.1", "mbarrier deadlock*", "X-ray alone", ENDED),
    ("[23]0.grid.1", "division by zero*", "X-ray alone", "an integer division by zero doesn't stop a GPU: the block goes on with some number, and touches nothing it "
     "shouldn't"),
    ("22.bound-*.[56]", "out of bounds*", "X-ray alone", REGISTERS),
    ("22.bound-too-wide.4", "local array overrun*", "X-ray alone", REGISTERS),
    ("2[02].thread-index.[29]", "out of bounds*", "X-ray alone", "what a block is to do is never written to shared memory, which no tool of compute-sanitizer knows; what a GPU has "
     "there leads to no wrong access"),
    ("21.thread-index.4", "out of bounds*", "X-ray alone", "one row past an array in shared memory: memcheck knows where a block's shared memory ends, not "
     "where an array in it does"),
    ("23.thread-index.14", "out of bounds*", "X-ray alone", "the last thread reads past the workspace, for a row that dQ doesn't have: nvcc reads only where the row exists"),
    ("3?.barrier-*.1", "race*", "X-ray alone", "the place of an mbarrier, used before it is initialised: no tool of compute-sanitizer looks there"),
    ("3?.*", "proxy fence*", "X-ray alone", "no tool of compute-sanitizer asks for the fence between ordinary accesses and those of TMA and wgmma"),
    ("3?.wgmma-wait-removed.*", "in flight*", "X-ray alone", "the accumulators of a product under way are used: those are registers, at which no tool of compute-sanitizer "
     "looks"),
    ("3?.*", "in flight*", "X-ray alone", ASYNC),
    ("3?.*", "overwritten*", "X-ray alone", ASYNC),
    ("3?.*", "bulk copy*", "X-ray alone", "a block ends and has not waited for its copies: no tool of compute-sanitizer asks for that"),
    ("33.named-barrier-removed.*", "race*", "X-ray alone", ASYNC),
    ("32.syncwarp-*", "race*", "X-ray alone", ASYNC),
    ("32.syncwarp-of-half.1", "mask*", "X-ray alone", "synccheck, which flags such a mask elsewhere, runs out of time"),
    ("02.every-lane-writes", CLEAN, "GPU alone", "the lanes write one sum, and writes of one value are no race to either side; but nvcc makes an FMA of the sum's products, which "
     "rounds one of them and not the other, so that on the GPU the lanes' sums differ in their last digit"),
    ("33.original", CLEAN, "GPU alone", "not a bug: finish reads from the workspace what backward_wgmma sent there by bulk copies, and initcheck doesn't "
     "see their writes. It knows cp.async.bulk since 2025.4, say its release notes; recorded was 2025.3.1"),
]  # fmt: skip


def explain(id: str, xray: str, who: str) -> str:
    """Why only the GPU's tools, or only the X-ray, flag a mutant; empty if nobody has said."""
    fits = (why for *two, side, why in DISAGREEMENTS if side == who and all(map(fnmatch, (id, xray), two)))
    return next(fits, "")
