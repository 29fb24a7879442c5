"""The notebooks: in step with their texts, built as promised, and executed from the first cell to the last.

Executing is the slow part; it is marked `notebooks`, so `pytest -m notebooks` runs it alone and `-m "not notebooks"`
leaves it out. A notebook is executed if something that it reads has changed since it last was (tools/executed.py), and so
is one of the others; `--all` executes all, `--record` those that have changed, and keeps a record of it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import executed
import nbformat
import pandas as pd
import pytest
import sixteen
from nbclient.exceptions import CellExecutionError

from helpers import record, show
from helpers.ladder import rung as ladder
from helpers.lessons import execute, links, numbers, pairs, watch
from helpers.lessons.course import exercises as course
from helpers.lessons.regions import body
from helpers.lessons.tasks.catalogue import task, tasks

FOLDER = execute.NOTEBOOKS
STEMS = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.ipynb"))
RUNGS = [stem for stem in STEMS if (ladder.KERNELS / f"{stem}.cu").exists()]
LADDER = [stem for stem in STEMS if stem in {rung.stem for rung in ladder.rungs()}]  # without 50, a part
LOGS = [stem for stem in STEMS if stem.endswith("_log")]  # what was tried, for whoever wants to know: no lessons
LESSONS = [stem for stem in STEMS if stem not in LOGS]
OTHERS = {"00_start_here", "24_in_a_model", "40_every_language", *LOGS} | {
    stem for stem in STEMS if stem.startswith("9")
}  # about no one rung
LONGEST_CELL = 15  # lines
MOST_WORDS = 2950  # outside folds, and of those with the hardest kernels 3400
HARD = (
    "03_fa1_fp32",
    "04_fa2_fp32",
    "22_backward_fp32",
    "23_backward_mma",
    "30_tma_wgmma",
    "32_ping_pong",
    "33_backward_wgmma",
)
MOST_MINUTES = 60

OPENING = ("**After this notebook you can**", "**Time**", "**Needs**", "**The idea in one line**")
SECTIONS = [  # in this order; a notebook may have others between them
    "The problem",
    "The kernel",
    "Run and check",
    "Predict, then measure",
    "Beside its peers",
    "What still hurts",
    "Exercises",
    "Self-check",
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
# A folder of somebody's machine. Paths of the project itself are written from its root: kernels/01_naive.cu.
MACHINE_PATH = re.compile(r"(?:/home/|/root/|/tmp/|/Users/|/opt/|site-packages|" + re.escape(str(execute.ROOT)) + ")")

every = pytest.mark.parametrize("stem", STEMS)
every_lesson = pytest.mark.parametrize("stem", LESSONS)


def read(stem: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{stem}.ipynb", as_version=4)


def texts(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def exercises(notebook: nbformat.NotebookNode) -> dict[str, dict[str, str]]:
    """By name ("Exercise 4.1", "Task 04.1"), the sources of its cells, by their names in Exercise, and its `solution` where one is
    folded there; what is missing, or does not open as it has to, has no entry."""
    found: dict[str, dict[str, str]] = {}
    for number, each in course.exercises(notebook).items():
        at = {part: getattr(each, part) for part in ("form", "start", "hints", "check")}
        parts = {part: notebook.cells[n].source for part, n in at.items() if n is not None}
        if each.folded:
            parts["solution"] = each.solution(notebook)
        if number.startswith("task "):
            of = task(number.removeprefix("task "))
            opening = f"%%region {of.number} {' '.join(of.regions)} -> my_"
        else:
            opening = rf"(%%kernel.*\n//|#) Exercise {re.escape(number)}\b"
        if not re.match(opening, parts.get("start", "")):
            parts.pop("start", None)
        found[number.capitalize() if number.startswith("task ") else f"Exercise {number}"] = parts
    return found


def tasks_of(notebook: nbformat.NotebookNode) -> dict[str, dict[str, str]]:
    """Those of `exercises` that are region tasks, by id."""
    return {name.partition(" ")[2]: parts for name, parts in exercises(notebook).items() if name.startswith("Task")}


def with_solutions(notebook: nbformat.NotebookNode, tasks: bool = True) -> nbformat.NotebookNode:
    """The notebook with each exercise's solution and its check appended at the end, those of region tasks if `tasks`."""
    for name, parts in exercises(notebook).items():
        if name.startswith("Task") and not tasks:
            continue
        notebook.cells += [nbformat.v4.new_code_cell(parts[p]) for p in ("solution", "check") if p in parts]
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """All text among a cell's outputs."""
    parts = []
    for output in cell.get("outputs", []):
        parts.append(output.get("text", ""))
        parts += [v for kind, v in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def run(notebook: nbformat.NotebookNode, path: Path) -> tuple[nbformat.NotebookNode, list[str]]:
    nbformat.write(notebook, path)
    return execute.execute(path)


# In step


@every
def test_text_and_notebook_hold_the_same_cells(stem):
    text = pairs.cells((FOLDER / "src" / f"{stem}.py").read_text())
    written, saved = ([(cell.cell_type, cell.source) for cell in cells] for cells in (text, read(stem).cells))
    assert written == saved, f"run: python -m helpers notebooks {stem} --from-text"


def test_each_text_has_its_notebook():
    assert STEMS == sorted(path.stem for path in (FOLDER / "src").glob("*.py"))


# As the records say


@every
def test_shows_the_records_as_they_are(stem):
    """What was saved with the notebook when it was executed, against data/ as it is."""
    shown = read(stem).metadata["records"]
    now = watch.records(shown)
    stale = sorted(path for path in shown if shown[path] != now[path])
    assert not stale, f"{stem} shows older records: run python -m helpers notebooks {stem} --inplace"


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "91_bug_museum"])  # whose kernels have bugs
def test_shows_the_kernels_as_they_are(stem):
    """Lines of kernels in saved outputs, comments too: of a region by their numbers, of a comparison those of the second kernel."""
    files = {path.name: path.read_text().splitlines() for path in ladder.KERNELS.rglob("*.cu")}
    older = []
    for output in (output for cell in read(stem).cells for output in cell.get("outputs", [])):
        title, *lines = output.get("data", {}).get("text/plain", "").splitlines() or [""]
        found = re.match(r"(?P<first>\S+ → )?(?P<file>\w+\.cu) · .*\blines\b", title)
        for line in filter(None, (re.match(r" *(\d+) (?P<added>[+] )?(.*)", line) for line in lines if found)):
            now = files[found["file"]]
            if found["first"]:
                shown = not line["added"] or line[3].strip() in map(str.strip, now)
            else:
                shown = line[3].rstrip() == now[int(line[1]) - 1].rstrip()
            older += [] if shown else [f"{title}: {line[0]}"]
    assert not older, f"{stem} shows older kernels: run python -m helpers notebooks {stem} --inplace\n{older[0]}"


