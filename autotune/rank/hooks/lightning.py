"""Hook Lightning, whose Trainer sets the batches per optimizer step instead of the DeepSpeed config."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from autotune.problem.candidate import ACCUMULATION
from autotune.rank.hooks.context import Context

_PACKAGES = ("lightning", "pytorch_lightning")


def trainer_of(model: Any) -> Any:
    """Return the Trainer of a LightningModule, or None if another loop trains (also Fabric, whose loop is the script's)."""
    for cls in type(model).__mro__:
        if cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in _PACKAGES:
            with suppress(RuntimeError):  # raised by a module without a Trainer
                return model.trainer if hasattr(model.trainer, "accumulate_grad_batches") else None
    return None


def accumulate(context: Context, model: Any, config: dict[str, Any]) -> None:
    """Set the candidate's accumulation in the model's Trainer, whose own count would end training at another step.

    Args:
        config: config of the engine being made. `Candidate.ds_config` omits the key, because Lightning refuses it in a
            config that it reads.
    """
    trainer = trainer_of(model)
    if trainer is not None and context.batch is not None:
        trainer.accumulate_grad_batches = config[ACCUMULATION] = context.batch[1]
