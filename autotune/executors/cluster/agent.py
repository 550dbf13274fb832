"""`autotune agent`: a node's side of a study, at the end of a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import queue
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from autotune._version import __version__
from autotune.errors import Stopped, UserError
from autotune.executors.cluster.rpc import BEAT_SECONDS, GREETING, PROTOCOL, SILENT_SECONDS, Verb, own_stream
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
#
# The agent reads requests from standard input, answers on standard output (`rpc.py`) and listens on no port. When its
# input ends, its tuner is silent or a signal arrives, the agent ends with all that it has started.

_LOOK_SECONDS = 0.1
_MOST_LOG_BYTES = 256 * 1024  # bytes of a rank's log that are sent to the tuner


class Agent:
    """Agent of one node for one tuner."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._received_at = time.monotonic()
        self._requests: queue.Queue[Message] = queue.Queue()
        self._ending = threading.Event()
        self._wake, self._woken = os.pipe()
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        self._home = SocketFolder("autotune-agent-")  # the next agent deletes the folder of a killed one
        self.folder = self._home.path
        self._kept = ExitStack()  # locks
        self.interpreter: Interpreter = OWN  # of the ranks
        self.machine = LocalMachine(self.folder, Ops(self._say), self._ending.is_set)
        self.needs: RankRequirements | None = None
        self.hardware: Hardware | None = None
        self.meter: Any = None
        self.host_workers: LocalWorkers | None = None
        self._sent_statuses: dict[int, int] = {}  # exit codes that were sent to the tuner
        self._hung_up = False

    def serve(self) -> None:
        """Handle requests until the tuner is gone."""
        for what in (self._read, self._beat):
            threading.Thread(target=what, daemon=True).start()
        self._send(GREETING, protocol=PROTOCOL, version=__version__, pid=os.getpid(), python=sys.executable)
        try:
            while not self._ending.is_set():
                sources = self.host_workers.sources() if self.host_workers is not None else []
                with suppress(OSError, ValueError):
                    select.select([self._wake, *sources], [], [], _LOOK_SECONDS)
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._forward_events()
                while not self._ending.is_set() and not self._requests.empty():
                    self._handle(self._requests.get())
        finally:
            self.close()

    def end(self) -> None:
        """Make `serve` return; may be called from any thread or signal handler."""
        self._ending.set()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._stream.closed and time.monotonic() - self._received_at < SILENT_SECONDS:
            message = self._stream.receive(_LOOK_SECONDS)
            if message is None:
                continue
            self._received_at = time.monotonic()
            if message["type"] != "beat":
                self._requests.put(message)
                with suppress(BlockingIOError):
                    os.write(self._woken, b"!")
        self.end()

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            self._send("beat")

    def _send(self, verb: str, **fields: Any) -> None:
        self._stream.send(verb, **fields)

    def _say(self, text: str) -> None:
        """Send a line for the user."""
        self._send("say", text=text)

    # -- what the ranks do -------------------------------------------------------------------------------------------

    def _forward_events(self) -> None:
        """Send new messages and exit codes of the ranks to the tuner."""
        workers = self.host_workers
        if workers is None:
            return
        self._forward_messages(workers)
        for rank, status in workers.statuses().items():
            if rank not in self._sent_statuses:
                self._forward_messages(workers)  # the rank's last messages
                self._sent_statuses[rank] = status
                self._send("exited", rank=rank, status=status)
        if workers.has_closed_channel and not self._hung_up:
            self._hung_up = True
            self._send("hung_up")
        if workers.lost_device:
            self._send("lost", text=workers.lost_device)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, request: Message) -> None:
        verb, number = request.pop("type"), request.pop("ask", None)
        answer: Mapping[str, Any]
        try:
            answer = HANDLERS[verb](self, **request) or {}
        except UserError as error:
            answer = {"failure": "user", "text": str(error)}
        except Stopped as error:
            answer = {"failure": "stopped", "text": str(error)}
        except OSError as error:
            answer = {"failure": "os", "text": str(error), "errno": error.errno}
        except Exception as error:  # the tuner knows the node's name and decides
            answer = {"failure": "agent", "text": f"{type(error).__name__}: {error}"}
        if number is not None:
            self._send("answer", to=number, **answer)
        elif verb == "brief" and "failure" in answer:  # the ranks would wait forever
            self._send("failed", text=answer["text"])

    def on_survey(
        self, *, env: dict[str, str], python: str | None, cwd: str, path: str, **asked: Any
    ) -> dict[str, Any]:
        """Run `agent.survey` with the ranks' environment, Python and working directory, if they exist here."""
        os.environ.update(env)
        with suppress(OSError):
            os.chdir(cwd)
        if python is not None:
            self.interpreter = interpreter_at(python, "--python")
        return survey(path=path, **asked, interpreter=self.interpreter)

    def on_open(self, *, needs: dict[str, Any], hardware: dict[str, Any], env: dict[str, str], who: str) -> None:
        """Hold the node's devices and prepare for starting ranks."""
        os.environ.update(env)
        self.machine.close()
        if self.hardware is None:
            self.hardware = Hardware.from_json(hardware)
            self._kept.enter_context(lock_gpus(self.hardware, who, self._say))
            self.meter = make_meter(self.hardware)
        self.needs = RankRequirements(**needs, interpreter=self.interpreter)
        self.machine.open(self.needs)

    def on_ops(self, *, names: list[str]) -> dict[str, Any]:
        """Build and load DeepSpeed ops; return the failures, the folder and the build time in seconds."""
        assert self.needs is not None
        fork_safe = self.machine.load_ops(names, self.needs)
        ops = self.machine.ops
        return {"fork_safe": fork_safe, "failed": ops.failed, "folder": ops.folder, "seconds": ops.build_seconds}

    def on_launch(
        self, *, entry: str, numbers: list[int], gauged: bool, node: list[int], left_seconds: float | None
    ) -> dict[str, Any]:
        """Start the ranks of this node; return their process ids and the seconds waited for memory."""
        assert self.hardware is not None
        self._end_workers(done=False)
        meter = self.meter if gauged else None
        workers = LocalWorkers(self.machine.launcher, self.hardware, meter, self._say, (node[0], node[1]))
        self.host_workers, self._sent_statuses, self._hung_up = workers, {}, False
        deadline = float("inf") if left_seconds is None else time.monotonic() + left_seconds
        workers.launch(entry, numbers, deadline=deadline, cancelled=self._launch_is_superseded)
        return {"pids": workers.pids, "waited_seconds": workers.waited_seconds}

    def _launch_is_superseded(self) -> bool:
        """Return True if this agent ends, or a request that ends the launch is pending: `end`, or a signal but a notice."""
        return self._ending.is_set() or any(
            request["type"] == "end" or (request["type"] == "signal" and request["number"] not in NOTICES)
            for request in list(self._requests.queue)
        )

    def on_brief(self, *, spec: Message, logs: bool) -> None:
        """Create the ranks' files on this machine's disk, then send the ranks their spec."""
        running = self.running
        folder = self.folder / "logs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if "sandbox" in spec or "candidate" in spec:
            self._make_files(spec, running.home)
        running.send_specs(spec, folder if logs else None)

    def _make_files(self, spec: Message, home: Path) -> None:
        """Create the ranks' files on this machine's disk, and add their location to the spec."""
        job = dataclasses.replace(Job.from_json(spec["job"]), interpreter=self.interpreter)
        candidate = Candidate.of(spec.get("candidate") or {})
        if "sandbox" in spec:
            how = {"unprotected": spec["unprotected"], "kept": spec["kept"]}
            sandbox = trial_sandbox(self.folder, job, candidate, self.folder, **how)
            spec["sandbox"] = sandbox.to_json()
        else:
            write_trial_files(job, candidate, home, quiet=False)
            spec["folder"] = str(home)

    @property
    def running(self) -> LocalWorkers:
        """The ranks of this node.

        Raises:
            OSError: none were launched. Only a request's answer tells the tuner.
        """
        if self.host_workers is None:
            raise OSError(0, "no ranks were launched")
        return self.host_workers

    def on_last_words(self, *, greeted: bool) -> dict[str, Any]:
        """Return the ends of the ranks' logs."""
        workers = self.running
        self._forward_events()
        return {"logs": workers.log_tails(greeted)}

    def notify(self, number: signal.Signals) -> None:
        """Forward a signal of this process to the ranks, without ending them."""
        if (workers := self.host_workers) is not None:
            workers.signal(number, workers.pids)

    def on_end(self, *, done: bool) -> dict[str, Any]:
        """End the ranks, and return their logs."""
        numbers = self.host_workers.numbers if self.host_workers is not None else ()
        self._end_workers(done=done)
        logs = {rank: log_tail(self.folder / "logs" / f"rank{rank}.log", _MOST_LOG_BYTES) for rank in numbers}
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        return {"logs": {rank: text for rank, text in logs.items() if text}}

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end_workers(self, *, done: bool) -> None:
        workers, self.host_workers = self.host_workers, None
        if workers is not None:
            self._forward_messages(workers)
            workers.send("stop")
            workers.end(done=done)
            remove_scratch(self.folder)

    def _forward_messages(self, workers: LocalWorkers) -> None:
        for rank, message in workers.receive():
            self._send("said", rank=rank, message=message)

    def close(self) -> None:
        """End everything that this agent started."""
        with suppress(Exception):
            self._end_workers(done=False)
        self.machine.close()
        self._kept.close()
        self._home.close()


