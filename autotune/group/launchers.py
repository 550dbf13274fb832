"""How rank processes are started: cold, or forked from a server that has imported everything once.

A launcher knows processes, not what they run: that is the name of a module with a function `become(address, rank)`.
"""

from __future__ import annotations

import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.entry_points import FORK_SERVER
from autotune.errors import Stopped, UserError
from autotune.group.ending import REAP_SECONDS, below, end_marked, marked
from autotune.group.protocol import Channel, Message
from autotune.group.verdict import log_tail
from autotune.interpreter import bound_command, current

MARK = "AUTOTUNE_RANKS_OF"  # the variable by which what ranks have started is found
IMPORT_SECONDS = 1800  # of a slow disk; beyond that it hangs
_BUILDING_SECONDS = 1800  # one op of a slow machine; beyond that a compiler hangs
_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 1.0  # for a server that builds to end its compilers
_FORK_SECONDS = 30.0  # a fork takes 10 ms; a server that needs longer has no memory left, or is stopped


class Launcher(Protocol):
    """Starts rank processes and knows how they ended."""

    @property
    def log(self) -> Path | None:
        """Where a rank writes until it is told its own log; None: where this process writes."""

    def launch(self, entry: str, address: str, rank: int) -> int:
        """The process id of a new rank that runs module `entry` and connects to the socket at `address`.

        Raises:
            OSError: the machine refuses: no memory, no process or no file is left.
        """

    def status(self, pid: int) -> int | None:
        """Exit code, negative for a signal; None while it lives."""

    def strays(self) -> list[psutil.Process]:
        """What ranks have started and left running when they died."""

    def close(self) -> None:
        """Ends whatever still runs. What the kernel does not let go is not waited for longer than a few seconds."""


class SpawnLauncher:
    """A cold start: a new interpreter a rank, seconds of imports.

    Args:
        env: a rank's environment, see `autotune.group.environment`.
        log: takes what ranks write; None leaves them this process's output.
        cwd: the folder they start in; None: this process's.
    """

    def __init__(self, env: Mapping[str, str], log: Path | None = None, cwd: str | None = None) -> None:
        self.log, self._env, self._cwd = log, env, cwd
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._mark = uuid.uuid4().hex  # inherited by whatever a rank starts

    def launch(self, entry: str, address: str, rank: int) -> int:
        output = self.log.open("ab") if self.log is not None else None
        try:
            process = subprocess.Popen(
                bound_command(current().path, entry, address, str(rank)),
                env={**self._env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._cwd,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        self._processes[process.pid] = process
        return process.pid

    def status(self, pid: int) -> int | None:
        process = self._processes.get(pid)
        return process.poll() if process else None

    def strays(self) -> list[psutil.Process]:
        return [process for process in marked(MARK, self._mark) if process.pid not in self._processes]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        until = time.monotonic() + REAP_SECONDS
        for process in self._processes.values():
            # a rank in a dead driver or disk is the kernel's for as long as it likes
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))


class ForkLauncher:
    """The fork server: imports are paid once a study, a rank starts in 10 ms.

    Args:
        env: the server's environment, which its ranks inherit.
        log: takes what the server writes, and its ranks until they are told their own.
        preload: what the server imports, see `autotune.group.fork_server.preload`.
        cancelled: asked several times a second while the server imports and builds, which then ends within a second.
    """

    def __init__(
        self, env: Mapping[str, str], log: Path, *, cancelled: Callable[[], bool] = lambda: False, **preload: Any
    ) -> None:
        self.log, self._env, self._preload, self._cancelled = log, env, preload, cancelled
        self._mark = uuid.uuid4().hex  # inherited by the compilers that it starts
        self._pids: dict[str, int] = {}  # by ticket: what was asked for, and is running now
        self._refusals: dict[str, OSError] = {}  # by ticket
        self._statuses: dict[int, int] = {}
        self._busy, self._begun = True, False

    def begin(self) -> None:
        """Starts the server, which imports while this process does something else."""
        self._channel, theirs = Channel.pair()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                bound_command(current().path, FORK_SERVER, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env={**self._env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self._channel.send("hello", **self._preload)
        self._begun = True

    def open(self) -> None:
        """Waits until the server has imported everything; it is started now where it was not before.

        Raises:
            UserError: it died, or hangs.
            Stopped: it was cancelled.
        """
        if not self._begun:
            self.begin()
        self._await("ready", IMPORT_SECONDS, lambda message: None)

    def load_ops(self, names: list[str], tell: Callable[[Message | None], None]) -> Message:
        """Has the server load DeepSpeed's ops, which may mean minutes of building; ranks that are forked later have them.

        Args:
            names: of their builders.
            tell: is told what is done with which op, see `autotune.group.ops.Tell`; None: nothing new.

        Returns:
            `failed`: why, by builder; `folder`: where they lie; `fork_safe`: whether the server may still be forked.

        Raises:
            UserError: the server died, or a build hangs.
            Stopped: it was cancelled.
        """
        self._channel.send("ops", names=names)
        return self._await("ops", _BUILDING_SECONDS, tell)

    def _await(self, kind: str, seconds: float, tell: Callable[[Message | None], None]) -> Message:
        """The server's message of this kind; `tell` is told those that come before it, and None while there are none."""
        until, self._busy = time.monotonic() + seconds, True
        while (message := self._channel.receive(_LOOK_SECONDS)) is None or message["type"] != kind:
            tell(message)
            if message is not None:
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
        ticket = f"{address}#{rank}"
        self._channel.send("launch", entry=entry, address=address, rank=rank, ticket=ticket)
        until = time.monotonic() + _FORK_SECONDS
        while ticket not in self._pids:
            if self._channel.closed or time.monotonic() > until:
                raise OSError("the fork server does not answer")
            self._take(self._channel.receive(0.1))
            if (refusal := self._refusals.pop(ticket, None)) is not None:
                raise refusal
        return self._pids.pop(ticket)

    def status(self, pid: int) -> int | None:
        for message in self._channel.drain():
            self._take(message)
        if pid not in self._statuses and self._channel.closed:
            return -signal.SIGKILL  # the server is gone, and its children with it
        return self._statuses.get(pid)

    def _take(self, message: Message | None) -> None:
        if message is None:
            return
        if message["type"] == "launched":
            self._pids[message["ticket"]] = message["pid"]
            self._statuses.pop(message["pid"], None)  # of an earlier rank that had this number
        elif message["type"] == "refused":
            self._refusals[message["ticket"]] = OSError(message["errno"], message["text"])
        elif message["type"] == "exited":
            self._statuses[message["pid"]] = message["status"]

    def strays(self) -> list[psutil.Process]:
        return below(self.server)  # it adopts them; where it was killed it took them with it

    @property
    def server(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _end_busy(self) -> None:
        """Ends the server in the middle of its work, with the compilers that it has started."""
        if not self.alive:
            end_marked(MARK, self._mark)
            return
        self._process.terminate()  # where it builds it takes all along (`taking_all_along`)
        try:
            self._process.wait(timeout=_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            started = self.strays()
            self._process.kill()
            for process in started:
                with suppress(psutil.Error):
                    process.kill()

    def close(self) -> None:
        self._channel.close()
        if self._busy:  # it does not read, and what it has started does not end with it
            self._end_busy()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=REAP_SECONDS)
