"""The verdict of a check: which cases are wrong, by how much and where, in text and for a notebook."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..figures.words import many

if TYPE_CHECKING:  # imported where they are needed: `import helpers` is quick and needs neither
    import numpy as np
    import pandas as pd

TOLD = 5  # failures that the text explains


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
            f"  {pattern(self.wrong, self.output)}"
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
        head = f"{self.name}: WRONG in {len({c.case for c in bad})} of {told}"
        drawn = next((c for c in bad if c.wrong is not None), None)
        return "\n".join([head, *self._told(), *([draw(drawn)] if drawn is not None else [])])

    def _told(self, most: int = TOLD) -> list[str]:
        """The first failures in words, what several have in common once, and the names of the rest."""
        groups: dict[object, list[Comparison]] = {}
        for c in self.failures:
            groups.setdefault(_sentence(c.problem) if c.wrong is None else id(c), []).append(c)
        shown = list(groups.values())[:most]
        lines = []
        for first, *others in shown:
            lines.append(first.explain() + (f"\n  the same in {many(len(others), 'more case')}" if others else ""))
        said = {id(c) for group in shown for c in group}
        if left := [c for c in self.failures if id(c) not in said]:
            others = list(dict.fromkeys(c.case for c in left))
            lines.append(f"... and {len(left)} more: " + ", ".join(others[:8]) + ", …" * (len(others) > 8))
        return lines

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from ..figures.tables import preformatted

        parts = [preformatted(str(self))]
        if not self.ok:
            first, *others = self._told()
            cases = len({c.case for c in self.comparisons})
            head = f"{self.name}: WRONG in {len({c.case for c in self.failures})} of {many(cases, 'case')}"
            drawn = next((c for c in self.failures if c.wrong is not None), None)
            parts = [preformatted(f"{head}\n{first}"), error_pixels(drawn) if drawn is not None else ""]
            if others:
                parts.append(_folded("other failures", preformatted("\n".join(others))))
        return "".join([*parts, _folded("every case", self._table())])

    def _table(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><td>{'✓' if c.ok else '<b>✗</b>'}</td><td {left}>{html.escape(c.case)}</td><td>{c.output.upper()}</td>"
            f"<td>{_number(c.error)}</td><td>{_number(c.budget)}</td><td>{_used(c)}</td></tr>"
            for c in self.comparisons
        )
        heads = f"<th></th><th {left}>case</th><th>output</th><th>error</th><th>budget</th><th>error / budget</th>"
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"


def _number(x: float) -> str:
    return "–" if x != x else f"{x:.2g}"


def _used(c: Comparison) -> str:
    """error / budget as a percentage, or where that has too many digits as a factor; – where no number says it."""
    if c.problem or c.used != c.used:
        return "–"
    return f"{c.used:.0%}" if c.used < 10 else f"{c.used:.2g} ×"


def _sentence(problem: str) -> str:
    """A problem without the numbers in which the same one differs from case to case: addresses, threads, blocks."""
    return re.sub(r"0x[0-9a-f]+|(?<!line )(?<![:\w])\b\d+", "#", problem)


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
    more = len(words) - 4
    return ", ".join(words[:4]) + (f" and {more} more run{'s' * (more > 1)}" if more > 0 else "")


def _axes(wrong: np.ndarray, output: str) -> tuple[str, ...]:
    names = ("row",) if output == "lse" else ("row", "column")
    lead = wrong.ndim - len(names)
    before = ("batch", "head") if lead == 2 else tuple(f"dim {i}" for i in range(lead))
    return (before + names)[-wrong.ndim :] if wrong.ndim else ()


def pattern(wrong: np.ndarray, output: str) -> str:
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
    lead, where = _head(comparison)
    picture = np.atleast_2d(wrong[lead]) if wrong.ndim else wrong.reshape(1, 1)
    rows = np.array_split(np.arange(picture.shape[0]), min(height, picture.shape[0]))
    columns = np.array_split(np.arange(picture.shape[1]), min(width, picture.shape[1]))
    across = "rows" if comparison.output == "lse" else "columns"
    title = f"{comparison.output.upper()} of {comparison.case!r}{', ' + where if where else ''}"
    lines = [f"{title}; {across} 0–{picture.shape[1] - 1} across: · right ▒ some wrong █ all wrong"]
    for r in rows:
        shares = [picture[np.ix_(r, c)].mean() for c in columns]
        label = "" if comparison.output == "lse" else f"{r[0]}" if len(r) == 1 else f"{r[0]}–{r[-1]}"
        lines.append(f"{label:>11} " + "".join("·" if s == 0 else "█" if s == 1 else "▒" for s in shares))
    return "\n".join(lines)


def error_pixels(comparison: Comparison) -> str:
    """The worst head of a wrong output as HTML: a pixel for each element, darker the further it is off, with its legend.

    O (and P): rows down, columns across. LSE: one line, rows across. Of more than MOST_ROWS rows neighbours share a pixel, which
    shows the worst of them.
    """
    import numpy as np

    from ..figures.pixels import image, key
    from ..figures.style import ERROR_COLOURS

    lead, where = _head(comparison)
    errors = np.atleast_2d(comparison.error_map[lead])
    wrong = np.atleast_2d(comparison.wrong[lead])
    ratio = errors / comparison.budget if comparison.budget else np.where(errors > 0, np.inf, 0)
    kinds = np.where(np.isnan(errors), 4, np.where(wrong, 1 + (ratio > 10) + (ratio > 100), 0)).astype(np.uint8)
    rows, columns = kinds.shape
    across = (
        f"rows 0–{columns - 1} across"
        if comparison.output == "lse"
        else f"rows 0–{rows - 1} down, columns 0–{columns - 1} across"
    )
    title = f"{comparison.output.upper()} of {comparison.case!r}{', ' + where if where else ''}: {across}"
    names = (
        "right",
        "up to 10 × the budget",
        "up to 100 ×",
        "more",
        "NaN, infinite or never written where it should not be",
    )
    there = [int(k) for k in np.unique(kinds)]
    words = f"{title}. {pattern(comparison.wrong, comparison.output)}"
    legend = key([(ERROR_COLOURS[k], names[k]) for k in there])
    return f"<div style='margin:6px 0'><div>{html.escape(title)}</div>{image(kinds, ERROR_COLOURS, words)}<div>{legend}</div></div>"


def _head(comparison: Comparison) -> tuple[tuple[int, ...], str]:
    """The head that the worst element is in: its index, and in words."""
    ndim, output = comparison.wrong.ndim, comparison.output
    lead = comparison.worst[: max(0, ndim - 2)] if output != "lse" else comparison.worst[:-1]
    return lead, ", ".join(f"{n} {i}" for n, i in zip(_axes(comparison.wrong, output), lead, strict=False))
