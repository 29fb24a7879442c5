"""Tries the emulator with several C++ compilers, before a release: compiler × tests passed × kernels counted alike.

    python tests/release/compilers.py                           # every g++ and clang++ on PATH
    python tests/release/compilers.py g++-11 clang++-19         # these
    python tests/release/compilers.py --counts g++ clang++-19   # the X-ray's counts alone

The counts of tests/release/counts.py are compared with the first compiler's. Two compilers may differ in how a struct of the
reader's own is read and written in shared memory: CONTRIBUTING.md's first two rows on compilers. Exits with 1 if a test fails or
another count differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.toolchain.compiler import Compiler, identify, programs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ACCESS = re.compile(r" (kernels/\S+):(\d+) (?:load|store) shared ")
# As lines of rungs 20 to 33 name theirs in shared memory.
STRUCT = re.compile(r"\b(?:work_smem|state_smem|works\[|item\(|work\.|part\.)")


def run(path: str, *command: str) -> str:
    """What `python command` prints with this compiler."""
    environment = {**os.environ, "CXX": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)
    return done.stdout


def counted(path: str) -> dict[str, set[str]]:
    """Kernel -> rows of counts."""
    found: dict[str, set[str]] = {}
    rows: set[str] = set()
    for line in run(path, str(HERE / "counts.py"), "--rows").splitlines():
        if line.startswith("    "):
            rows.add(line.strip())
        else:
            rows = found.setdefault(line.rpartition(" ")[0], set())
    return found


def of_struct(row: str) -> bool:
    """Whether its line of source has a struct in shared memory."""
    found = ACCESS.search(row)
    return found is not None and STRUCT.search((ROOT / found[1]).read_text().split("\n")[int(found[2]) - 1]) is not None


def compare(first: dict[str, set[str]], other: dict[str, set[str]]) -> tuple[int, int, list[str]]:
    """How many kernels are counted alike, how many but for structs, and those that are not."""
    alike, but_for_structs, differ = 0, 0, []
    for name in {**first, **other}:
        rows = first.get(name, set()) ^ other.get(name, set())
        others = [row for row in rows if not of_struct(row)]
        if not rows and name in first and name in other:
            alike += 1
        elif len(others) < len(rows) and all(re.match(r"instruction (ld|st)\.shared: ", row) for row in others):
            but_for_structs += 1
        else:
            differ.append(name)
    return alike, but_for_structs, differ


def tested(path: str) -> tuple[int, list[str]]:
    """Tests passed, and those that failed."""
    said = run(
        path,
        "-m",
        "pytest",
        "--all",
        "-rf",
        "-n",
        "auto",
        "-p",
        "no:cacheprovider",
        "tests/emulator",
        "tests/run/test_endings.py",
    )
    dots = sum(line.count(".") for line in said.splitlines() if re.fullmatch(r"[.FEsx]+ *\[ *\d+%\]", line))
    return dots, re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compilers", nargs="*")
    parser.add_argument("--counts", action="store_true", help="compare the counts, run no test")
    wanted = parser.parse_args()
    paths = [shutil.which(name) or parser.error(f"there is no compiler {name!r}") for name in wanted.compilers]
    paths = paths or [*programs("g++-[0-9]*"), *programs("clang++-[0-9]*")]
    known: dict[Compiler, str] = {identify(path): path for path in paths}
    first: dict[str, set[str]] = {}
    bad: list[str] = []
    print("| compiler | tests passed | failed | kernels counted alike | but for structs | otherwise |")
    print("|---|--:|--:|--:|--:|--:|")
    for compiler, path in known.items():
        counts = counted(path)
        first = first or counts
        alike, structs, differ = compare(first, counts)
        passed, failed = ("–", []) if wanted.counts else tested(path)
        name = str(compiler).rpartition(" (")[0]
        print(f"| {name} | {passed} | {len(failed)} | {alike} | {structs} | {len(differ)} |", flush=True)
        bad += [f"{name}: {each}" for each in (*failed, *differ, *([] if counts else ["counted nothing"]))]
    print(*bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
