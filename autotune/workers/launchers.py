"""Spawn and fork launchers, and the environment of workers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import psutil

from autotune.errors import Stopped, UserError
from autotune.problem.candidate import Candidate
from autotune.problem.nvml import ARCHITECTURES, BY_BUS, ORDER, architectures_to_set, compute_capabilities
from autotune.util.entry_points import FORK_SERVER
from autotune.util.interpreter import OWN, Interpreter, bound_command, contained_command
from autotune.workers.failure_classifier import log_tail
from autotune.workers.process_tree import (
    KILL_SECONDS,
    REAP_SECONDS,
    descendant_processes,
    end_groups,
    end_processes_with_variable,
    end_ranks,
    processes_with_variable,
)
from autotune.workers.protocol import Channel, Message

# -- launchers ---------------------------------------------------------------------------------------------------------
#
# A launcher runs a module with a function `become(address, rank)`, and does not know its work.

MARK = "AUTOTUNE_RANKS_OF"  # environment variable that identifies the ranks' descendants
IMPORT_SECONDS = 1800  # a slow disk takes this long; a longer import hangs
_BUILDING_SECONDS = 1800  # one op takes this long on a slow machine; a longer build hangs
_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 1.0  # time for a building server to end its compilers
_FORK_SECONDS = 30.0  # a fork takes 10 ms; a slower server has no memory left or is stopped


class Launcher(Protocol):
    """Starter of rank processes that knows how they ended."""

    @property
    def log(self) -> Path | None:
        """Log of a rank until it receives its own log; None writes to this process's output."""

    def launch(self, entry: str, address: str, rank: int) -> int:
        """Start a rank that runs module `entry` and connects to the socket at `address`; return its pid.

        Raises:
            OSError: the machine refuses, because no memory, process or file is left.
        """

    def status(self, pid: int) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""

    def forget(self, pids: Iterable[int]) -> None:
        """Drop the exit statuses of ranks that have ended."""

    def end(self, pids: list[int], *, strays: bool) -> list[psutil.Process]:
        """End these ranks, and with `strays` all processes that dead ranks left running; see `process_tree.end_ranks`."""

    def close(self) -> None:
        """End all remaining processes. Processes that the kernel keeps are awaited for a few seconds at most."""


class SpawnLauncher:
    """Launcher of trainings: a new interpreter per rank, in no PID namespace.

    Args:
        log: receives the ranks' output; None keeps this process's output.
        cwd: folder of the ranks; None uses this process's.
    """

    def __init__(
        self, env: Mapping[str, str], log: Path | None = None, cwd: str | None = None, python: str = OWN.path
    ) -> None:
        self.log, self._env, self._cwd, self._python = log, env, cwd, python
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._mark = uuid.uuid4().hex  # inherited by all descendants of a rank

    def launch(self, entry: str, address: str, rank: int) -> int:
        """Start a rank as a new process; return its process id."""
        with self.log.open("ab") if self.log is not None else nullcontext() as output:
            process = subprocess.Popen(
                bound_command(self._python, entry, address, str(rank)),
                env={**self._env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._cwd,
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return process.pid

    def status(self, pid: int) -> int | None:
        """Return the exit status of a rank, or None while it runs."""
        process = self._processes.get(pid)
        return process.poll() if process else None

    def forget(self, pids: Iterable[int]) -> None:
        """Drop the exit statuses of ranks that have ended."""
        for pid in [one for one in pids if self.status(one) is not None]:
            del self._processes[pid]

    def end(self, pids: list[int], *, strays: bool) -> list[psutil.Process]:
        """End these ranks, and with `strays` all that ranks have started."""
        return end_ranks(pids, self.status, self.descendants if strays else list)

    def descendants(self) -> list[psutil.Process]:
        """Return the processes that ranks have started."""
        return [process for process in processes_with_variable(MARK, self._mark) if process.pid not in self._processes]

    def close(self) -> None:
        """Kill all ranks and wait for their end."""
        for process in self._processes.values():
            process.kill()
        until = time.monotonic() + REAP_SECONDS
        for process in self._processes.values():
            # a rank in a dead driver or disk stays as long as the kernel keeps it
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))


