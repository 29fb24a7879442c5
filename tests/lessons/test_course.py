"""What a course hands out: students get no solutions and instructors all of them, from the same sources."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import executed
import nbformat
import pytest
from executed import verdicts

from helpers.ladder.paths import NOTEBOOKS
from helpers.lessons import numbers, regions
from helpers.lessons.course import marked, nbgrader, slides, syllabus, trees
from helpers.lessons.course.exercises import FOLDED, QUESTION, exercises, solved, unsolved
from helpers.lessons.tasks.catalogue import tasks

STEMS = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
BLANK = ("04.1", "04.2")
SHORTEST = [(tree, "02_online_softmax") for tree in ("student", "instructor")]  # to execute: one of them unless --all


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> trees.Built:
    return trees.build(tmp_path_factory.mktemp("course"), BLANK)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def lines(text: str) -> set[str]:
    """Lines long enough not to be the same by chance, without blanks and comments."""
    bare = (re.sub(r"\s+", "", line.partition("  #")[0]) for line in text.splitlines())
    return {line for line in bare if len(line) >= 16}


def inside(tree: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(tree), "FA_PROGRESS": ""}
    return subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)


# Nothing is given away


@pytest.mark.parametrize("stem", STEMS)
def test_a_students_notebook_has_neither_solutions_nor_outputs(built, stem):
    whole, given = read(NOTEBOOKS / f"{stem}.ipynb"), read(built.student / "notebooks" / f"{stem}.ipynb")
    assert not any(cell.get("outputs") for cell in given.cells) and "records" not in given.metadata
    elsewhere = lines("\n".join(FOLDED.sub("", cell.source) for cell in whole.cells))
    shown = lines("\n".join(cell.source for cell in given.cells))
    for number, each in exercises(whole).items():
        answer = lines(each.folded) | lines(each.solution(whole))
        assert each.folded and not answer & shown - elsewhere, f"exercise {number}: {answer & shown - elsewhere}"
    assert "<summary>Solution" not in "".join(cell.source for cell in given.cells)
    assert exercises(given).keys() == exercises(whole).keys()


@pytest.mark.parametrize("stem", STEMS)
def test_questions_of_the_self_check_stay_without_their_answers(built, stem):
    text = "\n".join(cell.source for cell in read(NOTEBOOKS / f"{stem}.ipynb").cells if cell.cell_type == "markdown")
    given = "\n".join(cell.source for cell in read(built.student / "notebooks" / f"{stem}.ipynb").cells)
    asked = QUESTION.findall(text.partition("## Self-check")[2])
    assert len(asked) >= 3 or stem.endswith("_log")
    assert all(question in given for question in asked)
    assert "<details" not in given.partition("## Self-check")[2].partition("\n## ")[0]


def test_what_is_said_to_instructors_is_not_said_to_students(built):
    sources = [path for path in trees.COURSE.glob("*.md") if marked.OPEN in path.read_text()]
    assert sources
    handed = "\n".join(path.read_text() for path in (built.student / "course").glob("*.md"))
    for path in sources:
        kept = lines(marked.for_students(path.read_text()))
        secret = lines(marked.for_instructors(path.read_text())) - kept
        assert secret and not secret & lines(handed), path.name
        assert secret <= lines((built.instructor / path.relative_to(trees.ROOT)).read_text())


def test_a_tree_has_all_that_its_readme_names_or_says_that_it_has_not(built):
    for tree in (built.student, built.instructor):
        text = (tree / "README.md").read_text()
        named = set(re.findall(r"`((?:[\w.]+/)+)`", text)) | {"Dockerfile", ".dockerignore", ".gitignore"}
        places = (tree, tree / "helpers", tree / "kernels")
        lacking = {name for name in named if not any((place / name).exists() for place in places)}
        assert lacking == set(re.findall(r"`([\w/]+/)`", trees.PART))
        assert text.startswith("# FlashAttention, one kernel at a time\n" + trees.PART)
        assert os.access(tree / ".binder" / "postBuild", os.X_OK)


def test_the_answers_of_the_cases_are_the_instructors_alone(built):
    """And a case about a rung that lacks a region says so."""
    assert (built.instructor / trees.ANSWERS).is_file() and not (built.student / trees.ANSWERS).exists()
    code = "from helpers.lessons.detective import opened\nopened({}).rung"
    blank, whole = (inside(built.student, "-c", code.format(n)) for n in (4, 6))
    assert "case 4 is not available: 04_fa2_fp32 is not whole in this tree" in blank.stderr and whole.returncode == 0


@pytest.mark.parametrize(
    "text", [marked.OPEN, f"{marked.CLOSE}{marked.OPEN}", f"{marked.OPEN}a{marked.OPEN}{marked.CLOSE}"]
)
def test_a_marker_without_its_partner_is_refused(text):
    with pytest.raises(ValueError, match="don't pair"):
        marked.for_students(text)


# Blank regions


def test_a_blank_region_is_nowhere_in_the_students_kernel(built):
    kernel = (built.student / "kernels" / "04_fa2_fp32.cu").read_text()
    for id in BLANK:
        wanted = {line for r in tasks()[id].regions for line in trees.code_lines(regions.body("04", r))}
        assert wanted and len(wanted & set(trees.code_lines(kernel))) <= len(wanted) / 10
        assert f"task {id}: the region" in kernel and not built.near[id].get("04_fa2_fp32.cu")
    assert not (built.instructor / "course" / "costs.json").exists()


def test_a_blank_rung_says_what_it_lacks_and_takes_what_is_typed(built):
    lacking = inside(built.student, "-m", "helpers", "check", "04")
    assert lacking.returncode and "task 04.1: the region online_update is for you to write" in (
        lacking.stdout + lacking.stderr
    )
    body = regions.body("04", "online_update")  # the region of 04.2 is still blank: each task is judged by itself
    file = built.student / "work.cu"
    text = "// region: 04 online_update\n// [region: online_update]\n{}\n// [end: online_update]\n"
    file.write_text(text.format(body))
    right = inside(built.student, "-m", "helpers", "exercise", "check", str(file))
    assert right.returncode == 0 and "Task 04.1: solved" in right.stdout, right.stdout + right.stderr
    file.write_text(text.format(body.replace("O_reg[r][c] *= alpha", "O_reg[r][c] *= 1.f")))
    wrong = inside(built.student, "-m", "helpers", "exercise", "check", str(file))
    assert wrong.returncode == 1 and "Task 04.1: solved" not in wrong.stdout
    assert "✓ one tile" in wrong.stdout and "✗" in wrong.stdout


def test_where_regions_are_blank_every_seed_can_be_graded(built):
    cost = "from helpers.lessons import judge; print(judge.own('04', 5)[1].traffic)"
    blank, whole = (inside(tree, "-c", cost) for tree in (built.student, trees.ROOT))
    assert blank.stdout == whole.stdout != "", blank.stderr


def test_kernels_that_hold_a_blank_region_are_named():
    assert trees.near(tasks()["04.1"], [regions.find("04").path], regions.find("04").path.parent) == {
        "04_fa2_fp32.cu": 1
    }


def test_a_whole_kernel_can_not_be_blank_and_a_tree_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="04.9"):
        trees.build(tmp_path, ["04.9"])
    (tmp_path / "student").mkdir()
    with pytest.raises(ValueError, match="there already"):
        trees.build(tmp_path)


# A solution stands in place of the cell that the reader fills in


def missing(start: str, solution: str, check: str) -> set[str]:
    """Names that the start cell binds and that the solution or the check reads, although the solution does not bind them before."""

    def names(tree: ast.AST, kind: type) -> set[str]:
        found = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, kind)}
        functions = (ast.FunctionDef, ast.ClassDef)
        return found | {each.name for each in ast.walk(tree) if kind is ast.Store and isinstance(each, functions)}

    lost, bound = set(), set()
    for statement in ast.parse(f"{solution}\n{check}").body:
        before = bound.copy()
        bound |= names(statement, ast.Store)
        lost |= names(statement, ast.Load) - (before if isinstance(statement, ast.Assign) else bound)
    return lost & names(ast.parse(start), ast.Store)


@pytest.mark.parametrize("stem", STEMS)
def test_a_solution_needs_nothing_of_the_cell_that_it_replaces(stem):
    notebook = read(NOTEBOOKS / f"{stem}.ipynb")
    for number, each in exercises(notebook).items():
        if each.check is not None and not (start := notebook.cells[each.start].source).startswith("%%"):
            lost = missing(start, each.solution(notebook), notebook.cells[each.check].source)
            assert not lost, f"exercise {number}: its solution lacks {lost}, which the start cell has"


def test_what_a_solution_lacks_is_seen():
    start = "names = ['a', 'b']\nchosen = set()"
    assert missing(start, "chosen = {'a'}", "exercise.verify('1.1', lambda: chosen <= set(names))") == {"names"}
    assert missing("x = {'a': 0}", "x = dict(zip(x, (1,)))", "x") == {"x"}
    assert not missing("def f(n):\n    pass", "def f(n):\n    return n and f(n - 1)", "f(3)")


# Executed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        option = metafunc.config.option
        every = [
            (tree, stem)
            for stem in STEMS
            if exercises(read(NOTEBOOKS / f"{stem}.ipynb"))
            for tree in ("student", "instructor")
        ]
        chosen = every if option.all else executed.drawn(SHORTEST, option.seed, 1)
        metafunc.parametrize("place", chosen, ids=["-".join(each) for each in chosen])


@pytest.mark.notebooks
def test_nothing_is_solved_for_students_and_everything_for_instructors(place, tmp_path):
    tree, stem = place
    whole = getattr(trees.build(tmp_path), tree)
    done = inside(whole, "-m", "helpers", "notebooks", stem, "--inplace")
    assert done.returncode == 0, done.stdout[-2000:]
    said = verdicts(read(whole / "notebooks" / f"{stem}.ipynb"))
    wanted = "solved" if tree == "instructor" else "not solved yet"
    assert said and all(set(each) == {wanted} for each in said.values()), said


# Parts


def small(*cells: tuple[str, str]) -> nbformat.NotebookNode:
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    return nbformat.v4.new_notebook(cells=[make[kind](source) for kind, source in cells])


def task(folded: str = "It is the rung's own.") -> nbformat.NotebookNode:
    """An exercise that is a region task."""
    text = f"### Task 04.1 · Write it\nText.\n<details>\n<summary>Solution</summary>\n\n{folded}\n\n</details>\nMore."
    return small(("markdown", text), ("code", "%%region 04 online_update -> mine\n// type here"), ("code", "x = 1"))


def test_the_solution_of_a_region_task_is_the_rungs_own_text():
    notebook = task()
    found = exercises(notebook)["task 04.1"]
    assert (found.start, found.check) == (1, None)
    assert solved(notebook).cells[1].source == "%%region 04 online_update -> mine\n" + regions.body(
        "04", "online_update"
    )
    assert unsolved(notebook).cells[0].source == "### Task 04.1 · Write it\nText.\nMore."
    assert verdicts(notebook) == {"task 04.1": ["not solved yet"]}
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="…\nTask 04.1: solved\n")]
    assert verdicts(notebook) == {"task 04.1": ["solved"]}
    own = task("```cuda\n%%region 04 online_update -> mine\nmine();\n```")
    assert solved(own).cells[1].source == "%%region 04 online_update -> mine\nmine();"


@pytest.mark.parametrize(("stem", "words"), [("nope", "no notebook nope"), ("19_log", "19_log has no exercise")])
def test_an_assignment_needs_a_notebook_with_exercises(stem, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        nbgrader.write(tmp_path, ["02_online_softmax", stem])


def test_cells_have_nbgraders_metadata(built):
    for stem in STEMS:
        notebook = read(built.student / "notebooks" / f"{stem}.ipynb")
        ids = [cell.metadata.nbgrader.grade_id for cell in notebook.cells if "nbgrader" in cell.metadata]
        assert len(ids) == len(set(ids)) >= len(exercises(notebook))


def test_a_check_ends_in_a_hidden_test_that_raises_unless_solved():
    whole = read(NOTEBOOKS / "02_online_softmax.ipynb")
    made = nbgrader.source(whole)
    checked = {number: each for number, each in exercises(made).items() if each.check is not None}
    for number, each in checked.items():
        code = made.cells[each.check].source
        assert code.endswith(nbgrader.HIDDEN) and "\nverdict = exercise.verify(" in f"\n{code}", number
        compile(code, number, "exec")
    assert json.dumps(made).count("### BEGIN HIDDEN TESTS") == len(checked) >= 2


# Words and slides


@pytest.mark.parametrize("lecture", slides.lectures(), ids=lambda path: path.stem)
def test_a_lecture_has_its_figures_with_words_and_the_records_numbers(lecture):
    text = lecture.read_text()
    assert text == numbers.renewed(text), f"{lecture.name} is behind the records"
    made = slides.notebook(text)
    shown = "\n".join(cell.source for cell in made.cells)
    assert shown.count("<img ") == len(slides.FIGURE.findall(text)) >= 3 and "{{" not in shown
    assert all(len(alt) > 20 for alt in re.findall(r'alt="([^"]*)"', shown))
    assert all(", 4096" in call for call in re.findall(r"ratio\(.*?\)", text)), (
        "a ratio stands beside the speed at N = 4096"
    )


def test_a_figure_that_is_not_there_is_named():
    with pytest.raises(LookupError, match="04_fa2_fp32 has no saved figure .*no such call"):
        slides.figure("04_fa2_fp32", "no such call")


def test_the_syllabus_is_in_step_with_notebooks_and_tasks():
    text = syllabus.PAGE.read_text()
    assert text == syllabus.renewed(text), "run: python -m helpers course syllabus"
    for weeks, of in syllabus.WEEKS.items():
        assert len(of) == weeks and all(week.minutes <= 480 for week in of)
        assert all(
            id.partition(".")[0] in {n for week in of[: i + 1] for n in week.notebooks}
            for i, week in enumerate(of)
            for id in week.tasks
        )
    assert not [
        id
        for week in syllabus.WEEKS[6]
        for id in week.tasks
        if not any(id in path.read_text() for path in slides.lectures())
    ]


def test_a_lecture_announces_the_quiz_of_its_week():
    for week in syllabus.WEEKS[6]:
        (lecture,) = (path for path in slides.lectures() if path.stem.startswith(f"{week.lecture}_"))
        assert ("- quiz next time: " in lecture.read_text()) == (syllabus.QUIZ in week.assessed), lecture.name


def test_slides_are_not_promised_where_they_can_not_be_made(built):
    assert "make slides" not in (built.student / "course" / "README.md").read_text()
    assert "`make slides`, in the full repository" in (built.instructor / "course" / "README.md").read_text()


def test_the_exam_has_thirty_questions_each_with_an_answer_for_instructors_alone():
    parts = re.split(r"^\*\*(\d+)\. ", (trees.COURSE / "oral_exam.md").read_text(), flags=re.MULTILINE)
    assert [int(n) for n in parts[1::2]] == list(range(1, 31))
    for question in parts[2::2]:
        kept = marked.for_students(question).partition("\n## ")[0]
        assert kept.strip().endswith("**") and question.count(marked.OPEN) == 1
