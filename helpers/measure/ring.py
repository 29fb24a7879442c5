"""The record of attention over several GPUs: time, memory and a timeline, of ours and of what PyTorch has.

`record_ring` starts a rank for each GPU. All ranks call the same implementations in the same random order; a burst's time is that of
the slowest rank. One GPU's time is taken in the same rounds, on every GPU at once, for the whole problem.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from .. import record
from ..run import one_sided, ring, ring_time
from ..run.kernel import load
from ..run.ranks import Me, launch

STEM, ONE, FAR = "50_ring", "one GPU", one_sided.STEM
ANY, SAME = f"{STEM} in any order", "one GPU, same bits"
HOPPER, AMPERE = ("32_ping_pong", "33_backward_wgmma"), ("20_causal_gqa", "23_backward_mma")
WIDTH = 2048  # H * D
LENGTHS = (16384, 32768, 65536, 262144)
ROUNDS = {16384: 7, 32768: 7, 65536: 5, 131072: 5, 262144: 3, 1048576: 3}  # a round at the longest takes seconds
TIMELINE = 65536  # N
STRONG, WEAK = (65536, 262144, 1048576), 16384  # more than two ranks: N; N of each rank
BURST_MS, LONG_MS = 20.0, 200.0  # a call that takes longer needs no other before it;
SECOND = 1000.0  # of one that takes longer than this, in milliseconds, the second, which is warm, is the first round's
IDLE = 0.025  # seconds between a warm-up and its burst: all begin on cards that are as cool
CLOCK = 2_000_000  # cycles in a millisecond, at most
SECONDS = 420  # start no case later
TINY = (64,)  # of a dry run on the emulator
COLUMNS = ["name", "ranks", "layout", "passes", "dtype", "causal", "B", "H", "Nq", "Nk", "D", "Hkv", "round", "ms"]
PYTORCH = "context_parallel {}"


def record_ring(
    dry: bool = False, ranks: int | None = None, largest: bool = False, lengths: tuple[int, ...] = ()
) -> None:
    """Measures and records ring attention on all GPUs of this machine (data/<gpu>-x<ranks>/50_ring.*); prints what it found.

    dry: on the emulator with two ranks and tiny tensors, to see that everything runs; records nothing. largest: instead of all that,
    one forward pass at the largest N whose tensors fit. lengths: times these N alone, and renews their rows of the record, with that of
    TIMELINE its timeline. Raises
    RuntimeError where there are fewer than two GPUs, or the rows to keep are of other kernels, RanksError where a rank fails,
    AssertionError where a result is wrong.
    """
    import torch

    gpus = torch.cuda.device_count()
    if not dry and (gpus < 2 or (ranks is not None and ranks > gpus)):
        raise RuntimeError(f"{gpus} GPUs here; the record of {STEM} needs at least two, and as many as ranks")
    if ranks is None:
        ranks = 2 if dry else gpus
    device = "cpu" if dry else "cuda"
    if largest:
        (found, *_) = launch(run_largest, ranks, device=device, timeout=600)
        print(
            "N = {N:,} on {ranks} ranks, causal, zigzag, H·D = {width}: {seconds:.1f} s, {gib:.1f} GiB at most".format(
                **found, width=found["H"] * found["D"], gib=found["bytes"] / 2**30
            )
        )
        if not dry:
            save_largest(found, record.conditions())
        return
    begun = time.time()
    if not dry:  # compiled once, not by every rank
        for stem in (STEM, *_rungs(device), *([FAR] if _rungs(device) == HOPPER else [])):
            load(stem, device=device)
    results = launch(run, ranks, dry, begun, lengths, device=device, timeout=540)
    first = results[0]
    rows = [
        (*row[:-1], max(result["times"][i][-1] for result in results)) for i, row in enumerate(first["times"])
    ]  # the slowest rank's
    frames = {
        "ring": pd.DataFrame(rows, columns=COLUMNS),
        "ring_memory": pd.DataFrame(first["memory"], columns=["name", "ranks", "passes", "B", "H", "N", "D", "bytes"]),
        "ring_timeline": pd.DataFrame(
            [event for result in results for event in result["timeline"]], columns=["rank", "what", "begin", "end"]
        ),
    }
    for line in first["skipped"]:
        print(f"skipped: {line}")
    if dry:
        print(frames["ring"].groupby(["name", "layout", "causal", "passes"]).size().rename("bursts").to_string())
        print("a dry run, without a GPU: these ran, and nothing is recorded")
        return
    print(summary(frames["ring"]).round(3).to_string(index=False))
    print(model_error(frames["ring"]).round(3).to_string(index=False))
    print(goals(frames["ring"]).round(3).to_string(index=False))
    known = record.conditions()
    known["device"] = f"{known['device']} x{ranks}"
    if lengths:
        frames["ring"] = _renewed(frames["ring"], known["device"])
    rungs = [STEM, *first["rungs"], *([FAR] if FAR in set(frames["ring"]["name"]) else [])]
    if lengths:
        frames = {kind: frame for kind, frame in frames.items() if len(frame)}
    if first["link"]:
        extra = {"method": " ".join(link.__doc__.split()), "checked": first["checked"]}
        frame = pd.DataFrame(first["link"], columns=LINK)
        path = record.save(FAR, "link", frame, known=known, rungs=[FAR, HOPPER[0]], extra=extra)
        print(
            frame.groupby(["name", "N", "D", "copiers"])[["ms", "bytes"]]
            .median()
            .eval("bytes / ms / 1e6")
            .round()
            .to_string()
        )
        print(f"wrote {path.name}")
    for kind, frame in frames.items():
        extra = {"method": " ".join(__doc__.split()), "skipped": first["skipped"], "checked": first["checked"]}
        path = record.save(STEM, kind, frame, known=known, rungs=rungs, extra=extra)
        print(f"wrote {path.name}")


def save_largest(found: dict, known: dict) -> None:
    """Records what run_largest found, under these conditions of one of the GPUs."""
    known = known | {"device": f"{known['device']} x{found['ranks']}"}
    extra = {"method": " ".join(run_largest.__doc__.split())}
    record.save(STEM, "ring_largest", pd.DataFrame([found]), known=known, rungs=[STEM, HOPPER[0]], extra=extra)


def _renewed(new: pd.DataFrame, device: str) -> pd.DataFrame:
    """The device's record with these rows in the place of those of the same lengths. RuntimeError if the others are of other kernels."""
    old = record.load(STEM, "ring", device=device)
    if old["stale"].any():
        raise RuntimeError(f"the record of {device} is of other kernels: record all lengths")
    kept = old.loc[~old["Nq"].isin(new["Nq"]), COLUMNS]
    return pd.concat([kept, new], ignore_index=True).sort_values("Nq", kind="stable", ignore_index=True)


