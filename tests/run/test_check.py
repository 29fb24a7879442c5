"""The error rule passes what is right, however it sums, and fails what is wrong, where a fixed tolerance doesn't."""

import base64
import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers import KernelError, load, reference
from helpers.figures.pixels import image
from helpers.run.check import check, compare
from helpers.run.reference import Case, same_precision
from helpers.run.report import Comparison, Report, error_pixels, pattern


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_case(name="random", N=40, D=32):
    return Case(name, *(randn(2, 3, N, D, seed=i) for i in range(3)))


def in_tiles(q, k, v, scale=None, Bc=32):
    """FlashAttention's recurrence, tile by tile, with every sum taken in order: right, and rounded differently."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    m = torch.full(q.shape[:-1], -torch.inf)
    l, O = torch.zeros_like(m), torch.zeros_like(q)
    for j in range(0, k.shape[2], Bc):
        S = torch.zeros(*q.shape[:-1], k[:, :, j : j + Bc].shape[2])
        for d in range(q.shape[-1]):
            S = S + q[..., d, None] * k[:, :, None, j : j + Bc, d]
        S = S * scale
        m_new = torch.maximum(m, S.amax(-1))
        P = torch.exp(S - m_new[..., None])
        a = torch.exp(m - m_new)
        l, O = a * l + P.sum(-1), a[..., None] * O + P @ v[:, :, j : j + Bc]
        m = m_new
    return O / l[..., None], m + l.log()


def test_right_kernels_pass_whatever_their_order_of_summation():
    report = check(in_tiles)
    assert report.ok, str(report)
    assert 0.02 < report.worst <= 1  # the rule measures something, and has no order of magnitude to spare
    assert check(same_precision).worst <= 0.51  # PyTorch itself uses half of twice its own error


def test_a_budget_is_twice_plain_pytorchs_error_four_ulps_of_the_sums_and_one_of_the_result():
    case = small_case()
    for found, magnitude, exact in zip(compare(case, case.baseline()), case.magnitude(), case.exact(), strict=True):
        ulps = 2.0**-23 * (4 * magnitude + exact.abs().max().item())
        assert found.budget == pytest.approx(2 * found.pytorch_error + ulps)


def test_where_nothing_may_be_off_anything_is_wrong():
    case = Case("zeros", *torch.zeros(3, 1, 1, 8, 32))
    report = check(lambda q, k, v: (q + 1e-9, case.baseline()[1]), case)
    assert not report.ok and report.worst == float("inf")


def test_a_fixed_tolerance_passes_a_kernel_that_drops_keys_and_the_rule_does_not():
    q, k, v = randn(1, 1, 64, 64), randn(1, 1, 16384, 64, seed=1), randn(1, 1, 16384, 64, seed=2)

    def drops_the_last_8_keys(q, k, v, scale=None):
        return same_precision(q, k[:, :, :-8], v[:, :, :-8], scale)

    o, lse = drops_the_last_8_keys(q, k, v)
    exact_o, exact_lse = reference.attention(q, k, v)
    assert torch.allclose(o, exact_o.float(), atol=1e-2)
    assert torch.allclose(lse, exact_lse.float(), atol=1e-2)

    report = check(drops_the_last_8_keys, [Case("N=16384", q, k, v)])
    assert not report.ok
    assert report.worst > 100
    assert {c.output for c in report.failures} == {"o", "lse"}


def no_rescale(q, k, v, scale=None):
    """l is not rescaled when the maximum moves: exact with one tile, wrong with more."""
    scale = q.shape[-1] ** -0.5
    S = (q @ k.mT) * scale
    m = S.amax(-1, keepdim=True)
    P = torch.exp(S - m)
    m_tile = torch.stack([t.amax(-1, keepdim=True) for t in S.split(32, -1)])
    l = sum(torch.exp(t - m_t).sum(-1, keepdim=True) for t, m_t in zip(S.split(32, -1), m_tile, strict=True))
    return P @ v / l, (m + l.log())[..., 0]


def max_from_zero(q, k, v, scale=None):
    S = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    m = S.amax(-1, keepdim=True).clamp(min=0)
    P = torch.exp(S - m)
    return P @ v / P.sum(-1, keepdim=True), (m + P.sum(-1, keepdim=True).log())[..., 0]


def wrong_lse_base(q, k, v, scale=None):
    o, lse = same_precision(q, k, v, scale)
    return o, lse / np.log(2)


def swapped_heads(q, k, v, scale=None):
    return same_precision(q, k.flip(1), v.flip(1), scale)


def ignores_strides(q, k, v, scale=None):
    q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return same_precision(q, k, v, scale)


def ignores_the_strides_of_o(q, k, v, scale=None, out=None):
    o, lse = same_precision(q, k, v, scale)
    out[0].as_strided(o.shape, torch.empty(o.shape).stride()).copy_(o)
    return out[0], out[1].copy_(lse)


def ignores_scale(q, k, v, scale=None):
    return same_precision(q, k, v)


def tail_not_masked(q, k, v, scale=None):
    """Rows zero-filled up to the tile, and left to score 0."""
    pad = -k.shape[2] % 32
    return same_precision(q, *(torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (k, v)), scale)


def fp16_inside(q, k, v, scale=None):
    o, lse = same_precision(q.half(), k.half(), v.half(), scale)
    return o.float(), lse


@pytest.mark.parametrize(
    "wrong",
    [
        no_rescale,
        max_from_zero,
        wrong_lse_base,
        swapped_heads,
        ignores_strides,
        ignores_the_strides_of_o,
        ignores_scale,
        tail_not_masked,
        fp16_inside,
    ],
)
def test_wrong_kernels_fail(wrong):
    report = check(wrong)
    assert not report.ok
    with pytest.raises(AssertionError, match="WRONG"):
        report.require()


def test_each_fault_fails_in_the_cases_that_look_for_it():
    def failing(kernel):
        return {c.case for c in check(kernel).failures}

    assert all(name.startswith(("strided", "all at once")) for name in failing(ignores_strides))
    assert {name for name in failing(ignores_scale) if not name.startswith("all at once")} == {
        "scale 0.3",
        "scale -0.3",
        "scale 0",
    }
    assert "N=31" not in failing(no_rescale)
    assert "N=63" in failing(no_rescale)
    assert "all scores about -1e4" in failing(max_from_zero)
    assert "random, D=64" not in failing(max_from_zero)  # what a test with random inputs alone would miss


def test_elements_never_written_are_told_from_wrong_ones():
    def skips_the_last_rows(q, k, v, scale=None, out=None):
        o, lse = same_precision(q, k, v, scale)
        out[0][:, :, :-3] = o[:, :, :-3]
        out[1][:] = lse
        return out

    report = check(skips_the_last_rows, [small_case(N=40, D=32)])
    failure = report.failures[0]
    assert f"{2 * 3 * 3 * 32} of {2 * 3 * 40 * 32} elements never written" in failure.problem
    assert "row 37–39" in str(report)
    assert [c.output for c in report.failures] == ["o"]


def test_one_wrong_element_is_found_named_and_never_averaged_away():
    case = small_case()

    def off_by_a_thousandth(q, k, v, scale=None):
        o, lse = same_precision(q, k, v, scale)
        o[1, 2, 17, 30] += 1e-3
        return o, lse

    report = check(off_by_a_thousandth, [case])
    assert report.failures[0].worst == (1, 2, 17, 30)
    assert "O[1, 2, 17, 30]" in str(report)
    assert "1 of 7680 elements wrong: batch 1; head 2; row 17; column 30" in str(report)
    error = report.error_map("random")
    assert error.shape == (2, 3, 40, 32)
    assert np.unravel_index(error.argmax(), error.shape) == (1, 2, 17, 30)
    assert error.max() == pytest.approx(1e-3, rel=1e-3)


def test_the_worst_element_is_one_that_is_not_finite():
    def a_large_one_and_a_nan(q, k, v, scale=None):
        o, lse = same_precision(q, k, v, scale)
        o[0, 1, 1, 1], o[1, 2, 5, 7] = 100.0, torch.nan
        return o, lse

    assert check(a_large_one_and_a_nan, small_case()).failures[0].worst == (1, 2, 5, 7)


def test_the_picture_shows_the_wrong_tile():
    case = small_case(N=64, D=32)

    def one_tile_wrong(q, k, v, scale=None):
        o, lse = same_precision(q, k, v, scale)
        o[0, 1, 16:32, 8:16] = 7
        return o, lse

    text = str(check(one_tile_wrong, [case]))
    rows = [line for line in text.splitlines() if "·" in line and "right" not in line]
    assert [("█" * 8 in row) for row in rows] == [4 <= i < 8 for i in range(16)]
    assert rows[4].split() == ["16–19", "·" * 8 + "█" * 8 + "·" * 16]
    assert "row 16–31; column 8–15" in text


def test_infinities_must_be_where_the_reference_has_them():
    s = randn(4, 9)
    s[2] = -torch.inf
    case = Case("masked", s=s)
    assert check(lambda s: reference.same_precision_softmax(s), [case]).ok

    def nan_row(s):
        return torch.softmax(s, -1), torch.logsumexp(s, -1)

    report = check(nan_row, [case])
    assert [c.output for c in report.failures] == ["p"]
    assert "9 of 36 elements NaN" in str(report)

    def plus_infinity(s):
        p, lse = reference.same_precision_softmax(s)
        return p, lse.abs()

    assert "1 of 4 elements infinite" in str(check(plus_infinity, [case]))

    def finite(s):
        p, lse = reference.same_precision_softmax(s)
        return p, lse.clamp(min=-1e30)

    assert "1 of 4 elements finite where the answer is [-inf]" in str(check(finite, [case]))


def test_a_nan_of_the_inputs_must_stay_in_its_row():
    case = small_case()
    case.q[0, 0, 3, 1] = torch.nan
    right = tuple(x.float() for x in case.exact())
    assert right[0][0, 0, 3].isnan().all() and check(lambda *inputs, scale=None: right, [case]).ok
    swallowed = tuple(x.nan_to_num(0.0) for x in right)
    assert "finite where the answer is [nan]" in str(check(lambda *inputs, scale=None: swallowed, [case]))


def test_the_dimensions_of_a_softmax_have_names():
    def one_wrong(s):
        p, lse = reference.same_precision_softmax(s)
        p[..., -1, 4] += 1
        lse[..., -1] += 1
        return p, lse

    for shape, named in (
        ((5, 9), "row 4"),
        ((2, 5, 9), "dim 0 all; row 4"),
        ((2, 3, 5, 9), "batch all; head all; row 4"),
    ):
        report = str(check(one_wrong, [Case("random", s=randn(*shape))]))
        assert f"elements wrong: {named}; column 4\n" in report and f"elements wrong: {named}\n" in report

    def off(s):
        p, lse = reference.same_precision_softmax(s)
        return p + 1, lse + 1

    report = str(check(off, [Case("random", s=randn(9))]))  # one row, and its LSE a number
    assert "9 of 9 elements wrong: column all\n" in report and "1 of 1 elements wrong" in report


ROW_PER_THREAD = """// row_per_thread: a CTA for 256 rows
// op: softmax
#include <fa/args.cuh>
#include <fa/math.cuh>
__global__ void softmax(const fa_args a) {
  const int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (row >= a.Nq) return;
  const float *S = static_cast<const float *>(a.Q) + row * a.Nk;
  float *P = static_cast<float *>(a.O) + row * a.Nk, m = -FA_INFINITY;
  double l = 0;
  for (int j = 0; j < a.Nk; ++j) m = fmaxf(m, S[j]);
  for (int j = 0; j < a.Nk; ++j) l += P[j] = expf(S[j] - (m == -FA_INFINITY ? 0.f : m));
  for (int j = 0; j < a.Nk; ++j) P[j] = l > 0 ? P[j] / l : 0.f;
  a.LSE[row] = m + logf(l);
}
extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
  return softmax<<<(a->Nq + 255) / 256, 256, 0, stream>>>(*a), cudaGetLastError();
}
"""


@pytest.mark.parametrize(
    ("which", "right", "wrong", "found"),
    [
        (ROW_PER_THREAD, "(a->Nq + 255)", "(a->Nk + 255)", "more rows than columns"),
        ("02_online_softmax", "e + 4 <= slice.last && aligned16(S)", "e + 4 <= slice.last", "starts at an odd element"),
        ("02_online_softmax", "e + 4 <= slice.last && aligned16(P)", "e + 4 <= slice.last", "starts at an odd element"),
        ("02_online_softmax", "merge_slices<<<dim3(a.Nq)", "merge_slices<<<dim3(1)", "long rows"),
    ],
)
def test_a_softmax_kernels_fault_is_seen_by_the_case_that_looks_for_it(which, right, wrong, found):
    kernel = load(which, device="cpu", quiet=True)
    check(kernel).require()
    broken = load(kernel.rung.replace(right, wrong), device="cpu", quiet=True)
    assert {c.case for c in check(broken).failures} == {found}


def test_an_error_of_another_kind_is_raised():
    def raises(q, k, v, scale=None):
        raise TypeError("a slip of the caller")

    with pytest.raises(TypeError, match="a slip"):
        check(raises, [small_case()])


def test_exceptions_shapes_and_changed_inputs_fail_the_case():
    case = small_case()

    def raises(q, k, v, scale=None):
        raise ValueError("D=32 is not among 64, 128")

    def wrong_shape(q, k, v, scale=None):
        o, lse = same_precision(q, k, v, scale)
        return o, lse[..., None]

    def no_lse(q, k, v, scale=None):
        return same_precision(q, k, v, scale)[0]

    def changes_q(q, k, v, scale=None):
        result = same_precision(q, k, v, scale)
        q.mul_(2)
        return result

    assert "raised ValueError: D=32 is not among 64, 128" in str(check(raises, [case]))
    assert "O is a NoneType, not a tensor" in str(check(lambda q, k, v, scale=None: (None, None), case))
    assert "LSE is torch.float32 (2, 3, 40, 1), not torch.float32 (2, 3, 40)" in str(check(wrong_shape, [case]))
    assert "O is torch.float64 (2, 3, 40, 32), not torch.float32" in str(check(reference.attention, [case]))
    assert "returned Tensor, not (o, lse)" in str(check(no_lse, [case]))
    assert "changed its inputs" in str(check(changes_q, [case]))
    case.q[0, 0, 0, 0] = torch.nan
    assert "changed its inputs" not in str(check(same_precision, [case]))
    assert "changed its inputs" in str(check(changes_q, [case]))
    with pytest.raises(ValueError, match="no cases"):
        check(same_precision, [])


SIXTEEN = [torch.float16, torch.bfloat16]
sixteen = pytest.mark.parametrize("dtype", SIXTEEN, ids=["fp16", "bf16"])


def sixteen_cases(dtype, D=(32, 64, 128)):
    return reference.cases(SimpleNamespace(op="attention", dtypes=("fp16" if dtype == torch.float16 else "bf16",), D=D))


def on_tensor_cores(q, k, v, scale=None, Bc=64):
    """What a 16-bit rung does: products of 16-bit numbers summed in float32, P rounded before the sum over l divides it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    m = torch.full(q.shape[:-1], -torch.inf)
    l, O = torch.zeros_like(m), torch.zeros(q.shape)
    for j in range(0, k.shape[2], Bc):
        S = (q.float() @ k[:, :, j : j + Bc].float().mT) * scale
        m_new = torch.maximum(m, S.amax(-1))
        P, a = torch.exp(S - m_new[..., None]), torch.exp(m - m_new)
        l, O = a * l + P.sum(-1), a[..., None] * O + P.to(q.dtype).float() @ v[:, :, j : j + Bc].float()
        m = m_new
    return (O / l[..., None]).to(q.dtype), m + l.log()


