"""What benchmarks/cluster/nodes.py counts of a failure, and what it does of a list of them; real ones are in its small form."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.problem.outcome import Outcome, OutcomeKind
from benchmarks.cluster import nodes
from benchmarks.cluster.node_grounds import FAILURES, Blow, Ground

CRASH, OK = Outcome(OutcomeKind.CRASH), Outcome(OutcomeKind.OK)


@dataclass
class Sessions:
    """Stands in for an executor: the first trial fails and is noticed at once, the second is ready after what it waits for."""

    workers: dict[int, int]
    starts: Callable[[], None] = lambda: None  # the second, before it is ready
    ready: Callable[[], None] = lambda: None
    on_phase: Callable[[str], None] = lambda phase: None
    begun: int = 0

    def session(self, candidate: object, name: str) -> Any:
        self.begun += 1
        first = self.begun == 1
        made = SimpleNamespace(failed_at=None, close=lambda: None, _group=SimpleNamespace(_rank_pids=self.workers))

        def measure(*_: object) -> Outcome:
            if not first:
                self.starts()
            self.on_phase("forward")
            if not first:
                self.ready()
            made.failed_at = time.monotonic() if first else None
            return CRASH if first else OK

        made.measure = measure
        return made


@dataclass
class Store:
    """Stands in for a study; what it forgets is lost."""

    forgets: OutcomeKind | None = None
    kept: dict[int, Outcome] = field(default_factory=dict)
    started: int = 0

    def start(self, *_: object) -> int:
        self.started += 1
        return self.started

    def finish(self, number: int, outcome: Outcome) -> None:
        if outcome.kind is not self.forgets:
            self.kept[number] = outcome

    def records(self) -> list[Any]:
        return [SimpleNamespace(number=number, outcome=outcome) for number, outcome in self.kept.items()]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield made
    made.kill()
    made.wait()


def ground(workers: dict[int, int], store: Store | None = None, **options: Any) -> Any:
    sessions = Sessions(workers, **{name: options.pop(name) for name in ("starts", "ready") if name in options})
    blows = {"rank": Blow(options.pop("strike", lambda session: None), **options)}
    return Ground(sessions, store or Store(), blows)  # type: ignore[arg-type]


def mended() -> None:
    """Waits until `nodes.fail` has noted that what was struck is back."""
    for thread in threading.enumerate():
        if "(mend)" in thread.name:
            thread.join()


def test_seconds_beyond_begin_when_it_was_noticed_and_what_was_away_is_back() -> None:
    soon = nodes.fail(ground({}, starts=lambda: (mended(), time.sleep(0.5))), "rank", 0)
    assert soon["outcome"] == "crash"
    assert soon["next"] >= soon["beyond"] >= 0.5
    away = nodes.fail(ground({}, starts=lambda: (mended(), time.sleep(0.1)), mend=lambda: time.sleep(0.4)), "rank", 0)
    assert away["next"] >= 0.5
    assert away["next"] - away["beyond"] >= 0.4, "what was away does not count"
    up = threading.Event()
    later = nodes.fail(ground({}, starts=lambda: time.sleep(0.1), ready=up.set, mend=up.wait), "rank", 0)
    assert later["beyond"] >= 0.1, "the next trial did not wait for it"


def test_a_rank_that_lives_on_is_left(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GOING_SECONDS", 0.1)
    kept = ground({0: process.pid})
    monkeypatch.setattr(kept, "processes", lambda: {psutil.Process(process.pid)}, raising=False)
    assert nodes.fail(kept, "rank", 0)["left"] == 1
    ended = ground({0: process.pid}, strike=lambda session: process.kill())
    monkeypatch.setattr(ended, "processes", lambda: {psutil.Process(process.pid)}, raising=False)
    assert nodes.fail(ended, "rank", 0)["left"] == 0


def test_an_outcome_that_the_study_lacks_is_lost() -> None:
    assert nodes.fail(ground({}), "rank", 0)["lost"] == 0
    assert nodes.fail(ground({}, Store(forgets=OutcomeKind.CRASH)), "rank", 0)["lost"] == 1


def test_counts_of_the_command_line() -> None:
    parser = nodes.command_line("")
    assert set(nodes.wanted(parser, "", 20).values()) == {20}
    assert set(nodes.wanted(parser, "", 20)) == {*FAILURES, nodes.OVERHEAD}
    assert nodes.wanted(parser, "rank,link-60=3", 20) == {"rank": 20, "link-60": 3}
    for typed in ("none", "rank=x"):
        with pytest.raises(SystemExit):
            nodes.wanted(parser, typed, 20)


def test_what_was_done_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(folder: object) -> None:
        raise AssertionError("nothing is missing")

    monkeypatch.setitem(nodes.GROUNDS, "ssh", never)
    each = [{"failure": "rank"}] * 2
    nodes.visit("ssh", {"rank": 2}, each, {}, lambda rows: None)
    with pytest.raises(AssertionError, match="nothing is missing"):
        nodes.visit("ssh", {"rank": 3}, each, {}, lambda rows: None)


def test_a_summary_says_how_many_of_each() -> None:
    row = {"failure": "rank", "outcome": "crash", "noticed": 1.0, "next": 2.0, "beyond": 1.0, "left": 0, "lost": 0}
    worse = {**row, "outcome": "infrastructure", "noticed": None, "next": 9.0, "beyond": 8.0, "left": 1}
    pairs = [{"failure": "overhead of ssh", "over it": 2.0 + at, "here": 1.0} for at in range(3)]
    found = nodes.summary([row, worse, row, *pairs])
    (failure,), (trial,) = found["failures"], found["trials"]
    assert (failure["count"], failure["left"], failure["lost"]) == (3, 1, 0)
    assert failure["outcome"] == "crash, infrastructure"
    assert (failure["next trial, s"], failure["worst"], failure["worst beyond"]) == (2.0, 9.0, 8.0)
    assert (trial["count"], trial["more, s"]) == (3, 2.0)
