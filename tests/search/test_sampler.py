"""The sampler in a user's own study."""

from __future__ import annotations

import optuna
import pytest

import autotune
from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.sampler import PEAK, FeasibleSampler, SampledProposer, named_sampler
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH
from autotune.search.tuner import Tuner
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayExecutor, ReplayTable
from tests.cli_call import call


def make_sampler(table: ReplayTable) -> FeasibleSampler:
    job, hardware = table.job(), table.hardware()
    trace = closed_form_trace(job, "a test")
    sampler = FeasibleSampler(lambda: Predictor(job, hardware, trace), table.space())
    sampler._candidates = sorted(table.rows, key=str)
    return sampler


def objective(sampler: FeasibleSampler, table: ReplayTable, trial: optuna.Trial) -> float:
    sampler.suggest(trial)
    candidate = Candidate.of(trial.params)
    row = table.rows[candidate]
    if row.kind is OutcomeKind.OOM_DEVICE:
        raise optuna.TrialPruned
    trial.set_user_attr(PEAK, int(row.peak_gib * GIB))
    return 1 / table.seconds_per_sample(candidate)


def test_a_users_study_finds_the_best_and_is_stopped(replay_table: ReplayTable) -> None:
    sampler = make_sampler(replay_table)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(lambda trial: objective(sampler, replay_table, trial), n_trials=80)
    assert study.best_value * replay_table.best_step_seconds > 0.95
    assert len(study.trials) < 60  # stopped when no gain was left


def test_the_next_candidate_follows_from_the_trials_alone(replay_table: ReplayTable) -> None:
    """Another sampler on the same study, as after a restart or in a second process, proposes the same."""
    sampler = make_sampler(replay_table)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(lambda trial: objective(sampler, replay_table, trial), n_trials=4)
    again = make_sampler(replay_table)
    number = len(study.trials)
    proposed = [one.sample_relative(study, optuna.trial.create_trial(value=0.0), {}) for one in (sampler, again)]
    assert len(study.trials) == number
    assert proposed[0] == proposed[1]
    tried = [trial.params for trial in study.trials]
    assert proposed[0] not in tried


def test_a_running_trial_is_not_proposed_again(replay_table: ReplayTable) -> None:
    sampler = make_sampler(replay_table)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    first, second = study.ask(), study.ask()
    for trial in (first, second):
        sampler.suggest(trial)
    assert first.params != second.params


def test_the_public_function_takes_the_options_of_plan() -> None:
    sampler = autotune.sampler(model="tiny-llama", gpu="l4", gpus=2, global_batch_size=32)
    trial = optuna.create_study(direction="maximize", sampler=sampler).ask()
    config = sampler.suggest(trial)
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == 16
    with pytest.raises(ValueError, match="gqu"):
        autotune.sampler(model="tiny-llama", gqu="l4")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["nosuch", "os:getcwd", "collections:OrderedDict"])
def test_what_is_no_sampler_is_refused_before_anything_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(monkeypatch, capsys, "run", "--model", "tiny-llama", "--device", "cpu", "--sampler", name)
    assert code == 2
    assert f"--sampler {name}: " in err


class Own(optuna.samplers.RandomSampler):
    """A user's sampler."""


@pytest.mark.parametrize("name", ["tpe", "random", f"{__name__}:Own"])
def test_another_sampler_proposes_until_the_trials_are_used(replay_table: ReplayTable, name: str) -> None:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    store = StudyStore.in_memory(job, hardware, space)
    predictor = Predictor(job, hardware, closed_form_trace(job, "a test"))
    sampler = named_sampler(name, 0)
    proposer = SampledProposer(store.study, sampler, sorted(replay_table.rows, key=str), space, predictor)
    found = Tuner(store, ReplayExecutor(replay_table), proposer, budget_seconds=3600, max_trials=15).run()
    searched = [record for record in store.records() if record.role == SEARCH]
    assert {record.note for record in searched} == {f"by {type(sampler).__name__}"}
    assert len({record.candidate for record in searched}) == len(searched) >= 12
    assert found.verified
