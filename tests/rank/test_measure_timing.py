"""When warm-up and measurement end, and what step times come to."""

from dataclasses import replace

import pytest

from autotune.rank.measure import (
    MAX_WARMUP_STEPS,
    MeasureRequest,
    after_warmup,
    beaten,
    enough,
    extrapolate,
    holds_timed_step,
    settled,
    stretch,
    warmed_up,
)

REQUEST = MeasureRequest(micro_batch=2, accumulation=1, min_steps=5, max_steps=50, min_seconds=10.0, max_seconds=100.0)


def test_a_request_is_a_message_without_its_type() -> None:
    message = {"type": "measure", "micro_batch": 2, "accumulation": 8, "full": True, "min_steps": 1, "max_steps": 9}
    found = MeasureRequest.of({**message, "min_seconds": 0.5, "max_seconds": 1.5})
    assert found == MeasureRequest(2, 8, 1, 9, 0.5, 1.5, full=True)


@pytest.mark.parametrize(
    ("accumulation", "full", "runs", "extrapolated"),
    [(1, False, 1, False), (3, False, 3, False), (4, False, 3, True), (64, False, 3, True), (64, True, 64, False)],
)
def test_of_a_long_accumulation_three_micro_batches_are_run(
    accumulation: int, full: bool, runs: int, extrapolated: bool
) -> None:
    request = replace(REQUEST, accumulation=accumulation, full=full)
    assert (request.micro_batches, request.extrapolated) == (runs, extrapolated)


@pytest.mark.parametrize(
    ("step_seconds", "done"),
    [
        ([], False),
        ([1.0], False),
        ([9.0, 1.0, 1.04], True),
        ([9.0, 1.0, 0.5, 0.51], True),
        ([1.0, 2.0, 4.0, 2.0, 1.0, 2.0], True),
        ([9.0, 2.0], True),  # longer than the least measurement
        ([11.0], True),
    ],
)
def test_warm_up_ends_when_steps_settle_or_its_share_is_spent(step_seconds: list[float], done: bool) -> None:
    assert warmed_up(step_seconds, REQUEST) is done
    assert len(step_seconds) <= MAX_WARMUP_STEPS


@pytest.mark.parametrize(
    ("elapsed", "steps", "is_enough"),
    [(11.0, 5, True), (11.0, 4, False), (1.0, 50, True), (101.0, 1, True), (100.0, 1, False)],
)
def test_enough(elapsed: float, steps: int, is_enough: bool) -> None:
    assert enough(REQUEST, elapsed, steps) is is_enough


@pytest.mark.parametrize(
    ("elapsed", "steps", "pace", "wanted"),
    [
        (0.0, 0, 1.0, 10),  # the seconds decide
        (0.0, 0, 4.0, 5),  # the steps decide
        (0.0, 0, 0.01, 50),  # no more than the most
        (90.0, 2, 4.0, 2),  # no more than the time allows
        (99.0, 2, 4.0, 1),  # but always one
    ],
)
def test_steps_between_comparisons_of_the_clocks(elapsed: float, steps: int, pace: float, wanted: int) -> None:
    assert stretch(REQUEST, elapsed, steps, pace) == wanted


LONG = replace(REQUEST, min_seconds=30.0)
SHARE = replace(LONG, share_seconds=20.0)


@pytest.mark.parametrize(
    ("warmup", "done", "another"),
    [
        ([7.0], False, True),
        ([14.0], True, True),  # a first step has one-time work
        ([15.0], True, False),  # a second one would take too long
        ([7.0, 7.0], True, False),  # the share holds no third one
    ],
)
def test_slow_steps_are_cut_to_what_the_share_holds(warmup: list[float], done: bool, another: bool) -> None:
    assert warmed_up(warmup, SHARE) is done
    left = after_warmup(SHARE, warmup)
    assert left.share_seconds == 20.0 - sum(warmup)
    assert holds_timed_step(left, warmup) is another
    assert not warmed_up(warmup, LONG), "without a share the warm-up goes on"


