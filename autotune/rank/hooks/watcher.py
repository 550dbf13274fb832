"""What the hooks tell the rank of its script's training."""

from __future__ import annotations

from typing import Any, Protocol

from autotune.problem.outcome import Phase
from autotune.rank.hooks.batches import Sizes


class Watcher(Protocol):
    """Sees the script's training. Every method is called on every rank."""

    def configured(self, config: dict[str, Any]) -> None:
        """The script's own DeepSpeed config, before any key of a candidate is in it; called again where the engine that trains
        has another than the first that was seen."""

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        """The batch that the script asks for, in sequences and micro-batches, and the optimizer that it has made itself (see
        `optimizers.kind_of`): known before memory can run out."""

    def engine_built(self) -> None:
        """An engine was built, whether it is the one that trains or not: its memory is taken."""

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """The engine that trains exists; for its facts see `deepspeed.engine_facts`. Told again where another turns out to be the
        one (`hooks.election`): all that was seen before is of no account."""

    def forward(self, sizes: Sizes) -> None:
        """A forward that gradients are taken of begins, with what it is given; one in evaluation mode is told when its
        backward begins."""

    def entered(self, phase: Phase) -> None:
        """INIT, FORWARD, BACKWARD or STEP begins; a backward may be told more than once."""

    def stepped(self) -> None:
        """An optimizer step is done."""

    def beside(self, number: int, rows: int) -> None:
        """An engine that was made after the one that trains, the so-manieth, has made an optimizer step of so many rows."""

    def failed(self, error: BaseException) -> None:
        """An exception leaves the engine, its making, or what was seen there (`Unusable`). The script may catch it, so what
        decides the trial is reported from here."""

    def unbuilt(self, builder: str) -> None:
        """The script is about to load an op of DeepSpeed's that this environment has not built; returns if it may."""

    def strayed(self) -> None:
        """The script trains, and no engine of DeepSpeed exists."""
