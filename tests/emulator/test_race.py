"""Races and their kin: what a trace finds without stopping the kernel, and what it must leave alone."""

import re
from functools import cache

import pytest
import torch
from emulated import build, program
from test_trace import trace

from helpers.emulator import Launcher
from helpers.emulator.trace import Trace
from helpers.ladder.contract import Call, FaArgs

RIGHT = {
    "a barrier between": "__shared__ float s[64]; s[t] = t; __syncthreads(); x = s[63 - t]; __syncthreads(); s[t] = x;",
    "nothing shared": "__shared__ float s[64]; s[t] = t; x = s[t]; s[t] = x + 1;",
    "only reads": "__shared__ float s[64]; s[t] = t; __syncthreads(); x = s[63 - t] + s[0];",
    "a warp's own part": "__shared__ float s[64]; s[t] = t; __syncwarp(); x = s[t ^ 5]; __syncwarp(); s[t] = x;",
    "halves of a warp by themselves": """__shared__ float s[64]; s[t] = t;
      if (t % 32 < 16) { __syncwarp(0xffffu); x = s[t ^ 3]; } else { __syncwarp(0xffff0000u); x = s[t ^ 3]; }""",
    "one lane after the other": """__shared__ float s; const unsigned lane = t % 32;
      if (t < 32) {
        if (lane == 0) s = 1;
        if (lane < 2) __syncwarp(0x3u);
        if (lane == 1 || lane == 2) __syncwarp(0x6u);
        if (lane == 2) x = s;
      }""",
    "the same value": "__shared__ int s; s = 7; __syncthreads(); x = s;",
    "atomics": "__shared__ int s; if (t == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); __syncthreads(); x = s;",
    "bytes side by side": "__shared__ unsigned char s[64]; s[t] = t; __syncthreads(); x = s[63 - t];",
    "halves side by side": "__shared__ unsigned short s[64]; s[t] = t; __syncthreads(); x = s[63 - t];",
    "two buffers, one barrier": """__shared__ float s[2][64];
      for (int i = 0; i < 6; ++i) { s[i % 2][t] = t; __syncthreads(); x += s[i % 2][63 - t]; }""",
    "a counting barrier": "__shared__ float s[64]; s[t] = t; x = __syncthreads_count(t < 7); x += s[63 - t];",
    "a copy, its wait and a barrier": """__shared__ __align__(16) float s[64]; if (t < 16) fa::cp_async_16(s + 4 * t, in + 4 * t);
      fa::cp_async_commit(); fa::cp_async_wait<0>(); __syncthreads(); x = s[63 - t];""",
    "one's own copy, waited for": """__shared__ __align__(16) float s[256]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16));
      fa::cp_async_commit(); fa::cp_async_wait<0>(); x = s[4 * t + 1];""",
    "a barrier of the warps that share": "__shared__ float s[64]; s[t] = t; fa::bar_sync(1, 64); x = s[63 - t];",
    "an arrival and a wait": """__shared__ float s[64]; if (t < 32) { s[t] = t; fa::bar_arrive(1, 64); }
      else { fa::bar_sync(1, 64); x = s[63 - t]; }""",
    "an mbarrier, passed on by one lane": """__shared__ float s[64]; __shared__ uint64_t b; start(b, 32);
      if (t < 32) { s[t] = t; arrive(b); } else { if (t == 32) wait(b, 0); __syncwarp(); x = s[63 - t]; }""",
    "knowledge passed on": """__shared__ float s[32]; __shared__ uint64_t b[2]; start(b[0], 32); start(b[1], 1);
      if (t < 32) { s[t] = t; arrive(b[0]); if (t == 0) { wait(b[0], 0); arrive(b[1]); } } else { wait(b[1], 0); x = s[63 - t]; }""",
    "global memory, a barrier between": "more[t] = t; __syncthreads(); x = more[63 - t];",
    "global memory, an atomic": "atomicAdd(more, 1.0f); __syncthreads();",
    "blocks apart": "more[blockIdx.x * 64 + t] = t; __syncthreads(); x = more[blockIdx.x * 64 + 63 - t];",
    "blocks that write the same": "more[t] = 5;",
    "the last block looks at all": """__shared__ int last; more[blockIdx.x * 64 + t] = t; __threadfence(); __syncthreads();
      if (t == 0) last = atomicAdd(reinterpret_cast<int *>(more) + 512, 1) == 2;
      __syncthreads();
      if (last) for (int i = 0; i < 3; ++i) x += more[i * 64 + t];""",
    "an atomic as a flag": """FLAG(int) if (t < 32) { s[t] = t; __syncwarp(); if (t == 0) { __threadfence_block(); atomicExch(&flag, 1); } }
      else { if (t == 32) { while (atomicAdd(&flag, 0) == 0) {} __threadfence_block(); } __syncwarp(); x = s[63 - t]; }""",
    "a volatile flag": """FLAG(volatile int) if (t == 0) { s[0] = 7; __threadfence_block(); flag = 1; }
      if (t == 32) { while (flag == 0) {} __threadfence_block(); x = s[0]; }""",
    "release and acquire": """FLAG(int) s[t] = t; __syncwarp(); int seen;
      if (t % 32 == 0) asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(place(&flag)) : "memory");
      do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(place(&flag)) : "memory"); while (seen < 2); x = s[63 - t];""",
    "a store that releases": """FLAG(int) if (t == 0) { s[0] = 7; asm volatile("st.release.cta.shared.u32 [%0], 1;" ::"r"(place(&flag)) : "memory"); }
      if (t == 32) { int seen; do asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(place(&flag)) : "memory"); while (seen == 0);
        asm volatile("fence.acq_rel.cta;" ::: "memory"); x = s[0]; }""",
    "a lock": """FLAG(int) for (bool done = false; !done;) if (atomicCAS(&flag, 0, 1) == 0) {
        __threadfence_block(); s[0] += t; __threadfence_block(); atomicExch(&flag, 0); done = true; }""",
    "a flag between blocks": """int seen = blockIdx.x == 0; if (blockIdx.x == 0) more[t] = t; __syncthreads();
      if (t == 0 && blockIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(more + 99) : "memory");
      while (seen == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(more + 99) : "memory");
      x = more[63 - t];""",
    "atomics of 16 bits": "__shared__ __half s; if (t == 0) s = __half(0); __syncthreads(); atomicAdd(&s, __half(1)); __syncthreads(); x = float(s);",
    "blocks that write halves of one word": "if (blockIdx.x < 2) reinterpret_cast<__half *>(more)[2 * t + blockIdx.x] = __half(int(t));",
    "a sum over blocks that the last one clears": """__shared__ bool last; if (t == 0) last = atomicAdd(reinterpret_cast<int *>(more), 1) == 2;
      __syncthreads(); if (last && t == 0) more[0] = 0;""",
}  # fmt: skip