def test_measuring_ends_before_a_step_that_the_share_does_not_hold() -> None:
    left = replace(REQUEST, share_seconds=12.0)
    assert stretch(left, 0.0, 0, 4.0) == 3
    assert enough(left, 8.5, 2)
    assert not enough(left, 8.0, 2)
    assert not enough(REQUEST, 8.5, 2)
    assert not enough(replace(REQUEST, share_seconds=0.0), 0.0, 0), "one step at least"


BEATEN = replace(REQUEST, beaten_step_seconds=1.0)


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [
        ([1.2, 1.2], True),
        ([1.04, 1.04], False),  # within the least interval of 5 %
        ([1.1, 1.5], False),  # the interval reaches below the limit
        ([1.5], False),  # one step has no interval
    ],
)
def test_candidate_is_beaten_once_its_interval_lies_above_the_limit(step_seconds: list[float], expected: bool) -> None:
    assert beaten(BEATEN, step_seconds) == expected
    assert not beaten(REQUEST, step_seconds), "without a limit nothing is beaten"


def test_candidate_that_is_expected_to_be_beaten_runs_two_steps_before_it_is_judged() -> None:
    assert stretch(BEATEN, 0.0, 0, 1.5) == 2
    assert stretch(BEATEN, 0.0, 0, 0.5) == stretch(REQUEST, 0.0, 0, 0.5) == 20
    assert stretch(BEATEN, 3.0, 2, 1.5) == stretch(REQUEST, 3.0, 2, 1.5)


def test_a_long_step_is_its_first_its_middle_and_its_boundary() -> None:
    assert extrapolate([0.5, 1.0, 3.0], 16) == pytest.approx(0.5 + 14 * 1.0 + 3.0)
    assert extrapolate([0.5, 1.0, 3.0], 3) == pytest.approx(4.5)
    assert extrapolate([2.5], 2) == 2.5, "a step that was run whole"


FIRST = [5.0, 1.0]  # of a warm-up: an engine's first step takes long, whatever recurs


@pytest.mark.parametrize(
    ("elapsed", "steps", "done"),
    [
        (10.0, [1.0] * 5, False),  # what the first did may come again
        (12.0, [1.0] * 12, True),
        (26.0, [1.0] * 5, True),  # a quarter of the longest measurement
        (45.0, [*[1.0] * 11, 9.0, *[1.0] * 13], True),  # and not again when it would have
        (60.0, [1.0, 1.0, 9.0, 1.0, 1.0, 9.0], False),  # one whole period
        (90.0, [1.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 9.0], True),
        (150.0, [*[1.0] * 11, 9.0], False),  # longer than usual
        (201.0, [*[1.0] * 11, 9.0], True),  # but not for ever
        (60.0, [*[1.0] * 61, 99.0, *[1.0] * 38], True),
    ],
)
def test_steps_are_measured_until_it_is_known_whether_work_recurs(
    elapsed: float, steps: list[float], done: bool
) -> None:
    assert settled(REQUEST, elapsed, steps, FIRST) is done


def test_where_the_first_step_was_like_the_others_nothing_is_waited_for() -> None:
    assert settled(REQUEST, 10.0, [1.0] * 5, [1.0, 1.0])


def test_a_measurement_that_grows_longer_still_leaves_a_trial_its_end() -> None:
    lone = [*[1.0] * 11, 9.0]
    assert not settled(REQUEST, 150.0, lone, FIRST)
    assert settled(replace(REQUEST, most_seconds=120.0), 150.0, lone, FIRST)


def test_a_mean_that_stays_vague_is_measured_up_to_the_usual_limits() -> None:
    uneven = [1.0, 5.0, 1.0, 1.0, 1.0, 2.0, 1.0, 9.0, 3.0, 1.0]
    assert not settled(REQUEST, 50.0, uneven, FIRST)
    assert settled(REQUEST, 101.0, uneven, FIRST)
