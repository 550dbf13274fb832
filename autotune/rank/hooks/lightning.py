"""Lightning: its Trainer, and no DeepSpeed config, says how many batches an optimizer step is made of."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from autotune.problem.candidate import ACCUMULATION
from autotune.rank.hooks.context import Context

_PACKAGES = ("lightning", "pytorch_lightning")


def trainer_of(model: Any) -> Any:
    """The Trainer of a LightningModule; None where another loop trains (Fabric's, too, which is the script's own)."""
    for cls in type(model).__mro__:
        if cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in _PACKAGES:
            with suppress(RuntimeError):  # of a module that no Trainer has
                return model.trainer if hasattr(model.trainer, "accumulate_grad_batches") else None
    return None


def accumulate(context: Context, model: Any, config: dict[str, Any]) -> None:
    """Has the model's Trainer count as the candidate does; its own count would end the training at another step.

    Args:
        config: of the engine that is made now. Lightning refuses the key in a config that it reads, so that
            `Candidate.ds_config` leaves it out.
    """
    trainer = trainer_of(model)
    if trainer is not None and context.batch is not None:
        trainer.accumulate_grad_batches = config[ACCUMULATION] = context.batch[1]