SYNCTHREADS, SYNCWARP = "a __syncthreads() has to stand between", "lanes of a warp need a __syncwarp()"
# name: (body, kind, words of the text, words of the hint); `// here` and `// there` are the finding's two lines.
WRONG = {
    "written, then read": (
        "__shared__ float K_smem[8][8]; K_smem[t / 8][t % 8] = t; // there\nx = K_smem[(63 - t) / 8][(63 - t) % 8]; // here",
        "race", r"thread \d+ of block 0 reads K_smem\[\d\]\[\d\], which thread \d+ writes on line \d+, and nothing", SYNCTHREADS,
    ),
    "read, then written": (
        "__shared__ float s[64]; s[t] = t; __syncthreads(); x = s[63 - t]; // there\ns[t] = x; // here",
        "race", r"thread \d+ of block 0 reads s\[\d+\], which thread \d+ writes on line", SYNCTHREADS,
    ),
    "written twice": (
        "__shared__ int s; s = t; // here there", "race", r"thread \d+ of block 0 writes s, which thread \d+ writes on line", SYNCTHREADS,
    ),
    "lanes of a warp": (
        "__shared__ float s[64]; s[t] = t; // there\nx = s[t ^ 1]; // here", "race", r"reads s\[\d+\], which thread", SYNCWARP,
    ),
    "a shuffle is no barrier": (
        "__shared__ float s[64]; s[t] = t; // there\nx = __shfl_xor_sync(0xffffffffu, x, 1);\nx += s[t ^ 1]; // here",
        "race", "reads s", SYNCWARP,
    ),
    "a warp's barrier for two warps": (
        "__shared__ float s[64]; s[t] = t; // there\n__syncwarp();\nx = s[t ^ 32]; // here", "race", "reads s", SYNCTHREADS,
    ),
    "half a warp's barrier": (
        "__shared__ float s[64]; s[t] = t; // there\nif (t % 32 < 16) __syncwarp(0xffffu);\nx = s[t ^ 16]; // here", "race", "reads s", SYNCWARP,
    ),
    "an atomic and a look": (
        "__shared__ int s; if (t == 0) s = 0; __syncthreads(); if (t < 32) atomicAdd(&s, 1); // there\nelse x = s; // here", "race", "s, which thread", SYNCTHREADS,
    ),
    "an atomic whose initialiser goes on to it": (
        "__shared__ int s; if (t == 0)\ns = 0; // there\natomicAdd(&s, 1); // here\n__syncthreads(); x = s;",
        "race", r"thread \d+ of block 0 writes s, which thread \d+ writes on line", SYNCTHREADS,
    ),
    "vectors that overlap": (
        "__shared__ __align__(16) float s[256]; *reinterpret_cast<float4 *>(s + 4 * t) = {}; // there\nx = s[4 * (63 - t) + 3]; // here",
        "race", r"reads s\[\d+\], which", SYNCTHREADS,
    ),
    "memcpy": (
        "__shared__ float s[256]; s[4 * t] = s[4 * t + 1] = s[4 * t + 2] = s[4 * t + 3] = t; // there\nfloat v[4]; memcpy(v, s + 4 * (63 - t), 16); // here\nx = v[t % 4];",
        "race", "reads s", SYNCTHREADS,
    ),
    "one buffer too few": (
        "__shared__ float s[64];\nfor (int i = 0; i < 3; ++i) {\ns[t] = i + t; // here\n__syncthreads();\nx += s[63 - t]; // there\n}", "race", "which thread", SYNCTHREADS,
    ),
    "dynamic shared memory": (
        "extern __shared__ float smem[]; float *K_smem = smem + 64;\nK_smem[t] = t; // there\nx = K_smem[63 - t]; // here", "race", r"K_smem \+ \d+ B, which", SYNCTHREADS,
    ),
    "ldmatrix": (
        "__shared__ __align__(16) float s[256];\nfor (int i = t; i < 256; i += 64) s[i] = i; // there\nuint32_t r[4];\nfa::ldmatrix_x4(r, s + t % 32 * 4); // here\nx = float(r[0]);",
        "race", "which thread", SYNCTHREADS,
    ),
    "a copy that nobody waited for": (
        "__shared__ __align__(16) float s[256]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); // there\nfa::cp_async_commit();\nx = s[4 * t]; // here",
        "in flight", r"thread \d+ of block 0 reads s\[\d+\] while its own cp.async on line \d+ may still be writing it", "wait for the copy",
    ),
    "another thread's copy in flight": (
        "__shared__ __align__(16) float s[256]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); // there\nfa::cp_async_commit(); __syncthreads();\nx = s[4 * (63 - t)]; // here",
        "in flight", r"while the cp.async of thread \d+ on line", "wait for the copy",
    ),
    "a wait that leaves one group too many": (
        "__shared__ __align__(16) float s[512]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); fa::cp_async_commit();\n"
        "fa::cp_async_16(s + 256 + 4 * t, in); // there\nfa::cp_async_commit(); fa::cp_async_wait<1>(); __syncthreads();\nx = s[4 * (63 - t)]; x += s[256 + 4 * t]; // here",
        "in flight", "while its own cp.async", "wait for the copy",
    ),
    "a store into a copy": (
        "__shared__ __align__(16) float s[256]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); // there\nfa::cp_async_commit();\ns[4 * t + 2] = 1; // here\nfa::cp_async_wait<0>();",
        "in flight", r"writes s\[\d+\] while its own", "wait for the copy",
    ),
    "a copy waited for, no barrier": (
        "__shared__ __align__(16) float s[256]; fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); // there\nfa::cp_async_commit(); fa::cp_async_wait<0>();\nx = s[4 * (63 - t)]; // here",
        "race|in flight", "which thread|while the cp.async", "",
    ),
    "a copy over what others still read": (
        "__shared__ __align__(16) float s[256]; for (int i = t; i < 256; i += 64) s[i] = i;\n__syncthreads();\nx = s[255 - t]; // there\n"
        "fa::cp_async_16(s + 4 * t, in + 4 * (t % 16)); // here\nfa::cp_async_commit(); fa::cp_async_wait<0>();",
        "race|in flight", "", "",
    ),
    "a named barrier for some": (
        "__shared__ float s[64]; s[t] = t; // there\nfa::bar_sync(1 + t / 32, 32);\nx = s[63 - t]; // here", "race", "which thread", SYNCTHREADS,
    ),
    "an arrival before the store": (
        "__shared__ float s[64]; if (t < 32) {\nfa::bar_arrive(1, 64); s[t] = t; // there\n} else {\nfa::bar_sync(1, 64); x = s[63 - t]; // here\n}", "race", "which thread", SYNCTHREADS,
    ),
    "whoever arrives waits for nobody": (
        "__shared__ float s[64]; if (t < 32) {\nfa::bar_arrive(1, 64); x = s[63 - t]; // here\n} else {\ns[t] = t; fa::bar_sync(1, 64); // there\n}", "race|uninitialised shared memory", "", "",
    ),
    "an mbarrier for one lane of the warp": (
        "__shared__ float s[64]; __shared__ uint64_t b; start(b, 1); if (t < 32) {\ns[t] = t; // there\nif (t == 0) arrive(b); } else {\nwait(b, 0); x = s[63 - t]; // here\n}",
        "race", "which thread", SYNCTHREADS,
    ),
    "an mbarrier that only one lane waits for": (
        "__shared__ float s[64]; __shared__ uint64_t b; start(b, 32); if (t < 32) {\ns[t] = t; arrive(b); // there\n} else {\nif (t == 32) wait(b, 0);\nx = s[63 - t]; // here\n}",
        "race", "which thread", SYNCTHREADS,
    ),
    "an arrival that is relaxed": (
        "__shared__ float s[64]; __shared__ uint64_t b; start(b, 32); if (t < 32) {\ns[t] = t; // there\n"
        'asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" ::"r"(place(&b)) : "memory"); } else {\nwait(b, 0); x = s[63 - t]; // here\n}',
        "race", "which thread", SYNCTHREADS,
    ),
    "global memory within a block": (
        "more += 64 * blockIdx.x; more[t] = t; // there\nx = more[63 - t]; // here", "race", r"reads P \+ \d+ B, which thread \d+ writes on line", SYNCTHREADS,
    ),
    "blocks that write one place": (
        "more[t] = t + blockIdx.x; // here there", "race", r"thread 0 of block 2 writes P \+ 0 B, which thread 0 of block 0 writes on line", "blocks run in any order",
    ),
    "a block that reads another's": (
        "more[blockIdx.x * 64 + t] = t; // there\n__syncthreads();\nx = more[(blockIdx.x + 1) % 3 * 64 + t]; // here",
        "race", r"thread \d+ of block \d reads P \+ \d+ B, which thread \d+ of block \d writes on line", "blocks run in any order",
    ),
    "one block clears what all add to": (
        "if (blockIdx.x == 0 && t == 0) more[0] = 0; // there\n__syncthreads(); atomicAdd(more, 1.0f); // here",
        "race", r"thread \d+ of block 2 changes P \+ 0 B by an atomic, which thread 0 of block 0 writes on line", "blocks run in any order",
    ),
    "an atomic within a block orders no blocks": (
        "__shared__ int s; s = 0; __syncthreads(); atomicAdd(&s, 1); __syncthreads();\nmore[t] = t + blockIdx.x; // here there",
        "race", "of block 2 writes P", "blocks run in any order",
    ),
    "a flag within a block orders no blocks": (
        "__shared__ volatile int s; s = 0; __syncthreads(); x = s;\nmore[t] = t + blockIdx.x; // here there",
        "race", "of block 2 writes P", "blocks run in any order",
    ),
    "a flag set without a fence": (
        "FLAG(int) if (t == 0) {\ns[0] = 7; // there\natomicExch(&flag, 1); }\nif (t == 32) { while (atomicAdd(&flag, 0) == 0) {} __threadfence_block();\nx = s[0]; // here\n}",
        "race", r"thread 32 of block 0 reads s\[0\], which thread 0 writes on line", SYNCTHREADS,
    ),
    "a flag seen without a fence": (
        "FLAG(int) if (t == 0) {\ns[0] = 7; // there\n__threadfence_block(); atomicExch(&flag, 1); }\nif (t == 32) { while (atomicAdd(&flag, 0) == 0) {}\nx = s[0]; // here\n}",
        "race", r"thread 32 of block 0 reads s\[0\], which thread 0 writes on line", SYNCTHREADS,
    ),
    "a flag set too early": (
        "FLAG(int) if (t == 0) { __threadfence_block(); atomicExch(&flag, 1);\ns[0] = 7; // there\n}\nif (t == 32) { while (atomicAdd(&flag, 0) == 0) {} __threadfence_block();\nx = s[0]; // here\n}",
        "race", r"s\[0\], which thread", SYNCTHREADS,
    ),
    "a lock without fences": (
        "FLAG(int) for (bool done = false; !done;) if (atomicCAS(&flag, 0, 1) == 0) {\ns[0] += t; // here there\natomicExch(&flag, 0); done = true; }",
        "race", r"s\[0\], which thread", SYNCTHREADS,
    ),
    "volatile is no barrier": (
        "__shared__ volatile float s[64]; s[t] = t; __syncthreads(); if (t < 32) {\nx = s[t] + s[t ^ 16]; // there\ns[t] = x; // here\n}",
        "race", r"reads s\[\d+\], which thread \d+ writes on line", SYNCWARP,
    ),
}  # fmt: skip
BEFORE = """#include <fa/sm80.cuh>
#include <fa/sm90.cuh>
__device__ inline uint32_t place(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
#define FLAG(type) __shared__ type flag; __shared__ float s[64]; if (t == 0) flag = 0; s[t] = 0; __syncthreads();
#define start(b, n) do { if (threadIdx.x == 0) fa::mbarrier_init(place(&(b)), n); __syncthreads(); } while (0)
#define arrive(b) fa::mbarrier_arrive(place(&(b)))
#define wait(b, parity) fa::mbarrier_wait(place(&(b)), parity)
"""


