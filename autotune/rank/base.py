"""What every rank does, whatever it trains: greet its parent, join its process group, report, leave.

A rank is a process that the parent has started, directly or by forking. It connects to the parent's Unix socket, says
`hello`, receives its `spec`, and from then on both speak JSON lines (`group/protocol.py`).

This module imports no torch at its top: `hello` comes first, and the environment is set before torch reads it.
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

EXIT_REPORTED = 13  # the failure was reported over the channel


def greet(address: str, number: int) -> tuple[Channel, Message]:
    """Connects to the parent and says which rank this is; returns the channel and the spec that came over it. Leaves
    with code 1 where the parent closes the channel instead."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    channel = Channel(sock)
    channel.send("hello", rank=number, pid=os.getpid())
    spec = channel.receive()
    if spec is None:
        leave(1)
    return channel, spec


def leave(code: int) -> NoReturn:
    """Ends this process at once, without the interpreter's cleanup: a peer may sit in a collective for ever, nothing may
    wait for it, and gloo's threads abort an interpreter that ends while its process group is open."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def handled(error: BaseException) -> list[BaseException]:
    """The errors upon which, or in whose handling, it was raised, the nearest first."""
    found = [error]
    for one in found:  # which grows meanwhile
        found += [cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in found]
    return found[1:]


class BaseRank(ABC):
    """One rank, from its spec to its end. A kind of rank says in `run` what it does in between."""

    def __init__(self, channel: Channel, spec: Message) -> None:
        self.channel, self.spec = channel, spec
        self.number: int = spec["rank"]
        self.sliced = bool(spec.get("slice_of"))  # the group's ranks stand for those of several nodes
        self.world: int = spec.get("slice_of") or spec["world"]  # ranks of the training
        local: Any = spec.get("local_rank", spec["rank"])
        self.local: int = local  # its number among those of its machine
        self.phase = Phase.START
        self.steps = 0  # optimizer steps so far
        self.device: Device | None = None
        self.pulse = Pulse(channel)
        self.written = ["."]  # folders that the training may write into
        self._last_progress = 0.0

    @abstractmethod
    def run(self) -> None:
        """The rank's work. Whatever it raises is reported by its caller."""

    # -- the start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The job, the environment, the device with its cap, the process group."""
        if cpus := os.environ.get("AUTOTUNE_CPUS"):  # others are other jobs'; before anything starts threads
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        own_memory()  # beside the cores that it has now
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
        self.agree(0.0)  # NCCL takes its buffers with the first collective
        if told := self.device.joined():
            self.channel.send("device", **told)

    def _set_environment(self) -> None:
        """As torchrun sets it."""
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
        if (
            self.sliced
        ):  # says that it is the whole group, and carries nothing: a gather copies what the rank itself has
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
        """For how long a collective may wait for its ranks."""
        return datetime.timedelta(hours=1)  # the parent notices a rank that hangs long before

    @property
    def own_device(self) -> Device:
        """The device, which `begin` has made."""
        assert self.device is not None
        return self.device

    def engine_built(self) -> None:
        """Set overhead and cap of the device again, now that DeepSpeed's own communicators have their buffers."""
        self.own_device.engine_built()

    # -- what it tells -----------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """The rank is in this phase from now on, and its parent knows."""
        self.phase = phase
        self.channel.send("phase", phase=phase)

    def progress(self, every_seconds: float = 0.0) -> None:
        """Tells that the rank lives and how many steps it has done, where the last time was so long ago."""
        now = time.monotonic()
        if now - self._last_progress >= every_seconds:
            self._last_progress = now
            self.channel.send("progress", steps=self.steps)

    def report(self, error: BaseException, described: Message | None = None) -> None:
        """Says what happened, the moment it is caught."""
        if self.device is not None:
            self.device.lift_cap()
        self.send_error(described or self._described(error))

    def send_error(self, described: Message) -> None:
        """Says what happened earlier, as it was described then."""
        self.channel.send("error", **described)
        sys.stderr.write(described["traceback"])
        sys.stderr.flush()

    def _described(self, error: BaseException) -> Message:
        """An error as the parent hears of it, with what memory looks like now."""
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
        """Reports a memory failure and leaves: the script may catch it and go on, and its peers would wait for ever. Returns
        any other error as the parent hears of it."""
        described = None
        with suppress(MemoryError):  # under a cap there may be no room for it
            described = self._described(error)
        if described is None or is_memory_error(described, self.spec["device"]):
            self.progress()
            self.report(error, described)
            leave(EXIT_REPORTED)
        return described

    def leave_if_memory_ended(self, ended: SystemExit) -> None:
        """A program may catch that memory ran out, say so in its own way and end by itself, with an exit code that says
        nothing: that is reported, and the process left."""
        if ended.code not in (None, 0):
            for error in handled(ended):
                self.leave_if_out_of_memory(error)

    # -- among the ranks ---------------------------------------------------------------------------------------------

    def agree(self, seconds: float) -> float:
        """The slowest rank's time, so that all ranks take the same decisions."""
        return self.reduce([seconds], "MAX")[0]

    def average(self, seconds: list[float]) -> list[float]:
        """Each step's mean over the ranks: they wait for each other within a step, so none is slower for long."""
        return [one / (1 if self.sliced else self.world) for one in self.reduce(seconds, "SUM")]

    def reduce(self, seconds: list[float], operation: str) -> list[float]:
        """Element by element over the ranks; `operation` is a name of torch.distributed.ReduceOp. Every rank calls it."""
        if self.world == 1 or self.sliced:
            return seconds
        device = self.own_device
        value = self.torch.tensor(seconds, dtype=self.torch.float64 if device.name == "cpu" else None)
        value = value.to(device.torch_device())
        self.torch.distributed.all_reduce(value, op=getattr(self.torch.distributed.ReduceOp, operation))
        return [float(one) for one in value.tolist()]

    # -- faults ------------------------------------------------------------------------------------------------------

    def fault(self, phase: Phase) -> None:
        """A fault that a test plants: hang, die by a signal, raise, or take memory until there is none (of a rank with a cap),
        on one rank at the start of one phase."""
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
