"""The error rule: is a kernel as exact as plain PyTorch?

Against float64, a kernel may err twice as much as plain PyTorch errs at the same precision on the same inputs, plus the
rounding no summation order avoids (a few ulps). Infinities must be where the reference has them; a NaN is wrong. The idea is that
of the flash-attention test suite, which for FlashAttention-2 allows gradients three times PyTorch's error and adds no ulps. A fixed
tolerance such as `allclose(atol=1e-2)` passes wrong kernels: at N = 16384 it accepts one that never looks at the last 8 keys.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ladder.rung import Which
from .kernel import Kernel, as_loaded, load
from .report import Comparison, Report

if TYPE_CHECKING:  # torch is imported where it is needed: `import helpers` is quick and needs none
    from torch import Tensor

    from .reference import Case

TIMES = 2  # the error allowed, in errors of plain PyTorch
ULPS = 4  # and in float32 ulps of what is summed on the way (reference.Case.magnitude)
SMALL = 1 << 28  # multiply-adds of a product that one CPU thread does sooner than several agree to begin
XRAY = "xray(kernel, …) looks for what results don't show: races, bank conflicts"
POISON = {"torch.float32": 0x7FC5A5A5, "torch.float16": 0x7E5A, "torch.bfloat16": 0x7FDA}  # NaNs no arithmetic produces


def check(kernel: Which | Callable, cases: Iterable[Case] | Case | str | None = None) -> Report:
    """Runs a kernel on every case and compares O (or P) and LSE with float64 by the 2x rule.

        check("04")

    kernel: what `load` takes, or any function `(q, k, v, scale=None) -> (o, lse)` (softmax: `(s) -> (p, lse)`); one that takes
    `out=(o, lse)` is handed outputs full of NaN. cases: of `reference.cases` of the kernel's rung "small" or "full", by default the full set
    on a GPU and the small one otherwise; or cases of one's own. A kernel that raises RuntimeError or ValueError (KernelError and CallError are
    such) fails the case with the error's text; any other error is raised, and one that can't be loaded raises as `load` does. ValueError for
    another word, and where there are no cases.
    """
    import torch

    from . import reference

    if isinstance(kernel, Kernel) or not callable(kernel):
        kernel = load(kernel, quiet=True)
    name = kernel.rung.stem if hasattr(kernel, "rung") else getattr(kernel, "__name__", type(kernel).__name__)
    if cases is None and getattr(getattr(kernel, "rung", None), "op", "") == "merge":
        return _merging(kernel)
    if cases is None or isinstance(cases, str):
        device = getattr(kernel, "device", "cpu")
        size = cases or ("small" if torch.device(device).type == "cpu" else "full")
        if size not in ("small", "full"):
            raise ValueError(f"cases is {cases!r}; allowed are 'small', 'full' and cases of one's own")
        cases = reference.cases(getattr(kernel, "rung", None), device, size)
    if not isinstance(cases, Iterable):
        cases = [cases]
    try:
        poisons = "out" in inspect.signature(kernel).parameters
    except ValueError:  # a built-in function that doesn't tell
        poisons = False
    with as_loaded():  # all cases are of one build
        comparisons = tuple(c for case in cases for c in _one(kernel, case, poisons))
    if not comparisons:
        raise ValueError("check() was given no cases")
    return Report(name, comparisons, XRAY if getattr(kernel, "backend", "") == "emulator" else "")


def _merging(kernel: Kernel) -> Report:
    """Of a kernel that merges partial results: its cases, then those that fit in place. They are the same on every machine."""
    from . import merging

    apart = check(kernel, merging.cases(device=kernel.device))
    within = check(merging.in_place(kernel), merging.cases_in_place(kernel.device))
    return replace(apart, comparisons=apart.comparisons + within.comparisons)


def _one(kernel: Callable, case: Case, poisons: bool) -> list[Comparison]:
    with _threads_for(case):
        return _run(kernel, case, poisons)


def _run(kernel: Callable, case: Case, poisons: bool) -> list[Comparison]:
    import torch

    inputs = case.inputs
    before = [x.clone() for x in inputs]
    options = dict(case.options)
    if poisons:
        options["out"] = _poisoned(case)
    try:
        outputs = kernel(*inputs, **options)
    except (RuntimeError, ValueError) as error:
        text = f"raised {type(error).__name__}: {error}"
        return [Comparison(case.name, case.names[0], *[float("nan")] * 3, problem=text)]
    if not all(torch.equal(bits(x), bits(y)) for x, y in zip(inputs, before, strict=True)):
        return [Comparison(case.name, case.names[0], *[float("nan")] * 3, problem="changed its inputs")]
    return compare(case, outputs)


def compare(case: Case, outputs: tuple[Tensor, ...]) -> list[Comparison]:
    """Compares outputs (O, LSE), (P, LSE) or (dQ, dK, dV), however computed, with float64 on `case`; one entry per output.

        compare(Case("mine", q, k, v), kernel(q, k, v))

    Outputs come in the order of `case.names`. What has another shape or dtype, or is no tuple of so many, is an entry with a problem.
    An output has one budget, from the largest of all its heads: a head whose V is a thousandth of another's is hardly tested.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) != len(case.names):
        text = f"returned {type(outputs).__name__}, not ({', '.join(case.names)})"
        return [Comparison(case.name, case.names[0], *[float("nan")] * 3, problem=text)]
    with _threads_for(case):
        found = zip(case.names, outputs, case.exact(), case.baseline(), case.magnitude(), strict=True)
        return [_compare(case.name, *f) for f in found]


