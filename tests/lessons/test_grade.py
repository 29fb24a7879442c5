"""The grader gives what is deserved: all points to the rung's own text, none to nothing, and to no attack more than it earns."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

from helpers import commands
from helpers.emulator.launcher import Launcher
from helpers.ladder.paths import KERNELS
from helpers.ladder.rung import rung as find
from helpers.lessons import detective, forms, judge, regions
from helpers.lessons.cases import CASES
from helpers.lessons.grading import allowed, sandbox
from helpers.lessons.grading import grade as grading
from helpers.lessons.grading.assignments import Criterion, assignment
from helpers.lessons.grading.grade import Grade, Graded, Patience, grade
from helpers.lessons.grading.submission import LARGEST, answers
from helpers.lessons.inputs import draw, instance
from helpers.run.check import compare
from helpers.run.reference import Case

pytestmark = pytest.mark.skipif(bool(sandbox.refusal()), reason="there is no sandbox here")
SHORT = Patience(launch=6, task=12, processor=10, submission=90)
ENDLESS = Patience(launch=2, task=12, processor=10, submission=90)  # for what never ends by itself
FREE = judge.Costs(0, 0, {})


def hand_in(folder: Path, stem: str, region: str, text: str) -> Path:
    """A form with `text` typed into it."""
    page = forms.page(stem, (region,))
    head, marker, rest = page.partition(f"// [region: {region}]\n")
    file = folder / f"{stem}_{region}.cu"
    file.write_text(f"{head}{marker}{text}\n// [end: {region}]\n")
    return file


def in_cells(folder: Path, *sources: str) -> Path:
    """A notebook with these cells."""
    path = folder / "mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources]), path)
    return path


def own(region: str, stem: str = "01") -> str:
    return regions.body(stem, region)


def whole(in_launcher: str = "", before: str = "", after: str = "") -> str:
    """Rung 01 with something more in its launcher, before all of its code, or after it."""
    launched = "  const fa_args &a = *args;\n"
    text = own("kernel")
    assert text.count(launched) == 1
    return f"{before}\n{text.replace(launched, launched + in_launcher)}\n{after}\n"


def why(found) -> str:
    return found.tasks[0].criteria[0].said


def tile() -> Case:
    return Case("one tile", *torch.randn(3, 1, 1, 16, 32))


def judged(case: Case, outputs=None, expected: int = 1, rungs: judge.Costs = FREE, **counts) -> judge.Judgement:
    """Of one launch, which gave these outputs or the right ones."""
    return judge.judge([case], [judge.Run(0, 0, outputs or case.baseline(), **counts)], expected, rungs)


def by_criterion(id: str, right: int = 10, findings: tuple[str, ...] = (), times: float = 1) -> list[float]:
    """The points of a kernel that is right in so many of ten cases and costs so many times as much as the rung."""
    cases = tuple((f"case {n}", "" if n < right else "wrong") for n in range(10))
    mine, rungs = (judge.Costs(n, 50, {"Q": (n, 0)}) for n in (round(100 * times), 100))
    filled = regions.Filled(find("01"), find("01"), ())
    made = assignment(id).criteria(judge.Judgement(cases, findings, mine, rungs), filled, None)
    return [each.points for each in made]


@pytest.fixture
def sandbox_alone(monkeypatch):
    """Kernels may say and call anything, so that the sandbox is all that holds them."""
    monkeypatch.setattr("helpers.lessons.grading.grade.STRICT", False)


# What is deserved


def test_the_rungs_own_text_gets_all_points_and_the_same_json_every_time(tmp_path):
    file = hand_in(tmp_path, "01", "scores", own("scores"))
    first, second = (grade(file, seed=5).as_json() for _ in range(2))
    assert first == second and first["points"] == first["most"] == 10


@pytest.mark.parametrize("text", ["", "// later", "   /* nothing\n yet */ "])
def test_an_empty_submission_gets_nothing(tmp_path, text):
    found = grade(hand_in(tmp_path, "01", "scores", text))
    assert (found.points, found.most) == (0, 10) and why(found) == "the region is empty"


def test_a_task_that_was_not_handed_in_counts(tmp_path):
    found = grade(hand_in(tmp_path, "01", "scores", ""), tasks=("01.1", "01.2"))
    assert (found.points, found.most) == (0, 20) and found.tasks[1].criteria[0].said == "nothing was handed in"


def test_a_task_that_is_named_twice_counts_once(tmp_path):
    found = grade(hand_in(tmp_path, "01", "scores", own("scores")), tasks=("01.1", "01.1"))
    assert found.points == found.most == 10


def test_a_lean_task_asks_for_no_bank_conflicts_at_other_head_dimensions_too(tmp_path):
    assert draw(find("11"), 5).D != 32
    plain = own("swizzle", "11").replace("(chunk ^ row", "(d == 32 ? chunk : chunk ^ row")
    (found,) = grade(hand_in(tmp_path, "11", "swizzle", plain), seed=5).tasks
    assert found.points == 9 and found.criteria[2].points == 0, str(found)


def test_a_whole_rung_is_tried_at_every_head_dimension(tmp_path):
    assert draw(find("04"), 0).D != 32
    barrier = "  __syncthreads(); // Q_smem and the first slabs"
    text = own("kernel", "04")
    assert text.count(barrier) == 1
    racy = text.replace(barrier, f"  __shared__ volatile int n;\n  if (d == 32) n = threadIdx.x;\n{barrier}")
    (found,) = grade(hand_in(tmp_path, "04", "kernel", racy)).tasks
    assert found.criteria[0].points == 6 and found.criteria[1].points == 0, str(found)


def test_what_is_blank_counts_only_where_nothing_is_filled_in(tmp_path):
    found = grade(in_cells(tmp_path, "%%region 01 scores\n// type here", "%%region 01 output\nemu::x"))
    assert [each.task for each in found.tasks] == ["01.3"]


@pytest.mark.parametrize("head", ["%%region 04 online_update epilogue -> mine", "%%region 04 epilog"])
def test_a_cell_that_is_no_task_is_named_where_nothing_or_a_blank_form_was_handed_in(tmp_path, head):
    path = in_cells(tmp_path, f"{head}\nint x;", "%%region 01 scores\n", "%%region 01 output\nemu::x")
    blank, missing, filled = grade(path, tasks=("01.1", "04.1", "01.3")).tasks
    assert missing.criteria[0].said == f"nothing was handed in: `{head}` is no task"
    assert blank.criteria[0].said == f"the region is empty: `{head}` is no task"
    assert head not in filled.criteria[0].said


def test_files_of_a_folder_that_hold_no_answer_are_named_each_with_its_reason(tmp_path):
    hand_in(tmp_path, "01", "scores", "")
    given = {"a.CU": "S[0] = 1.f;", "b.ipynb": '{"cells": [', "c/d.ipynb": '{"cells": []}', "e.zip": "PK", "f.txt": ""}
    (tmp_path / "c").mkdir()
    for name, text in given.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "g.cu").write_text("// region: 01 output\n", "utf-16")
    (tmp_path / "h.cu").write_text("// Anna\n// region: 01 outputs\n")
    (tmp_path / "i.ipynb").write_text(" " * (LARGEST + 1))
    whys = """a.CU: its first line has to be `// region: RUNG REGION`; b.ipynb: it can't be read as a notebook;
        c/d.ipynb: no cell begins with %%region; e.zip: a submission is a `.cu` file, a notebook or a folder of these;
        g.cu: it is not in UTF-8; h.cu: `// region: 01 outputs` is no task; i.ipynb: it has more than 8 MiB"""
    for task in grade(tmp_path, tasks=("01.1", "04.1")).tasks:
        assert task.criteria[0].said.partition(": ")[2] == " ".join(whys.split())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="it holds no answer: there is no `.cu` file or notebook in it"):
        grade(tmp_path / "none")


def test_the_seed_is_not_in_what_students_get(tmp_path, capsys):
    file, results = hand_in(tmp_path, "01", "scores", ""), tmp_path / "results.json"
    commands.main(["grade", str(file), "--seed", "86420", "--gradescope", str(results)])
    told = capsys.readouterr()
    assert "86420" not in told.out + results.read_text() and "seed 86420" in told.err


def test_a_compile_error_is_told_with_the_line_of_the_file(tmp_path):
    file = hand_in(tmp_path, "01", "scores", own("scores").replace("float s = 0.f;", "float s = zero;"))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "zero" in text)
    found = grade(file)
    assert found.points == 0 and re.search(rf"does not compile: {file.name}:{line}:\d+: error: .zero.", why(found))


def test_a_wrong_answer_gets_little_and_a_slow_one_less_than_all(tmp_path):
    wrong = own("output").replace("j < a.Nk", "j < a.Nk - 1")
    found = grade(hand_in(tmp_path, "01", "output", wrong))
    assert found.points <= 3 and "wrong: one query, one key" in why(found)
    again = "for (int j = 0; j < a.Nk; ++j) before += P[j] * V[j * a.V_stride[2] + c];"
    start = f"float before = 0.f;\n  {again}\n  float o = before == 12345.f ? 1.f : 0.f;"
    twice = own("output").replace("float o = 0.f;", start)
    found = grade(hand_in(tmp_path, "01", "output", twice))
    moved = found.tasks[0].criteria[-1]
    assert found.tasks[0].criteria[0].points == 6 and moved.points < moved.most


@pytest.mark.parametrize(("right", "correct"), [(0, 0), (5, 1), (9, 2)])
def test_a_wrong_answer_gets_a_share_of_three_points_for_its_right_cases_alone(right, correct):
    assert by_criterion("01.1", right) == [correct, 0, 0, 0]


@pytest.mark.parametrize(("times", "each"), [(1.02, 1), (1.03, 0.5), (2, 0.5), (2.01, 0)])
def test_either_memory_counts_in_full_up_to_the_rungs_costs_and_half_up_to_twice_them(times, each):
    assert by_criterion("01.1", times=times) == [6, 2, each, each]


def test_an_error_of_up_to_two_budgets_is_right():
    case = tile()
    (o, lse), (exact, _) = case.baseline(), case.exact()
    budget = compare(case, (o, lse))[0].budget
    assert [judged(case, ((exact + x * budget).float(), lse)).correct for x in (1.5, 2.5)] == [True, False]


def test_a_launch_in_another_order_that_is_missing_is_wrong():
    assert [judged(tile(), expected=launches).correct for launches in (1, 2)] == [True, False]


def test_inputs_that_a_launch_changes_make_it_wrong(monkeypatch):
    (job,) = judge.jobs([case := tile()])
    monkeypatch.setattr(Launcher, "share_build", lambda self: None)
    monkeypatch.setattr(Launcher, "launch", lambda self, call: case.q.add_(1))
    assert judge.one(Launcher(find("01")), replace(job, traced=False)).error == "changed its inputs"


@pytest.mark.parametrize(("read", "idle"), [(0, ("K",)), (99, ("K",)), (100, ())])
def test_threads_that_read_less_than_an_eighth_of_a_tensor_have_left_it_alone(read, idle):
    assert judged(tile(), rungs=judge.Costs(0, 0, {"K": (800, 0)}), bytes={"K": (read, 0)}).idle == idle
    often = judge.Costs(0, 0, {"K": (80_000, 0)}, {"K": 800})  # a rung that reads it a hundred times
    assert judged(tile(), rungs=often, bytes={"K": (read, 0)}).idle == idle


@pytest.mark.parametrize(("n", "name"), list(enumerate(["dQ", "dK", "dV"])))
def test_deterministic_asks_for_the_same_bits_in_another_order_of_threads(n, name):
    q, k, v, do = torch.randn(4, 1, 1, 16, 32)
    asked = Case("a tile", q, k, v, do=do, deterministic=True)
    assert [job.schedule for job in judge.jobs([asked])] == [0, judge.ANOTHER]
    assert [job.schedule for job in judge.jobs([replace(asked, deterministic=False)])] == [0]
    first, same, nearly = (tuple(x.clone() for x in asked.baseline()) for _ in range(3))
    nearly[n].view(torch.int32)[0, 0, 0, 0] ^= 1
    for second, right in ((same, True), (nearly, False)):
        runs = [judge.Run(0, schedule, outputs) for schedule, outputs in enumerate((first, second))]
        found = judge.judge([asked], runs, 2, FREE)
        assert found.correct == right and (f"{name} has other bits" in found.wrong) != right
        assert judge.judge([replace(asked, deterministic=False)], runs, 2, FREE).correct


def test_a_case_runs_in_two_other_orders_of_threads_drawn_from_the_seed(monkeypatch):
    monkeypatch.setattr(judge, "own", lambda *_: ([tile()], FREE))
    first, again, other = ([job.schedule for job in grading._jobs(assignment("01.1"), seed)] for seed in (1, 1, 2))
    assert first[0] == 0 and len({*first}) == 3 and first == again != other


def test_the_worker_is_told_the_limits_and_a_lean_tasks_own_inputs(tmp_path, monkeypatch):
    told = {}

    def confined(folder: Path, seconds: float) -> bool:
        told.update(json.loads((folder / "work.json").read_text()))
        return True

    monkeypatch.setattr(judge, "own", lambda *_: ([tile()], FREE))
    monkeypatch.setattr(grading, "_confined", confined)
    for region in ("swizzle", "fragments"):  # the first is lean
        hand_in(tmp_path, "11", region, own(region, "11"))
    grade(tmp_path, patience=Patience(launch=1, task=2, processor=3, submission=4))
    assert len({each["inputs"] for each in told["sources"]}) == len(told["sources"]) == 2
    assert {(each["seconds"], each["total"], each["processor"]) for each in told["sources"]} == {(1, 2, 3)}
    assert told["limits"]["seconds"] == 4


@pytest.mark.parametrize(("new", "points"), [("if (column == 0) a.LSE[", 10), ("a.LSE[", 7.5)])
def test_a_merge_is_graded_in_place_too(tmp_path, new, points):
    """Where every lane writes LSE over LSE_a, which one has read: a race, and more bytes."""
    text = own("merge", "50").replace("if (column == 0) a.LSE[", new)
    found = grade(hand_in(tmp_path, "50", "merge", text), seed=5)
    said = {c.name: c.said for c in found.tasks[0].criteria}
    assert found.points == points and ("reads LSE_a" in said["no races, no findings"]) == (points < 10), str(found)


def test_gradescopes_results_and_the_command_line(tmp_path, capsys):
    file, results = hand_in(tmp_path, "01", "scores", ""), tmp_path / "results.json"
    assert commands.main(["grade", str(file), "--json", "--gradescope", str(results)]) == 1
    said = json.loads(capsys.readouterr().out)
    made = json.loads(results.read_text())
    assert made["score"] == said["points"] == 0 and sum(test["max_score"] for test in made["tests"]) == 10
    # https://gradescope-autograders.readthedocs.io/en/latest/specs/, "Output format"
    every = {
        "score",
        "execution_time",
        "output",
        "visibility",
        "stdout_visibility",
        "extra_data",
        "tests",
        "leaderboard",
    }
    each = {"score", "max_score", "name", "number", "output", "tags", "visibility", "extra_data"}
    assert set(made) <= every and all(set(test) <= each for test in made["tests"])
    assert {test["visibility"] for test in made["tests"]} <= {"hidden", "after_due_date", "after_published", "visible"}
    assert all(isinstance(test["score"], int | float) and isinstance(test["output"], str) for test in made["tests"])
    assert made["score"] == sum(test["score"] for test in made["tests"])


# Attacks

HEADERS = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <unistd.h>\n#include <signal.h>\n#include <sys/socket.h>\n#include <sys/stat.h>"
TOO_LONG, HARMLESS = "took too long|took longer than 2 seconds", "tried to start a program, to fork"
ATTACKS = {
    "an endless loop in the launcher": ("for (volatile int i = 0;; i = i + 1) {}", TOO_LONG),
    "a fork bomb": ("for (;;) fork();", HARMLESS),
    "a program": ('if (system("touch stolen")) return cudaErrorInvalidValue;', HARMLESS),
    "a program in its place": ('execl("/bin/true", "true", nullptr);', HARMLESS),
    "a connection": ("socket(AF_INET, SOCK_DGRAM, 0);", HARMLESS),
    "a signal to the grader": ("kill(getppid(), SIGKILL);", HARMLESS),
    "100 GB": ("void *p = malloc(100ull << 30); memset(p, 1, 100ull << 30);", "crashed|illegal address|memory"),
    "it ends early": ("_exit(0);", "calls _exit|ended before"),
    "it ends as the grader would, and a folder is where its end was noted": (
        'mkdir("01.9/ended.json", 0700); mkdir("01.9.json", 0700); _exit(1);',
        "calls _exit|ended before",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_gets_nothing_and_the_grader_lives(tmp_path, attack, sandbox_alone):
    code, said = ATTACKS[attack]
    code = code.replace("touch stolen", f"touch {tmp_path}/stolen")
    patience = ENDLESS if said == TOO_LONG else SHORT
    found = grade(hand_in(tmp_path, "01", "kernel", whole(code, before=HEADERS)), patience=patience)
    assert found.points == 0 and re.search(said, why(found)), why(found)
    assert not list(tmp_path.rglob("stolen"))


@pytest.mark.always  # of attacks by host code
def test_what_runs_when_a_library_is_loaded_is_confined_too(tmp_path, sandbox_alone):
    constructor = '__attribute__((constructor)) static void first() { system("touch STOLEN"); }'.replace(
        "STOLEN", f"{tmp_path}/stolen"
    )
    found = grade(hand_in(tmp_path, "01", "kernel", whole(before=HEADERS, after=constructor)), patience=SHORT)
    assert found.points == 0 and HARMLESS in why(found)
    assert not (tmp_path / "stolen").exists()


def test_an_endless_loop_in_a_kernel_ends(tmp_path):
    endless = own("scores").replace("float s = 0.f;", "float s = 0.f;\n  while (q[0] == q[0]) s += k[0];")
    found = grade(hand_in(tmp_path, "01", "scores", endless), patience=ENDLESS)
    assert found.points == 0 and re.search(r"stopped at 01_scores.cu:\d+: it took longer than 2 seconds\n", why(found))


def test_others_folders_and_the_answer_key_can_not_be_read(tmp_path, sandbox_alone):
    (tmp_path / "alice").mkdir()
    other = hand_in(tmp_path / "alice", "01", "kernel", whole())
    folder = tmp_path / "bob"
    folder.mkdir()
    secrets = [other, KERNELS / "01_naive.cu", Path("/etc/passwd")]
    tried = " && ".join(f'!fopen("{secret}", "r")' for secret in secrets)  # right only where one of them can be opened
    written = f'FILE *mark = fopen("{tmp_path}/mark", "w");'
    opened = f"{written} if (!mark && {tried}) return cudaErrorUnknown;"
    found = grade(hand_in(folder, "01", "kernel", whole(opened, before=HEADERS)), patience=SHORT)
    assert found.points == 0 and "cudaErrorUnknown" in why(found) and not (tmp_path / "mark").exists()
    found = grade(hand_in(folder, "01", "kernel", f'#include "{KERNELS / "01_naive.cu"}"'), patience=SHORT)
    assert found.points == 0 and "does not compile" in why(found)


@pytest.mark.always  # of attacks by a kernel
def test_memory_that_is_not_the_kernels_can_not_be_read(tmp_path):
    """The reference is in another process; here there are only inputs, and what lies beside them."""
    reads = own("scores").replace("a.scale * s;", "a.scale * s + q[-20000];")
    found = grade(hand_in(tmp_path, "01", "scores", reads), patience=SHORT)
    assert found.points == 0 and "out of bounds" in why(found)


# The tensors themselves, or copies in the host's memory.
SAME = """
  const float *Q = (const float *)a.Q, *K = (const float *)a.K, *V = (const float *)a.V;
  float *O = (float *)a.O, *LSE = a.LSE;
