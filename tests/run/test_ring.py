"""Attention over several ranks against float64, with gradients: every layout, uneven lengths, grouped heads, all dtypes."""

from __future__ import annotations

from functools import cache

import pytest
import ring_programs as programs
import torch

from helpers import compare, load, merging, reference, ring

RING, GATHER, ULYSSES = "ring_attention", "all_gather_attention", "ulysses_attention"
EVERYWHERE = [  # at every number of ranks
    {"how": RING, "N": 48},
    {"how": RING, "N": 53, "H": 4, "Hkv": 2},  # uneven, and grouped heads
    {"how": RING, "N": 53, "causal": True},
    {"how": RING, "N": 48, "causal": True, "layout": "zigzag", "again": True},
    {"how": RING, "N": 53, "causal": True, "layout": "striped"},
    {"how": RING, "N": 48, "D": 128, "dtype": "bf16", "H": 4, "Hkv": 1, "causal": True, "layout": "zigzag"},
    {"how": RING, "N": 53, "dtype": "fp32"},
    {"how": GATHER, "N": 53, "H": 4, "Hkv": 2},
    {"how": GATHER, "N": 53, "causal": True},
    {"how": GATHER, "N": 48, "causal": True, "layout": "zigzag"},
]
HOPPER = {"kernel": "32_ping_pong", "N": 48, "how": RING, "again": True}  # 32 and 33: the same bits, gradients too
TEN_KEYS = 2 * 10 * 64 * 2  # bytes: blocks are cut into smaller ones, as those of long sequences are
RUNS = {
    2: [
        *EVERYWHERE,
        HOPPER | {"causal": True, "layout": "zigzag"},
        HOPPER | {"N": 49, "causal": True, "layout": "striped", "B": 2},
        {"how": RING, "N": 40, "rows": [9, 31], "causal": True},  # as uneven as can be
        {"how": RING, "N": 48, "causal": True, "layout": "zigzag", "again": True, "in_l2": TEN_KEYS},
        {"how": RING, "N": 53, "causal": True, "layout": "striped", "H": 4, "Hkv": 2, "in_l2": TEN_KEYS},
        {"how": RING, "N": 53, "dtype": "bf16", "in_l2": TEN_KEYS},
        {"how": ULYSSES, "N": 53, "H": 4, "Hkv": 2, "causal": True, "layout": "striped"},
        {"how": ULYSSES, "N": 48, "causal": True, "layout": "zigzag"},
        {"how": ULYSSES, "N": 53, "dtype": "bf16"},
        {"how": GATHER, "N": 48, "causal": True, "layout": "zigzag", "planned": True},
    ],
    3: [*EVERYWHERE, {"how": RING, "N": 5, "causal": True, "layout": "striped"}],  # ranks of one row and of two
    4: [
        EVERYWHERE[0],
        EVERYWHERE[3],
        {"how": RING, "N": 6, "causal": True, "layout": "striped"},
        {"how": RING, "N": 96, "causal": True, "layout": "zigzag", "in_l2": TEN_KEYS},
        {"how": GATHER, "N": 53, "causal": True},
        {"how": ULYSSES, "N": 56, "H": 4, "Hkv": 4, "causal": True, "layout": "zigzag"},
    ],
}


@cache
def results(ranks: int) -> list:
    """Of every rank what programs.attend gives for RUNS[ranks]."""
    return ring.launch(programs.attend, ranks, RUNS[ranks], device="cpu", timeout=400, quiet=True)


def held(run: dict, found: list) -> None:
    """A run's results, put together, against float64 by the error rule."""
    run = {**run}
    causal, layout = run.pop("causal", False), run.pop("layout", "contiguous")
    rows = run.pop("rows", None)
    for name in ("how", "again", "kernel", "in_l2", "planned"):
        run.pop(name, None)
    q, k, v, do = programs.tensors(**run)
    parts = [list(x) for x in zip(*found)]
    o, *grads = [torch.cat(x, 2) if rows else ring.whole(x, layout) for x in parts]
    forward = reference.Case("o", q, k, v, causal=causal)
    checked = compare(forward, (o, forward.baseline()[1])) + compare(
        reference.Case("gradients", q, k, v, do=do, causal=causal), tuple(grads)
    )
    assert all(c.ok for c in checked), "\n".join(c.explain() for c in checked if not c.ok)


@pytest.mark.parametrize(
    ("ranks", "number"), [(ranks, number) for ranks, runs in RUNS.items() for number in range(len(runs))]
)
def test_is_within_the_error_rule_of_one_kernel(ranks, number, pytestconfig):
    if ranks == 3 and not pytestconfig.option.all:
        pytest.skip("three ranks with --all: two show every layout, four that parts are more than two")
    held(RUNS[ranks][number], [of_rank[number] for of_rank in results(ranks)])


def test_more_than_two_parts_are_summed_up_in_float32():
    """Four finished parts, each rounded to 16 bits, merged in float64: the ring's O is that, rounded once."""
    attend = load("20_causal_gqa", device="cpu", quiet=True)
    q, k, v = ([part.contiguous() for part in x.split(12, 2)] for x in programs.tensors(48)[:3])
    for rank, of_rank in enumerate(results(4)):
        o, lse = torch.zeros(q[rank].shape).double(), torch.full(q[rank].shape[:3], -torch.inf).double()
        for keys, values in zip(k, v):
            o, lse = merging.merge(o, lse, *attend(q[rank], keys, values))
        ulp = torch.finfo(torch.float16).eps * 2.0 ** o.abs().log2().floor().clamp(min=-14)
        assert ((of_rank[0][0].double() - o).abs() / ulp).max() < 1


