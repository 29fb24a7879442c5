"""A record keeps its samples and conditions, says when it is stale, and is read without torch."""

import json
import math
import subprocess
import sys

import pandas as pd
import pytest

from helpers import record
from helpers.ladder import rung

CONDITIONS = {"device": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0, "date": "2026-01-01"}
SHAPE = {"B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}


def samples(times, **shape):
    """Forward samples from {name: [ms of each round]}."""
    rows = [
        {"name": n, "dtype": "fp32", **SHAPE, **shape, "round": r, "ms": ms}
        for n, all_ms in times.items()
        for r, ms in enumerate(all_ms)
    ]
    return pd.DataFrame(rows)


def save(root, frame, stem="04_fa2_fp32", kind="forward", **known):
    return record.save(stem, kind, frame, known=CONDITIONS | known, root=root)


def test_what_is_saved_is_loaded(tmp_path):
    frame = samples({"04_fa2_fp32": [1.25, 1.5], "SDPA MATH": [2.0, 2.125]})
    frame.attrs["method"] = "events"
    path = save(tmp_path, frame)
    assert path.relative_to(tmp_path).as_posix() == "nvidia-h200/04_fa2_fp32.forward.csv"
    loaded = record.load("04_fa2_fp32", device="NVIDIA H200", root=tmp_path)
    pd.testing.assert_frame_equal(loaded[frame.columns.tolist()], frame)
    assert set(loaded["device"]) == {"NVIDIA H200"}
    assert set(loaded["op"]) == {"attention"}
    assert not loaded["stale"].any()
    about = record.about("04_fa2_fp32", device="nvidia-h200", root=tmp_path)
    assert about["method"] == "events"
    assert about["flops"] == "4*B*H*Nq*Nk*D"
    assert about["digest"] == rung("04_fa2_fp32").digest
    assert about["power_limit_w"] == 700.0


def test_files_are_plain_text_that_diffs_well(tmp_path):
    path = save(tmp_path, samples({"04_fa2_fp32": [1 / 3]}))
    assert path.read_text() == "name,dtype,B,H,Nq,Nk,D,round,ms\n04_fa2_fp32,fp32,4,32,4096,4096,64,0,0.333333\n"
    assert path.with_suffix(".json").read_text().count("\n") > len(CONDITIONS)


def test_a_record_of_another_source_is_stale(tmp_path):
    path = save(tmp_path, samples({"04_fa2_fp32": [1.0]})).with_suffix(".json")
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"digest": "0" * 64}))
    assert record.load("04_fa2_fp32", device="nvidia-h200", root=tmp_path)["stale"].all()
    path.write_text(json.dumps(about | {"rung": "04_gone"}))
    assert record.load("04_fa2_fp32", device="nvidia-h200", root=tmp_path)["stale"].all()


def test_figures_of_the_device_itself_belong_to_no_rung(tmp_path):
    frame = pd.DataFrame([("copy", "TB/s", 0, 4.2)], columns=["name", "unit", "round", "value"])
    save(tmp_path, frame, "device", "ceilings")
    loaded = record.load("device", "ceilings", root=tmp_path)
    assert loaded["value"].tolist() == [4.2]
    assert not loaded["stale"].any()


def test_all_rungs_load_as_one_frame(tmp_path):
    for stem in ("03_fa1_fp32", "04_fa2_fp32"):
        save(tmp_path, samples({stem: [1.0], "SDPA MATH": [2.0]}), stem)
    loaded = record.load(root=tmp_path)
    assert loaded["rung"].tolist() == ["03_fa1_fp32"] * 2 + ["04_fa2_fp32"] * 2


def test_the_device_shown_is_this_machines_if_recorded_and_the_h200_otherwise(tmp_path, monkeypatch):
    save(tmp_path, samples({"04_fa2_fp32": [1.0]}))
    save(tmp_path, samples({"04_fa2_fp32": [9.0]}), device="NVIDIA A10")
    assert record.devices(tmp_path) == ["nvidia-h200", "nvidia-a10"]
    for here, ms in ((None, 1.0), ("NVIDIA A10", 9.0), ("NVIDIA GeForce RTX 4090", 1.0)):
        monkeypatch.setattr(record, "this_device", lambda here=here: here)
        assert record.load("04_fa2_fp32", root=tmp_path)["ms"].tolist() == [ms]
    save(tmp_path, samples({"03_fa1_fp32": [5.0]}), stem="03_fa1_fp32")  # on the H200 alone
    monkeypatch.setattr(record, "this_device", lambda: "NVIDIA A10")
    assert record.load("03_fa1_fp32", root=tmp_path)["ms"].tolist() == [5.0]


def test_a_missing_record_says_what_there_is(tmp_path):
    save(tmp_path, samples({"04_fa2_fp32": [1.0]}))
    with pytest.raises(
        LookupError, match=r"no 'forward' record of 01_naive on nvidia-h200 \(recorded there: 04_fa2_fp32.forward\)"
    ):
        record.load("01_naive", device="nvidia-h200", root=tmp_path)
    with pytest.raises(LookupError, match="make bench"):
        record.about("01_naive", device="nvidia-b200", root=tmp_path)
    with pytest.raises(LookupError, match="no published table 'x'; there are flash_attention_from_scratch, h200_peers"):
        record.published("x")


