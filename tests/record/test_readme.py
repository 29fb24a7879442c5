"""The tables of README.md and data/README.md, and the staircase's figures, are what data/ says."""

import itertools

import pandas as pd
import pytest
import sixteen
from ring_samples import samples

from helpers import pages, record
from helpers.ladder import rung as ladder
from helpers.ladder.rung import rungs
from helpers.record import goals, readme

CONDITIONS = {"device": "NVIDIA H200", "date": "2026-01-01"}


def save(root, stem, ratio):
    rows = []
    for D in (64, 128):
        for N in (512, 1024, 4096):
            B, H = 16384 // N, 2048 // D
            for name, tflops in ((stem, 10.0 * ratio), ("SDPA MATH", 10.0)):
                rows.append((name, "fp32", B, H, N, N, D, 0, 4 * B * H * N * N * D / tflops / 1e9))
    frame = pd.DataFrame(rows, columns=["name", "dtype", "B", "H", "Nq", "Nk", "D", "round", "ms"])
    record.save(stem, "forward", frame, known=CONDITIONS, root=root)


def test_a_row_says_speed_and_ratio(tmp_path):
    save(tmp_path, "04_fa2_fp32", 1.5)
    row = next(line for line in readme.details(tmp_path).splitlines() if "04_fa2_fp32" in line)
    assert "15 · 15 TFLOP/s" in row
    assert "1.50 × SDPA MATH (1.50–1.50)" in row
    assert "(../kernels/04_fa2_fp32.cu)" in row


def test_a_sixteen_bit_rung_says_both_dtypes_against_flash(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "KERNELS", tmp_path / "kernels")
    stem = sixteen.make_rung(ladder.KERNELS, "77_sixteen")
    rows = []
    for dtype, D, ratio in (("fp16", 64, 0.5), ("fp16", 128, 0.6), ("bf16", 64, 0.7), ("bf16", 128, 0.8)):
        for N, lower in ((512, 0.1), (1024, 0.0), (4096, 0.0)):
            B, H, flash = 16384 // N, 2048 // D, 300.0
            for name, tflops in ((stem, flash * (ratio - lower)), ("SDPA FLASH", flash), ("SDPA EFFICIENT", 200.0)):
                rows.append((name, dtype, B, H, N, N, D, 0, 4 * B * H * N * N * D / tflops / 1e9))
    frame = pd.DataFrame(rows, columns=["name", "dtype", "B", "H", "Nq", "Nk", "D", "round", "ms"])
    record.save(stem, "forward", frame, known=CONDITIONS, root=tmp_path)
    row = next(line for line in readme.details(tmp_path).splitlines() if stem in line)
    assert "fp16 150 · 180, bf16 210 · 240 TFLOP/s" in row
    assert "fp16 0.50 · 0.60, bf16 0.70 · 0.80 × SDPA FLASH (0.50–0.80)" in row  # N = 512 is not in the mean
    assert "EFFICIENT" not in row


def save_model(root):
    """Records of what models ask for, in which every rung takes 1 ms, FLASH 1.2, a copy as long as the copied bytes need."""
    shape = {"dtype": "fp16", "B": 4, "H": 16, "Nq": 4096, "Nk": 4096, "D": 128, "round": 0}
    decode = shape | {"B": 1, "Nq": 1, "Hkv": 2, "bytes": 3.0e9}

    def of(rows):
        return pd.DataFrame(rows)

    def timed(stem, causal):
        return [
            shape | {"name": n, "causal": causal, "ms": ms} for n, ms in ((stem, 1.0), ("SDPA FLASH", 1.2 + causal))
        ]

    heads = [shape | {"name": "20_causal_gqa", "causal": 1, "Hkv": h, "ms": ms} for h, ms in ((8, 1.0), (64, 0.98))]
    batch = {"dtype": "fp16", "causal": 1, "H": 16, "D": 128, "batch": 0, "sequences": 2, "tokens": 9, "round": 0}
    split = [
        decode | {"name": "21_split_kv", "splits": n, "chosen": n == 2, "ms": ms} for n, ms in ((1, 2.0), (2, 1.0))
    ]
    other = [
        decode | {"name": n, "splits": 0, "chosen": 0, "ms": ms} for n, ms in (("copy", 0.75), ("SDPA FLASH", 1.6))
    ]
    for stem, kind, frame in (
        ("20_causal_gqa", "causal", of(timed("20_causal_gqa", 1))),
        ("20_causal_gqa", "groups", of(heads)),
        ("20_causal_gqa", "packed", of([batch | {"ms": 1.0, "padded_ms": 2.0, "ideal_ms": 0.95}])),
        ("21_split_kv", "decode", of(split + other)),
        ("23_backward_mma", "backward", of(timed("23_backward_mma", 0) + timed("23_backward_mma", 1))),
    ):
        record.save(stem, kind, frame, known=CONDITIONS, root=root)


