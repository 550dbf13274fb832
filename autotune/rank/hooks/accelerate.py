"""Hook accelerate: the DeepSpeed config of its plugin, and the data loader passed to `Accelerator.prepare`."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.rank.hooks.base import Context
from autotune.rank.hooks.config import merged, without_trackers
from autotune.rank.hooks.process_group import wait_for
from autotune.rank.patches import Call
from autotune.rank.versions import import_or_none


def install(context: Context) -> None:
    """Install the hooks, or do nothing if accelerate cannot be imported."""
    config_class = import_or_none("accelerate.utils.deepspeed", "HfDeepSpeedConfig")
    if config_class is None:
        return
    import accelerate

    def share_state(call: Call) -> None:
        if context.device == "cpu":
            # As Trainer does. Otherwise accelerate 1.15 finds no backend in a custom loop and assumes a single process.
            call.args, call.kwargs = call.args[:1], {**call.kwargs, "cpu": True, "backend": None}
        call()
        wait_for(context, call.kwargs.get("timeout"))  # ddp_timeout, or that of InitProcessGroupKwargs

    context.patches.wrap(accelerate.PartialState, "__init__", share_state)

    def load_config(call: Call) -> None:
        call()
        config = call.owner
        own = copy.deepcopy(config.config)
        if own.get("zero_optimization") in context.script.profile.kept_configs:
            config.config = _accumulating(context, without_trackers(context, own))
            return  # a plugin without training (a teacher's), whose stage may be the only one possible
        config.config = merged(context, config.config)
        # A weak reference: transformers checks if its config still exists, so this list must not keep it alive.
        context.plugins.append((weakref.ref(config), own))
        config.set_stage_and_offload()

    def make_plugin(call: Call) -> None:
        call()
        context.accelerated = True
        # A plugin written in code keeps the stage of its arguments, and accelerate skips reductions by it.
        plugin = call.owner
        plugin.zero_stage = int((plugin.deepspeed_config.get("zero_optimization") or {}).get("stage", 0))

    loaders = Loaders(context)
    context.patches.wrap(config_class, "__init__", load_config)
    context.patches.wrap(accelerate.DeepSpeedPlugin, "__post_init__", make_plugin)
    context.patches.wrap(accelerate.Accelerator, "prepare", loaders.prepare)


def _accumulating(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the candidate's accumulation.

    accelerate keeps one accumulation for all plugins, that of the last plugin prepared.
    """
    sizes = [config.get(key) for key in (ACCUMULATION, MICRO_BATCH)]
    if context.batch is None or not all(isinstance(one, int) for one in sizes):
        return config
    found = {**config, ACCUMULATION: context.batch[1]}
    if found.get("train_batch_size", "auto") != "auto":
        del found["train_batch_size"]  # the product has changed
    return found


def begin_anew() -> None:
    """Reset accelerate's state of this process, because the environment has changed."""
    state = import_or_none("accelerate.state", "AcceleratorState")
    if state is not None:
        state._reset_state(reset_partial_state=True)


class Loaders:
    """Find the training's loader among all prepared ones, and give it the candidate's micro-batch.

    TrainingArguments set their batch sizes themselves. The training's loader is the first one prepared together with a
    model or an optimizer. Without such a loader it is the first earlier one that is still unread, because a loader for
    sampling has been read by then. Otherwise it is the first later one.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found = False
        self._trains = False  # True if a model or an optimizer was prepared without a loader
        self._before: list[tuple[Any, Any]] = []  # earlier loaders: the script's own, and the prepared one

    def prepare(self, call: Call) -> Any:
        """Replace `Accelerator.prepare`."""
        from torch.utils.data import DataLoader

        if self._found or self.context.through_arguments:
            return call()
        accelerator, *objects = call.args
        trains = any(map(_trains, objects))
        loaders = [one for one in objects if isinstance(one, DataLoader)]
        self._trains = self._trains or trains
        if loaders and self._trains:
            self._found = True
            self._resize(accelerator, loaders[0])
        elif trains:
            # the script already holds its loader, which gets the candidate's batch size in place
            for own, given in self._before:
                if getattr(given, "iteration", 0) == 0:
                    self._found = True
                    if self._resize(accelerator, own):
                        given.__dict__ = call.original(accelerator, own).__dict__
                        accelerator._dataloaders.pop()
                    break
        prepared = call()
        results = prepared if isinstance(prepared, tuple) else (prepared,)
        self._before += [
            (one, result) for one, result in zip(objects, results, strict=True) if isinstance(one, DataLoader)
        ]
        return prepared

    def _resize(self, accelerator: Any, loader: Any) -> bool:
        """Give a loader the candidate's batch size, and return True if it had another.

        A loader with a custom batch sampler stays unchanged, because there is no general way to resize it.
        """
        if not loader.batch_size:
            return False
        context = self.context
        context.loader_prepared = True
        context.loader_split = bool(getattr(accelerator, "split_batches", False))
        shares = accelerator.num_processes if context.loader_split else 1
        context.note_said(MICRO_BATCH, loader.batch_size // shares)
        if context.batch is None or loader.batch_size == context.batch[0] * shares:
            return False
        loader.batch_sampler.batch_size = vars(loader)["batch_size"] = context.batch[0] * shares
        return True


def _trains(one: Any) -> bool:
    """Return True for an optimizer or a model in training mode; generating and reference models are in evaluation mode."""
    import torch
    from accelerate.utils import DummyOptim

    return isinstance(one, torch.optim.Optimizer | DummyOptim) or (isinstance(one, torch.nn.Module) and one.training)
