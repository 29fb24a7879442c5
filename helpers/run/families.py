"""Families of inputs: what the scores of attention look like, from normal random numbers to the heads of trained models.

A kernel may need more time, or lose digits, where one key takes all of a row, or where a row's maximum keeps rising. So
every family is checked (`reference.cases`), timed and its error recorded (`record families`).

FAMILIES are made of random numbers, `real` ones of heads of trained models that are stored in data/heads/ (`record heads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import record
from ..ladder.contract import TORCH_NAMES

SLOPES = 8  # of ALiBi, taken by the heads in turn
SINK = 12.0  # by how much the score of key 0 leads, in nats: P_0 is 0.85 of 16384 keys
TOOTH, HEIGHT = 192, 24.0  # keys from one peak of the sawtooth to the next, and how high it is, in nats


@dataclass(frozen=True)
class Draw:
    """The shape of one call, (B, H, Hkv, Nq, Nk, D), and its source of random numbers."""

    B: int
    H: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    causal: bool
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        """Where the tensors are made."""
        return self.generator.device

    def randn(self, heads: int, rows: int) -> Tensor:
        """(B, heads, rows, D) normal random numbers, fp32."""
        return torch.randn(self.B, heads, rows, self.D, generator=self.generator, device=self.device)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of normal random numbers."""
        return self.randn(self.H, self.Nq), self.randn(self.Hkv, self.Nk), self.randn(self.Hkv, self.Nk)

    def keys(self) -> Tensor:
        """0 .. Nk - 1 as fp32."""
        return torch.arange(self.Nk, dtype=torch.float32, device=self.device)

    def last_seen(self) -> Tensor:
        """The last key that each query sees; below 0 where it sees none."""
        return _last_seen(self.Nq, self.Nk, self.causal, self.device)


def _last_seen(Nq: int, Nk: int, causal: bool, device: torch.device) -> Tensor:
    rows = torch.arange(Nq, device=device)
    return rows + Nk - Nq if causal else torch.full_like(rows, Nk - 1)


@dataclass(frozen=True)
class Family:
    """A kind of input: why it is tried, where it occurs, and `make`, which draws q (B,H,Nq,D), k and v (B,Hkv,Nk,D) in fp32.

    N: the length it has, and causal: the mask it was made under; None: any.
    """

    name: str
    why: str
    source: str
    make: Callable[[Draw], tuple[Tensor, Tensor, Tensor]]
    N: int | None = None
    causal: bool | None = None

    def inputs(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: str = "fp16",
        device: str | torch.device = "cpu",
        seed: int = 0,
        Hkv: int | None = None,
        *,
        causal: bool = False,
        gradient: bool = False,
    ) -> tuple[Tensor, ...]:
        """q (B,H,Nq,D), k and v (B,Hkv,Nk,D), and with `gradient` dO (B,H,Nq,D), the same for the same arguments.

        shape: (B, H, Nq, Nk, D). Hkv: a divisor of H; by default H. dtype: "fp32", "fp16" or "bf16". causal: whether the
        inputs are for a causal mask; a family that chooses a key for each query chooses one that it sees. Scores are finite.
        """
        B, H, Nq, Nk, D = shape
        draw = Draw(B, H, Hkv or H, Nq, Nk, D, causal, torch.Generator(device).manual_seed(seed))
        made = self.make(draw)
        made = (*made, draw.randn(H, Nq)) if gradient else made
        return tuple(x.to(getattr(torch, TORCH_NAMES[dtype])) for x in made)


