"""Detective cases: each is wrong, says nothing of its bug, takes no wrong diagnosis and no wrong fix, and can be solved."""

from __future__ import annotations

import re
import subprocess
import sys

import executed
import pytest
import wrong_fixes

from helpers import detective, progress, rungs, show
from helpers.evidence.mutants import catalogue
from helpers.lessons import cases, forms
from helpers.lessons import detective as own
from helpers.lessons.cases import ANSWERS, CASES, DRAWN, MECHANISMS, SHOWN
from helpers.lessons.detective import MOST_LINES, opened
from helpers.lessons.progress import solved

NUMBERS = [each.n for each in CASES]
every = pytest.mark.parametrize("n", NUMBERS)
SHARE = 2  # of what takes seconds a case; --all runs every one
FAST = 6  # a case of a second


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.option
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", NUMBERS if option.all else executed.drawn(NUMBERS, option.seed, SHARE))
    if "wrong" in metafunc.fixturenames:
        all = [(n, i) for n in NUMBERS for i in range(len(wrong_fixes.FIXES[n]))]
        metafunc.parametrize("wrong", all if option.all else executed.drawn(all, option.seed, 2 * SHARE))


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_PROGRESS", str(tmp_path / "progress.json"))


def answer(n: int, capsys) -> tuple[int, str, dict[int, str]]:
    found = opened(n).solution()
    capsys.readouterr()
    return found


# The cases


def test_there_is_one_for_each_rung_and_each_is_about_something_else():
    assert [each.number for each in CASES] == [rung.number for rung in rungs()]
    found = [cases.answers()[n]["mechanism"] for n in NUMBERS]
    assert len(set(found)) == len(found) < len(MECHANISMS) and set(found) < set(MECHANISMS)  # some belong to none


@every
def test_the_digests_are_those_of_the_answers(n):
    said, case = cases.answers()[n], cases.case(n)
    assert said["bug"] in catalogue() and said["bug"].startswith(case.number) and case.is_bug(said["bug"])
    assert [name for name in MECHANISMS if case.is_mechanism(name)] == [said["mechanism"]]
    assert len(said["why"].split()) > 10


@every
def test_the_bug_is_among_what_is_shown_and_no_comment_stands_beside_it(n):
    case = opened(n)
    shown = {line[0] for line in case.code().lines}
    assert case._lines and case._lines & shown and len(case._lines) <= MOST_LINES
    broken = case.rung.source.splitlines()
    whole = {line.strip() for line in show.source(case.case.number).text.splitlines()}
    new = [broken[line - 1] for line in case._lines if broken[line - 1].strip() not in whole]
    assert all("//" not in line or re.search(r"// \([\w, ]+\)$", line) for line in new), new


@every
def test_hints_lead_to_it_and_name_no_line(n):
    hints = cases.case(n).hints
    assert len(hints) == 3 and not any(re.search(r"\bline \d|\.cu", hint) for hint in hints)
    assert cases.answers()[n]["mechanism"] not in hints[0].split()


def test_the_broken_kernel_is_wrong_and_its_symptoms_say_nothing_of_the_bug(run, capsys):
    case = opened(run)
    seen = case.symptoms()
    assert seen.found or not all(each.right for each in seen.seen)
    assert case.fault(case.rung)
    for text in (str(seen), seen._repr_html_()):
        assert not re.search(r"\.cu\b|\bline \d|lines? \d", text)
        assert not re.search(
            r"\b(race|uninitiali[sz]ed|in flight|out of bounds|deadlock|misaligned|overwritten)\b", text
        )
        assert not any(re.search(rf"(?<!\d){line}:", text) for line in case._lines)
        assert cases.answers()[run]["bug"] not in text
    assert seen.found or "in 4 orders" in seen.orders  # what depends on the order is a race, which the X-ray finds


def test_a_race_shows_as_an_answer_that_changes_and_stops_nothing():
    """Of case 4, which its hints build upon."""
    seen = opened(4).symptoms()
    assert seen.orders.startswith("the answer changes with the order of threads") and all(
        each.right for each in seen.seen
    )
    assert {each.said for each in seen.seen} == {"", "in other orders of threads another answer"}


def test_the_fixed_kernel_is_right(run, capsys):
    assert opened(run).solve(*answer(run, capsys))
    assert list(solved()) == [f"case.{run}"]


def test_a_plausible_wrong_fix_fails(wrong, capsys):
    n, i = wrong
    case = opened(n)
    line, mechanism, right = answer(n, capsys)
    made = wrong_fixes.fixes(n, right)[i]
    with pytest.raises(AssertionError, match="the diagnosis is right; the fix isn't"):
        case.solve(line, mechanism, made)
    why = case.fault(case.fixed(made))
    assert "error:" not in why, f"wrong for another reason than is meant, it does not compile: {why}"


