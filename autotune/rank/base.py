"""Base of every rank: greet the parent, join the process group, report, leave.

A rank is a process that the parent starts, directly or by a fork. The rank connects to the parent's Unix socket, sends
`hello` and receives its `spec`. From then on both sides exchange JSON lines (`group/protocol.py`).

The module imports no torch at its top: `hello` is sent first, and the environment is set before torch reads it.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.errors import Unusable
from autotune.group.extensions import use_own_folder
from autotune.group.protocol import Channel, Message
from autotune.group.verdict import is_memory_error
from autotune.linux import own_memory
from autotune.problem.job import Job
from autotune.problem.outcome import Phase
from autotune.rank import numbers
from autotune.rank.meeting import Meeting
from autotune.rank.pulse import Pulse

if TYPE_CHECKING:
    from autotune.rank.devices import Device

EXIT_REPORTED = 13  # exit code of a rank that has reported its failure over the channel


def greet(address: str, number: int) -> tuple[Channel, Message]:
    """Connect to the parent and send this rank's number.

    The process leaves with code 1 if the parent closes the channel instead of sending a spec.

    Returns:
        The channel, and the spec that the parent sent.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    channel = Channel(sock)
    channel.send("hello", rank=number, pid=os.getpid())
    spec = channel.receive()
    if spec is None:
        leave(1)
    return channel, spec


