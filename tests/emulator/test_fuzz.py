"""Kernels made at random, many of them wrong: whatever they do, a launch or a trace ends, and the process lives on."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS, RUNS = 24, 80

MASKS = ("0xffffffffu", "0x0000ffffu", "0x0000000fu", "0xaaaaaaaau", "__activemask()")
BEFORE = """#include <fa/sm80.cuh>
__device__ __noinline__ int deep(int n) { volatile int y[16]; y[n & 15] = n; return n < 0 ? 0 : deep(n - (n < 1 << 20)) + y[0]; }
__device__ __noinline__ float shared_part(float *s, int t) { if (t % 3 == 0) return s[t % 64]; return s[(t + 7) % 64] + 1; }
"""


class Maker:
    """Kernel bodies, drawn from `seed`. They see t, lane, s and z (shared), d (dynamic shared), x and i."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tame = False  # nothing that is wrong, or that depends on the order of threads

    def number(self, *choices: int) -> int:
        return self.random.choice(choices)

    def condition(self) -> str:
        k, m = self.number(1, 2, 3, 5, 31, 32, 40), self.number(2, 3, 7, 32)
        return self.random.choice(
            [f"t < {k}", f"t % {m} == 0", f"lane > {k % 32}", f"(t & {k}) != 0", "x > 3", f"blockIdx.x == {k % 4}"]
        )

    def right(self, depth: int) -> str:
        k, c = self.number(1, 2, 3, 4, 8, 33), self.number(0, 1, 5, 31)
        together = (
            ["__syncthreads();", "__syncwarp();", "x += __shfl_xor_sync(0xffffffffu, t, 0);"] if depth == 0 else []
        )
        return self.random.choice(
            [
                f"x += s[(t * {k} + {c}) % 64];", f"x += in[(t * {k} + {c}) % 64];", f"x += shared_part(s, t + {c});",
                "if (t < 64) out[t] = 1;", "x += reinterpret_cast<const float4 *>(s)[t % 16].y;", f"atomicAdd(&z[(t + {c}) % 4], 1);",
                "x += reinterpret_cast<const float2 *>(in)[t % 7].x;", *together,
            ]
        )  # fmt: skip

    def plain(self) -> str:
        k, c = self.number(1, 2, 3, 4, 8, 33), self.number(0, 1, 5, 31, 100)
        return self.random.choice(
            [
                f"x += s[(t * {k} + {c}) % 64];", f"s[(t * {k} + {c}) % 64] = x;", f"s[(t + {c}) % 64] = t;",
                f"x += in[(t * {k}) % 64];", f"out[(t + {c}) % 64] = x;", f"atomicAdd(&z[{c} % 4], 1);",
                f"atomicAdd(out + {c} % 64, x);", f"x += shared_part(s, t + {c});", "x += __popc(__ballot_sync(__activemask(), x > 1));",
                "reinterpret_cast<float4 *>(s)[t % 16] = make_float4(x, x, x, x);", "__threadfence();", f"d[t % {k + 1}] = x;",
                "fa::cp_async_16(reinterpret_cast<float4 *>(s) + t % 16, in + t % 16 * 4);", "fa::cp_async_commit();", "fa::cp_async_wait<0>();",
                "{ float y[8]; for (int j = 0; j < 8; ++j) y[j] = x * j; x += y[t % 8]; }",
            ]
        )  # fmt: skip

    def risky(self) -> str:
        mask, k = self.random.choice(MASKS), self.number(0, 1, 5, 17)
        return self.random.choice(
            [
                f"__syncwarp({mask});", f"x += __shfl_xor_sync({mask}, x, {k});", f"x += __shfl_sync({mask}, x, t + {k});", "__syncthreads();",
                f"if (t == {k}) return;", "x += __syncthreads_or(x > 2);", "{ uint32_t r[4]; fa::ldmatrix_x4(r, s + lane * 4); x += r[0]; }",
            ]
        )  # fmt: skip

    def wrong(self) -> str:
        k = self.number(0, 3, 31, 40)
        return self.random.choice(
            [
                f"x += s[t + {k}];", f"out[t + {k + 30}] = x;", f"x += in[t - {k}];", "__trap();", f"assert(t < {k});", "x += deep(1 << 21);",
                "while (in[0] == 0 || x == x) {}", "for (;;) __syncwarp();", f"x += t / (t % {k + 1} * a.H - a.H);", f"*reinterpret_cast<float *>({k}ll << 40) = x;",
                "reinterpret_cast<float4 *>(out + 1)[t % 4] = make_float4(1, 2, 3, 4);", "{ volatile char big[1 << 19]; big[t] = 1; x += big[t + 1]; }",
                "x += d[1 << 20];", 'printf("%s", reinterpret_cast<const char *>(16));', "abort();", 'printf("%f\\n", x);',
                "x += reinterpret_cast<const float *>(&s)[1 << 12];", "__builtin_trap();",
            ]
        )  # fmt: skip

    def block(self, depth: int) -> str:
        return "{ " + " ".join(self.statement(depth + 1) for _ in range(self.number(1, 2, 3))) + " }"

    def statement(self, depth: int) -> str:
        roll = self.random.random()
        if roll < 0.12 and depth < 3:
            return f"if ({self.condition()}) {self.block(depth)} else {self.block(depth)}"
        if roll < 0.2 and depth < 3:
            return f"if ({self.condition()}) {self.block(depth)}"
        if roll < 0.28 and depth < 3:
            return f"for (int i = 0; i <= t % {self.number(1, 2, 4)}; ++i) {self.block(depth)}"
        if self.tame:
            return self.right(depth)
        return self.plain() if roll < 0.86 else self.risky() if roll < 0.97 else self.wrong()

    def kernel(self, tame: bool) -> str:
        self.tame = tame
        return "\n".join(self.statement(0) for _ in range(self.number(3, 6, 10)))


