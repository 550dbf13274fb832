"""`autotune run` as a user runs it: a process of its own, real ranks, real out-of-memory, real interruptions."""

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.outcome import OutcomeKind
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from tests import plain_training
from tests.cli_call import call
from tests.conftest import processes_in, wait_until

AUTOTUNE = [sys.executable, "-m", "autotune"]
SPACE = """
knobs:
  zero_stage: [2]
  train_micro_batch_size_per_gpu: [1, 2, 256]
  reduce_bucket_size: [500000]
"""
ON_CPUS = ["run", "--model", "tiny-llama", "--device", "cpu", "--gpus", "2", "--seq-len", "32"]
RUN = [*ON_CPUS, "--space", "s.yaml", "--memory-cap", "700MiB", "--study", "s", "--exhaustive", "--no-references"]


def autotune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AUTOTUNE, *words], cwd=folder, capture_output=True, text=True, timeout=400)


def measured_trials(folder: Path) -> int:
    """How many trials of study `s` have an end. Reads the database and no more: a second process that opens it through
    Optuna, too, would make its tables at the same time as the tuner."""
    try:
        with closing(sqlite3.connect(f"file:{folder}/runs/s/study.db?mode=ro", uri=True)) as database:
            return int(
                database.execute("SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'FAIL')").fetchone()[0]
            )
    except sqlite3.OperationalError:  # not there yet
        return 0


@dataclass(frozen=True)
class Stage:
    """What a user finds after a call."""

    code: int
    output: str
    left_running: list[str]  # command lines of processes
    measured: int  # trials with an end
    calls: list[float]  # seconds each call has used
    meta: dict[str, Any] | None  # of the exported config, if there is one


@dataclass(frozen=True)
class FinishedStudy:
    """One study's life: killed, called again and interrupted, called again and finished with a verified winner."""

    folder: Path
    killed: Stage
    interrupted: Stage
    finished: Stage
    report: dict[str, Any]  # what `--json` printed at the end

    @property
    def store(self) -> StudyStore:
        return StudyStore.load("s", runs=self.folder / "runs")


def stop_after(folder: Path, trials: int, number: signal.Signals) -> Stage:
    """Calls `autotune run`, and sends a signal to it when so many more trials have an end."""
    until = measured_trials(folder) + trials
    command = [*AUTOTUNE, *RUN, "--budget", "10m"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: process.poll() is not None or measured_trials(folder) >= until, f"{trials} trials", 300)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    if number is signal.SIGKILL:  # the kernel ends the ranks, in a moment of its own
        wait_until(lambda: not processes_in(folder), "a killed tuner leaves no orphan")
    return look(folder, process.returncode, output)


def look(folder: Path, code: int, output: str) -> Stage:
    store = StudyStore.load("s", runs=folder / "runs")
    meta = folder / "runs/s/s.meta.json"
    return Stage(
        code,
        output,
        processes_in(folder),
        sum(1 for record in store.records() if record.outcome),
        [one.used_seconds for one in store.calls()],
        json.loads(meta.read_text()) if meta.exists() else None,
    )


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> FinishedStudy:
    """Made once: what was seen on the way is kept for the tests, which only read it (and its exported config)."""
    folder = tmp_path_factory.mktemp("finished-study")
    (folder / "s.yaml").write_text(SPACE)
    killed = stop_after(folder, 1, signal.SIGKILL)
    interrupted = stop_after(folder, 1, signal.SIGINT)
    done = autotune(folder, *RUN, "--budget", "10m", "--json")
    assert done.returncode == 0, done.stderr
    finished = look(folder, done.returncode, done.stdout)
    return FinishedStudy(folder, killed, interrupted, finished, json.loads(done.stdout))


def test_after_sigkill_nothing_finished_is_lost(finished_study: FinishedStudy) -> None:
    killed = finished_study.killed
    assert killed.code == -signal.SIGKILL, killed.output
    assert killed.left_running == [], "a killed tuner leaves no orphan"
    assert killed.measured >= 1
    assert len(killed.calls) == 1, "its seconds are stored after each trial: the last one's may be lost"


def test_ctrl_c_exports_the_best_so_far_and_exits_130(finished_study: FinishedStudy) -> None:
    interrupted = finished_study.interrupted
    assert interrupted.code == 130, interrupted.output
    assert "goes on" in interrupted.output
    assert "Traceback" not in interrupted.output
    assert interrupted.left_running == []
    assert interrupted.measured > finished_study.killed.measured
    assert interrupted.calls[1] > 0
    assert interrupted.meta is not None
    assert interrupted.meta["verified"] is False


