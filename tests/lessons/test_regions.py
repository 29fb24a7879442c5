"""Typing a region: the rung around it stays, lines are named as the reader counts them, and a bad cell leaves no kernel behind."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers import CompileError, Kernel, blank, commands, hint, load, progress, rung, rungs
from helpers.lessons import forms, judge, regions, typed
from helpers.lessons import progress as progress_module
from helpers.lessons.progress import keep, solved
from helpers.lessons.regions import WHOLE, RegionError, Typed, body, fill

OUTPUT = body("01", "output")


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_PROGRESS", str(tmp_path / "progress.json"))


@pytest.mark.parametrize("stem", [each.stem for each in rungs()])
def test_filled_with_its_own_text_every_region_is_the_rung(stem):
    for name in regions.names(stem):
        assert fill(stem, {name: Typed(name, body(stem, name))}).rung.digest == rung(stem).digest, name


def test_lines_are_those_of_the_cell_inside_and_of_the_rung_outside():
    lines = rung("01").source.splitlines()
    typed_text = OUTPUT.replace("float o = 0.f;", "float o = 0.f;\n\n")  # two lines more
    filled = fill("01", {"output": Typed("output", typed_text)})
    whole = filled.rung.source.splitlines()
    inside = next(n for n, line in enumerate(whole, 1) if "float o = 0.f" in line)
    at = typed_text.splitlines().index("  float o = 0.f;") + 2
    assert filled.place(inside) == ("cell", at)
    behind = next(n for n, line in enumerate(whole, 1) if "fa_launch(const" in line)
    here = next(n for n, line in enumerate(lines, 1) if "fa_launch(const" in line)
    assert filled.place(behind) == ("01_naive.cu", here) and filled.place(3) == ("01_naive.cu", 3)
    said = filled.located(f"01_naive.cu:{inside}:3: error: no\n{inside:>5} | float\nwrites on line {behind}, and")
    assert said == f"cell:{at}:3: error: no\n{at:>5} | float\nwrites on line {here} of 01_naive.cu, and"


def test_where_all_of_the_rung_is_typed_its_file_is_the_readers():
    filled = fill("01", {WHOLE: Typed(WHOLE, body("01", WHOLE))})
    assert filled.located("01_naive.cu has no `fa_launch`") == "cell has no `fa_launch`"
    part = fill("01", {"output": Typed("output", OUTPUT)})
    assert part.located("01_naive.cu has no `fa_launch`") == "01_naive.cu has no `fa_launch`"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("%%region 04 online_update -> mine\nfloat a;", ("04", ("online_update",), "float a;")),
        ("%%region 04_fa2_fp32 scores output", ("04_fa2_fp32", ("scores", "output"), "")),
        ("// region: 04 online_update \nfloat a;", ("04", ("online_update",), "float a;")),
        ("%%region 04\nscores", None),
        ("%%regions 04 scores\n", None),
        ("\n \n%%region 04 scores\nfloat a;", ("04", ("scores",), "float a;")),
        ("float a;\n%%region 04 scores\n", None),
        ("%%region 04 scores -> mine\r\nfloat a;\r\n", ("04", ("scores",), "float a;\r\n")),
        ("%%region 04 scores output->mine \r\n", ("04", ("scores", "output"), "")),
        ("// Anna Smith\n\n// 42\n// region: 04 scores\nfloat a;", ("04", ("scores",), "float a;")),
        ("// region: 04\n// region: 04 scores\n", None),
    ],
)
def test_the_line_that_an_answer_opens_with(answer, found):
    cell = answer.lstrip().startswith("%%")
    made = regions.head(answer, cell)
    assert (made and (made.rung, made.regions, made.text)) == found
    assert regions.head(answer, not cell) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("}\n{", "cell:2: '}' closes"),
        ("int a;\nif (a) {", "cell:3: '{' is never closed"),
        ("int a = (1];", "cell:2: ']' closes"),
        ("\n#include <cstdio>", "cell:3: `#include` has no place"),
    ],
)
def test_what_leaves_its_region_is_refused_with_its_line(text, said):
    with pytest.raises(RegionError, match=re.escape(said)):
        fill("04", {"scores": Typed("scores", text)})


def test_a_macro_of_several_lines_is_allowed_in_a_whole_rung_alone():
    macro = "#define TWICE(x) \\\n  do { \\\n    (x) *= 2; \\\n  } while (0)\n"
    text = macro + body("01", WHOLE)
    assert fill("01", {WHOLE: Typed(WHOLE, text)}).rung.source.count(macro) == 1
    for region, wrong, at in (
        ("scores", text, 2),
        (WHOLE, f"{macro}// a comment \\\nint a;", 6),
        (WHOLE, macro.replace("do { \\", "do {\\"), 3),  # a word could go on in the next line
    ):
        with pytest.raises(RegionError, match=re.escape(f"cell:{at}: '\\\\' has no place")):
            fill("01", {region: Typed(region, wrong)})


def test_brackets_in_comments_and_strings_are_no_brackets():
    fill("04", {"scores": Typed("scores", '// }\nint a = \'}\'; /* { */ const char *s = "(\\")"; (void)a, (void)s;')})


def test_regions_inside_each_other_are_not_both_typed():
    with pytest.raises(RegionError, match="'scores' lies inside 'tile_loop'"):
        fill("04", {name: Typed(name, "") for name in ("scores", "tile_loop")})


def test_an_unknown_region_names_those_there_are():
    with pytest.raises(KeyError, match="no region 'output2'; it has .*output.*kernel"):
        blank("01", "output2")


def test_a_form_begins_with_the_magic_and_a_name_that_hides_none_of_the_notebook_s():
    assert str(blank("04", "online_update")).startswith("%%region 04 online_update -> my_online_update\n// 04.1: Write")
    assert str(blank("04")).startswith("%%region 04 kernel -> my_kernel\n")


def test_several_regions_stand_between_their_markers():
    form = forms.form("03", ("softmax", "merge"))
    text = "".join(f"// [region: {name}]\n{body('03', name)}\n// [end: {name}]\n" for name in ("softmax", "merge"))
    bodies = regions.read(text, ("softmax", "merge"))
    assert fill("03", bodies).rung.digest == rung("03").digest
    assert regions.read(form, ("softmax", "merge"))["merge"].empty
    with pytest.raises(RegionError, match=r"lacks `// \[region: merge\]`"):
        regions.read(text.partition("// [region: merge]")[0], ("softmax", "merge"))


# %%region


def run(shell, capsys, line, text):
    shell.run_cell_magic("region", line, text)
    return capsys.readouterr().out


def test_a_right_region_is_solved_and_compared_with_the_rungs_own(shell, capsys):
    said = run(shell, capsys, "01 output", OUTPUT)
    assert "given: const fa_args a" in said and "Task 01.3: solved" in said
    rows = re.findall(r"^  (\D+?) +([\d,]+) +([\d,]+)$", said, re.MULTILINE)
    assert len(rows) == 5 and all(mine == own for _, mine, own in rows) and rows[0][1] == "0"
    assert isinstance(shell.user_ns["output"], Kernel) and "task 01.3" in solved()
    assert shell.user_ns["output"](*torch.zeros(3, 1, 1, 8, 16))[0].eq(0).all()


def test_a_region_that_does_not_compile_leaves_no_kernel_behind(shell, capsys):
    shell.user_ns["mine"] = "yesterday's"
    said = run(shell, capsys, "01 output -> mine", OUTPUT.replace("float o = 0.f;", "float o = zero;"))
    line = OUTPUT.splitlines().index("  float o = 0.f;") + 2
    assert (
        re.search(rf"cell:{line}:\d+: error: .zero. was not declared", said) and f"{line} |   float o = zero;" in said
    )
    with pytest.raises(CompileError, match=f"cell:{line}"):
        shell.user_ns["mine"](torch.zeros(1))
    assert not solved()


@pytest.mark.parametrize(
    ("text", "said"), [("\n", "nothing is typed"), ("// later\n", "nothing is typed"), ("}\n", "closes what")]
)
def test_nor_does_an_empty_one_or_one_that_leaves_its_region(shell, capsys, text, said):
    shell.user_ns["output"] = "yesterday's"
    assert said in run(shell, capsys, "01 output", text)
    with pytest.raises(RegionError, match=said):
        shell.user_ns["output"](torch.zeros(1))


def test_a_wrong_region_says_where_and_is_not_solved(shell, capsys):
    said = run(shell, capsys, "01 output", OUTPUT.replace("j < a.Nk", "j < a.Nk - 1"))
    assert "WRONG in" in said and "worst at O[" in said and not solved()


def test_a_column_past_an_uneven_head_dimension_is_seen_in_the_notebook_too():
    right = regions.body("01", "output")
    wrong = right.replace("i >= a.Nq || c >= a.D", "i >= a.Nq")
    assert (
        wrong != right and not typed.attempt("01", ("output",), wrong).ok and typed.attempt("01", ("output",), right).ok
    )


def test_bank_conflicts_at_one_head_dimension_alone_are_seen():
    """A swizzle of whole rows of banks: of 64 columns and more it is the rung's."""
    right = body("11", "swizzle")
    text = right.replace("row / (d < 64 ? 64 / d : 1) % (d < 64 ? d / 8 : 8)", "row % (d < 64 ? d / 8 : 8)")
    made = typed.attempt("11", ("swizzle",), text)
    assert text != right and made.score.report.ok and not made.ok
    assert "d = 32: 8,448 bank conflicts, the rung has 0" in str(made)
    assert typed.attempt("11", ("swizzle",), right).ok