def source(seed: int) -> str:
    """A launcher that takes kernel, grid, block and dynamic shared memory from `fa_args`."""
    maker = Maker(seed)
    kernels = [
        f"""__global__ void kernel_{i}(const fa_args a) {{
        __shared__ __align__(16) float s[64];
        __shared__ int z[4];
        extern __shared__ float d[];
        const int t = threadIdx.x + blockDim.x * threadIdx.y, lane = t % 32;
        const float *in = static_cast<const float *>(a.Q);
        float *out = static_cast<float *>(a.O), x = t;
        for (int i = t; i < {64 if i % 4 == 1 else "64 && i == t"}; i += blockDim.x * blockDim.y) s[i] = i;
        for (int i = t; i < 4; i += blockDim.x * blockDim.y) z[i] = 0;
        {"__syncthreads();" if i % 4 else ""}
        {maker.kernel(tame=i % 4 == 1)}
        if (x == -1.5f) out[0] = s[0] + d[0] + z[0] + lane;
        }}"""
        for i in range(KERNELS)
    ]
    cases = "\n".join(
        f"case {i}: kernel_{i}<<<dim3(a.B, a.Nq), dim3(a.Nk, a.D), a.dtype>>>(a); break;" for i in range(KERNELS)
    )
    return f"""#include <fa/args.cuh>
    {BEFORE}{chr(10).join(kernels)}
    extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t) {{
      fa_args a = *args;
      const int which = a.H;
      a.H = 1;
      switch (which) {{ {cases} }}
      return cudaGetLastError();
    }}"""


def play(seed: int) -> None:
    """Launches and traces kernels of `source(seed)` in random shapes, saying what comes next; then one that is right."""
    import torch
    from emulated import build, run

    from helpers.emulator.trace import Trace
    from helpers.ladder.contract import Call, FaArgs
    from helpers.ladder.errors import KernelError

    draw = random.Random(seed)
    launcher = build(source(seed))
    outcomes = {"ran": 0, "stopped": 0, "refused": 0, "same": 0}
    for number in range(RUNS):
        q, o = torch.arange(64.0), torch.zeros(64)
        shape = {
            "B": draw.choice([1] * 9 + [2] * 5 + [5, 5, 5, 40, 40, 0]),
            "Nq": draw.choice([1] * 12 + [2, 3, 65536]),
            "Nk": draw.choice([1, 31, 32, 32, 32, 33, 64, 64, 96, 200, 333, 1024, 1025]),
            "D": draw.choice([1] * 8 + [2, 3]),
            # dynamic shared memory; the kernels have up to 512 bytes of their own
            "dtype": draw.choice([0, 4, 256, 256, 256, 4096, 4096, 4096, 4096, 48640, 49153, 240000]),
            "H": draw.randrange(KERNELS),
        }
        tracing, launcher.threads = draw.random() < 0.6, draw.choice([1, 2, 3])
        launcher.schedule, launcher.timeout = draw.choice([0, 0, number + 1]), 0.15
        print(
            f"\nseed {seed}, run {number}: {shape}, tracing {tracing}, {launcher.threads} threads, schedule {launcher.schedule}",
            flush=True,
        )
        args = FaArgs(Q=q.data_ptr(), O=o.data_ptr(), scale=1.0, **shape)
        try:
            if tracing:
                found = launcher.trace(Call(args, {"Q": q}, {"O": o}))
                assert isinstance(found, Trace)
                assert all(a.cost >= a.ideal > 0 and a.requests > 0 for a in found.accesses), found.accesses
                assert all(f.text and f.kind for f in found.findings)
                if shape["H"] % 4 == 1 and not any(f.kind == "stopped" for f in found.findings):
                    assert found.findings == (), found.findings
                    launcher.timeout = 20
                    launcher.threads, launcher.schedule = draw.choice([1, 2]), number + 1000
                    again = launcher.trace(Call(args, {"Q": q}, {"O": torch.zeros(64)}))
                    assert (again.accesses, again.findings) == (found.accesses, ())
                    outcomes["same"] += 1
                outcomes["stopped" if any(f.error for f in found.findings) else "ran"] += 1
            else:
                launcher.launch(Call(args, {"Q": q}, {"O": o}))
                outcomes["ran"] += 1
        except KernelError as error:
            assert str(error)
            outcomes["refused" if "CUDA error" in str(error) else "stopped"] += 1
        assert q.tolist() == list(range(64))
    assert run("out[threadIdx.x] = threadIdx.x;").tolist() == list(range(32))
    print(f"\nlived through {sum(outcomes.values())} runs: {outcomes}", flush=True)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 2])
def test_no_kernel_takes_the_process_down(seed):
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.append('../tools'); import test_fuzz as f; f.play({seed})",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", cwd=Path(__file__).parent, timeout=1800
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    last = done.stdout.rstrip().rpartition("\n")[2]
    outcomes = ast.literal_eval(last.partition(": ")[2])
    assert (
        last.startswith("lived through")
        and outcomes["ran"] > 3
        and outcomes["stopped"] > 3
        and outcomes["refused"] > 3 < outcomes["same"]
    )
