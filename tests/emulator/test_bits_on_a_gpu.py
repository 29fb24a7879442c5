"""Every function and every PTX instruction of arithmetic that the emulator has, on numbers where formats end: the GPU's bits.

Of a NaN it doesn't matter which. What is approximate on a GPU is left out (ex2.approx, `__expf`): the emulator computes it in full
precision. So is `fmaxf` of a signalling NaN."""

import itertools
import random
import struct

import pytest
import torch
from emulated import build, call, programs

pytestmark = pytest.mark.gpu

LETTER = {
    "16": "h",
    "32": "r",
    "64": "l",
    "f32": "f",
    "f64": "d",
    "8": "r",
    "x2": "r",
}  # of a register, by how its type ends
C_TYPE = {"h": "unsigned short", "r": "unsigned", "l": "unsigned long long", "f": "float", "d": "double"}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
FTZ = ("", ".ftz")

COUNT = 8192  # threads, each with three words of 64 bits: x, y, z
VARIABLES = """
  const int thread = blockIdx.x * 256 + threadIdx.x, count = gridDim.x * 256;
  const unsigned long long x = static_cast<const unsigned long long*>(a.Q)[thread];
  const unsigned long long y = static_cast<const unsigned long long*>(a.K)[thread];
  const unsigned long long z = static_cast<const unsigned long long*>(a.V)[thread];
  unsigned long long* o = static_cast<unsigned long long*>(a.O) + thread;
""" + "".join(
    f"  [[maybe_unused]] const {c_type} {names[0]} = as<{c_type}>(x), {names[1]} = as<{c_type}>(y), {names[2]} = as<{c_type}>(z);\n"
    for c_type, names in {
        "float": "fgh", "double": "dec", "int": "ijk", "unsigned": "uvw", "long long": ("l", "l1", "l2"), "unsigned long long": "pqr",
        "__half": ("s", "s1", "s2"), "__half2": ("S", "S1", "S2"), "__nv_bfloat16": ("b", "b1", "b2"), "__nv_bfloat162": ("B", "B1", "B2"),
    }.items()
)  # fmt: skip
CASTS = """#include <cmath>
template <class T> __device__ T as(unsigned long long x) { T t; __builtin_memcpy(&t, &x, sizeof t); return t; }
template <class T> __device__ unsigned long long bits(T t) { unsigned long long x = 0; __builtin_memcpy(&x, &t, sizeof t); return x; }
"""


def letter(kind: str) -> str:
    return next(
        LETTER[end]
        for end in ("x2", "f32", "f64", "16", "32", "64", "8")
        if kind.endswith(end) and (end[0] != "f" or kind == end)
    )


def instruction(
    text: str, to: str, *sources: str, words: tuple[str, ...] = ("x", "y", "z"), immediate: str = ""
) -> tuple[str, str, str]:
    """(name, type of the result, statement that computes it and keeps it in `o`) of a PTX instruction of these words."""
    given = ", ".join(
        f'"{letter(t)}"(as<{C_TYPE[letter(t)]}>({word}))' for t, word in zip(sources, words, strict=False)
    )
    operands = ", ".join(f"%{n}" for n in range(len(sources) + 1)) + immediate
    code = f'{{ {C_TYPE[letter(to)]} t; asm volatile("{text} {operands};" : "={letter(to)}"(t) : {given}); o[AT] = bits(t); }}'
    return text + immediate, to, code


def comparison(text: str, kind: str) -> tuple[str, str, str]:
    two = kind not in ("f16", "bf16")  # setp of 16 bits has one predicate
    given = ", ".join(f'"{letter(kind)}"(as<{C_TYPE[letter(kind)]}>({word}))' for word in "xy")
    ptx = f"{{.reg .pred P, R; {text} {'P|R' if two else 'P'}, %1, %2; selp.u32 %0, 1, 0, P; {'@R add.u32 %0, %0, 2;' * two}}}"
    return text, "u32", f'{{ unsigned t; asm volatile("{ptx}" : "=r"(t) : {given}); o[AT] = t; }}'


def functions(kind: str, *expressions: str) -> list[tuple[str, str, str]]:
    return [(e, kind, f"o[AT] = bits({e});") for e in expressions]


