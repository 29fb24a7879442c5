"""The error rule: is a kernel as exact as plain PyTorch?

Against float64, a kernel may err twice as much as plain PyTorch errs at the same precision on the same inputs, plus the
rounding no summation order avoids (a few ulps). NaN and infinity must be where the reference has them. The idea is that
of the flash-attention test suite, which for FlashAttention-2 allows gradients three times PyTorch's error and adds no ulps. A fixed
tolerance such as `allclose(atol=1e-2)` passes wrong kernels: at N = 16384 it accepts one that never looks at the last 8 keys.
"""

from __future__ import annotations

import contextlib
import html
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ladder.rung import Which
from .kernel import Kernel, as_loaded, load

if (
    TYPE_CHECKING
):  # torch, numpy and pandas are imported where they are needed: `import helpers` is quick and needs none
    import numpy as np
    import pandas as pd
    from torch import Tensor

    from .reference import Case

TIMES = 2  # the error allowed, in errors of plain PyTorch
ULPS = 4  # and in float32 ulps of what is summed on the way (reference.Case.magnitude)
SMALL = 1 << 28  # multiply-adds of a product that one CPU thread does sooner than several agree to begin
XRAY = "xray(kernel, …) looks for what results don't show: races, bank conflicts"
POISON = {"torch.float32": 0x7FC5A5A5, "torch.float16": 0x7E5A, "torch.bfloat16": 0x7FDA}  # NaNs no arithmetic produces


@dataclass(frozen=True)
class Comparison:
    """One output of one case held against float64; `error_map` has the output's shape (NaN where a NaN or an
    infinity is misplaced), errors are absolute."""

    case: str
    output: str
    error: float
    pytorch_error: float
    budget: float
    worst: tuple[int, ...] = ()
    got: float = float("nan")
    expected: float = float("nan")
    error_map: np.ndarray | None = field(default=None, repr=False)
    wrong: np.ndarray | None = field(default=None, repr=False)
    problem: str = ""  # set where no number says it: an exception, a changed input, a misplaced NaN

    @property
    def used(self) -> float:
        """error / budget: above 1 is wrong."""
        return 0.0 if self.error == 0 else self.error / self.budget if self.budget else float("inf")

    @property
    def ok(self) -> bool:
        """Within the budget."""
        return not self.problem and self.used <= 1

    def explain(self) -> str:
        """One case's failure in words: how far off, where the worst element is, and which elements are wrong."""
        if self.wrong is None:
            return f"{self.case}: {self.problem}"
        name = self.output.upper()
        place = f"{name}[{', '.join(map(str, self.worst))}]"
        size = self.problem or f"error {self.error:.2g}, {self.used:.3g} x the budget of {self.budget:.2g}"
        return (
            f"{self.case}: {size}\n  worst at {place}: got {self.got:.6g}, expected {self.expected:.6g}\n"
            f"  {_pattern(self.wrong, self.output)}"
        )


