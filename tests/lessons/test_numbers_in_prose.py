"""Numbers in prose that name where they come from."""

import pytest

from helpers import languages_timed, record
from helpers.lessons.numbers import (
    at_once,
    clocks,
    copied,
    family,
    language,
    one_gpu,
    over_one_gpu,
    power,
    ratio,
    renewed,
    stage,
    stalled,
    step,
    tflops,
    tile,
    trained,
)


def test_a_number_is_written_anew_and_nothing_else():
    text = 'It is **9.99<!--= ratio("13", "FLASH", 64):.2f --> times** as fast (<!--= 2 + 1 -->), 4.5 of it.'
    assert renewed(text) == (
        f'It is **{ratio("13", "FLASH", 64):.2f}<!--= ratio("13", "FLASH", 64):.2f --> times** as fast (3<!--= 2 + 1 -->), 4.5 of it.'
    )
    assert renewed(renewed(text)) == renewed(text)


def test_a_step_is_the_records():
    steps = record.load("32_ping_pong", "steps", device=record.SHOWN)
    (rung_28,) = steps.query("step == 28 and D == 64")["ratio_causal"]
    assert step("32", 28, 64, "ratio_causal") == rung_28 != step("32", 28, 128, "ratio_causal")
    assert renewed('0<!--= step("32", 28, 64, "ratio_causal"):.3f -->').startswith(f"{rung_28:.3f}<")


def test_a_language_is_held_against_sdpa_in_its_own_process():
    found = languages_timed.summary(record.SHOWN).set_index(["name", "D", "causal"])["ratio"]
    assert language("triton_tiles", 64, 1) == found["triton_tiles", 64, 1] > 1
    assert language("32_ping_pong", 128) == found["32_ping_pong", 128, 0] > 1.5  # in the process of the peers


def test_an_expression_that_fails_is_named():
    with pytest.raises(ValueError, match=r'ratio\("13", "FLASH", 65\)'):
        renewed('1<!--= ratio("13", "FLASH", 65)["x"] -->')


def test_a_ratio_and_a_speed_are_the_records():
    samples = record.load("13_tuned", device=record.SHOWN).query("D == 64 and dtype == 'fp16'")
    medians = record.medians(record.headline(samples)).query("Nk == 4096").set_index("name")
    assert (
        tflops("13", 64) == medians["tflops"]["13_tuned"]
        and tflops("13", 64, of="FLASH") == medians["tflops"][record.FLASH]
    )
    assert ratio("13", "FLASH", 64, 4096) == pytest.approx(
        medians["ms"][record.FLASH] / medians["ms"]["13_tuned"], rel=0.02
    )


def test_a_peer_is_named_in_short():
    samples = record.load("04_fa2_fp32", device=record.SHOWN).query("D == 64")
    medians = record.medians(record.headline(samples)).query("Nk == 4096").set_index("name")["tflops"]
    peers = {"EFFICIENT": "SDPA EFFICIENT", "MATH": "SDPA MATH"}
    assert {of: tflops("04", 64, dtype="fp32", of=of) for of in peers} == {of: medians[peers[of]] for of in peers}
    assert power("32", "ms", 128, of="CUDNN") == power("32", "ms", 128, of="SDPA CUDNN")


def test_what_several_gpus_did_is_the_records():
    samples = record.load("50_ring", "ring", f"{record.SHOWN}-x4").query("Nq == 65536 and D == 128 and causal == 1")
    samples = samples.query("passes == 'forward' and Hkv == 16").set_index("round")
    alone, ours = (samples.query(f"name == '{name}'") for name in ("one GPU", "50_ring"))
    flops = record.attention_flops(1, 16, 65536, 65536, 128, 1)
    assert one_gpu(65536, causal=1) == pytest.approx(flops / alone["ms"].median() / 1e9)
    in_zigzag = alone["ms"] / ours.query("layout == 'zigzag'")["ms"]
    assert over_one_gpu("50_ring", 65536, ranks=4) == pytest.approx(in_zigzag.median(), rel=0.02)
    link = record.load("51_one_sided", "link", f"{record.SHOWN}-x2").query("name == 'copies alone' and D == 128")
    link = link.query("copiers == 16 and N == 16384")
    assert copied(16, 128, 16384) == pytest.approx((link["bytes"] / (link["ms"] / 1e3)).median() / 1e9)


