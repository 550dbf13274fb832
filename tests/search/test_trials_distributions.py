from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autotune.problem.candidate import Candidate
from autotune.problem.space import Domain, SearchSpace, load_space
from autotune.search.storage import open_storage
from autotune.search.trials import begin, distribution, optuna_parameters, record_of
from tests.conftest import make_candidate

MICRO_BATCH = "train_micro_batch_size_per_gpu"


def test_numbers_are_ranges_and_words_choices() -> None:
    assert isinstance(distribution(MICRO_BATCH, (1, 2, 4, 8)), IntDistribution)
    assert isinstance(distribution(MICRO_BATCH, (1, 2)), IntDistribution)
    assert isinstance(distribution("offload_optimizer", ("none", "cpu")), CategoricalDistribution)
    assert distribution("zero_stage", (0, 2)).choices == (0, 1, 2, 3)  # type: ignore[attr-defined]
    assert distribution("overlap_comm", (True,)).choices == (False, True)  # type: ignore[attr-defined]
    assert isinstance(distribution("optimizer.params.x", (0.5, 8.5)), FloatDistribution)


def test_a_value_outside_the_space_is_held_too() -> None:
    cpu = load_space("cpu_demo")
    candidate = make_candidate(2, 128, **{"zero_optimization.reduce_scatter": True})
    parameters, found = optuna_parameters(candidate, cpu, {})
    assert parameters == candidate.as_dict
    assert set(found) == {name for name, _ in candidate.knobs}
    assert found[MICRO_BATCH].high == 128  # type: ignore[attr-defined]


def test_a_value_that_the_stored_choices_lack_is_no_parameter_of_optuna() -> None:
    stored = {"zero_stage": CategoricalDistribution((0, 2)), MICRO_BATCH: CategoricalDistribution((1, 2))}
    parameters, found = optuna_parameters(make_candidate(2, 4), None, stored)
    assert parameters["zero_stage"] == 2
    assert found["zero_stage"] is stored["zero_stage"]
    assert MICRO_BATCH not in parameters
    ranged = {MICRO_BATCH: FloatDistribution(1.0, 2.0)}
    assert optuna_parameters(make_candidate(2, 4), None, ranged)[1][MICRO_BATCH] == FloatDistribution(4.0, 4.0)


Values = tuple[int | float | str | bool, ...]
SPACES: tuple[
    dict[str, Values], ...
] = (  # one study's, each after the other: choices grow and shrink, and become ranges
    {"zero_stage": (0, 2), MICRO_BATCH: (1, 2)},
    {"zero_stage": (0, 2, 3), MICRO_BATCH: (1, 2, 4, 8)},
    {"zero_stage": (3,), MICRO_BATCH: (16,), "reduce_bucket_size": (0, 5)},
    {"zero_stage": (3,), "attention": ("sdpa",), "reduce_bucket_size": (70_000_000, 500_000_000)},
    {"zero_stage": (2,), "attention": ("sdpa", "eager"), "some.key": ("a", "b"), "other.key": (1, 2)},
    {"zero_stage": (2,), "some.key": ("b", "c", 1, True), "other.key": ("x", 2.5)},
)


@pytest.mark.parametrize("url", ["sqlite:///{}/x.db", "journal:{}/x.journal"])
def test_a_study_takes_the_candidates_of_any_space(tmp_path: Path, url: str) -> None:
    study = optuna.create_study(study_name="x", storage=open_storage(url.format(tmp_path)))
    tried: list[Candidate] = []
    for space in [_space(knobs) for knobs in (*SPACES, *SPACES)]:
        values = [
            {name: domain.values[at % len(domain.values)] for name, domain in space.knobs.items()} for at in (0, 1)
        ]
        for knobs in values:
            tried.append(Candidate.of(knobs))
            begin(study, tried[-1], space, role="search", note="", tuner="t")
    records = [record_of(trial) for trial in study.get_trials()]
    assert [record.candidate for record in records if record is not None] == tried


def test_a_study_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It has stored what its space had: [1, 2] as a choice, [0, 2] as all stages that there are."""
    storage = open_storage(f"sqlite:///{tmp_path}/x.db")
    study = optuna.create_study(study_name="x", storage=storage)
    kinds = {"zero_stage": CategoricalDistribution((0, 2)), MICRO_BATCH: CategoricalDistribution((1, 2))}
    study.add_trial(optuna.trial.create_trial(params={"zero_stage": 0, MICRO_BATCH: 1}, distributions=kinds, value=1.0))
    for stage, micro_batch in ((0, 2), (2, 1), (3, 8), (1, 1)):
        candidate = Candidate.of({"zero_stage": stage, MICRO_BATCH: micro_batch})
        begin(study, candidate, _space(SPACES[1]), role="search", note="", tuner="t")
    assert len(study.get_trials()) == 5


def test_what_another_tuner_tells_in_between_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    mine = optuna.create_study(study_name="x", storage=open_storage(url))
    theirs = optuna.load_study(study_name="x", storage=open_storage(url))
    read: Callable[..., list[optuna.trial.FrozenTrial]] = mine.get_trials

    def late(deepcopy: bool = True) -> list[optuna.trial.FrozenTrial]:
        monkeypatch.undo()
        before = read(deepcopy=deepcopy)
        begin(theirs, Candidate.of({"some.key": "a"}), None, role="search", note="", tuner="other")
        return before

    monkeypatch.setattr(mine, "get_trials", late)
    begin(mine, Candidate.of({"some.key": "b"}), None, role="search", note="", tuner="me")
    assert len(mine.get_trials()) == 2


def _space(knobs: dict[str, Values]) -> SearchSpace:
    return SearchSpace("s", "", {name: Domain(values) for name, values in knobs.items()}, "")
