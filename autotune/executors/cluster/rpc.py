"""Agents of other nodes as the tuner sees them: calls of their methods, and the proxy of remote workers."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import Stopped, UserError, one_line
from autotune.workers.failure_classifier import log_tail
from autotune.workers.memory_peaks import MemoryPeaks
from autotune.workers.protocol import Message, Stream

# -- calls of an agent's methods ---------------------------------------------------------------------------------------

# Methods of an agent that may be called while another one runs. `receive` is always being called. Both sides take a silent
# peer for gone: the tuner if a call of `receive` is not answered, and the agent if no call comes. Then it ends all that it has
# started.
ASIDE = ("receive", "cancel", "signal", "close")
POLL_SECONDS = 2.0
SILENT_SECONDS = 15.0  # seconds; a link may fail for five seconds, and TCP takes as long again to notice its return
GREETING_SECONDS = 60.0  # seconds; an interpreter on a slow network disk, after a slow login
_LOOK_SECONDS = 0.1
LEAVE_SECONDS = 8.0  # seconds for an agent to end what it has started: a grace period and the kernel's time
_LAST_WORDS_SECONDS = 1.0  # seconds to read the remaining output of an ended process
_MOST_LOG_BYTES = 8 * 2**20
_STANDARD_ERROR = 2


class NodeDown(Exception):
    """The node's agent is gone or does not answer.

    Args:
        text: the reason, after the node's name.
        received: text on the stream that is no answer.
        code: exit status of the process that carries the stream.
    """

    def __init__(self, text: str, received: str = "", code: int | None = None) -> None:
        super().__init__(text)
        self.received, self.code = received, code


class RemoteAgent(ABC):
    """`agent.NodeAgent` of another node."""

    silent_seconds: float | None = None  # time for the answer to `receive`; None: the transport notices a lost node

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure = ""  # reason of the failure; empty while connected
        self.groups = itertools.count(1)  # numbers of the groups of ranks
        self.greeting: Message = {}
        self._news: deque[Message] = deque()
        self._lines: deque[str] = deque()
        self._closing = threading.Event()
        self._left: Future[Message] = Future()  # done when the agent has ended what it has started
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)  # readable after news
        self._poller = threading.Thread(target=self._poll, daemon=True)

    @abstractmethod
    def begin(self, method: str, **fields: Any) -> Future[Message]:
        """Call a method and return the future of `NodeAgent.call`."""

    def greet(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for the agent's greeting.

        Raises:
            NodeDown: other data arrived, or none in time.
            Stopped: the user cancelled.
        """
        self.greeting = self.finish(self.begin("greeting"), seconds, cancelled)
        self._poller.start()

    def _explained(self, why: str) -> str:
        """Add the last output of the transport to a reason."""
        return why

    def call(self, method: str, seconds: float, **fields: Any) -> Any:
        """Call a method and return its value; see `finish`."""
        return self.finish(self.begin(method, **fields), seconds)

    def finish(
        self,
        future: Future[Message],
        seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
        print_line: Callable[[str], None] | None = None,
    ) -> Any:
        """Wait for a call's end and return its value.

        Args:
            print_line: receives the agent's lines for the user during the wait; None leaves them for `print_lines`.

        Raises:
            NodeDown: the agent is gone, or does not answer in time.
            UserError: the node cannot do it; the message contains the node's name.
            OSError: the machine refuses it.
            Stopped: the user cancelled.
        """
        until = time.monotonic() + seconds
        while not future.done():
            if time.monotonic() > until:
                self._give_up(f"no answer within {seconds:.0f} s")
            if self.failure:
                raise NodeDown(self.failure)
            if cancelled():
                raise Stopped("stopped before anything was measured")
            wait([future], _LOOK_SECONDS)
            if print_line is not None:
                self.print_lines(print_line)
        return self._value(future)

    def _value(self, future: Future[Message], seconds: float | None = None) -> Any:
        try:
            answer = future.result(seconds)
        except (NodeDown, TimeoutError):
            raise
        except Exception as error:
            answer = {"failure": "Exception", "text": f"{type(error).__name__}: {one_line(error)}"}
        failure = answer.get("failure")
        if failure == "UserError":
            raise UserError(f"node {self.name}: {answer['text']}")
        if failure == "Stopped":
            raise Stopped(answer["text"])
        if failure == "OSError":
            raise OSError(answer["errno"], f"node {self.name}: {answer['text']}")
        if failure:
            self._give_up(f"its agent failed: {answer['text']}")
            raise NodeDown(self.failure)
        return answer["value"]

    # -- news --------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._closing.is_set():
            try:
                news = self._value(self.begin("receive"), self.silent_seconds)
            except TimeoutError:
                self._give_up(f"nothing was heard of its agent for {self.silent_seconds:.0f} s")
                return
            except Exception as error:
                self._give_up(one_line(error))
                return
            self._lines.extend(news.pop("lines", ()))
            if news:
                self._news.append(news)
            self._wake_reader()

    def _give_up(self, why: str) -> None:
        if not self._closing.is_set() and not self.failure:
            self.failure = f"{self.name}: {self._explained(why)}"
            self._wake_reader()

    def _wake_reader(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        """Return a descriptor that is readable after news or a failure."""
        return self._wake

    def news(self) -> list[Message]:
        """Return the news of the ranks since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def print_lines(self, print_line: Callable[[str], None]) -> None:
        """Print the agent's lines for the user."""
        while self._lines:
            print_line(f"{self.name}: {self._lines.popleft()}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def start_echo(self) -> None:
        """Copy the ranks' output to this process's standard error from now on."""
        return None

    def hang_up(self) -> None:
        """Let the agent end; `close` waits for it."""
        if not self._closing.is_set():
            self._closing.set()
            self._left = self.begin("close")

    def close(self) -> None:
        """End the agent with all that it has started, and the way to it."""
        self.hang_up()
        if self._closed:
            return
        self._closed = True
        if not self.failure:
            wait([self._left], LEAVE_SECONDS)
        self._end()
        self.failure = self.failure or f"{self.name}: closed"
        if self._poller.ident is not None:
            self._poller.join()
        os.close(self._wake)

    @abstractmethod
    def _end(self) -> None:
        """End the way to the agent, and so an agent that still runs."""


class StreamAgent(RemoteAgent):
    """Agent at the other end of a connected socket.

    A call is a message with the method as its type, a number, and the fields. The answer has the number.
    """

    def __init__(self, name: str, link: socket.socket) -> None:
        super().__init__(name)
        self.silent_seconds = SILENT_SECONDS
        self._link, self._stream = link, Stream(link, None, SILENT_SECONDS)
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Message]] = {}
        self._changing = threading.Lock()
        self._down: NodeDown | None = None  # after the end of the stream
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, method: str, **fields: Any) -> Future[Message]:
        """Send a call; see `RemoteAgent`."""
        number, future = next(self._numbers), Future[Message]()
        with self._changing:
            if self._down is not None:
                future.set_exception(self._down)
                return future
            self._calls[number] = future
        self._stream.send(method, number=number, fields=fields)
        return future

    def _read(self) -> None:
        why, received = "its agent, or the way to it, has ended", ""
        while not self._stream.closed and not received:
            message = self._stream.receive()
            if message is not None and message["type"] == "answer":
                self._calls.pop(message["number"]).set_result(message)
            elif message is not None:
                why, received = "its shell prints text", str(message.get("line", message))
        code = None if received else self._exit_status()
        if code is not None:
            why += f" with exit status {code}"
        down = NodeDown(f"{self.name}: {self._explained(why)}", received, code)
        with self._changing:
            self._down = down
        for future in self._calls.values():
            future.set_exception(down)
        self._give_up(why)

    def _exit_status(self) -> int | None:
        """Return the exit status of the process that carries the stream, if there is one."""
        return None

    def _end(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._stream.close()


class CommandAgent(StreamAgent):
    """Agent whose standard input and output are those of a process here.

    Args:
        log: receives the process's standard error.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.log = log
        self._echo: subprocess.Popen[bytes] | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        link, theirs = socket.socketpair()
        both, pipe = theirs.fileno(), subprocess.PIPE
        with theirs:
            # a new session, because Ctrl-C signals the whole terminal, and the tuner decides
            self._process = subprocess.Popen(
                command, stdin=both, stdout=both, stderr=pipe, bufsize=0, start_new_session=True
            )
        self._errors = threading.Thread(target=self._keep_errors, daemon=True)
        self._errors.start()
        super().__init__(name, link)

    def _keep_errors(self) -> None:
        """Write standard error to the log and keep the log's end. Unread output here would also block the stream."""
        assert self._process.stderr is not None
        with self.log.open("ab", buffering=0) as log:
            while data := self._process.stderr.read(65536):
                if log.tell() > _MOST_LOG_BYTES:
                    log.truncate(0)
                log.write(data)

    def _exit_status(self) -> int | None:
        self._errors.join(_LAST_WORDS_SECONDS)  # before `tail` notices the end
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=_LAST_WORDS_SECONDS)
        return None

    def _explained(self, why: str) -> str:
        self._errors.join(_LAST_WORDS_SECONDS)
        last = log_tail(self.log, 2000).strip().rpartition("\n")[2].strip()[:200]
        return f"{why} ({last})" if last else why

    def start_echo(self) -> None:
        """Copy the process's standard error to this process's from now on.

        A terminal after Ctrl-S may not read for hours. Only `tail` waits for it, since an unread standard error of ssh would
        also block the agent's answers.
        """
        if self._echo is None:
            place, ends = self.log.stat().st_size + 1, self._process.pid
            words = ["tail", f"--bytes=+{place}", "--follow", f"--pid={ends}", "--sleep-interval=0.1", str(self.log)]
            self._echo = subprocess.Popen(words, stdout=_STANDARD_ERROR, start_new_session=True)

    def _end(self) -> None:
        if not (self.failure or self._down):
            self._exit_status()
        self._process.kill()
        self._process.wait()
        super()._end()
        self._errors.join(_LAST_WORDS_SECONDS)
        if self._echo is not None:
            with suppress(subprocess.TimeoutExpired):
                self._echo.wait(timeout=LEAVE_SECONDS)
            self._echo.kill()
            self._echo.wait()


