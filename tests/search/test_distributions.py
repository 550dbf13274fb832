from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autotune.problem.space_file import load_space
from autotune.search.distributions import distribution, distributions
from tests.conftest import make_candidate


def test_numbers_are_ranges_and_words_choices() -> None:
    assert isinstance(distribution((1, 2, 4, 8), 4), IntDistribution)
    assert isinstance(distribution(("none", "cpu"), "cpu"), CategoricalDistribution)
    assert isinstance(distribution((0, 1, 2, 3), 2), CategoricalDistribution)
    assert isinstance(distribution((True, False), True), CategoricalDistribution)
    assert isinstance(distribution((0.5, 8.5), 8.5), FloatDistribution)


def test_a_value_outside_the_space_is_held_too() -> None:
    assert distribution((1, 2, 4, 8), 16).high == 16  # type: ignore[attr-defined]
    assert "nvme" in distribution(("none", "cpu"), "nvme").choices  # type: ignore[attr-defined]
    found = distributions(make_candidate(2, **{"zero_optimization.reduce_scatter": True}), load_space("cpu_demo"))
    assert set(found) == {name for name, _ in make_candidate(2).knobs} | {"zero_optimization.reduce_scatter"}
