"""A record of any card is sound before it is taken in: every one in data/ is, and each rule has something to say."""

import json

import pandas as pd
import pytest

from helpers import record
from helpers.record.schema import COLUMNS, faults

RECORDS = sorted(p for p in record.DATA.glob("*/*.csv") if p.parent.name not in ("published", "heads"))
CARD = {
    "device": "NVIDIA GeForce RTX 4090",
    "driver": "580",
    "memory_mib": 24564.0,
    "torch": "2.11",
    "cuda": "13.0",
    "python": "3.12",
    "date": "2026-01-31",
}


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_record_is_sound(path):
    assert not faults(path)


def of_a_4090(root, stem="04_fa2_fp32", **columns):
    """A forward record of another card, each of `columns` in place of its own."""
    shape = {"name": stem, "dtype": "fp32", "B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}
    frame = pd.DataFrame([shape | {"round": r, "ms": 1.5} for r in range(7)]).assign(**columns)
    return record.save(stem, "forward", frame, known=CARD, root=root)


def test_a_record_of_another_card_is_sound_and_is_loaded_by_its_name(tmp_path):
    path = of_a_4090(tmp_path)
    assert path.parent.name == "nvidia-geforce-rtx-4090" and not faults(path)
    loaded = record.load("04_fa2_fp32", device=CARD["device"], root=tmp_path)
    assert loaded["ms"].eq(1.5).all() and not loaded["stale"].any()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"ms": 0.0}, "not above 0 in ms"),
        ({"ms": None}, "empty cells in ms"),
        ({"round": 0}, "1 rounds of something; a 'forward' record has at least 7"),
        ({"name": ["04_fa2_fp32"] * 6 + ["SDPA MATH"]}, "1 rounds of something"),
        ({"name": "SDPA MATH"}, "no row of 04_fa2_fp32 itself"),
        ({"note": "fast"}, "has the columns name, dtype, B, H, Nq, Nk, D, round, ms, note"),
    ],
)
def test_samples_that_can_not_be(tmp_path, columns, words):
    (fault,) = faults(of_a_4090(tmp_path, **columns))
    assert words in fault


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"device": "NVIDIA A10"}, "belongs into data/nvidia-a10/"),
        ({"kind": "causal"}, "its name would be 04_fa2_fp32.causal.csv"),
        ({"rung": "04_mine"}, "is no rung"),
        ({"digest": "12"}, "no digest"),
        ({"date": "31.1.2026"}, "written like 2026-01-31"),
        ({"driver": None}, "lacks driver"),
    ],
)
def test_conditions_that_can_not_be(tmp_path, known, words):
    path = of_a_4090(tmp_path)
    about = json.loads(path.with_suffix(".json").read_text()) | known
    path.with_suffix(".json").write_text(json.dumps({k: v for k, v in about.items() if v is not None}))
    assert any(words in fault for fault in faults(path))


def test_files_that_are_not_there_or_no_json(tmp_path):
    path = of_a_4090(tmp_path)
    path.with_suffix(".json").write_text("{")
    assert "is no JSON" in faults(path)[0]
    path.with_suffix(".json").unlink()
    assert "has no 04_fa2_fp32.forward.json beside it" in faults(path)[0]


def test_a_wrong_kernel_is_not_recorded(tmp_path):
    row = ("fp32", 256, 256, 64, "o", 2e-3, 1e-6, 1e-3)
    path = record.save(
        "04_fa2_fp32", "error", pd.DataFrame([row], columns=[*COLUMNS["error"]]), known=CARD, root=tmp_path
    )
    assert "an error beyond its budget" in faults(path)[0]
