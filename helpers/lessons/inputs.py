"""Inputs drawn from a seed by which a reader's kernel is judged, the easy ones first: each adds one thing that can go wrong."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..ladder.instances import of_head_dimension, single
from ..ladder.rung import Rung
from ..run import merging
from ..run.reference import DTYPES, Case, by_head, hide, moved, steepen

ANY_D = (24, 40, 64)  # for rungs that take any head dimension
SLOW = "22_backward_fp32"  # on an emulator, with D = 128
# Nq, Nk and window of a call with tiles past the diagonal, tiles before the window, and rows that see no key
SKIPPED = 400, 240, 40
ELSEWHERE = ("a ragged tile", "whole tiles", "several arguments at once")  # cases of every instance of a whole rung


@dataclass(frozen=True)
class Draw:
    """What a seed decides for a rung: head dimension, dtype, and the random numbers. dtype: 16-bit where the rung takes float32 besides."""

    rung: Rung
    seed: int
    D: int
    dtype: str

    @property
    def instance(self) -> Rung:
        """The rung with the one instance that is drawn."""
        return instance(self.rung, self.D, self.dtype)

    def cases(self) -> list[Case | merging.Case]:
        """The inputs, the easy ones first."""
        made = {"softmax": _softmax, "attention": _attention, "attention_backward": _backward, "merge": _merge}
        return list(made[self.rung.op](self))

    def others(self) -> list[Case]:
        """ELSEWHERE at each other head dimension that an attention rung names, and in each other dtype, as a launcher may lack one, and
        bank conflicts differ from one to the other; and SKIPPED, of a rung with windows."""
        places = [(f"D = {D}", replace(self, D=D)) for D in self.rung.D if D != self.D]
        places += [(dtype, replace(self, dtype=dtype)) for dtype in self.rung.dtypes if dtype != self.dtype]
        every = [(where, case) for where, there in places for case in there.cases() if case.name in ELSEWHERE]
        made = [replace(case, name=f"{where}, {case.name}") for where, case in every]
        if self.rung.op == "attention" and "window" in self.rung.features:
            *lengths, window = SKIPPED
            q, k, v = (x.to(DTYPES[self.dtype]) for x in _Dice(self).qkv(*lengths))
            made.append(Case("tiles that no row sees", q, k, v, causal=True, window=window))
        return made


def draw(rung: Rung, seed: int) -> Draw:
    """What `seed` draws for a rung; the same everywhere."""
    dice = random.Random(_number(seed, rung.stem))
    D = [d for d in rung.D if d <= 64 or rung.stem != SLOW] or ANY_D
    dtypes = [name for name in rung.dtypes if name != "fp32"] or rung.dtypes
    return Draw(rung, seed, dice.choice(D), dice.choice(dtypes))


def instance(rung: Rung, D: int, dtype: str) -> Rung:
    """A rung with one instance only where its launcher chooses as those of the ladder do; else all of it."""
    try:
        return single(rung, D, dtype) if "fp16" in rung.dtypes else of_head_dimension(rung, D)
    except ValueError:  # a reader's own launcher, or one that has this instance alone
        return rung


def uneven(rung: Rung, device: str = "cpu") -> list[Case]:
    """Head dimensions of ANY_D that no tile divides, for a rung that takes any; none for others. `check` has the usual ones only."""
    if rung.D or rung.op != "attention":
        return []
    made = []
    for D in ANY_D[:-1]:
        dice = torch.Generator().manual_seed(_number(D))
        q, k, v = (torch.randn(2, 2, n, D, generator=dice).to(device) for n in (19, 35, 35))
        made.append(Case(f"D = {D}", q, k, v))
    return made


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


class _Dice:
    """Random tensors and sizes of one draw."""

    def __init__(self, draw: Draw) -> None:
        self.generator = torch.Generator().manual_seed(_number(draw.seed, draw.rung.stem, "values"))
        self.sizes = random.Random(_number(draw.seed, draw.rung.stem, "sizes"))
        self.D, self.dtype = draw.D, DTYPES[draw.dtype]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def about(self, n: int) -> int:
        """A size of n to n + 14 that no tile divides."""
        return n + 1 + 2 * self.sizes.randrange(7)

    def qkv(self, Nq: int, Nk: int, B: int = 1, H: int = 2, Hkv: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return self.randn(B, H, Nq, self.D), self.randn(B, Hkv or H, Nk, self.D), self.randn(B, Hkv or H, Nk, self.D)


def _attention(draw: Draw) -> Iterator[Case]:
    dice = _Dice(draw)
    parts = _plain(dice), _features(dice, draw.rung.features), _persistent(dice, draw.rung), _hidden(dice)
    for case in itertools.chain(*parts):
        yield replace(case, **{name: moved(getattr(case, name), dice.dtype, "cpu") for name in "qkv"})


def _plain(dice: _Dice) -> Iterator[Case]:
    about, qkv, D = dice.about, dice.qkv, dice.D
    yield Case("one query, one key: O = V", *qkv(1, 1, H=1))
    yield Case("one tile", *qkv(16, 16))
    yield Case("a ragged tile", *qkv(33, about(36)))
    yield Case("whole tiles", *qkv(64, 128))
    yield Case("several tiles", *qkv(about(130), about(140), H=1))
    q, k, v = qkv(about(40), Nk := about(150))
    q[..., 0], k[..., 0] = D**0.5, torch.linspace(0, 0.3 * Nk, Nk)
    yield Case("scores that rise along the keys", q, k, v)
    yield Case("scores that fall along the keys", q, k.flip(2), v.flip(2))
    q, k, v = qkv(about(20), Nk := about(200), H=1)
    k[:, :, Nk // 2] = 3 * q[:, :, 0]
    yield Case("one key that outweighs all others", q, k, v)
    q, k, v = qkv(about(40), about(70))
    yield Case("a negative scale", q, k, v, scale=-0.3)
    yield Case("very large scores", 6 * q, 6 * k, v)
    q, k, v = qkv(about(20), about(70), H=1)
    q[..., 0], k[..., 0] = 1.0, -1000 * D**0.5
    yield Case("scores about -1000", q, k, v)
    Nk = about(70)
    q, k, v = (dice.randn(2, n, 3, D) for n in (about(40), Nk, Nk))
    q, v = (torch.cat((x, x), 2)[:, :, :3] for x in (q, v))  # room behind each token: not the strides of K, nor of O
    yield Case("strided (B,N,H,D)", *(x.transpose(1, 2) for x in (q, k, v)))
    yield Case("many tiles", *qkv(8, about(300 if dice.dtype == torch.float32 else 700), H=1))
    q, k, v = qkv(about(20), about(200), H=1)
    q[..., 0], k[:, :, 3, 0] = 30.0, 40.0
    yield Case("one key far above all others", q, k, v)
    yield Case("few keys, many queries", *qkv(about(260), 5, H=1))


def _features(dice: _Dice, features: tuple[str, ...]) -> Iterator[Case]:
    about, qkv, D = dice.about, dice.qkv, dice.D
    if "causal" in features:
        yield Case("causal", *qkv(about(130), about(150)), causal=True)
        yield Case("causal, several tiles ahead", *qkv(about(60), about(300)), causal=True)
        # The first 128 of them, a whole tile of any rung's, see no key.
        yield Case("causal, queries that see nothing", *qkv(about(290), about(40), H=1), causal=True)
    if "window" in features:
        window = 17 + dice.sizes.randrange(60)
        yield Case(f"window {window}", *qkv(about(200), about(210)), causal=True, window=window)
    if "gqa" in features:
        yield Case("6 heads on 2", *qkv(about(66), about(80), B=2, H=6, Hkv=2))
    if "varlen" in features:
        lens = [(5, 5), (0, 3), (70, about(130)), (1, 64), (129, 65), (3, 0)]
        starts = tuple(torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lens, strict=True))
        yield Case("packed", *qkv(int(starts[0][-1]), int(starts[1][-1])), cu_seqlens=starts, causal=True)
    if "lengths" in features:
        lengths = torch.tensor([300, 1, 129, 0], dtype=torch.int32)
        yield Case("keys cut short", *qkv(4, 300, B=4, H=4, Hkv=2), lengths=lengths)
        lengths = torch.tensor([300, 16, 129, 64], dtype=torch.int32)
        yield Case("cut short and causal", *qkv(4, 300, B=4, H=4, Hkv=2), lengths=lengths, causal=True)
    if "pages" in features:
        q, k, v = dice.randn(3, 4, 2, D), dice.randn(20, 2, 16, D), dice.randn(20, 2, 16, D)
        pages = torch.randperm(20, generator=dice.generator)[:18].reshape(3, 6).to(torch.int32)
        yield Case("pages", q, k, v, lengths=torch.tensor([96, 1, 37], dtype=torch.int32), pages=pages)
    if "splits" in features:
        for splits in (2, 5, 11):
            yield Case(f"{splits} splits", *qkv(3, about(690), H=4), splits=splits)
        yield Case("splits and lengths", *qkv(2, 300, B=4), lengths=torch.tensor([300, 1, 129, 0]).int(), splits=3)
    yield from _joint(dice, features)


def _joint(dice: _Dice, features: tuple[str, ...]) -> Iterator[Case]:
    """All that features allow in one call, with a scale and strides."""
    options = {"scale": 0.3} | ({"causal": True} if "causal" in features else {})
    window = {"window": 20 + dice.sizes.randrange(30)} if "window" in features else {}
    H, Hkv = 4, 2 if "gqa" in features else 4

    def by_token(B: int, N: int, heads: int) -> Tensor:
        return dice.randn(B, N, heads, dice.D).transpose(1, 2)

    Nk = dice.about(140)
    q, k, v = by_token(2, dice.about(66), H), by_token(2, Nk, Hkv), by_token(2, Nk, Hkv)
    for deterministic in (False, True) if "deterministic" in features else (False,):
        name = "several arguments at once" + ", deterministic" * deterministic
        yield Case(name, q, k, v, **options, **window, deterministic=deterministic)
    if "varlen" in features:
        starts = tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 70, 99], [0, 150, 153, 160]))
        q, k, v = by_token(1, 99, H), by_token(1, 160, Hkv), by_token(1, 160, Hkv)
        yield Case("packed, and several more arguments", q, k, v, cu_seqlens=starts, **options, **window)
    if "pages" in features:
        q, k, v = by_token(2, 4, H), by_token(30, 64, Hkv), by_token(30, 64, Hkv)
        pages = torch.randperm(30, generator=dice.generator)[:24].reshape(2, 12).to(torch.int32)
        lengths = torch.tensor([768, 333], dtype=torch.int32)
        yield Case("pages, and several more arguments", q, k, v, lengths=lengths, pages=pages, splits=3, **options)


def _persistent(dice: _Dice, rung: Rung) -> Iterator[Case]:
    """For a rung whose CTAs stay, one for each of the emulator's 132 SMs, and count query tiles: more than two for each CTA."""
    if "counter" in dict(rung.workspace):
        yield Case("three query tiles for a CTA", *dice.qkv(64, 32, H=400))


