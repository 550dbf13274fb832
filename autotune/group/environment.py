"""What a process of ours needs in its environment before its first instruction.

A training has the user's own environment and the little without which it would not be the one that was tuned. A trial is
quiet besides. Nothing here sets an allocator's variables: a trial must be as fast, and as large, as training will be.
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
    """The environment of a rank that trains, or of a process that builds what ranks load.

    Args:
        device: `cuda` or `cpu`.
        threads: that it computes with on the CPU.
    """
    beside = os.path.dirname(current().path)
    env = {
        **current().environment(),
        # torch looks for ninja in PATH; pip put it beside this Python, which need not be an activated environment.
        # Always the same one: another version's log would make it build every op again.
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": device,
        ORDER: os.environ.get(ORDER, BY_BUS),  # as NVML counts: gauge and capacity are then the rank's own GPU's
        # before any OpenMP library is loaded: a second one beside torch's hears of it in no other way
        THREADS: str(threads),
    }
    return env | {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else env


def trial_environment(device: str, threads: int) -> dict[str, str]:
    """The environment of a rank that is measured: a training's, but quiet, and safe to fork."""
    return {
        **training_environment(device, threads),
        **_architectures(device),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not wake the driver
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _architectures(device: str) -> dict[str, str]:
    """For which GPUs DeepSpeed builds its ops. Where nothing is said its builders ask CUDA, which wakes the driver in the fork
    server; they are told what they would find (`OpBuilder.compute_capability_args`)."""
    if device == "cpu" or ARCHITECTURES in os.environ:
        return {}
    found = compute_capabilities()
    return {ARCHITECTURES: ";".join(found) + "+PTX"} if found else {}  # as both DeepSpeed and torch add it to the last


def variables_of(candidate: Candidate, threads: int, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """What stands before the command that trains with a candidate: the variables that its ranks were measured under and
    that no launcher sets by itself.

    Args:
        own: the user's own that it was measured under; this process's need not be the same any more.
    """
    return {**own, THREADS: str(threads), **candidate.environment(own)}


def assignments(variables: Mapping[str, str]) -> str:
    """`NAME=value NAME=value`, as a shell takes them before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
