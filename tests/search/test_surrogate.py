import numpy as np
import pytest

from autotune.search.surrogate import Surrogate, features
from tests.conftest import make_candidate

CANDIDATES = [
    make_candidate(stage, micro, overlap_comm=overlap, reduce_bucket_size=bucket)
    for stage in (1, 2, 3)
    for micro in (1, 2, 4, 8)
    for overlap in (True, False)
    for bucket in (10**6, 10**8)
]


def speed(i: int) -> float:
    """First-order knobs matter, second-order ones do not."""
    candidate = CANDIDATES[i]
    return float(0.3 * np.log(candidate.micro_batch) - 0.4 * candidate.stage)


def taught(places: list[int]) -> Surrogate:
    surrogate = Surrogate(*features(CANDIDATES))
    for at in places:
        surrogate.observe(at, speed(at))
    return surrogate


def test_what_was_measured_is_expected_again() -> None:
    places = list(range(0, len(CANDIDATES), 5))
    expected, sigma = taught(places).predict(np.array(places))
    assert expected == pytest.approx([speed(at) for at in places], abs=0.05)
    assert (sigma < 0.05).all()


def test_what_is_unlike_anything_measured_is_uncertain() -> None:
    places = [i for i, c in enumerate(CANDIDATES) if c.stage == 1]
    _, sigma = taught(places).predict()
    assert sigma[[i for i, c in enumerate(CANDIDATES) if c.stage == 3]].min() > 2 * sigma[places].max()


def test_it_learns_from_the_study_how_much_second_order_knobs_matter() -> None:
    places = list(range(0, len(CANDIDATES), 3))
    expected, _ = taught(places).predict()
    others = [i for i in range(len(CANDIDATES)) if i not in places]
    assert abs(expected[others] - [speed(i) for i in others]).max() < 0.1


def test_features_of_one_candidate_and_of_knobs_that_some_lack() -> None:
    first, second = features([make_candidate(0, 1)])
    assert first.shape[0] == second.shape[0] == 1
    first, second = features([make_candidate(0, 1), make_candidate(3, 1, sub_group_size=10**6), *CANDIDATES])
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
