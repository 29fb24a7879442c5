"""What ranks run in the tests of helpers/run/ring.py, ranks.py and measure/ring.py."""

from __future__ import annotations

import os
import signal
import time

import torch

from helpers import one_sided, ring

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def tensors(N: int, H: int = 2, Hkv: int = 2, D: int = 64, dtype: str = "fp16", B: int = 1) -> list[torch.Tensor]:
    """Q, K, V and dO of a whole sequence, the same in every process."""
    generator = torch.Generator().manual_seed(N + H + D)
    shapes = [(B, h, N, D) for h in (H, Hkv, Hkv, H)]
    return [torch.randn(*shape, generator=generator).to(DTYPES[dtype]) for shape in shapes]


def attend(me, runs: list[dict]) -> list:
    """Of each run O, dQ, dK, dV of this rank. A run: `how` (the name of a function of ring), causal, layout, and the arguments of
    `tensors`; rows: how many each rank has, of a contiguous layout; backward: False for O alone; again: twice, compared bit by bit; planned: a plan
    says what mask and layout are; in_l2: bytes of K and V in a block."""
    found, usual = [], ring.IN_L2
    for run in runs:
        run = dict(run)
        ring.IN_L2 = run.pop("in_l2", usual)
        how, causal, layout = run.pop("how"), run.pop("causal", False), run.pop("layout", "contiguous")
        rows, backward, again = run.pop("rows", None), run.pop("backward", True), run.pop("again", False)
        kernel = {"kernel": run.pop("kernel")} if "kernel" in run else {}
        planned = run.pop("planned", False)
        whole = tensors(**run)
        if rows:
            parts = [x.split(rows, 2)[me.rank].contiguous() for x in whole]
        else:
            parts = [ring.local(x, me.rank, me.ranks, layout) for x in whole]
        results = []
        for _ in range(1 + again):
            q, k, v, do = (x.to(me.device, copy=True) for x in parts)
            q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
            asked = (
                {"plan": ring.agree(q, k, v, None, causal, layout)} if planned else {"causal": causal, "layout": layout}
            )
            o = getattr(ring, how)(q, k, v, **asked, **kernel)
            if backward:
                o.backward(do)
            results.append([x.detach().cpu() for x in ((o, q.grad, k.grad, v.grad) if backward else (o,))])
        assert all(torch.equal(x, y) for x, y in zip(results[0], results[-1])), "not the same bits"
        found.append(results[0])
    return found


def one_sided_calls(me, runs: list[dict], calls: int = 20) -> list:
    """As `attend`, of helpers.one_sided. Before each call the keys are overwritten right behind the call before, and one rank or another
    comes late; every other call has the same keys, and has to give the same bits."""
    found = []
    for run in runs:
        run = dict(run)
        causal = run.pop("causal", False)
        layout = "zigzag" if causal else "contiguous"
        q, k, v, do = (ring.local(x, me.rank, me.ranks, layout).to(me.device) for x in tensors(**run))
        room, first = one_sided.share(k, ring.agree(q, k, v, None, causal, layout)), {}
        for number in range(calls):
            room.k.copy_(k if number % 2 else -k)
            room.v.copy_(v)
            torch.cuda._sleep(1_000_000 * ((number + me.rank) % 3))
            o, _ = one_sided.attend(q, room)
            assert torch.equal(o, first.setdefault(number % 2, o)), f"call {number}: not the same bits"
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = one_sided.attention(q, k, v, room)
        assert torch.equal(o, first[1])
        o.backward(do)
        found.append([x.detach().cpu() for x in (o, q.grad, k.grad, v.grad)])
    return found


def refused(me, name: str) -> str:
    """What a call says that some rank makes wrongly."""
    q, k, v, _ = tensors(8)
    causal, layout = False, "contiguous"
    if name == "shape" and me.rank == 1:
        k = k[:, :1, :, :32]
    if name == "heads" and me.rank == 1:
        q, k, v = (x[:, :1] for x in (q, k, v))
    if name == "dtype" and me.rank == 1:
        q, k, v = (x.bfloat16() for x in (q, k, v))
    if name == "mixed" and me.rank == 1:
        k, v = k.bfloat16(), v.bfloat16()
    if name == "mask":
        causal = me.rank == 1
    if name == "zigzag":
        causal, layout = True, "zigzag"
        q, k, v = (x[:, :, : 8 - me.rank] for x in (q, k, v))
    if name == "fp32":
        q, k, v, causal = q.float(), k.float(), v.float(), True
    try:
        if name == "copiers":
            one_sided._require_the_same(8 + me.rank, ring.Plan(None, me.rank, (8, 8), "contiguous", False))
        ring.ring_attention(q, k, v, None, causal, layout)
    except ValueError as error:
        return str(error)
    return "taken"


def refusals(me, names: list[str]) -> list[str]:
    return [refused(me, name) for name in names]


def speaks(me, number: int) -> int:
    me.say(f"{number} of {me.ranks}")
    return number + me.rank


def gpus(me) -> str | None:
    """Which GPUs this rank may see; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def dies(me) -> None:
    """Rank 1 is killed while rank 0 waits for its message."""
    import torch.distributed as dist

    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), 1)


def leaves(me) -> None:
    if me.rank == 1:
        os._exit(7)
    time.sleep(60)


def raises(me) -> None:
    import torch.distributed as dist

    if me.rank == 1:
        raise KeyError("no such thing")
    dist.recv(torch.zeros(1), 1)


def wrong_shape(me) -> None:
    q, k, v, _ = tensors(8)
    ring.ring_attention(*((x[..., :32] if me.rank == 1 else x) for x in (q, k, v)))


def hangs(me) -> None:
    import torch.distributed as dist

    if me.rank == 1:
        time.sleep(60)
    dist.recv(torch.zeros(1), 1)


def hangs_outside_the_ring(me) -> None:
    q, k, v, _ = tensors(8)
    plan = ring.agree(q, k, v)
    if me.rank == 1:
        time.sleep(60)
    ring.ring_attention(q, k, v, plan=plan)


def waits(me, file: str) -> None:
    """Writes its process number, and waits."""
    with open(f"{file}.{me.rank}", "w") as out:
        out.write(str(os.getpid()))
    time.sleep(60)


def recorded(me) -> tuple:
    """What a dry run of the record gives; the slowest and the least of the ranks' numbers; what its check says where dQ is 1.1 times as
    large."""
    from helpers.measure import ring as measured

    found = measured.run(me, True, time.time())
    slowest, least = measured._slowest(me, me.rank), measured._least(me, me.rank)
    right = ring.ring_attention

    def wrong(q, *others):
        q.register_hook(lambda grad: 1.1 * grad)
        return right(q, *others)

    ring.ring_attention = wrong
    try:
        return found, slowest, least, measured.check(me, True)
    except AssertionError as error:
        return found, slowest, least, str(error)
