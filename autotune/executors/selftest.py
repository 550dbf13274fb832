"""Self-test of the machine: ranks rendezvous and add numbers, so that faults are not attributed to a candidate."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.entry_points import SELFTEST_RANK
from autotune.errors import MachineTrouble
from autotune.group.group import Group
from autotune.group.launchers import IMPORT_SECONDS, Launcher
from autotune.group.policy import Policy, Stop
from autotune.group.protocol import Message
from autotune.group.squad import Spread
from autotune.group.verdict import judge
from autotune.problem.hardware import Hardware

_POLICY = Policy(90.0, lambda phase: 90.0, settle_seconds=1.0, may_leave=False)
_DEADLINE_SECONDS = 240.0  # seconds after all imports; ranks that wait on GPUs spin and look alive
_NCCL_SAID = re.compile(r"NCCL WARN\s+(.*)")
# Remedies for the most common errors; the first match is shown.
_REMEDIES = (
    (r"Duplicate GPU", "every rank needs a GPU of its own; of MIG slices a process sees one: --gpus 1"),
    (r"no kernel image|not compatible with the current PyTorch", "install a torch that is built for this GPU"),
    (r"No CUDA GPUs|driver version is insufficient|libcuda", "`autotune doctor` says what is seen; check the driver"),
    (
        r"no socket interface|[Cc]onnection refused|No route to host",
        "set NCCL_SOCKET_IFNAME to an interface that is up",
    ),
    (r"shm|/dev/shm|Bus error|SIGBUS|No space left", "docker run --shm-size=8g (or --ipc=host)"),
    (r"out of memory", "other processes hold the devices' memory: end them, or hide those GPUs"),
)
_HANG = r"no sign of life|hang|deadline"
_REMEDY_OF_A_HANG = "peer access may be broken: NCCL_P2P_DISABLE=1 tells; check IOMMU and ACS"
_REMEDY_OF_IMPORTS = (
    "the disk that Python's packages lie on may be slow or away: `python -X importtime -c 'import torch'` tells"
)


def check_group(
    launcher: Launcher | Spread,
    hardware: Hardware,
    spec: dict[str, Any],
    ranks: int,
    folder: Path,
    cancelled: Callable[[], bool],
) -> None:
    """Start a group of ranks that add numbers.

    Args:
        launcher: starts the ranks.
        hardware: the machine.
        spec: the job and further settings of the ranks.
        ranks: number of ranks.
        folder: log folder.
        cancelled: True if the user cancelled.

    Raises:
        MachineTrouble: the test failed; one line with NCCL's last message and a remedy.
    """
    imported: set[int] = set()
    answers: set[int] = set()

    def take(rank: int, message: Message) -> None:
        if message["type"] == "imported":
            imported.add(rank)
        elif message["type"] == "measured":
            answers.add(rank)

    folder.mkdir(parents=True, exist_ok=True)
    group = Group(launcher, hardware, None, _POLICY, cancelled=cancelled, on_message=take)
    deadline = time.monotonic() + IMPORT_SECONDS
    try:
        stop = group.start(SELFTEST_RANK, ranks, spec, deadline=deadline, logs=folder)
        if stop is Stop.ARRIVED:
            stop = group.watch(lambda: len(imported) == ranks, deadline)
        if stop is Stop.ARRIVED:
            stop = group.watch(lambda: len(answers) == ranks, time.monotonic() + _DEADLINE_SECONDS)
        if stop in (Stop.ARRIVED, Stop.CANCELLED):
            return
        raise MachineTrouble(_complaint(stop, group, folder, importing=len(imported) < ranks))
    except OSError as error:
        raise MachineTrouble(f"ranks cannot be started on this machine: {error}") from None
    finally:
        group.end()


def _complaint(stop: Stop, group: Group, folder: Path, importing: bool) -> str:
    """Return the failure in one line.

    Args:
        stop: reason for the end.
        group: the ranks.
        folder: log folder.
        importing: the ranks had not yet communicated.
    """
    if stop is Stop.DEADLINE:
        reason = f"no end within {_DEADLINE_SECONDS:.0f} s, in {group.phase.value}: the ranks hang"
        if importing:
            reason = f"no torch and deepspeed imported by the deadline of {IMPORT_SECONDS} s"
        logs = ""
    else:
        evidence = group.evidence()
        reason = judge(evidence).reason
        logs = "\n".join(evidence.logs.values()) + "\n".join(str(error.get("text")) for error in evidence.errors)
    said = _NCCL_SAID.findall(logs)
    text = f"{reason}; NCCL: {said[-1].strip()[:200]}" if said else reason
    remedies = (*_REMEDIES, (_HANG, _REMEDY_OF_IMPORTS if importing else _REMEDY_OF_A_HANG))
    remedy = next((what for pattern, what in remedies if re.search(pattern, f"{text}\n{logs}")), "")
    hint = f"; {remedy}" if remedy else "; `autotune doctor` looks at the machine"
    return f"the ranks do not work together on this machine, before any config is tried: {text}{hint} (logs: {folder})"
