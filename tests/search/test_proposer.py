from pathlib import Path

import numpy as np

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job, traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import parse_space
from autotune.search.proposer import Proposer
from autotune.search.pruning import Dominance
from autotune.search.stopping import StopReason
from autotune.search.surrogate import first_order_key
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayTable
from tests.conftest import make_candidate, make_job

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def needs_no_less(candidate: Candidate, other: Candidate) -> bool:
    return bool(Dominance([candidate, other]).at_least_as_large(other)[0])


def make_proposer(replay_table: ReplayTable, **options: object) -> Proposer:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    predictor = Predictor(job, hardware, trace_job(job))
    candidates = sorted(replay_table.rows, key=str)
    return Proposer(candidates, space, 0, predictor, **options)  # type: ignore[arg-type]


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
    assert proposer.stopped is not None
    assert proposer.stopped.reason is StopReason.SMALL_GAIN
    best = min(replay_table.seconds_per_sample(c) for c in seen if replay_table.rows[c].kind is OutcomeKind.OK)
    assert replay_table.best_step_seconds / best > 0.97


def test_exhaustive_goes_on_with_optunas_sampler(replay_table: ReplayTable) -> None:
    proposer, notes = make_proposer(replay_table, exhaustive=True), []
    for _ in range(60):
        proposal = proposer.next()
        assert proposal is not None
        notes.append(proposal.note)
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    assert "Optuna's sampler" in notes
    assert proposer.stopped is None


def test_a_kernel_that_crashes_everywhere_is_given_up() -> None:
    job, hardware = make_job(), named_hardware("rtx4090", 2)
    space = parse_space(
        "knobs: {zero_stage: [1, 2], train_micro_batch_size_per_gpu: [1, 2], "
        "attention: [sdpa, flex_attention], overlap_comm: [true, false]}"
    )
    proposer = Proposer(space.candidates(job), space, 0, traced_predictor(job, hardware))
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
    assert first is not None
    assert replay_table.rows[first.candidate].kind is OutcomeKind.OK


def test_an_out_of_memory_rules_out_what_needs_no_less(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    out = next(
        c
        for c, row in replay_table.rows.items()
        if row.kind is OutcomeKind.OOM_DEVICE and c.stage == 2 and c.micro_batch > 4
    )
    proposer.observe(out, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB))
    left = set(proposer.open_candidates)
    assert out not in left
    assert not any(needs_no_less(c, out) for c in list(left)[::7])
    assert any("needs no less memory" in reason for reason in proposer.skips())
    true_ok = {c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK}
    assert true_ok <= left  # what it rules out really does not fit


def test_dominance_compares_memory_only_where_it_holds_for_every_model() -> None:
    low = make_candidate(2, 4)
    assert needs_no_less(make_candidate(2, 8), low)
    assert not needs_no_less(make_candidate(1, 4), low), "stage 1 has buffers of its own"
    assert not needs_no_less(make_candidate(2, 2), low)
    assert not needs_no_less(make_candidate(3, 8), low)
    assert not needs_no_less(make_candidate(0, 8), low)
    assert not needs_no_less(make_candidate(2, 8, activation_checkpointing=True), low)
    assert needs_no_less(low, make_candidate(2, 4, activation_checkpointing=True))
    assert needs_no_less(make_candidate(2, 4, overlap_comm=True), make_candidate(2, 4, overlap_comm=False))


def test_hopeless_candidates_are_skipped_and_counted(replay_table: ReplayTable) -> None:
    proposer = make_proposer(replay_table)
    table = proposer._model.table()
    hopeless = proposer._model.forecast().hopeless
    assert hopeless.any()
    worth, _ = proposer._worth()
    assert np.isneginf(worth[hopeless]).all()
    assert table.peak[hopeless].min() > proposer.hardware.capacity_bytes
    reason, count = next((r, n) for r, n in proposer.skips().items() if "predicted to need" in r)
    assert "beyond the interval" in reason
    assert count == int(hopeless.sum())


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
    import dataclasses

    job, space = replay_table.job(), replay_table.space()
    small = dataclasses.replace(replay_table.hardware(), memory_cap_bytes=GIB // 2)
    candidates = sorted(replay_table.rows, key=str)
    proposer = Proposer(candidates, space, 0, Predictor(job, small, trace_job(job)))
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


def small_space(buckets: str = "[50000000, 500000000]") -> Proposer:
    job, hardware = make_job(), named_hardware("h100", 2)
    space = parse_space(
        "knobs: {zero_stage: [0, 1, 2, 3], train_micro_batch_size_per_gpu: [1, 2, 4], "
        f"activation_checkpointing: [true, false], reduce_bucket_size: {buckets}, overlap_comm: [true, false]}}"
    )
    return Proposer(space.candidates(job), space, 0, traced_predictor(job, hardware))


def test_what_matters_most_is_seen_at_every_level_before_anything_else_is_turned() -> None:
    """Whatever is measured: here nothing but the micro-batch matters, and a larger one is slower, as nobody expects."""
    proposer, kinds, refined_at = small_space(), [], None
    for trial in range(12):
        proposal = proposer.next()
        if proposal is None:
            break
        kind = first_order_key(proposal.candidate)
        if kind in kinds and refined_at is None:
            refined_at = trial
        kinds.append(kind)
        proposer.observe(proposal.candidate, measured_as(proposal.candidate, 100.0 / proposal.candidate.micro_batch))
    seen = {stage for stage, *_ in kinds[:refined_at]}
    assert seen == {0, 1, 2, 3}
    assert {checkpointing for _, _, _, checkpointing, *_ in kinds[:refined_at]} == {True, False}
    best = max(proposer.speed, key=proposer.speed.__getitem__)
    assert best.micro_batch == 1


def test_second_order_knobs_are_not_turned_where_they_cannot_make_up_for_the_rest() -> None:
    proposer = small_space("[5000000, 50000000, 500000000]")
    slow = [c for c in proposer.candidates if c.stage == 3 and c.micro_batch == 4 and not c.checkpointing]
    fast = next(c for c in proposer.candidates if c.stage == 0 and c.micro_batch == 1)
    proposer.observe(fast, measured_as(fast, 100.0))
    for candidate in slow[:3]:
        proposer.observe(candidate, measured_as(candidate, 40.0))
    _, gain = proposer._worth()
    left = [proposer.candidates.index(c) for c in slow[3:]]
    assert gain[left].max() < 0.001


def test_a_search_does_not_end_before_a_second_opinion(replay_table: ReplayTable) -> None:
    proposer, notes = make_proposer(replay_table), []
    while (proposal := proposer.next()) is not None:
        notes.append(proposal.note)
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    assert sum("by measurements alone" in note for note in notes) >= 1
    assert proposer.stopped is not None


def test_what_fitted_in_another_space_has_not_failed(replay_table: ReplayTable) -> None:
    """A study that goes on in another space recalls what it has measured outside of that."""
    fitting = [c for c in sorted(replay_table.rows, key=str) if replay_table.rows[c].kind is OutcomeKind.OK]
    proposer = make_proposer(replay_table)
    for candidate in fitting[:10]:
        other = candidate.but(gradient_accumulation_steps=77)
        assert other not in replay_table.rows
        proposer.observe(other, result(replay_table, candidate))
    proposal = proposer.next()
    assert proposal is not None
    assert "least memory" not in proposal.note