def test_resumed_it_ends_with_a_verified_winner(finished_study: FinishedStudy) -> None:
    report, store = finished_study.report, finished_study.store
    assert report["verified"] is True
    stored_seconds = finished_study.finished.calls[-1]  # in tenths, of the same clock, read before
    assert report["used_seconds"] > stored_seconds - 0.1 > 0
    records = [record for record in store.records() if record.outcome]
    kinds = {record.outcome.kind for record in records if record.outcome}
    assert OutcomeKind.OOM_DEVICE in kinds, "256 sequences do not fit into 700 MiB"
    searched = [
        r.candidate for r in records if r.role == SEARCH and r.outcome and r.outcome.kind.is_attributable_to_candidate
    ]
    assert len(set(searched)) == len(searched), "nothing is measured twice"
    assert store.winner.role == VERIFY
    assert len(finished_study.finished.calls) == 3
    assert finished_study.finished.left_running == []


def test_another_job_under_the_same_name_is_refused(
    finished_study: FinishedStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished_study.folder)
    code, _, err = call(monkeypatch, capsys, *RUN, "--budget", "60s", "--precision", "bf16")
    assert code == 2
    assert "precision" in err
    assert "--force" in err


# -- the exported config trains without autotune -------------------------------------------------------------------------


def train(folder: Path, *launcher: str) -> str:
    """Runs two ranks of a script that knows nothing of autotune, to their end."""
    command = [str(Path(sys.executable).parent / launcher[0]), *launcher[1:]]
    return plain_training.train(command, folder, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})


TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def export(
    study: FinishedStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], style: str, out: Path
) -> None:
    monkeypatch.chdir(study.folder)
    code, _, err = call(monkeypatch, capsys, "export", "s", "--format", style, "--out", str(out))
    assert code == 0, err


@pytest.mark.main_path
@pytest.mark.slow
def test_the_exported_config_trains_under_plain_deepspeed(finished_study: FinishedStudy, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, os, sys, torch, deepspeed\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(64, 64)\n"
        "config = json.load(open(sys.argv[1]))\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "if 'offload_optimizer' in config.get('zero_optimization', {}):\n"
        "    from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)\n"
        "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)\n"
        "losses = []\n"
        "for _ in range(4 * config['gradient_accumulation_steps']):\n"
        "    loss = engine(torch.ones(config['train_micro_batch_size_per_gpu'], 64)).square().mean()\n"
        "    engine.backward(loss); engine.step(); losses.append(loss.item())\n"
        "assert losses[-1] < losses[0] and type(engine).__name__ == 'DeepSpeedEngine'\n"
        "assert engine.zero_optimization_stage() == config.get('zero_optimization', {}).get('stage', 0)\n"
        "print('trained')\n"
    )
    config = finished_study.folder / "runs/s/s.json"
    assert train(tmp_path, *TORCHRUN, "train.py", str(config)).count("trained") == 2


# -- studies without a winner --------------------------------------------------------------------------------------------


@pytest.mark.main_path
@pytest.mark.slow
def test_when_nothing_fits_it_says_what_came_closest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.yaml").write_text("knobs:\n  zero_stage: [0]\n  train_micro_batch_size_per_gpu: [512]\n")
    words = ["--gpus", "1", "--seq-len", "64", "--space", "big.yaml", "--memory-cap", "600MiB", "--budget", "5m"]
    code, out, err = call(monkeypatch, capsys, *ON_CPUS, *words)
    assert code == 3, out + err
    assert "closest: " in err
    assert "of headroom" in err
    assert "micro-batch 512 -> 256" in err


def test_a_model_that_transformers_refuses_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 7,
        "num_hidden_layers": 1,
        "vocab_size": 50,
        "intermediate_size": 64,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    Path("bad").mkdir()
    Path("bad/config.json").write_text(json.dumps(config))
    words = ["run", "--model", "./bad", "--device", "cpu", "--gpus", "1", "--seq-len", "16", "--budget", "5m"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 2, out + err
    assert "model bad cannot be built" in err
    assert "multiple of the number of attention heads" in err
    assert err.count("\n") == 1
