"""`autotune agent`: a node's side of a study."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from autotune._version import __version__
from autotune.errors import Stopped, UserError
from autotune.executors.cluster.rpc import ASIDE, GREETING_SECONDS, POLL_SECONDS, SILENT_SECONDS
from autotune.executors.machine import LocalMachine, Ops, RankRequirements, remove_scratch, trial_sandbox
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect, threads_per_rank
from autotune.problem.job import Job
from autotune.problem.nvml import open_nvml
from autotune.script.argument_writer import write_trial_files
from autotune.util.files import SocketFolder, cache_root
from autotune.util.inquiry import PACKAGES
from autotune.util.interpreter import OWN, Interpreter, interpreter_at
from autotune.util.linux import NOTICES, adopt_orphans, handled_signals
from autotune.workers.failure_classifier import log_tail
from autotune.workers.gpu_locks import lock_gpus, lock_holder
from autotune.workers.gpu_memory import make_meter
from autotune.workers.host_workers import LocalWorkers
from autotune.workers.protocol import Message, Stream

# -- agent -------------------------------------------------------------------------------------------------------------

_LOOK_SECONDS = 0.1
_MOST_LOG_BYTES = 256 * 1024  # bytes of a rank's log that are sent to the tuner


class NodeAgent:
    """Starts groups of ranks on this node for one tuner, which calls methods by name and with JSON values.

    A method that this class lacks is one of the ranks' `LocalWorkers`. The methods of `ASIDE` may be called at any time, the
    others one after the other.
    """

    def __init__(self) -> None:
        self._kept = ExitStack()  # folder and locks
        # the next agent deletes the folder of a killed one
        self.folder = self._kept.enter_context(contextlib.closing(SocketFolder("autotune-agent-"))).path
        self._lines: list[str] = []  # for the user
        self.ending = threading.Event()
        self._interpreter: Interpreter = OWN  # of the ranks
        self._machine = LocalMachine(self.folder, Ops(self._lines.append), self.ending.is_set)
        self._hardware: Hardware | None = None
        self._meter: Any = None
        self._lock = threading.Lock()  # held by each method that is not in `ASIDE`
        self._workers: LocalWorkers | None = None
        self._group = self._cancelled_group = 0  # numbers of groups of ranks
        self._sent_state: Message = {}

    def call(self, method: str, fields: Message) -> Message:
        """Call a method and return its value, or the type and text of its error."""
        held = contextlib.nullcontext() if method in ASIDE else self._lock
        try:
            with held:
                owner = self if hasattr(self, method) else self._running
                return {"value": getattr(owner, method)(**fields)}
        except (UserError, Stopped, OSError) as error:
            kind = next(one.__name__ for one in (UserError, Stopped, OSError) if isinstance(error, one))
            return {"failure": kind, "text": str(error), "errno": getattr(error, "errno", None)}
        except Exception as error:  # the tuner knows the node's name and decides
            return {"failure": "Exception", "text": f"{type(error).__name__}: {error}"}

    def greeting(self) -> Message:
        """Return the version and the process."""
        return {"version": __version__, "pid": os.getpid()}

    def clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def exists(self, path: str) -> bool:
        """Return True if this node has the path."""
        return Path(path).exists()

    # -- preparation -------------------------------------------------------------------------------------------------

    def survey(
        self,
        *,
        env: dict[str, str],
        python: str | None,
        cwd: str,
        path: str,
        device: str,
        count: int,
        headroom: float,
        memory_cap_bytes: int | None,
    ) -> dict[str, Any]:
        """Return all values that the tuner compares before anything starts.

        Args:
            env, python, cwd: environment, Python and working directory of the ranks, if they exist here.
            path: required path; may be empty.
            count: number of devices in use.

        Raises:
            UserError: the node has too few devices, the path is missing, or a required folder cannot be written.
        """
        os.environ.update(env)
        with suppress(OSError):
            os.chdir(cwd)
        if python is not None:
            self._interpreter = interpreter_at(python, "--python")
        interpreter = self._interpreter
        hardware = detect(device, count, memory_cap_bytes=memory_cap_bytes, headroom=headroom)
        if path and not Path(path).exists():
            raise UserError(f"no {path} there; expected what is trained in the same place on every node")
        for folder in (Path(tempfile.gettempdir()), cache_root()):
            _check_writable(folder)
        held = [f"{gpu} is in use by autotune ({who})" for gpu in hardware.gpus if (who := lock_holder(gpu))]
        if held:
            raise UserError(f"{held[0]}: wait for it, or leave the node out")
        versions = {package: found for package in PACKAGES if (found := interpreter.version(package))}
        by_ray, by_ssh = os.environ.get(_ADDRESS_OF_RAY), os.environ.get(_ADDRESS_OF_SSH, "").split()[2:3]
        return {
            "hardware": hardware.to_json(),
            "versions": {**versions, "cuda": interpreter.cuda, "nccl": interpreter.nccl, "driver": _driver()},
            "threads": threads_per_rank(count),
            "addresses": addresses(),
            "reached_at": [by_ray] if by_ray else by_ssh,  # by the transport; empty if unknown
            "hostname": socket.gethostname(),
        }

    def open(self, *, needs: dict[str, Any], hardware: dict[str, Any], env: dict[str, str], who: str) -> None:
        """Hold the node's devices and prepare for starting ranks."""
        os.environ.update(env)
        self._machine.close()
        if self._hardware is None:
            self._hardware = Hardware.from_json(hardware)
            self._kept.enter_context(lock_gpus(self._hardware, who))
            self._meter = make_meter(self._hardware)
        self._machine.open(RankRequirements(**needs, interpreter=self._interpreter))

    def load_ops(self, names: list[str]) -> dict[str, Any]:
        """Build and load DeepSpeed ops; return the failures, the folder and the build time in seconds."""
        fork_safe = self._machine.load_ops(names)
        ops = self._machine.ops
        return {"fork_safe": fork_safe, "failed": ops.failed, "folder": ops.folder, "seconds": ops.build_seconds}

    # -- ranks, see `HostWorkers` ------------------------------------------------------------------------------------

    def launch(
        self, *, group: int, entry: str, numbers: list[int], gauged: bool, node: list[int], left_seconds: float | None
    ) -> tuple[list[int], float]:
        """Start a group's ranks on this node; return their process ids and the seconds waited for memory."""
        assert self._hardware is not None
        self._end_workers(done=False)
        meter = self._meter if gauged else None
        launcher, place = self._machine.launcher, (node[0], node[1])
        workers = LocalWorkers(launcher, self._hardware, meter, self._lines.append, place)
        self._workers, self._group, self._sent_state = workers, group, {}
        deadline = float("inf") if left_seconds is None else time.monotonic() + left_seconds
        workers.launch(entry, numbers, deadline=deadline, cancelled=self._launch_is_cancelled)
        return workers.pids, workers.waited_seconds

    def _launch_is_cancelled(self) -> bool:
        return self.ending.is_set() or self._cancelled_group >= self._group

    def cancel(self, group: int) -> None:
        """Let the launch of this group return soon."""
        self._cancelled_group = group

    def send_specs(self, *, spec: Message, logs: bool) -> None:
        """Create the ranks' files on this machine's disk, then send the ranks their spec."""
        running = self._running
        folder = self.folder / "logs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if "sandbox" in spec or "candidate" in spec:
            self._make_files(spec, running.home)
        running.send_specs(spec, folder if logs else None)

    def _make_files(self, spec: Message, home: Path) -> None:
        """Create the ranks' files on this machine's disk, and add their location to the spec."""
        job = dataclasses.replace(Job.from_json(spec["job"]), interpreter=self._interpreter)
        candidate = Candidate.of(spec.get("candidate") or {})
        if "sandbox" in spec:
            how = {"unprotected": spec["unprotected"], "kept": spec["kept"]}
            sandbox = trial_sandbox(self.folder, job, candidate, self.folder, **how)
            spec["sandbox"] = sandbox.to_json()
        else:
            write_trial_files(job, candidate, home, quiet=False)
            spec["folder"] = str(home)

    @property
    def _running(self) -> LocalWorkers:
        """The ranks of this node.

        Raises:
            OSError: none were launched.
        """
        if self._workers is None:
            raise OSError(0, "no ranks were launched")
        return self._workers

    def signal(self, group: int, number: int, pids: Sequence[int]) -> None:
        """Send a signal to ranks; one that is no notice cancels their launch too."""
        if number not in NOTICES:
            self.cancel(group)
        self._running.signal(signal.Signals(number), pids)

    def notify(self, number: int) -> None:
        """Forward a signal of this process to the ranks, without ending them."""
        if (workers := self._workers) is not None:
            workers.signal(signal.Signals(number), workers.pids)

    def is_progressing(self, waiting: Sequence[int]) -> bool:
        """Return True if the ranks make progress, given the ranks that wait in a collective."""
        return self._running.is_progressing(set(waiting))

    def peaks(self) -> dict[str, Any]:
        """Return the peaks of the ranks."""
        return dataclasses.asdict(self._running.peaks())

    def receive(self) -> Message:
        """Return lines for the user, and messages and exit codes of the ranks, as soon as any are new.

        After `POLL_SECONDS` the result is empty. It proves that this agent lives, as the call does for the tuner.
        """
        until = time.monotonic() + POLL_SECONDS
        while True:
            news, sources = self._news()
            if news or self.ending.is_set() or time.monotonic() > until:
                return news
            with suppress(OSError, ValueError):  # another thread has closed one
                select.select(sources, [], [], _LOOK_SECONDS)

    def _news(self) -> tuple[Message, list[Any]]:
        """Return what is new, and the sources to wait on. A method that works for long holds the lock; it has no ranks."""
        news: Message = {}
        sources: list[Any] = []
        if self._lock.acquire(timeout=_LOOK_SECONDS):
            try:
                if self._workers is not None:
                    news, sources = self._state(self._workers), self._workers.sources()
            finally:
                self._lock.release()
        if self._lines:
            news["lines"] = self._taken_lines()
        return news, sources

    def _state(self, workers: LocalWorkers) -> Message:
        """Return the ranks' messages with their state, or nothing if there are none and the state is not new."""
        state: Message = {"statuses": workers.statuses()}
        messages = workers.receive()  # after the statuses, so that the last messages of an ended rank are among them
        state |= {"closed": workers.has_closed_channel, "lost": workers.lost_device}
        if not messages and state == self._sent_state:
            return {}
        self._sent_state = state
        return {"group": self._group, "messages": messages, **state}

    def _taken_lines(self) -> list[str]:
        taken = list(self._lines)
        del self._lines[: len(taken)]
        return taken

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, *, done: bool) -> dict[str, Any]:
        """End the ranks, and return the lines for the user and the ranks' logs."""
        numbers = self._workers.numbers if self._workers is not None else ()
        self._end_workers(done=done)
        logs = {rank: log_tail(self.folder / "logs" / f"rank{rank}.log", _MOST_LOG_BYTES) for rank in numbers}
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        return {"lines": self._taken_lines(), "logs": {rank: text for rank, text in logs.items() if text}}

    def _end_workers(self, *, done: bool) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.send("stop")
            workers.end(done=done)
            remove_scratch(self.folder)

    def close(self) -> None:
        """End everything that this agent started."""
        self.ending.set()
        with self._lock:
            with suppress(Exception):
                self._end_workers(done=False)
            self._machine.close()
            self._kept.close()