# The diagnosis


@every
def test_wrong_diagnoses_are_refused(n):
    """Before anything is compiled; of a wrong one both halves are judged."""
    case, mechanism = opened(n), cases.answers()[n]["mechanism"]
    line = min(case._lines)
    assert case.diagnose(line, mechanism) == ""
    others = [name for name in MECHANISMS if name != mechanism]
    assert {case.diagnose(line, name) for name in others} == {"the line is right, the mechanism is another one"}
    far = [at for at in range(1, len(case.rung.source.splitlines()) + 1) if at not in case._lines]
    assert {case.diagnose(at, mechanism) for at in far} == {"that is the mechanism, in another line"}
    assert case.diagnose(far[0], others[0]) == "neither the line nor the mechanism"


@pytest.mark.parametrize(
    ("line", "mechanism", "said"),
    [
        (None, "", "first the diagnosis"),  # as it is handed out
        (..., ..., "first the diagnosis"),
        (12, "", "first the diagnosis"),
        (None, "layout", "first the diagnosis"),
        (12, "a bug", "no mechanism"),
        ("12", "layout", "a number"),
        (True, "layout", "a number"),
        (10**6, "layout", "a number"),
    ],
)
def test_what_is_no_diagnosis_is_refused_with_a_right_fix(line, mechanism, said, capsys):
    _, _, fix = answer(FAST, capsys)
    with pytest.raises(AssertionError, match=said):
        opened(FAST).solve(line, mechanism, fix)
    assert not solved()


# The fix


def swap() -> dict[int, str]:
    """Another kernel in the place of this one."""
    return {n: "" for n in range(30, 60)}


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ({}, "fix is a dictionary"),
        ((1, 2), "fix is a dictionary"),
        ({0: ""}, "no line of the file"),
        ({10**6: ""}, "no line of the file"),
        ({62: None}, "no line of the file"),
        ("itself", "nothing is fixed yet"),
        ("a comment", "the fix isn't"),
        ({62: "    )"}, "the fix isn't"),
        (swap(), "enough for every case"),
    ],
)
def test_what_is_no_fix_is_refused(fix, said, capsys):
    line, mechanism, _ = answer(FAST, capsys)
    own_line = opened(FAST).rung.source.splitlines()[line - 1]
    fix = (
        {"itself": {line: own_line}, "a comment": {line: f"{own_line} // fixed"}}.get(fix, fix)
        if isinstance(fix, str)
        else fix
    )
    with pytest.raises(AssertionError, match=said):
        opened(FAST).solve(line, mechanism, fix)


def test_no_attribute_of_a_case_is_the_answer():
    """What completion offers."""
    case = opened(FAST)
    names = [name for name in dir(case) if not name.startswith("_") and name != "solution"]
    values = [value for name in names if not callable(value := getattr(case, name))]
    texts = [*map(str, values), repr(case), repr(vars(case.case))]
    assert case._lines not in values
    right = "at<d>(row + r, chunk)) = x;"
    assert not any(right in text or "tiles-written" in text for text in texts)
    assert not any(re.search(r"\blayout\b", text) for text in texts)


# Drawn


def test_a_seed_draws_twelve_the_same_everywhere_and_another_one_others():
    drawn = {seed: [case.case.n for case in detective(seed)] for seed in range(30)}
    assert drawn[3] == [case.case.n for case in detective(3)] and len({tuple(d) for d in drawn.values()}) > 20
    assert all(len(set(d)) == DRAWN == 12 and d == sorted(d) and SHOWN not in d for d in drawn.values())
    assert {n for d in drawn.values() for n in d} == {*NUMBERS} - {SHOWN}


def test_an_unknown_case_is_refused_by_name():
    with pytest.raises(KeyError, match=r"no case 'case.99'; there are case.1 to case.16"):
        forms.hint("case.99")


def test_hints_unfold_one_at_a_time():
    hints, page = forms.hint("case.6"), forms.hint("case.6")._repr_html_()
    told = [repr(hints) for _ in range(4)]
    assert told[0].startswith("hint 1 of 3: ") and told[2] == told[3] and told[2].startswith("hint 3 of 3: ")
    assert page.count("<details>") == 3 and "<details open" not in page and "Case 6: hint 1 of 3" in page
    assert hints._repr_mimebundle_()["text/plain"] == "hints of case 6, folded"


# As files, and counted


