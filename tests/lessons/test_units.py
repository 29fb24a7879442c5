"""The budget of 10 to 13: counted by hand and by the tools it is the same."""

import pandas as pd
import pytest

from helpers import budget, record, units

# Of 32 query rows and 64 keys at D = 128: a warp of 12 has 16 rows, reads 64 fragments of four wavefronts and, as one of four, copies
# 32 KB / 4 of K and V into shared memory; one of 13 has 32 rows and reads 64 of K and V and 16 of Q.
BY_HAND = {"12": 2 * (64 * 4 + 64), "13_1": 2 * (64 * 4 + 64), "13_2": 80 * 4 + 64, "13": 80 * 4 + 64}


def test_the_ceiling_of_mma_sync_is_the_recorded_one():
    assert f"{units.MMA_SYNC} TFLOP/s" in record.about("13_tuned", "steps", "nvidia-h200")["ceilings"]
    assert units.GHZ == record.about("13_tuned", "steps", "nvidia-h200")["sm_clock_max_mhz"] / 1000
    assert units.clocks_of_mma(2 * 2048 * units.SMS * units.GHZ / 1000) == pytest.approx(1)


@pytest.mark.sampled
@pytest.mark.parametrize("which", BY_HAND)
def test_wavefronts_and_exponentials_are_those_counted_by_hand(which):
    found = units.clocks(which, D=128)
    assert list(found.index) == list(budget.UNITS)
    assert found["shared memory"] == BY_HAND[which]
    assert found["tensor cores"] == pytest.approx(256 * units.clocks_of_mma())
    assert found["MUFU"] == (128 if which == "13" else 136)  # four rows' alpha, where the maximum is sought


def test_four_schedulers_issue_a_warp_instruction_each_per_clock(monkeypatch):
    monkeypatch.setattr(units, "_wavefronts", lambda *_: 0)
    monkeypatch.setattr(units, "usual_path", lambda *_: [(0, "HMMA", "")] * 128 + [(0, "FFMA", "")] * 128)
    assert units.clocks("12", D=128, rows=16)["issue slots"] == 256 / 4


@pytest.mark.parametrize(("which", "fewest", "most"), [("12", 600, 660), ("13_3", 860, 920), ("13", 650, 720)])
def test_the_usual_path_has_the_products_once_and_no_mask(which, fewest, most):
    lines = units.usual_path(which, 128)
    names = [opcode for _, opcode, _ in lines]
    assert sum(n.startswith("HMMA") for n in names) == (128 if which == "12" else 256)
    assert sum(n.startswith("FSEL") for n in names) < 8 and fewest < len(names) < most
    assert sum(n.startswith("FMNMX") for n in names) == {"12": 36, "13_3": 72, "13": 0}[which]


def test_what_a_kernel_took_is_its_recorded_speed():
    frame = units.table(["12", "13_2"], D=128)
    speed = (
        record.headline(record.medians(record.load("12_double_buffered")))
        .query("name == '12_double_buffered' and D == 128 and Nk == 4096 and dtype == 'fp16'")["tflops"]
        .iloc[0]
    )
    clocks = 4 * 32 * 64 * 128 * 132 * 1.98e9 / (speed * 1e12)
    assert frame.loc["12_double_buffered", "took"] == pytest.approx(clocks)
    assert list(frame.index) == ["12_double_buffered", "13_2_rows"]
    figure = units.draw(frame, "title")
    assert figure.png() and "13_2_rows: clocks of shared memory 384, tensor cores 428" in figure.in_words
    assert f"the longest is shared memory; it took {clocks:.0f}" in figure.in_words


def test_what_was_timed_among_the_stages_is_one_session():
    stages = record.headline(record.medians(record.load("13_tuned", "stages"))).query(
        "D == 128 and Nk == 4096 and dtype == 'fp16'"
    )
    speeds = stages.set_index("name")["tflops"]
    took = units.table(["12", "13_2", "13"], D=128, beside="13")["took"]
    for stem in took.index:
        assert took[stem] == pytest.approx(units.took(speeds[stem]))
    assert units.table(["13"], D=128)["took"].item() != pytest.approx(took["13_tuned"])


def test_a_draft_says_what_else_it_differs_in():
    """At D = 128 draft 6 has its row sums by mma.sync as well, 20 half the keys per tile; 2 differs in what its name says."""
    drafts = units.drafts([2, 6, 20])
    assert list(dict.fromkeys(drafts["label"].str.split(" · ").str[0])) == ["12_double_buffered", "2", "6", "20"]
    at128 = drafts[drafts["D"] == 128]
    also = at128.set_index(at128["label"].str.split(" ").str[0])["also"]
    assert also["6"] == "at D = 128: row sums by mma.sync" and also["20"] == "at D = 128: 32 keys per tile"
    assert also["2"] == "" and drafts.loc[drafts["label"].str.startswith("6 "), "label"].str.contains("also").all()
    assert drafts.set_index(["label", "D"])["ratio"].loc["12_double_buffered"].lt(1).all()


def test_stalls_are_drawn_of_the_rungs_that_are_named(monkeypatch):
    asked = []

    def load(stem, kind, device):
        asked.append((stem, kind))
        rows = [
            (stem, "NVIDIA H200", False, 4096, D, r, n)
            for D in (64, 128)
            for r, n in (("selected", 1.0), ("wait", D / 64))
        ]
        return pd.DataFrame(rows, columns=["rung", "device", "stale", "N", "D", "reason", "cycles"])

    monkeypatch.setattr(units.record, "load", load)
    drawn = units.stalls(["12", "13"], D=128)
    assert asked == [("12", "stalls"), ("13", "stalls")]
    assert "12: 3.0 cycles" in drawn.in_words and "NVIDIA H200" in drawn.in_words and "stale" not in drawn.in_words