@every
def test_numbers_in_prose_are_the_records(stem):
    text = (FOLDER / "src" / f"{stem}.py").read_text()
    assert text == numbers.renewed(text), f"run: python -m helpers notebooks {stem} --from-text"


@every
def test_leads_to_its_neighbours(stem):
    text = (FOLDER / "src" / f"{stem}.py").read_text()
    assert links.line(stem) in text and text == links.linked(text, stem), (
        f"run: python -m helpers notebooks {stem} --from-text"
    )


# Built as promised


@every_lesson
def test_opens_with_what_it_offers_and_asks(stem):
    first = read(stem).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith(f"# {stem[:2]} · ")
    places = [first.source.find(words) for words in OPENING]
    assert -1 not in places and places == sorted(places), f"the opening block has to hold, in order, {OPENING}"


@every
def test_the_first_code_cell_is_the_same_everywhere(stem):
    """tests/house/test_hosted.py runs it. It has six lines at most, since it is no part of the lesson."""
    assert texts(read(stem), "code")[0] == pairs.FIRST_CELL
    assert len(pairs.FIRST_CELL.splitlines()) <= 6


def test_a_notebook_is_a_rung_s_or_looks_across_them():
    """So that a notebook whose kernel was renamed isn't taken for one without a kernel, and let off its sections."""
    assert set(STEMS) - set(RUNGS) <= OTHERS
    assert not OTHERS & set(RUNGS)


