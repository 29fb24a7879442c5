"""What a trace says besides its counts (tests/emulator/test_trace_counts.py): lines, names, worst requests, findings that stop."""

import resource
from collections import Counter

import pytest
import torch
from emulated import FILE, build, ctrl_c, launch, line_of, program
from emulated import trace as traced

from helpers import rung, rungs
from helpers.emulator.trace import Access, Trace
from helpers.ladder.contract import prepare
from helpers.ladder.errors import KernelError
from helpers.run.kernel import Kernel
from helpers.run.reference import random_inputs
from helpers.toolchain.compiler import emulators_compiler


def trace(body: str, out: int | torch.Tensor = 32, *, shape: str = "1, 32", before: str = "", **tensors) -> Trace:
    out = torch.zeros(out) if isinstance(out, int) else out
    return traced(build(program(body, shape, before)), out, **tensors)


def rung_trace(kernel: Kernel, N: int = 77, D: int = 64) -> Trace:
    shape = (1, 1, 7, 13 * N, D) if kernel.rung.op == "softmax" else (1, 2, N, N, D)
    return kernel.launcher.trace(prepare(kernel.rung, "cpu", random_inputs(kernel.rung, shape)))


def on(found: Trace, line: int) -> list[Access]:
    return [a for a in found.accesses if a.line == line]


# ---- the same everywhere

# CTAs that take one tile after another, and send a tile's results by way of the next one's place: with several OS threads it is a
# matter of time which CTA takes which tile, and of the schedule which of its two names that place has when it is sent.
TAKES_TILES = {"33_backward_wgmma"}


def without_names(accesses: tuple[Access, ...]) -> Counter:
    """What was asked for, line by line, whatever the place in shared memory is called: requests, bytes, cost and ideal."""
    found = Counter()
    for a in accesses:
        target = a.target if a.space == "global" else ""
        for what in ("requests", "bytes", "cost", "ideal"):
            found[a.kernel, a.line, a.op, a.space, target, a.width, what] += getattr(a, what)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("stem", [r.stem for r in rungs()])
def test_a_trace_is_the_same_for_any_number_of_os_threads_and_any_schedule(stem):
    kernel = Kernel(rung(stem), "cpu")
    kernel.launcher.threads = 1
    first = rung_trace(kernel)
    assert first.accesses and first.findings == ()
    takes_tiles = stem in TAKES_TILES
    for threads, schedule in ((1, 0), (1, 5), (1, 6)) if takes_tiles else ((2, 0), (3, 5), (1, 6)):
        kernel.launcher.threads, kernel.launcher.schedule = threads, schedule
        again = rung_trace(kernel)
        assert again.accesses == first.accesses or (takes_tiles and schedule)
        assert without_names(again.accesses) == without_names(first.accesses)
        assert again.instructions == first.instructions
        assert again.tensors == first.tensors and again.findings == ()
    for name, (read, written, _) in first.tensors.items():  # as a launch counts them, request by request
        moved = [a for a in first.accesses if a.space == "global" and a.target == name]
        twice = [a for a in moved if a.op == "atomic" or "reduce" in a.op]  # read and written
        assert sum(a.bytes for a in moved + twice) == read + written
        if not any("bulk" in a.op for a in moved):  # of a bulk copy an access doesn't say which way it goes
            assert sum(a.bytes for a in moved if a.op != "store") == read


def test_tracing_leaves_results_and_later_launches_alone():
    launcher = build(
        program("__shared__ float s[32]; s[threadIdx.x] = in[threadIdx.x]; out[threadIdx.x] = s[threadIdx.x] * 2;")
    )
    q = torch.arange(32.0)
    first, second = torch.zeros(32), torch.zeros(32)
    found = traced(launcher, first, Q=q)
    launch(launcher, second, Q=q)
    assert torch.equal(first, q * 2) and torch.equal(second, q * 2)
    assert (
        found.tensors
        == {"O": (0, 128, 128), "Q": (128, 0, 128)}
        == {name: (*launcher.counters[name], launcher.sizes[name]) for name in ("O", "Q")}
    )


