"""The reference is the definition: held against float64 written out by hand, and against the identities it must obey."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from helpers import check, reference, rung
from helpers.ladder.contract import prepare
from helpers.ladder.rung import rungs
from helpers.lessons import inputs
from helpers.run.check import compare
from helpers.run.families import FAMILIES

STRIDED = ("strided", "all at once")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(q, k, v, scale):
    """O and LSE of one head from Python floats: Σ_j exp(s_j) v_j / Σ_j exp(s_j)."""
    O, LSE = [], []
    for q_i in q.tolist():
        s = [scale * sum(a * b for a, b in zip(q_i, k_j, strict=True)) for k_j in k.tolist()]
        m = max(s)
        p = [math.exp(x - m) for x in s]
        l = sum(p)
        O.append([sum(p_j * v_j[d] for p_j, v_j in zip(p, v.tolist(), strict=True)) / l for d in range(v.shape[1])])
        LSE.append(m + math.log(l))
    return torch.tensor(O, dtype=torch.float64), torch.tensor(LSE, dtype=torch.float64)


@pytest.mark.parametrize(("Nq", "Nk", "D"), [(1, 1, 4), (3, 7, 5), (6, 2, 8)])
def test_attention_is_its_definition(Nq, Nk, D):
    q, k, v = randn(1, 1, Nq, D), randn(1, 1, Nk, D, seed=1), randn(1, 1, Nk, D, seed=2)
    o, lse = reference.attention(q, k, v)
    expected_o, expected_lse = by_hand(q[0, 0], k[0, 0], v[0, 0], D**-0.5)
    torch.testing.assert_close(o[0, 0], expected_o, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse[0, 0], expected_lse, rtol=1e-13, atol=1e-14)


def test_scale_multiplies_the_scores():
    q, k, v = (randn(2, 3, 9, 16, seed=i) for i in range(3))
    for a, b in zip(reference.attention(q, k, v, 0.5), reference.attention(2 * q, k, v, 0.25), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_rows_in_chunks_are_the_rows_at_once(monkeypatch):
    q, k, v = randn(2, 3, 50, 8), randn(2, 3, 20, 8, seed=1), randn(2, 3, 20, 8, seed=2)
    whole = reference.attention(q, k, v)
    monkeypatch.setattr(reference, "CHUNK", 2 * 3 * 20 * 7)  # 7 rows at a time, and one chunk of 1
    for a, b in zip(reference.attention(q, k, v), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


def test_long_sequences_never_hold_all_of_S(monkeypatch):
    """No tensor made on the way is larger than a chunk, whatever N."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    monkeypatch.setattr(reference, "CHUNK", 1 << 14)
    q, k = randn(1, 1, 1000, 4), randn(1, 1, 2000, 4, seed=1)
    with Largest() as largest:
        reference.attention(q, k, k)
    assert largest.numel <= 1 << 14  # S has 2 000 000 elements