def _hidden(dice: _Dice) -> Iterator[Case]:
    q, k, v = dice.qkv(dice.about(40), dice.about(200))
    hide(q, k)
    yield Case("keys of -inf, and rows of nothing else", q, k, v)


def _backward(draw: Draw) -> Iterator[Case]:
    dice, features = _Dice(draw), draw.rung.features
    kept = (
        "one query",
        "one tile",
        "a ragged",
        "whole",
        "several",
        "scores that rise",
        "a negative",
        "strided",
        "few keys",
    )
    plain = (case for case in _plain(dice) if case.name.startswith(kept))
    for case in itertools.chain(plain, _features(dice, features)):
        kind, do = dice.dtype, dice.randn(*case.q.shape)
        there = {name: moved(getattr(case, name), kind, "cpu") for name in "qkv"}
        there["do"] = (do if case.q.is_contiguous() else by_head(do)).to(kind)
        yield replace(case, name=case.name.partition(":")[0], **there)
    q, k, v = dice.qkv(dice.about(66), dice.about(80))
    do = dice.randn(*q.shape)
    scale = steepen(q, k, v, do)
    q, k, v, do = (x.to(dice.dtype) for x in (q, k, v, do))
    yield Case("gradients that fit 16 bits only once they are scaled", q, k, v, do=do, scale=scale)
    if "deterministic" in features:
        q, k, v = (x.to(dice.dtype) for x in dice.qkv(dice.about(130), dice.about(290)))
        do = dice.randn(*q.shape).to(dice.dtype)
        yield Case("deterministic, causal", q, k, v, do=do, deterministic=True, causal=True)


