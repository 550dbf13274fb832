"""A call of `autotune run` without a winner says why it stopped."""

from pathlib import Path

import pytest

from autotune.executors.replay import load_replay_table, write_replay_table
from autotune.problem.outcome import OutcomeKind
from tests.cli_call import call

TABLE = Path(__file__).parent.parent / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--max-trials", "2"], "--max-trials 2 reached"), ([], "every candidate is tried or ruled out")],
)
def test_a_call_without_a_winner_ends_with_its_trials_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = load_replay_table(TABLE)
    measured = [(one, row) for one, row in whole.rows.items() if row.kind is OutcomeKind.OK]
    largest = sorted(measured, key=lambda entry: -entry[1].peak_gib)[:4]
    write_replay_table(tmp_path / "t.csv.gz", whole.facts, dict(largest))
    words = ("run", "--executor", "replay:t.csv.gz", "--headroom", "60%", "--study", "s", "--budget", "5m", "--yes")
    code, _, err = call(monkeypatch, capsys, *words, *options)
    assert code == 3, err
    (last,) = (line for line in err.splitlines() if reason in line)
    count = 2 if options else len(largest)
    assert last.startswith(f"{count} trials ({count} ok) in ")
