"""A call of `autotune run` without a winner says why it stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.outcome import Outcome, OutcomeKind
from benchmarks.search.replay import ReplaySession, load_replay_table, write_replay_table
from tests.cli_call import replay

TABLE = Path(__file__).parent.parent / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def too_large(path: Path) -> int:
    """Write a table of the largest measured rows, and return their number."""
    whole = load_replay_table(TABLE)
    measured = [(one, row) for one, row in whole.rows.items() if row.kind is OutcomeKind.OK]
    largest = sorted(measured, key=lambda entry: -entry[1].peak_gib)[:4]
    write_replay_table(path, whole.facts, dict(largest))
    return len(largest)


RUN = ("--headroom", "60%", "--study", "s", "--budget", "5m")


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--max-trials", "2"], "--max-trials 2 reached"), ([], "every candidate is tried or ruled out")],
)
def test_a_call_without_a_winner_ends_with_its_trials_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    too_large(tmp_path / "t.csv.gz")
    code, _, err = replay(monkeypatch, capsys, Path("t.csv.gz"), *RUN, *options)
    assert code == 3, err
    (last,) = (line for line in err.splitlines() if reason in line)
    count = 2 if options else 4
    assert last.startswith(f"{count} trials ({count} ok) in ")
    code, out, _ = replay(monkeypatch, capsys, Path("t.csv.gz"), *RUN, *options, "--json", "--study", "j")
    assert code == 3
    told = json.loads(out)
    assert (told["winner"], told["verified"], told["ended"]) == (None, False, reason)
    assert last.partition(" in ")[0] in told["lines"][-1]


def test_failures_without_an_oom_have_their_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ReplaySession, "measure", lambda *words: Outcome(OutcomeKind.CRASH, reason="why"))
    code, _, err = replay(monkeypatch, capsys, TABLE, *RUN, "--max-trials", "2")
    assert (code, "no candidate ran: crash: why (2x)" in err) == (5, True)


def test_a_call_that_is_stopped_without_a_winner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    too_large(tmp_path / "t.csv.gz")
    measure = ReplaySession.measure

    def interrupted(self: ReplaySession, *words: Any) -> Outcome:
        signal.raise_signal(signal.SIGINT)
        return measure(self, *words)

    monkeypatch.setattr(ReplaySession, "measure", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = replay(monkeypatch, capsys, Path("t.csv.gz"), *RUN)
    assert code == 130, err
    said, last = out.splitlines()[-2:]
    assert said == "stopped without a winner"
    assert last.startswith("1 trial (1 ok) in ")
    assert last.endswith("; interrupted")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once_and_says_that_trials_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    too_large(tmp_path / "t.csv.gz")

    def interrupted(self: ReplaySession, *words: Any) -> Outcome:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one has ended it")

    monkeypatch.setattr(ReplaySession, "measure", interrupted)
    code, _, err = replay(monkeypatch, capsys, Path("t.csv.gz"), *RUN)
    assert code == 130
    assert err.splitlines()[-1] == "autotune: stopped at once; measured trials are kept, and the same command goes on"
