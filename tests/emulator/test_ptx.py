"""Inline PTX: every instruction the emulator interprets, against numpy and tables written out from the PTX ISA's
formulas; on a GPU (`pytest -m gpu tests/emulator/test_ptx.py`) the same small kernels on both, compared bit for bit.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from emulated import FILE, build, line_of, program
from emulated import launch as start

from helpers import CompileError, KernelError
from helpers.toolchain.compiler import emulators_compiler

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RANDOM = np.random.default_rng(0)
LANES = range(32)
# What a body sees besides what emulated.program gives it.
USUAL = """
  [[maybe_unused]] uint32_t* o = static_cast<uint32_t*>(a.O);
  [[maybe_unused]] const uint32_t* q = static_cast<const uint32_t*>(a.Q);
  [[maybe_unused]] const uint32_t* k = static_cast<const uint32_t*>(a.K);
  [[maybe_unused]] const uint32_t* v = static_cast<const uint32_t*>(a.V);
  [[maybe_unused]] const int t = threadIdx.x, lane = threadIdx.x % 32;
"""


built = cache(build)


def launch_on(device: str, source: str, words: int, H: int = 1, **arrays: np.ndarray) -> np.ndarray:
    """`words` 32-bit words of output; those nobody writes are 0xdeadbeef."""
    out = torch.from_numpy(np.full(words, 0xDEADBEEF, np.uint32).view(np.int32)).to(device)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).to(device) for name, x in arrays.items()}
    start(built(source, device), out, H=H, **tensors)
    return out.cpu().numpy().view(np.uint32)


def nan_is_nan(bits: np.ndarray, dtype) -> np.ndarray:
    """Bits with every NaN the same one: which it is differs between machines."""
    values = bits.view(dtype)
    return np.where(np.isnan(values), np.array(np.nan, dtype), values).view(bits.dtype)


def ulps(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How many floats lie between two of them; 0 between two NaNs."""
    order = [np.where(b < 0, -(b & 0x7FFFFFFF), b) for b in (z.view(np.int32).astype(np.int64) for z in (x, y))]
    return np.where(np.isnan(x) & np.isnan(y), 0, abs(order[0] - order[1]))


def run(device: str, body: str, words: int, *, shape="1, 32", before="", H=1, dtype=np.uint32, **arrays) -> np.ndarray:
    """The output as `dtype`: the emulator's, or the GPU's once it has been found to be the emulator's, bit for bit."""
    source = program(USUAL + body, shape, before)
    emulated = launch_on("cpu", source, words, H, **arrays)
    if device == "cuda":
        real = launch_on("cuda", source, words, H, **arrays)
        assert (real == emulated).all(), np.flatnonzero(real != emulated)[:8]
    return emulated.view(dtype)


def failure(body: str, **options) -> str:
    before, shape = options.pop("before", ""), options.pop("shape", "1, 32")
    source = program(USUAL + body, shape, before)
    with pytest.raises(KernelError) as caught:
        launch_on("cpu", source, 256, **options)
    if "// here" in body:
        assert str(caught.value).startswith(f"{FILE}:{line_of(source)}: "), caught.value
    return str(caught.value)


def failures(bodies: list[str], number: int, before: str = "", **arrays: np.ndarray) -> str:
    """As `failure`, of one of several bodies that are built into one kernel."""
    cases = (f"if (a.H == {i}) {{\n{body.replace('// here', f'// here {i}.')}\n}}" for i, body in enumerate(bodies))
    source = program(USUAL + before + "\n".join(cases))
    with pytest.raises(KernelError) as caught:
        launch_on("cpu", source, 256, H=number, **arrays)
    assert str(caught.value).startswith(f"{FILE}:{line_of(source, f'// here {number}.')}: "), caught.value
    return str(caught.value)


# ---- the formulas of the PTX ISA, chapter "Warp Level Matrix Multiply-Accumulate Instructions"


def group_and_thread(lane):
    return lane >> 2, lane % 4


def place_a16(lane, i):
    g, t = group_and_thread(lane)
    return g if i in (0, 1, 4, 5) else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)


def place_b16(lane, i):
    g, t = group_and_thread(lane)
    return t * 2 + (i & 1) + (0 if i < 2 else 8), g


def place_a8(lane, i):
    g, t = group_and_thread(lane)
    return g if i < 2 else g + 8, t * 2 + (i & 1)


def place_b8(lane, i):
    g, t = group_and_thread(lane)
    return t * 2 + i, g


def place_a_tf32(lane, i):
    g, t = group_and_thread(lane)
    return (g, t) if i == 0 else (g + 8, t) if i == 1 else (g, t + 4) if i == 2 else (g + 8, t + 4)


def place_b_tf32(lane, i):
    g, t = group_and_thread(lane)
    return (t, g) if i == 0 else (t + 4, g)


def place_c(lane, i):
    g, t = group_and_thread(lane)
    return g if i < 2 else g + 8, t * 2 + (i & 1)


def gather(matrix: np.ndarray, place, elements: int) -> np.ndarray:
    """(32, elements): what each lane holds of a matrix."""
    return np.array([[matrix[place(lane, i)] for i in range(elements)] for lane in LANES])


def scatter(fragments: np.ndarray, place, shape) -> np.ndarray:
    out = np.empty(shape, fragments.dtype)
    for lane, i in itertools.product(LANES, range(fragments.shape[1])):
        out[place(lane, i)] = fragments[lane, i]
    return out


# ---- ldmatrix, stmatrix, movmatrix


def fill(words: int) -> str:
    """Shared memory from Q, as 16-byte rows."""
    return f"""__shared__ __align__(128) uint32_t smem[{words}];
    for (int i = t; i < {words}; i += 32) smem[i] = q[i];
    __syncthreads(); uint32_t base = uint32_t(__cvta_generic_to_shared(smem));
    """


def ldmatrix(count: int, trans: bool, space=".shared") -> str:
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}{space}.b16"
    return f'asm volatile("{name} {{{registers}}}, [%{count}];" : {outputs} : "r"(address) : "memory");'


@BOTH
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(device, count, trans):
    memory = RANDOM.integers(0, 1 << 16, (64, 8), dtype=np.uint16)
    rows = RANDOM.permutation(64)[:32].astype(np.uint32)  # any row from any place
    body = f"""{fill(256)} uint32_t r[4] = {{}}, address = base + 16 * k[lane];
    {ldmatrix(count, trans)}
    for (int i = 0; i < 4; ++i) o[4 * lane + i] = r[i];"""
    out = run(device, body, 128, Q=memory, K=rows).view(np.uint16).reshape(32, 4, 2)
    for m in range(count):
        matrix = memory[rows[8 * m : 8 * m + 8]]
        for lane, i in itertools.product(LANES, range(2)):
            row, column = lane // 4, 2 * (lane % 4) + i
            assert out[lane, m, i] == (matrix[column, row] if trans else matrix[row, column])
    assert (out[:, count:] == 0).all()


@BOTH
def test_ldmatrix_ignores_the_addresses_of_lanes_it_has_no_rows_for(device):
    wrong = 2 if device == "cpu" else 512  # not even aligned; a GPU that looked would be lost for all other tests
    memory = RANDOM.integers(0, 1 << 16, (64, 8), dtype=np.uint16)
    body = f"""{fill(256)} uint32_t r[2] = {{}}, address = base + (lane < 16 ? 16 * lane : {wrong});
    {ldmatrix(2, False, ".shared::cta")} o[2 * lane] = r[0]; o[2 * lane + 1] = r[1];"""
    out = run(device, body, 64, Q=memory).view(np.uint16).reshape(32, 2, 2)
    assert (out[:, 1].reshape(8, 8) == memory[8:16]).all()


@BOTH
def test_ldmatrix_takes_64_bit_addresses_and_offsets(device):
    memory = RANDOM.integers(0, 1 << 16, (64, 8), dtype=np.uint16)
    body = f"""{fill(256)} uint32_t r; unsigned long long address = __cvta_generic_to_shared(smem) + 16 * (lane % 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%0}}, [%1 + 128];" : "=r"(r) : "l"(address)); o[lane] = r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%0}}, [%1+%2];" : "=r"(r) : "l"(address), "n"(256)); o[lane + 32] = r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%0}}, [%1+-16];" : "=r"(r) : "l"(address + 16)); o[lane + 64] = r;"""
    out = run(device, body, 96, Q=memory).view(np.uint16).reshape(3, 8, 8)
    assert (out[0] == memory[8:16]).all() and (out[1] == memory[16:24]).all() and (out[2] == memory[:8]).all()


BAD_ROWS = {
    "base + 16 * lane + 2 * (lane == 9)": "misaligned in kernel: thread 9 of block 0 reads 16 bytes at smem + 146 B, which",
    "base + (lane == 31 ? 1024 : 16 * lane)": "thread 31 of block 0 reads 16 bytes at smem + 1024 bytes, 16 past its end",
    "lane == 3 ? 0xfffffff0u : base": "thread 3 of block 0 gives ldmatrix the row address 0xfffffff0, which lies outside of",
}  # fmt: skip


@pytest.mark.parametrize("address", BAD_ROWS)
def test_a_bad_row_is_reported_at_the_readers_line(address):
    bodies = [f"uint32_t r[4], address = {a};\n{ldmatrix(4, False)} // here" for a in BAD_ROWS]
    report = failures(bodies, list(BAD_ROWS).index(address), fill(256), Q=np.zeros(256, np.uint32))
    assert BAD_ROWS[address] in report


