"""What a job is trained on: detected through NVML and psutil, or named (`--gpu rtx3090`). Creates no CUDA context."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.errors import UserError, near
from autotune.problem.host import host_available_bytes
from autotune.units import GIB, format_bytes


@dataclass(frozen=True)
class GpuFacts:
    """A row of `data/gpus.json`; rates are peaks, one direction, of one GPU."""

    name: str
    match: str  # a pattern found in NVML's name; a short one must be a word of it (H200 is no GH200)
    memory_gib: float
    tflops: float  # dense 16-bit
    fp32_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    link: str
    pcie_gb_per_s: float
    bf16: bool


@dataclass(frozen=True)
class Hardware:
    """The devices of one machine that a study uses."""

    device: str  # "cuda" or "cpu"
    name: str  # of the device model
    count: int  # ranks' devices used
    memory_bytes: int  # of one device
    memory_cap_bytes: int | None  # what one rank may use of it, where the user said
    host_memory_bytes: int  # what the study may take of main memory, as it was when the hardware was detected
    facts: str | None = None  # name of the GpuFacts row
    headroom: float = 0.05  # share of the capacity that a winner leaves free
    bf16: bool = True
    rates: dict[str, Any] | None = None  # GpuFacts given outright, where no row of the table is meant

    @property
    def capacity_bytes(self) -> int:
        """Memory that one rank may use: its device's, or the user's cap where that is less."""
        return min(self.memory_bytes, self.memory_cap_bytes or self.memory_bytes)

    @property
    def ceiling_bytes(self) -> int:
        """Memory that a winner may use: the capacity less the headroom."""
        return int(self.capacity_bytes * (1 - self.headroom))

    @property
    def gpu_facts(self) -> GpuFacts | None:
        if self.rates:
            return GpuFacts(**self.rates)
        return gpu_table().get(self.facts) if self.facts else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hardware:
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

    def __str__(self) -> str:
        cap = f" capped at {format_bytes(self.capacity_bytes)} a rank" if self.memory_cap_bytes else ""
        return f"{self.count} x {self.name} ({format_bytes(self.memory_bytes)}){cap}"


@cache
def gpu_table() -> dict[str, GpuFacts]:
    text = (resources.files("autotune") / "data" / "gpus.json").read_text()
    return {row["name"]: GpuFacts(**row) for row in json.loads(text)["gpus"]}


def facts_for(nvml_name: str, memory_bytes: int) -> GpuFacts | None:
    """The row whose pattern matches NVML's name of the GPU; of several, the one nearest in memory. None: no row does."""
    words = set(nvml_name.replace("-", " ").split())
    rows = [
        row
        for row in gpu_table().values()
        if fnmatch.fnmatch(nvml_name, f"*{row.match}*") and (len(row.match) > 4 or row.match in words)
    ]
    if not rows:
        return None
    return min(rows, key=lambda row: (abs(row.memory_gib * GIB - memory_bytes), -len(row.match)))


def named_gpu(name: str) -> GpuFacts:
    """The row of a name like `rtx3090`, `a100-80gb`, `H100`.

    Raises:
        UserError: no such row.
    """
    table = gpu_table()
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "")
    plain = words.replace("_", "-").strip("-")
    aliases = {
        "a100": "a100-80gb",
        "a100-80": "a100-80gb",
        "a100-40": "a100-40gb",
        "v100": "v100-32gb",
        "h100-80gb": "h100",
        "h100-sxm": "h100",
        "a6000": "rtxa6000",
        "a5000": "rtxa5000",
        "a4000": "rtxa4000",
        "3090": "rtx3090",
        "4090": "rtx4090",
        "5090": "rtx5090",
        "6000-ada": "rtx6000-ada",
    }
    found = table.get(plain) or table.get(aliases.get(plain, "")) or table.get(plain.replace("-", ""))
    if found is None:
        raise UserError(f"unknown GPU {name!r}{near(plain, table)}; known: {', '.join(table)}")
    return found


