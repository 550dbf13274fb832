"""GPU table, estimates for unlisted GPUs, prices, and main memory of cloud machines."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from autotune.errors import UserError, did_you_mean
from autotune.problem.nvml import open_nvml
from autotune.util.files import shipped_json
from autotune.util.units import GIB

# -- GPU table ---------------------------------------------------------------------------------------------------------
#
# Table of GPUs: capacity and speed of each card, by NVML's name or by a name that a user types.


_AMPERE = 8.0  # lowest compute capability of cards that compute in bf16


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
    network_gb_per_s: float | None = None  # of a whole node; None: estimated from the class of the card
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
    rows = shipped_json("gpus.json")["gpus"]
    return {row["name"]: GpuFacts(**row, bf16=row["compute_capability"] >= _AMPERE) for row in rows}


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
    if not rows:
        return None
    return min(rows, key=lambda row: (abs(row.memory_gib * GIB - memory_bytes), -len(row.match)))


def named_gpu(name: str) -> GpuFacts:
    """Return the row of a name like `rtx3090`, `a100-80gb`, `H100`.

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
        raise UserError(
            f"unknown GPU {name!r}{did_you_mean(plain, table, 0.0)} docs/gpus.md lists all {len(table)} names"
        )
    return found


# -- estimates for unlisted GPUs ---------------------------------------------------------------------------------------
#
# Rates of a GPU without a row in the table: a slice, a virtual part of a card, or an unlisted card.
#
# Figures from the driver are preferred to a card with a similar name, and that to the card nearest in memory. None is
# exact: `GpuFacts.doubt` gives the uncertainty and `whence` the source.

# Standard deviations of a rate's logarithm. A slice has its share of multiprocessors and memory, but its own clocks. The driver
# reports maximum clocks and counts, from which the table's rates follow within 30 %.
_OF_A_SLICE, _FROM_DRIVER, _VIRTUAL, _SIMILAR = 0.3, 0.35, 0.5, 1.0
# `NVIDIA A100-SXM4-80GB MIG 1g.10gb`, `... MIG 1c.3g.40gb` (NVIDIA's MIG user guide, "Device Names")
_SLICE = re.compile(r"(?P<card>.+?)\s+MIG\s+(?:(?P<compute>\d+)c\.)?(?P<slices>\d+)g\.(?P<gb>\d+)gb", re.IGNORECASE)
_SLICES, _OF_FOUR = 7, re.compile(r"\bA30\b|RTX PRO")  # slices per card, at most ("Supported MIG Profiles")
# `GRID A100D-40C`, `NVIDIA H100XM-80C`, of a slice `GRID A100D-1-10C` (NVIDIA's vGPU user guide, "Virtual GPU Types"). A D marks
# the card with twice the memory.
_PART = re.compile(
    r"(?:GRID|NVIDIA|Tesla)\s+(?P<card>[A-Z]+\d+)(?P<kind>[A-Z]*)-(?:(?P<slices>\d)-)?(?P<gb>\d+)[ABCQ]\w*$"
)
# Ratio of 16-bit throughput in tensor cores to 32-bit throughput, by compute capability (NVIDIA's architecture whitepapers).
# GeForce has half of it from Ampere on if sums have 32 bits.
_TENSOR = {(6, 0): 2.0, (6, 1): 1.0, (7, 0): 8.0, (7, 5): 8.0, (8, 0): 16.0, (8, 6): 4.0, (8, 7): 4.0, (8, 9): 4.0}
_TENSOR |= {(9, 0): 14.8, (10, 0): 30.0, (10, 3): 30.0, (11, 0): 16.0, (12, 0): 4.0, (12, 1): 4.0}
_PCIE_GB_PER_S = {1: 3.0, 2: 6.0, 3: 12.0, 4: 24.0, 5: 50.0, 6: 100.0}  # by generation, for 16 lanes, as in the table
_MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_MAIN_MEMORY_GB_PER_S = 250.0  # GPUs whose memory is main memory: DGX Spark and Jetson Thor 273, Orin 205 (data sheets)
_SHARED = "l4"  # row nearest to those
_DESKTOP = ("rtx", "gtx", "quadro", "titan")


@dataclass(frozen=True)
class NvmlFigures:
    """Figures of a card from NVML: peaks, one direction. None: not reported."""

    capability: tuple[int, int]
    fp32_tflops: float | None = None
    memory_gb_per_s: float | None = None
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None