def _rungs(device: str) -> tuple[str, str]:
    """The rungs, forward and backward, that compute on a device."""
    import torch

    return HOPPER if device != "cpu" and torch.cuda.get_device_capability() == (9, 0) else AMPERE


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each implementation the median milliseconds of a case, and `speedup` over one GPU: the median of the rounds' ratios, with
    the lowest and the highest. `beside`: which of one GPU's, with the same bits where both can do that."""
    keys = ["D", "Nq", "causal", "passes", "Hkv"]
    paired = frame[~frame["name"].isin([ONE, SAME])].fillna({"layout": ""})
    for name in (ONE, SAME):
        alone = frame.loc[frame["name"] == name, [*keys, "round", "ms"]].rename(columns={"ms": name})
        paired = paired.merge(alone, on=[*keys, "round"], how="left")
    same = (paired["name"] == STEM) & paired[SAME].notna()
    paired = paired.assign(beside=same.map({True: SAME, False: ONE}), one=paired[SAME].where(same, paired[ONE]))
    rows = []
    for key, of_case in paired.groupby([*keys, "name", "layout", "beside"], sort=False):
        ratios = of_case["one"] / of_case["ms"]
        spread = {"speedup": ratios.median(), "lowest": ratios.min(), "highest": ratios.max()}
        told = dict(zip([*keys, "name", "layout", "beside"], key))
        rows.append(told | {"ms": of_case["ms"].median()} | spread)
    return pd.DataFrame(rows)