"""
COPIES = """
  auto copy = [&](const void *from, const int64_t *stride, int n) {
    std::vector<float> to((a.B - 1) * stride[0] + (a.H - 1) * stride[1] + (n - 1) * stride[2] + a.D);
    cudaMemcpy(to.data(), from, 4 * to.size(), cudaMemcpyDeviceToHost);
    return to;
  };
  auto Q = copy(a.Q, a.Q_stride, a.Nq), K = copy(a.K, a.K_stride, a.Nk), V = copy(a.V, a.V_stride, a.Nk), O = copy(a.O, a.O_stride, a.Nq);
  std::vector<float> LSE(a.B * a.H * a.Nq);
"""
BACK = """
  cudaMemcpy(a.O, O.data(), 4 * O.size(), cudaMemcpyHostToDevice);
  cudaMemcpy(a.LSE, LSE.data(), 4 * LSE.size(), cudaMemcpyHostToDevice);
"""
HOST = """
  for (int64_t b = 0; b < a.B; ++b) for (int64_t h = 0; h < a.H; ++h) for (int i = 0; i < a.Nq; ++i) {
    double m = -1e300, l = 0; std::vector<double> p(a.Nk), o(a.D);
    for (int j = 0; j < a.Nk; ++j) { p[j] = 0; for (int c = 0; c < a.D; ++c)
      p[j] += double(Q[b * a.Q_stride[0] + h * a.Q_stride[1] + i * a.Q_stride[2] + c]) * K[b * a.K_stride[0] + h * a.K_stride[1] + j * a.K_stride[2] + c];
      p[j] *= a.scale; m = p[j] > m ? p[j] : m; }
    for (int j = 0; j < a.Nk; ++j) { p[j] = exp(p[j] - m), l += p[j];
      for (int c = 0; c < a.D; ++c) o[c] += p[j] * V[b * a.V_stride[0] + h * a.V_stride[1] + j * a.V_stride[2] + c]; }
    for (int c = 0; c < a.D; ++c) O[b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2] + c] = l > 0 ? o[c] / l : 0;
    LSE[(b * a.H + h) * a.Nq + i] = m + log(l);
  }