# ---- whose line, whose name


def test_costs_belong_to_the_readers_line_through_calls_that_are_inlined():
    before = """#include <fa/math.cuh>
    __device__ __forceinline__ float first(const float *p) {
      float x[4];
      fa::load4(x, p); // helper
      return x[0];
    }"""
    source = program("__shared__ __align__(16) float s[128];\nfa::store4(s + 4 * threadIdx.x, in); // store\n"
                     "__syncthreads();\nout[threadIdx.x] = first(s + 4 * threadIdx.x);\natomicAdd(out, 1.0f); // atomic", before=before)  # fmt: skip
    found = traced(build(source), torch.zeros(32), Q=torch.ones(4))
    assert {a.file for a in found.accesses} == {str(FILE)} and {a.kernel for a in found.accesses} == {"kernel"}
    (store,) = (a for a in on(found, line_of(source, "// store")) if a.op == "store")
    assert (store.width, store.target, store.requests) == (16, "s", 1)
    (load,) = on(found, line_of(source, "// helper"))
    assert (load.op, load.width, load.cost) == ("load", 16, 4)
    (atomic,) = on(found, line_of(source, "// atomic"))
    assert (atomic.op, atomic.space, atomic.target, atomic.requests, atomic.bytes) == ("atomic", "global", "O", 1, 128)
    assert found.tensors["O"] == (128, 128 + 128, 128)


def test_what_stands_in_fa_is_charged_to_the_line_that_calls_it():
    body = """__shared__ __align__(16) __half s[2048];
    for (int i = threadIdx.x; i < 2048; i += 32) s[i] = __half(1);
    __syncthreads();
    uint32_t r[4];
    fa::ldmatrix_x4(r, s + threadIdx.x % 16 * 64); // here
    out[threadIdx.x] = r[0];"""
    source = program(body, before="#include <fa/sm80.cuh>")
    found = traced(build(source), torch.zeros(32))
    (access,) = on(found, line_of(source))
    assert (access.op, access.width, access.requests, access.cost, access.ideal) == ("ldmatrix", 16, 1, 32, 4)
    assert access.file == str(FILE) and found.instructions["ldmatrix"] == 1


def test_structs_that_calls_take_and_give_by_value_are_accesses():
    before = """struct Row { float x[8]; };
    __device__ __noinline__ float2 pair(float x) { return {x, x + 1}; }
    __device__ __noinline__ float4 four(float x) { return {x, x, x, x}; }
    __device__ __noinline__ Row row(float x) { return {{x, x}}; }
    __device__ __noinline__ float of_pair(float2 v) { return v.x + v.y; }
    __device__ __noinline__ float of_four(float4 v) { return v.x + v.y; }
    __device__ __noinline__ float of_row(Row v, int i) { return v.x[i]; }
    template <int n> __device__ void set(float *p) {
      struct Local { float x[2 * n]; };
      *reinterpret_cast<Local *>(p + 4 * threadIdx.x) = {1.0f}; // copy
    }"""
    body = """__shared__ __align__(16) float more[128]; __shared__ float2 p[32]; __shared__ float4 f[32]; __shared__ __align__(16) Row r[32];
    const int t = threadIdx.x;
    p[t] = pair(t); // store 8;
    f[t] = four(t); // store 16;
    r[t] = row(t); // store 32;
    set<2>(more);
    __syncthreads();
    float x = of_pair(p[31 - t]); // load 8;
    x += of_four(f[31 - t]); // load 16;
    out[t] = x + of_row(r[31 - t], 1); // load 32;"""
    source = program(body, before=before)
    out = torch.zeros(32)
    found = traced(build(source), out)
    assert out.tolist() == [5.0 * (31 - t) + 1 for t in range(32)] and found.findings == ()
    gcc = emulators_compiler().kind == "gcc"
    width = 16 if gcc else 4  # clang copies a struct of the reader's own by members
    assert [(a.op, a.target, a.width) for a in on(found, line_of(source, "// copy"))] == [("store", "more", width)]
    for op in ("store", "load"):
        for size in (8, 16, 32) if gcc else (8, 16):  # clang leaves what doesn't fit into registers to the call
            access = [a for a in on(found, line_of(source, f"// {op} {size};")) if a.space == "shared"]
            assert [(a.op, a.width, a.bytes) for a in access] == [(op, min(size, 16), 32 * size)]