@every_lesson
def test_has_its_sections_in_order(stem):
    headings = re.findall(r"^## (.+)$", "\n".join(texts(read(stem), "markdown")), re.MULTILINE)
    wanted = SECTIONS if stem in RUNGS else SECTIONS[-2:]
    assert [h for h in headings if h in wanted] == wanted


@every
def test_cells_are_short(stem):
    for source in texts(read(stem), "code"):
        assert len(source.splitlines()) <= LONGEST_CELL, source


@every
def test_run_all_goes_on_where_there_is_no_machine_code(stem):
    """Without nvcc, as on a Mac, these functions raise, and JupyterLab stops at a cell that does if it has not this tag."""
    for cell in read(stem).cells:
        needs = re.search(r"\b(sass\.(?!histogram)\w+\(|units\.table\(|wgmma_units\.forward\()", cell.source)
        if cell.cell_type == "code" and needs and not cell.source.lstrip().startswith("def "):
            assert "raises-exception" in cell.metadata.get("tags", []), (needs[1], cell.source)


@every_lesson
def test_is_read_in_an_hour(stem):
    text = "\n".join(texts(read(stem), "markdown")).replace(links.line(stem), "")
    shown = re.sub(r"<details>.*?</details>|<!--.*?-->", "", text, flags=re.DOTALL).split()
    words = sum(any(map(str.isalnum, word)) for word in shown)  # "##" and "|" are none
    assert words <= (3400 if stem in HARD else MOST_WORDS)
    assert int(re.search(r"\*\*Time\*\* (\d+) minutes", text)[1]) <= MOST_MINUTES


@every_lesson
def test_two_exercises_or_more_each_complete(stem):
    notebook = read(stem)
    found = exercises(notebook)
    to_write = tasks_of(notebook)
    assert len(found) >= 2 and len(to_write) >= (0 if stem not in LADDER else 3 if stem < "14" else 2)
    assert {task(id).number for id in to_write} <= {stem[:2]}
    assert not {name.partition(" ")[2] for name in found if name.startswith("Exercise")} & tasks().keys()
    for name, parts in found.items():
        wanted = {"form", "start", "hints", "solution"} if name.startswith("Task") else {"start", "check", "solution"}
        assert parts.keys() == wanted, f"{name} has only {sorted(parts)}"
        assert parts["solution"].strip() != parts["start"].strip()
    assert texts(notebook, "code")[-1] == "progress()"


@every_lesson
def test_a_task_to_be_written_is_empty_and_leaves_the_notebook_s_own_names_alone(stem):
    """So that Run All compiles nothing there, and breaks no cell that stands above or below."""
    notebook = read(stem)
    starts = [parts["start"] for parts in tasks_of(notebook).values()]
    for start in starts:
        assert not [line for line in start.splitlines()[1:] if line.strip() and not line.startswith("//")], start
    names = [re.search(r"-> (\w+)", start)[1] for start in starts]
    others = "\n".join(text for text in texts(notebook, "code") if text not in starts)
    assert len(set(names)) == len(names) and not [name for name in names if re.search(rf"\b{name}\s*=", others)]


@every
def test_links_lead_somewhere(stem):
    for target in LINK.findall("\n".join(texts(read(stem), "markdown"))):
        if not re.match(r"https?://|#", target):
            assert (FOLDER / target.split("#")[0]).exists(), target