def test_a_file_goes_there_and_back_and_is_judged(capsys):
    line, mechanism, fix = answer(FAST, capsys)
    page = own.page(FAST)
    empty = own.read(page)
    assert empty is not None and (empty.n, empty.line, empty.mechanism) == (FAST, None, "")
    assert empty.text == opened(FAST).rung.source.rstrip("\n") and own.read(empty.text) is None
    assert own.attempt(empty) == (False, f"Case {FAST}: not solved yet\n  first the diagnosis: a line and a mechanism")
    told = page.replace("// line:", f"// line: line {line}").replace(
        "// mechanism:", f"// mechanism: `{mechanism.title()}`"
    )
    assert own.attempt(own.read(told)) == (
        False,
        f"Case {FAST}: not solved yet\n  the diagnosis is right; the fix isn't: nothing is fixed yet",
    )
    fixed = opened(FAST).fixed(fix).source
    assert own.attempt(own.read(told.replace(empty.text, fixed))) == (True, f"Case {FAST}: solved")
    assert "cases solved: 1 of 16 (6)" in str(progress())
    assert repr(opened(FAST)).endswith("solved")


@pytest.mark.parametrize("above", ["// Anna Smith\n", "/* Anna Smith,\n   42 */\n\n", "// D: 7\n"])
def test_a_name_above_a_case_changes_neither_its_header_block_nor_the_lines_of_its_code(above, capsys):
    case, (line, _, fix) = opened(FAST), answer(FAST, capsys)
    text = above + case.fixed(fix).source
    made = case.edited(text)
    assert (made.dtypes, made.D, made.op) == (case.rung.dtypes, case.rung.D, case.rung.op)
    assert made.source.splitlines()[line:] == text.splitlines()[line:]
    with pytest.raises(ValueError, match="nothing is fixed yet"):
        case.edited(above + case.rung.source)


@pytest.mark.parametrize(
    ("written", "line", "said"),
    [("130.", 130, ""), ("line 130", 130, ""), ("130-131", "130-131", ", not '130-131'")],
)
def test_a_line_that_is_no_number_is_quoted(written, line, said):
    handed = own.read(
        own.page(FAST).replace("// line:", f"// line: {written}").replace("// mechanism:", "// mechanism: layout")
    )
    assert handed.line == line and said in own.attempt(handed)[1]


def test_the_command_lists_writes_checks_and_hints(tmp_path, monkeypatch, capsys):
    from helpers import commands
    from helpers.ladder import paths

    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert commands.main(["exercise", "list", "cases"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 16
    assert commands.main(["exercise", "list", "cases", "--seed", "7"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    assert commands.main(["exercise", "new", "case", str(FAST)]) == 0
    said, file = capsys.readouterr().out, tmp_path / "work" / "case_06.cu"
    assert "case 6: a broken 11_swizzled" in said and file.is_file()
    line, mechanism, _ = answer(FAST, capsys)
    told = (
        file.read_text().replace("// line:", f"// line: {line}").replace("// mechanism:", f"// mechanism: {mechanism}")
    )
    for text, words in ((file.read_text(), "first the diagnosis"), (told, "nothing is fixed yet")):
        file.write_text(text, "utf-8-sig")
        assert commands.main(["exercise", "check", str(file)]) == 1 and words in capsys.readouterr().out
    assert commands.main(["exercise", "hint", "case.6", "2"]) == 0
    assert capsys.readouterr().out.count("hint ") == 2


# Trees that were handed out


def test_without_the_answers_a_case_can_be_solved_and_gives_no_solution(monkeypatch, tmp_path, capsys):
    line, mechanism, fix = answer(FAST, capsys)
    monkeypatch.setattr(cases, "ANSWERS", tmp_path / "none.json")
    cases.answers.cache_clear()
    try:
        with pytest.raises(ValueError, match="without the cases' solutions"):
            opened(FAST).solution()
        assert opened(FAST).solve(line, mechanism, fix)
    finally:
        cases.answers.cache_clear()


def test_of_a_rung_that_is_not_whole_there_is_no_case(monkeypatch):
    def lacking(stem):
        raise ValueError("'at<d>' occurs 0 times")

    monkeypatch.setattr(own, "of_rung", lacking)
    with pytest.raises(ValueError, match="11_swizzled is not whole in this tree"):
        own.Opened(cases.case(FAST)).symptoms()


def test_only_the_module_of_answers_names_a_bug():
    text = ANSWERS.with_name("cases.py").read_text() + ANSWERS.with_name("detective.py").read_text()
    assert not [said["bug"] for said in cases.answers().values() if said["bug"] in text]


def test_importing_it_runs_nothing():
    code = "import sys, helpers.lessons.cases; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
