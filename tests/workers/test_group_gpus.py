"""Groups on GPUs of a driver that tests write: the ranks are processes that train nothing."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.problem.hardware import detect
from autotune.problem.nvml import GpuLost
from autotune.problem.outcome import OutcomeKind, Source
from autotune.util.units import GIB
from autotune.workers import host_workers
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.gpu_memory import make_meter
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.launchers import SpawnLauncher, trial_environment
from tests.conftest import wait_until
from tests.fake_driver import GPU_IS_LOST, Card, Driver

FAKE = "tests.workers.fake_rank"
NEIGHBOUR = 4_194_302
OUT = "error CUDA out of memory. Tried to allocate 2.00 GiB."
HOUR = 3600.0


class Machine:
    """Two GPUs with a group on them."""

    def __init__(self, driver: Driver, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.driver, self.folder, self._patch = driver, folder, patch
        driver.show(Card("A", 24), Card("A", 24))
        self.hardware = detect("cuda", 2)
        self.meter = make_meter(self.hardware)
        self._environment = trial_environment("cpu", 1)
        self.launcher = SpawnLauncher(self._environment, folder / "spawn.log")
        self.said: list[str] = []
        self.ready: set[int] = set()
        self.group: WorkerGroup | None = None

    def make(self, plan: dict[str, object] | None = None, training: bool = False) -> WorkerGroup:
        self._environment["FAKE_RANK"] = json.dumps(plan or {})
        self.ready.clear()
        self.group = WorkerGroup(
            self.launcher,
            self.hardware,
            None if training else self.meter,
            GroupPolicy(HOUR, lambda phase: HOUR, settle_seconds=0.1, may_exit=training),
            on_message=lambda rank, message: self.ready.add(rank) if message.get("phase") == "ready" else None,
            print_line=self.said.append,
        )
        return self.group

    def run(self, plan: dict[str, object] | None = None, training: bool = False) -> tuple[WorkerGroup, WatchEnd]:
        """A group that was started and watched until it is ready, or something else happened."""
        group = self.make(plan, training)
        stop = group.start(FAKE, 2, {}, logs=self.folder)
        return group, group.watch(lambda: len(self.ready) == 2) if stop is WatchEnd.ARRIVED else stop

    def hold(self, **mib_by_card: dict[int, int]) -> None:
        for card, processes in mib_by_card.items():
            self.driver.cards[int(card[-1])].processes = processes
        self.driver.write()


@pytest.fixture
def machine(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(driver, tmp_path, monkeypatch)
    with closing(made.launcher):
        yield made
        if made.group is not None:
            for card in driver.cards:  # whatever a test left there
                card.error, card.processes, card.hidden_mib = 0, {}, 0
            driver.write()
            made.group.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("training", [False, True], ids=["trial", "training"])
def test_a_gpu_that_is_lost_in_mid_study(machine: Machine, training: bool) -> None:
    """Ranks may hang in the driver or fail in words of their own: the driver's word decides, without a traceback."""
    group, stop = machine.run(training=training)
    assert stop is WatchEnd.ARRIVED
    machine.driver.cards[1].error = GPU_IS_LOST
    machine.driver.write()
    if training:  # nobody looks at its devices until a rank fails
        group.kill()
    assert group.watch(lambda: False, time.monotonic() + 60) is WatchEnd.FAILED
    verdict = classify_failure(group.evidence())
    assert verdict.kind is OutcomeKind.INFRASTRUCTURE
    assert verdict.reason == "GPU 1 does not answer: GPU is lost"
    assert verdict.source is Source.DEVICE
    group.end()
    if not training:
        with pytest.raises(GpuLost, match="GPU 1 does not answer: GPU is lost"):
            machine.run()


