"""Ranks of a group on another machine: a `LocalSquad` at the other end of a wire, as seen by the group."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.executors.nodes.talk import SILENT_SECONDS, by_rank, peaks_of
from autotune.executors.nodes.wire import NodeDown, Wire
from autotune.group.gauge import Peaks
from autotune.group.protocol import Message

_ANSWER_SECONDS = SILENT_SECONDS + 5.0  # seconds; a GPU driver may be slow, while a lost agent is noticed earlier
_END_SECONDS = 60.0  # seconds; grace periods, and time to free a hundred GiB of host memory and the device's memory


class RemoteSquad:
    """State of the ranks on the node at the other end of `wire`, which sends their messages and exit codes.

    Args:
        wire: the wire to the node.
        gauged: memory is sampled continuously.
        say: receives lines for the user.
        node: index of the node, and number of nodes.
    """

    home = Path()

    def __init__(self, wire: Wire, gauged: bool, say: Callable[[str], None], node: tuple[int, int]) -> None:
        self._wire, self._gauged, self._say, self._node = wire, gauged, say, node
        self.numbers: Sequence[int] = ()
        self.pids: list[int] = []
        self.waited_seconds = 0.0
        self.hung_up, self.lost = False, ""
        self._launching: int | None = None  # request number of the launch
        self._statuses: dict[int, int] = {}
        self._logs: Path | None = None
        self._failed = ""  # reason of a failed request
        wire.events()  # discard events of an earlier group

    @property
    def cut_off(self) -> str:
        down = self._wire.down or self._failed
        return f"node {down}" if down else ""

    def launch(
        self,
        entry: str,
        numbers: Sequence[int],
        *,
        deadline: float = math.inf,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.numbers = numbers
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        asked = {"entry": entry, "numbers": list(numbers), "gauged": self._gauged, "node": self._node}
        self._launching = self._wire.begin("launch", **asked, left_seconds=left)

    def _take_launched(self) -> None:
        """Process the result of the launch, if it has arrived.

        Raises:
            OSError: the node refused the launch.
        """
        if self._launching is None or (answer := self._wire.taken(self._launching)) is None:
            return
        self._launching = None
        self.pids, self.waited_seconds = answer["pids"], answer["waited_seconds"]

    def sources(self) -> list[Any]:
        return [] if self.cut_off else [self._wire]

    def hear(self) -> list[tuple[int, Message]]:
        heard = []
        for event in self._wire.events():
            kind = event["type"]
            if kind == "said":
                heard.append((int(event["rank"]), event["message"]))
            elif kind == "exited":
                self._statuses[int(event["rank"])] = int(event["status"])
            elif kind == "hung_up":
                self.hung_up = True
            elif kind == "lost":
                self.lost = f"node {self._wire.name}: {event['text']}"
            elif kind == "say":
                self._say(f"{self._wire.name}: {event['text']}")
            elif kind == "failed":
                self._failed = f"{self._wire.name}: {event['text']}"
        try:
            self._take_launched()
        except NodeDown as error:
            self._failed = str(error)
        return heard

    def brief(self, spec: Message, logs: Path | None) -> None:
        self._spec, self._logs = spec, logs

    def begin(self, workers: Sequence[int]) -> None:
        self._wire.tell("brief", spec=self._spec, workers=list(workers), logs=self._logs is not None)

    def tell(self, kind: str, **fields: Any) -> None:
        self._wire.tell("pass_on", what=kind, fields=fields)

    def statuses(self) -> dict[int, int]:
        return dict(self._statuses)

    def look_anew(self) -> None:
        self._wire.tell("look_anew")

    def get_on(self, waiting: set[int]) -> bool:
        if self._launching is not None:  # the launch waits for memory or forks; the agent's heartbeat proves life
            return not self.cut_off
        answer = self._ask("get_on", waiting=sorted(waiting & set(self.numbers)))
        return bool(answer and answer["alive"])

    def place(self, rank: int, device: str) -> None:
        self._wire.tell("place", rank=rank, device=device)

    def peaks(self) -> Peaks:
        answer = self._ask("peaks")
        return peaks_of(answer["peaks"]) if answer else Peaks(used=[0] * len(self.numbers))

    def reset_peaks(self) -> None:
        self._wire.tell("reset_peaks")

    def last_words(self, greeted: bool) -> dict[int, str]:
        answer = self._ask("last_words", greeted=greeted)
        return by_rank(answer["logs"]) if answer else {}

    def _ask(self, kind: str, **fields: Any) -> Message | None:
        """Return the answer to a request; None if the node is disconnected, which is recorded."""
        if self.cut_off:
            return None
        try:
            return self._wire.ask(kind, _ANSWER_SECONDS, **fields)
        except NodeDown as error:
            self._failed = str(error)
        except OSError:  # no ranks were launched
            pass
        return None

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        said = {"number": int(number), "pids": list(pids)}
        # Sent by another thread, because a signal handler may have interrupted a `tell` that holds the stream's lock.
        threading.Thread(target=self._wire.tell, args=("signal",), kwargs=said, daemon=True).start()

    def end(self, *, done: bool) -> None:
        if self._wire.down:  # the agent ends its ranks, or has done so
            return
        try:
            answer = self._wire.ask("end", _END_SECONDS, done=done)
        except (NodeDown, OSError) as error:
            self._say(f"node {error}: its ranks end with its agent")
            return
        self.hear()  # forward the last lines for the user
        if self._logs is not None:
            for rank, text in by_rank(answer["logs"]).items():
                with suppress(OSError):
                    self._logs.mkdir(parents=True, exist_ok=True)
                    (self._logs / f"rank{rank}.log").write_text(text, encoding="utf-8")
