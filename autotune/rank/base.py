"""Lifecycle of a rank: rendezvous, heartbeat, memory snapshot and error report.

A rank is a process that the parent starts, directly or by a fork. The rank connects to the parent's Unix socket, sends
`hello` and receives its `spec`. From then on both sides exchange JSON lines (`workers/protocol.py`).

The module imports no torch at its top: `hello` is sent first, and the environment is set before torch reads it.
"""

from __future__ import annotations

import datetime
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.errors import Unusable, UserError
from autotune.problem.job import Job
from autotune.problem.outcome import Phase
from autotune.util.linux import data_bytes, main_memory, own_memory
from autotune.util.units import MIB
from autotune.workers.failure_classifier import is_memory_error
from autotune.workers.jit_ops import link_without_space, use_own_folder
from autotune.workers.protocol import Channel, Message

if TYPE_CHECKING:
    from autotune.rank.devices import Device

EXIT_REPORTED = 13  # exit code of a rank that has reported its failure over the channel


def connect_to_parent(address: str, number: int) -> tuple[Channel, Message]:
    """Connect to the parent and send this rank's number.

    Return the channel, and the spec that the parent sent. The process leaves with code 1 if the parent closes the
    channel instead.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    channel = Channel(sock)
    channel.send("hello", rank=number)
    spec = channel.receive()
    if spec is None:
        exit_process(1)
    return channel, spec


def exit_process(code: int) -> NoReturn:
    """End this process at once, without the interpreter's cleanup.

    A peer may wait in a collective for ever, so nothing may wait for the peer. Besides, gloo's threads abort an
    interpreter that ends while its process group is open.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def error_chain(error: BaseException) -> list[BaseException]:
    """Return all causes and contexts of an error, the nearest first."""
    found = [error]
    for one in found:  # the list grows during the loop
        found += [cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in found]
    return found[1:]


