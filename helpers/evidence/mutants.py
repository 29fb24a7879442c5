"""The catalogue's seeded bugs as kernels: each a rung with one place changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..ladder.instances import for_d64, of_head_dimension, single
from ..ladder.rung import Rung, code, includes, parse, rung, rungs
from .catalogue import (
    BATCH,
    ELSEWHERE,
    HEADS,
    INSTANCE,
    LAUNCH_RULES,
    MEMORY,
    NOT,
    PLACES,
    REPEATED,
    RESULTS,
    RULES,
    SHAPES,
    VALUES,
)

if TYPE_CHECKING:
    from torch import Tensor

# What must notice a mutant: a pattern (re.search) of its verdict (verdicts.py).
NOTICED = r"^(check|emulator|xray): "
CLEAN = r"^clean$"
UNORDERED = r"^xray: (race|in flight)$"


@dataclass(frozen=True)
class Mutant:
    """`source` is rung `stem` with one bug, `bug`, first seen in `line`.

    A memory error is run at fixed shapes, by compute-sanitizer and by the X-ray; its source has the instances for D = 64 only.
    `wrong_result` says that the bug is one for the check: `verdicts.search` looks for the smallest input that shows it.
    place: where else than at SHAPES it is run, a key of PLACES.
    """

    id: str
    stem: str
    bug: str
    line: int
    source: str = field(repr=False)
    wrong_result: bool = False
    place: str = ""

    @property
    def must(self) -> str:
        """A pattern (re.search) that its verdict has to fit; empty if nothing need notice it: some do no harm."""
        if self.rule == "original":
            return CLEAN
        if self.rule in ("barrier-removed", "syncwarp-removed", "wait-removed") and self.id not in ORDERS_NO_THREADS:
            return UNORDERED
        return NOTICED if self.wrong_result or self.place else ""

    @property
    def rule(self) -> str:
        """The rule that made it, or its own name."""
        return self.id.partition("@")[0].split(".")[1]

    @property
    def emulated(self) -> Rung:
        """What the emulator runs: the one instance, in one dtype, that has the bug."""
        whole = parse(self.source, Path(f"{self.stem}.cu"))
        D, dtype = INSTANCE.get(self.id, (64, whole.dtypes[0]))
        return single(whole, D, dtype) if "fp16" in whole.dtypes else of_head_dimension(whole, D)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes it is run at: (Nq, Nk, D), or (rows, N) of a softmax."""
        if self.place:
            return [PLACES[self.place][0]]
        found = SHAPES.get(self.stem[:2], SHAPES["default"])
        return [(*shape[:-1], INSTANCE[self.id][0]) for shape in found] if self.id in INSTANCE else found

    @property
    def calls(self) -> list[tuple[int, int, int, int, int]]:
        """(B, H, Nq, Nk, D) of every call; a softmax of Nq rows of Nk has B = H = D = 1."""
        if rung(self.stem).op == "softmax":
            return [(1, 1, rows, N, 1) for rows, N in self.shapes]
        return [(BATCH, self.heads[0], *shape) for shape in self.shapes]

    @property
    def options(self) -> dict[str, int | bool | float]:
        """What a call asks for beside its inputs."""
        asked = {"causal": True, "splits": 2}
        options = {name: value for name, value in asked.items() if name in rung(self.stem).features}
        return options | ({"scale": PLACES[self.place][1]} if self.place else {})

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of Q, and of K and V."""
        return HEADS, 1 if "gqa" in rung(self.stem).features else HEADS

    @cached_property
    def digest(self) -> str:
        """12 digits of the SHA-256 of the code, without comments, and of the headers it includes."""
        headers = _of_headers(tuple(line for line in self.source.splitlines() if line.startswith("#include")))
        return hashlib.sha256((code(self.source) + headers).encode()).hexdigest()[:12]

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """Random inputs of every call, on the CPU."""
        from ..run.reference import random_inputs

        options = {"Hkv": self.heads[1], "causal": self.options.get("causal", False)}
        return [random_inputs(rung(self.stem), shape, seed=i, **options) for i, shape in enumerate(self.calls)]


# Barriers that order a CTA among others, whose turns the X-ray doesn't follow (22); its end (23, where nobody reads K and V
# then: the CTA ends with nothing under way); or that make a warp one again before bar.arrive (33).
ORDERS_NO_THREADS = {"22.barrier-removed.3", "22.barrier-removed.4", "23.wait-removed.2", "33.syncwarp-removed.1"}


@cache
def mutants() -> dict[str, Mutant]:
    """The memory errors by id, rung by rung. ValueError if one that is written out no longer fits its rung."""
    return {m.id: m for each in rungs() for m in [*_by_rule(each.stem), *_written(each.stem, MEMORY)]}


@cache
def catalogue() -> dict[str, Mutant]:
    """Every seeded bug by id, and of every rung the original, in which nothing must be noticed."""
    found = {}
    for each in rungs():
        found[f"{each.number}.original"] = original(each.stem)
        if any(id.startswith(each.number) for id in ELSEWHERE):
            found |= {m.id: m for m in (_elsewhere(original(each.stem), place) for place in PLACES)}
    found |= mutants()
    found |= {m.id: m for m in (_elsewhere(found[id], place) for id, place in ELSEWHERE.items())}
    return found | {m.id: m for each in rungs() for m in _written(each.stem, RESULTS)}


def of_rung(stem: str) -> dict[str, Mutant]:
    """The bugs of one rung by id, without those that are run elsewhere. ValueError if one no longer fits its rung."""
    tables = (_by_rule(stem), _written(stem, MEMORY), _written(stem, RESULTS))
    return {m.id: m for table in tables for m in table}


def change(id: str) -> tuple[str, str, str]:
    """Of a bug that is written out: the rung's stem, the text it replaces, and by what. KeyError for another id."""
    stems = {each.number: each.stem for each in rungs()}
    written = {f"{number}.{name}": (stems[number], old, new) for number, name, _, old, new in [*MEMORY, *RESULTS]}
    return written[id]


