"""A rung beside the peers on one sequence of few heads."""

import pandas as pd
import torch

from helpers import bench, record, reference, rung
from helpers.measure import by_family, one_sequence


def test_the_grid_is_one_sequence_of_few_rows():
    grid = pd.DataFrame([cell.about for cell in one_sequence.cells(rung("32_ping_pong"))])
    rows = grid["H"] * grid["Nq"]
    assert (grid["B"] == 1).all() and rows.between(1 << 13, 1 << 17).all() and not grid.duplicated().any()
    assert set(grid["Nk"]) == set(one_sequence.LENGTHS) and set(grid["H"]) == set(one_sequence.HEADS)
    assert (
        rows.min() / 192 < 132 / 2 and rows.max() / 192 > 4 * 132
    )  # tiles of 32 at D = 64: half an H200's SMs, and several for each
    assert set(grid["D"]) == {64, 128} and set(grid["causal"]) == {0, 1} and set(grid["dtype"]) == {"bf16"}
    assert not any(cell.causal for cell in one_sequence.cells(rung("13_tuned")))


def test_tensors_have_the_shape_and_dtype_of_the_cell(monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    cell = one_sequence.Cell("bf16", True, 4, 33, 64)
    q, k, v, do = cell.tensors(gradient=True)
    assert {x.shape for x in (q, k, v, do)} == {(1, 4, 33, 64)} and q.dtype == torch.bfloat16
    assert not torch.equal(q, k) and len(cell.tensors(gradient=False)) == 3


def test_a_rung_is_timed_at_every_cell_beside_the_peers(monkeypatch):
    def measure(calls, inputs=(), rounds=2, **options):
        for call in calls.values():
            call()
        return pd.DataFrame([(name, 0, 1.0) for name in calls], columns=["name", "round", "ms"])

    seen = set()

    def kernel(q, k, v, causal=False):
        seen.add((*q.shape, causal))
        return reference.same_precision(q, k, v, causal=causal)

    monkeypatch.setattr(one_sequence, "LENGTHS", (20, 40))
    monkeypatch.setattr(one_sequence, "ROWS", (80, 200))
    monkeypatch.setattr(one_sequence, "WITHOUT", ())
    monkeypatch.setattr(by_family, "measure", measure)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    frame = one_sequence.timings(kernel, rung("32_ping_pong"))
    assert list(frame) == ["dtype", "name", "causal", *record.SHAPE, "round", "ms"]
    assert seen == {(1, H, N, D, c) for H, N in ((4, 20), (8, 20), (4, 40)) for D in (64, 128) for c in (False, True)}
    assert {"32_ping_pong", "SDPA FLASH"} <= set(frame["name"])