# Handler of each verb; it takes the message's fields by name and returns the fields of the answer.
HANDLERS: Mapping[Verb, Callable[..., Mapping[str, Any] | None]] = {
    "brief": Agent.on_brief,
    "end": Agent.on_end,
    "exists": lambda agent, path: {"there": Path(path).exists()},
    "get_on": lambda agent, waiting: {"alive": agent.running.is_progressing(set(waiting))},
    "last_words": Agent.on_last_words,
    "launch": Agent.on_launch,
    "look_anew": lambda agent: agent.running.reset_liveness_baseline(),
    "open": Agent.on_open,
    "ops": Agent.on_ops,
    "pass_on": lambda agent, what, fields: agent.running.send(what, **fields),
    "peaks": lambda agent: {"peaks": dataclasses.asdict(agent.running.peaks())},
    "place": lambda agent, rank, device: agent.running.register_device(rank, device),
    "reset_peaks": lambda agent: agent.running.reset_peaks(),
    "signal": lambda agent, number, pids: agent.running.signal(signal.Signals(number), pids),
    "survey": Agent.on_survey,
}


@contextmanager
def _ended_by_signals(agent: Agent) -> Iterator[None]:
    """End the agent on SIGTERM, SIGINT and SIGHUP, unless nohup ignores that, and forward SIGUSR1 and SIGUSR2.

    Slurm may send the latter to all processes of a job.
    """
    with (
        handled_signals(lambda *_: agent.end()),
        handled_signals(lambda number, _: agent.notify(signal.Signals(number)), NOTICES),
    ):
        yield