class ForkLauncher:
    """Launcher through the fork server: one import per study, and 10 ms per rank.

    Args:
        env: environment of the server, which its ranks inherit.
        contained: the server and its ranks have a PID namespace, if the kernel gives one, and the server builds no ops.
        cold: the server imports nothing, and each rank is a new interpreter, with seconds of imports.
        log: receives the output of the server, and of ranks until they have their own log.
        preload: modules that the server imports, see `autotune.workers.fork_server.preload`.
        cancelled: polled several times a second during imports and builds, which end within a second once it returns
            True.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        log: Path,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        python: str = OWN.path,
        contained: bool = True,
        cold: bool = False,
        **preload: Any,
    ) -> None:
        self.log, self._env, self._preload, self._cancelled = log, env, preload, cancelled
        self._python, self.contained, self.cold = python, contained, cold
        self._in_namespace = False  # known from the server's first answer on
        self._mark = uuid.uuid4().hex  # inherited by the compilers that it starts
        self._pids: dict[str, int] = {}  # ticket -> pid of a launched rank
        self._refusals: dict[str, OSError] = {}  # by ticket
        self._statuses: dict[int, int] = {}
        self._busy, self._begun = True, False

    def begin(self) -> None:
        """Start the server, which imports while this process continues."""
        self._channel, theirs = Channel.pair()
        make_command = contained_command if self.contained else bound_command
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                make_command(self._python, FORK_SERVER, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env={**self._env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self.server = self._process.pid
        self._channel.send("hello", cold=self.cold, **self._preload)
        self._begun = True

    def open(self) -> None:
        """Wait until the server has imported everything, and start it first if necessary.

        Raises:
            UserError: the server died or hangs.
            Stopped: the wait was cancelled.
        """
        if not self._begun:
            self.begin()
        ready = self._await("ready", IMPORT_SECONDS, lambda message: None)
        self.server, self._in_namespace = ready["pid"], ready["contained"]

    def load_ops(self, names: list[str], report: Callable[[Message], None]) -> Message:
        """Make the server load the ops of these builders for all later ranks, with minutes of building if it is not contained.

        Args:
            report: called with progress per op, see `autotune.workers.jit_ops.ProgressCallback`.

        Returns:
            `failed`: builder -> reason, such as `jit_ops.NOT_BUILT`; `folder`: location of the ops; `fork_safe`: True if the
            server can still fork.

        Raises:
            UserError: the server died, or a build hangs.
            Stopped: the wait was cancelled.
        """
        self._channel.send("ops", names=names, build=not self.contained)
        return self._await("ops", _BUILDING_SECONDS, report)

    def _await(self, verb: str, seconds: float, report: Callable[[Message], None]) -> Message:
        """Return the server's message of this verb; call `report` with earlier ones."""
        until, self._busy = time.monotonic() + seconds, True
        while (message := self._channel.receive(_LOOK_SECONDS)) is None or message["type"] != verb:
            if message is not None:
                report(message)
                until = time.monotonic() + seconds
            elif self._channel.closed:
                self.close()
                tail = log_tail(self.log).strip().splitlines()
                raise UserError(f"the fork server died: {tail[-1] if tail else 'no output'} (log: {self.log})")
            elif self._cancelled():
                self.close()
                raise Stopped("stopped before anything was measured")
            elif time.monotonic() > until:
                self.close()
                raise UserError(
                    f"the fork server did not get on for {seconds:.0f} s, importing or building DeepSpeed's ops; "
                    f"`autotune doctor` tries each (log: {self.log})"
                )
        self._busy = False
        return message

    def launch(self, entry: str, address: str, rank: int) -> int:
        """Fork a rank from the server; return its process id.

        Raises:
            OSError: The fork server does not answer.
        """
        ticket = f"{address}#{rank}"
        self._channel.send("launch", entry=entry, address=address, rank=rank, ticket=ticket, cold=self.cold)
        until = time.monotonic() + _FORK_SECONDS
        while ticket not in self._pids:
            if self._channel.closed or time.monotonic() > until:
                raise OSError("the fork server does not answer")
            self._take(self._channel.receive(0.1))
            if (refusal := self._refusals.pop(ticket, None)) is not None:
                raise refusal
        return self._pids.pop(ticket)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a rank, or None while it runs."""
        for message in self._channel.drain():
            self._take(message)
        if pid not in self._statuses and self._channel.closed:
            return -signal.SIGKILL  # the server has ended, and its children with it
        return self._statuses.get(pid)

    def forget(self, pids: Iterable[int]) -> None:
        """Drop the exit statuses of ranks that have ended."""
        for pid in pids:
            self._statuses.pop(pid, None)

    def _take(self, message: Message | None) -> None:
        if message is None:
            return
        if message["type"] == "launched":
            self._pids[message["ticket"]] = message["pid"]
            self._statuses.pop(message["pid"], None)  # of an earlier rank with this pid
        elif message["type"] == "refused":
            self._refusals[message["ticket"]] = OSError(message["errno"], message["text"])
        elif message["type"] == "exited":
            self._statuses[message["pid"]] = message["status"]

    def end(self, pids: list[int], *, strays: bool) -> list[psutil.Process]:
        """End these ranks, and with `strays` everything else that the server's ranks have started."""
        if not (self._in_namespace and strays):
            return end_ranks(pids, self.status, self.descendants if strays else list)
        end_groups(pids, self.status)
        self._channel.send("end")
        until = time.monotonic() + KILL_SECONDS
        while not self._channel.closed and time.monotonic() < until:
            message = self._channel.receive(_LOOK_SECONDS)
            if message is not None and message["type"] == "ended":
                return self.descendants() if message["left"] else []
            self._take(message)
        return self.descendants()  # a killed server's namespace is gone

    def descendants(self) -> list[psutil.Process]:
        """Return the processes below the fork server."""
        return descendant_processes(self.server)  # the server adopts them; a killed server's children died with it

    @property
    def alive(self) -> bool:
        """Return True while the fork server runs."""
        return self._process.poll() is None

    def _end_busy(self) -> None:
        """End a busy server with the compilers that it has started."""
        if not self.alive:
            end_processes_with_variable(MARK, self._mark)
            return
        self._process.terminate()  # a building server ends its descendants (`terminate_with_descendants`)
        try:
            self._process.wait(timeout=_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            started = self.descendants()
            self._process.kill()
            for process in started:
                with suppress(psutil.Error):
                    process.kill()

    def close(self) -> None:
        """End the fork server, by a kill if needed."""
        self._channel.close()
        if self._busy:  # a busy server does not read, and its descendants do not end with it
            self._end_busy()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=REAP_SECONDS)