def test_softmax_of_a_fully_masked_row_is_zero_and_its_lse_minus_infinity():
    s = randn(3, 5)
    s[1] = -torch.inf
    p, lse = reference.softmax(s)
    assert torch.equal(p[1], torch.zeros(5, dtype=torch.float64))
    assert lse[1] == -torch.inf
    torch.testing.assert_close(p[::2].sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(lse[::2], s[::2].double().exp().sum(-1).log())


def test_a_key_of_minus_infinity_is_no_key():
    q, k, v = randn(1, 1, 4, 8).abs(), randn(1, 1, 6, 8, seed=1), randn(1, 1, 6, 8, seed=2)
    k[0, 0, 2] = -torch.inf
    without = [0, 1, 3, 4, 5]
    for got, expected in zip(
        reference.attention(q, k, v), reference.attention(q, k[:, :, without], v[:, :, without]), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-14)
    _, lse = reference.attention(q, torch.full_like(k, -torch.inf), v)
    assert (lse == -torch.inf).all()


def test_a_row_with_a_nan_is_nan():
    q, k, v = randn(1, 1, 4, 8), randn(1, 1, 6, 8, seed=1), randn(1, 1, 6, 8, seed=2)
    q[0, 0, 2, 3] = torch.nan
    for x in reference.attention(q, k, v):
        assert x[0, 0, 2].isnan().all() and x[0, 0, [0, 1, 3]].isfinite().all()


def test_the_baseline_rounds_at_the_inputs_precision():
    """The error of plain PyTorch is of the order of the dtype's ulp: smaller and the rule fails right kernels, larger
    and it passes wrong ones."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (randn(1, 2, 64, 32, seed=i).to(dtype) for i in range(3))
        o, lse = reference.same_precision(q, k, v)
        assert o.dtype == dtype
        assert lse.dtype == torch.float32
        error = (o.double() - reference.attention(q, k, v)[0]).abs().max()
        assert 0.05 * torch.finfo(dtype).eps < error < 8 * torch.finfo(dtype).eps


def test_every_case_has_a_finite_answer_except_the_masked_rows():
    for op in ("attention", "softmax"):
        for case in reference.cases(SimpleNamespace(op=op)):
            o, lse = case.exact()
            assert o.isfinite().all(), case.name
            assert not lse.isnan().any(), case.name
            assert lse.isfinite().all() or "masked" in case.name, case.name


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_cases_are_what_their_names_say(dtype):
    made = {c.name: c for c in reference.cases(SimpleNamespace(op="attention", dtypes=(dtype,), D=(64,)))}

    def scores(case):
        return case.q.double() @ case.k.double().mT / 8

    assert scores(made["all scores about -1e4"]).max() < -9900
    assert scores(made["all scores about 1e4"]).min() > 9900
    assert scores(made["very large scores of both signs"]).abs().max() > 1000
    p = torch.softmax(scores(made["one-hot rows"]), -1)
    assert p.amax(-1).min() > 0.99
    assert not torch.equal(p.argmax(-1)[0, 0], torch.arange(p.shape[-1]))  # not the identity: a swapped index shows
    rising = scores(made["scores rise along the keys"]).mean((0, 1, 2))
    assert (rising[32:] - rising[:-32]).min() > 8
    assert made["zeros"].q.count_nonzero() == 0
    for N in (1, 31, 33, 63, 65, 127, 129):
        assert made[f"N={N}"].k.shape[2] == N
    for name, case in made.items():
        if name.startswith("strided"):
            assert not all(x.is_contiguous() for x in case.inputs), name
            assert all(x.stride(-1) == 1 for x in case.inputs), name
    layouts = made["strided, three layouts"]
    assert len({layouts.q.stride(), layouts.k.stride(), layouts.v.stride()}) == 3


def test_cases_follow_the_rung_and_are_the_same_every_time():
    rung = SimpleNamespace(op="attention", dtypes=("fp16", "bf16"), D=(128,))
    first, again = list(reference.cases(rung)), list(reference.cases(rung))
    assert {c.q.dtype for c in first} == {torch.float16, torch.bfloat16}
    assert {c.q.shape[-1] for c in first} == {128}
    assert len([c for c in first if c.q.dtype == torch.float16]) == len(first) / 2
    assert all(x.isfinite().all() for c in first for x in c.inputs)
    for a, b in zip(first, again, strict=True):
        assert a.name == b.name
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a.inputs, b.inputs, strict=True))
    assert len({c.name for c in first}) == len(first)


def test_every_head_dimension_meets_the_edges_of_its_tiles():
    made = list(reference.cases(SimpleNamespace(op="attention", dtypes=("fp16",), D=(32, 64, 128))))
    for d in (32, 64, 128):
        own = [c for c in made if c.q.shape[-1] == d]
        for tile in (64, 128):
            assert {1, tile - 1} <= {c.q.shape[2] % tile for c in own}, (d, tile)
            assert {1, tile - 1} <= {c.k.shape[2] % tile for c in own}, (d, tile)
        assert max(c.q.shape[2] for c in own) > 2 * 192, "a third tile of queries, of the widest there are"


def test_masks_meet_both_ends_of_a_ctas_tiles_one_key_off():
    """For tiles of 128 queries and 64 keys: a last key that begins its tile, and a first one that ends it."""
    last, first = set(), set()
    for case in reference.cases(SimpleNamespace(features=("causal", "window"))):
        Nq, shift = case.q.shape[2], case.k.shape[2] - case.q.shape[2]
        for i0 in range(0, Nq, 128) if case.causal else ():
            if i0 + 128 <= Nq:
                last.add((i0 + 128 + shift - 1) % 64)
            if case.window and i0 + shift >= case.window:
                first.add((i0 + shift - case.window + 1) % 64)
    assert 0 in last and 63 in first


def test_packed_strides_survive_the_change_of_dtype():
    rung = SimpleNamespace(op="attention", dtypes=("fp16",), D=(64,))
    packed = next(c for c in reference.cases(rung) if c.name == "strided, packed QKV")
    _, H, N, D = packed.q.shape
    assert packed.k.stride() == (N * 3 * H * D, D, 3 * H * D, 1)


@pytest.mark.parametrize("stem", ["04_fa2_fp32", "23_backward_mma"])
def test_outputs_lie_as_those_of_a_call_without_out(stem):
    strided = [case for case in reference.cases(rung(stem)) if case.name.startswith("strided")]
    lie = [[x.stride() for x in case.empty_outputs()] for case in strided]
    assert lie == [[x.stride() for x in prepare(rung(stem), "cpu", case.inputs).results] for case in strided]
    assert {x.is_contiguous() for case in strided for x in case.empty_outputs()[:1]} == {True, False}


def test_a_strided_gradient_lies_neither_as_o_nor_as_q_and_they_may_differ_too():
    made = list(reference.cases(SimpleNamespace(op="attention_backward", dtypes=("fp16",), D=(64,))))
    lie = [tuple(case.inputs[n].stride() for n in (0, 3, 5)) for case in made if case.name.startswith(STRIDED)]
    assert len(lie) == 4 and all(do not in (q, o) for q, o, do in lie)
    assert any(q != o for q, o, _ in lie)
    assert any(not case.inputs[3].is_contiguous() for case in made)
    plain = [case for case in made if not case.name.startswith(STRIDED)]
    assert plain and all(x.is_contiguous() for case in plain for x in case.inputs)


def test_a_rung_meets_tiles_and_rows_of_minus_infinity():
    for stem in ("04_fa2_fp32", "32_ping_pong"):
        made = list(reference.cases(rung(stem)))
        hidden = [case for case in made if not case.k.isfinite().all()]
        assert [case.q.dtype for case in hidden] == [reference.DTYPES[name] for name in rung(stem).dtypes]
    for case in hidden:
        s = case.q.double() @ case.k.double().mT
        assert not s.isnan().any() and not (s == torch.inf).any()
        seen = s.isfinite()
        assert not seen[0, 0, :, :128].any() and not seen[0, 1, :, -128:].any()  # the widest tile there is
        assert seen.any(-1).any() and not seen.any(-1).all()
        o, lse = case.exact()
        assert (o[~seen.any(-1)] == 0).all() and ((lse == -torch.inf) == ~seen.any(-1)).all()
    same = SimpleNamespace(op="attention", dtypes=("fp32",), D=(64,))  # as an implementation in another language
    assert all(x.isfinite().all() for case in reference.cases(same) for x in case.inputs)


def arguments(case):
    """What a case sets that others leave as it is."""
    there = {
        "causal": case.causal,
        "window": case.window,
        "gqa": case.k.shape[1] < case.q.shape[1],
        "pages": case.pages,
    }
    there |= {"varlen": case.cu_seqlens, "lengths": case.lengths, "splits": case.splits, "B > 1": len(case.q) > 1}
    there |= {"deterministic": case.deterministic, "scale": case.scale, "strided": not case.q.is_contiguous()}
    return {name for name, value in there.items() if value is not None and value is not False}


@pytest.mark.parametrize("stem", [one.stem for one in rungs() if one.op.startswith("attention")])
def test_every_two_arguments_meet_at_every_head_dimension(stem):
    """Else a kernel that ignores one of them where the other is set is right."""
    one, apart = rung(stem), [{"varlen", "B > 1"}]  # a packed batch is one
    for made, dims in ((reference.cases(one), one.D or (32, 64, 128)), (inputs.draw(one, 3).cases(), (None,))):
        made = [(arguments(case), case.q.shape[-1]) for case in made]
        names = {"scale", "strided", "B > 1"} | (set(one.features) & set().union(*(names for names, _ in made)))
        for pair in map(set, itertools.combinations(sorted(names), 2)):
            for d in dims if pair not in apart else ():
                assert any(pair <= there and d in (None, D) for there, D in made), (pair, d)


@pytest.mark.parametrize("stem", ["23_backward_mma", "33_backward_wgmma"])
def test_a_gradient_rounded_to_fp16_before_it_is_scaled_is_wrong(stem):
    drawn = next(one for seed in range(9) if (one := inputs.draw(rung(stem), seed)).dtype == "fp16")
    for made in (reference.cases(rung(stem)), drawn.cases()):
        wrong = []
        for case in made:
            if case.q.dtype == torch.float16 and case.scale is not None and case.scale:
                dq, dk, dv = case.baseline()
                early = [(x / case.scale).half() * case.scale for x in case.exact()[:2]]
                assert all(part.ok for part in compare(case, (dq, dk, dv)))
                found = [compare(case, three) for three in ((early[0].half(), dk, dv), (dq, early[1].half(), dv))]
                wrong += [case.name] if not any(all(part.ok for part in parts) for parts in found) else []
        assert len(wrong) == 1 and "scaled" in wrong[0]


def test_the_first_element_stays_where_it_is():
    for device in ("cpu", "meta"):  # a move to another device makes a new tensor
        made = {c.name: c.s for c in reference.cases(SimpleNamespace(op="softmax"), device)}
        odd = made["starts at an odd element"]
        assert (odd.device.type, odd.storage_offset(), odd.is_contiguous()) == (device, 1, True)
    s = torch.arange(7.0)[1:].view(2, 3)
    moved = reference.moved(s, torch.float16, "cpu")
    assert torch.equal(moved, s.half()) and moved.storage_offset() == 1


def test_full_has_what_only_a_gpu_can_do():
    names = [c.name for c in reference._attention_cases((64, 128), "full", torch.float32)]
    assert {"B*H=66049", "N=16384", "Nq=64, Nk=65537", "N=129"} <= set(names)


def test_bad_requests_are_refused_by_name():
    with pytest.raises(ValueError, match="'medium'"):
        list(reference.cases(size="medium"))
    with pytest.raises(ValueError, match="'dropout'"):
        list(reference.cases(SimpleNamespace(op="dropout")))
    q = randn(1, 1, 4, 8)
    for call in (reference.attention, reference.same_precision):
        with pytest.raises(ValueError, match="window=3 needs causal=True"):
            call(q, q, q, window=3)
    with pytest.raises(ValueError, match="window=3 needs causal=True"):
        reference.attention_backward(q, q, q, q, window=3)


def test_sixteen_bit_kernels_meet_every_family_and_the_late_ones_under_a_mask():
    rung = SimpleNamespace(op="attention", dtypes=("bf16",), D=(64, 128), features=("causal",))
    made = [c for c in reference.cases(rung) if c.name.startswith("family")]
    assert {f"family {name}" for name in FAMILIES} <= {c.name for c in made}
    late = {c.name for c in made if c.causal}
    assert late == {f"family {name}, causal" for name in ("sink", "one key", "falling")}
    assert "family one key, D=128" in {c.name for c in made}
    assert all(
        c.k.shape[2] > 2 * 128 and c.q.dtype == torch.bfloat16 for c in made
    )  # more than two of the largest tiles
    names = [c.name for c in reference.cases(SimpleNamespace(op="attention", dtypes=("fp32",), D=(64,)))]
    assert not any(name.startswith("family") for name in names)
    backward = SimpleNamespace(op="attention_backward", dtypes=("fp16",), D=(64,))
    assert sum(c.name.startswith("family") for c in reference.cases(backward)) == len(FAMILIES)


def test_a_kernel_that_keeps_an_old_maximum_is_wrong_on_the_families():
    """P in fp16 with the maximum of the first 128 keys, whatever comes later: it overflows where a row rises late."""

    def stale(q, k, v, scale=None, causal=False):
        s = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
        first = s[..., -(s.shape[-1] % 128 or 128) :].amax(-1, keepdim=True)
        p = torch.exp(s - first).half().float()
        l = torch.exp(s - first).sum(-1, keepdim=True)
        return (p @ v.float() / l).to(q.dtype), (first + torch.log(l)).squeeze(-1)

    rung = SimpleNamespace(op="attention", dtypes=("fp16",), D=(64,))
    wrong = {c.case for c in check(stale, reference.cases(rung)).failures}
    assert {"family one key", "family falling", "family sink"} <= wrong
    assert not {"family randn", "family Q × 2", "family growing"} & wrong
