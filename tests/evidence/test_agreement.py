"""The X-ray's counts against what Nsight Compute counted on an H200 (data/): equal, or the difference is explained."""

from __future__ import annotations

import pandas as pd
import pytest

from helpers import agreement, record, sass
from helpers.emulator.banks import LINE, SECTOR
from helpers.emulator.trace import Access
from helpers.evidence import reasons
from helpers.evidence.patterns import Pattern
from helpers.evidence.patterns import patterns as every_pattern
from helpers.ladder import rung as ladder
from helpers.toolchain.toolkit import find_toolkit

# What a rung may be off, in percent of all that the hardware counts. What nvcc makes of the source is known to the digit; GOAL is
# what that may come to in a rung that isn't named here. LEFT is beside it: what timing adds, which differs from run to run (of one
# code of 33, 2.04, 2.19 and 2.22 % in three records).
GOAL = 2.0
# 32 hands O to stmatrix, which these counters leave out, so that the same 104 stores are more of what is left.
NVCC = {"04_fa2_fp32": 3.4, "21_split_kv": 7.5, "32_ping_pong": 16.3}
LEFT = {
    "20_causal_gqa": 0.2,
    "22_backward_fp32": 0.7,
    "23_backward_mma": 0.7,
    "31_warp_specialized": 2.0,
    "32_ping_pong": 2.3,
    "33_backward_wgmma": 2.3,
}


@pytest.fixture(scope="module")
def patterns():
    return agreement.singles("patterns")


@pytest.fixture(scope="module")
def microkernels():
    return agreement.singles("microkernels")


@pytest.fixture(scope="module")
def rungs():
    return agreement.rungs()


def unexplained(frame):
    return frame[(frame["difference"] != 0) & (frame["why"] == "")]


def test_rungs_have_the_counters_that_the_xray_predicts(rungs):
    recorded = {path.name.partition(".")[0] for path in record.DATA.glob("*/*.counters.csv")}
    assert set(rungs["name"]) == recorded >= {r.stem for r in ladder.rungs()[:14]}
    assert unexplained(rungs).empty, unexplained(rungs)


def test_every_rung_is_off_by_no_more_than_is_known(rungs):
    for name, row in agreement.totals(rungs).iterrows():
        assert row["percent"] - row["rest_percent"] <= NVCC.get(name, GOAL), name
        assert row["rest_percent"] <= LEFT.get(name, 0.1), name
        assert row["unexplained_percent"] == 0


def test_what_timing_adds_are_wavefronts_that_are_called_conflicts(rungs):
    """Both counters of a kernel differ by the same, beside what nvcc accounts for."""
    varied = rungs[rungs["metric"].str.fullmatch("shared_(load|store)_(wavefronts|conflicts)")]
    varied = varied.assign(what=varied["metric"].str.rpartition("_")[2], op=varied["metric"].str.rpartition("_")[0])
    table = varied.pivot(index=["name", "D", "kernel", "op"], columns="what", values="rest").dropna()
    assert len(table) > 50 and (table["conflicts"] > 0).any()
    assert (table["conflicts"] == table["wavefronts"]).all(), table[table["conflicts"] != table["wavefronts"]]


def test_every_pattern_of_addresses_costs_what_the_hardware_counts(patterns):
    assert patterns["name"].nunique() >= 700
    assert unexplained(patterns).empty, unexplained(patterns)


def test_wavefronts_are_exact(patterns):
    """Of loads, stores, ldmatrix, atomics, and of cp.async through the L1."""
    counted = patterns[patterns["metric"].str.endswith("_wavefronts")]
    assert (counted["difference"] == 0).all()
    copies = counted[(counted["metric"] == "async_copy_wavefronts") & counted["kernel"].eq("copy")]
    assert copies["name"].nunique() == 152 and copies["hardware"].nunique() > 10


def test_every_cp_async_costs_what_the_hardware_counts_by_instruction():
    """Conflicts, where no wavefront is allowed before one is called a conflict; sectors; and all wavefronts, of cp.async.cg
    with those in which what comes from the L2 is written."""
    frame = agreement.copies()
    of = frame.groupby("kernel")["name"].nunique()
    assert set(of.index) == {"cp.async.ca", "cp.async.cg"} and of["cp.async.ca"] == 31 and of["cp.async.cg"] >= 163
    assert unexplained(frame).empty, unexplained(frame)
    off = frame[frame["difference"] != 0]
    past_L1 = off[off["kernel"] == "cp.async.cg"]
    assert list(past_L1["name"] + ", " + past_L1["metric"]) == ["copy16g: all zeros from stride 128, wavefronts"]
    assert set(frame["name"]) == {p.name for p in every_pattern() if p.op in ("copy16", "copy16g")}
    assert frame["hardware"].nunique() > 10


def neighbours(lanes):
    """The most of some lanes (source, to), source None for zeros, that share 16 bytes of a row of banks with one of them."""

    def meet(a, b):
        return a is not None and b is not None and (a - b) % 128 == 0

    return max(sum(meet(s, other) or meet(to, there) for other, there in lanes) for s, to in lanes)


