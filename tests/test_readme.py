"""The README's table is what data/ says."""

import pandas as pd
import pytest
import sixteen

from helpers import ladder, readme, record
from helpers.ladder import rungs

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


def test_the_readme_is_up_to_date_with_data():
    text = (readme.ROOT / "README.md").read_text()
    assert readme.rewritten(text) == text, "run `make readme`"


def test_a_row_says_speed_and_ratio(tmp_path):
    save(tmp_path, "04_fa2_fp32", 1.5)
    row = next(line for line in readme.table(tmp_path).splitlines() if "04_fa2_fp32" in line)
    assert "15 · 15 TFLOP/s" in row
    assert "1.50 × SDPA MATH (1.50–1.50)" in row
    assert "(kernels/04_fa2_fp32.cu)" in row


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
    row = next(line for line in readme.table(tmp_path).splitlines() if stem in line)
    assert "fp16 150 · 180, bf16 210 · 240 TFLOP/s" in row
    assert "fp16 0.50 · 0.60, bf16 0.70 · 0.80 × SDPA FLASH (0.50–0.80)" in row  # N = 512 is not in the mean
    assert "EFFICIENT" not in row


def test_every_rung_has_a_row_recorded_or_not(tmp_path):
    rows = [line for line in readme.table(tmp_path).splitlines() if line.startswith("| [")]
    assert len(rows) == len(rungs())
    assert all("not recorded yet" in row for row in rows)


def test_a_stale_record_says_so(tmp_path):
    save(tmp_path, "04_fa2_fp32", 1.5)
    path = tmp_path / "nvidia-h200" / "04_fa2_fp32.forward.json"
    path.write_text(path.read_text().replace('"digest": "', '"digest": "x'))
    assert "stale" in readme.table(tmp_path)


def test_only_the_part_between_the_markers_changes(tmp_path):
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    new = readme.rewritten(text, tmp_path)
    assert new.startswith(f"before\n{readme.BEGIN}\n| rung ")
    assert new.endswith(f"\n{readme.END}\nafter\n")
    assert readme.rewritten(new, tmp_path) == new
    for broken in ("no markers", text + text, f"{readme.END} {readme.BEGIN}"):
        with pytest.raises(ValueError, match="needs one"):
            readme.rewritten(broken, tmp_path)


def test_check_changes_nothing_and_fails_on_an_old_table(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"{readme.BEGIN}\nold\n{readme.END}\n")
    assert readme.main(["--check"], path) == 1
    assert "-old" in capsys.readouterr().out
    assert "old" in path.read_text()
    assert readme.main([], path) == 0
    assert readme.main(["--check"], path) == 0
