"""The detective cases: a kernel of each rung with one bug, for a reader to name and to fix.

A case names its bug and the mechanism by digests, so that nobody reads the answer here by accident; tests hold them to
answers.json, which a student's tree lacks. The bugs are those of evidence/catalogue.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..ladder.rung import rung

MECHANISMS = {
    "barrier": "a `__syncthreads()` or `__syncwarp()` is missing or too weak",
    "wait": "a copy is used before it has landed: the wait allows too many unfinished ones",
    "overwritten": "a copy refills a buffer, and nobody waited until its readers had released it",
    "stage": "the wrong stage of a ring is read",
    "product": "registers are touched while an asynchronous product works on them",
    "unwritten": "shared memory is read that nobody has written",
    "bounds": "an access past the end of a tensor",
    "layout": "a tile is stored by one rule and read by another",
    "fragment": "the wrong element of a fragment: a register taken for another row or column",
    "stride": "an address with the wrong stride",
    "tensor": "the wrong tensor is loaded",
    "heads": "a query head uses the wrong head of K and V",
    "mask": "a key is counted that the query does not see, or one is left out that it sees",
    "rescale": "sums that belong to different maxima are added as they are",
    "leak": "an accumulator keeps what an earlier step left in it",
    "infinity": "infinity minus infinity",
    "units": "natural and binary logarithms are mixed",
    "rounding": "a number is rounded to 16 bits too early",
}
ANSWERS = Path(__file__).with_name("answers.json")
DRAWN = 12  # cases of a seed
SHOWN = 1  # the case that notebook 93 works through: not drawn


@dataclass(frozen=True)
class Case:
    """A case as it is stored. n: its number; number: the rung's. bug, mechanism: digests. regions: where to look, among them the
    bug's; "a to b" is all from a to b. seed: what draws the inputs (lessons/inputs.py). hints: from a nudge to nearly everything."""

    n: int
    number: str
    bug: str
    mechanism: str
    regions: tuple[str, ...]
    hints: tuple[str, ...]
    seed: int = 1

    @property
    def id(self) -> str:
        """Its name beside the tasks': "case.5"."""
        return f"case.{self.n}"

    @property
    def name(self) -> str:
        """What a reader calls it, "case 5"."""
        return f"case {self.n}"

    @property
    def title(self) -> str:
        """One line on it, without its bug."""
        return f"{self.name}: a broken {rung(self.number).stem}"

    def is_bug(self, id: str) -> bool:
        """Whether the catalogue's bug `id` is this case's."""
        return digest(self.n, id) == self.bug

    def is_mechanism(self, name: str) -> bool:
        """Whether a key of MECHANISMS is this case's."""
        return digest(self.n, name) == self.mechanism


def digest(n: int, answer: str) -> str:
    """What is stored of an answer to case n."""
    return hashlib.sha256(f"case {n}: {answer}".encode()).hexdigest()[:12]


@cache
def answers() -> dict[int, dict[str, str]]:
    """Bug, mechanism and reason by case. ValueError in a tree that was handed out without them."""
    if not ANSWERS.is_file():
        raise ValueError("this copy of the series was handed out without the cases' solutions")
    return {int(n): answer for n, answer in json.loads(ANSWERS.read_text()).items()}


def case(id: str | int) -> Case:
    """A case by its number or its id. KeyError names those there are."""
    found = {each.id: each for each in CASES} | {str(each.n): each for each in CASES}
    if str(id) not in found:
        raise KeyError(f"no case {id!r}; there are case.1 to case.{len(CASES)}")
    return found[str(id)]


