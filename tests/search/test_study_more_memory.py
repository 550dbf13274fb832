"""A study that goes on with more memory than it had: what ran out of less may fit now."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.search.proposer import Proposer
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, VERIFY, Record
from autotune.search.tuner import SearchSummary, Tuner
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayExecutor, ReplaySession, ReplayTable, load_replay_table

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"
LITTLE, MUCH = 12 * GIB, 22 * GIB


@pytest.fixture(scope="module")
def replay_table() -> ReplayTable:
    """Of that table one engine per stage that fits with little memory, with all its rungs."""
    whole = load_replay_table(TABLE)
    families: dict[int, object] = {}
    for candidate, row in sorted(whole.rows.items(), key=lambda item: str(item[0])):
        if candidate.micro_batch == 1 and row.kind is OutcomeKind.OK and row.peak_gib * GIB < LITTLE:
            families.setdefault(candidate.stage, candidate.family)
    some = {c: row for c, row in whole.rows.items() if c.family in families.values()}
    return dataclasses.replace(whole, rows=some)


def with_free(replay_table: ReplayTable, free_bytes: int) -> Hardware:
    whole = replay_table.hardware()
    return dataclasses.replace(whole, taken_bytes=whole.memory_bytes - free_bytes)


class Shared(ReplayExecutor):
    """The table's cards, of which others hold a part: what needs more than the rest runs out."""

    def __init__(self, replay_table: ReplayTable, capacity_bytes: int, *, says: bool) -> None:
        super().__init__(replay_table)
        self.capacity_bytes, self.says = capacity_bytes, says

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        executor = self

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                if executor.replay_table.rows[candidate].peak_gib * GIB <= executor.capacity_bytes:
                    return super().measure(candidate, measure_spec, deadline_seconds)
                executor.advance(5.0)
                self.alive = False
                told = executor.capacity_bytes if executor.says else None
                return Outcome(
                    OutcomeKind.OOM_DEVICE, Phase.BACKWARD, missing_bytes=GIB // 4, capacity_bytes=told, seconds=5.0
                )

        return Session(self, candidate)


def call(
    store: StudyStore, replay_table: ReplayTable, free_bytes: int, *, says: bool = True
) -> tuple[SearchSummary, list[Record]]:
    """An exhaustive call with so much memory: how it ended, and its own trials of the search."""
    job, space, hardware = replay_table.job(), replay_table.space(), with_free(replay_table, free_bytes)
    candidates, before = sorted(replay_table.rows, key=str), len(store.records())
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace_job(job)), exhaustive=True)
    executor = Shared(replay_table, free_bytes, says=says)
    summary = Tuner(store, executor, proposer, budget_seconds=7200).run()
    return summary, [record for record in store.records()[before:] if record.role == SEARCH]


def study(replay_table: ReplayTable) -> StudyStore:
    return StudyStore.in_memory(replay_table.job(), with_free(replay_table, LITTLE), replay_table.space())


def ran_out(records: list[Record]) -> set[Candidate]:
    return {record.candidate for record in records if record.outcome and record.outcome.kind is OutcomeKind.OOM_DEVICE}


def test_what_ran_out_is_tried_again_with_more_memory_and_only_then(replay_table: ReplayTable) -> None:
    store = study(replay_table)
    first = ran_out(call(store, replay_table, LITTLE)[1])
    assert first
    assert store.failed().keys() >= first
    for free in (LITTLE, LITTLE + GIB // 8):
        assert not first & {record.candidate for record in call(store, replay_table, free)[1]}, (
            "it has as much as it had"
        )
    store.note_hardware(with_free(replay_table, MUCH))
    assert not store.failed().keys() & first
    summary, again = call(store, replay_table, MUCH)
    fitting = {
        c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and LITTLE < row.peak_gib * GIB <= MUCH
    }
    assert fitting <= {record.candidate for record in again}, "what no trial has ruled out with so much memory"
    assert first & fitting
    assert summary.winner.candidate in fitting
    assert not call(store, replay_table, LITTLE)[1], "what ran out of more runs out of less"


def test_a_study_of_before_is_taken_as_it_was(replay_table: ReplayTable) -> None:
    """Nothing says with how much memory its trials ran out."""
    store = study(replay_table)
    first = ran_out(call(store, replay_table, LITTLE, says=False)[1])
    assert first
    assert not first & {record.candidate for record in call(store, replay_table, MUCH)[1]}


def called(replay_table: ReplayTable, store: StudyStore, free: int, hardware: Hardware) -> Proposer:
    """A proposer after a call that was cancelled at once, and has learnt what the study knows."""
    job = replay_table.job()
    predictor = Predictor(job, hardware, trace_job(job))
    proposer = Proposer(sorted(replay_table.rows, key=str), replay_table.space(), predictor)
    executor = Shared(replay_table, free, says=True)
    Tuner(store, executor, proposer, budget_seconds=60, cancelled=lambda: True).run()
    return proposer


@pytest.mark.parametrize("role", [VERIFY, RESUME])
@pytest.mark.parametrize(("capacity_bytes", "wins"), [(LITTLE, True), (MUCH, False), (None, False)])
def test_what_verification_ran_out_of_less_memory_with_may_win(
    replay_table: ReplayTable, role: str, capacity_bytes: int | None, wins: bool
) -> None:
    best = min(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and row.peak_gib * GIB < LITTLE),
        key=replay_table.seconds_per_sample,
    )
    only = dataclasses.replace(replay_table, rows={best: replay_table.rows[best]})
    store, row, rate = study(only), only.rows[best], 1 / only.seconds_per_sample(best)
    assert row.step_seconds is not None
    measured = Measurement(row.step_seconds, 0.01, 4, rate, rate, int(row.peak_gib * GIB))
    store.finish(store.start(best, only.space()), Outcome(OutcomeKind.OK, measurement=measured))
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.SAVE, reason="gathered save", capacity_bytes=capacity_bytes)
    store.finish(store.start(best, only.space(), role), out)
    winner = call(store, only, MUCH)[0].winner
    assert (winner is not None and winner.role == VERIFY) is wins


