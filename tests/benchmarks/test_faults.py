"""The harness of faults: what it draws, counts and sees; and some of its faults, planted."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.executors.local import LocalExecutor
from autotune.problem.outcome import OutcomeKind
from autotune.recovery import supervisor
from autotune.search import storage
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, VERIFY
from benchmarks.common import HERE
from benchmarks.reliability import fault_ground, planting, stricken
from benchmarks.reliability.fault_ground import TOKEN, Ground
from benchmarks.reliability.faults import EPISODES, episode, opened, summary
from benchmarks.reliability.planting import BY_ITSELF, PHASES, WEIGHTS, drawn, lost
from tests.studies import study_of_every_kind


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Ground sets in this process is as it was after the test."""
    for name in (TOKEN, "AUTOTUNE_FAULTS_CLOCK", "TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch, undone: None) -> Iterator[Ground]:
    monkeypatch.setattr(fault_ground, "GOING_SECONDS", 0.3)
    made = Ground()
    yield made
    made.close()
    assert not made.root.exists()


def test_every_kind_is_drawn_in_every_phase_and_a_seed_draws_the_same() -> None:
    found = [
        [drawn(random.Random(seed), role, set()) for seed in range(3000)]
        for role in (SEARCH, VERIFY, RESUME)
        for _ in (0, 1)
    ]
    assert found[0] == found[1]
    kinds = Counter(fault.kind for fault in found[0])
    assert set(kinds) == set(WEIGHTS)
    killed = {fault.phase for fault in found[0] if fault.kind == "rank: SIGKILL"}
    assert killed == set(PHASES)
    for kind in BY_ITSELF:
        assert "save" in {fault.phase for fault in found[2] if fault.kind == kind}
        assert "load" in {fault.phase for fault in found[4] if fault.kind == kind}
    assert set(BY_ITSELF) < set(WEIGHTS)
    only = {drawn(random.Random(seed), SEARCH, set(WEIGHTS) - {"clock: jumps"}).kind for seed in range(20)}
    assert only == {"clock: jumps"}, "the others are not allowed here"


def test_what_is_left_is_seen(ground: Ground) -> None:
    assert ground.leftovers(set()) == []
    process = subprocess.Popen(["sleep", "60"])
    (ground.temporary / "autotune-x").mkdir()
    segment = Path("/dev/shm") / f"faults-{os.getpid()}"
    segment.write_text("x")
    trial = ground.root / "trials" / "0000"
    (trial / "checkpoint").mkdir(parents=True)
    (ground.root / "scratch").mkdir()
    (trial / "rank0.log").write_text("")
    try:
        words = " ".join(ground.leftovers(set(), trial.parent))
        assert f"process {process.pid} is left" in words
        assert "autotune-x" in words
        assert segment.name in words
        assert "checkpoint" in words
        assert "scratch" in words
        assert "rank0" not in words
        assert f"{process.pid}" not in " ".join(ground.leftovers({process.pid}))
    finally:
        process.kill()
        process.wait()
        segment.unlink()


@pytest.mark.parametrize("others", [True, False])
def test_what_another_run_holds_is_not_left_by_this_one(ground: Ground, others: bool) -> None:
    """A semaphore whose maker alone has it stands in no map by its name."""
    code = "import multiprocessing; lock = multiprocessing.get_context('spawn').Lock(); print(flush=True); input()"
    env = {**os.environ, TOKEN: "another"} if others else dict(os.environ)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = " ".join(ground.leftovers(set()))
        process.communicate("\n")
    assert (f"process {process.pid} is left" in found, "shared memory sem.mp-" in found) == (not others, not others)


def test_a_clock_that_is_wrong_is_wrong_in_what_is_started_too(ground: Ground) -> None:
    wrong_seconds = 1e8  # three years: no test takes half of them, so that which clock was read is beyond doubt
    right, steady = time.time(), time.monotonic()

    def shifts(now: float, then: float) -> int:
        return round((now - then) / wrong_seconds)

    ground.shift_clock(wrong_seconds)
    said = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], capture_output=True, text=True)
    assert shifts(float(said.stdout), right) == 1
    assert shifts(time.time(), right) == 1
    assert shifts(time.monotonic(), steady) == 0
    ground.shift_clock(0.0)
    assert shifts(time.time(), right) == 0


