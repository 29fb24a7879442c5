"""What a wrong kernel comes to: a KernelError that says what, who and where. Never a dead process, never a wrong next call."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from emulated import FILE, build, ctrl_c, launch, line_of, program, run, trace

from helpers.emulator import Launcher
from helpers.ladder.errors import CompileError, Interrupted, KernelError
from helpers.ladder.rung import Rung
from helpers.toolchain import progress
from helpers.toolchain.compiler import emulators_compiler

FULL = "0xffffffffu"
FOLDER = Path(__file__).parent


def failure(
    body: str, out: int | torch.Tensor = 32, shape: str = "1, 32", before: str = "", timeout=None, **tensors
) -> str:
    """The report of a kernel that must fail; after it a good kernel must run. The line marked `// here` must be named."""
    source = program(body, shape, before)
    launcher = build(source)
    launcher.timeout = timeout or launcher.timeout
    out = torch.full((out,), float("nan")) if isinstance(out, int) else out
    with pytest.raises(KernelError) as caught:
        launch(launcher, out, **tensors)
    assert run("out[threadIdx.x] = 7;").tolist() == [7.0] * 32
    report = str(caught.value)
    if "// here" in source:
        assert f"{FILE}:{line_of(source)}: " in report
    return report


MISTAKES = {
    # name: (body, shape, words of the report)
    "write past the end": (
        "out[threadIdx.x + 31] = 1; // here", "1, 32",
        "out of bounds in kernel: thread 1 of block 0 writes 4 bytes at O + 128 bytes, 4 past its end (it has 128 bytes)",
    ),
    "read before the start": (
        "out[0] = in[-int(threadIdx.x) - 2]; // here", "1, 32",
        "thread 0 of block 0 reads 4 bytes, 8 bytes before the start of Q",
    ),
    "read far past the end": ("out[0] = in[1 << 13]; // here", "1, 1", "reads 4 bytes at Q + 32768 bytes, 32648 past its end"),
    "vector over the end": (
        "reinterpret_cast<float2*>(out)[15] = {}; reinterpret_cast<float4*>(out + 28)[blockIdx.x] = {}; // here", "dim3(2, 2), 1",
        "thread 0 of block (1, 0) writes 16 bytes at O + 128 bytes, 16 past its end",
    ),
    "vector that straddles the end": (
        "*reinterpret_cast<float4*>(out) = reinterpret_cast<const float4*>(in)[7]; // here", "1, 1",
        "reads 16 bytes at Q + 112 bytes, 4 past its end (it has 124 bytes)",
    ),
    "struct for a call, read past the end": (
        "out[0] = called(reinterpret_cast<const float4*>(in)[n]); // here", "1, 1", "reads 16 bytes at Q + 512 bytes",
    ),
    "wild address": ("*reinterpret_cast<float*>(0x123456789000) = 1; // here", "1, 1", "address 0x123456789000, which belongs to no tensor"),
    "null pointer": ("static_cast<float*>(a.workspace[2])[3] = 1; // here", "1, 1", "through a null pointer (address 0xc)"),
    "misaligned": (
        "reinterpret_cast<float4*>(out + 1)[0] = {}; // here", "1, 1",
        "misaligned in kernel: thread 0 of block 0 writes 16 bytes at O + 4 bytes, which is no multiple of 16\n",
    ),
    "misaligned in shared memory": (
        "__shared__ float x[8]; reinterpret_cast<float2*>(x + 1)[threadIdx.x] = {}; // here", "1, 2",
        "misaligned in kernel: thread 0 of block 0 writes 8 bytes at x[1], which is no multiple of 8\n",
    ),
    "shared array overrun": (
        "__shared__ float x[8], y[8]; y[0] = 0; x[threadIdx.x] = 1; // here", "1, 32",
        "thread 8 of block 0 takes element 8 of an array of type float [8]",
    ),
    "shared array overrun by a pointer": (
        "__shared__ float x[8], y[8]; y[0] = 0; float* p = x; p[threadIdx.x] = 1; // here", "1, 32",
        "thread 8 of block 0 writes 4 bytes at x + 32 bytes, 4 past its end (it has 32 bytes)",
    ),
    "row of a shared array that is behind its end": (
        "__shared__ float x[2][8]; x[1][threadIdx.x] = 1; // here", "1, 32",
        "thread 8 of block 0 writes 4 bytes at x + 64 bytes, 4 past its end (it has 64 bytes)",
    ),
    "local array, one too far": (
        "float r[4] = {};\nfor (int i = 0; i <= n / 8; ++i) r[i] += in[i]; // here\nout[0] = r[n % 3];", "1, 1",
        "thread 0 of block 0 takes element 4 of an array of type float [4]",
    ),
    "local array, unrolled": (
        "float r[4];\n_Pragma(\"unroll\") for (int i = 0; i < 5; ++i) r[i] = in[i]; // here\nout[0] = r[n % 3];", "1, 1",
        "takes element 4 of an array of type float [4]",
    ),
    "local array, read far away": (
        "int r[4] = {}; r[n % 4] = 1;\nout[0] = r[long(n) << 40]; // here", "1, 1", "takes element 35184372088832 of an array of type int [4]",
    ),
    "local array, before its start": (
        "float r[2][4] = {}; r[n % 2][0] = 1;\nr[1][-int(threadIdx.x)] = 2; // here\nout[0] = r[n % 2][0];", "1, 32",
        "thread 1 of block 0 takes element -1 of an array of type float [4]",
    ),
    "local array of a struct": (
        "struct { __half x[4]; int n; } r = {}; r.n = n;\nr.x[unsigned(n) - 33] = in[0]; // here\nout[r.n] = r.x[n % 4];", "1, 1",
        "takes element 4294967295 of an array of type __half [4]",
    ),
    "dynamic shared overrun": (
        "extern __shared__ float x[]; x[threadIdx.x] = 1; // here", "1, 32, 64",
        "thread 16 of block 0 writes 4 bytes at dynamic shared memory + 64 bytes, 4 past its end (it has 64 bytes)",
    ),
    "uninitialised shared memory": (
        "__shared__ float x[2][4]; x[1][0] = 1;\nout[0] = x[1][0] + x[1][2]; // here", "1, 1",
        "reads 4 bytes at x + 24 bytes, which nobody has written",
    ),
    "another thread's stack": (
        "__shared__ int* p; int mine = 5; if (threadIdx.x == 0) p = &mine; __syncthreads();\nif (threadIdx.x == 1) *p = 6; // here\n"
        "__syncthreads(); out[0] = mine;", "1, 2",
        "thread 1 of block 0 writes 4 bytes of a local variable of thread 0, which only that thread can see",
    ),
    "trap": ("if (threadIdx.x == 3) __trap(); // here", "1, 32", "trap in kernel: thread 3 of block 0 executes __trap()"),
    "assertion": (
        "assert(threadIdx.x < 3); // here", "1, 32",
        "assertion in kernel: thread 3 of block 0 fails the assertion `threadIdx.x < 3`",
    ),
    "division by zero": ("out[0] = 5 / a.D % (a.B - 1); // here", "1, 1", "thread 0 of block 0 divides an integer by zero"),
    "abort": ("if (n > 3) abort(); // here", "1, 1", "thread 0 of block 0 calls abort(), which only host code can"),
    "illegal instruction": (
        "if (n > 3) __builtin_trap(); // here", "1, 1",
        "trap in kernel: thread 0 of block 0 reaches code that can't be reached, such as a division by a constant zero, or a trap",
    ),
    "inline PTX": ('asm volatile("mma.sync %0;" : "=f"(out[0])); // here', "1, 1", "executes inline PTX: mma.sync %0;"),
    "shuffle from an absent lane": (
        "if (threadIdx.x < 4) out[0] = __shfl_sync(0xfu, 1, 9); // here", "1, 32",
        "reads lane 9 in __shfl_sync, and that lane takes no part (mask 0x0000000f)",
    ),
    "mask without the caller": ("__syncwarp(0xfffffffeu); // here", "1, 32", "with the mask 0xfffffffe, which doesn't name its own lane 0"),
    "width of a shuffle": (f"out[0] = __shfl_sync({FULL}, 1, 0, 3); // here", "1, 32", "with width 3; 1, 2, 4, 8, 16 and 32 are allowed"),
    "static shared memory": ("__shared__ float x[12289]; x[threadIdx.x] = 1; // here", "1, 32", "49156 bytes of static shared memory; 49152 are"),
}  # fmt: skip


@pytest.fixture(scope="module")
def museum() -> tuple[str, Launcher]:
    """All mistakes in one kernel, which fa_args::H chooses from; `// here` is followed by the mistake's number."""
    body, launches = "", ""
    for i, (mistake, shape, _) in enumerate(MISTAKES.values()):
        body += f"if (a.H == {i}) {{\n{mistake.replace('// here', f'// here {i}.')}\n}}\n"
        launches += f"  if (a.H == {i}) kernel<<<{shape}>>>(a);\n"
    called = "__device__ __noinline__ float called(float4 v) { return v.x; }"
    source = program(body, before=called, launch=launches)
    return source, build(source)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported(mistake, museum):
    source, launcher = museum
    number = list(MISTAKES).index(mistake)
    with pytest.raises(KernelError) as caught:
        launch(launcher, torch.zeros(32), H=number, Q=torch.zeros(32 - 1))
    assert MISTAKES[mistake][2] in str(caught.value)
    if f"// here {number}." in source:
        assert f"{FILE}:{line_of(source, f'// here {number}.')}: " in str(caught.value)
    assert run("out[threadIdx.x] = 7;").tolist() == [7.0] * 32