def test_arrays_in_dynamic_shared_memory_have_the_names_of_their_pointers():
    body = """extern __shared__ __align__(1024) unsigned char smem[];
    float *A_smem = reinterpret_cast<float *>(smem), *B_smem = A_smem + 32;
    const uint32_t C_smem = uint32_t(__cvta_generic_to_shared(B_smem + 64));
    A_smem[threadIdx.x] = 1; // a
    B_smem[threadIdx.x] = C_smem; // b
    B_smem[64 + threadIdx.x] = 3; // c
    smem[4 * 32 * 4 + threadIdx.x] = 4; // c again
    for (int i = 0; i < 2; ++i) {
      float *D_smem = A_smem + 192 + 32 * i;
      D_smem[threadIdx.x] = i; // d
    }
    float *mine_smem = A_smem + 256 + threadIdx.x; // no array: another place for every lane
    *mine_smem = 5; // d still"""
    source = program(body, shape="1, 32, 2048")
    found = traced(build(source), torch.zeros(32))
    for mark, name in (
        ("a", "A_smem"),
        ("b", "B_smem"),
        ("c", "C_smem"),
        ("c again", "C_smem"),
        ("d", "D_smem"),
        ("d still", "D_smem"),
    ):
        line = [i for i, text in enumerate(source.split("\n"), 1) if text.endswith(f"// {mark}")]
        assert [a.target for a in on(found, *line)] == [name]


def test_an_array_at_a_templates_constant_has_its_name():
    before = "template <int n> struct Tile { static constexpr int at = 4 * n; };\n"
    body = """extern __shared__ unsigned char smem[];
    float *A_smem = reinterpret_cast<float *>(smem), *B_smem = A_smem + Tile<32>::at / 4, *C_smem = 32 < n ? A_smem + 64 : A_smem + 96;
    B_smem[threadIdx.x] = 1;
    C_smem[threadIdx.x] = 1;"""
    found = trace(body, shape="1, 32, 512", before=before)
    assert [a.target for a in found.accesses] == ["B_smem", "B_smem"]  # of C's "<" it isn't known that it compares


def test_dynamic_shared_memory_without_pointers_has_its_own_name():
    found = trace("extern __shared__ float tile[]; tile[threadIdx.x] = 1;", shape="1, 32, 128")
    assert [a.target for a in found.accesses] == ["tile"]


# ---- one request


def test_the_worst_request_is_kept_with_its_addresses():
    body = """__shared__ float s[1024];
    const int stride = blockIdx.x == 2 && threadIdx.y == 1 ? 32 : 1;
    s[threadIdx.x * stride] = 1; // here"""
    source = program(body, shape="4, dim3(32, 2)")
    (access,) = on(traced(build(source), torch.zeros(32)), line_of(source))
    worst = access.worst_request
    assert (access.requests, access.cost, access.ideal, access.worst) == (8, 7 + 32, 8, 32)
    assert (worst.kernel, worst.block, worst.warp, worst.width, worst.cost, worst.ideal) == ("kernel", 2, 1, 4, 32, 1)
    assert [a - worst.addresses[0] for a in worst.addresses] == [128 * lane for lane in range(32)]


def test_addresses_count_from_where_an_allocation_begins():
    source = program(
        "",
        before="__global__ void far(float* w) { w[40 - threadIdx.x] = 1; }",
        launch="float* w; cudaMalloc(&w, 4096); far<<<1, 32>>>(w + 8); cudaFree(w);",
    )
    (stored,) = traced(build(source), torch.zeros(32)).accesses
    assert stored.target == "cudaMalloc"
    assert stored.worst_request.addresses == tuple(4 * (48 - t) for t in range(32))


