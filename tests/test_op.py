"""Every rung as a PyTorch operator."""

import pytest
import torch

from helpers import load, op, rungs


def inputs(rung) -> tuple:
    torch.manual_seed(0)
    return (torch.randn(3, 40),) if rung.op == "softmax" else tuple(torch.randn(1, 2, 33, 64) for _ in range(3))


@pytest.mark.parametrize("rung", rungs(), ids=lambda r: r.stem)
def test_opcheck(rung):
    results = torch.library.opcheck(op.operator(rung.stem), inputs(rung))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("rung", rungs(), ids=lambda r: r.stem)
def test_the_operator_is_the_kernel(rung):
    for got, expected in zip(
        op.operator(rung.stem)(*inputs(rung)), load(rung.stem, device="cpu", quiet=True)(*inputs(rung))
    ):
        assert torch.equal(got, expected)


class Attention(torch.nn.Module):
    def __init__(self, stem: str, heads: int = 2, d: int = 32) -> None:
        super().__init__()
        self.project, self.heads, self.attend = torch.nn.Linear(heads * d, 3 * heads * d), heads, op.operator(stem)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("stem", ["01_naive", "03_fa1_fp32", "04_fa2_fp32"])
def test_a_module_compiles_without_a_graph_break(stem):
    torch.manual_seed(0)
    module, x = Attention(stem), torch.randn(2, 37, 64)
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected)


def test_a_gradient_is_refused_by_name():
    q, k, v = (torch.randn(1, 2, 33, 64, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="03_fa1_fp32 has no backward kernel; call it on q.detach"):
        op.operator("03_fa1_fp32")(q, k, v)[0].sum().backward()


def test_an_unknown_rung_names_the_rungs():
    with pytest.raises(ValueError, match="no rung 'flash'; the rungs are 01_naive"):
        op.operator("flash")


def test_wrong_shapes_are_the_contracts_to_refuse():
    with pytest.raises(ValueError, match="head dimension 48"):
        op.operator("03_fa1_fp32")(*(torch.randn(1, 1, 8, 48) for _ in range(3)))