CONSTANTS = {
    "stored": ("two[n / 32] = 3;", "writes 4 bytes of the __constant__ variable two"),
    "in a namespace": ("inner::three[n / 16] = 3;", "writes 4 bytes of the __constant__ variable inner::three"),
    "by an atomic": ("atomicAdd(two, 1.f);", "writes 4 bytes of the __constant__ variable two"),
    "by PTX": (
        'asm volatile("st.global.f32 [%0], %1;" ::"l"(two), "f"(1.f) : "memory");',
        "of the __constant__ variable two",
    ),
}


@pytest.fixture(scope="module")
def constants() -> tuple[str, Launcher]:
    """A kernel that writes __device__ variables, and __constant__ ones as fa_args::H says."""
    before = """
    __constant__ float two[2] = {1, 2};
    namespace inner { __constant__ int three[3]; }
    __device__ float four[4];
    __device__ int error;  // the C library has a function of that name
    static __device__ float five[5];
    """
    body = "error = 0; four[n / 16] = 4; five[n / 16] = 5; atomicAdd(four, 1.f);\n"
    body += "\n".join(
        f"if (a.H == {i}) {{\n{write} // here {i}.\n}}" for i, (write, _) in enumerate(CONSTANTS.values())
    )
    source = program(body + "\nout[0] = two[1] + inner::three[0] + four[2] + five[2];", "1, 1", before)
    return source, build(source)


def refused(made: tuple[str, Launcher], number: int, **given) -> str:
    """What is said of case `number` of a program that chooses by fa_args::H, at the line that ends in `// here number.`"""
    source, launcher = made
    with pytest.raises(KernelError) as caught:
        launch(launcher, torch.zeros(32), H=number, **given)
    assert f"{FILE}:{line_of(source, f'// here {number}.')}: " in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_kernel_cannot_write_constants(name, constants):
    said = refused(constants, list(CONSTANTS).index(name))
    assert "constant memory in kernel: thread 0 of block 0 writes 4 bytes" in said and CONSTANTS[name][1] in said


