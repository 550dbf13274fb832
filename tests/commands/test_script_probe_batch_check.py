"""What a script is told instead of its own batch, to see whether it obeys."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.script_probe import ShortRuns, _longer, others
from tests.conftest import make_candidate
from tests.results.report.studies import measured


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ((4, 2), [(2, 4), (8, 1), (1, 8)]),
        ((1, 8), [(2, 4), (4, 2)]),
        ((2, 1), [(1, 2)]),
        ((3, 2), [(6, 1), (2, 3), (1, 6)]),
        ((1, 3), [(3, 1)]),
        ((3, 3), [(1, 9), (9, 1)]),
        # none of the same size but one that memory may not hold
        ((1, 7), [(2, 8)]),
        ((1, 1), [(2, 2)]),
    ],
)
def test_other_batches_of_the_same_size_are_told_first(own: tuple[int, int], told: list[tuple[int, int]]) -> None:
    assert [(one.micro_batch, one.accumulation) for one in others(make_candidate(2, *own))] == told
    assert all(one.stage == 2 for one in others(make_candidate(2, *own)))


@pytest.mark.parametrize(
    ("seconds", "left", "half_holds"), [(33.9, 0, False), (34.1, 2, False), (58.9, 2, False), (59.1, 2, True)]
)
def test_short_runs_that_would_take_more_than_their_share_are_left_out(
    seconds: float, left: int, half_holds: bool
) -> None:
    """Two steps of warm-up and three others; those of half the micro-batch may take twice as long."""
    baseline = dataclasses.replace(measured(40, 3), outside_seconds=19.0)  # a start of 9 s, and two steps
    assert baseline.measurement is not None
    baseline = dataclasses.replace(baseline, measurement=dataclasses.replace(baseline.measurement, step_seconds=5.0))
    runs = ShortRuns(SimpleNamespace(), seconds, baseline)  # type: ignore[arg-type]
    assert (runs.left, runs.holds(2.0)) == (left, half_holds)


def test_time_of_a_short_run_is_taken_from_the_next() -> None:
    session: Any = SimpleNamespace(facts={}, close=lambda: None)
    session.measure = lambda *_: dataclasses.replace(measured(40, 3), seconds=7.0)
    runs = ShortRuns(SimpleNamespace(session=lambda *_, job: session), 10.0)  # type: ignore[arg-type]
    runs.run(make_candidate(2, 4, 2), "probe-batch-1", None)  # type: ignore[arg-type]
    assert (runs.left, runs._seconds) == (1, 3.0)


@pytest.mark.parametrize(
    ("ran", "left", "budget", "line"),
    [
        (None, 60.0, 60.0, "use --budget 2m"),
        (None, 20.0, 60.0, "use --budget 2m"),
        (
            {"start_seconds": 9.0, "step_seconds": 8.0},
            20.0,
            20.0,
            "a step takes about 8.0 s, and the first run about 33.0 s; use --budget 2m",
        ),
        (
            {"start_seconds": 9.0, "step_seconds": 0.5},
            25.0,
            25.0,
            "a step takes about 500 ms, and the first run about 10.5 s; use --budget 60s",
        ),
        (
            {"start_seconds": 9.0, "step_seconds": 4.0},
            20.0,
            60.0,
            "a step takes about 4.0 s, and the first run about 21.0 s; use --budget 2m",
        ),
    ],
)
def test_budget_that_ends_the_first_run_names_a_larger_one(
    ran: dict[str, float] | None, left: float, budget: float, line: str
) -> None:
    """What was used before the run is used again: 40 s of a budget of 60 s leave too little of 60 s."""
    assert _longer(ran, left, budget) == line