def original(stem: str) -> Mutant:
    """The rung itself, cut down and run like its mutants: id "04.original"."""
    return Mutant(f"{stem[:2]}.original", stem, "none", 0, for_d64(stem).source)


@cache
def _of_headers(lines: tuple[str, ...]) -> str:
    """The code of the fa/ headers that these #include lines reach."""
    return "".join(code(header.read_text()) for header in includes("\n".join(lines)))


def _by_rule(stem: str) -> Iterator[Mutant]:
    source = for_d64(stem).source
    bare = re.sub(r"//[^\n]*", lambda found: " " * len(found[0]), source)
    lines, launcher = source.splitlines(), source.index("[region: launcher]")
    for rules, begin, end in ((RULES, 0, launcher), (LAUNCH_RULES, launcher, len(bare))):
        for name, (bug, pattern, new) in rules.items():
            if name in REPEATED.get(stem[:2], ()):
                continue
            for n, place in enumerate(re.compile(pattern).finditer(bare, begin, end), 1):
                text = new(place) if callable(new) else place.expand(new)
                made = source[: place.start()] + text + source[place.end() :]
                id, line = f"{stem[:2]}.{name}.{n}", 1 + source.count("\n", 0, place.start())
                if id not in NOT and not VALUES.search(lines[line - 1]):
                    yield Mutant(id, stem, bug, line, made)


def _written(stem: str, table: list[tuple[str, str, str, str, str]]) -> Iterator[Mutant]:
    source = rung(stem).source if table is RESULTS else for_d64(stem).source
    for number, name, bug, old, new in table:
        if stem[:2] != number:
            continue
        if source.count(old) != 1:
            raise ValueError(f"mutant {number}.{name}: {old!r} occurs {source.count(old)} times in {stem}, not once")
        made = source.replace(old, new)
        line = next(n for n, (a, b) in enumerate(zip(source.splitlines(), made.splitlines()), 1) if a != b)
        yield Mutant(f"{number}.{name}", stem, bug, line, made, wrong_result=table is RESULTS)


def _elsewhere(mutant: Mutant, place: str) -> Mutant:
    change = PLACES[place][2]
    source = mutant.source.replace(*change) if change else mutant.source
    return replace(mutant, id=f"{mutant.id}@{place}", source=source, place=place)
