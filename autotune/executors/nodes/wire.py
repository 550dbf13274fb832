"""Wire: the tuner's end of the stream to a node's agent, with requests, answers and failure detection."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import Stopped, UserError
from autotune.executors.nodes.echo import Echo
from autotune.executors.nodes.talk import BEAT_SECONDS, GREETING, GREETING_SECONDS, SILENT_SECONDS
from autotune.group.protocol import Message, Stream
from autotune.group.verdict import log_tail

_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 8.0  # seconds for an agent to end what it has started: a grace period and the kernel's time
_LAST_WORDS_SECONDS = 1.0  # seconds to read the remaining output of an ended process
_LOG_LINES = 3
_MOST_LOG_BYTES = 8 * 2**20
_STANDARD_ERROR = 2


class NodeDown(Exception):
    """The node's agent is gone or does not answer; the message contains the node's name."""


class NotGreeted(NodeDown):
    """The agent never sent its greeting.

    Args:
        node: the node's name.
        why: the reason, without the node's name.
        said: bytes that came over the stream instead.
        log: last lines of the transport's output.
        code: the transport's exit status, if it ended.
    """

    def __init__(self, node: str, why: str, said: str, log: str, code: int | None) -> None:
        super().__init__(f"{node}: {why}")
        self.why, self.said, self.log, self.code = why, said, log, code


class Wire:
    """Process whose standard input and output are those of an agent.

    Args:
        name: the node's name.
        command: starts the process.
        log: receives its standard error.
        preamble: bytes that are sent first.
        preamble_seconds: wait for progress in sending them; a slow login or a waiting job step reads nothing.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        preamble: bytes = b"",
        preamble_seconds: float = GREETING_SECONDS,
    ) -> None:
        self.name, self.log = name, log
        self.down = ""  # reason of the failure; empty while connected
        self._echo = Echo(_STANDARD_ERROR, log)
        self.echo = False  # copy its standard error to this process's
        self.greeting: Message = {}
        self._answers: dict[int, Message] = {}
        self._events: deque[Message] = deque()
        self._asked = 0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._preamble, self._patience_seconds = preamble, preamble_seconds
        self._untaken = bool(preamble)
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
        self._heard_at = time.monotonic()
        # heartbeats start now, because an agent with an early greeting must not take the tuner for gone
        self._threads.append(threading.Thread(target=self._beat, daemon=True))
        self._threads[0].start()

    def greet(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> Message:
        """Return the agent's greeting, the first line of the stream.

        Raises:
            NotGreeted: other data arrived, or none in time.
            Stopped: the user cancelled.
        """
        until, said = time.monotonic() + seconds, b""
        os.set_blocking(self._stream.fileno(), False)
        while b"\n" not in said:
            code = self._process.poll()
            with suppress(BlockingIOError):
                if data := os.read(self._stream.fileno(), 1):  # the reader thread reads the text after the first line
                    said += data
                    continue
                code = self._process.wait(timeout=_LEAVE_SECONDS) if code is None else code
            if code is not None or time.monotonic() > until:
                raise self._not_greeted(said, code, seconds)
            if cancelled():
                raise Stopped("stopped before anything was measured")
            time.sleep(0.01)
        first = self._stream.feed(said)
        if first is None or first["type"] != GREETING:
            raise self._not_greeted(said, None, seconds)
        os.set_blocking(self._stream.fileno(), True)
        self.greeting, self._heard_at = first, time.monotonic()
        self._threads.append(threading.Thread(target=self._read, daemon=True))
        self._threads[-1].start()
        return first

    def _not_greeted(self, said: bytes, code: int | None, seconds: float) -> NotGreeted:
        self._errors.join(_LAST_WORDS_SECONDS if code is not None else 0.0)
        text = said.decode(errors="replace").strip()
        log = "\n".join(log_tail(self.log, 2000).strip().splitlines()[-_LOG_LINES:])
        sent = ", and what --sync sends was not taken: the login, or the step, takes as long" if self._untaken else ""
        why = f"no agent within {seconds:.0f} s{sent}"
        if code is not None:
            why = f"the way to it ended with exit status {code}"
        self.down = f"{self.name}: {why}"
        return NotGreeted(self.name, why, text, log, code)

    # -- threads -----------------------------------------------------------------------------------------------------

    def _keep_errors(self) -> None:
        """Write standard error to the log and keep the log's end. Unread output here would also block the stream."""
        assert self._process.stderr is not None
        with self.log.open("ab", buffering=0) as log:
            while data := self._process.stderr.read(65536):
                if self.echo:
                    self._echo.give(data)
                if log.tell() > _MOST_LOG_BYTES:
                    log.truncate(0)
                log.write(data)

    def _read(self) -> None:
        while not self._stream.closed:
            message = self._stream.receive(_LOOK_SECONDS)
            if message is None:
                if time.monotonic() - self._heard_at > SILENT_SECONDS:
                    self._give_up(f"nothing was heard of its agent for {SILENT_SECONDS:.0f} s")
                    return
                continue
            self._heard_at = time.monotonic()
            if message["type"] == "beat":
                continue
            with self._changed:
                if message["type"] == "answer":
                    message["came"] = (
                        time.time()
                    )  # Time of arrival for the comparison of clocks: the caller may wait for other nodes first.
                    self._answers[message["to"]] = message
                else:
                    self._events.append(message)
                self._changed.notify_all()
            self._poke()
        self._give_up("its agent, or the way to it, has ended")

    def _beat(self) -> None:
        if self._untaken:  # requests follow the greeting, which follows the preamble
            self._untaken = not self._stream.give(self._preamble, self._patience_seconds)
        while not self._closing.wait(BEAT_SECONDS) and not self.down:
            self._stream.send("beat")

    def _give_up(self, why: str) -> None:
        if self._closing.is_set():
            return
        self._errors.join(_LAST_WORDS_SECONDS)
        words = [line.strip() for line in log_tail(self.log, 2000).splitlines() if line.strip()]
        with self._changed:
            self.down = self.down or f"{self.name}: {why}" + (f" ({words[-1][:200]})" if words else "")
            self._changed.notify_all()
        self._poke()

    def _poke(self) -> None:
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

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that has no answer."""
        if not self.down:
            self._stream.send(kind, **fields)

    def ask(self, kind: str, seconds: float, **fields: Any) -> Message:
        """Send a request and return the answer; see `begin` and `finish`."""
        return self.finish(self.begin(kind, **fields), seconds)

    def begin(self, kind: str, **fields: Any) -> int:
        """Send a request and return its number."""
        with self._changed:
            self._asked += 1
            number = self._asked
        self.tell(kind, ask=number, **fields)
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
            number: the request's number.
            seconds: time limit.
            cancelled: True if the user cancelled.
            take: receives the agent's events during the wait; None leaves them for `events`.

        Raises:
            NodeDown: the agent is gone, or does not answer in time.
            UserError: the node cannot do it; the message contains the node's name.
            OSError: the machine refuses it.
            Stopped: the user cancelled.
        """
        until = time.monotonic() + seconds
        while (answer := self._answers.pop(number, None)) is None:
            for event in self.events() if take is not None else ():
                assert take is not None
                take(event)
            if self.down:
                raise NodeDown(self.down)
            if time.monotonic() > until:
                raise NodeDown(f"{self.name}: no answer within {seconds:.0f} s")
            if cancelled():
                raise Stopped("stopped before anything was measured")
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
        self._raise(answer)
        return answer

    def taken(self, number: int) -> Message | None:
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

    def hang_up(self) -> None:
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
        self.hang_up()
        self._closed = True
        if not self.down:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.down = self.down or f"{self.name}: closed"
        self._errors.join(_LAST_WORDS_SECONDS)
        self._echo.close()
        for thread in self._threads:
            thread.join()
        for descriptor in (self._wake, self._woken):
            os.close(descriptor)
