"""Kernels made at random that are right: loops and branches in which lanes part, shuffles, votes, matches, reductions, ldmatrix and
shared atomics. The emulator and a GPU compute the same numbers; all are whole, so that no order of additions can be seen."""

import pytest
import torch
from emulated import build
from test_fuzz import BEFORE, Maker

from helpers.ladder.contract import Call, FaArgs

pytestmark = pytest.mark.gpu

KERNELS = 24
SHAPES = ((32, 1), (64, 1), (96, 1), (32, 4))
BLOCKS, MOST_THREADS = 2, 128


class RightMaker(Maker):
    """Its statements leave x whole, and what whole warps have to meet in stands outside of branches."""

    def right(self, depth: int) -> str:
        k, c, m = self.number(1, 2, 3, 4, 8, 33), self.number(0, 1, 5, 31), self.number(1, 2, 4, 8, 16)
        width, trans = self.number(4, 8, 16, 32), self.random.choice(["", "_trans"])
        together = [
            "__syncthreads();", "__syncwarp();", f"x += __shfl_xor_sync(0xffffffffu, x, {m});",
            f"x += __shfl_down_sync(0xffffffffu, x, {c % 8}, {width});", f"x += __shfl_up_sync(0xffffffffu, x, {c % 8}, {width});",
            f"x += __shfl_sync(0xffffffffu, x, {c}, {width});", f"x += __popc(__ballot_sync(0xffffffffu, fmodf(x, {k}.f) > 1));",
            f"x += __any_sync(0xffffffffu, x > {c}) + 2 * __all_sync(0xffffffffu, x > {k});",
            f"x = fmodf(x, 1000.f); x += __reduce_max_sync(0xffffffffu, int(x)) % 7 + __reduce_add_sync(0xffffffffu, unsigned(t) % {k + 1});",
            f"x += __popc(__match_any_sync(0xffffffffu, int(fmodf(x, {k}.f))));", f"x += __syncthreads_count(t % {k + 1} == 0);",
            f"x += __syncthreads_or(x > {c});",
            f"{{ uint32_t r[4]; fa::ldmatrix_x4{trans}(r, s + lane / 8 * 4 + lane % 8 * 4); x += (r[0] >> 16 & 15) + (r[3] >> 20 & 7); }}",
        ]  # fmt: skip
        alone = [
            f"x += s[(t * {k} + {c}) % 64];", f"x += in[(t * {k} + {c}) % 64];", f"x += shared_part(s, t + {c});",
            f"x = fmodf(x * {k} + {c}, 4096.f);", f"atomicAdd(&z[(t + {c}) % 4], {k});", f"x = floorf(x / {k}.f);",
            "x += reinterpret_cast<const float4 *>(s)[t % 16].y;", "x += reinterpret_cast<const float2 *>(in)[t % 7].x;",
            f"x += __float2int_rd(x / 3.f) % {k + 2};", f"if (t % {k + 1} == {c % 3}) x = -x;",
            "{ float y[8]; for (int j = 0; j < 8; ++j) y[j] = fmodf(x, 64.f) * j; x += y[t % 8]; }",
            f"for (int j = 0; j < t % {k + 1}; ++j) {{ if (j == {c % 5}) continue; if (j > {k}) break; x += j; }}",
        ]  # fmt: skip
        return self.random.choice(alone + together * (depth == 0))


def source(seed: int) -> str:
    """A launcher that takes kernel and block from `fa_args`; a kernel writes x of each thread, and z."""
    maker = RightMaker(seed)
    kernels = [
        f"""__global__ void kernel_{i}(const fa_args a) {{
        __shared__ __align__(16) float s[64];
        __shared__ int z[4];
        const int t = threadIdx.x + blockDim.x * threadIdx.y, threads = blockDim.x * blockDim.y, lane = t % 32;
        const float *in = static_cast<const float *>(a.Q);
        float *out = static_cast<float *>(a.O), x = t;
        for (int j = t; j < 64; j += threads) s[j] = j;
        for (int j = t; j < 4; j += threads) z[j] = 0;
        __syncthreads();
        {maker.kernel(tame=True)}
        __syncthreads();
        out[blockIdx.x * {MOST_THREADS} + t] = x;
        if (t < 4) out[{BLOCKS * MOST_THREADS} + blockIdx.x * 4 + t] = z[t] + lane;
        }}"""
        for i in range(KERNELS)
    ]
    cases = "\n".join(f"case {i}: kernel_{i}<<<{BLOCKS}, dim3(a.Nk, a.D)>>>(a); break;" for i in range(KERNELS))
    return f"""#include <fa/args.cuh>
    {BEFORE}{chr(10).join(kernels)}
    extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t) {{
      const fa_args a = *args;
      switch (a.H) {{ {cases} }}
      return cudaGetLastError();
    }}"""


@pytest.mark.parametrize("seed", range(1, 9))
def test_right_kernels_compute_what_a_gpu_computes(seed):
    launchers = {device: build(source(seed), device) for device in ("cpu", "cuda")}
    for number in range(KERNELS):
        for x, y in SHAPES:
            outputs = []
            for device, launcher in launchers.items():
                q, o = torch.arange(64.0, device=device), torch.zeros(BLOCKS * (MOST_THREADS + 4), device=device)
                args = FaArgs(Q=q.data_ptr(), O=o.data_ptr(), scale=1.0, B=1, Nq=1, H=number, Nk=x, D=y)
                launcher.launch(Call(args, {"Q": q}, {"O": o}))
                outputs.append(o.cpu())
            assert torch.equal(*outputs), f"kernel_{number} with blocks of {x} x {y} threads"
