"""mbarriers and named barriers: what they let through, what they order, and what is said when nobody can go on."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from emulated import FILE, build, launch, line_of, trace
from tma import program

from helpers import KernelError

BEFORE = r"""
__device__ inline void arrive_state(uint32_t b, uint64_t &s) {
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(s) : "r"(b) : "memory");
}
__device__ inline bool test_state(uint32_t b, uint64_t s) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(b), "l"(s) : "memory");
  return done;
}
__device__ inline bool test_parity(uint32_t b, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(b), "r"(parity) : "memory");
  return done;
}
__device__ inline void cp_async_4(float *to, const float *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place(to)), "l"(from) : "memory");
}
__device__ inline void start(uint32_t b, int count) {
  if (threadIdx.x == 0) {
    fa::mbarrier_init(b, count);
    fa::fence_mbarrier_init();
  }
  __syncthreads();
}
"""


def cases(bodies: dict[str, str], threads: int = 64, before: str = BEFORE) -> str:
    """All bodies in one kernel: fa_args::H says which is run. Their lines are told apart by `// name: mark`."""
    code = ""
    for i, (name, body) in enumerate(bodies.items()):
        code += f"  if (a.H == {i}) {{\n{body.replace('// ', f'// {name}: ')}\n  }}\n"
    head = "  __shared__ __align__(128) float s[256];\n  __shared__ uint64_t bars[4];\n  [[maybe_unused]] const uint32_t b = place(bars);\n  float x = 0;\n"
    return program(f"{head}{code}  out[t] = x;", f"1, {threads}", before)


# Each gives thread t of 64 the value that thread 63 - t has written, or what the comment says.
RIGHT = {
    "a phase for all": "start(b, 64); s[t] = t; fa::mbarrier_arrive(b); fa::mbarrier_wait(b, 0); x = s[63 - t];",
    "two phases": """start(b, 64); s[t] = t; fa::mbarrier_arrive(b); fa::mbarrier_wait(b, 0); x = s[63 - t];
      fa::mbarrier_arrive(b); fa::mbarrier_wait(b, 1); s[t] = x; x = s[t];""",
    "states": "start(b, 64); s[t] = t; uint64_t w; arrive_state(b, w); while (!test_state(b, w)) {} x = s[63 - t];",
    "nothing to wait for before the first phase": "start(b, 1); fa::mbarrier_wait(b, 1); s[t] = t; __syncthreads(); x = s[63 - t];",
    "one waits, and wakes the others": """start(b, 32); start(b + 8, 1);
      if (t >= 32) { s[t] = t; fa::mbarrier_arrive(b); fa::mbarrier_wait(b + 8, 0); x = s[t] + 63 - 2.0f * t; }
      else { if (t == 0) { fa::mbarrier_wait(b, 0); fa::mbarrier_arrive(b + 8); } fa::mbarrier_wait(b + 8, 0); x = s[63 - t]; }""",
    "bytes of a copy": """start(b, 1);
      if (t == 0) { fa::mbarrier_arrive_expect_tx(b, 256); bulk_load(place(s), in, 256, b); }
      fa::mbarrier_wait(b, 0); x = s[63 - t];""",
    "bytes expected apart": """start(b, 1);
      if (t == 0) {
        bulk_load(place(s), in, 128, b); bulk_load(place(s + 32), in + 32, 128, b);
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(256) : "memory");
        fa::mbarrier_arrive(b);
      }
      fa::mbarrier_wait(b, 0); x = s[63 - t];""",
    "cp.async": """start(b, 64); cp_async_4(s + t, in + t);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
      fa::mbarrier_wait(b, 0); x = s[63 - t];""",
    "cp.async, counted apart": """start(b, 64); cp_async_4(s + t, in + t);
      asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(b) : "memory");
      fa::mbarrier_arrive(b); fa::mbarrier_wait(b, 0); x = s[63 - t];""",
    "a spin that looks at other things too": """start(b, 64); s[t] = t; fa::mbarrier_arrive(b);
      if (t == 0) while (!test_parity(b, 0)) x += 1;
      fa::mbarrier_wait(b, 0); x = s[63 - t];""",
    "an arrival while another waits in vain": """start(b, 1); start(b + 8, 1);
      if (t == 0) { while (!test_parity(b, 0)) { if (x == 0) { fa::mbarrier_arrive(b + 8); x = 1; } } }
      if (t == 1) { fa::mbarrier_wait(b + 8, 0); fa::mbarrier_arrive(b); }
      s[t] = t; __syncthreads(); x = s[63 - t];""",
    "a named barrier of a warp": "s[t] = t; fa::bar_sync(1 + t / 32, 32); x = s[t ^ 31]; __syncthreads(); s[t] = x; __syncthreads(); x = s[t ^ 32];",
    "arrive and sync": """if (t < 32) { s[t] = t; fa::bar_arrive(3, 64); fa::bar_sync(4, 64); x = s[63 - t]; }
      else { s[t] = t; fa::bar_sync(3, 64); x = s[63 - t]; fa::bar_arrive(4, 64); }""",
    "barrier 0 on two lines": """s[t] = t; if (t < 32) { asm volatile("bar.sync 0, 64;" ::: "memory"); x = s[63 - t]; }
      else {
        asm volatile("bar.sync 0, 64;" ::: "memory"); x = s[63 - t]; }""",
    "barrier 0, arrive and sync": """s[t] = t; if (t < 32) { asm volatile("bar.arrive 0, 64;" ::: "memory"); x = 63 - t; }
      else { asm volatile("bar.sync 0, 64;" ::: "memory"); x = s[63 - t]; }""",
    "barrier 0 by number and by __syncthreads": """for (int w = 0; w < 64; w += 32) {
        s[t] = t; if (t / 32 == w / 32) { asm volatile("bar.sync 0, 64;" ::: "memory"); x = s[63 - t]; }
        else { __syncthreads(); x = s[63 - t]; }
        __syncthreads(); }""",
    "votes at barrier 0": """const int q = t % 3 == 0; uint32_t count;
      if (t >= 32) asm volatile("{ .reg .pred q; setp.ne.b32 q, %1, 0; bar.red.popc.u32 %0, 0, 64, q; }" : "=r"(count) : "r"(q));
      else count = __syncthreads_count(q);
      x = count == 22 ? 63 - t : -1;""",
    "votes": """uint32_t any; const int q = t == 7;
      asm volatile("{ .reg .pred p, q; setp.ne.b32 q, %1, 0; barrier.cta.red.or.pred p, 2, 64, q; selp.u32 %0, 1, 0, p; }" : "=r"(any) : "r"(q));
      uint32_t count;
      asm volatile("{ .reg .pred q; setp.ne.b32 q, %1, 0; bar.red.popc.u32 %0, 2, 64, q; }" : "=r"(count) : "r"(q));
      x = any == 1 && count == 1 ? 63 - t : -1;""",
}  # fmt: skip


@cache
def right():
    return build(cases(RIGHT))


@pytest.mark.parametrize("number", range(len(RIGHT)), ids=RIGHT)
def test_what_is_right_goes_through_in_any_order(number):
    for schedule in (0, 3, 4):
        launcher = right()
        launcher.schedule = schedule
        out = launch(launcher, torch.full((64,), -1.0), H=number, Q=torch.arange(64.0))
        assert out.tolist() == [63.0 - t for t in range(64)]
        found = trace(launcher, torch.zeros(64), H=number, Q=torch.arange(64.0))
        assert found.findings == ()


# name: body, kind, words. The finding stands at `// here`.
STOPPED = {
    "the wrong parity": (
        "start(b, 64); fa::mbarrier_arrive(b);\nfa::mbarrier_wait(b, 0);\nfa::mbarrier_wait(b, 1); // here",
        "mbarrier deadlock", r"threads 0-63 wait at .* in mbarrier.try_wait for phase 1 \(parity 1\) of the mbarrier bars\[0\]: 64 of 64 arrivals missing",
    ),
    "an arrival too few": (
        "start(b, 64); if (t != 5) fa::mbarrier_arrive(b);\nif (t < 32) fa::mbarrier_wait(b, 0); // here",
        "mbarrier deadlock", r"threads 0-31 wait at .* for phase 0 \(parity 0\) of the mbarrier bars\[0\]: 1 of 64 arrivals missing\n  threads 32-63 have returned",
    ),
    "more bytes expected than copied": (
        "start(b + 8, 1); if (t == 0) { fa::mbarrier_arrive_expect_tx(b + 8, 512); bulk_load(place(s), in, 256, b + 8); }\nfa::mbarrier_wait(b + 8, 0); // here",
        "mbarrier deadlock", r"bars\[1\]: 256 bytes missing",
    ),
    "fewer": (
        "start(b, 1); if (t == 0) { fa::mbarrier_arrive_expect_tx(b, 128); bulk_load(place(s), in, 256, b); }\nfa::mbarrier_wait(b, 0); // here",
        "mbarrier deadlock", r"bars\[0\]: 128 bytes more than expected have come",
    ),
    "nobody copies": (
        "start(b, 2); if (t == 0) fa::mbarrier_arrive_expect_tx(b, 128);\nwhile (!test_parity(b, 0)) {}",
        "mbarrier deadlock", r"threads 0-63 wait at .* in mbarrier.test_wait .*: 1 of 2 arrivals and 128 bytes missing",
    ),
    "an arrival too many": ("start(b, 1); if (t == 0) { fa::mbarrier_arrive_expect_tx(b, 128);\nfa::mbarrier_arrive(b); // here\n}",
        "mbarrier", r"arrives once at the mbarrier bars\[0\], and of the 1 arrival of phase 0 none is missing"),
    "no initialisation": ("fa::mbarrier_arrive(b); // here", "mbarrier", r"comes with mbarrier.arrive to bars\[0\], where no mbarrier has been initialised"),
    "overwritten": ("start(b, 64); if (t == 0) bars[0] = 0; __syncthreads();\nfa::mbarrier_arrive(b); // here",
        "mbarrier", r"the mbarrier bars\[0\], whose 8 bytes have been overwritten"),
    "no count": ("if (t == 0)\nfa::mbarrier_init(b, 0); // here", "mbarrier", "initialises an mbarrier for 0 arrivals"),
    "parity two": ("start(b, 64); fa::mbarrier_wait(b, 2); // here", "mbarrier", "a phase of parity 2; it is 0 or 1"),
    "misaligned": ("start(b, 64); fa::mbarrier_arrive(b + 4); // here", "misaligned", "lies at a multiple of 8"),
    "half of a barrier": ("if (t < 32) { fa::bar_sync(1, 64); // here\n}",
        "barrier deadlock", r"threads 0-31 wait at .* in bar.sync: of the 64 threads of barrier 1 32 have come\n  threads 32-63 have returned"),
    "two counts": ("if (t < 32) fa::bar_sync(1, 64);\nelse fa::bar_sync(1, 32);", "barrier", "barrier 1 for (32|64) threads, and others have come to it for (32|64)"),
    "__syncthreads after a part of barrier 0": ("if (t < 16) fa::bar_sync(0, 32);\nelse __syncthreads();", "barrier", "barrier 0 for (32|64) threads, and others have come to it for (32|64)"),
    "a part of barrier 0 after __syncthreads": ("if (t >= 32) fa::bar_sync(0, 32);\nelse __syncthreads();", "barrier", "barrier 0 for (32|64) threads, and others have come to it for (32|64)"),
    "half of barrier 0": ("if (t < 16) fa::bar_sync(0, 64); // here\nelse if (t < 32) __syncthreads();", "barrier deadlock",
        r"threads 0-15 wait at .* in bar.sync: of the 64 threads of barrier 0 32 have come\n  threads 16-31 wait at .* in __syncthreads: .*\n  threads 32-63 have returned"),
    "no multiple of a warp": ("fa::bar_sync(1, 48); // here", "barrier", "for 48 threads; there must be a multiple of 32"),
    "a copy that nobody waits for": ("start(b, 1); if (t == 0) { fa::mbarrier_arrive_expect_tx(b, 256); bulk_load(place(s), in, 256, b); }",
        "bulk copy", r"ends while the cp.async.bulk of thread 0 still writes its shared memory: nobody has waited for the mbarrier bars\[0\]"),
    "a store that is not waited for": ("s[t] = t; fa::fence_proxy_async(); __syncthreads(); if (t == 0) {\nbulk_store(out, place(s), 256);\nbulk_commit(); }",
        "bulk copy", "ends while the cp.async.bulk of thread 0 still reads its shared memory: no cp.async.bulk.wait_group"),
    "read in flight": ("start(b, 1); if (t == 0) { fa::mbarrier_arrive_expect_tx(b, 256); bulk_load(place(s), in, 256, b); }\n__syncthreads();\nx = s[t]; // here",
        "in flight", r"reads 4 bytes at s \+ \d+ bytes, which a copy may still be writing"),
}  # fmt: skip


@cache
def stopped():
    source = cases({name: body for name, (body, _, _) in STOPPED.items()})
    return source, build(source)


@pytest.mark.parametrize("name", STOPPED)
def test_what_is_wrong_is_named(name):
    _, kind, words = STOPPED[name]
    source, launcher = stopped()
    for schedule in (0, 5):
        launcher.schedule = schedule
        with pytest.raises(KernelError) as caught:
            launch(launcher, torch.zeros(64), H=list(STOPPED).index(name), Q=torch.arange(64.0))
        report = str(caught.value)
        line = line_of(source, mark) if (mark := f"// {name}: here") in source else r"\d+"
        assert re.match(rf"{FILE}:{line}: {kind} in kernel", report), report
        assert re.search(words, report) and "hint:" in report, report


# In dynamic shared memory an mbarrier is called what it was initialised by, and those that are called alike are counted.
DYNAMIC = program(
    """
  extern __shared__ __align__(128) unsigned char X_smem[];
  const uint32_t smem = place(X_smem), full = smem + 64, empty = full + 16;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) fa::mbarrier_init(full + 8 * s, 1), fa::mbarrier_init(empty, 32);
    fa::fence_mbarrier_init();
  }
  if (a.H != 3) __syncthreads();
  if (a.H == 0) fa::mbarrier_wait(full + 8, 0);
  if (a.H == 1) fa::mbarrier_wait(empty, 0);
  if (a.H == 2 && t == 0) fa::mbarrier_arrive_expect_tx(full, 64), bulk_load(smem, in, 64, full);
  if (a.H == 3) fa::mbarrier_wait(full, 1);
  if (a.H == 4 && t == 0) fa::mbarrier_arrive(full + 256);
  out[t] = 0;""",
    "1, 64",
    dynamic=1024,
)
CALLED = {
    0: "for phase 0 (parity 0) of the mbarrier full[1]: 1 of 1 arrival missing",
    1: "for phase 0 (parity 0) of the mbarrier empty: 32 of 32 arrivals missing",
    2: "nobody has waited for the mbarrier full[0]",
    3: "reads the mbarrier full[0], which thread 0 writes on line",
    4: "where no mbarrier has been initialised",
}


@pytest.mark.parametrize("which", CALLED)
def test_an_mbarrier_is_called_what_the_source_calls_it(which):
    launcher = build(DYNAMIC)
    try:
        said = "; ".join(map(str, trace(launcher, torch.zeros(64), H=which, Q=torch.arange(64.0)).findings))
    except KernelError as error:
        said = str(error)
    assert CALLED[which] in said, said


# A producer warp, two consumer warps, two stages and the results through a third buffer. a.H: which line is left out.
PIPELINE = program(
    r"""
  __shared__ __align__(128) float stage[2][256], result[2][64];
  __shared__ uint64_t full[2], empty[2];
  if (t == 0) for (int i = 0; i < 2; ++i) {
    fa::mbarrier_init(place(full + i), 1);
    fa::mbarrier_init(place(empty + i), 2);
  }
  if (a.H != 1) fa::fence_mbarrier_init();
  if (a.H != 2) __syncthreads();
  const int tiles = 5;
  if (t == 0) {
    for (int i = 0; i < tiles; ++i) {
      if (a.H != 3) fa::mbarrier_wait(place(empty + i % 2), (i / 2 + 1) % 2);
      if (a.H != 4) fa::mbarrier_arrive_expect_tx(place(full + i % 2), a.H == 5 ? 512 : 1024);
      bulk_load(place(stage[i % 2]), in + 256 * i, 1024, place(full + i % 2));
    }
  } else if (t >= 32) {
    for (int i = 0; i < tiles; ++i) {
      if (a.H != 6) fa::mbarrier_wait(place(full + i % 2), i / 2 % 2);
      float sum = 0;
      for (int j = 0; j < 4; ++j) sum += stage[i % 2][(t + 64 * j) % 256];
      if (a.H != 7) __syncwarp();
      if (t % 32 == 0 && a.H != 8) fa::mbarrier_arrive(place(empty + i % 2));
      if (t == 32 && a.H != 9) bulk_wait_read<1>();
      if (a.H != 10) fa::bar_sync(1, 64);
      result[i % 2][t - 32] = sum;
      if (a.H != 11) fa::fence_proxy_async();
      if (a.H != 12) fa::bar_sync(1, 64);
      if (t == 32) {
        bulk_store(out + 64 * i, place(result[i % 2]), 256);
        if (a.H != 13) bulk_commit();
      }
    }
    if (t == 32 && a.H != 14) bulk_wait_read<0>();
  }