def test_rows_that_nobody_wrote_are_reported():
    body = f"__shared__ __align__(16) uint32_t smem[128]; if (t < 31) for (int i = 0; i < 4; ++i) smem[4 * t + i] = 0;\n" \
        f"uint32_t r[4], address = uint32_t(__cvta_generic_to_shared(smem)) + 16 * t; __syncthreads();\n{ldmatrix(4, True)} // here"  # fmt: skip
    report = failure(body)
    assert "uninitialised shared memory in kernel: thread 31 of block 0 reads 16 bytes at smem + 496 bytes" in report


@pytest.mark.parametrize("shape", ["1, 24", "1, 40"])
def test_matrix_instructions_need_a_whole_warp(shape):
    body = '__shared__ __align__(16) uint4 smem[1]; smem[0] = uint4{}; uint32_t r;\n' \
        'asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "l"(__cvta_generic_to_shared(smem))); // here'  # fmt: skip
    assert "executes ldmatrix without all 32 lanes of its warp" in failure(body, shape=shape)


def test_a_lane_that_does_not_come_is_a_deadlock():
    body = f"{fill(128)} uint32_t r[1], address = base;\nif (lane != 5) {{ {ldmatrix(1, False)} }}\n__syncthreads();"
    report = failure(body, Q=np.zeros(128, np.uint32))
    assert "deadlock in kernel" in report and "threads 0-4, 6-31 wait at" in report and "in ldmatrix (mask" in report


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@BOTH
def test_stmatrix_is_ldmatrix_backwards(device, count, trans):
    values = RANDOM.integers(0, 1 << 16, (32, 4, 2), dtype=np.uint16)
    rows = RANDOM.permutation(32).astype(np.uint32)
    registers, inputs = (
        ", ".join(x.format(i) for i in range(count)) for x in ("%{}", '"r"(q[4 * lane + {}])')
    )  # fmt: skip
    registers = ", ".join(f"%{i + 1}" for i in range(count))
    body = f"""__shared__ __align__(128) uint32_t smem[128]; for (int i = t; i < 128; i += 32) smem[i] = 0;
    uint32_t address = uint32_t(__cvta_generic_to_shared(smem)) + 16 * k[lane]; __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 [%0], {{{registers}}};"
       :: "r"(address), {inputs} : "memory");
    __syncwarp(); for (int i = t; i < 128; i += 32) o[i] = smem[i];"""
    out = run(device, body, 128, Q=values, K=rows).view(np.uint16).reshape(32, 8)
    wanted = np.zeros((32, 8), np.uint16)
    for m, lane, i in itertools.product(range(count), LANES, range(2)):
        row, column = (2 * (lane % 4) + i, lane // 4) if trans else (lane // 4, 2 * (lane % 4) + i)
        wanted[rows[8 * m + row], column] = values[lane, m, i]
    assert (out == wanted).all()


@BOTH
def test_movmatrix_transposes(device):
    matrix = RANDOM.integers(0, 1 << 16, (8, 8), dtype=np.uint16)
    body = 'asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(o[lane]) : "r"(q[lane]));'
    assert (run(device, body, 32, Q=matrix).view(np.uint16).reshape(8, 8) == matrix.T).all()


# ---- mma


def to_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """The bits of float32 values, rounded to `kind`."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return x.view(np.uint32) & 0xFFFFE000 if kind == "tf32" else x.view(np.uint32)


def from_bits(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)


MMA = {
    "m16n8k16 f16": (16, "f16", "f32", place_a16, place_b16),
    "m16n8k16 bf16": (16, "bf16", "f32", place_a16, place_b16),
    "m16n8k16 f16 into f16": (16, "f16", "f16", place_a16, place_b16),
    "m16n8k8 f16": (8, "f16", "f32", place_a8, place_b8),
    "m16n8k8 bf16": (8, "bf16", "f32", place_a8, place_b8),
    "m16n8k8 f16 into f16": (8, "f16", "f16", place_a8, place_b8),
    "m16n8k8 tf32": (8, "tf32", "f32", place_a_tf32, place_b_tf32),
}


def mma_body(k: int, kind: str, sums: str) -> str:
    na, nb, nc = (4, 2, 2 if sums == "f16" else 4) if k == 16 or kind == "tf32" else (2, 1, 2 if sums == "f16" else 4)
    letter = "r" if sums == "f16" else "f"
    d, a, b, c = ([f"%{first + i}" for i in range(n)] for first, n in ((0, nc), (nc, na), (nc + na, nb), (0, nc)))
    vector = "{{{}}}".format
    text = f"mma.sync.aligned.m16n8k{k}.row.col.{sums}.{kind}.{kind}.{sums} " + ", ".join(
        vector(", ".join(x)) for x in (d, a, b, c)
    )
    of = "uint32_t" if sums == "f16" else "float"
    outputs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(nc))
    inputs = ", ".join(
        [f'"r"(q[{na} * lane + {i}])' for i in range(na)] + [f'"r"(k[{nb} * lane + {i}])' for i in range(nb)]
    )
    return f"""{of} c[{nc}]; for (int i = 0; i < {nc}; ++i) c[i] = static_cast<const {of}*>(a.V)[{nc} * lane + i];
    asm volatile("{text};" : {outputs} : {inputs});
    for (int i = 0; i < {nc}; ++i) static_cast<{of}*>(a.O)[{nc} * lane + i] = c[i];"""


def mma(device_or_none, name: str, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> tuple[np.ndarray, ...]:
    """(D, exact D, sum of |products|) of float32 matrices that `kind` holds exactly."""
    k, kind, sums, place_of_a, place_of_b = MMA[name]
    fragments = {
        "Q": to_bits(gather(A, place_of_a, 4 if kind == "tf32" else k // 2), kind),
        "K": to_bits(gather(B, place_of_b, 2 if kind == "tf32" else k // 4), kind),
        "V": to_bits(gather(C, place_c, 4), sums),
    }
    words = 64 if sums == "f16" else 128
    source = program(USUAL + mma_body(k, kind, sums))
    bits = launch_on(device_or_none, source, words, **fragments)
    D = scatter(from_bits(bits.view(np.uint16 if sums == "f16" else np.uint32), sums).reshape(32, 4), place_c, (16, 8))
    A, B, C = (x.astype(np.float64) for x in (A, B, C))
    with np.errstate(all="ignore"):
        return D, A @ B + C, abs(A) @ abs(B) + abs(C)


def random_matrices(name: str, whole: bool) -> list[np.ndarray]:
    k, kind, sums, *_ = MMA[name]
    shapes = ((16, k), (k, 8), (16, 8))
    if whole:  # sums of them are exact in every format, in any order
        return [RANDOM.integers(-4, 5, s).astype(np.float32) for s in shapes]
    values = [RANDOM.standard_normal(s).astype(np.float32) for s in shapes]
    return [from_bits(to_bits(x, f), f) for x, f in zip(values, (kind, kind, sums))]


@BOTH
@pytest.mark.parametrize("name", MMA)
def test_mma_of_whole_numbers_is_exact(device, name):
    for _ in range(4):
        D, exact, _ = mma(device, name, *random_matrices(name, whole=True))
        assert (D == exact).all()


@BOTH
@pytest.mark.parametrize("name", MMA)
def test_mma_up_to_the_order_of_its_sums(device, name):
    """A tensor core cuts off below 2^-23 of the largest term, so an error of one such step per term."""
    for _ in range(4):
        matrices = random_matrices(name, whole=False)
        D, exact, size = mma(device, name, *matrices)
        rounding = 0
        if MMA[name][2] == "f16":
            rounding = 2.0**-11 * abs(exact) if device == "cpu" else 2.0**-10 * size
        assert (abs(D - exact) <= (MMA[name][0] + 1) * 2.0**-23 * size + rounding).all()
        assert (D != matrices[2]).mean() > 0.9


def test_mma_adds_in_the_order_of_k():
    A, B, C = random_matrices("m16n8k16 f16", whole=False)
    D, *_ = mma("cpu", "m16n8k16 f16", A, B, C)
    for k in range(16):
        C = C + A[:, k : k + 1] * B[k : k + 1]
    assert (D.view(np.uint32) == C.astype(np.float32).view(np.uint32)).all()


@BOTH
def test_mma_with_subnormals_infinities_and_nans(device):
    A, B, C = (np.zeros(s, np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    A[0, 0], A[1, 0], A[2, 0], A[3, :2] = 2.0**-24, np.inf, np.nan, np.inf
    B[0], B[1] = 1, -1
    D, *_ = mma(device, "m16n8k16 f16", A, B, C)
    assert (D[0] == 2.0**-24).all() and (D[1] == np.inf).all() and np.isnan(D[2:4]).all() and (D[4:] == 0).all()


HEAD = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
BAD_OPERANDS = {
    f'"{HEAD} {{%0, %0, %0, %0}}, {{%1, %1}}, {{%1, %1}}, {{%0, %0, %0, %0}};"': "{%1, %1} has 2 registers where",
    f'"{HEAD} {{%1, %1, %1, %1}}, {{%1, %1, %1, %1}}, {{%1, %1}}, {{%0, %0, %0, %0}};"': "%1 is an input and can't be written to",
    f'"{HEAD} {{%0, %0, %0, %0}}, {{%1, %1, %1, %1}}, {{%1, %1}};"': "takes 4 operands, not 3",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_OPERANDS)
def test_mma_operands_of_the_wrong_number_or_type(text):
    bodies = [f'float x = 0;\nasm volatile({t} : "+f"(x) : "r"(t)); // here' for t in BAD_OPERANDS]
    assert BAD_OPERANDS[text] in failures(bodies, list(BAD_OPERANDS).index(text))


# ---- cp.async


COPY = """__shared__ __align__(16) uint32_t smem[128]; smem[4 * t] = smem[4 * t + 1] = smem[4 * t + 2] = smem[4 * t + 3] = 0xffffffffu;
  const uint32_t to = uint32_t(__cvta_generic_to_shared(smem + 4 * t)); const uint32_t* from = q + 4 * t;
"""
AND_OUT = "for (int i = 0; i < 4; ++i) o[4 * t + i] = smem[4 * t + i];"
WAIT = 'asm volatile("cp.async.wait_all;" ::: "memory");'
INPUT = RANDOM.integers(0, 1 << 32, (32, 4), dtype=np.uint32)
NAMES = {4: ["ca"], 8: ["ca"], 16: ["ca", "cg"]}


@BOTH
@pytest.mark.parametrize(("bytes_", "cache"), [(b, c) for b, names in NAMES.items() for c in names])
def test_cp_async_copies(device, bytes_, cache):
    hint = ".L2::128B" if bytes_ == 16 else ""
    name = f"cp.async.{cache}.shared.global{hint}"
    body = f'{COPY} asm volatile("{name} [%0], [%1], {bytes_};\\n" :: "r"(to), "l"(from) : "memory"); {WAIT} {AND_OUT}'
    out = run(device, body, 128, Q=INPUT).reshape(32, 4)
    assert (out[:, : bytes_ // 4] == INPUT[:, : bytes_ // 4]).all() and (out[:, bytes_ // 4 :] == 0xFFFFFFFF).all()


@BOTH
@pytest.mark.parametrize("bytes_", [4, 8, 16])
def test_cp_async_fills_with_zeros(device, bytes_):
    body = f"""{COPY} asm volatile("cp.async.ca.shared::cta.global [%0], [%1], %2, %3;" :: "r"(to), "l"(from), "n"({bytes_}),
      "r"(t % {bytes_ + 1}) : "memory"); {WAIT} {AND_OUT}"""
    out = run(device, body, 128, Q=INPUT).view(np.uint8).reshape(32, 16)
    for t in LANES:
        n = t % (bytes_ + 1)
        assert (out[t, :n] == INPUT.view(np.uint8)[t, :n]).all() and (out[t, n:bytes_] == 0).all()
        assert (out[t, bytes_:] == 255).all()


@BOTH
def test_cp_async_with_a_predicate_that_ignores_the_source(device):
    body = f"""{COPY} asm volatile("{{ .reg .pred p; setp.lt.s32 p, %2, 7;\\n cp.async.cg.shared.global [%0], [%1], 16, p; }}"
      :: "r"(to), "l"(from), "r"(t) : "memory"); {WAIT} {AND_OUT}"""
    out = run(device, body, 128, Q=INPUT).reshape(32, 4)
    assert (out[:7] == 0).all() and (out[7:] == INPUT[7:]).all()


@BOTH
def test_a_source_of_no_bytes_may_lie_anywhere(device):
    body = f"""{COPY} if (t >= 16) from = q + (1 << 20);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(t < 16 ? 16 : 0)); {WAIT} {AND_OUT}"""
    out = run(device, body, 128, Q=INPUT).reshape(32, 4)
    assert (out[:16] == INPUT[:16]).all() and (out[16:] == 0).all()


COMMIT = 'asm volatile("cp.async.commit_group;" ::: "memory");'


def copy(at: int) -> str:
    return f"""asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to + 4 * {at}), "l"(from + {at}) : "memory"); {COMMIT}"""


@pytest.mark.parametrize("groups", [0, 1, 2, 3, 4, 9])
def test_a_wait_lands_all_groups_but_the_youngest(groups):
    body = f"""{COPY} {"".join(copy(i) for i in range(4))} asm volatile("cp.async.wait_group %0;" :: "n"({groups}));

    for (int i = 0; i < 4; ++i) if (i == a.H) o[t] = smem[4 * t + i]; // here"""
    landed = 4 - min(groups, 4)
    for i in range(landed):
        assert (launch_on("cpu", program(USUAL + body), 32, H=i, Q=INPUT) == INPUT[:, i]).all()
    for i in range(landed, 4):
        assert "in flight" in failure(body, H=i, Q=INPUT)


