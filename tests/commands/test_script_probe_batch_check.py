"""What a script is told instead of its own batch, to see whether it obeys."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands import script_probe
from autotune.commands.script_probe import SHORT_RUNS_SHARE, ShortRuns, _longer, others
from autotune.problem.job import Script
from autotune.problem.outcome import Outcome, OutcomeKind
from tests.conftest import make_candidate
from tests.results.report.studies import measured


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ((4, 2), [(2, 4), (8, 1), (1, 8)]),
        ((1, 8), [(2, 4), (4, 2)]),
        ((1, 3), [(3, 1)]),
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


@pytest.mark.parametrize("start_seconds", [60.0, 100.0, 150.0, 180.0, 195.0])
def test_short_runs_of_a_slow_script_leave_time_for_a_trial_and_its_verification(start_seconds: float) -> None:
    """Of a budget of 10 minutes; each takes the start and ten steps."""
    steps_seconds, of_a_run = 10 * 2.0, start_seconds + 2 * 2.0
    baseline = dataclasses.replace(measured(40, 3), seconds=start_seconds + steps_seconds, outside_seconds=of_a_run)
    assert baseline.measurement is not None
    baseline = dataclasses.replace(baseline, measurement=dataclasses.replace(baseline.measurement, step_seconds=2.0))
    left_seconds = 600.0 - baseline.seconds
    runs = ShortRuns(SimpleNamespace(), SHORT_RUNS_SHARE * left_seconds, baseline)  # type: ignore[arg-type]
    left_seconds -= runs.expected_seconds() if runs.left else 0.0
    assert left_seconds > 1.7 * baseline.seconds


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
            "a step takes about 500 ms, and the first run about 10.5 s; use --budget 1m",
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


@pytest.mark.parametrize(
    ("ran", "same"),
    [
        ([], False),
        ([{}], True),
        ([{"repeats_seeds": True}], False),
        ([{"repeats_seeds": True}, {}], False),
        ([None], False),  # it failed, so nothing is known of its seeds
    ],
)
def test_trials_repeat_the_first_seeds_unless_a_measured_run_named_the_same(
    ran: list[dict[str, Any] | None], same: bool
) -> None:
    runs = ShortRuns(SimpleNamespace(), 100.0)  # type: ignore[arg-type]
    for facts in ran:
        outcome = measured(40, 3) if facts is not None else Outcome(OutcomeKind.CRASH, reason="it failed")
        session: Any = SimpleNamespace(facts=facts or {}, close=lambda: None, measure=lambda *_, one=outcome: one)
        runs.executor = SimpleNamespace(session=lambda *_, job, one=session: one)  # type: ignore[assignment]
        runs.run(make_candidate(2, 4, 2), "probe-batch", None)  # type: ignore[arg-type]
    assert runs.names_same_seeds == same


def test_a_script_whose_batch_is_kept_keeps_its_largest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = {"9-0a1b2c3d": {"index": 4, "bytes": 80, "read": 9, "tokens": 12, "samples": 9}}
    facts: dict[str, Any] = {"micro_batch": 2, "accumulation": 1, "micros": 1, "rows": 2, "config": {}, "widest": 8}
    unset = (
        "model_config precision causal model trained frozen checkpointing checkpointed through_arguments loader_prepared "
        "relaunched client_optimizer untested_optimizer flags"
    )
    facts |= {"largest": largest, **dict.fromkeys(unset.split(), False)}
    monkeypatch.setattr(script_probe, "carriers_found", lambda _, script, __: script.profile)
    monkeypatch.setattr(script_probe, "check_batch", lambda *_: "it ignores other batches")
    monkeypatch.setattr(script_probe, "_with_noise", lambda *_: None)
    monkeypatch.setattr(ShortRuns, "names_same_seeds", True)
    said: list[str] = []
    executor: Any = SimpleNamespace(hardware=SimpleNamespace(count=2))
    budget: Any = SimpleNamespace(left_seconds=600.0)
    script = Script(("train.py",), ".")
    found = script_probe._checked(executor, script, measured(40, 3), facts, "key", budget, said.append)
    assert found.script.profile.largest == largest
    assert said[0] == "--worst-case: sample 4 is the largest (train has 9 samples, 9 were read)"
