"""Start every measurement from the beginning, even if the script resumes.

A checkpoint has the layout of one ZeRO stage, so candidates of other stages would fail. A finished training would make
no step. Speed and memory do not depend on the values of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.rank.checkpoints import model_states
from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported

# Keys of a checkpoint that `DeepSpeedEngine.load_checkpoint` uses itself (deepspeed 0.19.8). The rest is the script's.
_DEEPSPEEDS = (
    "module",
    "optimizer",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
)


def install(context: Context) -> None:
    """Hook DeepSpeed's engines and accelerate if the context is quiet; see `keep_trainer_from_it` for Trainer."""
    if not context.quiet:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    def load_checkpoint(
        original: Callable[..., Any], engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if engine is context.engine or any(engine is one for one in (*context.beside, *context.earlier)):
            found = _found(engine, Path(load_dir), tag)
            if found is not None:
                return found
        return original(engine, load_dir, tag, *args, **kwargs)

    context.patches.wrap(DeepSpeedEngine, "load_checkpoint", load_checkpoint)
    if (accelerator := imported("accelerate", "Accelerator")) is not None:
        context.patches.wrap(accelerator, "load_state", lambda original, *args, **kwargs: None)


def keep_trainer_from_it(context: Context, arguments: Any) -> None:
    """Make Trainer start afresh, even if TrainingArguments or the script's call of `train` resume."""
    arguments.resume_from_checkpoint = None
    if context.trains_anew:
        return
    context.trains_anew = True

    def train(
        original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return original(trainer, None, *args, **kwargs)

    context.patches.wrap(imported("transformers", "Trainer"), "train", train)


def _found(engine: Any, folder: Path, tag: Any) -> tuple[str, dict[str, Any]] | None:
    """Return DeepSpeed's answer for a checkpoint: its path, and the script's own states in it.

    Returns:
        None without a checkpoint, so that DeepSpeed reports it itself.
    """
    if tag is None:
        latest = folder / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    states = model_states(folder / str(tag)) if tag is not None else {}
    own = {key: value for key, value in states.items() if key not in _DEEPSPEEDS}
    return (str(folder / str(tag)), own) if states else None