def test_a_kernel_may_write_device_variables(constants):
    assert launch(constants[1], torch.zeros(32), H=-1)[0] == 11


def test_out_of_bounds_store_never_happens():
    x = torch.zeros(64)
    failure("out[threadIdx.x] = 1;", x[16:32])
    assert x[:16].eq(0).all() and x[32:].eq(0).all()


def test_an_element_of_a_shared_array_may_be_counted_from_another_row():
    """As on a GPU: C++ has no word for it, and the memory is the array's."""
    body = "__shared__ float x[2][16]; x[0][threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = x[1][int(threadIdx.x) - 16];"
    assert run(body).tolist() == [float(t) for t in range(32)]


def test_a_local_arrays_end_may_be_pointed_at():
    body = "float r[4] = {1, 2, 3, 4}; for (const float *p = r; p != &r[n / 8]; ++p) out[threadIdx.x] = *p;"
    assert run(body).tolist() == [4.0] * 32


def test_a_tensor_that_begins_at_no_multiple_says_so():
    copy = "*reinterpret_cast<float4*>(out) = reinterpret_cast<const float4*>(in)[1]; // here"
    report = failure(copy, Q=torch.zeros(32)[1:])
    assert "reads 16 bytes at Q + 16 bytes, which is no multiple of 16 (Q itself begins 4 bytes past one)" in report


GCC = emulators_compiler().kind == "gcc"


# A count that clang knows when it compiles is g++'s alone: clang leaves out stores that it knows to be past the end.
@pytest.mark.parametrize("count", ["n / 4", "8", "100"] if GCC else ["n / 4"])
def test_a_local_array_overrun_by_a_pointer(count):
    """No index says how far it goes: told at the end of the function whose array it is, before it returns to nowhere. That is
    at its closing brace with g++, at the line of its return with clang."""
    before = f"""
__device__ void fill(float* p, const float* in, int n) {{ for (int i = 0; i < COUNT; ++i) p[i] = in[i % n]; }}
__device__ __noinline__ float third(const float* in, int n) {{
  float r[4];
  fill(r, in, n);
  return r[n % 4]; {"" if GCC else "// here"}
}} {"// here" if GCC else ""}
"""
    report = failure("out[0] = third(in, n);", before=before.replace("COUNT", count), Q=torch.zeros(32))
    assert "local array overrun in kernel: thread 0 of block 0 has written past the end of a local array" in report
    assert run("out[0] = third(in, n);", before=before.replace("COUNT", "n / 8"), Q=torch.ones(32))[0] == 1


def test_a_local_array_overrun_past_the_stack():
    """It never comes to the end of its function: told at the line of the store. g++ lets the runtime see each store of a pointer
    into a local array, clang only what leaves the stack."""
    body = "float r[4]; float* p = r;\nfor (int i = 0; i < n << 10; ++i) p[i] = i; // here\nout[0] = r[n % 4];"
    report = failure(body, shape="1, 1")
    seen, left = (
        "out of bounds in kernel: thread 0 of block 0 writes",
        "local array overrun in kernel: thread 0 of block 0 goes",
    )
    assert (seen if GCC else left) in report


def test_a_store_past_one_tensor_does_not_land_in_its_neighbour():
    both = torch.zeros(2, 64)
    assert "O + 256 bytes" in failure("out[64 + threadIdx.x] = 1;", both[0], Q=both[1])
    assert both.sum() == 0


def test_columns_between_the_rows_of_a_view_are_not_the_views():
    packed = torch.zeros(4, 3 * 8)
    body = "for (int r = 0; r < 4; ++r) out[r * 24 + threadIdx.x] = r;"
    launch(build(program(body, "1, 8")), packed[:, 8:16])
    assert packed.sum() == 8 * 6 and packed[:, 8:16].sum() == 8 * 6
    report = failure(body, packed[:, 8:16], shape="1, 9")
    assert "thread 8 of block 0 writes 4 bytes at O + 32 bytes, between two rows of that view" in report


def test_a_dimension_of_1_may_have_any_stride():
    """PyTorch gives it the stride of what it was cut from, which may be smaller than a row of what is left."""
    packed = torch.zeros(4, 3 * 8)
    view = packed.as_strided((1, 4, 1, 8), (8, 24, 1, 1), 8)
    launch(build(program("for (int r = 0; r < 4; ++r) out[r * 24 + threadIdx.x] = r + 1;", "1, 8")), view)
    assert packed[:, 8:16].sum() == 8 * 10 and packed.sum() == 8 * 10
    report = failure("out[n / 4] = 0;", view)
    assert "O + 32 bytes, between two rows of that view" in report


def test_overlapping_views_are_told_apart():
    packed = torch.arange(24.0).view(4, 6)
    launcher = build(program("out[threadIdx.x] = in[threadIdx.x * 6] + static_cast<const float*>(a.K)[1];", "1, 4"))
    out = launch(launcher, torch.zeros(4), Q=packed[:, :3], K=packed[:, 3:])
    assert out.tolist() == [4, 10, 16, 22]
    assert launcher.counters == {"O": (0, 16), "Q": (16, 0), "K": (16, 0)}


def test_recursion_without_end():
    before = "__device__ __noinline__ int deep(volatile int x) { volatile int y[64]; y[x % 64] = x; return deep(x + 1) + y[0]; }"
    report = failure("out[0] = deep(n);", before=before)
    assert "stack overflow" in report and "has used up its stack of 256 KB" in report


def test_too_large_a_frame():
    assert "stack overflow" in failure("volatile char big[1 << 20]; big[n] = 1; out[0] = big[n + 1];")


def test_c_string_of_a_wild_pointer():
    assert "illegal address" in failure('printf("%s", reinterpret_cast<const char*>(16));')


# ---- waiting for ever