def test_a_finding_in_a_case_that_is_right_is_said():
    right = body("30", "refill")
    text = "\n".join(line for line in right.splitlines() if "mbarrier_wait" not in line)
    made = typed.attempt("30", ("refill",), text)
    assert text != right and made.score.report.ok and not made.ok and "  ✗ overwritten at " in str(made)


def test_words_that_a_task_rules_out_are_refused_with_their_line():
    text = body("12", "load_tile") + "\n// fa::cp_async_commit() later\n  fa::cp_async_wait<0>();"
    made = typed.attempt("12", ("load_tile",), text)
    line = len(text.splitlines()) + 1
    assert f"cell:{line}: `cp_async_wait` has no place in the region 'load_tile'" in str(made) and not made.ok


def test_a_word_that_a_grader_refuses_is_named_where_a_task_is_solved():
    made = typed.attempt("01", ("output",), f'{OUTPUT}\n__device__ void say() {{ printf("here"); }}')
    line = len(OUTPUT.splitlines()) + 2
    assert made.said[-2] == "Task 01.3: solved"
    assert made.said[-1].startswith(f"before it is handed in: cell:{line}: `printf` can't be graded")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="there is no nm as on Linux")
def test_a_call_that_a_grader_refuses_is_named_where_a_task_is_solved(monkeypatch):
    monkeypatch.setattr(typed, "score", lambda *_: SimpleNamespace(ok=True))
    copies = "#include <cstring>\nchar *(*volatile copy)(char *, const char *, size_t) = strncpy;\n"
    right = body("01", "kernel")
    assert typed.attempt("01", ("kernel",), right).said[-1] == "Task 01.9: solved"
    said = typed.attempt("01", ("kernel",), copies + right).said
    assert said[-1].startswith("before it is handed in: it uses `strncpy`: a graded kernel calls nothing but")