def test_what_was_trained_is_the_records():
    found = {kind: record.load("24_in_a_model", kind, record.SHOWN) for kind in ("profile", "training", "runs")}
    assert trained("parts", "SDPA FLASH", "all") == pytest.approx(
        found["profile"].query("name == 'SDPA FLASH'").ms.sum()
    )
    of_run = "name == 'SDPA CUDNN' and graph == 1"
    ms, (tokens,) = found["training"].query(of_run + " and step >= 20").ms.median(), found["runs"].query(of_run).tokens
    assert trained("speeds", "SDPA CUDNN, as a graph", "kilotokens_per_s") == pytest.approx(tokens / ms)
    assert trained("yardstick", "SDPA FLASH, seed 1", "mean") > 10 * trained("yardstick", "SDPA CUDNN", "mean") > 0
    ms = record.load("24_in_a_model", "writing", record.SHOWN).query("name == 'SDPA' and graph == 1 and B == 16").ms
    assert trained("writing", (16, 2048, "SDPA, as a graph"), "bytes_per_s") == pytest.approx(16_000 / ms.median())
    with pytest.raises(ValueError, match="rungs 1 and 2"):
        renewed('1<!--= trained("speeds", "rungs 1 and 2", "held_out") -->')


def test_stages_tiles_and_stalls_are_the_records():
    samples = record.load("13_tuned", "stages", record.SHOWN).query("D == 64 and dtype == 'fp16'")
    ms = samples.groupby(["Nk", "name"])["ms"].median().unstack()
    of = {name: record.geometric_mean(ms[record.FLASH] / ms[name]) for name in ms}
    assert stage("13", "13_3", "13_2", 64) == pytest.approx(of["13_3_fma"] / of["13_2_rows"], rel=0.02)
    assert stage("13", "12", "FLASH", 64) == pytest.approx(of["12_double_buffered"], rel=0.02)
    times = record.load("12_double_buffered", "timeline", record.SHOWN).query("warp == 0 and kind == 'softmax'")
    assert tile("12", "softmax") == pytest.approx((times.end - times.begin).mean())
    cycles = record.load("13_tuned", "stalls", record.SHOWN).query("D == 128").set_index("reason")["cycles"]
    assert stalled("13", 128, "wait", "barrier") == pytest.approx((cycles["wait"] + cycles["barrier"]) / cycles.sum())
    with pytest.raises(LookupError, match="no sleep; there are barrier"):
        stalled("13", 128, "sleep")
    assert at_once(32) == [1.0] * 4 and min(at_once(0)) > 1


def test_a_family_is_the_records():
    found = record.spread(record.load("13_tuned", "families", record.SHOWN), "13_tuned").set_index(
        ["family", "D", "causal"]
    )
    assert family("13", "FLASH", "one key", 64) == found.loc[("one key", 64, 0), record.FLASH]
    assert family("13", "FLASH", "one key", 64) != family("13", "FLASH", "randn", 64)


def test_what_a_burst_took_is_the_records():
    samples = record.load("32_ping_pong", "power", record.SHOWN)
    ours = samples.query("name == '32_ping_pong' and D == 128 and inputs == 'zeros'")
    assert power("32", "joules", 128, "zeros") == ours["joules"].median() < power("32", "joules", 128)
    assert power("32", "ms", 128, of="CUDNN") > power("32", "ms", 128) > power("32", "ms", 128, "zeros")
    assert power("32", "Mclk", 128) == pytest.approx(power("32", "ms", 128) * power("32", "mhz", 128) / 1000, rel=0.01)
    assert clocks("32", 128) > 2 * 1024  # two consumers' products at the tensor cores' full rate