def test_the_instructions_counter_counts_neighbours_where_the_data_pipes_counts_a_queue():
    """Of cp.async.ca, for which there are both."""
    by_instruction = record.load("device", "async").set_index("name")["wavefronts"]
    by_data_pipe = record.load("device", "patterns").set_index("name")["shared_wavefronts"] - 4
    differ = 0
    for pattern in every_pattern():
        if pattern.op == "copy16":
            own = pattern.source or tuple(16 * lane for lane in range(32))
            read = pattern.read or (16,) * 32
            lanes = [(s if n else None, to) for s, n, to in zip(own, read, pattern.to, strict=True)]
            quarters = [[lane for lane in lanes[q : q + 8] if lane[1] is not None] for q in range(0, 32, 8)]
            assert by_instruction[pattern.name] == sum(map(neighbours, filter(None, quarters))), pattern.name
            differ += by_instruction[pattern.name] != by_data_pipe[pattern.name]
    assert differ > 10


def of_32(place):
    return tuple(map(place, range(32)))


@pytest.mark.parametrize(
    ("what", "to", "source", "written"),
    [
        ("as it lies", of_32(lambda l: 16 * l), None, (16, 4)),
        ("swizzled", of_32(lambda l: 16 * (l ^ l // 8)), None, (16, 4)),
        ("a row for each lane", of_32(lambda l: 128 * l), None, (32, 32)),
        ("16 bytes on", of_32(lambda l: 16 * l + 16), None, (32, 12)),
        ("two quarters with a line", of_32(lambda l: 16 * l + 64), of_32(lambda l: 16 * l + 64), (16, 5)),
        ("all in one place", of_32(lambda l: 0), None, (1, 1)),
        ("a lane alone", of_32(lambda l: 0 if l == 9 else None), None, (1, 1)),
        ("upper and lower halves", of_32(lambda l: 16 * l if l % 8 in (0, 3) else None), None, (8, 8)),
    ],
)
def test_what_comes_from_the_L2_is_written_by_xor(what, to, source, written):
    assert agreement.written_from_L2(Pattern(what, "copy16g", to, source=source)) == written


def asked_of_L2(pattern: Pattern) -> int:
    """How many sectors a cp.async.cg asks the L2 for: each 32 bytes of its destination, once for every line of 128 bytes that
    they come from. What is filled with zeros, or overwritten by a later lane, is not asked for."""
    source = pattern.source or tuple(lane * pattern.width for lane in range(32))
    last = {to: lane for lane, to in enumerate(pattern.to) if to is not None}
    reads = [lane for lane in last.values() if pattern.read is None or pattern.read[lane]]
    return len({(source[lane] // LINE, pattern.to[lane] // SECTOR) for lane in reads})


def test_cp_async_cg_asks_for_the_sectors_that_the_hardware_counts(patterns):
    counted = patterns[patterns["metric"] == "global_load_sectors"].set_index("name")["hardware"]
    copies = [p for p in every_pattern() if p.op == "copy16g" and p.name in counted]
    # The kernel also reads 16 bytes of each lane's row of Q, and twice more if the lane takes part.
    for pattern in copies:
        rows = 16 + 2 * len({lane // 2 for lane, to in enumerate(pattern.to) if to is not None})
        assert asked_of_L2(pattern) == counted[pattern.name] - rows, pattern.name
    assert len(copies) >= 57
    # As where shared memory begins with 48 bytes of something else
    assert asked_of_L2(Pattern("", "copy16g", tuple(48 + 16 * lane for lane in range(32)))) == 4 * 5


def test_micro_kernels_have_the_counters_that_the_xray_predicts(microkernels):
    assert microkernels["name"].nunique() >= 60
    assert unexplained(microkernels).empty, unexplained(microkernels)


@pytest.mark.parametrize("stem", ["21_split_kv", "22_backward_fp32"])
def test_rungs_that_models_need_are_counted_kernel_by_kernel(stem, tmp_path, monkeypatch):
    """With a record made up of the X-ray's own counts, and one of them off by one: every kernel and counter is beside its own."""
    B, H, N, D = agreement.SIZES[0]
    names = {"21_split_kv": ["split_kv", "merge_splits"], "22_backward_fp32": ["prepare", "backward_fp32"]}[stem]
    rows = []
    for name in names:
        accesses = [a for a in agreement.traced(stem).accesses if a.kernel.startswith(f"{name}<")]
        rows.append(
            {"dtype": "fp16", "B": B, "H": H, "N": N, "D": D, "kernel": f"void {name}<{D}>"}
            | agreement.counters(accesses)
        )
    rows[1]["global_load_sectors"] += 1
    known = {"device": "NVIDIA H200", "date": "2026-01-01"}
    record.save(stem, "counters", pd.DataFrame(rows), known=known, root=tmp_path)
    load = record.load
    monkeypatch.setattr(record, "load", lambda stem, kind, device: load(stem, kind, "NVIDIA H200", tmp_path))
    monkeypatch.setattr(agreement.ladder, "rungs", lambda: [agreement.ladder.rung(stem)])
    frame = agreement.rungs()
    assert set(frame["kernel"]) == set(names)
    assert unexplained(frame)[["kernel", "metric", "difference"]].values.tolist() == [
        [names[1], "global_load_sectors", 1]
    ]


def explained(frame):
    """Rows with a difference, and their reasons."""
    rows = frame[frame["difference"] != 0].itertuples(index=False)
    return [
        (row, reasons.explain(row.name, row.kernel, row.metric, row.D, row.difference, row.hardware)) for row in rows
    ]


def test_a_number_that_is_off_by_one_is_not_explained(rungs, patterns, microkernels):
    for frame, least in ((rungs, 25), (patterns, 315), (microkernels, 39)):
        exact = [row for row, reason in explained(frame) if reason and not any(reason.timing) and not reason.between]
        assert len(exact) >= least and all(row.rest == 0 for row in exact)
        for row in exact:
            for other in (row.difference + 1, row.difference - 1, -row.difference):
                assert reasons.explain(row.name, row.kernel, row.metric, row.D, other, row.hardware) is None, row


def test_what_addresses_decide_is_explained_within_bounds_alone(patterns, microkernels):
    for row, reason in explained(pd.concat([patterns, microkernels, agreement.copies()])):
        if reason.between:
            for other in (reason.between[0] - 1, reason.between[1] + 1):
                assert reasons.explain(row.name, row.kernel, row.metric, row.D, other, row.hardware) is None, row


def test_no_reason_is_without_a_number():
    for reason in reasons.REASONS:
        assert reason.by or any(reason.timing) or reason.between, reason
        assert not reason.explains(0, 10**6, 10**5) and not reason.explains(0, -(10**6), 10**5), reason


def test_what_does_not_go_through_the_pipe_of_loads_and_stores_is_not_counted():
    ours = agreement.counters(
        [
            Access("k", "k.cu", 1, "cp.async.bulk.tensor", "shared", "K_smem", 2, 7, 8192, 0, 0, 0, None),
            Access("k", "k.cu", 1, "cp.async.bulk.tensor", "global", "K", 2, 7, 8192, 256, 256, 40, None),
            Access("k", "k.cu", 2, "atomic", "global", "dQ", 4, 3, 384, 12, 12, 4, None),
            Access("k", "k.cu", 3, "stmatrix", "shared", "O_smem", 16, 5, 2560, 25, 20, 5, None),
        ]
    )
    assert {metric: count for metric, count in ours.items() if count} == {
        "shared_store_wavefronts": 25,
        "shared_store_conflicts": 5,
    }


def test_a_difference_is_seen_and_nothing_explains_it_away():
    access = Access("k", "k.cu", 1, "load", "shared", "X_smem", 4, 10, 1280, 30, 10, 4, None)
    ours = agreement.counters([access])
    assert (ours["shared_load_wavefronts"], ours["shared_load_conflicts"], ours["shared_load_instructions"]) == (
        30,
        20,
        10,
    )
    theirs = {"shared_load_wavefronts": 31, "shared_load_conflicts": 20, "global_load_sectors": float("nan")}
    frame = agreement._frame(agreement._beside("05_new", "k", ours, theirs))
    assert frame[["metric", "difference", "why"]].values.tolist() == [
        ["shared_load_wavefronts", 1, ""],
        ["shared_load_conflicts", 0, ""],
    ]
    assert agreement.totals(frame)["unexplained_percent"].item() == pytest.approx(100 / 51)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stem", "kernel", "opcodes"),
    [
        ("20_causal_gqa", "causal_gqa<64, fa::fp16>", {"STS.128": 1, "STS.64": 1, "LDS.128": 1, "LDS": 16}),
        ("21_split_kv", "split_kv<64, fa::fp16>", {"LDS.64": 4, "LDS.128": 4, "LDS": 12}),
        ("21_split_kv", "merge_splits<64, fa::fp16>", {"LDS.64": 1, "LDS.128": 3 + 7, "STG.E": 2 + 1}),
        ("21_split_kv", "merge_splits<128, fa::fp16>", {"LDS.64": 1, "LDS.128": 1 + 3, "STG.E": 2 + 1}),
        ("22_backward_fp32", "backward_fp32<64>", {"STS.128": 34, "STS.64": 1, "STS": 3, "LDGSTS.E": 48}),
        ("23_backward_mma", "backward_mma<64, fa::fp16>", {"LDS.64": 8, "LDS": 15}),
    ],
)
def test_the_machine_code_is_what_the_reasons_say(stem, kernel, opcodes):
    """Loads and stores that are wider or fewer than the source's, and LDS that are for no lane: by the nvcc of the record."""
    if not find_toolkit().version.startswith(record.about(stem, "counters")["cuda"]):
        pytest.skip("another nvcc than the record's")
    found = sass.histogram(stem, modifiers=True)[kernel]
    assert {opcode: int(found.get(opcode, 0)) for opcode in opcodes} == opcodes
