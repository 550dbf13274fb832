"""What optuna-dashboard finds in a study; the keys are those that its version 0.21.0 reads."""

import random
from collections.abc import Callable

import optuna
import pytest

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.search.trials import constraints, flat
from autotune.search.trials import tell as for_the_dashboard
from autotune.util.units import GIB
from tests.conftest import make_candidate
from tests.results.report.studies import everything, in_memory, machine, measured, ran_out, tell


def test_flat_attributes_say_how_a_trial_ended() -> None:
    hardware = machine()
    fits = flat(measured(100, 11), hardware)
    assert fits == {"kind": "ok", "peak_gib": 11.0, "over_gib": -11.8, "tokens_per_s": 3200.0}
    assert flat(measured(100, 23.5), hardware)["over_gib"] == 0.7
    out = flat(ran_out(Phase.FORWARD, 4.0), hardware)
    assert out["kind"] == "oom_device"
    assert out["over_gib"] > 4.0
    assert "tokens_per_s" not in out


def test_the_trials_of_a_study_have_them() -> None:
    kinds = {trial.user_attrs["kind"] for trial in everything().study.get_trials()}
    assert kinds >= {"ok", "oom_device", "timeout", "crash"}


def test_the_sampler_is_told_the_same_as_before() -> None:
    """No value and no constraint is bent for the dashboard: what ran above the ceiling keeps its speed, and is infeasible."""
    store = in_memory()
    tell(store, make_candidate(0, 1), measured(50, 10))
    tell(store, make_candidate(0, 2), measured(99, 23.9))
    above = store.study.get_trials()[1]
    assert above.value == 99
    assert above.constraints["memory_gib_over"] == pytest.approx(23.9 - 0.95 * 24)
    assert above.constraints["failed"] == 0
    assert store.study.best_trial.number == 0


def told_plainly(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> None:
    """As Optuna 5 would be told without any dashboard: everything COMPLETE, infeasible by its constraints alone."""
    for name, value in constraints(outcome, hardware).items():
        trial.set_constraint(name, value)
    study.tell(trial, outcome.measurement.samples_per_second if outcome.measurement else 0.0)


def asked_of_tpe(how: Callable[..., None], seed: int, outcomes: list[Outcome]) -> list[dict[str, object]]:
    """What Optuna's TPE asks for while it is told outcomes in this way."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
    asked = []
    for outcome in outcomes:
        trial = study.ask()
        asked.append(
            {"x": trial.suggest_categorical("x", list(range(9))), "y": trial.suggest_int("y", 1, 64, log=True)}
        )
        how(study, trial, outcome, machine())
    return asked


@pytest.mark.parametrize("seed", range(4))
def test_optunas_tpe_asks_for_the_same_whether_told_for_the_dashboard_or_plainly(seed: int) -> None:
    draw = random.Random(seed)
    some = [
        lambda: measured(draw.uniform(10, 100), draw.uniform(5, 22)),  # fits
        lambda: measured(draw.uniform(10, 100), draw.uniform(23, 24)),  # above the ceiling
        lambda: ran_out(Phase.FORWARD, draw.uniform(0.5, 30)),
        lambda: Outcome(OutcomeKind.CRASH, Phase.FORWARD),
    ]
    for share in ((6, 2, 2, 1), (0, 1, 3, 1)):  # the second: nothing fits
        outcomes = [one() for one in draw.choices(some, share, k=40)]
        assert asked_of_tpe(for_the_dashboard, seed, outcomes) == asked_of_tpe(told_plainly, seed, outcomes)


def test_the_best_trial_of_the_storage_is_never_one_that_does_not_fit() -> None:
    """It is what the dashboard shows as best."""
    store = in_memory()
    tell(store, make_candidate(0, 32), ran_out(Phase.FORWARD, 4.0))
    tell(store, make_candidate(0, 2), measured(99, 23.9))
    tell(store, make_candidate(3, 2), Outcome(OutcomeKind.CRASH, Phase.FORWARD))
    with pytest.raises(ValueError, match="No trials"):
        _ = store.study.best_trial
    fits = tell(store, make_candidate(0, 1), measured(50, 10))
    tell(store, make_candidate(0, 1), Outcome(OutcomeKind.OK, peak_bytes=12 * GIB), "resume")
    assert store.study.best_trial.number == fits
