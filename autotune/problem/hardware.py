"""Hardware, detected or named, and usable CPUs."""

from __future__ import annotations

import dataclasses
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.problem.gpu_specs import (
    AMPERE,
    GpuFacts,
    default_host_bytes,
    facts_for,
    gpu_table,
    named_gpu,
    unlisted_gpu_facts,
)
from autotune.problem.host_memory import cgroup_folders, host_available_bytes
from autotune.problem.nvml import (
    BY_BUS,
    ORDER,
    Gpu,
    GpuError,
    architectures_to_set,
    compute_capabilities,
    lack_nvlink,
    order_is_unknown,
    order_to_set,
    settled_gpus,
    unseen_gpu,
)
from autotune.problem.outcome import OutcomeKind
from autotune.util.bounds import known_fields
from autotune.util.units import GIB, LEAST_MEMORY_BYTES, format_bytes

# -- hardware ----------------------------------------------------------------------------------------------------------
#
# Hardware of a job: detected through NVML and psutil, or named (`--gpu rtx3090`). No CUDA context is created.

# GB/s of a node's network, one direction: servers of PCIe cards have one adapter of 100 Gbit/s (NVIDIA's EGX reference designs).
_ADAPTER_GB_PER_S = 12.5

# Largest difference of two capacities that count as alike, as a share of the larger. Machines bought together, and one machine
# over time, differ by the memory that the driver, a desktop and other processes take.
CARD_APART, MAIN_MEMORY_APART = 0.02, 0.25


