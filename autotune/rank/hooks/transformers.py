"""Hooks of transformers: TrainingArguments and its subclasses (TRL); no saves, evaluations or resumes in a measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, KNOBS, MICRO_BATCH
from autotune.problem.knobs import LEVERS
from autotune.rank.checkpoints import model_states, tag_of
from autotune.rank.hooks.base import Context
from autotune.rank.patches import Call
from autotune.rank.versions import import_or_none
from autotune.script.argument_files import output_folder

_DEFAULT_OUTPUT = "trainer_output"  # since transformers 5


def install(context: Context) -> None:
    """Set the candidate's batch in arguments before `__post_init__` checks them and loads the config."""
    arguments_class = import_or_none("transformers", "TrainingArguments")
    if arguments_class is None:
        return

    def post_init(call: Call) -> None:
        _fill(context, call.owner)
        call()
        if context.quiet:
            call.owner.report_to = []  # transformers 5 adds Kubeflow to "none"

    def load_state(call: Call) -> Any:
        state = call()
        if context.batch is not None and getattr(state, "train_batch_size", None):
            # Before transformers 5.2, Trainer prefers the checkpoint's micro-batch to that of its arguments.
            state.train_batch_size = context.batch[0]
        return state

    context.patches.wrap(arguments_class, "__post_init__", post_init)
    context.patches.wrap(import_or_none("transformers", "TrainerState"), "load_from_json", load_state)


def _fill(context: Context, arguments: Any) -> None:
    context.through_arguments = True
    for name in ("max_length", "max_seq_length"):  # names of TRL
        if isinstance(longest := getattr(arguments, name, None), int):
            context.allowed_tokens.append(longest)
    if context.device == "cpu":
        arguments.use_cpu = True
    arguments.auto_find_batch_size = False  # Trainer would catch an OOM and halve the batch
    _note(context, arguments)
    if context.batch is not None:
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = context.batch
    context.levers = {knob for knob in LEVERS if getattr(arguments, KNOBS[knob].trainer, None) == KNOBS[knob].off}
    for knob in context.knobs.keys() & set(LEVERS):
        setattr(arguments, KNOBS[knob].trainer, context.knobs[knob])
    for name in ("gradient_checkpointing", CHECKPOINTING):
        if CHECKPOINTING in context.knobs and hasattr(arguments, name):
            setattr(arguments, name, bool(context.knobs[CHECKPOINTING]))
    context.watcher.planned(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    if context.quiet:
        _silence(context, arguments)


def _note(context: Context, arguments: Any) -> None:
    """Record the batch of arguments, in place of that of earlier ones."""
    context.said.clear()
    context.note_said(MICRO_BATCH, arguments.per_device_train_batch_size)
    context.note_said(ACCUMULATION, arguments.gradient_accumulation_steps)
    context.averages_by_rank = getattr(arguments, "average_tokens_across_devices", None) is False


def _silence(context: Context, arguments: Any) -> None:
    """Prevent resumes, evaluations, saves, reports, and files outside the context's folder.

    The schedule of evaluations and saves stays in the arguments, because callbacks and schedulers check it.
    """
    if not context.trainer_silent:
        context.trainer_silent = True
        _silence_trainer(context)
    arguments.resume_from_checkpoint = None
    arguments.output_dir = _output(context, arguments.output_dir or _DEFAULT_OUTPUT)
    arguments.report_to = "none"
    arguments.push_to_hub = False
    for name, value in (("eval_on_start", False), ("logging_dir", None)):  # not in every version
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def _output(context: Context, given: Any) -> str:
    """Return the output folder of a trial: the script's own if the sandbox keeps its files, else one in the trial's files."""
    path = os.path.expanduser(os.fsdecode(given))
    if context.sandbox is not None and context.sandbox.keeps(os.path.abspath(path)):
        return os.fsdecode(given)
    theirs = Path(context.script.cwd, path)  # `../out` keeps its meaning relative to the user's folder
    return str(output_folder(context.folder, theirs))


# -- saves and resumes -------------------------------------------------------------------------------------------------
#
# Skip all saves and evaluations of a measurement: no checkpoint is written, and none removed to free space. Start from
# the beginning, even if the script resumes. A checkpoint has the layout of one ZeRO stage, so candidates of other stages
# would fail. A finished training would make no step. Speed and memory do not depend on the values of weights.
#
# Verification calls DeepSpeed's own saves (`deepspeed.unhooked`). The arguments stay unchanged: callbacks and schedulers
# read them, and refuse a training that never evaluates or saves.

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


def install_silence(context: Context) -> None:
    """Hook DeepSpeed's engines and accelerate if the context is quiet; see `_silence_trainer` for Trainer."""
    if not context.quiet:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    def load_checkpoint(call: Call) -> Any:
        engine = call.owner
        if engine in (context.engine, *(one.engine for one in context.beside), *context.earlier):
            found = _found(engine, Path(call.given["load_dir"]), call.given["tag"])
            if found is not None:
                return found
        return call()

    def save_state(call: Call) -> Any:
        accelerator, output_dir = call.owner, call.given["output_dir"]
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = os.path.join(
                accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}"
            )
        project.iteration += 1
        make_folder(context, output_dir)
        return output_dir

    def tagged(call: Call) -> str:
        tag = call.given["tag"]
        name = f"global_step{call.owner.global_steps}" if tag is None else str(tag)
        return os.path.join(call.given["save_dir"], name)

    context.patches.wrap(DeepSpeedEngine, "load_checkpoint", load_checkpoint)
    _leave_out(context, DeepSpeedEngine, "save_checkpoint", tagged)
    _leave_out(context, DeepSpeedEngine, "save_16bit_model", lambda call: call.given["save_dir"])
    if (accelerator_class := import_or_none("accelerate", "Accelerator")) is not None:
        _leave_out(context, accelerator_class, "load_state")
        _leave_out(context, accelerator_class, "save_model", lambda call: call.given["save_directory"])
        context.patches.wrap(accelerator_class, "save_state", save_state)