def test_lost_trials_and_endless_ones_are_violations(tmp_path: Path) -> None:
    store = study_of_every_kind(tmp_path, (OutcomeKind.OK, OutcomeKind.CRASH))
    told = {record.number: record.outcome for record in store.records() if record.outcome}
    assert lost(told, StudyStore.load("s", runs=tmp_path)) == []
    (number, other), *_ = list(told.items())[1:]
    assert lost({**told, 99: other, number: told[0]}, store) == [f"trial {number} is lost", "trial 99 is lost"]


def test_the_summary_counts_by_kind() -> None:
    row = {"kind": "rank: SIGKILL", "phase": "init", "rank": 0, "share": 0.1, "outcome": "crash", "seconds": 0.5}
    other = {**row, "phase": "start", "seconds": None}
    violation = {"text": "x is left", "again": "python benchmarks/reliability/faults.py --only 1"}
    each = [
        {"seed": 0, "episode": "study", "seconds": 1.0, "faults": [row, row], "violations": []},
        {"seed": 1, "episode": "study", "seconds": 1.0, "faults": [other], "violations": [violation]},
    ]
    whole = summary(each)
    assert (whole["faults"], whole["violations"], whole["violated"]) == (3, 1, [violation])
    of_kind = {one["kind"]: one for one in whole["kinds"]}["rank: SIGKILL"]
    assert (of_kind["planted"], of_kind["until work goes on, s, median"], of_kind["in"]) == (3, 0.5, "init, start")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "seed"),
    [
        (("rank: SIGKILL", "rank: SIGSTOP", "rank: raises", "rank: out of memory", "logs: deleted"), 0),
        (("database: locked", "database: gone", "disk: full", "clock: jumps", "fork server: SIGKILL"), 4),
    ],
)
def test_a_study_under_faults_with_ranks_that_measure_nothing(
    kinds: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch, undone: None
) -> None:
    monkeypatch.setattr(LocalExecutor, "rank_module", "tests.benchmarks.quick_rank")
    monkeypatch.setattr(planting, "WEIGHTS", dict.fromkeys(kinds, 1.0))
    monkeypatch.setattr(planting, "IMPATIENT", planting.Deadlines(hello=60.0, start=1.0, init=1.0, step=1.0))
    monkeypatch.setattr(storage, "BUSY_SECONDS", storage.BUSY_SECONDS)
    with opened(trials=4) as bench:
        row = episode(bench, EPISODES.index("study") + seed * len(EPISODES))
    assert row["violations"] == []
    assert {fault["kind"] for fault in row["faults"]} <= set(kinds)
    assert len(row["faults"]) >= 2
    assert any(fault["seconds"] is not None for fault in row["faults"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["training ranks, all: SIGKILL", "training rank: SIGSTOP"])
def test_a_training_under_faults_with_ranks_that_train_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch, undone: None
) -> None:
    monkeypatch.setattr(supervisor, "TRAIN_RANK", "tests.benchmarks.quick_training")
    monkeypatch.setattr(stricken, "TRAININGS", (kind,))
    monkeypatch.setattr(stricken, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(storage, "BUSY_SECONDS", storage.BUSY_SECONDS)
    with opened(trials=1) as bench:
        row = episode(bench, EPISODES.index("training"))
    assert row["violations"] == []
    (fault,) = row["faults"]
    assert fault["kind"] == kind
    assert (fault["seconds"] is not None) == (kind in stricken.RESTARTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "faults", "episodes"),
    [
        (0, 30, set(EPISODES)),
        (1, 5, {"calls", "study"}),  # calls have four faults at most
    ],
)
def test_real_faults_leave_nothing_and_lose_nothing(
    tmp_path: Path, first: int, faults: int, episodes: set[str]
) -> None:
    path = tmp_path / "faults.json"
    words = ["--faults", str(faults), "--first", str(first), "--json", str(path)]
    command = [sys.executable, str(HERE / "reliability" / "faults.py"), *words]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=880)
    found = json.loads(path.read_text())
    assert found["violated"] == []
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert found["faults"] >= faults
    assert {row["episode"] for row in found["each"]} >= episodes