def of_integers() -> list[tuple[str, str, str]]:
    found = []
    for t in INTEGERS:
        found += [
            instruction(f"{op}.{t}", t, t, t) for op in ("add", "sub", "min", "max", "div", "rem", "mul.lo", "mul.hi")
        ]
        found += [instruction(f"mad.lo.{t}", t, t, t, t), instruction(f"shr.{t}", t, t, "u32")]
    for t in ("u16", "s16", "u32", "s32"):
        wide = t[0] + str(2 * int(t[1:]))
        found += [instruction(f"mul.wide.{t}", wide, t, t), instruction(f"mad.wide.{t}", wide, t, t, wide)]
    found += [instruction(f"mad.hi.{t}", t, t, t, t) for t in ("u32", "s32")]
    found += [instruction(f"{op}.{t}", t, t) for op in ("neg", "abs") for t in ("s16", "s32", "s64")]
    for t in BITS:
        found += [instruction(f"{op}.{t}", t, t, t) for op in ("and", "or", "xor")]
        found += [instruction(f"not.{t}", t, t), *(instruction(f"{op}.{t}", t, t, "u32") for op in ("shl", "shr"))]
    for t in ("b32", "b64"):
        found += [instruction(f"popc.{t}", "u32", t), instruction(f"clz.{t}", "u32", t), instruction(f"brev.{t}", t, t)]
    field = "z & 255", "z >> 8 & 255"  # place and length
    found += [instruction(f"bfi.{t}", t, t, t, "u32", "u32", words=("x", "y", *field)) for t in ("b32", "b64")]
    found += [instruction(f"bfe.{t}", t, t, "u32", "u32", words=("x", *field)) for t in ("u32", "s32", "u64", "s64")]
    found += [
        instruction(f"shf.{side}.{end}.b32", "b32", "b32", "b32", "u32") for side in "lr" for end in ("wrap", "clamp")
    ]
    found += [instruction("prmt.b32", "b32", "b32", "b32", "b32")]
    return found + [
        instruction("lop3.b32", "b32", "b32", "b32", "b32", immediate=f", {table}")
        for table in (0x96, 0xE8, 0xCA, 0x1D)
    ]


def of_reals() -> list[tuple[str, str, str]]:
    found = []
    for ftz in FTZ:
        f = f"{ftz}.f32"
        found += [
            instruction(op + f, "f32", "f32", "f32")
            for op in ("add", "sub", "mul", "add.rn", "mul.rn", "div.rn", "min", "max")
        ]
        found += [instruction(f"{op}{ftz}.sat.f32", "f32", "f32", "f32") for op in ("add", "sub", "mul")]
        found += [instruction(f"{op}{ftz}.NaN.f32", "f32", "f32", "f32") for op in ("min", "max")]
        found += [instruction(f"fma.rn{ftz}{sat}.f32", "f32", "f32", "f32", "f32") for sat in ("", ".sat")]
        found += [instruction(op + f, "f32", "f32") for op in ("neg", "abs", "rcp.rn", "sqrt.rn")]
        for t in ("f16", "f16x2"):
            found += [instruction(f"{op}{ftz}.{t}", t, t, t) for op in ("add", "sub", "mul", "add.rn", "min", "max")]
            found += [instruction(f"fma.rn{ftz}.{t}", t, t, t, t)]
    found += [instruction(f"{op}.f64", "f64", "f64", "f64") for op in ("add", "sub", "mul", "div.rn", "min", "max")]
    found += [
        instruction("fma.rn.f64", "f64", "f64", "f64", "f64"),
        *(instruction(f"{op}.f64", "f64", "f64") for op in ("neg", "abs")),
    ]
    for t in HALVES:
        found += [
            instruction(f"{op}.{t}", t, t, t)
            for op in ("add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN", "max.NaN")
        ]
        found += [instruction(f"fma.rn.{t}", t, t, t, t), *(instruction(f"{op}.{t}", t, t) for op in ("neg", "abs"))]
    return found


