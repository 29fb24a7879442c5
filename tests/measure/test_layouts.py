"""A rung beside the peers in both layouts of memory, with grouped heads, at odd lengths."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from helpers import bench, record, reference, rung
from helpers.measure import by_family, layouts
from helpers.record import goals


@pytest.fixture
def small(monkeypatch):
    def measure(calls, inputs=(), rounds=2, **options):
        rows = [(name, r, 2.0 if name == "FA3" else 1.0) for r in range(rounds) for name in calls]
        for call in calls.values():
            call()
        return pd.DataFrame(rows, columns=["name", "round", "ms"])

    for name, value in dict(TOKENS=80, WIDTH=512, LENGTHS=(40, 33)).items():
        monkeypatch.setattr(layouts, name, value)
    monkeypatch.setattr(layouts, "WITHOUT", ())
    monkeypatch.setattr(by_family, "measure", measure)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def test_the_grid_has_everything_and_headline_shapes():
    grid = pd.DataFrame([cell.about for cell in layouts.cells(rung("32_ping_pong"))])
    assert len(grid) == 2**5 * 6 and not grid.duplicated().any()
    assert grid["B"].mul(grid["Nq"]).between(12288, 16384).all() and grid["H"].mul(grid["D"]).eq(2048).all()
    assert set(grid["H"] // grid["Hkv"]) == {1, 4} and {1000, 4097} < set(grid["Nk"])
    assert {c.group for c in layouts.cells(replace(rung("32"), features=("causal",)))} == {1}


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_tensors_lie_as_the_layout_says(small, layout):
    q, k, v, do = layouts.Cell(layout, "bf16", True, 40, 64, 4).tensors(gradient=True)
    assert q.shape == do.shape == (2, 8, 40, 64) and k.shape == v.shape == (2, 2, 40, 64)
    assert q.dtype == torch.bfloat16 and len({x.data_ptr() for x in (q, k, v, do)}) == 4
    assert not torch.equal(k, v)
    assert all(x.transpose(1, 2).is_contiguous() == (layout == "BNHD") for x in (q, do))


def test_a_rung_is_timed_in_every_layout(small):
    seen = set()

    def kernel(q, k, v, causal=False):
        seen.add((q.is_contiguous(), causal, q.shape[1] // k.shape[1], q.shape[2]))
        return reference.same_precision(q, k, v, causal=causal)

    frame = layouts.timings(kernel, rung("32_ping_pong"))
    assert list(frame) == ["layout", "name", "dtype", "causal", *record.SHAPE, "Hkv", "round", "ms"]
    assert len(seen) == 16
    assert {"32_ping_pong", "SDPA FLASH"} <= set(frame["name"])


def test_the_backward_pass_gets_o_in_the_layout_of_its_gradient(small, monkeypatch):
    monkeypatch.setattr(layouts, "LENGTHS", (40,))

    def kernel(q, k, v, o, lse, do, causal=False):
        assert o.stride() == do.stride()
        expected, _ = reference.attention(q, k, v, causal=causal)
        torch.testing.assert_close(o.double(), expected, rtol=0.02, atol=0.02)
        return q, k, v

    few = replace(rung("33_backward_wgmma"), dtypes=("fp16",), D=(64,))
    frame = layouts.timings(kernel, few)
    assert (
        frame.loc[frame["name"] == few.stem].groupby("layout").size().eq(4 * by_family.ROUNDS).all()
    )  # none was refused


def test_goals_take_every_layout_length_and_head_count(small, tmp_path):
    from conditions import CONDITIONS

    rows = [
        cell.about
        | {"name": name, "round": 0, "ms": 1.0 if name == "32_ping_pong" else 1.1 if cell.group == 1 else 1.21}
        for cell in layouts.cells(rung("32_ping_pong"))
        for name in ("32_ping_pong", "FA3")
    ]
    frame = pd.DataFrame(rows).assign(Nk=lambda f: f["Nk"].map({40: 1000, 33: 512}))
    record.save("32_ping_pong", "layouts", frame, known=CONDITIONS, root=tmp_path)
    table = goals.verdicts(["32_ping_pong"], tmp_path).set_index("what")
    row = table.loc["layouts × FA3 D == 128 and causal == 1"]
    assert (
        row["mean"] == pytest.approx(1.1 * 1.1**0.5, abs=1e-3) and row["worst"] == 1.1 and row["verdict"] == "reached"
    )
    assert table.loc["layouts × FA3 causal == 0 N == 512", "verdict"] == "reached"
    assert table.loc["layouts × FA4 causal == 0 N == 512", "verdict"] == "not recorded"
    longer = frame.assign(ms=frame["ms"].where((frame["name"] != "FA3") | (frame["Nk"] == 512), 0.5))
    record.save("32_ping_pong", "layouts", longer, known=CONDITIONS, root=tmp_path)
    table = goals.verdicts(["32_ping_pong"], tmp_path).set_index("what")
    assert table.loc["layouts × FA3 causal == 0 N == 512", "verdict"] == "reached"  # whatever the longer ones are


def test_masks_are_those_a_rung_takes():
    assert by_family.masks(rung("13")) == (False,) and by_family.masks(rung("32")) == (False, True)
    assert by_family.masks(rung("23")) == (False, True)
