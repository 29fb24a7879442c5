"""A record keeps its samples and conditions, says when it is stale, and is read without torch."""

import json
import subprocess
import sys

import pandas as pd
import pytest
from conditions import CONDITIONS

from helpers import record
from helpers.ladder.rung import rung
from helpers.record import SHAPE

ONE = {"B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}


def samples(times, **shape):
    """Forward samples from {name: [ms of each round]}."""
    rows = [
        {"name": n, "dtype": "fp32", **ONE, **shape, "round": r, "ms": ms}
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


def test_a_record_that_can_not_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = save(tmp_path, samples({"04_fa2_fp32": [1.25]}))
    before = path.read_text(), path.with_suffix(".json").read_text()
    monkeypatch.setattr(json, "dumps", lambda *_, **__: "\ud800")  # half of a letter: not to be written
    with pytest.raises(UnicodeEncodeError):
        save(tmp_path, samples({"04_fa2_fp32": [9.0]}))
    assert (path.read_text(), path.with_suffix(".json").read_text()) == before


def test_a_record_replaces_the_one_before(tmp_path):
    for ms in (1.0, 9.0):
        save(tmp_path, samples({"04_fa2_fp32": [ms]}))
    assert record.load("04_fa2_fp32", device="NVIDIA H200", root=tmp_path)["ms"].tolist() == [9.0]
    assert not list(tmp_path.rglob("*.new"))


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
    for here, ms in ((None, 1.0), ("NVIDIA A10", 9.0), ("NVIDIA GeForce RTX 4090", 1.0)):
        monkeypatch.setattr("helpers.record.store.this_device", lambda here=here: here)
        assert record.load("04_fa2_fp32", root=tmp_path)["ms"].tolist() == [ms]
    save(tmp_path, samples({"03_fa1_fp32": [5.0]}), stem="03_fa1_fp32")  # on the H200 alone
    monkeypatch.setattr("helpers.record.store.this_device", lambda: "NVIDIA A10")
    assert record.load("03_fa1_fp32", root=tmp_path)["ms"].tolist() == [5.0]
    own = tmp_path / "nvidia-a10" / "04_fa2_fp32.forward.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"digest": "0" * 64}))
    assert record.load("04_fa2_fp32", root=tmp_path)["ms"].tolist() == [9.0]  # stale, but this machine's


def test_of_two_cards_the_first_whose_record_is_of_the_kernel_as_it_is_is_shown(tmp_path, monkeypatch):
    first, second = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    assert record.DEVICES == (record.slug(first), record.slug(second))
    monkeypatch.setattr("helpers.record.store.this_device", lambda: None)
    stems, shown = ("03_fa1_fp32", "04_fa2_fp32"), {}
    for stem in stems:
        for device, ms in ((first, 1.0), (second, 2.0), (f"{second} x2", 3.0)):
            shown[stem, device] = save(tmp_path, samples({stem: [ms]}), stem, device=device).with_suffix(".json")

    def times(stem=None, device=None):
        return record.load(stem, device=device, root=tmp_path)["ms"].tolist()

    assert times("04_fa2_fp32") == times("04_fa2_fp32", record.SHOWN) == [1.0]
    file = shown["04_fa2_fp32", first]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "0" * 64}))
    assert times("04_fa2_fp32") == [2.0] and times("03_fa1_fp32") == [1.0]
    assert times() == [2.0, 2.0]  # of all rungs those of one card
    assert times("04_fa2_fp32", first) == [1.0]  # which was asked for
    assert times("04_fa2_fp32", f"{record.SHOWN}-x2") == [3.0]
    file = shown["04_fa2_fp32", second]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "0" * 64}))
    assert times("04_fa2_fp32") == [1.0]  # both are stale: the first, which says so
    monkeypatch.setattr("helpers.record.store.this_device", lambda: second)
    assert times("04_fa2_fp32") == [2.0] and times("04_fa2_fp32", record.SHOWN) == [1.0]


