"""What follows upon an attempt: ranks that train nothing end as they are told, and the supervisor goes on, waits or gives up."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import MachineError, UserError
from autotune.executors.machine import RankRequirements
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Script
from autotune.problem.outcome import OutcomeKind
from autotune.recovery import supervisor
from autotune.recovery.ladder import Rung
from autotune.recovery.supervisor import AttemptMessages, LaunchSummary, Supervisor
from autotune.workers.host_workers import LocalWorkers
from autotune.workers.jit_ops import FOLDER
from autotune.workers.launchers import SpawnLauncher
from tests.conftest import make_candidate, make_job, pid_lives, wait_until

ROOT = Path(__file__).parents[2]
OOM = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
DISK = "[Errno 28] No space left on device: '/scratch/cache'"
LADDER = [make_candidate(1, 4, 1), make_candidate(1, 2, 2), make_candidate(1, 1, 4)]


class Launch:
    """A supervisor of one planned rank; what it waits passes on a clock of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.says, self.waited = folder, list[str](), list[float]()
        (folder / "train.py").touch()

    def make(self, plan: list[dict], ladder: list[Candidate] = LADDER, max_restarts: int = 10) -> Supervisor:
        (self.folder / "plan.json").write_text(json.dumps(plan))
        job = replace(make_job(1), script=Script((str(self.folder / "train.py"),), str(self.folder)))
        return Supervisor(
            job,
            detect("cpu", 1),
            [Rung(one, 1e9 - at, 1.0, True) for at, one in enumerate(ladder)],
            self.folder,
            max_restarts=max_restarts,
            silent_seconds=300.0,
            print_line=self.says.append,
        )

    def run(self, plan: list[dict], ladder: list[Candidate] = LADDER, max_restarts: int = 10) -> LaunchSummary:
        return self.make(plan, ladder, max_restarts).run()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(supervisor, "TRAIN_RANK", "tests.recovery.planned_rank")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ops = tmp_path / "ops"
    (ops / "shm").mkdir(parents=True)
    (ops / "shm" / "shm.so").write_bytes(b"a library" * 100)
    (ops / "ShareMemCommBuilder.op").write_text("shm")
    monkeypatch.setenv(FOLDER, str(ops))
    made = Launch(tmp_path)

    def wait(self: Supervisor, seconds: float) -> None:
        made.waited += [seconds] if seconds else []

    monkeypatch.setattr(Supervisor, "_wait", wait)
    return made


_WAIT = Supervisor._wait


def rungs(summary: LaunchSummary) -> list[int]:
    return [attempt.rung for attempt in summary.attempts]


def kinds(summary: LaunchSummary) -> list[str]:
    return [attempt.ended.partition(":")[0] for attempt in summary.attempts]


# -- the ladder ------------------------------------------------------------------------------------------------------


def test_out_of_memory_steps_down_at_once(launch: Launch) -> None:
    summary = launch.run([{"steps": 3, "error": OOM}, {"steps": 7}])
    assert (summary.code, rungs(summary), kinds(summary)) == (0, [0, 1], ["oom_device", "done"])
    assert launch.waited == []


def test_a_rung_that_needs_no_less_than_the_oom_is_skipped(launch: Launch) -> None:
    larger = make_candidate(1, 8, 1)
    summary = launch.run([{"steps": 3, "error": OOM}, {"steps": 7}], [LADDER[0], larger, LADDER[2]])
    assert (summary.code, rungs(summary)) == (0, [0, 2])
    launch.says.clear()
    (launch.folder / "attempts.rank0").unlink()
    summary = launch.run([{"steps": 3, "error": OOM}], [LADDER[0], larger])
    assert rungs(summary) == [0]
    assert launch.says[-1] == "no config with less memory is left on the ladder: giving up"


