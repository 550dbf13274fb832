"""The bound of the speed that a search has left."""

import math

import numpy as np
import pytest

from autotune.search.belief import Mixture
from autotune.search.stopping import Confidence, StopReason, speed_left


def bound(ahead: float, sigma: float, fits: float, count: int, groups: int) -> float:
    one = np.ones(count)
    believed = Mixture(np.zeros(1), ahead * one[None], sigma * one[None], np.ones(1, bool))
    return speed_left(believed, fits * one, np.arange(count) % groups)


def test_one_candidate_leaves_its_90_percent_quantile() -> None:
    assert bound(-0.05, 0.1, 1.0, 1, 1) == 0.09, "exp(-0.05 + 1.2816 * 0.1) - 1 is 8.1 %"


def test_candidates_of_one_group_count_once_and_groups_add_up() -> None:
    alone = bound(0.0, 0.1, 1.0, 1, 1)
    assert bound(0.0, 0.1, 1.0, 5, 1) == pytest.approx(alone)
    assert bound(0.0, 0.1, 1.0, 5, 5) > 1.3 * alone


def test_what_probably_does_not_fit_leaves_less() -> None:
    assert bound(0.0, 0.1, 0.1, 1, 1) == 0.0
    assert 0.0 < bound(0.0, 0.1, 0.5, 1, 1) < bound(0.0, 0.1, 1.0, 1, 1)


@pytest.mark.parametrize(
    ("left", "measured", "untried", "sentence"),
    [
        (0.021, 9, True, "untried configs are at most 3 % faster, with 90 % probability (judged by 14 trials)"),
        (0.0001, 4, True, "untried configs are at most 1 % faster, with 90 % probability (judged by 14 trials)"),
        (0.0, 9, True, "no untried config is faster, with 90 % probability (judged by 14 trials)"),
        (1.5, 4, True, "untried configs may be more than twice as fast (judged by 14 trials)"),
        (math.inf, 3, True, "3 configs measured: too few to bound the speed of the untried ones"),
        (math.inf, 1, True, "1 config measured: too few to bound the speed of the untried ones"),
        (0.0, 9, False, "no config is left to try"),
        (math.inf, 1, False, "no config is left to try"),
    ],
)
def test_sentence_claims_no_more_than_is_known(left: float, measured: int, untried: bool, sentence: str) -> None:
    assert Confidence(left, 14, measured, untried).sentence == sentence


@pytest.mark.parametrize("reason", StopReason)
def test_a_stored_sentence_gives_its_reason(reason: StopReason) -> None:
    fields = {"count": 3, "percent": 0.5, "tried": "7 configs", "kinds": "3 crash (of 4)"}
    assert StopReason.of(reason.stop(**fields).sentence) is reason
    assert StopReason.of(f"another {reason.value}") is None


def test_stop_fills_the_sentence_of_its_reason() -> None:
    stop = StopReason.MAX_TRIALS.stop(count=3)
    assert (stop.reason, stop.sentence) == (StopReason.MAX_TRIALS, "--max-trials 3 reached")