def test_a_missing_record_says_what_there_is(tmp_path):
    save(tmp_path, samples({"04_fa2_fp32": [1.0]}))
    for asked, words in (
        (
            ("01_naive", "forward"),
            "no 'forward' record of 01_naive on nvidia-h200, nor one of another kind; `make bench`",
        ),
        (
            ("04_fa2_fp32", "error"),
            "no 'error' record of 04_fa2_fp32 on nvidia-h200; recorded of it: forward; `make bench`",
        ),
        (("04_fa2_fp32", "forwrd"), "no 'forwrd' record of 04_fa2_fp32 on nvidia-h200; recorded of it: forward$"),
        ((None, "forwrd"), "no 'forwrd' record on nvidia-h200; recorded there: forward$"),
        (("04", "forward"), "no records of '04': a record's stem is whole, like 04_fa2_fp32$"),
    ):
        with pytest.raises(LookupError, match=words):
            record.load(*asked, device="nvidia-h200", root=tmp_path)
    with pytest.raises(LookupError, match="make bench"):
        record.about("01_naive", device="nvidia-b200", root=tmp_path)
    with pytest.raises(LookupError, match="no published table 'x'; there are flash_attention_from_scratch, h200_peers"):
        record.published("x")


def test_nothing_is_recorded_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.record.device.query_gpu", lambda *_: None)
    with pytest.raises(RuntimeError, match="on a GPU only"):
        record.save("04_fa2_fp32", "forward", samples({"04_fa2_fp32": [1.0]}), root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_conditions_are_what_nvidia_smi_tells_of_them(monkeypatch):
    monkeypatch.setattr(record.device, "query_gpu", lambda *fields: list(fields))
    known = record.device.conditions()
    assert (known["device"], known["driver"], known["power_limit_w"]) == ("name", "driver_version", "power.limit")
    assert (known["memory_mib"], known["memory_clock_mhz"]) == ("memory.total", "clocks.mem")
    assert known["sm_clock_max_mhz"] == "clocks.max.sm"


def test_flops_and_bytes_are_counted_by_hand():
    # B=1 H=2 Nq=3 Nk=5 D=7: QK^T and PV are 3*5 dot products of length 7 and 3*7 of length 5, 2 operations a term, 2 heads
    assert record.forward_flops(1, 2, 3, 5, 7) == 2 * (3 * 5 * 7 * 2 + 3 * 7 * 5 * 2)
    assert record.forward_bytes(1, 2, 3, 5, 7) == 2 * 4 * (3 * 7 + 5 * 7 + 5 * 7 + 3 * 7 + 3)
    assert record.forward_bytes(1, 2, 3, 5, 7, itemsize=2) == 2 * (2 * (3 * 7 + 5 * 7 + 5 * 7 + 3 * 7) + 4 * 3)
    assert record.least_bytes("04_fa2_fp32", 1, 2, 3, 5, 7) == record.forward_bytes(1, 2, 3, 5, 7)
    formed = 2 * 4 * 2 * 2 * 3 * 5  # S and P, each written and read
    for name in ("01_naive", record.MATH):
        assert record.least_bytes(name, 1, 2, 3, 5, 7) == record.forward_bytes(1, 2, 3, 5, 7) + formed
    assert record.softmax_bytes(3, 5) == 4 * (15 + 15 + 3)


def test_medians_carry_the_unit_of_the_operation():
    frame = record.medians(samples({"a": [2.0, 1.0, 9.0]}))
    assert frame[["ms", "ms_low", "ms_high"]].values.tolist() == [[2.0, 1.0, 9.0]]
    assert frame["tflops"].item() == pytest.approx(4 * 4 * 32 * 4096**2 * 64 / 2e-3 / 1e12)
    assert frame["tb_per_s"].isna().all()
    assert record.medians(samples({"a": [2.0]}).assign(flops=4e9))["tflops"].tolist() == [2.0]
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
    assert (mean, low, high) == (pytest.approx((0.5 * 2 * 8) ** (1 / 3)), 0.5, 8.0)


def test_a_spread_is_the_geometric_mean_over_lengths():
    ratios = ((1024, 2.0), (4096, 8.0))
    frame = pd.concat(samples({"ours": [1.0], "peer": [x]}, family="randn", causal=0, Nq=N, Nk=N) for N, x in ratios)
    assert record.spread(frame, "ours")["peer"].tolist() == [pytest.approx(4)]


def test_a_packed_batch_beside_a_padded_one_is_the_median_of_the_rounds():
    batch = {"dtype": "fp16", "causal": 1, "H": 16, "D": 128, "batch": 0, "sequences": 2, "tokens": 9}
    times = enumerate(((6.0, 4.0), (3.0, 6.0), (9.0, 18.0)))
    frame = pd.DataFrame([batch | {"round": r, "ms": 2.0, "ideal_ms": i, "padded_ms": p} for r, (i, p) in times])
    found = record.ratio_to_ideal(frame)
    assert found[["ratio", "low", "high", "to_padded"]].values.tolist() == [[3.0, 1.5, 4.5, 3.0]]


def test_a_summary_is_by_dtype_and_head_dimension_and_names_the_worst_shape():
    parts = []
    for dtype, D, factor in (("fp16", 64, 1.0), ("fp16", 128, 2.0), ("bf16", 64, 3.0)):
        for N, ratio in ((512, 0.5), (1024, 2.0), (4096, 8.0)):
            shape = {"B": 16384 // N, "H": 2048 // D, "Nq": N, "Nk": N, "D": D}
            parts.append(samples({"ours": [1.0], "peer": [factor * ratio]}, **shape).assign(dtype=dtype))
    parts.append(samples({"ours": [1.0], "peer": [0.25]}, B=8, H=16, Nq=256, Nk=256).assign(dtype="fp16"))
    frame = record.summary(pd.concat(parts), "ours", "peer").set_index(["dtype", "D"])
    assert frame["mean"].to_dict() == pytest.approx({("fp16", 64): 4, ("fp16", 128): 8, ("bf16", 64): 12})
    assert frame.loc[("fp16", 64), ["low", "high", "worst", "at"]].tolist() == [2.0, 8.0, 0.25, "B8 H16 N256"]
    assert frame.loc[("bf16", 64), ["worst", "at"]].tolist() == [1.5, "B32 H32 N512"]


def test_errors_and_memory_recorded_before_there_was_a_dtype_are_fp32(tmp_path):
    old = pd.DataFrame([("04_fa2_fp32", 1, 1, 512, 512, 64, 9)], columns=["name", *SHAPE, "bytes"])
    save(tmp_path, old, kind="memory")
    assert record.load("04_fa2_fp32", "memory", root=tmp_path)["dtype"].tolist() == ["fp32"]


def test_records_are_read_without_torch():
    code = "import sys; from helpers import record, plot, show, sass; from helpers.record import goals, readme; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=record.DATA.parent)


def test_the_documentation_names_every_kind_and_file_there_is():
    text = (record.DATA / "README.md").read_text()
    for path in record.DATA.glob("*/*.csv"):
        if path.parent.name == "published":
            assert f"`{path.name}`" in text
        elif path.parent.name == "heads":
            assert f"| `{path.stem}` |" in text and f"`heads of {path.stem}`" in text
            assert all(f"`{c}`" in text for c in path.read_text().split("\n", 1)[0].split(","))
        else:
            stem, kind, _ = path.name.split(".")
            assert f"| `{kind}`" in text, path
            columns = path.read_text().split("\n", 1)[0].split(",")
            about = json.loads(path.with_suffix(".json").read_text())
            assert about["device"], path
            assert about["date"], path
            assert ("digest" in about) == (stem != "device"), path
            assert kind in ("counters", "patterns", "microkernels") or all(
                f"`{c}`" in text or c in "B H Nq Nk D" for c in columns
            ), path


def test_public_kernels_read_like_a_record():
    frame = record.public_kernels()
    assert not frame.duplicated(["name", "dtype", *SHAPE]).any()
    at = frame[(frame["dtype"] == "fp16") & (frame["D"] == 128) & (frame["Nk"] == 4096)].set_index("name")
    assert 515 < at.loc["Triton tutorial 06", "tflops"] < 525
    assert at.loc["SDPA FLASH", "to_flash"] == 1 and 300 < at.loc["SDPA FLASH", "tflops"] < 350
    assert at.loc["FlashAttention-3", "to_flash"] > at.loc["SDPA CUDNN", "to_flash"] > 1.5
    assert 1.05 < at.loc["flash_attention_from_scratch 16", "to_flash"] < 1.15
    assert {"LeetCUDA", "learn-cuda 07"} <= set(frame["name"])
    long = frame[(frame["Nk"] == 16384) & (frame["name"] == "LeetCUDA")]
    flops = record.forward_flops(*(long[c] for c in SHAPE))
    assert (flops / long["ms"] / 1e9 / long["tflops"]).between(0.99, 1.01).all()
    assert len(record.public_kernels(causal=True)) and set(record.public_kernels("bwd")["name"]) >= {"FlashAttention-3"}


def test_public_kernels_are_the_correct_ones_of_one_mask_beside_the_median_of_flash(tmp_path):
    rows = [(0, 100.0, 1), (0, 200.0, 1), (0, 600.0, 1), (0, 900.0, 0), (1, 50.0, 1)]  # causal, TFLOP/s, correct
    table = pd.DataFrame(rows, columns=["causal", "tflops", "correct"])
    table = table.assign(peer="x", variant="", direction="fwd", dtype="float16", B=4, H=16, N=4096, D=128, ms=1.0)
    table = table.assign(sdpa_flash_tflops=table["tflops"], sdpa_cudnn_tflops=table["tflops"], ratio_to_sdpa_flash=1.0)
    (tmp_path / "published").mkdir()
    table.to_csv(tmp_path / "published" / "h200_peers.csv")
    for causal, speeds, median in ((False, [100, 200, 600], 200), (True, [50], 50)):
        found = record.public_kernels(causal=causal, root=tmp_path).groupby("name")["tflops"].agg(list).to_dict()
        assert found == {"x": speeds, "SDPA FLASH": [median], "SDPA CUDNN": [median]}


def test_steps_have_one_row_each_and_a_column_for_every_head_dimension():
    rows = [
        (1, "a", "why", "yes", 64, 1.5, 1.25, 0),
        (1, "a", "why", "no", 128, 2.0, 1.0, 16),
        (2, "b", "so", "no", 64, 3.0, 2.0, 8),
    ]
    names = ["step", "what", "reason", "kept", "D", "ratio", "ratio_causal", "spill_bytes"]
    found = record.step_table(pd.DataFrame(rows, columns=names), "spill_bytes")
    assert found.index.tolist() == [1, 2] and found.loc[1, "kept"] == "yes; no"
    assert found.loc[1, "ratio, D = 64"] == 1.5 and found.loc[1, "spill_bytes, D = 128"] == 16
    assert found.loc[2, "ratio_causal, D = 64"] == 2.0 and pd.isna(found.loc[2, "ratio, D = 128"])


def test_the_published_log_and_steps_are_read():
    log = record.leetcuda_log()
    assert len(log) == len(record.published("leetcuda_readme_ada")) / 2
    row = log[
        (log["dtype"] == "fp16") & (log["B"] == 16) & (log["H"] == 16) & (log["Nk"] == 1024) & (log["D"] == 64)
    ].iloc[0]
    assert row["ms"] == 1.106799 and row["to_unfused"] == pytest.approx(5.125363 / 1.106799)
    assert row["tflops"] == pytest.approx(4 * 16 * 16 * 1024**2 * 64 / 1.106799e-3 / 1e12)
    steps = record.sixteen_steps()
    assert steps.index.tolist() == list(range(1, 17))
    assert steps.loc[2, "a100_gain"] == pytest.approx(72.4 - 16.6)
    assert "`" not in "".join(steps["change"])


def test_published_tables_keep_their_columns():
    assert "correct" in record.published("h200_peers")
    assert len(record.published("h200_peers")) == 151
    assert record.published("leetcuda_readme_ada")["time_ms"].gt(0).all()


def test_the_clocks_per_tile_are_one_warps_without_its_copies():
    """Two tiles of warp 0: 2 + 4 clocks of waiting and 3 + 3 of products, a gap of 1 between them; a copy over all, another warp."""
    rows = [(0, 4, "wait", 10, 12), (0, 4, "mma", 12, 15), (0, 5, "wait", 16, 20), (0, 5, "mma", 20, 23)]
    rows += [(0, 5, "load", 2, 20), (1, 4, "wait", 0, 99)]
    found = record.per_tile(pd.DataFrame(rows, columns=["warp", "tile", "kind", "begin", "end"]))
    assert found.to_dict() == {"wait": 3, "mma": 3, "all": 6.5}
