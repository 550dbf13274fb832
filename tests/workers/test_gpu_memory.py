"""Whose bytes are on a GPU: NVML's real bindings over a driver that changes under them."""

import gc
import os
import subprocess
import time

import pytest

from autotune.problem import nvml
from autotune.problem.hardware import detect
from autotune.problem.nvml import GpuError, GpuLost
from autotune.util.units import GIB
from autotune.workers import gpu_memory as gpu_meter
from autotune.workers.gpu_memory import NvmlMeter, attribute_hidden_usage, make_meter
from autotune.workers.memory_monitor import CpuMeter
from autotune.workers.memory_peaks import FOREIGN_BYTES, MemoryPeaks
from tests.fake_driver import FUNCTION_NOT_FOUND, GPU_IS_LOST, NO_PROCESS, NOT_SUPPORTED, Card, Driver, Slice

RANK, NEIGHBOUR, DESKTOP = NO_PROCESS, NO_PROCESS + 1, NO_PROCESS + 2


@pytest.fixture
def card(driver: Driver) -> Card:
    """One with a desktop of 1.3 GiB on it."""
    driver.show(Card("NVIDIA GeForce RTX 3090", 24, graphics={DESKTOP: 1300}))
    return driver.cards[0]


def meter_of(driver: Driver) -> NvmlMeter:
    made = make_meter(detect("cuda", None))
    assert isinstance(made, NvmlMeter)
    return made


def begun(driver: Driver) -> NvmlMeter:
    meter = meter_of(driver)
    assert meter.external_usage_warnings() == []
    meter.begin()
    return meter


def sampled(meter: NvmlMeter, *pids: int) -> MemoryPeaks:
    """Fresh peaks of one close sample."""
    peaks = MemoryPeaks(used=[0] * len(pids))
    meter.sample_faster()
    meter.sample(list(pids), peaks)
    return peaks


def change(driver: Driver, card: Card, **values: object) -> None:
    for name, value in values.items():
        setattr(card, name, value)
    driver.write()


# -- whose bytes ---------------------------------------------------------------------------------------------------------


def test_a_desktop_is_nobodys_fault(driver: Driver, card: Card) -> None:
    meter = begun(driver)
    change(driver, card, processes={RANK: 10 * 1024})
    peaks = sampled(meter, RANK)
    assert peaks.used == [10 * GIB]
    assert peaks.grown == {0: 10 * GIB}
    assert peaks.foreign == 0
    assert peaks.worst == 10 * GIB
    change(driver, card, processes={})
    assert meter.unreleased_memory_warnings() == []


def test_a_gpu_that_computes_is_busy(driver: Driver, card: Card) -> None:
    meter = begun(driver)
    assert not meter.busy()
    change(driver, card, utilization=97)
    assert meter.busy()
    change(driver, card, utilization=1)
    assert not meter.busy(), "a kernel that waits for a peer uses no memory: 0 % there"
    driver.failing = {"nvmlDeviceGetUtilizationRates": FUNCTION_NOT_FOUND}
    driver.write()
    assert not meter.busy(), "nobody can tell"
    assert not CpuMeter().busy()


def test_a_neighbour_in_mid_study(driver: Driver, card: Card) -> None:
    """It takes 12 GiB while a rank runs: not the rank's, and known by its pid."""
    meter = begun(driver)
    change(driver, card, processes={RANK: 10 * 1024, NEIGHBOUR: 12 * 1024})
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.foreign) == ([10 * GIB], 12 * GIB)
    assert peaks.neighbours == f"a process (pid {NEIGHBOUR}) 12.00 GiB on GPU 0"
    change(driver, card, processes={NEIGHBOUR: 12 * 1024})
    assert meter.unreleased_memory_warnings() == [], "what is left is not the ranks'"
    (line,) = meter.external_usage_warnings()
    assert line == (f"GPU 0 has 12.00 GiB less free than when the study began: a process (pid {NEIGHBOUR}) 12.00 GiB")
    meter.begin()
    assert meter.external_usage_warnings() == [], "it was waited for in vain"
    change(driver, card, processes={NEIGHBOUR: 12 * 1024, RANK: 8 * 1024})
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.foreign) == ([8 * GIB], 12 * GIB), "it still takes room that the capacity counts"
    assert f"pid {NEIGHBOUR}" in peaks.neighbours
    change(driver, card, processes={})
    assert meter.external_usage_warnings() == []
    meter.begin()
    change(driver, card, processes={RANK: 8 * 1024})
    assert sampled(meter, RANK).foreign == 0, "it is gone again"


def test_a_neighbour_that_grows_is_waited_for_again(driver: Driver, card: Card) -> None:
    meter = begun(driver)
    for gib, waits in ((4, True), (4, False), (4.2, False), (8, True)):
        change(driver, card, processes={NEIGHBOUR: int(gib * 1024)})
        assert bool(meter.external_usage_warnings()) is waits, gib
        if waits:
            meter.begin()


