"""A measurement saves and evaluates nothing on its way, whatever the script's arguments and calls say: no checkpoint is written,
and none is removed to make room for one. DeepSpeed's own saves are silent in `deepspeed.py`, where verification finds them.

The arguments stay as they are: callbacks and schedulers read them, and refuse a training that never evaluates or saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported


def install(context: Context) -> None:
    """Hooks accelerate where the context is quiet; for Trainer see `keep_trainer_from_it`."""
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
    """Trainer never comes to evaluate or save, since no callback's wish for it is heard. What the script itself evaluates is."""
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
        """In place of what writes a checkpoint or uploads one."""

    context.patches.wrap(imported("transformers.trainer_callback", "CallbackHandler"), "call_event", call_event)
    trainer_class = imported("transformers", "Trainer")
    for name, silent in (("save_model", save_model), ("_save_checkpoint", nothing), ("push_to_hub", nothing)):
        if hasattr(trainer_class, name):
            context.patches.wrap(trainer_class, name, silent)


def make_folder(context: Context, folder: Any, *, anywhere: bool = False) -> None:
    """Makes the folder that a script would find after a save, which may write into it: where it is the trial's. Among the user's
    files an empty checkpoint would be taken for one; with `anywhere` it is none, and is made there too."""
    kept = bool(folder) and context.sandbox is not None and context.sandbox.keeps(os.path.abspath(os.fsdecode(folder)))
    if folder and (anywhere or kept):
        os.makedirs(folder, exist_ok=True)