BODIES = RIGHT | {name: body for name, (body, *_) in WRONG.items()}


@cache
def every() -> tuple[Launcher, dict[str, set[int]]]:
    """All of BODIES as kernels of one file, which is compiled once, chosen by fa_args::H; and of each the marked lines."""
    text, marked = BEFORE, {}
    for i, (name, body) in enumerate(BODIES.items()):
        text += f"__global__ void kernel_{i}(const fa_args a) {{ // {name}\nconst int t = threadIdx.x; float x = 0;\n"
        text += (
            "[[maybe_unused]] float *out = static_cast<float *>(a.O), *more = static_cast<float *>(a.workspace[0]);\n"
        )
        text += f"[[maybe_unused]] const float *in = static_cast<const float *>(a.Q);\n{body}\n"
        text += "out[blockIdx.x * 64 + t] = x;\n}\n"
    chosen = "\n".join(f"if (a.H == {i}) kernel_{i}<<<3, 64, 1024>>>(a);" for i in range(len(BODIES)))
    text = program("", before=text, launch=chosen)
    kernel = ""
    for number, line in enumerate(text.split("\n"), 1):
        kernel = line.partition(" // ")[2] if line.startswith("__global__ void kernel_") else kernel
        marked.setdefault(kernel, set()).update({number} if re.search(r"// (here|there)", line) else ())
    return build(text), marked