@BOTH
def test_pipelined_copies(device):
    body = f"""{COPY} {copy(0)} {copy(1)} asm volatile("cp.async.wait_group 1;"); o[4 * t] = smem[4 * t];
    {copy(2)} asm volatile("cp.async.wait_group 1;"); o[4 * t + 1] = smem[4 * t + 1]; {COMMIT}
    asm volatile("cp.async.wait_group 1;"); o[4 * t + 2] = smem[4 * t + 2];"""
    assert (run(device, body, 128, Q=INPUT).reshape(32, 4)[:, :3] == INPUT[:, :3]).all()


def test_an_empty_group_counts():
    body = f'{COPY} {copy(0)} {COMMIT} {COMMIT} asm volatile("cp.async.wait_group 2;"); o[t] = smem[4 * t];'
    assert (run("cpu", body, 32, Q=INPUT) == INPUT[:, 0]).all()


def test_a_copy_that_is_not_committed_is_not_waited_for():
    body = f"""{COPY} asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from));
    asm volatile("cp.async.wait_group 0;");\no[t] = smem[4 * t]; // here"""
    assert "thread 0 of block 0 reads 4 bytes at smem + 0 bytes, which a copy may still be writing" in failure(
        body, Q=INPUT
    )


def test_another_threads_wait_does_not_count():
    body = f"""{COPY} {copy(0)} if (t != 3) {WAIT} __syncthreads();\no[t] = smem[4 * (t ^ 1)]; // here"""
    assert "thread 2 of block 0 reads 4 bytes at smem + 48 bytes, which a copy may still be writing" in failure(
        body, Q=INPUT
    )


def test_the_source_is_read_when_the_copy_lands():
    """As late as the program allows: a store to the source before the wait is seen."""
    body = f"""{COPY} {copy(0)} const_cast<uint32_t*>(q)[4 * t] = t; {WAIT} o[t] = smem[4 * t];"""
    assert (run("cpu", body, 32, Q=INPUT.copy()) == np.arange(32)).all()


def test_copies_of_a_block_are_gone_when_it_ends():
    body = f"""{COPY} if (blockIdx.x % 2 == 0) {{ {copy(0)} }} else {{ {COMMIT} {WAIT} }}
    o[32 * blockIdx.x + t] = smem[4 * t + (blockIdx.x + 1) % 2];"""
    launcher = built(program(USUAL + body, "4, 32"), "cpu")
    launcher.threads = 1
    assert (launch_on("cpu", program(USUAL + body, "4, 32"), 128, Q=INPUT) == 0xFFFFFFFF).all()


BAD_COPIES = {
    '"cp.async.ca.shared.global [%0], [%1], 12;" :: "r"(to), "l"(from)': "copies 12 bytes, 12 of them from memory",
    '"cp.async.cg.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from)': "copies 8 bytes with cp.async.cg",
    '"cp.async.ca.shared.global [%0], [%1], 8, 9;" :: "r"(to), "l"(from)': "copies 8 bytes, 9 of them from memory",
    '"cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to + 4), "l"(from)': "misaligned in kernel: thread 0 of block 0 writes 8 bytes",
    '"cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from + 1)': "thread 0 of block 0 copies 8 bytes at Q + 4 bytes, which is no multiple of 8",
    '"cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from + 4)': "thread 31 of block 0 reads 16 bytes at Q + 512 bytes, 16 past",
    '"cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + 16), "l"(from)': "thread 31 of block 0 writes 16 bytes at smem + 512 bytes, 16 past",
    '"cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(1 << 30), "l"(from)': "gives cp.async the address 0x40000000, which lies outside of",
    '"cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "r"(to)': "[%1]: an address has 64 bits here",
}  # fmt: skip


@pytest.mark.parametrize("call", BAD_COPIES)
def test_a_bad_copy_is_reported_at_the_readers_line(call):
    bodies = [f"asm volatile({c}); // here\n{WAIT}" for c in BAD_COPIES]
    assert BAD_COPIES[call] in failures(bodies, list(BAD_COPIES).index(call), COPY, Q=INPUT)


@BOTH
def test_pipeline_functions(device):
    body = f"""{COPY} __pipeline_memcpy_async(smem + 4 * t, from, 8); __pipeline_commit();
    __pipeline_memcpy_async(smem + 4 * t + 2, q + 4 * (31 - t), 8, 4); __pipeline_commit(); __pipeline_wait_prior(1);
    o[4 * t] = smem[4 * t]; o[4 * t + 1] = smem[4 * t + 1];
    __pipeline_wait_prior(0); o[4 * t + 2] = smem[4 * t + 2]; o[4 * t + 3] = smem[4 * t + 3];"""
    out = run(device, body, 128, before="#include <cuda_pipeline.h>", Q=INPUT).reshape(32, 4)
    assert (out[:, :2] == INPUT[:, :2]).all() and (out[:, 2] == INPUT[::-1, 0]).all() and (out[:, 3] == 0).all()


# ---- one instruction at a time: 256 threads, random operands with the awkward ones among them

