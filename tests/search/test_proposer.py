import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job, traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import parse_space
from autotune.search.proposer import ENOUGH, WORTHWHILE, Proposer
from autotune.search.stopping import LEAST_MEASURED, StopReason
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayTable
from tests.conftest import make_job

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def make_proposer(replay_table: ReplayTable, capacity_gib: float | None = None, **options: object) -> Proposer:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    if capacity_gib is not None:
        hardware = dataclasses.replace(hardware, memory_cap_bytes=int(capacity_gib * GIB))
    predictor = Predictor(job, hardware, trace_job(job))
    candidates = sorted(replay_table.rows, key=str)
    return Proposer(candidates, space, predictor, **options)  # type: ignore[arg-type]


def result(replay_table: ReplayTable, candidate: Candidate) -> Outcome:
    row = replay_table.rows[candidate]
    if row.kind is not OutcomeKind.OK:
        return Outcome(row.kind, missing_bytes=GIB, outside_seconds=12.0)
    assert row.step_seconds is not None
    rate = candidate.micro_batch * candidate.accumulation * 2 / row.step_seconds
    measured = Measurement(row.step_seconds, 0.02, 4, rate, rate, int(row.peak_gib * GIB))
    return Outcome(OutcomeKind.OK, measurement=measured, outside_seconds=12.0)


def test_nothing_is_proposed_twice_and_the_end_has_a_reason(replay_table: ReplayTable) -> None:
    proposer, seen = make_proposer(replay_table), []
    while (proposal := proposer.next()) is not None:
        while proposal is not None:
            seen.append(proposal.candidate)
            proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
            proposal = (
                proposer.next_rung(proposal.candidate)
                if replay_table.rows[proposal.candidate].kind is OutcomeKind.OK
                else None
            )
    assert len(seen) == len(set(seen))
    assert len(seen) < 60
    assert proposer.stopped.reason is StopReason.SMALL_GAIN
    best = min(replay_table.seconds_per_sample(c) for c in seen if replay_table.rows[c].kind is OutcomeKind.OK)
    assert replay_table.best_step_seconds / best > 0.97


def test_a_kernel_that_crashes_everywhere_is_given_up() -> None:
    job, hardware = make_job(), named_hardware("rtx4090", 2)
    space = parse_space(
        "knobs: {zero_stage: [1, 2], train_micro_batch_size_per_gpu: [1, 2], "
        "attention: [sdpa, flex_attention], overlap_comm: [true, false]}"
    )
    proposer = Proposer(space.candidates(job), space, traced_predictor(job, hardware))
    crashed = Outcome(
        OutcomeKind.CRASH,
        Phase.FORWARD,
        reason="no such kernel",
        evidence="exception RuntimeError",
        source=Source.EXCEPTION,
    )
    flex = [c for c in space.candidates(job) if c.get("attention") == "flex_attention"]
    apart = next(c for c in flex if c.stage != flex[0].stage and c.get("overlap_comm") != flex[0].get("overlap_comm"))
    proposer.observe(
        flex[0].but(attention="sdpa"), Outcome(OutcomeKind.OK, measurement=Measurement(1, 0, 4, 1, 1, GIB))
    )
    proposer.observe(flex[0], crashed)
    assert any(c.get("attention") == "flex_attention" for c in proposer.open_candidates)
    proposer.observe(apart, crashed)
    assert all(c.get("attention") == "sdpa" for c in proposer.open_candidates)
    assert any("no such kernel" in reason for reason in proposer.skips())


def test_rungs_of_one_engine_ascend(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table, exhaustive=True)
    climbed = 0
    for _ in range(60):
        proposal = proposer.next()
        if proposal is None or climbed > 5:
            break
        batch = 0
        while proposal is not None:
            climbed += batch > 0
            assert proposal.candidate.micro_batch > batch
            batch = proposal.candidate.micro_batch
            family = proposal.candidate.family
            outcome = result(replay_table, proposal.candidate)
            proposer.observe(proposal.candidate, outcome)
            proposal = proposer.next_rung(proposal.candidate) if outcome.ok else None
            assert proposal is None or proposal.candidate.family == family
    assert climbed > 5


def test_the_first_proposal_fits(replay_table: ReplayTable) -> None:
    first = make_proposer(replay_table).next()
    assert replay_table.rows[first.candidate].kind is OutcomeKind.OK


def test_an_oom_excludes_its_candidate_and_nothing_that_fits(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    out = next(
        c
        for c, row in replay_table.rows.items()
        if row.kind is OutcomeKind.OOM_DEVICE and c.stage == 2 and c.micro_batch > 4
    )
    proposer.observe(out, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB))
    left = set(proposer.open_candidates)
    assert out not in left
    assert {c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK} <= left


