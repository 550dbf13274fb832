"""Each rule of the proposer decides in its own case and leaves other cases to the next rule."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.search.knob_record import KnobRecord
from autotune.search.proposer import ENOUGH, HEAD, LEAST_EVIDENCE, LOOSE_BOUND, Decision, Proposal, Proposer
from autotune.search.stopping import LEAST_MEASURED, Stop, StopReason
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayTable, load_replay_table
from tests.search.test_proposer import TABLE, measured_as, result, small_space

SCRIPT_TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "landscapes_real" / "encoder-script_2xcpu.csv.gz"


def make_proposer(replay_table: ReplayTable, capacity_gib: float | None = None, exhaustive: bool = False) -> Proposer:
    job, hardware = replay_table.job(), replay_table.hardware()
    if capacity_gib is not None:
        hardware = dataclasses.replace(hardware, memory_cap_bytes=int(capacity_gib * GIB))
    candidates = sorted(replay_table.rows, key=str)
    predictor = Predictor(job, hardware, trace_job(job))
    return Proposer(candidates, replay_table.space(), 0, predictor, exhaustive=exhaustive)


def decide(proposer: Proposer, name: str) -> Proposal | Stop | None:
    (rule,) = (rule for rule in proposer.rules if rule.name == name)
    return rule.decide(Decision(proposer._worth))


def fastest(replay_table: ReplayTable) -> Candidate:
    fitting = [c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK]
    return min(fitting, key=replay_table.seconds_per_sample)


def search_until(proposer: Proposer, replay_table: ReplayTable, rule: str) -> Proposal | None:
    """Search until the rule has decided, and return what it proposed; None for a stop."""
    for _ in range(100):
        proposal = proposer.next()
        if proposer.decided_by == rule or proposal is None:
            assert proposer.decided_by == rule
            return proposal
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    raise AssertionError(f"rule {rule!r} never decided")


def reject_predictor(proposer: Proposer) -> None:
    proposer._model.speed.credit = -1.0


def test_rules_are_applied_in_order_and_the_first_decision_counts(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    assert len({rule.name for rule in proposer.rules}) == len(proposer.rules)
    proposal = proposer.next()
    names = [rule.name for rule in proposer.rules]
    before = names[: names.index(proposer.decided_by)]
    assert [decide(proposer, name) for name in before] == [None] * len(before)
    assert proposal == decide(proposer, proposer.decided_by)


def test_fallback_after_failures_needs_many_failures_and_no_fit(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    for candidate in proposer.candidates[:ENOUGH]:
        assert decide(proposer, "fallback after failures") is None
        proposer.observe(candidate, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB))
    found = decide(proposer, "fallback after failures")
    assert isinstance(found, Proposal)
    assert "nothing has fitted" in found.note
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    assert decide(proposer, "fallback after failures") is None


def test_sampler_gets_its_share_only_if_the_predictor_is_rejected(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer._proposed = HEAD + 1
    assert decide(proposer, "sampler's share") is None
    reject_predictor(proposer)
    found = decide(proposer, "sampler's share")
    assert isinstance(found, Proposal)
    assert found.note == "Optuna's sampler"


def test_fallback_without_a_fit_applies_if_nothing_is_predicted_to_fit(replay_table: ReplayTable) -> None:
    assert decide(make_proposer(replay_table), "fallback without a fit") is None
    found = decide(make_proposer(replay_table, capacity_gib=0.5), "fallback without a fit")
    assert isinstance(found, Proposal)
    assert "nothing is likely to fit" in found.note


def test_first_fit_proposes_the_best_predicted_until_one_fits(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    found = decide(proposer, "first fit")
    assert isinstance(found, Proposal)
    assert found.candidate == proposer.candidates[int(proposer._worth()[0].argmax())]
    proposer.observe(found.candidate, result(replay_table, found.candidate))
    assert decide(proposer, "first fit") is None


def test_untried_level_is_tried_before_a_measured_kind_is_refined(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    found = search_until(proposer, replay_table, "untried level")
    assert found is not None
    at = proposer.candidates.index(found.candidate)
    assert proposer._coverage.uncovered()[at]
    proposer._coverage._seen[:] = True
    assert decide(proposer, "untried level") is None


def test_predicted_gain_goes_on_without_gain_until_there_is_evidence(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer.speed[fastest(replay_table)] = 1e9  # no prediction reaches it
    found = decide(proposer, "predicted gain")
    assert isinstance(found, Proposal)
    assert found.note == f"no gain is predicted; checked, since fewer than {LEAST_EVIDENCE} configs are measured"
    for candidate in proposer.candidates[: LEAST_EVIDENCE - 1]:
        proposer.speed.setdefault(candidate, 1.0)
    proposer.speed |= dict.fromkeys(proposer.candidates[-LEAST_EVIDENCE:], 1.0)
    assert decide(proposer, "predicted gain") is None


def test_memory_limit_is_tested_by_a_candidate_predicted_not_to_fit(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    found = decide(proposer, "memory limit")
    assert isinstance(found, Proposal)
    assert "predicted not to fit" in found.note
    proposer._coverage._seen[:] = True
    assert decide(proposer, "memory limit") is None


def test_second_opinion_is_asked_before_the_predictor_ends_the_search(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    found = search_until(proposer, replay_table, "second opinion")
    assert found is not None
    reject_predictor(proposer)
    assert decide(proposer, "second opinion") is None


def test_sampler_goes_on_in_an_exhaustive_search(replay_table: ReplayTable) -> None:
    assert decide(make_proposer(replay_table), "sampler") is None
    found = decide(make_proposer(replay_table, exhaustive=True), "sampler")
    assert isinstance(found, Proposal)
    assert found.note == "Optuna's sampler"


def test_small_gain_stops_the_search_with_the_tolerance(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    stop = decide(proposer, "small gain")
    assert isinstance(stop, Stop)
    assert stop.reason is StopReason.SMALL_GAIN
    assert stop.sentence == "the predicted gain of going on is below 0.25 % (--exhaustive goes on)"
    proposer._pool.open_mask = np.zeros(len(proposer.candidates), dtype=bool)
    assert decide(proposer, "small gain") is None


def measure(proposer: Proposer, candidate: Candidate, speed: float) -> None:
    """Record a speed, while the predictor is not rejected."""
    proposer._model.table()
    proposer.observe(candidate, measured_as(candidate, speed))
    proposer._model.speed.credit = proposer._model.memory.credit = 1.0


def best_of_small_space() -> tuple[Proposer, Candidate]:
    """A search of which one candidate is measured."""
    proposer = small_space()
    best = next(c for c in proposer.candidates if c.stage == 1 and c.micro_batch == 2 and not c.checkpointing)
    measure(proposer, best, 100.0)
    return proposer, best


def test_untested_knob_turns_each_knob_of_the_best_cheapest_first() -> None:
    proposer, best = best_of_small_space()
    turned: list[str] = []
    while ways := proposer._knob_turns():
        costs = proposer._trial_costs()
        found = decide(proposer, "untested knob")
        assert isinstance(found, Proposal)
        cost = costs[proposer.candidates.index(found.candidate)]
        assert cost == min(costs[way.at] for way in ways)
        turned += [knob for knob, value in found.candidate.knobs if best.get(knob) not in (None, value)]
        measure(proposer, found.candidate, 50.0)
    assert decide(proposer, "untested knob") is None
    assert sorted(turned) == [
        "activation_checkpointing",
        "overlap_comm",
        "reduce_bucket_size",
        "train_micro_batch_size_per_gpu",
        "train_micro_batch_size_per_gpu",
        *3 * ["zero_stage"],
    ]


def test_untested_knobs_cost_at_most_a_fifth_of_the_remaining_budget() -> None:
    proposer, _ = best_of_small_space()
    costs, ways = proposer._trial_costs(), proposer._knob_turns()
    cheapest = min(float(costs[way.at]) for way in ways)
    (rule,) = (rule for rule in proposer.rules if rule.name == "untested knob")
    assert rule.decide(Decision(proposer._worth, 4.9 * cheapest)) is None
    assert rule.decide(Decision(proposer._worth, 5.1 * cheapest)) is not None
    assert rule.decide(Decision(proposer._worth, 4.1 * cheapest)) is None, "the share counts the first turn too"


@pytest.mark.parametrize(("faster", "doubtful"), [(1.0, False), (1.5, True)])
def test_doubtful_knob_is_turned_if_its_predicted_effects_were_wrong(faster: float, doubtful: bool) -> None:
    proposer, best = best_of_small_space()
    # no doubt of any knob, so that only the errors of this study count
    proposer.knobs = KnobRecord(proposer.candidates, {knob: 1e-4 for knob, _ in best.knobs})
    other = not best.get("overlap_comm")
    measure(proposer, best, 100.0)
    measure(proposer, best.but(zero_stage=2, train_micro_batch_size_per_gpu=1), 50.0)
    measure(proposer, best.but(zero_stage=2, train_micro_batch_size_per_gpu=1, overlap_comm=other), 50.0 * faster)
    (way,) = (way for way in proposer._knob_turns() if way.knob == "overlap_comm")
    assert proposer.candidates[way.at] == best.but(overlap_comm=other)
    assert (proposer._turn_gain(way) >= proposer.tolerance) == doubtful
    found = decide(proposer, "doubtful knob")
    most = max(proposer._knob_turns(), key=proposer._turn_gain)
    assert isinstance(found, Proposal)
    assert found.candidate == proposer.candidates[most.at]
    proposer.tolerance = 1.01 * proposer._turn_gain(most)
    assert decide(proposer, "doubtful knob") is None


def test_loose_bound_measures_the_candidate_that_makes_it_so_loose(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    assert decide(proposer, "loose bound") is None  # nothing has fitted
    fitting = [one for one in sorted(replay_table.rows, key=str) if result(replay_table, one).ok]
    for candidate in fitting[:LEAST_MEASURED]:
        proposer.observe(candidate, result(replay_table, candidate))
    before = math.expm1(proposer._bound()[0])
    assert before > LOOSE_BOUND
    claimed = proposer.confidence()
    assert claimed is not None
    assert claimed.left_share > before, "what is predicted not to fit may fit, and the best speed is noisy"
    found = decide(proposer, "loose bound")
    assert isinstance(found, Proposal)
    assert found.candidate in proposer.open_candidates
    assert found.note == f"up to {100 * before:.0f} % may be left"


def test_candidates_of_a_loose_bound_cost_at_most_a_fifth_of_the_remaining_budget(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    (rule,) = (rule for rule in proposer.rules if rule.name == "loose bound")
    cost = float(proposer._trial_costs().min())
    assert rule.decide(Decision(proposer._worth, left_seconds=4 * cost)) is None
    assert rule.decide(Decision(proposer._worth, left_seconds=1000 * cost)) is not None


def test_tight_bound_is_left_alone(replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make_proposer(replay_table)
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    monkeypatch.setattr("autotune.search.proposer.LOOSE_BOUND", math.expm1(proposer._bound()[0]))
    assert decide(proposer, "loose bound") is None


def test_predictor_that_is_rejected_or_exhaustive_search_turns_no_knob(replay_table: ReplayTable) -> None:
    for exhaustive in (True, False):
        proposer = make_proposer(replay_table, exhaustive=exhaustive)
        proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
        reject_predictor(proposer)
        assert decide(proposer, "untested knob") is None
        assert decide(proposer, "doubtful knob") is None
        assert decide(proposer, "loose bound") is None


def test_first_trials_of_a_short_budget_are_predicted_to_take_a_quarter_of_it(
    replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.proposer.LEAST_SHARE_SECONDS", 0.0)

    def first_seconds(budget: float) -> float:
        proposer = make_proposer(replay_table)
        proposal = proposer.next(budget)
        assert proposal is not None
        forecast = proposer._model.forecast()
        at = proposer.candidates.index(proposal.candidate)
        longest = proposer._costs.measuring_seconds(forecast.step * np.exp(forecast.sigma), proposer._accumulation)
        return float(longest[at])

    usual = first_seconds(1e6)
    assert first_seconds(3.9 * usual) < 3.9 / 4 * usual < usual


def test_work_of_a_script_per_micro_batch_is_unknown_until_two_sizes_are_measured() -> None:
    table = load_replay_table(SCRIPT_TABLE)
    proposer = make_proposer(table)
    small, larger = (c for c in table.rows if c.stage == 0 and c.micro_batch <= 4)
    proposer.observe(small, result(table, small))
    unknown = proposer._unknown_overhead()
    assert unknown[proposer.candidates.index(larger)] == pytest.approx(0.5 * math.log(4))
    assert unknown[proposer.candidates.index(small)] == 0
    proposer.observe(larger, result(table, larger))
    assert not proposer._unknown_overhead().any()


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
    for _ in range(20):
        proposal = proposer.next()
        if proposal is None:
            break
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
        if (confidence := proposer.confidence()) is not None:
            left.append(confidence.left_share)
            assert confidence.trials == len(proposer._answers)
    known = [share for share in left if share < math.inf]
    assert len(left) - len(known) == LEAST_MEASURED - 1, "one for each candidate that fits"
    assert known[-1] < 0.5 * known[0]
    assert 0 < left[-1] < 0.1


def test_nothing_is_said_of_untried_candidates_that_are_ruled_out(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    proposer.observe(fastest(replay_table), result(replay_table, fastest(replay_table)))
    for stop, untried in ((StopReason.BUDGET_USED, True), (StopReason.ALL_TRIED, False)):
        proposer.stopped = stop.stop()
        confidence = proposer.confidence()
        assert confidence is not None
        assert confidence.untried is untried


def test_every_rule_has_a_test() -> None:
    """A new rule is named in this file."""
    text = Path(__file__).read_text()
    rules = make_proposer(load_replay_table(TABLE)).rules
    assert all(f'"{rule.name}"' in text for rule in rules)