class BaseRank(ABC):
    """One rank, from its spec to its end. A subclass implements the work in `run`."""

    # Longest time that a collective waits until there is an engine. The parent detects a hanging rank long before.
    collective_timeout = datetime.timedelta(hours=1)

    def __init__(self, channel: Channel, spec: Message) -> None:
        self.channel, self.spec = channel, spec
        self.number: int = spec["rank"]
        self.world: int = spec["world"]
        local: Any = spec.get("local_rank", self.number)
        self.local: int = local  # rank on its own host
        self.phase = Phase.START
        self.steps = 0  # optimizer steps so far
        self.device: Device | None = None
        self.heartbeat = Heartbeat(channel)
        self.written = ["."]  # folders that the training may write to
        self._last_progress = 0.0

    @abstractmethod
    def run(self) -> None:
        """Do the rank's work. The caller reports any exception."""

    # -- start -------------------------------------------------------------------------------------------------------

    def begin(self, *, joins: bool = True) -> None:
        """Set up the job, the environment, and the device with its cap.

        Args:
            joins: join the process group at once. A script's rank joins when the script creates its group.
        """
        if cpus := os.environ.get("AUTOTUNE_CPUS"):  # before any thread starts; the remaining CPUs belong to other jobs
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        own_memory()  # after the affinity is set, so that pages are copied close to these CPUs
        self.rendezvous = Rendezvous.from_spec(self.spec["store"], self.number, self.world)
        if port := self.rendezvous.open():
            self.channel.send("store", port=port, scripts_port=self.spec["port"])
        self.enter(Phase.START)
        self.heartbeat.start()
        self.job = Job.from_json(self.spec["job"])
        self._set_environment()
        import torch

        from autotune.rank.devices import make_device

        with suppress(OSError, UserError):  # an op that is needed fails with this reason where it is built
            link_without_space(use_own_folder())

        self.torch: Any = torch
        self.device = make_device(self.spec["device"], self.spec.get("pid", os.getpid()))
        self.fault(Phase.START)
        self.device.setup(self.local, self.spec["cap_bytes"], self.spec["threads"])
        if joins:
            self.join()
        else:
            self._report_device()

    def join(self, backend: str = "") -> None:
        """Join the process group. Every rank must call this.

        Args:
            backend: as the script names it. It counts if it adds one for other devices, such as `cpu:gloo,cuda:nccl`.
        """
        self._join_group(backend)
        self._report_device()

    def _report_device(self) -> None:
        """Apply the device's cap, and report its memory outside the allocator."""
        if told := self.own_device.joined():
            self.channel.send("device", **told)

    def _set_environment(self) -> None:
        """Set the variables that torchrun sets."""
        os.environ.update(
            RANK=str(self.number),
            LOCAL_RANK=str(self.local),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.spec.get("local_world", self.world)),
            MASTER_ADDR=self.rendezvous.host,
            MASTER_PORT=str(self.spec["port"]),
            DS_ACCELERATOR=self.spec["device"],
            OMP_NUM_THREADS=str(self.spec["threads"]),
        )
        if (nodes := self.spec.get("nodes", 1)) > 1:
            os.environ.update(GROUP_RANK=str(self.spec["node"]), GROUP_WORLD_SIZE=str(nodes))
        os.environ.update(self.spec.get("env", {}))
        os.environ["NCCL_DEBUG"] = os.environ.get("NCCL_DEBUG", "WARN")  # a failure then has its cause in the log

    def _join_group(self, backend: str) -> None:
        own = self.own_device.backend
        if f"cuda:{own}" not in backend:
            backend = own
        store = self.rendezvous.store(self.torch, self.collective_timeout)
        self.torch.distributed.init_process_group(
            backend, store=store, rank=self.number, world_size=self.world, timeout=self.collective_timeout
        )
        import deepspeed

        deepspeed.init_distributed(dist_backend=own, verbose=False)

    @property
    def step_timeout(self) -> datetime.timedelta:
        """Longest time that a collective of a step waits: the silence after which the parent ends a trial.

        NCCL's watchdog then names the collective in the rank's log.
        """
        return datetime.timedelta(0, self.spec.get("silence_seconds") or 3600.0)

    @property
    def own_device(self) -> Device:
        """Return the device that `begin` created."""
        assert self.device is not None
        return self.device

    def engine_built(self) -> None:
        """Update overhead and cap of the device, and the timeout of all groups, once DeepSpeed has made its communicators.

        DeepSpeed's own groups have torch's default of ten minutes with NCCL, whatever the script asks for.
        """
        self.own_device.engine_built()
        c10d = self.torch.distributed.distributed_c10d
        for group in [*c10d._world.pg_map]:
            c10d._set_pg_timeout(self.step_timeout, group)

    # -- messages to the parent --------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Enter a phase and send it to the parent."""
        self.phase = phase
        self.channel.send("phase", phase=phase)

    def progress(self, every_seconds: float = 0.0, **more: Any) -> None:
        """Send a heartbeat with the step count and `more`, unless the last one is more recent than `every_seconds`."""
        now = time.monotonic()
        if now - self._last_progress >= every_seconds:
            self._last_progress = now
            self.channel.send("progress", steps=self.steps, **more)

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
            "errnos": sorted(errnos(error)),
            "cause": str(error.cause) if isinstance(error, Unusable) else None,
            "full_disk": full_disk(self.written),
            "numbers": collect(self.spec["device"], self.spec.get("cap_bytes")),
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
            exit_process(EXIT_REPORTED)
        return described

    def leave_if_memory_ended(self, ended: SystemExit) -> None:
        """Report and leave if a script exits with an error code after it caught an OOM.

        Such a script prints its own message, and its exit code does not name the OOM.
        """
        if ended.code not in (None, 0):
            for error in error_chain(ended):
                self.leave_if_out_of_memory(error)

    # -- collectives -------------------------------------------------------------------------------------------------

    def agree(self, seconds: float) -> float:
        """Return the slowest rank's time, so that all ranks decide alike."""
        return self.reduce([seconds], "MAX")[0]

    def average(self, seconds: list[float]) -> list[float]:
        """Return each step's mean over the ranks.

        Ranks wait for each other within a step, so no rank stays slower for long.
        """
        return [one / self.world for one in self.reduce(seconds, "SUM")]

    def reduce(self, seconds: list[float], operation: str) -> list[float]:
        """Reduce each element over the ranks by an operation of torch.distributed.ReduceOp. Every rank must call this."""
        if self.world == 1:
            return seconds
        # A script may have set a default dtype of 16 bits and a default device.
        value = self.torch.tensor(seconds, dtype=self.torch.float64, device=self.own_device.torch_device())
        operator = getattr(self.torch.distributed.ReduceOp, operation)
        # DeepSpeed's own group: a communicator of the default group, in which no engine trains, would take memory
        group = getattr(sys.modules.get("deepspeed.utils.groups"), "_WORLD_GROUP", None)
        self.torch.distributed.all_reduce(value, op=operator, group=group)
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


# -- rendezvous --------------------------------------------------------------------------------------------------------
#
# Rendezvous of the ranks of a group: a file on one machine, a TCP port of the first machine on several.

_SQLITE_REFUSALS = (3, 8, 14)  # SQLITE_PERM, SQLITE_READONLY, SQLITE_CANTOPEN; attribute since Python 3.11
_BACKLOG = 1024
LOOPBACK = "127.0.0.1"


