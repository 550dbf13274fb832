"""The harness of faults: what it sees, and some of its faults, planted."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common import HERE
from benchmarks.reliability import fault_ground
from benchmarks.reliability.fault_ground import TOKEN, Ground
from benchmarks.reliability.faults import EPISODES


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