def test_a_neighbour_that_a_container_hides(driver: Driver, card: Card) -> None:
    """Between two groups its bytes are known to be others'; beside a rank only that rank can tell."""
    meter = begun(driver)
    change(driver, card, hidden_mib=10 * 1024)
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.grown, peaks.worst, peaks.foreign) == ([0], {0: 10 * GIB}, 10 * GIB, 0)
    change(driver, card, hidden_mib=12 * 1024)
    assert meter.unreleased_memory_warnings() == [
        f"GPU 0 has 12.00 GiB less free than before its ranks were launched: {gpu_meter.HIDDEN}"
    ]
    assert meter.external_usage_warnings() == [
        f"GPU 0 has 12.00 GiB less free than when the study began: {gpu_meter.HIDDEN}"
    ]
    meter.begin()
    change(driver, card, hidden_mib=20 * 1024)
    peaks = sampled(meter, RANK)
    assert peaks.grown == {0: 8 * GIB}, "12 of the 20 GiB were there before"
    assert (peaks.foreign, peaks.neighbours) == (12 * GIB, f"{gpu_meter.HIDDEN} on GPU 0")


def test_what_a_failed_rank_says_of_hidden_neighbours() -> None:
    numbers = {"total_bytes": 24 * GIB, "free_bytes": GIB // 2, "reserved_bytes": 11 * GIB}
    peaks = MemoryPeaks(used=[0])
    attribute_hidden_usage(peaks, numbers, int(0.8 * GIB))
    assert peaks.foreign == pytest.approx(11.7 * GIB)
    assert peaks.foreign > FOREIGN_BYTES
    own = MemoryPeaks(used=[11 * GIB])
    attribute_hidden_usage(own, numbers, int(0.8 * GIB))
    assert own.foreign == 0, "NVML shows it, and knows better"
    late = MemoryPeaks(used=[0])
    attribute_hidden_usage(late, numbers, int(11.7 * GIB))
    assert late.foreign == 0, "less than what CUDA and NCCL load late"
    for told in ({}, {**numbers, "reserved_bytes": None}):
        silent = MemoryPeaks(used=[0])
        attribute_hidden_usage(silent, {k: v for k, v in told.items() if v is not None}, 0)
        assert silent.foreign == 0
    attribute_hidden_usage(silent, numbers, None)
    assert silent.foreign == 0


def test_another_process_with_the_same_number(driver: Driver, card: Card) -> None:
    """A container numbers its processes anew while NVML shows the host's numbers: that one is no rank."""
    change(driver, card, processes={RANK: 9 * 1024})
    meter = begun(driver)
    change(driver, card, hidden_mib=2 * 1024)
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.worst) == ([0], 2 * GIB)


def test_what_a_rank_has_started_is_its_own(driver: Driver, card: Card) -> None:
    """A server for generation, say, that a script runs beside its training."""
    meter = begun(driver)
    with subprocess.Popen(["sleep", "60"]) as child:
        change(driver, card, processes={os.getpid(): 1024, child.pid: 12 * 1024})
        peaks = sampled(meter, os.getpid())
        child.kill()
    assert (peaks.used, peaks.foreign) == ([GIB], 0)


def test_a_neighbour_is_seen_though_the_rank_is_gone(driver: Driver, card: Card) -> None:
    """A rank reports and leaves at once: when processes are listed the next time it is not there any more."""
    meter = begun(driver)
    change(driver, card, processes={RANK: 9 * 1024})
    sampled(meter, RANK)
    change(driver, card, processes={NEIGHBOUR: 12 * 1024})
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.foreign) == ([0], 12 * GIB)


def test_what_ended_ranks_still_hold(driver: Driver, card: Card) -> None:
    """SIGKILL is not the end: a process that frees pinned memory keeps its GPU for seconds."""
    meter = begun(driver)
    change(driver, card, processes={RANK: 10 * 1024})
    sampled(meter, RANK)
    change(driver, card, processes={RANK: 3 * 1024})
    (line,) = meter.unreleased_memory_warnings()
    assert line == (
        "GPU 0 has 3.00 GiB less free than before its ranks were launched: ended ranks still hold it: "
        f"a process (pid {RANK}) 3.00 GiB"
    )
    assert meter.external_usage_warnings(), "and the next group waits for it"
    change(driver, card, processes={RANK: 40})
    assert meter.unreleased_memory_warnings() == [], "the driver's own bookkeeping"