VARIABLES = """
    __device__ float plain[64];
    namespace inner { __device__ int counted; }
    static __device__ float hidden[32];
    __constant__ float constant[32] = {1};
    constexpr float table[32] = {1};
    """


def test_device_variables_are_global_memory():
    body = """const int t = threadIdx.x;
    plain[2 * (31 - t)] = constant[t]; // plain
    atomicAdd(&inner::counted, 1); // counted
    hidden[t] = table[n - 1 - t]; // hidden
    __syncthreads();
    out[t] = plain[2 * t] + hidden[31 - t]; // read"""
    found = trace(body, shape="2, 32", before=VARIABLES)
    counted = [(a.op, a.target, a.requests, a.cost, a.bytes) for a in found.accesses if a.target != "O"]
    assert sorted(counted) == [
        ("atomic", "__device__ inner::counted", 2, 2, 256),
        ("load", "__device__ plain", 2, 16, 256),
        ("store", "__device__", 2, 8, 256),
        ("store", "__device__ plain", 2, 16, 256),
    ]
    (stored,) = (a for a in found.accesses if (a.op, a.target) == ("store", "__device__ plain"))
    assert stored.worst_request.addresses == tuple(8 * (31 - t) for t in range(32))


def test_lanes_that_take_no_part_have_no_address():
    source = program("if (threadIdx.x % 8 == 3) out[threadIdx.x] = 1; // here")
    (access,) = on(traced(build(source), torch.zeros(32)), line_of(source))
    assert access.worst_request.addresses == tuple(4 * i if i % 8 == 3 else None for i in range(32))
    assert (access.requests, access.bytes, access.cost, access.ideal) == (1, 16, 4, 1)


def test_sectors_are_counted_from_where_a_view_begins():
    source = program("out[threadIdx.x] = in[threadIdx.x]; // here")
    whole = torch.zeros(64)
    for start, sectors in ((0, 4), (1, 5), (8, 4), (12, 5)):
        found = on(traced(build(source), torch.zeros(32), Q=whole[start : start + 32]), line_of(source))
        assert [(a.cost, a.ideal) for a in found if a.op == "load"] == [(sectors, 4)]


def test_an_atomic_is_one_step_however_long_the_streams():
    body = "__shared__ int sum; if (threadIdx.x == 0) sum = 0; __syncthreads(); for (int i = 0; i < 700; ++i) atomicAdd(&sum, 1); __syncthreads(); out[threadIdx.x] = sum;"
    launcher = build(program(body, "1, 64"))
    for launcher.schedule in range(4):
        out = torch.zeros(64)
        assert traced(launcher, out).findings == () and out.tolist() == [700.0 * 64] * 64


def test_instructions_are_counted_by_warp():
    body = """out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[0], 1) + __any_sync(0xffffffffu, 1);
    __syncwarp(); __syncthreads(); __syncthreads();"""
    found = trace(body, 64, shape="3, 64", Q=torch.ones(1))
    assert found.instructions == {
        "bar.sync": 12, "bar.warp.sync": 6, "ld.global": 6, "shfl.sync": 6, "st.global": 6, "vote.sync": 6,
    }  # fmt: skip


def test_syncthreads_is_one_instruction_where_ptx_comes_to_its_barrier():
    body = """if (threadIdx.x < 32) asm volatile("bar.sync 0, 64;" ::: "memory"); else __syncthreads();
    if (threadIdx.x >= 32) asm volatile("bar.sync 0, 64;" ::: "memory"); else __syncthreads();
    __syncthreads();
    out[threadIdx.x] = 1;"""
    assert trace(body, 64, shape="1, 64").instructions == {"bar.sync": 6, "st.global": 2}


