"""Real DeepSpeed on real CPU ranks, and every way for them to end."""

import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import MachineError
from autotune.executors.base import RESUME, VERIFY, MeasureSpec
from autotune.executors.local import CUDA_INITIALIZED_BEFORE_FORK, Deadlines, LocalExecutor
from autotune.predict.step_time import size_seconds
from autotune.problem.candidate import ALLOCATOR_VARIABLES
from autotune.problem.hardware import detect, threads_per_rank
from autotune.problem.outcome import OutcomeKind, Phase
from autotune.util.units import MIB
from autotune.workers import fork_server
from autotune.workers.group import WatchEnd, WorkerGroup
from autotune.workers.launchers import ForkLauncher
from tests.conftest import Bench, capped_ranks, make_candidate, make_job, pid_lives, wait_until


@pytest.mark.main_path
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_every_stage_is_measured(bench: Bench, stage: int) -> None:
    outcome = bench.run(make_candidate(stage, 2, 2))
    assert outcome.ok, outcome
    measured = outcome.measurement
    assert measured.samples_per_second == pytest.approx(8 / measured.step_seconds)
    assert measured.tokens_per_second == pytest.approx(32 * measured.samples_per_second)
    assert 100 * MIB < measured.peak_bytes < 2000 * MIB
    assert measured.model_tflops_per_gpu
    assert [*dict.fromkeys(bench.phases)] == ["init", "forward"]
    assert not measured.extrapolated


@pytest.mark.main_path
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "knobs", [{"offload_optimizer": "cpu"}, {"activation_checkpointing": True}, {"overlap_comm": True}]
)
def test_knobs_really_run(bench: Bench, knobs: dict) -> None:
    assert bench.run(make_candidate(2, 1, 1, **knobs)).ok


def test_how_the_model_is_made_is_a_knob(bench: Bench) -> None:
    assert bench.run(make_candidate(1, attention="eager")).ok
    missing = bench.run(make_candidate(1, attention="flash_attention_2"))
    assert missing.kind is OutcomeKind.CRASH
    assert "FlashAttention2" in missing.reason


@pytest.mark.slow
def test_one_engine_climbs_and_a_long_accumulation_is_extrapolated(bench: Bench) -> None:
    first = make_candidate(1, 1, 1)
    measure_spec = MeasureSpec(min_seconds=0.0, min_steps=5)  # for medians that one slow step does not move
    with closing(bench.session(first)) as session:
        outcomes = [session.measure(make_candidate(1, *rung), measure_spec, 60.0) for rung in ((1, 1), (2, 1), (2, 16))]
    assert all(outcome.ok for outcome in outcomes)
    long, short = outcomes[2].measurement, outcomes[1].measurement
    assert long is not None
    assert short is not None
    assert long.extrapolated
    assert not short.extrapolated
    assert long.samples_per_second * long.step_seconds == pytest.approx(2 * 16 * 2), "all of them count"
    with pytest.raises(ValueError, match="one family"):
        session.measure(make_candidate(2), measure_spec, 5.0)


@pytest.mark.main_path
@pytest.mark.slow
def test_verification_is_a_certificate(bench: Bench) -> None:
    outcome = bench.run(make_candidate(3, 2, 4), measure_spec=VERIFY)
    assert outcome.ok
    assert not outcome.measurement.extrapolated
    assert outcome.measurement.steps >= VERIFY.min_steps
    assert "save" in bench.phases
    folder = Path(outcome.log or "")
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".safetensors")]  # nothing is written


@pytest.mark.main_path
@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_candidate_goes_on_from_a_checkpoint(bench: Bench, stage: int) -> None:
    candidate = make_candidate(stage, 2, offload_optimizer="cpu" if stage == 3 else "none")
    outcome = bench.run(candidate, measure_spec=RESUME)
    assert outcome.ok, outcome
    assert outcome.measurement.steps == 1
    assert "load" in bench.phases, "by a group that has loaded it"
    folder = Path(outcome.log or "")
    assert not (folder / "checkpoint").exists()


