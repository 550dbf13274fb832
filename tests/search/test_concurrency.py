"""Several workers of one search: who measures beside whom, and what becomes of a failure."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind, Source
from autotune.search.concurrency import SearchWorkers, host_bound
from autotune.search.proposer import Proposer, first_order_key
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH
from autotune.search.tuner import SearchSummary
from benchmarks.search.replay import ReplayExecutor, ReplaySession, ReplayTable
from tests.conftest import make_candidate
from tests.search import test_tuner

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"
OFFLOADED = make_candidate(2, offload_optimizer="cpu")


def test_what_offloads_is_bound_by_the_host() -> None:
    assert host_bound(OFFLOADED)
    assert host_bound(make_candidate(3, offload_param="nvme"))
    assert not host_bound(make_candidate(3))


@pytest.mark.parametrize(("alone", "beside"), [(host_bound, False), (lambda candidate: False, True)])
def test_host_bound_trials_have_the_machine_to_themselves(alone: Callable[[Candidate], bool], beside: bool) -> None:
    workers, lock, meeting = SearchWorkers(alone), threading.Lock(), threading.Barrier(3)
    running: list[Candidate] = []
    seen: list[list[Candidate]] = []  # what ran when a trial began

    def work(worker: int) -> None:
        for turn in range(13):  # in the first all three meet, however slowly they come
            offloads = turn % 4 == worker if turn else beside and worker == 0
            candidate = OFFLOADED if offloads else make_candidate(worker, 1 + turn)
            with workers.locked(), workers.claim(candidate), workers.device_section(candidate), workers.unlocked():
                with lock:
                    running.append(candidate)
                    seen.append(list(running))
                if not turn:
                    meeting.wait(60)
                time.sleep(0.005)
                with lock:
                    running.remove(candidate)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert len(seen) == 39
    assert max(map(len, seen)) > 1, "others are measured beside each other"
    mixed = [group for group in seen if len(group) > 1 and OFFLOADED in group]
    assert bool(mixed) is beside
    assert not workers.at_work


class Meeting:
    """Where workers who run at once see each other, also where proposals take longer than trials: who is measuring waits a moment
    for another who is, until two have met."""

    def __init__(self) -> None:
        self._here, self._met, self._seen, self._changed = 0, False, False, threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._here += 1
            self._met |= self._here > 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._met, 1.0)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._here -= 1

    def see(self) -> None:
        """Waits a moment for one who is measuring, until one was seen."""
        with self._changed:
            self._seen |= self._changed.wait_for(lambda: self._seen or self._here > 0, 1.0)


class Slow(ReplayExecutor):
    """A table that takes a moment; it keeps when which candidate was measured.

    Args:
        fails: raises for the trial of this number.
        meeting: of those that are to be measured beside each other.
    """

    def __init__(
        self, replay_table: ReplayTable, fails: int | None = None, seconds: float = 0.01, meeting: Meeting | None = None
    ) -> None:
        super().__init__(replay_table, 0)
        self._meeting = meeting
        self.measured: list[tuple[float, float, Candidate]] = []
        self.opened = self.closed = 0
        self._fails, self._seconds = fails, seconds

    def open(self, print_line: Callable[[str], None]) -> None:
        self.opened += 1

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session, executor = super().session(candidate, name, patience), self
        measure = session.measure

        def slowly(candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
            if executor._fails == len(executor.measured):
                raise UserError("the job fails by itself")
            began = time.monotonic()
            with nullcontext() if executor._meeting is None or host_bound(candidate) else executor._meeting:
                time.sleep(executor._seconds)
            outcome = measure(candidate, measure_spec, deadline_seconds)
            if not measure_spec.certify and not measure_spec.resume:
                executor.measured.append((began, time.monotonic(), candidate))
            return outcome

        session.measure = slowly  # type: ignore[method-assign]
        return session


def search(
    replay_table: ReplayTable, executors: list[Slow], workers: SearchWorkers | None = None, **options: object
) -> tuple[SearchSummary, StudyStore]:
    first, *beside = executors
    result, _, store = test_tuner.search(replay_table, 1800, executor=first, beside=beside, workers=workers, **options)
    return result, store


def test_workers_repeat_nothing_and_find_what_one_finds(replay_table: ReplayTable) -> None:
    meeting = Meeting()
    executors = [Slow(replay_table, meeting=meeting) for _ in range(3)]
    result, store = search(replay_table, executors)
    searched = [record.candidate for record in store.records() if record.role == SEARCH]
    assert len(searched) == len(set(searched)), "nothing is repeated"
    assert sorted(map(str, searched)) == sorted(str(one) for e in executors for _, _, one in e.measured), "nor lost"
    assert all(executor.measured for executor in executors)
    assert [executor.opened for executor in executors] == [0, 1, 1], "the first is open already"
    assert result.verified
    assert replay_table.best_step_seconds / replay_table.seconds_per_sample(result.winner.candidate) > 0.95
    spans = sorted((began, ended, one) for e in executors for began, ended, one in e.measured)
    together = [(a, b) for (_, ended, a), (began, _, b) in itertools.pairwise(spans) if began < ended]
    assert together, "they measure at once"
    assert not [pair for pair in together if any(map(host_bound, pair))]


class Heavy(Slow):
    """One whose opening and whose sessions' ends take the host's time; `busy` has when they did, and for what."""

    def __init__(
        self, replay_table: ReplayTable, busy: list[tuple[float, float, Candidate | None]], meeting: Meeting
    ) -> None:
        super().__init__(replay_table, meeting=meeting)
        self._busy = busy

    def open(self, print_line: Callable[[str], None]) -> None:
        began = time.monotonic()
        time.sleep(0.3)
        self._busy.append((began, time.monotonic(), None))

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session, busy, meeting = super().session(candidate, name, patience), self._busy, self._meeting

        def close() -> None:
            began = time.monotonic()
            time.sleep(0.01)
            if meeting is not None and not host_bound(candidate):
                meeting.see()
            busy.append((began, time.monotonic(), candidate))

        session.close = close  # type: ignore[method-assign]
        return session


@pytest.mark.slow
def test_nothing_is_measured_beside_an_opening_nor_alone_beside_an_end(replay_table: ReplayTable) -> None:
    busy: list[tuple[float, float, Candidate | None]] = []
    meeting = Meeting()
    executors = [Heavy(replay_table, busy, meeting) for _ in range(3)]
    search(replay_table, executors)  # type: ignore[arg-type]
    spans = [span for executor in executors for span in executor.measured]
    assert sum(one is None for _, _, one in busy) == 2
    assert min(began for began, _, _ in spans) > max(ended for _, ended, one in busy if one is None)
    together = [(one, a) for began, ended, one in busy if one for b, e, a in spans if b < ended and began < e]
    assert not [pair for pair in together if any(map(host_bound, pair))]
    assert any(map(host_bound, (one for _, _, one in busy if one))), "it would be seen"
    assert together, "others do go on"


def test_one_that_cannot_be_opened_stops_them_all(replay_table: ReplayTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(print_line: Callable[[str], None]) -> None:
        raise UserError("no such device")

    executors = [Slow(replay_table) for _ in range(3)]
    monkeypatch.setattr(executors[1], "open", broken)
    with pytest.raises(UserError, match="no such device"):
        search(replay_table, executors)
    assert not any(executor.measured for executor in executors)


def test_a_number_of_trials_is_everybodys(replay_table: ReplayTable) -> None:
    result, store = search(replay_table, [Slow(replay_table) for _ in range(4)], max_trials=7)
    assert sum(record.role == SEARCH for record in store.records()) == 7
    assert result.stop_sentence == "--max-trials 7 reached"


@pytest.mark.parametrize("which", [0, 1])
def test_one_that_fails_stops_them_all(which: int, replay_table: ReplayTable) -> None:
    executors = [Slow(replay_table, 2 if which == number else None) for number in range(2)]
    workers = SearchWorkers()
    with pytest.raises(UserError, match="the job fails by itself"):
        search(replay_table, executors, workers)
    assert workers.failed
    assert not workers.at_work


def test_what_runs_elsewhere_is_not_handed_out(replay_table: ReplayTable) -> None:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    candidates = sorted(replay_table.rows, key=str)
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace_job(job)))
    running: list[Candidate] = []
    while (proposal := proposer.next()) is not None and len(running) < 5:
        running.append(proposal.candidate)
        proposer.reserve(running)
    assert len({first_order_key(candidate) for candidate in running}) == 5, "what is like it comes later"
    assert set(proposer.open_candidates) == set(candidates), "and all may still be tried"
    # where only what is like it is left, that is handed out
    only = [candidate for candidate in candidates if candidate.family == running[0].family]
    few = Proposer(only, space, Predictor(job, hardware, trace_job(job)))
    first = few.next()
    few.reserve([first.candidate])
    second = few.next()
    assert second.candidate != first.candidate
    few.reserve(only)
    assert few.next() is None
    few.reserve([])
    assert few.next() is not None


def test_with_nobody_beside_it_nothing_is_kept_back(replay_table: ReplayTable) -> None:
    one, store = search(replay_table, [Slow(replay_table, seconds=0.0)])
    assert one.verified
    assert all(r.outcome and r.outcome.kind in (OutcomeKind.OK, OutcomeKind.OOM_DEVICE) for r in store.records())


class Crowded(Slow):
    """Main memory is enough for one trial at a time, but for those of one engine: never.

    Args:
        running: of all executors of the machine.
        meeting: the first trials of both wait for each other.
    """

    def __init__(
        self, replay_table: ReplayTable, running: list[Candidate], hungry: Candidate, meeting: threading.Barrier
    ) -> None:
        super().__init__(replay_table)
        self._running, self._hungry, self._first = running, hungry, meeting

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session, executor = super().session(candidate, name, patience), self
        measure = session.measure

        def crowded(candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
            executor._running.append(candidate)
            if not executor.measured:
                executor._first.wait(60)
            try:
                outcome = measure(candidate, measure_spec, deadline_seconds)
                if len(executor._running) > 1 or candidate.family == executor._hungry.family:
                    return Outcome(OutcomeKind.OOM_HOST, reason="killed", evidence="SIGKILL", source=Source.SIGNAL)
            finally:
                executor._running.remove(candidate)
            return outcome

        session.measure = crowded  # type: ignore[method-assign]
        return session


def test_main_memory_that_ran_out_beside_others_speaks_against_nobody(replay_table: ReplayTable) -> None:
    running: list[Candidate] = []
    hungry = next(one for one in sorted(replay_table.rows, key=str) if replay_table.rows[one].kind is OutcomeKind.OK)
    meeting = threading.Barrier(2)
    executors: list[Slow] = [Crowded(replay_table, running, hungry, meeting) for _ in range(2)]
    _, store = search(replay_table, executors, SearchWorkers(lambda candidate: False), max_trials=40)
    outcomes = [(r.candidate, r.outcome) for r in store.records() if r.role == SEARCH and r.outcome]
    excused = [one for one, outcome in outcomes if outcome.kind is OutcomeKind.INTERRUPTED]
    assert excused, "it ran out"
    assert {outcome.reason for _, outcome in outcomes if outcome.kind is OutcomeKind.INTERRUPTED} == {
        "killed, while others ran beside it; it is tried again alone"
    }
    assert len(excused) == len(set(excused)), "once"
    assert {one.family for one, outcome in outcomes if outcome.kind is OutcomeKind.OOM_HOST} <= {hungry.family}
    again = [one for one, outcome in outcomes if one in excused and outcome.kind is OutcomeKind.OK]
    assert again, "alone it runs"