@dataclass
class Rendezvous:
    """Rendezvous of one rank with its peers.

    On one machine the rendezvous is a file, so two studies cannot meet. On several machines it is torch's TCPStore,
    which has no authentication. The first rank therefore binds it to the single address that its peers use, at a free
    port. All keys begin with a token that only this group knows.
    """

    number: int
    world: int
    file: str = ""
    host: str = LOOPBACK  # address of the first rank's machine, as its peers reach it
    port: int | None = None  # None if this rank opens the port, and has not done so yet
    token: str = ""
    _listener: socket.socket | None = field(default=None, repr=False)

    @classmethod
    def from_spec(cls, store: str | dict[str, Any], number: int, world: int) -> Rendezvous:
        """Build from the `store` of a spec: a file, or `host`, `port` and `token`."""
        if isinstance(store, str):
            return cls(number, world, file=store)
        return cls(number, world, host=store["host"], port=store["port"], token=store["token"])

    def open(self) -> int | None:
        """Bind the port if this rank is responsible for it, and return it; otherwise return None.

        Raises:
            OSError: this machine has no such address, or it cannot be bound.
        """
        if self.file or self.number or self.port is not None:
            return None
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind, protocol)
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        return self.port

    def store(self, torch: Any, timeout: datetime.timedelta) -> Any:
        """Return the torch.distributed store of the rendezvous."""
        distributed = torch.distributed
        if self.file:
            return distributed.FileStore(self.file, self.world)
        # torch closes the descriptor, so Python must release it.
        served = {} if self._listener is None else {"master_listen_fd": self._listener.detach()}
        met = distributed.TCPStore(
            self.host, self.port, self.world, is_master=bool(served), timeout=timeout, wait_for_workers=False, **served
        )
        return distributed.PrefixStore(self.token, met)


# -- memory snapshot ---------------------------------------------------------------------------------------------------
#
# Memory and disks after a failure, sent with every error for ambiguous error texts.
#
# torch is only used if it is loaded already, and CUDA is never initialized. No function raises. A driver or disk that
# does not answer costs `PATIENCE_SECONDS`. The blocked call stays in a daemon thread, which ends with the process.

PATIENCE_SECONDS = 2.0  # for the driver, which answers within a millisecond if it answers at all

FULL_BYTES = 16 * MIB  # bytes left on a full disk; a file that did not fit is mostly written

Numbers = dict[str, int]


def collect(device: str, cap_bytes: int | None = None) -> Numbers:
    """Return the available figures by name, in bytes.

    The host has `host_available_bytes` and `pinned_bytes`. The allocator has `reserved_bytes` and `allocated_bytes` and
    their peaks. The device has `free_bytes` and `total_bytes`, and `allowed_bytes` under a cap.

    Args:
        device: `cuda` or `cpu`.
        cap_bytes: cap of a CPU rank.
    """
    numbers: Numbers = {}
    with suppress(Exception):
        numbers["host_available_bytes"] = main_memory().available
    if device == "cpu":
        with suppress(Exception):
            numbers["reserved_bytes"] = data_bytes("self")
            numbers |= {"allowed_bytes": cap_bytes} if cap_bytes is not None else {}
    elif device == "cuda":
        torch: Any = sys.modules.get("torch")
        with suppress(Exception):
            if torch is not None and torch.cuda.is_initialized():
                index = torch.cuda.current_device()  # device of this thread; a new thread starts with GPU 0
                _within(PATIENCE_SECONDS, lambda: of_cuda(torch, index, numbers))
    return dict(numbers)  # a copy, because the thread may still write


def errnos(error: BaseException) -> set[int]:
    """Return the kernel's error numbers in a chain of exceptions. SQLite's own codes for a refusal count as EACCES."""
    found: set[int] = set()
    for one in (error, *error_chain(error)):
        if isinstance(one, OSError) and isinstance(one.errno, int):  # `OSError("no", "room")` has a text there
            found.add(one.errno)
        if getattr(one, "sqlite_errorcode", 0) & 0xFF in _SQLITE_REFUSALS:
            found.add(errno.EACCES)
    return found


def full_disk(folders: Sequence[str]) -> str:
    """Return the first of these folders whose disk is full, or an empty string.

    A quota that the file system does not report is not detected, and neither is a file system that does not answer.
    """
    full: list[str] = []

    def look() -> None:
        for folder in folders:
            with suppress(OSError):
                disk = os.statvfs(folder)
                if disk.f_bavail * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_favail == 0):
                    full.append(os.path.abspath(folder))

    _within(PATIENCE_SECONDS, look)
    return full[0] if full else ""


