"""Warp instructions, barriers, shared memory and atomics: what each thread gets, worked out by hand."""

from functools import cache

import pytest
import torch
from emulated import build, launch, program, programs, run

from helpers.emulator import Launcher

LANE = torch.arange(32)
FULL = "0xffffffffu"
NOTHING = -1.0  # what was there before


# Of each a body, the launch, and what the kernel writes. All stand in one program.
CASES = {
    "shuffle index wraps around": (
        f"out[threadIdx.x] = __shfl_sync({FULL}, threadIdx.x, 35) + 100 * __shfl_sync({FULL}, threadIdx.x, -1);",
        "1, 32", [3103] * 32,
    ),
    "shuffle distances wrap around": (
        f"""const int t = threadIdx.x;
    out[t] = __shfl_xor_sync({FULL}, t, 33) + 100 * __shfl_down_sync({FULL}, t, 33) + 10000 * __shfl_up_sync({FULL}, t, -1)
        + 1000000 * (__shfl_down_sync({FULL}, t, -1) == (t == 0 ? 31 : t));""",
        "1, 32", [(t ^ 1) + 100 * min(t + 1, 31) + 10000 * (t % 31) + 1000000 for t in range(32)],
    ),
    "butterfly sum of a warp": (
        f"float s = threadIdx.x; for (int d = 16; d; d /= 2) s += __shfl_xor_sync({FULL}, s, d); out[threadIdx.x] = s;",
        "1, 32", [31 * 16] * 32,
    ),
    "shuffles move up to eight bytes": (
        f"""const int t = threadIdx.x;
    out[t] = __shfl_down_sync({FULL}, double(t), 1) + __shfl_down_sync({FULL}, (long long)t << 33, 1) / (1ll << 33)
        + __high2float(__shfl_down_sync({FULL}, __floats2half2_rn(0, t), 1));""",
        "1, 32", [*range(3, 96, 3), 93],
    ),
    "votes": (
        f"""const bool odd = threadIdx.x % 2;
    out[threadIdx.x] = (__ballot_sync({FULL}, odd) == 0xaaaaaaaau) + 10 * __any_sync({FULL}, odd) + 100 * __all_sync({FULL}, odd)
        + 1000 * __all_sync({FULL}, threadIdx.x < 32) + 10000 * __any_sync({FULL}, 0) + 100000 * __uni_sync({FULL}, 0);""",
        "1, 32", [101011] * 32,
    ),
    "match and reduce": (
        f"""const int t = threadIdx.x; int all;
    bool ok = __match_any_sync({FULL}, t / 8) == 0xffu << t / 8 * 8;
    ok &= __match_all_sync({FULL}, 5, &all) == {FULL} && all;
    ok &= __match_all_sync({FULL}, t, &all) == 0 && !all;
    ok &= __reduce_add_sync({FULL}, t) == 496 && __reduce_add_sync({FULL}, unsigned(t)) == 496u;
    ok &= __reduce_min_sync({FULL}, t - 5) == -5 && __reduce_max_sync({FULL}, t - 5) == 26;
    ok &= __reduce_min_sync({FULL}, unsigned(t - 5)) == 0u && __reduce_max_sync({FULL}, unsigned(t - 5)) == 0xffffffffu;
    ok &= __reduce_and_sync({FULL}, t | 64u) == 64u && __reduce_or_sync({FULL}, unsigned(t)) == 31u;
    ok &= __reduce_xor_sync({FULL}, 1u << t) == {FULL};
    out[t] = ok;""",
        "1, 32", [1.0] * 32,
    ),
    "halves of a diverged warp shuffle by themselves": (
        """const int t = threadIdx.x; int v;
    if (t < 16) v = __shfl_sync(0x0000ffffu, t, 3); else v = __shfl_sync(0xffff0000u, t, 20);
    out[t] = v;""",
        "1, 32", [3] * 16 + [20] * 16,
    ),
    "lanes that returned are not waited for": (
        f"if (threadIdx.x >= 8) return; out[threadIdx.x] = __reduce_add_sync({FULL}, 1u);",
        "1, 32", [8.0] * 8,
    ),
    "the active mask while others wait for its lanes": (
        """__shared__ volatile int flag; const int t = threadIdx.x; if (t == 0) flag = 0; __syncthreads();
    if (t == 5) { const unsigned m = __activemask(); __threadfence_block(); flag = m; } else while (flag == 0) {}
    out[t] = flag;""",
        "1, 64", [32] * 64,
    ),
    "a last warp that is not full": (
        f"const unsigned b = __ballot_sync({FULL}, 1); out[threadIdx.x] = __popc(b);",
        "1, 40", [32] * 32 + [8] * 8,
    ),
    "syncwarp separates a store from a load": (
        """__shared__ int x[32]; x[threadIdx.x] = threadIdx.x; __syncwarp(); out[threadIdx.x] = x[31 - threadIdx.x];""",
        "1, 32", list(range(31, -1, -1)),
    ),
    "barriers that vote": (
        """const int t = threadIdx.x;
    out[t] = __syncthreads_count(t % 3 == 0 ? 7 : 0) + 1000 * __syncthreads_and(t < 96) + 10000 * __syncthreads_and(t > 0)
        + 100000 * __syncthreads_or(t == 5) + 1000000 * __syncthreads_or(t == 500);""",
        "1, 96", [101032] * 96,
    ),
    "a named barrier of a last warp that is not full": (
        """__shared__ int x[48]; const int t = threadIdx.x; x[t] = t;
    asm volatile("bar.sync 1, 64;" ::: "memory"); out[t] = x[47 - t];
    asm volatile("bar.sync 1;" ::: "memory"); x[t] = out[t];
    asm volatile("bar.sync 1;" ::: "memory"); out[t] = x[47 - t];""",
        "1, 48", list(range(48)),
    ),
    "a named barrier of warps of which lanes have returned": (
        """__shared__ int x[64]; const int t = threadIdx.x; x[t] = t; uint32_t all, count;
    asm volatile("bar.arrive 2, 64;" ::: "memory"); if (t % 32 > 20) return;
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; bar.red.and.pred p, 1, 64, p; selp.u32 %0, 1, 0, p;"
                 "setp.eq.s32 p, %2, 7; bar.red.popc.u32 %1, 1, 64, p; }" : "=r"(all), "=r"(count) : "r"(t));
    out[t] = x[t ^ 32] + 100 * all + 1000 * count;""",
        "1, 64", [1100 + (t ^ 32) if t % 32 <= 20 else NOTHING for t in range(64)],
    ),
    "constants that are called as arrays in shared memory are": (
        """constexpr int D_smem = 32; const int n_smem = D_smem + 8; __shared__ float x[n_smem]; x[threadIdx.x] = 5;
    out[threadIdx.x] = x[threadIdx.x] + n_smem + (INT_MAX == 0x7fffffff);""",
        "1, 32", [46] * 32,
    ),
    "shared variables of every declaration": (
        """[[maybe_unused]] __shared__ float unused[32]; __shared__ float x[32], *p, y; __shared__ float *const *q, z;
    if (threadIdx.x == 0) p = x + 1, q = &p, x[1] = 1, y = 2, z = 3;
    __syncthreads(); out[threadIdx.x] = **q + 10 * y + 100 * z;""",
        "1, 32", [321] * 32,
    ),
    "dynamic shared memory is aligned and the blocks own": (
        """extern __shared__ __align__(1024) unsigned char smem[];
    float* x = reinterpret_cast<float*>(smem);
    x[threadIdx.x] = blockIdx.x; __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = x[63] + 100 * (__cvta_generic_to_shared(smem) % 1024 == 0);""",
        "50, 64, 256", [100 + b for b in range(50)],
    ),
    "a spinning thread lets the others run": (
        """__shared__ volatile int flag; if (threadIdx.x == 0) flag = 0; __syncthreads();
    if (threadIdx.x == 0) { while (flag == 0) {} out[0] = flag; } else if (threadIdx.x == 40) flag = 3;""",
        "1, 64", [3],
    ),
    "a lock made of atomics": (
        """__shared__ int lock, count; if (threadIdx.x == 0) lock = count = 0; __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {}
    count = count + 1; __threadfence(); atomicExch(&lock, 0);
    __syncthreads(); if (threadIdx.x == 0) out[0] = count;""",
        "1, 128", [128],
    ),
}  # fmt: skip


