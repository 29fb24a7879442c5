"""The board is what data/ says, whole: a new rung stands on it by itself, and one without records says so."""

import math
import subprocess
import sys

import pandas as pd
import pytest
import sixteen
import torch

from helpers import load, plot, record, scoreboard, workloads
from helpers.ladder import rung as ladder
from helpers.record import SHAPE

CONDITIONS = {"device": "NVIDIA H200", "date": "2026-01-01"}
STEM = "77_sixteen"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data/ of its own and a ladder of 04 and a new rung, 77, that takes fp16 and bf16."""
    kernels = tmp_path / "kernels"
    sixteen.make_rung(kernels, STEM)
    for stem in ("02_online_softmax", "04_fa2_fp32"):
        (kernels / f"{stem}.cu").write_text((ladder.KERNELS / f"{stem}.cu").read_text())
    monkeypatch.setattr(ladder, "KERNELS", kernels)
    monkeypatch.setattr("helpers.record.store.this_device", lambda: None)
    (tmp_path / "published").mkdir()
    for path in (record.DATA / "published").glob("*.csv"):
        (tmp_path / "published" / path.name).write_text(path.read_text())
    return tmp_path


def save(root, stem, tflops, **known):
    """Forward records from {(name, dtype): TFLOP/s}; at N = 1024 everything but FLASH runs half as fast."""
    rows = []
    for (name, dtype), speed in tflops.items():
        for D in (64, 128):
            for N in (512, 1024, 4096):
                B, H = 16384 // N, 2048 // D
                now = speed / 2 if N == 1024 and name != "SDPA FLASH" else speed
                rows += [(name, dtype, B, H, N, N, D, r, 4 * B * H * N * N * D / now / 1e9) for r in range(3)]
    frame = pd.DataFrame(rows, columns=["name", "dtype", *SHAPE, "round", "ms"])
    record.save(stem, "forward", frame, known=CONDITIONS | known, root=root)


def both(root, **known):
    save(root, "04_fa2_fp32", {("04_fa2_fp32", "fp32"): 45.0, ("SDPA EFFICIENT", "fp32"): 40.0}, **known)
    peers = {("SDPA FLASH", d): 300.0 for d in ("fp16", "bf16")} | {("SDPA CUDNN", "fp16"): 600.0}
    save(root, STEM, {(STEM, "fp16"): 150.0, (STEM, "bf16"): 120.0} | peers, **known)


def test_a_new_rung_stands_on_the_board_by_itself(root):
    both(root)
    table = scoreboard.speeds(root=root).set_index(["name", "D"])
    row = table.loc[(STEM, 64)]
    assert row[["kind", "dtype", "device"]].tolist() == ["rung", "fp16", "NVIDIA H200"]
    assert row["tflops"] == pytest.approx(150) and row["to_flash"] == pytest.approx(math.sqrt(0.25 * 0.5))
    assert [row["low"], row["high"]] == pytest.approx([0.25, 0.5])
    assert table.loc[("SDPA CUDNN", 128), ["kind", "tflops"]].tolist() == ["peer", pytest.approx(600)]
    assert table.loc[("SDPA FLASH", 64), "to_flash"] == 1
    assert table.loc[("Triton tutorial 06", 64), "kind"] == "published"
    assert table.loc[("04_fa2_fp32", 64), "dtype"] == "fp32" and math.isnan(table.loc[("04_fa2_fp32", 64), "to_flash"])
    assert "02_online_softmax" not in table.index.get_level_values(0) and "SDPA EFFICIENT" not in table.index
    bf16 = scoreboard.speeds("bf16", root=root).set_index(["name", "D"])
    assert bf16.loc[(STEM, 64), "tflops"] == pytest.approx(120)
    assert scoreboard.unrecorded(root=root) == ["02_online_softmax"]
    assert STEM in plot.staircase(scoreboard.speeds(root=root)).axes[0].get_xticklabels()[-1].get_text().replace(
        "\n", "_"
    )


def test_a_rung_without_records_says_so(root):
    save(root, "04_fa2_fp32", {("04_fa2_fp32", "fp32"): 45.0})
    table = scoreboard.speeds(root=root)
    assert table.loc[table["name"] == STEM, "tflops"].isna().tolist() == [True, True]
    figure = plot.staircase(table)
    figure.draw_without_rendering()
    assert sum(t.get_text() == "not recorded yet" for ax in figure.axes for t in ax.texts) == 2
    assert set(table.loc[table["name"] == "SDPA FLASH", "kind"]) == {"published"}  # until a 16-bit rung ran beside it
    assert scoreboard.properties(root=root).loc[STEM].drop("lines").isna().all()
    assert STEM in scoreboard.unrecorded(root=root)


def test_published_figures_of_an_h200_stand_beside_records_of_an_h200_only(root):
    both(root, device="NVIDIA A10")
    table = scoreboard.speeds(device="nvidia-a10", root=root)
    assert set(table["device"]) == {"NVIDIA A10"} and "published" not in set(table["kind"])


def test_the_summit_has_flashattention_3_cublas_and_the_datasheet(root):
    both(root)
    save(root, "04_fa2_fp32", {("04_fa2_fp32", "fp32"): 45.0, ("SDPA FLASH", "bf16"): 300.0, ("FA3", "bf16"): 700.0})
    rounds = [(record.CUBLAS if name else STEM, r, 2.0 + r, 3e12) for r in range(3) for name in (0, 1)]
    frame = pd.DataFrame(rounds, columns=["name", "round", "ms", "flops"])
    record.save(STEM, "matmul", frame, known=CONDITIONS, root=root)
    plain = scoreboard.speeds("bf16", root=root)
    assert not {"ceiling"} & set(plain["kind"]) and not {"FA3", "FlashAttention-3"} & set(plain["name"])
    table = scoreboard.speeds("bf16", root=root, summit=True).set_index(["name", "D"])
    for D in (64, 128):
        assert table.loc[(record.CUBLAS, D), ["kind", "tflops"]].tolist() == ["ceiling", pytest.approx(1000)]
        assert table.loc[("datasheet", D), "tflops"] == 989.5
    assert set(scoreboard.LIMIT.values()) == {989.5}  # of an H100 as of an H200
    assert table.loc[("FA3", 128), ["kind", "tflops"]].tolist() == ["peer", pytest.approx(700)]
    assert not {"FA4", "FlashAttention-3"} & set(table.index.get_level_values("name"))  # the latter is of another day
    half = scoreboard.speeds(root=root, summit=True).set_index("name")
    assert "cuBLAS" not in half.index  # no record of the device's ceilings in this data/
    ceilings = pd.DataFrame([("fp16 matmul", "TFLOP/s", 0, 745.0)], columns=["name", "unit", "round", "value"])
    record.save("device", "ceilings", ceilings, known=CONDITIONS, root=root)
    assert set(scoreboard.speeds(root=root, summit=True).query("name == 'cuBLAS'")["tflops"]) == {745.0}
    elsewhere = CONDITIONS | {"device": "NVIDIA A10"}
    save(root, STEM, {(STEM, "bf16"): 120.0}, **elsewhere)
    assert "ceiling" not in set(scoreboard.speeds("bf16", device="nvidia-a10", root=root, summit=True)["kind"])


def test_stale_records_stay_marked(root):
    both(root)
    path = root / "nvidia-h200" / f"{STEM}.forward.json"
    path.write_text(path.read_text().replace('"digest": "', '"digest": "x'))
    table = scoreboard.speeds(root=root)
    assert table.loc[table["name"] == STEM, "stale"].all()
    (ax,) = scoreboard.draw(table).axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert f"{STEM} (stale)" in labels and "SDPA FLASH (beside 77)" in labels  # a peer is as it was
    assert f"STALE: {STEM}" in plot.staircase(table).get_suptitle()


def test_properties_come_from_the_file_and_the_records(root):
    built = [(phase, 0, s) for phase, s in (("import", 3.0), ("cold", 1.5), ("edit", 1.25))]
    record.save(STEM, "build", pd.DataFrame(built, columns=["phase", "round", "seconds"]), known=CONDITIONS, root=root)
    rows = [(d, 256, 512, 64, o, e, 1.0, 8.0) for d in ("fp16", "bf16") for o, e in (("o", 4.0), ("lse", 2.0))]
    columns = ["dtype", "Nq", "Nk", "D", "output", "error", "pytorch_error", "budget"]
    record.save(STEM, "error", pd.DataFrame(rows, columns=columns), known=CONDITIONS, root=root)
    memory = pd.DataFrame([(STEM, "fp16", 1, 1, 16384, 16384, 64, 3 << 20)], columns=["name", "dtype", *SHAPE, "bytes"])
    record.save(STEM, "memory", memory, known=CONDITIONS, root=root)
    row = scoreboard.properties(root=root).loc[STEM]
    assert row.drop("lines").tolist() == [1.5, 1.25, 0.5, 0.25, 3.0]
    source = ladder.rung(STEM).source
    assert row["lines"] == sum(bool(line.split("//")[0].strip()) for line in source.splitlines())


def test_what_the_figures_against_n_show(root):
    both(root)
    frame = scoreboard.samples(root=root)
    assert set(frame["name"]) == {"04_fa2_fp32", STEM, "SDPA FLASH", "SDPA CUDNN"}
    plot.throughput(frame)


def test_another_card_has_a_staircase_of_its_own(root, monkeypatch):
    """A Turing card: no bf16, no FLASH, and rungs that it can't run."""
    both(root)
    save(root, "04_fa2_fp32", {("04_fa2_fp32", "fp32"): 4.0, ("SDPA EFFICIENT", "fp32"): 5.0}, device="Tesla T4")
    assert scoreboard.others(root=root) == ["tesla-t4"]
    table = scoreboard.speeds(device="tesla-t4", root=root)
    own = table.query("name == '04_fa2_fp32'")
    assert own["tflops"].tolist() == pytest.approx([4, 4]) and set(own["device"]) == {"Tesla T4"}
    assert table.query("name == @STEM")["tflops"].isna().all() and set(table["kind"]) == {"rung"}
    plot.staircase(table)
    monkeypatch.setattr(
        "helpers.record.store.this_device", lambda: "Tesla T4"
    )  # there it is the first, and the H200's beside it
    assert scoreboard.speeds(root=root)["tflops"].max() == pytest.approx(4) and scoreboard.others(root=root) == [
        "nvidia-h200"
    ]


