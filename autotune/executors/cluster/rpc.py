"""Tuner side of an agent's stream, with the proxy of remote workers."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from autotune.errors import Stopped, UserError
from autotune.util.units import format_bytes
from autotune.workers.failure_classifier import log_tail
from autotune.workers.memory_peaks import MemoryPeaks
from autotune.workers.protocol import Message, Stream

# -- output of ranks ---------------------------------------------------------------------------------------------------

_MOST_BYTES = 8 * 2**20  # bytes in the buffer
_PIECE_BYTES = select.PIPE_BUF  # bytes that a writable pipe accepts without blocking
_LOOK_MS = 100
_PATIENCE_SECONDS = 1.0  # seconds; wait at the end for a reader that does not read


class OutputForwarder:
    """Buffer bytes and write them in a thread. A full buffer drops the oldest bytes, with a note in the output.

    A terminal after Ctrl-S or a pager may not read for hours. ssh carries the ranks' output and the agent's heartbeats
    over one channel, so an unread output would block the heartbeats, and the node would be given up.

    Args:
        log: log file that the note refers to.
    """

    def __init__(self, descriptor: int, log: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._descriptor, self._log, self._most_bytes = descriptor, log, most_bytes
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = self._left_out_bytes = 0
        self._changed = threading.Condition()
        self._closing, self._given_up = False, False
        self._idle, self._moved_at = True, 0.0
        self._thread: threading.Thread | None = None

    def give(self, data: bytes) -> None:
        """Add bytes without blocking."""
        with self._changed:
            self._pieces.append(data)
            self._waiting_bytes += len(data)
            while self._waiting_bytes > self._most_bytes:
                gone = len(self._pieces.popleft())
                self._waiting_bytes -= gone
                self._left_out_bytes += gone
            if self._idle:
                self._idle, self._moved_at = False, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Write the remaining bytes as long as they are read."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        while self._thread is not None and self._thread.is_alive():
            self._given_up = not self._idle and time.monotonic() - self._moved_at > _PATIENCE_SECONDS
            self._thread.join(_LOOK_MS / 1000)

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            with suppress(OSError):  # the reader is gone
                self._write(memoryview(piece))

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._pieces:
                self._idle = True
                if self._closing:
                    return None
                self._changed.wait()
            if self._given_up:
                return None
            piece = self._pieces.popleft()
            self._waiting_bytes -= len(piece)
            gone, self._left_out_bytes = self._left_out_bytes, 0
        note = f"\n[autotune: {format_bytes(gone)} were not read in time and are left out here: {self._log} has the end of all]\n"
        return note.encode() + piece if gone else piece

    def _write(self, left: memoryview) -> None:
        taking = select.poll()
        taking.register(self._descriptor, select.POLLOUT)
        while left and not self._given_up:
            if taking.poll(_LOOK_MS):
                left = left[os.write(self._descriptor, left[:_PIECE_BYTES]) :]
                self._moved_at = time.monotonic()


# -- protocol shared with the agent ------------------------------------------------------------------------------------
#
# The tuner sends numbered requests (`ask`), which the agent answers in order, and messages without an answer (`send`).
# The agent sends answers, messages of ranks (`said`), exit codes (`exited`) and lines for the user (`say`). Both sides
# send heartbeats (`beat`). A side without input for `SILENT_SECONDS` treats the peer as gone. The agent then ends all
# that it has started, as at the end of its standard input.

PROTOCOL = 1
BEAT_SECONDS = 2.0
SILENT_SECONDS = 15.0  # seconds; a link may fail for five seconds, and TCP takes as long again to notice its return
GREETING_SECONDS = 60.0  # seconds; an interpreter on a slow network disk, after a slow login
GREETING = "agent"  # type of an agent's first message
# Verbs that the tuner sends to an agent, see `agent.HANDLERS`.
# fmt: off
Verb = Literal[
    "survey", "open", "ops", "exists", "launch", "brief", "pass_on",
    "signal", "end", "look_anew", "get_on", "place", "peaks", "reset_peaks", "last_words",
]
# fmt: on


def by_rank(data: dict[str, Any]) -> dict[int, Any]:
    """Return JSON data keyed by rank, with integer keys."""
    return {int(rank): value for rank, value in data.items()}


def own_stream(patience_seconds: float) -> Stream:
    """Return a stream over this process's standard input and output, and redirect both for all other code."""
    reads, writes = os.dup(0), os.dup(1)
    for descriptor in (reads, writes):
        os.set_inheritable(descriptor, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # prints of other code go to standard error
    os.close(null)
    return Stream(reads, writes, patience_seconds)


# -- agent stream ------------------------------------------------------------------------------------------------------

_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 8.0  # seconds for an agent to end what it has started: a grace period and the kernel's time
_LAST_WORDS_SECONDS = 1.0  # seconds to read the remaining output of an ended process
_LOG_LINES = 3
_MOST_LOG_BYTES = 8 * 2**20
_STANDARD_ERROR = 2


class NodeDown(Exception):
    """The node's agent is gone or does not answer; the message contains the node's name."""


class NoGreeting(NodeDown):
    """The agent never sent its greeting.

    Args:
        why: the reason, without the node's name.
        received: bytes that came over the stream instead.
        log: last lines of the transport's output.
        code: the transport's exit status, if it ended.
    """

    def __init__(self, node: str, why: str, received: str, log: str, code: int | None) -> None:
        super().__init__(f"{node}: {why}")
        self.why, self.received, self.log, self.code = why, received, log, code


class AgentConnection:
    """The tuner's end of the stream to a node's agent: a process whose standard input and output are those of the agent.

    Args:
        log: receives its standard error.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        self.failure = ""  # reason of the failure; empty while connected
        self._echo = OutputForwarder(_STANDARD_ERROR, log)
        self._echoes = False
        self.greeting: Message = {}
        self._answers: dict[int, Message] = {}
        self._events: deque[Message] = deque()
        self._asked = 0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._closing, self._closed = threading.Event(), False
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C signals the whole terminal; the tuner decides
        )
        self._errors = threading.Thread(target=self._keep_errors, daemon=True)
        self._errors.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stream = Stream(self._process.stdout.fileno(), self._process.stdin.fileno(), SILENT_SECONDS)
        self._received_at = time.monotonic()
        # heartbeats start now, because an agent with an early greeting must not take the tuner for gone
        self._threads.append(threading.Thread(target=self._beat, daemon=True))
        self._threads[0].start()

    def greet(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> Message:
        """Return the agent's greeting, the first line of the stream.

        Raises:
            NoGreeting: other data arrived, or none in time.
            Stopped: the user cancelled.
        """
        until, received = time.monotonic() + seconds, b""
        os.set_blocking(self._stream.fileno(), False)
        while b"\n" not in received:
            code = self._process.poll()
            with suppress(BlockingIOError):
                if data := os.read(self._stream.fileno(), 1):  # the reader thread reads the text after the first line
                    received += data
                    continue
                code = self._process.wait(timeout=_LEAVE_SECONDS) if code is None else code
            if code is not None or time.monotonic() > until:
                raise self._not_greeted(received, code, seconds)
            if cancelled():
                raise Stopped("stopped before anything was measured")
            time.sleep(0.01)
        first = self._stream.feed(received)
        if first is None or first["type"] != GREETING:
            raise self._not_greeted(received, None, seconds)
        os.set_blocking(self._stream.fileno(), True)
        self.greeting, self._received_at = first, time.monotonic()
        self._threads.append(threading.Thread(target=self._read, daemon=True))
        self._threads[-1].start()
        return first

    def _not_greeted(self, received: bytes, code: int | None, seconds: float) -> NoGreeting:
        self._errors.join(_LAST_WORDS_SECONDS if code is not None else 0.0)
        text = received.decode(errors="replace").strip()
        log = "\n".join(log_tail(self.log, 2000).strip().splitlines()[-_LOG_LINES:])
        why = f"no agent within {seconds:.0f} s"
        if code is not None:
            why = f"the way to it ended with exit status {code}"
        self.failure = f"{self.name}: {why}"
        return NoGreeting(self.name, why, text, log, code)

    # -- threads -----------------------------------------------------------------------------------------------------

    def _keep_errors(self) -> None:
        """Write standard error to the log and keep the log's end. Unread output here would also block the stream."""
        assert self._process.stderr is not None
        with self.log.open("ab", buffering=0) as log:
            while data := self._process.stderr.read(65536):
                if self._echoes:
                    self._echo.give(data)
                if log.tell() > _MOST_LOG_BYTES:
                    log.truncate(0)
                log.write(data)

    def _read(self) -> None:
        while not self._stream.closed:
            message = self._stream.receive(_LOOK_SECONDS)
            if message is None:
                if time.monotonic() - self._received_at > SILENT_SECONDS:
                    self._give_up(f"nothing was heard of its agent for {SILENT_SECONDS:.0f} s")
                    return
                continue
            self._received_at = time.monotonic()
            if message["type"] == "beat":
                continue
            with self._changed:
                if message["type"] == "answer":
                    # Time of arrival for the comparison of clocks: the caller may wait for other nodes first.
                    message["came"] = time.time()
                    self._answers[message["to"]] = message
                else:
                    self._events.append(message)
                self._changed.notify_all()
            self._wake_reader()
        self._give_up("its agent, or the way to it, has ended")

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_SECONDS) and not self.failure:
            self._stream.send("beat")

    def _give_up(self, why: str) -> None:
        if self._closing.is_set():
            return
        self._errors.join(_LAST_WORDS_SECONDS)
        words = [line.strip() for line in log_tail(self.log, 2000).splitlines() if line.strip()]
        with self._changed:
            self.failure = self.failure or f"{self.name}: {why}" + (f" ({words[-1][:200]})" if words else "")
            self._changed.notify_all()
        self._wake_reader()

    def _wake_reader(self) -> None:
        with suppress(OSError):
            os.write(self._woken, b"!")

    # -- talking -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable after an event or a failure."""
        return self._wake

    def events(self) -> list[Message]:
        """Return the events since the last call."""
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def send(self, verb: Verb, **fields: Any) -> None:
        """Send a message that has no answer."""
        if not self.failure:
            self._stream.send(verb, **fields)

    def ask(self, verb: Verb, seconds: float, **fields: Any) -> Message:
        """Send a request and return the answer; see `begin` and `finish`."""
        return self.finish(self.begin(verb, **fields), seconds)

    def begin(self, verb: Verb, **fields: Any) -> int:
        """Send a request and return its number."""
        with self._changed:
            self._asked += 1
            number = self._asked
        self.send(verb, ask=number, **fields)
        return number

    def finish(
        self,
        number: int,
        seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
        take: Callable[[Message], None] | None = None,
    ) -> Message:
        """Wait for the answer to a request and return it.

        Args:
            take: receives the agent's events during the wait; None leaves them for `events`.

        Raises:
            NodeDown: the agent is gone, or does not answer in time.
            UserError: the node cannot do it; the message contains the node's name.
            OSError: the machine refuses it.
            Stopped: the user cancelled.
        """
        until = time.monotonic() + seconds
        while (answer := self._answers.pop(number, None)) is None:
            if take is not None:
                for event in self.events():
                    take(event)
            if self.failure:
                raise NodeDown(self.failure)
            if time.monotonic() > until:
                raise NodeDown(f"{self.name}: no answer within {seconds:.0f} s")
            if cancelled():
                raise Stopped("stopped before anything was measured")
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
        self._raise(answer)
        return answer

    def answer_if_arrived(self, number: int) -> Message | None:
        """Return the answer to a request, or None if it has not arrived; raises as `finish` does."""
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._raise(answer)
        return answer

    def _raise(self, answer: Message) -> None:
        failure = answer.get("failure")
        if failure == "user":
            raise UserError(f"node {self.name}: {answer['text']}")
        if failure == "stopped":
            raise Stopped(answer["text"])
        if failure == "os":
            raise OSError(answer["errno"], f"node {self.name}: {answer['text']}")
        if failure:
            raise NodeDown(f"{self.name}: its agent failed: {answer['text']}")

    def start_echo(self) -> None:
        """Copy the process's standard error to this process's from now on."""
        self._echoes = True

    def close_stream(self) -> None:
        """Close the stream, which ends the agent; `close` waits for it."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._stream.close()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the agent with all that it has started, and the process that carries the stream."""
        if self._closed:
            return
        self.close_stream()
        self._closed = True
        if not self.failure:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.failure = self.failure or f"{self.name}: closed"
        self._errors.join(_LAST_WORDS_SECONDS)
        self._echo.close()
        for thread in self._threads:
            thread.join()
        for descriptor in (self._wake, self._woken):
            os.close(descriptor)


