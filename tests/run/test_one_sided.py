"""kernels/51_one_sided.cu and helpers.one_sided: right on 1 to 4 ranks of one process, every remote byte once, and nothing to be found."""

from __future__ import annotations

import dataclasses
import difflib
import re
from unittest.mock import Mock

import pytest
import torch

from helpers import CallError, load, one_sided, ring, rung, sass
from helpers.lessons.regions import body
from helpers.run import check, reference
from helpers.run.kernel import Kernel

EMULATOR_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def ranks(
    R: int,
    n: int,
    H: int = 2,
    Hkv: int = 1,
    D: int = 64,
    causal: bool = False,
    kind: str = "float16",
    device: str = "cpu",
    **options,
) -> tuple:
    """Inputs of the whole sequence, each rank's queries, and rooms."""
    torch.manual_seed(R * n + D)
    layout = "zigzag" if causal else "contiguous"
    whole = [torch.randn(1, h, R * n, D).to(getattr(torch, kind)).to(device) for h in (H, Hkv, Hkv)]
    q, k, v = ([ring.local(x, r, R, layout) for r in range(R)] for x in whole)
    return whole, q, one_sided.rooms(k, v, causal, **options)


def held_to_float64(whole: list, results: list, causal: bool, scale: float | None = None) -> None:
    layout = "zigzag" if causal else "contiguous"
    o = ring.whole([o for o, _ in results], layout)
    lse = ring.whole([lse[..., None] for _, lse in results], layout)[..., 0].contiguous()
    case = reference.Case("51", *whole, causal=causal, **({} if scale is None else {"scale": scale}))
    wrong = [c.explain() for c in check.compare(case, (o, lse)) if not c.ok]
    assert not wrong, "\n".join(wrong)


@EMULATOR_AND_GPU
@pytest.mark.parametrize(
    ("R", "n", "H", "Hkv", "D", "causal", "kind"),
    [
        (1, 100, 2, 2, 64, True, "bfloat16"),
        (2, 128, 2, 1, 64, False, "float16"),
        (2, 256, 2, 2, 128, False, "bfloat16"),
        (2, 512, 4, 1, 64, True, "bfloat16"),
        (3, 256, 2, 1, 128, True, "float16"),
        (4, 256, 2, 1, 64, True, "float16"),
    ],
)
def test_all_ranks_together_are_within_the_error_budget(R, n, H, Hkv, D, causal, kind, device):
    whole, q, rooms = ranks(R, n, H, Hkv, D, causal, kind, device)
    first = one_sided.together(q, rooms)
    held_to_float64(whole, first, causal)
    for room in rooms:  # other keys, the same flags: the next epoch
        room.k.mul_(-1)
    second = one_sided.together(q, rooms)
    held_to_float64([whole[0], -whole[1], whole[2]], second, causal)


@pytest.mark.parametrize(("R", "causal"), [(1, True), (2, False), (3, True)])
def test_long_sequences_are_attended_in_blocks(R, causal, monkeypatch):
    """Where the L2 doesn't hold a head's keys: the copies by 51, and rung 20 on them here."""
    monkeypatch.setattr(ring, "IN_L2", 2 * 100 * 64 * 2)  # a hundred keys
    whole, q, rooms = ranks(R, 256, H=4, Hkv=2, causal=causal)
    assert not any(one_sided._fits(of_rank, room) for of_rank, room in zip(q, rooms))
    held_to_float64(whole, one_sided.together(q, rooms), causal)


def test_a_negative_scale():
    whole, q, rooms = ranks(2, 128)
    held_to_float64(whole, one_sided.together(q, rooms, scale=-0.2), False, -0.2)


def traced(source: str | None = None, causal: bool = True, copiers: int = 1, rank: int = 0, n: int = 256, **heads):
    """The X-ray of rank 0 of 2, after both have said that their keys are there."""
    _, q, rooms = ranks(2, n, causal=causal, copiers=copiers, **heads)
    kernel = load(source=source, device="cpu", quiet=True) if source else load(one_sided.STEM, device="cpu", quiet=True)
    kernel.launcher.threads = 2  # as many as copiers: they run at the same time
    return one_sided.xrayed(q, rooms, rank, kernel), kernel