def named_hardware(name: str, count: int, *, host_memory_bytes: int | None = None, headroom: float = 0.05) -> Hardware:
    """`count` GPUs of the named model, which need not be in this machine.

    Raises:
        UserError: no such GPU, or a count that makes no sense.
    """
    if not 1 <= count <= 4096:
        raise UserError(f"--gpus {count}: expected 1 to 4096")
    row = named_gpu(name)
    host = host_memory_bytes or max(64, 32 * count) * GIB
    return Hardware("cuda", row.name, count, int(row.memory_gib * GIB), None, host, row.name, headroom, row.bf16)


@contextmanager
def nvml() -> Iterator[Any]:
    """NVML's bindings, initialised, or None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[str]:
    """The devices that CUDA_VISIBLE_DEVICES leaves visible, as indices or UUIDs that NVML can open."""
    with nvml() as lib:
        if lib is None:
            return []
        count = lib.nvmlDeviceGetCount()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [str(i) for i in range(count)]
    ids = [part.strip() for part in wanted.split(",")]
    kept: list[str] = []
    for one in ids:
        if one.startswith(("GPU-", "MIG-")) or (one.isdigit() and int(one) < count):
            kept.append(one)
        else:
            break  # CUDA ignores everything from the first invalid entry on
    return kept


def nvml_handle(lib: Any, device: str) -> Any:
    """The NVML handle of an entry of `visible_gpus()`."""
    return lib.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else lib.nvmlDeviceGetHandleByUUID(device)


def detect(device: str, gpus: int | None, *, memory_cap_bytes: int | None = None, headroom: float = 0.05) -> Hardware:
    """The machine's own devices; `gpus=None` takes all GPUs, or two CPU ranks where there is none.

    Raises:
        UserError: fewer devices than asked for, or a cap above the capacity.
    """
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus}: expected at least 1")
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f"--device {device}: expected auto, cuda or cpu")
    visible = visible_gpus() if device != "cpu" else []
    if device == "cuda" and not visible:
        raise UserError("--device cuda: no GPU found (NVML sees none); try --device cpu, or `autotune doctor`")
    if device == "auto" and not visible and gpus is not None:
        raise UserError(
            f"--gpus {gpus}: found no GPU on this machine; try --device cpu --gpus {min(gpus, _cpu_ranks())} "
            "for CPU ranks, `autotune plan --gpu NAME` to predict without one, or `autotune doctor`"
        )
    found = _detect_cuda(visible, gpus) if visible else _detect_cpu(gpus)
    if memory_cap_bytes is not None and memory_cap_bytes > found.memory_bytes:
        raise UserError(
            f"--memory-cap {format_bytes(memory_cap_bytes)} is above the capacity of "
            f"{format_bytes(found.memory_bytes)} a rank: give less, or leave it out"
        )
    return dataclasses.replace(found, memory_cap_bytes=memory_cap_bytes, headroom=headroom)


def _cpu_ranks() -> int:
    return max(1, min(2, os.cpu_count() or 1))


def _detect_cuda(visible: list[str], gpus: int | None) -> Hardware:
    count = gpus or len(visible)
    if count > len(visible):
        raise UserError(
            f"--gpus {count}: found {len(visible)} (CUDA_VISIBLE_DEVICES counts); try --gpus {len(visible)}, "
            f"or `autotune plan --gpu NAME --gpus {count}` to predict without them"
        )
    names, sizes = [], []
    with nvml() as lib:
        for one in visible[:count]:
            handle = nvml_handle(lib, one)
            name = lib.nvmlDeviceGetName(handle)
            names.append(name.decode() if isinstance(name, bytes) else str(name))
            sizes.append(int(lib.nvmlDeviceGetMemoryInfo(handle).total))
    memory = min(sizes)  # the smallest decides what fits
    facts = facts_for(names[0], memory)
    return Hardware(
        "cuda",
        " + ".join(sorted(set(names))),
        count,
        memory,
        None,
        host_available_bytes(),
        facts.name if facts else None,
        bf16=facts.bf16 if facts else True,
    )


def _detect_cpu(gpus: int | None) -> Hardware:
    count = gpus or _cpu_ranks()
    cores = os.cpu_count() or 1
    if count > max(2, cores):
        raise UserError(
            f"--gpus {count}: {cores} CPU cores carry at most {max(2, cores)} ranks; try --gpus {max(2, cores)}"
        )
    host = host_available_bytes()
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return Hardware("cpu", f"CPU rank of {name}", count, int(host * 0.9) // count, None, host)
