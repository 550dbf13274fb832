"""DeepSpeed's ops before a trial or a training needs them: built where this environment has not yet, and said."""

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

_LOADING_SECONDS = 5.0  # loading that takes longer is building anew what has changed


class Ops:
    """The ops of one study or training.

    Args:
        say: takes a line for people.
        show: takes what is done at the moment, for a view that is drawn again and again; empty when it is done.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None] = lambda text: None) -> None:
        self._say, self._show = say, show
        self._names: list[str] = []  # of the builders of those that were asked for
        self._server: ForkLauncher | None = None  # has loaded them
        self.failed: dict[str, str] = {}  # why, by builder
        self.folder = ""  # of this environment's own, where they lie; empty: where the user's own variable says
        self.build_seconds = 0.0
        self._loading: tuple[float, Message] | None = None  # since when, and what was said of it

    def load(
        self,
        launcher: Launcher,
        names: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Has the launcher's ranks find these, and those that were asked for before; returns whether a fork server may still
        be forked. Cold ranks find what a process of its own has built beforehand: else they would build, in silence and all
        at the same place.

        Args:
            names: of the builders.
            env: of that process, as ranks have it.
            log: of that process.

        Raises:
            UserError: that process or the server died, or a build hangs.
            Stopped: it was cancelled.
        """
        new = [name for name in dict.fromkeys(names) if name not in self._names]
        self._names += new
        if isinstance(launcher, ForkLauncher):
            if launcher is not self._server:  # another has loaded those of before
                self._server, new = launcher, self._names
                return self._ask(launcher, new)
            return self._ask(launcher, new) if new else True
        if new:
            try:
                with closing(ForkLauncher(env, log, cancelled=cancelled, model_type=None, modules=[])) as server:
                    server.open()
                    self._ask(server, new)
            except BaseException:
                self._names = self._names[: -len(new)]  # whoever tries again asks for them again
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
        """The candidates that do without the ops that cannot be built, and a line for each of these that costs some.

        Raises:
            UserError: none is left.
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
    """`CPUAdam` for `CPUAdamBuilder`."""
    return builder.removesuffix("Builder")