def test_divergent_barrier():
    body = """const int t = threadIdx.x;
    if (t < 40) __syncthreads(); // first
    else __syncthreads(); // second"""
    source = program(body, "1, 64")
    report = failure(body, shape="1, 64")
    assert "divergent barrier in kernel: the threads of block 0 don't all come to the same barrier:" in report
    assert f"threads 0-39 wait at {FILE}:{line_of(source, '// first')} in __syncthreads" in report
    assert f"threads 40-63 wait at {FILE}:{line_of(source, '// second')} in __syncthreads" in report


def test_early_return_before_a_barrier():
    report = failure("if (threadIdx.x % 32 == 3) return;\n__syncthreads(); // here", shape="2, 64")
    assert "divergent barrier" in report and "threads 3, 35 have returned" in report
    assert "threads 0-2, 4-34, 36-63 wait at" in report


def test_shuffle_that_one_lane_does_not_reach():
    report = failure(f"if (threadIdx.x != 5) out[0] = __shfl_sync({FULL}, 1, 0); // here\n__syncthreads();")
    assert "deadlock in kernel: no thread of block 0 can go on:" in report
    assert (
        "threads 0-4, 6-31 wait at" in report
        and "in __shfl_sync (mask 0xffffffff)" in report
        and "thread 5 wait" in report
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if (t != 5) fa::ldmatrix_x4(r, s); // here\n__syncthreads();", "threads 0-4, 6-31 wait at {here} in ldmatrix"),
        (
            "float c[4] = {}; if (t % 32 < 16) fa::mma_m16n8k16<fa::fp16>(c, r, 1, 1); // here\n__syncthreads();",
            "threads 0-15, 32-47 wait at {here} in mma",
        ),
        ("if (t < 32) fa::bar_sync(0, 64); // here", "threads 0-31 wait at {here} in bar.sync"),
        ("if (t != 5) fa::fence_proxy_async();\nif (t < 32) fa::mbarrier_wait(b, 0); // here", "threads 0-31 wait at {here} in mbarrier"),
    ],
)  # fmt: skip
def test_who_waits_inside_fa_waits_at_the_line_that_calls_it(body, what):
    head = """__shared__ __align__(16) __half s[512]; __shared__ uint64_t bar; const int t = threadIdx.x;
    [[maybe_unused]] const uint32_t b = uint32_t(__cvta_generic_to_shared(&bar)); uint32_t r[4] = {};
    for (int i = t; i < 512; i += 64) s[i] = __half(1);
    if (t == 0) fa::mbarrier_init(b, 64);
    __syncthreads();
    """
    tail = "\nif (t >= 32) return;\nout[t] = r[t % 4];"
    before = "#include <fa/sm80.cuh>\n#include <fa/sm90.cuh>"
    source = program(head + body + tail, "1, 64", before)
    report = failure(head + body + tail, shape="1, 64", before=before)
    assert what.format(here=f"{FILE}:{line_of(source)}") in report and "fa/" not in report


def test_two_shuffles_that_share_lanes():
    body = f"if (threadIdx.x < 16) out[0] = __shfl_sync({FULL}, 1, 0);\nelse out[1] = __shfl_sync({FULL}, 1, 16);"
    report = failure(body)
    assert "threads 0-15 wait at" in report and "threads 16-31 wait at" in report


def test_the_barrier_of_a_device_function_and_template_is_one_barrier():
    before = "template <int i> __device__ __noinline__ void all() { __syncthreads(); }"
    assert (
        run(
            "if (threadIdx.x < 32) all<0>(); else all<1>(); out[threadIdx.x] = 1;", 64, shape="1, 64", before=before
        ).sum()
        == 64
    )


@pytest.mark.parametrize(
    "loop", ["while (true) {}", "for (unsigned i = n; i; i = i * 3 | 1) out[0] = i;", "for (;;) __syncthreads();"]
)
def test_timeout_stops_a_loop_without_end(loop):
    assert "stopped" in failure(f"{loop}", timeout=0.3, shape="3, 64")


@pytest.mark.parametrize("loop", ["while (true) {}", "while (in[0] == 0) {}", "while (true) __syncwarp();"])
def test_ctrl_c_stops_a_loop_without_end(loop):
    launcher = build(program(loop, "4, 64"))
    launcher.compile()
    with pytest.raises(Interrupted) as stopped, ctrl_c():
        launch(launcher, torch.zeros(32), Q=torch.zeros(4))
    (shown,) = stopped.value._render_traceback_()  # in a notebook nothing else is shown
    assert re.match(rf"KeyboardInterrupt: {FILE}:\d+: stopped in kernel", shown) and "hint" in shown
    assert run("out[threadIdx.x] = 7;").tolist() == [7.0] * 32


@pytest.mark.parametrize(
    "loop",
    [
        "while (true) {} // here", "while (in[0] == 0) {} // here", "for (;;) __syncthreads(); // here",
        "while (atomicAdd(out, 0.0f) == 0) {} // here", "__shared__ volatile int flag; flag = 0;\nwhile (flag == 0) {} // here",
    ],
)  # fmt: skip
def test_a_loop_that_is_stopped_is_named_by_its_line(loop):
    assert "stopped while" in failure(loop, torch.zeros(32), "2, 64", timeout=0.4, Q=torch.zeros(4))


def test_progress_is_shown_after_two_seconds(monkeypatch):
    launcher = build(program("if (blockIdx.x == 3) { while (in[0] == 0) {} }", "100, 32"))
    launcher.timeout = 2.8
    launcher.compile()  # which on a busy machine shows progress of its own
    shown = []
    monkeypatch.setattr(progress, "_line", lambda: shown.append)
    with pytest.raises(KernelError, match="stopped"):
        launch(launcher, torch.zeros(32), Q=torch.zeros(4))
    assert re.fullmatch(r"emulator: kernel \[#+ *\] 99 of 100 blocks, 2 s", shown[0]) and shown[-1] == ""


