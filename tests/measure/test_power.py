"""Clock, energy and time of long bursts: the clock is that of the SMs between two notes, and the record is sound."""

import sys

import pytest
import torch
from conditions import CARD
from test_sensors import Event, Nvml, on_made_up_gpu

from helpers import bench, record, rung
from helpers.measure import power
from helpers.record.schema import faults


def notes(*rows: tuple[int, int, int]) -> torch.Tensor:
    """SM, clocks and nanoseconds of each CTA."""
    return torch.tensor([(*row, 0) for row in rows])


def test_the_clock_is_counted_sm_by_sm():
    """Counters of SMs have nothing in common but their rate; of an SM's CTAs the first in the list counts; SM 9 is in one alone."""
    before = notes((0, 5_000, 1_000), (1, 900_000, 1_000), (9, 1, 1), (0, 7_000, 2_000))
    after = notes((1, 900_000 + 1_755_000, 1_001_000), (0, 5_000 + 1_755_000, 1_001_000))
    assert power.megahertz(before, after) == pytest.approx(1755)
    ran = notes(*((sm, clocks, 2_000) for sm, clocks in enumerate((1_000, 1_500, 1_900))))
    assert power.megahertz(notes(*((sm, 0, 1_000) for sm in range(3))), ran) == 1500  # the median of the SMs


@pytest.mark.parametrize(
    "after",
    [notes((0, 10, 2_000)), notes((0, 9_000, 1_000)), notes((3, 9_000, 2_000))],
    ids=["anew", "no time", "other"],
)
def test_what_is_no_clock_is_refused(after):
    with pytest.raises(RuntimeError, match="can't be read across kernels"):
        power.megahertz(notes((0, 5_000, 1_000)), after)


@pytest.fixture
def gpu(monkeypatch):
    """Kernels that take 1 ms and 0.7 J, on zeros 0.4 J; NVML tells the energy."""
    made, used = Nvml(), {"mJ": 0.0}
    made.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: used["mJ"]
    monkeypatch.setitem(sys.modules, "pynvml", made)
    on_made_up_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name, value in dict(TOKENS=64, N=32, SECONDS=0.02).items():
        monkeypatch.setattr(power, name, value)
    monkeypatch.setattr(bench, "DEVICE", "cpu")

    def call(q, k, v):
        Event.now += 1.0
        used["mJ"] += 700.0 if q.any() else 400.0

    monkeypatch.setattr(bench, "sdpa", lambda name, q, k, v: call(q, k, v))
    monkeypatch.setattr(power, "clock", lambda: lambda: lambda: 1755.0)
    return call


def test_a_record_has_both_kernels_on_both_inputs(gpu, tmp_path):
    frame = power.timings(gpu, rung("32_ping_pong"))
    assert list(frame)[:3] == ["name", "inputs", "dtype"] and len(frame) == 2 * 2 * 2 * power.ROUNDS
    assert set(frame["name"]) == {"32_ping_pong", "SDPA CUDNN"} and set(frame["D"]) == {64, 128}
    joules = frame.groupby("inputs")["joules"]
    assert joules.min().to_dict() == pytest.approx({"random": 0.7, "zeros": 0.4})
    assert joules.max().to_dict() == pytest.approx({"random": 0.7, "zeros": 0.4})
    assert frame["watts"].tolist() == pytest.approx((1e3 * frame["joules"] / frame["ms"]).tolist())
    assert set(frame["mhz"]) == {1755.0} and set(frame["throttle"]) == {
        "power_cap"
    }  # and the sensors', during the burst
    assert frame["sm_mhz"].eq(1755).all()
    path = record.save("32_ping_pong", "power", frame, known=CARD, root=tmp_path)
    assert not faults(path)
    (fault,) = faults(record.save("32_ping_pong", "power", frame.assign(mhz=0), known=CARD, root=tmp_path))
    assert "not above 0 in mhz" in fault


def test_a_backward_pass_is_recorded_beside_those_of_its_peers(gpu, monkeypatch):
    """It gets q, k, v, O, LSE and dO; of the peers only fast ones are asked for, none of which is at hand on a CPU."""
    monkeypatch.setattr(
        power.workloads, "backward_peers", lambda q, k, v, do, causal, without: {"FA3": lambda: gpu(q, k, v)}
    )
    frame = power.timings(lambda q, k, v, o, lse, do: gpu(q, k, do), rung("33_backward_wgmma"))
    assert set(frame["name"]) == {"33_backward_wgmma", "FA3"} and set(frame["inputs"]) == {"random", "zeros"}
    assert frame.groupby("inputs")["joules"].median().to_dict() == pytest.approx({"random": 0.7, "zeros": 0.4})


def test_the_clock_is_noted_around_the_burst_alone(gpu):
    log = []

    def clock():
        log.append("begin")
        return lambda: log.append("end") or 1.0

    def call():
        Event.now += 1.0
        log.append("call")

    frame = bench.energy({"f": call}, seconds=0.002, rounds=1, clock=clock)
    first, last = log.index("begin"), log.index("end")
    assert len(frame) == 1 and set(log[first + 1 : last]) == {"call"} and last == len(log) - 1


@pytest.mark.gpu
def test_the_sms_clock_is_one_that_the_card_has():
    end, x = power.clock()(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        x @ x
    assert 300 < end() < 3000
