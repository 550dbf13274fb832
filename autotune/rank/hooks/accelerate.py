"""accelerate: the DeepSpeed config of its plugin, and the data loader that `Accelerator.prepare` is given."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.script_job import KEPT
from autotune.rank.hooks.config import merged, without_trackers
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
        own = copy.deepcopy(config.config)
        if own.get("zero_optimization") in context.script.profile.get(KEPT, ()):
            config.config = _accumulating(context, without_trackers(context, own))
            return  # of a plugin that trains nothing: a teacher's, whose stage may be the only one that it can have
        config.config = merged(context, config.config)
        # transformers goes by whether its config is still there: it is not kept alive
        context.plugins.append((weakref.ref(config), own))
        config.set_stage_and_offload()

    def make_plugin(original: Callable[..., Any], plugin: Any) -> None:
        original(plugin)
        context.accelerated = True
        # A plugin that is written in code keeps the stage of its arguments, and accelerate skips reductions by it.
        plugin.zero_stage = int((plugin.deepspeed_config.get("zero_optimization") or {}).get("stage", 0))

    loaders = Loaders(context)
    context.patches.wrap(config_class, "__init__", load_config)
    context.patches.wrap(accelerate.DeepSpeedPlugin, "__post_init__", make_plugin)
    context.patches.wrap(accelerate.Accelerator, "prepare", loaders.prepare)


def _accumulating(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """With the candidate's accumulation, which accelerate keeps once for all plugins: that of the last that is prepared."""
    sizes = [config.get(key) for key in (ACCUMULATION, MICRO_BATCH)]
    if context.batch is None or not all(isinstance(one, int) for one in sizes):
        return config
    found = {**config, ACCUMULATION: context.batch[1]}
    if found.get("train_batch_size", "auto") != "auto":
        del found["train_batch_size"]  # it would be another
    return found


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


class Loaders:
    """Finds the training's loader among all that are prepared, and makes it again at the candidate's micro-batch. Batch sizes of
    TrainingArguments are set there.

    It is the first beside a model or an optimizer. Where there is none beside them, it is the first that was prepared before and
    that nothing has been drawn from yet (a sampling loader has had its use then), else the first after.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found = False
        self._trains = False  # a model or an optimizer was prepared, without a loader
        self._before: list[tuple[Any, Any]] = []  # loaders prepared until then: the script's own, and what it was given

    def prepare(self, original: Callable[..., Any], accelerator: Any, /, *objects: Any, **kwargs: Any) -> Any:
        """Stands for `Accelerator.prepare`."""
        from torch.utils.data import DataLoader

        if self._found or self.context.through_arguments:
            return original(accelerator, *objects, **kwargs)
        trains = any(map(_trains, objects))
        at = next((at for at, one in enumerate(objects) if isinstance(one, DataLoader)), None)
        if at is not None and (trains or self._trains):
            self._found = True
            changed = self._resized(accelerator, objects[at])
            return original(accelerator, *objects[:at], changed, *objects[at + 1 :], **kwargs)
        if trains:
            self._trains = True
            self._take_one_from_before(original, accelerator)
        prepared = original(accelerator, *objects, **kwargs)
        results = prepared if isinstance(prepared, tuple) else (prepared,)
        self._before += [
            (one, result) for one, result in zip(objects, results, strict=True) if isinstance(one, DataLoader)
        ]
        return prepared

    def _take_one_from_before(self, original: Callable[..., Any], accelerator: Any) -> None:
        """The script has the loader already: it becomes one of the other batch size."""
        for own, given in self._before:
            if getattr(given, "iteration", 0) == 0:
                self._found = True
                changed = self._resized(accelerator, own)
                if changed is not own:
                    given.__dict__ = original(accelerator, changed).__dict__
                    accelerator._dataloaders.pop()
                return

    def _resized(self, accelerator: Any, loader: Any) -> Any:
        """The loader, or one like it; one with a batch sampler of its own, which is not known how to change, stays."""
        if not loader.batch_size:
            return loader
        context = self.context
        context.loader_prepared = True
        context.loader_split = bool(getattr(accelerator, "split_batches", False))
        shares = accelerator.num_processes if context.loader_split else 1
        context.note_said(MICRO_BATCH, loader.batch_size // shares)
        if context.batch is None or loader.batch_size == context.batch[0] * shares:
            return loader
        return _with_batch_size(loader, context.batch[0] * shares)


def _trains(one: Any) -> bool:
    """Whether it is what is trained, or what trains it; a model that only generates or refers is in evaluation mode."""
    import torch
    from accelerate.utils import DummyOptim

    return isinstance(one, torch.optim.Optimizer | DummyOptim) or (isinstance(one, torch.nn.Module) and one.training)


def _with_batch_size(loader: Any, batch_size: int) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    kept = {name: getattr(loader, name) for name in _KEPT}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, **kept)
