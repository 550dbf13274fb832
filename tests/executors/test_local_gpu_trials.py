"""Trials on GPUs of a driver that tests write, without a rank: what ends before one is launched."""

from pathlib import Path

import pytest

from autotune.executors.base import SEARCH
from autotune.executors.local import LocalExecutor
from autotune.problem.hardware import detect
from autotune.problem.outcome import Outcome, OutcomeKind, Source
from autotune.workers import host_workers
from autotune.workers.launchers import SpawnLauncher, trial_environment
from tests.conftest import make_candidate, make_job
from tests.fake_driver import GPU_IS_LOST, Card, Driver

NEIGHBOUR = 4_194_302


class Trial:
    """One, on one GPU, whose ranks are interpreters that never say hello."""

    def __init__(self, driver: Driver, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        driver.show(Card("A", 24))
        self.executor = LocalExecutor(make_job(1), detect("cuda", 1), folder, [])
        self.executor.target.opened_launcher = SpawnLauncher(trial_environment("cpu", 1), folder / "spawn.log")
        self.said: list[str] = []
        self.executor.print_line = self.said.append
        patch.setattr(LocalExecutor, "rank_module", "tests.workers.mute_rank")

    def run(self, deadline_seconds: float) -> Outcome:
        session = self.executor.session(make_candidate(), "0001")
        try:
            return session.measure(make_candidate(), SEARCH, deadline_seconds)
        finally:
            session.close()


@pytest.fixture
def trial(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(driver, tmp_path, monkeypatch)


def test_a_gpu_that_is_lost_between_trials(trial: Trial) -> None:
    trial.driver.cards[0].error = GPU_IS_LOST
    trial.driver.write()
    outcome = trial.run(60)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.INFRASTRUCTURE, "GPU 0 does not answer: GPU is lost")


@pytest.mark.slow
def test_seconds_of_waiting_for_a_neighbour_are_not_the_candidates(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial whose share of the budget ends is taken for slow, unless it has waited."""
    assert trial.run(0.5).kind is OutcomeKind.INTERRUPTED
    trial.driver.cards[0].processes = {NEIGHBOUR: 12 * 1024}
    trial.driver.write()
    monkeypatch.setattr(host_workers, "FREE_MEMORY_SECONDS", 0.2)
    outcome = trial.run(0.5)
    assert (outcome.kind, outcome.source) == (OutcomeKind.GPU_CONTENTION, Source.BUDGET)
    assert "of waiting for the device's memory" in outcome.reason
    assert f"(pid {NEIGHBOUR})" in trial.said[0]