""",
    "1, 96",
)
LEFT_OUT = {
    1: "proxy fence", 2: "race|mbarrier", 3: "race|in flight", 4: "mbarrier deadlock", 5: "mbarrier deadlock|in flight", 6: "in flight|race",
    7: "race", 8: "mbarrier deadlock", 9: "overwritten", 10: "overwritten", 11: "proxy fence", 12: "race", 13: "overwritten|bulk copy", 14: "bulk copy",
}  # fmt: skip


@cache
def pipeline():
    return build(PIPELINE)


def pipelined(left_out: int, schedule: int):
    launcher = pipeline()
    launcher.schedule = schedule
    tiles, out = torch.arange(5 * 256.0).reshape(5, 4, 64), torch.zeros(5 * 64)
    found = trace(launcher, out, H=left_out, Q=tiles)
    expected = (tiles.sum(1)[:, (torch.arange(64) + 32) % 64]).flatten()
    return found, torch.equal(out, expected)


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_a_pipeline_with_two_stages_is_right(schedule):
    found, equal = pipelined(0, schedule)
    assert equal and found.findings == ()
    assert found.tensors["Q"][:2] == (5 * 1024, 0) and found.tensors["O"][:2] == (0, 5 * 256)
    counts = found.instructions
    assert counts["cp.async.bulk"] == 10 and counts["mbarrier.try_wait"] == 5 + 2 * 5 and counts["bar.sync"] >= 20
    assert (
        counts["mbarrier.arrive"] == 10
        and counts["mbarrier.arrive.expect_tx"] == 5
        and counts["fence.proxy.async"] == 10
    )


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("schedule", [0, 2])
def test_a_pipeline_without_one_of_its_lines_is_found_out(left_out, schedule):
    found, _ = pipelined(left_out, schedule)
    assert any(re.fullmatch(LEFT_OUT[left_out], f.kind) and f.hint for f in found.findings), found.findings
