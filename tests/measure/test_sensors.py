"""Clock, power and throttle reasons of every sample, with a made-up NVML; nothing where there is none."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from helpers import bench
from helpers.measure import sensors


class Error(Exception):
    pass


class Nvml(SimpleNamespace):
    """NVML of one GPU; `told` holds its clock, power and reasons."""

    NVML_CLOCK_SM, NVMLError, NVML_FI_DEV_POWER_INSTANT = 1, Error, 186

    def __init__(self, **told):
        super().__init__(told={"mhz": 1755, "mw": 651_500, "bits": 4, "field": 0} | told, asked=[])

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked.append(index)
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return "gpu"

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        return self.told["mhz"]

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        value = SimpleNamespace(uiVal=self.told["mw"])
        return [SimpleNamespace(nvmlReturn=self.told["field"], value=value)]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 500_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        if self.told["bits"] is None:
            raise Error("not supported")
        return self.told["bits"]


@pytest.fixture
def nvml(monkeypatch):
    def install(**told):
        made = Nvml(**told)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_what_is_read(nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = nvml()
    assert sensors.reader()() == (1755.0, 651.5, "power_cap") and made.asked == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a,GPU-1")
    assert sensors.reader() and made.asked[-1] == "GPU-8f2a"


def test_an_average_stands_in_where_the_power_of_the_moment_is_not_told(nvml):
    nvml(field=3)
    assert sensors.reader()()[1] == 500.0


def test_reasons_in_words():
    assert sensors.words(0) == sensors.words(1) == "none"
    assert sensors.words(0x4 | 0x20 | 0x1) == "power_cap+thermal"


@pytest.mark.parametrize("missing", ["module", "reasons", "driver"])
def test_without_nvml_there_is_no_reader(nvml, monkeypatch, missing):
    if missing == "module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "reasons":
        nvml(bits=None)
    else:
        monkeypatch.setattr(
            nvml(), "nvmlInit", lambda: (_ for _ in ()).throw(Error("driver not loaded")), raising=False
        )
    assert sensors.reader() is None


def test_energy_is_that_of_the_calls_alone(nvml, monkeypatch):
    """1 kW while f runs, 0.5 kW while g does, and nothing in between."""
    made = nvml()
    used = {"mJ": 7.0}
    made.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: used["mJ"]
    on_made_up_gpu(monkeypatch)

    def spending(ms, watts):
        def call():
            Event.now += ms
            used["mJ"] += ms * watts

        return call

    frame = bench.energy({"f": spending(2.0, 1000.0), "g": spending(5.0, 500.0)}, rounds=2)
    mean = frame.groupby("name")[["ms", "joules", "watts"]].mean()
    assert mean.loc["f"].tolist() == pytest.approx([2.0, 2.0, 1000.0])
    assert mean.loc["g"].tolist() == pytest.approx([5.0, 2.5, 500.0])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="energy can't be read"):
        bench.energy({"f": spending(2.0, 1.0)})


class Event:
    """A CUDA event on a clock that only the callables advance."""

    now, log = 0.0, []

    def __init__(self, enable_timing):
        pass

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.log.append("synchronize")

    def elapsed_time(self, end):
        return end.at - self.at


def on_made_up_gpu(monkeypatch):
    Event.log = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(L2_cache_size=1000))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)


def test_a_sample_has_what_was_read_while_it_ran(monkeypatch):
    on_made_up_gpu(monkeypatch)

    def call():
        Event.now += 20.0
        Event.log.append("call")

    def read():
        Event.log.append("read")
        return 1700.0, 600.0, "power_cap"

    monkeypatch.setattr(sensors, "reader", lambda: read)
    frame = bench.measure({"f": call}, rounds=2)
    assert list(frame) == ["name", "round", "ms", *sensors.COLUMNS]
    assert frame["watts"].eq(600).all() and frame["throttle"].eq("power_cap").all()
    assert Event.log[-6:] == ["call", "read", "synchronize"] * 2 and Event.log.count("read") == 2
    monkeypatch.setattr(sensors, "reader", lambda: None)
    pd.testing.assert_frame_equal(bench.measure({"f": call}, rounds=2), frame[["name", "round", "ms"]])