"""
# Reads the inputs about as often as rung 01 and writes every element of the outputs, but not what belongs there.
TOUCH = """
__global__ void touch(const fa_args a) {
  for (int64_t b = 0; b < a.B; ++b) for (int64_t h = 0; h < a.H; ++h) for (int i = threadIdx.x; i < a.Nq; i += 32) {
    float s = 0;
    for (int r = 0; r < a.Nk; ++r) for (int c = 0; c < a.D; ++c)
      s += ((const float *)a.Q)[b * a.Q_stride[0] + h * a.Q_stride[1] + i * a.Q_stride[2] + c] +
           ((const float *)a.K)[b * a.K_stride[0] + h * a.K_stride[1] + r * a.K_stride[2] + c] +
           ((const float *)a.V)[b * a.V_stride[0] + h * a.V_stride[1] + r * a.V_stride[2] + c];
    for (int c = 0; c < a.D; ++c) ((float *)a.O)[b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2] + c] = s;
    a.LSE[(b * a.H + h) * a.Nq + i] = s;
  }
}
"""


def by_the_host(copied: bool, touched: bool) -> str:
    """Rung 01 computed by its launcher: on copies of the tensors, and behind a kernel that touches them, perhaps."""
    before, launched = (TOUCH, "  touch<<<1, 32, 0, stream>>>(a);\n") if touched else ("", "")
    work = f"{COPIES}{HOST}{BACK}" if copied else f"{SAME}{HOST}"
    headers = "#include <fa/args.cuh>\n#include <fa/launch.cuh>\n#include <cmath>\n#include <vector>"
    opened = 'extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {\n  const fa_args &a = *args;'
    return f"{headers}\n{before}{opened}\n{launched}{work}  return cudaGetLastError();\n}}"


@pytest.mark.parametrize("touched", [False, True])
def test_the_host_can_not_touch_the_tensors(tmp_path, touched):
    found = grade(hand_in(tmp_path, "01", "kernel", by_the_host(copied=False, touched=touched)), seed=5)
    assert found.points == 0 and "fa_launch reads 4 bytes of Q, which is the GPU's" in why(found)


def test_the_host_can_not_do_the_work_alone(tmp_path):
    """Of tensors that no kernel has touched, it is noticed."""
    found = grade(hand_in(tmp_path, "01", "kernel", by_the_host(copied=True, touched=False)), seed=5)
    assert found.points == 0, str(found)


def test_the_host_can_do_the_work_on_copies_behind_a_kernel_that_touches_the_tensors(tmp_path):
    """A known limit, which `allowed` describes: the launcher of a whole rung has to be read."""
    found = grade(hand_in(tmp_path, "01", "kernel", by_the_host(copied=True, touched=True)), seed=5)
    assert found.points == found.most == 10, str(found)
    assert "read the launcher" in " ".join(allowed.__doc__.split())


# Counts, which are taken in the kernel's own process

FORGED = {
    "a load that isn't counted": (
        "scores",
        "auto peek = [] (const float *p) __attribute__((no_sanitize_thread)) { return *p; };\n",
        "`__attribute__` can't be graded",
    ),
    "another attribute": ("scores", "[[gnu::no_sanitize(\"thread\")]] int x;\n", "can't be graded"),
    "the same with a blank between the brackets": ("scores", "[ [gnu::no_sanitize(\"thread\")] ] int x;\n", "`[ [` can't be graded"),
    "the same with brackets from macros": ("kernel", "#define A [\n#define B [\nA B gnu::no_sanitize(\"thread\")]] int f();\n", "`gnu` can't be graded"),
    "a load that the compiler doesn't announce": (
        "kernel",
        "#include <xmmintrin.h>\n__m128 peek(const float *p) { return _mm_loadl_pi(_mm_setzero_ps(), (const __m64 *)p); }\n",
        "`_mm_loadl_pi` can't be graded",
    ),
    "an attribute between the marks of numbers": (
        "scores",
        "int a = 1'0; auto peek = [] (const float *p) __attribute__((no_sanitize_thread)) { return *p; }; int b = 1'0;\n",
        "`__attribute__` can't be graded",
    ),
    "the emulator by its name": ("scores", "emu::thread_index();\n", "`emu` can't be graded"),
    "checks that do nothing": ("kernel", 'extern "C" void __tsan_read4(void *) {}\n', "can't be graded"),
    "the same, pasted": ("kernel", "#define CAT(a, b) a##b\nvoid CAT(__ts, an_read4)(void *) {}\n", "can't be graded"),
    "the host's own assembly": ("kernel", '#define A asm\nint f() { A("nop"); return 0; }\n', "can't be graded"),
    "the counters by name": ("kernel", 'extern "C" void emu_counters(void *);\n', "can't be graded"),
    "other results in the file": ("kernel", "#include <cstdio>\nint f() { fclose(fopen(\"0.json\", \"w\")); return 0; }\n", "uses `fclose`"),
    "a thread that waits": ("kernel", "#include <thread>\nint f() { std::thread([] {}).detach(); return 0; }\n", "it uses `"),
    "dlsym": ("kernel", '#include <dlfcn.h>\nint f() { return dlsym(nullptr, "x") != nullptr; }\n', "it uses `dlsym`"),
    "memory that nobody watches": ("kernel", "#include <cstring>\nchar *(*volatile copy)(char *, const char *, size_t) = strncpy;\n", "it uses `strncpy`"),
    "printf's %n": ("scores", '__device__ void say(int *n) { printf("%n", n); }\n', "`printf` can't be graded"),
}  # fmt: skip


@pytest.mark.parametrize("attack", FORGED)
def test_counts_can_not_be_forged_by_what_is_known(tmp_path, attack):
    region, code, said = FORGED[attack]
    found = grade(hand_in(tmp_path, "01", region, code + own(region)), patience=SHORT)
    assert found.points == 0 and said in why(found), why(found)


@pytest.mark.parametrize(
    "text", ["// emu::x", 'const char *s = "__attribute__ ## extern";', "float emulated = 1; // ##"]
)
def test_what_is_quoted_or_said_in_a_comment_is_no_attack(text):
    assert not allowed.unfit(regions.Typed("", text))


def test_a_block_of_extern_C_is_refused_with_its_own_reason():
    launcher = "cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) { return cudaSuccess; }"
    refused = allowed.unfit(regions.Typed(regions.WHOLE, f'extern "C" {{\n{launcher}\n}}'))
    assert '`extern "C" {` can\'t be graded: blocks of extern "C", which belongs before fa_launch itself' in refused
    assert not allowed.unfit(regions.Typed(regions.WHOLE, f'extern "C" {launcher}'))


def test_a_macro_of_several_lines_is_read_as_one():
    text = "int a;\n#define ODD(x) \\\n  do { \\\n    asm(x); \\\n  } while (0)\n"
    assert "cell:3: " in allowed.unfit(regions.Typed(regions.WHOLE, text))
    assert not allowed.unfit(regions.Typed(regions.WHOLE, text.replace("asm", "abs")))


def test_nothing_that_a_rung_says_or_calls_is_refused():
    for stem in ("01", "04", "13", "22", "32", "50"):  # what the others call, these do
        assert not [name for name in regions.names(stem) if allowed.unfit(regions.Typed(name, own(name, stem)))]
        (library,) = Launcher(instance(find(stem), 64, find(stem).dtypes[-1])).compile_traced()
        assert not allowed.strange(library.path)


def test_what_the_compiler_calls_for_bits_and_wide_integers_is_not_refused(tmp_path):
    """Where the machine has no instruction for it: __popc, __popcll, and division of 128 bits."""
    counts = "__popc(threadIdx.x) == __popcll(threadIdx.x) && __int128(a.Nk) / a.Nq >= 0 && (unsigned __int128)a.Nk % a.Nq >= 0"
    text = own("scores").replace("float s = 0.f;", f"float s = {counts} ? 0.f : 1.f;")
    typed = regions.Typed("scores", text)
    launcher = Launcher(instance(regions.fill("01", {"scores": typed}).rung, 64, "fp32"))
    (library,) = launcher.compile_traced()
    assert not allowed.unfit(typed) and not allowed.strange(library.path)


@pytest.mark.always  # of attacks by what is handed in
def test_python_in_a_notebook_is_not_executed(tmp_path):
    patches = (
        "import helpers.lessons.judge as judge, helpers.lessons.exercise as exercise\n"
        "exercise.verify = lambda *a, **k: True\njudge.judge = lambda *a: None\nopen('mark', 'w').write('here')"
    )
    path = in_cells(tmp_path, patches, "%%region 01 scores\n// nothing", "lse_holds = lambda f: f is right")
    assert grade(path).points == 0 and not (tmp_path / "mark").exists() and not Path("mark").exists()


def test_a_notebooks_answer_is_its_last_cell_on_a_task(tmp_path):
    right = f"%%region 01_naive scores -> mine\n{own('scores')}"
    found = grade(in_cells(tmp_path, "%%region 01 scores\nwrong", right, "x = 1"))
    assert found.points == found.most == 10


def test_a_blank_form_does_not_replace_a_filled_one(tmp_path):
    worked = in_cells(tmp_path, "%%region 01 scores\nfloat s;", "%%region 01 scores -> mine\n// type here")
    assert answers(worked)["01.1"].bodies["scores"].text == "float s;"
    worked.rename(tmp_path / "01-Copy1.ipynb")
    (tmp_path / "case_06-Copy1.cu").write_text(detective.page(6).replace("// line:", "// line: 7"))
    in_cells(tmp_path, "%%region 01 scores -> mine\n"), case_file(tmp_path, 6)
    found = answers(tmp_path)
    assert found["01.1"].bodies["scores"].text == "float s;" and found["case.6"].diagnosis == (7, "")


def test_blank_lines_above_an_answer_are_no_trouble_and_count(tmp_path):
    cell = answers(in_cells(tmp_path, "\n  \n%%region 01 scores\nfloat s;"))["01.1"].bodies["scores"]
    assert (cell.text, cell.line) == ("float s;", 4)
    form = hand_in(tmp_path, "01", "scores", "float s;")
    line = answers(form)["01.1"].bodies["scores"].line
    form.write_text(f"\n\n{form.read_text()}")
    assert answers(form)["01.1"].bodies["scores"].line == line + 2


def test_a_name_above_a_form_and_line_ends_of_windows_are_no_trouble(tmp_path):
    form, cell = hand_in(tmp_path, "01", "scores", "float s;"), "%%region 01 scores -> mine\r\nfloat s;\r\n"
    form.write_text(f"// Anna Smith\n{form.read_text()}")
    for file in (form, in_cells(tmp_path, cell)):
        assert answers(file)["01.1"].bodies["scores"].text == "float s;"


def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path):
    form, case = hand_in(tmp_path, "01", "scores", "float s;"), case_file(tmp_path, 6)
    cells = in_cells(tmp_path, "%%region 01 output\nfloat o;")
    for file in (form, case, cells):
        file.rename(file.with_suffix(file.suffix.upper()))
    assert answers(tmp_path).keys() == {"01.1", "01.3", "case.6"}


def test_a_byte_order_mark_is_no_part_of_an_answer(tmp_path):
    for file in (in_cells(tmp_path, "%%region 01 scores\nfloat s;"), hand_in(tmp_path, "01", "scores", "float s;")):
        file.write_text(file.read_text(), "utf-8-sig")
        assert answers(file)["01.1"].bodies["scores"].text == "float s;"


def test_a_link_to_somebody_elses_answer_is_no_answer(tmp_path):
    other = hand_in(tmp_path, "01", "scores", own("scores"))
    folder = tmp_path / "bob"
    folder.mkdir()
    os.symlink(other, folder / "mine.cu")
    assert grade(folder, tasks=("01.1",)).points == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("} int x = 0; {", "closes what was opened outside"),
        ("#include <cstdlib>", "has no place in the region"),
        ("/* open", "a comment that doesn't end"),
        ("int x = 0; \\\n}", "has no place in a region"),
        ('auto s = R"(})";', "has no place in a region"),
        ("int x = 1'0; } { int y = 1'0;", "closes what was opened outside"),
    ],
)
def test_what_reaches_past_its_region_is_refused(tmp_path, typed, said):
    found = grade(hand_in(tmp_path, "04", "online_update", typed))
    assert found.points == 0 and said in why(found)


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"\xff\xfe\x00", b"[1, 2]", b'{"cells": 3}', b"[" * 100_000, b"// region:\n", b"// region: ../x y\n"],
)
@pytest.mark.parametrize("suffix", [".cu", ".ipynb"])
def test_rubbish_is_no_answer(tmp_path, rubbish, suffix):
    file = tmp_path / f"mine{suffix}"
    file.write_bytes(rubbish)
    assert grade(file, tasks=("01.1",)).points == 0


def test_a_whole_kernel_may_open_with_a_comment_and_can_not_change_the_header_block(tmp_path):
    opening = "// plan: as the rung does it\n// D: 7\n// op: softmax\n"
    found = grade(in_cells(tmp_path, f"%%region 01 kernel -> mine\n{opening}{own('kernel')}"))
    assert found.points == found.most == 10, str(found)


@pytest.mark.parametrize("end", ["\u2028", "\x0c", "\x85", "\r"])
def test_nothing_hides_behind_a_comment_that_ends_in_another_way(tmp_path, end):
    hidden = f"// x{end}__attribute__((no_sanitize_thread)) int f();\n"
    found = grade(in_cells(tmp_path, f"%%region 01 scores -> mine\n{hidden}{own('scores')}"), patience=SHORT)
    assert found.points == 0 and "`__attribute__` can't be graded" in why(found)


@pytest.mark.parametrize(
    "text",
    [
        "// case: 6\n// line: \u00b2\n",
        "// case: 6\n// line: " + "9" * 5000,
        "// case: " + "9" * 5000 + "\n// line: 1\n",
    ],
)
def test_numbers_that_are_none_are_no_diagnosis(tmp_path, text):
    (tmp_path / "case.cu").write_text(text)
    assert grade(tmp_path, tasks=("case.6",)).points == 0


def test_halves_of_letters_and_names_without_end_are_no_trouble(tmp_path):
    cells = [f"%%region 01 scores -> mine\n// \ud800\n{own('scores')}", f"%%region {'a' * 5000}.cu kernel\nint x;"]
    cells += [f"%%region 01 output{' ' * 500_000}x\n", "\n" * 500_000, "//\n" * 500_000]
    source = [{"cell_type": "code", "source": each} for each in cells]
    (tmp_path / "mine.ipynb").write_text(json.dumps({"cells": source}))
    found = grade(tmp_path)
    assert found.points == found.most == 10


def test_one_submission_that_can_not_be_graded_leaves_the_others_their_points(tmp_path, capsys, monkeypatch):
    def once(path: Path, *rest):
        if path.name == "first":
            raise ZeroDivisionError("by what it holds")
        return grade(path, *rest)

    monkeypatch.setattr("helpers.lessons.grading.grade.grade", once)
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    folders = [str(tmp_path / name) for name in ("first", "missing", "second")]
    assert commands.main(["grade", *folders, "--tasks", "01.1", "--json"]) == 1
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert [line["submission"] for line in lines] == folders  # by the paths: files of several students have one name
    assert "by what it holds" in lines[0]["error"] and (lines[0]["points"], lines[0]["tasks"]) == (0, [])
    assert "error" in lines[1] and "error" not in lines[2]
    assert "first is not graded: ZeroDivisionError: by what it holds" in told.err
    assert re.search(r"missing is not graded: (?!\w+Error)", told.err) and "Error" not in lines[1]["error"]
    assert commands.main(["grade", *folders, "--tasks", "01.77"]) == 2
    said = capsys.readouterr().err
    assert "no task '01.77'; there are 01.1, " in said and said.endswith(f", and case.1 to case.{len(CASES)}\n")


@pytest.mark.parametrize(("correct", "status"), [((6, 6), 0), ((5, 6), 1), ((6, 5), 1)])
def test_submissions_that_all_have_all_points_exit_with_0(monkeypatch, correct, status):
    def graded(path: Path, *rest) -> Grade:
        return Grade(str(path), 0, (Graded("01.1", (Criterion("correct", float(path.name), 6, "said"),)),))

    monkeypatch.setattr(grading, "grade", graded)
    assert commands.main(["grade", *map(str, correct)]) == status


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("form.cu", "\nS[0] = 1.f;\n", "its first line has to be `// region: RUNG REGION`"),
        ("form.cu", "// region: 04 online_updat\n", "`// region: 04 online_updat` is no task"),
        ("broken.ipynb", "{", "it can't be read as a notebook"),
        ("empty.ipynb", '{"cells": []}', "no cell begins with %%region"),
        ("answer.txt", "S[0] = 1.f;\n", "a submission is a `.cu` file, a notebook or a folder of these"),
    ],
)
def test_a_submission_without_an_answer_says_why_and_has_no_full_points(name, text, why, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    results = tmp_path / "results.json"
    assert commands.main(["grade", str(tmp_path / name), "--gradescope", str(results)]) == 1
    told = capsys.readouterr()
    assert not told.out and why in told.err
    assert json.loads(results.read_text())["score"] == 0 and why in json.loads(results.read_text())["output"]
    assert f"nothing was handed in: {why}" in str(grade(tmp_path / name, 0, ["01.1"]))


def test_where_results_can_not_be_written_is_said_before_anything_is_graded(tmp_path, capsys):
    for path, words in ((tmp_path, "it is a folder"), (tmp_path / "no" / "results.json", "there is no folder")):
        assert commands.main(["grade", str(tmp_path / "missing"), "--gradescope", str(path)]) == 2
        assert words in capsys.readouterr().err


# The sandbox itself

CONFINED = """
import sys
from pathlib import Path
from helpers.lessons.grading import sandbox
import errno, os, resource, socket, subprocess, threading
folder = Path(sys.argv[1])
sandbox.confine([Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/lib"), Path("/lib64")], folder / "own", sandbox.Limits())
def refused(what):
    try:
        what()
    except OSError as error:
        return errno.errorcode[error.errno]
    except ValueError:  # resource's word for EPERM
        return "EPERM"
    return "done"
print(refused(lambda: open(folder / "secret")), refused(lambda: open(folder / "own/x", "w")), refused(lambda: open(folder / "x", "w")))
print(refused(lambda: socket.create_connection(("127.0.0.1", 9), 1)))
print(subprocess.run(["cat", str(folder / "secret")], capture_output=True).returncode != 0)
sandbox.lock()
print(refused(lambda: resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))), flush=True)
thread = threading.Thread(target=print, args=("a thread",)); thread.start(); thread.join()
sys.stdout.flush()
os.fork()
print("forked")
"""


@pytest.mark.always
def test_the_sandbox_holds_in_both_steps(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "secret").write_text("secret")
    done = subprocess.run([sys.executable, "-c", CONFINED, str(tmp_path)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "EACCES done EACCES", done.stderr
    assert lines[1] in ("EACCES", "ECONNREFUSED") and lines[2] == "True", lines
    assert lines[3] == "EPERM" and lines[4:] == ["a thread"] and done.returncode == -31, done.stderr


SIGNALLED = """
import ctypes, os, sys, threading
from helpers.lessons.grading import sandbox
sandbox.lock()
libc, own, parent = ctypes.CDLL(None), os.getpid(), os.getppid()
thread = threading.get_native_id()
print(eval(sys.argv[1]), flush=True)
"""
# System calls on x86-64 and aarch64, and their arguments after the number; 0: no signal, only whether one may be sent.
SIGNALS = {
    "tkill": (200, 130, "parent, 0"),
    "tgkill": (234, 131, "parent, parent, 0"),
    "rt_sigqueueinfo": (129, 138, "parent, 0, None"),
    "rt_tgsigqueueinfo": (297, 240, "parent, parent, 0, None"),
    "fcntl": (72, 25, "1, 8, parent"),  # F_SETOWN
}


def after_lock(call: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", SIGNALLED, call], capture_output=True, text=True)


@pytest.mark.parametrize("name", SIGNALS)
def test_nobody_else_is_sent_a_signal(name):
    """By the lock alone: Landlock holds signals only since Linux 6.12."""
    x86, arm, arguments = SIGNALS[name]
    done = after_lock(f"libc.syscall({x86 if platform.machine() == 'x86_64' else arm}, {arguments})")
    assert done.returncode == -signal.SIGSYS and not done.stdout, done.stderr


def test_signals_to_oneself_arrive():
    tgkill = SIGNALS["tgkill"][platform.machine() != "x86_64"]
    assert after_lock(f"libc.syscall({tgkill}, own, thread, 0)").stdout == "0\n"
    assert after_lock("os.abort()").returncode == -signal.SIGABRT


def test_where_there_is_no_sandbox_nothing_is_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="needs a sandbox.*darwin"):
        grade(tmp_path)


def test_a_failure_of_the_grader_is_no_fault_of_the_submission(tmp_path, monkeypatch, capsys):
    file = hand_in(tmp_path, "01", "scores", own("scores"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory for torch >&2\nexit 1\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr("helpers.lessons.grading.grade.sys.executable", str(broken))
        with pytest.raises(RuntimeError, match="the grader's own process failed: no memory for torch"):
            grade(file)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert commands.main(["grade", str(file)]) == 1 and "grading needs nm" in capsys.readouterr().err


# Detective cases


def case_file(folder: Path, n: int, line: str = "", mechanism: str = "", fix: dict[int, str] | None = None) -> Path:
    """A case's file, filled in."""
    page, case = detective.page(n), detective.opened(n)
    if fix:
        page = page.replace(case.rung.source, case.fixed(fix).source)
    page = page.replace("// line:", f"// line: {line}").replace("// mechanism:", f"// mechanism: {mechanism}")
    file = folder / f"case_{n:02d}.cu"
    file.write_text(page)
    return file


