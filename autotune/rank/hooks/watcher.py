"""Interface by which the hooks report a script's training to its rank."""

from __future__ import annotations

from typing import Any, Protocol

from autotune.problem.outcome import Phase
from autotune.rank.hooks.batches import Sizes


class Watcher(Protocol):
    """Observer of the script's training. Every method is called on every rank."""

    def configured(self, config: dict[str, Any]) -> None:
        """Receive the script's own DeepSpeed config without a candidate's keys.

        Called again if the engine that trains has another config than the first one seen.
        """

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        """Receive the script's batch before memory can run out.

        Args:
            micro_batch: sequences per forward.
            accumulation: micro-batches per optimizer step.
            optimizer: kind of the script's own optimizer, see `optimizers.kind_of`.
        """

    def engine_built(self) -> None:
        """Note that an engine was built, for training or not: its memory is allocated."""

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """Receive the engine that trains, and its facts (`deepspeed.engine_facts`).

        Called again if another engine turns out to be the one that trains (`hooks.election`). All earlier observations
        are then void.
        """

    def forward(self, sizes: Sizes) -> None:
        """Receive the sizes of a forward with gradients when it begins.

        A forward in evaluation mode is reported when its backward begins.
        """

    def entered(self, phase: Phase) -> None:
        """Note the beginning of INIT, FORWARD, BACKWARD or STEP. A backward may be reported more than once."""

    def stepped(self) -> None:
        """Note the end of an optimizer step."""

    def beside(self, number: int, rows: int) -> None:
        """Note an optimizer step of auxiliary engine `number`, made after the one that trains, on `rows` rows."""

    def failed(self, error: BaseException) -> None:
        """Receive an exception of the engine, its construction, or an observation (`Unusable`).

        The script may catch it, so failures that decide a trial are reported here.
        """

    def unbuilt(self, builder: str) -> None:
        """Note that the script will load a DeepSpeed op that this environment has not built. Return to allow it."""

    def strayed(self) -> None:
        """Note that the script trains without any DeepSpeed engine."""