@sixteen
def test_right_sixteen_bit_kernels_pass(dtype):
    report = check(on_tensor_cores, sixteen_cases(dtype))
    assert report.ok, str(report)
    assert 0.2 < report.worst <= 1
    assert check(same_precision, sixteen_cases(dtype)).worst <= 0.51


@sixteen
@pytest.mark.parametrize(
    "wrong",
    [no_rescale, max_from_zero, wrong_lse_base, swapped_heads, ignores_strides, ignores_scale, tail_not_masked],
)
def test_wrong_kernels_fail_in_sixteen_bits_too(wrong, dtype):
    def kernel(q, k, v, scale=None):
        if wrong is ignores_strides:
            q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
            return on_tensor_cores(q, k, v, scale)
        o, lse = wrong(q.float(), k.float(), v.float(), scale)
        return o.to(dtype), lse

    report = check(kernel, sixteen_cases(dtype, D=(64,)))
    assert "o" in {c.output for c in report.failures} or wrong is wrong_lse_base
    assert not report.ok


@sixteen
def test_dropped_keys_show_in_sixteen_bits_in_O_as_in_LSE(dtype):
    q, k, v = (randn(1, 1, n, 64, seed=i).to(dtype) for i, n in enumerate((64, 16384, 16384)))
    report = check(lambda q, k, v: same_precision(q, k[:, :, :-8], v[:, :, :-8]), [Case("N=16384", q, k, v)])
    assert {c.output for c in report.failures} == {"o", "lse"}