# -- process -----------------------------------------------------------------------------------------------------------
#
# The agent of ssh and srun reads calls from standard input and answers on standard output, and listens on no port. When its
# input ends, its tuner is silent or a signal arrives, it ends with all that it has started.


def serve(agent: NodeAgent, stream: Stream) -> bool:
    """Call the methods that the tuner names, until it is gone. Return True if the agent was asked to end."""

    def answer(number: int, method: str, fields: Message) -> None:
        stream.send("answer", number=number, **agent.call(method, fields))

    silent_at = time.monotonic() + GREETING_SECONDS
    with ThreadPoolExecutor(1) as ordered, ThreadPoolExecutor(2) as aside:
        while not stream.closed and not agent.ending.is_set() and time.monotonic() < silent_at:
            message = stream.receive(_LOOK_SECONDS)
            if message is not None and "number" in message:
                silent_at = time.monotonic() + SILENT_SECONDS
                pool = aside if message["type"] in ASIDE else ordered
                pool.submit(answer, message["number"], message["type"], message["fields"])
        asked = agent.ending.is_set()
        ordered.shutdown(wait=False, cancel_futures=True)
        agent.close()
    return asked


def main() -> None:
    """Run the command `autotune agent`.

    SIGTERM and SIGINT end the agent, and so does SIGHUP unless nohup ignores it. Slurm may send SIGUSR1 and SIGUSR2 to all
    processes of a job; the ranks get these too. If the tuner is gone, the exit code lets a scheduler start the agent again.
    """
    stream = Stream.of_this_process(SILENT_SECONDS)
    adopt_orphans()
    agent = NodeAgent()
    with (
        contextlib.closing(stream),
        handled_signals(lambda *_: agent.ending.set()),
        handled_signals(lambda number, _: agent.notify(number), NOTICES),
    ):
        if not serve(agent, stream):
            sys.exit("autotune: the tuner of this agent is gone")