def test_a_row_says_what_models_ask_for(tmp_path):
    save_model(tmp_path)
    rows = {line[3:5]: line for line in readme.details(tmp_path).splitlines() if line.startswith("| [")}
    flops = 4 * 4 * 16 * 4096 * 4096 * 128 / 1e9  # TFLOP/s at 1 ms
    assert f"causal: fp16 {flops / 2:.3g} TFLOP/s" in rows["20"] and "causal: fp16 2.20 × SDPA FLASH" in rows["20"]
    assert "0.98 × itself with 64 heads of K and V instead of 8" in rows["20"] and "0.95 × full batches" in rows["20"]
    assert "3.00–3.00 TB/s" in rows["21"] and "0.75 × copy" in rows["21"] and "1.60 × SDPA FLASH" in rows["21"]
    assert f"backward: fp16 {2.5 * flops:.3g} TFLOP/s<br>backward, causal: fp16 {1.25 * flops:.3g}" in rows["23"]
    assert "backward: fp16 1.20 × SDPA FLASH" in rows["23"] and "backward, causal: fp16 2.20 ×" in rows["23"]


def test_the_staircase_says_over_what_the_rung_that_decodes_is_averaged(tmp_path):
    save_model(tmp_path)
    assert readme.caches("21_split_kv", tmp_path) == "4096 to 4096 keys"
    _, _, caption = pages.staircase()
    assert "geometric mean over N = 1024 … 16384 (21: over its caches of 2048 to 131072 keys)." in caption


def test_goals_are_held_against_the_records(tmp_path):
    save_model(tmp_path)
    table = goals.verdicts(["20_causal_gqa", "21_split_kv", "22_backward_fp32", "23_backward_mma"], tmp_path)
    said = table.set_index("what")[["rung", "mean", "verdict"]]
    assert said.loc["causal × SDPA FLASH"].tolist() == ["20_causal_gqa", 2.2, "reached"]
    assert said.loc["groups × as many heads"].tolist() == ["20_causal_gqa", 0.98, "reached"]
    assert said.loc["decode × copy"].tolist() == ["21_split_kv", 0.75, "above the floor"]
    assert said.loc["backward × SDPA MATH"].tolist()[2] == "not recorded"
    assert said.loc["backward × SDPA FLASH causal == 1"].tolist() == ["23_backward_mma", 2.2, "reached"]
    assert not table["record"].str.contains("stale").any()


def test_a_goal_is_held_by_the_mean_however_slow_the_worst_shape_is(tmp_path, monkeypatch):
    save_model(tmp_path)
    monkeypatch.setattr(goals, "GOALS", [goals.Goal("20_causal_gqa", "groups", "as many heads", 1.0, 0.9)])
    monkeypatch.setattr(goals.Goal, "points", lambda *_: pd.Series([2.0, 0.6]))
    row = goals.verdicts(root=tmp_path).iloc[0]
    assert (row["mean"], row["worst"], row["verdict"]) == (1.095, 0.6, "reached")


def test_a_goal_says_that_its_record_is_stale(tmp_path):
    save_model(tmp_path)
    for file in tmp_path.glob("*/21_split_kv.*.json"):
        file.write_text(file.read_text().replace('"digest": "', '"digest": "0'))
    table = goals.verdicts(["20_causal_gqa", "21_split_kv"], tmp_path).set_index("rung")
    assert table.loc["21_split_kv", "record"].dropna().unique().tolist() == ["NVIDIA H200, stale"]
    assert table.loc["20_causal_gqa", "record"].dropna().unique().tolist() == ["NVIDIA H200"]