@dataclass(frozen=True)
class Hardware:
    """Devices that a study uses, on one machine or on several alike."""

    device: str  # "cuda" or "cpu"
    name: str  # name of the device model
    count: int  # devices used by ranks, over all nodes
    memory_bytes: int  # bytes of one device, all of its memory
    memory_cap_bytes: int | None  # bytes that one rank may use of it; None: no limit by the user
    host_memory_bytes: int  # bytes of one node's main memory available to the study at detection
    facts: str | None = None  # name of the GpuFacts row
    headroom: float = 0.05  # share of the capacity that a winner leaves free
    bf16: bool = True
    rates: dict[str, Any] | None = None  # GpuFacts given directly, if no row of the table applies
    taken_bytes: int = 0  # bytes of one device that the driver and other processes held at detection
    gpus: tuple[str, ...] = ()  # UUIDs of the devices, by rank; empty for CPU ranks and named GPUs
    # variables that a training needs to run as the trials did
    environment: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    threads: int | None = None  # CPU threads per rank, as reported by the nodes; None: a share of this machine's
    unified: bool = False  # GPU memory is main memory, so that offloading to the CPU frees nothing
    reserve_bytes: int = 0  # bytes of one device that another process will hold (`--reserve`)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.count % self.nodes:
            raise UserError(
                f"{self.count} devices cannot be split over {self.nodes} nodes: give a divisor of {self.count}"
            )

    @property
    def per_node(self) -> int:
        """Number of devices in each node."""
        return self.count // self.nodes

    @property
    def network_gb_per_s(self) -> float:
        """GB/s from one node to the others, one direction: as given, or assumed by the class of the card."""
        facts = self.gpu_facts
        if facts is None:
            return _ADAPTER_GB_PER_S
        return facts.network_gb_per_s or facts.adapter_gb_per_s * self.per_node or _ADAPTER_GB_PER_S

    def with_rates(self, **rates: Any) -> Hardware:
        """Return this hardware with other facts of its GPUs; CPU ranks have none."""
        facts = self.gpu_facts
        return dataclasses.replace(self, rates={**vars(facts), **rates}) if facts is not None else self

    @property
    def capacity_bytes(self) -> int:
        """Bytes that one rank may use; measured peaks are compared with this.

        They are the bytes that a new process could have at detection, its CUDA context included, or the user's cap if smaller.
        Memory that other processes already held then counts towards the reserve.
        """
        free = self.memory_bytes - max(self.taken_bytes, self.reserve_bytes)
        return min(free, self.memory_cap_bytes or free)

    def capped(self, memory_cap_bytes: int | None) -> Hardware:
        """Return this hardware with a cap on each rank's memory; None keeps the present cap.

        Raises:
            UserError: the cap is above the capacity.
        """
        if memory_cap_bytes is not None and memory_cap_bytes > self.capacity_bytes:
            raise UserError(
                f"--memory-cap {format_bytes(memory_cap_bytes)} is above the capacity of "
                f"{format_bytes(self.capacity_bytes)} a rank: give less, or leave it out"
            )
        return dataclasses.replace(self, memory_cap_bytes=memory_cap_bytes or self.memory_cap_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes to which a rank is limited; None without a cap and a reserve."""
        return self.capacity_bytes if self.memory_cap_bytes or self.reserve_bytes else None

    def reserving(self, reserve_bytes: int) -> Hardware:
        """Return this hardware with bytes of each device left to another process, like the rollout engine of RL.

        Raises:
            UserError: nothing is left for a rank.
        """
        if reserve_bytes and self.memory_bytes - reserve_bytes < LEAST_MEMORY_BYTES:
            raise UserError(
                f"--reserve {format_bytes(reserve_bytes)} leaves too little of {format_bytes(self.memory_bytes)} a rank "
                f"on {self.name}: give less"
            )
        return dataclasses.replace(self, reserve_bytes=reserve_bytes)

    @property
    def ceiling_bytes(self) -> int:
        """Bytes that a winner may use: the capacity less the headroom."""
        return int(self.capacity_bytes * (1 - self.headroom))

    def outgrew(self, ran_out: OutcomeKind, capacity_bytes: int | None) -> bool:
        """Check that the present capacity is clearly larger than `capacity_bytes`, so that a candidate with an OOM may fit now.

        The capacity is a rank's device, or for OOM_HOST a node's main memory. None means the present capacity.
        """
        of_host = ran_out is OutcomeKind.OOM_HOST
        apart = CARD_APART if self.device == "cuda" and not (self.unified or of_host) else MAIN_MEMORY_APART
        now = self.host_memory_bytes if of_host else self.capacity_bytes
        return capacity_bytes is not None and capacity_bytes < (1 - apart) * now

    @property
    def gpu_facts(self) -> GpuFacts | None:
        """Facts of the GPU, estimated for a slice or a GPU without a row in the table. None: CPU ranks."""
        if self.rates:
            return GpuFacts(**self.rates)
        if self.device != "cuda":
            return None
        return gpu_table().get(self.facts or "") or unlisted_gpu_facts(
            self.name, self.memory_bytes, unified=self.unified
        )

    def peak_tflops(self, precision: str) -> float | None:
        """Return the peak of one GPU; None for CPU ranks, and if it is only estimated: a share of it has no meaning."""
        card = self.gpu_facts
        if card is None or card.doubt:
            return None
        return card.fp32_tflops if precision == "fp32" else card.tflops

    def to_json(self) -> dict[str, Any]:
        """Return the hardware as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hardware:
        """Return the hardware of JSON data; ignore unknown keys."""
        return cls(**{**known_fields(cls, data), "gpus": tuple(data.get("gpus", ()))})

    def __str__(self) -> str:
        cap = f" capped at {format_bytes(self.capacity_bytes)} a rank" if self.memory_cap_bytes else ""
        if self.reserve_bytes:
            less = "," if cap else " less"
            cap += f"{less} {format_bytes(self.reserve_bytes)} reserved for another process"
        free = f"{format_bytes(self.memory_bytes - self.taken_bytes)} free of " if self.taken_bytes else ""
        whose = " of main memory" if self.unified else ""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.count} x {self.name} ({free}{format_bytes(self.memory_bytes)}{whose}){cap}{nodes}"