@pytest.mark.parametrize(("causal", "copiers", "rank"), [(True, 1, 0), (True, 1, 1), (False, 2, 0)])
def test_every_remote_byte_crosses_the_link_once_and_nothing_is_found(causal, copiers, rank):
    seen, _ = traced(causal=causal, copiers=copiers, rank=rank)
    assert not seen.findings
    other = 1 - rank
    keys = 256 * 64 * 2 // (2 if causal and rank > other else 1)  # of an earlier rank half
    for letter in "KV":
        assert seen.tensors.loc[f"peer_{letter}[{other}]", "bytes_read"] == keys
        assert seen.tensors.loc[f"near_{letter}", "bytes_written"] == keys


SEEDED = {
    "the wait for a tile": ("if (!there) fa::await_gpu(arrived, a.epoch);", "", "race", r"near_K.*arrived\[\d\], which block 1"),
    "the fence before TMA": (
        "if (!all_there) fa::fence_proxy_async_global(); // TMA reads what the flag speaks of", "", "proxy fence", "near_K",
    ),
    "the wait for a copy's end": ("fa::cp_async_bulk_wait_group<1>(); //", "//", "race", "near_K"),
    "the wait for the peer": (
        "fa::await_sys(a.signals[a.rank] + tile.rank, a.epoch);", "", "race", r"reads peer_K\[1\].*no flag with .acquire.sys",
    ),
    "the scope of that wait": (
        "fa::await_sys(a.signals[a.rank] + tile.rank", "fa::await_gpu(a.signals[a.rank] + tile.rank", "race", r"peer_K\[1\]",
    ),
    "the order of done": (
        "  for (int i = 0; i < min(slots, mine); ++i) ask(i);\n",
        "  for (int i = 0; i < min(slots, mine); ++i) ask(i);\n  for (int r = 0; r < a.ranks; ++r)\n"
        "    if (r != a.rank) fa::publish_sys(a.signals[r] + fa::done_signal(a.rank, blockIdx.x), a.epoch);\n",
        "overwritten", r"sets signals\[1\]\[8\] for another GPU while .* peer_K\[1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_what_is_left_out_is_found(name):
    old, new, kind, words = SEEDED[name]
    seen, _ = traced(rung(one_sided.STEM).replace(old, new))
    assert any(f.kind == kind and re.search(words, f.text) for f in seen.findings), seen.findings


def test_flags_are_needed_until_the_last_copy_is_there():
    """A CTA that takes it for granted after its first query tile reads keys that may not have arrived."""
    three_ctas = rung(one_sided.STEM).replace(
        "const unsigned ctas = unsigned(min(", "const unsigned ctas = 3; unsigned(min("
    )
    taken = "if (!fa::is_set_gpu(a.arrived + all - c, a.epoch)) return false;"
    assert three_ctas.count(taken) == 1
    many = {"n": 512, "H": 8, "Hkv": 4, "copiers": 2}
    assert not traced(three_ctas, **many)[0].findings
    found = traced(three_ctas.replace(taken, ""), **many)[0].findings
    assert any(f.kind == "race" and "near_K" in f.text for f in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64_t(head) * tiles + tiles - 1 - t}", "int64_t(head) * tiles + t}"),  # from the other end of near_K
        (
            "int row = far.rows - Bc, last = far.rows - others;",
            "int row = others - Bc, last = 0;",
        ),  # an early piece sees a late rank's keys
        ("(a.rank - 1 - step + a.ranks) % a.ranks", "(a.rank + 1 + step) % a.ranks"),
        ("work.piece * pieces.rows + row", "row"),
    ],
)
def test_the_error_rule_notices_a_seeded_bug(old, new):
    kernel = load(source=rung(one_sided.STEM).replace(old, new), device="cpu", quiet=True)
    whole, q, rooms = ranks(3, 256, causal=True)
    results = one_sided.together(q, rooms, kernel=kernel)
    with pytest.raises(AssertionError):
        held_to_float64(whole, results, True)


def test_who_never_announces_is_waited_for_and_the_line_told():
    _, q, rooms = ranks(2, 128)
    kernel = Kernel(rung(one_sided.STEM), "cpu")
    kernel.launcher.timeout = 3
    rooms[0].epoch = 1
    with pytest.raises(RuntimeError, match=r"stopped .* last looked at signals\[0\]\[1\]"):
        kernel(q[0], rooms[0].k, rooms[0].v, peers=rooms[0].peers("attend"))