# ---- several blocks, several OS threads


def test_the_lowest_faulty_block_is_the_one_reported():
    body = (
        "for (volatile int i = 0; i < 20000 / int(blockIdx.x + 1); ++i) {} if (blockIdx.x > 4) out[n + blockIdx.x] = 1;"
    )
    launcher = build(program(body, "50, 1"))
    launcher.threads = 4
    for _ in range(20):
        with pytest.raises(KernelError, match="thread 0 of block 5 "):
            launch(launcher, torch.zeros(32))


def test_blocks_after_a_faulty_one_are_not_begun():
    launcher = build(program("if (blockIdx.x == 3) __trap();", "1 << 30, 1"))
    start = time.monotonic()
    with pytest.raises(KernelError, match="block 3 executes __trap"):
        launch(launcher, torch.zeros(32))
    assert time.monotonic() - start < launcher.timeout  # a thousand million blocks would be stopped by it


def test_an_atomic_after_a_faulty_block_does_not_wait_for_ever():
    launcher = build(program("if (blockIdx.x == 1) __trap(); atomicAdd(out, 1.0f);", "64, 32"))
    launcher.threads = 4
    with pytest.raises(KernelError, match="block 1 executes __trap"):
        launch(launcher, torch.zeros(32))


def test_a_block_does_not_wait_for_what_a_faulty_one_left_undone():
    faulty = "if (blockIdx.x == 0) { for (volatile int i = 0; i < 100000000; ++i) {} __trap(); }"
    launcher = build(program(f"{faulty} while (atomicAdd(out, 0.0f) == 0.0f) {{}}", "2, 1"))
    launcher.threads = 2
    start = time.monotonic()
    with pytest.raises(KernelError, match="block 0 executes __trap"):
        launch(launcher, torch.zeros(32))
    assert time.monotonic() - start < launcher.timeout  # which would stop one that waits


# ---- launches that CUDA refuses


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("0, 32", "invalid configuration argument (cudaErrorInvalidConfiguration): grid (0, 1, 1), block (32, 1, 1)"),
        ("1, 1025", "cudaErrorInvalidConfiguration"),
        ("1, dim3(1, 1, 65)", "cudaErrorInvalidConfiguration"),
        ("1, dim3(64, 32)", "cudaErrorInvalidConfiguration"),
        ("dim3(1, 65536), 1", "cudaErrorInvalidConfiguration"),
        ("dim3(1, 1, 65536), 1", "cudaErrorInvalidConfiguration"),
        ("-1, 1", "cudaErrorInvalidConfiguration"),
        (
            "1, 32, 49153",
            "invalid argument (cudaErrorInvalidValue): 49153 bytes of dynamic shared memory asked for; 49152 are allowed without",
        ),
    ],
)
def test_launches_that_cuda_refuses(shape, words):
    assert words in failure("out[0] = 1;", shape=shape)


def test_launch_bounds_bound_the_threads_of_a_block():
    before = """
    template <int d> struct Tile { static constexpr int threads = d / 2, ctas = 2; };
    template <int d, typename T> __global__ __launch_bounds__(Tile<d>::threads,
                                                              Tile<d>::ctas) void bounded(T *out) {  // here
      out[threadIdx.x + 16 * threadIdx.y] = d;
    }"""
    host = "bounded<64, float><<<1, dim3(16, a.H)>>>(static_cast<float*>(a.O));"
    source = program("", before=before, launch=host)
    launcher = build(source)
    assert launch(launcher, torch.zeros(32), H=2).eq(64).all()
    with pytest.raises(KernelError) as caught:
        launch(launcher, torch.zeros(64), H=3)
    said = "launch bounds in bounded<64, float>: a block has 48 threads, and __launch_bounds__ allows 32\n"
    assert f"{FILE}:{line_of(source)}: {said}" in str(caught.value)


def test_shared_memory_over_48_kb_needs_the_opt_in():
    opt_in = (
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, {0}); kernel<<<1, 32, {0}>>>(a);"
    )
    body = "extern __shared__ float x[]; x[58111 * (n / 32)] = 3; if (threadIdx.x == 0) out[0] = x[58111];"
    assert launch(build(program(body, launch=opt_in.format(227 << 10))), torch.zeros(32))[0] == 3
    with pytest.raises(KernelError, match="232449 bytes of dynamic shared memory asked for; at most 232448 can be had"):
        launch(build(program(body + " ", launch=opt_in.format((227 << 10) + 1))), torch.zeros(32))


STATIC = "extern __shared__ float x[]; __shared__ float y[1024]; y[0] = x[0] = 5; out[0] = x[0] + y[0];"
OPT_IN = "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);"


@pytest.mark.parametrize(
    ("opt_in", "arch", "most", "unless"),
    [
        ("", None, 48 << 10, " without cudaFuncSetAttribute"),
        (OPT_IN, None, 227 << 10, ""),
        (OPT_IN, "sm_86", 99 << 10, ""),
    ],
)
def test_static_and_dynamic_shared_memory_are_counted_together(opt_in, arch, most, unless):
    source = program(STATIC, launch=f"const int bytes = {most} - 4096 + a.H; {opt_in} kernel<<<1, 1, bytes>>>(a);")
    launcher = Launcher(Rung("test", FILE, source), arch)
    assert launch(launcher, torch.zeros(1), H=0)[0] == 10
    words = f"of static and {most - 4095} of dynamic shared memory; {most} are allowed in all{unless}"
    with pytest.raises(KernelError, match=f"comes to 4096 bytes {words}"):
        launch(launcher, torch.zeros(1), H=1)


