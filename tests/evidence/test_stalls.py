"""Why warps wait: what ncu prints becomes a row per launch and reason; other launches, and no reasons, are refused."""

import pandas as pd
import pytest
from conditions import CARD
from test_counters import fake_ncu

from helpers import record
from helpers.evidence import counters, stalls
from helpers.figures import stalls as figure
from helpers.record.schema import faults

STEMS = ("10_fa2_mma_fp16", "13_tuned")
CYCLES = {"selected": "1", "wait": "2.5", "gmma": "n/a", "drain": "0"}


def listing(launches: int, cycles: dict[str, str] = CYCLES) -> str:
    """ncu's --csv --page raw of so many launches; after it what --query-metrics prints, which the fake prints, too."""
    metrics = {f"{stalls.METRIC.format(reason)}.ratio": n for reason, n in cycles.items()}
    metrics |= {name: f"{1000 + i:,}" for i, name in enumerate(stalls.WORK.values())}
    rows = [["ID", "Kernel Name", *metrics], [""] * (2 + len(metrics))]
    rows += [[str(i), f"void fa2<{i}>(fa_args)", *metrics.values()] for i in range(launches)]
    return "==PROF== Connected\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def profiled(tmp_path, monkeypatch, text: str) -> pd.DataFrame:
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, text)))
    return stalls.profile(STEMS)


def test_a_row_per_launch_and_reason(tmp_path, monkeypatch):
    frame = profiled(tmp_path, monkeypatch, listing(4))
    assert frame.groupby(["stem", "D"], sort=False)["kernel"].first().tolist() == [f"void fa2<{i}>" for i in range(4)]
    assert frame[["B", "H", "N"]].drop_duplicates().values.tolist() == [[4, 32, 4096], [4, 16, 4096]]
    assert frame.head(3)[["reason", "cycles"]].values.tolist() == [
        ["drain", 0],
        ["selected", 1],
        ["wait", 2.5],
    ]  # no gmma
    assert frame["instructions"].eq(1001).all()
    arguments = (tmp_path / "arguments").read_text()
    assert "from helpers.evidence.stalls import *; call_stalled(['10_fa2_mma_fp16', '13_tuned'])" in arguments
    assert "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio" in arguments
    assert "smsp__warps_active.avg.per_cycle_active" in arguments


def test_the_reasons_are_those_that_ncu_lists(tmp_path, monkeypatch):
    listed = "\n".join(f"{stalls.METRIC.format(r)}   Ratio  # of warps" for r in ("wait", "new_reason", "wait"))
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, listed + f"\n{stalls.METRIC}_not_issued")))
    assert stalls.reasons() == ("wait", "new_reason")
    monkeypatch.setattr(counters, "find_ncu", lambda: str(fake_ncu(tmp_path, "")))
    assert stalls.reasons() == stalls.REASONS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (listing(5), "5 launches of 10_fa2_mma_fp16, 13_tuned; there are 4"),
        (listing(4, dict.fromkeys(CYCLES, "n/a")), "no reason for 10_fa2_mma_fp16, 13_tuned"),
        ("==ERROR== Failed to find metric", "ncu could not profile 10_fa2_mma_fp16, 13_tuned: ==ERROR=="),
    ],
)
def test_what_is_not_recorded(tmp_path, monkeypatch, text, words):
    with pytest.raises(RuntimeError, match=words):
        profiled(tmp_path, monkeypatch, text)


@pytest.mark.parametrize("stem", ["01_naive", "21_split_kv", "23_backward_mma"])
def test_only_forward_passes_in_one_launch(stem):
    with pytest.raises(ValueError, match=f"not of {stem}"):
        stalls.record_stalls(["13_tuned", stem])


def test_the_record_is_sound_and_is_drawn(tmp_path, monkeypatch):
    frame = profiled(tmp_path, monkeypatch, listing(4))
    rows = frame[frame["stem"] == "13_tuned"].drop(columns="stem")
    path = record.save("13_tuned", "stalls", rows, known=CARD, root=tmp_path)
    assert not faults(path)
    (fault,) = faults(record.save("13_tuned", "stalls", rows.assign(cycles=-1.0), known=CARD, root=tmp_path))
    assert "below 0" in fault
    table = figure.by_reason(frame[frame["D"] == 64], "stem")
    assert list(table) == ["issues an instruction", "fixed latency of the last instruction (wait)"]  # drain is 0
    drawn = figure.strips(table, "Title")
    assert "13_tuned: 3.5 cycles, most of them 2.5 fixed latency" in drawn.in_words
    bars = drawn.axes[0].containers[1]
    assert [bar.get_x() for bar in bars] == [1.0, 1.0] and [bar.get_width() for bar in bars] == [2.5, 2.5]
    (ax,) = figure.strips(table.mul([1, 2], axis=0), "Title").axes
    lengths = {
        name.get_text(): bar.get_width() for name, bar in zip(ax.get_yticklabels(), ax.containers[1], strict=True)
    }
    assert lengths == {STEMS[0]: 2.5, STEMS[1]: 5}
    with pytest.raises(ValueError, match="twice"):
        figure.by_reason(pd.concat([rows, rows]))


def test_reasons_without_a_name_of_their_own_are_added_up():
    frame = pd.DataFrame({"kernel": "k", "reason": ["drain", "selected", "misc"], "cycles": [0.5, 1.0, 0.25]})
    assert figure.by_reason(frame).loc["k"].to_dict() == {"issues an instruction": 1.0, "all else": 0.75}
