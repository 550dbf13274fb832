"""Several tuners of one study: who lives, who has which trial, and what becomes of that of one who died."""

import dataclasses
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest

from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search import storage
from autotune.search.proposer import Proposer
from autotune.search.storage import lock_log_dir
from autotune.search.study import StudyStore
from autotune.search.trials import (
    ABANDONED,
    DIED,
    DIED_TWICE,
    SEARCH,
    VERIFY,
    MeasuredHere,
    kept_if_it_fails,
    outcomes_kept_in_folder,
)
from autotune.search.tuner import SearchSummary, Tuner
from autotune.util.units import MIB
from benchmarks.search.replay import ReplayExecutor, ReplaySession, ReplayTable, load_replay_table
from tests.conftest import make_candidate, make_job, wait_until

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"
SPACE = load_space("cpu_demo")
OK = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.1, 3, 8.0, 256.0, 100 * MIB))
ELSEWHERE = "worker-2/12345678-1/77-1234/abcdef"  # a tuner on another machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.search.study.HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setitem(storage._HEARTBEAT, "grace_period", 1)


def opened(url: str, folder: Path) -> StudyStore:
    store, _ = StudyStore.create_or_resume("s", url, folder, make_job(), detect("cpu", 2), SPACE)
    store.share(print)
    return store


def test_of_two_that_want_the_same_one_has_it(shared_url: str, tmp_path: Path) -> None:
    stores = [opened(shared_url, tmp_path) for _ in range(3)]
    try:
        for round in range(4):
            candidate = make_candidate(round % 4, 1 + round)
            with ThreadPoolExecutor(3) as pool:
                numbers = list(pool.map(lambda store, c=candidate: store.claim(c, SPACE, SEARCH), stores))
            won = [store for store, number in zip(stores, numbers, strict=True) if number is not None]
            assert len(won) == 1, numbers
            (number,) = (number for number in numbers if number is not None)
            won[0].finish(number, OK)
            late = next(store for store in stores if store is not won[0])
            assert late.claim(candidate, SPACE, SEARCH) is None, "it was measured meanwhile"
            assert late.claim(candidate, SPACE, VERIFY, known=[number]) is not None, "another role is another trial"
        assert len([record for record in stores[0].records() if record.role == SEARCH]) == 4, "claims leave nothing"
    finally:
        for store in stores:
            store.leave()


@pytest.mark.usefixtures("quick")
def test_a_trial_without_heartbeats_is_closed_and_its_candidate_tried_again(shared_url: str, tmp_path: Path) -> None:
    mine, theirs = opened(shared_url, tmp_path), opened(shared_url, tmp_path)
    try:
        theirs._left.set()  # its connection is cut
        number = theirs.claim(make_candidate(0), SPACE, SEARCH)
        assert number is not None
        assert mine.claim(make_candidate(0), SPACE, SEARCH) is None
        running = mine.running_elsewhere()
        assert [(record.number, record.tuner) for record in running] == [(number, theirs.tuner)]
        wait_until(lambda: not mine.running_elsewhere(), "the end of the grace period", 20)
        assert mine.record(number).outcome == DIED
        again = mine.claim(make_candidate(0), SPACE, SEARCH, known=[number])
        assert again is not None
        mine.finish(again, OK)
        theirs.finish(number, OK)  # it lived: its measurement is kept
        assert Counter(r.outcome.kind for r in mine.records() if r.outcome) == {
            OutcomeKind.OK: 2,
            OutcomeKind.INTERRUPTED: 1,
        }
    finally:
        mine.leave()
        theirs.leave()