def test_a_template_whose_arguments_are_deduced_may_have_the_most_that_its_file_asks_for():
    before = "template <class T> __global__ void deduced(T* out) { extern __shared__ float x[]; x[14335] = 3; *out = x[14335]; }"
    opt_in = "cudaFuncSetAttribute(deduced<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, 57344);"
    host = "deduced<<<1, 1, 57344 + a.H>>>(static_cast<float*>(a.O));"
    launcher = build(program("", before=before, launch=f"{opt_in} {host}"))
    assert launch(launcher, torch.zeros(1), H=0)[0] == 3
    with pytest.raises(KernelError, match="57345 bytes of dynamic shared memory asked for; 57344 are allowed without"):
        launch(launcher, torch.zeros(1), H=1)
    with pytest.raises(KernelError, match="57344 bytes of dynamic shared memory asked for; 49152 are allowed without"):
        launch(build(program("", before=before, launch=host)), torch.zeros(1), H=0)


def test_launches_of_every_kind():
    before = """
    __global__ void defaults(float *out, float by = 2) { out[threadIdx.x] += by; }
    template <int d, class T> __global__ void part(T *out) { out[threadIdx.x] += d; }
    namespace inner { template <class T> __global__ void part(T *out) { out[threadIdx.x] += 7; } }
    __global__ void shape(float *out) { out[threadIdx.x] += gridDim.x + blockDim.x; }
    void start(dim3 gridDim, dim3 blockDim, float *out) { shape<<<gridDim, blockDim>>>(out); }"""
    host = """float *out = static_cast<float*>(a.O);
    dim3 gridDim(1), blockDim = dim3(32);
    defaults<<<gridDim, blockDim>>>(out); defaults<<<1, 32>>>(out, 3);
    part<10><<<1, 32>>>(out); part<20, float><<<1, 32>>>(out); inner::part<<<1, 32>>>(out); start(gridDim, blockDim, out);"""
    wanted = 2 + 3 + 10 + 20 + 7 + 33
    assert launch(build(program("", before=before, launch=host)), torch.zeros(32)).tolist() == [wanted] * 32


def test_a_failed_launch_is_seen_by_the_launcher_and_stops_what_follows():
    launcher = """  kernel<<<1, 1>>>(a);
    if (cudaPeekAtLastError() != cudaErrorIllegalAddress) return cudaErrorUnknown;
    kernel<<<2, 1>>>(a);"""
    with pytest.raises(KernelError, match="block 0 writes 4 bytes at O"):
        launch(build(program("out[n + blockIdx.x] = 1;", launch=launcher)), torch.zeros(32))


def test_the_api_of_the_launcher():
    launcher = """  int device, sms, shared, blocks; float* scratch; float host[2] = {3, 4};
    cudaError_t e[] = {cudaGetDevice(&device), cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 128, 40 << 10), cudaMalloc(&scratch, 8),
      cudaMemcpyAsync(scratch, host, 8, cudaMemcpyHostToDevice, stream)};
    for (auto x : e) if (x != cudaSuccess) return x;
    fa_args b = a; b.K = scratch;
    kernel<<<1, 1, 0, stream>>>(b);
    cudaMemsetAsync(static_cast<float*>(a.O) + 2, 0, 4, stream);
    const float figures[3] = {float(sms), float(shared), float(blocks)};
    cudaMemcpy(static_cast<float*>(a.O) + 3, figures, 12, cudaMemcpyHostToDevice);
    if (cudaDeviceSynchronize() != cudaSuccess || cudaFree(scratch) != cudaSuccess) return cudaErrorUnknown;
    if (strcmp(cudaGetErrorName(cudaErrorAssert), "cudaErrorAssert")) return cudaErrorUnknown;"""
    out = launch(
        build(program("for (int i = 0; i < 2; ++i) out[i] = static_cast<const float*>(a.K)[i];", launch=launcher)),
        torch.ones(6),
    )
    assert out.tolist() == [3, 4, 0, 132, 227 * 1024, 5]
    past = launcher.replace("cudaMalloc(&scratch, 8)", "cudaMalloc(&scratch, 4)").replace("host, 8", "host, 4")
    with pytest.raises(KernelError, match="out of bounds"):
        launch(build(program("out[0] = static_cast<const float*>(a.K)[1];", launch=past)), torch.ones(6))


def test_what_only_the_launcher_writes_comes_back_and_is_no_traffic_of_the_kernels():
    host = """const float x = 5; cudaMemsetAsync(a.O, 0, 8, stream);
    cudaMemcpy(const_cast<void*>(a.Q), &x, 4, cudaMemcpyHostToDevice);
    cudaMemcpyAsync(a.workspace[0], a.Q, 4, cudaMemcpyDeviceToDevice, stream);"""
    out, given, scratch, launcher = torch.ones(3), torch.ones(2), torch.ones(2), build(program("", launch=host))
    launch(launcher, out, Q=given, scratch=scratch)
    assert (out.tolist(), given.tolist(), scratch.tolist()) == ([0, 0, 1], [5, 1], [5, 1])
    assert set(launcher.counters.values()) == {(0, 0)}


def test_memory_from_cudamalloc_is_there_until_it_is_freed():
    launcher = """  static float* kept;
    if (kept == nullptr && cudaMalloc(&kept, 128) != cudaSuccess) return cudaErrorMemoryAllocation;
    if (a.H == 3) cudaFree(kept);
    fa_args b = a; b.K = kept; kernel<<<1, 32>>>(b);"""
    body = """float* kept = static_cast<float*>(const_cast<void*>(a.K)) + threadIdx.x;
    if (a.H == 0) *kept = threadIdx.x; else out[threadIdx.x] = kept[a.H - 1];"""
    launcher = build(program(body, launch=launcher))
    launch(launcher, torch.zeros(32), H=0)
    assert launch(launcher, torch.zeros(32), H=1).tolist() == [float(t) for t in range(32)]
    past = r"thread 31 of block 0 reads 4 bytes at memory from cudaMalloc \+ 128 bytes, 4 past its end \(it has 128 bytes\)"
    with pytest.raises(KernelError, match=past):
        launch(launcher, torch.zeros(32), H=2)
    with pytest.raises(KernelError, match="out of bounds in kernel: thread 0 of block 0 reads 4 bytes"):
        launch(launcher, torch.zeros(32), H=3)


