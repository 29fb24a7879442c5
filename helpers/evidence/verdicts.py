"""Who notices which seeded bug: recorded in data/verdicts.csv, and run again where it may have changed.

A row holds the smallest input found that shows a bug, what noticed it there, and three digests: of the mutant (its code and
the headers it includes), of the emulator (C++ sources, translation, compiler flags) and of the checker (the error rule, the
reference, the shapes). A row is stale if one of the three is another today. `make test` runs the stale ones and a share of
the rest (`choose`), `pytest --all` runs every one, and `record` brings the file up to date.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import re
import time
import tokenize
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from typing import TYPE_CHECKING

from ..ladder.errors import KernelError
from ..ladder.paths import DATA, HELPERS
from ..ladder.rung import Rung, code
from ..toolchain import guard
from ..toolchain.cores import cores
from . import catalogue as tables
from .mutants import Mutant, catalogue, original

if TYPE_CHECKING:
    from ..run.kernel import Kernel
    from ..run.reference import Case
    from ..run.xray import Xray

PATH = DATA / "verdicts.csv"
EMULATOR = HELPERS / "emulator"
CHECKER = tuple(HELPERS / "run" / f"{name}.py" for name in ("check", "report", "reference", "families"))
XRAY, CLEAN = "xray", "clean"
SHARED_ROWS = (
    "75 packed sequences"  # the case whose CTAs would write one another's rows, unless they mind where a sequence ends
)
SHARE = 16  # of the rows that are not stale, so many are run each time
MOST = 120  # stale rows that are all run; of more, one of each kind
CLEAR = 2.0  # budgets an error has to exceed for a case to be taken: others may depend on the machine's own rounding
SECONDS = 60.0  # after which a launch is stopped: a mutant that loops without end
SAVE_SECONDS = 20.0  # between two writings of the record


@dataclass(frozen=True)
class Verdict:
    """A row of the record. input: "xray" (the mutant's shapes, traced), the name of a case, or "xray at" one. noticed: "check: wrong",
    "emulator: out of bounds" (what stopped the check's call), "xray: race" (the first finding of a kind that has to be found,
    else the first), "clean". emulator: empty if it is not known with which one a row was made."""

    mutant: str
    digest: str
    emulator: str
    checker: str
    input: str
    noticed: str


# What a mutant does


def see(mutant: Mutant, input: str) -> str:
    """What notices a mutant at an input; "clean" if nothing does. KeyError if no case has this name."""
    if input == XRAY:
        return _xrayed(mutant)
    kernel, name = _kernel(mutant.emulated), input.removeprefix(f"{XRAY} at ")
    case = {case.name: case for case in _cases(kernel.rung)}[name]
    return _checked(kernel, case)[0] if name == input else _xrayed_at(mutant, case)


def search(mutant: Mutant) -> tuple[str, str]:
    """The smallest input that shows a mutant, and what notices it there. A memory error is for the X-ray at its shapes alone;
    a wrong result for the check's cases, the smallest first, then for the X-ray, at last at SHARED_ROWS. What looks like a missing
    barrier the X-ray sees at once, and cases may be right by luck: it goes first."""
    ways: list[Callable[[Mutant], tuple[str, str]]] = [lambda m: (XRAY, _xrayed(m))]
    if mutant.wrong_result:
        ways.append(_smallest_case)
        if not _orders_threads(mutant):
            ways.reverse()
        ways.append(_shared_rows)
    return next((seen for seen in (way(mutant) for way in ways) if seen[1] != CLEAN), (XRAY, CLEAN))


def findings(mutant: Mutant) -> list[tuple[str, int, int | None]]:
    """What the X-ray finds in a mutant at the first of its shapes that shows something: kind, line, the other line."""
    return next(
        (found for ray in _rays(mutant) if (found := [(f.kind, f.line, f.other_line) for f in ray.findings])), []
    )


def _xrayed(mutant: Mutant) -> str:
    try:
        kinds = [kind for kind, _, _ in findings(mutant)]
    except KernelError as error:  # nothing could be launched, or it never ended
        kinds = re.split(r":| after ", str(error))[:1]
    if not kinds and mutant.wrong_result and _conflicts(mutant) > 2 * _conflicts(original(mutant.stem)):
        kinds = ["bank conflicts"]
    return _said(mutant, kinds)


def _xrayed_at(mutant: Mutant, case: Case) -> str:
    from ..run.xray import xray

    return _said(mutant, [f.kind for f in xray(_kernel(mutant.emulated), *case.inputs, **case.options).findings])


def _said(mutant: Mutant, kinds: list[str]) -> str:
    """Of what the X-ray found, what has to be found, else the first."""
    said = [f"{XRAY}: {kind}" for kind in kinds] or [CLEAN]
    return next((noticed for noticed in said if re.search(mutant.must, noticed)), said[0])


def _shared_rows(mutant: Mutant) -> tuple[str, str]:
    cases = [case for case in _cases(mutant.emulated) if case.name == SHARED_ROWS]
    return next(((f"{XRAY} at {SHARED_ROWS}", _xrayed_at(mutant, case)) for case in cases), (XRAY, CLEAN))


def _rays(mutant: Mutant) -> Iterable[Xray]:
    from ..run.xray import xray

    kernel = _kernel(mutant.emulated)
    return (xray(kernel, *inputs, **mutant.options) for inputs in mutant.inputs())


def _conflicts(mutant: Mutant) -> int:
    return sum(ray.conflicts for ray in _rays(mutant))


def _kernel(rung: Rung) -> Kernel:
    """For the emulator, on one OS thread: with several it is a matter of time which CTA of 33 takes which tile of keys, or writes a row
    last. Nothing is compiled before it is run or traced."""
    from ..run.kernel import Kernel

    kernel = Kernel(rung, "cpu")
    kernel.launcher.timeout, kernel.launcher.threads = SECONDS, 1
    return kernel


def _orders_threads(mutant: Mutant) -> bool:
    line = original(mutant.stem).source.splitlines()[mutant.line - 1]
    return re.search(r"__sync|wait|fence", line) is not None


def _cases(rung: Rung) -> list[Case]:
    """The check's small cases, those with the fewest scores first."""
    from ..run import reference

    def size(case: Case) -> int:
        return case.s.numel() if case.s is not None else case.q[..., 0].numel() * case.k.shape[2]

    return sorted(reference.cases(rung, "cpu", "small"), key=size)


def _smallest_case(mutant: Mutant) -> tuple[str, str]:
    kernel, unclear = _kernel(mutant.emulated), (XRAY, CLEAN)
    for case in _cases(kernel.rung):
        noticed, used = _checked(kernel, case)
        if used > CLEAR:
            return case.name, noticed
        if used > 1 and unclear[1] == CLEAN:
            unclear = case.name, noticed
    return unclear


def _checked(kernel: Kernel, case: Case) -> tuple[str, float]:
    """What notices one case, and the largest error in budgets: above 1 is wrong."""
    from ..run.check import check

    report = check(kernel, [case])
    if report.ok:
        return CLEAN, report.worst
    stopped = re.match(r"raised KernelError: (?:\S+:\d+: )?(?P<kind>.+?)(?: in |:| after )", report.failures[0].problem)
    return f"emulator: {stopped['kind']}" if stopped else "check: wrong", report.worst


# What a verdict depends on


def digest_of_emulator() -> str:
    """12 digits of the SHA-256 of the emulator's C++ without comments, of what Python adds to it, of the translation, and of the
    compilers' flags on any machine."""
    from ..emulator import fragments, launcher

    files = [*(file for file in sorted(EMULATOR.rglob("*")) if file.suffix in (".h", ".cpp")), guard.HEADER]
    translation = [_python((EMULATOR / f"{name}.py").read_text()) for name in ("translate", "host_code")]
    flags = [launcher.KERNEL_FLAGS, launcher.COMPILER_FLAGS, launcher.TRACE_FLAGS]
    flags += [launcher.RUNTIME_FLAGS, launcher.RUNTIME_COMPILER_FLAGS]
    return _sha([*(code(file.read_text()) for file in files), fragments.tables(), *translation, repr(flags)])


def digest_of_checker() -> str:
    """The same of the error rule, the reference and its cases, and of the shapes that mutants are run at."""
    shapes = (tables.SHAPES, tables.BATCH, tables.HEADS, tables.PLACES, tables.INSTANCE)
    return _sha([*(_python(file.read_text()) for file in CHECKER), repr(shapes)])


def _sha(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _python(text: str) -> str:
    """Python without comments, docstrings, blank lines and trailing blanks: the same on every version of Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            string = node.body[0]
            lines[string.lineno - 1 : string.end_lineno] = [""] * (string.end_lineno - string.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


# The record


def read() -> dict[str, Verdict]:
    """The recorded verdicts by mutant; none if there is no record yet."""
    if not PATH.exists():
        return {}
    with PATH.open(newline="") as file:
        return {row["mutant"]: Verdict(**row) for row in csv.DictReader(file)}


def write(verdicts: dict[str, Verdict]) -> None:
    """Writes the record, in the catalogue's order and without what is no longer in it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Verdict)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(verdicts[id]) for id in catalogue() if id in verdicts)
    whole = PATH.with_suffix(".new")
    whole.write_text(text.getvalue())
    whole.replace(PATH)


def stale(verdicts: dict[str, Verdict]) -> list[str]:
    """The mutants that have no verdict of what they, the emulator and the checker are today."""
    today = digest_of_emulator(), digest_of_checker()
    rows = ((id, verdicts.get(id), mutant) for id, mutant in catalogue().items())
    return [id for id, row, m in rows if row is None or (row.digest, row.emulator, row.checker) != (m.digest, *today)]


def record(workers: int | None = None, every: bool = False) -> list[str]:
    """Runs what is stale (every: all mutants), `workers` at a time (by default as many as there are cores), and writes the
    record as it goes: stopped, it goes on from there when it is called again. Prints every verdict that is new or another.

    Gives back the mutants that nothing notices although something must: those need another input or a fix of the checker."""
    verdicts, all_mutants, start = read(), catalogue(), time.monotonic()
    wanted = list(all_mutants) if every else stale(verdicts)
    wanted.sort(key=lambda id: not all_mutants[id].must)  # what must be noticed goes first
    emulator, checker = digest_of_emulator(), digest_of_checker()
    saved = start
    # Processes, because each has an emulator of its own; started afresh, because torch has threads.
    with ProcessPoolExecutor(workers or cores(), get_context("spawn")) as pool:
        futures = {pool.submit(_renewed, id, verdicts[id].input if id in verdicts else ""): id for id in wanted}
        for done, future in enumerate(as_completed(futures), 1):
            id = futures[future]
            before, (input, noticed) = verdicts.get(id), future.result()
            verdicts[id] = Verdict(id, all_mutants[id].digest, emulator, checker, input, noticed)
            if before is None or (before.input, before.noticed) != (input, noticed):
                was = f" (was: at {before.input!r} · {before.noticed})" if before else ""
                print(f"{done} of {len(wanted)} · {id} at {input!r} · {noticed}{was}", flush=True)
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                write(verdicts)
    write(verdicts)
    missed = [id for id, mutant in all_mutants.items() if not re.search(mutant.must, verdicts[id].noticed)]
    print(f"{len(wanted)} verdicts renewed in {time.monotonic() - start:.0f} s, {len(all_mutants)} recorded")
    print(
        *(f"not noticed as it must be: {id} at {verdicts[id].input!r} · {verdicts[id].noticed}" for id in missed),
        sep="\n",
    )
    return missed


def _renewed(id: str, input: str) -> tuple[str, str]:
    """What notices a mutant today: at the recorded input if something does, else wherever `search` finds something."""
    mutant = catalogue()[id]
    try:
        noticed = see(mutant, input) if input else CLEAN
    except KeyError:  # a case that there is no longer
        noticed = CLEAN
    return (input, noticed) if noticed != CLEAN else search(mutant)


# What a run of the tests looks at


@dataclass(frozen=True)
class Choice:
    """Mutants to run, by id. seed: what the share was drawn by. stale: how many rows are; of those not all are run if there
    are more than MOST."""

    ids: tuple[str, ...]
    seed: str
    stale: int
    all: int

    def __str__(self) -> str:
        text = f"{len(self.ids)} of {self.all} seeded bugs run, chosen by --seed={self.seed}"
        if self.stale > MOST:
            text += f"; {self.stale} recorded verdicts are stale, one of each kind was run: `make verdicts` renews them"
        elif self.stale:
            text += f"; {self.stale} recorded verdicts were stale and are among them: `make verdicts` renews them"
        return text


def choose(seed: str, everything: bool = False) -> Choice:
    """The stale mutants and SHARE of the others; if more than MOST are stale, of each rule in each decade of rungs one, and of
    each rung one whose result is wrong.

    The share is drawn by `seed`, for which the tests take the digest of the commit: the same commit always runs the same
    tests, so that what fails can be run again and bisected, and every commit runs others.
    """
    all_mutants, old = catalogue(), set(stale(read()))
    if everything:
        chosen = set(all_mutants)
    elif len(old) > MOST:
        chosen = set({_kind(all_mutants[id]): id for id in _drawn(old, seed)}.values())
    else:
        chosen = old | set(_drawn(all_mutants.keys() - old, seed)[:SHARE])
    return Choice(tuple(id for id in all_mutants if id in chosen), seed, len(old), len(all_mutants))


def _drawn(ids: Iterable[str], seed: str) -> list[str]:
    """Mutants in an order drawn by `seed`."""
    return sorted(ids, key=lambda id: hashlib.sha256(f"{seed} {id}".encode()).digest())


def _kind(mutant: Mutant) -> tuple[str, str]:
    if mutant.wrong_result:
        return mutant.stem, "wrong result"
    written = mutant.rule not in {*tables.RULES, *tables.LAUNCH_RULES, "original"}
    return mutant.stem[0], "elsewhere" if mutant.place else "written" if written else mutant.rule
