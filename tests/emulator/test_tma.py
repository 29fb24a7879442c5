"""Tensor maps and bulk copies: boxes against their definition in numpy, what is wrong with them, what a trace counts."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from emulated import build, launch, line_of, trace
from tma import box_of, of_map, program, swizzled

from helpers import KernelError


def tensor_ptx(rank: int) -> str:
    """A load, a store and a sum of this rank, at the coordinates `at`."""
    inputs = ", ".join(f'"r"(at[{d}])' for d in range(rank))
    there, back = (", ".join(f"%{first + d}" for d in range(rank)) for first in (3, 2))
    out = f'[%0, {{{back}}}], [%1];" ::"l"(&map), "r"(place(box)), {inputs} : "memory")'
    return f"""
  if (rank == {rank} && way == 0) asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {{{there}}}], [%2];" ::"r"(place(box)), "l"(&map), "r"(place(&full)), {inputs} : "memory"); // load
  if (rank == {rank} && way == 1) asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group {out};
  if (rank == {rank} && way == 2) asm volatile("cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group {out};"""


# a.H: bytes of the box; a.K[24]: 0 to load and give back what lies in shared memory, 1 to store V there first, 2 to add.
EVERY_RANK = program(
    r"""
  extern __shared__ __align__(1024) unsigned char box[];
  __shared__ uint64_t full;
  const int *k = static_cast<const int *>(a.K), way = k[24], *at = k + 25, rank = k[0];
  if (t == 0) {
    fa::mbarrier_init(place(&full), 1);
    fa::fence_mbarrier_init();
  }
  if (way > 0) for (int i = t; i < a.H; i += 32) box[i] = static_cast<const unsigned char *>(a.Q)[i];
  fa::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    if (way == 0) fa::mbarrier_arrive_expect_tx(place(&full), a.H);
"""
    + "".join(tensor_ptx(n) for n in range(1, 6))
    + r"""
    bulk_commit();
    bulk_wait<0>();
  }
  if (way == 0) {
    fa::mbarrier_wait(place(&full), 0);
    for (int i = t; i < a.H; i += 32) static_cast<unsigned char *>(a.O)[i] = box[i];
  }
""",
    dynamic=65536,
)


@cache
def every_rank():
    return build(EVERY_RANK)


def elements(sizes, strides) -> int:
    return sum((n - 1) * s for n, s in zip(sizes, (1, *strides))) + 1


# dtype, sizes, strides in elements, box, steps, coordinates
BOXES = {
    "a row": ("float32", (64,), (), (32,), (1,), (8,)),
    "a row that begins before the tensor": ("float32", (64,), (), (32,), (1,), (-12,)),
    "a row that ends behind it": ("uint8", (200,), (), (64,), (1,), (160,)),
    "rows inside": ("float16", (64, 40), (64,), (32, 8), (1, 1), (16, 5)),
    "rows before and behind": ("float16", (64, 10), (72,), (64, 16), (1, 1), (0, -3)),
    "a corner": ("float32", (20, 10), (24,), (8, 8), (1, 1), (16, 6)),
    "outside altogether": ("float32", (20, 10), (24,), (8, 8), (1, 1), (40, -20)),
    "every second row": ("float16", (64, 33), (64,), (16, 15), (1, 2), (0, 3)),
    "three dimensions": ("float32", (8, 6, 5), (16, 100), (8, 4, 3), (1, 1, 1), (0, 4, 3)),
    "strides not in order": ("float16", (64, 6, 3), (192, 64), (64, 4, 2), (1, 1, 1), (0, 1, 2)),
    "four, with steps": ("float64", (4, 5, 4, 6), (4, 20, 80), (4, 3, 4, 5), (1, 1, 3, 2), (0, -1, 1, 2)),
    "five": ("float16", (64, 7, 2, 3, 2), (128, 64, 904, 2800), (64, 4, 2, 1, 1), (1, 1, 1, 1, 1), (0, 5, 0, 1, 1)),
}  # fmt: skip
KINDS = {"uint8": 0, "float16": 6, "float32": 7, "float64": 8}


def case(name, swizzle=0):
    dtype, sizes, strides, box, steps, at = BOXES[name]
    item = np.dtype(dtype).itemsize
    ints = of_map(len(sizes), KINDS[dtype], item, swizzle, sizes, [s * item for s in strides], box, steps)
    return np.dtype(dtype), sizes, strides, box, steps, at, ints


def loaded(memory: np.ndarray, ints: list[int], at, nbytes: int) -> np.ndarray:
    k = torch.tensor([*ints, 0, *at], dtype=torch.int32)
    out = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
    launch(every_rank(), out, H=nbytes, Q=torch.from_numpy(memory.view(np.uint8).copy()), K=k)
    return out.numpy()


@pytest.mark.parametrize("name", BOXES)
def test_a_box_is_what_its_definition_says(name):
    dtype, sizes, strides, box, steps, at, ints = case(name)
    memory = np.random.default_rng(0).integers(1, 100, elements(sizes, strides)).astype(dtype)
    expected = box_of(memory, sizes, strides, box, steps, at)
    assert (loaded(memory, ints, at, expected.nbytes).view(dtype) == expected.reshape(-1)).all()


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_swizzles_follow_their_formula(mode, columns):
    if columns * 2 > 16 << mode:
        return
    memory = np.arange(1, 64 * 40 + 1).astype(np.uint16).view(np.float16)
    ints = of_map(2, 6, 2, mode, (64, 40), (128,), (columns, 24))
    expected = memory.view(np.uint16).reshape(40, 64)[5:29, :columns].copy()
    assert (loaded(memory.view(np.uint16), ints, (0, 5), expected.nbytes) == swizzled(expected.reshape(-1), mode)).all()


# ---- from shared memory to global


@pytest.mark.parametrize("name", BOXES)
def test_a_box_is_stored_where_it_was_read(name):
    dtype, sizes, strides, box, steps, at, ints = case(name)
    rng = np.random.default_rng(1)
    memory = rng.integers(1, 50, elements(sizes, strides)).astype(dtype)
    new = box_of(rng.integers(50, 100, memory.size).astype(dtype), sizes, strides, box, steps, at)
    number = box_of(np.arange(1, memory.size + 1, dtype=np.int64), sizes, strides, box, steps, at).reshape(-1)
    inside = number > 0
    for way in (1, 2) if dtype != np.uint8 else (1,):
        expected = memory.copy()
        expected[number[inside] - 1] = new.reshape(-1)[inside] + (expected[number[inside] - 1] if way == 2 else 0)
        out = torch.from_numpy(memory.copy().view(np.uint8))
        k = torch.tensor([*of_map_to_output(ints), way, *at], dtype=torch.int32)
        launch(every_rank(), out, H=new.nbytes, Q=torch.from_numpy(new.view(np.uint8).reshape(-1).copy()), K=k)
        assert (out.numpy().view(dtype) == expected).all()


def of_map_to_output(ints: list[int]) -> list[int]:
    return [*ints[:3], ints[3] | 16, *ints[4:]]


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_a_store_undoes_the_swizzle(mode):
    columns = 8 << mode
    rows = np.arange(1, 16 * columns + 1).astype(np.uint16)
    out = torch.zeros(64 * 16, dtype=torch.int16)
    k = torch.tensor([*of_map(2, 6, 2, mode, (64, 16), (128,), (columns, 16), output=True), 1, 0, 0], dtype=torch.int32)
    launch(every_rank(), out, H=rows.nbytes, Q=torch.from_numpy(swizzled(rows, mode)), K=k)
    found = out.numpy().view(np.uint16).reshape(16, 64)
    assert (found[:, :columns] == rows.reshape(16, columns)).all() and (found[:, columns:] == 0).all()


SUMS = program(r"""
  __shared__ __align__(16) float s[32];
  s[t] = t + blockIdx.x * 0.1f;
  fa::fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    bulk_add(out, place(s), 128);
    bulk_commit();
    if (blockIdx.x % 2) bulk_wait<0>(); else bulk_wait_read<0>();
  }
""", "8, 32")  # fmt: skip


def test_sums_of_all_blocks_come_out_the_same_on_any_number_of_threads():
    launcher, results = build(SUMS), []
    for threads, schedule in ((1, 0), (2, 0), (2, 7)):
        launcher.threads, launcher.schedule = threads, schedule
        results.append(launch(launcher, torch.full((32,), 1 / 3)))
    assert all(torch.equal(results[0], r) for r in results)
    assert torch.allclose(results[0], 1 / 3 + 8 * torch.arange(32.0) + 2.8)


# ---- as late as allowed

LATE = {
    # A store that is read by its wait: what is written into its source before that goes along.
    "read at the wait": "s[t] = 1; fa::fence_proxy_async(); __syncwarp(); if (t == 0) { bulk_store(out, place(s), 128); bulk_commit(); s[3] = 7; bulk_wait_read<0>(); }",
    # What is written at the wait or at the end is not there before.
    "written at the end": "s[t] = 2; fa::fence_proxy_async(); __syncwarp(); if (t == 0) { bulk_store(out, place(s), 128); bulk_commit(); bulk_wait_read<0>(); out[40] = out[0]; }",
    "written at the wait": "s[t] = 3; fa::fence_proxy_async(); __syncwarp(); if (t == 0) { bulk_store(out, place(s), 128); bulk_commit(); bulk_wait<0>(); out[40] = out[0]; }",
    # Two groups, of which the first is waited for.
    "one of two": "s[t] = 4; fa::fence_proxy_async(); __syncwarp(); if (t == 0) { bulk_store(out, place(s), 64); bulk_commit(); bulk_store(out + 16, place(s + 16), 64); bulk_commit(); bulk_wait<1>(); out[40] = out[0]; out[41] = out[16]; bulk_wait<0>(); }",
}  # fmt: skip


@cache
def late():
    body = "".join(f"  if (a.H == {i}) {{ {text} }}\n" for i, text in enumerate(LATE.values()))
    return build(program("  __shared__ __align__(128) float s[32];\n" + body))


@pytest.mark.parametrize("name", LATE)
def test_copies_are_as_late_as_the_waits_allow(name):
    out = launch(late(), torch.zeros(42), H=list(LATE).index(name))
    expected = {
        "read at the wait": [1, 1, 1, 7, 0, 0],
        "written at the end": [2, 2, 2, 2, 0, 0],
        "written at the wait": [3, 3, 3, 3, 3, 0],
        "one of two": [4, 4, 4, 4, 4, 0],
    }[name]
    assert [*out[:4].tolist(), *out[40:].tolist()] == expected


# ---- what the driver refuses

GOOD = {"rank": 2, "kind": 6, "swizzle": 0, "sizes": (64, 40), "strides": (128,), "box": (64, 8), "steps": (1, 1)}
REFUSED = {
    "rank": ({"rank": 6}, "the rank"),
    "type": ({"kind": 77}, "no such data type"),
    "an empty tensor": ({"sizes": (64, 0)}, "a size must be"),
    "stride": ({"strides": (72,)}, "a stride must be a multiple of 16"),
    "an empty box": ({"box": (64, 0)}, "1 to 256"),
    "too large a box": ({"box": (64, 257)}, "1 to 256"),
    "a box of 8 bytes": ({"box": (4, 8)}, "innermost dimension must be a multiple of 16"),
    "longer than the swizzle": ({"swizzle": 2}, "not be longer than the swizzle's"),
    "swizzle": ({"swizzle": 4}, "no such swizzle"),
    "steps": ({"steps": (1, 9)}, "an element stride"),
    "no step": ({"steps": (1, 0)}, "an element stride"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_maps_that_the_driver_refuses(name):
    change, why = REFUSED[name]
    m = {**GOOD, **change}
    ints = of_map(m["rank"], m["kind"], 2, m["swizzle"], m["sizes"], m["strides"], m["box"], m["steps"])
    with pytest.raises(KernelError, match=f"CUDA error: invalid argument.*{why}"):
        loaded(np.zeros(64 * 40, np.uint16), ints, (0, 0), 1024)


def test_an_address_must_be_a_multiple_of_16():
    ints = of_map(2, 6, 2, 0, (64, 30), (128,), (64, 8))
    k = torch.tensor([*ints, 0, 0, 0], dtype=torch.int32)
    memory = torch.zeros(64 * 40, dtype=torch.int16)[3:]
    with pytest.raises(KernelError, match="the address must be a multiple of 16"):
        launch(every_rank(), torch.zeros(1024, dtype=torch.uint8), H=1024, Q=memory, K=k)


# ---- what goes wrong on the device

WRONG = {
    "coordinates": ("fa::cp_async_bulk_tensor_5d(place(s), &map, place(&full), 0, 0, 0, 0, 0);", "tensor map", "takes 5 coordinates, the map of a tensor with 2"),
    "no map": ("fa::cp_async_bulk_tensor_5d(place(s), reinterpret_cast<const CUtensorMap *>(a.Q), place(&full), 0, 0, 0, 0, 0);", "tensor map", "where no tensor map is"),
    "a copy of the map": ("const CUtensorMap mine = map; fa::cp_async_bulk_tensor_5d(place(s), &mine, place(&full), 0, 0, 0, 0, 0);", "tensor map", "the address of a map in a local variable"),
    "behind the array": ("load(place(s + 128), 0, 0);", "out of bounds", r"lets cp.async.bulk.tensor write 1024 bytes at s \+ 512 bytes, 512 past its end"),
    "misaligned": ("load(place(s + 4), 0, 0);", "misaligned", r"the address s\[4\], which is no multiple of 128"),
    "a tensor that the map has too large": ("load(place(s), 0, 36);", "out of bounds", "reads 128 bytes at Q .*past its end"),
    "no mbarrier": ("asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];\" ::\"r\"(place(s)), \"l\"(in), \"r\"(place(s + 8)));", "mbarrier", "where no mbarrier has been initialised"),
    "15 bytes": ("bulk_load(place(s), in, 15, place(&full));", "misaligned", "copies 15 bytes with cp.async.bulk"),
    "from the second element": ("bulk_load(place(s), in + 1, 16, place(&full));", "misaligned", r"from or to Q \+ 4 bytes; both must be multiples of 16"),
    "twice to one place": ("fa::mbarrier_arrive_expect_tx(place(&full), 128); bulk_load(place(s), in, 64, place(&full)); bulk_load(place(s), in, 64, place(&full));", "in flight", "where a copy is under way"),
    "what nobody has written": ("bulk_store(out, place(s), 64);", "uninitialised shared memory", r"lets cp.async.bulk read 64 bytes at s \+ 0 bytes"),
    "unknown": ("asm volatile(\"cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2}], [%3];\" ::\"r\"(place(s)), \"l\"(&map), \"r\"(0), \"r\"(place(&full)));", "unsupported", "im2col"),
}  # fmt: skip
LOAD = """
#define load(to, x, y) asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint " \
    "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(place(&full)), "l"(uint64_t(0)) : "memory")
"""


LOAD_A_BOX = """  __shared__ __align__(128) float s[32]; __shared__ uint64_t full;
  if (t == 0) {
    fa::mbarrier_init(place(&full), 1);
    fa::fence_mbarrier_init();
    fa::mbarrier_arrive_expect_tx(place(&full), 128);
    load(place(s), 0, 0);
  }
  __syncthreads();
  fa::mbarrier_wait(place(&full), 0);
"""


@cache
def wrong():
    body = "".join(f"  if (a.H == {i} && t == 0) {{ {text} }}\n" for i, (text, *_) in enumerate(WRONG.values()))
    head = """  __shared__ __align__(128) float s[256]; __shared__ uint64_t full;
  if (t == 0) { fa::mbarrier_init(place(&full), 1); fa::fence_mbarrier_init(); }
  __syncthreads();
"""
    return build(program(head + body, before=LOAD))


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_named(name):
    _, kind, words = WRONG[name]
    ints = of_map(2, 6, 2, 0, (64, 44), (128,), (64, 8))
    with pytest.raises(KernelError, match=rf"{kind} in kernel: .*{words}(.|\n)*hint: "):
        launch(
            wrong(),
            torch.zeros(64),
            H=list(WRONG).index(name),
            Q=torch.zeros(64 * 40, dtype=torch.int16),
            K=torch.tensor(ints, dtype=torch.int32),
        )


PARAMETERS = {
    "without __grid_constant__": ("", "CUtensorMap map", "the address of a map in a local variable"),
    "of a template": ("template <class T> ", "const __grid_constant__ CUtensorMap map", ""),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_map_is_read_where_the_grid_has_one(name):
    template, parameter, wrong = PARAMETERS[name]
    body = LOAD_A_BOX + "out[t] = s[t];"
    signature = "__global__ void kernel(const fa_args a, const __grid_constant__ CUtensorMap map)"
    text = program(body, before=LOAD)
    assert signature in text
    of_a = "T" if template else "fa_args"
    text = text.replace(signature, f"{template}__global__ void kernel(const {of_a} a, {parameter})")
    text = text.replace("cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 0);", "")
    q = torch.arange(64 * 40, dtype=torch.float32)
    k = torch.tensor(of_map(2, 7, 4, 0, (64, 40), (256,), (32, 1)), dtype=torch.int32)
    with pytest.raises(KernelError, match=wrong) if wrong else nullcontext():
        out = launch(build(text), torch.zeros(32), Q=q, K=k)
        assert torch.equal(out, q[:32])


# ---- the X-ray

# What a copy overwrites has been written by threads, or read: a store wants a fence and an order, a read an order alone.
OVERWRITTEN = {
    "fenced by who wrote": ("s[t] = t; fa::fence_proxy_async(); __syncthreads();", ""),
    "fenced by who copies": ("s[t] = t; __syncthreads(); if (t == 0) fa::fence_proxy_async();", ""),
    "fenced by somebody between": (
        "s[t] = t; fa::bar_sync(1, 64); if (t < 32) fa::fence_proxy_async(); fa::bar_sync(2, 64);",
        "",
    ),
    "read": ("s[t] = t; fa::fence_proxy_async(); __syncthreads(); x += s[63 - t]; __syncthreads();", ""),
    "not fenced": ("s[t] = t; // there\n__syncthreads();", "proxy fence"),
    "fenced before": ("fa::fence_proxy_async(); s[t] = t; // there\n__syncthreads();", "proxy fence"),
    "fenced by half of them": (
        "s[t] = t; // there\nif (t < 32) fa::fence_proxy_async(); __syncthreads();",
        "proxy fence",
    ),
    "not in order": ("s[t] = t; // there\nfa::fence_proxy_async();", "race"),
}


@cache
def overwritten():
    body = "".join(
        f"  if (a.H == {i}) {{\n{text.replace('// there', f'// there {i};')}\n}}\n"
        for i, (text, _) in enumerate(OVERWRITTEN.values())
    )
    source = program(
        f"""  __shared__ __align__(128) float s[64]; __shared__ uint64_t full;
  float x = 0;
  if (t == 0) {{ fa::mbarrier_init(place(&full), 1); fa::fence_mbarrier_init(); }}
  __syncthreads();
{body}
  if (t == 0) {{
    fa::mbarrier_arrive_expect_tx(place(&full), 256);
    bulk_load(place(s), in, 256, place(&full));
  }}
  fa::mbarrier_wait(place(&full), 0);
  out[t] = x + s[t];
""",
        "1, 64",
    )
    return source, build(source)


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_what_threads_wrote_is_fenced_before_a_copy_overwrites_it(name):
    source, launcher = overwritten()
    number, (_, kind) = list(OVERWRITTEN).index(name), OVERWRITTEN[name]
    for launcher.schedule in (0, 3):
        found = trace(launcher, torch.zeros(64), H=number, Q=torch.arange(64.0)).findings
        if not kind:
            assert found == ()
            continue
        (f,) = (f for f in found if f.kind == kind)
        assert line_of(source, f"// there {number};") in (f.line, f.other_line)
        assert kind == "race" or re.search(
            r"thread 0 of block 0 writes s\[\d+\] through the async proxy, and thread \d+ wrote it on", f.text
        )


def test_a_trace_counts_both_ends_of_a_copy():
    dtype, sizes, strides, box, steps, at, ints = case("rows before and behind")
    memory = np.zeros(elements(sizes, strides), np.float16)
    k = torch.tensor([*ints, 0, *at], dtype=torch.int32)
    out = torch.zeros(2048, dtype=torch.uint8)
    found = trace(every_rank(), out, H=2048, Q=torch.from_numpy(memory.view(np.uint8).copy()), K=k)
    copies = {a.space: a for a in found.accesses if a.op == "cp.async.bulk.tensor"}
    there, here = copies["global"], copies["shared"]
    assert found.findings == () and found.tensors["Q"][:2] == (10 * 128, 0)
    assert (there.target, there.requests, there.bytes, there.ideal) == ("Q", 1, 10 * 128, 40)
    assert there.cost == 5 * 4 + 5 * 5  # rows of 144 bytes: every second one begins in the middle of a sector
    assert (here.target, here.requests, here.bytes, here.cost, here.ideal) == (
        "box",
        1,
        2048,
        0,
        0,
    )  # wavefronts: not known
    assert there.line == here.line and "way == 0" in "".join(EVERY_RANK.split("\n")[there.line - 2 : there.line])
    assert found.instructions["cp.async.bulk.tensor"] == 1 and found.instructions["mbarrier.init"] == 1


def test_a_block_may_have_227_kb_at_a_multiple_of_1024():
    body = "extern __shared__ __align__(1024) unsigned char box[];\nif (t == 0) { box[232447] = 5; out[0] = place(box) % 1024; out[1] = box[232447]; }"
    assert launch(build(program(body, dynamic=232448)), torch.full((2,), -1.0)).tolist() == [0, 5]
