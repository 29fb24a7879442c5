"""The backward pass: rungs 22 and 23 give the same twice where they say so, are what autograd calls, and work where a model trains."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from helpers import check, load, op, reference
from helpers.run.reference import Case

FP32, MMA = "22_backward_fp32", "23_backward_mma"
EMULATOR_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# What goes there, in which dtype, and what comes back.
WAYS = [
    ("04_fa2_fp32", torch.float32, FP32),
    ("12_double_buffered", torch.float16, MMA),
    ("12_double_buffered", torch.bfloat16, MMA),
]
each_way = pytest.mark.parametrize(("forward", "dtype", "backward"), WAYS, ids=["fp32", "fp16", "bf16"])


def case(
    B: int, H: int, Hkv: int, Nq: int, Nk: int, d: int, dtype: torch.dtype, device: str = "cpu", **options
) -> Case:
    torch.manual_seed(Nq + Nk)
    q, do = (torch.randn(B, H, Nq, d, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(B, Hkv, Nk, d, device=device).to(dtype) for _ in range(2))
    return Case(f"Nq={Nq}, Nk={Nk}, D={d}", q, k, v, do=do, **options)


@EMULATOR_AND_GPU
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_twice_bit_by_bit(d, causal, device):
    """Several key tiles add to each row of dQ, in turn."""
    kernel = load(FP32, device=device, quiet=True)
    (B, H, n) = (1, 2, 300) if device == "cpu" else (2, 4, 3000)
    one = case(B, H, H // 2, n, n, d, torch.float32, device, causal=causal)
    first, second = (kernel(*one.inputs, **one.options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    check(kernel, [one]).require()


@EMULATOR_AND_GPU
@pytest.mark.parametrize("d", [64, 128])
def test_on_tensor_cores_dk_and_dv_are_the_same_twice(d, device):
    """dQ is added up by atomics, and its rung says that it isn't."""
    kernel = load(MMA, device=device, quiet=True)
    one = case(1, 2, 2, 300, 300, d, torch.float16, device)
    first, second = (kernel(*one.inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[1:], second[1:], strict=True))
    assert "dQ is not" in kernel.rung.outputs


@pytest.mark.sampled
@EMULATOR_AND_GPU
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": 100}], ids=["", "causal", "window"]
)
@pytest.mark.parametrize(
    ("H", "Hkv", "Nq", "Nk", "d"),
    [(2, 2, 150, 200, 64), (4, 2, 200, 150, 64), (4, 1, 130, 190, 128), (8, 1, 65, 129, 64)],
)
def test_heads_that_share_k_and_v_have_copies_which_are_added_in_order(H, Hkv, Nq, Nk, d, options, device):
    """Within the budget although each head's dK and dV are rounded first, the same twice, and without sharing no memory."""
    kernel = load(MMA, device=device, quiet=True)
    cases = [case(2, H, Hkv, Nq, Nk, d, dtype, device, **options) for dtype in (torch.float16, torch.bfloat16)]
    check(kernel, cases).require()
    seen = [kernel.tensors(*cases[0].inputs, **cases[0].options) for _ in range(2)]
    assert all(torch.equal(*(tensors[name] for tensors in seen)) for name in ("dK", "dV"))
    assert seen[0]["dK_dV"].shape == (2, H if H > Hkv else 0, Nk, d)


SCALES = (-0.3, -0.0, 0.0, 2.0)


@EMULATOR_AND_GPU
@pytest.mark.parametrize(
    ("stem", "dtype", "scale"),
    [(FP32, torch.float32, scale) for scale in (*SCALES, 1e-30, -1e-30)]
    + [(MMA, dtype, scale) for dtype in (torch.float16, torch.bfloat16) for scale in (*SCALES, 1e-40, -1e-40)],
)
def test_any_scale(stem, dtype, scale, device):
    """A masked score has P = 0 with any scale: 22 masks after scaling; 23 masks with the infinity of the right sign, and takes 1e-30
    for a smaller scale, which 1e-40 tests. 22's is only 1e-30: it adds to dQ by atomicAdd, which on a GPU takes subnormal numbers
    for 0 (PTX ISA, "atom"), so dQ has to stay above them."""
    kernel = load(stem, device=device, quiet=True)
    check(
        kernel, [case(1, 1, 1, 70, 90, 64, dtype, device, scale=scale, causal=causal) for causal in (False, True)]
    ).require()


@pytest.mark.parametrize(("stem", "dtype"), [(FP32, torch.float32), (MMA, torch.float16)])
def test_gradients_into_strided_tensors(stem, dtype):
    """out in (B,N,H,D): nothing but its rows is written."""
    kernel = load(stem, device="cpu", quiet=True)
    one = case(2, 2, 2, 70, 90, 64, dtype)
    out = tuple(torch.full((2, n, 3, 64), torch.nan).to(dtype)[:, :, :2].transpose(1, 2) for n in (70, 90, 90))
    got = kernel(*one.inputs, out=out)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(got, out, strict=True))
    check(lambda *_: out, [one]).require()
    assert all(
        x.transpose(1, 2).as_strided((2, x.shape[2], 3, 64), (x.shape[2] * 192, 192, 64, 1))[:, :, 2].isnan().all()
        for x in out
    )