@pytest.mark.slow
def test_a_candidate_that_dies_as_it_loads(bench: Bench) -> None:
    bench.fault = {"rank": 1, "where": "load", "what": "oom"}
    outcome = bench.run(make_candidate(1, 2), measure_spec=RESUME)
    assert (outcome.kind, outcome.phase, outcome.rank) == (OutcomeKind.OOM_DEVICE, Phase.LOAD, 1)
    assert not (Path(outcome.log or "") / "checkpoint").exists()


def test_the_ranks_are_tested_before_any_candidate(bench: Bench) -> None:
    bench.executor.check(pytest.fail)
    assert bench.left_over() == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"what": "SIGKILL"}, "killed from outside"),
        ({"what": "raise", "text": "NCCL error: Duplicate GPU detected : rank 0 and rank 1"}, "a GPU of its own"),
    ],
)
def test_a_machine_on_which_ranks_do_not_meet_is_said_in_one_line(
    bench: Bench, fault: dict[str, object], said: str
) -> None:
    bench.fault = {"rank": 1, "where": "init", **fault}
    with pytest.raises(MachineError, match=said) as caught:
        bench.executor.check(lambda text: None)
    assert "before any config is tried" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert bench.left_over() == []


@pytest.mark.slow
def test_a_rank_that_finds_cuda_woken_has_the_rest_start_cold(tmp_path: Path) -> None:
    said: list[str] = []
    woken = {"rank": 0, "where": "start", "what": "raise", "text": f"autotune: {CUDA_INITIALIZED_BEFORE_FORK}"}
    executor = LocalExecutor(make_job(), detect("cpu", 2), tmp_path, [make_candidate()])
    executor.fault = lambda name: woken if executor.isolation == "fork" else None
    with closing(executor):
        executor.open(lambda text: None)
        executor.check(said.append)
        assert executor.isolation == "spawn"
        assert "falling back to cold starts" in said[0]


@pytest.mark.parametrize(("woken", "cu_init", "safe"), [(False, 0, True), (True, 0, False), (False, 3, False)])
def test_fork_safety_is_what_a_forked_child_says(
    monkeypatch: pytest.MonkeyPatch, woken: bool, cu_init: int, safe: bool
) -> None:
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: woken)
    driver = SimpleNamespace(cuInit=lambda flags: cu_init)
    monkeypatch.setattr(fork_server.ctypes, "CDLL", lambda name: driver)
    assert fork_server.cuda_survives_fork() is safe


def test_limits_grow_with_what_an_engine_must_move() -> None:
    job, big = make_job(), replace(make_job(), model=replace(make_job().model, parameters=7 * 10**9))
    offloaded = make_candidate(3, offload_optimizer="cpu")
    assert size_seconds(job, offloaded) < 5
    assert size_seconds(big, make_candidate(3)) > 60
    assert size_seconds(big, offloaded) > size_seconds(big, make_candidate(3)) + 100, "112 GB are pinned"
    limits = Deadlines(init=10.0, step=7.0).allowing(100.0, patience=2.0)
    assert (limits(Phase.INIT), limits(Phase.LOAD), limits(Phase.SAVE)) == (220.0, 214.0, 214.0)
    assert (limits(Phase.START), limits(Phase.FORWARD)) == (180.0, 14.0)


def test_out_of_memory_on_the_real_cap(bench: Bench) -> None:
    bench.executor.hardware = capped_ranks(520)
    outcome = bench.run(make_candidate(0, 64))
    assert outcome.kind is OutcomeKind.OOM_DEVICE
    assert outcome.missing_bytes
    assert outcome.capacity_bytes == 520 * MIB
    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes <= 520 * MIB
    bench.executor.hardware = capped_ranks(2000)
    assert bench.run(make_candidate(0, 1)).ok, "the next trial starts as if nothing had happened"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "what", ["oom", "SIGKILL", *(pytest.param(what, marks=pytest.mark.slow) for what in ("SIGSEGV", "raise", "hang"))]
)
@pytest.mark.parametrize("where", ["init", "backward"])
def test_one_rank_of_two_fails(bench: Bench, what: str, where: str) -> None:
    bench.fault = {"rank": 1, "where": where, "what": what}
    if what == "hang":
        bench.executor.deadlines = Deadlines(start=60, init=5, step=3)
    expected = {"oom": OutcomeKind.OOM_DEVICE, "hang": OutcomeKind.TIMEOUT}.get(what, OutcomeKind.CRASH)
    session = bench.session(make_candidate(2))
    outcome = session.measure(make_candidate(2), MeasureSpec(), 120.0)
    assert outcome.kind is expected, outcome
    assert outcome.evidence
    assert outcome.log
    assert session.failed_at is not None
    assert bench.left_over() == [], "the whole group is ended, before anybody asks for it"
    if what != "hang":
        assert outcome.rank == 1
    if what == "oom":
        assert outcome.phase is Phase(where)


