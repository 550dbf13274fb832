"""Places beside each other: GPUs or CPUs of its own for each job."""

import os

import pytest

from autotune.errors import UserError
from autotune.executors import machine as module
from autotune.executors.machine import CPUS, slots
from autotune.util.units import GIB
from tests.fake_driver import Card, Driver


def cpus(monkeypatch: pytest.MonkeyPatch, count: int, threads: str = "") -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: count)
    monkeypatch.setattr("autotune.problem.hardware.usable_cpus", lambda: count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4, 4 + count)))
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)


def test_cpus_and_main_memory_are_shared_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus(monkeypatch, 9)
    alone, *none = slots(1, "cpu", 2)
    places = slots(2, "cpu", 2)
    assert not none
    assert [place.variables[CPUS] for place in places] == ["4,5,6,7", "8,9,10,11"]
    assert {place.hardware.threads for place in places} == {2}
    assert places[0].hardware.count == 2
    assert (
        abs(2 * places[0].hardware.memory_bytes - alone.hardware.memory_bytes)
        < 0.1 * GIB + alone.hardware.memory_bytes / 20
    )


def test_gpus_of_its_own_for_each(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.show(*(Card("NVIDIA A100", 80) for _ in range(5)))
    uuids = [card.uuid for card in driver.cards]
    places = slots(2, "auto", 2)
    assert [place.hardware.gpus for place in places] == [tuple(uuids[:2]), tuple(uuids[2:4])]
    assert [place.variables for place in places] == [
        {"CUDA_VISIBLE_DEVICES": ",".join(uuids[:2])},
        {"CUDA_VISIBLE_DEVICES": ",".join(uuids[2:4])},
    ]
    assert {place.hardware.count for place in places} == {2}
    monkeypatch.setattr("autotune.problem.hardware.host_available_bytes", lambda: 100 * GIB)
    assert [place.hardware.host_memory_bytes for place in slots(2, "auto", 2)] == [100 * GIB] * 2, (
        "what offloads is alone"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [place.hardware.gpus for place in slots(2, "auto", 1)] == [(uuids[3],), (uuids[1],)]
    with pytest.raises(UserError, match="2 GPUs hold 1 job of 2 ranks; try --parallel 1"):
        slots(2, "auto", 2)


def test_unlike_gpus_measure_unlike_things(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.show(Card("NVIDIA A100", 80), Card("NVIDIA H100", 80))
    with pytest.raises(UserError, match="unlike"):
        slots(2, "auto", 1)


@pytest.mark.parametrize(
    ("parallel", "ranks", "threads", "words"),
    [
        (5, 1, "", "4 CPUs hold 4 jobs of 1 rank; try --parallel 4"),
        (3, 1, "2", "4 CPUs hold 2 jobs of 1 rank with 2 threads each; try --parallel 2"),
        (2, 1, "8", "4 CPUs hold no job of 1 rank with 8 threads each"),
        (2, None, "", "--gpus"),
    ],
)
def test_more_than_there_is(
    parallel: int, ranks: int | None, threads: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus(monkeypatch, 4, threads)
    with pytest.raises(UserError, match=words) as caught:
        slots(parallel, "cpu", ranks)
    assert str(caught.value).startswith(f"--parallel {parallel}: ")