def driver_figures(uuid: str) -> NvmlFigures | None:
    """Return the driver's figures of a whole card, or None if it does not answer. Nothing is started on the card."""
    with suppress(Exception):  # a failed estimate must not raise
        if (lib := open_nvml()) is not None:
            return _told(lib, lib.nvmlDeviceGetHandleByUUID(uuid))
    return None


def _told(lib: Any, handle: Any) -> NvmlFigures:
    def asked(name: str, *arguments: Any) -> float | None:
        with suppress(lib.NVMLError, AttributeError):  # an older driver, or old bindings
            return float(getattr(lib, name)(handle, *arguments)) or None
        return None

    capability = tuple(lib.nvmlDeviceGetCudaComputeCapability(handle))
    cores, clock = asked("nvmlDeviceGetNumGpuCores"), asked("nvmlDeviceGetMaxClockInfo", lib.NVML_CLOCK_SM)
    width, rate = asked("nvmlDeviceGetMemoryBusWidth"), asked("nvmlDeviceGetMaxClockInfo", lib.NVML_CLOCK_MEM)
    generation, lanes = asked("nvmlDeviceGetMaxPcieLinkGeneration"), asked("nvmlDeviceGetMaxPcieLinkWidth")
    links = sum(bool(asked("nvmlDeviceGetNvLinkState", link)) for link in range(_MOST_LINKS))
    a_link = 50.0 if capability >= (10, 0) else 25.0  # GB/s of NVLink 5, and of 2 to 4
    lane = _PCIE_GB_PER_S.get(int(generation), _PCIE_GB_PER_S[4]) / 16 if generation else None
    return NvmlFigures(
        capability,
        fp32_tflops=2 * cores * clock * 1e6 / 1e12 if cores and clock else None,
        memory_gb_per_s=2 * rate * 1e6 * width / 8 / 1e9 if rate and width else None,  # both edges of the clock
        pcie_gb_per_s=lane * lanes if lane and lanes else None,
        nvlink_gb_per_s=links * a_link if links else None,
    )


@cache
def unlisted_gpu_facts(
    name: str, memory_bytes: int, nvml_figures: NvmlFigures | None = None, *, unified: bool = False
) -> GpuFacts:
    """Return facts of a GPU from its NVML name, its memory and its driver's figures.

    Args:
        memory_bytes: of the whole device.
        nvml_figures: figures of a whole card.
        unified: its memory is main memory.
    """
    if " + " in name:  # unlike cards: ranks wait for the slowest
        return min(
            (unlisted_gpu_facts(one, memory_bytes, nvml_figures, unified=unified) for one in name.split(" + ")),
            key=_speed,
        )
    if slice_ := _SLICE.match(name):
        whole = 4 if _OF_FOUR.search(slice_["card"]) else _SLICES
        of_card = min(1.0, int(slice_["slices"]) / whole)
        card = unlisted_gpu_facts(slice_["card"], int(memory_bytes / of_card))
        return _shared(card, memory_bytes, min(1.0, int(slice_["compute"] or slice_["slices"]) / whole))
    if row := facts_for(name, memory_bytes):
        # The driver may give a slice the name of its card.
        return row if memory_bytes > 0.7 * row.memory_gib * GIB else _shared(row, memory_bytes)
    if (part := _PART.match(name)) and (row := _card_of(part)):
        if part["slices"]:
            return _shared(row, memory_bytes, int(part["slices"]) / _SLICES)
        said = f"those of {row.name}, of which it is a virtual part"
        return _adapted(row, memory_bytes, said, _VIRTUAL, bf16=row.bf16)
    if nvml_figures is not None and nvml_figures.fp32_tflops:
        return _from_driver(name, memory_bytes, nvml_figures, unified)
    similar = gpu_table()[_SHARED] if unified else _similar_row(name, memory_bytes)
    bf16 = nvml_figures is None or nvml_figures.capability >= (8, 0)
    return _adapted(similar, memory_bytes, f"those of {similar.name}, the likest that is", _SIMILAR, bf16=bf16)


def _speed(facts: GpuFacts) -> float:
    return facts.tflops


