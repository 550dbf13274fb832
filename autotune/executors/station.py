"""What one machine needs for a study or a training: a launcher of ranks, DeepSpeed's ops, an eye on its memory.

The local executor has one, and so has the agent of every node (`nodes/agent.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.executors.ops import Ops
from autotune.group.environment import training_environment, trial_environment
from autotune.group.launchers import ForkLauncher, Launcher, SpawnLauncher


@dataclass(frozen=True)
class Needs:
    """What ranks of a job need of the machine that they run on.

    Args:
        device: `cuda` or `cpu`.
        threads: CPU threads a rank.
        isolation: `fork` (from a server that has imported everything) or `spawn` (cold starts).
        modules: what the server imports, beside what every rank needs.
        model_type: of a model of transformers', which it imports too.
        training: whether ranks train instead of being measured: in the user's own environment, and to their own end.
        cwd: the folder in which ranks start; None: this process's.
        variables: of ranks, beside the usual ones.
    """

    device: str
    threads: int
    isolation: str = "spawn"
    modules: Sequence[str] = ()
    model_type: str | None = None
    training: bool = False
    cwd: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """A rank's before its first instruction."""
        make = training_environment if self.training else trial_environment
        return {**make(self.device, self.threads), **self.variables}


class Station:
    """Starts ranks on this machine.

    Args:
        folder: for the logs of what starts ranks.
        cancelled: asked several times a second while a server imports and builds.
    """

    def __init__(self, folder: Path, ops: Ops, cancelled: Callable[[], bool]) -> None:
        self.folder, self.ops, self.cancelled = folder, ops, cancelled
        self.found: Launcher | None = None
        self._begun: tuple[Needs, ForkLauncher] | None = None

    @property
    def launcher(self) -> Launcher:
        if self.found is None:
            raise RuntimeError("open() comes first")
        return self.found

    def begin(self, needs: Needs) -> None:
        """Starts what `open` of the same needs waits for: imports take seconds, in which this process can do something else."""
        self.close()
        if needs.isolation == "fork":
            self.folder.mkdir(parents=True, exist_ok=True)
            server = ForkLauncher(
                needs.environment(),
                self.folder / "server.log",
                cancelled=self.cancelled,
                model_type=needs.model_type,
                modules=list(needs.modules),
            )
            server.begin()
            self._begun = needs, server

    def open(self, needs: Needs) -> None:
        """Makes the launcher.

        Raises:
            UserError: the fork server died, or hangs.
            Stopped: it was cancelled.
        """
        if self._begun is None or self._begun[0] != needs:
            self.begin(needs)
        if self._begun is not None:
            server, self._begun = self._begun[1], None
            server.open()
            self.found = server
        else:
            log = None if needs.training else self.folder / "spawn.log"
            self.found = SpawnLauncher(needs.environment(), log, needs.cwd)

    def load_ops(self, names: Sequence[str], needs: Needs) -> bool:
        """Has DeepSpeed's ops built and loaded; whether ranks may still be forked then. See `Ops.load`."""
        return self.ops.load(self.launcher, names, needs.environment(), self.folder / "server.log", self.cancelled)

    @property
    def broken(self) -> bool:
        """Whether the fork server was killed, or could not be started again."""
        return self.found is None or (isinstance(self.found, ForkLauncher) and not self.found.alive)

    def mend(self) -> None:
        """`open` starts another."""
        self.close()

    def all_see(self, path: Path) -> bool:
        """All ranks are on this machine."""
        return True

    def close(self) -> None:
        begun, found = self._begun, self.found
        self._begun = self.found = None
        if begun is not None:
            begun[1].close()
        if found is not None:
            found.close()