def test_nvcc_compiles_it_without_spills():
    used = sass.resources(rung(one_sided.STEM), "sm_90a")
    assert len(used) == 5  # two D, two dtypes, and the flags alone
    assert not used[["spill_store_bytes", "spill_load_bytes", "stack_bytes"]].any(axis=None)


def test_what_it_does_not_take_is_said():
    kernel = load(one_sided.STEM, device="cpu", quiet=True)
    whole, q, rooms = ranks(2, 128)
    room = rooms[0]
    with pytest.raises(CallError, match="takes peers="):
        kernel(q[0], room.k, room.v)
    with pytest.raises(CallError, match="the same multiple of 256 under a causal mask"):
        kernel(q[0], room.k, room.v, causal=True, peers=room.peers())
    with pytest.raises(CallError, match="K of rank 1 is .*contiguous"):
        room.keys = (room.keys[0], room.keys[1][:, :, ::2])
        kernel(q[0], room.k, room.v, peers=room.peers())
    with pytest.raises(CallError, match="K of rank 1 starts at address 2 modulo 16"):
        shifted = torch.empty(room.k.numel() + 1, dtype=room.k.dtype)[1:].view(room.k.shape)
        room.keys = (room.keys[0], shifted)
        kernel(q[0], room.k, room.v, peers=room.peers())
    with pytest.raises(CallError, match="epoch is 0; calls are numbered from 1"):
        kernel(q[0], room.k, room.v, peers=dataclasses.replace(room.peers(), epoch=0))
    plan = ring.Plan(None, 0, (128, 256), "contiguous", False)
    with pytest.raises(ValueError, match="have 128, 256 rows"):
        one_sided.share(room.k, plan)
    with pytest.raises(ValueError, match="51 takes zigzag"):
        one_sided.share(room.k, ring.Plan(None, 0, (128, 128), "striped", True))
    with pytest.raises(ValueError, match="together"):
        one_sided.share(room.k, ring.Plan(None, 0, (128, 128), "contiguous", False))


def test_a_refused_call_counts_for_no_rank():
    """The other ranks count only calls that were launched: a refused one may not be an epoch of its own."""
    _, q, rooms = ranks(1, 128)
    one_sided.attend(q[0], rooms[0])
    with pytest.raises(CallError, match="bfloat16"):
        one_sided.attend(q[0].bfloat16(), rooms[0])
    assert rooms[0].epoch == 1


def test_a_call_that_could_not_start_counts_for_no_rank(monkeypatch):
    """Whatever the error: memory may run out before anything is launched."""
    _, q, rooms = ranks(1, 128)
    kernel = one_sided.op.loaded(one_sided.STEM, "cpu")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(kernel, "_run", Mock(side_effect=MemoryError))
        one_sided.attend(q[0], rooms[0])
    assert rooms[0].epoch == 0
    one_sided.attend(q[0], rooms[0])


def test_after_an_error_ranks_of_one_process_begin_anew():
    """Otherwise one would wait for ever for what another has announced in the call that failed."""
    whole, q, rooms = ranks(2, 128)
    for _ in range(2):
        with pytest.raises(CallError, match="float32"):
            one_sided.together([q[0], q[1].float()], rooms)
        held_to_float64(whole, one_sided.together(q, rooms), False)


def test_the_consumers_are_those_of_32():
    """But for where a piece's rows and keys begin and end: what is fixed in 32 is to be fixed here."""
    theirs, mine = (body(which, "consumer").splitlines() for which in ("32_ping_pong", one_sided.STEM))
    lines = [*difflib.ndiff(theirs, mine)]
    gone, new = ([line for line in lines if line.startswith(sign)] for sign in ("- ", "+ "))
    assert len(gone) <= 8 and all(re.search(r"a\.Nq|a\.Nk|work = \{", line) for line in gone), gone
    broken = (
        "of_lane_0(read.j_last)",
        "max(row0 + 63",
        ": keys - 1;",
    )  # second and third lines of what doesn't fit into one
    assert len(new) <= 12 and all(
        "piece" in line or "keys" in line or any(b in line for b in broken) for line in new
    ), new