def test_nothing_is_recorded_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "query_gpu", lambda *_: None)
    with pytest.raises(RuntimeError, match="on a GPU only"):
        record.save("04_fa2_fp32", "forward", samples({"04_fa2_fp32": [1.0]}), root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_flops_and_bytes_are_counted_by_hand():
    # B=1 H=2 Nq=3 Nk=5 D=7: QK^T and PV are 3*5 dot products of length 7 and 3*7 of length 5, 2 operations a term, 2 heads
    assert record.forward_flops(1, 2, 3, 5, 7) == 2 * (3 * 5 * 7 * 2 + 3 * 7 * 5 * 2)
    assert record.forward_bytes(1, 2, 3, 5, 7) == 2 * 4 * (3 * 7 + 5 * 7 + 5 * 7 + 3 * 7 + 3)
    assert record.forward_bytes(1, 2, 3, 5, 7, itemsize=2) == 2 * (2 * (3 * 7 + 5 * 7 + 5 * 7 + 3 * 7) + 4 * 3)
    assert record.softmax_bytes(3, 5) == 4 * (15 + 15 + 3)


def test_medians_carry_the_unit_of_the_operation():
    frame = record.medians(samples({"a": [2.0, 1.0, 9.0]}))
    assert frame[["ms", "ms_low", "ms_high"]].values.tolist() == [[2.0, 1.0, 9.0]]
    assert frame["tflops"].item() == pytest.approx(4 * 4 * 32 * 4096**2 * 64 / 2e-3 / 1e12)
    assert frame["tb_per_s"].isna().all()
    shape = {"B": 1, "H": 1, "Nq": 1000, "Nk": 500, "D": 1}
    frame = record.medians(samples({"a": [1.0]}, **shape).assign(op="softmax"))
    assert frame["tb_per_s"].item() == pytest.approx(record.softmax_bytes(1000, 500) / 1e-3 / 1e12)
    assert frame["tflops"].isna().all()


def test_a_ratio_is_formed_within_each_round():
    """Clocks that wander slow both alike: round by round the ratio is 2, though the medians' is not."""
    frame = samples({"ours": [1.0, 4.0, 1.1], "peer": [2.0, 8.0, 2.2]})
    found = record.ratio(frame, "ours", "peer")
    assert found[["ratio", "low", "high"]].values.tolist() == [[2.0, 2.0, 2.0]]
    frame = samples({"ours": [1.0, 1.0, 1.0], "peer": [1.0, 3.0, 2.0]})
    assert record.ratio(frame, "ours", "peer")[["ratio", "low", "high"]].values.tolist() == [[2.0, 1.0, 3.0]]
    with pytest.raises(LookupError, match="no samples of ours beside cuDNN; there are ours, peer"):
        record.ratio(frame, "ours", "cuDNN")


def test_a_ratio_uses_the_session_that_has_both():
    a = samples({"03": [1.0], "peer": [2.0]}).assign(rung="03")
    b = samples({"04": [1.0], "peer": [5.0]}).assign(rung="04")
    assert record.ratio(pd.concat([a, b]), "03", "peer")["ratio"].tolist() == [2.0]


def test_overall_is_the_geometric_mean_with_the_worst_and_best_shape():
    parts = []
    for N, ratio in ((512, 100.0), (1024, 0.5), (4096, 2.0), (16384, 8.0)):
        shape = {"B": 16384 // N, "Nq": N, "Nk": N}
        parts.append(samples({"ours": [1.0], "peer": [ratio]}, **shape))
    parts.append(samples({"ours": [1.0], "peer": [50.0]}, B=8, H=8, Nq=1024, Nk=1024))  # not the headline workload
    mean, low, high = record.overall(pd.concat(parts), "ours", "peer")
    assert (mean, low, high) == (pytest.approx(math.cbrt(0.5 * 2 * 8)), 0.5, 8.0)


def test_records_are_read_without_torch():
    code = "import sys; from helpers import record, plot, show, sass, readme; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=record.DATA.parent)


def test_the_documentation_names_every_kind_and_file_there_is():
    text = (record.DATA / "README.md").read_text()
    for path in record.DATA.glob("*/*.csv"):
        if path.parent.name == "published":
            assert f"`{path.name}`" in text
        else:
            stem, kind, _ = path.name.split(".")
            assert f"| `{kind}`" in text, path
            columns = path.read_text().split("\n", 1)[0].split(",")
            about = json.loads(path.with_suffix(".json").read_text())
            assert about["device"], path
            assert about["date"], path
            assert ("digest" in about) == (stem != "device"), path
            assert kind == "counters" or all(f"`{c}`" in text or c in "B H Nq Nk D" for c in columns), path


def test_published_tables_keep_their_columns():
    assert "correct" in record.published("h200_peers")
    assert len(record.published("h200_peers")) == 151
    assert record.published("leetcuda_readme_ada")["time_ms"].gt(0).all()
