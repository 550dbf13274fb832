"""Real ranks, for the benchmarks: trials, trainings under `autotune launch`, trainings without autotune, and `autotune run`.

The benchmarks reach the executor and the supervisor only through this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.executors.deadlines import Deadlines
from autotune.executors.local import LocalExecutor
from autotune.group.environment import training_environment
from autotune.group.extensions import FOLDER, own_folder
from autotune.problem.candidate import Candidate
from autotune.problem.cpus import threads_per_rank
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.rank.recurring import median_spread
from autotune.recovery.ladder import Rung
from autotune.recovery.supervisor import LaunchSummary, Supervisor

__all__ = ["Deadlines", "LaunchSummary", "LocalExecutor", "median_spread"]

HERE = Path(__file__).parent
TRAINING_RANK = "autotune.rank.train"  # in the command line of a rank of `autotune launch`


@contextmanager
def opened(
    job: Job, hardware: Hardware, folder: Path, candidates: list[Candidate], **options: Any
) -> Iterator[LocalExecutor]:
    """An executor whose fork server is up; closed at the end."""
    executor = LocalExecutor(job, hardware, folder, candidates, **options)
    executor.open(print)
    try:
        yield executor
    finally:
        executor.close()


def launch(
    job: Job, hardware: Hardware, ladder: list[Rung], folder: Path, *, max_restarts: int, silent_seconds: float = 300.0
) -> LaunchSummary:
    """A training as `autotune launch` runs it."""
    supervisor = Supervisor(
        job, hardware, ladder, folder, max_restarts=max_restarts, silent_seconds=silent_seconds, say=print
    )
    return supervisor.run()


def training_ranks() -> list[psutil.Process]:
    """The ranks of a training that this process launched."""
    found = []
    for process in psutil.Process().children():
        try:
            if TRAINING_RANK in process.cmdline():
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


@dataclass(frozen=True)
class Tuned:
    """How a call of `autotune run` ended."""

    code: int
    report: dict[str, Any]  # empty where it failed
    stderr: str


def autotune_run(*options: str, script: Sequence[str] = (), cwd: Path | None = None) -> Tuned:
    """`autotune run OPTIONS --yes --json [-- SCRIPT]` in a process of its own."""
    command = [sys.executable, "-m", "autotune.cli", "run", *options, "--yes", "--json"]
    command += ["--", *script] if script else []
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    return Tuned(done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}, done.stderr)


def plain_words(job: Job, config: dict[str, Any], steps: int, folder: Path) -> list[str]:
    """`train_plain.py` and its arguments, a training that knows nothing of autotune; its files are written to the folder."""
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "model.json").write_text(json.dumps(job.model.config))
    options = [str(job.seq_len), str(steps), "--precision", job.precision]
    return [str(HERE / "train_plain.py"), f"{folder}/ds.json", f"{folder}/model.json", *options]


def plain_environment(device: str, ranks: int) -> dict[str, str]:
    """The environment of a rank that trains without autotune, one of `ranks`. DeepSpeed's ops are those that trials have built:
    torch's own folder is built anew for minutes whenever another environment has used it."""
    return {FOLDER: str(own_folder(device)), **training_environment(device, threads_per_rank(ranks))}


def train_plainly(
    job: Job,
    config: dict[str, Any],
    checkpointing: bool,
    steps: int,
    device: str,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Trains with `config` under torchrun, in this process's own environment and with what autotune prints before the
    command.

    Args:
        variables: what is printed; None: the CPU threads alone.

    Raises:
        RuntimeError: the training failed; with the end of its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = plain_words(job, config, steps, Path(folder))
        command = [*torchrun_words(job.ranks), *words, *(["--checkpointing"] if checkpointing else [])]
        env = {**plain_environment(device, job.ranks), **(variables or {})}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TRAINED ")), None)
    if line is None:
        raise RuntimeError(done.stderr[-3000:])
    return dict(json.loads(line.removeprefix("TRAINED ")))


def torchrun_words(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
