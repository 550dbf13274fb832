"""Table of GPUs: capacity and speed of each card, by NVML's name or by a name that a user types."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autotune.errors import UserError, near
from autotune.units import GIB


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


@cache
def gpu_table() -> dict[str, GpuFacts]:
    text = (resources.files("autotune") / "data" / "gpus.json").read_text(encoding="utf-8")
    return {row["name"]: GpuFacts(**row) for row in json.loads(text)["gpus"]}


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
        raise UserError(f"unknown GPU {name!r}{near(plain, table)}; known: {', '.join(table)}")
    return found
