"""FlashAttention's packages as peers: found where they can be imported, called in their layout, their versions told."""

import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers import bench, record, reference, rung, workloads
from helpers.measure import libraries, recording


class Fake(types.ModuleType):
    """A package's module whose flash_attn_func is PyTorch's attention in the layout (B,N,H,D), on 16-bit inputs only."""

    def __init__(self, name, lse=False, **attributes):
        super().__init__(name)
        self.lse, self.calls, self.deterministic = lse, [], set()
        vars(self).update(attributes)

    def flash_attn_func(self, q, k, v, causal=False, deterministic=False):
        if q.dtype == torch.float32:
            raise AssertionError  # without a word, as an assert does
        self.calls.append((tuple(q.shape), tuple(k.shape), causal))
        self.deterministic.add(deterministic)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return (o, None) if self.lse else o


@pytest.fixture
def fakes(monkeypatch):
    """FA3 and FA4, FA4 in a namespace package where there is no FA2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    namespace = types.ModuleType("flash_attn")
    namespace.__path__ = []
    made = {
        "flash_attn_interface": Fake("flash_attn_interface", __version__="3.0.0", __compiler__="nvcc 13.0"),
        "flash_attn": namespace,
        "flash_attn.cute": Fake("flash_attn.cute", lse=True, __version__="0.0.0"),
    }
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    version = libraries.importlib.metadata.version

    def versions(name):
        return "4.0.0b36" if name == "flash-attn-4" else version(name)

    monkeypatch.setattr(libraries.importlib.metadata, "version", versions)
    return made["flash_attn_interface"], made["flash_attn.cute"]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("causal", [False, True])
def test_they_are_peers_with_a_transposed_layout(fakes, causal):
    q, k, v = randn(2, 6, 40, 64), randn(2, 3, 40, 64, seed=1), randn(2, 3, 40, 64, seed=2)
    o, _ = reference.attention(q, k, v, causal=causal)
    found = bench.peers(q, k, v, causal=causal)
    assert {"FA3", "FA4"} <= set(found) and "flash_attn" not in found
    for name in ("FA3", "FA4"):
        assert (found[name](q, k, v) - o).abs().max() < 2e-3
    assert fakes[0].calls[-1] == ((2, 40, 6, 64), (2, 40, 3, 64), causal)


def test_what_is_left_out_is_not_imported(fakes, monkeypatch):
    imported = []
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: imported.append(name) or fakes[0])
    assert "FA3" in bench.peers(*[randn(1, 1, 8, 64)] * 3, without=["FA4", "flash_attn"])
    assert imported == ["flash_attn_interface"]


def test_a_package_that_lacks_a_library_is_absent(monkeypatch):
    def fails(name):
        raise OSError("libfa3.so: cannot open shared object file")

    monkeypatch.setattr(libraries.importlib, "import_module", fails)
    assert libraries.found() == {} and libraries.versions(["FA3", "FA4"]) == {}


def test_one_that_refuses_fp32_without_a_word_is_no_peer(fakes):
    q = randn(1, 1, 8, 64).float()
    assert "FA4" not in bench.peers(q, q, q)
    assert bench.refusal(libraries.found()["FA4"], q, q, q) == "AssertionError"


def test_versions_are_those_of_the_distribution_or_of_the_module(fakes):
    assert libraries.versions(["FA3", "SDPA FLASH"]) == {"FA3": "3.0.0, nvcc 13.0"}
    assert libraries.versions(["FA4"]) == {"FA4": "4.0.0b36"}


def test_a_record_tells_the_versions_of_its_peers(fakes, monkeypatch):
    import pandas as pd

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91400)
    frame = pd.DataFrame({"name": ["32_ping_pong", "FA3", "SDPA CUDNN"]})
    assert recording._versions(frame) == {"peers": {"SDPA CUDNN": "cuDNN 91400", "FA3": "3.0.0, nvcc 13.0"}}
    assert recording._versions(frame[:1]) == {} and recording._versions(pd.DataFrame({"batch": [0]})) == {}


@pytest.mark.parametrize("causal", [False, True])
def test_their_backward_pass_is_timed_alone(fakes, causal):
    q, k, v, do = (randn(1, 2, 40, 64, seed=i) for i in range(4))
    calls = workloads.backward_peers(q, k, v, do, causal)
    expected = reference.attention_backward(q, k, v, do, causal=causal)
    for name in ("FA3", "FA4"):
        forward = len(fakes[0].calls)
        for got, x in zip(calls[name](), expected, strict=True):
            assert (got - x).abs().max() < 1e-2
        assert len(fakes[0].calls) == forward
    assert "flash_attn" not in calls


def test_the_price_of_one_order_is_told_beside_fa3s(fakes, monkeypatch):
    import pandas as pd

    def measure(calls, inputs=(), **options):
        for call in calls.values():
            call()
        return pd.DataFrame([(name, 0, 1.0 + name[1]) for name in calls], columns=["name", "round", "ms"])

    ours = []
    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(workloads, "TOKENS", 16)
    monkeypatch.setattr(workloads, "WIDTH", 128)
    monkeypatch.setattr(workloads, "IN_ORDER", (16,))
    frame = workloads.deterministic(lambda *x, **options: ours.append(options), rung("33_backward_wgmma"))
    assert {options["deterministic"] for options in ours} == {False, True}
    assert fakes[0].deterministic == {False, True}
    prices = record.price_of_order(frame)
    assert set(prices["name"]) == {"33_backward_wgmma", "FA3"} and (prices["ratio"] == 2.0).all()


def test_groups_are_timed_beside_them(fakes, monkeypatch):
    import pandas as pd

    names = []

    def measure(calls, inputs=(), **options):
        for call in calls.values():
            call(*inputs)
        names.extend(calls)
        return pd.DataFrame([(name, 0, 1.0) for name in calls], columns=["name", "round", "ms"])

    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(workloads, "GROUPS", (4, 2))
    monkeypatch.setattr(workloads, "GROUPED", ((1, 16),))
    frame = workloads.groups(lambda q, k, v, causal: q, rung("20_causal_gqa"))
    assert {("FA3", 2), ("FA4", 2), ("20_causal_gqa", 4)} <= set(names)
    assert set(frame.loc[frame["name"] == record.FA3, "Hkv"]) == {2}