def leave(code: int) -> NoReturn:
    """End this process at once, without the interpreter's cleanup.

    A peer may wait in a collective for ever, so nothing may wait for the peer. Besides, gloo's threads abort an
    interpreter that ends while its process group is open.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def handled(error: BaseException) -> list[BaseException]:
    """Return all causes and contexts of an error, the nearest first."""
    found = [error]
    for one in found:  # the list grows during the loop
        found += [cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in found]
    return found[1:]


class BaseRank(ABC):
    """One rank, from its spec to its end. A subclass implements the work in `run`."""

    def __init__(self, channel: Channel, spec: Message) -> None:
        self.channel, self.spec = channel, spec
        self.number: int = spec["rank"]
        self.sliced = bool(spec.get("slice_of"))  # the group's ranks stand for those of several nodes (a node slice)
        self.world: int = spec.get("slice_of") or spec["world"]  # ranks of the training
        local: Any = spec.get("local_rank", spec["rank"])
        self.local: int = local  # rank on its own host
        self.phase = Phase.START
        self.steps = 0  # optimizer steps so far
        self.device: Device | None = None
        self.pulse = Pulse(channel)
        self.written = ["."]  # folders that the training may write to
        self._last_progress = 0.0

    @abstractmethod
    def run(self) -> None:
        """Do the rank's work. The caller reports any exception."""

    # -- start -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Set up the job, the environment, the device with its cap, and the process group."""
        if cpus := os.environ.get("AUTOTUNE_CPUS"):  # before any thread starts; the remaining CPUs belong to other jobs
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        own_memory()  # after the affinity is set, so that pages are copied close to these CPUs
        self.meeting = Meeting.of(self.spec["store"], self.number, self.world)
        if (port := self.meeting.open()) is not None:
            self.channel.send("store", port=port, scripts_port=self.spec["port"])
        self.enter(Phase.START)
        self.pulse.start()
        self.job = Job.from_json(self.spec["job"])
        self._set_environment()
        import torch

        from autotune.rank.devices import make_device

        self.torch: Any = torch
        self.device = make_device(self.spec["device"])
        self.fault(Phase.START)
        self.device.setup(self.local, self.spec["cap_bytes"], self.spec["threads"])
        self._join_group(self.device)
        self.agree(0.0)  # NCCL allocates its buffers at the first collective
        if told := self.device.joined():
            self.channel.send("device", **told)

    def _set_environment(self) -> None:
        """Set the variables that torchrun sets."""
        os.environ.update(
            RANK=str(self.number),
            LOCAL_RANK=str(self.local),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.spec.get("local_world", self.world)),
            MASTER_ADDR=self.meeting.host,
            MASTER_PORT=str(self.spec["port"]),
            DS_ACCELERATOR=self.spec["device"],
            OMP_NUM_THREADS=str(self.spec["threads"]),
        )
        if (nodes := self.spec.get("nodes", 1)) > 1:
            os.environ.update(GROUP_RANK=str(self.spec["node"]), GROUP_WORLD_SIZE=str(nodes))
        os.environ.update(self.spec.get("env", {}))
        use_own_folder()

    def _join_group(self, device: Device) -> None:
        backend = device.backend
        if self.sliced:  # the fake backend transfers nothing: a gather copies the rank's own data
            from torch.testing._internal.distributed.fake_pg import FakeStore

            backend, store = "fake", FakeStore()
        else:
            store = self.meeting.store(self.torch, self.collective_timeout)
        self.torch.distributed.init_process_group(
            backend, store=store, rank=self.number, world_size=self.world, timeout=self.collective_timeout
        )
        import deepspeed

        deepspeed.init_distributed(dist_backend=device.backend, verbose=False)

    @property
    def collective_timeout(self) -> datetime.timedelta:
        """Longest time that a collective waits for its ranks."""
        return datetime.timedelta(hours=1)  # the parent detects a hanging rank long before

    @property
    def own_device(self) -> Device:
        """Return the device that `begin` created."""
        assert self.device is not None
        return self.device

    def engine_built(self) -> None:
        """Update overhead and cap of the device once DeepSpeed's communicators have allocated their buffers."""
        self.own_device.engine_built()

    # -- messages to the parent --------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Enter a phase and send it to the parent."""
        self.phase = phase
        self.channel.send("phase", phase=phase)

    def progress(self, every_seconds: float = 0.0) -> None:
        """Send a heartbeat with the step count, unless the last one is more recent than `every_seconds`."""
        now = time.monotonic()
        if now - self._last_progress >= every_seconds:
            self._last_progress = now
            self.channel.send("progress", steps=self.steps)

    def report(self, error: BaseException, described: Message | None = None) -> None:
        """Report an error when it is caught."""
        if self.device is not None:
            self.device.lift_cap()
        self.send_error(described or self._described(error))

    def send_error(self, described: Message) -> None:
        """Send an error as it was described when it was caught."""
        self.channel.send("error", **described)
        sys.stderr.write(described["traceback"])
        sys.stderr.flush()

    def _described(self, error: BaseException) -> Message:
        """Describe an error for the parent, with a memory snapshot of this moment."""
        frames = traceback.extract_tb(error.__traceback__)
        return {
            "phase": self.phase,
            "kinds": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
            "text": str(error)[:8000],
            "traceback": "".join(traceback.format_exception(error))[-16000:],
            "file": frames[-1].filename if frames else "",
            "files": [frame.filename for frame in frames],
            "rank": self.number,
            "cause": str(error.cause) if isinstance(error, Unusable) else None,
            "full_disk": numbers.full_disk(self.written),
            "numbers": numbers.collect(self.spec["device"], self.spec.get("cap_bytes")),
        }

    def leave_if_out_of_memory(self, error: BaseException) -> Message:
        """Report an OOM and leave; return the description of any other error.

        Without this, a script could catch the OOM and continue, and its peers would wait for ever.
        """
        described = None
        with suppress(MemoryError):  # under a cap, memory may not suffice for the description
            described = self._described(error)
        if described is None or is_memory_error(described, self.spec["device"]):
            self.progress()
            self.report(error, described)
            leave(EXIT_REPORTED)
        return described

    def leave_if_memory_ended(self, ended: SystemExit) -> None:
        """Report and leave if a script exits with an error code after it caught an OOM.

        Such a script prints its own message, and its exit code does not name the OOM.
        """
        if ended.code not in (None, 0):
            for error in handled(ended):
                self.leave_if_out_of_memory(error)

    # -- collectives -------------------------------------------------------------------------------------------------

    def agree(self, seconds: float) -> float:
        """Return the slowest rank's time, so that all ranks decide alike."""
        return self.reduce([seconds], "MAX")[0]

    def average(self, seconds: list[float]) -> list[float]:
        """Return each step's mean over the ranks.

        Ranks wait for each other within a step, so no rank stays slower for long.
        """
        return [one / (1 if self.sliced else self.world) for one in self.reduce(seconds, "SUM")]

    def reduce(self, seconds: list[float], operation: str) -> list[float]:
        """Reduce each element over the ranks. Every rank must call this.

        Args:
            operation: a name of torch.distributed.ReduceOp.
        """
        if self.world == 1 or self.sliced:
            return seconds
        device = self.own_device
        value = self.torch.tensor(seconds, dtype=self.torch.float64 if device.name == "cpu" else None)
        value = value.to(device.torch_device())
        self.torch.distributed.all_reduce(value, op=getattr(self.torch.distributed.ReduceOp, operation))
        return [float(one) for one in value.tolist()]

    # -- faults ------------------------------------------------------------------------------------------------------

    def fault(self, phase: Phase) -> None:
        """Trigger the fault that a test planted for this rank and phase.

        A fault hangs, kills by a signal, raises, or fills the memory of a rank with a cap.
        """
        planted = self.spec.get("fault")
        if not planted or planted["rank"] != self.number or planted["where"] != phase:
            return
        if planted["what"] == "hang":
            time.sleep(3600)
        elif planted["what"] == "oom":
            raise self.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (planted)")
        elif planted["what"] == "exhaust":
            hoard = []
            while self.spec["cap_bytes"]:
                hoard.append(self.torch.ones(2**24))  # 64 MiB
        elif planted["what"] == "raise":
            raise RuntimeError(planted.get("text", "planted"))
        else:
            os.kill(os.getpid(), getattr(signal, planted["what"]))