def test_the_reader_s_kernel_is_timed_beside_flash(root, monkeypatch):
    """With a stand-in for the clock: what is asked of it, and what stands on the board."""
    asked = []

    def measure(callables, inputs, burst_ms):
        asked.append((set(callables), inputs[0].dtype, tuple(inputs[0].shape)))
        ms = {"yours": 4.0, "SDPA FLASH": 1.0}
        return pd.DataFrame([(n, r, ms[n]) for n in callables for r in range(3)], columns=["name", "round", "ms"])

    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(workloads, "refusal", lambda call, *x: "D = 128 is too much" if x[0].shape[-1] == 128 else None)
    monkeypatch.setattr(workloads, "peers", lambda *x, without: {"SDPA FLASH": len} if "SDPA CUDNN" in without else {})
    monkeypatch.setattr(workloads, "random_tensors", lambda dtype, shape, count: [torch.empty(shape).half()] * count)

    class Mine:
        rung = ladder.rung(STEM)

    table = scoreboard.place(Mine())
    assert {n for names, _, _ in asked for n in names} == {"yours", "SDPA FLASH"}
    assert {shape[2] for _, _, shape in asked} == {1024, 2048, 4096, 8192, 16384}
    assert table[["name", "kind", "dtype", "D"]].values.tolist() == [["yours", "yours", "fp16", 64]]
    assert table["to_flash"].item() == pytest.approx(0.25)
    monkeypatch.setattr(workloads, "refusal", lambda *_: "no GPU like this")
    with pytest.raises(RuntimeError, match="yours takes no shape of the headline workload: no GPU like this"):
        scoreboard.place(Mine())