@every
def test_regions_are_there(stem):
    calls = re.findall(r'show\.region\(\s*"([^"]+)",\s*"([^"]+)"\s*\)', "\n".join(texts(read(stem), "code")))
    assert calls or stem not in RUNGS
    for rung, name in calls:
        show.region(rung, name)


@every
def test_no_path_of_a_machine(stem):
    notebook = read(stem)
    for cell in notebook.cells:
        assert not MACHINE_PATH.search(cell.source), cell.source
        assert not MACHINE_PATH.search(printed(cell)), printed(cell)


# Executed


@cache
def changes() -> dict[str, str]:
    """What has changed of each notebook since it was executed: see executed.changed."""
    return {stem: executed.changed(stem, with_solutions(read(stem))) for stem in STEMS}


@pytest.mark.notebooks
@every
def test_executes_and_its_solutions_solve(stem, tmp_path, request):
    """Region tasks filled with the rung's own text take minutes: here with --all, and a share of them in test_tasks.py."""
    asked, whole = request.config.option, with_solutions(read(stem))
    stale = {other for other, what in changes().items() if what}
    if not asked.all and stem not in (stale if asked.record else executed.chosen(changes(), asked.seed)):
        pytest.skip(
            "`make executed` is due" if stem in stale else "nothing that it reads has changed since it was executed"
        )
    done, reads = run(with_solutions(read(stem), tasks=asked.all), tmp_path / f"{stem}.ipynb")
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    outputs = [printed(cell) for cell in code]
    for cell, output in zip(code, outputs, strict=True):
        assert cell.source == "doctor()" or not MACHINE_PATH.search(output), output  # doctor names this machine's tools
    for name in exercises(read(stem)):
        verdicts = re.findall(rf"{re.escape(name)}: (solved|not solved yet)", "\n".join(outputs))
        solved = ["solved"] if asked.all or not name.startswith("Task") else []
        assert verdicts == ["not solved yet", *solved], f"{name}: {verdicts}"
    if asked.record:
        executed.keep(stem, whole, reads)


