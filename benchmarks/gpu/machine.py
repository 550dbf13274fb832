"""The GPU, its driver, and the versions of the packages that a figure depends on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

from autotune.problem.nvml import GpuError, compute_capabilities, open_nvml, visible_gpus

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "triton", "flash_attn", "nvidia-ml-py")
_OF_CUDA = ("nvidia-nccl", "nvidia-cudnn")  # and a suffix for the version of CUDA


def describe(device: str) -> dict[str, Any]:
    """Return what NVML and package metadata show. CUDA is not woken and torch not imported."""
    found: dict[str, Any] = {
        "name": platform.processor() or platform.machine(),
        "device": device,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        **{name: _version(name) for name in PACKAGES},
        **_cuda_packages(),
    }
    if device == "cuda":
        with suppress(GpuError):
            for gpu in visible_gpus()[:1]:
                found |= {"name": gpu.name, "total_bytes": gpu.total_bytes, "free_bytes": gpu.free_bytes}
            found["compute_capability"] = next(iter(compute_capabilities()), None)
    return found | of_driver()


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what torch shows of its device. Wakes CUDA: runs in a process that measures nothing."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": arguments["device"]}
    found |= host_speed(torch, arguments["device"])
    if arguments["device"] == "cuda":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "total_bytes": total,
            "free_bytes": free,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def host_speed(torch: Any, device: str) -> dict[str, float]:
    """Return microseconds of one thread for a Python call, and for an operator of torch on CPU and on the device.

    The device's work is not waited for: it is the host that is measured, which limits steps of small kernels.
    """
    torch.set_num_threads(1)
    small = {"cpu": torch.ones(8, 8), "device": torch.ones(8, 8, device=device)}
    weight = {name: one.clone().requires_grad_() for name, one in small.items()}

    def nothing() -> None:
        return None

    def passes(name: str) -> None:
        for _ in range(20):
            (small[name] @ weight[name]).mul(
                2.0
            ).sum().backward()  # 3 operators, and 4 of backward with the sum of gradients

    def best(work: Callable[[], object], count: int, rounds: int = 7) -> float:
        seconds = []
        for _ in range(rounds):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                work()
            seconds.append(time.perf_counter() - began)
        return 1e6 * min(seconds) / count

    found = {"Python call us": best(nothing, 20_000)}
    for name, one in small.items():
        found |= {f"add us, {name}": best(lambda one=one: one.add(1.0), 500)}  # type: ignore[misc]
        found |= {f"20 passes us, {name}": best(lambda name=name: passes(name), 5)}  # type: ignore[misc]
    return found


def of_driver() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (lib := open_nvml()) is not None:
        with suppress(lib.NVMLError):
            found["driver"] = str(lib.nvmlSystemGetDriverVersion())
        with suppress(lib.NVMLError):
            found["driver_cuda"] = int(lib.nvmlSystemGetCudaDriverVersion())
    return found


def _cuda_packages() -> dict[str, str]:
    named = ((str(one.metadata["Name"] or "").lower(), one) for one in distributions())
    return {name: one.version for name, one in named if name.startswith(_OF_CUDA)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
