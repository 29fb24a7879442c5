"""Warpgroup instructions: wgmma through its descriptors against matmul, and every way of using it wrong that can be known;
on a GPU (`pytest -m gpu tests/emulator/test_wgmma.py`) the same small kernels against the same numbers."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from emulated import FILE, build, launch, line_of, processor_seconds, program, trace

from helpers import KernelError, fragments
from helpers.emulator.fragments import Descriptor

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RANDOM = np.random.default_rng(0)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
START, BYTES = (
    65536,
    65536,
)  # where the emulator's dynamic shared memory begins, and how much of it the kernels here have

# Descriptors come as data (K: those of A and B, then scale-d), and shared memory is filled from Q, so that one kernel serves
# many layouts. D begins as the first workspace tensor has it, and goes to O as each thread holds it.
PRELUDE = """
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ __forceinline__ void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory"); }
template <int n> __device__ __forceinline__ void dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(n)); }
template <int n> __device__ __forceinline__ void inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(n)); }
__device__ __noinline__ void issue(uint64_t da, uint64_t db) {
  float d[8];
  int added = 0;
  ISSUE
  commit();
}
"""
SETUP = """
  extern __shared__ __align__(1024) uint32_t smem[];
  const int t = threadIdx.x;
  [[maybe_unused]] const uint64_t* given = static_cast<const uint64_t*>(a.K);
  // Descriptors are made for dynamic shared memory that begins at 65536, as the emulator's does.
  const uint64_t moved = (static_cast<uint32_t>(__cvta_generic_to_shared(smem)) - 65536u) >> 4;
  [[maybe_unused]] uint64_t da = given[0] - (given[0] & 0x3fff) + (given[0] + moved & 0x3fff);
  [[maybe_unused]] uint64_t db = given[1] - (given[1] & 0x3fff) + (given[1] + moved & 0x3fff);
  [[maybe_unused]] int added = int(given[2]);
  for (int i = t; i < 65536 / 4; i += blockDim.x) smem[i] = static_cast<const uint32_t*>(a.Q)[i];
  [[maybe_unused]] uint32_t ra[4];
  for (int i = 0; i < 4; ++i) ra[i] = static_cast<const uint32_t*>(a.V)[4 * (t % 128) + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
"""


def wgmma(n: int, kind: str = "f16", to: str = "f32", tail: str = "", registers: bool = False, d: str = "d") -> str:
    """The asm statement of one product: D is `d`, A is da or ra[0..3], B is db; tail: scale-a, scale-b, the transposes."""
    words = n // 2 if to == "f32" else n // 4
    tail = tail or ("1, 1" if kind == "tf32" else "1, 1, 0" if registers else "1, 1, 0, 0")
    first = words + (5 if registers else 2)
    a = "{" + ", ".join(f"%{words + i}" for i in range(4)) + "}" if registers else f"%{words}"
    outputs = ", ".join(f'"+{"f" if to == "f32" else "r"}"({d}[{i}])' for i in range(words))
    inputs = ", ".join([f'"r"(ra[{i}])' for i in range(4)] if registers else ['"l"(da)']) + ', "l"(db), "r"(added)'
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{first}, 0; "'
        f'"wgmma.mma_async.sync.aligned.m64n{n}k{8 if kind == "tf32" else 16}.{to}.{kind}.{kind} "'
        f'"{{{", ".join(f"%{i}" for i in range(words))}}}, {a}, %{first - 1}, p, {tail};}}" : {outputs} : {inputs});'
    )


def one_product(n: int, **options) -> str:
    """A kernel's body: one product, waited for."""
    words, kind = (n // 2, "float") if options.get("to", "f32") == "f32" else (n // 4, "uint32_t")
    return f"""
  {kind} d[{words}];
  for (int i = 0; i < {words}; ++i) d[i] = static_cast<const {kind}*>(a.workspace[0])[t * {words} + i];
  fence(); {wgmma(n, **options)} commit(); wait<0>();
  for (int i = 0; i < {words}; ++i) static_cast<{kind}*>(a.O)[t * {words} + i] = d[i];
"""


READS = "for (int i = 0; i < 8; ++i) out[t * 8 + i] = d[i];"
ZERO = "float d[8]; for (int i = 0; i < 8; ++i) d[i] = 0;"
W = wgmma(16)


def source_of(cases: tuple[str, ...], threads: int = 128) -> str:
    """One kernel of several bodies, of which fa_args::H chooses one."""
    marked = (case.replace("// here", f"// here {i}.") for i, case in enumerate(cases))
    body = "\n".join(f"if (a.H == {i}) {{\n{case}\n}}" for i, case in enumerate(marked))
    start = (
        "  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);\n"
        f"  kernel<<<1, {threads}, 65536>>>(a);"
    )
    return program(SETUP + body, before=PRELUDE.replace("ISSUE", wgmma(16)), launch=start)


@cache
def built(cases: tuple[str, ...], threads: int = 128, device: str = "cpu"):
    return build(source_of(cases, threads), device)


def run(
    cases,
    case: int,
    image: np.ndarray,
    given=(0, 0, 1),
    *,
    out: torch.Tensor,
    c=None,
    registers=None,
    threads=128,
    device="cpu",
):
    k = torch.tensor([g - (1 << 64) if g >> 63 else g for g in given])
    v = torch.zeros(512, dtype=torch.int32) if registers is None else registers
    tensors = {"Q": torch.from_numpy(image.view(np.int32)), "K": k, "V": v, "c": torch.zeros(1) if c is None else c}
    tensors = {name: x.to(device) for name, x in tensors.items()}
    return launch(built(tuple(cases), threads, device), out.to(device), H=case, **tensors).cpu()


# ---- operands and results


def operand(mn: int, k: int, kind: str = "f16") -> torch.Tensor:
    return torch.from_numpy(RANDOM.standard_normal((mn, k)).astype(np.float32)).to(DTYPES[kind])


def image_of(*operands: tuple[torch.Tensor, Descriptor, bool]) -> np.ndarray:
    """Shared memory in which every operand (rows of A or columns of B first) lies where its descriptor says; NaNs elsewhere."""
    image = np.full(BYTES, 0xFF, np.uint8)
    for matrix, descriptor, mn_major in operands:
        item = matrix.element_size()
        raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, item)
        for mn, k in itertools.product(range(matrix.shape[0]), range(matrix.shape[1])):
            at = descriptor.address(mn_major, mn, k, item) - START
            image[at : at + item] = raw[mn, k]
    return image


def packed(start: int, swizzle: int, mn_major: bool, mn: int) -> Descriptor:
    """A tile of `mn` rows or columns without gaps."""
    if swizzle == 0:
        return Descriptor(start, 128, 256) if not mn_major else Descriptor(start, mn * 16, 128)
    if not mn_major:
        return Descriptor(start, 16, 8 * swizzle, 0, swizzle)
    return Descriptor(start, 16 * swizzle, 8 * swizzle, 0, swizzle)


def held(d: torch.Tensor) -> torch.Tensor:
    """D (64, N) as 128 threads hold it, fp32 or two fp16 to a word."""
    places = [fragments.wgmma_d(thread, i) for thread in range(128) for i in range(d.shape[1] // 2)]
    rows, columns = zip(*places, strict=True)
    return d[list(rows), list(columns)].contiguous()


def gathered(out: torch.Tensor, n: int) -> torch.Tensor:
    """The opposite of `held`."""
    place = held(torch.arange(64 * n).reshape(64, n))
    return torch.empty(64 * n, dtype=out.dtype).index_put((place,), out.flatten()).reshape(64, n)


def summed(A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """C + A B^T with each product added in turn and rounded to fp32: the emulator's own order, bit for bit."""
    total = C.float().clone()
    for k in range(A.shape[1]):
        total += sign * A[:, k, None].float() * B[:, k].float()
    return total


def check(cases, case: int, n: int, a: tuple, b: tuple, added: bool = True, sign: int = 1, **options) -> None:
    """One product of A and B, each (matrix, descriptor, MN-major)."""
    C = torch.from_numpy(RANDOM.standard_normal((64, n)).astype(np.float32))
    given = (a[1].encode(), b[1].encode(), int(added))
    got = gathered(
        run(cases, case, image_of(a, b), given, out=torch.full((64 * n,), torch.nan), c=held(C), **options), n
    )
    want = summed(a[0], b[0], C if added else torch.zeros_like(C), sign)
    assert options.get("device") == "cuda" or torch.equal(got, want)
    torch.testing.assert_close(got, sign * a[0].float() @ b[0].float().T + (C if added else 0), rtol=1e-4, atol=1e-4)


# ---- right numbers

COLUMNS = range(8, 257, 8)
EVERY_N = [one_product(n) for n in COLUMNS]


@BOTH
def test_every_n(device):
    for case, n in enumerate(COLUMNS):
        a, b = packed(START, 0, False, 64), packed(START + 8192, 128, False, n)
        check(
            EVERY_N, case, n, (operand(64, 16), a, False), (operand(n, 16), b, False), added=n % 16 == 0, device=device
        )


MAJORS = [one_product(80, tail=f"1, 1, {ta}, {tb}") for ta in (0, 1) for tb in (0, 1)]


@BOTH
@pytest.mark.parametrize("case", range(4), ids=["K, K", "K, MN", "MN, K", "MN, MN"])
def test_both_majors_in_every_swizzle(case, device):
    for wide_a, wide_b in itertools.product((0, 32, 64, 128), repeat=2):
        mn_a, mn_b = case // 2 == 1, case % 2 == 1
        a, b = packed(START, wide_a, mn_a, 64), packed(START + 16384, wide_b, mn_b, 80)
        check(MAJORS, case, 80, (operand(64, 16), a, mn_a), (operand(80, 16), b, mn_b), device=device)


@BOTH
@pytest.mark.parametrize("case", range(4), ids=["K, K", "K, MN", "MN, K", "MN, MN"])
def test_offsets_that_leave_gaps_and_patterns_that_begin_anywhere(case, device):
    """Any leading and stride offsets, and any base offset: the C++ reads where fragments.Descriptor says."""
    for _ in range(6):
        operands = []
        for mn, mn_major, start in ((64, case // 2 == 1, START), (80, case % 2 == 1, START + 32768)):
            swizzle = int(RANDOM.choice((0, 32, 64, 128)))
            start += 16 * int(RANDOM.integers(64)) if swizzle == 0 else 128 * int(RANDOM.integers(8))
            near, far = (128, 3072) if swizzle == 0 else (8 * swizzle, 16 * swizzle)  # no two chunks in one place
            leading, stride = far + 16 * int(RANDOM.integers(4)), near
            if swizzle == 0:
                leading, stride = (far + 16 * int(RANDOM.integers(8)), near + 16 * int(RANDOM.integers(2)))
            base = int(RANDOM.integers(8)) if swizzle else 0
            operands.append((operand(mn, 16), Descriptor(start, leading, stride, base, swizzle), mn_major))
        check(MAJORS, case, 80, *operands, device=device)


KINDS = [
    one_product(24, kind="bf16"),
    one_product(24, kind="bf16", tail="1, -1, 0, 1"),
    one_product(24, kind="tf32"),
    one_product(24, kind="f16", registers=True),
    one_product(24, kind="bf16", registers=True, tail="-1, 1, 1"),
    one_product(24, kind="tf32", registers=True),
    one_product(24, to="f16"),
]


@BOTH
@pytest.mark.parametrize(
    "case, kind, sign, mn_major", [(0, "bf16", 1, False), (1, "bf16", -1, True), (2, "tf32", 1, False)]
)
def test_kinds_of_factors(case, kind, sign, mn_major, device):
    k = 8 if kind == "tf32" else 16
    A, B = (operand(mn, k, kind) for mn in (64, 24))
    if kind == "tf32":  # of which the hardware looks at 19 bits
        A, B = ((x.view(torch.int32) & -0x2000).view(torch.float32) for x in (A, B))
    a, b = packed(START, 128, False, 64), packed(START + 16384, 64, mn_major, 24)
    check(KINDS, case, 24, (A, a, False), (B, b, mn_major), sign=sign, device=device)


@BOTH
@pytest.mark.parametrize(
    "case, kind, sign, mn_major", [(3, "f16", 1, False), (4, "bf16", -1, True), (5, "tf32", 1, False)]
)
def test_a_in_registers(case, kind, sign, mn_major, device):
    k = 8 if kind == "tf32" else 16
    A, B = (operand(mn, k, kind) for mn in (64, 24))
    layout = fragments.wgmma_a
    if kind == "tf32":
        A, B = ((x.view(torch.int32) & -0x2000).view(torch.float32) for x in (A, B))

        def layout(thread, i):
            row, column = fragments.a_fragment_tf32(thread % 32, i)
            return 16 * (thread // 32) + row, column

    places = [layout(thread, i) for thread in range(128) for i in range(k // 2)]
    rows, columns = zip(*places, strict=True)
    registers = A[list(rows), list(columns)].contiguous().view(torch.int32)
    a, b = packed(START, 0, False, 64), packed(START + 16384, 32, mn_major, 24)
    check(KINDS, case, 24, (A, a, False), (B, b, mn_major), sign=sign, registers=registers, device=device)


def test_accumulators_in_half_precision():
    """The sum is made in fp32 and rounded once, as mma.sync's here."""
    A, B, C = operand(64, 16), operand(24, 16), operand(64, 24)
    a, b = packed(START, 128, False, 64), packed(START + 16384, 128, False, 24)
    image, given = image_of((A, a, False), (B, b, False)), (a.encode(), b.encode(), 1)
    out = run(KINDS, 6, image, given, out=torch.zeros(64 * 12, dtype=torch.int32), c=held(C).view(torch.int32))
    assert torch.equal(gathered(out.view(torch.float16), 24), summed(A, B, C).half())


SEQUENCES = [
    # Two steps of K into the same accumulators, in one group.
    f"""float d[8]; for (int i = 0; i < 8; ++i) d[i] = 0;
    fence(); {wgmma(16)} da += given[3]; db += given[3]; {wgmma(16)} commit(); wait<0>();
    for (int i = 0; i < 8; ++i) out[t * 8 + i] = d[i];""",
    # Two groups with accumulators of their own: the first is there when one is still under way. In between, empty asm
    # statements that only tell the compiler of registers.
    f"""float d[8], e[8]; added = 0;
    fence(); {wgmma(16)} commit(); da += given[3]; db += given[3]; {wgmma(16, d="e")} commit();
    asm volatile("" : "+f"(e[0]), "+f"(e[1]) :: "memory");
    wait<1>(); for (int i = 0; i < 8; ++i) out[t * 8 + i] = d[i];
    wait<0>(); asm volatile("" : "+f"(e[0]) :: "memory"); for (int i = 0; i < 8; ++i) out[t * 8 + i] += e[i];""",
    # Shared memory that changes before the wait: the product is that of the new operand, as late as it may be.
    f"""float d[8]; added = 0; fence(); {wgmma(16)} commit();
    __syncthreads(); for (int i = t; i < 2048; i += 128) smem[i] = 0; __syncthreads();
    wait<0>(); for (int i = 0; i < 8; ++i) out[t * 8 + i] = d[i];""",
]


@BOTH
@pytest.mark.parametrize("case", range(2))
def test_sums_go_on_and_groups_end_in_order(case, device):
    A, B = operand(64, 32), operand(16, 32)
    a, b = (Descriptor(at, 16, 1024, 0, 128) for at in (START, START + 16384))
    image = image_of((A, a, False), (B, b, False))
    out = run(SEQUENCES, case, image, (a.encode(), b.encode(), 1, 32 >> 4), out=torch.zeros(64 * 16), device=device)
    zero = torch.zeros(64, 16)
    first, second = summed(A[:, :16], B[:, :16], zero), summed(A[:, 16:], B[:, 16:], zero)
    want = first + second if case == 1 else summed(A[:, 16:], B[:, 16:], first)
    torch.testing.assert_close(gathered(out, 16), want, rtol=1e-4, atol=1e-4)


def test_operands_are_read_at_the_wait():
    a, b = (Descriptor(at, 16, 1024, 0, 128) for at in (START, START + 16384))
    image = image_of((operand(64, 16), a, False), (operand(16, 16), b, False))
    assert (run(SEQUENCES, 2, image, (a.encode(), b.encode(), 1), out=torch.zeros(64 * 16)) == 0).all()


def test_a_warpgroups_product_takes_well_under_a_millisecond():
    body = f"""float d[64]; for (int i = 0; i < 64; ++i) d[i] = 0;
    fence(); for (int i = 0; i < 200; ++i) {{ {wgmma(128)} commit(); wait<0>(); }} out[t] = d[0];"""
    a, b = packed(START, 128, False, 64), packed(START + 16384, 128, False, 128)
    image, given = image_of((operand(64, 16), a, False), (operand(128, 16), b, False)), (a.encode(), b.encode(), 1)
    built((body,)).compile()
    times = [processor_seconds(lambda: run([body], 0, image, given, out=torch.zeros(128))) for _ in range(3)]
    assert min(times) < 2  # loops of Python's, of about 50 ms each


def test_a_descriptor_reaches_all_of_shared_memory():
    """The last tile of 227 KB: its address has 18 bits, of which a descriptor holds 14."""
    bytes_ = 227 << 10
    body = f"""extern __shared__ __align__(1024) uint32_t smem[];
    const int t = threadIdx.x, added = 0;
    for (int i = t; i < {bytes_ // 4}; i += 128) smem[i] = i < {(bytes_ - 4096) // 4} ? 0xffffffff : 0x3c003c00;
    const uint64_t at = static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + {bytes_ - 4096};
    const uint64_t da = (at & 0x3ffff) >> 4 | 8ull << 16 | 16ull << 32, db = da;
    __syncthreads(); float d[8]; fence(); {W} commit(); wait<0>(); {READS}"""
    start = f"""  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, {bytes_});
    kernel<<<1, 128, {bytes_}>>>(a);"""
    source = program(body, before=PRELUDE.replace("ISSUE", wgmma(16)), launch=start)
    assert (launch(build(source), torch.zeros(64 * 16)) == 16).all()


# ---- every field of a descriptor matters

WHOLE = [one_product(128, tail="1, 1, 1, 1")]
FIELDS = {
    "start": {"start": START + 16},
    "leading": {"leading": 4096},
    "stride": {"stride": 2048},
    "base_offset": {"base_offset": 1},
    "swizzle": {"swizzle": 64},
    "no swizzle": {"swizzle": 0},
}


@BOTH
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("which", "AB")
def test_a_wrong_field_gives_other_numbers(field, which, device):
    """Both operands MN-major with 128-byte swizzle; A has one block of 64 rows, so that its leading offset is never used."""
    A, B = operand(64, 16), operand(128, 16)
    right = {"A": packed(START, 128, True, 64), "B": packed(START + 16384, 128, True, 128)}
    wrong = dict(right)
    changed = {k: v + right[which].start - START if k == "start" else v for k, v in FIELDS[field].items()}
    wrong[which] = Descriptor(**{f: getattr(right[which], f) for f in Descriptor.FIELDS} | changed)
    image = image_of((A, right["A"], True), (B, right["B"], True))
    given = (wrong["A"].encode(), wrong["B"].encode(), 0)
    got = gathered(run(WHOLE, 0, image, given, out=torch.zeros(64 * 128), c=torch.zeros(64 * 128), device=device), 128)
    unused = which == "A" and field == "leading"
    assert torch.allclose(got, summed(A, B, torch.zeros(64, 128)), rtol=1e-4, atol=1e-4) == unused


# ---- misuse. Every case is a body that chooses what to do wrong; the finding is at the line with "// here"


# what is wrong: (body, threads, kind of finding, words of its sentence)
WRONG = {
    "no fence": (f"{ZERO} {W} commit(); wait<0>(); {READS}", 128, "fence", "before its warp has executed wgmma.fence"),
    "no fence after use": (
        f"{ZERO} fence(); {W} commit(); wait<0>(); d[3] += 1;\n{W} // here\ncommit(); wait<0>(); {READS}",
        128, "fence", "used since its last wgmma.fence"),
    "no fence after a read": (
        f"{ZERO} fence(); {W} commit(); wait<0>(); {READS}\n{W} // here\ncommit(); wait<0>(); {READS}",
        128, "fence", "used since its last wgmma.fence"),
    "no commit": (f"{ZERO} fence(); {W} wait<0>();\n{READS} // here", 128, "in flight", "reads an accumulator of the wgmma"),
    "no wait": (f"{ZERO} fence(); {W} commit();\n{READS} // here", 128, "in flight", "no wgmma.wait_group has covered it"),
    "too weak a wait": (f"{ZERO} fence(); {W} commit(); wait<1>();\n{READS} // here", 128, "in flight", "reads an accumulator"),
    "nobody waits": (f"{ZERO} fence(); {W} commit(); out[t] = 1;", 128, "in flight", "returns while the wgmma.mma_async"),
    "written in flight": (f"{ZERO} fence(); {W} commit();\nd[2] = 0; // here\nwait<0>(); {READS}", 128, "in flight", "writes an acc"),
    "read as an operand": (
        f'{ZERO} uint32_t h; fence(); {W} commit();\nasm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(h) : "f"(d[0])); // here\n'
        f"wait<0>(); out[t] = h; {READS}", 128, "in flight", "reads an accumulator"),
    "not there any more": ("fence(); issue(da, db); wait<0>();", 128, "in flight", "variables that are no longer there"),
    "another shape": (
        f"float d[16]; for (int i = 0; i < 16; ++i) d[i] = 0; fence(); {W} \n{wgmma(32)} // here\ncommit(); wait<0>(); {READS}",
        128, "in flight", "of another shape and still under way"),
    "a warp has returned": (f"{ZERO} fence(); if (t < 32) return; {W} commit(); wait<0>(); {READS}", 128, "warpgroup", "warp 0 has returned"),
    "a warp returns later": (
        f'{ZERO} fence(); if (t < 96) {{ {W} commit(); wait<0>(); }} else for (int i = 0; i < 20; ++i) asm volatile("nanosleep.u32 9;");',
        128, "warpgroup", "returns, and its warp has not executed wgmma.mma_async"),
    "a warp waits elsewhere": (
        f"{ZERO} fence(); if (t >= 32) {{ {W} commit(); wait<0>(); }} __syncthreads(); {READS}", 128, "warpgroup",
        "which warp 0 of the same warpgroup doesn't execute"),
    "three warps wait elsewhere": (
        f"{ZERO} fence(); if (t < 32) {{ {W} commit(); wait<0>(); }} __syncthreads(); {READS}", 128, "warpgroup",
        "which warps 1, 2, 3 of the same warpgroup don't execute"),
    "another wgmma": (
        f"{ZERO} fence(); if (t < 32) {{ {W} commit(); wait<0>(); }} else {{\n{W}\ncommit(); wait<0>(); }} {READS}", 128,
        "warpgroup", "has executed another"),
    "other descriptors in a warp": (f"{ZERO} db += t & 1; fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 128, "warpgroup", "other operands than lane"),
    "other descriptors in a warpgroup": (f"{ZERO} db += t / 32; fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 128,
                                         "warpgroup", "other descriptors or another scale-d"),
    "a block of three warps": (f"{ZERO} fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 96, "warpgroup", "warp 3 no such warps are in the block"),
    "four warps from the second on": (
        f"{ZERO} if (t >= 32 && t < 160) {{ fence();\n{W}\ncommit(); wait<0>(); {READS} }}", 256, "warpgroup", "its warp has not executed|has returned"),
    "half a warp": (f"{ZERO} if (t % 32 < 16) return; fence(); {W} commit(); wait<0>(); {READS}", 128, "inline PTX", "without all 32 lanes"),
    "beyond shared memory": (f"{ZERO} da = given[3]; fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 128, "descriptor", "where there is no array"),
    "bits without a meaning": (f"{ZERO} da |= 1ull << 53; fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 128, "descriptor", "mean nothing"),
    "a base offset without swizzle": (
        f"{ZERO} db = db << 2 >> 2 | 1ull << 49; fence();\n{W} // here\ncommit(); wait<0>(); {READS}", 128, "descriptor", "where it must be 0"),
    "scale 2": (ZERO + "fence();\n" + wgmma(16, tail="2, 1, 0, 0") + " // here\ncommit(); wait<0>();" + READS, 128, "inline PTX", "scale-a 2"),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(WRONG))
def test_misuse_is_named(what):
    _, threads, kind, words = WRONG[what]
    cases = tuple(body for body, of, _, _ in WRONG.values() if of == threads)
    case = [name for name, (_, of, _, _) in WRONG.items() if of == threads].index(what)
    given = (
        *(packed(at, 0, False, 64).encode() for at in (START, START + 16384)),
        1,
        packed(START + BYTES - 1024, 0, False, 64).encode(),
    )
    with pytest.raises(KernelError) as caught:
        run(cases, case, np.zeros(BYTES, np.uint8), given, out=torch.zeros(64 * 16), threads=threads)
    report = str(caught.value)
    assert f": {kind} in kernel: " in report and any(w in report for w in words.split("|")), report
    if "// here" in cases[case]:
        assert report.startswith(f"{FILE}:{line_of(source_of(cases, threads), f'// here {case}.')}: "), report


# ---- setmaxnreg: 384 threads are launched with 168 registers each

REGISTERS = {
    "right": ("if (t < 128) dec<24>(); else inc<240>(); out[t] = 1;", "", ""),
    "there and back": ("if (t < 128) { dec<40>(); __syncthreads(); inc<104>(); } else { inc<232>(); __syncthreads(); dec<200>(); } out[t] = 1;", "", ""),
    "no multiple of 8": ("if (t < 128) dec<28>();", "registers", "with 28 registers: a multiple of 8 from 24 to 256 is allowed"),
    "too few": ("if (t < 128) dec<16>();", "registers", "with 16 registers"),
    "too many": ("inc<264>();", "registers", "with 264 registers"),
    "more than there are": (
        "if (t < 128) dec<80>(); else inc<224>();", "registers",
        "1792 more for its 32 threads, and of the 64512 that the block was launched with (384 threads x 168) 64000 are taken "
        "(per thread of warps 0-3: 80, warps 4-9: 224, warps 10-11: 168) and 512 are free\n"),
    "nobody gives any": (
        "if (t < 128) inc<176>();", "registers",
        "256 more for its 32 threads, and of the 64512 that the block was launched with (384 threads x 168) 64512 are taken "
        "(per thread of warps 0-11: 168) and 0 are free\n"),
    "eight too many, before a product": (
        f"if (t < 128) {{ dec<32>(); return; }}\nasm volatile(\"setmaxnreg.inc.sync.aligned.u32 240;\"); // here\nadded = 0; float d[8]; fence();\n{W} // product\ncommit(); wait<0>(); {READS}",
        "registers",
        "in setmaxnreg.inc for 240 registers per thread: 2304 more for its 32 threads, and of the 64512 that the block was launched with "
        "(384 threads x 168) 63232 are taken (per thread of warps 0-3: 32, warps 4-10: 240, warp 11: 168) and 1280 are free; "
        "warps 8, 9, 10 wait for it to execute wgmma.mma_async on {product}\n"),
    "three warps": ("if (t >= 32 && t < 128) dec<24>(); else if (t < 32) for (int i = 0; i < 9; ++i) asm volatile(\"nanosleep.u32 9;\");", "warpgroup", "has not executed setmaxnreg.dec"),
    "different numbers": ("if (t < 32) dec<24>(); else if (t < 128) dec<32>();", "warpgroup", "where another warp of its warpgroup has executed"),
    "down from less": ("if (t < 128) { dec<24>(); dec<32>(); }", "registers", "with 32 registers per thread and has 24"),
}  # fmt: skip


@pytest.mark.parametrize("what", REGISTERS)
def test_registers_change_hands(what):
    body, kind, words = REGISTERS[what]
    cases, case = tuple(body for body, _, _ in REGISTERS.values()), list(REGISTERS).index(what)
    given = (*(packed(at, 0, False, 64).encode() for at in (START, START + 16384)), 1)
    options = {"image": np.zeros(BYTES, np.uint8), "given": given, "threads": 384, "out": torch.zeros(384 * 8)}
    if not kind:
        assert (run(cases, case, **options)[:384] == 1).all()
        return
    with pytest.raises(KernelError) as caught:
        run(cases, case, **options)
    report, source = str(caught.value), source_of(cases, 384)
    words = words.format(product=f"{FILE}:{line_of(source, '// product')}")
    assert f": {kind} in kernel: " in report and words in report, report
    if "// here" in cases[case]:
        line = f"{FILE}:{line_of(source, f'// here {case}.')}"
        assert report.startswith(f"{line}: ") and f"warp 11 of block 0 waits at {line} in " in report, report


# ---- what only a trace follows: who orders ordinary stores with wgmma's reads

PROXY = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();'
EMPTY = "added = 0; float d[8]; fence();"
# what: (body, kind of finding, words); at the line with "// here"
TRACED = {
    "right": (f"{EMPTY} {W} commit(); wait<0>(); __syncthreads(); smem[t] = 0; {READS}", "", ""),
    "a new tile": (
        f"{EMPTY} for (int i = 0; i < 2; ++i) {{ {W} commit(); wait<0>(); __syncthreads(); smem[t] = i; {PROXY} fence(); }} {READS}",
        "", ""),
    "no fence.proxy.async": (
        f"smem[t] = 1; __syncthreads(); {EMPTY}\n{W} // here\ncommit(); wait<0>(); {READS}", "proxy fence", "with no fence.proxy.async"),
    "overwritten under way": (f"{EMPTY} {W} commit();\nsmem[t + 128] = 0; // here\nwait<0>(); {READS}", "overwritten", ""),
    "written without a barrier": (
        f"smem[t] = 1; {PROXY.replace('__syncthreads();', '')} {EMPTY}\n{W} // here\ncommit(); wait<0>(); {READS}", "race", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", TRACED)
def test_what_a_trace_finds(what):
    body, kind, words = TRACED[what]
    cases, case = tuple(body for body, _, _ in TRACED.values()), list(TRACED).index(what)
    launcher, out = built(cases), torch.zeros(64 * 16)
    tensors = {
        "Q": torch.zeros(BYTES // 4, dtype=torch.int32),
        "K": torch.tensor([packed(at, 0, False, 64).encode() for at in (START, START + 16384)] + [0]),
        "V": torch.zeros(512, dtype=torch.int32),
    }
    findings = trace(launcher, out, H=case, **tensors).findings
    if not kind:
        assert findings == ()
        return
    line = line_of(source_of(cases), f"// here {case}.")
    assert any(f.kind == kind and f.line == line and words in f.text for f in findings), findings
