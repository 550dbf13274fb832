"""GPUs that NVML shows to this process, and driver errors."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from typing import Any

from autotune.problem.host_memory import host_available_bytes, host_total_bytes
from autotune.util.interpreter import NVML_FILE
from autotune.util.linux import name_of, pid_is_alive
from autotune.util.units import MIB, format_bytes

# -- visible GPUs ------------------------------------------------------------------------------------------------------
#
# GPUs that CUDA shows a process of this environment, and their memory.
#
# NVML is queried, which creates no CUDA context and starts nothing. NVML numbers cards in the order of their PCI buses.
# CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which `workers/launchers.py` therefore sets for every rank unless
# the user has set it.

_TUNERS_NVML = "autotune_nvml"
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


# A killed process frees its memory over seconds: NVIDIA's driver unmaps it page by page while the process exits.
LOOK_AGAIN_SECONDS, _MOST_LOOKS = 1.0, 30
_NOBODYS_BYTES = 512 * MIB  # bytes held by no living process; a desktop or the driver may hold less than that


class GpuError(OSError):
    """NVML returns an error for a GPU."""


class GpuLost(GpuError):
    """GPU lost for good: it has fallen off the bus, needs a reset, or the driver is gone."""


@dataclass(frozen=True)
class Gpu:
    """State of a card, or of a MIG slice, at this moment. Sizes in bytes.

    Only `free_bytes` has the same meaning everywhere. NVML's version 1 counts the driver's share as used; version 2 does so on
    some drivers only (docs.nvidia.com/deploy/archive/R525/nvml-api/structnvmlMemory__v2__t.html against R590's).
    """

    label: str  # for display: `GPU 0`, `GPU 0 slice 1`
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int  # bytes that a new process can have, its CUDA context included
    reserved_bytes: int  # bytes that the driver keeps for itself; 0 if not reported
    holders: dict[int, int]  # bytes by pid, of the processes that NVML shows
    in_slices: bool = False  # a card in MIG mode: only its slices can be used, and only their memory is known
    is_slice: bool = False
    trouble: str = ""  # NVML's error if the card cannot be used
    unified: bool = False  # its memory is main memory

    @property
    def held_bytes(self) -> int:
        """Bytes that processes hold, including those that NVML does not show.

        If the memory is main memory, only processes that NVML shows count.
        """
        if self.unified:
            return sum(self.holders.values())
        return max(0, self.total_bytes - self.reserved_bytes - self.free_bytes)


# -- NVML ----------------------------------------------------------------------------------------------------------------


_opened_by: int | None = None  # pid of the process that has initialised NVML; a forked child initialises it again


def open_nvml() -> Any:
    """Return NVML's bindings, or None if no driver answers; `driver_failure` gives the reason.

    NVML is initialised once per process and never shut down. Without persistence mode each new opening may wake every card for
    seconds. A shutdown by the garbage collector may wait for the bindings' own lock for ever.
    """
    return None if driver_error() is not None else _bindings()


def _bindings() -> Any:
    """Return nvidia-ml-py from this environment, or else the tuner's copy, whose one file every Python can run.

    The package `pynvml` has the same module name and hides nvidia-ml-py. Its old releases lack calls that are used here.

    Raises:
        ImportError: nvidia-ml-py is not installed.
    """
    with suppress(ImportError):
        found = importlib.import_module("pynvml")
        if hasattr(found, "nvmlMemory_v2"):
            return found
    with suppress(KeyError):
        return sys.modules[_TUNERS_NVML]
    spec = importlib.util.spec_from_file_location(_TUNERS_NVML, os.environ.get(NVML_FILE) or _hidden_file())
    if spec is None or spec.loader is None:
        raise ImportError("nvidia-ml-py is not installed")
    # The name is private, so that `import pynvml` still fails in the user's own code.
    sys.modules[_TUNERS_NVML] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _hidden_file() -> str:
    """Return the file of this environment's nvidia-ml-py; empty if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))
    return ""


def driver_error() -> Exception | None:
    """Initialise NVML if this process has not yet; return the error of its bindings, None if the driver answers."""
    global _opened_by
    if _opened_by != os.getpid():
        try:
            _bindings().nvmlInit()
        except Exception as error:
            return error
        _opened_by = os.getpid()
    return None


def driver_failure() -> str:
    """Return why the driver does not answer; empty if it answers, or if this machine has none."""
    error = driver_error()
    if error is None:
        return ""
    try:
        pynvml = _bindings()
    except Exception:
        return f"nvidia-ml-py cannot be imported: {error}"
    return "" if isinstance(error, pynvml.NVMLError_LibraryNotFound) else str(error)


@contextmanager
def nvml_errors(label: str) -> Iterator[None]:
    """Convert NVML's errors to GpuError or GpuLost, with the GPU's name."""
    pynvml = _bindings()
    gone = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    try:
        yield
    except pynvml.NVMLError as error:
        kind = GpuLost if error.value in gone else GpuError
        raise kind(f"{label} does not answer: {error}") from None


def holders(lib: Any, handle: Any) -> dict[int, int]:
    """Return bytes by pid of the processes on a device that NVML shows. A container hides those outside of it, and often all."""
    found: dict[int, int] = {}
    for listed in (lib.nvmlDeviceGetComputeRunningProcesses, lib.nvmlDeviceGetGraphicsRunningProcesses):
        with suppress(lib.NVMLError_FunctionNotFound, lib.NVMLError_NotSupported, lib.NVMLError_NoPermission):
            for process in listed(handle):
                found[int(process.pid)] = max(found.get(int(process.pid), 0), int(process.usedGpuMemory or 0))
    return found


def holders_text(by_pid: dict[int, int]) -> str:
    """Format the largest holders first, like `python3 (pid 4711) 12.00 GiB, …`."""
    largest = sorted(by_pid.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name_of(pid) or 'a process'} (pid {pid}) {format_bytes(held)}" for pid, held in largest)


def free_by_uuid() -> dict[str, int]:
    """Return free bytes of every whole card and slice that this process may use; empty without a driver."""
    cards = _cards(with_holders=False)
    devices = [one for handle, card in cards for one in (card, *_slices(handle, card))]
    return {one.uuid: one.free_bytes for one in devices if not (one.trouble or one.in_slices)}


def bytes_of(pid: int, uuid: str) -> int | None:
    """Return the bytes that a process holds on a device; None if NVML does not show them, as in most containers."""
    lib = open_nvml()
    if lib is None:
        return None
    with suppress(lib.NVMLError):
        return holders(lib, lib.nvmlDeviceGetHandleByUUID(uuid)).get(pid) or None
    return None


# -- which there are -----------------------------------------------------------------------------------------------------


def all_cards() -> list[Gpu]:
    """Return the cards that this process may use, in the order of their PCI buses; empty without a driver."""
    return [gpu for _, gpu in _cards()]


def visible_gpus() -> list[Gpu]:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves visible, in CUDA's order; empty without a driver.

    A process sees at most one MIG slice, the first of the visible ones, and then no whole card (NVIDIA's MIG user guide, "CUDA
    Device Enumeration").

    Raises:
        GpuError: the driver does not answer.
    """
    cards = _cards()
    slices = [_slices(handle, card) for handle, card in cards]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.startswith("MIG-"):
        known = [one for of_card in slices for one in of_card]
        return [known[i] for i in by_uuid(wanted, "MIG-", [one.uuid for one in known])][:1]
    chosen = [cards[i][1] for i in selected(wanted, [card.uuid for _, card in cards])]
    usable = [slices[i] for i, (_, card) in enumerate(cards) if card in chosen]
    if sliced := [one for of_card in usable for one in of_card]:
        return sliced[:1]
    return [card for card in chosen if not card.in_slices]


def settled_gpus(count: int | None) -> list[Gpu]:
    """Return `visible_gpus` once the first `count` (None: all) regain no more memory from processes that have just ended.

    A study that was killed and restarted must not mistake its own ranks' memory for GPU contention.

    Raises:
        GpuError: the driver does not answer.
    """
    gpus = visible_gpus()
    for _ in range(_MOST_LOOKS):
        if not any(_is_held_by_no_process(gpu) for gpu in gpus[:count]):
            break
        time.sleep(LOOK_AGAIN_SECONDS)
        earlier, gpus = {gpu.uuid: gpu.free_bytes for gpu in gpus}, visible_gpus()
        if not any(gpu.free_bytes > earlier.get(gpu.uuid, 0) for gpu in gpus[:count]):
            break
    return gpus


def _is_held_by_no_process(gpu: Gpu) -> bool:
    """Check that much of the GPU's memory is held by no living process."""
    alive = sum(held for pid, held in gpu.holders.items() if pid_is_alive(pid))
    return gpu.held_bytes - alive > _NOBODYS_BYTES


def selected(wanted: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the cards that a value of CUDA_VISIBLE_DEVICES leaves visible.

    The rules are CUDA's as torch reads them (`torch.cuda._parse_visible_devices`). The leading digits of a word count (`1gpu` is
    1). The first number without a card ends the list. A repeated number leaves no card.

    Args:
        wanted: None if the variable is not set.
        uuids: of all cards, in CUDA's order.
    """
    if wanted is None:
        return list(range(len(uuids)))
    if wanted.startswith("GPU-"):
        return by_uuid(wanted, "GPU-", uuids)
    numbers = (re.match(r"[+-]?\d+", part.strip(), re.ASCII) for part in wanted.split(","))
    places = list(takewhile(lambda place: place >= 0, (int(number[0]) if number else -1 for number in numbers)))
    if len(set(places)) < len(places):
        return []
    return list(takewhile(lambda place: place < len(uuids), places))


def by_uuid(wanted: str, kind: str, uuids: Sequence[str]) -> list[int]:
    """Return the indices of devices by unambiguous prefixes of their UUIDs."""
    texts = list(takewhile(lambda part: part.startswith(kind), wanted.split(",")))
    if len(set(texts)) < len(texts):
        return []
    places: list[int] = []
    for text in texts:
        matching = [i for i, uuid in enumerate(uuids) if uuid.startswith(text)]
        if len(matching) != 1:
            break
        if matching[0] in places:
            return []
        places.append(matching[0])
    return places


def order_is_unknown(count: int) -> bool:
    """Check that NVML cannot determine which `count` cards CUDA takes.

    The case arises if the user sets another order for CUDA and only some of several unlike cards are used.
    """
    return os.environ.get(ORDER, BY_BUS) != BY_BUS and _order_matters() and count < len(all_cards())


def order_to_set() -> dict[str, str]:
    """Return the variables that make a training's GPU numbers match those of this module."""
    return {ORDER: BY_BUS} if ORDER not in os.environ and _order_matters() else {}


def _order_matters() -> bool:
    """Check that an index may mean different cards by bus and by speed: cards are unlike, and not named by UUID."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    return not named and len({card.name for card in all_cards()}) > 1


def compute_capabilities() -> list[str]:
    """Return the compute capabilities of the visible GPUs, like `["8.0", "9.0"]`, lowest first; empty without a driver."""
    found: set[tuple[int, int]] = set()
    lib = open_nvml()
    for gpu in visible_gpus():
        with suppress(lib.NVMLError):
            handle = lib.nvmlDeviceGetHandleByUUID(gpu.uuid)
            with suppress(lib.NVMLError):  # the slice's card has the capability
                handle = lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            found.add(tuple(lib.nvmlDeviceGetCudaComputeCapability(handle)))
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def lack_nvlink(uuids: Sequence[str]) -> bool:
    """Check that no NVLinks join all of these cards, as a ring of several ranks needs; False if the driver does not tell."""
    lib = open_nvml()
    with suppress(lib.NVMLError):
        left = [lib.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        reached = [left.pop()]
        for one in reached:  # the list grows during the loop
            joined = [p for p in left if not lib.nvmlDeviceGetP2PStatus(one, p, lib.NVML_P2P_CAPS_INDEX_NVLINK)]
            reached += joined
            left = [other for other in left if other not in joined]
        return left != []
    return False


def _cards(with_holders: bool = True) -> list[tuple[Any, Gpu]]:
    """Return handles and cards, without cards that this process may not open (a Slurm step's cgroup excludes them).

    NVML's count includes such cards, and CUDA's does not (nvmlDeviceGetCount_v2).
    """
    lib, found = open_nvml(), list[tuple[Any, Gpu]]()
    if lib is None:
        return found
    with nvml_errors("NVIDIA's driver"):
        count = lib.nvmlDeviceGetCount()
    for index in range(count):
        label = f"GPU {len(found)}"
        try:
            try:
                handle = lib.nvmlDeviceGetHandleByIndex(index)
            except lib.NVMLError_NoPermission:
                continue
            found.append((handle, _look(lib, handle, label, with_holders, in_slices=_in_slices(lib, handle))))
        except lib.NVMLError as error:
            found.append((None, Gpu(label, "", label, 0, 0, 0, {}, trouble=str(error))))
    return found


def _look(
    lib: Any, handle: Any, label: str, with_holders: bool = True, *, in_slices: bool = False, is_slice: bool = False
) -> Gpu:
    # Memory and processes of a card in MIG mode are visible to administrators only.
    own = (0, 0, 0) if in_slices else own_memory(lib, handle)
    total, free, reserved = own or shared_memory()
    return Gpu(
        label,
        lib.nvmlDeviceGetUUID(handle),
        lib.nvmlDeviceGetName(handle),
        total,
        free,
        reserved,
        holders(lib, handle) if with_holders and not in_slices else {},
        in_slices,
        is_slice,
        unified=own is None,
    )


def _in_slices(lib: Any, handle: Any) -> bool:
    try:
        return bool(lib.nvmlDeviceGetMigMode(handle)[0])
    except lib.NVMLError:  # the card does not support MIG
        return False


def _slices(handle: Any, card: Gpu) -> list[Gpu]:
    lib, found = open_nvml(), list[Gpu]()
    if card.in_slices:
        for index in range(lib.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(lib.NVMLError):  # indices may have gaps
                own = lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found.append(_look(lib, own, f"{card.label} slice {len(found)}", is_slice=True))
    return found


# -- memory shared with the host ---------------------------------------------------------------------------------------
#
# Memory of a GPU: its own, or main memory if it has none.
#
# Integrated GPUs (DGX Spark's GB10, Jetson) share the machine's memory. For these NVML reports that both versions of
# the call are not supported (leptonai/gpud#1170, XuehaiPan/nvitop#208), or a size of 0 (Syllo/nvtop#411).

Sizes = tuple[int, int, int]  # bytes: total, free, kept by the driver (0 if the driver does not report it)


def memory(lib: Any, handle: Any) -> Sizes:
    """Return a device's memory. For a device without its own, return main memory, of which a process gets its share."""
    return own_memory(lib, handle) or shared_memory()


def shared_memory() -> Sizes:
    """Return main memory as this process can have it, for a device without dedicated memory."""
    return host_total_bytes(), host_available_bytes(), 0


def own_memory(lib: Any, handle: Any) -> Sizes | None:
    """Return the device's own memory, or None if it has none."""
    try:
        found = lib.nvmlDeviceGetMemoryInfo(handle, lib.nvmlMemory_v2)
    except (lib.NVMLError_FunctionNotFound, lib.NVMLError_NotSupported):  # drivers before R510
        try:
            found = lib.nvmlDeviceGetMemoryInfo(handle)
        except lib.NVMLError_NotSupported:
            return None
    sizes = int(found.total), int(found.free), int(getattr(found, "reserved", 0))
    return sizes if sizes[0] else None


# -- driver errors -----------------------------------------------------------------------------------------------------


def unseen_gpu() -> str:
    """Return why CUDA shows no GPU, by the driver or by CUDA_VISIBLE_DEVICES; empty if the driver knows none."""
    trouble = driver_failure()
    if trouble:
        return f"NVIDIA's driver does not answer: {trouble}"
    cards = all_cards()
    if not cards:
        return ""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        return f"CUDA_VISIBLE_DEVICES={wanted} names none of the {len(cards)} GPUs"
    return "every GPU is in MIG mode and has no slice"


# -- architectures of builds -------------------------------------------------------------------------------------------
#
# DeepSpeed's builders split every entry of torch's list of architectures at its dot and convert both parts to integers
# (deepspeed 0.19.8, ops/op_builder/builder.py, `compute_capability_args`). Entries that torch accepts, like "9.0a", "10.0f"
# and "Hopper", end the build, and also the loading of an op that is already built.

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
_READABLE = re.compile(r"\d+\.\d+(\+PTX)?")


def unreadable_architectures() -> list[str]:
    """Return the entries of the user's list of architectures that DeepSpeed's builders cannot read."""
    entries = os.environ.get(ARCHITECTURES, "").replace(";", " ").split()
    return [entry for entry in entries if not _READABLE.fullmatch(entry)]


def architectures_to_set() -> dict[str, str]:
    """Return a list of architectures that DeepSpeed reads, in place of the user's if that is one that it cannot read.

    The list has the visible GPUs. Without a driver it has the numbers of the user's entries.
    """
    if not unreadable_architectures():
        return {}
    found = compute_capabilities() or sorted(set(re.findall(r"\d+\.\d+", os.environ[ARCHITECTURES])))
    return {ARCHITECTURES: ";".join(found)} if found else {}
