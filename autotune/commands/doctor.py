"""What of this machine helps or hinders a study: each finding with what it costs and how to fix it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.file_systems import file_system_of
from autotune.group.environment import trial_environment
from autotune.predict.unread import newer_version
from autotune.problem.cpus import usable_cpus
from autotune.problem.hardware import facts_for, nvml, nvml_handle, visible_gpus
from autotune.problem.host import host_available_bytes, host_total_bytes
from autotune.units import GIB, MIB, format_bytes

_LEAST_SHM_BYTES = 64 * MIB  # NCCL's and gloo's shared segments, a data loader's batches
_BUILD_SECONDS = 1200


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `good`, `warn` (slower or fewer choices) or `bad` (a study cannot run)."""

    level: str
    what: str
    found: str
    cost: str = ""
    fix: str = ""


def examine(nvme_path: Path | None = None) -> list[Finding]:
    """Everything there is to find; builds DeepSpeed's CPU Adam where it is not built yet."""
    return [*_gpus(), *_memory(), *_disk(nvme_path), *_libraries()]


def _gpus() -> Iterator[Finding]:
    with nvml() as lib:
        if lib is None:
            yield Finding(
                "warn",
                "GPU",
                "NVML finds no driver",
                "only CPU ranks can be tuned",
                "install NVIDIA's driver, or run the container with --gpus all",
            )
            return
        version = lib.nvmlSystemGetDriverVersion()
        cuda = lib.nvmlSystemGetCudaDriverVersion()
        yield Finding("good", "driver", f"{version}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")
        for device in visible_gpus():
            yield _gpu(lib, device)


def _gpu(lib: Any, device: str) -> Finding:
    handle = nvml_handle(lib, device)
    name, memory = str(lib.nvmlDeviceGetName(handle)), lib.nvmlDeviceGetMemoryInfo(handle)
    what = f"GPU {device}"
    found = f"{name}, {format_bytes(memory.total)}, {format_bytes(memory.used)} in use"
    if memory.used > GIB:
        return Finding(
            "warn",
            what,
            found,
            "trials run out of memory earlier than your training would",
            "end the other processes (nvidia-smi lists them), or hide this GPU with CUDA_VISIBLE_DEVICES",
        )
    if facts_for(name, memory.total) is None:
        return Finding("warn", what, f"{found}, not in autotune's table", "no MFU", "add it to data/gpus.json")
    return Finding("good", what, found)


def _memory() -> Iterator[Finding]:
    total, available = host_total_bytes(), host_available_bytes()
    found = f"{format_bytes(available)} free of {format_bytes(total)}"
    if available < 0.25 * total or available < 4 * GIB:
        yield Finding("warn", "main memory", found, "offload to the CPU runs out early", "end what else is running")
    else:
        yield Finding("good", "main memory", found)
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding("warn", "shared memory", "no /dev/shm", "NCCL and data loaders fail", "mount a tmpfs there")
        return
    found = f"{format_bytes(shared.free)} free in /dev/shm"
    if shared.free < _LEAST_SHM_BYTES:
        yield Finding(
            "bad",
            "shared memory",
            found,
            "ranks die by SIGBUS or NCCL fails",
            "docker run --shm-size=8g (or --ipc=host)",
        )
    else:
        yield Finding("good", "shared memory", found)


def _disk(nvme_path: Path | None) -> Iterator[Finding]:
    runs = Path("runs") if Path("runs").is_dir() else Path()
    system = file_system_of(runs)
    free = shutil.disk_usage(runs).free
    found = f"{format_bytes(free)} free for runs/ ({system})"
    if free < GIB:
        yield Finding("warn", "disk", found, "a study's logs may not fit", "make room")
    elif system.on_network:
        yield Finding(
            "warn",
            "disk",
            found,
            "SQLite cannot lock there: new studies are kept in runs/NAME/study.journal, each write at the network's speed",
            "nothing needs to be done; a folder on a local disk is faster",
        )
    else:
        yield Finding("good", "disk", found)
    if nvme_path is not None:
        yield _nvme(nvme_path)


