"""Grades a class's answers to notebook 04's tasks, sixty folders, and prints points and seconds.

    python tests/release/sixty.py [--seed 0] [--jobs 2] [--into FOLDER]

The folders hold right answers, costly ones, wrong ones (tests/tools/wrong.py), some without all tasks, texts that don't compile,
nothing, rubbish, and cheats, in about the shares that a class has. Exits with 1 if one gets other points than it deserves.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import wrong

from helpers.lessons import forms
from helpers.lessons.regions import body
from helpers.lessons.tasks.catalogue import of_rung

TASKS = {task.id: task.regions[0] for task in of_rung("04")}
OWN = {id: body("04", region) for id, region in TASKS.items()}
LAUNCHED = "  const fa_args &a = *args;\n"
CHEATS = {  # task, and what is typed
    "an endless kernel": ("04.1", "for (volatile int i = 0;; i = i + 1) {}\n" + OWN["04.1"]),
    "a read of what lies beside the inputs": (
        "04.2",
        OWN["04.2"].replace("float l = l_reg[r];", "float l = l_reg[r] + 0.f * O[-40000];"),
    ),
    "the emulator's counters": ("04.3", "emu::counters();\n" + OWN["04.3"]),
    "a program": (
        "04.9",
        "#include <cstdlib>\n"
        + OWN["04.9"].replace(LAUNCHED, LAUNCHED + '  if (system("true")) return cudaErrorUnknown;\n'),
    ),
}
Texts = dict[str, str]  # task -> what was typed
Points = dict[str, tuple[float, float]]  # task -> the fewest and the most that it deserves


def class_of_sixty() -> Iterator[tuple[str, Texts, Points]]:
    """A name, answers and what they deserve, sixty times."""
    all_right = dict.fromkeys(TASKS, (10, 10))
    for n in range(27):
        yield f"right_{n:02}", OWN, all_right
    idle = "for (int n = 0; n < 32; ++n) (void)((volatile float *)P_smem)[row0]; // reads for nothing"
    costly = OWN["04.3"].replace("fetch_V();", f"fetch_V();\n        {idle}")
    for n in range(6):
        yield f"costly_{n}", OWN | {"04.3": costly}, all_right | {"04.3": (9.5, 9.5)}
    bugs = [
        (task.id, body(filled.rung, TASKS[task.id]))
        for task in of_rung("04")
        for filled in wrong.answers(task).values()
    ]
    for n in range(12):
        mistakes = dict(bugs[i % len(bugs)] for i in ((n,) if n % 2 else (n, n + 5)))
        yield f"wrong_{n:02}", OWN | mistakes, all_right | dict.fromkeys(mistakes, (0, 9))
    for n in range(5):
        some = [id for i, id in enumerate(TASKS) if (n + 1) >> i & 1 or i == n % 3]
        yield f"some_{n}", {id: OWN[id] for id in some}, {id: (10, 10) if id in some else (0, 0) for id in TASKS}
    for n, id in enumerate(("04.1", "04.3", "04.9")):
        broken = OWN[id].replace(";\n", "\n", 1)
        yield f"typo_{n}", OWN | {id: broken}, all_right | {id: (0, 0)}
    yield "empty_0", {}, dict.fromkeys(TASKS, (0, 0))
    yield "empty_1", dict.fromkeys(TASKS, "// later"), dict.fromkeys(TASKS, (0, 0))
    yield "rubbish", {"": "\x00\xff[[["}, dict.fromkeys(TASKS, (0, 0))
    for n, (id, text) in enumerate(CHEATS.values()):
        yield f"cheat_{n}", OWN | {id: text}, all_right | {id: (0, 3)}  # what is right in some cases gets up to three


def write(folder: Path, name: str, texts: Texts) -> Path:
    """The folder of a submission: a form for each task, as `exercise new` makes it, with what was typed."""
    mine = folder / name
    mine.mkdir(parents=True)
    for id, text in texts.items():
        if id not in TASKS:
            (mine / "mine.ipynb").write_text(text)
            continue
        region = TASKS[id]
        opening, marker, _ = forms.page("04", (region,)).partition(f"// [region: {region}]\n")
        (mine / f"{region}.cu").write_text(f"{opening}{marker}// by {name}\n{text}\n// [end: {region}]\n")
    return mine


def main(arguments: argparse.Namespace) -> int:
    folder = arguments.into or Path(tempfile.mkdtemp(prefix="sixty-"))
    deserved: dict[str, Points] = {}
    for name, texts, points in class_of_sixty():
        deserved[name] = points
        write(folder, name, texts)
    assert len(deserved) == 60
    command = [sys.executable, "-m", "helpers", "grade", *(str(folder / name) for name in deserved)]
    command += ["--tasks", *TASKS, "--seed", str(arguments.seed), "--jobs", str(arguments.jobs), "--json"]
    start, done, unfair = time.monotonic(), 0, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as grader:
        for line in grader.stdout:
            each, parts = json.loads(line), []
            name = Path(each["submission"]).name
            for task in each["tasks"]:
                least, most = deserved[name][task["task"]]
                fair = least <= task["points"] <= most
                unfair += not fair
                parts.append(f"{task['task']} {task['points']:g}" + f" (not {least:g} to {most:g})" * (not fair))
            lost = next((c["said"] for t in each["tasks"] for c in t["criteria"] if c["points"] < c["most"]), "")
            said = f"{name:<10} {each['points']:>4g} of {each['most']}: {', '.join(parts)}  {lost[:90]}"
            print(said, flush=True)
            done += "error" not in each
    wall, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{done} of 60 graded, {unfair} unfairly: {wall:.0f} s, {cpu:.0f} s of processors")
    return int(unfair > 0 or done < 60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--into", type=Path, help="where the folders are written (default: a new one in /tmp)")
    sys.exit(main(parser.parse_args()))