def of_cuda(torch: Any, index: int, numbers: Numbers) -> None:
    """Collect torch.cuda's figures of a device in use into `numbers`, each when it arrives.

    The driver is called first, because mem_get_info does not take torch's lock. If the driver hangs, torch's lock may
    be held for ever, and waiting for it would stop every thread.
    """
    with suppress(Exception):  # a context ruined by an error returns that error; torch's own counters still work
        torch.cuda.set_device(index)
        numbers["free_bytes"], numbers["total_bytes"] = (int(size) for size in torch.cuda.mem_get_info(index))
    with suppress(Exception):
        stats = torch.cuda.memory_stats(index)
        for name in ("allocated", "reserved"):
            numbers[f"{name}_bytes"] = int(stats[f"{name}_bytes.all.current"])
            numbers[f"{name}_peak_bytes"] = int(stats[f"{name}_bytes.all.peak"])
    with suppress(Exception):
        share = float(torch.cuda.get_per_process_memory_fraction(index))
        if share < 1.0 and "total_bytes" in numbers:
            numbers["allowed_bytes"] = int(share * numbers["total_bytes"])
    with suppress(Exception):  # not in every release
        numbers["pinned_bytes"] = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run the work in a thread and wait at most `seconds`."""
    with suppress(Exception):  # no thread can start if memory or process numbers have run out
        thread = threading.Thread(target=work, name="numbers", daemon=True)
        thread.start()
        thread.join(seconds)


# -- heartbeat ---------------------------------------------------------------------------------------------------------
#
# Building, saving, evaluating, tokenizing and compiling send no message for minutes. Once a second a thread samples the
# stacks of the main thread and of torch's own threads, and reports to the parent whether they have changed. The stacks of a
# rank that hangs do not change. On GPUs autograd runs a backward, with its collectives, in another thread.

BEAT_SECONDS = 1.0
# Paths of code in which a rank waits for its peers. Some collectives spin, so CPU time there is no progress.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
# Ends of paths of code that runs while torch.compile compiles a forward or a backward, and not in a compiled call.
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
_INNERMOST = 4  # innermost frames that are searched for a collective


class Heartbeat:
    """Send `pulse` messages until `stop`. A rank without progress is reported once.

    A message has `moved` (a thread made progress since the last one), `where` (its position), `waits` (a collective is
    running) and `compiles` (torch.compile is at work).
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="autotune-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat thread."""
        self._thread.start()

    def stop(self) -> None:
        """Request the heartbeat thread to stop."""
        self._stopped.set()

    def _beat(self) -> None:
        last: ThreadPosition | None = None
        told = False
        while not self._stopped.wait(BEAT_SECONDS):
            now = thread_position(self._main or 0)
            if now is None or self._channel.closed:
                return
            moved = last is None or now.place != last.place
            if moved or not told:
                self._channel.send("pulse", moved=moved, where=now.where, waits=now.waits, compiles=now.compiles)
            last, told = now, not moved


@dataclass(frozen=True)
class ThreadPosition:
    """Position of a rank's threads, without their frames: a stored frame would keep its variables' tensors alive."""

    place: tuple[tuple[int, int], ...]  # code and instruction of every frame
    where: str
    waits: bool
    compiles: bool = False


def thread_position(thread: int) -> ThreadPosition | None:
    """Return the current position of a thread by its identity and of torch's own threads, or None if it has ended.

    Threads that Python started are left out, because they may poll: those of loaders and of progress bars.
    """
    own = threading.get_ident()  # its frame would hold all others in a cycle
    frames = {one: frame for one, frame in sys._current_frames().items() if one == thread or one != own}
    if thread not in frames:
        return None
    stacks = {one: [frame for frame, _ in traceback.walk_stack(frames[one])] for one in frames}
    seen = [
        stack for one, stack in stacks.items() if one == thread or stack[-1].f_code.co_filename != threading.__file__
    ]
    place = tuple((id(frame.f_code), frame.f_lasti) for stack in seen for frame in stack)
    where = next((stack[0] for stack in seen if waits(stack[0])), frames[thread])
    return ThreadPosition(place, describe(where), waits(where), any(compiles(stack[0]) for stack in seen))


def describe(frame: FrameType) -> str:
    """Return a frame's position, like `all_reduce (torch/distributed/distributed_c10d.py:2810)`."""
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"


def waits(frame: FrameType) -> bool:
    """Return True if one of the innermost frames belongs to a collective."""
    innermost = islice(traceback.walk_stack(frame), _INNERMOST)
    return any(part in one.f_code.co_filename for one, _ in innermost for part in _COLLECTIVES)


def compiles(frame: FrameType) -> bool:
    """Return True if torch.compile compiles in this stack."""
    return any(one.f_code.co_filename.endswith(_COMPILERS) for one, _ in traceback.walk_stack(frame))