@cache
def all_cases() -> Launcher:
    return build(programs([(body, shape) for body, shape, _ in CASES.values()]))


@pytest.mark.parametrize("name", CASES)
def test_each_thread_gets(name):
    wanted = CASES[name][2]
    out = torch.full((len(wanted),), NOTHING)
    assert launch(all_cases(), out, H=list(CASES).index(name)).tolist() == wanted


def test_shuffles_of_every_width():
    calls, wanted = [], []
    for width in (1, 2, 4, 8, 16, 32):
        first = LANE // width * width
        for d in (0, 1, 3):
            calls += [
                f"__shfl{kind}_sync({FULL}, threadIdx.x + 100, {d}, {width})" for kind in ("", "_up", "_down", "_xor")
            ]
            wanted += [
                first + d % width,
                torch.where(LANE - d >= first, LANE - d, LANE),
                torch.where(LANE + d < first + width, LANE + d, LANE),
                torch.where((LANE ^ d) < first + width, LANE ^ d, LANE),
            ]
    body = "\n".join(f"out[{32 * i} + threadIdx.x] = {call};" for i, call in enumerate(calls))
    assert torch.equal(run(body, 32 * len(calls)).int().view(-1, 32), torch.stack(wanted).int() + 100)


def test_active_mask_of_a_whole_warp():
    assert run("__syncwarp(); out[threadIdx.x] = __activemask() == 0xffffffffu; __syncwarp();").tolist() == [1.0] * 32


