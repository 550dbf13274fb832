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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.executors.base import LaunchTarget
from autotune.executors.local import Deadlines, LocalExecutor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, threads_per_rank
from autotune.problem.job import Job
from autotune.rank.step_statistics import median_spread
from autotune.recovery.ladder import Rung
from autotune.recovery.supervisor import LaunchSummary, Supervisor
from autotune.workers.jit_ops import FOLDER, own_folder
from autotune.workers.launchers import training_environment

__all__ = ["Deadlines", "LaunchSummary", "LocalExecutor", "median_spread"]

HERE = Path(__file__).parent
WARMUP_STEPS = 5  # of a training by train_plain.py, which are not counted
TRAINING_SECONDS = 1800.0  # of a training by torchrun, at most
TRAINING_RANK = "autotune.rank.train_rank"  # in the command line of a rank of `autotune launch`


@contextmanager
def opened(job: Job, hardware: Hardware, folder: Path, candidates: list[Candidate]) -> Iterator[LocalExecutor]:
    """An executor whose fork server is up; closed at the end."""
    executor = LocalExecutor(job, hardware, folder, candidates)
    executor.open(print)
    try:
        yield executor
    finally:
        executor.close()


def launch(
    job: Job,
    hardware: Hardware,
    ladder: list[Rung],
    folder: Path,
    *,
    max_restarts: int,
    silent_seconds: float = 300.0,
    ground: LaunchTarget | None = None,
) -> LaunchSummary:
    """A training as `autotune launch` runs it, on nodes if `ground` is given."""
    supervisor = Supervisor(
        job, hardware, ladder, folder, max_restarts=max_restarts, silent_seconds=silent_seconds, print_line=print
    )
    return supervisor.run(ground)


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


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all its descendants, ranks in sessions of their own included."""
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in tree:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def run_limited(
    command: Sequence[str], seconds: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or end it with all its descendants after so many seconds.

    Raises:
        RuntimeError: it took longer; with the end of its standard error.
    """
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_tree(process)
            _, err = process.communicate()
            raise RuntimeError(f"{' '.join(command)[:300]}: not done in {seconds:.0f} s\n{err[-3000:]}") from None
        except BaseException:
            end_tree(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def autotune_run(*options: str, script: Sequence[str] = (), cwd: Path | None = None) -> Tuned:
    """`autotune run OPTIONS --json [-- SCRIPT]` in a process of its own."""
    command = [sys.executable, "-m", "autotune", "run", *options, "--json"]
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
    seconds: float = TRAINING_SECONDS,
    warmup: int = WARMUP_STEPS,
) -> dict[str, Any]:
    """Trains with `config` under torchrun, in this process's own environment and with what autotune prints before the
    command.

    Args:
        steps: after those of the warm-up.
        variables: what is printed; None: the CPU threads alone.
        seconds: after which the training is ended.

    Raises:
        RuntimeError: the training failed, or was ended; with the end of its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = plain_words(job, config, steps + warmup, Path(folder))
        command = [
            *torchrun_words(job.ranks),
            *words,
            "--warmup",
            str(warmup),
            "--checkpointing",
            str(int(checkpointing)),
        ]
        env = {**plain_environment(device, job.ranks), **(variables or {})}
        done = run_limited(command, seconds, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TRAINED ")), None)
    if line is None:
        raise RuntimeError(done.stderr[-3000:])
    return dict(json.loads(line.removeprefix("TRAINED ")))


def torchrun_words(ranks: int) -> list[str]:
    """Return torchrun's words up to the script. Its ranks meet at the loopback address: by default torchrun gives them the host's
    name, and retries for minutes if nothing resolves that."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*words, "--nproc-per-node", str(ranks)]