@pytest.mark.parametrize(
    "host",
    ["kernel<<<1, 1025>>>(a);", "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20);"],
)
def test_an_error_that_the_launcher_keeps_to_itself_is_in_the_way_of_a_trace(host):
    launcher = build(program("out[0] = 1;", launch=f"{host} return cudaSuccess;"))
    launch(launcher, torch.zeros(1))  # as silent as on a GPU
    out = torch.zeros(1)
    with pytest.raises(KernelError, match=r"CUDA error: invalid .*fa_launch said cudaSuccess: .* cudaGetLastError\(\)"):
        trace(launcher, out)


def test_a_copy_to_a_variable_stays_within_it():
    host = (
        "float x[2] = {1, 2}; cudaError_t e = cudaMemcpyToSymbol(two, x, 8, a.H); if (e) return e; kernel<<<1, 1>>>(a);"
    )
    launcher = build(program("out[0] = two[1];", before="__constant__ float two[2];", launch=host))
    assert launch(launcher, torch.zeros(1), H=0)[0] == 2
    with pytest.raises(KernelError, match="cudaErrorInvalidValue.: cudaMemcpyToSymbol past the end of the variable"):
        launch(launcher, torch.zeros(1), H=4)


def test_an_error_that_the_launcher_has_looked_at_is_its_own_affair():
    host = "kernel<<<1, 1025>>>(a); if (cudaGetLastError() != cudaSuccess) kernel<<<1, 1>>>(a);"
    assert launch(build(program("out[0] = 1;", launch=host)), torch.zeros(1))[0] == 1


# ---- the launcher's own code


