"""The GPU's SM clock, its power draw and what holds its clock back, read through NVML while a burst runs.

NVML comes with the driver, its Python module as nvidia-ml-py. Without one of them nothing is read, and a record keeps what
`bench.watch` sees alone.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import record

COLUMNS = ("sm_mhz", "watts", "throttle")
# NVML's clocks event reasons, bit by bit. Idleness (bit 0) is none.
REASONS = {
    1: "application_clocks",
    2: "power_cap",
    3: "hw_slowdown",
    4: "sync_boost",
    5: "thermal",
    6: "hw_thermal",
    7: "hw_power_brake",
    8: "display",
}
NONE = "none"


def _open() -> tuple | None:
    """NVML's module and the GPU that torch calls cuda:0; None where there is no module, no driver, or no such GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        place = record.gpu_id()
        by = pynvml.nvmlDeviceGetHandleByIndex if place.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        return pynvml, by(int(place) if place.isdigit() else place)
    except Exception:  # NVML's own error can't be named where its module is missing
        return None


def reader() -> Callable[[], tuple[float, float, str]] | None:
    """A function that reads COLUMNS of the GPU that torch calls cuda:0: MHz, W, and the reasons joined by "+" or "none". None where
    NVML can't be used. The power is the sensor's latest reading, and takes some ten milliseconds to follow a change."""
    if (found := _open()) is None:
        return None
    pynvml, gpu = found
    reasons_of = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons_of = reasons_of or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def read() -> tuple[float, float, str]:
        mhz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
        return float(mhz), _watts(pynvml, gpu), words(reasons_of(gpu))

    try:
        read()
    except pynvml.NVMLError:  # a GPU, or a driver, that doesn't tell
        return None
    return read


def energy() -> Callable[[], float] | None:
    """A function that reads the joules which that GPU has used since its driver was loaded, a counter that moves on every some ten
    milliseconds. None where NVML can't tell."""
    if (found := _open()) is None:
        return None
    pynvml, gpu = found

    def read() -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3

    try:
        read()
    except pynvml.NVMLError:
        return None
    return read


def _watts(pynvml, gpu) -> float:
    """The power now; where only the average over a second is told, that."""
    field = getattr(pynvml, "NVML_FI_DEV_POWER_INSTANT", None)
    if field is not None:
        value = pynvml.nvmlDeviceGetFieldValues(gpu, [field])[0]
        if value.nvmlReturn == 0:
            return value.value.uiVal / 1e3
    return pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


def words(bits: int) -> str:
    """NVML's bits in words: "power_cap+thermal"; "none" if nothing holds the clock back."""
    return "+".join(word for bit, word in REASONS.items() if bits >> bit & 1) or NONE
