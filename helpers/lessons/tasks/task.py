"""What a region task is: one or more regions of a rung that a reader writes, and what is said about them."""

from __future__ import annotations

from dataclasses import dataclass

from ..regions import WHOLE

IN_TURN = "a.deterministic asks for the same bits every time. No check here can see the order of CTAs: on a GPU compare two runs bit by bit"
LEVELS = {1: "one loop", 2: "a few steps", 3: "layouts, or the order of threads", 4: "the whole kernel"}


@dataclass(frozen=True)
class Task:
    """A task of the catalogue. The solution is the rung's own text of the regions.

    id: the rung's number and the task's, "04.1". level: a key of LEVELS. given, after: the contract, a line each, "name (shape): what";
    what stands in `given` is declared before the region, what `after` says is declared or true behind it.
    hints: from a nudge to nearly everything. lean: bank conflicts, or bytes of K and V that are read, beyond the rung's own are an
    error. without: names that may not be said in the regions.
    """

    id: str
    region: str | tuple[str, ...]
    level: int
    statement: str
    given: tuple[str, ...]
    after: tuple[str, ...]
    hints: tuple[str, ...]
    lean: bool = False
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a reader calls it, "task 04.1"."""
        return f"task {self.id}"

    @property
    def number(self) -> str:
        """The rung's number, "04"."""
        return self.id.partition(".")[0]

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions to write."""
        return (self.region,) if isinstance(self.region, str) else self.region

    @property
    def stepwise(self) -> bool:
        """Whether its inputs are worth going through one by one, the easy ones first: the hard tasks'."""
        return self.level > 2

    @property
    def every_D(self) -> bool:
        """Whether a grader tries it at every head dimension and in every dtype that the rung names, not only in the one drawn: a lean one,
        a whole rung."""
        return self.lean or self.level == 4


def whole(number: str, first: str, then: str, trap: str, *more: str, backward: bool = False) -> Task:
    """The task to write a rung from its header block. first, then, trap: its hints; more: what else is true behind it."""
    args = "fa::backward(args)" if backward else "fa::model(args)" if number >= "20" else "fa_args"
    tensors = (
        "Q holds S (rows,N), O receives P; Nq = rows, Nk = N"
        if number == "02"
        else "LSE (B,H,Nq) fp32, contiguous; workspace[i]: the tensors of the header block's `workspace`, uninitialized"
    )
    sizes = "rows and N" if number == "02" else "Nq, Nk and B*H"
    empty = (
        "a query whose LSE is -inf, as it sees no key, gets dQ = 0 and adds nothing to dK and dV"
        if backward
        else f"a row without a finite score (all -inf, or no key) gives {'P' if number == '02' else 'O'} = 0 and LSE = -inf"
    )
    return Task(
        f"{number}.9",
        WHOLE,
        4,
        "Write the whole rung from its header block: kernels and launcher. Any design will do that gives the right answer "
        "with the inputs, dtypes, head dimensions and workspace that the header block names. A grader also sets its wavefronts "
        "and bytes beside the rung's (course/rubric.md).",
        (
            f"the arguments ({args}, kernels/include/fa/): tensors with strides in elements, columns contiguous",
            tensors,
            "the #include lines of the rung",
        ),
        (
            'extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) launches the work on `stream`',
            f"every element of the outputs is written; {sizes} may be any positive number (a grid's y and z take 65535)",
            "the launcher takes every dtype and head dimension that the header block names",
            empty,
            *more,
        ),
        (first, then, trap),
    )
