"""One machine's resources for a study or a training: a launcher of ranks and DeepSpeed's ops.

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
    """Requirements of a job's ranks on their machine.

    Args:
        device: `cuda` or `cpu`.
        threads: CPU threads per rank.
        isolation: `fork` (from a server that has imported everything) or `spawn` (cold starts).
        modules: additional imports of the fork server.
        model_type: transformers model type, which the server also imports.
        training: ranks train to the end in the user's own environment, instead of being measured.
        cwd: working directory of the ranks; None: this process's.
        variables: additional environment variables of the ranks.
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
        """Return a rank's initial environment."""
        make = training_environment if self.training else trial_environment
        return {**make(self.device, self.threads), **self.variables}


class Station:
    """Starts ranks on this machine.

    Args:
        folder: for the logs of the fork server or of cold starts.
        ops: DeepSpeed's ops.
        cancelled: polled several times a second while a server imports and builds.
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
        """Start the fork server that `open` waits for, so that its imports run in the background."""
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
        """Create the launcher.

        Raises:
            UserError: the fork server died, or hangs.
            Stopped: the user cancelled.
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
        """Build and load DeepSpeed's ops; return whether ranks may still be forked. See `Ops.load`."""
        return self.ops.load(self.launcher, names, needs.environment(), self.folder / "server.log", self.cancelled)

    @property
    def broken(self) -> bool:
        """True if the fork server was killed or could not be restarted."""
        return self.found is None or (isinstance(self.found, ForkLauncher) and not self.found.alive)

    def mend(self) -> None:
        """Close the launcher; `open` creates another."""
        self.close()

    def all_see(self, path: Path) -> bool:
        """Return True, because all ranks are on this machine."""
        return True

    def close(self) -> None:
        begun, found = self._begun, self.found
        self._begun = self.found = None
        if begun is not None:
            begun[1].close()
        if found is not None:
            found.close()