@dataclass(frozen=True)
class Report:
    """The verdict on every case. `ok`; `worst`, the largest error/budget; `frame`, a row per case and output."""

    name: str
    comparisons: tuple[Comparison, ...]
    hint: str = ""  # what to look at once all is right

    @property
    def ok(self) -> bool:
        """Every output of every case is within its budget."""
        return all(c.ok for c in self.comparisons)

    @property
    def worst(self) -> float:
        """The largest error/budget of all cases; infinite where a problem has no number."""
        return max(float("inf") if c.problem else c.used for c in self.comparisons)

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that are not ok, in order."""
        return [c for c in self.comparisons if not c.ok]

    @property
    def frame(self) -> pd.DataFrame:
        """case, output, error, pytorch_error, budget (absolute), used (error/budget), ok."""
        import pandas as pd

        columns = ("case", "output", "error", "pytorch_error", "budget", "used", "ok")
        return pd.DataFrame([{c: getattr(x, c) for c in columns} for x in self.comparisons], columns=list(columns))

    def require(self) -> Report:
        """This report if it is ok; AssertionError with the failing cases, worst index and pattern if not."""
        if not self.ok:
            raise AssertionError(str(self))
        return self

    def error_map(self, case: str, output: str = "o") -> np.ndarray:
        """|error| of one case as an array of the output's shape: (B,H,Nq,D) for "o", (B,H,Nq) for "lse".

        KeyError names the cases there are when there is no such one.
        """
        for c in self.comparisons:
            if c.case == case and c.output == output and c.error_map is not None:
                return c.error_map
        known = sorted({(c.case, c.output) for c in self.comparisons if c.error_map is not None})
        raise KeyError(f"no error map of {output!r} for case {case!r}; there are {known}")

    def __str__(self) -> str:
        cases, bad = {c.case for c in self.comparisons}, self.failures
        told = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
        if not bad:
            top = max(self.comparisons, key=lambda c: c.used)
            return (
                f"{self.name}: right in {told}; at worst {top.used:.0%} of the error budget "
                f"({top.output.upper()} of {top.case!r}: error {top.error:.1e}, budget {top.budget:.1e})"
            ) + (f"\n  {self.hint}" if self.hint else "")
        lines = [f"{self.name}: WRONG in {len({c.case for c in bad})} of {told}"]
        first = {(c.problem if c.wrong is None else id(c)): c for c in reversed(bad)}  # one sentence is said once
        shown = [c for c in bad if first[c.problem if c.wrong is None else id(c)] is c][:5]
        for c in shown:
            same = 0 if c.wrong is not None else sum(other.problem == c.problem for other in bad) - 1
            lines.append(c.explain() + (f"\n  the same in {same} more cases" if same else ""))
        problems = {c.problem for c in shown if c.wrong is None}
        left = [c for c in bad if c not in shown and not (c.wrong is None and c.problem in problems)]
        if left:
            others = list(dict.fromkeys(c.case for c in left))
            lines.append(f"... and {len(left)} more: " + ", ".join(others[:8]) + ", …" * (len(others) > 8))
        drawn = next((c for c in bad if c.wrong is not None), None)
        if drawn is not None:
            lines.append(draw(drawn))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓' if c.ok else '<b>✗</b>'}</td><td style='text-align:left'>{html.escape(c.case)}</td>"
            f"<td>{c.output.upper()}</td><td>{c.error:.2g}</td><td>{c.budget:.2g}</td><td>{c.used:.0%}</td></tr>"
            for c in self.comparisons
        )
        return (
            f"<pre style='margin:0;word-break:normal'>{html.escape(str(self))}</pre><details{'' if self.ok else ' open'}><summary>every case</summary>"
            "<table><thead><tr><th></th><th style='text-align:left'>case</th><th>output</th><th>error</th>"
            f"<th>budget</th><th>used</th></tr></thead><tbody>{rows}</tbody></table></details>"
        )


def check(kernel: Which | Callable, cases: Iterable[Case] | None = None) -> Report:
    """Runs a kernel on every case and compares O (or P) and LSE with float64 by the 2x rule.

        check("04")

    kernel: what `load` takes, or any function `(q, k, v, scale=None) -> (o, lse)` (softmax: `(s) -> (p, lse)`); one that takes
    `out=(o, lse)` is handed outputs full of NaN. cases: `reference.cases` of the kernel's rung by default, the full set
    on a GPU and the small one otherwise. A kernel that raises fails the case with the error's text; one that can't be loaded
    raises as `load` does.
    """
    import torch

    from . import reference

    if isinstance(kernel, Kernel) or not callable(kernel):
        kernel = load(kernel, quiet=True)
    name = kernel.rung.stem if hasattr(kernel, "rung") else getattr(kernel, "__name__", type(kernel).__name__)
    if cases is None:
        device = getattr(kernel, "device", "cpu")
        small = torch.device(device).type == "cpu"
        cases = reference.cases(getattr(kernel, "rung", None), device, "small" if small else "full")
    try:
        poisons = "out" in inspect.signature(kernel).parameters
    except ValueError:  # a built-in function that doesn't tell
        poisons = False
    with as_loaded():  # all cases are of one build
        comparisons = tuple(c for case in cases for c in _one(kernel, case, poisons))
    if not comparisons:
        raise ValueError("check() was given no cases")
    return Report(name, comparisons, XRAY if getattr(kernel, "backend", "") == "emulator" else "")


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
    if not all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)):
        return [Comparison(case.name, case.names[0], *[float("nan")] * 3, problem="changed its inputs")]
    return compare(case, outputs)


def compare(case: Case, outputs: tuple[Tensor, ...]) -> list[Comparison]:
    """Compares outputs (O, LSE), (P, LSE) or (dQ, dK, dV), however computed, with float64 on `case`; one entry per output.

        compare(Case("mine", q, k, v), kernel(q, k, v))

    Outputs come in the order of `case.names`. What has another shape or dtype, or is no tuple of so many, is an entry with a problem.
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

    if got.shape != exact.shape or got.dtype != plain.dtype:
        text = f"{name.upper()} is {got.dtype} {tuple(got.shape)}, not {plain.dtype} {tuple(exact.shape)}"
        return Comparison(case, name, *[float("nan")] * 3, problem=text)
    finite = exact.isfinite()
    matches = torch.where(finite, got.isfinite(), got.double() == exact)  # infinities by sign; the reference has no NaN
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
        _bits(x).fill_(POISON[str(x.dtype)])
    return outputs


