"""What can be said without a GPU of the records that models need: their columns, their shapes, their arithmetic."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from helpers import bench, record, rung, workloads

SPEED = {"copy": 2.0, "SDPA FLASH": 3.0}  # ms of each name; the rung takes 1


@pytest.fixture
def small(monkeypatch):
    """Small shapes on the CPU, and a clock that knows the answer."""

    def measure(calls, inputs=(), rounds=2, **options):
        for call in calls.values():
            call(*inputs)
        rows = [(name, r, SPEED.get(name, 1.0)) for r in range(rounds) for name in calls]
        frame = pd.DataFrame(rows, columns=["name", "round", "ms"])
        frame.attrs["method"] = "a fake"
        return frame

    for name, value in dict(TOKENS=128, WIDTH=128, LENGTHS=(32, 64), GROUPS=(4, 2), GROUPED=((1, 16),)).items():
        monkeypatch.setattr(workloads, name, value)
    monkeypatch.setattr(workloads, "COPIED", 1 << 10)
    monkeypatch.setattr(workloads, "CACHES", ((2, 4, 2, 512, 64),))
    for name, value in dict(SHORTEST=16, LONGEST=64, SEQUENCES=3, BATCHES=1).items():
        monkeypatch.setattr(workloads, name, value)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(workloads, "_causal_peers", lambda *x: {"SDPA FLASH": lambda q, k, v: q})
    sdpa = workloads.sdpa
    monkeypatch.setattr(
        workloads, "sdpa", lambda name, q, *x, **o: q if name == record.FLASH else sdpa(name, q, *x, **o)
    )
    monkeypatch.setattr(workloads, "measure", measure)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return SimpleNamespace(calls=[])


def kernel(calls):
    def call(q, k, v, causal=False, cu_seqlens=None, splits=None):
        calls.append((tuple(q.shape), tuple(k.shape), causal, cu_seqlens, splits))
        return q, None

    return call


def test_causal_rows_count_half_of_the_flops(small):
    samples = workloads.causal(kernel(small.calls), rung("20_causal_gqa"))
    assert list(samples) == ["name", "dtype", "causal", *record.SHAPE, "round", "ms"]
    assert all(causal for *_, causal, _, _ in small.calls)
    made = record.medians(samples).query("name == '20_causal_gqa'")
    assert (made["tflops"] * 1e9 == record.forward_flops(*(made[c] for c in record.SHAPE)) / 2).all()
    assert record.ratio(samples, "20_causal_gqa", "SDPA FLASH")["ratio"].eq(3).all()


def test_groups_are_timed_beside_as_many_heads(small):
    samples = workloads.groups(kernel(small.calls), rung("20_causal_gqa"))
    assert set(zip(samples["name"], samples["Hkv"])) == {("20_causal_gqa", 2), ("20_causal_gqa", 4), ("SDPA FLASH", 2)}
    assert {k[1] for _, k, *_ in small.calls} == {2, 4}


def test_the_heads_of_a_group_rotate_past_the_cache(small, monkeypatch):
    """The stopwatch copies what it is given; here it gives each burst another scale of the tensors, which all calls have to take."""
    seen, timed = [], workloads.measure
    monkeypatch.setattr(workloads, "measure", lambda calls, given, **o: timed(calls, [2 * x for x in given], **o))

    def kernel(q, k, v, causal):
        seen.append((k.shape[1], q.std().item() > 1.5, k.std().item() > 1.5))
        return q, None

    workloads.groups(kernel, rung("20_causal_gqa"))
    assert set(seen) == {(2, True, True), (4, True, False)}


def test_packed_batches_have_an_ideal(small):
    samples = workloads.packed(kernel(small.calls), rung("20_causal_gqa"))
    assert (samples["tokens"] < samples["sequences"] * 64).all()
    longest = {int(starts[0].diff().max()) for *_, starts, _ in small.calls if starts is not None}
    padded = {q[2] for q, _, _, starts, _ in small.calls if starts is None and q[0] == workloads.SEQUENCES}
    assert padded == longest and len(longest) == 1  # of the one batch
    rates = {16: pd.Series([1.0]), 32: pd.Series([4.0]), 64: pd.Series([4.0])}
    assert [workloads._rate(rates, n)[0] for n in (16, 32, 50, 64)] == [1, 4, 4, 4]
    assert workloads._rate(rates, 23)[0] == pytest.approx(4**0.5236, rel=1e-3)  # log2(23 / 16) = 0.5236


def test_decode_rows_say_their_bytes_and_splits(small):
    samples = workloads.decode(kernel(small.calls), rung("21_split_kv"))
    table = record.bandwidths(samples)
    assert set(table["splits"]) >= {1, 2} and set(table["bytes"]) == {2 * 2 * 2 * 2 * 512 * 64}
    assert samples.groupby(["dtype", "round"])["chosen"].sum().eq(1).all()
    assert table["to_flash"].eq(3).all()
    copy = samples.loc[samples["name"] == "copy", "bytes"].iloc[0]
    assert copy == 2 * 4 * (1 << 10)  # COPIED floats, read and written
    assert table["of_copy"].iloc[0] == pytest.approx(table["bytes"].iloc[0] / 1.0 / (copy / 2.0))


@pytest.mark.parametrize(("stem", "dtypes"), [("22_backward_fp32", ["fp32"]), ("23_backward_mma", ["fp16", "bf16"])])
def test_the_backward_pass_is_timed_beside_autograds(small, stem, dtypes):
    """With PyTorch's own back ends in between: those that the CPU has."""
    given = []

    def kernel(q, k, v, o, lse, do, causal=False):
        given.append(causal)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(o, expected, rtol=0.02, atol=0.02)
        return q, k, v

    samples = workloads.backward(kernel, rung(stem))
    assert list(samples) == ["name", "dtype", "causal", *record.SHAPE, "round", "ms"]
    assert set(given) == {False, True} and list(samples["dtype"].unique()) == dtypes
    assert {stem, "SDPA MATH"} <= set(samples["name"]) and set(samples["causal"]) == {0, 1}
    made = record.medians(samples.assign(op="attention_backward"))
    flops = 2.5 * record.attention_flops(*(made[c] for c in record.SHAPE), made["causal"])
    assert (made["tflops"] * made["ms"] * 1e9).tolist() == pytest.approx(flops.tolist())
    assert "causal" in record.summary(samples, stem, "SDPA MATH")