def test_languages_are_held_against_sdpa_in_their_own_process(tmp_path):
    rows = []
    for language, speed in (("triton_tiles", 1.4), ("cute_dsl", 0.85)):
        for N, D, causal in itertools.product(record.LENGTHS, (64, 128), (0, 1)):
            if (language, N, D) != ("cute_dsl", 512, 64):  # one that isn't timed at every length
                shape = {"causal": causal, "B": 1, "H": 8, "Nq": N, "Nk": N, "D": D, "round": 0, "language": language}
                ms = 1.0 if language == "cute_dsl" else 3.0  # another clock, as in another process
                rows.append(shape | {"name": "SDPA FLASH", "dtype": "fp16", "ms": ms})
                rows.append(shape | {"name": language, "dtype": "fp16", "ms": ms / speed / (1 + causal)})
    record.save("40_every_language", "timings", pd.DataFrame(rows), known=CONDITIONS, root=tmp_path, rungs=["13_tuned"])
    table = goals.verdicts(["40_every_language"], tmp_path).set_index("what")["verdict"]
    assert table["timings × SDPA FLASH language == 'triton_tiles'"] == "reached"
    assert table["timings × SDPA FLASH language == 'cute_mma'"] == "not recorded"
    said = readme.languages(tmp_path)
    assert "causal mask: Triton 1.40 to 2.80 ([notebook 40]" in said


def test_several_gpus_are_held_against_one_and_against_pytorch(tmp_path):
    assert readme.several_gpus(tmp_path) == ""
    peer = samples(1.6).replace({"50_ring": "context_parallel alltoall"}).query("layout != ''")
    far = samples(1.96).replace({"50_ring": "51_one_sided"}).query("layout != ''")
    frame = pd.concat([samples(1.92), peer, far])
    known = CONDITIONS | {"device": "NVIDIA H200 x2"}
    record.save("50_ring", "ring", frame, known=known, root=tmp_path, rungs=["50_ring"])
    told = readme.several_gpus(tmp_path)
    assert told.splitlines()[-1] == "| 2 |  | 1.92 (1.96) |  |  | 1.20 to 1.20 |"
    path = tmp_path / "nvidia-h200-x2" / "50_ring.ring.json"
    path.write_text(path.read_text().replace('"digest": "', '"digest": "x'))
    assert readme.several_gpus(tmp_path).splitlines()[-1].startswith(f"| 2{readme.STALE} |")


def test_a_goal_by_family_is_held_by_the_slowest_family(tmp_path):
    shape = {"dtype": "fp16", "causal": 0, "B": 4, "H": 16, "Nq": 4096, "Nk": 4096, "D": 128}
    rows = [
        shape | {"family": family, "name": name, "round": 0, "ms": ms, "Nk": N, "Nq": N}
        for family, peer in (("randn", 2.0), ("one key", 0.5))
        for N, more in ((1024, 1.1), (4096, 1 / 1.1))
        for name, ms in (("13_tuned", 1.0), ("SDPA FLASH", peer * more))
    ]
    record.save("13_tuned", "families", pd.DataFrame(rows), known=CONDITIONS, root=tmp_path)
    table = goals.verdicts(["13_tuned"], tmp_path).set_index("what")
    row = table.loc["families × SDPA FLASH"]
    assert (row["mean"], row["worst"], row["verdict"]) == (0.5, pytest.approx(0.455, abs=1e-3), "missed")
    assert table.loc["families × 12_double_buffered", "verdict"] == "not recorded"
    errors = [
        shape | {"family": "randn", "name": name, "output": "o", "error": error}
        for name, error in (("13_tuned", 2e-3), ("SDPA FLASH", 1.9e-3), ("FA3", 1.8e-3))
    ]
    record.save("13_tuned", "accuracy", pd.DataFrame(errors), known=CONDITIONS, root=tmp_path)
    row = goals.verdicts(["13_tuned"], tmp_path).set_index("what").loc["accuracy × SDPA FLASH"]
    assert (row["mean"], row["floor"], row["verdict"]) == (0.95, 0.909, "reached")
    gradients = goals.verdicts(["23_backward_mma"], tmp_path).set_index("what").loc["accuracy × SDPA FLASH"]
    assert (gradients["goal"], gradients["floor"]) == (0.952, 0.952)  # 1 / 1.05
    with pytest.raises(LookupError, match="no errors of 13_tuned beside x; there are those of 13_tuned, SDPA FLASH"):
        record.ratio_of_errors(record.load("13_tuned", "accuracy", record.DEFAULT_DEVICE, tmp_path), "13_tuned", "x")


