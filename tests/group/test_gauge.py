import os

from autotune.group import gauge
from autotune.rank.devices import data_bytes
from autotune.units import MIB
from tests.conftest import wait_until


class CountingMeter(gauge.CpuMeter):
    """Knows how often it was asked."""

    samples = 0

    def sample(self, pids: list[int], peaks: gauge.Peaks) -> None:
        super().sample(pids, peaks)
        self.samples += 1

    def wait_for_more(self) -> None:
        """Until one sample was begun and ended from now on."""
        before = self.samples
        wait_until(lambda: self.samples >= before + 2, "samples of the gauge")


def test_the_cpu_gauge_sees_what_is_mapped() -> None:
    meter = CountingMeter()
    watching = gauge.Gauge(meter, [os.getpid()])
    meter.wait_for_more()
    before = watching.peaks().worst
    block = bytearray(64 * MIB)
    meter.wait_for_more()
    grown = watching.peaks().worst - before
    del block
    assert 60 * MIB < grown < 80 * MIB
    watching.reset()
    meter.wait_for_more()
    assert watching.peaks().worst < before + 10 * MIB
    watching.stop()
    assert meter.is_idle()
    assert data_bytes(os.getpid()) > 0


class FakeNvml:
    """A device of 1000 units whose use the test sets."""

    def __init__(self) -> None:
        self.used, self.processes = 100 * MIB, []

    def nvmlDeviceGetMemoryInfo(self, handle):  # type: ignore[no-untyped-def]
        return type("M", (), {"used": self.used, "total": 1000 * MIB})

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # type: ignore[no-untyped-def]
        return [type("P", (), {"pid": pid, "usedGpuMemory": size}) for pid, size in self.processes]


def nvml_meter(fake: FakeNvml) -> gauge.NvmlMeter:
    meter = gauge.NvmlMeter.__new__(gauge.NvmlMeter)
    meter._lib, meter._handles = fake, ["gpu0"]
    meter._idle = [meter._used("gpu0")]
    return meter


def test_nvml_per_process_and_foreign_growth() -> None:
    fake = FakeNvml()
    meter = nvml_meter(fake)
    fake.used, fake.processes = 900 * MIB, [(7, 300 * MIB)]
    peaks = gauge.Peaks(used=[0])
    meter.sample([7], peaks)
    assert peaks.used == [300 * MIB]
    assert peaks.foreign == 500 * MIB
    assert not meter.is_idle()
    fake.used = 100 * MIB
    assert meter.is_idle()


def test_nvml_device_growth_where_pids_are_hidden() -> None:
    fake = FakeNvml()
    meter = nvml_meter(fake)
    fake.used = 500 * MIB
    peaks = gauge.Peaks(used=[0])
    meter.sample([7], peaks)
    assert peaks.used == [400 * MIB]
    assert peaks.foreign == 0
