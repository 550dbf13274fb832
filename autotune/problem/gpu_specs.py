"""GPU table, estimates for unlisted GPUs, prices, and main memory of cloud machines."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from dataclasses import dataclass
from functools import cache

from autotune.errors import UserError, did_you_mean
from autotune.util.files import shipped_json
from autotune.util.units import GIB

# -- GPU table ---------------------------------------------------------------------------------------------------------
#
# Table of GPUs: capacity and speed of each card, by NVML's name or by a name that a user types.


AMPERE = 8.0  # lowest compute capability of cards that compute in bf16


@dataclass(frozen=True)
class GpuFacts:
    """Row of `data/gpus.json`; rates are peaks of one GPU, in one direction."""

    name: str
    match: str  # pattern to find in NVML's name; a short one must be a whole word (H200 is not GH200)
    memory_gib: float
    tflops: float  # dense 16-bit
    fp32_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    link: str
    pcie_gb_per_s: float
    bf16: bool
    achievable: float = 0.85  # share of `tflops` that the best matrix products reach
    adapter_gb_per_s: float = 0.0  # share of its node's network; 0: a node of such cards has one adapter
    network_gb_per_s: float = 0.0  # of a whole node; 0: by the adapters
    ring_gb_per_s: float = 0.0  # of an all-reduce through all ranks, as the self-test measured it
    doubt: float = 0.0  # standard deviation of the rates' logarithms, if the rates are no table row's
    whence: str = ""  # source of such rates
    compute_capability: float = 0.0  # 0: unknown, as in rates that older studies stored

    @property
    def is_recent_server_card(self) -> bool:
        """True for Hopper's and Blackwell's server cards; the desktop's Blackwell has compute capability 12."""
        return 9.0 <= self.compute_capability < 12.0


@cache
def gpu_table() -> dict[str, GpuFacts]:
    """Return the rows of `data/gpus.json` by name."""
    return {
        row["name"]: GpuFacts(**row, bf16=row["compute_capability"] >= AMPERE)
        for row in shipped_json("gpus.json")["gpus"]
    }


def facts_for(nvml_name: str, memory_bytes: int) -> GpuFacts | None:
    """Return the row whose pattern matches NVML's name of the GPU, or None.

    If several rows match, the row nearest in memory is returned.
    """
    words = set(nvml_name.replace("-", " ").split())
    rows = [
        row
        for row in gpu_table().values()
        if fnmatch.fnmatch(nvml_name, f"*{row.match}*") and (len(row.match) > 4 or row.match in words)
    ]
    return min(rows, key=lambda row: (abs(row.memory_gib * GIB - memory_bytes), -len(row.match)), default=None)


def named_gpu(name: str) -> GpuFacts:
    """Return the row of a name like `rtx3090`, `a100-80gb`, `H100`.

    Raises:
        UserError: no such row.
    """
    table = gpu_table()
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "")
    plain = words.replace("_", "-").strip("-")
    found = (
        table.get(plain)
        or table.get(shipped_json("gpus.json")["aliases"].get(plain, ""))
        or table.get(plain.replace("-", ""))
    )
    if found is None:
        raise UserError(
            f"unknown GPU {name!r}{did_you_mean(plain, table, 0.0)} docs/gpus.md lists all {len(table)} names"
        )
    return found


# -- estimates for unlisted GPUs ---------------------------------------------------------------------------------------

_SIMILAR = 1.0  # standard deviation of the logarithm of an unlisted card's rates
_SHARED = "l4"  # row for GPUs whose memory is main memory: DGX Spark, Jetson (205 to 273 GB/s by their data sheets)
_DESKTOP = ("rtx", "gtx", "quadro", "titan")


@cache
def unlisted_gpu_facts(name: str, memory_bytes: int, *, unified: bool = False) -> GpuFacts:
    """Return facts of a GPU without a row in the table: those of the nearest row, with a wide doubt.

    The nearest row is that of the whole card by NVML's name, if the device has most of its memory. Otherwise it is the nearest
    in memory among desktop or server cards; of several, the one with median speed.

    Args:
        memory_bytes: of the whole device, which may be a slice or a virtual part of a card.
        unified: its memory is main memory.
    """
    row = gpu_table()[_SHARED] if unified else _nearest_row(name, memory_bytes)
    return dataclasses.replace(
        row, memory_gib=memory_bytes / GIB, whence=f"those of {row.name}, the nearest listed", doubt=_SIMILAR
    )


def _nearest_row(name: str, memory_bytes: int) -> GpuFacts:
    same = facts_for(name, memory_bytes)
    if same is not None and memory_bytes > 0.7 * same.memory_gib * GIB:
        return same
    desktop = any(word in name.lower() for word in _DESKTOP)
    rows = [row for row in gpu_table().values() if row.name.startswith(_DESKTOP) is desktop]
    least = min(_doublings(row, memory_bytes) for row in rows)
    alike = sorted((row for row in rows if _doublings(row, memory_bytes) <= least + 0.15), key=lambda row: row.tflops)
    return alike[len(alike) // 2]


def _doublings(row: GpuFacts, memory_bytes: int) -> float:
    return abs(math.log2(row.memory_gib * GIB / memory_bytes))


# -- prices ------------------------------------------------------------------------------------------------------------
#
# Rental prices of GPUs from `data/prices.json`, rough and dated.


@dataclass(frozen=True)
class Price:
    """Price of one GPU on demand; `date` is the month or year in which the provider's list was read."""

    usd_per_hour: float
    provider: str
    date: str
    source: str

    def __str__(self) -> str:
        return f"${self.usd_per_hour:.2f} a GPU and hour ({self.provider}, {self.date})"


@cache
def price_table() -> dict[str, Price]:
    """Return prices by the names of `data/gpus.json`; a card without a listed price is missing."""
    return {row.pop("gpu"): Price(**row) for row in shipped_json("prices.json")["prices"]}


# -- cloud machines ----------------------------------------------------------------------------------------------------
#
# Main memory of common cloud machines from `data/hosts.json`: the default of a plan for a named card.

_WORKSTATION_GIB_PER_GPU, _WORKSTATION_GIB = 32, 64  # for cards that no common cloud machine has


@dataclass(frozen=True)
class CloudMachine:
    """Main memory of a common cloud machine, as one GPU's share; `date` as in `Price`."""

    gib_per_gpu: float
    shape: str
    date: str
    source: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.date}"


@cache
def cloud_machines() -> dict[str, CloudMachine]:
    """Return the common cloud machine of each card by the names of `data/gpus.json`; a card that none has is missing."""
    return {row.pop("gpu"): CloudMachine(**row) for row in shipped_json("hosts.json")["hosts"]}


def default_host_bytes(name: str, gpus_per_node: int) -> int:
    """Return the main memory, in bytes, to assume for a machine with `gpus_per_node` of the card `name`."""
    machine = cloud_machines().get(name)
    if machine is None:
        return max(_WORKSTATION_GIB, _WORKSTATION_GIB_PER_GPU * gpus_per_node) * GIB
    return int(machine.gib_per_gpu * gpus_per_node * GIB)
