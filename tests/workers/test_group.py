"""One watch for trials and trainings: ranks that die, hang or leave at every point of their life."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.executors.base import SEARCH
from autotune.executors.local import LocalExecutor
from autotune.problem.hardware import detect
from autotune.problem.outcome import OutcomeKind, Phase
from autotune.util.linux import is_open
from autotune.workers import host_workers, launchers, process_tree
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.gpu_memory import make_meter
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.launchers import ForkLauncher, SpawnLauncher, trial_environment
from autotune.workers.process_tree import REAP_SECONDS, end_ranks, processes_with_variable
from autotune.workers.protocol import RANK_MESSAGES, Channel, malformed
from tests.conftest import make_candidate, make_job, wait_until

FAKE = "tests.workers.fake_rank"
PHASES = [phase.value for phase in Phase]
DEADLY = ["SIGKILL", "SIGSEGV", "exit 3"]
HOUR = 3600.0


def policy(may_leave: bool = False, hello_seconds: float = HOUR, silent: str | None = None) -> GroupPolicy:
    """One that waits for an hour, but in the phase that is to be silent."""
    return GroupPolicy(
        hello_seconds, lambda phase: 0.5 if phase.value == silent else HOUR, settle_seconds=0.2, may_exit=may_leave
    )


class Fakes:
    """Makes groups of two ranks that train nothing, and knows what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hardware = detect("cpu", 2)
        self._environment = trial_environment("cpu", 1)
        self.launcher = SpawnLauncher(self._environment, folder / "spawn.log")
        self.group: WorkerGroup | None = None
        self.ready: set[int] = set()
        self.ports: list[int] = []
        self.said: list[str] = []

    def make(
        self, policy: GroupPolicy, plan: dict[str, object] | None = None, **options: Callable[[], bool]
    ) -> WorkerGroup:
        self._environment["FAKE_RANK"] = json.dumps(plan or {})

        def take(rank: int, message: dict[str, object]) -> None:
            if message.get("phase") == "ready":
                self.ready.add(rank)
            if message["type"] == "note":
                self.ports.append(message["spec"]["port"])

        meter = None if policy.may_exit else make_meter(self.hardware)
        told = {"on_message": take, "print_line": self.said.append}
        self.group = WorkerGroup(self.launcher, self.hardware, meter, policy, **told, **options)
        return self.group

    def run(self, policy: GroupPolicy, plan: dict[str, object] | None = None) -> tuple[WorkerGroup, WatchEnd]:
        """A group that was started and watched until it is ready, or something else happened."""
        group = self.make(policy, plan)
        stop = group.start(FAKE, 2, {}, logs=self.folder)
        return group, group.watch(lambda: len(self.ready) == 2) if stop is WatchEnd.ARRIVED else stop

    def left(self) -> list[psutil.Process]:
        return [
            p
            for p in processes_with_variable(launchers.MARK, self.launcher._mark)
            if p.status() != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(tmp_path)
    yield made
    if made.group is not None:
        made.group.end()
        assert not made.group.home.exists()
    made.launcher.close()
    assert made.left() == []


def test_groups_beside_each_other_have_ports_of_their_own(fakes: Fakes) -> None:
    """A script may open a store at MASTER_PORT itself, and two that did so at one port would be one training."""
    groups = [fakes.make(policy(), {"note": []}) for _ in range(2)]
    for group in groups:
        assert group.start(FAKE, 2, {}) is WatchEnd.ARRIVED
        before = len(fakes.ports)
        assert group.watch(lambda before=before: len(fakes.ports) == before + 2) is WatchEnd.ARRIVED
    groups[0].end()
    one, also_one, other, also_other = fakes.ports
    assert (one, other) == (also_one, also_other), "all ranks of a group have one"
    assert one != other


@pytest.mark.few(3)
@pytest.mark.parametrize("may_leave", [False, True], ids=["trial", "training"])
@pytest.mark.parametrize("what", DEADLY)
def test_a_rank_that_dies_before_its_hello_is_noticed_at_once(fakes: Fakes, what: str, may_leave: bool) -> None:
    group, stop = fakes.run(policy(may_leave), {"rank": 1, "where": "hello", "what": what})
    assert stop is WatchEnd.FAILED
    assert not group.greeted
    status = 3 if what == "exit 3" else -getattr(signal, what)
    assert group.evidence().statuses == {1: status}
    assert group.failed_at is not None


def test_ranks_that_never_say_hello_are_not_waited_for_for_ever(fakes: Fakes) -> None:
    group, stop = fakes.run(policy(hello_seconds=1.0), {"rank": 0, "where": "hello", "what": "hang"})
    assert stop is WatchEnd.SILENT
    assert not group.greeted


def test_waiting_for_the_hello_can_be_stopped(fakes: Fakes) -> None:
    began = time.monotonic()
    plan = {"rank": 0, "where": "hello", "what": "hang"}
    group = fakes.make(policy(), plan, cancelled=lambda: time.monotonic() - began > 0.5)
    assert group.start(FAKE, 2, {}) is WatchEnd.CANCELLED
    group.end()
    group = fakes.make(policy(), plan)
    assert group.start(FAKE, 2, {}, deadline=time.monotonic() + 0.5) is WatchEnd.DEADLINE


@pytest.mark.few(3)
@pytest.mark.parametrize("phase", PHASES)
def test_silence_is_measured_by_the_patience_of_its_phase(fakes: Fakes, phase: str) -> None:
    group, stop = fakes.run(policy(silent=phase), {"rank": 1, "where": phase, "what": "hang"})
    assert stop is WatchEnd.SILENT
    verdict = classify_failure(group.evidence())
    assert verdict.kind is OutcomeKind.TIMEOUT
    assert verdict.phase is Phase(phase), "of the rank that hangs, not of the one that went on"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compute", "beat"])
@pytest.mark.parametrize("may_leave", [False, True], ids=["trial", "training"])
def test_a_rank_that_computes_or_gets_on_is_no_hang(fakes: Fakes, what: str, may_leave: bool) -> None:
    patience = GroupPolicy(HOUR, lambda phase: 2.0, settle_seconds=0.2, may_exit=may_leave)
    group = fakes.make(patience, {"rank": 1, "where": "step", "what": what})
    assert group.start(FAKE, 2, {}, logs=fakes.folder) is WatchEnd.ARRIVED
    assert group.watch(lambda: len(fakes.ready) == 2, time.monotonic() + 4.5) is WatchEnd.DEADLINE


def test_a_stopped_rank_hangs_and_where_it_was_is_said(fakes: Fakes) -> None:
    group, stop = fakes.run(policy(silent="step"), {"rank": 1, "where": "step", "what": "SIGSTOP"})
    assert stop is WatchEnd.SILENT
    group._process(1, {"type": "pulse", "moved": False, "where": "all_reduce (c10d.py:7)", "waits": True})
    group._process(0, {"type": "pulse", "moved": False, "where": "sleep (train.py:3)", "waits": False})
    assert group._positions_text() == "; rank 0 in sleep (train.py:3); rank 1 in all_reduce (c10d.py:7)", (
        "the cause first"
    )


@pytest.mark.parametrize(
    ("phase", "waits", "told"), [("forward", True, True), ("forward", False, False), ("step", True, False)]
)
def test_unequal_collectives_are_named_when_every_rank_waits(fakes: Fakes, phase: str, waits: bool, told: bool) -> None:
    group = fakes.make(policy(), {})
    group._world, group.phase = 2, Phase(phase)
    for rank, waiting in ((0, waits), (1, True)):
        group._process(rank, {"type": "pulse", "moved": False, "where": "wait (c10d.py:7)", "waits": waiting})
    text = group._positions_text()
    assert ("set_z3_leaf_modules" in text and "has no image" in text) is told


@pytest.mark.parametrize(
    ("device", "phase", "may_leave", "spins"),
    [
        ("cuda", "backward", False, False),
        ("cpu", "backward", False, True),
        ("cuda", "save", False, True),
        ("cuda", "step", True, True),
    ],
)
def test_cpu_time_of_a_silent_rank_counts_unless_it_may_spin_for_a_gpu(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, device: str, phase: str, may_leave: bool, spins: bool
) -> None:
    """A main thread spins in cudaStreamSynchronize while NCCL waits for a peer; torch.compile may work for minutes."""
    asked: list[set[int]] = []
    group = fakes.make(policy(may_leave))
    monkeypatch.setattr(group, "_hardware", replace(group._hardware, device=device))
    monkeypatch.setattr(group, "_hosts", [SimpleNamespace(is_progressing=asked.append)])
    group._world, group.phase = 4, Phase(phase)
    for rank in range(4):  # 2 compiles, 3 then holds the interpreter's lock
        group._process(rank, {"type": "pulse", "moved": rank == 3, "where": "", "waits": False, "compiles": rank == 2})
    group._check_progress()
    assert asked == [set() if spins else {0, 1}]


@pytest.mark.few(12)
@pytest.mark.parametrize("may_leave", [False, True], ids=["trial", "training"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("what", DEADLY)
def test_a_rank_that_dies_in_a_phase_fails_the_group(fakes: Fakes, what: str, phase: str, may_leave: bool) -> None:
    _, stop = fakes.run(policy(may_leave), {"rank": 1, "where": phase, "what": what})
    assert stop is WatchEnd.FAILED


@pytest.mark.parametrize("may_leave", [False, True], ids=["trial", "training"])
def test_leaving_by_itself_is_a_trainings_end_and_a_trials_failure(fakes: Fakes, may_leave: bool) -> None:
    group, stop = fakes.run(policy(may_leave))
    assert stop is WatchEnd.ARRIVED
    assert group.statuses() == {}
    group.send("leave")
    assert group.watch(lambda: may_leave and group.all_succeeded) is (
        WatchEnd.ARRIVED if may_leave else WatchEnd.FAILED
    )


def test_a_script_that_was_over_keeps_its_code_whatever_its_interpreter_dies_of(fakes: Fakes) -> None:
    group = fakes.make(policy(may_leave=True), {"where": "forward", "what": "bye 0 SIGABRT"})
    assert group.start(FAKE, 2, {}) is WatchEnd.ARRIVED
    assert group.watch(lambda: group.all_succeeded) is WatchEnd.ARRIVED
    assert set(group.statuses().values()) == {-signal.SIGABRT}
    assert group.exit_codes() == {0: 0, 1: 0}


def test_the_first_complaint_does_not_hide_the_cause(fakes: Fakes) -> None:
    group, stop = fakes.run(policy(), {"rank": 1, "where": "forward", "what": "error CUDA out of memory"})
    assert stop is WatchEnd.FAILED
    evidence = group.evidence()
    assert [error["text"] for error in evidence.errors] == ["CUDA out of memory"]
    assert evidence.phase is Phase.FORWARD


@pytest.mark.parametrize("what", ["worker", "task"])
def test_what_a_finished_training_leaves_running_was_meant_to(fakes: Fakes, what: str) -> None:
    """The upload of its last checkpoint."""
    group, stop = fakes.run(policy(may_leave=True), {"where": "init", "what": what})
    assert stop is WatchEnd.ARRIVED
    group.send("leave")
    assert group.watch(lambda: group.all_succeeded) is WatchEnd.ARRIVED
    group.end()
    left = fakes.left()
    assert [process.name() for process in left] == ["sleep", "sleep"]
    for process in left:
        process.kill()
    wait_until(lambda: fakes.left() == [], "the workers' end")


def test_shared_memory_that_killed_ranks_left_is_removed(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL's files; not those of others, which were there before or are in use."""
    monkeypatch.setattr(host_workers, "SHARED_MEMORY", tmp_path)
    (tmp_path / "nccl-before").touch()
    group, _ = fakes.run(policy())
    (tmp_path / "nccl-left").touch()
    with (tmp_path / "nccl-used").open("w"):
        group.end()
    assert {path.name for path in tmp_path.glob("nccl-*")} == {"nccl-before", "nccl-used"}
    assert is_open(Path(psutil._psutil_linux.__file__)), "mapped, though no descriptor is left"


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["worker", "worker SIGKILL"])
def test_what_ranks_start_in_sessions_of_their_own_is_ended_too(fakes: Fakes, what: str) -> None:
    group, stop = fakes.run(policy(), {"where": "init", "what": what})
    assert stop is (WatchEnd.ARRIVED if what == "worker" else WatchEnd.FAILED)
    assert any("sleep" in process.name() for process in fakes.left())
    group.end()
    assert fakes.left() == []


def test_signals_reach_every_rank_once(fakes: Fakes) -> None:
    group, _ = fakes.run(policy(may_leave=True))
    group.signal(signal.SIGTERM)
    group.signal(signal.SIGTERM)
    group.wait_until_ended(60.0, 60.0)
    assert group.statuses() == {0: -signal.SIGTERM, 1: -signal.SIGTERM}


class Leaving:
    """Two ranks that leave at these seconds of a clock, and get on until another; between looks the clock goes on."""

    pids: ClassVar = [1, 2]

    def __init__(self, clock: list[float], works_until: float, left_at: tuple[float, float]) -> None:
        self._clock, self._works_until, self._left_at = clock, works_until, left_at

    def reset_liveness_baseline(self) -> None:
        pass

    def is_progressing(self, waiting: set[int]) -> bool:
        return self._clock[0] < self._works_until

    def statuses(self) -> dict[int, int]:
        return {rank: 0 for rank, at in enumerate(self._left_at) if self._clock[0] >= at}


def on_clock(
    fakes: Fakes,
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    patience: GroupPolicy,
    host: Leaving,
    stops: list[float] | None = None,
    heard: bool = False,
) -> WorkerGroup:
    """A group of these two ranks, which waits by the clock; its process stands still for the stops, each in its turn."""
    group = fakes.make(patience)

    def hear(seconds: float) -> bool:
        clock[0] += 10 * seconds
        if clock[0] > 60.0 and stops:
            clock[0] += stops.pop()
        return heard and clock[0] < HOUR

    for name, value in {"_hosts": [host], "_receive": hear, "_world": 2}.items():
        monkeypatch.setattr(group, name, value)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return group


@pytest.mark.parametrize(
    ("works_until", "left_at", "waited"),
    [
        (0.0, (HOUR, HOUR), 30.0),
        (0.0, (20.0, 25.0), 25.0),
        (400.0, (400.0, 401.0), 401.0),
        (100.0, (HOUR, HOUR), 130.0),
        (HOUR, (400.0, HOUR), 430.0),
        (HOUR, (HOUR, HOUR), 1800.0),
    ],
    ids=["mute", "at once", "saves", "saves and hangs", "waits for one that is gone", "never leaves"],
)
def test_ranks_that_save_after_a_signal_are_waited_for(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, works_until: float, left_at: tuple[float, float], waited: float
) -> None:
    clock = [0.0]
    group = on_clock(fakes, monkeypatch, clock, policy(may_leave=True), Leaving(clock, works_until, left_at))
    group.wait_until_ended(30.0, 1800.0)
    assert waited - 7 <= clock[0] <= waited + 7  # it looks every five seconds


def test_a_slow_hello_does_not_extend_the_wait_for_the_others(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sends heartbeats proves nothing of the one that never says hello."""
    clock = [0.0]
    host = Suspended(clock, 0.0, (math.inf, math.inf))
    group = on_clock(fakes, monkeypatch, clock, policy(hello_seconds=60.0), host, heard=True)
    monkeypatch.setattr(group, "_rank_pids", {0: 1})
    assert group.watch(lambda: group.greeted) is WatchEnd.SILENT
    assert clock[0] < HOUR


def test_a_rank_of_a_training_that_ends_before_all_said_hello_is_lost(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 0 is the end of a training only for ranks that have begun it."""
    clock = [0.0]
    group = on_clock(fakes, monkeypatch, clock, policy(may_leave=True), Suspended(clock, 0.0, (0.0, math.inf)))
    monkeypatch.setattr(group, "_rank_pids", {0: 1})
    assert group._has_lost_rank()
    monkeypatch.setattr(group, "_rank_pids", {0: 1, 1: 2})
    assert not group._has_lost_rank()


class Suspended(Leaving):
    """Two ranks that never leave, and say nothing once they are up; workers and clock of a loop that is stopped for a while."""

    lost_device = unreachable = ""
    has_closed_channel = False
    numbers = (0, 1)


@pytest.mark.parametrize(
    ("works_until", "stopped_seconds", "waited"),
    [(0.0, 0.0, 600.0), (0.0, 7200.0, 600.0), (7000.0, 7200.0, 660.0), (HOUR, 7200.0, HOUR + 600.0)],
    ids=["hangs", "hangs and is stopped", "worked until it was stopped", "works on"],
)
def test_a_launcher_that_was_stopped_with_its_ranks_does_not_take_them_for_hanging(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, works_until: float, stopped_seconds: float, waited: float
) -> None:
    """By `scontrol suspend` or `docker pause`, for longer than a hang may take."""
    clock, stops = [0.0], [stopped_seconds]
    patience = GroupPolicy(HOUR, lambda phase: 600.0, settle_seconds=0.2, may_exit=True)
    worked = works_until + stopped_seconds if works_until == HOUR else works_until
    group = on_clock(fakes, monkeypatch, clock, patience, Suspended(clock, worked, (math.inf, math.inf)), stops)
    monkeypatch.setattr(group, "_rank_pids", {0: 1, 1: 2})
    assert group.watch(lambda: False) is WatchEnd.SILENT
    assert waited - 20 <= clock[0] - stopped_seconds <= waited + 20
    clock[0], stops[:] = 0.0, [stopped_seconds]
    group.wait_until_ended(600.0, 1800.0)
    least = min(waited, 1800.0)
    assert least - 20 <= clock[0] - stopped_seconds <= least + 20


@pytest.mark.slow
def test_a_trial_whose_ranks_do_not_come_up_says_nothing_of_its_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ninety seconds of waiting, Ctrl-C included, while the rank was long dead."""
    monkeypatch.setenv("FAKE_RANK", json.dumps({"rank": 1, "where": "hello", "what": "exit 3"}))
    monkeypatch.setattr(LocalExecutor, "rank_module", FAKE)
    executor = LocalExecutor(make_job(), detect("cpu", 2), tmp_path, [make_candidate()])
    executor.isolation = "spawn"
    executor.deadlines = replace(executor.deadlines, hello=HOUR)  # longer than this test may take
    executor.open(lambda text: None)
    outcome = executor.session(make_candidate(), "0").measure(make_candidate(), SEARCH, 2 * HOUR)
    executor.close()
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "did not come up" in outcome.reason


class Server(ForkLauncher):
    """A fork server's end of the line, at which the test answers."""

    def __init__(self) -> None:
        super().__init__({}, Path())
        self._channel, theirs = Channel.pair()
        self.theirs = Channel(theirs)

    def answer(self, kind: str, **fields: object) -> None:
        self.theirs.send(kind, **fields)


def test_a_rank_is_not_taken_for_an_earlier_one_of_the_same_number() -> None:
    server = Server()
    server.answer("launched", ticket="a#0", pid=4242)
    assert server.launch(FAKE, "a", 0) == 4242
    server.answer("exited", pid=4242, status=-15)
    assert server.status(4242) == -15
    server.answer("launched", ticket="b#0", pid=4242)
    assert server.launch(FAKE, "b", 0) == 4242
    assert server.status(4242) is None


def test_exit_statuses_of_ended_ranks_are_forgotten() -> None:
    """A tuner of thousands of trials would keep each."""
    server, spawner = Server(), SpawnLauncher({**os.environ})
    server.answer("exited", pid=4242, status=0)
    assert server.status(4242) == 0
    server.forget([4242, 4243])
    assert server.status(4242) is None
    pid = spawner.launch("this", "nowhere", 0)
    spawner.forget([pid])
    while spawner.status(pid) is None:
        assert spawner._processes, "it was forgotten while it ran"
        time.sleep(0.01)
    assert spawner.status(pid) == 0
    spawner.forget([pid, 1])
    assert spawner.status(pid) is None


def test_a_refused_fork_is_the_machines_trouble_of_that_launch_alone() -> None:
    server = Server()
    server.answer("refused", ticket="earlier#0", errno=12, text="Cannot allocate memory")
    assert server.status(1) is None
    server.answer("refused", ticket="a#0", errno=12, text="Cannot allocate memory")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        server.launch(FAKE, "a", 0)


def test_a_number_that_was_waited_for_is_somebody_elses_and_let_alone() -> None:
    stranger = subprocess.Popen(["sleep", "3600"], start_new_session=False)
    try:
        end_ranks([stranger.pid], lambda pid: 0, list)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_the_kernel_does_not_let_go_is_said(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL is no end for a process that frees pinned memory, or sits in a dead driver."""
    group, stop = fakes.run(policy())
    assert stop is WatchEnd.ARRIVED
    with monkeypatch.context() as patch:
        for name in ("KILL_GRACE_SECONDS", "KILL_SECONDS", "REAP_SECONDS"):
            patch.setattr(process_tree, name, 0.1)
        patch.setattr(process_tree.os, "killpg", lambda pid, number: None)
        patch.setattr(psutil.Process, "kill", lambda process: None)
        patch.setattr(group, "send", lambda kind: None)
        patch.setattr(Channel, "close", lambda channel: None)
        group.end()
    assert len(fakes.said) == 2
    assert all(
        f"pid={pid}" in line and line.endswith("the kernel has not let it go")
        for pid, line in zip(group.pids, fakes.said, strict=True)
    )
    group.kill()
    wait_until(lambda: len(group.statuses()) == 2, "the ranks' end")


def test_a_process_in_the_middle_of_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux shows no environment of it (fs/proc/base.c, environ_read), and its rank may be dead already."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "AUTOTUNE_TEST": "this one"})
    asked: list[int] = []
    environ = psutil.Process.environ

    def late(self: psutil.Process) -> dict[str, str]:
        if self.pid != process.pid:
            return environ(self)
        asked.append(self.pid)
        return environ(self) if len(asked) > 3 else {}

    monkeypatch.setattr(psutil.Process, "environ", late)
    try:
        assert [found.pid for found in processes_with_variable("AUTOTUNE_TEST", "this one")] == [process.pid]
    finally:
        process.kill()
        process.wait()


class Stuck:
    """A process that SIGKILL does not reach: it sits in a dead driver. Waiting for it passes the time of a clock."""

    def __init__(self, clock: list[float], told: list[str]) -> None:
        self._clock, self._told = clock, told

    def kill(self) -> None:
        self._told.append("kill")

    def wait(self, timeout: float) -> int:
        self._told.append("wait")
        self._clock[0] += timeout
        raise subprocess.TimeoutExpired("rank", timeout)


def test_ranks_that_cannot_be_killed_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = [0.0], list[str]()
    launcher = SpawnLauncher({})
    stuck = {pid: Stuck(clock, told) for pid in (1, 2, 3)}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as killable:
        monkeypatch.setattr(launcher, "_processes", {**stuck, killable.pid: killable})
        monkeypatch.setattr(launchers.time, "monotonic", lambda: clock[0])
        try:
            launcher.close()
            monkeypatch.undo()
            assert killable.wait(timeout=60) == -signal.SIGKILL
        finally:
            killable.kill()
    assert told == ["kill"] * 3 + ["wait"] * 3
    assert clock[0] == REAP_SECONDS, "one deadline for all"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(verb=st.sampled_from([*sorted(RANK_MESSAGES), "other"]), data=st.data())
def test_a_message_of_any_shape_is_processed_or_an_error_of_its_rank(
    verb: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fakes = Fakes(tmp_path_factory.mktemp("group"))
    group = fakes.make(GroupPolicy(HOUR, lambda phase: HOUR, settle_seconds=0.0, may_exit=True))
    group._world, group._hosts[0].numbers = 2, range(2)
    try:
        fields = [name.rstrip("?") for name in RANK_MESSAGES.get(verb, ())]
        message = {name: data.draw(_JSON, label=name) for name in fields if data.draw(st.booleans())}
        group._process(1, {"type": verb, **message})
        if malformed({"type": verb, **message}):
            verdict = classify_failure(group.evidence())
            assert (verdict.kind, verdict.rank) == (OutcomeKind.CRASH, 1)
            assert "rank 1 sent a message that cannot be read: " in verdict.reason
    finally:
        group.end()