@sixteen
def test_rounding_that_a_fused_kernel_avoids_is_not_excused(dtype):
    """S, the sum of P V or the LSE at 16 bits: each is seen."""

    def rounded_scores(q, k, v, scale=None):
        s = ((q.float() @ k.float().mT) * q.shape[-1] ** -0.5).to(dtype).float()
        p = torch.softmax(s, -1)
        return (p.to(dtype).float() @ v.float()).to(dtype), same_precision(q, k, v)[1]

    def rounded_sums(q, k, v, scale=None):
        p = torch.softmax(q.float() @ k.float().mT / 8, -1).to(dtype)
        o = torch.zeros_like(q)
        for j in range(k.shape[2]):
            o = o + p[..., j : j + 1] * v[:, :, j : j + 1]
        return o, same_precision(q, k, v)[1]

    def rounded_lse(q, k, v, scale=None):
        o, lse = same_precision(q, k, v)
        return o, lse.to(dtype).float()

    def sixteen_bit_lse(q, k, v, scale=None):
        o, lse = same_precision(q, k, v)
        return o, lse.to(dtype)

    flat, peaked = (Case("", *(a * randn(1, 2, 200, 64, seed=i).to(dtype) for i in range(3))) for a in (1, 2))
    for case, kernel in ((peaked, rounded_scores), (flat, rounded_sums), (flat, rounded_lse)):
        assert check(same_precision, [case]).worst <= 0.51
        assert not check(kernel, [case]).ok, kernel.__name__
    assert "not torch.float32" in str(check(sixteen_bit_lse, [flat]))


