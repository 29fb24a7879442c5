"""The source with what each line costs beside it: text in a terminal, HTML in a notebook.

The HTML has no colours of its own but such as read on a light page and on a dark one.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..emulator.trace import Access
from ..ladder.show import ASIDE, MARKER, PAGE, coloured
from .style import EXCESS, HEAT
from .words import SPACES, count

BAR = 8  # characters
HEADS = {"shared": " shared memory", "global": " global memory"}


@dataclass(frozen=True)
class HeatListing:
    """Lines of a `.cu` with what each costs: shared memory's wavefronts left, global memory's sectors right of it.

    A bar's length is the line's share of the costliest line of the kernel in that space; its orange part (░ in text) is
    what a request without conflicts, or a coalesced one, would not cost.
    """

    title: str
    lines: tuple[tuple[int, str], ...]
    costs: dict[int, dict[str, tuple[int, int]]]  # line -> space -> cost, excess
    most: dict[str, int]  # space -> the largest cost of a line
    marked: dict[int, str]  # lines that findings name -> the kind

    def bar(self, line: int, space: str) -> tuple[str, str, str]:
        """Of a line: the bar's necessary part, its needless part, and the number."""
        cost, excess = self.costs.get(line, {}).get(space, (0, 0))
        if not cost:
            return "", "", ""
        both = 0 < excess < cost  # each part is seen
        full = max(1 + both, round(BAR * cost / self.most[space]))
        over = min(full - both, max(1, round(full * excess / cost))) if excess else 0
        return "█" * (full - over), "░" * over, count(cost)

    @property
    def spaces(self) -> list[str]:
        """Those that these lines touch; both where none does."""
        found = [space for space in SPACES if any(space in self.costs.get(n, ()) for n, _ in self.lines)]
        return found or [space for space in SPACES if self.most.get(space)]

    @property
    def _head(self) -> str:
        return "".join(f"{HEADS[space]:<{BAR + 9}}" for space in self.spaces)

    def __str__(self) -> str:
        rows = [self.title, f"      {self._head}".rstrip()]
        for number, text in self.lines:
            strip = ""
            for space in self.spaces:
                must, needless, cost = self.bar(number, space)
                strip += f"{cost:>7} {must + needless:<{BAR}} "
            rows.append(f"{number:>5} {strip}{'✗' if number in self.marked else ' '} {text}".rstrip())
        return "\n".join([*rows, f"      {self.legend}"])

    __repr__ = __str__

    @property
    def legend(self) -> str:
        """What the bars stand for."""
        return (
            "█ as many as the bytes need  ░ bank conflicts, or sectors not coalesced; numbers: wavefronts, sectors"
            + ("  ✗ see the findings" if self.marked else "")
        )

    def _repr_html_(self) -> str:
        rows = [_aside(self.title), _aside(f"      {self._head}")]
        for number, text in self.lines:
            strip = ""
            for space in self.spaces:
                must, needless, cost = self.bar(number, space)
                strip += f"{cost:>7} "
                strip += f'<span style="color:{HEAT[space]}">{must}</span>' if must else ""
                strip += f'<span style="color:{EXCESS}">{"█" * len(needless)}</span>' if needless else ""
                strip += " " * (BAR + 1 - len(must + needless))
            mark = f'<span style="color:{EXCESS}">✗</span>' if number in self.marked else " "
            gutter = f'<span style="{ASIDE}">{number:>5} {strip}</span>{mark}'
            rows.append(f"{gutter} {coloured(text)}")
        keys = f'<span style="color:{HEAT["shared"]}">█</span> <span style="color:{HEAT["global"]}">█</span> '
        keys += _aside("as many as the bytes need") + f'  <span style="color:{EXCESS}">█</span> '
        keys += _aside("beyond that: bank conflicts, or sectors not coalesced. Numbers: wavefronts, sectors")
        return f'<pre style="{PAGE}">{chr(10).join([*rows, "      " + keys])}</pre>'


def _aside(text: str) -> str:
    return f'<span style="{ASIDE}">{html.escape(text)}</span>'


def heat(
    title: str, lines: Iterable[tuple[int, str]], accesses: Iterable[Access], marked: dict[int, str]
) -> HeatListing:
    """The listing of some numbered lines of a file. accesses: those of the whole file; the costliest line of all sets the
    scale of the bars. marked: lines that findings name, with the kind."""
    costs: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for a in accesses:
        cost, excess = costs[a.line].get(a.space, (0, 0))
        costs[a.line][a.space] = (cost + a.cost, excess + a.cost - a.ideal)
    most = {space: max((c[space][0] for c in costs.values() if space in c), default=0) for space in SPACES}
    return HeatListing(title, tuple(line for line in lines if not MARKER.match(line[1])), dict(costs), most, marked)