def by_rank(data: dict[str, Any]) -> dict[int, Any]:
    """Return JSON data keyed by rank, with integer keys."""
    return {int(rank): value for rank, value in data.items()}


# -- remote workers ----------------------------------------------------------------------------------------------------

_ANSWER_SECONDS = SILENT_SECONDS + 5.0  # seconds; a GPU driver may be slow, while a lost agent is noticed earlier
_END_SECONDS = 60.0  # seconds; grace periods, and time to free a hundred GiB of host memory and the device's memory


class RemoteWorkers:
    """Ranks of a group on the node of `agent`, which returns their messages and exit codes as news.

    Args:
        gauged: memory is sampled continuously.
        print_line: receives lines for the user.
        node: index of the node, and number of nodes.
    """

    home = Path()

    def __init__(
        self, agent: RemoteAgent, gauged: bool, print_line: Callable[[str], None], node: tuple[int, int]
    ) -> None:
        self._agent, self._gauged, self._print_line, self._node = agent, gauged, print_line, node
        self._group = next(agent.groups)
        self.numbers: Sequence[int] = ()
        self.pids: list[int] = []
        self.waited_seconds = 0.0
        self.has_closed_channel, self.lost_device = False, ""
        self._started: list[Future[Message]] = []  # calls whose end is awaited later
        self._statuses: dict[int, int] = {}
        self._logs: Path | None = None

    @property
    def unreachable(self) -> str:
        """Return the name of the lost node, or an empty text while its agent is connected."""
        return f"node {self._agent.failure}" if self._agent.failure else ""

    def launch(self, entry: str, numbers: Sequence[int], *, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Request the start of the node's ranks. The answer is awaited later."""
        self.numbers = numbers
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        asked = {"entry": entry, "numbers": list(numbers), "gauged": self._gauged, "node": self._node}
        self._started.append(self._agent.begin("launch", group=self._group, **asked, left_seconds=left))

    def sources(self) -> list[Any]:
        """Return the streams to wait on: the agent's, while it is connected."""
        return [] if self.unreachable else [self._agent]

    def receive(self) -> list[tuple[int, Message]]:
        """Return the ranks' messages, and process the agent's news."""
        heard = []
        for news in self._agent.news():
            if news["group"] == self._group:
                heard += [(int(rank), message) for rank, message in news["messages"]]
                self._statuses = by_rank(news["statuses"])
                self.has_closed_channel = news["closed"]
                if news["lost"]:
                    self.lost_device = f"node {self._agent.name}: {news['lost']}"
        self._agent.print_lines(self._print_line)
        for call in [one for one in self._started if one.done()]:
            self._started.remove(call)
            with suppress(NodeDown):
                if launched := self._agent.finish(call, 0.0):
                    self.pids, self.waited_seconds = launched
        return heard

    def send_specs(self, spec: Message, logs: Path | None) -> None:
        """Send the spec to the node's ranks."""
        self._logs = logs
        self._started.append(self._agent.begin("send_specs", spec=spec, logs=logs is not None))

    def send(self, verb: str, **fields: Any) -> None:
        """Send a message to the node's ranks."""
        self._agent.begin("send", verb=verb, **fields)

    def statuses(self) -> dict[int, int]:
        """Return the exit status of each rank that has ended."""
        return dict(self._statuses)

    def reset_liveness_baseline(self) -> None:
        """Restart the liveness check of the ranks."""
        self._agent.begin("reset_liveness_baseline")

    def is_progressing(self, waiting: set[int]) -> bool:
        """Return True if the ranks make progress, given the ranks that wait in a collective."""
        if self._started:  # the launch waits for memory or forks; the agent proves that it lives
            return not self.unreachable
        return bool(self._ask("is_progressing", waiting=sorted(waiting & set(self.numbers))))

    def register_device(self, rank: int, device: str) -> None:
        """Register the device of a rank."""
        self._agent.begin("register_device", rank=rank, device=device)

    def peaks(self) -> MemoryPeaks:
        """Return the peaks of the node's ranks: zeros if the node is lost."""
        peaks = self._ask("peaks")
        if not peaks:
            return MemoryPeaks(used=[0] * len(self.numbers))
        return MemoryPeaks(**{**peaks, "grown": by_rank(peaks["grown"])})

    def reset_peaks(self) -> None:
        """Reset the peaks of the node's ranks."""
        self._agent.begin("reset_peaks")

    def log_tails(self, greeted: bool) -> dict[int, str]:
        """Return the end of each rank's log: empty if the node is lost."""
        return by_rank(self._ask("log_tails", greeted=greeted) or {})

    def _ask(self, method: str, **fields: Any) -> Any:
        """Return the result of a call; None if the node is disconnected or has no ranks."""
        with suppress(NodeDown, OSError):
            return self._agent.call(method, _ANSWER_SECONDS, **fields)
        return None

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Send a signal to ranks of the node."""
        request = {"method": "signal", "group": self._group, "number": int(number), "pids": list(pids)}
        # Sent by another thread, because a signal handler may have interrupted a call that holds the stream's lock.
        threading.Thread(target=self._agent.begin, kwargs=request, daemon=True).start()

    def end(self, *, done: bool) -> None:
        """End the node's ranks and collect the ends of their logs."""
        if self._agent.failure:  # the agent ends its ranks, or has done so
            return
        self._agent.begin("cancel", group=self._group)
        try:
            answer = self._agent.call("end", _END_SECONDS, done=done)
        except (NodeDown, OSError) as error:
            self._print_line(f"node {error}: its ranks end with its agent")
            return
        self._agent.print_lines(self._print_line)
        for line in answer["lines"]:
            self._print_line(f"{self._agent.name}: {line}")
        if self._logs is not None:
            for rank, text in by_rank(answer["logs"]).items():
                with suppress(OSError):
                    self._logs.mkdir(parents=True, exist_ok=True)
                    (self._logs / f"rank{rank}.log").write_text(text, encoding="utf-8")