@sixteen
def test_poison_of_sixteen_bits_is_told_from_a_nan(dtype):
    def skips_the_last_row(q, k, v, scale=None, out=None):
        o, lse = same_precision(q, k, v, scale)
        out[0][:, :, :-1], out[1][:] = o[:, :, :-1], lse
        out[0][0, 0, 0, 0] = torch.nan
        return out

    q, k, v = (randn(1, 2, 33, 64, seed=i).to(dtype) for i in range(3))
    problem = check(skips_the_last_row, [Case("random", q, k, v)]).failures[0].problem
    assert f"{2 * 64} of {2 * 33 * 64} elements never written" in problem
    assert f"1 of {2 * 33 * 64} elements NaN" in problem


def test_a_report_reads_well():
    report = check(same_precision, [small_case("a <case>")])
    assert str(report).startswith("same_precision: right in 1 case; at worst")
    assert "a &lt;case&gt;" in report._repr_html_()
    assert list(report.frame.columns) == ["case", "output", "error", "pytorch_error", "budget", "used", "ok"]
    assert report.require() is report
    with pytest.raises(KeyError, match="no error map of 'o' for case 'nothing'"):
        report.error_map("nothing")


def test_a_report_names_the_largest_share_of_a_budget_and_not_the_largest_error():
    report = Report("kernel", (Comparison("a", "o", 1e-3, 1e-3, 1e-1), Comparison("b", "o", 1e-6, 3e-6, 2e-6)))
    assert "at worst 50% of the error budget (O of 'b': error 1.0e-06, budget 2.0e-06)" in str(report)
    assert "<td>O</td><td>1e-06</td><td>2e-06</td><td>50%</td>" in report._repr_html_()


