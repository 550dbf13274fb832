"""Skip all saves and evaluations of a measurement: no checkpoint is written, and none removed to free space.

`deepspeed.py` silences DeepSpeed's own saves, because verification needs them. The arguments stay unchanged: callbacks
and schedulers read them, and refuse a training that never evaluates or saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported


def install(context: Context) -> None:
    """Hook accelerate if the context is quiet; see `keep_trainer_from_it` for Trainer."""
    if not context.quiet or (accelerator_class := imported("accelerate", "Accelerator")) is None:
        return

    def save_state(original: Callable[..., Any], accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = os.path.join(
                accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}"
            )
        project.iteration += 1
        make_folder(context, output_dir)
        return output_dir

    def save_model(
        original: Callable[..., Any], accelerator: Any, model: Any, save_directory: Any = None, *_: Any, **__: Any
    ) -> None:
        make_folder(context, save_directory)

    context.patches.wrap(accelerator_class, "save_state", save_state)
    context.patches.wrap(accelerator_class, "save_model", save_model)


def keep_trainer_from_it(context: Context) -> None:
    """Keep Trainer from evaluating and saving by ignoring callbacks; the script's own evaluations run."""
    if context.trainer_silent:
        return
    context.trainer_silent = True

    def call_event(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        control = original(*args, **kwargs)
        control.should_evaluate = control.should_save = False
        return control

    def save_model(original: Callable[..., Any], trainer: Any, output_dir: Any = None, *_: Any, **__: Any) -> None:
        make_folder(context, trainer.args.output_dir if output_dir is None else output_dir)

    def nothing(original: Callable[..., Any], /, *_: Any, **__: Any) -> None:
        """Replace methods that write or upload a checkpoint."""

    context.patches.wrap(imported("transformers.trainer_callback", "CallbackHandler"), "call_event", call_event)
    trainer_class = imported("transformers", "Trainer")
    for name, silent in (("save_model", save_model), ("_save_checkpoint", nothing), ("push_to_hub", nothing)):
        if hasattr(trainer_class, name):
            context.patches.wrap(trainer_class, name, silent)


def make_folder(context: Context, folder: Any, *, anywhere: bool = False) -> None:
    """Create the folder that a script expects after a save, if it belongs to the trial.

    Among the user's files an empty checkpoint could be mistaken for a real one. With `anywhere` the folder is created
    there too, because it cannot be mistaken.
    """
    kept = bool(folder) and context.sandbox is not None and context.sandbox.keeps(os.path.abspath(os.fsdecode(folder)))
    if folder and (anywhere or kept):
        os.makedirs(folder, exist_ok=True)