@pytest.mark.parametrize(("role", "told"), [(SEARCH, True), (VERIFY, False), (RESUME, False)])
def test_what_ran_out_of_less_memory_teaches_what_a_search_needs(
    replay_table: ReplayTable, role: str, told: bool
) -> None:
    """And closes nothing. Verification takes more than a search does."""
    store, candidate = study(replay_table), min(replay_table.rows, key=str)
    out = Outcome(OutcomeKind.OOM_DEVICE, capacity_bytes=LITTLE)
    store.finish(store.start(candidate, replay_table.space(), role), out)
    proposer = called(replay_table, store, MUCH, with_free(replay_table, MUCH))
    assert (proposer.predictor._seen == {candidate: out}) is told
    assert len(proposer.open_candidates) == len(replay_table.rows)


def test_predictions_learn_that_more_was_needed_than_there_was_then(replay_table: ReplayTable) -> None:
    job, hardware, candidates = replay_table.job(), with_free(replay_table, MUCH), sorted(replay_table.rows, key=str)
    predictor = Predictor(job, hardware, trace_job(job))
    peaks = predictor.table(candidates).peak
    at = int(np.argmin(abs(peaks - 0.75 * MUCH)))
    before = float(peaks[at])

    def after(capacity_bytes: int | None) -> tuple[float, float]:
        """Its peak by the predictor, and by the belief."""
        proposer = Proposer(candidates, replay_table.space(), Predictor(job, hardware, trace_job(job)))
        proposer.observe(candidates[at], Outcome(OutcomeKind.OOM_DEVICE, capacity_bytes=capacity_bytes))
        return float(proposer.predictor.table(candidates).peak[at]), math.exp(proposer._forecast.peak.mean[at])

    then, now, unknown = after(LITTLE), after(MUCH), after(None)
    assert then[0] == pytest.approx(before, rel=0.02), "it was predicted to need more than that"
    assert now[0] > before, "by its constants; the belief knows the candidate itself"
    assert then[1] == pytest.approx(before, rel=0.1)
    assert now[1] > 0.98 * MUCH
    assert unknown == now


@pytest.mark.parametrize(
    ("machine", "capacity_gib", "outgrew"),
    [
        ({}, 12.0, True),
        ({}, 21.8, False),
        ({}, 22.0, False),
        ({}, 23.0, False),
        ({"memory_cap_bytes": 12 * GIB}, 12.0, False),
        ({"device": "cpu"}, 20.0, False),
        ({"device": "cpu"}, 12.0, True),
        ({"unified": True}, 20.0, False),
    ],
)
def test_clearly_less(machine: dict[str, object], capacity_gib: float, outgrew: bool) -> None:
    hardware = Hardware("cuda", "x", 2, 24 * GIB, None, 64 * GIB, taken_bytes=2 * GIB)
    hardware = dataclasses.replace(hardware, **machine)  # type: ignore[arg-type]
    assert hardware.outgrew(OutcomeKind.OOM_DEVICE, int(capacity_gib * GIB)) is outgrew
    assert not hardware.outgrew(OutcomeKind.OOM_DEVICE, None)


@pytest.mark.parametrize(("then_gib", "again"), [(32, True), (56, False), (None, False)])
def test_what_ran_out_of_less_main_memory_is_tried_again_and_teaches_nothing(
    replay_table: ReplayTable, then_gib: int | None, again: bool
) -> None:
    """What main memory there is differs more from day to day than a card's."""
    store, candidate = study(replay_table), min(replay_table.rows, key=str)
    out = Outcome(OutcomeKind.OOM_HOST, capacity_bytes=then_gib and then_gib * GIB)
    store.finish(store.start(candidate, replay_table.space()), out)
    hardware = dataclasses.replace(with_free(replay_table, LITTLE), host_memory_bytes=64 * GIB)
    store.note_hardware(hardware)
    assert (candidate not in store.failed()) is again
    proposer = called(replay_table, store, LITTLE, hardware)
    assert (len(proposer.open_candidates) == len(replay_table.rows)) is again
    assert proposer._host_ran_out is not again