def of_conversions() -> list[tuple[str, str, str]]:
    found, small = [], ("u8", "s8", *INTEGERS)
    size = {t: (t[0] == "s", int(t[1:])) for t in small}
    for to, source in itertools.permutations(small, 2):
        found.append(instruction(f"cvt.{to}.{source}", to, source))
        (signed, bits), (source_signed, source_bits) = size[to], size[source]
        if bits < source_bits or (bits == source_bits and signed != source_signed) or (source_signed and not signed):
            found.append(instruction(f"cvt.sat.{to}.{source}", to, source))
    for i, real in itertools.product(small, ("f16", "f32", "f64")):
        found += [instruction(f"cvt.{r}.{i}.{real}", i, real) for r in ("rni", "rzi", "rmi", "rpi")]
        found += [
            instruction(f"cvt.{r}.{real}.{i}", real, i)
            for r in ("rn", "rz", "rm", "rp")
            if real != "f16" or r in ("rn", "rz")
        ]
    found += [instruction(f"cvt.rzi.ftz.{i}.f32", i, "f32") for i in small]
    found += [
        instruction(f"cvt.{r}.{t}.{t}", t, t) for r in ("rni", "rzi", "rmi", "rpi") for t in ("f16", "f32", "f64")
    ]
    for to, source in (("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64")):
        found += [instruction(f"cvt.{r}.{to}.{source}", to, source) for r in ("rn", "rz")]
    for r in ("rn", "rz"):
        found += [instruction(f"cvt.{r}.relu.{to}.f32", to, "f32") for to in ("f16", "bf16")]
        found += [
            instruction(f"cvt.{r}{relu}.{to}.f32", to, "f32", "f32")
            for to in ("f16x2", "bf16x2")
            for relu in ("", ".relu")
        ]
        found += [instruction(f"cvt.{r}.tf32.f32", "b32", "f32"), instruction(f"cvt.{r}.sat.f16.f32", "f16", "f32")]
    found += [instruction(f"cvt.{r}.f32.f64", "f32", "f64") for r in ("rm", "rp")]
    found += [
        instruction("cvt.rna.tf32.f32", "b32", "f32"),
        instruction("cvt.rn.ftz.f32.f64", "f32", "f64"),
        instruction("cvt.sat.f32.f32", "f32", "f32"),
    ]
    wider = (("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "f32"))
    return found + [instruction(f"cvt.{to}.{source}", to, source) for to, source in wider]


def of_comparisons() -> list[tuple[str, str, str]]:
    ordered, unsigned = ("eq", "ne", "lt", "le", "gt", "ge"), ("lo", "ls", "hi", "hs")
    real = (*ordered, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    by_type = {t: (*ordered, *unsigned * (t[0] == "u")) for t in INTEGERS} | dict.fromkeys(
        ("f32", "f64", "f16", "bf16"), real
    )
    found = [comparison(f"setp.{op}.{t}", t) for t, ops in by_type.items() for op in ops]
    return found + [comparison(f"setp.{op}.ftz.f32", "f32") for op in ("eq", "lt", "leu")]


def of_functions() -> list[tuple[str, str, str]]:
    one = "__frcp_rn __fsqrt_rn __saturatef fabsf floorf ceilf truncf rintf roundf".split()
    two = "__fadd_rn __fsub_rn __fmul_rn __fdiv_rn copysignf min max fmodf".split()
    found = functions("f32", *(f"{f}(f)" for f in one), *(f"{f}(f, g)" for f in two), "__fmaf_rn(f, g, h)", "__double2float_rn(d)",
                      "__int2float_rn(i)", "__uint2float_rn(u)", "__ll2float_rn(l)", "__ull2float_rn(p)", "ldexpf(f, i & 511)")  # fmt: skip
    found += functions("f64", *(f"__d{op}_rn(d, e)" for op in ("add", "sub", "mul", "div")), "__drcp_rn(d)", "__dsqrt_rn(d)", "__fma_rn(d, e, c)",
                       "min(d, e)", "max(d, e)", "min(f, d)", "max(d, f)", "__ll2double_rn(l)", "__ull2double_rn(p)", "__hiloint2double(i, j)")  # fmt: skip
    for name, kind in (("int", "s32"), ("uint", "u32"), ("ll", "s64"), ("ull", "u64")):
        found += functions(
            kind,
            *(
                f"__{source}2{name}_{r}({source[0]})"
                for source in ("float", "double")
                for r in ("rn", "rz", "rd", "ru")
            ),
        )
    found += functions("s32", "__popc(u)", "__popcll(p)", "__clz(i)", "__clzll(l)", "__ffs(i)", "__ffsll(l)", "__mul24(i, j)", "__mulhi(i, j)",
                       "__hadd(i, j)", "__rhadd(i, j)", "__dp4a(i, j, k)", "__double2loint(d)", "__double2hiint(d)", "int(isnan(f) + 2 * isinf(f) + 4 * signbit(f))")  # fmt: skip
    found += functions("u32", *(f"{f}(u, v)" for f in "__umul24 __umulhi __uhadd __urhadd umin umax".split()), "__brev(u)", "__sad(i, j, u)", "min(i, u)",
                       *(f"{f}(u, v, w)" for f in "__usad __dp4a __byte_perm __funnelshift_l __funnelshift_r __funnelshift_lc __funnelshift_rc".split()))  # fmt: skip
    found += functions(
        "u64", "__brevll(p)", "__umul64hi(p, q)", "__mul64hi(l, l1)", "llmin(l, l1)", "ullmax(p, q)", "max(l, p)"
    )
    for kind, name, c_type, s in (("f16", "half", "__half", "s"), ("bf16", "bfloat16", "__nv_bfloat16", "b")):
        S = s.upper()
        both = (
            "__hadd __hsub __hmul __hdiv __hmax __hmin __hmax_nan __hmin_nan __hadd_sat __hsub_sat __hmul_sat".split()
        )
        found += functions(kind, *(f"{f}({s}, {s}1)" for f in both), *(f"{f}({s})" for f in "__hneg __habs hfloor hceil htrunc hrint hsqrt".split()),
                           *(f"{f}({s}, {s}1, {s}2)" for f in ("__hfma", "__hfma_sat", "__hfma_relu")), f"__float2{name}_rz(f)",
                           *(f"{c_type}({value})" for value in ("f", "d", "i", "u", "l", "p", "short(i)", "(unsigned short)u")))  # fmt: skip
        pairs = "__hadd2 __hsub2 __hmul2 __h2div __hmax2 __hmin2 __hmax2_nan __hmin2_nan __hadd2_sat __hmul2_sat __heq2 __hlt2 __hle2 __hgt2 __hge2".split()
        found += functions(kind + "x2", *(f"{f}({S}, {S}1)" for f in pairs), f"__hneg2({S})", f"__habs2({S})", f"__floats2{name}2_rn(f, g)",
                           *(f"{f}({S}, {S}1, {S}2)" for f in ("__hfma2", "__hfma2_sat", "__hfma2_relu")))  # fmt: skip
        compared = (f"{f}({s}, {s}1)" for f in "__heq __hne __hlt __hle __hgt __hge".split())
        compared_pairs = (f"{f}({S}, {S}1)" for f in "__hbeq2 __hblt2 __hble2 __hbgt2 __hbge2".split())
        found += functions(
            "s32",
            *(
                f"int({e})"
                for e in (*compared, *compared_pairs, f"{S} == {S}1", f"{S} != {S}1", f"{s} != {s}1", f"{s} < {s}1")
            ),
        )
        found += functions("s32", f"__{name}2int_rn({s})", f"__{name}2int_rz({s})", f"__hisinf({s})")
    return found


def words() -> list[torch.Tensor]:
    """x, y and z: where the formats end, beside random numbers."""
    drawn = random.Random(5)
    floats = [
        *range(3),
        0x3F000000,
        0x3F7FFFFF,
        0x3F800000,
        0x3F801000,
        0x3F803000,
        0x3F808000,
        0x3F818000,
        0x40200000,
        0x4B000001,
        0x4EFFFFFF,
    ]
    floats += [
        0x4F000000,
        0x4F7FFFFF,
        0x4F800000,
        0x5F000000,
        0x5F7FFFFF,
        0x5F800000,
        0x33000000,
        0x33000001,
        0x387FE000,
        0x387FFFFF,
        0x38800000,
    ]
    floats += [
        0x477FE000,
        0x477FEFFF,
        0x477FF000,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x7E800000,
        0x7E800001,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
    ]
    floats += [0x1F7FFFFF, 0x1F800000, 0x203504F3, 0x7F7F7FFF, 0x7F7F8000]
    halves = [
        0,
        1,
        0x3FF,
        0x400,
        0x3C00,
        0x3C01,
        0x7BFF,
        0x7C00,
        0x7C01,
        0x7E00,
        0x7FFF,
        0x3555,
        0x7F,
        0x80,
        0x7F7F,
        0x7F80,
        0x7FC0,
        0x3F80,
        0x3F81,
    ]
    values = [
        1 + 2**-24,
        1 + 2**-24 + 2**-52,
        1 + 2**-25,
        0.5,
        1.5,
        2.5,
        65519.99999,
        65520,
        127.5,
        255.5,
        32767.5,
        65535.5,
        2**31 - 0.5,
        2**31,
    ]
    values += [
        2**32 - 0.5,
        2**63,
        2**63 - 1024,
        2**64,
        2**64 - 2048,
        1e30,
        2**-25,
        2**-25 + 2**-50,
        2**-149,
        2**-150,
        2**-126,
        2**-126 - 2**-150,
    ]
    doubles = [
        0,
        1,
        0xFFFFFFFFFFFFF,
        0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0x7FF0000000000001,
        *(double(v) for v in (*values, 2**128 - 2**103)),
    ]
    integers = [
        *range(4),
        31,
        32,
        33,
        63,
        64,
        127,
        128,
        255,
        256,
        *(2**n + d for n in (15, 16, 24, 31, 32, 53, 63) for d in (-1, 0, 1)),
        2**64 - 1,
    ]
    kinds = [
        [v | side for v in some for side in (0, 1 << top)] for some, top in ((floats, 31), (halves, 15), (doubles, 63))
    ] + [integers]

    def word() -> int:
        choice = drawn.randrange(6)
        if choice < 4:
            value = drawn.choice(kinds[choice])
            return value | (drawn.choice(kinds[1]) << 16) % 2**32 if choice == 1 else value
        return drawn.getrandbits(64) if choice == 4 else double(drawn.gauss(0, 1) * 2.0 ** drawn.randrange(-30, 40))

    triples = [tuple(drawn.choice(kind) for _ in range(3)) for kind in kinds for _ in range(COUNT // 8)]
    triples += [(word(), word(), word()) for _ in range(COUNT - len(triples))]
    return [torch.tensor([w - (w >> 63 << 64) for w in column]) for column in zip(*triples, strict=True)]


def double(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def canonical(bits: torch.Tensor, kind: str) -> torch.Tensor:
    """Of a result's 64 bits those that count, every NaN the same one."""
    if kind.endswith("x2"):
        low, high = (canonical(part, kind[:-2]) for part in (bits, bits >> 16))
        return low | high << 16
    size = int(kind.removeprefix("b").removeprefix("f").strip("us"))
    bits = bits & ((1 << size) - 1) if 8 < size < 64 else bits
    infinity = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}.get(kind)
    if infinity is None:
        return bits
    magnitude = (1 << (size - 1)) - 1
    return torch.where(bits & magnitude > infinity, magnitude, bits)


@pytest.mark.parametrize(
    "kind", [of_integers, of_reals, of_conversions, of_comparisons, of_functions], ids=lambda f: f.__name__
)
def test_the_emulator_computes_the_gpus_bits(kind):
    found = kind()
    parts = [found[i : i + 25] for i in range(0, len(found), 25)]
    bodies = [
        VARIABLES + "\n".join(code.replace("AT", f"{n} * count") for n, (_, _, code) in enumerate(part))
        for part in parts
    ]
    source = programs([(body, f"{COUNT // 256}, 256") for body in bodies])
    source = source.replace("#include <cuda_bf16.h>\n", f"#include <cuda_bf16.h>\n{CASTS}", 1)
    columns = words()
    outputs = {}
    for device in ("cpu", "cuda"):
        launcher, given = build(source, device), [column.to(device) for column in columns]
        for number, part in enumerate(parts):
            out = torch.zeros(len(part) * COUNT, dtype=torch.int64, device=device)
            launcher.launch(call(out, number, Q=given[0], K=given[1], V=given[2]))
            outputs[device, number] = out.view(len(part), COUNT).cpu()
    wrong = {}
    for number, part in enumerate(parts):
        for (name, result, _), ours, real in zip(part, outputs["cpu", number], outputs["cuda", number], strict=True):
            differ = canonical(ours, result) != canonical(real, result)
            if differ.any():
                at = int(differ.nonzero()[0])
                wrong[name] = f"{int(differ.sum())} of {COUNT}: of " + ", ".join(f"{int(c[at]) % 2**64:#x}" for c in columns) + (
                    f" the emulator has {int(ours[at]) % 2**64:#x}, the GPU {int(real[at]) % 2**64:#x}"
                )  # fmt: skip
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())