def test_what_no_number_says_is_worse_than_any_error():
    raised = Comparison("b", "o", *[float("nan")] * 3, problem="raised RuntimeError")
    assert Report("kernel", (Comparison("a", "o", 1.0, 0.0, 2.0), raised)).worst == float("inf")


def test_a_case_that_is_wrong_in_both_outputs_counts_once_and_has_an_error_map_of_each():
    report = check(lambda *inputs, scale=None: tuple(x + 1 for x in same_precision(*inputs)), small_case())
    assert len(report.failures) == 2 and "WRONG in 1 of 1 case" in str(report)
    assert report.error_map("random").shape == (2, 3, 40, 32) and report.error_map("random", "lse").shape == (2, 3, 40)


@pytest.mark.parametrize(
    ("backend", "wrong", "told"), [("emulator", 0, True), ("emulator", 1, False), ("nvcc", 0, False)]
)
def test_a_right_kernel_on_the_emulator_is_told_of_the_xray(backend, wrong, told):
    def kernel(q, k, v, scale=None):
        o, lse = same_precision(q, k, v, scale)
        return o + wrong, lse

    kernel.backend = backend
    assert ("xray(kernel" in str(check(kernel, [small_case("a case")]))) is told


def test_what_every_case_says_is_said_once():
    def refuses(q, k, v, scale=None):
        raise KernelError("out of bounds, line 7")

    cases = [Case(f"case {i}", *torch.randn(3, 1, 1, 4, 32)) for i in range(9)]
    said = str(check(refuses, cases))
    assert said.count("out of bounds, line 7") == 1 and "the same in 8 more cases" in said and "WRONG in 9 of 9" in said