# -- remote workers ----------------------------------------------------------------------------------------------------

_ANSWER_SECONDS = SILENT_SECONDS + 5.0  # seconds; a GPU driver may be slow, while a lost agent is noticed earlier
_END_SECONDS = 60.0  # seconds; grace periods, and time to free a hundred GiB of host memory and the device's memory


class RemoteWorkers:
    """Ranks of a group on the node at the other end of `connection`, which sends their messages and exit codes.

    Args:
        gauged: memory is sampled continuously.
        print_line: receives lines for the user.
        node: index of the node, and number of nodes.
    """

    home = Path()

    def __init__(
        self, connection: AgentConnection, gauged: bool, print_line: Callable[[str], None], node: tuple[int, int]
    ) -> None:
        self._connection, self._gauged, self._print_line, self._node = connection, gauged, print_line, node
        self.numbers: Sequence[int] = ()
        self.pids: list[int] = []
        self.waited_seconds = 0.0
        self.has_closed_channel, self.lost_device = False, ""
        self._launching: int | None = None  # request number of the launch
        self._statuses: dict[int, int] = {}
        self._logs: Path | None = None
        self._failed = ""  # reason of a failed request
        connection.events()  # discard events of an earlier group

    @property
    def unreachable(self) -> str:
        """Return the name of the lost node, or an empty text while its agent is connected."""
        down = self._connection.failure or self._failed
        return f"node {down}" if down else ""

    def launch(self, entry: str, numbers: Sequence[int], *, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Request the start of the node's ranks. The answer is awaited later."""
        self.numbers = numbers
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        asked = {"entry": entry, "numbers": list(numbers), "gauged": self._gauged, "node": self._node}
        self._launching = self._connection.begin("launch", **asked, left_seconds=left)

    def sources(self) -> list[Any]:
        """Return the streams to wait on: the agent's, while it is connected."""
        return [] if self.unreachable else [self._connection]

    def receive(self) -> list[tuple[int, Message]]:
        """Return the ranks' messages, and process the agent's events."""
        heard = []
        for event in self._connection.events():
            verb = event["type"]
            if verb == "said":
                heard.append((int(event["rank"]), event["message"]))
            elif verb == "exited":
                self._statuses[int(event["rank"])] = int(event["status"])
            elif verb == "hung_up":
                self.has_closed_channel = True
            elif verb == "lost":
                self.lost_device = f"node {self._connection.name}: {event['text']}"
            elif verb == "say":
                self._print_line(f"{self._connection.name}: {event['text']}")
            elif verb == "failed":
                self._failed = f"{self._connection.name}: {event['text']}"
        try:
            if self._launching is not None and (answer := self._connection.answer_if_arrived(self._launching)):
                self._launching = None
                self.pids, self.waited_seconds = answer["pids"], answer["waited_seconds"]
        except NodeDown as error:
            self._failed = str(error)
        return heard

    def send_specs(self, spec: Message, logs: Path | None) -> None:
        """Send the spec to the node's ranks."""
        self._logs = logs
        self._connection.send("brief", spec=spec, logs=logs is not None)

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message to the node's ranks."""
        self._connection.send("pass_on", what=verb, fields=fields)

    def statuses(self) -> dict[int, int]:
        """Return the exit status of each rank that has ended."""
        return dict(self._statuses)

    def reset_liveness_baseline(self) -> None:
        """Restart the liveness check of the ranks."""
        self._connection.send("look_anew")

    def is_progressing(self, waiting: set[int]) -> bool:
        """Return True if the ranks make progress, given the ranks that wait in a collective."""
        if self._launching is not None:  # the launch waits for memory or forks; the agent's heartbeat proves life
            return not self.unreachable
        answer = self._ask("get_on", waiting=sorted(waiting & set(self.numbers)))
        return bool(answer and answer["alive"])

    def register_device(self, rank: int, device: str) -> None:
        """Register the device of a rank."""
        self._connection.send("place", rank=rank, device=device)

    def peaks(self) -> MemoryPeaks:
        """Return the peaks of the node's ranks: zeros if the node is lost."""
        answer = self._ask("peaks")
        if not answer:
            return MemoryPeaks(used=[0] * len(self.numbers))
        return MemoryPeaks(**{**answer["peaks"], "grown": by_rank(answer["peaks"]["grown"])})

    def reset_peaks(self) -> None:
        """Reset the peaks of the node's ranks."""
        self._connection.send("reset_peaks")

    def log_tails(self, greeted: bool) -> dict[int, str]:
        """Return the end of each rank's log: empty if the node is lost."""
        answer = self._ask("last_words", greeted=greeted)
        return by_rank(answer["logs"]) if answer else {}

    def _ask(self, verb: Verb, **fields: Any) -> Message | None:
        """Return the answer to a request; None if the node is disconnected, which is recorded."""
        if self.unreachable:
            return None
        try:
            return self._connection.ask(verb, _ANSWER_SECONDS, **fields)
        except NodeDown as error:
            self._failed = str(error)
        except OSError:  # no ranks were launched
            pass
        return None

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Send a signal to ranks of the node."""
        request = {"number": int(number), "pids": list(pids)}
        # Sent by another thread, because a signal handler may have interrupted a `send` that holds the stream's lock.
        threading.Thread(target=self._connection.send, args=("signal",), kwargs=request, daemon=True).start()

    def end(self, *, done: bool) -> None:
        """End the node's ranks and collect the ends of their logs."""
        if self._connection.failure:  # the agent ends its ranks, or has done so
            return
        try:
            answer = self._connection.ask("end", _END_SECONDS, done=done)
        except (NodeDown, OSError) as error:
            self._print_line(f"node {error}: its ranks end with its agent")
            return
        self.receive()  # forward the last lines for the user
        if self._logs is not None:
            for rank, text in by_rank(answer["logs"]).items():
                with suppress(OSError):
                    self._logs.mkdir(parents=True, exist_ok=True)
                    (self._logs / f"rank{rank}.log").write_text(text, encoding="utf-8")
