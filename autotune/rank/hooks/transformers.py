"""transformers: TrainingArguments, and those of libraries that build on them (TRL), carry the candidate's batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.problem.argument_files import output_folder
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH
from autotune.rank.hooks import resuming, saving
from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported

_DEFAULT_OUTPUT = "trainer_output"  # since transformers 5


def install(context: Context) -> None:
    """Arguments are changed before `__post_init__` reads them: there they are checked and the config is loaded. Does nothing
    where transformers cannot be imported."""
    arguments_class = imported("transformers", "TrainingArguments")
    if arguments_class is None:
        return

    def post_init(original: Callable[..., Any], arguments: Any) -> None:
        _fill(context, arguments)
        original(arguments)
        if context.quiet:
            arguments.report_to = []  # transformers 5 adds Kubeflow to none

    def load_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        if context.batch is not None and getattr(state, "train_batch_size", None):
            # Before transformers 5.2 Trainer goes on with the micro-batch of the checkpoint, whatever its arguments say.
            state.train_batch_size = context.batch[0]
        return state

    context.patches.wrap(arguments_class, "__post_init__", post_init)
    context.patches.wrap(imported("transformers", "TrainerState"), "load_from_json", load_state)


def _fill(context: Context, arguments: Any) -> None:
    context.through_arguments = True
    for name in ("max_length", "max_seq_length"):  # TRL's
        if isinstance(longest := getattr(arguments, name, None), int):
            context.allowed_tokens.append(longest)
    if context.device == "cpu":
        arguments.use_cpu = True
    arguments.auto_find_batch_size = False  # it catches our out-of-memory and halves the batch
    context.note_said(MICRO_BATCH, arguments.per_device_train_batch_size)
    context.note_said(ACCUMULATION, arguments.gradient_accumulation_steps)
    if context.batch is not None:
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = context.batch
    candidate = context.candidate
    if candidate is not None and CHECKPOINTING in candidate.as_dict:
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if hasattr(arguments, name):
                setattr(arguments, name, candidate.checkpointing)
    context.watcher.planned(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    if context.quiet:
        _silence(context, arguments)


def _silence(context: Context, arguments: Any) -> None:
    """Nothing is resumed, evaluated, saved, reported or left behind outside the context's folder. When to evaluate and save the
    arguments still say: callbacks and schedulers check that."""
    resuming.keep_trainer_from_it(context, arguments)
    saving.keep_trainer_from_it(context)
    arguments.output_dir = _output(context, arguments.output_dir or _DEFAULT_OUTPUT)
    arguments.report_to = "none"
    arguments.push_to_hub = False
    for name, value in (("eval_on_start", False), ("logging_dir", None)):  # not in every version
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def _output(context: Context, given: Any) -> str:
    """Return the output folder of a trial: the script's own if the sandbox keeps what is written there, else one in its files."""
    path = os.path.expanduser(os.fsdecode(given))
    if context.sandbox is not None and context.sandbox.keeps(os.path.abspath(path)):
        return os.fsdecode(given)
    theirs = Path(context.script.cwd, path)  # `../out` means what it does in the user's folder
    return str(output_folder(context.folder, theirs))