CASES = (
    Case(
        1,
        "01",
        "a1fb32e6c2af",
        "590ea2b30c28",
        ("scores", "softmax", "output"),
        (
            "One head is right. What does a head's address depend on that a single head's does not?",
            "LSE is right, so the scores are. O is a weighted sum of the wrong rows: compare the addresses of K and V.",
            "K_stride[0] belongs to the batch and K_stride[1] to the head. Which tensor has them the other way round?",
        ),
        seed=2,
    ),
    Case(
        2,
        "02",
        "b17f87b587a7",
        "773cdeae3205",
        ("merge", "merge_threads", "load", "softmax"),
        (
            "Which rows are NaN: those that have few numbers for their threads, or many -inf. What do they have in common?",
            "Two partial states are merged, and both may be empty: m = -inf and l = 0.",
            "exp(m_a - m) with m_a = m = -inf. What has to be subtracted instead, so that an empty state contributes 0?",
        ),
    ),
    Case(
        3,
        "03",
        "15f4a05635cb",
        "608def1a8291",
        ("tile_loop",),
        (
            "With one tile of keys nothing is wrong, and nothing where the scores rise along the keys.",
            "Rising scores: every tile brings the maximum. Which factor is 1 then, and isn't when an earlier tile had it?",
            "Two partial results are merged: each has to be multiplied by exp(its own maximum - the common one).",
        ),
        seed=9,
    ),
    Case(
        4,
        "04",
        "9ce72e824d4e",
        "ad3404eadbb1",
        ("tile_loop", "scores", "output"),
        (
            "Nearly all is right, and the answer may change with the order of the threads. That is no arithmetic.",
            "Two threads meet in shared memory, and nothing makes one wait. Ask of each array: who writes it, who reads it, what stands between?",
            "V goes through shared memory slab by slab, written by all warps and read by all warps. What stands between?",
        ),
        seed=3,
    ),
    Case(
        5,
        "10",
        "64b9e29c9036",
        "d69d5f92c94b",
        ("tile_loop", "scores", "online_update"),
        (
            "Right where the keys fill their tiles. So it is about the last tile.",
            "Look at the rows: 0 to 7 of each 16 are right. A lane holds rows g and g + 8: elements 0, 1 and elements 2, 3.",
            "An element's column is 2t + (its number modulo 2). Where is it taken to be something else?",
        ),
        seed=2,
    ),
    Case(
        6,
        "11",
        "19440243cef2",
        "fbaf45695b5a",
        ("swizzle", "load_tile", "scores", "output"),
        (
            "Everything is wrong but one query and one key: the sizes are plausible, the numbers are not.",
            "A single row is right. What is different from row to row, although the data is there?",
            "at(row, chunk) says where a chunk lies. Who doesn't ask it?",
        ),
    ),
    Case(
        7,
        "12",
        "58cd5bf187a6",
        "4999a00a1d06",
        ("load_tile", "pipeline", "tile_loop"),
        (
            "All of O is NaN at some lengths, and nothing is wrong at others. Which lengths are right?",
            "Right where the first tile of keys is whole. A key past the end has the weight 0, and 0 times a number is 0.",
            "0 times NaN is NaN. What do rows of V_smem hold that belong to no key?",
        ),
        seed=4,
    ),
    Case(
        8,
        "13",
        "e072d120d5b6",
        "953950170edf",
        ("online_update", "epilogue"),
        (
            "O is right, always. Which output does a model not look at?",
            "Divide what came out by what was expected, in several rows.",
            "The ratio is 1.4427. What has this value?",
        ),
    ),
    Case(
        9,
        "20",
        "a2400cee3f7f",
        "0c1c330bfafb",
        ("schedule to visible", "mask"),
        (
            "One input is wrong. What has it that no other one has?",
            "Look at which heads are wrong: with 6 heads on 2 the first three belong together.",
            "Query head h uses head h / 3 of K and V. Does it?",
        ),
        seed=3,
    ),
    Case(
        10,
        "21",
        "92d1b0f6ba60",
        "a8bff26962d2",
        ("tile_loop", "merge_warps"),
        (
            "Right with few keys, wrong with many, and O only by a few budgets: something small is added.",
            "Numbers between 0 and 1 would do it. Where are there such numbers, in a register that is used again?",
            "An accumulator of mma.sync is added to. What does it hold when a step begins?",
        ),
        seed=3,
    ),
    Case(
        11,
        "22",
        "c98b292a1d28",
        "134c8adce58e",
        ("load_slab", "pipeline", "tile_loop"),
        (
            "Every gradient is wrong in every input. P is recomputed first, and already that could be wrong.",
            "Slabs are copied by cp.async, one on its way while the one before is multiplied. Where does a thread wait for its copies?",
            "cp.async.wait_group n leaves n groups unfinished. How many may be, when the newest is the one that is needed now?",
        ),
    ),
    Case(
        12,
        "23",
        "3caa191b4c7e",
        "3abd90237e18",
        ("tile_loop", "scores"),
        (
            "Only causal inputs are wrong. Is it the mask's edge or a whole tile?",
            "Row i of the queries sees the keys up to i + Nk - Nq, this one included.",
            "Compare the comparison in the mask with the sentence above, for the key just behind the last one that is seen.",
        ),
    ),
    Case(
        13,
        "30",
        "02a5d3f1a984",
        "9ea70dc1d52b",
        ("fetch", "scores", "output", "refill"),
        (
            "Even one query and one key are wrong: there O is V, whatever the scores are. And LSE is right.",
            "So the weights are right, and what they weigh is not V. What is it? Compare O with the inputs.",
            "Follow the tile backwards: which descriptor, which address, which copy fills it?",
        ),
    ),
    Case(
        14,
        "31",
        "72bdc62c8a06",
        "a92710635bbb",
        ("producer", "scores", "output"),
        (
            "The outputs are right here, and the X-ray still reports something. A GPU may get them wrong whenever the consumers are slow.",
            "The ring has few stages, the keys have many tiles. What has to be true before a stage is filled a second time?",
            "A ring needs two kinds of barrier: full and empty. Who waits for the empty ones?",
        ),
        seed=3,
    ),
    Case(
        15,
        "32",
        "c7a142ad25b5",
        "af75c34b9fc5",
        ("maximum", "tile_loop", "overlap"),
        (
            "It fails as soon as there are several tiles of keys, and not in the first.",
            "wgmma is asynchronous: between commit and wait its accumulators belong to the tensor cores.",
            "Two products are under way at once. After which wait is S there, and after which O?",
        ),
    ),
    Case(
        16,
        "33",
        "7ee20b189e86",
        "4673d3e6da81",
        ("scores", "tile_loop"),
        (
            "The first tile of queries that a CTA takes is right. What changes from one tile to the next?",
            "P is recomputed from LSE. If P belongs to one tile and LSE to another, every gradient is wrong.",
            "The scores of the next step are begun in this one. Look at each use of a stage there: of this step, or of the next?",
        ),
    ),
)
