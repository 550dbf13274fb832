"""Build DeepSpeed's ops before a trial or a training needs them, and report it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from autotune.errors import UserError
from autotune.group.extensions import FOLDER
from autotune.group.launchers import ForkLauncher, Launcher
from autotune.group.protocol import Message
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.rank.config import DISPENSABLE, needed_ops
from autotune.units import format_duration

_LOADING_SECONDS = 5.0  # seconds; slower loading means that DeepSpeed rebuilds a changed op


class Ops:
    """The ops of one study or training.

    Args:
        say: receives lines for the user.
        show: receives the current operation for a live view; empty when it is done.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None] = lambda text: None) -> None:
        self._say, self._show = say, show
        self._names: list[str] = []  # builders requested so far
        self._server: ForkLauncher | None = None  # the server that has loaded them
        self.failed: dict[str, str] = {}  # reason by builder
        self.folder = ""  # this environment's own folder of ops; empty if TORCH_EXTENSIONS_DIR is set
        self.build_seconds = 0.0
        self._loading: tuple[float, Message] | None = None  # start time, and the message about it

    def load(
        self,
        launcher: Launcher,
        names: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Make these ops and the earlier ones available to the launcher's ranks.

        For cold ranks a separate process builds the ops first. Otherwise each rank would build without a message, and
        all in one folder.

        Args:
            launcher: starts the ranks.
            names: builders of the ops.
            env: environment of the separate process, as for ranks.
            log: log file of that process.
            cancelled: True if the user cancelled.

        Returns:
            True if a fork server may still be forked.

        Raises:
            UserError: that process or the server died, or a build hangs.
            Stopped: the user cancelled.
        """
        new = [name for name in dict.fromkeys(names) if name not in self._names]
        self._names += new
        if isinstance(launcher, ForkLauncher):
            if launcher is not self._server:  # another server loaded the earlier ops
                self._server, new = launcher, self._names
                return self._ask(launcher, new)
            return self._ask(launcher, new) if new else True
        if new:
            try:
                with closing(ForkLauncher(env, log, cancelled=cancelled, model_type=None, modules=[])) as server:
                    server.open()
                    self._ask(server, new)
            except BaseException:
                self._names = self._names[: -len(new)]  # the next attempt requests them again
                raise
        return True

    def _ask(self, server: ForkLauncher, names: list[str]) -> bool:
        try:
            answer = server.load_ops(names, self._take)
        finally:
            self._show("")
        self.folder = "" if FOLDER in os.environ else answer["folder"]
        for builder, why in answer["failed"].items():
            if builder not in self.failed:
                self._say(f"DeepSpeed's {op_name(builder)} cannot be built ({why})")
            self.failed[builder] = why
        return bool(answer["fork_safe"])

    def _take(self, message: Message | None) -> None:
        if message is None:
            if self._loading and time.monotonic() - self._loading[0] > _LOADING_SECONDS:
                said, self._loading = self._loading[1], None
                self._begin({**said, "state": "building"})
        elif message["state"] in ("waiting", "building", "loading"):
            self._begin(message)
        else:
            self._loading = None
            if message.get("built") or message["state"] == "failed":
                self.build_seconds += message["seconds"]
            if message.get("built"):
                self._say(f"built DeepSpeed's {op_name(message['op'])} in {format_duration(message['seconds'])}")

    def _begin(self, message: Message) -> None:
        op, last = op_name(message["op"]), message["last_seconds"]
        took = f"it took {format_duration(last)} the last time" if last else "once for this environment, maybe minutes"
        if message["state"] == "loading":
            self._loading = time.monotonic(), message
            self._show(f"loading DeepSpeed's {op}")
            return
        if message["state"] == "waiting":
            text = f"waiting for DeepSpeed's {op}, which another process is building ({took})"
        elif message.get("going_on"):
            text = f"going on with DeepSpeed's {op}, whose build was stopped ({took})"
        else:
            text = f"building DeepSpeed's {op} ({took})"
        self._say(text)
        self._show(text)

    def left(self, candidates: Sequence[Candidate], job: Job, device: str) -> tuple[list[Candidate], list[str]]:
        """Return the candidates that need no failed op, and one line per failed op that excludes some.

        Raises:
            UserError: no candidate is left.
        """
        failed = self.failed.keys() - DISPENSABLE
        if not failed or not candidates:
            return list(candidates), []
        missing = {one: failed & set(needed_ops([one], job, device)) for one in candidates}
        left = [one for one in candidates if not missing[one]]
        lines = []
        for builder in sorted(set().union(*missing.values())):
            count = sum(builder in needed for needed in missing.values())
            of = f"{count} of {len(candidates)} candidates need it"
            lines.append(f"DeepSpeed's {op_name(builder)} cannot be built ({self.failed[builder]}): {of}")
        if not left:
            raise UserError(f"{'; '.join(lines)}; `autotune doctor` says what is missing")
        return left, [f"{line}: left out" for line in lines]


def op_name(builder: str) -> str:
    """Return `CPUAdam` for `CPUAdamBuilder`."""
    return builder.removesuffix("Builder")
