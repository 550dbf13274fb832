"""What a figure was measured with: the GPU, its driver, and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune.problem.gpus import nvml

PACKAGES = ("deepspeed", "transformers", "accelerate", "triton", "flash_attn", "nvidia-ml-py")


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Wakes CUDA: never called in a process that measures."""
    import torch

    found: dict[str, Any] = {
        "name": platform.processor() or platform.machine(),
        "device": "cpu",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }
    if arguments["device"] == "cuda":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "name": properties.name,
            "device": "cuda",
            "compute_capability": f"{properties.major}.{properties.minor}",
            "total_bytes": total,
            "free_bytes": free,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
        }
    return found | of_driver()


def of_driver() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with nvml() as lib:
        if lib is not None:
            with suppress(lib.NVMLError):
                found["driver"] = str(lib.nvmlSystemGetDriverVersion())
            with suppress(lib.NVMLError):
                found["driver_cuda"] = int(lib.nvmlSystemGetCudaDriverVersion())
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