def test_a_goal_against_a_peer_that_did_not_run_is_not_recorded(tmp_path):
    save(tmp_path, "32_ping_pong", 1.5)
    table = goals.verdicts(["32_ping_pong"], tmp_path)
    assert table.loc[table["what"].str.contains("FA3|FA4"), "verdict"].eq("not recorded").all()


def test_every_rung_but_the_first_has_a_goal():
    assert {r.stem for r in rungs()} - {"01_naive"} <= {g.rung for g in goals.GOALS}


@pytest.mark.parametrize("table", [readme.table, readme.details])
def test_every_rung_has_a_row_recorded_or_not(table, tmp_path):
    rows = [line for line in table(tmp_path).splitlines() if line.startswith("| [")]
    assert len(rows) == len(rungs())
    assert all("not recorded yet" in row for row in rows)


@pytest.mark.parametrize("rung", rungs(), ids=lambda rung: rung.stem)
def test_a_title_fits_the_table(rung):
    assert 0 < len(rung.title.split()) < 12 and "|" not in rung.title


def test_the_ladder_says_speed_and_ratios_in_fp16_without_a_mask(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "KERNELS", tmp_path / "kernels")
    stem = sixteen.make_rung(ladder.KERNELS, "77_sixteen")
    rows = []
    for dtype, D, ratio in (("fp16", 64, 0.5), ("fp16", 128, 0.6), ("bf16", 64, 0.7), ("bf16", 128, 0.8)):
        for N in (512, 1024, 4096):
            for name, tflops in ((stem, 300.0 * ratio), ("SDPA FLASH", 300.0), ("SDPA CUDNN", 600.0)):
                ms = record.forward_flops(16384 // N, 2048 // D, N, N, D) / tflops / 1e9
                rows.append((name, dtype, 16384 // N, 2048 // D, N, N, D, 0, ms if N > 512 else 9 * ms))
    frame = pd.DataFrame(rows, columns=["name", "dtype", "B", "H", "Nq", "Nk", "D", "round", "ms"])
    record.save(stem, "forward", frame, known=CONDITIONS, root=tmp_path)
    (row,) = (line for line in readme.table(tmp_path).splitlines() if line.startswith("| 77"))
    assert row.endswith("| 150 · 180 | 0.50 · 0.60 | 0.25 · 0.30 |")  # neither bf16 nor N = 512


def test_public_kernels_and_fp32_rungs_stand_beside_flash(tmp_path):
    """FLASH takes 1 ms in fp16, the fp32 rung 8 ms, cuDNN 0.5 ms; FLASH of the lower rung, 3 ms, does not count."""
    shape = {"B": 4, "H": 16, "Nq": 4096, "Nk": 4096, "D": 128, "round": 0}
    for stem, dtype, times in (
        ("04_fa2_fp32", "fp32", {"04_fa2_fp32": 8.0, "SDPA MATH": 9.0}),
        ("10_fa2_mma_fp16", "fp16", {"10_fa2_mma_fp16": 2.0, "SDPA FLASH": 3.0, "SDPA CUDNN": 0.1}),
        ("11_swizzled", "fp16", {"11_swizzled": 2.0, "SDPA FLASH": 1.0, "SDPA CUDNN": 0.5, "FA4": 0.4}),
    ):
        frame = pd.DataFrame([shape | {"name": name, "dtype": dtype, "ms": ms} for name, ms in times.items()])
        record.save(stem, "forward", frame, known=CONDITIONS, root=tmp_path)
    (tmp_path / "published").mkdir()
    study = "peer,variant,direction,dtype,B,H,N,D,causal,ms,tflops,correct,ratio_to_sdpa_flash,ratio_to_sdpa_cudnn"
    study += ",sdpa_flash_tflops,sdpa_cudnn_tflops\nFlashAttention-3,fa3,fwd,float16,4,16,4096,128,0,1,1,1,1.75,,,\n"
    study += "Triton tutorial 06 (autotuned),t,fwd,float16,4,16,4096,128,0,1,1,1,1.5,,,\n"
    (tmp_path / "published" / "h200_peers.csv").write_text(study)
    (found,) = readme.across_sessions(tmp_path).values.tolist()
    assert found == ["04_fa2_fp32", "forward", 128, pytest.approx(1 / 8)]
    found = readme.peers(tmp_path).values.tolist()  # FlashAttention-3 of another day isn't among them
    assert found == [
        ["cuDNN", "forward", 128, 2.0],
        ["FA4", "forward", 128, 2.5],
        ["Triton", "forward", 128, 1.5],
    ]


def test_a_stale_record_says_so(tmp_path):
    save(tmp_path, "04_fa2_fp32", 1.5)
    path = tmp_path / "nvidia-h200" / "04_fa2_fp32.forward.json"
    path.write_text(path.read_text().replace('"digest": "', '"digest": "x'))
    assert "stale" in readme.details(tmp_path) and "stale" in readme.table(tmp_path)


def test_the_spread_over_families_is_a_sentence_once_it_is_recorded(tmp_path):
    assert readme.families(tmp_path) == "" and "families" not in readme.table(tmp_path)
    shape = {"dtype": "fp16", "causal": 0, "B": 4, "H": 16, "Nq": 4096, "Nk": 4096, "D": 128, "round": 0}
    for stem, peer in (
        ("13_tuned", "SDPA FLASH"),
        ("32_ping_pong", "SDPA CUDNN"),
        ("12_double_buffered", "SDPA FLASH"),
    ):
        times = {"randn": 1.25, "one key": 0.5, "heads of x": 1.0}
        rows = [
            shape | {"family": f, "name": n, "ms": ms} for f, x in times.items() for n, ms in ((stem, 1.0), (peer, x))
        ]
        record.save(stem, "families", pd.DataFrame(rows), known=CONDITIONS, root=tmp_path)
    said = readme.families(tmp_path)
    assert "Over up to 3 families" in said and "13: 0.50 to 1.25 × FlashAttention-2, 32: 0.50 to 1.25 × cuDNN" in said
    assert said in readme.table(tmp_path)
    record.save(
        "33_backward_wgmma", "families", pd.DataFrame(rows), known=CONDITIONS, root=tmp_path
    )  # not beside itself
    assert readme.families(tmp_path) == said


def test_the_spread_over_one_sequence_is_a_sentence_once_it_is_recorded(tmp_path):
    assert readme.one_sequence(tmp_path) == "" and "One sequence" not in readme.table(tmp_path)
    shape = {"dtype": "bf16", "B": 1, "Nq": 2048, "Nk": 2048, "D": 64, "round": 0}
    for stem, peer in (
        ("20_causal_gqa", "SDPA FLASH"),
        ("33_backward_wgmma", "SDPA CUDNN"),
        ("31_warp_specialized", "SDPA CUDNN"),
    ):
        rows = [
            shape | {"causal": causal, "H": H, "name": name, "ms": ms}
            for causal, H, x in ((0, 4, 0.7), (0, 16, 1.1), (1, 4, 1.8))
            for name, ms in ((stem, 1.0), (peer, x))
        ]
        record.save(stem, "one_sequence", pd.DataFrame(rows), known=CONDITIONS, root=tmp_path)
    said = readme.one_sequence(tmp_path)
    assert "20: 0.70 to 1.80 × FlashAttention-2, 33: 0.70 to 1.80 × cuDNN" in said and "31: 0" not in said
    assert said in readme.table(tmp_path)
