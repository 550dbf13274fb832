"""Slurm transport: the nodes of this process's allocation, and one agent on each, started by `srun`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.executors.nodes.hostfile import Host
from autotune.executors.nodes.transports import PACKAGE, agent_words, agents_complaint
from autotune.executors.nodes.wire import NotGreeted
from autotune.units import format_duration

_ANSWER_SECONDS = 60.0  # seconds; a controller under load answers slowly
# Variables that an agent inherits before it receives more. A Python from `module load` may need the library path.
_KEPT = "PATH,HOME,USER,LANG,LC_ALL,TMPDIR,LD_LIBRARY_PATH"
JOB, NODES, GPUS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE"  # set for a job's processes: sbatch(1)


@dataclass(frozen=True)
class Srun:
    """Job step on one node of the allocation, parallel to other steps."""

    job: str
    python: str = sys.executable
    package: Path = PACKAGE
    sync: bool = False

    def command(self, node: str) -> list[str]:
        where = ["--jobid", self.job, "--nodelist", node, "--nodes=1", "--ntasks=1"]
        how = ["--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--unbuffered", f"--export={_KEPT}"]
        return ["srun", *where, *how, "--", *agent_words(self.python, self.package, sync=self.sync)]

    def complaint(self, node: str, failure: NotGreeted) -> str:
        said = [line for line in failure.log.splitlines() if line.startswith("srun: ")]
        if said and not failure.said and "exited" not in said[-1].lower() and "task" not in said[-1]:
            return f"node {node}: Slurm starts no agent there ({said[-1].removeprefix('srun: ')[:200]})"
        return agents_complaint(node, failure, self.python, self.package)


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process belongs to a Slurm job."""
    return bool(environment.get(JOB) and environment.get(NODES))


def allocated_hosts(gpus: int | None, environment: Mapping[str, str] = os.environ) -> list[Host]:
    """Return the nodes of the allocation, with `gpus` slots each, or with the number of allocated GPUs.

    Raises:
        UserError: Slurm does not list the nodes, or the number of devices is unknown.
    """
    names = asked("scontrol", "show", "hostnames", environment[NODES]).split()
    each = environment.get(GPUS, "")
    count = gpus if gpus is not None else int(each) if each.isdigit() and int(each) else None
    if count is None:
        raise UserError("this allocation has no GPUs: --device cpu --gpus N says how many CPU ranks each node has")
    if count < 1:
        raise UserError(f"--gpus {count}: expected at least 1")
    return [Host(name, tuple(range(count))) for name in names]


def check_time_left(budget_seconds: float, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the allocation lasts as long as the budget.

    Raises:
        UserError: the allocation ends earlier.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    left = float(end) - time.time() if end.isdigit() else _left_seconds(environment[JOB])
    if left is not None and left < budget_seconds:
        raise UserError(
            f"the allocation ends in {format_duration(max(0.0, left))}, before a budget of {format_duration(budget_seconds)}: "
            "give a smaller --budget, or a longer --time"
        )


def _left_seconds(job: str) -> float | None:
    """Return the time left from squeue's `days-hours:minutes:seconds`; None if unlimited or unknown."""
    with suppress(UserError, ValueError):
        days, _, clock = asked("squeue", "-h", "-j", job, "-o", "%L").strip().rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        seconds = sum(part * 60**at for at, part in enumerate(reversed(parts)))
        return float(seconds + 86400 * int(days or 0))
    return None


def asked(*words: str) -> str:
    """Return the output of a Slurm command.

    Raises:
        UserError: Slurm is missing, or the command fails; with its error message.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"--executor slurm: no {words[0]} on this machine; call autotune where Slurm's commands are")
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_ANSWER_SECONDS, stdin=subprocess.DEVNULL, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"--executor slurm: {words[0]} does not answer within {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in said if "error" in line), said[0] if said else f"exit status {done.returncode}")
        raise UserError(f"--executor slurm: {first.removeprefix(words[0] + ': ')}")
    return done.stdout