def _leave_out(context: Context, owner: Any, name: str, folder: Callable[[Call], Any] | None = None) -> None:
    """Replace a method that reads or writes a checkpoint by one that only makes its `folder`."""

    def left_out(call: Call) -> bool:
        if folder is not None:
            make_folder(context, folder(call))
        return True

    if hasattr(owner, name):
        context.patches.wrap(owner, name, left_out)


def _silence_trainer(context: Context) -> None:
    """Keep Trainer from resuming, evaluating and saving by ignoring callbacks; the script's own evaluations run."""

    def train(call: Call) -> Any:
        arguments = call.owner.args
        _note(context, arguments)  # a library may have made others since (sentence-transformers)
        context.watcher.planned(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
        call.change(resume_from_checkpoint=None)
        return call()

    def call_event(call: Call) -> Any:
        control = call()
        control.should_evaluate = control.should_save = False
        return control

    context.patches.wrap(import_or_none("transformers.trainer_callback", "CallbackHandler"), "call_event", call_event)
    trainer_class = import_or_none("transformers", "Trainer")
    context.patches.wrap(trainer_class, "train", train)
    _leave_out(
        context, trainer_class, "save_model", lambda call: call.given["output_dir"] or call.owner.args.output_dir
    )
    _leave_out(context, trainer_class, "_save_checkpoint")
    _leave_out(context, trainer_class, "push_to_hub")


def make_folder(context: Context, folder: Any) -> None:
    """Create the folder that a script expects after a save, if it belongs to the trial.

    Among the user's files an empty checkpoint could be mistaken for a real one.
    """
    if folder and context.sandbox is not None and context.sandbox.keeps(os.path.abspath(os.fsdecode(folder))):
        os.makedirs(folder, exist_ok=True)


def _found(engine: Any, folder: Path, tag: Any) -> tuple[str, dict[str, Any]] | None:
    """Return DeepSpeed's answer for a checkpoint: its path, and the script's own states in it.

    Returns:
        None without a checkpoint, so that DeepSpeed reports it itself.
    """
    if tag is None:
        tag = tag_of(folder, "latest_universal" if engine.load_universal_checkpoint() else "latest")
    states = model_states(folder / str(tag)) if tag is not None else {}
    own = {key: value for key, value in states.items() if key not in _DEEPSPEEDS}
    return (str(folder / str(tag)), own) if states else None