def test_beyond_five_faults_the_cases_are_counted_and_named():
    faults = (Comparison(f"case {i}", "o", *[float("nan")] * 3, problem="abcdefg"[i]) for i in range(7))
    assert "case 4: e\n... and 2 more: case 5, case 6" in str(Report("kernel", tuple(faults)))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([4, 5, 6], "4–6"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 2, 4, 6], "0, 2 … 6 (step 2)"),
        ([0, 2, 5, 9], "0, 2, 5, 9"),
        ([0, 2, 5, 9, 14, 15], "0, 2, 5, 9 and 1 more run"),
    ],
)
def test_rows_in_words(rows, words):
    wrong = np.isin(np.arange(20), rows)
    assert pattern(wrong, "lse") == f"{len(rows)} of 20 elements wrong: row {words}"


def test_the_same_fault_at_other_addresses_is_said_once_and_another_line_is_another_fault():
    faults = iter(
        [
            "cell:4: thread 0 of block 0 writes at 0x55b4",
            "cell:4: thread 7 of block 2 writes at 0x1234",
            "cell:5: thread 0",
        ]
    )

    def stopped(q, k, v, scale=None):
        raise KernelError(next(faults))

    said = str(check(stopped, [Case(f"case {i}", *torch.randn(3, 1, 1, 4, 32)) for i in range(3)]))
    assert said.count("cell:4") == 1 and "the same in 1 more case\n" in said and said.count("cell:5") == 1


def one_tile_wrong(q, k, v, scale=None):
    o, lse = same_precision(q, k, v, scale)
    o[0, 1, 16:32, 8:16] = 7
    o[0, 1, 0, 0] = torch.nan
    return o, lse


def test_in_a_notebook_a_wrong_kernel_is_a_sentence_a_picture_and_folds():
    page = check(one_tile_wrong, [small_case("a", N=64, D=32), small_case("b", N=64, D=32)])._repr_html_()
    assert page.count("<details>") == 2 and "open" not in page
    before = page.partition("<details>")[0]
    assert before.count("worst at") == 1 and "WRONG in 2 of 2 cases" in before
    (words,) = re.findall('alt="([^"]+)"', before)
    assert "rows 0–63 down, columns 0–31 across" in words and "129 of" in words
    far_off = check(lambda q, k, v, scale=None: (v + 1e6, same_precision(q, k, v)[1]), [small_case("a")])._repr_html_()
    assert re.search(r"<td>\d.*? ×</td>", far_off) and not re.search(r"\d{4}%", far_off)