def _softmax(draw: Draw) -> Iterator[Case]:
    dice = _Dice(draw)
    about, randn = dice.about, dice.randn
    yield Case("rows of one", s=randn(3, 1))
    yield Case("32 numbers", s=randn(5, 32))
    yield Case("a ragged row", s=randn(5, about(200)))
    yield Case("large numbers", s=100 + 30 * randn(6, about(100)))
    some = randn(5, about(300))
    yield Case("-inf here and there", s=some.masked_fill(randn(*some.shape) > 0, -torch.inf))
    late = randn(5, about(200))
    late[:, :-3], late[1] = -torch.inf, -torch.inf
    yield Case("nearly nothing but -inf", s=late)
    yield Case("a block per row", s=randn(3, about(1023)))
    yield Case("several warps", s=torch.linspace(0, 90, N := about(2050)).repeat(2, 1) + randn(2, N))
    yield Case("slices of a row", s=randn(2, about(33000)))
    yield Case("slices, a multiple of four", s=torch.linspace(-40, 40, 32772).repeat(2, 1) + randn(2, 32772))
    yield Case("starts at an odd element", s=randn(5 * 203 + 1)[1:].view(5, 203))


def _merge(draw: Draw) -> Iterator[merging.Case]:
    dice = _Dice(draw)
    about, pair = dice.about, partial(_pair, dice)
    some = dice.randn(2, 2, n := about(20))
    none, row = torch.full_like(some, -torch.inf), torch.arange(n)
    yield pair("the same LSE: the mean", n, (some, some))
    yield pair("one row", 1)
    yield pair("a ragged number of rows", about(36))
    yield pair("float32 alone", about(20), kind=torch.float32)
    yield pair("O in 16 bits", about(20), rounded=True)
    yield pair("O_a in 16 bits", about(20), narrow=True)
    yield pair("O and O_a in 16 bits", about(20), narrow=True, rounded=True)
    yield pair("LSE far apart", n, (some + torch.tensor([5.0, -5.0, 20.0, -20.0, 200.0, -200.0])[row % 6], some))
    yield pair("large LSE", n, (some + 3e4, some + 3e4 + 1))
    yield pair("very negative LSE", n, (some - 3e4, some - 3e4 + 1))
    yield pair("a without a key", n, (none, some))
    yield pair("b without a key", n, (some, none))
    yield pair("both without a key", n, (none, none))
    rows_without = [torch.where(row % each == 0, -torch.inf, some) for each in (3, 4)]  # of every 12th, both
    yield pair("some rows without a key", n, rows_without)
    yield _by_token(dice)
    yield pair("many rows of a larger tensor", about(400), before=20)
    yield pair("in place", about(40), in_place=True)
    yield pair("in place, in 16 bits", about(20), narrow=True, rounded=True, in_place=True)
    yield pair("in place, rows of a larger tensor", n, rows_without, before=20, in_place=True)


