"""Kernels of a few lines whose warp requests were counted by hand: what a trace, and a GPU's counters, have to give.

All are one `.cu`, `source()`, which both back ends take: `kernel(q, k, v, scale=i)` launches the i-th of `MICROS`,
whose `__global__` function is called `micro_<name>`; `inputs()` are the q, k, v. A body sees `t` (threadIdx.x), `in` and
`more` (Q and K as float), `out` (O as float), `x` (a float that is stored at the end) and `a` (fa_args); a line that
ends in `// 1` is what the counts with mark 1 are of.

Of a count: cost and ideal are wavefronts (shared) or 32-byte sectors (global), bytes those that all lanes ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, COLUMNS = 2048, 16  # of Q, K, V and O, fp32: 128 KB each

PRELUDE = """#include <cuda_fp16.h>
#include <fa/args.cuh>
#include <fa/sm80.cuh>

// Something in every word of a shared array, and a reader for what is stored, so that no store is for nothing.
#define FILL(s)                                                                                                        \\
  for (int i = threadIdx.x; i < int(sizeof(s)) / 4; i += 32) reinterpret_cast<float *>(s)[i] = float(i);               \\
  __syncthreads()
#define KEEP(s)                                                                                                        \\
  __syncthreads();                                                                                                     \\
  if (a.Nk == -1) x = reinterpret_cast<const volatile float *>(s)[t]

