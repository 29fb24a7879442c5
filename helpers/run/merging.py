"""Merging partial results of attention: (O_a, LSE_a) of some keys and (O_b, LSE_b) of others give (O, LSE) of both.

`check(kernel)` holds a kernel that merges to the error rule in all `cases`, also in place, as other kernels are held to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .kernel import Kernel
from .reference import DTYPES, moved


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, dtype: torch.dtype = torch.float64) -> tuple:
    """O (B,H,N,D) and LSE (B,H,N) of both parts, computed in `dtype`. A part with LSE = -inf saw no key and counts nothing; where
    both are, O = 0 and LSE = -inf."""
    a, b = lse_a.to(dtype), lse_b.to(dtype)
    lse = torch.logaddexp(a, b)
    base = torch.where(lse == -torch.inf, 0.0, lse)
    weights = ((x - base).exp()[..., None] for x in (a, b))
    return sum(w * o.to(dtype) for w, o in zip(weights, (o_a, o_b))), lse


@dataclass(frozen=True)
class Case:
    """One input to try, as `check` takes it: o_a (B,H,N,D) float32 or as o_b, o_b, lse_a and lse_b (B,H,N) float32.
    rounded: the result has o_b's dtype, otherwise it is float32. in_place: for whoever makes the call; the result goes to o_a and lse_a,
    of which `over` makes copies."""

    name: str
    o_a: Tensor
    lse_a: Tensor
    o_b: Tensor
    lse_b: Tensor
    rounded: bool = False
    in_place: bool = False

    s = None
    names = ("o", "lse")
    options: dict = field(default_factory=dict)

    @property
    def q(self) -> Tensor:
        """As `check` asks for sizes: O's."""
        return self.o_b

    k = q

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What a kernel is called with."""
        return self.o_a, self.lse_a, self.o_b, self.lse_b

    def empty_outputs(self, fill: float = torch.nan) -> tuple[Tensor, Tensor]:
        """O and LSE, full of `fill`."""
        dtype = self.o_b.dtype if self.rounded else torch.float32
        full = torch.full(self.o_b.shape, fill, dtype=dtype, device=self.o_b.device)
        return full, torch.full(self.o_b.shape[:3], fill, device=self.o_b.device)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The float64 answer."""
        return merge(*self.inputs)

    def baseline(self) -> tuple[Tensor, Tensor]:
        """The answer of plain PyTorch in float32, rounded as the output is."""
        o, lse = merge(*self.inputs, dtype=torch.float32)
        return o.to(self.o_b.dtype if self.rounded else torch.float32), lse

    def magnitude(self) -> tuple[float, float]:
        """The largest number of O, and of the LSE: only the difference of two LSE goes into the weights."""
        lses = torch.stack([self.lse_a, self.lse_b])
        largest = max(1.0, lses[lses.isfinite()].abs().max().item() if lses.isfinite().any() else 0.0)
        return max(x.abs().max().item() for x in (self.o_a, self.o_b)), largest


def over(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The inputs of a call in place and its outputs: copies of o_a and lse_a, with their strides, are both."""
    o, lse = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) for x in (o_a, lse_a))
    return (o, lse, o_b, lse_b), (o, lse)


def in_place(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function (o_a, lse_a, o_b, lse_b) -> (o, lse) that has a kernel merge in place, in copies."""

    def merged(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        given, out = over(*inputs)
        return kernel(*given, out=out)

    return merged


def cases_in_place(device: str = "cpu") -> Iterator[Case]:
    """Of the cases those whose O can lie in O_a's memory, for the function that `in_place` gives."""
    fit = (case for case in cases(device=device) if case.o_a.dtype == case.empty_outputs()[0].dtype)
    return (replace(case, name=f"in place: {case.name}") for case in fit)


def workload(shape: tuple[int, int, int, int], dtype: str = "fp16", device: str = "cpu") -> tuple[Tensor, ...]:
    """Random o_a (B,H,N,D) in float32, lse_a, o_b in `dtype` and lse_b, as a ring merges them."""
    generator = torch.Generator(device).manual_seed(0)
    o, lse = (torch.randn(2, *size, generator=generator, device=device) for size in (shape, shape[:3]))
    return o[0], lse[0], o[1].to(DTYPES[dtype]), lse[1]


def cases(dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16"), device: str = "cpu") -> Iterator[Case]:
    """The inputs that a merge must survive, the same on every machine: sizes that are no multiple of a block, a part or both
    without a key, LSE that lie far apart or are large, rows of a larger tensor, and every mixture of dtypes."""
    generator = torch.Generator().manual_seed(50)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    for name in dtypes:
        dtype = DTYPES[name]
        wide = [False] if name == "fp32" else [False, True]
        for D in (32, 64, 128):
            for fp32 in wide:
                for rounded in wide:
                    parts = randn(2, 3, 37, D), randn(2, 3, 37), randn(2, 3, 37, D), randn(2, 3, 37)
                    a = parts[0] if fp32 else parts[0].to(dtype)
                    words = f"D={D}, O_a {'fp32' if fp32 else name}, O {name if rounded else 'fp32'}, {name}"
                    yield _on(device, Case(words, a, parts[1], parts[2].to(dtype), parts[3], rounded))
        o_a, o_b = randn(1, 2, 21, 64).to(dtype), randn(1, 2, 21, 64).to(dtype)
        none, some = torch.full((1, 2, 21), -torch.inf), randn(1, 2, 21)
        mixed = torch.where(torch.arange(21) % 3 == 0, -torch.inf, some)
        for words, lse_a, lse_b in (
            ("a without a key", none, some),
            ("b without a key", some, none),
            ("both without a key", none, none),
            ("some rows without a key", mixed, mixed.flip(2)),
            ("equal", some, some),
            ("a far above b", some + 200, some),
            ("b far above a", some - 1e4, some),
            ("both large", some + 3e4, some + 3e4 + 1),
            ("both very negative", some - 3e4, some - 3e4 + 1),
        ):
            yield _on(device, Case(f"{words}, {name}", o_a, lse_a, o_b, lse_b, name != "fp32"))
        for N in (1, 2, 15, 16, 17):
            yield _on(device, Case(f"N={N}, {name}", *(x[:, :, :N] for x in (o_a, some, o_b, some.flip(2)))))
        whole, lse = randn(2, 2, 40, 64), randn(2, 2, 40)
        half = randn(2, 2, 20, 64).to(dtype), randn(2, 2, 20)
        yield _on(device, Case(f"half of the rows, {name}", whole[:, :, 20:], lse[:, :, 20:], *half))
        by_token = randn(2, 20, 2, 64).to(dtype).transpose(1, 2)
        yield _on(device, Case(f"heads side by side, {name}", by_token, half[1], half[0], half[1]))


def _on(device: str, case: Case) -> Case:
    return Case(case.name, *(moved(x, x.dtype, device) for x in case.inputs), rounded=case.rounded)