def test_the_picture_of_errors_has_a_pixel_for_each_element():
    from matplotlib.image import imread

    page = check(one_tile_wrong, [small_case("a", N=64, D=32)])._repr_html_()
    data = base64.b64decode(re.search('base64,([^"]+)', page)[1])
    pixels = imread(io.BytesIO(data), format="png")[..., :3]
    assert pixels.shape == (64, 32, 3)
    right, off, nan = pixels[40, 20], pixels[20, 10], pixels[0, 0]
    assert right.sum() > off.sum() > nan.sum(), "darker the more it is wrong"
    wrong = (pixels != right).any(axis=2)
    assert wrong.sum() == 16 * 8 + 1 and wrong[16:32, 8:16].all()


def test_pixels_are_told_apart_up_to_ten_and_up_to_a_hundred_budgets():
    off = np.array([[[[0.5, 9.0, 11.0, 99.0, 101.0]]]])
    page = error_pixels(Comparison("a", "o", 101.0, 0.0, 1.0, (0, 0, 0, 4), error_map=off, wrong=off > 1))
    data = re.search('base64,([^"]+)', page)[1]
    from matplotlib.image import imread

    right, ten, hundred, same, more = imread(io.BytesIO(base64.b64decode(data)), format="png")[0, :, :3].tolist()
    assert hundred == same and sum(right) > sum(ten) > sum(hundred) > sum(more), "darker the further it is off"
    assert "up to 10 × the budget" in page and "up to 100 ×" in page


def test_many_rows_share_pixels_that_show_the_worst():
    kinds = np.zeros((3000, 4), np.uint8)
    kinds[1234, 2] = 3
    from matplotlib.image import imread

    data = re.search('base64,([^"]+)', image(kinds, ("#ffffff", "#ffffff", "#ffffff", "#000000"), "words"))[1]
    pixels = imread(io.BytesIO(base64.b64decode(data)), format="png")[..., 0]
    assert len(pixels) == 512 and (pixels < 0.5).sum() == 1


def test_infinities_in_the_inputs_leave_the_budget_finite():
    case = small_case()
    case.q.abs_()
    case.k[0, 0, 3] = -torch.inf
    right = lambda q, k, v, scale=None: tuple(x.float() for x in case.exact())  # noqa: E731
    wrong = lambda q, k, v, scale=None: (case.exact()[0].float(), case.exact()[1].float() + 1)  # noqa: E731
    assert check(right, [case]).ok and not check(wrong, [case]).ok
    case.v[0, 0, 4, 1] = torch.inf
    off = lambda q, k, v, scale=None: (case.exact()[0].float() * 1.01, case.exact()[1].float())  # noqa: E731
    assert check(right, [case]).ok and not check(off, [case]).ok


def test_the_set_of_cases_may_be_named():
    from helpers import reference

    softmax = load("02", device="cpu", quiet=True)
    every = {*(case.name for case in reference.cases(softmax.rung, "cpu", "small"))}
    assert {c.case for c in check(softmax, "small").comparisons} == every
    with pytest.raises(ValueError, match="'little'; allowed are 'small', 'full'"):
        check(softmax, "little")


@pytest.mark.parametrize(("device", "size"), [("cpu", "small"), ("cuda", "full")])
def test_a_gpu_is_given_the_full_set_by_default(device, size, monkeypatch):
    asked = []
    monkeypatch.setattr(reference, "cases", lambda *which: asked.append(which) or [small_case()])

    def kernel(q, k, v, scale=None):
        return same_precision(q, k, v, scale)

    kernel.device = device
    assert check(kernel).ok and asked == [(None, device, size)]


@pytest.mark.parametrize("small, expected", [(1 << 28, 1), (0, 2)])
def test_small_cases_are_left_to_one_thread_and_the_threads_come_back(monkeypatch, small, expected):
    monkeypatch.setattr(sys.modules[check.__module__], "SMALL", small)
    seen, before = [], torch.get_num_threads()

    def kernel(q, k, v, scale=None):
        seen.append(torch.get_num_threads())
        raise RuntimeError("no result")

    try:
        torch.set_num_threads(2)
        check(kernel, [small_case()])
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (seen, after) == ([expected], 2)
