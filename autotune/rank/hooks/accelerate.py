"""accelerate: the DeepSpeed config of its plugin, and the data loader that `Accelerator.prepare` is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import MICRO_BATCH
from autotune.rank.hooks.config import merged
from autotune.rank.hooks.context import Context
from autotune.rank.hooks.process_group import wait_for
from autotune.rank.versions import imported

# What a loader of another batch size is made with again; its sampler too, where it has one.
_KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
)


def install(context: Context) -> None:
    """Does nothing where accelerate cannot be imported. The process group must exist."""
    config_class = imported("accelerate.utils.deepspeed", "HfDeepSpeedConfig")
    if config_class is None:
        return
    import accelerate

    def share_state(original: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any) -> None:
        original(state, *args, **kwargs)
        wait_for(context, kwargs.get("timeout"))  # TrainingArguments' ddp_timeout, InitProcessGroupKwargs'

    context.patches.wrap(accelerate.PartialState, "__init__", share_state)
    _state_of_cpu_ranks(context)

    def load_config(original: Callable[..., Any], config: Any, config_file_or_dict: Any) -> None:
        original(config, config_file_or_dict)
        config.config = merged(context, config.config)
        config.set_stage_and_offload()

    def make_plugin(original: Callable[..., Any], plugin: Any) -> None:
        original(plugin)
        context.accelerated = True
        # A plugin that is written in code keeps the stage of its arguments, and accelerate skips reductions by it.
        plugin.zero_stage = int((plugin.deepspeed_config.get("zero_optimization") or {}).get("stage", 0))

    def prepare(original: Callable[..., Any], accelerator: Any, /, *objects: Any, **kwargs: Any) -> Any:
        return original(accelerator, *_resized(context, accelerator, objects), **kwargs)

    context.patches.wrap(config_class, "__init__", load_config)
    context.patches.wrap(accelerate.DeepSpeedPlugin, "__post_init__", make_plugin)
    context.patches.wrap(accelerate.Accelerator, "prepare", prepare)


def begin_anew(context: Context) -> None:
    """Forgets what accelerate knows of this process, as a new one would know nothing: the environment is another now."""
    state = imported("accelerate.state", "AcceleratorState")
    if state is None:
        return
    state._reset_state(reset_partial_state=True)
    _state_of_cpu_ranks(context)


def _state_of_cpu_ranks(context: Context) -> None:
    """Asked by a loop on CPU ranks, accelerate 1.15 finds no backend and takes itself for the only process; Trainer asks like
    this."""
    import accelerate

    if context.device == "cpu":
        accelerate.PartialState(cpu=True)


def _resized(context: Context, accelerator: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """The objects with the first data loader among them at the candidate's micro-batch, if it is the training's: the first
    that the script has prepared, and batch sizes do not come from TrainingArguments."""
    from torch.utils.data import DataLoader

    if context.through_arguments or context.loader_prepared:
        return objects
    found = list(objects)
    for at, loader in enumerate(found):
        if isinstance(loader, DataLoader) and loader.batch_size:
            context.loader_prepared = True
            context.loader_split = bool(getattr(accelerator, "split_batches", False))
            shares = accelerator.num_processes if context.loader_split else 1
            context.note_said(MICRO_BATCH, loader.batch_size // shares)
            if context.batch is not None and loader.batch_size != context.batch[0] * shares:
                found[at] = _with_batch_size(loader, context.batch[0] * shares)
            break
    return tuple(found)


def _with_batch_size(loader: Any, batch_size: int) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    kept = {name: getattr(loader, name) for name in _KEPT}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, **kept)