@pytest.mark.notebooks
def test_a_new_rung_stands_in_the_last_notebook_by_itself(tmp_path):
    """A copy of the series with one kernel file and its record more, and nothing else changed."""
    for folder in ("helpers", "kernels", "data"):
        shutil.copytree(execute.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks").mkdir()
    stem = sixteen.make_rung(tmp_path / "kernels", "77_sixteen")
    shape = [(16384 // n, 2048 // d, n, n, d) for d in (64, 128) for n in (1024, 4096)]
    speeds = {stem: 123.0, "SDPA FLASH": 300.0, "SDPA CUDNN": 500.0, "SDPA MATH": 30.0}
    rows = [(n, "fp16", *s, 0, record.forward_flops(*s) / t / 1e9) for s in shape for n, t in speeds.items()]
    frame = pd.DataFrame(rows, columns=["name", "dtype", *record.SHAPE, "round", "ms"])
    frame.to_csv(tmp_path / "data" / "nvidia-h200" / f"{stem}.forward.csv", index=False)
    known = {"rung": stem, "kind": "forward", "op": "attention", "device": "NVIDIA H200"}
    known["digest"] = ladder.rung(tmp_path / "kernels" / f"{stem}.cu").digest
    (tmp_path / "data" / "nvidia-h200" / f"{stem}.forward.json").write_text(json.dumps(known))
    cells = [c for c in read("99_the_ladder").cells if c.cell_type == "code" or c.source.startswith("## Your kernel")]
    upto = next(i for i, c in enumerate(cells) if c.cell_type == "markdown")  # the rest is about the reader's own
    cells[1].source += f"\nassert scoreboard.__file__.startswith({str(tmp_path)!r})"
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:upto]), tmp_path / "notebooks" / "99_the_ladder.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "helpers", "notebooks", "99_the_ladder"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    last = nbformat.read(tmp_path / "build" / "notebooks" / "99_the_ladder.ipynb", as_version=4)
    shown = [text for cell in last.cells if stem in (text := printed(cell))]
    assert len(shown) >= 5  # the ratios by dtype, the costs, the steps, the public kernels, the log
    assert any("0.41" in text for text in shown)  # 123 / 300


# The tests above bite


def small(*cells: tuple[str, str]) -> nbformat.NotebookNode:
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    return nbformat.v4.new_notebook(cells=[make[kind](source) for kind, source in cells])


def answer(solution: str) -> nbformat.NotebookNode:
    folded = f"### Exercise 9.1\n<details><summary>Solution</summary>\n\n```python\n{solution}\n```\n</details>"
    check = 'from helpers import exercise\nexercise.verify("9.1", x == 42)'
    return small(("markdown", folded), ("code", "# Exercise 9.1\nx = ..."), ("code", check))


def test_what_a_notebook_reads_is_known(tmp_path):
    """Modules, kernels, headers, the emulator's sources, records; and all of helpers/ of a program that it starts."""
    cells = [
        "from helpers import load, record\nload('01_naive', device='cpu', quiet=True)\nx = record.load('01_naive', device='nvidia-h200')",
        "len(open('/etc/hostname').read())",
    ]
    notebook = small(*(("code", cell) for cell in cells))
    done, reads = run(notebook, tmp_path / "small.ipynb")
    assert done.metadata["records"] == watch.records(
        ["data/nvidia-h200/01_naive.forward.csv", "data/nvidia-h200/01_naive.forward.json"]
    )
    assert [cell.source for cell in done.cells] == cells
    assert {
        "helpers/__init__.py",
        "helpers/run/kernel.py",
        "helpers/emulator/runtime/emulator.cpp",
        "helpers/emulator/include/cuda_fp16.h",
        "kernels/01_naive.cu",
        "kernels/include/fa/args.cuh",
        "data/nvidia-h200/01_naive.forward.csv",
    } <= set(reads)
    assert not {"helpers/lessons/museum.py", "kernels/13_tuned.cu"} & set(reads)
    starts = small(("code", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import helpers'])"))
    assert "helpers/lessons/museum.py" in run(starts, tmp_path / "small.ipynb")[1]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ("", ""),
        ("helpers/read.py", "others"),
        ("helpers/other.py", ""),
        ("data/new.csv", "others"),
        ("kernels/gone.cu", "own"),
        ("kernels/read.cuh", "own"),
    ],
)
def test_a_notebook_runs_again_when_what_it_reads_has_changed(changed, what, tmp_path):
    notebook, reads = answer("x = 42"), ["helpers/read.py", "kernels/gone.cu", "kernels/read.cuh"]
    for path in (*reads, "helpers/other.py", "data/there.csv"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    assert executed.changed("small", notebook, tmp_path, tmp_path) == "own"  # never executed
    digests = [make(notebook, reads, tmp_path) for make in (executed.digest, executed.own_digest)]
    (tmp_path / "small.txt").write_text("\n".join([*digests, *reads, ""]))
    if changed == "kernels/gone.cu":
        (tmp_path / changed).unlink()
    elif changed:
        (tmp_path / changed).write_text("changed")
    assert executed.changed("small", notebook, tmp_path, tmp_path) == what
    assert executed.changed("small", answer("x = 43"), tmp_path, tmp_path) == "own"  # its cells


def test_what_is_a_notebook_s_own_always_runs_and_of_the_rest_a_share():
    states = {"01": "own", "02": "own"} | {f"1{i}": "others" for i in range(9)} | {f"2{i}": "" for i in range(9)}
    chosen = executed.chosen(states, "a commit")
    assert chosen == executed.chosen(states, "a commit") != executed.chosen(states, "another commit")
    count = {what: sum(states[stem] == what for stem in chosen) for what in ("own", "others", "")}
    assert count == {"own": 2, "others": executed.MOST, "": executed.SHARE}


def test_every_commit_draws_its_own_share():
    shares = [executed.drawn(STEMS, f"commit {n}", 3) for n in range(100)]
    assert all(len(share) == 3 for share in shares) and {stem for share in shares for stem in share} == set(STEMS)
    assert executed.drawn(STEMS, "commit 5", 3) == shares[5] != shares[6]


@pytest.mark.parametrize("solution, verdict", [("x = 42", "solved"), ("x = 54", "not solved yet")])
def test_a_wrong_solution_is_seen(solution, verdict, tmp_path):
    done, _ = run(with_solutions(answer(solution)), tmp_path / "small.ipynb")
    assert printed(done.cells[2]).startswith("Exercise 9.1: not solved yet")
    assert printed(done.cells[-1]).startswith(f"Exercise 9.1: {verdict}")


def write(start: str) -> nbformat.NotebookNode:
    folded = "<details><summary>Solution</summary>\n\nthe rung's own\n</details>"
    cells = [
        ("code", "%load_ext helpers\nfrom helpers import blank"),
        ("markdown", "### Task 01.3"),
        ("code", 'blank("01", "output")'),
        ("code", start),
    ]
    return small(*cells, ("markdown", folded))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_task_is_filled_with_the_rungs_own_text(wrong, tmp_path):
    """And an empty one is judged not solved, without a compiler."""
    whole = with_solutions(write("%%region 01 output -> my_output\n// here"))
    assert body("01", "output") in whole.cells[-1].source
    if wrong:
        whole.cells[-1].source = whole.cells[-1].source.replace("o += P[j]", "o -= P[j]")
    done, _ = run(whole, tmp_path / "small.ipynb")
    empty, full = printed(done.cells[3]), printed(done.cells[-1])
    assert empty == "Task 01.3: not solved yet; nothing is typed in the region 'output'\n"
    assert ("Task 01.3: not solved yet" if wrong else "Task 01.3: solved") in full


def test_a_task_without_its_solution_or_with_the_wrong_cell_is_seen():
    assert "start" not in tasks_of(write("%%region 01 softmax -> my_output"))["01.3"]
    assert "solution" not in tasks_of(nbformat.v4.new_notebook(cells=write("").cells[:-1]))["01.3"]


def test_a_cell_that_raises_is_seen(tmp_path):
    raises = small(("code", "1 / 0"))
    for raises.cells[-1].metadata["tags"] in ([], ["raises-exception"]):  # the tag is for readers
        with pytest.raises(CellExecutionError, match="1 / 0"):
            run(raises, tmp_path / "small.ipynb")


@pytest.mark.parametrize("place", ["/home/anna/kernels/01_naive.cu", "/usr/lib/python3/site-packages/torch"])
def test_a_path_of_a_machine_is_seen(place):
    assert MACHINE_PATH.search(place) and not MACHINE_PATH.search("kernels/01_naive.cu")


def test_a_folded_solution_stays_folded_in_html(tmp_path):
    execute.save(answer("x = 42"), "small", tmp_path)
    html = (tmp_path / "small.html").read_text()
    folded = html[html.index("<details>") : html.index("</details>")]
    assert "<pre>" in folded and "42" in folded


def test_a_notebook_that_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError, match="no notebook 77_none; there are 00_start_here, 01_naive, "):
        execute.execute_all(["01_naive", "77_none"])


def test_a_notebook_is_named_by_its_stem_how_that_begins_or_its_file():
    names = ["51_one_sided", "03", "04_fa2_fp32.ipynb", "notebooks/10_fa2_mma_fp16.ipynb", "03_fa1_fp32"]
    found = [path.stem for path in execute.chosen(names)]
    assert found == ["03_fa1_fp32", "04_fa2_fp32", "10_fa2_mma_fp16", "51_one_sided"]
    assert len(execute.chosen([])) == len(STEMS)
    with pytest.raises(ValueError, match="^'5' fits 50_ring, 51_one_sided: name one of them"):
        execute.chosen(["03", "5"])