@pytest.mark.parametrize(
    ("right_line", "right_name", "fix", "points"),
    [
        (True, True, "right", 10),
        (True, True, "none", 4),  # the diagnosis alone
        (False, False, "right", 6),  # a diff
        (True, False, "right", 8),
        (False, False, "none", 0),
        (True, True, "wrong", 4),
        (True, True, "other kernel", 4),
    ],
)
def test_a_case_is_graded_by_diagnosis_and_fix(tmp_path, capsys, right_line, right_name, fix, points):
    line, mechanism, right = detective.opened(6).solution()
    texts = {"right": right, "none": None, "wrong": {line: "    X_smem[row] = x;"}, "other kernel": right}
    file = case_file(tmp_path, 6, str(line if right_line else 20), mechanism if right_name else "barrier", texts[fix])
    if fix == "other kernel":
        file.write_text(
            (KERNELS / "10_fa2_mma_fp16.cu").read_text() + file.read_text().partition("[end: launcher]\n")[2]
        )
    found = grade(file, seed=1, patience=SHORT)
    assert found.points == points and found.most == 10, str(found)
    assert [each.task for each in found.tasks] == ["case.6"]
    assert {c.name for c in found.tasks[0].criteria} == {"line", "mechanism", "fixed"}


def test_a_case_that_is_right_and_races_is_not_fixed():
    assert [by_criterion("case.6", findings=findings)[-1] for findings in ((), ("a race",))] == [6, 0]


