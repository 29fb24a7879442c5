"""Host code that ends its process ends fa_launch alone: a KernelError says what and where, on both back ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import endings
import pytest
import torch
from emulated import FILE
from endings import IN_A_KERNEL, NOT_HERE, WAYS, line_of

from helpers import KernelError, load

TOOLS = Path(endings.__file__).parent
ROOT = TOOLS.parents[1]
BACK_ENDS = ("nvcc", "emulator")


@pytest.fixture(scope="module")
def ran():
    """What gives, for a back end, endings.py's records of launches by name, and all that it wrote."""

    @cache
    def run(back_end: str) -> tuple[dict[str, dict], subprocess.CompletedProcess[str]]:
        program = subprocess.run(
            [sys.executable, endings.__file__, back_end],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TOOLS)])},
            capture_output=True,
            text=True,
            timeout=600,  # of a hang,
        )
        records = [json.loads(line) for line in program.stdout.splitlines() if line.startswith("{")]
        by_name = {record["name"]: record for record in records}
        assert len(by_name) == len(records), "a forked child has come back"
        return by_name, program

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_launcher_that_ends_the_process_raises(ran, back_end, name):
    records, _ = ran(back_end)
    assert name in records, "the program has ended before"
    assert records[name]["next"] == ""  # the launch after it, which finds no exception left over
    words = WAYS[name][1]
    for text in (records[name]["first"], records[name]["again"]):
        assert words in text and bool(words) == bool(text)
        if words and name not in NOT_HERE:
            assert text.startswith(f"{FILE}:{line_of(name)}: ")


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_process_goes_on_and_its_handlers_run_at_its_own_end(ran, back_end):
    _, program = ran(back_end)
    assert program.returncode == 0, program.stderr
    before, _, after = program.stdout.partition('{"name": "done"}')
    assert "handlers of the process ran" not in before and "handlers of the process ran" in after


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_what_a_launcher_has_printed_is_there_when_it_raises(ran, back_end):
    _, program = ran(back_end)
    for i, name in enumerate(WAYS, 1):
        if WAYS[name][1]:
            assert f'printed {i} streamedprinted {i} streamed\n{{"name": "{name}"' in program.stdout
            assert re.search(rf"reason {i}(?!\d).*reason {i}(?!\d)", program.stderr)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_launcher_in_another_thread_raises_too(ran, back_end):
    records, _ = ran(back_end)
    assert records["in a thread"]["first"] == records["exit"]["first"]


@pytest.mark.parametrize("name", IN_A_KERNEL)
def test_a_kernel_that_calls_what_only_host_code_can_is_a_finding(ran, name):
    record = ran("emulator")[0][name]  # nvcc refuses it
    assert record["first"] == f"{FILE}:{line_of(name)}: host function in kernel: {IN_A_KERNEL[name][1]}"
    assert record["next"] == ""


def test_a_trace_of_a_launcher_that_exits_has_it_as_a_finding(ran):
    record = ran("emulator")[0]["traced"]
    assert (record["kind"], record["line"]) == ("exit", line_of("exit"))


CHECKED = """#include <fa/args.cuh>
#include <cstdio>
#include <cstdlib>
#define CUDA_CHECK(call) \\
  do { \\
    cudaError_t error = (call); \\
    if (error != cudaSuccess) fprintf(stderr, "CUDA: %s\\n", cudaGetErrorString(error)), exit(1); \\
  } while (0)
__global__ void kernel(float* o) { o[threadIdx.x] = 1; }
extern "C" cudaError_t fa_launch(const fa_args* args, cudaStream_t stream) {
  kernel<<<1, args->Nk == 1 ? 2048 : 1, 0, stream>>>(static_cast<float*>(args->O));
  CUDA_CHECK(cudaPeekAtLastError());
  return cudaGetLastError();
}
"""


@pytest.mark.gpu
def test_on_a_gpu_cudas_error_is_told_with_the_exit_and_taken_back(capfd):
    kernel = load(source=CHECKED, quiet=True)
    q, k = torch.zeros(1, 1, 1, 64, device="cuda"), torch.zeros(1, 1, 2, 64, device="cuda")
    words = r"cell:12: exit in the launcher: fa_launch calls exit\(1\)[\s\S]*CUDA error: invalid (?:configuration )?argument"
    with pytest.raises(KernelError, match=words):
        kernel(q, q, q)
    assert "CUDA: invalid " in capfd.readouterr().err
    assert kernel(q, k, k)[0].flatten()[0] == 1
    torch.cuda.synchronize()
