"""Region tasks: each is whole, its rung's own text is the solution, and plausible wrong answers to it fail."""

from dataclasses import replace
from types import SimpleNamespace

import executed
import pytest
import torch
import wrong

from helpers import check, load, rungs
from helpers import rung as find
from helpers.ladder.contract import TORCH_NAMES
from helpers.lessons import forms, judge, typed
from helpers.lessons.grading import assignments
from helpers.lessons.inputs import ELSEWHERE, draw, instance
from helpers.lessons.regions import WHOLE, Typed, body, fill, names
from helpers.lessons.tasks.catalogue import about, of_rung, task, tasks
from helpers.lessons.tasks.task import LEVELS
from helpers.run.reference import cases as every

SEED, SHARE = 1, 6  # wrong answers of a run; --all runs every one
KERNELS = [rung.stem for rung in rungs()]
LEANEST = {"11.1": "no swizzle"}  # wrong by its bank conflicts alone
FIRST, LAST = "a.causal ? max(i0 + shift - window + 1, 0) / Bc * Bc : 0", "last_key < 0 ? -Bc : last_key / Bc * Bc"
O_AT, DO_AT = (f"b * a.{x}_stride[0] + h * a.{x}_stride[1] + i * a.{x}_stride[2]" for x in ("O", "dO"))
M_NEW = "m_finite = m_new == -FA_INFINITY ? 0.f : m_new;"
ONE_KIND = {  # of calls in which an edit of a rung is wrong: the rung, what stands once in it, what replaces it, their cases
    "O contiguous": ("30", O_AT, "(int64_t(b * a.H + h) * a.Nq + i) * d", "strided"),
    "dO where O lies": ("22", DO_AT, O_AT, "strided"),
    "rows of dQ behind each other": ("23", "dQ + i * a.dQ_stride[2] + col", "dQ + i * d + col", "strided"),
    "m of -inf": ("04", M_NEW, "m_finite = m_new;", "keys of -inf"),
    "l of 0": ("12", "l_inv = l > 0.f ? 1.f / l : 0.f;", "l_inv = 1.f / l;", "keys of -inf"),
}
NEEDLESS = {  # right answers to 20.1 but for the tiles that they read in vain
    "all tiles": ((LAST, "(Nk - 1) / Bc * Bc"), (FIRST, "0")),
    "those before the window": ((FIRST, "0"),),
    "one for queries that see nothing": ((LAST, "last_key / Bc * Bc"),),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "answer" in metafunc.fixturenames:
        option = metafunc.config.option
        every = [
            (id, name) for id in tasks() for name in wrong.answers(tasks()[id]) if WHOLE not in tasks()[id].regions
        ]
        chosen = every if option.all else executed.drawn(every, option.seed, SHARE)
        metafunc.parametrize("answer", chosen, ids=[f"{id} {name}" for id, name in chosen])


@pytest.mark.parametrize("stem", KERNELS)
def test_every_rung_has_tasks_from_one_loop_to_the_whole_kernel(stem):
    of = of_rung(stem)
    assert len(of) >= (4 if stem < "14" else 3) and [each.regions for each in of].count((WHOLE,)) == 1
    assert min(each.level for each in of) <= 2 and of[-1].level == 4 == max(LEVELS)


@pytest.mark.parametrize("id", tasks())
def test_a_task_has_a_contract_and_hints_and_a_form_without_the_answer(id):
    found = task(id)
    assert found.statement and found.given and found.after and len(found.hints) >= 2
    assert set(found.regions) <= set(names(found.number)) and about(found.number, found.regions) is found
    form = str(forms.blank(found.number, *found.regions))
    assert form.startswith("%%region ") and found.statement[:40] in form
    answer = [
        line.strip()
        for region in found.regions
        for line in body(found.number, region).splitlines()
        if len(line.strip()) > 25
    ]
    assert not [
        line for line in answer if not line.startswith(("//", "#include", "template", "__global__")) and line in form
    ]


@pytest.mark.parametrize("id", tasks())
def test_there_are_wrong_answers_to_each(id):
    assert len(wrong.answers(task(id))) >= wrong.FEWEST


@pytest.mark.sampled
@pytest.mark.parametrize("stem", ["01_naive", "11_swizzled", "30_tma_wgmma", "50_ring"])
@pytest.mark.parametrize("seed", [0, 2])
def test_the_rungs_own_text_is_right(stem, seed):
    cases, costs = judge.own(stem, seed)  # raises if it isn't
    assert len(cases) >= 11 and costs.traffic > 0


def test_a_wrong_answer_fails(answer):
    id, name = answer
    filled = wrong.answers(task(id))[name]
    assert judge.fault(filled.rung, task(id).number, SEED, task(id).lean), f"{name} passes for {id}"


@pytest.mark.parametrize("name", ONE_KIND)
def test_what_is_wrong_in_one_kind_of_call_fails_in_the_notebook_and_in_the_grader(name):
    number, old, new, words = ONE_KIND[name]
    rung, drawn = find(number), draw(find(number), SEED)
    edited = instance(replace(rung, source=rung.replace(old, new)), drawn.D, drawn.dtype)
    of_seed, of_check = ([c for c in cases if c.name.startswith(words)] for cases in (drawn.cases(), every(edited)))
    found = judge.judge(of_seed, judge.observe(edited, judge.jobs(of_seed)), len(of_seed), judge.Costs(0, 0, {}))
    assert of_seed and not found.right
    assert not check(load(edited, device="cpu", quiet=True), of_check).ok


@pytest.mark.parametrize("stem", ["01_naive", "10_fa2_mma_fp16", "22_backward_fp32", "33_backward_wgmma"])
def test_of_strided_tensors_those_of_one_shape_have_different_strides(stem):
    (case,) = (case for case in draw(find(stem), SEED).cases() if case.name.startswith("strided"))
    q, k, v, *of_backward = case.inputs
    of_rows = [
        q,
        *of_backward[::2],
        case.empty_outputs()[0],
    ]  # q, with o and do, and the first output, which lies as o does
    assert len({x.stride() for x in of_rows}) == (3 if of_backward else 2) and k.stride() != v.stride()
    assert not any(x.is_contiguous() for x in (*of_rows, k, v))


IN_PLACE = {"every lane reads LSE": "in place: ", "every lane writes LSE": "race at "}  # wrong there alone


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_wrong_in_place_alone_fails_there(name):
    filled = wrong.answers(task("50.1"))[name]
    assert judge.fault(filled.rung, "50", SEED).startswith(IN_PLACE[name])
    drawn = draw(find("50"), SEED)
    apart = [case for case in drawn.cases() if not case.in_place]
    runs = list(judge.observe(instance(filled.rung, drawn.D, drawn.dtype), judge.jobs(apart)))
    assert judge.judge(apart, runs, len(apart), judge.Costs(0, 0, {})).ok


@pytest.mark.parametrize("seed", range(3))
def test_the_inputs_of_a_merge_have_what_can_go_wrong(seed):
    drawn = draw(find("50"), seed)
    cases, half = drawn.cases(), getattr(torch, TORCH_NAMES[drawn.dtype])
    results = {(c.o_a.dtype, c.o_b.dtype, c.empty_outputs()[0].dtype) for c in cases}
    single = torch.float32
    assert results == {(single,) * 3} | {(a, half, o) for a in (single, half) for o in (single, half)}
    empty = {(bool(a), bool(b)) for c in cases for a, b in zip(c.lse_a.isinf().flatten(), c.lse_b.isinf().flatten())}
    assert len(empty) == 4  # a part without a key, the other one, both, neither
    assert max((c.lse_a - c.lse_b).nan_to_num(0, 0, 0).abs().max() for c in cases) > 150
    assert any(c.o_a.stride() != c.o_b.stride() and c.lse_a.stride() != c.lse_b.stride() for c in cases)
    assert {c.in_place and not c.o_a.is_contiguous() for c in cases} == {True, False}
    assert not cases[0].in_place and all(c.lse_a.isfinite().all() for c in cases[:5])  # the easy ones first


def test_a_merge_in_place_leaves_the_inputs_as_they_are_for_the_next_order_of_threads():
    drawn = draw(find("50"), SEED)
    cases = [case for case in drawn.cases() if case.in_place]
    before = [case.exact() for case in cases]
    work = judge.jobs(cases, (0, 5))
    runs = list(judge.observe(drawn.instance, work))
    assert len(work) == 2 * len(cases) and judge.judge(cases, runs, len(work), judge.Costs(0, 0, {})).ok
    assert all(a.equal(b) for case, was in zip(cases, before) for a, b in zip(case.exact(), was))


def test_a_merge_whose_threads_leave_the_parts_alone_is_seen():
    own = judge.own("50", SEED)[1]
    for name in ("O_a", "O_b", "LSE_a", "LSE_b"):
        mine = judge.Costs(0, 0, {**own.bytes, name: (0, 0)})
        assert judge._idle(mine, own, name) and not judge._idle(own, own, name)


ROWSUM_OF_P_DP = """  auto at = [&](const void *x, const int64_t *stride, int head, int row) {
    return static_cast<const float *>(x) + b * stride[0] + head * stride[1] + row * stride[2];
  };
  const float *Q = at(a.Q, a.Q_stride, h, i), lse = a.LSE[(b * a.H + h) * a.Nq + i];
  for (int c = lane; c < d; c += 32) dQ[c] = 0.f;
  for (int j = lane; j < a.Nk; j += 32) {
    const float *K = at(a.K, a.K_stride, h, j), *V = at(a.V, a.V_stride, h, j);
    float s = 0.f, dP = 0.f;
    for (int c = 0; c < d; ++c) s += Q[c] * K[c], dP += dO[c] * V[c];
    delta += expf(a.scale * s - lse) * dP;
  }"""


def test_a_backward_pass_need_not_read_what_it_can_form_again():
    drawn, old = draw(find("22"), SEED), "  for (int c = lane; c < d; c += 32) delta += O[c] * dO[c], dQ[c] = 0.f;"
    cases = [case for case in drawn.cases() if case.name in ("one tile", "whole tiles")]
    edited = instance(
        replace(find("22"), source=find("22").replace(f"#pragma unroll\n{old}", ROWSUM_OF_P_DP)), drawn.D, "fp32"
    )
    own, mine = (list(judge.observe(rung, judge.jobs(cases))) for rung in (drawn.instance, edited))
    costs = judge.sum_of(own)
    found = judge.judge(cases, mine, len(cases), costs)
    assert found.ok and costs.bytes["O"][0] and not found.costs.bytes["O"][0]
    for name, is_the_work in (("LSE", False), ("Q", True), ("V", True), ("dO", True), ("dK", True)):
        left = judge.Costs(0, 0, {**costs.bytes, name: (0, 0)})
        assert judge._idle(left, costs, name) == is_the_work


def test_a_launcher_that_lacks_a_dtype_fails_as_a_whole_rung():
    drawn, opening = draw(find("11"), SEED), "  const fa_args &a = *args;\n"
    other = {"fp16": "bf16", "bf16": "fp16"}[drawn.dtype]
    text = body("11", "kernel")
    assert text.count(opening) == 1
    lacking = text.replace(opening, f"{opening}  if (a.dtype == FA_{other.upper()}) return cudaErrorInvalidValue;\n")
    filled = fill("11", {WHOLE: Typed(WHOLE, lacking)}).rung
    assert judge.fault(filled, "11", SEED, lean=True).startswith(f"{other}, a ragged tile: ")


def test_a_whole_rung_is_tried_at_every_head_dimension_and_in_every_dtype():
    names = {case.name for case in draw(find("30"), SEED).others()}
    D, dtype = draw(find("30"), SEED).D, draw(find("30"), SEED).dtype
    places = (f"D = {192 - D}", {"fp16": "bf16", "bf16": "fp16"}[dtype])
    assert names == {f"{place}, {name}" for place in places for name in ELSEWHERE}


@pytest.mark.parametrize("id", LEANEST)
def test_what_is_right_but_wasteful_is_seen(id):
    filled = wrong.answers(task(id))[LEANEST[id]]
    assert "bank conflicts, the rung has 0" in judge.fault(filled.rung, task(id).number, SEED, lean=True)


def test_a_race_of_rows_longer_than_the_xrays_own_is_seen_in_the_notebook_too():
    filled = wrong.answers(task("02.2"))["warps in turn without a barrier"]
    made = typed.attempt("02", ("merge_threads",), body(filled.rung, "merge_threads"))
    assert made.score.report.ok and not made.ok and "race at cell:" in str(made)


def test_a_race_at_one_head_dimension_alone_is_seen_in_the_notebook(monkeypatch):
    """By the X-ray: the outputs are right, here without `check`."""
    monkeypatch.setattr(typed, "_checked", lambda *_: SimpleNamespace(ok=True))
    barrier = "  __syncthreads(); // Q_smem and the first slabs"
    racy = find("04").replace(barrier, f"  __shared__ volatile int n;\n  if (d == 32) n = threadIdx.x;\n{barrier}")
    found = typed.score(load(source=racy, device="cpu", quiet=True), find("04"))
    assert found.ray.ok and not found.ok and "d = 32: race at " in str(found)


TILED = """__global__ void scores(const fa_args a) {
  __shared__ float q_smem[tile][tile + 1], k_smem[tile][tile + 1];
  const int tiles = (a.Nq + tile - 1) / tile, head = blockIdx.x / tiles, b = head / a.H, h = head % a.H;
  const int i0 = blockIdx.x % tiles * tile, j0 = blockIdx.y * tile, x = threadIdx.x, y = threadIdx.y;
  const float *Q = static_cast<const float *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1];
  const float *K = static_cast<const float *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1];
  float s = 0.f;
  for (int c0 = 0; c0 < a.D; c0 += tile) {
    q_smem[y][x] = i0 + y < a.Nq && c0 + x < a.D ? Q[(i0 + y) * a.Q_stride[2] + c0 + x] : 0.f;
    k_smem[y][x] = j0 + y < a.Nk && c0 + x < a.D ? K[(j0 + y) * a.K_stride[2] + c0 + x] : 0.f;
    __syncthreads();
    for (int c = 0; c < tile; ++c) s += q_smem[y][c] * k_smem[x][c];
    __syncthreads();
  }
  if (i0 + y >= a.Nq || j0 + x >= a.Nk) return;
  static_cast<float *>(a.workspace[0])[(int64_t(head) * a.Nq + i0 + y) * a.Nk + j0 + x] = a.scale * s;
}"""


def test_a_kernel_that_reads_far_less_than_the_rung_has_done_the_work():
    filled = fill("01", {"scores": Typed("scores", TILED)})
    mine, own = judge.locally(filled.rung, "01"), judge.own("01", 0)[1]
    assert mine.ok and 8 * mine.costs.bytes["Q"][0] < own.bytes["Q"][0]


@pytest.mark.parametrize("name", NEEDLESS)
def test_tiles_that_are_read_in_vain_are_seen(name):
    text = body("20", "visible")
    for pair in NEEDLESS[name]:
        assert text.count(pair[0]) == 1
        text = text.replace(*pair)
    filled, said = fill("20", {"visible": Typed("visible", text)}).rung, "bytes of K and V are read, the rung reads"
    assert task("20.1").lean and said in judge.fault(filled, "20", SEED, lean=True)
    if name == "one for queries that see nothing":  # in the notebook, too
        made = typed.attempt("20", ("visible",), text)
        assert made.score.report.ok and not made.ok and f"window 40: 278,528 {said} 245,760" in str(made)


def test_a_lean_kernel_has_no_bank_conflicts_at_the_other_head_dimensions_either():
    drawn, text = draw(find("11"), SEED), body("11", "swizzle")
    assert text.count("(chunk ^ row") == 1
    for D in find("11").D:
        plain = text.replace("(chunk ^ row", f"(d == {D} ? chunk : chunk ^ row")
        filled = fill("11", {"swizzle": Typed("swizzle", plain)}).rung
        assert "bank conflicts, the rung has 0" in judge.fault(filled, "11", SEED, lean=True)
        assert D == drawn.D or not judge.fault(filled, "11", SEED)


def test_a_rung_that_was_edited_is_measured_again(monkeypatch):
    _, before = judge.own("01", SEED)
    read = "V[j * a.V_stride[2] + c]"
    twice = find("01").replace(
        f"o += P[j] * {read}",
        f"o += P[j] * (0.5f * {read} + 0.5f * ((volatile const float *)V)[j * a.V_stride[2] + c])",
    )
    monkeypatch.setattr(judge, "find", lambda number: replace(find("01"), source=twice))
    _, after = judge.own("01", SEED)
    assert after.bytes["V"][0] == 2 * before.bytes["V"][0]


def test_one_rule_says_what_is_wasteful():
    """Of the reader's own score, of `fault` and of the grader, which gives a lean task that wastes no points for that memory."""
    own, right = judge.Costs(100, 50, {"K": (100, 0), "V": (100, 0)}), (("one tile", ""),)
    for conflicts, K, wastes in ((51, 100, (False, False)), (52, 100, (True, False)), (50, 101, (False, True))):
        mine = judge.Costs(50 + conflicts, 50, own.bytes | {"K": (K, 0)})
        assert tuple(map(bool, judge.wasted(mine, own))) == wastes
        found = judge.Judgement(right, (), mine, own)
        points = {c.name: c.points for c in assignments.assignment("11.1").criteria(found, None, None)}
        assert points["shared memory"] == assignments.SHARED * (not wastes[0]) and task("11.1").lean
        assert points["global memory"] == assignments.MOVED * (not wastes[1])


def test_what_a_kernel_leaves_alone_is_said_where_all_cases_are_right():
    none = judge.Costs(0, 0, {})
    for idle, last in (((), "  ✓ one tile"), (("K",), "  ✗ the kernel leaves K alone: who did the work?")):
        assert typed.plan(judge.Judgement((("one tile", ""),), (), none, none, idle))[-1] == last


def test_the_line_of_a_wrong_case_names_what_was_found_in_its_run():
    case, findings = (
        draw(find("01"), SEED).cases()[1],
        ("uninitialised shared memory at cell:67: read\n  hint: a barrier", "race"),
    )
    o, lse = case.baseline()
    runs = [judge.Run(0, 0, outputs, findings=findings) for outputs in ((o + 1, lse), (o, lse))]
    wrong, right = (judge.judge([case], [run], 1, judge.Costs(0, 0, {})) for run in runs)
    (line,) = typed.plan(wrong)
    assert line.startswith("  ✗ one tile: error 1, ") and line.endswith(
        "; uninitialised shared memory at cell:67: read"
    )
    assert "\n  worst at O[" in wrong.wrong and right.correct


def test_a_seed_draws_the_same_everywhere_and_another_one_others():
    rung = rungs()[4]
    draws = [draw(rung, seed) for seed in range(20)]
    assert {(each.D, each.dtype) for each in draws} == {(D, dtype) for D in rung.D for dtype in rung.dtypes}
    assert {draw(find("50"), seed).dtype for seed in range(20)} == {"fp16", "bf16"}  # float32 comes along with each
    one, same, other = (draw(rung, seed).cases() for seed in (3, 3, 4))
    assert all(a.q.equal(b.q) for a, b in zip(one, same))
    assert any(a.q.shape != b.q.shape or not a.q.equal(b.q) for a, b in zip(one, other))