# -- node survey -------------------------------------------------------------------------------------------------------

LEAST_FREE_BYTES = 64 * 2**20  # bytes free on a disk for logs
_ADDRESS_OF_SSH = "SSH_CONNECTION"  # client's address and port, then the server's: ssh(1)
_ADDRESS_OF_RAY = "AUTOTUNE_REACHED_AT"  # set by `ray_transport.AgentActor`


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"autotune")
            file.flush()
        free = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from None
    if free.f_bavail * free.f_frsize < LEAST_FREE_BYTES:
        raise UserError(f"{folder} is full: its disk has less than {LEAST_FREE_BYTES >> 20} MiB left")


def addresses() -> list[tuple[str, str, int]]:
    """Return (interface, address, prefix length) of every active address of this machine, IPv4 first.

    Link-local IPv6 addresses (fe80::) are left out, because each use would need the interface name.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [(name, one) for name, known in psutil.net_if_addrs().items() if name in up for one in known]
    return [
        (name, one.address, int(ipaddress.ip_address(one.netmask)).bit_count() if one.netmask else most)
        for family, most in ((socket.AF_INET, 32), (socket.AF_INET6, 128))
        for name, one in found
        if one.family == family and not (most == 128 and ipaddress.ip_address(one.address).is_link_local)
    ]


def _driver() -> str | None:
    with suppress(Exception):  # there is no driver, or one that does not answer, which the detection of GPUs reports
        return str(open_nvml().nvmlSystemGetDriverVersion())
    return None