def run(name: str, threads: int = 1, schedule: int = 0) -> Trace:
    launcher, _ = every()
    launcher.threads, launcher.schedule = threads, schedule
    tensors = {"O": torch.zeros(192), "Q": torch.arange(64.0), "P": torch.zeros(1024)}
    args = FaArgs(B=1, H=list(BODIES).index(name), Nq=192, Nk=1, D=1, scale=1.0)
    args.O, args.Q, args.workspace[0] = (tensor.data_ptr() for tensor in tensors.values())
    return launcher.trace(Call(args, {"Q": tensors["Q"]}, {"O": tensors["O"]}, {"P": tensors["P"]}))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_left_alone(name):
    for threads, schedule in ((1, 0), (2, 3)):
        findings = [f for f in run(name, threads, schedule).findings if f.kind != "uninitialised memory"]
        assert findings == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    _, kind, words, hint = WRONG[name]
    lines = every()[1][name]
    for threads, schedule in ((1, 0), (2, 0), (2, 3)):
        found = [f for f in run(name, threads, schedule).findings if re.fullmatch(kind, f.kind)]
        pairs = [f for f in found if {f.line, f.other_line} == lines]
        assert len(pairs) == 1, found
        (finding,) = pairs
        assert finding.count > 0 and not finding.error and finding.hint
        assert re.search(words, finding.text) and hint in finding.hint


def test_findings_are_the_same_on_any_number_of_os_threads():
    first = run("written, then read").findings
    assert first == run("written, then read", threads=2).findings == run("written, then read", threads=3).findings
    assert first[0].count % 3 == 0  # of three blocks


def test_a_kernel_with_a_race_runs_to_its_end():
    body = "__shared__ float s[64];\ns[threadIdx.x] = 1;\nout[threadIdx.x] = s[63 - threadIdx.x];"
    out = torch.full((64,), float("nan"))
    found = trace(body, out, shape="1, 64")
    assert found.findings and not any(f.error for f in found.findings) and not out[:63].isnan().all()