def test_a_hopper_rung_is_held_against_cublas(small, monkeypatch):
    monkeypatch.setattr(workloads, "LENGTHS", (2048, 4096))
    monkeypatch.setattr(workloads, "TOKENS", 4096)
    monkeypatch.setattr(workloads, "SQUARE", 16)
    monkeypatch.setitem(SPEED, record.CUBLAS, 4.0)
    samples = workloads.matmul(kernel(small.calls), replace(rung("20_causal_gqa"), arch="sm_90a"))
    points = record.ratio_to_cublas(samples, "20_causal_gqa")
    ours = points["causal"].map(lambda c: record.attention_flops(1, 1, 4096, 4096, 128, c) / 1.0)
    assert points["ratio"].tolist() == pytest.approx((ours / (2 * 16**3 / 4.0)).tolist())


def test_a_rung_has_the_records_its_features_call_for(small):
    assert record.kinds(rung("20_causal_gqa")) == ("forward", "causal", "groups", "packed")
    assert record.kinds(rung("21_split_kv")) == ("decode",)
    assert record.kinds(rung("23_backward_mma")) == ("backward",)
    assert record.kinds(rung("33_backward_wgmma")) == ("backward", "deterministic")
    assert record.kinds(replace(rung("13_tuned"), arch="sm_90a")) == ("forward", "matmul")
    assert record.kinds(rung("12_double_buffered")) == ("forward",)
    for kind in record.kinds(rung("20_causal_gqa"))[1:]:
        columns = workloads.samples(kind, kernel([]), rung("20_causal_gqa")).columns
        assert ("Hkv" in columns) == (kind == "groups") and ("ideal_ms" in columns) == (kind == "packed")


def test_groups_and_packed_batches_become_ratios(small):
    few = record.grouped(workloads.groups(kernel([]), rung("20_causal_gqa")), "20_causal_gqa")
    assert few["ratio"].eq(1).all() and (few["few"][0], few["many"][0]) == (2, 4)
    samples = workloads.packed(kernel([]), rung("20_causal_gqa")).assign(ms=2.0, padded_ms=5.0, ideal_ms=1.5)
    assert (
        record.ratio_to_ideal(samples)["ratio"].eq(0.75).all()
        and record.ratio_to_ideal(samples)["to_padded"].eq(2.5).all()
    )
