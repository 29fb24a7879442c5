"""The player's frames are what the traced launch did: its bytes are the emulator's, and its tiles cover S once."""

import html
import itertools
import json
import re

import pytest
import torch

from helpers import load, xray
from helpers.figures.player import GAP, HIGH, LEFT, SCORES_LEFT, SHARED_LEFT, TOP, WIDE, Player, scenes
from helpers.run.walk import _steps, walk

N, D = 256, 64
DTYPES = {"03_fa1_fp32": torch.float32, "04_fa2_fp32": torch.float32, "13_tuned": torch.float16}


def inputs(stem, H=1):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, H, N, D, generator=generator).to(DTYPES[stem]) for _ in range(3))


@pytest.fixture(scope="module", params=list(DTYPES))
def walked(request):
    return walk(request.param, *inputs(request.param))


def blocks(stem):
    return 1 if stem == "03_fa1_fp32" else 2  # FlashAttention-1 has a block for each head, the others for 128 queries


@pytest.mark.parametrize("stem", list(DTYPES))
def test_the_blocks_bytes_are_the_launchs(stem):
    """The runtime counts bytes by itself; all blocks' steps together are as many, tensor by tensor."""
    counted = {}
    for block in range(blocks(stem)):
        for step in walk(stem, *inputs(stem), block=block).steps:
            for kind in ("read", "written"):
                for name, rows in getattr(step, kind).items():
                    counted[name, kind] = counted.get((name, kind), 0) + rows.bytes
    tensors = xray(stem, *inputs(stem)).tensors
    for name, row in tensors.iterrows():
        for kind in ("read", "written"):
            assert counted.get((name, kind), 0) == row[f"bytes_{kind}"], (name, kind)


def test_a_steps_bytes_are_all_that_the_block_has_read_and_written_so_far(walked):
    moved = [sum(rows.bytes for rows in (*s.read.values(), *s.written.values())) for s in walked.steps]
    assert [s.hbm for s in walked.steps] == [*itertools.accumulate(moved)]


def test_steps_are_numbered_without_those_in_which_nothing_happens():
    first, second = _steps([(0, 0, "read", 0, 1, 8), (3, 0, "used", 4, 5, 0)], ["Q"], {"Q": 4})
    assert (first.number, second.number) == (0, 1)
    assert (second.used["Q"].first, second.used["Q"].last) == (0, 1)  # of the second head, whose rows begin at 4


def test_strided_tensors_are_walked_as_contiguous_ones():
    """(B, N, H, D) in memory, seen as (B, H, N, D)."""
    plain = [x[:, :, :64].contiguous() for x in inputs("04_fa2_fp32", H=2)]
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    assert walk("04_fa2_fp32", *by_token).steps == walk("04_fa2_fp32", *plain).steps


def test_every_tile_of_P_meets_V_once(walked):
    """The rectangles that the player fills cover the block's queries and all keys: no tile is left out, none comes twice."""
    tiles = [scene["pv"] for scene in scenes(walked) if "pv" in scene]
    area = sum(width * height for *_, width, height in dict.fromkeys(tiles))
    queries = sum(r.last - r.first + 1 for r in {s.written["O"] for s in walked.steps if "O" in s.written})
    rows = N if walked.kernel == "03_fa1_fp32" else queries
    assert area == pytest.approx(HIGH * HIGH * rows / N)
    assert len(dict.fromkeys(tiles)) == len(tiles), "each once"
    assert min(x for x, *_ in tiles) == SCORES_LEFT and min(y for _, y, *_ in tiles) == TOP


def test_shared_memory_holds_what_the_kernel_keeps_there(walked):
    item = 2 if walked.kernel == "13_tuned" else 4
    tiles = {"03_fa1_fp32": 64 + 32 + 32, "04_fa2_fp32": 128 + 2 * 32 + 2 * 32, "13_tuned": 128 + 2 * 2 * 64}
    assert walked.smem == tiles[walked.kernel] * D * item
    for step in walked.steps:
        for tensor in step.read.keys() & {"K", "V"}:
            assert tensor in step.resident, "K and V come from HBM to shared memory"


BY_REGISTERS = """// mine: a query row per thread, in registers
//
// op:        attention
// dtypes:    fp32
// D:         32
// arch:      sm_75
#include <fa/args.cuh>
#include <fa/launch.cuh>
__global__ void by_registers(const float* Q, const float* K, const float* V, float* O, int N) {
  __shared__ float Ks[32][32], Vs[32][32];
  const int t = threadIdx.x;
  float q[32], k[32], v[32], o = 0;
  for (int d = 0; d < 32; ++d) q[d] = Q[(blockIdx.x * 32 + t) * 32 + d];
  for (int j = 0; j < N; j += 32) {
COPY
    __syncthreads();
    for (int d = 0; d < 32; ++d) o += q[d] * Ks[t][d] * Vs[t][d];
    __syncthreads();
  }
  O[t] = o;
}
extern "C" cudaError_t fa_launch(const fa_args* a, cudaStream_t stream) {
  auto *Q = static_cast<const float*>(a->Q), *K = static_cast<const float*>(a->K), *V = static_cast<const float*>(a->V);
  by_registers<<<a->Nq / 32, 32, 0, stream>>>(Q, K, V, static_cast<float*>(a->O), a->Nk);
  return cudaGetLastError();
}
"""
ROW_BY_ROW = """    for (int r = 0; r < 32; ++r) {
      Ks[r][t] = K[(j + r) * 32 + t];
      Vs[r][t] = V[(j + r) * 32 + t];
    }"""
