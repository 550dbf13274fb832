"""What optuna-dashboard finds in a study; the keys are those that its version 0.21.0 reads."""

from autotune.problem.outcome import Phase
from autotune.search.dashboard import flat
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


def test_a_study_has_them_and_a_note_of_its_winner() -> None:
    store = everything()
    assert store.winner is not None
    attributes = store.study._storage.get_study_system_attrs(store.study._study_id)
    assert f"winner is trial {store.winner.number}" in attributes["dashboard:note_str:0"]
    assert attributes["dashboard:note_ver"] == 1
    store.set_winner(0, "verified")
    attributes = store.study._storage.get_study_system_attrs(store.study._study_id)
    assert "winner is trial 0" in attributes["dashboard:note_str:0"]
    assert attributes["dashboard:note_ver"] == 2
    assert {trial.user_attrs["kind"] for trial in store.study.get_trials()} >= {"ok", "oom_device", "timeout", "crash"}


def test_the_sampler_is_told_the_same_as_before() -> None:
    """No value and no constraint is bent for the dashboard: what ran above the ceiling keeps its speed, and is infeasible."""
    store = in_memory()
    tell(store, make_candidate(0, 1), measured(50, 10))
    tell(store, make_candidate(0, 2), measured(99, 23.9))
    above = store.study.get_trials()[1]
    assert above.value == 99
    assert set(above.constraints) == {"memory_gib_over", "failed"}
    assert store.study.best_trial.number == 0
