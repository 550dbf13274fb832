"""Environment variables that a process needs before its first instruction.

A training has the user's environment and the few additions that make it equal to the measured run. A trial is also
quiet. No allocator variables are set, because a trial must be as fast and as large as training.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from types import MappingProxyType

from autotune.interpreter import current
from autotune.problem.candidate import Candidate
from autotune.problem.gpus import BY_BUS, ORDER, compute_capabilities

THREADS = "OMP_NUM_THREADS"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def training_environment(device: str, threads: int) -> dict[str, str]:
    """Return the environment of a rank that trains, or of a process that builds for ranks.

    Args:
        device: `cuda` or `cpu`.
        threads: number of CPU threads for computing.
    """
    beside = os.path.dirname(current().path)
    env = {
        **current().environment(),
        # torch looks for ninja in PATH. pip installs it next to this Python, whose environment may not be activated.
        # The same ninja must always be found, because another version's log would make it rebuild every op.
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": device,
        ORDER: os.environ.get(ORDER, BY_BUS),  # NVML's order, so that monitor and capacity match the rank's GPU
        # set before any OpenMP library loads: the only way to reach a second one next to torch's
        THREADS: str(threads),
    }
    return env | {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else env


def trial_environment(device: str, threads: int) -> dict[str, str]:
    """Return the environment of a rank that is measured: a training's, but quiet and safe to fork."""
    return {
        **training_environment(device, threads),
        **_architectures(device),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not initialize the driver
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _architectures(device: str) -> dict[str, str]:
    """Return the GPU architectures for which DeepSpeed builds its ops.

    Without the variable, DeepSpeed's builders query CUDA, which initializes the driver in the fork server. The value
    equals the result of that query (`OpBuilder.compute_capability_args`).
    """
    if device == "cpu" or ARCHITECTURES in os.environ:
        return {}
    found = compute_capabilities()
    return {ARCHITECTURES: ";".join(found) + "+PTX"} if found else {}  # as DeepSpeed and torch do


def variables_of(candidate: Candidate, threads: int, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the variables to set before the command that trains with a candidate.

    These are the variables of the measured ranks that no launcher sets itself.

    Args:
        own: the user's own variables during the measurement, which may differ from this process's.
    """
    return {**own, THREADS: str(threads), **candidate.environment(own)}


def assignments(variables: Mapping[str, str]) -> str:
    """Return `NAME=value NAME=value`, as a shell accepts before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
