"""What steps come to of which some have other work."""

import random
import statistics

import pytest

from autotune.rank.step_statistics import median_spread, pace_of


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ([1.0, 1.0, 9.0, 1.0] * 4, 3.0),
        ([1.0, 9.0] * 4, 5.0),
        ([9.0, 9.0, 9.0, 1.0] * 4, 7.0),  # most steps have it
        ([*[1.0] * 9, 11.0] * 3, 2.0),
        ([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0], 3.0),  # whole periods alone
    ],
)
def test_work_that_recurs_counts(steps: list[float], seconds: float) -> None:
    assert pace_of(steps).seconds == pytest.approx(seconds)


def test_the_jitter_of_short_steps_is_nothing_beside_a_rollout() -> None:
    steps = [0.001, 0.0014, 0.64, 0.001, 0.002, 0.001, 0.64, 0.0015, 0.001, 0.001, 0.64]
    found = pace_of(steps)
    assert found.seconds == pytest.approx(1.2875 / 8)
    assert found.spread < 0.02 * found.seconds
    assert found.settled


@pytest.mark.parametrize(
    "steps",
    [
        [1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [*[1.0] * 14, 9.0, 9.0, *[1.0] * 14],  # a stall over two steps
        [*[1.0] * 28, 9.0, 9.0],
    ],
)
def test_a_stall_of_the_machine_does_not(steps: list[float]) -> None:
    assert pace_of(steps).seconds == 1.0


def test_what_comes_once_is_waited_for() -> None:
    assert pace_of([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]).pending is False
    assert pace_of([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0], unseen=2).pending is True
    assert pace_of([1.0, 1.0, 1.0, 9.0, *[1.0] * 5], unseen=2).pending is False
    assert pace_of([1.0, 1.0, 1.0, 9.0]).pending is True
    assert pace_of([*[1.0] * 20, 1.5]).pending is False, "a step that hardly changes the figure"


def test_periods_that_differ_make_a_mean_unsure() -> None:
    alike, unlike = pace_of([1.0, 9.0] * 6), pace_of([1.0, 9.0, 1.0, 3.0] * 3)
    assert alike.spread == pytest.approx(0)
    assert unlike.vague
    assert unlike.spread > 0.1 * unlike.seconds


def test_steps_of_many_lengths_come_to_their_mean() -> None:
    steps = [1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    found = pace_of(steps)
    assert found.seconds == pytest.approx(sum(steps) / len(steps))
    assert 0 < found.spread < found.seconds


def test_the_interval_of_a_median_holds_95_of_100_samples() -> None:
    draw = random.Random(0)
    samples = [[draw.gauss(10.0, 1.0) for _ in range(101)] for _ in range(2000)]
    held = sum(abs(statistics.median(sample) - 10.0) <= median_spread(sample) for sample in samples)
    assert held / len(samples) == pytest.approx(0.95, abs=0.02)