@pytest.mark.usefixtures("quick")
def test_a_trial_that_was_killed_before_its_first_heartbeat_is_closed(
    shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = opened(shared_url, tmp_path), opened(shared_url, tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr("autotune.search.study.record_heartbeat", lambda trial: None)
        theirs._left.set()
        theirs.start(make_candidate(0), SPACE)
    wait_until(lambda: mine.close_interrupted() == 1, "the end of the grace period", 20)
    mine.leave()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["killed", "ended by an error"])
def test_only_a_process_that_died_twice_speaks_against_what_it_ran(how: str, shared_url: str, tmp_path: Path) -> None:
    mine = opened(shared_url, tmp_path)
    try:
        for turn in range(2):
            theirs = opened(shared_url, tmp_path)
            theirs.start(make_candidate(0), SPACE)
            if how == "killed":
                theirs._left.set()
                wait_until(lambda: mine.close_interrupted() == 1, "the end of the grace period", 20)
            else:
                theirs.leave()
            assert len(mine.records()) == turn + 1
        outcomes = [record.outcome for record in mine.records()]
        assert outcomes == ([DIED, DIED_TWICE] if how == "killed" else [ABANDONED, ABANDONED])
    finally:
        mine.leave()


@pytest.mark.usefixtures("quick")
def test_heartbeats_keep_a_trial_running(shared_url: str, tmp_path: Path) -> None:
    mine, theirs = opened(shared_url, tmp_path), opened(shared_url, tmp_path)
    try:
        assert theirs.claim(make_candidate(0), SPACE, SEARCH) is not None
        time.sleep(2.5)
        assert mine.close_interrupted() == 0
        assert mine.peers() == [theirs.tuner]
        theirs.leave()
        assert mine.peers() == []
    finally:
        mine.leave()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("closed", [False, True])
def test_what_could_not_be_stored_is_stored_by_the_next_call(
    closed: bool, shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = opened(shared_url, tmp_path)
    number = theirs.start(make_candidate(0), SPACE)
    with monkeypatch.context() as away:

        def fails(*_: object) -> bool:
            raise optuna.exceptions.StorageInternalError("away")

        away.setattr("autotune.search.study.store_outcome", fails)
        with pytest.raises(optuna.exceptions.StorageInternalError):
            theirs.finish(number, OK)
    theirs.leave()
    mine = opened(shared_url, tmp_path)
    try:
        if closed:  # by a call elsewhere
            wait_until(lambda: mine.close_interrupted() == 1, "its end", 20)
        assert mine.finish_late() == 1
        assert mine.measured() == {make_candidate(0): OK.measurement}
        assert mine.close_interrupted() == 0
        assert mine.finish_late() == 0, "once"
        assert len(mine.records()) == 1 + closed
    finally:
        mine.leave()


def test_what_another_study_left_is_not_stored(shared_url: str, tmp_path: Path) -> None:
    store = opened(shared_url, tmp_path)
    try:
        store.start(make_candidate(0), SPACE)
        kept = {"number": 0, "tuner": ELSEWHERE, "outcome": OK.to_json()}
        for name, text in (("a", json.dumps(kept)), ("b", "{"), ("c", json.dumps({**kept, "number": 9}))):
            (tmp_path / f"unsaved-{name}.json").write_text(text)
        assert store.finish_late() == 0
        assert not store.measured()
    finally:
        store.leave()


def test_what_was_kept_goes_when_it_is_stored_and_not_before(shared_url: str, tmp_path: Path) -> None:
    store = opened(shared_url, tmp_path)
    try:
        number = store.start(make_candidate(0), SPACE)
        trial = store._open[number]
        with pytest.raises(KeyboardInterrupt), kept_if_it_fails(tmp_path, trial, OK, MeasuredHere()):
            raise KeyboardInterrupt
        (kept,) = tmp_path.glob("unsaved-*.json")
        waiting = outcomes_kept_in_folder(tmp_path, store.study)
        assert next(waiting)[1] == OK
        waiting.close()  # it is killed while it stores it
        assert kept.exists()
        assert store.finish_late() == 1
        assert not kept.exists()
        assert store.measured() == {make_candidate(0): OK.measurement}
    finally:
        store.leave()


def test_several_that_begin_at_once_make_one_study(shared_url: str, tmp_path: Path) -> None:
    def make(seq_len: int) -> bool:
        job = dataclasses.replace(make_job(), seq_len=seq_len)
        return StudyStore.create_or_resume("s", shared_url, tmp_path, job, detect("cpu", 2), SPACE)[1]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(make, [64] * 4)) == [False, True, True, True]


def test_each_has_a_place_of_its_own(tmp_path: Path) -> None:
    first, held = lock_log_dir(tmp_path, "s")
    second, other = lock_log_dir(tmp_path, "s")
    assert (first, second) == (tmp_path, tmp_path / "tuner-2")
    held.release()
    third, again = lock_log_dir(tmp_path, "s")
    assert third == tmp_path
    for one in (other, again):
        one.release()


class Slow(ReplayExecutor):
    """A table that takes a moment, so that two tuners are at work at once. It counts what it measured."""

    def __init__(self, replay_table: ReplayTable, seed: int) -> None:
        super().__init__(replay_table, seed)
        self.searched: list[Candidate] = []

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> ReplaySession:
        session, executor = super().session(candidate, name, patience), self
        measure = session.measure

        def slowly(candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
            time.sleep(0.02)
            if not measure_spec.certify and not measure_spec.resume:
                executor.searched.append(candidate)
            return measure(candidate, measure_spec, deadline_seconds)

        session.measure = slowly  # type: ignore[method-assign]
        return session


def tune(
    url: str, folder: Path, replay_table: ReplayTable, seed: int, trials: int | None
) -> tuple[SearchSummary, Slow]:
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    store, _ = StudyStore.create_or_resume("s", url, folder, job, hardware, space)
    executor = Slow(replay_table, seed)
    proposer = Proposer(sorted(replay_table.rows, key=str), space, Predictor(job, hardware, trace_job(job)))
    store.share(print)
    try:
        store.close_interrupted()
        tuner = Tuner(store, executor, proposer, budget_seconds=900, max_trials=trials)
        return tuner.run(), executor
    finally:
        store.leave()


@pytest.mark.slow
def test_two_tuners_repeat_nothing_and_find_one_winner(shared_url: str, tmp_path: Path) -> None:
    replay_table = load_replay_table(TABLE)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(tune, shared_url, tmp_path, replay_table, seed, 6) for seed in range(2)]
        (first, one), (second, other) = (each.result() for each in both)
    store = StudyStore.load("s", shared_url)
    records = store.records()
    assert all(record.outcome is not None for record in records), "nothing is left open"
    searched = [record.candidate for record in records if record.role == SEARCH]
    assert sorted(map(str, searched)) == sorted(map(str, [*one.searched, *other.searched])), "nothing is lost"
    assert len(searched) == len(set(searched)), "nothing is repeated"
    assert one.searched
    assert other.searched
    assert first.verified
    assert second.verified
    assert store.winner is not None
    verified = {r.candidate: r for r in records if r.role == VERIFY and r.outcome and r.outcome.measurement}
    assert store.winner.candidate in verified
    assert len(store.calls()) == 2