def test_what_a_cp_async_reads_is_no_load_instruction():
    body = """__shared__ __align__(16) float s[128];
    fa::cp_async_16(s + 4 * threadIdx.x, in + 4 * threadIdx.x); // here
    fa::cp_async_commit();
    fa::cp_async_wait<0>();
    out[threadIdx.x] = s[4 * threadIdx.x] + in[threadIdx.x];"""
    source = program(body, before="#include <fa/sm80.cuh>")
    found = traced(build(source), torch.zeros(32), Q=torch.ones(128))
    assert {name: found.instructions[name] for name in ("cp.async", "ld.global", "ld.shared")} == {
        "cp.async": 1, "ld.global": 1, "ld.shared": 1,
    }  # fmt: skip
    assert {(a.op, a.space, a.bytes) for a in on(found, line_of(source))} == {
        ("cp.async", "shared", 512),
        ("load", "global", 512),
    }


# ---- kernels that go wrong while they are traced


def test_what_stops_a_kernel_is_a_finding():
    source = program("out[threadIdx.x + 31] = 1; // here")
    (finding,) = traced(build(source), torch.zeros(32)).findings
    assert finding.error and finding.kind == "out of bounds" and finding.line == line_of(source)
    assert "thread 1 of block 0 writes 4 bytes at O + 128 bytes, 4 past its end" in finding.text and finding.hint


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("if (threadIdx.x < 8) __syncthreads(); else __syncthreads();", "divergent barrier", "don't all come to the same"),
        ("if (threadIdx.x < 8) return;\n__syncthreads();", "divergent barrier", "threads 0-7 have returned"),
        ("if (threadIdx.x != 5) out[0] = __shfl_sync(0xffffffffu, 1, 0);\n__syncthreads();", "deadlock", "wait at"),
        ("__trap();", "trap", "executes __trap()"),
        ("reinterpret_cast<float4 *>(out + 1)[0] = {};", "misaligned", "no multiple of 16"),
    ],
)  # fmt: skip
def test_other_stops_are_findings_too(body, kind, words):
    found = trace(body.replace("else", "\nelse"))
    (finding,) = [f for f in found.findings if f.error]
    assert finding.kind == kind and words in finding.text and finding.file == str(FILE) and finding.line > 0


def test_reads_of_what_nobody_wrote_let_the_kernel_go_on():
    source = program("__shared__ float s[4][8];\nout[threadIdx.x] = s[threadIdx.x / 8][threadIdx.x % 8]; // here")
    out = torch.zeros(32)
    found = traced(build(source), out)
    (finding,) = found.findings
    assert (finding.kind, finding.line, finding.count, finding.error) == (
        "uninitialised shared memory", line_of(source), 32, False,
    )  # fmt: skip
    assert finding.text == "thread 0 of block 0 reads s[0][0], which nobody has written" and finding.hint
    assert out.isnan().all()


def test_a_launch_that_cuda_refuses_raises():
    with pytest.raises(KernelError, match="cudaErrorInvalidConfiguration"):
        trace("out[0] = 1;", shape="1, 1025")


def test_timeout_is_a_finding():
    launcher = build(program("while (in[0] == 0) {}", shape="3, 64"))
    launcher.timeout = 0.3
    (finding,) = traced(launcher, torch.zeros(32), Q=torch.zeros(1)).findings
    assert finding.kind == "stopped" and finding.error


@pytest.mark.parametrize("loop", ["while (true) {}", "while (in[0] == 0) {}", "while (true) __syncthreads();"])
def test_ctrl_c_stops_a_trace(loop):
    launcher = build(program(loop, "4, 64"))
    launcher.compile_traced()  # the build is not what is interrupted
    with pytest.raises(KeyboardInterrupt), ctrl_c():
        traced(launcher, torch.zeros(32), Q=torch.zeros(4))
    assert traced(build(program("out[0] = 1;")), torch.zeros(32)).findings == ()


def test_a_long_loop_takes_no_more_memory():
    """Streams are merged while lanes run: two million requests are two rows."""
    body = "for (int i = 0; i < 1 << 15; ++i) out[threadIdx.x] = in[threadIdx.x + i % 2]; // here"
    source = program(body, shape="1, 1024")
    launcher = build(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = traced(launcher, torch.zeros(1024), Q=torch.ones(1025))
    assert {(a.op, a.target, a.requests) for a in on(found, line_of(source))} == {
        ("load", "Q", 32 << 15),
        ("store", "O", 32 << 15),
    }
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KB
