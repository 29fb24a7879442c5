"""compute-sanitizer finds nothing in any rung, on a GPU: memory, races, uninitialised reads, barriers. And what racecheck
does not follow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated import build

from helpers import rung, rungs
from helpers import sanitize as sanitizing
from helpers.evidence.mutants import Mutant
from helpers.evidence.sanitizer_words import CLEAN
from helpers.ladder.contract import Call, FaArgs
from helpers.run.kernel import cuda_refusal

ROOT = Path(__file__).parents[2]
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]

# Tails in every dimension, each D, one tile and several, masks, groups of heads, packed and paged batches; a process per
# tool, since starting one is what takes long.
CALLS = """
import sys
import torch
from helpers import load, rung, rungs
from helpers.run.kernel import cuda_refusal
from helpers.run.reference import cases, random_inputs
torch.manual_seed(0)
for r in rungs():
    if cuda_refusal(r):
        print(r.stem, "ran")  # nowhere on this GPU
        continue
    kernel = load(r.stem, device="cuda", quiet=True)
    features = []
    if r.op == "softmax":
        shapes = [(3, 1), (5, 1023), (2, 4096), (3, 33001), (1, 200003)]
        calls = [(torch.randn(shape, device="cuda"),) for shape in shapes]
    else:
        sizes = [(1, 1), (129, 70), (65, 130)]
        calls = [
            random_inputs(r, (1, 2, Nq, Nk, D), dtype, "cuda")
            for dtype in r.dtypes for D in (r.D or (33, 64)) for Nq, Nk in sizes
        ]
        asked = ("causal, Nq=129", "window 65", "8 heads on 2", "packed", "pages of 48", "11 splits")
        features = [c for c in cases(r, "cuda") if any(words in c.name for words in asked)]
    for inputs, options in [*((x, {}) for x in calls), *((c.inputs, c.options) for c in features)]:
        kernel(*inputs, **options)
        torch.cuda.synchronize()
    print(r.stem, "ran")
if "wrong" in sys.argv:
    bad = rung("01_naive").replace("if (i >= a.Nq || c >= a.D) return;", "if (i > a.Nq || c >= a.D) return;")
    q, k, v = (torch.randn(1, 1, 8, 64, device="cuda") for _ in range(3))
    load(source=bad, device="cuda", quiet=True)(q, k, v)
    torch.cuda.synchronize()
"""


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer, "compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
    # Without torch's caching allocator each tensor is an allocation of its own, with bounds the tools know.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    if tool == "initcheck":
        # finish and add_heads of 33 read what bulk copies have written, and initcheck doesn't see that
        # (helpers/evidence/disagreements.py). Those of 23 have the same names; the record of seeded bugs has 23 as it is, clean.
        for kernel in ("finish", "add_heads"):
            command += ["--kernel-name-exclude", f"kernel_substring={kernel}"]
    command += [sys.executable, "-c", CALLS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_every_rung_is_clean(tool):
    done = sanitize(tool)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [line for line in done.stdout.splitlines() if line.endswith(" ran")] == [f"{r.stem} ran" for r in rungs()]


@pytest.mark.gpu
def test_a_missing_bounds_check_is_found():
    """The test above bites: a rung that writes one row too many is flagged."""
    done = sanitize("memcheck", "wrong")
    assert done.returncode == 9 and "Invalid __global__" in done.stdout


# How the readers of a TMA pipeline give its place back (releases.cu): the number it is asked for by, whether that is right,
# and whether racecheck reports it. One arrival behind a barrier of all who read orders them all: "mbarrier.arrive" releases,
# and barriers are transitive. racecheck counts the reads of the thread that arrives, and no others.
RELEASES = {
    "every thread for itself": (1, True, False),
    "a lane of each warp, behind a __syncwarp": (2, True, True),
    "one thread, behind a barrier of all": (3, True, True),
    "one thread, behind nothing": (4, False, True),
}
SOURCE = Path(__file__).with_name("releases.cu").read_text()
Nq, D = 8, 128


@pytest.mark.parametrize("how", RELEASES)
def test_the_emulator_tells_right_releases_from_wrong_ones(how):
    number, right, _ = RELEASES[how]
    Q, O = torch.arange(float(Nq * D)).view(Nq, D), torch.empty(D)  # noqa: E741
    args = FaArgs(B=1, H=number, Nq=Nq, Nk=1, D=D, scale=1.0, Q=Q.data_ptr(), O=O.data_ptr())
    found = build(SOURCE).trace(Call(args, {"Q": Q}, {"O": O})).findings
    assert torch.equal(O, Q.sum(0).roll(-1)) and [f.kind for f in found] == ([] if right else ["race"])


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_refusal(rung("33_backward_wgmma"))), reason="cp.async.bulk needs a Hopper GPU")
@pytest.mark.parametrize("how", RELEASES)
def test_racecheck_takes_an_arrival_to_speak_for_one_thread(how, tmp_path):
    number, _, reported = RELEASES[how]
    program = sanitizing.build(Mutant(how, "33_backward_wgmma", "", 0, SOURCE), tmp_path)
    numbers = [0, 0, 1, number, 1, Nq, 1, D, 4, 0, 1, 0, 0, 0, 0]  # as calls.cpp takes them
    said = sanitizing.sanitize(program, numbers, "racecheck", seconds=60)
    assert said.startswith("race") if reported else said == CLEAN