# --- autograd


@each_way
def test_autograd_calls_the_backward_rung(forward, dtype, backward):
    one = case(1, 2, 2, 70, 90, 64, dtype)
    q, k, v = (x.clone().requires_grad_() for x in (one.q, one.k, one.v))
    o, lse = op.operator(forward)(q, k, v)
    got = torch.autograd.grad(o, (q, k, v), one.do)
    expected = load(backward, device="cpu", quiet=True)(*(x.detach() for x in (q, k, v, o, lse)), one.do)
    assert lse.requires_grad
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)  # dQ of 23 up to the order of its additions
    check(lambda *_: got, [one]).require()


def test_gradcheck():
    """fp32 kernels between double-precision ends, so that a difference quotient of every input element has digits left."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, n, 32, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    attention = op.operator("04_fa2_fp32")

    def f(q, k, v):
        return attention(q.float(), k.float(), v.float(), 0.5)[0].double()

    assert torch.autograd.gradcheck(f, inputs, eps=1e-3, atol=2e-3, rtol=1e-3, nondet_tol=0.0)
    with pytest.raises(GradcheckError):  # and it can fail
        torch.autograd.gradcheck(
            lambda q, k, v: f(q, k, v) + (0.5 * q).detach(), inputs, eps=1e-3, atol=2e-3, rtol=1e-3, fast_mode=True
        )


class Attention(torch.nn.Module):
    def __init__(self, stem: str, heads: int = 2, d: int = 64) -> None:
        super().__init__()
        self.project, self.heads, self.attend = torch.nn.Linear(heads * d, 3 * heads * d), heads, op.operator(stem)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)[0].transpose(1, 2).flatten(2)


def trained(module, x, call) -> list[torch.Tensor]:
    """The gradients of a loss, of the input and of every parameter."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@each_way
def test_it_trains_compiled_and_under_checkpoint(forward, dtype, backward):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Attention(forward).to(dtype), torch.randn(2, 37, 128).to(dtype)
    plain = trained(module, x, module)
    compiled = trained(module, x, torch.compile(module, fullgraph=True, backend="aot_eager"))
    kept = trained(module, x, lambda x: checkpoint(module, x, use_reentrant=False))
    for a, b, c in zip(plain, compiled, kept, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_a_gradient_of_a_gradient_is_refused():
    q = torch.randn(1, 1, 5, 32, requires_grad=True)
    o, _ = op.operator("04_fa2_fp32")(q, q, q)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="22_backward_fp32 has no backward kernel"):
        dq.sum().backward()


CAUSAL = "20_causal_gqa"