def _times(factor: float) -> Callable[[Draw], tuple[Tensor, Tensor, Tensor]]:
    def make(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = draw.qkv()
        return factor * q, k, v

    return make


def _sink(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return _biased(draw, SINK * (draw.keys() == 0))


def _one_key(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Query i is twice key π(i), and their score 2 |k|²/√D, 16 nats on average at D = 64, where others are 0 ± 2. π is a
    permutation for each head. Of the permutations only the identity has π(i) <= i for all i: under a causal mask π(i) is drawn evenly
    from the keys that query i sees, and several queries may have the same."""
    k, v = draw.randn(draw.Hkv, draw.Nk), draw.randn(draw.Hkv, draw.Nk)
    random = torch.rand(draw.B, draw.H, max(draw.Nq, draw.Nk), generator=draw.generator, device=draw.device)
    if draw.causal:
        last = draw.last_seen().clamp(min=0)
        chosen = (random[..., : draw.Nq] * (last + 1)).long().minimum(last)  # the product may round up
    else:
        chosen = random.argsort(-1)[..., : draw.Nq] % draw.Nk
    own = k.repeat_interleave(draw.H // draw.Hkv, 1)
    q = 2 * own.gather(2, chosen[..., None].expand(-1, -1, -1, draw.D))
    return q, k, v


def _slopes(draw: Draw) -> Tensor:
    """ALiBi's for 8 heads, 2^-1 .. 2^-8 nats per key, in turn: (H, 1)."""
    return 2.0 ** -(1 + torch.arange(draw.H, device=draw.device)[:, None] % SLOPES)


def _growing(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return _biased(draw, draw.keys() - (draw.Nk - 1), _slopes(draw))


def _falling(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return _biased(draw, -draw.keys(), _slopes(draw))


def _sawtooth(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return _biased(draw, HEIGHT / TOOTH * (draw.keys() % TOOTH))


def _biased(draw: Draw, bias: Tensor, slopes: float | Tensor = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal random numbers, and to the scores of each query comes slopes (H,1) · bias (Nk): the product of the first of the D numbers."""
    q, k, v = draw.qkv()
    q[..., 0], k[..., 0] = math.sqrt(draw.D) * slopes, bias
    return q, k, v


_RANDOM = (
    Family("randn", "what most measurements take: every key counts", "the usual inputs of benchmarks", _times(1)),
    Family("Q × 2", "scores twice as far apart", "weights grow in training; heads differ in temperature", _times(2)),
    Family("Q × 4", "a few keys take most of each row", "as Q × 2", _times(4)),
    Family("Q × 8", "one random key takes nearly all of each row", "as Q × 2", _times(8)),
    Family("sink", "key 0, which 13 and 20 take last, leads every row", "attention sinks, arXiv 2309.17453", _sink),
    Family(
        "one key",
        "each query looks at one key of its own, anywhere",
        "induction and retrieval heads, arXiv 2209.11895 and 2404.15574",
        _one_key,
    ),
    Family(
        "growing", "scores grow along the keys, each head at a slope of its own", "ALiBi, arXiv 2108.12409", _growing
    ),
    Family("falling", "the maximum rises at every tile taken from the last on", "ALiBi, seen the other way", _falling),
    Family(
        "sawtooth",
        "scores rise and drop again and again",
        "periodic text; worst for a maximum that also falls",
        _sawtooth,
    ),
)
FAMILIES = {family.name: family for family in _RANDOM}


# Heads of trained models


def real(root: Path = record.DATA) -> dict[str, Family]:
    """The families made of the heads that are recorded, by name: each model's at the length and under the mask that it had there."""
    found = {}
    for model in record.models(root):
        stored, about = record.load_heads(model, root)
        tensors = tuple(torch.from_numpy(stored[part]) for part in ("q", "k", "v"))
        name, N = f"heads of {model}", tensors[0].shape[1]
        found[name] = Family(name, about["model"], about["source"], partial(_heads, tensors), N, about["causal"])
    return found


def every(root: Path = record.DATA) -> dict[str, Family]:
    """FAMILIES and the real ones."""
    return FAMILIES | real(root)


def _heads(stored: tuple[Tensor, Tensor, Tensor], draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """The stored heads (heads, N, d) in turn, the same for each of B; rows beyond N begin again with the first.

    Where D is a multiple of d, q and k get zeros for the other numbers and are turned by a random rotation of D dimensions, the
    scores what they were: q is √(D/d) times as large, since they are divided by √D instead of √d. v are D/d heads side by side.
    """
    q, k, v = (x.float().to(draw.device) for x in stored)
    count, d = q.shape[0], q.shape[2]
    if draw.D % d:
        raise ValueError(f"heads of D = {d} can't be those of D = {draw.D}")
    group = draw.H // draw.Hkv
    kv = torch.arange(draw.Hkv, device=draw.device) % count
    q, k = q[kv.repeat_interleave(group)], k[kv]
    v = torch.cat([v[(kv + i) % count] for i in range(draw.D // d)], -1)
    if draw.D > d:
        turn = torch.linalg.qr(torch.randn(draw.D, draw.D, generator=draw.generator, device=draw.device)).Q[:d]
        q, k = math.sqrt(draw.D / d) * q @ turn, k @ turn
    rows = [(draw.Nq, q), (draw.Nk, k), (draw.Nk, v)]
    made = (x[:, torch.arange(n, device=draw.device) % x.shape[1]] for n, x in rows)
    return tuple(x.expand(draw.B, -1, -1, -1).contiguous() for x in made)


# How peaked inputs are

BOUNDS = (0.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 100.0)  # log2 units


class Peakedness(NamedTuple):
    """keys: the effective number of keys of a query, exp of the entropy of its row of P; top: the largest P of a row; both as medians
    over the rows. rises: for each (R, Bc, bound) the share of pairs of R rows and a tile of Bc keys in which a row's maximum rises."""

    keys: float
    top: float
    rises: dict[tuple[int, int, float], float]


def peakedness(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    scale: float | None = None,
    rows: Sequence[int] = (16, 32),
    tiles: Sequence[int] = (64, 128),
    bounds: Sequence[float] = BOUNDS,
) -> Peakedness:
    """How peaked the rows of P are, and how often a kernel that keeps a row's maximum as long as it can has to renew it.

    q (B,H,Nq,D), k (B,Hkv,Nk,D); a head at a time, whose S has to fit into memory. Tiles are taken from the last to the first,
    as rungs 13 and 20 do (32 has an order of its own). A row begins with the maximum of its first tile; a later tile whose own
    maximum exceeds the row's by more than `bound` log2 units makes it rise. A pair counts if a row of it sees a key of the tile, its first tile apart.
    """
    B, H, Nq, D = q.shape
    Nk, group = k.shape[2], H // k.shape[1]
    scale = D**-0.5 if scale is None else scale
    unseen = torch.arange(Nk, device=q.device) > _last_seen(Nq, Nk, causal, q.device)[:, None]
    entropies, tops = [], []
    counts = {(R, Bc, bound): [0, 0] for R in rows for Bc in tiles for bound in bounds}
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        s = (q[b, h].float() @ k[b, h // group].float().T * scale).masked_fill(unseen, -torch.inf)
        seen = s.isfinite().any(1)  # a row that sees nothing has no P
        p = torch.softmax(s[seen], -1)
        entropies.append(torch.special.entr(p).sum(-1)), tops.append(p.amax(-1))
        for Bc in tiles:
            own = _maxima(s, Bc) * math.log2(math.e)
            for bound in bounds:
                begun, rose = _staircase(own, bound)
                for R in rows:
                    asks, pairs = (_blocks(x, R) for x in (rose, begun))
                    counts[R, Bc, bound][0] += int(asks.sum())
                    counts[R, Bc, bound][1] += int(pairs.sum())
    shares = {key: asks / pairs if pairs else 0.0 for key, (asks, pairs) in counts.items()}
    return Peakedness(torch.cat(entropies).median().exp().item(), torch.cat(tops).median().item(), shares)


def _maxima(s: Tensor, Bc: int) -> Tensor:
    """(Nq, Nk) -> (Nq, tiles): the largest score of each tile, the last tile first."""
    padded = torch.nn.functional.pad(s, (0, -s.shape[1] % Bc), value=-torch.inf)
    return padded.unflatten(1, (-1, Bc)).amax(-1).flip(1)


def _staircase(own: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Of the tiles' maxima (Nq, tiles): where a row sees something and has a maximum already, and where that rises."""
    m = torch.full_like(own[:, 0], -torch.inf)
    begun, rose = [], []
    for tile in own.unbind(1):
        has = m > -torch.inf
        rises = has & (tile > m + bound)
        begun.append(has & (tile > -torch.inf)), rose.append(rises)
        m = torch.where(rises | ~has, tile, m)
    return torch.stack(begun, 1), torch.stack(rose, 1)


def _blocks(x: Tensor, R: int) -> Tensor:
    """(Nq, tiles) -> (blocks, tiles): whether any of R rows."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % R)).unflatten(0, (-1, R)).any(1)
