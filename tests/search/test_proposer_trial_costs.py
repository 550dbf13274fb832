"""What trials take, as the proposer counts it."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.problem.job import Script
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.search.proposer import MOST_STEP_SECONDS, STARTUP_SECONDS, Costs
from tests.conftest import make_candidate, make_job


def test_starts_of_the_own_stage_count_before_all_and_a_slow_rung_does_not() -> None:
    costs = Costs(make_job())
    assert costs.startup_seconds.tolist() == [STARTUP_SECONDS] * 4
    costs.observe(Outcome(OutcomeKind.OK, outside_seconds=0.6, started=True), 0)
    costs.observe(Outcome(OutcomeKind.OK, outside_seconds=0.4), 0)
    costs.observe(Outcome(OutcomeKind.OK, outside_seconds=9.0, started=True), 3)
    assert costs.startup_seconds == pytest.approx([0.6, 4.8, 4.8, 9.0])


def test_no_estimate_gives_a_trial_the_whole_budget() -> None:
    costs, candidate = Costs(make_job()), make_candidate()
    assert costs.limit_seconds(candidate, 1e6, 1.0) == costs.limit_seconds(candidate, MOST_STEP_SECONDS, 1.0) < 3 * 3600
    assert costs.limit_seconds(candidate, 1e6, 2.0) > costs.limit_seconds(candidate, 1e6, 1.0)
    slow = Measurement(1000.0, 1.0, 3, 1.0, 1.0, 1)
    costs.observe(Outcome(OutcomeKind.OK, measurement=slow), 0)
    assert costs.limit_seconds(candidate, 1e6, 1.0) > 40_000, "one has shown that steps are long here"


def test_a_script_s_steps_are_run_in_full() -> None:
    step, accumulation = np.array([1.8, 1.8]), np.array([32, 1])
    of_model = Costs(make_job()).measuring_seconds(step, accumulation)
    assert of_model[0] < of_model[1]
    of_script = Costs(make_job(script=Script(("train.py",), "/"))).measuring_seconds(step, accumulation)
    assert of_script == pytest.approx([9.0, 9.0])


def test_what_a_limit_ended_while_it_started_raises_all_limits() -> None:
    costs, candidate = Costs(make_job()), make_candidate(0, 1)
    before = costs.limit_seconds(candidate, 0.1, 1.0)
    assert costs.limit_seconds(candidate, 0.1, 2.0) == pytest.approx(2 * before)
    costs.observe(Outcome(OutcomeKind.TIMEOUT, Phase.STEP, source=Source.LIMIT, seconds=500.0), 0)
    assert costs.limit_seconds(candidate, 0.1, 1.0) == before, "it had started"
    costs.observe(Outcome(OutcomeKind.TIMEOUT, Phase.INIT, source=Source.LIMIT, seconds=500.0), 0)
    assert costs.limit_seconds(candidate, 0.1, 1.0) > 1500