def test_the_active_mask_has_the_lanes_that_come_to_it_together():
    """Lanes that a branch or a loop keeps away take no part, so that the mask is good for what comes next."""
    branch = (
        "unsigned m = 0; if (threadIdx.x % 3 == 0) { m = __activemask(); __syncwarp(m); } out[threadIdx.x] = __popc(m);"
    )
    assert run(branch).int().tolist() == [11, 0, 0] * 10 + [11, 0]
    loop = "int sum = 0; for (int i = threadIdx.x % 4; i > 0; --i) sum += __popc(__ballot_sync(__activemask(), 1)); out[threadIdx.x] = sum;"
    assert run(loop).int().tolist() == [0, 24, 24 + 16, 24 + 16 + 8] * 8
    ptx = 'unsigned m = 0; if (threadIdx.x < 5) asm volatile("activemask.b32 %0;" : "=r"(m)); out[threadIdx.x] = m;'
    assert run(ptx).int().tolist() == [31] * 5 + [0] * 27


def test_barrier_separates_stores_from_loads_of_the_whole_block():
    body = """__shared__ float tile[1024], twice[1024];
    const int t = threadIdx.x;
    for (int round = 0; round < 5; ++round) {
      tile[t] = t + round;
      __syncthreads();
      twice[t] = tile[1023 - t];
      __syncthreads();
      out[t] = twice[t] + tile[(t + 512) % 1024];
      __syncthreads();
    }"""
    t = torch.arange(1024)
    assert torch.equal(run(body, 1024, shape="1, 1024"), (1023 - t + 4 + (t + 512) % 1024 + 4).float())


def test_shared_declarations_of_template_instances_and_scopes_are_distinct():
    before = """template <int i> __device__ float* scratch() { __shared__ float x[4]; return x; }"""
    body = """{ __shared__ int y; if (threadIdx.x == 0) y = 1; } { __shared__ int y; if (threadIdx.x == 0) y = 2; }
    scratch<1>()[0] = 5; scratch<2>()[0] = 7;
    out[threadIdx.x] = scratch<1>()[0] + 10 * scratch<2>()[0];"""
    assert run(body, 1, shape="1, 1", before=before).tolist() == [75]


ATOMICS = {
    # call on x = 12 of type T: new value
    "int": {"Add(&x, -5)": 7, "Sub(&x, 5)": 7, "Exch(&x, 5)": 5, "Min(&x, -5)": -5, "Max(&x, 50)": 50, "And(&x, 6)": 4}
    | {"Or(&x, 1)": 13, "Xor(&x, 4)": 8, "CAS(&x, 12, 3)": 3, "CAS(&x, 11, 3)": 12},
    "unsigned": {"Add(&x, 5u)": 17, "Inc(&x, 12u)": 0, "Inc(&x, 13u)": 13, "Dec(&x, 20u)": 11, "Dec(&x, 5u)": 5}
    | {"Min(&x, 3u)": 3, "Max(&x, 3u)": 12},
    "unsigned long long": {"Add(&x, 5ull)": 17, "Max(&x, 99ull)": 99, "CAS(&x, 12ull, 1ull)": 1},
    "float": {"Add(&x, 0.5f)": 12.5, "Exch(&x, 2.0f)": 2},
    "double": {"Add(&x, 0.25)": 12.25},
    "__half": {"Add(&x, __half(0.5f))": 12.5},
}


