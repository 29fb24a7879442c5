"""Rung 20 with other numbers of heads at once: the variants differ in that number alone, and it does what it says."""

import pandas as pd
import torch
from conditions import CARD

from helpers import bench, record, rung
from helpers.measure import heads_at_once, workloads
from helpers.record.schema import faults


def test_the_rungs_own_share_is_among_the_variants():
    """By its text: under a causal mask the variant of 32 MiB is the rung."""
    assert rung(heads_at_once.STEM).source.count(heads_at_once.SHARE) == 1 and 32 in heads_at_once.MIB
    assert "int64_t(32) << 20" in heads_at_once.variant(32, 64).source
    assert len({heads_at_once.variant(mib, 64).source for mib in heads_at_once.MIB}) == len(heads_at_once.MIB)


def test_a_record_has_every_share_at_every_shape(monkeypatch, tmp_path):
    def measure(calls, inputs, burst_ms):
        for call in calls.values():
            call(*inputs)
        return pd.DataFrame([(name, r, 1.0) for r in range(7) for name in calls], columns=["name", "round", "ms"])

    seen = []
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(workloads, "random_tensors", lambda dtype, shape, count: [shape] * count)
    monkeypatch.setattr(heads_at_once, "variant", lambda mib, D: (mib, D))
    monkeypatch.setattr(
        "helpers.run.kernel.load", lambda which, **_: lambda q, k, v, causal: seen.append((*which, q[2], causal))
    )
    frame = heads_at_once.timings()
    assert len(frame) == 7 * len(seen) and len(set(seen)) == 2 * 2 * len(heads_at_once.MIB)
    assert all(causal for *_, causal in seen)
    assert frame["B"].mul(frame["Nq"]).eq(16384).all() and frame["H"].mul(frame["D"]).eq(2048).all()
    path = record.save(heads_at_once.STEM, "at_once", frame, known=CARD, root=tmp_path)
    assert not faults(path)
