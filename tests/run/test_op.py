"""Every rung as a PyTorch operator, in each of its dtypes."""

import pytest
import torch

from helpers import load, op, rungs
from helpers.run.reference import DTYPES, Case

each = pytest.mark.parametrize(
    ("rung", "dtype"),
    [(r, DTYPES[d]) for r in rungs() for d in r.dtypes],
    ids=[f"{r.stem}-{d}" for r in rungs() for d in r.dtypes],
)


def inputs(rung, dtype) -> tuple:
    torch.manual_seed(0)
    shapes = [(3, 40)] if rung.op == "softmax" else [(1, 2, 33, 64)] * 3
    x = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    return Case("", *x, do=torch.randn(shapes[0]).to(dtype)).inputs if rung.op == "attention_backward" else x


@pytest.mark.sampled
@each
def test_opcheck(rung, dtype):
    results = torch.library.opcheck(op.operator(rung.stem), inputs(rung, dtype))
    assert set(results.values()) == {"SUCCESS"}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_pytorchs_switch_asks_for_the_same_bits(deterministic, monkeypatch):
    """Where a backward rung can give them, and for an error where none can."""
    asked, of = [], op.loaded
    monkeypatch.setattr(op, "loaded", lambda *which: lambda *x, **given: asked.append(given) or of(*which)(*x, **given))
    q, k, v = (torch.randn(1, 2, 33, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    op.operator("32_ping_pong")(q, k, v)[0].sum().backward()
    assert asked[-1]["deterministic"] is True
    with pytest.raises(NotImplementedError, match="D=64, deterministic"):
        op.operator("12_double_buffered")(q, k, v)[0].sum().backward()
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    op.operator("04_fa2_fp32")(q, k, v)[0].sum().backward()


def test_opcheck_of_a_gradient():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, 33, 64, dtype=torch.float16, requires_grad=True) for H in (4, 2, 2))
    results = torch.library.opcheck(op.operator("20_causal_gqa"), (q, k, v), {"causal": True})
    assert set(results.values()) == {"SUCCESS"}


@each
def test_the_operator_is_the_kernel(rung, dtype):
    x = inputs(rung, dtype)
    got, expected = op.operator(rung.stem)(*x), load(rung.stem, device="cpu", quiet=True)(*x)
    assert [t.dtype for t in got] == ([dtype] * 3 if rung.op == "attention_backward" else [dtype, torch.float32])
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)  # 23 too: on the emulator CTAs take turns


@each
def test_results_lie_as_the_inputs_do(rung, dtype):
    """The heads of a token side by side, as a model's matrix leaves them: so does the next matrix want them."""
    if rung.op == "softmax":
        return
    x, call = inputs(rung, dtype), op.operator(rung.stem)
    packed = torch.cat([t.transpose(1, 2) for t in x if t.dim() == 4], 2).tensor_split(len(x) - (len(x) > 3), 2)
    packed = [t.transpose(1, 2) for t in packed]
    packed[4:4] = x[4:5]  # LSE
    ways = [{}] if len(x) == 3 else [{}, {"q_starts": torch.tensor([0, 10, 33], dtype=torch.int32)}]
    for options in ways:
        got, expected = call(*packed, **options), call(*x, **options)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            traced = call(*map(mode.from_tensor, packed), **options)
        for a, b, c in zip(got, expected, traced, strict=True):
            assert torch.equal(a, b) and a.stride() == c.stride()
            assert a.dim() == 3 or (a.transpose(1, 2).is_contiguous() and b.is_contiguous())


class Attention(torch.nn.Module):
    def __init__(self, stem: str, heads: int = 2, d: int = 32) -> None:
        super().__init__()
        self.project, self.heads, self.attend = torch.nn.Linear(heads * d, 3 * heads * d), heads, op.operator(stem)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)[0].transpose(1, 2).flatten(2)


@each
def test_a_module_compiles_without_a_graph_break(rung, dtype):
    if rung.op != "attention":
        return
    d = rung.usual_D
    torch._dynamo.reset()  # it counts how often one function is compiled anew, and gives up
    torch.manual_seed(0)
    module, x = Attention(rung.stem, d=d).to(dtype), torch.randn(2, 37, 2 * d).to(dtype)
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected)