SIZE = {"r": 1, "f": 1, "h": 1, "l": 2, "d": 2}
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-40,
    3e38,
    -3e38,
    1e-38,
    2.5,
    -0.5,
    65519.0,
    65520.0,
    3e9,
    -3e9,
]


@np.errstate(all="ignore")
def operand(kind: str, number: int) -> np.ndarray:
    """256 values, two words each, the upper 0 for what has 32 bits."""
    g = np.random.default_rng(number)
    words = np.zeros((256, 2), np.uint32)
    if kind in "fd":
        x = g.standard_normal(256) * 10.0 ** g.integers(-6, 7, 256)
        x[: len(SPECIAL)] = np.roll(SPECIAL, 3 * number)
        words[:, :] = x.view(np.uint32).reshape(256, 2) if kind == "d" else words
        if kind == "f":
            words[:, 0] = x.astype(np.float32).view(np.uint32)
    else:
        x = g.integers(0, 1 << 64, 256, dtype=np.uint64)
        x[:8] = np.roll([0, 1, 0xFFFFFFFFFFFFFFFF, 0x80000000, 0x8000000000000000, 0x7FFFFFFF, 31, 33], number)
        words[:, :] = x.view(np.uint32).reshape(256, 2)
        words[:, 1] *= kind == "l"
        words[:, 0] &= 0xFFFF if kind == "h" else 0xFFFFFFFF
    return words


VALUES = {"r": np.uint32, "h": np.uint16, "l": np.uint64, "f": np.float32, "d": np.float64}


def value(words: np.ndarray, kind: str) -> np.ndarray:
    flat = np.ascontiguousarray(words).view(np.uint64).reshape(-1)
    return (
        flat.astype(np.uint32).view(np.float32)
        if kind == "f"
        else flat.view(np.float64)
        if kind == "d"
        else flat.astype(VALUES[kind])
    )


def s32(x):
    return x.astype(np.uint32).view(np.int32).astype(np.int64)