HOST = {
    # name: (launcher, words of the report)
    "division by zero": ("kernel<<<a.Nq / (a.D - 1), 32>>>(a); // here", "division by zero in the launcher: fa_launch divides an integer by zero"),
    "null pointer": ("kernel<<<*static_cast<const int*>(a.K), 32>>>(a); // here", "illegal address in the launcher: fa_launch touches the address 0x0"),
    "in the C library": ("memset(reinterpret_cast<void*>(64), 1, a.Nq);", "illegal address in the launcher"),
    "abort by a signal": ("raise(SIGABRT);", "abort in the launcher: fa_launch comes to an abort() of the C or C++ library"),
    "array": ("int grid[2] = {}; grid[a.Nq / 16] = 1; kernel<<<grid[1], 32>>>(a); // here",
              "out of bounds in the launcher: fa_launch takes element 2 of an array of type int [2]"),
    "array, by a pointer": ("kernel<<<eight(a.Nq / 4), 32>>>(a);",
                            "local array overrun in the launcher: fa_launch has written past the end of a local array"),
    "memset past a tensor": (
        "cudaMemsetAsync(static_cast<float*>(a.O) + 1, 0, 128, stream); // here",
        "out of bounds in the launcher: fa_launch lets cudaMemsetAsync write 128 bytes at O + 4 bytes, 4 past its end (it has 128 bytes)"),
    "memset past an allocation": (
        "float* s; cudaMalloc(&s, 1024); cudaMemset(s, 0x5a, 262144); // here",
        "lets cudaMemset write 262144 bytes at memory from cudaMalloc + 0 bytes, 261120 past its end (it has 1024 bytes)"),
    "memset of a negative size": ("cudaMemset(a.O, 0, a.D - 2); // here", "lets cudaMemset write 18446744073709551615 bytes at O + 0 bytes"),
    "memset of no tensor": ("cudaMemset(static_cast<char*>(a.O) - 8, 0, 4); // here", "write 4 bytes, 8 bytes before the start of O"),
    "memset of nothing": ("cudaMemset(a.workspace[0], 0, 4); // here",
                          "null pointer in the launcher: fa_launch lets cudaMemset write 4 bytes through a null pointer"),
    "copy to past a tensor": ("float x[64] = {}; cudaMemcpy(a.O, x, 256, cudaMemcpyHostToDevice); // here",
                              "lets cudaMemcpy write 256 bytes at O + 0 bytes, 128 past its end (it has 128 bytes)"),
    "copy from past a tensor": ("float x[64]; cudaMemcpyAsync(x, a.O, 256, cudaMemcpyDefault, stream); // here",
                                "lets cudaMemcpyAsync read 256 bytes at O + 0 bytes, 128 past its end (it has 128 bytes)"),
    "copy from no tensor": ("float x[1]; cudaMemcpy(x, static_cast<char*>(a.O) + 128, 4, cudaMemcpyDeviceToHost); // here",
                            "lets cudaMemcpy read 4 bytes at O + 128 bytes, 4 past its end (it has 128 bytes)"),
    "recursion": ("kernel<<<deep(1), 32>>>(a);", "stack overflow in the launcher: fa_launch has used up its stack"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_a_fault_of_the_launcher_is_a_finding(name):
    host, words = HOST[name]
    before = """
    #include <signal.h>
    int deep(volatile int n) { return n < 0 ? 0 : deep(n + 1) + n; }
    __noinline__ int eight(int n) { volatile int x[4], *p = x; for (int i = 0; i < n; ++i) p[i] = 1; return x[0]; }
    """
    source = program("out[0] = 1;", before=before, launch=host)
    with pytest.raises(KernelError) as caught:
        launch(build(source), torch.zeros(32))
    assert words in str(caught.value)
    assert "// here" not in source or f"{FILE}:{line_of(source)}: " in str(caught.value)
    assert run("out[threadIdx.x] = 7;").tolist() == [7.0] * 32


TOUCHED = {
    "written": ("static_cast<float*>(a.O)[1] = 1;", "writes 4 bytes of O"),
    "read": ("if (static_cast<const float*>(a.Q)[0] > 9) return cudaErrorUnknown;", "reads 4 bytes of Q"),
    "set": ("memset(a.O, 0, 8);", "writes 8 bytes of O"),
    "allocated": ("float* p; cudaMalloc(&p, 8); p[1] = 2;", "writes 4 bytes of memory from cudaMalloc"),
}


@pytest.fixture(scope="module")
def touching() -> tuple[str, Launcher]:
    """A launcher that touches device memory on the host, as fa_args::H says; if it says none, as a launcher may."""
    cases = "\n".join(f"if (a.H == {i}) {{\n{touch} // here {i}.\n}}" for i, (touch, _) in enumerate(TOUCHED.values()))
    allowed = """float x[2] = {};
    cudaMemcpyAsync(x, a.Q, 8, cudaMemcpyDeviceToHost, stream); x[0] += x[1];
    cudaMemcpyToSymbol(two, a.Q, 8, 0, cudaMemcpyDeviceToDevice); cudaMemsetAsync(a.O, 0, 128, stream);
    kernel<<<1, 1>>>(a);
    cudaMemcpy(static_cast<float*>(a.O) + 1, x, 4, cudaMemcpyHostToDevice);"""
    source = program("out[0] = two[1];", before="__constant__ float two[2];", launch=f"{cases}\n{allowed}")
    return source, build(source)


@pytest.mark.parametrize("name", TOUCHED)
def test_a_launcher_cannot_touch_device_memory_on_the_host(name, touching):
    said = refused(touching, list(TOUCHED).index(name), Q=torch.ones(2))
    words = f"{TOUCHED[name][1]}, which is the GPU's: host code can't touch it\n  hint: launch a kernel, or use cudaMemcpyAsync"
    assert f"device memory in the launcher: fa_launch {words}" in said


def test_a_launcher_may_copy_and_fill_device_memory(touching):
    out = launch(touching[1], torch.ones(32), H=-1, Q=torch.tensor([3.0, 4.0]))
    assert out.tolist() == [4, 7, *[0] * 30]


ENDLESS = "for (volatile int i = 1; i < a.Nq; i = i * a.D) {} // here"


def test_a_launcher_without_end_is_stopped():
    source = program("out[0] = 1;", launch=f"kernel<<<1, 1>>>(a);\n{ENDLESS}")
    launcher = build(source)
    launcher.timeout = 0.3
    with pytest.raises(
        KernelError, match=f"{FILE}:{line_of(source)}: stopped in the launcher: stopped while fa_launch"
    ):
        launch(launcher, torch.zeros(32))


def test_ctrl_c_stops_a_launcher_without_end():
    source = program("out[0] = 1;", launch=ENDLESS)
    launcher = build(source)
    launcher.compile()
    with pytest.raises(KeyboardInterrupt, match=f"{FILE}:{line_of(source)}: stopped in the launcher"), ctrl_c():
        launch(launcher, torch.zeros(32))
    assert run("out[threadIdx.x] = 7;").tolist() == [7.0] * 32


# ---- printing, compiling


def test_printf_comes_out_in_the_order_of_the_blocks(capfd):
    launcher = build(program('if (threadIdx.x == 0) printf("block %d: %.1f\\n", blockIdx.x, 0.5f);', "100, 32"))
    launch(launcher, torch.zeros(1))
    wanted = "".join(f"block {b}: 0.5\n" for b in range(100))
    assert launcher.output == wanted and capfd.readouterr().out == wanted


def test_what_is_printed_beyond_a_megabyte_is_lost():
    launcher = build(program('for (int i = 0; i < 2500; ++i) printf("%03d %d\\n", blockIdx.x, i);', "400, 4"))
    first = None
    for launcher.threads in (1, 3):
        launch(launcher, torch.zeros(1))
        assert 900_000 < len(launcher.output) <= 1 << 20
        assert launcher.output.startswith("000 0\n") and first in (None, launcher.output)
        first = launcher.output


def test_what_was_printed_before_a_fault_is_shown(capfd):
    failure('printf("so far\\n"); __trap();', shape="1, 1")
    assert capfd.readouterr().out == "so far\n"


def test_compile_error_names_the_readers_line():
    source = program("out[0] = 1;\nflaot x = 2; // here")
    with pytest.raises(CompileError, match=rf"{FILE}:{line_of(source)}:\d+: error: .*flaot"):
        build(source).compile()


def test_a_header_that_is_not_there_is_told_from_those_that_are():
    with pytest.raises(
        CompileError,
        match=r"reader.cu:4:10: fatal error: .*cub/cub.cuh.*\n(.*\n)*of CUDA's own headers the emulator has .*<cuda_fp16.h>",
    ):
        build(program("out[0] = 1;", before="#include <cub/cub.cuh>")).compile()


def test_untranslatable_source_is_a_compile_error_with_its_line():
    source = program("__shared__ float x = 3; // here")
    with pytest.raises(CompileError, match=f"{FILE}:{line_of(source)}: __shared__ variables can't be initialised"):
        build(source).compile()


def test_a_fault_outside_of_kernels_is_left_to_others():
    program = f"""
import ctypes, sys, threading, torch
sys.path += [{str(FOLDER)!r}, {str(FOLDER.parent / "tools")!r}]
import emulated
good, endless = (emulated.build(emulated.program(body)) for body in ("out[0] = 1;", "while (true) {{}}"))
emulated.launch(good, torch.zeros(1))
endless.compile()
if sys.argv[1] == "during":
    threading.Thread(target=emulated.launch, args=(endless, torch.zeros(1)), daemon=True).start()
    import time; time.sleep(0.5)
ctypes.string_at(8)
"""
    for when in ("after", "during"):
        command = [sys.executable, "-c", program, when]
        assert subprocess.run(command, timeout=600, cwd=FOLDER.parents[1]).returncode == -signal.SIGSEGV
