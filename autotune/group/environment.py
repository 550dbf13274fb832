"""What a rank's process needs in its environment before its first instruction."""

from __future__ import annotations

import os
import sys

from autotune.problem.gpus import BY_BUS, ORDER
from autotune.processes import package_environment


def rank_environment(device: str) -> dict[str, str]:
    """The environment of a rank, or of a process that builds what ranks load.

    Args:
        device: `cuda` or `cpu`.
    """
    beside = os.path.dirname(sys.executable)
    env = {
        **package_environment(),
        # torch looks for ninja in PATH; pip put it beside this Python, which need not be an activated environment.
        # Always the same one: another version's log would make it build every op again.
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": device,
        ORDER: os.environ.get(ORDER, BY_BUS),  # as NVML counts: gauge and capacity are then the rank's own GPU's
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not wake the driver
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if device == "cpu":
        env |= {
            # Large blocks straight from mmap and back: peak memory then repeats whatever ran before.
            "MALLOC_MMAP_THRESHOLD_": "1048576",
            "MALLOC_TRIM_THRESHOLD_": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return env


def threads_per_rank(ranks: int) -> int:
    """CPU threads that each of `ranks` ranks of this machine computes with."""
    return max(1, min(8, (os.cpu_count() or 1) // ranks))