AHEAD = """    for (int r = 0; r < 32; ++r) k[r] = K[(j + r) * 32 + t], v[r] = V[(j + r) * 32 + t];
    __syncthreads();
    for (int r = 0; r < 32; ++r) Ks[r][t] = k[r], Vs[r][t] = v[r];"""


@pytest.mark.parametrize("copy", [ROW_BY_ROW, AHEAD], ids=["row by row", "across a barrier"])
def test_what_stays_in_registers_is_not_in_shared_memory(copy):
    kernel = load(source=BY_REGISTERS.replace("COPY", copy), device="cpu", quiet=True)
    steps = walk(kernel, *torch.randn(3, 1, 1, 64, 32)).steps
    for tile in (0, 1):
        (step,) = [s for s in steps if s.used and s.used["K"].first == 32 * tile]
        for held in (step.resident, step.used):
            assert {name: (r.first, r.last) for name, r in held.items()} == dict.fromkeys(
                "KV", (32 * tile, 32 * tile + 31)
            )
        assert step.resident["K"].bytes == step.resident["V"].bytes == 32 * 32 * 4


def test_the_orders_of_the_two_papers_are_seen():
    first, second = (walk(stem, *inputs(stem)) for stem in ("03_fa1_fp32", "04_fa2_fp32"))
    loads = {w.kernel: [t for s in w.steps for t in ("K", "Q") if t in s.read] for w in (first, second)}
    assert loads["03_fa1_fp32"].count("Q") == 32 and loads["04_fa2_fp32"].count("Q") == 1
    assert sum("O" in s.written for s in first.steps) > 30 and sum("O" in s.written for s in second.steps) == 1


def test_a_players_page_needs_nothing_else_and_says_what_it_shows(walked):
    player = Player(walked)
    page = player._repr_html_()
    assert not re.search(r"(src|href)=\"http|@import|fetch\(", page) and "%" + "NAME%" not in page
    data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page)[1])
    assert len(data["boxes"]) == len(data["words"]) == len(walked.steps) and data["hbm"][-1] == 1
    assert data["words"][0].startswith(f"Step 1 of {len(walked.steps)}: reads Q 0–")
    (alt,) = re.findall('<img alt="([^"]+)"', page)
    assert html.unescape(alt).startswith(player.title) and "counted by the emulator" in alt
    assert all(f'id="{name}"' in data["live"] for name in re.findall(r'aria-labelledby="([^"]+)"', data["live"]))
    without = re.sub(r"(?s)<script.*?</script>", "", page)
    assert "<button" not in without and "<img" in without, "where scripts are dropped the strip stands alone"
    assert len(page) < 80_000, "a notebook has room for it"


def test_the_boxes_are_where_the_rows_are():
    step = walk("04_fa2_fp32", *inputs("04_fa2_fp32"), block=1).steps[0]
    assert (step.read["Q"].first, step.read["Q"].last) == (128, 255)
    (scene, *_) = scenes(walk("04_fa2_fp32", *inputs("04_fa2_fp32"), block=1))
    x, y, _, height = scene["resident-Q"]
    assert x == SHARED_LEFT and y == TOP + HIGH / 2 and height == HIGH / 2


def test_S_is_as_high_as_the_queries_and_as_wide_as_the_keys():
    q, k, v = inputs("04_fa2_fp32")
    shown = scenes(walk("04_fa2_fp32", q[:, :, :128].contiguous(), k, v))
    first = {kind: next(scene[kind] for scene in shown if kind in scene) for kind in ("scores", "pv")}
    keys = {"scores": 64, "pv": 32}  # a tile of K, a slab of V, each with all 128 queries
    assert first == {kind: (SCORES_LEFT, TOP, HIGH * n / N, HIGH) for kind, n in keys.items()}


def test_O_is_read_in_the_left_half_of_its_column_and_written_in_the_right():
    (scene, *_) = [s for s in scenes(walk("03_fa1_fp32", *inputs("03_fa1_fp32"))) if {"read-O", "written-O"} <= {*s}]
    left = LEFT + 3 * (WIDE + GAP)
    assert [scene[f"{kind}-O"][::2] for kind in ("read", "written")] == [(left, WIDE / 2), (left + WIDE / 2, WIDE / 2)]


def test_what_has_no_steps_is_said():
    q, k, v = inputs("04_fa2_fp32")
    with pytest.raises(ValueError, match="no block 7"):
        walk("04_fa2_fp32", q, k, v, block=7)
    with pytest.raises(ValueError, match="no __syncthreads"):
        walk("01_naive", q, k, v)
    with pytest.raises(ValueError, match="softmax"):
        walk("02_online_softmax", q[0, 0])


def test_tensors_among_the_options_may_be_on_any_device(monkeypatch):
    """They are taken to the CPU as the inputs are; here a tensor that is there already stands for one of a GPU."""
    q, k, v = (x.half() for x in inputs("04_fa2_fp32", H=2))
    starts = torch.tensor([0, 100, N], dtype=torch.int32)
    taken = []
    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: taken.append(x.shape) or to_cpu(x))
    walk("20_causal_gqa", q, k, v, causal=True, cu_seqlens=(starts, starts))
    assert starts.shape in taken


def test_an_xray_after_a_walk_counts_as_before():
    kernel = "04_fa2_fp32"
    before = xray(kernel, *inputs(kernel)).to_frame()
    walk(kernel, *inputs(kernel))
    assert xray(kernel, *inputs(kernel)).to_frame().equals(before)
