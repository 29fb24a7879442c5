"""Warpgroups that note what they do: the same answer, phases one after the other, products only behind what they wait for."""

import dataclasses
import re

import pytest
import torch

from helpers import draw_backward, for_d64, load, reference, roles, rung, sass

# Warpgroup 0 writes a row of Q to shared memory, warpgroup 1 adds it to O; two named barriers lead to and fro.
SOURCE = """// notes: a kernel of two roles
// dtypes: fp32
#include <fa/args.cuh>
#include <fa/sm90.cuh>
__global__ void two_roles(const fa_args a) {
  extern __shared__ __align__(1024) float smem[];
  const int t = threadIdx.x % 128;
  float *O = static_cast<float *>(a.O);
  if (threadIdx.x < 128) {
    // [region: producer]
    for (int i = 0; i < a.Nq; ++i) {
      if (i > 0)
        fa::bar_sync(2, 256);
      if (t < a.D) smem[t] = static_cast<const float *>(a.Q)[i * a.D + t];
      fa::bar_sync(1, 256);
    }
    return;
    // [end: producer]
  }
  for (int i = 0; i < a.Nq; ++i) {
    fa::bar_sync(1, 256);
    // [region: scores]
    float x = t < a.D ? smem[t] : 0.f;
    // [end: scores]
    // [region: mask]
    x += 1.f;
    // [end: mask]
    // [region: online_update]
    x *= 2.f;
    // [end: online_update]
    // [region: output]
    if (t < a.D) O[i * a.D + t] = x;
    if (i + 1 < a.Nq) fa::bar_sync(2, 256);
    // [end: output]
  }
}
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  two_roles<<<1, 256, 1024, stream>>>(*args);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def q():
    torch.manual_seed(0)
    return torch.randn(1, 1, 4, 32)


def test_phases_come_in_order_and_the_answer_stays(q):
    plain = load(source=SOURCE, device="cpu", quiet=True)
    assert torch.equal(plain(q, q, q)[0], (q + 1) * 2)
    assert torch.equal(load(source=roles.instrument(SOURCE), device="cpu", quiet=True)(q, q, q)[0], (q + 1) * 2)
    times = roles.times(plain, q, q, q)
    assert set(times.lane) == {"producer", "consumer 0"} and times.begin.min() == 0
    for _, lane in times.groupby("lane"):
        assert (lane.begin < lane.end).all() and (lane.end[:-1].values <= lane.begin[1:].values).all()
    consumer = times[times.lane == "consumer 0"]
    assert [list(consumer.kind).count(kind) for kind in ("scores", "softmax", "output")] == [4, 4, 4]
    assert list(consumer.kind)[:4] == ["wait", "scores", "softmax", "output"]
    copies = times[(times.lane == "producer") & (times.kind == "copy")]
    scores = consumer[consumer.kind == "scores"]
    assert len(copies) == 7 and (copies.end[::2].values <= scores.begin.values).all()  # each row before it is used


def test_lines_stay_where_they_were():
    lines = roles.instrument(SOURCE).splitlines()
    assert lines[1].startswith("// workspace: notes") and len(lines) == len(SOURCE.splitlines()) + 1
    assert "bar_sync(1, 256); note(was); }" in lines[15] and lines[16].strip() == "}"


def test_a_wait_under_a_condition_is_one_and_what_was_going_on_goes_on_behind_it(q):
    text = SOURCE.replace(
        "    // [region: mask]\n    x += 1.f;",
        "    // [region: mask]\n    const bool all = true;\n    if (all) fa::bar_sync(3, 128);\n    x += 1.f;",
    )
    times = roles.times(load(source=text, device="cpu", quiet=True), q, q, q)
    kinds = list(times[times.lane == "consumer 0"].kind)
    assert kinds[:6] == ["wait", "scores", "softmax", "wait", "softmax", "output"]


@pytest.mark.parametrize("old, words", [
    ("// [region: output]", "region: output.* is nowhere to be found"),
    ("extern __shared__", "no line with extern __shared__"),
])  # fmt: skip
def test_a_text_without_its_markers_is_refused(old, words):
    with pytest.raises(ValueError, match=words):
        roles.instrument(SOURCE.replace(old, "static"))


def test_clocks_that_wrap_around_and_notes_that_were_never_written():
    notes = torch.full((4, 8, 2), 7, dtype=torch.int32)
    said = {0: [("copy", -5), ("wait", 10), ("", 30)], 2: [("wait", -7), ("scores", 11), ("scores", 13), ("", 20)]}
    for group, rows in said.items():
        for i, (kind, clock) in enumerate(rows):
            notes[group, i] = torch.tensor([roles.SIGN | roles.KINDS.index(kind), clock])
    frame = roles.intervals(notes, ordered=False)
    assert frame.values.tolist() == [
        ["producer", "copy", 2, 17],
        ["producer", "wait", 17, 37],
        ["consumer 0", "wait", 0, 18],  # the earliest, though not the first in the list
        ["consumer 0", "scores", 18, 27],
    ]


def test_a_backward_pass_notes_its_own_phases():
    """In each step of each consumer: what is started, what is computed, what is sent; the answer stays what it was."""
    source = for_d64("33_backward_wgmma").source
    kernel = load(source=source, device="cpu", quiet=True)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, n, 64).half() for n in (200, 128, 128, 200))
    case = reference.Case("", q, k, v, do=do)
    noted = load(source=roles.instrument(source), device="cpu", quiet=True)
    assert all(torch.equal(x, y) for x, y in zip(kernel(*case.inputs), noted(*case.inputs), strict=True))
    times = roles.times(kernel, *case.inputs)
    assert set(times.lane) == {"producer", "consumer 0", "consumer 1"}
    assert set(times[times.lane == "producer"].kind) == {"copy", "wait"}
    consumer = times[times.lane == "consumer 1"]
    assert set(consumer.kind) == {"wait", "product", "softmax", "products", "dS", "send dQ"}
    steps = -(-200 // draw_backward.constants(source, 64)["Br"])
    assert list(consumer.kind).count("dS") == steps


@pytest.mark.parametrize("stem", ["31_warp_specialized", "32_ping_pong", "33_backward_wgmma"])
def test_every_wait_for_products_is_noted(stem):
    """Also one whose number of groups is an expression of the template's parameters."""
    waits = [line for line in roles.instrument(rung(stem).source).splitlines() if "fa::wgmma_wait_group<" in line]
    noted = f"note({roles.KINDS.index('product')}); fa::wgmma_wait_group<"
    assert waits and all(noted in line for line in waits), "\n".join(waits)