def test_each_rank_has_its_own_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.show(Card("A", 24), Card("A", 24), Card("A", 24))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    meter = begun(driver)
    driver.cards[2].processes, driver.cards[0].processes = {RANK: 1024}, {RANK - 1: 2048}
    driver.cards[1].processes = {NEIGHBOUR: 4096}
    driver.write()
    peaks = sampled(meter, RANK, RANK - 1)
    assert (peaks.used, peaks.foreign) == ([GIB, 2 * GIB], 0), "the card in between is not ours"
    meter.register_device(0, driver.cards[0].uuid)  # the user's own CUDA_DEVICE_ORDER: the ranks say which they have
    meter.register_device(1, driver.cards[2].uuid)
    meter.register_device(1, "GPU-nobodys")
    driver.cards[2].processes, driver.cards[0].processes = {RANK - 1: 1024}, {RANK: 2048}
    driver.write()
    assert sampled(meter, RANK, RANK - 1).used == [2 * GIB, GIB]


def test_a_slice(driver: Driver) -> None:
    own = Slice("A100 MIG 1g.5gb", 4.75)
    driver.show(Card("A100", 40, capability=(8, 0), mig=True, slices=[own, Slice("A100 MIG 1g.5gb", 4.75)]))
    meter = begun(driver)
    own.processes = {RANK: 3 * 1024}
    driver.cards[0].slices[1].processes = {NEIGHBOUR: 4 * 1024}
    driver.write()
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.foreign) == ([3 * GIB], 0)


# -- drivers that fail ---------------------------------------------------------------------------------------------------


def test_a_gpu_that_falls_off_the_bus(driver: Driver, card: Card) -> None:
    meter = begun(driver)
    change(driver, card, error=GPU_IS_LOST)
    peaks = sampled(meter, RANK)
    assert peaks.lost == "GPU 0 does not answer: GPU is lost"
    for refused in (meter.external_usage_warnings, meter.begin):
        with pytest.raises(GpuLost, match=r"^GPU 0 does not answer: GPU is lost$"):
            refused()
    assert meter.unreleased_memory_warnings() == []
    change(driver, card, error=0)
    assert meter.external_usage_warnings() == [], "it was reset"


def test_an_answer_that_fails_once_is_no_lost_gpu(driver: Driver, card: Card) -> None:
    meter = begun(driver)
    driver.failing = {"nvmlDeviceGetMemoryInfo_v2": 999}
    driver.write()
    peaks = MemoryPeaks(used=[0])
    with pytest.raises(GpuError):  # which the gauge takes no notice of
        meter.sample([RANK], peaks)
    assert peaks.lost == ""


def test_without_a_driver_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    meter = NvmlMeter(("GPU-x",))
    meter.begin()
    peaks = MemoryPeaks(used=[0])
    meter.sample([RANK], peaks)
    assert (peaks.used, meter.external_usage_warnings(), meter.unreleased_memory_warnings()) == ([0], [], [])
    assert isinstance(make_meter(detect("cpu", 1)), CpuMeter)


def test_slow_calls_are_few(driver: Driver, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of processes costs 1-10 ms a GPU under a lock of the driver: once a second is enough."""
    meter = begun(driver)
    calls: list[str] = []
    for name in ("holders", "memory"):
        real = getattr(gpu_meter, name)
        monkeypatch.setattr(gpu_meter, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(9):
        meter.sample([RANK], MemoryPeaks(used=[0]))
        now += meter.interval_seconds
    assert (calls.count("memory"), calls.count("holders")) == (9, 3), "9 samples in 2 seconds"


def test_a_meter_that_is_collected_calls_no_driver(driver: Driver, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run inside the bindings, which would wait for their own lock for ever: seen once in 15 runs."""
    import pynvml

    meter = begun(driver)
    shut_down: list[int] = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: shut_down.append(1))
    del meter
    gc.collect()
    assert shut_down == []


# -- GPUs without memory of their own ------------------------------------------------------------------------------------


def test_of_main_memory_only_what_nvml_shows_is_the_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner, a data loader and the page cache take main memory, too: no neighbour on the GPU, and nothing that ranks left."""
    left = 113 * GIB
    monkeypatch.setattr(nvml, "host_total_bytes", lambda: 121 * GIB)
    monkeypatch.setattr(nvml, "host_available_bytes", lambda: left)
    driver.cards = [Card("NVIDIA GB10", 0, graphics={DESKTOP: 90})]
    driver.failing = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}
    driver.write()
    (card,) = driver.cards
    meter = begun(driver)
    left = 80 * GIB
    change(driver, card, processes={RANK: 10 * 1024})
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.grown, peaks.foreign, peaks.lost) == ([10 * GIB], {0: 10 * GIB}, 0, "")
    change(driver, card, processes={RANK: 10 * 1024, NEIGHBOUR: 12 * 1024})
    peaks = sampled(meter, RANK)
    assert (peaks.used, peaks.foreign) == ([10 * GIB], 12 * GIB)
    change(driver, card, processes={RANK: 3 * 1024})
    (line,) = meter.unreleased_memory_warnings()
    assert line.startswith(
        "GPU 0 has 3.00 GiB less free than before its ranks were launched: ended ranks still hold it"
    )
    change(driver, card, processes={})
    assert (meter.unreleased_memory_warnings(), meter.external_usage_warnings()) == ([], [])