def model_error(frame: pd.DataFrame) -> pd.DataFrame:
    """Our ring's milliseconds and speedup beside the model's: `ms`, `predicted_ms`, `measured`, `predicted`, and `error`, predicted /
    measured - 1."""
    rows = []
    found = summary(frame)
    for row in found[found["name"] == found["passes"].map({"forward": STEM, "both": ANY})].itertuples():
        ranks = int(frame["ranks"].max())
        problem = ring_time.Problem(N=row.Nq, H=WIDTH // row.D, Hkv=row.Hkv, D=row.D, causal=bool(row.causal))
        machine, both = ring_time.Machine(), row.passes == "both"
        told = ring_time.speedup(problem, machine, ranks, row.layout, both)
        times = {"ms": row.ms, "predicted_ms": 1e3 * ring_time.seconds(problem, machine, ranks, row.layout, both)}
        case = {"D": row.D, "N": row.Nq, "causal": row.causal, "passes": row.passes, "layout": row.layout}
        rows.append(case | times | {"measured": row.speedup, "predicted": told, "error": told / row.speedup - 1})
    return pd.DataFrame(rows)


# What the ring is meant to reach on two GPUs under a causal mask, in zigzag: speedup over `one GPU`, and over peers
GOALS = (("forward", 65536, 1.92), ("forward", 16384, 1.80), ("both", 65536, 1.85))
PEERS = {"context_parallel": 1.15, "all-gather + SDPA": 1.10}
OVER_RING = ((65536, 1.0), (32768, 1.05))  # 51 over 50
SCALED = {4: 3.7, 8: 7.2}  # of so many ranks, at N = 262144: speedup over `one GPU`


def goals(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each goal and case: `what`, the least that was reached in any D, the `goal`, and `reached`. The gradients are summed in any
    order, as one GPU's and the peers' are; beside one GPU's with the same bits, ours have them too."""
    found = summary(frame[(frame["Hkv"] * frame["D"] == WIDTH)])
    found = found[found["layout"] != "striped"]
    mine = found[~((found["causal"] == 1) & (found["layout"] == "contiguous"))]
    same = mine[(mine["name"] == STEM) & (mine["beside"] == SAME)]
    mine = mine[mine["name"] == mine["passes"].map({"forward": STEM, "both": ANY})]
    rows = []
    if (ranks := int(frame["ranks"].max())) > 2:
        cases = mine[(mine["passes"] == "forward") & (mine["Nq"] == 262144)]
        goal = SCALED.get(ranks, 0.9 * ranks)
        rows += [(f"forward, N = 262144, {ranks} GPUs over one", cases["speedup"].min(), goal)] if len(cases) else []
    for passes, N, goal in GOALS if ranks == 2 else ():
        for cases, words in ((mine, ""), (same, ", same bits")):
            lengths, cases = _of_lengths(cases[cases["passes"] == passes], N)
            rows += [(f"{passes}, {lengths}, over one GPU{words}", cases["speedup"].min(), goal)] if len(cases) else []
    keys = ["D", "Nq", "causal", "passes", "Hkv"]
    for peer, goal in PEERS.items():
        theirs = found[found["name"].str.startswith(peer)].groupby(keys)["ms"].min().rename("theirs")
        paired = mine.merge(theirs.reset_index(), on=keys)
        for passes, cases in paired.groupby("passes"):
            rows.append((f"{passes}, over {peer}", (cases["theirs"] / cases["ms"]).min(), goal))
    far = found[found["name"] == FAR].merge(mine, on=[*keys, "layout"], suffixes=("", "_ring"))
    for N, goal in OVER_RING:
        lengths, cases = _of_lengths(far, N)
        least = (cases["ms_ring"] / cases["ms"]).min()
        rows += [(f"{FAR} over {STEM}, {lengths}", least, goal)] if len(cases) else []
    table = pd.DataFrame(rows, columns=["what", "least", "goal"])
    return table.assign(reached=table["least"] >= table["goal"])


def _of_lengths(cases: pd.DataFrame, N: int) -> tuple[str, pd.DataFrame]:
    """In words, and the cases: those of the short lengths up to N, or of N and all longer."""
    if N < LENGTHS[-2]:
        return f"N to {N}", cases[cases["Nq"] <= N]
    return f"N from {N}", cases[cases["Nq"] >= N]


# What runs in each rank


def run(me: Me, dry: bool, begun: float, lengths: tuple[int, ...] = ()) -> dict:
    """All measurements of one rank: `times` (rows of COLUMNS, this rank's milliseconds), memory, timeline, link, skipped, checked; of
    `lengths` alone times, if there are any, and the timeline."""
    found: dict[str, Any] = {
        "times": [],
        "skipped": [],
        "checked": check(me, dry),
        "rungs": list(_rungs(me.device)),
        "link": [],
        "memory": [],
        "timeline": [],
    }
    if not dry:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        if _rungs(me.device) == HOPPER and not lengths:
            found["link"] = link(me)
    for case in [case for case in cases(me.ranks, dry) if not lengths or case["N"] in lengths]:
        if me.rank == 0:
            me.say(f"{time.time() - begun:4.0f} s: {case}")
        if not _least(me, time.time() - begun < SECONDS):
            found["skipped"].append(f"{case}: no time left")
            continue
        found["times"] += _case(me, dry, found["skipped"], **case)
    if not dry and not lengths:
        found["memory"] = memories(me)
    if not dry and (not lengths or TIMELINE in lengths):
        found["timeline"] = timeline(me)
    return found


def cases(ranks: int, dry: bool) -> list[dict]:
    """The cases, the shortest first: of two ranks every kind, of more how the time scales with them."""
    if ranks > 2 and not dry:
        return scaling(ranks)
    every = tuple(itertools.product((True, False), ("forward", "both")))
    few, forward = [(True, "both"), (False, "forward")], [(True, "forward")]
    made = []
    for N in TINY if dry else LENGTHS:
        for D in (64,) if dry else (128, 64):
            chosen = few if dry else forward if N == 32768 or (N, D) == (LENGTHS[-1], 64) else every
            if (N, D) == (LENGTHS[-1], 128):  # without a mask both passes of one GPU take seconds
                chosen = every[:3]
            for causal, passes in chosen:
                made.append({"N": N, "D": D, "causal": causal, "passes": passes, "Hkv": 2 if dry else WIDTH // D})
        if not dry:  # grouped heads: an eighth of the bytes
            made.append({"N": N, "D": 128, "causal": True, "passes": "forward", "Hkv": 2})
    return made


def scaling(ranks: int) -> list[dict]:
    """Strong scaling at the lengths STRONG, weak scaling at WEAK tokens a rank; D = 128. At the longest the forward pass alone: one
    GPU takes 22 seconds for both passes under a causal mask (`ring_time`), and four calls are made."""
    made = [
        {"N": N, "D": 128, "causal": causal, "passes": passes, "Hkv": WIDTH // 128}
        for N in sorted({*STRONG, WEAK * ranks})
        for causal, passes in itertools.product((True, False), ("forward", "both"))
    ]
    return [case for case in made if case["N"] < STRONG[-1] or case["passes"] == "forward"]


def _inputs(me: Me, N: int, D: int, Hkv: int, dry: bool) -> tuple:
    """Q, K, V and dO of N rows, normal random numbers: timings need no more agreement than their shapes."""
    import torch

    H = 2 if dry else WIDTH // D
    make = functools.partial(torch.randn, device=me.device, dtype=torch.bfloat16)
    return make(1, H, N, D), make(1, Hkv, N, D), make(1, Hkv, N, D), make(1, H, N, D)


def _case(me: Me, dry: bool, skipped: list[str], N: int, D: int, causal: bool, passes: str, Hkv: int) -> list[tuple]:
    """The rows of one case, of this rank. What fails on any rank is left out on all, and `skipped` says so."""
    import torch

    gc.collect()
    backward, H = passes == "both", 2 if dry else WIDTH // D
    whole = _inputs(me, N, D, Hkv, dry)
    parts = [x[:, :, : N // me.ranks].contiguous() for x in whole]
    calls, layouts = implementations(me, whole, parts, causal, backward, dry)
    bursts, first = {}, {}
    for name in list(calls):
        problem, ms = _attempt(me, calls[name])
        if not problem and ms >= LONG_MS:  # the first call may have compiled something
            problem, ms = _attempt(me, calls[name])
        if problem:
            skipped.append(f"{name}, N={N}, D={D}, causal {causal}, {passes}: {problem}")
            del calls[name]
            continue
        if ms > SECOND:
            first[name] = ms
        warm, hold = ms < LONG_MS, 0.0
        if warm:  # so may that of a short one; and how long does the host take?
            ms, host = (_slowest(me, x) for x in _timed(me, calls[name], 4, True))
            hold = 1.5 * host if host > ms / 2 and not dry else 0.0
        number = max(1, min(20, round(BURST_MS / ms)))
        bursts[name] = number, warm, number * hold
    order, rows, shape = random.Random(N + D), [], (1, H, N, N, D, Hkv)
    for number in range(2 if dry else ROUNDS[N]):
        for name in order.sample(list(calls), len(calls)):
            ms = first.pop(name) if name in first else _burst(me, calls[name], *bursts[name])
            told = name.split(" · ")[0], me.ranks, layouts[name], passes, "bf16", int(causal)
            rows.append((*told, *shape, number, ms))
    del calls, whole, parts
    if not dry:
        torch.cuda.empty_cache()
    return rows


Call = Callable[[], Any]


def implementations(
    me: Me, whole: tuple, parts: list, causal: bool, backward: bool, dry: bool
) -> tuple[dict[str, Callable[[], contextlib.AbstractContextManager[Call]]], dict[str, str]]:
    """By name, what prepares a call and gives it; and each one's layout. `whole`: the whole problem, which one GPU gets; `parts`: a
    rank's share of it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from ..run import op

    q, k, v, do = (x.detach().requires_grad_(backward and i < 3) for i, x in enumerate(parts))
    Q, K, V, dO = (x.detach().requires_grad_(backward and i < 3) for i, x in enumerate(whole))

    def back(o: Any, of: tuple, grad: Any) -> None:
        if backward:
            torch.autograd.grad(o, of, grad)

    def ours(function: Callable, layout: str, **options: Any) -> Callable:
        plan = ring.agree(q, k, v, None, causal, layout)
        return _ready(lambda: back(function(q, k, v, None, causal, layout, plan=plan, **options), (q, k, v), do))

    one = op.operator(ring.forward_stem(Q, K, causal))
    made = {ONE: _ready(lambda: back(one(Q, K, V, None, causal)[0], (Q, K, V), dO))}
    layouts = {ONE: ""}
    N, layout = whole[0].shape[2], "zigzag" if causal else "contiguous"
    every = N < LENGTHS[-1]  # of the longest only what counts
    for each in ring.LAYOUTS if causal and every and not backward else (layout,):
        made[f"{STEM} · {each}"], layouts[f"{STEM} · {each}"] = ours(ring.ring_attention, each), each
    if backward:
        # Of the gradients, the sums in any order, as one GPU's are by default; and one GPU's with the same bits.
        made[ANY], layouts[ANY] = ours(ring.ring_attention, layout, deterministic=False), layout
        if every:
            made[SAME], layouts[SAME] = functools.partial(_same_bits, made[ONE]), ""
    if not backward and _rungs(me.device) == HOPPER and not q.shape[2] % 256:
        made[FAR], layouts[FAR] = _far(q, k, v, ring.agree(q, k, v, None, causal, layout)), layout
    alternatives = {"all-gather": ring.all_gather_attention} if every else {}
    if every and k.shape[1] % me.ranks == 0:
        alternatives["Ulysses"] = ring.ulysses_attention
    for name, function in alternatives.items():
        made[name], layouts[name] = ours(function, layout), layout
    if dry:
        return made, layouts
    if N <= LENGTHS[-1]:
        made["all-gather + SDPA"] = ours(ring.all_gather_attention, layout, attend=_sdpa(sdpa))
        layouts["all-gather + SDPA"] = layout
    for method in ("allgather", "alltoall"):
        name = PYTORCH.format(method)
        made[name] = functools.partial(_context_parallel, me, method, whole, causal, backward)
        layouts[name] = "zigzag" if causal else "contiguous"
    return made, layouts


def _far(q: Any, k: Any, v: Any, plan: ring.Plan, copiers: int = one_sided.COPIERS) -> Callable:
    """51, whose keys lie in memory that all ranks read: as a model's projection may write them there, copying them is not counted."""

    @functools.cache
    def room() -> one_sided.Room:
        made = one_sided.share(k, plan, copiers)
        made.k.copy_(k), made.v.copy_(v)
        return made

    @contextlib.contextmanager
    def prepare() -> Iterator[Call]:
        here = room()
        yield lambda: one_sided.attend(q, here)

    return prepare


LINK = ["name", "ranks", "copiers", "dtype", "H", "N", "D", "bytes", "round", "ms"]
COPIERS = (4, 8, 12, 16, 24, 32)


def link(me: Me) -> list[tuple]:
    """51 without a mask by the number of CTAs that copy: the copies alone, the whole call, and 32 with the next rank's K and V read where
    they are. A burst's time is that of the slowest rank; bytes: K and V that one rank fetches."""
    from ..run import op

    rows = []
    for N, D in ((16384, 128), (65536, 128), (16384, 64)):
        n, H = N // me.ranks, WIDTH // D
        q, k, v = (x[:, :, :n].contiguous() for x in _inputs(me, n, D, H, False)[:3])
        plan, fetched = ring.agree(q, k, v), 2 * (me.ranks - 1) * k.numel() * 2
        calls: dict[tuple, Callable] = {}
        for copiers in COPIERS:
            room = one_sided.share(k, plan, copiers)
            room.k.copy_(k), room.v.copy_(v)
            calls["copies alone", copiers] = functools.partial(_fetch, q, room)
            calls["whole call", copiers] = functools.partial(one_sided.attend, q, room)
        far = (me.rank + 1) % me.ranks
        calls["read directly", 0] = functools.partial(op.loaded(HOPPER[0], "cuda"), q, room.keys[far], room.values[far])
        for number in range(3):
            for (name, copiers), call in random.Random(number).sample(list(calls.items()), len(calls)):
                calls_of_it = 1 if name == "read directly" else 8
                ms = _slowest(me, _burst(me, _ready(call), calls_of_it, True, hold_ms=0.5 * calls_of_it))
                rows.append((name, me.ranks, copiers, "bf16", H, N, D, fetched, number, ms))
        del calls, room
    return rows


def _fetch(q: Any, room: one_sided.Room) -> None:
    from ..run import op

    op.loaded(FAR, "cuda")(q, room.k, room.v, causal=room.causal, peers=room.peers("announce", "fetch", "settle"))


def _ready(call: Call) -> Callable[[], contextlib.AbstractContextManager[Call]]:
    return lambda: contextlib.nullcontext(call)


@contextlib.contextmanager
def _same_bits(prepare: Callable) -> Iterator[Call]:
    """The same call with PyTorch's switch for deterministic algorithms on, by which our operators go."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would cost time, and is no part of the kernel
    try:
        with prepare() as call:
            yield call
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def _sdpa(sdpa: Callable) -> Callable:
    """cuDNN's attention. Its causal mask begins at the first key. Queries in the middle of the sequence are two calls of it, of the keys
    before them and of their own, and our merge; where a gradient or grouped heads are asked for, which its LSE doesn't take,
    FlashAttention-2 has a mask that ends at the last key."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    from ..run import op

    def with_lse(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> tuple:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return o, lse.reshape(q.shape[:3])

    def attend(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        before = k.shape[2] - q.shape[2] if causal else 0
        if before and (grouped or q.requires_grad):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                return sdpa(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), scale=scale, **grouped)
        if before:
            early = with_lse(q, k[:, :, :before], v[:, :, :before], False, scale)
            return op.loaded(STEM, "cuda")(*early, *with_lse(q, k[:, :, before:], v[:, :, before:], True, scale))[0]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v, is_causal=causal, scale=scale, **grouped)

    return attend


_mesh: list = []  # of PyTorch's context_parallel, made once


@contextlib.contextmanager
def _context_parallel(me: Me, method: str, whole: tuple, causal: bool, backward: bool) -> Iterator[Call]:
    """PyTorch's own, with cuDNN's attention; under a mask it deals out the rows as zigzag does. Entering splits its buffers over the
    ranks, which no burst counts."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = functional.scaled_dot_product_attention
    _attention.set_rotate_method(method)
    _attention._cp_options.enable_load_balance = causal  # it refuses to without a mask
    buffers = [x.detach().clone() for x in whole]
    if not _mesh:
        _mesh.append(init_device_mesh("cuda", (me.ranks,)))
    (mesh,) = _mesh
    options = {"buffers": buffers, "buffer_seq_dims": [2] * 4, "no_restore_buffers": set(buffers)}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(mesh, **options):
        q, k, v, do = buffers
        q, k, v = (x.requires_grad_(backward) for x in (q, k, v))

        def call() -> None:
            grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)
            if backward:
                torch.autograd.grad(o, (q, k, v), do)

        try:
            yield call
        except Exception:  # it takes its SDPA out of PyTorch's functional only where all went well
            functional.scaled_dot_product_attention = sdpa
            _attention._disable_context_parallel_dispatcher()
            raise
        for x in buffers:
            x.requires_grad_(False)


def _attempt(me: Me, prepare: Callable) -> tuple[str, float]:
    """Calls it once; what went wrong on any rank, in a line, or nothing, and the milliseconds of the slowest. (A rank that raises inside
    a collective leaves the others waiting, until the run's time is up: what can be refused is refused by all alike.)"""
    problem, begin = "", time.perf_counter()
    try:
        with prepare() as call:
            begin = time.perf_counter()
            call()
            _synchronize(me)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    ms = _slowest(me, (time.perf_counter() - begin) * 1e3)
    return ("" if _least(me, not problem) else problem or "failed on another rank"), ms


def _least(me: Me, value: float) -> float:
    """Of all ranks' values the least."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([value], device=me.device, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MIN)
    return x.item()


def _synchronize(me: Me) -> None:
    if me.device != "cpu":
        import torch

        torch.cuda.synchronize()


def _slowest(me: Me, ms: float) -> float:
    """Of all ranks' times the longest."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([ms], device=me.device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def _burst(me: Me, prepare: Callable, calls: int, warm: bool, hold_ms: float = 0.0) -> float:
    """Milliseconds per call of this rank, all ranks having begun together; warm: after a call that isn't counted. The GPU begins after
    `hold_ms`, when the host has queued the calls."""
    return _timed(me, prepare, calls, warm, hold_ms)[0]


def _timed(me: Me, prepare: Callable, calls: int, warm: bool, hold_ms: float = 0.0) -> tuple[float, float]:
    """As _burst; and the milliseconds that the host took to queue a call."""
    import torch
    import torch.distributed as dist

    with prepare() as call:
        if warm:
            call()
        _synchronize(me)
        time.sleep(IDLE if warm and me.device != "cpu" else 0)
        dist.barrier()
        begin = time.perf_counter()
        if me.device == "cpu":
            for _ in range(calls):
                call()
            ms = (time.perf_counter() - begin) * 1e3 / calls
            return ms, ms
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(hold_ms * CLOCK))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        host = (time.perf_counter() - begin) * 1e3 / calls
        end.synchronize()
        return start.elapsed_time(end) / calls, host


def check(me: Me, dry: bool) -> str:
    """Holds the ring's result and gradients to float64 by the error rule, and two runs to the same bits. AssertionError if it fails."""
    import torch
    import torch.distributed as dist

    from ..run import reference
    from ..run.check import compare

    N, H = (16 * me.ranks, 2) if dry else (1024 * me.ranks, 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, H, N, 64, generator=generator).bfloat16().to(me.device) for _ in range(4))
    for layout in ("contiguous", "zigzag", "striped"):
        runs = []
        for _ in range(2):
            mine = [ring.local(x, me.rank, me.ranks, layout).requires_grad_(i < 3) for i, x in enumerate((q, k, v, do))]
            o = ring.ring_attention(*mine[:3], None, True, layout)
            o.backward(mine[3])
            runs.append([o.detach(), *(x.grad for x in mine[:3])])
        same = range(4) if ring.forward_stem(q, k, True) == HOPPER[0] else range(1)  # 23's dQ is added up by atomics
        assert all(torch.equal(runs[0][i], runs[1][i]) for i in same), f"{layout}: not the same bits from run to run"
        gathered = []
        for x in runs[0]:
            parts = [torch.empty_like(x) for _ in range(me.ranks)]
            dist.all_gather(parts, x.contiguous())
            gathered.append(ring.whole(parts, layout))
        forward = reference.Case(f"O, {layout}", q, k, v, causal=True)
        checked = compare(forward, (gathered[0], forward.baseline()[1]))
        checked += compare(reference.Case(f"gradients, {layout}", q, k, v, do=do, causal=True), tuple(gathered[1:]))
        wrong = [c.explain() for c in checked if not c.ok]
        assert not wrong, "\n".join(wrong)
    far = _rungs(me.device) == HOPPER
    if far:
        for causal, layout in ((True, "zigzag"), (False, "contiguous")):
            mine = [ring.local(x, me.rank, me.ranks, layout) for x in (q, k, v)]
            with _far(*mine, ring.agree(*mine, None, causal, layout))() as call:
                runs = [call(), call()]
            assert all(torch.equal(a, b) for a, b in zip(*runs)), f"{FAR}: not the same bits from run to run"
            parts = [torch.empty_like(runs[0][0]) for _ in range(me.ranks)]
            dist.all_gather(parts, runs[0][0].contiguous())
            case = reference.Case(f"{FAR}, causal {causal}", q, k, v, causal=causal)
            wrong = [c.explain() for c in compare(case, (ring.whole(parts, layout), case.baseline()[1])) if not c.ok]
            assert not wrong, "\n".join(wrong)
    said = f"O and gradients of N = {N}, causal, three layouts, against float64; {'all' if len(same) > 1 else 'O'} twice, the same bits"
    return said + (f"; O of {FAR}, with and without a mask, too" if far else "")


def memories(me: Me) -> list[tuple]:
    """Peak bytes of this rank's ring and of one GPU's kernel: what is allocated during a call, with the inputs."""
    import torch

    from ..run import op

    rows = []
    for N in (16384, 65536, 262144, 1048576):
        for name, ranks in ((ONE, 1), (STEM, me.ranks)):
            if ranks == 1 and N > 262144:
                continue  # its time tells nothing new, and takes seconds
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            q, k, v = _inputs(me, N // ranks, 128, WIDTH // 128, False)[:3]
            if ranks == 1:
                op.operator(ring.forward_stem(q, k, True))(q, k, v, None, True)
            else:
                ring.ring_attention(q, k, v, None, True, "zigzag")
            torch.cuda.synchronize()
            rows.append((name, ranks, "forward", 1, WIDTH // 128, N, 128, torch.cuda.max_memory_allocated() - before))
            del q, k, v  # they would count as there before the next
    return rows


def timeline(me: Me, N: int = TIMELINE) -> list[tuple]:
    """What runs on this rank's GPU during one forward pass: (rank, what, begin, end), milliseconds from the end of a barrier, which all
    GPUs leave at the same time. what: "attention", "merge", "transfer" or "other"."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    q, k, v, _ = (x[:, :, : N // me.ranks].contiguous() for x in _inputs(me, N, 128, WIDTH // 128, False))
    plan = ring.agree(q, k, v, None, True, "zigzag")
    call = functools.partial(ring.ring_attention, q, k, v, None, True, "zigzag", plan=plan)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        dist.barrier()
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begin = max(event.time_range.end for event in events if "AllReduce" in event.name)  # the barrier's
    kinds = {"nccl": "transfer", "merge": "merge", "ping_pong": "attention", "causal_gqa": "attention"}
    found = []
    for event in events:
        if event.time_range.start >= begin and not event.name.startswith("nccl:"):  # a mere label
            what = next((kind for part, kind in kinds.items() if part in event.name.lower()), "other")
            times = ((at - begin) / 1e3 for at in (event.time_range.start, event.time_range.end))
            found.append((me.rank, what, *times))
    return found


def run_largest(me: Me) -> dict:
    """One causal forward pass at the largest N, H·D = 2048, D = 128, whose tensors fill all but an eighth of the ranks' memory by
    ring_time.memory: seconds by the host's clock, and the peak on rank 0, inputs and all."""
    import torch

    dry = me.device == "cpu"
    memory = _least(me, 2**21 if dry else torch.cuda.mem_get_info()[0])  # other programs may hold some, on one GPU more
    H = 2 if dry else 16
    many = 128 if dry else 1 << 20  # tokens
    per_token = ring_time.memory(ring_time.Problem(N=many * me.ranks, H=H, Hkv=H), me.ranks) / many
    n = int(0.88 * memory / per_token) // 256 * 256
    shape = (1, H, n, 128)
    q, k, v = (torch.randn(shape, device=me.device, dtype=torch.bfloat16) for _ in range(3))
    begin = time.perf_counter()
    o = ring.ring_attention(q, k, v, None, True, "zigzag")
    _synchronize(me)
    seconds = time.perf_counter() - begin
    assert o.isfinite().all()
    shape = {"B": 1, "H": H, "N": n * me.ranks, "D": 128}
    peak = 0 if dry else torch.cuda.max_memory_allocated()
    return {"name": STEM, "ranks": me.ranks, "passes": "forward", **shape, "seconds": seconds, "bytes": peak}
