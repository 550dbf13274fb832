"""The reliability scripts: the generated study, and the time of a recovery."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.search.study import StudyStore
from benchmarks.reliability.large_study import write_study, write_table
from benchmarks.reliability.recovery import recoveries
from tests.cli_call import replay


@pytest.mark.slow
def test_the_generated_study_resumes_from_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(write_table(tmp_path, 40), tmp_path, 12)
    monkeypatch.chdir(tmp_path)
    assert len(StudyStore.load("large").records()) == 12
    again = ["--study", "large", "--yes", "--max-trials", "1", "--budget", "10m"]
    code, out, err = replay(monkeypatch, capsys, Path("large.csv.gz"), *again)
    assert (code, err) == (0, "")
    assert "12 trials in" in out
    assert len(StudyStore.load("large").records()) > 12


def test_a_recovery_is_timed_from_the_failure_to_the_next_step(tmp_path: Path) -> None:
    entries = [{"started": True, "at": 0}]
    entries += [{"step": step, "at": 10 + step} for step in range(8)]  # checkpoint after step 5; it fails in step 7
    entries += [{"started": True, "at": 30}, *({"step": step, "at": 40 + step} for step in (5, 6, 7))]
    (tmp_path / "seen.rank0.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    assert recoveries(tmp_path) == [(46 - 17, 3)]