def gradients(forward: str, one: Case, **options) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV by autograd through the operator of a rung."""
    leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v)]
    o, _ = op.operator(forward)(*leaves, scale=one.scale, causal=one.causal, window=one.window, **options)
    return torch.autograd.grad(o, leaves, one.do)


@pytest.mark.parametrize(
    ("forward", "dtype", "d"),
    [(CAUSAL, torch.float16, 96), (CAUSAL, torch.bfloat16, 96), ("11_swizzled", torch.float16, 32), ("01_naive", torch.float32, 20)],
)  # fmt: skip
def test_a_head_dimension_that_no_backward_rung_has_is_filled_up(forward, dtype, d):
    one = case(1, 2, 2, 20, 30, d, dtype)
    check(lambda *_, **__: gradients(forward, one), [one]).require()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_and_groups_of_heads_have_gradients(dtype):
    for options in ({"causal": True}, {"causal": True, "window": 17, "scale": 0.2}, {}):
        one = case(2, 4, 2, 50, 70, 64, dtype, **options)
        check(lambda *_, one=one, **__: gradients(CAUSAL, one), [one]).require()


STARTS = [0, 20, 20, 53, 54], [0, 31, 36, 69, 69]  # of queries, of keys: also sequences without the one or the other


def test_a_packed_batch_has_the_gradients_of_its_sequences():
    one = case(1, 2, 1, STARTS[0][-1], STARTS[1][-1], 64, torch.float16, causal=True)
    q_starts, k_starts = (torch.tensor(x, dtype=torch.int32) for x in STARTS)
    grads = gradients(CAUSAL, one, q_starts=q_starts, k_starts=k_starts)
    for q0, q1, k0, k1 in zip(STARTS[0], STARTS[0][1:], STARTS[1], STARTS[1][1:]):
        own = [grads[0][:, :, q0:q1], grads[1][:, :, k0:k1], grads[2][:, :, k0:k1]]
        if q0 == q1 or k0 == k1:
            assert not any(x.any() for x in own)
            continue
        k, v = one.k[:, :, k0:k1], one.v[:, :, k0:k1]
        sequence = Case(f"from {q0}", one.q[:, :, q0:q1], k, v, do=one.do[:, :, q0:q1], causal=True)
        check(lambda *_, own=own, **__: tuple(own), [sequence]).require()
    with pytest.raises(ValueError, match="has to rise from 0 to 54"):
        gradients(CAUSAL, one, q_starts=q_starts // 2, k_starts=k_starts)
    with pytest.raises(ValueError, match="k_starts needs q_starts"):
        gradients(CAUSAL, one, k_starts=k_starts)


def test_the_operators_of_packed_batches_and_caches_pass_opcheck():
    one = case(1, 2, 1, STARTS[0][-1], STARTS[1][-1], 64, torch.float16, causal=True)
    starts = {n: torch.tensor(x, dtype=torch.int32) for n, x in zip(("q_starts", "k_starts"), STARTS)}
    tests = ("test_schema", "test_faketensor")
    done = torch.library.opcheck(
        op.operator(CAUSAL), (one.q, one.k, one.v), {"causal": True, **starts}, test_utils=tests
    )
    done |= torch.library.opcheck(op.operator(MMA), one.inputs, {"causal": True, **starts}, test_utils=tests)
    q, (k, v) = torch.randn(2, 2, 1, 64).half(), torch.randn(2, 4, 1, 16, 64).half()
    cache = {
        "lengths": torch.tensor([20, 32], dtype=torch.int32),
        "pages": torch.tensor([[0, 3], [2, 1]], dtype=torch.int32),
    }
    done |= torch.library.opcheck(op.operator("21_split_kv"), (q, k, v), {**cache, "splits": 2}, test_utils=tests)
    assert set(done.values()) == {"SUCCESS"}
    with pytest.raises(NotImplementedError, match="no backward for keys in a cache"):
        op.operator("21_split_kv")(q.requires_grad_(), k, v, **cache)[0].sum().backward()


def test_a_model_of_causal_packed_heads_compiles_without_a_graph_break():
    """One compiled step, forward and back, with groups of heads in (B, N, H, D), which no kernel copies."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(1, 54, 4 * 64).half()
    q_starts = torch.tensor(STARTS[0], dtype=torch.int32)

    def step(x):
        q, kv = x.split([128, 128], -1)
        q, k = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (q, kv))
        o, _ = op.operator(CAUSAL)(q, k[:, :1], k[:, 1:], causal=True, q_starts=q_starts)
        return o.transpose(1, 2).flatten(2).square().sum()

    grads = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        call(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_heads_side_by_side_are_not_copied(monkeypatch):
    """(B, N, H, D), as a model has them: the kernel gets the very tensors, there and back."""
    seen = []

    def spy(stem, device, kernel=op.loaded):
        return lambda *inputs, **options: seen.append((stem, inputs)) or kernel(stem, device)(*inputs, **options)

    monkeypatch.setattr(op, "loaded", spy)
    q, k, v = (torch.randn(1, 20, 2, 64).half().transpose(1, 2).requires_grad_() for _ in range(3))
    do = torch.randn(1, 20, 2, 64).half().transpose(1, 2)
    op.operator(CAUSAL)(q, k, v, causal=True)[0].backward(do)
    (_, there), (stem, back) = seen
    assert stem == MMA
    for given, got in zip((q, k, v, q, k, v, do), (*there, *back[:3], back[5]), strict=True):
        assert got.data_ptr() == given.data_ptr() and got.stride() == given.stride()


class InDoubles(torch.autograd.Function):
    """Attention in float64, whose backward pass is rung 22's in float32."""

    @staticmethod
    def forward(ctx, q, k, v, causal, window):
        o, lse = reference.attention(q, k, v, causal=causal, window=window)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = {"causal": causal, "window": window}
        return o

    @staticmethod
    def backward(ctx, do):
        inputs = (x.float().contiguous() for x in (*ctx.saved_tensors, do))
        return *(x.double() for x in op.operator(FP32)(*inputs, **ctx.options)), None, None


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2)])
def test_gradcheck_of_masks_and_groups_of_heads(causal, window):
    torch.manual_seed(0)
    inputs = [torch.randn(1, H, n, 32, dtype=torch.float64, requires_grad=True) for H, n in ((2, 3), (1, 4), (1, 4))]
    apply = lambda *x: InDoubles.apply(*x, causal, window)  # noqa: E731
    assert torch.autograd.gradcheck(apply, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_a_gradient_that_is_off_fails_gradcheck():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, 2, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    off = lambda q, k, v: InDoubles.apply(q, k, v, True, None) + 0.1 * k.sum().detach()  # noqa: E731
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(off, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_the_way_back_stays_in_the_forward_rungs_decade():
    assert op.backward_rung(torch.float16, 64, CAUSAL).stem == MMA
    assert op.backward_rung(torch.float32, 64, "04_fa2_fp32", frozenset({"gqa"})).stem == FP32
    with pytest.raises(
        NotImplementedError,
        match="D=256 .22_backward_fp32: fp32, D in 32, 64, 128, causal, window, gqa, deterministic; 23",
    ):
        op.backward_rung(torch.float16, 256)
