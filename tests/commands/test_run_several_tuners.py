"""Calls of `autotune run` that share a study: real ones, on CPU ranks, in a real PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from autotune.problem.outcome import OutcomeKind, Source
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from tests.cli_call import call
from tests.conftest import processes_in, wait_until
from tests.postgres import Postgres, made_postgres, why_not

AUTOTUNE = [sys.executable, "-m", "autotune"]
SPACE = """\
name: few
about: six candidates
knobs:
  zero_stage: [0, 1, 2]
  train_micro_batch_size_per_gpu: [1, 2]
"""
JOB = ("--model", "tiny-gemma-2", "--device", "cpu", "--gpus", "1", "--seq-len", "16", "--space", "few.yaml")
RUN = ("run", *JOB, "--study", "s", "--budget", "10m", "--exhaustive", "--no-references")


def started(folder: Path, url: str, log: Path) -> subprocess.Popen[bytes]:
    """A call in a folder of its own, as on a machine of its own; the URL is in its environment."""
    folder.mkdir(exist_ok=True)
    (folder / "few.yaml").write_text(SPACE)
    env = {**os.environ, "AUTOTUNE_STORAGE": url, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("wb") as out:
        return subprocess.Popen([*AUTOTUNE, *RUN], cwd=folder, env=env, stdout=out, stderr=out)


def under_way(store: StudyStore, pid: int) -> list[int]:
    """Numbers of the trials that a process has running."""
    return [r.number for r in store.records() if r.outcome is None and r.tuner and f"/{pid}/" in r.tuner]


@pytest.mark.slow
def test_two_calls_share_a_study_and_one_is_killed_in_mid_trial(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if why := why_not():
        pytest.skip(why)
    with made_postgres() as server:
        calls = [started(tmp_path / name, server.url, tmp_path / f"{name}.log") for name in ("one", "two")]
        try:
            victim, other = calls
            wait_until(lambda: tables(server) and "s" in studies(server), "the study", 300)
            store = StudyStore.load("s", server.url)
            for _ in range(100):  # stopped first: what runs then cannot be over before it is killed
                wait_until(lambda: under_way(store, victim.pid) or victim.poll() is not None, "a trial", 300)
                victim.send_signal(signal.SIGSTOP)
                if lost := under_way(store, victim.pid):
                    break
                victim.send_signal(signal.SIGCONT)
            victim.kill()
            victim.wait()
            server.cut()
            server.stop()
            server.start()
            assert other.wait(600) == 0, (tmp_path / "two.log").read_text()
        finally:
            for process in calls:
                process.kill()
                process.wait()
        found = {record.number: record for record in store.records()}
        assert all(record.outcome is not None for record in found.values())
        for number in lost:
            outcome = found[number].outcome
            assert (outcome.kind, outcome.source) == (OutcomeKind.INTERRUPTED, Source.DEATH)
        measured = Counter(r.candidate for r in found.values() if r.role == SEARCH and r.outcome and r.outcome.ok)
        assert len(measured) == 6, "what was lost was tried again"
        assert set(measured.values()) == {1}, "and nothing else"
        assert store.winner.role == VERIFY
        # the same call again finds everything done
        again = started(tmp_path / "one", server.url, tmp_path / "again.log")
        assert again.wait(600) == 0, (tmp_path / "again.log").read_text()
        assert sum(record.role == SEARCH for record in store.records()) == sum(r.role == SEARCH for r in found.values())
        for words in (("show", "s"), ("report", "s"), ("export", "s", "--trial", str(store.winner.number))):
            subprocess.run([*AUTOTUNE, *words, "--storage", server.url], cwd=tmp_path / "two", check=True)
        wait_until(lambda: not processes_in(tmp_path), "nothing is left")
        printed = "".join(capfd.readouterr())
        assert server.password not in printed
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in files if server.password.encode() in path.read_bytes()] == []
        for table in ("study_user_attributes", "trial_user_attributes"):
            assert server.ask(f"select count(*) from {table} where value_json like '%{server.password}%'") == [(0,)]


def tables(server: Postgres) -> bool:
    return server.ask("select to_regclass('studies')") != [(None,)]


def studies(server: Postgres) -> list[str]:
    named = server.ask("select study_name from studies")
    founded = server.ask("select count(*) from study_user_attributes where key = 'objective'")
    return [name for (name,) in named] if founded != [(0,)] else []


@pytest.mark.parametrize(
    "words", [("run", "--model", "tiny-gemma-2", "--device", "cpu"), ("show", "s"), ("report", "s"), ("export", "s")]
)
def test_a_server_that_refuses_is_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *words, "--storage", "postgresql://joe:s3cret@127.0.0.1:1/db")
    assert code == 2
    assert err.splitlines()[-1].startswith("autotune: --storage postgresql://joe:***@127.0.0.1:1/db cannot be opened: ")
    assert "Traceback" not in err
    assert "s3cret" not in out + err
    assert not (tmp_path / "runs").exists(), "nothing is left behind"
