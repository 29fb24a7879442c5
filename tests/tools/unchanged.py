"""Which tests are sampled: those of files in which, and below which, nothing has changed since all of their tests passed.

A test file depends on itself, on tests/tools, on kernels/, on the rooms of helpers/ up to the highest that it imports from (a
room imports only rooms below it, import-linter holds that), and on data/: of that, only on the heads of trained models if
neither its rooms nor its own words reach the records; and where its own words name them, on notebooks/, course/, docs/ and
README.md. tests/passed.txt has the digest of all of that for each file whose tests passed in `pytest --all --record`. Of a file
whose digest is the recorded one, one test in SHARE runs.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

import helpers
from helpers.ladder.contract import TORCH_NAMES
from helpers.ladder.paths import ROOT
from helpers.pages import order
from helpers.run.reference import Case

RECORD = ROOT / "tests" / "passed.txt"
SHARE = 4
OWN_WAYS = (
    "tests/evidence/test_mutants.py",
    "tests/lessons/test_notebooks.py",
)  # chosen one by one, by records of their own
ALWAYS = "tests/house/"  # tests of pages, commands and the house itself read everything


def depends(text: str) -> list[str]:
    """The rooms of helpers/ that a test file's text depends on, the lowest first; all of them if it starts programs."""
    rooms = [*reversed(order())]
    if "subprocess" in text or "helpers.magic" in text or "import magic" in text:
        return rooms
    used = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "helpers":
            public = helpers._PUBLIC | helpers._LESSONS
            used |= {public.get(alias.name, alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers."):
            used.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import) and any(alias.name.startswith("helpers") for alias in node.names):
            return rooms
    highest = max((rooms.index(room) if room in rooms else len(rooms) for room in used), default=0)
    return rooms[: max(highest, rooms.index("run")) + 1]  # tests/tools use rooms up to run


def reads_records(text: str) -> bool:
    """Whether a test file's tests may see what data/ records of GPUs: up to the room run nothing reads it unasked."""
    return depends(text)[-1] != "run" or "record" in text or "data" in text


def reads_pages(text: str) -> bool:
    """Whether a test file names what is written to be read: notebooks, or pages of the course, the book or README.md."""
    return bool(re.search(r'NOTEBOOKS|"(notebooks|course|docs)"|README', text))


def digest(path: Path, root: Path = ROOT) -> str:
    """Of all that the tests of a file depend on."""
    text = path.read_text()
    parts = [f"helpers/{room}" for room in depends(text)]
    files = ["pyproject.toml", "helpers/__init__.py", "tests/conftest.py"]
    if reads_pages(text):
        parts += ["notebooks", "course", "docs"]
        files += ["README.md"]
    sha = hashlib.sha256(text.encode())
    for part in (*parts, "kernels", "data" if reads_records(text) else "data/heads", "tests/tools"):
        sha.update(_of_folder(root / part).encode())
    for file in files:
        sha.update((root / file).read_bytes())
    return sha.hexdigest()[:16]


@cache
def _of_folder(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            sha.update(f"\n{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return sha.hexdigest()


def read() -> dict[str, str]:
    """File -> digest at which all of its tests passed."""
    lines = RECORD.read_text().splitlines() if RECORD.is_file() else []
    return dict(line.split() for line in lines)


def keep(files: Iterable[str]) -> None:
    """Records that all tests of these files have passed, and drops files that are gone."""
    found = read() | {file: digest(ROOT / file) for file in files}
    RECORD.write_text("".join(f"{file} {was}\n" for file, was in sorted(found.items()) if (ROOT / file).is_file()))


def sampled(file: str, recorded: Mapping[str, str]) -> bool:
    """Is a share of this file's tests enough?"""
    if file.startswith(ALWAYS) or file in OWN_WAYS or file not in recorded:
        return False
    return recorded[file] == digest(ROOT / file)


def share(cases: Iterable[Case], stem: str, config: pytest.Config, dtypes: Sequence[str]) -> list[Case]:
    """A rung's cases, of those in one of `dtypes` ("bf16") one in SHARE unless --all."""
    option, few = config.option, {f"torch.{TORCH_NAMES[name]}" for name in dtypes}
    return [
        case
        for case in cases
        if option.all or str(case.inputs[0].dtype) not in few or drawn(f"{stem} {case.name}", option.seed)
    ]


def drawn(nodeid: str, seed: str) -> bool:
    """Is this test in the share? The same for the same seed; over the seeds every test is."""
    return int.from_bytes(hashlib.sha256(f"{seed} {nodeid}".encode()).digest()[:4], "big") % SHARE == 0