def test_a_refusal_is_learnt_once_its_pattern_shows(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    refused = [c for c in replay_table.rows if c.offload_param == "cpu" and c.stage == 3]
    worked = next(
        c
        for c in replay_table.rows
        if c.stage == 3 and c.offload_param == "none" and replay_table.rows[c].kind is OutcomeKind.OK
    )
    proposer.observe(worked, result(replay_table, worked))
    wanted = [refused[0], next(c for c in refused if not set(c.family) <= set(refused[0].family) and c.checkpointing)]
    for candidate in wanted:
        proposer.observe(candidate, Outcome(OutcomeKind.INVALID, reason="offload_param is not for you"))
    assert any("DeepSpeed refuses" in reason for reason in proposer.skips())
    assert wanted[0] not in proposer.open_candidates


def test_a_crash_closes_its_engine_only(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    candidate = next(iter(replay_table.rows))
    before = len(proposer.open_candidates)
    proposer.observe(candidate, Outcome(OutcomeKind.CRASH, reason="boom"))
    gone = before - len(proposer.open_candidates)
    assert gone == sum(c.family == candidate.family for c in replay_table.rows)
    proposer.observe(candidate, Outcome(OutcomeKind.INFRASTRUCTURE, reason="port"))
    assert len(proposer.open_candidates) == before - gone


def test_a_trial_gets_time_by_what_it_is_expected_to_take(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    slow = max(replay_table.rows, key=lambda c: c.accumulation * (2 if c.offload_optimizer == "cpu" else 1))
    assert proposer.trial_seconds(slow) > 30


def test_where_nothing_is_predicted_to_fit_the_least_is_tried(replay_table: ReplayTable) -> None:
    job, space = replay_table.job(), replay_table.space()
    small = dataclasses.replace(replay_table.hardware(), memory_cap_bytes=GIB // 2)
    candidates = sorted(replay_table.rows, key=str)
    proposer = Proposer(candidates, space, Predictor(job, small, trace_job(job)))
    tried = 0
    while (proposal := proposer.next()) is not None:
        assert "nothing is likely to fit" in proposal.note
        tried += 1
        proposer.observe(proposal.candidate, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB))
    assert 1 <= tried <= 4


def measured_as(candidate: Candidate, samples_per_second: float) -> Outcome:
    step = candidate.micro_batch * candidate.accumulation * 2 / samples_per_second
    measured = Measurement(step, 0.0, 4, samples_per_second, samples_per_second, GIB)
    return Outcome(OutcomeKind.OK, measurement=measured, outside_seconds=12.0)


def test_what_fitted_in_another_space_has_not_failed(replay_table: ReplayTable) -> None:
    """A study that goes on in another space recalls what it has measured outside of that."""
    fitting = [c for c in sorted(replay_table.rows, key=str) if replay_table.rows[c].kind is OutcomeKind.OK]
    proposer = make_proposer(replay_table)
    for candidate in fitting[:10]:
        other = candidate.but(gradient_accumulation_steps=77)
        assert other not in replay_table.rows
        proposer.observe(other, result(replay_table, candidate))
    proposal = proposer.next()
    assert "least memory" not in proposal.note


def fastest(replay_table: ReplayTable) -> Candidate:
    fitting = (candidate for candidate, row in replay_table.rows.items() if row.kind is OutcomeKind.OK)
    return min(fitting, key=replay_table.seconds_per_sample)


def run_to_end(proposer: Proposer, replay_table: ReplayTable) -> list[str]:
    """Measure what is proposed, each in an engine of its own, and return the notes."""
    notes = []
    while (proposal := proposer.next()) is not None:
        notes.append(proposal.note)
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    return notes


def test_exhaustive_search_goes_on_when_no_gain_is_expected(replay_table: ReplayTable) -> None:
    proposer, notes = make_proposer(replay_table, exhaustive=True), []
    for _ in range(40):
        proposal = proposer.next()
        notes.append(proposal.note)
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    assert "--exhaustive goes on" in notes
    assert proposer.stopped is None


def test_hopeless_candidates_are_counted_and_not_tried_first(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    hopeless = proposer._forecast.hopeless
    assert hopeless.any()
    value, _ = proposer._values(proposer._forecast)
    assert np.isneginf(value[hopeless]).all()
    (count,) = (n for reason, n in proposer.skips().items() if "believed to need more" in reason)
    assert count == int(hopeless.sum())


def test_search_ends_if_the_most_gain_per_second_is_not_worthwhile(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    run_to_end(proposer, replay_table)
    assert proposer.stopped.sentence == StopReason.SMALL_GAIN.stop(percent=100 * WORTHWHILE).sentence
    value, gain = proposer._values(proposer._forecast)
    assert gain[value.argmax()] < WORTHWHILE


def test_what_measurements_alone_expect_is_tried_though_the_predictor_agrees_with_them(
    replay_table: ReplayTable,
) -> None:
    proposer = make_proposer(replay_table)
    run_to_end(proposer, replay_table)
    forecast, fast = proposer._forecast, int(np.flatnonzero(proposer._available)[0])
    assert proposer._best is not None
    believed = forecast.speed
    means = believed.means - 5.0
    means[~believed.predicts, fast] = proposer._best + 0.5
    speed = dataclasses.replace(believed, means=means)
    fits = np.ones(len(proposer.candidates))
    proposer.__dict__["_forecast"] = dataclasses.replace(forecast, speed=speed, fits_by_measurements=fits)
    proposal = proposer.next()
    assert proposal.candidate == proposer.candidates[fast]


def test_many_failures_without_a_fit_leave_the_thriftiest_candidates_only(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    for candidate in proposer.candidates[:ENOUGH]:
        proposer.observe(candidate, Outcome(OutcomeKind.CRASH, reason=str(candidate)))
    proposal = proposer.next()
    assert proposal.note == "least memory of its stage: nothing has fitted"
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    proposal = proposer.next()
    assert "least memory" not in proposal.note


def test_speed_of_an_earlier_call_ranks_and_is_not_compared(replay_table: ReplayTable) -> None:
    """The machine may be slower today: a candidate of this call is the best although the stored speed is higher."""
    proposer, best = make_proposer(replay_table), fastest(replay_table)
    slow = next(c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and c.stage != best.stage)
    proposer.observe(best, measured_as(best, 100.0))
    proposer.begin_call()
    assert proposer._best is not None
    proposer.observe(slow, measured_as(slow, 10.0))
    assert proposer._best == pytest.approx(math.log(10.0))
    at = proposer.candidates.index(best)
    assert proposer._forecast.speed.sigma[at] > 0.02, "less sure than a measurement of this call"


def test_candidate_that_cannot_win_sets_no_best_speed(replay_table: ReplayTable) -> None:
    proposer, best = make_proposer(replay_table), fastest(replay_table)
    proposer.observe(best, measured_as(best, 100.0))
    proposer.drop_from_best(best)
    assert proposer._best is None
    over = dataclasses.replace(measured_as(best, 50.0).measurement, peak_bytes=proposer.hardware.ceiling_bytes + 1)  # type: ignore[type-var]
    proposer.observe(best, Outcome(OutcomeKind.OK, measurement=over))
    assert proposer._best is None


def test_verification_that_fails_by_memory_lowers_the_limit_of_its_stage(replay_table: ReplayTable) -> None:
    proposer, best = make_proposer(replay_table), fastest(replay_table)
    searched = result(replay_table, best)
    proposer.observe(best, searched)
    before = proposer._forecast.fits.copy()
    proposer.apply_verification_failure(best, Outcome(OutcomeKind.OK), searched.measurement, 0.5)
    stage = np.array([c.stage for c in proposer.candidates])
    after = proposer._forecast.fits
    assert after[stage == best.stage].sum() < before[stage == best.stage].sum()
    assert after[stage != best.stage] == pytest.approx(before[stage != best.stage])


def test_first_trials_of_a_short_budget_are_predicted_to_take_a_quarter_of_it(
    replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.proposer.FIRST_TRIAL_SECONDS", 0.0)

    def first_seconds(budget: float) -> float:
        proposer = make_proposer(replay_table)
        proposal = proposer.next(budget)
        forecast, at = proposer._forecast, proposer.candidates.index(proposal.candidate)
        slow_step = forecast.step_seconds * np.exp(forecast.speed.sigma)
        return float(proposer._costs.measuring_seconds(slow_step, proposer._accumulation)[at])

    usual = first_seconds(1e6)
    assert first_seconds(3.9 * usual) < 3.9 / 4 * usual < usual


@pytest.mark.parametrize(
    ("left", "only_one", "share"), [(400.0, False, 100.0), (8.0, False, 5.0), (3.0, False, 3.0), (40.0, True, 40.0)]
)
def test_share_of_a_trial_is_a_quarter_but_all_of_what_nothing_else_needs(
    replay_table: ReplayTable, left: float, only_one: bool, share: float
) -> None:
    proposer = make_proposer(replay_table)
    for candidate in proposer.candidates[1:] if only_one else ():
        proposer.close_candidate(candidate)
    proposer.next(left)
    assert proposer.trial_share_seconds == share


def test_confidence_grows_with_trials(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    assert proposer.confidence() is None
    left = []
    while (proposal := proposer.next()) is not None:
        outcome = result(replay_table, proposal.candidate)
        proposer.observe(proposal.candidate, outcome)
        if outcome.ok:
            left.append(proposer.confidence().left_share)
    known = [share for share in left if share < math.inf]
    assert len(left) - len(known) == LEAST_MEASURED - 1, "one for each candidate that fits"
    assert known[-1] < known[0]
    assert 0 < left[-1] < 0.1


def test_nothing_is_said_of_untried_candidates_that_are_ruled_out(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    for stop, untried in ((StopReason.BUDGET_USED, True), (StopReason.ALL_TRIED, False)):
        proposer.stopped = stop.stop()
        confidence = proposer.confidence()
        assert confidence.untried is untried


def test_no_trial_begins_that_is_expected_to_outlast_the_budget(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    first = proposer.next(600.0)
    proposer.observe(first.candidate, result(replay_table, first.candidate))  # its engine took 12 s to start
    assert proposer.next(10.0) is None
    assert proposer.stopped.reason is StopReason.BUDGET_USED
    assert proposer.next(600.0) is not None