def _nvme(path: Path) -> Finding:
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding(
            "bad", "nvme path", f"{path} is no folder that can be written", "nvme offload fails", "make it writable"
        )
    system = file_system_of(path)
    found = f"{path} ({system.kind}), {format_bytes(shutil.disk_usage(path).free)} free"
    if system.on_network or system.kind in ("fuse", "overlay", "tmpfs"):
        return Finding("warn", "nvme path", found, "offload at the speed of that file system", "use a local NVMe drive")
    return Finding("good", "nvme path", found)


# Runs apart: imports of seconds, a CUDA context, and builds that may hang stay out of this process.
_EXAMINATION = """
import json, os, sys
out = {"errors": {}}
def attempt(name, work):
    try:
        out[name] = work()
    except Exception as error:
        out["errors"][name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
def torch_facts():
    import torch
    return {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
            "nccl": list(torch.cuda.nccl.version()) if torch.version.cuda else None}
attempt("torch", torch_facts)
def versions():
    import deepspeed, transformers, optuna
    return {"deepspeed": deepspeed.__version__, "transformers": transformers.__version__, "optuna": optuna.__version__}
attempt("versions", versions)
def op(name):
    from deepspeed.accelerator import get_accelerator
    from autotune.group.ops import load_ops
    if get_accelerator().create_op_builder(name) is None:
        raise RuntimeError("not for this device")
    if why := load_ops([name]).get(name):
        raise RuntimeError(why)
    return True
for name in sys.argv[1:]:
    attempt(name, lambda: op(name))
print("FACTS" + json.dumps(out))
"""
_OPS = {  # what is lost without it
    "CPUAdamBuilder": "optimizer offload to the CPU cannot be tried",
    "AsyncIOBuilder": "nvme offload cannot be tried",
    "FusedAdamBuilder": "--optimizer fused_adam cannot be tried",
}


def _libraries() -> Iterator[Finding]:
    device = "cuda" if visible_gpus() else "cpu"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _EXAMINATION, *_OPS],
            env=trial_environment(device, usable_cpus()),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "bad",
            "libraries",
            f"no answer within {_BUILD_SECONDS} s",
            "nothing can be measured",
            "try `ds_report`; a build that hangs says where",
        )
        return
    line = next((line for line in done.stdout.splitlines() if line.startswith("FACTS")), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("bad", "libraries", f"the probe died: {last[:160]}", "nothing can be measured", "reinstall torch")
        return
    yield from judge_libraries(json.loads(line[5:]), device)


def judge_libraries(facts: dict[str, Any], device: str) -> Iterator[Finding]:
    """Findings from what the examination reported."""
    errors = facts["errors"]
    torch = facts.get("torch")
    if torch is None:
        yield Finding("bad", "torch", errors["torch"], "nothing can be measured", "pip install torch==2.13.0")
        return
    if device == "cuda" and not torch["available"]:
        build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "a CPU build"
        yield Finding(
            "bad",
            "torch",
            f"{torch['version']}, {build}, sees no GPU though the driver does",
            "no GPU can be tuned",
            "install the torch wheel whose CUDA version is at most the driver's (first line above)",
        )
    else:
        yield Finding("good", "torch", f"{torch['version']}" + (f", CUDA {torch['cuda']}" if torch["cuda"] else ""))
    if device == "cuda":
        nccl = torch["nccl"]
        if nccl:
            yield Finding("good", "NCCL", ".".join(map(str, nccl)))
        else:
            yield Finding("bad", "NCCL", "missing", "no training on GPUs", "install torch's CUDA build")
    if "versions" in facts:
        versions = facts["versions"]
        newer = newer_version(versions.get("deepspeed", ""))
        level, cost, fix = ("warn", newer, "look for a newer autotune") if newer else ("good", "", "")
        yield Finding(level, "libraries", ", ".join(f"{k} {v}" for k, v in versions.items()), cost, fix)
    else:
        yield Finding(
            "bad", "libraries", errors["versions"], "nothing can be measured", "pip install -U deepspeed-autotune"
        )
    for op, cost in _OPS.items():
        name = f"DeepSpeed op {op.removesuffix('Builder')}"
        if op in facts:
            yield Finding("good", name, "built")
        else:
            fix = (
                "apt install libaio-dev"
                if op == "AsyncIOBuilder"
                else "pip install ninja, a C++ compiler and CUDA's nvcc"
            )
            yield Finding("warn", name, f"cannot be built: {errors.get(op, 'unknown')}", cost, f"{fix}; then again")