@contextlib.contextmanager
def _threads_for(case: Case) -> Iterator[None]:
    """One CPU thread for a small case's tensors: where other programs want the cores too, a second one multiplies the time."""
    import torch

    before = torch.get_num_threads()
    products = case.s.numel() if case.s is not None else case.q.numel() * case.k.shape[-2]
    if products <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(case: str, name: str, got: Tensor, exact: Tensor, plain: Tensor, magnitude: float) -> Comparison:
    import torch

    if not isinstance(got, torch.Tensor):
        text = f"{name.upper()} is a {type(got).__name__}, not a tensor"
        return Comparison(case, name, *[float("nan")] * 3, problem=text)
    if got.shape != exact.shape or got.dtype != plain.dtype:
        text = f"{name.upper()} is {got.dtype} {tuple(got.shape)}, not {plain.dtype} {tuple(exact.shape)}"
        return Comparison(case, name, *[float("nan")] * 3, problem=text)
    finite = exact.isfinite()
    same = (got.double() == exact) | (got.isnan() & exact.isnan())  # infinities by sign, whichever NaN
    matches = torch.where(finite, got.isfinite(), same)
    error = torch.where(finite & matches, (got.double() - exact).abs(), 0.0)
    pytorch_error = torch.where(finite, (plain.double() - exact).abs(), 0.0).max().item()
    largest = torch.where(finite, exact.abs(), 0.0).max().item()
    floor = ULPS * torch.finfo(torch.float32).eps * magnitude + torch.finfo(got.dtype).eps * largest
    budget = TIMES * pytorch_error + floor
    wrong = ~matches | (error > budget)
    problem = "" if matches.all() else _misplaced(got, exact, matches)
    score = torch.where(matches, error, torch.inf)
    worst = tuple(i.item() for i in torch.unravel_index(score.argmax(), score.shape))
    return Comparison(
        case,
        name,
        error=error.max().item(),
        pytorch_error=pytorch_error,
        budget=budget,
        worst=worst,
        got=got[worst].item(),
        expected=exact[worst].item(),
        error_map=torch.where(matches, error, torch.nan).float().cpu().numpy(),
        wrong=wrong.cpu().numpy(),
        problem=problem,
    )


def _poisoned(case: Case) -> tuple[Tensor, ...]:
    """Outputs full of NaNs of a kind that arithmetic doesn't make, so that an element never written can be told."""
    outputs = case.empty_outputs()
    for x in outputs:
        bits(x).fill_(POISON[str(x.dtype)])
    return outputs


def bits(x: Tensor) -> Tensor:
    """A tensor's memory as integers of the same size and shape: a NaN, too, equals itself."""
    import torch

    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _misplaced(got: Tensor, exact: Tensor, matches: Tensor) -> str:
    """What is wrong with the NaNs and infinities, in words."""
    kinds = {
        "never written": bits(got.contiguous()) == POISON[str(got.dtype)],
        "NaN": got.isnan(),
        "infinite": got.isinf(),
        f"finite where the answer is {exact[~exact.isfinite()].flatten()[:1].tolist() or ''}": ~exact.isfinite(),
    }
    left, parts = ~matches, []
    for words, mask in kinds.items():
        here = left & mask
        if here.any():
            parts.append(f"{here.sum().item()} of {got.numel()} elements {words}")
            left = left & ~here
    return ", ".join(parts)
