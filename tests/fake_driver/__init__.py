"""A driver to test against: `nvml.c` is a library that the real bindings (nvidia-ml-py, torch's own) take for
`libnvidia-ml.so.1`, and answers what a test has written.

    driver.show(Card("NVIDIA GeForce RTX 3090", 24, processes={4711: 1300}))

The library reads the file again at every call: a test that changes `driver.cards` and writes them again has changed the
machine under whatever looks at it.

`cuda.c` stands in for `libcuda.so.1`: it logs each cuInit with its stack, and fails in a fork of a process that has called it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.problem import nvml

SOURCES = {"libnvidia-ml.so.1": "nvml.c", "libcuda.so.1": "cuda.c"}
CUDA_LOG = "FAKE_CUDA_LOG"
NO_PROCESS = 2**22  # Linux numbers processes below this (PID_MAX_LIMIT), so this machine has none of that number
# Codes of NVML, as the bindings name them.
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH = (
    3,
    4,
    9,
    13,
    15,
    18,
)


def new_uuid(kind: str) -> str:
    """One that no other device has, in this run or another: locks are of UUIDs, and the machine's."""
    return f"{kind}-{os.urandom(4).hex()}-0000-0000-0000-{os.urandom(6).hex()}"


@dataclass
class Slice:
    """A MIG device of a card; memory in GiB, that of processes in MiB by pid (-1: bytes that the driver does not tell)."""

    name: str
    memory_gib: float
    uuid: str = field(default_factory=lambda: new_uuid("MIG"))
    reserved_mib: int = 0
    hidden_mib: int = 0  # taken by processes that this container is not shown
    processes: dict[int, int] = field(default_factory=dict)
    graphics: dict[int, int] = field(default_factory=dict)  # of a desktop

    def lines(self) -> list[str]:
        return [
            f"uuid {self.uuid}",
            f"name {self.name}",
            f"total_mib {int(self.memory_gib * 1024)}",
            f"reserved_mib {self.reserved_mib}",
            f"hidden_mib {self.hidden_mib}",
            *(f"process {pid} {mib}" for pid, mib in self.processes.items()),
            *(f"graphics {pid} {mib}" for pid, mib in self.graphics.items()),
        ]


@dataclass
class Card(Slice):
    """A GPU."""

    uuid: str = field(default_factory=lambda: new_uuid("GPU"))
    reserved_mib: int = 320
    capability: tuple[int, int] = (8, 6)
    utilization: int = 0
    affinity: int = 0xFF
    nvlink: str = "switch"  # cards of the same name are joined; empty: none
    mig: bool = False
    slices: list[Slice] = field(default_factory=list)
    error: int = 0  # every call about it fails so

    def lines(self) -> list[str]:
        return [
            *super().lines(),
            f"capability {self.capability[0]} {self.capability[1]}",
            f"utilization {self.utilization}",
            f"affinity {self.affinity:x}",
            f"nvlink {self.nvlink}",
            f"mig {int(self.mig)}",
            f"error {self.error}",
            *(line for one in self.slices for line in ["slice", *one.lines()]),
        ]


@dataclass
class Driver:
    """The machine that the library shows, in the order of its PCI buses."""

    library: Path
    path: Path  # of the file that the library reads
    cards: list[Card] = field(default_factory=list)
    version: str = "580.95.05"
    cuda: int = 13000
    delay_ms: int = 0  # of every call
    failing: dict[str, int] = field(default_factory=dict)  # NVML's code by function

    def show(self, *cards: Card) -> None:
        """These cards from now on."""
        self.cards = [*cards]
        self.write()

    def write(self) -> None:
        lines = [f"driver {self.version}", f"cuda {self.cuda}", f"delay_ms {self.delay_ms}"]
        lines += [f"fail {name} {code}" for name, code in self.failing.items()]
        for number, card in enumerate(self.cards):
            lines += ["gpu", f"bus 00000000:{number + 1:02x}:00.0", *card.lines()]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.path)

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to find this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML": str(self.path)}


@dataclass(frozen=True)
class CudaCall:
    """A call of cuInit, as `cuda.c` has logged it."""

    pid: int
    result: int  # CUresult
    stack: str  # C frames, then Python's, innermost first


def cuda_calls(log: Path) -> list[CudaCall]:
    """Return the calls of cuInit so far, in order."""
    found: list[CudaCall] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        if line.startswith("cuInit "):
            _, pid, result = line.split()
            found.append(CudaCall(int(pid), int(result), ""))
        else:
            found[-1] = replace(found[-1], stack=f"{found[-1].stack}{line.strip()}\n")
    return found


def build(folder: Path, name: str = "libnvidia-ml.so.1") -> Path:
    """The library, compiled into the folder; the test is skipped where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake driver needs a C compiler: no cc here")
    library = folder / name
    # Without a soname: a process that has loaded it by its path can still load a real driver's by its name.
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command.append(str(Path(__file__).with_name(SOURCES[name])))
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def install(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """The bindings of this process call the fake driver until `patch` is undone."""
    import pynvml

    patch.setattr(nvml, "_opened_by", None)  # NVML was opened of another library, or of none
    patch.setenv("FAKE_NVML", str(driver.path))
    patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(driver.library)))
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.delenv("CUDA_DEVICE_ORDER", raising=False)