def named_hardware(
    name: str, count: int, *, host_memory_bytes: int | None = None, headroom: float = 0.05, nodes: int = 1
) -> Hardware:
    """Return `count` GPUs of the named model in `nodes` machines; this machine need not have any. Host memory is per machine.

    Raises:
        UserError: no such GPU, or the nodes cannot share them evenly.
    """
    row = named_gpu(name)
    host = host_memory_bytes or default_host_bytes(row.name, count // nodes)
    return Hardware(
        "cuda", row.name, count, int(row.memory_gib * GIB), None, host, row.name, headroom, row.bf16, nodes=nodes
    )


def detect(device: str, gpus: int | None, *, memory_cap_bytes: int | None = None, headroom: float = 0.05) -> Hardware:
    """Detect this machine's devices; `gpus=None` takes all GPUs, or with `cpu` two ranks. Only `cpu` gives CPU ranks.

    Raises:
        UserError: there are fewer devices than requested, a GPU is unusable and none is requested, or the cap exceeds the
            capacity.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f"--device {device}: expected auto, cuda or cpu")
    try:
        visible = settled_gpus(gpus) if device != "cpu" else []
    except GpuError as error:
        raise UserError(f"{error}; try --device cpu, or `autotune doctor`") from None
    if not visible and device != "cpu":
        why = unseen_gpu()
        none = f"found no GPU that can be used: {why}" if why else "found no GPU on this machine"
        raise UserError(
            f"{none}; add --device cpu for CPU ranks, call `autotune plan --gpu NAME`, or see `autotune doctor`"
        )
    found = _detect_cuda(visible, gpus) if visible else _detect_cpu(gpus)
    return dataclasses.replace(found, headroom=headroom).capped(memory_cap_bytes)


def _detect_cuda(visible: list[Gpu], gpus: int | None) -> Hardware:
    count = gpus or len(visible)
    if count > len(visible):
        if visible[0].is_slice:
            raise UserError(
                f"--gpus {count}: a CUDA process can use one MIG slice only, here {visible[0].name}, and NCCL "
                "refuses two ranks on it; try --gpus 1, or turn MIG off (`nvidia-smi -mig 0`)"
            )
        raise UserError(
            f"--gpus {count}: found {len(visible)} (CUDA_VISIBLE_DEVICES counts); try --gpus {len(visible)}, "
            f"or `autotune plan --gpu NAME --gpus {count}` to predict without them"
        )
    used = visible[:count]
    for one in used:
        if one.trouble:
            raise UserError(
                f"{one.label} does not answer ({one.trouble}): leave it out with CUDA_VISIBLE_DEVICES, or reset it "
                "(`nvidia-smi -r`, or a reboot)"
            )
    if order_is_unknown(count):
        raise UserError(
            f"{ORDER}={os.environ[ORDER]} with different GPUs: autotune cannot know which {count} come first in this order; "
            f"set {ORDER}={BY_BUS}, or name them by UUID in CUDA_VISIBLE_DEVICES"
        )
    memory = min(one.total_bytes for one in used)  # the smallest GPU decides whether a candidate fits
    facts = None if used[0].is_slice else facts_for(used[0].name, memory)  # the table's rates are those of whole cards
    found = Hardware(
        "cuda",
        " + ".join(sorted({one.name for one in used})),
        count,
        memory,
        None,
        host_available_bytes(),
        facts.name if facts else None,
        bf16=facts.bf16 if facts else all(float(one) >= AMPERE for one in compute_capabilities()),
        taken_bytes=memory - min(one.free_bytes for one in used),
        gpus=tuple(one.uuid for one in used),
        environment={**order_to_set(), **architectures_to_set()},
        unified=any(one.unified for one in used),
    )
    row = found.gpu_facts
    if row and row.link == "nvlink" and lack_nvlink(found.gpus):
        return found.with_rates(link="pcie", link_gb_per_s=row.pcie_gb_per_s, adapter_gb_per_s=0.0)
    return found


def _detect_cpu(gpus: int | None) -> Hardware:
    cores = os.cpu_count() or 1
    count, most = gpus or min(2, cores), max(2, cores)
    if count > most:
        raise UserError(f"--gpus {count}: {cores} CPU cores run at most {most} ranks; try --gpus {most}")
    host = host_available_bytes()
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Hardware("cpu", f"CPU rank of {name}", count, int(host * 0.9) // count, None, host)


# -- cpus --------------------------------------------------------------------------------------------------------------
#
# CPUs that this process may use: the machine's, limited by CPU affinity and cgroup quotas.
#
# `os.cpu_count()` ignores both limits: in a container of 8 CPUs on a machine of 128 it returns 128.


def usable_cpus() -> int:
    """Return the number of CPUs whose time this process can have, at least 1."""
    shares = [share for folder, _ in cgroup_folders("cpu") if (share := _share(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *shares])))


def threads_per_rank(ranks: int) -> int:
    """Return the CPU threads of each of `ranks` ranks of this machine: OMP_NUM_THREADS if set, else an equal share of the CPUs.

    torchrun and `accelerate launch` give each of several ranks one thread unless that variable is set. Every printed command
    therefore sets it.
    """
    own = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list sets the threads of nested levels
    if own.isdigit() and int(own) > 0:
        return int(own)
    return max(1, usable_cpus() // ranks)


def _share(folder: Path) -> float | None:
    """Return the quota of a cgroup in CPUs, or None.

    Source: Linux, admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst (`cpu.cfs_quota_us`, -1 for none).
    """
    with suppress(OSError, ValueError):
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
            )
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None