def test_no_case_follows_one_that_never_ends(monkeypatch):
    monkeypatch.setattr(typed, "SECONDS", 2.0)
    filled = fill(
        "01", {"output": Typed("output", OUTPUT.replace("float o = 0.f;", "float o = 0.f;\n  for (;;) o += 1.f;"))}
    )
    kernel = load(filled.rung, quiet=True)
    kernel.launcher.timeout = typed.SECONDS
    (found,) = typed._checked(kernel, rung("01")).comparisons
    assert "stopped" in found.problem
    cases, _ = judge.own("01", 0)
    (one,) = judge.observe(filled.rung, judge.jobs(cases), 2.0)
    assert "stopped" in one.error and one.case == 0


def test_a_kernel_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(typed, "score", lambda kernel, *_: pytest.fail(f"{kernel.launcher.timeout}"))
    with pytest.raises(pytest.fail.Exception, match=f"{judge.SECONDS}"):
        typed.attempt("01", ("output",), OUTPUT)


MERGE = body("50", "merge")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", "Task 50.1: solved"),
        ("l > 0.f ? 1.f / l : 0.f", "1.f / l", "✗ both without a key"),
        ("if (column == 0) a.LSE[", "a.LSE[", "race at cell:"),  # in place, where it is X-rayed
    ],
)
def test_a_merge_is_checked_and_x_rayed_as_a_ring_calls_it(shell, capsys, old, new, said):
    assert said in run(shell, capsys, "50 merge -> mine", MERGE.replace(old, new, 1))
    assert ("task 50.1" in solved()) == (not old) and isinstance(shell.user_ns["mine"], Kernel)