def test_out_of_memory_beside_a_neighbour_that_came_in_mid_study(machine: Machine) -> None:
    group = machine.make({"rank": 1, "where": "forward", "what": OUT})
    up, over = threading.Event(), threading.Event()

    def start() -> None:  # ranks die with the thread that has started them
        group.start(FAKE, 2, {}, logs=machine.folder)
        up.set()
        over.wait()

    threading.Thread(target=start, daemon=True).start()
    wait_until(lambda: group.greeted, "the ranks' hellos")
    machine.hold(card0={group._rank_pids[0]: 9000}, card1={group._rank_pids[1]: 9000, NEIGHBOUR: 12 * 1024})
    assert up.wait(60)
    assert group.watch(lambda: False) is WatchEnd.FAILED
    over.set()
    evidence = group.evidence()
    verdict = classify_failure(evidence)
    assert verdict.kind is OutcomeKind.GPU_CONTENTION
    assert evidence.peaks.neighbours == f"a process (pid {NEIGHBOUR}) 12.00 GiB on GPU 1"
    assert evidence.peaks.used == [9000 * 2**20] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("grown_gib", "kind"), [(12, OutcomeKind.GPU_CONTENTION), (0.2, OutcomeKind.OOM_DEVICE)])
def test_out_of_memory_where_processes_are_hidden(machine: Machine, grown_gib: float, kind: OutcomeKind) -> None:
    """The rank's own figures: its device has filled outside its allocator since its group was up."""
    before, total, reserved = int(0.8 * GIB), 24 * GIB, 9 * GIB
    free = total - reserved - before - int(grown_gib * GIB)
    plan = {
        "rank": 1,
        "where": "forward",
        "what": OUT,
        "device": {"uuid": machine.hardware.gpus[1], "overhead_bytes": before, "outside_bytes": before},
        "numbers": {"total_bytes": total, "free_bytes": free, "reserved_bytes": reserved},
    }
    group, stop = machine.run(plan)
    assert stop is WatchEnd.FAILED
    assert classify_failure(group.evidence()).kind is kind


def test_a_neighbour_is_named_and_waited_for(machine: Machine) -> None:
    machine.hold(card1={NEIGHBOUR: 12 * 1024})

    def leave() -> None:
        wait_until(lambda: machine.said, "the wait for it")
        machine.hold(card1={})

    leaves = threading.Thread(target=leave)
    leaves.start()
    group, stop = machine.run()
    leaves.join()
    assert stop is WatchEnd.ARRIVED
    assert group.waited_seconds > 0
    assert machine.said == [
        f"GPU 1 has 12.00 GiB less free than when the study began: a process (pid {NEIGHBOUR}) 12.00 GiB; "
        "waiting at most 30 s for it"
    ]


def test_beside_a_neighbour_that_stays_no_failure_is_the_candidates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_workers, "FREE_MEMORY_SECONDS", 0.3)
    machine.hold(card1={NEIGHBOUR: 12 * 1024})
    group, stop = machine.run({"rank": 1, "where": "forward", "what": OUT})
    assert (stop, group.waited_seconds > 0) == (WatchEnd.FAILED, True)
    assert classify_failure(group.evidence()).kind is OutcomeKind.GPU_CONTENTION
    group.end()
    said = len(machine.said)
    assert machine.said[-1].startswith("going on beside it")
    group, stop = machine.run()
    assert (stop, group.waited_seconds) == (WatchEnd.ARRIVED, 0.0), "once is enough"
    assert len(machine.said) == said


def test_ended_ranks_that_keep_their_memory_are_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_workers, "RELEASED_MEMORY_SECONDS", 0.3)
    group, stop = machine.run()
    assert stop is WatchEnd.ARRIVED
    pid = group._rank_pids[0]
    machine.hold(card0={pid: 3 * 1024})
    wait_until(lambda: group.peaks().used[0] == 3 * GIB, "a sample")
    group.end()
    (line,) = machine.said
    assert "GPU 0 has 3.00 GiB less free than before its ranks were launched: ended ranks still hold it" in line
    assert f"(pid {pid}) 3.00 GiB" in line


def test_a_training_is_looked_at_only_when_it_fails(machine: Machine) -> None:
    before = set(threading.enumerate())  # a gauge of an earlier test may wait for its driver's last answer
    group, stop = machine.run(training=True)
    assert stop is WatchEnd.ARRIVED
    machine.hold(card0={group._rank_pids[0]: 5 * 1024})
    peaks = group.peaks()
    assert peaks.used == [5 * GIB, 0]
    assert not any(thread.name == "memory monitor" for thread in set(threading.enumerate()) - before)