# -- environment -------------------------------------------------------------------------------------------------------
#
# A training has the user's environment and the few additions that make it equal to the measured run. A trial is also
# quiet. No allocator variables are set, because a trial must be as fast and as large as training.

THREADS = "OMP_NUM_THREADS"


def training_environment(device: str, threads: int, interpreter: Interpreter = OWN) -> dict[str, str]:
    """Return the environment of a rank that trains, or of a process that builds for ranks."""
    env = {
        **interpreter.environment(),
        # torch looks for ninja in PATH. pip installs it next to this Python, whose environment may not be activated.
        # All builds must find one ninja, because another version's log would make it rebuild every op.
        "PATH": os.pathsep.join([os.path.dirname(interpreter.path), os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": device,
        ORDER: os.environ.get(ORDER, BY_BUS),  # NVML's order, so that monitor and capacity match the rank's GPU
        # set before any OpenMP library loads: the only way to reach a second one next to torch's
        THREADS: str(threads),
    }
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else architectures_to_set())


def trial_environment(device: str, threads: int, interpreter: Interpreter = OWN) -> dict[str, str]:
    """Return the environment of a rank that is measured: a training's, but quiet and safe to fork."""
    return {
        **training_environment(device, threads, interpreter),
        **_architectures(device),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not initialize the driver
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _architectures(device: str) -> dict[str, str]:
    """Return the GPU architectures for which DeepSpeed builds its ops.

    Without the variable, DeepSpeed's builders query CUDA, which initializes the driver in the fork server. The value
    equals the result of that query (`OpBuilder.compute_capability_args`).
    """
    if device == "cpu" or ARCHITECTURES in os.environ:
        return {}
    found = compute_capabilities()
    return {ARCHITECTURES: ";".join(found) + "+PTX"} if found else {}  # as DeepSpeed and torch do


def variables_of(candidate: Candidate, threads: int, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the variables to set before the command that trains with a candidate.

    These are the variables of the measured ranks that no launcher sets itself.

    Args:
        own: the user's own variables during the measurement, which may differ from this process's.
    """
    return {**own, THREADS: str(threads), **candidate.environment(own)}


def assignments(variables: Mapping[str, str]) -> str:
    """Return `NAME=value NAME=value`, as a shell accepts before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