def plain(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE in the inputs' precision by the formulas; grouped heads; the mask sits at the bottom right."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~seen, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def gradients(f, inputs, weights) -> tuple[torch.Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = sum((x.to(w.dtype) * w).sum() for x, w in zip(f(*inputs), weights) if w is not None)
    return torch.autograd.grad(found, inputs, allow_unused=True)


@pytest.mark.parametrize(
    ("stem", "dtype", "Hkv", "D", "causal", "within"),
    [("04", torch.float32, 2, 64, False, 1e-5), ("20", torch.float16, 1, 96, True, 3e-3)],
)
@pytest.mark.parametrize("of_o", [True, False])
def test_a_loss_may_use_lse(stem, dtype, Hkv, D, causal, within, of_o):
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, n, D).to(dtype) for h, n in ((2, 33), (Hkv, 40), (Hkv, 40))]
    weights = torch.randn(1, 2, 33, D).double() if of_o else None, torch.randn(1, 2, 33).double()
    rung = op.operator({"04": "04_fa2_fp32", "20": "20_causal_gqa"}[stem])
    got = gradients(lambda *x: rung(*x, causal=causal), inputs, weights)
    exact = gradients(lambda *x: plain(*x, causal=causal), [x.double() for x in inputs], weights)
    for a, b in zip(got, exact, strict=True):
        if of_o or (b is not None and b.any()):
            torch.testing.assert_close(a.double(), b, atol=within * b.abs().max().item(), rtol=0)
        else:
            assert a is None or not a.any()  # V has no part in LSE


def test_small_gradients_of_lse_add_up():
    """Each is below fp16's smallest number, their sum is not."""
    q, k = torch.full((1, 1, 300, 64), 0.5).half(), torch.ones(1, 1, 1, 64).half().requires_grad_()
    (3e-8 * op.operator("20_causal_gqa")(q, k, k.detach())[1]).sum().backward()
    torch.testing.assert_close(k.grad.float(), torch.full_like(k, 300 * 3e-8 * 0.5 / 8).float(), atol=7e-8, rtol=0)


def test_gradcheck_of_o_and_lse():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, n, 32, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    rung = op.operator("04_fa2_fp32")

    def both(q, k, v):
        return tuple(x.double() for x in rung(q.float(), k.float(), v.float(), 0.5))

    assert torch.autograd.gradcheck(both, inputs, eps=1e-3, atol=2e-3, rtol=1e-3)


def test_a_row_that_sees_no_key_gives_no_gradient_by_lse():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).half().requires_grad_() for n in (5, 3, 3))
    o, lse = op.operator("20_causal_gqa")(q, k, v, causal=True)
    (o.float().sum() + lse.exp().sum()).backward()
    assert not q.grad[:, :, :2].any() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_who_leaves_lse_alone_pays_for_no_gradient_of_it(monkeypatch):
    calls, of = [], op.loaded
    monkeypatch.setattr(op, "loaded", lambda stem, device: calls.append(stem) or of(stem, device))
    q, k, v = (torch.randn(1, 1, 33, 64).half().requires_grad_() for _ in range(3))
    op.operator("20_causal_gqa")(q, k, v)[0].sum().backward()
    assert calls == ["20_causal_gqa", "23_backward_mma"]


def test_a_gradient_that_no_rung_has_is_refused_by_name():
    q, k, v = (torch.randn(1, 2, 3, 136, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="no backward kernel for torch.float32 and D=136"):
        op.operator("01_naive")(q, k, v)[0].sum().backward()
    with pytest.raises(NotImplementedError, match="02_online_softmax has no backward kernel; call it on q.detach"):
        op.operator("02_online_softmax")(torch.randn(3, 40, requires_grad=True))[0].sum().backward()


def test_an_unknown_rung_names_the_rungs():
    with pytest.raises(ValueError, match="no kernel 'flash'"):
        op.operator("flash")


def test_wrong_shapes_are_the_contracts_to_refuse():
    with pytest.raises(ValueError, match="head dimension 48"):
        op.operator("03_fa1_fp32")(*(torch.randn(1, 1, 8, 48) for _ in range(3)))


@each
def test_a_dtype_the_rung_does_not_take_is_refused_when_run_and_when_traced(rung, dtype):
    other = torch.float64 if dtype == torch.float32 else torch.float32
    call, wrong = op.operator(rung.stem), [x.to(other) for x in inputs(rung, dtype)]
    allowed = f"{rung.stem} takes {str(DTYPES[rung.dtypes[0]]).removeprefix('torch.')}"
    with pytest.raises(ValueError, match=allowed):
        call(*wrong)
    with torch._subclasses.FakeTensorMode(), pytest.raises(ValueError, match=allowed):
        call(*(torch.empty(x.shape, dtype=other) for x in wrong))


def test_mixed_dtypes_are_refused_while_traced():
    q, k = (torch.empty(1, 2, 33, 64, dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    for rung in rungs():
        if len(rung.dtypes) > 1:
            with torch._subclasses.FakeTensorMode() as fake, pytest.raises(ValueError, match="have to be the same"):
                x = [fake.from_tensor(x) for x in (q, k, k)]
                back = [x[0], x[0][..., 0].float(), x[0]]
                op.operator(rung.stem)(*x, *(back if rung.op == "attention_backward" else []))
