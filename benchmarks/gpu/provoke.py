"""Memory failures, provoked one a process, told as a rank of ours tells an error."""

from __future__ import annotations

import resource
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from autotune.rank.base import BaseRank
from autotune.util.linux import data_bytes
from autotune.util.units import GIB, MIB

LEFT_BYTES = 20 * MIB  # of the device, where something small is to fail
# Each is tried until it fails. torch's allocator asks CUDA for 10 MiB and more exactly, for 1 MiB in pieces of 2 MiB, and for
# what lies between in pieces of 20 MiB (c10/core/CachingDeviceAllocator.h: kMinLargeAlloc, kSmallBuffer, kLargeBuffer).
_BLOCKS = (4 * GIB, GIB, 256 * MIB, 64 * MIB, 16 * MIB, MIB)


def allow(limit: int, size: int | None = None) -> None:
    """Sets this process's own limit; None: as high as it may be."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (hard if size is None else size, hard))


class Told(BaseRank):
    """A rank without a parent, for how it describes an error."""

    def __init__(self, device: str) -> None:
        super().__init__(None, {"rank": 0, "world": 1, "device": device, "cap_bytes": None})  # type: ignore[arg-type]

    def run(self) -> None:
        raise NotImplementedError

    def described(self, error: BaseException) -> dict[str, Any]:
        return self._described(error)


class Room:
    """A device on which memory is made scarce. On a CPU nothing is: most cases then just succeed."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.kept: list[Any] = []
        if device == "cuda":
            torch.zeros(1, device=device)
        else:  # so that something fails there, too
            limit = data_bytes("self") + 512 * MIB
            allow(resource.RLIMIT_DATA, limit)

    def block(self, size: int) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.device)

    def fill(self, left_bytes: int = 0) -> None:
        """Keeps blocks until no more than this is free."""
        if self.device == "cpu":
            return
        for size in _BLOCKS:
            while self.torch.cuda.mem_get_info()[0] - left_bytes >= size:
                try:
                    self.kept.append(self.block(size))
                except self.torch.OutOfMemoryError:
                    break

    def cap(self, size: int) -> None:
        if self.device == "cuda":
            self.torch.cuda.set_per_process_memory_fraction(size / self.torch.cuda.mem_get_info()[1])

    def hoard(self) -> None:
        """Until it fails."""
        while True:
            self.kept.append(self.block(256 * MIB))

    def limit_addresses(self, more_bytes: int) -> None:
        """As `ulimit -v`: what is mapped now, and so much more."""
        mapped = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        allow(resource.RLIMIT_AS, mapped + more_bytes)


def allocator(room: Room) -> None:
    room.hoard()


def cap(room: Room) -> None:
    room.cap(2 * GIB)
    room.hoard()


def pinned_ulimit(room: Room) -> None:
    """As DeepSpeed pins a partition: a tensor that exists already."""
    plain = room.torch.empty(4 * GIB if room.device == "cuda" else MIB, dtype=room.torch.uint8)
    room.limit_addresses(GIB)
    room.kept.append(plain.pin_memory())


def pinned_too_much(room: Room) -> None:
    """More than the machine has, asked for at once: refused before a page is touched."""
    size = 4 * psutil.virtual_memory().total
    room.kept.append(room.torch.empty(size, dtype=room.torch.uint8, pin_memory=True))


def cublas(room: Room) -> None:
    square = room.torch.ones(64, 64, device=room.device, dtype=room.torch.bfloat16)
    room.fill(LEFT_BYTES)
    square @ square


def cudnn(room: Room) -> None:
    image, weights = (room.torch.ones(1, 8, 16, 16, device=room.device) for _ in range(2))
    room.fill(LEFT_BYTES)
    room.torch.nn.functional.conv2d(image, weights, padding=1)


def module(room: Room) -> None:
    """A kernel whose code is not loaded yet (CUDA loads lazily)."""
    values = room.torch.full((1024,), 0.5, device=room.device)
    room.fill()
    values.erfinv_()
    values.lgamma_()
    if room.device == "cuda":
        room.torch.cuda.synchronize()


def nccl(room: Room) -> None:
    dist = room.torch.distributed
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("nccl" if room.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    value = room.torch.ones(1, device=room.device)
    room.fill(LEFT_BYTES)
    dist.all_reduce(value)
    dist.barrier()


def triton(room: Room) -> None:
    if room.device == "cpu":  # Triton compiles for none
        return
    from benchmarks.gpu.kernel import add_one

    values = room.torch.zeros(1024, device=room.device)
    room.fill()
    add_one[(1,)](values, 1024)
    room.torch.cuda.synchronize()


CASES: dict[str, Callable[[Room], None]] = {
    case.__name__: case
    for case in (allocator, cap, pinned_ulimit, pinned_too_much, cublas, cudnn, module, nccl, triton)
}


def child(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The error that a rank would send, and its innermost frames; None where nothing failed."""
    import torch

    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # if the kernel has to end something, this

    try:
        room = Room(torch, arguments["device"])
        CASES[arguments["case"]](room)
    except BaseException as error:
        allow(resource.RLIMIT_DATA)
        allow(resource.RLIMIT_AS)
        frames = [[one.filename, one.name, one.line] for one in traceback.extract_tb(error.__traceback__)]
        return {"error": Told(arguments["device"]).described(error), "frames": frames[-6:]}
    return None
