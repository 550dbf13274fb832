"""The machine: its devices, programs, packages and variables, and what autotune and torch detect."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from autotune.util.linux import main_memory
from benchmarks.gpu.ground import EXPECTED, Ground, Row, run_child

_TEXT = 6000  # characters of a command's output
COMMANDS = {
    "nvidia-smi": "nvidia-smi; nvidia-smi -q -d MEMORY,CLOCK,PERFORMANCE | head -80",
    "kernel": "uname -a; head -3 /etc/os-release; id; ulimit -a; cat /proc/self/cgroup; nproc; free -g; df -h / /tmp /dev/shm",
    "main memory": "head -3 /proc/meminfo; cat /sys/devices/system/memory/block_size_bytes; "
    "ls -d /sys/devices/system/memory/memory* | wc -l; ls /sys/bus/virtio/drivers",
    "host names": 'hostname; getent hosts "$(hostname)"; ip -br addr 2>/dev/null || cat /proc/net/dev; cat /etc/hosts',
    "compilers": "which -a nvcc c++ ninja cc; nvcc -V | tail -2; c++ --version | head -1; ls -d /usr/local/cuda*; "
    "for h in cusparse.h cusolverDn.h cublas_v2.h cuda_runtime_api.h curand.h; do "
    'ls "${CUDA_HOME:-/usr/local/cuda}/include/$h"; done',
    "packages": "which -a python3; python3 -V; python3 -m pip list 2>/dev/null | grep -iE '^(torch|deepspeed|transformers|"
    "accelerate|peft|optuna|pydantic|numpy|triton|nvidia-|filelock|psutil|typer|rich|datasets|flash|liger)'",
    "variables": "env | grep -E '^(CUDA|NCCL|NVIDIA|TORCH|PYTORCH|LD_|PATH|CPATH|HOME|OMP|TMPDIR)'; "
    "ldconfig -p | grep -E 'libcuda|nvidia-ml'",
}


def run(ground: Ground) -> Iterator[Row]:
    for what, command in COMMANDS.items():
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
        yield {"what": what, "output": [(done.stdout + done.stderr)[-_TEXT:]]}
    yield {"what": "main memory as autotune counts it", **main_memory()._asdict()}
    hardware = ground.hardware()
    yield {"what": "detected", "hardware": hardware.to_json(), "as": str(hardware), EXPECTED: hardware.count == 1}
    machine = run_child("machine", {"device": ground.device})
    why = [machine.stderr[-1500:]]
    yield {"what": "torch", "machine": machine.result, "why": why, EXPECTED: machine.result is not None}