@pytest.mark.parametrize(("rows", "code"), [(4, 0), (16, 2)])
def test_another_batch_than_the_studys_ends_the_start(launch: Launch, rows: int, code: int) -> None:
    step = {"micro_batches": 1, "rows": rows, "digest": 0.5, "loss": 1.0, "gradient_norm": 1.0}
    step |= {"update": [0.0, 0], "rates": [1e-4], "skipped": False}
    trace = {"steps": [step], "stage": 1, "precision": "fp32", "accumulation": 1, "draws": False, "missing": ""}
    made = launch.make([{"steps": 1, "traced": trace, "wait": code == 2}])
    made._first_step = supervisor.FirstStep("s", 4, None)
    assert made.run().code == code
    complaint = "stopped: its first step has 16 samples, and study s was tuned for 4. Restore the tuned batch"
    assert any(line.startswith(complaint) for line in launch.says) is (code == 2)


@pytest.mark.slow
def test_a_rung_whose_op_cannot_be_built_is_passed_over(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image without a compiler: the rank would end with `Unable to JIT load`, which is nobody's memory."""
    monkeypatch.setenv("CXX", "/bin/false")
    offloaded = make_candidate(1, 2, 2, offload_optimizer="cpu")
    summary = launch.run([{"steps": 3, "error": OOM}, {"steps": 7}], [LADDER[0], offloaded, LADDER[2]])
    assert summary.code == 0, launch.says
    assert rungs(summary) == [0, 1, 2]
    assert kinds(summary) == ["oom_device", "invalid", "done"]
    assert "CPUAdam cannot be built" in summary.attempts[1].ended
    assert len((launch.folder / "attempts.rank0").read_text()) == 2, "no rank was started under it"


def test_the_first_rung_whose_op_cannot_be_built_ends_it(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launch.make([{"steps": 7}], [make_candidate(1, 2, 2, offload_optimizer="cpu"), LADDER[2]])
    monkeypatch.setattr(
        made.target, "load_ops", lambda *_: made.target.ops.failed.update(CPUAdamBuilder="no compiler") or True
    )
    summary = made.run()
    assert (summary.code, rungs(summary), kinds(summary)) == (1, [0], ["invalid"])


@pytest.mark.slow
def test_ranks_that_are_killed_twice_without_a_step_have_less_the_third_time(launch: Launch) -> None:
    plan = [{"signal": "SIGKILL"}] * 3 + [{"steps": 1}]
    summary = launch.run(plan)
    assert (summary.code, rungs(summary)) == (0, [0, 0, 1, 1]), "a new rung has two attempts of its own"
    assert launch.waited == []


# -- a checkpoint that cannot be loaded --------------------------------------------------------------------------------


CUT_OFF = "PytorchStreamReader failed reading zip archive: failed finding central directory"


def told(launch: Launch, what: str = "bad") -> list[list[str]]:
    """What each attempt was told: of bad checkpoints, or of output folders that were begun with."""
    return [json.loads(line) for line in (launch.folder / what).read_text().splitlines()]


@pytest.mark.slow
def test_a_restart_takes_an_older_checkpoint_than_one_that_cannot_be_loaded(launch: Launch) -> None:
    damaged = {"error": CUT_OFF, "unloaded": "out/checkpoint-8/global_step8"}
    summary = launch.run([{"steps": 8, "signal": "SIGKILL"}, damaged, {"steps": 3, "signal": "SIGKILL"}, {"steps": 9}])
    assert (summary.code, rungs(summary)) == (0, [0] * 4)
    assert told(launch) == [[], [], [damaged["unloaded"]], []], "since then it may have been saved again"
    assert any(CUT_OFF in line and "checkpoint-8/global_step8: starting again" in line for line in launch.says)


@pytest.mark.few(1)
@pytest.mark.parametrize(("names", "attempts"), [(("8",), 1 + 2), (("8", "4", "2", "1"), 1 + 3)], ids=["same", "all"])
def test_what_no_checkpoint_mends_ends_it(launch: Launch, names: tuple[str, ...], attempts: int) -> None:
    """A script that cannot load what it has saved."""
    unloaded = [{"error": CUT_OFF, "unloaded": name} for name in names]
    summary = launch.run([{"steps": 8, "signal": "SIGKILL"}, *unloaded])
    assert summary.code == 13
    assert len(summary.attempts) == attempts
    assert "script's own failure" in summary.attempts[-1].ended


def test_what_the_first_attempt_cannot_load_is_the_scripts_own_failure(launch: Launch) -> None:
    summary = launch.run([{"error": CUT_OFF, "unloaded": "elsewhere/checkpoint-8"}])
    assert (summary.code, rungs(summary)) == (13, [0])


@pytest.mark.slow
def test_a_restart_knows_into_which_folders_the_training_may_have_written(launch: Launch) -> None:
    launch.run(
        [{"signal": "SIGKILL"}, {"output": "/out", "error": OOM}, {"output": "/two", "error": OOM}, {"steps": 3}]
    )
    assert told(launch, "begun") == [[], [], ["/out"], ["/out", "/two"]]


# -- an outage -------------------------------------------------------------------------------------------------------


def test_an_outage_burns_no_rung_and_is_waited_out(launch: Launch) -> None:
    summary = launch.run([{"steps": 3, "error": DISK}] + [{"error": DISK}] * 6 + [{"steps": 3}])
    assert (summary.code, rungs(summary)) == (0, [0] * 8)
    assert launch.waited == [10.0, 30.0, 60.0, 120.0, 300.0, 300.0, 300.0]


READ_ONLY = "[Errno 30] Read-only file system: '/data/out.{}'"
HUB = (
    "HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /m (at 0x7f{}: Name or service not known)"
)


@pytest.mark.parametrize("text", [READ_ONLY, HUB])
def test_the_same_words_before_any_step_are_no_outage(launch: Launch, text: str) -> None:
    summary = launch.run([{"error": text.format(attempt)} for attempt in range(9)])
    assert (summary.code, rungs(summary)) == (4, [0, 0])
    assert launch.waited == [10.0]
    assert launch.says[-1].endswith("giving up")


@pytest.mark.slow
def test_other_words_each_time_are_waited_out(launch: Launch) -> None:
    plan = [{"error": READ_ONLY}, {"error": DISK}, {"error": READ_ONLY}, {"hello": "exit 3"}, {"error": READ_ONLY}]
    summary = launch.run([*plan, {"steps": 3}])
    assert (summary.code, rungs(summary)) == (0, [0] * 6)


def test_an_outage_after_steps_is_a_new_one(launch: Launch) -> None:
    plan = [{"steps": 1, "error": DISK}, {"error": DISK}, {"steps": 5, "error": DISK}, {"error": DISK}, {"steps": 3}]
    assert launch.run(plan).code == 0
    assert launch.waited == [10.0, 30.0, 10.0, 30.0]


@pytest.mark.slow
def test_an_outage_is_not_waited_out_for_ever(launch: Launch) -> None:
    summary = launch.run([{"steps": 3, "error": DISK}, {"error": DISK}], max_restarts=2)
    assert (summary.code, rungs(summary)) == (4, [0, 0, 0])
    assert launch.waited == [10.0, 30.0], "after the last there is nothing to wait for"


# -- whether it gets on ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_restarts_count_anew_from_each_newer_checkpoint(launch: Launch) -> None:
    """Two weeks on a machine that fails now and then."""
    lost = [{"resumed": f"out/checkpoint-{step}", "steps": step % 7 + 1, "signal": "SIGKILL"} for step in range(6)]
    summary = launch.run([*lost, {"steps": 3}], max_restarts=1)
    assert (summary.code, len(summary.attempts)) == (0, 7)


@pytest.mark.slow
def test_an_older_checkpoint_is_not_getting_on(launch: Launch) -> None:
    plan = [
        {"resumed": f"out/checkpoint-{step}", "steps": steps, "signal": "SIGKILL"}
        for step, steps in zip("1212", (9, 5, 2, 7), strict=True)
    ]
    summary = launch.run(plan, max_restarts=2)
    assert len(summary.attempts) == 2 + 2
    assert "--max-restarts 2 reached" in launch.says[-1]


@pytest.mark.main_path
@pytest.mark.few(1)
@pytest.mark.parametrize("begun", [{"output": "out"}, {"output": "out", "resumed": "out/checkpoint-5", "written": 7}])
@pytest.mark.parametrize("end", [{"error": DISK}, pytest.param({"signal": "SIGABRT"}, marks=pytest.mark.slow)])
def test_the_same_end_at_the_same_step_three_times_is_given_up(launch: Launch, begun: dict, end: dict) -> None:
    """A save into a full disk; a batch at which it hangs. An attempt that does not come to train is no such end."""
    barren = {**begun, "error": READ_ONLY}
    plan = [{**begun, **end, "steps": steps} for steps in (100, 101, 100)]
    summary = launch.run([plan[0], barren, *plan[1:], {"steps": 3}])
    assert summary.code == (4 if "error" in end else 134)
    assert len(summary.attempts) == 4
    assert "3 times in a row at the same step" in launch.says[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "others",
    [
        [{"steps": 100, "output": "out", "resumed": "out/last", "written": at} for at in range(5)],
        [{"steps": 100 + 10 * at, "output": "out"} for at in range(5)],
        pytest.param([{"steps": 100} for _ in range(5)], marks=pytest.mark.slow),
    ],
    ids=["saved anew under its name", "farther each time", "loads in its own way"],
)
def test_ends_that_are_not_alike_go_on(launch: Launch, others: list[dict]) -> None:
    summary = launch.run([*({**one, "signal": "SIGKILL"} for one in others), {"steps": 3}])
    assert (summary.code, len(summary.attempts)) == (0, 6)


def test_a_script_in_phases_is_where_it_has_gone_on_last() -> None:
    heard = AttemptMessages(lambda text: None)
    for folder in ("one", "two"):
        heard.process(0, {"type": "resumed", "path": folder, "written": 7})
    end = heard.end(1, OutcomeKind.CRASH, "killed")
    assert (end.resumed_from, end.origin) == ("one", "two 7")


@pytest.mark.main_path
@pytest.mark.slow
def test_a_step_down_has_ends_of_its_own(launch: Launch) -> None:
    alike = {"steps": 9, "output": "out"}
    kills = [{**alike, "signal": "SIGKILL"}] * 2
    summary = launch.run([*kills, {**alike, "error": OOM}, *kills, {"steps": 3}])
    assert (summary.code, rungs(summary)) == (0, [0, 0, 0, 1, 1, 1])


@pytest.mark.timeout(300)
def test_a_signal_ends_the_waiting(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "_wait", _WAIT)
    monkeypatch.setattr(supervisor, "PAUSES_SECONDS", (3600.0,))

    def interrupt() -> None:
        wait_until(lambda: any("same config in " in line for line in launch.says), "the pause")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    made = launch.make([{"error": DISK}], max_restarts=1)
    thread.start()
    summary = made.run()
    thread.join()
    assert (summary.code, rungs(summary)) == (128 + signal.SIGTERM, [0])
    assert "stopped by SIGTERM" in launch.says[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("hello", ["exit 3", "SIGSEGV", "SIGKILL"])
def test_ranks_that_do_not_come_up_are_the_machines_trouble(launch: Launch, hello: str) -> None:
    summary = launch.run([{"hello": hello}, {"steps": 3}])
    assert (summary.code, rungs(summary), kinds(summary)) == (0, [0, 0], ["infrastructure", "done"])
    assert "the ranks did not come up" in summary.attempts[0].ended
    assert launch.waited == [10.0]


def test_ranks_that_break_before_their_first_word_twice_in_a_row_are_given_up(launch: Launch) -> None:
    """A half-upgraded environment, a `sitecustomize` that fails: it was retried for half an hour."""
    summary = launch.run([{"hello": "exit 3"}])
    assert (summary.code, rungs(summary)) == (4, [0, 0])
    assert launch.waited == [10.0]
    assert launch.says[-1].endswith("giving up")


@pytest.mark.slow
def test_ranks_that_something_kills_before_their_first_word_are_waited_for(launch: Launch) -> None:
    assert launch.run([{"hello": "SIGKILL"}] * 3 + [{"steps": 3}]).code == 0
    assert launch.waited == [10.0, 30.0, 60.0]


@pytest.mark.parametrize("stepped", [False, True])
def test_what_cannot_be_prepared_in_the_same_words_is_given_up_before_any_step(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stepped: bool
) -> None:
    made, calls = launch.make([{"steps": 3 * stepped, "signal": "SIGKILL"}, {"steps": 9}]), []
    load = made.target.load_ops

    def breaking(names: Sequence[str]) -> bool:
        calls.append(names)
        if len(calls) in (2, 3, 4):
            raise UserError(f"the fork server died (process {len(calls)})")
        return load(names)

    monkeypatch.setattr(made.target, "load_ops", breaking)
    summary = made.run()
    assert kinds(summary) == ["crash", *["infrastructure"] * (3 if stepped else 2), *["done"] * stepped]


@pytest.mark.slow
def test_ranks_that_never_say_hello_are_the_machines_trouble(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HELLO_SECONDS", 1.0)
    summary = launch.run([{"hello": "SIGSTOP"}], max_restarts=0)
    assert kinds(summary) == ["infrastructure"]


def test_a_machine_that_starts_no_process_is_tried_again(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launch.make([{"steps": 3}])
    refusals = [OSError(12, "Cannot allocate memory"), OSError(28, "No space left on device")]
    real = SpawnLauncher.launch

    def refusing(self: SpawnLauncher, *words: Any) -> int:
        if refusals:
            raise refusals.pop(0)
        return real(self, *words)

    monkeypatch.setattr(SpawnLauncher, "launch", refusing)
    summary = made.run()
    assert (summary.code, rungs(summary)) == (0, [0, 0, 0])
    assert "Cannot allocate memory" in summary.attempts[0].ended
    assert launch.waited == [10.0, 30.0]


@pytest.mark.parametrize("error", [UserError("the fork server died"), OSError(28, "No space left on device")])
def test_what_breaks_while_a_later_attempt_is_prepared_is_tried_again(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    made, calls = launch.make([{"steps": 3, "error": OOM}, {"steps": 9}]), []
    load = made.target.load_ops

    def breaking(names: Sequence[str]) -> bool:
        calls.append(names)
        if len(calls) == 2:
            raise error
        return load(names)

    monkeypatch.setattr(made.target, "load_ops", breaking)
    summary = made.run()
    assert (summary.code, rungs(summary)) == (0, [0, 1, 1])
    assert kinds(summary) == ["oom_device", "infrastructure", "done"]
    assert (launch.folder / "launch.json").exists()


class Away:
    """Nodes of which one is lost when the first attempt has ended, and cannot be reached so many times."""

    def __init__(self, made: Supervisor, times: int) -> None:
        self._machine, self.ops, self.times = made.target, made.target.ops, times
        self._began = made.folder / "attempts.rank0"

    @property
    def launcher(self) -> object:
        return self._machine.launcher

    def open(self, needs: RankRequirements) -> None:
        self._machine.open(needs)

    def load_ops(self, names: object) -> bool:
        return True

    @property
    def broken(self) -> bool:
        return self.times > 0 and self._began.exists()

    def reconnect(self) -> None:
        self.times -= 1
        raise MachineError("node two: it cannot be reached (No route to host)")


@pytest.mark.parametrize(("times", "code"), [(3, 0), (100, 4)])
def test_a_node_that_restarts_is_waited_for_as_any_machine(launch: Launch, times: int, code: int) -> None:
    made = launch.make([{"steps": 3, "error": DISK}, {"steps": 9}], max_restarts=4)
    summary = made.run(Away(made, times))
    assert summary.code == code, launch.says
    assert kinds(summary) == ["infrastructure"] * (4 if times == 3 else 5) + ["done"] * (times == 3)
    assert "No route to host" in summary.attempts[1].ended
    assert launch.waited == [10.0, 30.0, 60.0, 120.0]


def test_bad_input_is_said_before_anything_is_trained(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launch.make([{"steps": 3}])

    def breaking(names: Sequence[str]) -> bool:
        raise UserError("the fork server died")

    monkeypatch.setattr(made.target, "load_ops", breaking)
    with pytest.raises(UserError, match="the fork server died"):
        made.run()


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_training_that_is_done_is_no_failure_of_a_full_disk(launch: Launch) -> None:
    made = launch.make([{"steps": 3}])
    (launch.folder / "launch.json").mkdir()  # nothing can be written there
    summary = made.run()
    assert (summary.code, kinds(summary)) == (0, ["done"])
    assert "launch.json was not written" in launch.says[-1]


def test_what_is_refused_after_the_end_does_not_start_it_again(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    end = LocalWorkers.end

    def refusing(squad: LocalWorkers, *, done: bool) -> None:
        end(squad, done=done)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(LocalWorkers, "end", refusing)
    summary = launch.run([{"steps": 3}])
    assert (summary.code, rungs(summary)) == (0, [0])
    assert any("Too many open files" in line for line in launch.says)


@pytest.mark.parametrize("code", [0, 7])
def test_the_scripts_own_end_is_passed_on(launch: Launch, code: int) -> None:
    summary = launch.run([{"steps": 3, "code": code}])
    assert (summary.code, rungs(summary)) == (code, [0])


@pytest.mark.few(1)
@pytest.mark.parametrize("stopped", [False, True])
def test_what_a_training_leaves_running_is_ended_only_upon_a_signal(launch: Launch, stopped: bool) -> None:
    """As `Popen(["aws", "s3", "sync", …])` at the last save."""
    (launch.folder / "go").touch()
    made = launch.make([{"steps": 1, "run": ["sleep", "3600"], "caught": ["SIGTERM"], "wait": stopped}])
    if stopped:
        (launch.folder / "go").unlink()
        with sent_when_waiting(launch, signal.SIGTERM, caught=True):
            summary = made.run()
    else:
        summary = made.run()
    assert summary.code == 0
    left = int((launch.folder / "left").read_text())
    assert pid_lives(left) is not stopped
    if not stopped:
        os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("caught", [[], ["SIGUSR1", "SIGUSR2"]], ids=["not caught", "caught"])
def test_a_signal_that_says_something_reaches_ranks_that_expect_it_and_ends_none(
    launch: Launch, caught: list[str]
) -> None:
    """`--signal=USR1@600` of Slurm ended the supervisor, and its ranks with it."""
    made = launch.make([{"steps": 1, "caught": caught, "wait": True}])
    with sent_when_waiting(launch, signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1, caught=bool(caught)):
        summary = made.run()
    assert (summary.code, rungs(summary)) == (0, [0])
    found = launch.folder / "caught"
    assert (found.read_text().split() if found.exists() else []) == ["SIGUSR1", "SIGUSR2", "SIGUSR1"] * bool(caught)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@contextmanager
def sent_when_waiting(launch: Launch, *numbers: signal.Signals, caught: bool) -> Iterator[None]:
    """This process gets these signals once the rank waits, one after the other: the next when the rank has `caught` the one before,
    or this process was told of it. Then the rank waits no more."""
    told, notify = list[int](), Supervisor._notify

    def heard() -> int:
        names = launch.folder / "caught"
        return len(told) if not caught else len(names.read_text().split()) if names.exists() else 0

    def note(made: Supervisor, number: int, frame: object) -> None:
        notify(made, number, frame)
        told.append(number)

    def send() -> None:
        wait_until((launch.folder / "waiting").exists, "the rank")
        try:
            for count, number in enumerate(numbers):
                os.kill(os.getpid(), number)
                wait_until(lambda count=count: heard() > count, "the signal")
        finally:
            (launch.folder / "go").touch()

    thread = threading.Thread(target=send)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "_notify", note)
        thread.start()
        yield
        thread.join()
