"""A study that is searched again in another space: what that has not cannot win, and no space is refused by what is stored."""

from collections.abc import Callable
from pathlib import Path

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.search.proposer import Proposer
from autotune.search.study import StudyStore
from autotune.search.tuner import NullObserver, SearchSummary, Tuner
from benchmarks.search.replay import ReplayExecutor, ReplayTable

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


class Heard(NullObserver):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def searched(
    replay_table: ReplayTable, store: StudyStore, allowed: Callable[[Candidate], bool] = lambda one: True
) -> tuple[SearchSummary, list[str]]:
    """A call whose space has the candidates that are allowed."""
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    candidates = [one for one in sorted(replay_table.rows, key=str) if allowed(one)]
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace_job(job)))
    heard = Heard()
    executor = ReplayExecutor(replay_table, 0)
    tuner = Tuner(store, executor, proposer, budget_seconds=900, observer=heard)
    return tuner.run(), heard.lines


def test_only_what_the_present_space_has_wins(replay_table: ReplayTable) -> None:
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    first, lines = searched(replay_table, store)
    assert first.winner is not None
    assert first.verified
    assert not [line for line in lines if "space" in line]
    best, before = first.winner.candidate, len(store.records())

    second, lines = searched(replay_table, store, lambda one: one.micro_batch < best.micro_batch)
    assert second.winner is not None
    assert second.verified
    assert second.winner.candidate.micro_batch < best.micro_batch
    assert store.winner == second.winner
    facts = store.facts()
    rivals = (*facts.tied, *facts.slower, *facts.faster)
    assert all(rival.candidate.micro_batch < best.micro_batch for rival in rivals)
    aside = {record.number: record for record in store.records() if record.number in store.set_aside}
    assert {one.candidate.micro_batch >= best.micro_batch for one in aside.values()} == {True}
    assert all(
        "not in the space" in facts.remarks[n] for n, one in aside.items() if one.outcome and one.outcome.measurement
    )
    told = [line for line in lines if "not in this call's space" in line]
    assert len(told) == 1
    assert all(record.candidate.micro_batch < best.micro_batch for record in store.records()[before:])

    third, lines = searched(replay_table, store)
    assert third.winner.candidate.micro_batch == best.micro_batch, "the first space again: what it found counts again"
    assert not [line for line in lines if "space" in line]
    assert not store.set_aside


def test_what_is_faster_elsewhere_does_not_end_the_search(replay_table: ReplayTable) -> None:
    """Nothing of the space comes near what another space had: that is no reason to measure nothing of it."""
    store = StudyStore.in_memory(replay_table.job(), replay_table.hardware(), replay_table.space())
    searched(replay_table, store)
    before = len(store.records())
    slow = lambda one: one.micro_batch == 1 and one.stage == 3  # noqa: E731
    result, _ = searched(replay_table, store, slow)
    assert slow(result.winner.candidate)
    assert len({record.candidate for record in store.records()[before:]}) > 1