@pytest.mark.parametrize(
    ("line", "mechanism", "said"),
    [
        ("", "", ["no line was given", "no mechanism was given"]),
        ("20", "barrier", ["line 20: it is another one", "mechanism barrier: it is another one"]),
        ("line 20", "bariere", ["line 20: it is another one", "mechanism bariere: there is none of this name"]),
    ],
)
def test_a_wrong_diagnosis_says_what_is_wrong_with_it(tmp_path, line, mechanism, said):
    answer = answers(case_file(tmp_path, 6, line, mechanism))["case.6"]
    assert [each.said for each in assignment("case.6").nothing("", answer)][:2] == said


def test_a_case_hides_no_words_in_a_raw_string(tmp_path):
    file = case_file(tmp_path, 6, *map(str, detective.opened(6).solution()[:2]))
    hidden = 'static auto s = R"(")"; int f() __attribute__((no_sanitize_thread)); static auto t = "";\n'
    file.write_text(file.read_text().replace("// case:", f"{hidden}// case:"))
    found = grade(file, seed=1, patience=SHORT)
    assert found.points == 4 and "has no place in a region" in found.tasks[0].criteria[-1].said


def test_a_case_that_was_not_handed_in_is_worth_nothing(tmp_path):
    found = grade(hand_in(tmp_path, "01", "output", own("output")), tasks=["case.6"], patience=SHORT)
    assert (found.points, found.most) == (0, 10)
    with pytest.raises(KeyError, match="no case"):
        grade(tmp_path, tasks=["case.77"])