def _bits(x: Tensor) -> Tensor:
    """A contiguous float tensor's memory as integers."""
    import torch

    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _misplaced(got: Tensor, exact: Tensor, matches: Tensor) -> str:
    """What is wrong with the NaNs and infinities, in words."""
    kinds = {
        "never written": _bits(got.contiguous()) == POISON[str(got.dtype)],
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


def _ranges(indices: np.ndarray, size: int) -> str:
    """'all', '3', '64–69', '1, 3 … 31 (step 2)', '0–3, 16–19 and 5 more runs'."""
    import numpy as np

    if len(indices) == size:
        return "all" if size > 1 else "0"
    steps = np.diff(indices)
    if len(indices) > 3 and steps[0] > 1 and (steps == steps[0]).all():
        return f"{indices[0]}, {indices[1]} … {indices[-1]} (step {steps[0]})"
    runs = np.split(indices, np.flatnonzero(steps > 1) + 1)
    words = [f"{r[0]}" if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs]
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more runs" if len(words) > 4 else "")


def _axes(wrong: np.ndarray, output: str) -> tuple[str, ...]:
    names = ("row",) if output == "lse" else ("row", "column")
    lead = wrong.ndim - len(names)
    before = ("batch", "head") if lead == 2 else tuple(f"dim {i}" for i in range(lead))
    return (before + names)[-wrong.ndim :] if wrong.ndim else ()


def _pattern(wrong: np.ndarray, output: str) -> str:
    """Which elements are wrong, axis by axis."""
    import numpy as np

    parts = []
    for axis, name in enumerate(_axes(wrong, output)):
        others = tuple(a for a in range(wrong.ndim) if a != axis)
        hit = np.flatnonzero(wrong.any(axis=others))
        parts.append(f"{name} {_ranges(hit, wrong.shape[axis])}")
    return f"{wrong.sum()} of {wrong.size} elements wrong: " + "; ".join(parts)


def draw(comparison: Comparison, height: int = 16, width: int = 64) -> str:
    """A text picture of which elements are wrong in the worst head: · none, ▒ some, █ all of the elements in a cell.

    O (and P): rows down, columns across. LSE: one line, rows across.
    """
    import numpy as np

    wrong = comparison.wrong
    lead = comparison.worst[: max(0, wrong.ndim - 2)] if comparison.output != "lse" else comparison.worst[:-1]
    picture = np.atleast_2d(wrong[lead]) if wrong.ndim else wrong.reshape(1, 1)
    rows = np.array_split(np.arange(picture.shape[0]), min(height, picture.shape[0]))
    columns = np.array_split(np.arange(picture.shape[1]), min(width, picture.shape[1]))
    where = ", ".join(f"{n} {i}" for n, i in zip(_axes(wrong, comparison.output), lead, strict=False))
    across = "rows" if comparison.output == "lse" else "columns"
    title = f"{comparison.output.upper()} of {comparison.case!r}{', ' + where if where else ''}"
    lines = [f"{title}; {across} 0–{picture.shape[1] - 1} across: · right ▒ some wrong █ all wrong"]
    for r in rows:
        shares = [picture[np.ix_(r, c)].mean() for c in columns]
        label = "" if comparison.output == "lse" else f"{r[0]}" if len(r) == 1 else f"{r[0]}–{r[-1]}"
        lines.append(f"{label:>11} " + "".join("·" if s == 0 else "█" if s == 1 else "▒" for s in shares))
    return "\n".join(lines)
