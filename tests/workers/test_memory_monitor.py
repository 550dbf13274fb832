import mmap
import os
import threading
import time

import pytest

from autotune.util.linux import data_bytes
from autotune.util.units import MIB
from autotune.workers import memory_monitor
from autotune.workers.memory_peaks import MemoryPeaks
from tests.conftest import wait_until


class CountingMeter(memory_monitor.CpuMeter):
    """Knows how often it was asked."""

    samples = 0

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        super().sample(pids, peaks)
        self.samples += 1

    def wait_for_more(self) -> None:
        """Until one sample was begun and ended from now on."""
        before = self.samples
        wait_until(lambda: self.samples >= before + 2, "samples of the gauge")


def test_the_cpu_gauge_sees_what_is_mapped() -> None:
    meter = CountingMeter()
    watching = memory_monitor.MemoryMonitor(meter, [os.getpid()])
    meter.wait_for_more()
    before = watching.peaks().worst
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE):  # the allocator might reuse a freed block
        meter.wait_for_more()
    grown = watching.peaks().worst - before
    assert 60 * MIB < grown < 80 * MIB
    watching.reset()
    meter.wait_for_more()
    assert watching.peaks().worst < before + 10 * MIB
    watching.stop()
    assert meter.unreleased_memory_warnings() == meter.external_usage_warnings() == []
    assert data_bytes(os.getpid()) > 0


class SlowMeter(memory_monitor.Meter):
    """Answers late, like a driver that hangs, and says when it was asked to look closely."""

    interval_seconds = 60.0

    def __init__(self) -> None:
        self.hangs, self.close, self.samples = threading.Event(), 0, 0

    def sample_faster(self) -> None:
        self.close += 1

    def sample(self, pids: list[int], peaks: MemoryPeaks) -> None:
        self.samples += 1
        peaks.used[0] = self.samples
        if self.hangs.is_set():
            time.sleep(3600)


def test_a_look_is_a_sample_more_and_a_close_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "_LOOK_SECONDS", 120.0)
    meter = SlowMeter()
    watching = memory_monitor.MemoryMonitor(meter, [1])
    wait_until(lambda: meter.samples == 1, "the first sample")
    assert watching.look().used == [2]
    assert meter.close == 1
    watching.stop()


def test_a_driver_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "_LOOK_SECONDS", 0.1)
    meter = SlowMeter()
    meter.hangs.set()
    watching = memory_monitor.MemoryMonitor(meter, [1])
    wait_until(lambda: meter.samples == 1, "the first sample")
    assert watching.look().used == [1]
    watching.reset()
    assert watching.peaks().used == [0]


def test_main_memory_that_runs_short_is_looked_at_closely_and_devices_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it waits for: no clock."""
    left_bytes, waited, meter = [50 * MIB, 9 * MIB, 11 * MIB], list[tuple[int, float]](), CountingMeter()
    monkeypatch.setattr(memory_monitor, "host_total_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(memory_monitor, "host_available_bytes", lambda: left_bytes[min(len(waited), 2)])

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # a thread's start
                return super().wait()
            waited.append((meter.samples, timeout))
            return super().wait(timeout if len(waited) > 2 else 0)

    monkeypatch.setattr(threading, "Event", Counting)
    watching = memory_monitor.MemoryMonitor(meter, [os.getpid()])
    wait_until(lambda: len(waited) >= 3, "three looks")
    watching.stop()
    usual, closely = meter.interval_seconds, memory_monitor._CLOSELY_SECONDS
    assert waited[:3] == [(1, usual), (2, closely), (2, usual - closely)]
    assert watching.peaks().host_low == 9 * MIB