def test_a_config_that_deepspeed_refuses_keeps_its_message(bench: Bench) -> None:
    outcome = bench.run(
        make_candidate(2, **{"zero_optimization.offload_optimizer.ratio": 0.5, "offload_optimizer": "cpu"}).but(
            **{"zero_optimization.reduce_bucket_size": -5}
        )
    )
    assert outcome.kind is OutcomeKind.INVALID
    assert "reduce_bucket_size" in outcome.reason or "ValidationError" in outcome.reason


def test_the_budgets_end_is_an_interruption(bench: Bench) -> None:
    bench.fault = {"rank": 0, "where": "forward", "what": "hang"}  # a fast machine would end before it otherwise
    outcome = bench.run(make_candidate(2), deadline_seconds=0.4)
    assert outcome.kind is OutcomeKind.INTERRUPTED


def test_a_stop_request_ends_a_running_trial(bench: Bench) -> None:
    began = time.monotonic()
    bench.executor.cancelled = lambda: time.monotonic() - began > 1.0
    bench.fault = {"rank": 0, "where": "forward", "what": "hang"}
    assert bench.run(make_candidate()).kind is OutcomeKind.INTERRUPTED


@pytest.mark.slow
def test_fork_and_spawn_agree(bench: Bench, tmp_path: Path) -> None:
    candidate, measure_spec = make_candidate(1, 4), MeasureSpec(min_seconds=0.2, min_steps=3)
    forked = bench.run(candidate, measure_spec=measure_spec)
    assert isinstance(bench.executor.launcher, ForkLauncher)
    cold = LocalExecutor(make_job(), bench.executor.hardware, tmp_path, [candidate])
    cold.isolation = "spawn"
    cold.open(lambda text: None)
    with closing(cold), closing(cold.session(candidate, "0001")) as session:
        spawned = session.measure(candidate, measure_spec, 300.0)
        assert isinstance(cold.launcher, ForkLauncher)
        assert cold.launcher.cold
    assert spawned.ok
    assert spawned.measurement is not None
    assert spawned.measurement.peak_bytes == pytest.approx(forked.measurement.peak_bytes, rel=0.15)


def test_a_disk_that_refuses_is_the_machines_trouble(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.executor.launcher, "launch", refuse)
    outcome = bench.run(make_candidate())
    assert outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "No space" in outcome.reason


@pytest.mark.slow
def test_ranks_die_with_their_server_which_is_started_again(bench: Bench) -> None:
    with closing(bench.session(make_candidate())) as session:
        assert session.measure(make_candidate(), MeasureSpec(min_seconds=0.0, min_steps=2), 120.0).ok
        ranks = [process.pid for process in bench.left_over()]
        assert len(ranks) == 2
        server = bench.executor.launcher.server
        assert server is not None
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not any(pid_lives(pid) for pid in (server, *ranks)), "their end")
    assert bench.run(make_candidate()).ok


def test_a_rank_is_told_the_environment_of_its_candidate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    asked: list[dict[str, Any]] = []
    start = WorkerGroup.start

    def told(group: WorkerGroup, entry: str, ranks: int, spec: dict[str, Any], **options: Any) -> WatchEnd:
        asked.append(spec)
        return start(group, entry, ranks, spec, **options)

    monkeypatch.setattr(WorkerGroup, "start", told)
    assert bench.run(make_candidate(expandable_segments=True)).ok
    assert asked[0]["env"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert asked[0]["threads"] == threads_per_rank(2)