def main() -> None:
    """Run the command `autotune agent`."""
    stream = own_stream(SILENT_SECONDS)
    adopt_orphans()
    agent = Agent(stream)
    with _ended_by_signals(agent), contextlib.closing(stream):
        agent.serve()


# -- node survey -------------------------------------------------------------------------------------------------------

LEAST_FREE_BYTES = 64 * 2**20  # bytes free on a disk for logs
_ADDRESS_OF_SSH = "SSH_CONNECTION"  # client's address and port, then the server's: ssh(1)
_ADDRESS_OF_RAY = "AUTOTUNE_REACHED_AT"  # see ray_driver.Carrier


def survey(
    *, device: str, count: int, headroom: float, memory_cap_bytes: int | None, path: str, interpreter: Interpreter = OWN
) -> dict[str, Any]:
    """Return all values that the tuner compares before anything starts, as JSON. `count` is the number of devices in use.

    Raises:
        UserError: the node has too few devices, the path is missing, or a required folder cannot be written.
    """
    hardware = detect(device, count, memory_cap_bytes=memory_cap_bytes, headroom=headroom, interpreter=interpreter)
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
        "clock": time.time(),
        "addresses": addresses(),
        "reached_at": [by_ray] if by_ray else by_ssh,  # by the transport; empty if unknown
        "hostname": socket.gethostname(),
    }


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
    with suppress(Exception):  # the detection of GPUs reports a driver that does not answer
        if (lib := open_nvml()) is not None:
            found = lib.nvmlSystemGetDriverVersion()
            return found.decode() if isinstance(found, bytes) else str(found)
    return None
