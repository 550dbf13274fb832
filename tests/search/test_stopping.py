"""The bound of the speed that a search has left."""

import numpy as np
import pytest

from autotune.search.stopping import Confidence, StopReason, speed_left


def bound(ahead: float, sigma: float, fits: float, count: int, groups: int) -> float:
    one = np.ones(count)
    return speed_left(ahead * one, sigma * one, fits * one, np.arange(count) % groups)


def test_one_candidate_leaves_its_90_percent_quantile() -> None:
    assert bound(-0.05, 0.1, 1.0, 1, 1) == pytest.approx(-0.05 + 1.2816 * 0.1, abs=2e-4)


def test_candidates_of_one_group_count_once_and_groups_add_up() -> None:
    alone = bound(0.0, 0.1, 1.0, 1, 1)
    assert bound(0.0, 0.1, 1.0, 5, 1) == pytest.approx(alone)
    assert bound(0.0, 0.1, 1.0, 5, 5) > 1.3 * alone


def test_what_probably_does_not_fit_leaves_less() -> None:
    assert bound(0.0, 0.1, 0.1, 1, 1) == 0.0
    assert 0.0 < bound(0.0, 0.1, 0.5, 1, 1) < bound(0.0, 0.1, 1.0, 1, 1)


@pytest.mark.parametrize(
    ("left", "trials", "sentence"),
    [
        (0.021, 14, "at most 3 % left with 90 % probability, by 14 trials"),
        (0.0001, 1, "at most 1 % left with 90 % probability, by 1 trial"),
        (0.0, 9, "nothing left with 90 % probability, by 9 trials"),
        (1.5, 2, "possibly more than 100 % left, by 2 trials"),
    ],
)
def test_sentence_rounds_up(left: float, trials: int, sentence: str) -> None:
    assert Confidence(left, trials).sentence == sentence


def test_stop_fills_the_sentence_of_its_reason() -> None:
    stop = StopReason.MAX_TRIALS.stop(count=3)
    assert (stop.reason, stop.sentence) == (StopReason.MAX_TRIALS, "--max-trials 3 reached")
