"""Tile shapes by measurement: the arithmetic of the winners, who gets them, and the grid itself."""

import dataclasses
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from helpers import Kernel, check, load, record, reference, rung, tune
from helpers.ladder.rung import parse
from helpers.record import tiles
from helpers.run.reference import Case

STEM = "13_tuned"
GPU = "Some GPU"
FAST, SLOW = (4, 64, 2, 2, 4), (4, 32, 2, 3, 4)


def samples(times: dict[tuple, float], lengths=(1024, 4096)) -> pd.DataFrame:
    """Three rounds of each shape for every dtype and D; the middle one counts."""
    rows = [
        (dtype, 1, 1, n, n, D, *shape, r, ms * n * (1, 5, 0.2)[r])
        for dtype in ("fp16", "bf16")
        for D in (64, 128)
        for shape, ms in times.items()
        for n in lengths
        for r in range(3)
    ]
    return pd.DataFrame(rows, columns=["dtype", *record.SHAPE, *tune.COLUMNS, "round", "ms"])


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A record of this rung on a GPU of its own, which this machine pretends to have."""
    monkeypatch.setattr("helpers.record.store.this_device", lambda: GPU)
    record.save(STEM, "tiles", samples({FAST: 1.0, SLOW: 1.1}), known={"device": GPU}, root=tmp_path)
    return tmp_path


def test_the_median_over_rounds_and_the_geometric_mean_over_lengths_decide():
    uneven = samples({FAST: 1.0, SLOW: 1.1})
    uneven.loc[(uneven["Nk"] == 1024) & (uneven["Bc"] == SLOW[1]) & (uneven["D"] == 128), "ms"] *= 0.8
    found = tune.best(uneven)
    assert found["fp16", 64] == found["bf16", 64] == FAST
    assert found["fp16", 128] == found["bf16", 128] == SLOW  # 0.8 at one length, 1.1 at both


def test_a_shape_that_lacks_a_length_is_out():
    gaps = samples({FAST: 1.0, SLOW: 1.1})
    gaps = gaps[(gaps["Nk"] == 1024) | (gaps["Bc"] == SLOW[1])]
    assert set(tune.best(gaps).values()) == {SLOW}


def test_the_loader_passes_the_winners_to_the_rung_as_it_stands(recorded):
    found = rung(STEM)
    row = "{4, 64, 2, 2, 4}"
    assert tiles.definition(found, recorded) == f"#define FA_TILES {row}, {row}, {row}, {row}\n"


def test_nothing_else_gets_them(recorded, monkeypatch):
    found, other = rung(STEM), rung("04_fa2_fp32")
    edited = dataclasses.replace(found, source=found.source.replace("-3e38f", "-2e38f"))
    assert tiles.definition(edited, recorded) == ""
    assert tiles.definition(parse(found.source, Path("cell")), recorded) == ""
    assert tiles.definition(other, recorded) == ""
    monkeypatch.setattr("helpers.record.store.this_device", lambda: "Another GPU")
    assert tiles.definition(found, recorded) == ""
    monkeypatch.setattr("helpers.record.store.this_device", lambda: None)
    assert tiles.definition(found, recorded) == ""


def test_a_record_of_other_code_counts_no_more(recorded):
    about = recorded / record.slug(GPU) / f"{STEM}.tiles.json"
    about.write_text(about.read_text().replace(rung(STEM).digest, "0" * 64))
    assert tiles.definition(rung(STEM), recorded) == ""


def test_the_grid_has_the_rungs_own_shapes():
    source = rung(STEM).source
    for D in rung(STEM).D:
        assert len(set(tune.GRID[D])) == len(tune.GRID[D])
        assert any("{" + ", ".join(map(str, shape)) + "}" in source for shape in tune.GRID[D])


@pytest.mark.parametrize("shapes", [((4, 32, 3, 2, 2), (4, 32, 2, 2, 8)), ((4, 128, 2, 1, 0), (4, 48, 3, 2, 5))])
def test_other_shapes_are_right_too(shapes):
    """More stages, fewer and more keys per tile, Q in registers in part and as a whole."""
    kernel: Kernel = load(source=tune.with_shapes(rung(STEM), shapes * 2), device="cpu", quiet=True)
    torch.manual_seed(0)

    def case(D: int, dtype: str) -> Case:
        q, k, v = (torch.randn(1, 1, n, D).to(reference.DTYPES[dtype]) for n in (130, 300, 300))
        return Case(f"D={D}, {dtype}", q, k, v)

    check(kernel, [case(D, dtype) for D in (64, 128) for dtype in ("fp16", "bf16")]).require()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="on a GPU only"):
        tune.record_tiles(STEM)


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_small_grid_measured():
    found = rung(STEM)
    grid = {64: [FAST, (4, 64, 15, 2, 4)], 128: [(4, 64, 2, 2, 0)]}  # 15 stages of 16 KB fit in no shared memory
    table, skipped = tune.measure(found, rounds=3, grid=grid)
    assert tune.best(table) == {(t, D): grid[D][0] for t in found.dtypes for D in found.D}
    assert len(skipped) == 1 and "(4, 64, 15, 2, 4)" in skipped[0]