def test_one_rank_is_one_kernel():
    runs = [{"how": RING, "N": 33, "causal": True, "layout": "striped"}, {"how": RING, "N": 34, "dtype": "bf16"}]
    (found,) = ring.launch(programs.attend, 1, runs, device="cpu", quiet=True)
    for run, parts in zip(runs, found):
        held(run, [parts])


def test_what_a_rank_has_wrong_every_rank_says():
    expected = {
        "shape": "rank 1: q (1, 2, 8, 64), k (1, 1, 8, 32), v (1, 2, 8, 64); each rank has as many keys as queries, "
        "and H a multiple of Hkv",
        "heads": "rank 1 has q (1, 1, n, 64), rank 0 (1, 2, n, 64); they have to be the same",
        "dtype": "rank 1 has dtype torch.bfloat16, rank 0 torch.float16; they have to be the same",
        "mask": "rank 1 has causal True, rank 0 False; they have to be the same",
        "zigzag": "the ranks have 8, 7 rows; zigzag needs the same even number of each",
        "copiers": "the ranks have 8, 9 copiers; they have to be as many on each",
        "mixed": "rank 1: q float16, k bfloat16, v bfloat16; they have to be the same",
        "fp32": "float32 goes through 04_fa2_fp32, which doesn't take a causal mask: use fp16 or bf16",
    }
    for of_rank in ring.launch(programs.refusals, 2, list(expected), device="cpu"):
        assert of_rank == list(expected.values())


@pytest.mark.parametrize("how", [RING, GATHER, ULYSSES])
@pytest.mark.parametrize(
    ("lengths", "asked", "words"),
    [
        ((4, 12), {}, "q has 8 rows, the plan 4"),
        ((8, 8), {"causal": False}, "causal is False, the plan's True"),
        ((8, 8), {"causal": True, "layout": "contiguous"}, "layout is 'contiguous', the plan's 'zigzag'"),
    ],
)
def test_a_plan_of_other_lengths_mask_or_layout_is_refused(how, lengths, asked, words):
    q, k, v, _ = programs.tensors(8)
    with pytest.raises(ValueError, match=words):
        getattr(ring, how)(q, k, v, plan=ring.Plan(None, 0, lengths, "zigzag", True), **asked)


def test_gathered_keys_in_stripes_are_refused_under_a_mask():
    """Each run of a rank's rows is one causal call, and a stripe is no run."""
    q, k, v, _ = programs.tensors(8)
    with pytest.raises(ValueError, match="not striped"):
        ring.all_gather_attention(q, k, v, plan=ring.Plan(None, 0, (8, 8), "striped", True))


def test_the_rows_of_all_ranks_are_the_sequence():
    x = torch.arange(2 * 3 * 48 * 4.0).view(2, 3, 48, 4)
    for layout in ring.LAYOUTS:
        parts = [ring.local(x, rank, 4, layout) for rank in range(4)]
        assert torch.equal(ring.whole(parts, layout), x)
    for layout, words in (("zigzag", "the same even number"), ("striped", "deals them out in turn")):
        with pytest.raises(ValueError, match=words):
            ring.whole([x[:, :, :3], x[:, :, :4]], layout)


@pytest.mark.parametrize(
    ("back_ends", "by_nccl"),
    [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False), ("cpu:gloo", False)],
)
def test_a_group_may_have_a_back_end_for_each_kind_of_device(monkeypatch, back_ends, by_nccl):
    """`init_process_group` without a back end gives both: NCCL is for GPU tensors then, whatever `get_backend` calls the group."""
    monkeypatch.setattr(ring.dist, "get_backend_config", lambda group: back_ends)
    assert ring._by_nccl(None, torch.device("cuda:1")) == by_nccl
    assert not ring._by_nccl(None, torch.device("cpu"))


# On GPUs, the same: one each with NCCL; two ranks on one with gloo


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks):
    runs = [
        {"how": RING, "N": 512},
        {"how": RING, "N": 512, "causal": True, "layout": "zigzag", "D": 128, "dtype": "bf16", "again": True},
        {"how": RING, "N": 509, "causal": True, "layout": "striped", "H": 4, "Hkv": 2},
        {"how": GATHER, "N": 512, "causal": True, "layout": "zigzag"},
        {"how": ULYSSES, "N": 512, "H": 4, "Hkv": 4, "causal": True, "layout": "zigzag"},
    ]
    found = ring.launch(programs.attend, ranks, runs, timeout=300, quiet=True)
    for number, run in enumerate(runs):
        held(run, [of_rank[number] for of_rank in found])


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own, whose memory the others read"
)
def test_one_sided_on_gpus():
    runs = [
        {"N": 2048, "dtype": "bf16", "H": 4, "Hkv": 4, "D": 128},
        {"N": 4096, "causal": True, "D": 128, "H": 8, "Hkv": 2},
        {"N": 4096, "causal": True, "H": 4, "Hkv": 1, "dtype": "bf16"},
    ]
    found = ring.launch(programs.one_sided_calls, 2, runs, timeout=300, quiet=True)
    for number, run in enumerate(runs):
        layout = "zigzag" if run.get("causal") else "contiguous"
        held({"how": RING, "layout": layout, **run}, [of_rank[number] for of_rank in found])