def test_what_each_step_brought(root):
    both(root)
    row = scoreboard.steps(root=root).loc[STEM]
    assert row["over"] == "04_fa2_fp32" and row["changed_lines"] > 20
    assert row["times_faster_D64"] == pytest.approx(150 / 45)  # both run half as fast at N = 1024
    assert scoreboard.steps("bf16", root=root).loc[STEM, "times_faster_D128"] == pytest.approx(120 / 45)
    (root / "nvidia-h200" / "04_fa2_fp32.forward.csv").unlink()
    assert math.isnan(scoreboard.steps(root=root).loc[STEM, "times_faster_D64"])


def test_x_rays_side_by_side(root):
    frame = scoreboard.xrays({"yours": load(STEM, device="cpu", quiet=True), "again": STEM}, N=64, D=32)
    assert frame.index.tolist() == ["yours", "again"]
    assert frame.loc["yours"].tolist() == frame.loc["again"].tolist()
    row = frame.loc["yours"]
    assert row[["wavefronts", "conflicts", "products", "findings"]].tolist() == [0, 0, 0, 0]  # no shared memory at all
    assert row["times_least"] > 30 and row["excess_sectors"] > 0  # every query reads every key, two bytes at a time


@pytest.mark.gpu
def test_a_kernel_is_placed_on_this_gpu(monkeypatch):
    monkeypatch.setattr(workloads, "LENGTHS", (512, 4096))
    table = scoreboard.place(load("04_fa2_fp32", device="cuda", quiet=True)).set_index("D")
    assert table.index.tolist() == [64, 128] and table["tflops"].gt(1).all()
    table = scoreboard.place(load(source=sixteen.SOURCE, device="cuda", quiet=True)).set_index("D")
    assert set(table["dtype"]) == {"fp16"} and table["to_flash"].between(1e-4, 1).all()


def test_the_board_needs_no_torch():
    code = "import sys; from helpers import scoreboard; scoreboard.speeds(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=record.DATA.parent)


def test_the_board_is_drawn_whole(root):
    both(root)
    figure = scoreboard.draw(scoreboard.speeds(root=root, summit=True))
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:2] == ["04_fa2_fp32 (fp32)", STEM] and {"SDPA FLASH (beside 77)", "datasheet"} <= set(labels)
    assert "forward pass, fp16, B·N" in figure.get_suptitle()
    assert f"{STEM}, D = 64: 150" in figure.in_words and ax.get_xscale() == "log" and not ax.patches