def _pair(
    dice: _Dice,
    name: str,
    rows: int,
    lses: Sequence[Tensor] = (),
    before: int = 0,
    kind: torch.dtype | None = None,
    narrow: bool = False,
    **options: bool,
) -> merging.Case:
    """Two parts of (2,2,rows,D). lses: (2,2,rows) of both. before: rows that lie before part a in a larger tensor; before b, twice as
    many. kind: of O_b, by default what was drawn, and if `narrow` of O_a, which is float32 otherwise. options: of merging.Case."""
    kind = kind or dice.dtype
    parts = []
    for skip, one in ((before, kind if narrow else torch.float32), (2 * before, kind)):
        parts += [
            dice.randn(2, 2, skip + rows, dice.D).to(one)[:, :, skip:],
            dice.randn(2, 2, skip + rows)[:, :, skip:],
        ]
    for lse, wanted in zip(parts[1::2], lses):
        lse.copy_(wanted)
    return merging.Case(name, *parts, **options)


def _by_token(dice: _Dice) -> merging.Case:
    """O_a with the heads of a token side by side, O_b head by head."""
    n = dice.about(20)
    o_a, o_b = dice.randn(2, n, 3, dice.D).transpose(1, 2), dice.randn(2, 3, n, dice.D).to(dice.dtype)
    return merging.Case("heads side by side", o_a, dice.randn(2, 3, n), o_b, dice.randn(2, 3, n))
