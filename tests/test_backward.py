"""The way back: rungs 22 and 23 give the same twice where they say so, are what autograd calls, and work where a model trains."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from helpers import check, load, op, reference, rung
from helpers.contract import prepare
from helpers.reference import Case

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
    n = 300 if device == "cpu" else 3000
    one = case(2, 4, 2, n, n, d, torch.float32, device, causal=causal)
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


@EMULATOR_AND_GPU
@pytest.mark.parametrize(("stem", "dtype"), [(FP32, torch.float32), (MMA, torch.float16), (MMA, torch.bfloat16)])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(stem, dtype, scale, device):
    """A masked score is -inf after the scale has been applied, or a scale of 0 would make it NaN."""
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
    assert not lse.requires_grad
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)  # dQ of 23 up to the order of its additions
    check(lambda *_: got, [one]).require()


def test_gradcheck():
    """fp32 kernels between double-precision ends, so that a difference quotient of every input element has digits left."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, n, 32, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)]
    attention = op.operator("04_fa2_fp32")

    def f(q, k, v):
        return attention(q.float(), k.float(), v.float(), 0.5)[0].double()

    assert torch.autograd.gradcheck(f, inputs, eps=1e-3, atol=2e-3, rtol=1e-3, nondet_tol=0.0)
    with pytest.raises(GradcheckError):  # and it can fail
        torch.autograd.gradcheck(
            lambda q, k, v: f(q, k, v) + (0.05 * q).detach(), inputs, eps=1e-3, atol=2e-3, rtol=1e-3
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


def test_a_dtype_and_d_without_a_backward_rung_names_those_there_are():
    q = torch.randn(1, 1, 5, 32).half().requires_grad_()
    with pytest.raises(
        NotImplementedError, match="no backward kernel for torch.float16 and D=32 .22_backward_fp32: fp32"
    ):
        op.operator("12_double_buffered")(q, q, q)[0].sum().backward()


# --- does the check bite? (That nobody waits for a turn shows on a GPU only: the emulator's CTAs add in turn anyway.)

MUTANTS = [
    (FP32, "P without the LSE", "* scale_log2 - LSE;", "* scale_log2;"),
    (FP32, "dS without delta", "*p *= dP_reg[r][c] - delta;", "*p *= dP_reg[r][c];"),
    (FP32, "dK without the scale", "dK_reg[r][c + e] *= a.scale;", ";"),
    (FP32, "a query sees one key of the future", "(a.causal && c * TX_s > seen)", "(a.causal && c * TX_s > seen + 1)"),
    (FP32, "one key too many in a window", "c * TX_s <= seen - a.window", "c * TX_s < seen - a.window"),
    (FP32, "the first tile of queries is one too late", "max(0, j0 - shift) / Br", "(max(0, j0 - shift) + Br - 1) / Br"),
    (FP32, "keys past the end have a P", "c * TX_s >= end ||", ""),
    (FP32, "a row that sees nothing divides by nothing", "LSE == -FA_INFINITY ? FA_INFINITY : LSE", "false ? FA_INFINITY : LSE"),
    (FP32, "each query head overwrites its group's dK", "int h = work.hk * group", "int h = work.hk * group + group - 1"),
    (FP32, "one slab fewer waited for", "fa::cp_async_wait<T::stages - 2>();", "fa::cp_async_wait<T::stages - 1>();"),
    (MMA, "P without the LSE", "* scale_log2 - (e % 2 ? LSE.y : LSE.x);", "* scale_log2;"),
    (MMA, "LSE by rows, not by columns", "(e % 2 ? LSE.y : LSE.x)", "(e / 2 ? LSE.y : LSE.x)"),
    (MMA, "dS without delta", "(dP_reg[m][n][c + 1] - delta.y)", "(dP_reg[m][n][c + 1])"),
    (MMA, "dS^T's matrices in the order of dS", "at<Br>(16 * k + row_B, (row_q + 16 * m) / 8 + chunk_B)", "at<Br>(16 * k + row_A, (row_q + 16 * m) / 8 + chunk_A)"),
    (MMA, "dS read before it is written", "    __syncthreads(); // all of dS", "    // all of dS"),
    (MMA, "dS overwritten before it is read", "    __syncthreads(); // as above", "    if (warp < 2) __syncwarp(); // as above"),
    (MMA, "a query sees one key of the future", "(a.causal && key - query > ahead)", "(a.causal && key - query > ahead + 1)"),
    (MMA, "keys past the end have a P", "key >= left ||", ""),
    (MMA, "masked before it is scaled", "? LSE.y : LSE.x);\n", "? LSE.y : LSE.x), S_reg[m][n][e] = a.scale < 0.f && a.causal ? -S_reg[m][n][e] : S_reg[m][n][e];\n"),
    (MMA, "dQ without the scale", "fa::pack2<T>(x * a.scale, y * a.scale)", "fa::pack2<T>(x, y)"),
    (MMA, "dQ's rows out of order", "g + e / 2 % 2 * 8,", "g + e % 2 * 8,"),
    (MMA, "no wait for a step", "    fa::cp_async_wait<0>();\n    //", "    //"),
]  # fmt: skip


@pytest.mark.parametrize(("stem", "bug", "old", "new"), MUTANTS, ids=[f"{m[0][:2]} {m[1]}" for m in MUTANTS])
def test_a_seeded_bug_is_caught(stem, bug, old, new):
    kernel = load(source=rung(stem).replace(old, new), device="cpu", quiet=True)
    kernel.launcher.timeout = 60
    cases = (c for c in reference.cases(kernel.rung, "cpu", "small"))
    caught = next((report for c in cases if not (report := check(kernel, [c])).ok), None)
    assert caught is not None or found(kernel), (
        f"{stem} with this bug passes every case, and the X-ray finds nothing: {bug}"
    )


def found(kernel) -> bool:
    """Whether a traced call with tails and several tiles stops at an error, or its trace has a finding."""
    one = case(1, 2, 2, 150, 300, 64, reference.DTYPES[kernel.rung.dtypes[0]])
    call = prepare(kernel.rung, "cpu", one.inputs, scale=None)
    return bool(kernel.launcher.trace(call.args, call.tensors).findings)


@pytest.mark.parametrize("stem", [FP32, MMA])
def test_the_unmodified_rung_is_not(stem):
    """Nothing is found in the rung itself: a finding says something of a mutant."""
    assert not found(load(stem, device="cpu", quiet=True))
