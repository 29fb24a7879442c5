"""A tool of the emulator is one more file: this one, added to the runtime as it is, sees every access and every barrier."""

import ctypes

import emulated
import pytest
import torch
from emulated import program
from test_trace import traced

from helpers import fragments, load
from helpers.emulator import launcher
from helpers.emulator.native import open_runtime
from helpers.ladder.contract import prepare
from helpers.run.reference import random_inputs
from helpers.toolchain import build

TOOL = """
#include <atomic>
namespace emu {
static std::atomic<uint64_t> counted[4];  // bytes in shared memory and in tensors, barriers, blocks
struct Counting final : Watcher {
  explicit Counting(Worker* worker) : Watcher(worker, kMemory | kExecution) {}
  void access(const Access& a) override { counted[a.target == kShared ? 0 : 1] += a.bytes; }
  void completed(const BarrierPoint& b) override { counted[2] += b.kind == BarrierPoint::Block; }
  void end_block() override { ++counted[3]; }
};
struct CountingTool final : Tool {
  std::unique_ptr<Watcher> watch(Worker* w) override { return std::make_unique<Counting>(w); }
  void begin_session() override { for (auto& c : counted) c = 0; }
};
static CountingTool counting_tool;
static const Listed counting_listed(&counting_tool);
extern "C" void emu_counted(uint64_t* out) { for (int i = 0; i < 4; ++i) out[i] = counted[i]; }
}  // namespace emu
"""


@pytest.fixture(scope="module")
def runtime():
    """The runtime with one more tool, in the place of the one that launchers use."""
    halves = [
        f'{fragments.tables()}#include "{launcher.HERE / "runtime" / name}.cpp"\n'
        for name in ("emulator", "interpreter")
    ]
    texts = [*launcher._texts(launcher.HERE / "runtime"), *launcher._texts(launcher.INCLUDE / "emulator")]
    flags = ["-std=c++17", "-O0", "-pthread"]
    built = build("emulator_with_tool", cpp=[halves[0] + TOOL, halves[1]], flags=flags, depends=texts)
    library = open_runtime(str(built.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_runtime", lambda: (built.path, library))
        yield library


def counted(library) -> list[int]:
    out = (ctypes.c_uint64 * 4)()
    library.emu_counted(out)
    return list(out)


def test_a_tool_is_told_of_what_a_kernel_does(runtime):
    body = """
      __shared__ float4 tile[64];
      tile[threadIdx.x] = float4{1, 2, 3, 4};
      __syncthreads();
      out[blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x].x;
      __syncthreads();
    """
    launcher, out = emulated.build(program(body, "3, 64")), torch.zeros(192)
    traced(launcher, out)
    assert counted(runtime) == [3 * 64 * (16 + 4), 3 * 64 * 4, 3 * 2, 3]
    assert out.tolist() == [1.0] * 192
    emulated.launch(launcher, out)
    assert counted(runtime) == [0, 0, 0, 0]  # a plain launch is watched by those tools alone that say so


def test_a_tool_sees_every_access_that_a_trace_counts(runtime):
    kernel = load("31_warp_specialized", device="cpu", quiet=True)
    call = prepare(kernel.rung, "cpu", random_inputs(kernel.rung, (1, 1, 64, 64, 64)))
    found = kernel.launcher.trace(call)
    tensors = sum(a.bytes for a in found.accesses if a.space == "global")
    by_threads = sum(a.bytes for a in found.accesses if a.space == "shared" and a.op not in launcher.BULK)
    assert counted(runtime)[:2] == [by_threads, tensors]
    assert by_threads > 0
    assert {a.op for a in found.accesses} & set(launcher.BULK)