def test_atomics_return_the_old_value_and_store_the_new():
    cases = [(kind, call, new) for kind, calls in ATOMICS.items() for call, new in calls.items()]
    body = "\n".join(
        f"{{ __shared__ {kind} x; x = static_cast<{kind}>(12);\n"
        f"const auto old = atomic{call}; out[{2 * i}] = float(old); out[{2 * i + 1}] = float(x); }}"
        for i, (kind, call, _) in enumerate(cases)
    )
    out = run(body, 2 * len(cases), shape="1, 1").view(-1, 2)
    assert out[:, 0].tolist() == [12] * len(cases)
    assert out[:, 1].tolist() == [new for _, _, new in cases]


def test_float_sums_over_blocks_are_the_same_to_the_last_bit():
    torch.manual_seed(0)
    x = torch.randn(200 * 64) * torch.logspace(-6, 6, 200 * 64)
    launcher = build(program("atomicAdd(out, in[blockIdx.x * 64 + threadIdx.x]);", "200, 64"))
    results = set()
    for threads in (1, 2, 3, 4, 4):
        launcher.threads = threads
        results.add(launch(launcher, torch.zeros(1), Q=x).item())
    in_order = torch.zeros(())
    for value in x:
        in_order = in_order + value
    assert results == {in_order.item()}


def test_the_last_block_sees_what_all_others_wrote():
    body = """out[1 + blockIdx.x] = blockIdx.x; __threadfence();
    if (atomicAdd(static_cast<int*>(const_cast<void*>(a.K)), 1) == gridDim.x - 1) {
      float s = 0; for (int i = 0; i < gridDim.x; ++i) s += out[1 + i]; out[0] = s; }"""
    assert run(body, 101, shape="100, 1", K=torch.zeros(1, dtype=torch.int32))[0] == 4950


def test_blocks_run_on_several_os_threads():
    # Two blocks that each wait for the other's flag can only both end if they run at the same time.
    body = """volatile int* flag = static_cast<int*>(const_cast<void*>(a.K)); flag[blockIdx.x] = 1;
    while (flag[1 - blockIdx.x] == 0) {} out[blockIdx.x] = 1;"""
    launcher = build(program(body, "2, 1"))
    launcher.threads, launcher.timeout = 2, 20
    assert launch(launcher, torch.zeros(2), K=torch.zeros(2, dtype=torch.int32)).tolist() == [1, 1]


def test_a_launch_deduces_the_arguments_of_a_kernel_template():
    before = "template <class T> __global__ void __launch_bounds__(64) fill(T* x, T value) { x[threadIdx.x] = value; }"
    launcher = "  fill<<<1, 8>>>(static_cast<float*>(a.O), 3.0f);"
    assert launch(build(program("", before=before, launch=launcher)), torch.zeros(8)).tolist() == [3.0] * 8


def test_a_launch_through_a_pointer_converts_its_arguments():
    before = "template <int d> __global__ void fill(const float* x, float* y, long long n) { y[threadIdx.x] = x ? 0 : n * d; }"
    launcher = "  auto kernel = fill<5>; kernel<<<1, 8>>>(0, static_cast<float*>(a.O), 2);"
    assert launch(build(program("", before=before, launch=launcher)), torch.zeros(8)).tolist() == [10.0] * 8


def test_memcpy_and_memset_are_checked_and_counted():
    body = "float x[4]; memcpy(x, in + 1, 12); std::memcpy(out, x, 12); memset(out + 3, 0, 4);"
    launcher = build(program(body, "1, 1"))
    assert launch(launcher, torch.ones(4), Q=torch.arange(4.0)).tolist() == [1, 2, 3, 0]
    assert launcher.counters == {"O": (0, 16), "Q": (12, 0)}