def test_a_wrong_line_of_the_magic_is_explained(shell, capsys):
    assert "takes a rung" in run(shell, capsys, "", "int a;")
    assert "no region 'nothing'" in run(shell, capsys, "01 nothing", "int a;")
    assert "no kernel '77'" in run(shell, capsys, "77 output", "int a;")


def test_an_empty_task_of_two_regions_is_not_solved_yet_too(shell, capsys):
    assert run(shell, capsys, "32 softmax rescale", "// here") == "nothing is typed in the region 'softmax'\n"
    assert run(shell, capsys, "22 dS -> mine", "// here").startswith("Task 22.2: not solved yet; nothing is typed")


# Forms, hints, progress, and the command line


def test_a_form_for_an_editor_is_filled_in_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forms, "ROOT", tmp_path)
    assert commands.main(["exercise", "new", "01", "output"]) == 0
    file = tmp_path / "work" / "01_output.cu"
    assert commands.main(["exercise", "new", "01", "output"]) == 2 and "is there already" in capsys.readouterr().err
    assert commands.main(["exercise", "check", str(file)]) == 1 and "nothing is typed" in capsys.readouterr().out
    text = file.read_text().replace("// [region: output]\n", f"// [region: output]\n{OUTPUT}\n")
    file.write_text(text.replace("float o = 0.f;", "float o = zero;"))
    line = next(n for n, each in enumerate(file.read_text().splitlines(), 1) if "zero" in each)
    assert commands.main(["exercise", "check", str(file)]) == 1 and f"01_output.cu:{line}:" in capsys.readouterr().out
    file.write_text(text, encoding="utf-8-sig")  # as some editors write it
    assert commands.main(["exercise", "check", str(file)]) == 0 and "Task 01.3: solved" in capsys.readouterr().out


def test_a_form_of_a_whole_rung_has_its_headers_and_no_more(tmp_path):
    page = forms.page("04", (WHOLE,))
    found = regions.read(page, (WHOLE,), "file", 1)[WHOLE]
    assert found.text.split() == [
        word for line in rung("04").source.splitlines() if line.startswith("#include") for word in line.split()
    ]
    (tmp_path / "mine.cu").write_text(page)
    assert not typed.attempt_file(tmp_path / "mine.cu").ok


def test_hints_are_silent_in_a_notebook_until_they_are_unfolded_and_come_one_by_one():
    shown = hint("04.1")
    bundle = shown._repr_mimebundle_()
    assert "alpha" not in bundle["text/plain"] and bundle["text/html"].count("<details><summary>") == 3
    assert (
        bundle["text/html"].index("hint 1")
        < bundle["text/html"].index("hint 2")
        < bundle["text/html"].index("</details>")
    )
    assert "<code>scores</code>" in hint("01.3")._repr_html_() and "`" not in hint("01.3")._repr_html_()
    assert [repr(shown)[:11] for _ in range(4)] == ["hint 1 of 3", "hint 2 of 3", "hint 3 of 3", "hint 3 of 3"]


def test_progress_is_kept_and_a_broken_file_is_no_obstacle(tmp_path):
    keep("task 04.1"), keep("exercise 2.1"), keep("task 04.1")
    said = str(progress())
    assert "exercises solved: 1 (2.1)" in said and "tasks solved: 1 of 61 (04.1)" in said and "next: 01.1" in said
    assert f"kept in {tmp_path}" in said
    (tmp_path / "progress.json").write_text("[broken")
    assert solved() == {} and "tasks solved: 0" in str(progress())


def test_progress_is_kept_in_a_home_folder_that_no_shell_has_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FA_PROGRESS", "~/mine.json")
    keep("task 04.1")
    assert "task 04.1" in solved() and (tmp_path / "mine.json").is_file()


def test_where_progress_is_kept_nowhere_there_is_none_and_no_folder_of_a_machine_is_shown(tmp_path, monkeypatch):
    """As when a notebook is executed for its outputs."""
    monkeypatch.setattr(progress_module, "ROOT", tmp_path)
    monkeypatch.delenv("FA_PROGRESS")
    keep("task 04.1")
    assert str(progress()).splitlines()[-1] == "kept in work/progress.json" and "1 of" in str(progress())
    monkeypatch.setenv("FA_PROGRESS", "")
    assert not solved() and "kept in work" in str(progress())