def _adapted(row: GpuFacts, memory_bytes: int, whence: str, doubt: float, **changed: Any) -> GpuFacts:
    """Return the row adapted to a similar device, under the row's name: network adapters, link and context are alike."""
    doubt = max(doubt, row.doubt)
    return dataclasses.replace(row, memory_gib=memory_bytes / GIB, whence=whence, doubt=doubt, **changed)


def _shared(card: GpuFacts, memory_bytes: int, computing: float | None = None) -> GpuFacts:
    """Return a slice's facts: its share of the multiprocessors (None: that of memory), and its share of memory's rate."""
    of_memory = min(1.0, memory_bytes / GIB / card.memory_gib)
    share = computing or of_memory
    return _adapted(
        card,
        memory_bytes,
        f"{share:.0%} of those of {card.name}, of which it is a slice",
        _OF_A_SLICE,
        tflops=share * card.tflops,
        fp32_tflops=share * card.fp32_tflops,
        memory_gb_per_s=of_memory * card.memory_gb_per_s,
    )


def _card_of(part: re.Match[str]) -> GpuFacts | None:
    """Return the card of a virtual part: the first of that name with enough memory; for a D the largest."""
    for stem in (f"{part['card']}{part['kind']}".lower(), part["card"].lower()):
        rows = [row for row in gpu_table().values() if row.name.removeprefix("quadro-").split("-")[0] == stem]
        if rows and part["kind"].startswith("D"):
            return max(rows, key=lambda row: row.memory_gib)
        if rows:
            return next((row for row in rows if row.memory_gib >= 0.9 * int(part["gb"])), rows[-1])
    return None


def _from_driver(name: str, memory_bytes: int, nvml_figures: NvmlFigures, unified: bool) -> GpuFacts:
    assert nvml_figures.fp32_tflops
    older = [tensor for capability, tensor in sorted(_TENSOR.items()) if capability <= nvml_figures.capability]
    tensor = older[-1] if older else 1.0
    if "GeForce" in name and nvml_figures.capability >= (8, 6):
        tensor /= 2
    tflops = tensor * nvml_figures.fp32_tflops

    def unlike(row: GpuFacts) -> float:
        return abs(math.log(row.tflops / tflops)) + abs(math.log(row.memory_gib * GIB / memory_bytes))

    kin = gpu_table()[_SHARED] if unified else min(gpu_table().values(), key=unlike)
    memory = _MAIN_MEMORY_GB_PER_S if unified else nvml_figures.memory_gb_per_s or kin.memory_gb_per_s
    pcie = nvml_figures.pcie_gb_per_s or kin.pcie_gb_per_s
    return _adapted(
        kin,
        memory_bytes,
        "reckoned from what its driver says",
        _FROM_DRIVER if unified or nvml_figures.memory_gb_per_s else _SIMILAR,
        tflops=tflops,
        fp32_tflops=nvml_figures.fp32_tflops,
        memory_gb_per_s=memory,
        pcie_gb_per_s=pcie,
        link_gb_per_s=nvml_figures.nvlink_gb_per_s or (kin.link_gb_per_s if kin.link == "pcie" else pcie),
        link="nvlink" if nvml_figures.nvlink_gb_per_s else "pcie",
        bf16=nvml_figures.capability >= (8, 0),
        compute_capability=float("{}.{}".format(*nvml_figures.capability)),
    )


def _similar_row(name: str, memory_bytes: int) -> GpuFacts:
    """Return the row of a similar GPU: by the name (GH200 for h200), or else by class, then by memory.

    If several have similar memory, the one with median speed is returned.
    """
    rows = list(gpu_table().values())
    words = re.findall(r"[a-z]+\d+", name.lower())
    desktop = any(word in name.lower() for word in _DESKTOP)
    kinds: Sequence[Callable[[GpuFacts], bool]] = (
        lambda row: any(word.endswith(row.name.split("-")[0]) for word in words),
        lambda row: row.name.startswith(_DESKTOP) is desktop,
    )
    rows = next((found for kind in kinds if (found := [row for row in rows if kind(row)])), rows)
    least = min(_doublings(row, memory_bytes) for row in rows)
    alike = sorted((row for row in rows if _doublings(row, memory_bytes) <= least + 0.15), key=_speed)
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
        when = f", {self.date}" if self.date else ""
        return f"${self.usd_per_hour:.2f} a GPU and hour ({self.provider}{when})"


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