struct float_triple {
  float x, y, z;
};
struct two_vectors {
  float4 x, y;
};
__device__ __forceinline__ float sum(float2 v) { return v.x + v.y; }
__device__ __forceinline__ float sum(float4 v) { return v.x + v.y + v.z + v.w; }
"""


@dataclass(frozen=True)
class Count:
    mark: int
    op: str
    space: str
    width: int
    requests: int
    cost: int
    ideal: int
    bytes: int
    target: str = ""  # empty: any


@dataclass(frozen=True)
class Micro:
    name: str
    body: str
    counts: tuple[Count, ...]
    shape: str = "1, 32"
    before: str = ""
    gpu: bool = True  # the same instructions are to be expected of nvcc


def _shared(
    width: int, cost: int, ideal: int, requests: int = 1, lanes: int = 0, op: str = "load", mark: int = 1
) -> Count:
    return Count(mark, op, "shared", width, requests, cost, ideal, (lanes or 32 * requests) * width)


def _global(width: int, cost: int, ideal: int, lanes: int = 32, op: str = "load", mark: int = 1, to: str = "") -> Count:
    return Count(mark, op, "global", width, 1, cost, ideal, lanes * width, to)


SIZE = 8192  # bytes of the shared arrays of _load and _store


def _load(name: str, index: str, cost: int, ideal: int = 1, kind: str = "float", lanes: int = 32) -> Micro:
    """One load of a shared array of SIZE bytes by the lanes for which `index` is given: "if (…) index" leaves some out."""
    width = {"float": 4, "float2": 8, "float4": 16, "unsigned char": 1, "unsigned short": 2}[kind]
    condition, _, place = index.rpartition(" : ")
    value = "float(s[{}])" if width <= 4 else "sum(s[{}])"
    body = f"__shared__ __align__(1024) {kind} s[{SIZE // width}];\nFILL(s);\n"
    if width > 4 and not condition:  # a load straight into an inlined call's parameter has no line of its own in g++
        body += f"const {kind} v = s[{place}]; // 1\nx = sum(v);"
    else:
        body += f"{condition and f'if ({condition}) '}x = {value.format(place)}; // 1"
    return Micro(name, body, (_shared(width, cost, ideal, lanes=lanes),))


def _store(name: str, index: str, cost: int, ideal: int = 1, kind: str = "float", lanes: int = 32) -> Micro:
    width = {"float": 4, "float2": 8, "float4": 16, "unsigned short": 2}[kind]
    value = {"float": "in[0]", "float2": "make_float2(in[0], 1)", "float4": "make_float4(in[0], 1, 2, 3)"}
    condition, _, place = index.rpartition(" : ")
    body = f"__shared__ __align__(1024) {kind} s[{SIZE // width}];\nconst auto v = {value.get(kind, 'a.H')};\n"
    body += f"{condition and f'if ({condition}) '}s[{place}] = v; // 1\nKEEP(s);"
    return Micro(name, body, (_shared(width, cost, ideal, lanes=lanes, op="store"),))


def _matrix(name: str, row: str, cost: int, matrices: int = 4, trans: str = "") -> Micro:
    """ldmatrix, with `row` the half at which the row begins whose address lane t gives."""
    body = f"""__shared__ __align__(1024) __half s[4096];
    FILL(s);
    uint32_t r[{matrices}];
    fa::ldmatrix_x{matrices}{trans}(r, s + {row}); // 1
    for (int i = 0; i < {matrices}; ++i) x += float(r[i]);"""
    return Micro(name, body, (_shared(16, cost, matrices, lanes=8 * matrices, op="ldmatrix"),))


def _copy(
    name: str, width: int, to: str, cost: int, sectors: int, ideal: int, read: int = -1, bytes_read: str = "", lanes=32
) -> Micro:
    """cp.async of `width` bytes a lane from K, in order, to byte `to` of shared memory. `read`: bytes asked of K."""
    from_lane = f"reinterpret_cast<const char *>(more) + {width} * t"
    source = f', "r"({bytes_read})' if bytes_read else ""
    body = f"""__shared__ __align__(1024) unsigned char s[8192];
    asm volatile("cp.async.ca.shared.global [%0], [%1], {width}{", %2" if source else ""};" ::"r"(fa::smem_address(s + {to})), "l"({from_lane}){source} : "memory"); // 1
    fa::cp_async_commit();
    fa::cp_async_wait<0>();
    KEEP(s);"""
    ideal_store = {4: 1, 8: 2, 16: 4}[width]
    counts = [Count(1, "cp.async", "shared", width, 1, cost, ideal_store, 32 * width)]
    if read != 0:
        each = width if read < 0 else read // lanes
        counts.append(Count(1, "load", "global", each, 1, sectors, ideal, read if read > 0 else 32 * width, "K"))
    return Micro(name, body, tuple(counts))


MICROS: tuple[Micro, ...] = (
    # ---- loads of 4 bytes from shared memory
    _load("contiguous", "t", 1),
    _load("stride_2", "2 * t", 2),
    _load("stride_3", "3 * t", 1),
    _load("stride_4", "4 * t", 4),
    _load("stride_8", "8 * t", 8),
    _load("stride_16", "16 * t", 16),
    _load("stride_32", "32 * t", 32),  # a column of 32: every lane in one bank
    _load("stride_33", "33 * t", 1),  # the same, padded by a word
    _load("stride_31", "31 * t", 1),
    _load("stride_34", "34 * t", 2),
    _load("broadcast", "5 + a.B", 1),
    _load("two_words_of_a_bank", "t % 2 * 32", 2),
    _load("two_words_of_two_banks", "t % 2", 1),
    _load("four_words_of_a_bank", "t % 4 * 32", 4),
    _load("sixteen_words_of_a_bank", "t / 2 * 32", 16),
    _load("off_by_one_word", "t + 1", 1),  # two rows of the banks, each bank once
    _load("backwards", "31 - t", 1),
    _load("permuted", "t * 5 % 32", 1),
    _load("xor_swizzle", "t * 32 + (t ^ a.B)", 1),  # a column again: the word t ^ 1 of row t
    _load("half_a_warp_stride_2", "t < 16 : 2 * t", 1, lanes=16),
    _load("every_fourth_lane", "t % 4 == 0 : 8 * t", 8, lanes=8),  # words 0, 32, … 224
    _load("one_lane", "t == 17 : 3 * t", 1, lanes=1),
    _load("upper_half", "t >= 16 : 32 * t", 16, lanes=16),
    # ---- of 1 and 2 bytes: a word is a word
    _load("bytes", "t", 1, kind="unsigned char"),
    _load("bytes_stride_4", "4 * t", 1, kind="unsigned char"),
    _load("bytes_stride_8", "8 * t", 2, kind="unsigned char"),
    _load("bytes_stride_128", "128 * t", 32, kind="unsigned char"),
    _load("halves", "t", 1, kind="unsigned short"),
    _load("halves_stride_2", "2 * t", 1, kind="unsigned short"),
    _load("halves_column", "64 * t", 32, kind="unsigned short"),
    _load("halves_column_padded_by_2", "66 * t", 1, kind="unsigned short"),
    _load("halves_column_padded_by_1", "65 * t", 2, kind="unsigned short"),  # 32.5 words: lanes 2 k and 2 k + 1 share a bank
    # ---- of 8 bytes: half a warp at a time, both halves together if lanes pair up
    _load("float2", "t", 2, 2, "float2"),
    _load("float2_stride_2", "2 * t", 4, 2, "float2"),
    _load("float2_column", "16 * t", 32, 2, "float2"),
    _load("float2_column_padded", "33 * t % 512", 2, 2, "float2"),
    _load("float2_broadcast", "a.B", 1, 1, "float2"),
    _load("float2_pairs", "t / 2", 1, 1, "float2"),
    _load("float2_pairs_of_2", "t % 2 + t / 4 * 2", 1, 1, "float2"),  # lanes l and l ^ 2
    _load("float2_pairs_of_4", "t % 4 + t / 8 * 4", 2, 2, "float2"),  # l and l ^ 4: stays two halves
    _load("float2_pairs_in_one_bank", "t / 2 * 16", 16, 1, "float2"),
    _load("float2_half_a_warp", "t < 16 : t", 1, 1, "float2", lanes=16),
    _load("float2_a_quarter_on_each_side", "t % 16 < 8 : t", 2, 2, "float2", lanes=16),
    _load("float2_even_lanes", "t % 2 == 0 : t / 2", 1, 1, "float2", lanes=16),  # the odd neighbours take no part
    # ---- of 16 bytes: a quarter at a time, the quarters of a half together if lanes pair up
    _load("float4", "t", 4, 4, "float4"),
    _load("float4_stride_2", "2 * t", 8, 4, "float4"),
    _load("float4_column", "8 * t % 512", 32, 4, "float4"),
    _load("float4_column_padded", "9 * t", 4, 4, "float4"),
    _load("float4_broadcast", "a.B", 2, 2, "float4"),
    _load("float4_pairs", "t / 2", 2, 2, "float4"),
    _load("float4_pairs_of_2", "t % 2 + t / 4 * 2", 2, 2, "float4"),
    _load("float4_pairs_of_4", "t % 4 + t / 8 * 4", 4, 4, "float4"),
    _load("float4_tile", "t % 8 * 8 + t / 8", 32, 4, "float4"),  # rows of 128 bytes, one chunk of eight rows a quarter
    _load("float4_tile_swizzled", "t % 8 * 8 + (t / 8 ^ t % 8)", 4, 4, "float4"),
    _load("float4_eight_lanes", "t < 8 : t", 1, 1, "float4", lanes=8),
    _load("float4_four_rows", "t % 4", 4, 4, "float4"),
    _load("float4_rows_then_columns", "t / 4", 2, 2, "float4"),
    # ---- stores: nothing goes together
    _store("store", "t", 1),
    _store("store_stride_2", "2 * t", 2),
    _store("store_column", "32 * t", 32),
    _store("store_column_padded", "33 * t", 1),
    _store("store_all_to_one_word", "a.B", 1),
    _store("store_half_a_warp", "t < 16 : t", 1, lanes=16),
    _store("store_halves", "t", 1, kind="unsigned short"),
    _store("store_halves_column", "64 * t", 32, kind="unsigned short"),
    _store("store_float2", "t", 2, 2, "float2"),
    _store("store_float2_pairs", "t / 2", 2, 2, "float2"),
    _store("store_float2_column", "16 * t", 32, 2, "float2"),
    _store("store_float4", "t", 4, 4, "float4"),
    _store("store_float4_pairs", "t / 2", 4, 4, "float4"),
    _store("store_float4_column", "8 * t", 32, 4, "float4"),
    _store("store_float4_column_padded", "9 * t", 4, 4, "float4"),
    _store("store_float4_tile_swizzled", "t % 8 * 8 + (t / 8 ^ t % 8)", 4, 4, "float4"),
    # ---- objects that no instruction moves at once
    Micro(
        "triple", "__shared__ float_triple s[256];\nFILL(s);\nconst float_triple v = s[t]; // 1\nx = v.x + v.y + v.z;",
        (_shared(4, 3, 3, requests=3),),  # words 3 t, 3 t + 1, 3 t + 2
        gpu=False,
    ),
    Micro(
        "two_vectors", "__shared__ __align__(16) two_vectors s[64];\nFILL(s);\nconst two_vectors v = s[t]; // 1\nx = sum(v.x) + sum(v.y);",
        (_shared(16, 16, 8, requests=2),),  # every other 16 bytes: two lanes to a bank in each quarter
        gpu=False,
    ),
    Micro(
        "copied_by_memcpy", "__shared__ __align__(16) float s[512];\nFILL(s);\nfloat4 v;\nmemcpy(&v, s + 4 * t, 16); // 1\nx = sum(v);",
        (_shared(16, 4, 4),),
        gpu=False,
    ),
    # ---- lanes that part
    Micro(
        "two_branches", """__shared__ float s[64], z[64];
        FILL(s); FILL(z);
        if (t % 2 == 0) {
          x = s[t]; // 1
          out[64 + t] = x;
        } else {
          x = z[2 * t]; // 2
          out[128 + t] = x;
        }""",
        (_shared(4, 1, 1, lanes=16), _shared(4, 2, 1, lanes=16, mark=2)),  # 2: words 2, 6, … 62: eight banks, twice
    ),
    Micro(
        "together_again", """__shared__ float s[64], z[64];
        FILL(s); FILL(z);
        if (t < 7) {
          x = s[t]; // 1
          out[64 + t] = x;
        }
        x += z[t]; // 2""",
        (_shared(4, 1, 1, lanes=7), _shared(4, 1, 1, mark=2)),
    ),
    Micro(
        "trips_by_lane", "__shared__ float s[256];\nFILL(s);\nfor (int i = 0; i <= t % 4; ++i) x += s[32 * i + t]; // 1",
        (_shared(4, 4, 4, requests=4, lanes=32 + 24 + 16 + 8),),
    ),  # nvcc unrolls this loop by four: lanes with four trips take other loads than the rest, 7 instead of 4
    Micro(
        "strided_loop", "__shared__ float s[256];\nFILL(s);\nfor (int i = t; i < a.Nk / 32 + 6; i += 32) x += s[i]; // 1",
        (_shared(4, 3, 3, requests=3, lanes=70),),  # 2048 / 32 + 6 = 70
    ),
    Micro(
        "leaving_a_loop", """__shared__ float s[64];
        FILL(s);
        for (int i = 0;; ++i) {
          x += s[t + i]; // 1
          if (i == t / 16) break;
        }
        out[64 + t] = x; // 2""",
        (_shared(4, 2, 2, requests=2, lanes=48), _global(4, 4, 4, op="store", mark=2)),
    ),
    Micro(
        "every_other_turn", """__shared__ float s[256];
        FILL(s);
        for (int i = 0; i < a.H * 4; ++i) {
          if ((i + t) % 2) continue;
          x += s[32 * i + t]; // 1
        }""",
        (_shared(4, 4, 4, requests=4, lanes=64),),
    ),
    Micro(
        "nested_branches", """__shared__ float s[64];
        FILL(s);
        if (t < 20) {
          if (t >= 4) {
            x = s[t]; // 1
            out[64 + t] = x;
          }
          x += s[2 * t]; // 2
          out[128 + t] = x;
        }""",
        (_shared(4, 1, 1, lanes=16), _shared(4, 2, 1, lanes=20, mark=2)),  # 2: words 0 … 38: banks 0 to 6 twice
    ),
    Micro(
        "early_return", "__shared__ float s[64];\nFILL(s);\nif (t >= 20) return;\nx = s[t]; // 1",
        (_shared(4, 1, 1, lanes=20),),
    ),
    # ---- loops and calls
    Micro(
        "loop", "__shared__ float s[512];\nFILL(s);\nfor (int i = 0; i < a.H * 10; ++i) x += s[32 * i + t]; // 1",
        (_shared(4, 10, 10, requests=10),),
    ),
    Micro(
        "unrolled_loop", "__shared__ float s[512];\nFILL(s);\n#pragma unroll\nfor (int i = 0; i < 6; ++i) x += s[64 * i + 2 * t]; // 1",
        (_shared(4, 12, 6, requests=6),),
    ),
    Micro(
        "partly_unrolled_loop",
        "__shared__ float s[512];\nFILL(s);\n#pragma unroll 4\nfor (int i = 0; i < a.H * 10; ++i) x += s[32 * i + t]; // 1",
        (_shared(4, 10, 10, requests=10),),
    ),
    Micro(
        "loop_in_a_loop",
        "__shared__ float s[512];\nFILL(s);\nfor (int i = 0; i < a.H * 3; ++i)\nfor (int j = 0; j <= i; ++j) x += s[32 * j + 4 * t]; // 1",
        (_shared(4, 24, 6, requests=6),),
    ),
    Micro(
        "inlined_call", "__shared__ float s[64];\nFILL(s);\nx = inlined(s, t) + inlined(s, t + 7);",
        (_shared(4, 2, 2, requests=2),),
        before="__device__ __forceinline__ float inlined(const float *s, int i) {\n  return s[i]; // 1\n}",
    ),
    Micro(
        "call", "__shared__ float s[64];\nFILL(s);\nx = called(s, 2 * t);\nx += s[t]; // 2",
        (_shared(4, 2, 1), _shared(4, 1, 1, mark=2)),
        before="__device__ __noinline__ float called(const float *s, int i) {\n  return s[i]; // 1\n}",
    ),
    Micro(
        "call_from_two_branches", """__shared__ float s[64];
        FILL(s);
        if (t < 16) {
          x = branched(s, t);
          out[64 + t] = x;
        } else {
          x = branched(s, t + 32);
          out[128 + t] = x;
        }
        x += s[t]; // 2""",
        (_shared(4, 2, 2, requests=2, lanes=32), _shared(4, 1, 1, mark=2)),  # each branch makes its own call
        before="__device__ __noinline__ float branched(const float *s, int i) {\n  return s[i]; // 1\n}",
    ),
    Micro(
        "call_with_a_branch", """__shared__ float s[128];
        FILL(s);
        x = parting(s, t); x += s[t]; // 3""",
        (_shared(4, 1, 1, lanes=8), _shared(4, 1, 1, lanes=24, mark=2), _shared(4, 1, 1, mark=3)),
        before="""__device__ __noinline__ float parting(const float *s, int i) {
          if (i < 8) {
            return s[i]; // 1
          }
          float y = 2 * s[i + 32]; // 2
          return y;
        }""",
    ),
    Micro(
        "recursion", "__shared__ float s[256];\nFILL(s);\nx = deeper(s, t, t % 4);",
        (_shared(4, 4, 4, requests=4, lanes=32 + 24 + 16 + 8),),
        before="""__device__ __noinline__ float deeper(const float *s, int t, int n) {
          const float y = s[32 * n + t]; // 1
          return n == 0 ? y : y + deeper(s, t, n - 1);
        }""",
        gpu=False,  # lanes 3, 7, … call once more than others: which of their loads are one request is the hardware's
    ),
    Micro(
        "lambda", "__shared__ float s[64];\nFILL(s);\nconst auto get = [&](int i) {\n  return s[2 * i]; // 1\n};\nx = get(t) + get(t % 16);",
        (_shared(4, 3, 2, requests=2),),
    ),
    Micro(
        "template", "__shared__ float s[256];\nFILL(s);\nx = strided<1>(s, t) + strided<4>(s, t);",
        (_shared(4, 5, 2, requests=2),),
        before="template <int n> __device__ float strided(const float *s, int i) {\n  return s[n * i]; // 1\n}",
    ),
    # ---- blocks of other shapes
    Micro(
        "forty_threads", "__shared__ float s[64];\nFILL(s);\nx = s[t]; // 1", (_shared(4, 2, 2, requests=2, lanes=40),), shape="1, 40"
    ),
    Micro(
        "two_dimensions", """__shared__ float s[64];
        if (threadIdx.y == 0) { for (int i = threadIdx.x; i < 64; i += 8) s[i] = i; }
        __syncthreads();
        x = s[threadIdx.y * 8 + threadIdx.x]; // 1
        x += s[threadIdx.x * 8 + threadIdx.y]; // 2""",
        (_shared(4, 2, 2, requests=2), _shared(4, 4, 2, requests=2, mark=2)),  # 2: words 8 x + y of 4 rows y: x and x + 4
        shape="1, dim3(8, 8)",
    ),
    Micro(
        "five_blocks", "__shared__ float s[64];\nFILL(s);\nx = s[2 * t]; // 1", (_shared(4, 10, 5, requests=5),), shape="5, 32"
    ),
    Micro(
        "around_a_shuffle", """__shared__ float s[64];
        FILL(s);
        x = s[t]; // 1
        x = __shfl_xor_sync(0xffffffffu, x, 1);
        x += s[2 * t]; // 2""",
        (_shared(4, 1, 1), _shared(4, 2, 1, mark=2)),
    ),
    Micro(
        "half_warps_that_sync", """__shared__ float s[128];
        FILL(s);
        if (t < 16) {
          x = s[t]; // 1
          __syncwarp(0xffffu);
          x += s[4 * t]; // 2
          out[64 + t] = x;
        } else {
          x = s[t + 64]; // 3
          __syncwarp(0xffff0000u);
          out[128 + t] = x;
        }
        x += s[t]; // 4""",
        (
            _shared(4, 1, 1, lanes=16), _shared(4, 2, 1, lanes=16, mark=2),
            _shared(4, 1, 1, lanes=16, mark=3), _shared(4, 1, 1, mark=4),
        ),
    ),
    Micro(
        "barrier_in_a_loop", """__shared__ float s[64];
        FILL(s);
        for (int i = 0; i < a.H * 3; ++i) {
          s[t] = x; // 1
          __syncthreads();
          x += s[(2 * t + i) % 64]; // 2
          __syncthreads();
          s[t + 32] = x; // 3
          __syncthreads();
        }""",
        (
            _shared(4, 3, 3, requests=3, op="store"), _shared(4, 6, 3, requests=3, mark=2),
            _shared(4, 3, 3, requests=3, op="store", mark=3),
        ),
    ),
    # ---- global memory: sectors of 32 bytes
    Micro("global", "x = in[t]; // 1", (_global(4, 4, 4, to="Q"),)),
    Micro("global_stride_2", "x = in[2 * t]; // 1", (_global(4, 8, 4),)),
    Micro("global_stride_8", "x = in[8 * t]; // 1", (_global(4, 32, 4),)),
    Micro("global_column", "x = in[64 * t]; // 1", (_global(4, 32, 4),)),
    Micro("global_broadcast", "x = in[a.B]; // 1", (_global(4, 1, 1),)),
    Micro("global_off_by_one", "x = in[t + 1]; // 1", (_global(4, 5, 4),)),
    Micro("global_two_rows", "x = in[t / 16 * 64 + t % 16]; // 1", (_global(4, 4, 4),)),
    Micro("global_pairs", "x = in[t / 2]; // 1", (_global(4, 2, 2),)),
    Micro("global_backwards", "x = in[31 - t]; // 1", (_global(4, 4, 4),)),
    Micro("global_eight_lanes", "if (t < 8) x = in[t]; // 1", (_global(4, 1, 1, lanes=8),)),
    Micro("global_eight_lanes_apart", "if (t % 4 == 0) x = in[2 * t]; // 1", (_global(4, 8, 1, lanes=8),)),
    Micro("global_bytes", "x = reinterpret_cast<const unsigned char *>(in)[t]; // 1", (_global(1, 1, 1),)),
    Micro("global_halves", "x = reinterpret_cast<const unsigned short *>(in)[t]; // 1", (_global(2, 2, 2),)),
    Micro("global_float2", "const float2 v = reinterpret_cast<const float2 *>(in)[t]; // 1\nx = sum(v);", (_global(8, 8, 8),)),
    Micro("global_float4", "const float4 v = reinterpret_cast<const float4 *>(in)[t]; // 1\nx = sum(v);", (_global(16, 16, 16),)),
    Micro("global_float4_stride_2", "const float4 v = reinterpret_cast<const float4 *>(in)[2 * t]; // 1\nx = sum(v);", (_global(16, 32, 16),)),
    Micro("global_through_the_read_only_cache", "x = __ldg(in + t); // 1", (_global(4, 4, 4),)),
    Micro("global_two_tensors", "const float *p = t < 16 ? in : more;\nx = p[t]; // 1",
          (_global(4, 2, 2, lanes=16, to="Q"), _global(4, 2, 2, lanes=16, to="K")), gpu=False),  # one instruction, two tensors
    Micro("global_store", "out[64 + t] = in[0]; // 1",
          (_global(4, 4, 4, op="store", to="O"), _global(4, 1, 1, to="Q"))),
    Micro("global_store_stride_2", "const float v = in[0];\nout[64 + 2 * t] = v; // 1", (_global(4, 8, 4, op="store"),)),
    Micro("global_store_float4", "const float v = in[0];\nreinterpret_cast<float4 *>(out)[64 + t] = make_float4(v, v, v, v); // 1",
          (_global(16, 16, 16, op="store"),)),
    # ---- atomics: lanes of one word, or of one bank, take turns
    Micro("atomic", "__shared__ int s[64];\nFILL(s);\natomicAdd(s + t, 1 + t); // 1\nKEEP(s);", (_shared(4, 1, 1, op="atomic"),)),
    Micro("atomic_one_word", "__shared__ int s[64];\nFILL(s);\natomicAdd(s + a.B, 1 + t); // 1\nKEEP(s);", (_shared(4, 32, 1, op="atomic"),)),
    # (of that one nvcc sees that all lanes have one address: it adds them up first, and one lane does the atomic)
    Micro("atomic_two_words", "__shared__ int s[64];\nFILL(s);\natomicMax(s + t % 2, 1 + t); // 1\nKEEP(s);", (_shared(4, 16, 1, op="atomic"),)),
    Micro("atomic_stride_4", "__shared__ int s[128];\nFILL(s);\natomicAdd(s + 4 * t, 1 + t); // 1\nKEEP(s);", (_shared(4, 4, 1, op="atomic"),)),
    Micro("atomic_global", "out[64 + t] = 0;\n__syncthreads();\natomicAdd(reinterpret_cast<int *>(out) + 64 + t, 1 + t); // 1", (_global(4, 4, 4, op="atomic"),)),
    Micro("atomic_global_one_word", "out[64] = 0;\n__syncthreads();\natomicAdd(reinterpret_cast<int *>(out) + 64, 1 + t); // 1", (_global(4, 1, 1, op="atomic"),)),
    # ---- ldmatrix: eight rows of 16 bytes a phase
    _matrix("ldmatrix_rows_of_128_bytes", "t % 16 * 64 + t / 16 * 8", 32),
    _matrix("ldmatrix_padded", "t % 16 * 72 + t / 16 * 8", 4),
    _matrix("ldmatrix_swizzled", "t % 16 * 64 + (t / 16 ^ t % 8) * 8", 4),
    _matrix("ldmatrix_rows_of_64_bytes", "t % 16 * 32 + t / 16 * 8", 16),  # two rows a line: four to a bank
    _matrix("ldmatrix_rows_of_32_bytes", "t % 16 * 16 + t / 16 * 8", 8),
    _matrix("ldmatrix_rows_of_16_bytes", "t * 8", 4),
    _matrix("ldmatrix_one_row", "0", 4),
    _matrix("ldmatrix_trans", "t % 16 * 64 + t / 16 * 8", 32, trans="_trans"),
    _matrix("ldmatrix_trans_padded", "t % 16 * 72 + t / 16 * 8", 4, trans="_trans"),
    _matrix("ldmatrix_x2", "t % 16 * 64", 16, 2),  # the addresses of lanes 16 to 31 are not looked at
    _matrix("ldmatrix_x2_padded", "t % 16 * 72", 2, 2),
    _matrix("ldmatrix_x2_trans", "t % 16 * 64", 16, 2, "_trans"),
    _matrix("ldmatrix_x1", "t % 8 * 64", 8, 1),
    _matrix("ldmatrix_x1_padded", "t % 8 * 72", 1, 1),
    # ---- cp.async: sectors of its source, wavefronts of its store
    _copy("copy_4", 4, "4 * t", 1, 4, 4),
    _copy("copy_4_stride_2", 4, "8 * t", 2, 4, 4),
    _copy("copy_8", 8, "8 * t", 2, 8, 8),
    _copy("copy_8_column", 8, "128 * t", 32, 8, 8),
    _copy("copy_16", 16, "16 * t", 4, 16, 16),
    _copy("copy_16_column", 16, "128 * t", 32, 16, 16),
    _copy("copy_16_padded", 16, "144 * t", 4, 16, 16),
    _copy("copy_16_swizzled", 16, "(t % 8 * 128 + (t / 8 ^ t % 8) * 16)", 4, 16, 16),
    _copy("copy_16_of_some_lanes", 16, "16 * t", 5, 6, 6, read=12 * 16, bytes_read="t < 12 ? 16 : 0", lanes=12),
    _copy("copy_16_half_of_it_zeros", 16, "16 * t", 4, 32 // 2, 8, read=32 * 8, bytes_read="a.H * 8"),
    _copy("copy_16_all_zeros", 16, "16 * t", 4, 0, 0, read=0, bytes_read="a.H - 1"),
    # ---- what is no request
    Micro(
        "local_array", "float y[8];\nfor (int i = 0; i < 8; ++i) y[i] = in[i];\nfor (int i = 0; i < a.H * 8; ++i) x += y[(t + i) % 8]; // 1", (),
        gpu=False,
    ),
    Micro("parameters", "x = a.scale + float(a.Q_stride[a.H]); // 1", (), gpu=False),
)  # fmt: skip


def source() -> str:
    """The text of the `.cu` with all of them."""
    kernels = []
    for micro in MICROS:
        kernels.append(f"""{micro.before}
__global__ void micro_{micro.name}(const fa_args a) {{
  [[maybe_unused]] const int t = threadIdx.x;
  [[maybe_unused]] const float *in = static_cast<const float *>(a.Q), *more = static_cast<const float *>(a.K);
  [[maybe_unused]] float *out = static_cast<float *>(a.O);
  float x = 0.f;
  {micro.body}
  out[threadIdx.y * blockDim.x + t] = x;
}}""")
    launches = "\n".join(
        f"  case {i}: micro_{m.name}<<<{m.shape}, 0, stream>>>(*a); break;" for i, m in enumerate(MICROS)
    )
    return f"""{PRELUDE}
{chr(10).join(kernels)}

extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {{
  switch (int(a->scale)) {{
{launches}
  default: return cudaErrorInvalidValue;
  }}
  return cudaGetLastError();
}}
"""


def inputs():
    """q, k and v: (1, 1, ROWS, COLUMNS), fp32."""
    import torch

    q = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(1, 1, ROWS, COLUMNS) % 97
    return q, q + 1, q + 2