def test_every_tile_notes_that_its_scores_are_started():
    """Also where what is started depends on the head dimension."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (64, 1024, 1024))
    times = roles.times(for_d64("32_ping_pong"), q, k, v)
    kinds = list(times[times.lane == "consumer 0"].kind)
    assert kinds.count("scores") == 8


def test_a_wait_for_a_product_is_told_from_one_for_a_barrier():
    """In each tile of 31: S is started and waited for, then softmax, V, O is started and waited for."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (64, 256, 256))
    times = roles.times(for_d64("31_warp_specialized"), q, k, v)
    kinds = list(times[times.lane == "consumer 0"].kind)
    first = kinds.index("scores")
    assert kinds[first : first + 2] == ["scores", "product"] and kinds.count("product") == 4
    assert {"softmax", "wait", "output"} <= set(kinds)


def test_notes_leave_the_products_of_33_asynchronous():
    """Where they are recorded. nvcc says so where it serialises them, and a note that makes it spill would show other times than the
    kernel's own."""
    noted = roles.instrument(rung("33_backward_wgmma").source)
    whole = dataclasses.replace(rung("33_backward_wgmma"), source=noted)
    said = (sass.cubin(whole).parent / "ptxas.log").read_text()
    serialised = re.findall(r"\(C75(?:08|1[0-5])\).* '_Z14backward_wgmmaILi(\d+)E", said)
    left_out = roles.NO_ROOM["33_backward_wgmma"]
    assert {int(D) for D in serialised} == set(left_out)
    used = sass.resources(whole)[["spill_store_bytes", "spill_load_bytes"]]
    recorded = [not any(f"<{D}, " in name for D in left_out) for name in used.index]
    assert 0 < sum(recorded) < len(used) and (used[recorded] == 0).all(axis=None)


def test_a_recording_has_every_head_dimension():
    frame = roles.recording("32_ping_pong", N=256, tokens=256, width=128, device="cpu")
    assert frame.columns.tolist() == ["D", "lane", "kind", "begin", "end"] and set(frame.D) == {64, 128}
    assert set(frame[frame.D == 64].lane) == {"producer", "consumer 0", "consumer 1", "consumer 2"}


def test_a_head_dimension_without_room_for_notes_is_not_recorded(monkeypatch):
    monkeypatch.setitem(roles.NO_ROOM, "32_ping_pong", (128,))
    assert set(roles.recording("32_ping_pong", N=128, tokens=128, width=128, device="cpu").D) == {64}


def test_without_a_gpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="on a GPU only"):
        roles.record_roles("32_ping_pong")