def flush(x):
    return np.where(abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def half(x):
    return x.astype(np.float16).view(np.uint16)


def brain(x):
    return to_bits(np.ascontiguousarray(x, np.float32), "bf16")


def least(a, b):
    """Of a number and a NaN the number; -0 is less than 0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def most(a, b):
    return -least(-a, -b)


def two(high, low):
    return high.astype(np.uint32) << 16 | low


def halves(x):
    return (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)


def each(function, kind):
    """The function of floats on both halves of registers that hold two 16-bit floats."""

    def apply(*xs):
        parts = zip(*(halves(x) for x in xs))
        low, high = (
            function(*(from_bits(p, kind).astype(np.float64) for p in part)).astype(np.float32) for part in parts
        )
        return two(to_bits(high, kind), to_bits(low, kind))

    return apply


def by_bits(table):
    def logic(a, b, c):
        out = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    return logic


def permuted(a, b, s):
    bytes_ = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], axis=1)
    out = np.zeros((len(a), 4), np.uint8)
    for i, (lane, selector) in itertools.product(range(4), enumerate(s)):
        nibble = int(selector) >> 4 * i & 15
        byte = bytes_[lane, nibble & 7]
        out[lane, i] = byte if nibble < 8 else 255 * (byte >> 7)
    return out.view(np.uint32).reshape(-1)


def saturated(x, low, high):
    return np.where(
        np.isnan(x), 0, np.clip(np.nan_to_num(x.astype(np.float64), nan=0, posinf=1e30, neginf=-1e30), low, high)
    )


def fma(a, b, c):
    """a * b is exact in double and the sum in long double, so it is rounded once."""
    return (a.astype(np.float64) * b.astype(np.float64)).astype(np.longdouble) + c.astype(np.longdouble)


I32, U32, I64 = (-(2**31), 2**31 - 1), (0, 2**32 - 1), (-(2**63), 2**63 - 1)
# the text (%0 is the result), kinds of result and operands, the result; a number behind: so many ulp are allowed on a GPU
ONE = [
    ("ex2.approx.ftz.f32 %0, %1;", "ff", lambda a: flush(np.exp2(flush(a).astype(np.float64)).astype(np.float32)), 2),
    ("ex2.approx.f32 %0, %1;", "ff", lambda a: np.exp2(a.astype(np.float64)), 2),
    ("lg2.approx.ftz.f32 %0, %1;", "ff", lambda a: np.log2(flush(a).astype(np.float64)), 4),
    ("rcp.approx.ftz.f32 %0, %1;", "ff", lambda a: flush((1 / flush(a).astype(np.float64)).astype(np.float32)), 1),
    ("rcp.rn.f32 %0, %1;", "ff", lambda a: 1 / a.astype(np.float64)),
    ("rsqrt.approx.ftz.f32 %0, %1;", "ff", lambda a: 1 / np.sqrt(flush(a).astype(np.float64)), 2),
    ("sqrt.rn.f32 %0, %1;", "ff", np.sqrt),
    ("sqrt.approx.ftz.f32 %0, %1;", "ff", lambda a: np.sqrt(flush(a)), 2),
    ("tanh.approx.f32 %0, %1;", "ff", lambda a: np.tanh(a.astype(np.float64)), 1 << 14),
    ("add.f32 %0, %1, %2;", "fff", lambda a, b: a + b),
    ("add.ftz.f32 %0, %1, %2;", "fff", lambda a, b: flush(flush(a) + flush(b))),
    ("sub.rn.f32 %0, %1, %2;", "fff", lambda a, b: a - b),
    ("mul.f32 %0, %1, %2;", "fff", lambda a, b: a * b),
    ("mul.rn.ftz.f32 %0, %1, %2;", "fff", lambda a, b: flush(flush(a) * flush(b))),
    ("mul.sat.f32 %0, %1, %2;", "fff", lambda a, b: np.where(a * b > 0, np.minimum(a * b, 1), 0)),
    ("fma.rn.f32 %0, %1, %2, %3;", "ffff", fma),
    ("max.f32 %0, %1, %2;", "fff", most),
    ("min.ftz.f32 %0, %1, %2;", "fff", lambda a, b: least(flush(a), flush(b))),
    ("max.NaN.f32 %0, %1, %2;", "fff", np.maximum),
    ("neg.f32 %0, %1;", "ff", np.negative),
    ("abs.f32 %0, %1;", "ff", np.abs),
    ("div.rn.f32 %0, %1, %2;", "fff", lambda a, b: a / b),
    ("add.f64 %0, %1, %2;", "ddd", lambda a, b: a + b),
    ("mul.rn.f64 %0, %1, %2;", "ddd", lambda a, b: a * b),
    ("add.s32 %0, %1, %2;", "rrr", lambda a, b: a + b),
    ("sub.u32 %0, %1, %2;", "rrr", lambda a, b: a - b),
    ("add.u64 %0, %1, %2;", "lll", lambda a, b: a + b),
    ("sub.s64 %0, %1, %2;", "lll", lambda a, b: a - b),
    ("mul.lo.s32 %0, %1, %2;", "rrr", lambda a, b: a * b),
    ("mul.lo.u64 %0, %1, %2;", "lll", lambda a, b: a * b),
    ("mul.hi.u32 %0, %1, %2;", "rrr", lambda a, b: a.astype(np.uint64) * b >> np.uint64(32)),
    ("mul.hi.s32 %0, %1, %2;", "rrr", lambda a, b: s32(a) * s32(b) >> 32),
    ("mul.wide.u32 %0, %1, %2;", "lrr", lambda a, b: a.astype(np.uint64) * b),
    ("mul.wide.s32 %0, %1, %2;", "lrr", lambda a, b: s32(a) * s32(b)),
    ("mad.lo.u32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: a * b + c),
    ("mad.wide.s32 %0, %1, %2, %3;", "lrrl", lambda a, b, c: s32(a) * s32(b) + c.view(np.int64)),
    ("min.s32 %0, %1, %2;", "rrr", lambda a, b: np.minimum(s32(a), s32(b))),
    ("max.u32 %0, %1, %2;", "rrr", np.maximum),
    ("neg.s32 %0, %1;", "rr", lambda a: -s32(a)),
    ("abs.s32 %0, %1;", "rr", lambda a: abs(s32(a))),
    ("and.b32 %0, %1, %2;", "rrr", lambda a, b: a & b),
    ("or.b64 %0, %1, %2;", "lll", lambda a, b: a | b),
    ("xor.b32 %0, %1, %2;", "rrr", lambda a, b: a ^ b),
    ("not.b32 %0, %1;", "rr", lambda a: ~a),
    ("shl.b32 %0, %1, %2;", "rrr", lambda a, b: np.where(b < 32, a << (b & 31), 0)),
    ("shr.u32 %0, %1, %2;", "rrr", lambda a, b: np.where(b < 32, a >> (b & 31), 0)),
    ("shr.s32 %0, %1, %2;", "rrr", lambda a, b: s32(a) >> np.minimum(b, 31)),
    ("shr.b32 %0, %1, 5;", "rr", lambda a: a >> 5),
    ("shl.b64 %0, %1, %2;", "llr", lambda a, b: np.where(b < 64, a << (b & 63).astype(np.uint64), 0)),
    ("shf.l.wrap.b32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: (b.astype(np.uint64) << 32 | a) << (c & 31) >> 32),
    ("shf.r.clamp.b32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: (b.astype(np.uint64) << 32 | a) >> np.minimum(c, 32)),
    ("prmt.b32 %0, %1, %2, %3;", "rrrr", permuted),
    ("prmt.b32 %0, %1, %2, 0x5410;", "rrr", lambda a, b: b << 16 | a & 0xFFFF),
    ("lop3.b32 %0, %1, %2, %3, 0x96;", "rrrr", lambda a, b, c: a ^ b ^ c),
    ("lop3.b32 %0, %1, %2, %3, (0xf0 & 0xcc) | 0xaa;", "rrrr", lambda a, b, c: (a & b) | c),
    ("lop3.b32 %0, %1, %2, %3, 0x1b;", "rrrr", by_bits(0x1B)),
    ("bfe.u32 %0, %1, 7, 9;", "rr", lambda a: a >> 7 & 511),
    ("bfe.s32 %0, %1, 7, 9;", "rr", lambda a: s32(a) << 48 >> 55),
    ("bfi.b32 %0, %1, %2, 8, 4;", "rrr", lambda a, b: b & ~np.uint32(0xF00) | (a & 15) << 8),
    ("popc.b32 %0, %1;", "rr", lambda a: [int(x).bit_count() for x in a]),
    ("clz.b32 %0, %1;", "rr", lambda a: [32 - int(x).bit_length() for x in a]),
    ("brev.b32 %0, %1;", "rr", lambda a: [int(f"{x:032b}"[::-1], 2) for x in a]),
    ("mov.b32 %0, {%1, %2};", "rhh", lambda a, b: two(b, a)),
    ("mov.b64 %0, {%1, %2};", "lrr", lambda a, b: b.astype(np.uint64) << 32 | a),
    ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, lo}; }", "rr", lambda a: a << 16 | a >> 16),
    ("{ .reg .b32 hi; mov.b64 {_, hi}, %1; mov.u32 %0, hi; }", "rl", lambda a: a >> np.uint64(32)),
    ("mov.f32 %0, 0f40490FDB;", "f", lambda: np.full(256, np.float32(np.pi))),
    ("mov.u32 %0, 0xcafe;", "r", lambda: np.full(256, 0xCAFE)),
    ("mov.b32 %0, -2;", "r", lambda: np.full(256, -2)),
    ("add.f32 %0, %1, 1.5;", "ff", lambda a: a + np.float32(1.5)),
    ("cvt.rn.f16x2.f32 %0, %1, %2;", "rff", lambda a, b: two(half(a), half(b))),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", "rff", lambda a, b: two(brain(a), brain(b))),
    ("cvt.rn.relu.bf16x2.f32 %0, %1, %2;", "rff", lambda a, b: two(brain(np.maximum(a, 0)), brain(np.maximum(b, 0)))),
    ("cvt.rn.f16.f32 %0, %1;", "hf", half),
    ("cvt.rn.bf16.f32 %0, %1;", "hf", brain),
    ("cvt.f32.f16 %0, %1;", "fh", lambda a: from_bits(a, "f16")),
    ("cvt.f32.bf16 %0, %1;", "fh", lambda a: from_bits(a, "bf16")),
    ("cvt.rna.tf32.f32 %0, %1;", "rf", lambda a: (a.view(np.uint32) + np.where(np.isfinite(a), 0x1000, 0)) & 0xFFFFE000),
    ("cvt.rzi.s32.f32 %0, %1;", "rf", lambda a: saturated(np.trunc(a), *I32).astype(np.int64)),
    ("cvt.rni.u32.f32 %0, %1;", "rf", lambda a: saturated(np.rint(a), *U32).astype(np.int64)),
    ("cvt.rmi.s32.f32 %0, %1;", "rf", lambda a: saturated(np.floor(a), *I32).astype(np.int64)),
    ("cvt.rpi.f32.f32 %0, %1;", "ff", np.ceil),
    ("cvt.rn.f32.s32 %0, %1;", "fr", s32),
    ("cvt.rn.f32.u32 %0, %1;", "fr", lambda a: a.astype(np.float64)),
    ("cvt.rz.f32.u32 %0, %1;", "fr", lambda a: np.where((x := a.astype(np.float32)).astype(np.float64) > a, np.nextafter(x, np.float32(0)), x)),
    ("cvt.u64.u32 %0, %1;", "lr", lambda a: a),
    ("cvt.s64.s32 %0, %1;", "lr", s32),
    ("cvt.u32.u64 %0, %1;", "rl", lambda a: a),
    ("cvt.u32.u16 %0, %1;", "rh", lambda a: a),
    ("cvt.s32.s16 %0, %1;", "rh", lambda a: a.view(np.int16)),
    ("cvt.sat.s8.s32 %0, %1;", "rr", lambda a: np.clip(s32(a), -128, 127)),
    ("cvt.f64.f32 %0, %1;", "df", lambda a: a.astype(np.float64)),
    ("cvt.rn.f32.f64 %0, %1;", "fd", lambda a: a.astype(np.float32)),
    ("cvt.rz.tf32.f32 %0, %1;", "rf", lambda a: np.where(np.isnan(a), 0x7FFFE000, a.view(np.uint32) & 0xFFFFE000)),
    ("cvt.rm.f32.f64 %0, %1;", "fd", lambda a: np.where((x := a.astype(np.float32)) > a, np.nextafter(x, np.float32(-np.inf)), x)),
    ("add.f16x2 %0, %1, %2;", "rrr", each(lambda a, b: a + b, "f16")),
    ("mul.rn.bf16x2 %0, %1, %2;", "rrr", each(lambda a, b: a * b, "bf16")),
    ("fma.rn.f16x2 %0, %1, %2, %3;", "rrrr", each(lambda a, b, c: a * b + c, "f16")),
    ("max.f16x2 %0, %1, %2;", "rrr", each(most, "f16")),
    ("min.bf16x2 %0, %1, %2;", "rrr", each(least, "bf16")),
    ("neg.f16x2 %0, %1;", "rr", lambda a: a ^ np.uint32(0x80008000)),
    ("abs.bf16x2 %0, %1;", "rr", lambda a: a & np.uint32(0x7FFF7FFF)),
    ("{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, %1, %2, p; }", "rrr", lambda a, b: np.minimum(s32(a), s32(b))),
    ("{ .reg .pred p, q; setp.ge.u32 p|q, %1, %2; selp.u32 %0, 1, 0, q; }", "rrr", lambda a, b: a < b),
    ("{ .reg .pred p; setp.gtu.f32 p, %1, %2; selp.f32 %0, 1.0, 0f00000000, p; }", "fff", lambda a, b: ~(a <= b)),
    ("{ .reg .pred p; setp.neu.f32 p, %1, %2; @p mov.f32 %0, 1.0; @!p mov.f32 %0, 2.0; }", "fff", lambda a, b: np.where(a != b, 1, 2)),
    ("{ .reg .pred p; setp.num.f32 p, %1, %2; selp.f32 %0, 1.0, 2.0, p; }", "fff", lambda a, b: np.where(np.isnan(a) | np.isnan(b), 2, 1)),
    ("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; setp.lt.or.s32 q, %2, 0, !p; selp.b32 %0, 1, 0, q; }", "rrr", lambda a, b: (s32(b) < 0) | (a == 0)),
    ("{ .reg .pred p<2>; setp.eq.u32 p0, %1, 1; setp.hi.u32 p1, %2, 9; xor.pred p0, p0, p1; not.pred p1, p0; selp.u32 %0, 3, 4, p1; }",
     "rrr", lambda a, b: np.where((a == 1) ^ (b > 9), 4, 3)),
]  # fmt: skip


def name_of(case) -> str:
    return case[0].split(" %0")[0][:40] + (" const" if len(case[1]) == 1 else "")


@cache
def table_source() -> str:
    """All of ONE in one kernel, chosen by fa_args::H. (Results are stored whole: of a 16-bit number that is stored byte by
    byte, ptxas 13.0 takes the lower byte for one to convert to, F2I.U8.F16.)"""
    types = {"r": "uint32_t", "h": "uint16_t", "l": "unsigned long long", "f": "float", "d": "double"}
    body = ""
    for number, (text, kinds, *_) in enumerate(ONE):
        inputs = "".join(
            f" {types[c]} x{i}; memcpy(&x{i}, {'qkv'[i]} + 2 * t, sizeof x{i});" for i, c in enumerate(kinds[1:])
        )
        operands = ", ".join(f'"{c}"(x{i})' for i, c in enumerate(kinds[1:]))
        body += f"""if (a.H == {number}) {{ {types[kinds[0]]} r;{inputs}
        asm volatile("{text}" : "={kinds[0]}"(r) : {operands}); *reinterpret_cast<decltype(r) *>(o + 2 * t) = r; }}\n"""
    return program(USUAL + body, "1, 256")


@BOTH
@pytest.mark.parametrize("case", ONE, ids=name_of)
def test_one_instruction(device, case):
    text, kinds, wanted, *allowed = case
    words = [operand(kind, i) for i, kind in enumerate(kinds[1:])]
    arrays = dict(zip("QKV", words))
    results = {d: launch_on(d, table_source(), 512, H=ONE.index(case), **arrays) for d in {"cpu", device}}
    result = {}
    for d, out in results.items():
        out = out.reshape(256, 2)
        out[:, 1] *= SIZE[kinds[0]] == 2
        if kinds[0] == "h":
            out[:, 0] &= 0xFFFF
        result[d] = value(out, kinds[0])
    with np.errstate(all="ignore"):
        exact = np.asarray(wanted(*(value(w, kind) for w, kind in zip(words, kinds[1:]))))
    kind = VALUES[kinds[0]]
    if kind in (np.float32, np.float64):
        with np.errstate(all="ignore"):
            exact = exact.astype(kind)
        assert np.array_equal(result["cpu"], exact, equal_nan=True), differing(result["cpu"], exact)
        zero = exact == 0
        assert (np.signbit(result["cpu"]) == np.signbit(exact))[zero & ~np.isnan(exact)].all()
    else:
        exact = (
            exact.astype(np.float64).astype(np.int64).astype(kind) if exact.dtype.kind == "f" else exact.astype(kind)
        )
        same = result["cpu"] == exact
        if "f16" in text or "bf16" in text:  # a NaN is a NaN, whichever
            same = both_nan_or_same(text, result["cpu"], exact)
        assert same.all(), differing(result["cpu"], exact)
    if device == "cuda":
        emulated, real = result["cpu"], result["cuda"]
        if allowed:
            with np.errstate(all="ignore"):
                close = (ulps(emulated, real) <= allowed[0]) | ("lg2" in text and abs(emulated - real) < 2.0**-21)
            assert close.all(), differing(emulated, real)
        elif kind in (np.float32, np.float64):
            bits = np.uint32 if kind == np.float32 else np.uint64
            assert (nan_is_nan(emulated.view(bits), kind) == nan_is_nan(real.view(bits), kind)).all(), differing(
                emulated, real
            )
        else:
            used = 0xFFFFE000 if "tf32" in text else np.iinfo(kind).max  # of tf32 a tensor core reads 19 bits
            assert both_nan_or_same(text, emulated & used, real & used).all(), differing(emulated, real)


# PTX ISA, "cvt": 0; where f64 or 64 bits take part the highest bit alone.
NAN_AS = {
    "s32.f32": 0, "u32.f32": 0, "s32.f16": 0, "u16.f32": 0, "s64.f32": 1 << 63, "u64.f32": 1 << 63, "s64.f16": 1 << 63,
    "s32.f64": 1 << 31, "u32.f64": 1 << 31, "s64.f64": 1 << 63, "u64.f64": 1 << 63,
}  # fmt: skip


@BOTH
def test_a_nan_as_an_integer(device):
    kinds = {"16": ("h", "uint16_t"), "32": ("r", "uint32_t"), "64": ("l", "uint64_t")}
    nans = {
        "f16": '"h"(uint16_t(0x7fff))',
        "f32": '"f"(__int_as_float(0x7fc00000))',
        "f64": '"d"(__longlong_as_double(0x7ff8ll << 48))',
    }
    body = "uint64_t* out64 = reinterpret_cast<uint64_t*>(o);\n"
    for i, name in enumerate(NAN_AS):
        to, source = name.split(".")
        letter, c_type = kinds[to[1:]]
        body += f'{{ {c_type} x; asm("cvt.rzi.{name} %0, %1;" : "={letter}"(x) : {nans[source]}); out64[{i}] = x; }}\n'
    out = run(device, body, 2 * len(NAN_AS), shape="1, 1", dtype=np.uint64)
    assert dict(zip(NAN_AS, out.tolist())) == NAN_AS


# What an H200 gives where formats end; test_bits_on_a_gpu.py asks it for many more. (instruction, letters, operands, result)
ENDS = [
    ("rem.u32", "rrr", (7, 0), 0xFFFFFFFF),
    ("add.ftz.f16", "hhh", (1, 0x00A5), 0),
    ("mul.ftz.f32", "fff", (0xBF7FFFFF, 0x80800000), 0),  # (1 - 2^-24) 2^-126: flushed before float rounds it to 2^-126
    ("fma.rn.ftz.f32", "ffff", (0x808003FF, 0x32D8967B, 0x00800000), 0x00800000),  # 2^-126 in 24 digits
    ("div.approx.f32", "fff", (0xCF800000, 0x7E800001), 0x80000000),  # a divisor above 2^126
    ("cvt.rz.f32.u64", "fl", (0x7FEFFFFFFFFFFFFF,), 0x5EFFDFFF),
    ("cvt.rp.f64.s64", "dl", (0x7FF0000000000001,), 0x43DFFC0000000001),
    ("cvt.rn.ftz.f32.f64", "fd", (0x380FFFFFE0000000,), 0),
    ("cvt.rna.tf32.f32", "rf", (0x7F800001,), 0x7F800000),  # adds and cuts off, a NaN as well
]


@BOTH
def test_where_formats_end(device):
    types = {"r": "unsigned", "h": "unsigned short", "l": "unsigned long long", "f": "float", "d": "double"}
    casts = {
        "r": "{}u",
        "h": "(unsigned short){}",
        "l": "{}ull",
        "f": "__int_as_float({})",
        "d": "__longlong_as_double({}ll)",
    }
    body = "unsigned long long* out64 = reinterpret_cast<unsigned long long*>(o);\n"
    for i, (text, letters, operands, _) in enumerate(ENDS):
        given = ", ".join(
            f'"{kind}"({casts[kind].format(word)})' for kind, word in zip(letters[1:], operands, strict=True)
        )
        names = ", ".join(f"%{n}" for n in range(len(letters)))
        body += f'{{ {types[letters[0]]} x; asm volatile("{text} {names};" : "={letters[0]}"(x) : {given}); out64[{i}] = 0; __builtin_memcpy(out64 + {i}, &x, sizeof x); }}\n'
    out = run(device, body, 2 * len(ENDS), shape="1, 1", dtype=np.uint64)
    assert {e[0]: hex(x) for e, x in zip(ENDS, out.tolist())} == {e[0]: hex(e[3]) for e in ENDS}


def both_nan_or_same(text: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    same = x == y
    if "tf32" in text:
        x, y = (z.astype(np.uint32).view(np.float32) for z in (x, y))
        return same | (np.isnan(x) & np.isnan(y))
    kind = "bf16" if "bf16" in text else "f16" if "f16" in text else None
    if kind is None:
        return same
    parts = [[from_bits(p, kind) for p in (halves(z) if z.dtype == np.uint32 else (z, z))] for z in (x, y)]
    equal = [(a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)) for a, b in zip(*parts)]
    return equal[0] & equal[1]


def differing(x: np.ndarray, y: np.ndarray) -> str:
    where = np.flatnonzero(~((x == y) | ((x != x) & (y != y))))[:6]
    return f"at {where}: {x[where]} and {y[where]}"


# ---- loads and stores


@BOTH
def test_loads_of_every_width(device):
    data = RANDOM.integers(0, 1 << 32, 64, dtype=np.uint32)
    body = f"""{fill(64)} if (t > 0) return; const uint32_t* p = q; uint32_t r[4]; unsigned long long l;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
    for (int i = 0; i < 4; ++i) o[i] = r[i];
    asm volatile("ld.shared.v2.f32 {{%0, %1}}, [%2+24];" : "=f"(static_cast<float*>(a.O)[4]), "=f"(static_cast<float*>(a.O)[5]) : "r"(base));
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(l) : "l"(p + 8)); o[6] = uint32_t(l); o[7] = uint32_t(l >> 32);
    asm volatile("ld.u8 %0, [%1];" : "=r"(r[0]) : "l"(p + 10)); o[8] = r[0];
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(r[0]) : "r"(base + 41)); o[9] = r[0];
    asm volatile("ld.global.s16 %0, [%1 + 2];" : "=r"(r[0]) : "l"(p + 10)); o[10] = r[0];
    unsigned short h; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(h) : "r"(base + 46)); o[11] = h;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(o[12]) : "l"(p + 12));
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(o[13]) : "l"(p + 13));
    asm volatile("{{ .reg .b64 s; cvta.to.shared.u64 s, %1; ld.shared.b32 %0, [s+56]; }}" : "=r"(o[14]) : "l"(smem));
    asm volatile("{{ .reg .b64 s; cvta.shared.u64 s, %1; ld.b32 %0, [s+60]; }}" : "=r"(o[15]) : "l"((unsigned long long)base));"""
    out = run(device, body, 16, Q=data)
    bytes_, shorts = data.view(np.uint8), data.view(np.uint16)
    wanted = data[:16].copy()
    wanted[4:6] = data[6:8]
    wanted[6:8] = data[8:10]
    wanted[8:12] = [bytes_[40], bytes_[41].astype(np.int8), shorts[21].astype(np.int16), shorts[23]]
    assert (out == wanted).all()


@BOTH
def test_stores_of_every_width(device):
    data = RANDOM.integers(0, 1 << 32, 16, dtype=np.uint32)
    body = """__shared__ __align__(16) uint32_t smem[16]; uint32_t base = uint32_t(__cvta_generic_to_shared(smem));
    if (t > 0) return; for (int i = 0; i < 16; ++i) smem[i] = 0;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(base), "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]) : "memory");
    asm volatile("st.shared.v2.f32 [%0 + 16], {%1, %2};" :: "r"(base), "f"(__uint_as_float(q[4])), "f"(__uint_as_float(q[5])) : "memory");
    asm volatile("st.shared.u8 [%0], %1;" :: "r"(base + 25), "r"(q[6]) : "memory");
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(base + 30), "h"((unsigned short)q[7]) : "memory");
    asm volatile("st.b64 [%0], %1;" :: "l"(smem + 8), "l"((unsigned long long)q[8] << 32 | q[9]) : "memory");
    asm volatile("st.shared.u32 [%0], 7;" :: "r"(base + 40) : "memory");
    for (int i = 0; i < 16; ++i) asm volatile("st.global.cs.u32 [%0], %1;" :: "l"(o + i), "r"(smem[i]) : "memory");"""
    out = run(device, body, 16, Q=data)
    wanted = np.zeros(16, np.uint32)
    wanted[:6] = data[:6]
    wanted.view(np.uint8)[25], wanted.view(np.uint16)[15] = data[6] & 255, data[7] & 0xFFFF
    wanted[8:11] = data[9], data[8], 7
    assert (out == wanted).all()


BAD_ACCESSES = {
    'asm volatile("ld.global.v4.u32 {%0, %0, %0, %0}, [%1];" : "=r"(x) : "l"(q + 30)); // here': "misaligned in kernel",
    'asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(q + 32 + t)); // here': "reads 4 bytes at Q + 128 bytes, 4 past its end",
    'asm volatile("st.global.u32 [%0], %1;" :: "l"(o + 256), "r"(t)); // here': "writes 4 bytes at O + 1024 bytes, 4 past its end",
    'asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base + 64)); // here': "reads 4 bytes at smem + 64 bytes, 4 past its end",
    'asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base)); // here': "which nobody has written",
    'asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "l"(q)); // here': "shared memory",
    'asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(smem)); // here': "the address of something in shared memory",
    'asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(0ull)); // here': "null pointer in kernel",
    'asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "r"(base)); // here': "an address has 64 bits here",
    'asm volatile("ld.global.v2.u32 %0, [%1];" : "=r"(x) : "l"(q)); // here': "takes a vector of 2",
}  # fmt: skip


@pytest.mark.parametrize("body", BAD_ACCESSES)
def test_a_bad_access_is_reported_at_the_readers_line(body):
    before = "__shared__ uint32_t smem[16]; uint32_t x, base = uint32_t(__cvta_generic_to_shared(smem));\n"
    bodies = [f"{b}\no[t] = x + base;" for b in BAD_ACCESSES]
    report = failures(bodies, list(BAD_ACCESSES).index(body), before, Q=np.zeros(32, np.uint32))
    assert BAD_ACCESSES[body] in report


def test_bytes_are_counted():
    body = 'asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(o[t]), "=r"(o[t + 32]) : "l"(q + 2 * t));'
    source = program(USUAL + body)
    launch_on("cpu", source, 64, Q=np.zeros(64, np.uint32))
    assert built(source, "cpu").counters == {"O": (0, 256), "Q": (256, 0)}


@BOTH
def test_atomics(device):
    body = """__shared__ uint32_t s[4]; if (t < 4) s[t] = t == 3 ? 0 : 100; __syncthreads();
    uint32_t base = uint32_t(__cvta_generic_to_shared(s)), old; float f;
    asm volatile("red.shared.add.u32 [%0], %1;" :: "r"(base), "r"(t) : "memory");
    asm volatile("atom.shared.min.s32 %0, [%1], %2;" : "=r"(old) : "r"(base + 4), "r"(-t) : "memory");
    asm volatile("atom.shared.exch.b32 %0, [%1], %2;" : "=r"(old) : "r"(base + 8), "r"(7) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(o), "f"(1.5f) : "memory");
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" :: "l"(o + 1), "r"(t + 5) : "memory");
    asm volatile("atom.add.f32 %0, [%1], %2;" : "=f"(f) : "l"(s + 3), "f"(2.0f) : "memory");
    asm volatile("atom.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(o + 2), "r"(t + 40), "r"(99) : "memory");
    __syncthreads(); if (t == 0) for (int i = 0; i < 4; ++i) o[3 + i] = s[i];"""
    start_ = np.array([0, 3, 40], np.uint32)
    out = run(device, "if (t == 0) { o[0] = 0; o[1] = q[1]; o[2] = q[2]; } __syncthreads();" + body, 8, Q=start_)
    assert out[:1].view(np.float32) == 48 and out[1] == 36 and out[2] == 99
    assert (
        out[3] == 100 + 31 * 16 and out[4].astype(np.int32) == -31 and out[5] == 7 and out[6:7].view(np.float32) == 64
    )


# ---- warps and barriers


@BOTH
def test_shuffles(device):
    """PTX ISA, shfl.sync: c clamps the source lane and parts the warp; the predicate says whether the source was inside."""
    kinds = [("up", 3, 0), ("down", 5, 31), ("bfly", 9, 31), ("idx", 35, 31)]
    kinds += [
        ("up", 1, (32 - 8) << 8),
        ("down", 3, (32 - 8) << 8 | 31),
        ("bfly", 5, (32 - 16) << 8 | 31),
        ("idx", 6, (32 - 4) << 8 | 31),
    ]
    kinds += [("idx", 7, (32 - 8) << 8 | 5), ("bfly", 1, (32 - 8) << 8 | 4)]
    body, wanted = "uint32_t r, p;\n", []
    for i, (kind, b, c) in enumerate(kinds):
        body += f"""asm volatile("{{ .reg .pred p; shfl.sync.{kind}.b32 %0|p, %2, {b}, {c}, 0xffffffff; selp.u32 %1, 1, 0, p; }}"
          : "=r"(r), "=r"(p) : "r"(100 + t)); o[{64 * i} + t] = r; o[{64 * i + 32} + t] = p;\n"""
        segment, clamp, b = c >> 8, c & 31, b & 31
        for lane in LANES:
            last, first = (lane & segment) | (clamp & ~segment), lane & segment
            source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[kind]
            inside = source >= last if kind == "up" else source <= last
            wanted.append((100 + (source if inside else lane), inside))
    out = run(device, body, 64 * len(kinds)).reshape(-1, 2, 32)
    assert [(v, p) for pair in out for v, p in zip(*pair)] == wanted


@BOTH
def test_votes_matches_and_sums(device):
    body = """uint32_t r[8];
    asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %1, 10; vote.sync.ballot.b32 %0, p, -1; }" : "=r"(r[0]) : "r"(t));
    asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %1, 10; vote.sync.any.pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q; }" : "=r"(r[1]) : "r"(t));
    asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %1, 10; vote.sync.all.pred q, !p, 0xffffffff; selp.u32 %0, 1, 0, q; }" : "=r"(r[2]) : "r"(t));
    asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(r[3]) : "r"(t / 8));
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(r[4]) : "r"(t - 5));
    asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; @p add.u32 %0, %0, 7; }" : "=r"(r[5]));
    asm volatile("activemask.b32 %0;" : "=r"(r[6]));
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(r[7]));
    __syncwarp(); for (int i = 0; i < 8; ++i) o[8 * t + i] = r[i];"""
    out = run(device, body, 256).reshape(32, 8)
    lanes = np.arange(32)
    assert (out[:, 0] == 1023).all() and (out[:, 1] == 1).all() and (out[:, 2] == 0).all()
    assert (out[:, 3] == 0xFF << lanes // 8 * 8).all() and (out[:, 4] == 31 * 16 - 160).all()
    assert (
        (out[:, 5] == np.where(lanes == 0, 7, 0)).all()
        and (out[:, 6] == 0xFFFFFFFF).all()
        and (out[:, 7] == lanes).all()
    )


@BOTH
def test_barriers_and_special_registers(device):
    body = """__shared__ uint32_t x[128]; uint32_t r[6], tid; unsigned long long clock;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid)); x[tid] = tid * tid;
    asm volatile("bar.sync 0;" ::: "memory"); r[0] = x[127 - tid];
    asm volatile("barrier.sync.aligned 0, 128;" ::: "memory"); x[tid] = tid;
    asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); r[1] = x[tid ^ 31];
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%nctaid.x; mov.u32 %2, %%ntid.x; mov.u32 %3, %%lanemask_lt;"
      : "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock));
    for (int i = 0; i < 6; ++i) o[6 * (128 * blockIdx.x + tid) + i] = r[i];"""
    out = run(device, body, 6 * 256, shape="2, 128").reshape(2, 128, 6)
    i = np.arange(128)
    assert (out[:, :, 0] == (127 - i) ** 2).all() and (out[:, :, 1] == i ^ 31).all()
    assert (out[:, :, 2] == [[0], [1]]).all() and (out[:, :, 3] == 2).all() and (out[:, :, 4] == 128).all()
    assert (out[:, :, 5] == (1 << i % 32) - 1).all()


# ---- statements


@BOTH
def test_what_a_statement_may_hold(device):
    """Scopes, labels and loops, predicates, comments, constants, and lines of every shape."""
    body = r"""uint32_t r = 5; float f = 2; volatile int one = 1;
    asm volatile("" ::: "memory");
    asm volatile("" : "+r"(r));
    asm volatile("// nothing\n");
    asm ("{\n\t.reg .u32 i, sum<2>;\n\t.reg .pred more;\n\tmov.u32 i, 0; mov.u32 sum0, 0;\n"
         "again: /* 1 + 2 + ... + r */\n\tadd.u32 i, i, 1;\n\tadd.u32 sum0, sum0, i; setp.lt.u32 more, i, %1;\n"
         "\t@more bra again;\n\tmov.u32 sum1, sum0; // done\n\tmov.u32 %0, sum1;}" : "=r"(o[t * 8]) : "r"(t + 1));
    asm volatile ("{ .reg .b32 x; { .reg .b32 x; mov.b32 x, 7; } mov.b32 x, %1; add.s32 %0, x, (3 << 2) + -2; }" : "=r"(o[t * 8 + 1]) : "r"(r));
    __asm__ __volatile__ ( "fma.rn.f32 %0, %0, %0, %1" /* 4 + 1 */ ";" : "+f"(f) // both
      : "f"(1.0f) );
    o[t * 8 + 2] = uint32_t(f);
    asm("add.u32 %0, %1, %2;" : "=r"(o[t * 8 + 3]) : "r"(one == 2 ? 5 : 6), "n"(sizeof(float) >= 4 ? 10 : 20));
    if (t % 2) asm("mov.u32 %0, 1;" : "=r"(o[t * 8 + 4])); else asm("mov.u32 %0, 2;" : "=r"(o[t * 8 + 4]));
    uint2 pair = {1, 2}; asm("add.u32 %0, %0, %1; add.u32 %1, %1, %0;" : "+r"(pair.x), "+r"(pair.y)); o[t * 8 + 5] = pair.x * 16 + pair.y;
    unsigned long long l = 1; asm("{add.u64 %0,%0,%1;}" : "+l"(l) : "l"(~0ull)); o[t * 8 + 6] = uint32_t(l);
    asm("mov.u32 %0, WARP_SZ;" : "=r"(o[t * 8 + 7]));"""
    out = run(device, body, 256).reshape(32, 8)
    t = np.arange(32)
    assert (out[:, 0] == (t + 1) * (t + 2) // 2).all() and (out[:, 1] == 15).all() and (out[:, 2] == 5).all()
    assert (out[:, 3] == 16).all() and (out[:, 4] == 2 - t % 2).all() and (out[:, 5] == 3 * 16 + 5).all()
    assert (out[:, 6] == 0).all() and (out[:, 7] == 32).all()


@BOTH
def test_statements_in_templates_macros_and_functions(device):
    before = r"""
    #define ADD(r, x, n) asm volatile("add.u32 %0, %1, " #n ";\n" : "=r"(r) : "r"(x))
    #define WAIT_FOR(N) \
      asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : \
                   "memory")
    namespace fa {
    template <int n> __device__ __forceinline__ void twice(uint32_t (&r)[n]) {
      #pragma unroll
      for (int i = 0; i < n; ++i) asm("add.u32 %0, %0, %0;" : "+r"(r[i]));
      WAIT_FOR(n - 1);
    }
    template <typename T> __device__ uint32_t size_of() { uint32_t r; asm("mov.u32 %0, %1;" : "=r"(r) : "n"(sizeof(T))); return r; }
    struct S { uint32_t x; __device__ void up() { asm volatile("add.u32 %0, %0, 1;" : "+r"(x)); } };
    }  // namespace fa
    """
    body = """uint32_t r[3] = {1, 2, 3}; fa::twice(r); fa::S s = {9}; s.up();
    for (int i = 0; i < 3; ++i) ADD(o[8 * t + i], r[i], 100);
    if (t > 3) ADD(o[8 * t + 3], t, 1); else WAIT_FOR(2);
    o[8 * t + 4] = fa::size_of<double>() * 10 + fa::size_of<char>(); o[8 * t + 5] = s.x;
    auto f = [](uint32_t x) { asm("neg.s32 %0, %0;" : "+r"(x)); return x; }; o[8 * t + 6] = f(5);"""
    out = run(device, body, 256, before=before).reshape(32, 8)
    t = np.arange(32)
    assert (out[:, :3] == [102, 104, 106]).all() and (out[4:, 3] == t[4:] + 1).all()
    assert (out[:, 4] == 81).all() and (out[:, 5] == 10).all() and (out[:, 6].astype(np.int32) == -5).all()


UNKNOWN = [
    'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); // here',
    'asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0}, {%0}, {%0}, {%0};" :: "r"(t)); // here',
    'asm volatile("ex2.approx.f64 %0, %1;" : "=d"(x) : "d"(x)); // here',
    'asm volatile("{ .shared .b32 x; }"); // here',
    'asm volatile("mov.u32 %0, %%envreg3;" : "=r"(y)); // here',
    'asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(h) : "f"(f)); // here',
    'asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(y), "r"(y), "r"(y)); // here',
    'asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(o), "f"(f)); // here',
    'asm volatile("fma.rn.f32x2 %0, %1, %1, %1;" : "=l"(z) : "l"(z)); // here',
    'asm volatile("cvt.sat.s32.u16 %0, %1;" : "=r"(y) : "h"(h)); // here',
    'asm volatile("cvt.rn.sat.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); // here',
    'asm volatile("add.ftz.u32 %0, %0, %0;" : "+r"(y)); // here',
]


@pytest.mark.parametrize("body", UNKNOWN)
def test_an_unknown_instruction_is_named(body):
    before = "double x = 0; float f = 0; uint64_t z = 0; uint32_t y = 0; uint16_t h = 0;"
    bodies = [f"{before}\n{b}\nout[0] = x + y + z + h;" for b in UNKNOWN]
    report = failures(bodies, UNKNOWN.index(body))
    what = body.split('"')[1].split(";")[0]
    assert "unsupported in kernel: thread 0 of block 0 executes inline PTX: " in report
    assert what.removeprefix("{ ") in report and "which the emulator doesn't know" in report


def test_a_comparison_of_16_bits_has_one_predicate():
    body = 'asm volatile("{ .reg .pred p, q; setp.lt.f16 p|q, %0, %0; }" ::"h"(uint16_t(t))); // here'
    assert "setp.lt.f16 p|q, %0, %0;, which the emulator doesn't know" in failure(body)


def test_an_unknown_instruction_that_is_not_executed_does_no_harm():
    body = 'if (n == 5) { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); } o[t] = 3;'
    assert (run("cpu", body, 32) == 3).all()


REFUSED = {
    "mov.u32 %0, 1": "the last instruction has no ';'",
    "mov.u32 %0, %9;": "%9 of 2 operands",
    "add.u32 %0, %1;": "add.u32 takes 3 operands, not 2",
    "add.u32 %0, %1, x;": "x can't be read there",
    "add.u64 %0, %1, %1;": "%0 has not the type that add.u64 takes there",
    "add.f32 %0, %1, 1;": "a constant of type f32 or f64 is written",
    "{ .reg .f32 f; add.u32 %0, f, %1; }": "f has not the type that add.u32 takes there",
    "@p mov.u32 %0, 1;": "@p: no predicate of that name",
    "mov.u32 %1, 1;": "%1 is an input and can't be written to",
    "bra nowhere;": "bra nowhere: no such label",
    "{ mov.u32 %0, 1;": "'{' without '}'",
    "mov.u32 %0, 0x;": "is no number",
    "mov.u32 %0 %1;": 'is in the way',
    "cvt.f16.f32 %0, %1;": "cvt.f16.f32 needs a rounding",
    "add %0, %1, 1;": "add names no type",
    "ld.shared.u32 %0, %1;": "%1 must be an address in [ ]",
    "/* mov": "a comment that is never closed",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_ptx_is_refused_in_words(text):
    bodies = [f'uint32_t r = 0;\nasm volatile("{x}" : "=r"(r) : "r"(t)); // here\no[t] = r;' for x in REFUSED]
    report = failures(bodies, list(REFUSED).index(text))
    assert "inline PTX in kernel: thread 0 of block 0 executes inline PTX: " in report and REFUSED[text] in report


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ('short x = 0; asm("mov.u32 %0, %1;" : "=r"(r) : "r"(x)); // here', "'r' takes a 32-bit integer"),
        ('asm("mov.u32 %0, 1;" : "=r"(out[0])); // here', "'r' takes a 32-bit integer"),
        ('asm("mov.u64 %0, %1;" : "=l"(r) : "l"(q)); // here', "'l' takes a 64-bit integer"),
        ('asm("mov.f32 %0, %1;" : "=f"(out[0]) : "f"(1.0)); // here', "'f' takes a float"),
        ('asm("mov.u32 %0, %1;" : "=r"(r) : "q"(r)); // here', "'q' is no an? input operand's constraint"),
        ('asm("mov.u32 %0, 1;" : "r"(r)); // here', "'r' is no an? output operand's constraint"),
        ('asm("mov.u32 %0, 1;" : [x] "=r"(r)); // here', 'must be a constraint and an expression'),
    ],
)  # fmt: skip
def test_operands_of_the_wrong_type_do_not_compile(statement, words):
    source = program(f"{USUAL} uint32_t r = 0;\n{statement}\no[t] = r;")
    with pytest.raises(CompileError, match=words) as caught:
        build(source).compile()
    assert f"{FILE}:{line_of(source)}" in str(caught.value)


def test_an_error_in_a_header_of_instructions_is_the_kernels():
    """kernels/include/fa is where rungs keep their PTX: what goes wrong there is told at the line that uses it."""
    body = """__shared__ __align__(16) uint4 smem[8]; smem[t % 8] = uint4{}; uint32_t r[4]; __syncthreads();
    fa::ldmatrix_x4(r, smem + lane); // here
    o[t] = r[0];"""
    # clang holds an address that is formed from an array against its length, too
    by_compiler = {
        "gcc": "reads 16 bytes at smem + 496 bytes",
        "clang": "takes element 31 of an array of type uint4 [8]",
    }
    assert by_compiler[emulators_compiler().kind] in failure(body, before="#include <fa/sm80.cuh>")


def test_every_thread_of_many_blocks_parses_a_statement_once():
    body = 'uint32_t r; asm volatile("add.u32 %0, %1, 1;" : "=r"(r) : "r"(t)); o[blockIdx.x * 64 + t] = r;'
    launcher = built(program(USUAL + body, "200, 64"), "cpu")
    launcher.threads = 8
    out = launch_on("cpu", program(USUAL + body, "200, 64"), 200 * 64)
    assert (out.reshape(200, 64) == np.arange(64) + 1).all()
