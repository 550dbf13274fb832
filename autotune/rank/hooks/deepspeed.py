"""Hook DeepSpeed: pass the candidate's config to the engine that trains, and report its steps to the watcher."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.errors import Unusable
from autotune.problem.ds_file import named_config
from autotune.problem.outcome import Phase
from autotune.problem.script_job import EARLIER, KEPT, TORCHS
from autotune.rank.hooks import beside, checkpointing, election, lightning, optimizers
from autotune.rank.hooks.batches import batch_of, padded, sizes_of
from autotune.rank.hooks.config import kept_configs, merged, note_own
from autotune.rank.hooks.context import Context
from autotune.rank.hooks.saving import make_folder
from autotune.rank.versions import backward_prologue

_WATCHED = (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD), ("step", Phase.STEP))


def install(context: Context) -> None:
    """Hook `deepspeed.initialize` and the methods of its engines."""
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    patches = context.patches
    patches.wrap(deepspeed, "initialize", functools.partial(_initialize, context))
    for name, phase in _WATCHED:
        patches.wrap(DeepSpeedEngine, name, functools.partial(_watched, context, phase))
    if (prologue := backward_prologue(DeepSpeedEngine)) is not None:
        patches.wrap(DeepSpeedEngine, prologue, functools.partial(_loss_backward, context))
    patches.wrap(DeepSpeedEngine, "compile", functools.partial(_compile, context))
    if context.quiet:
        patches.wrap(DeepSpeedEngine, "save_checkpoint", functools.partial(_save_checkpoint, context))
        patches.wrap(DeepSpeedEngine, "save_16bit_model", functools.partial(_save_weights, context))


def _save_checkpoint(
    context: Context, _: Any, engine: Any, save_dir: Any = None, tag: Any = None, *__: Any, **___: Any
) -> bool:
    """Replace `engine.save_checkpoint`: only create its folders."""
    make_folder(context, save_dir, anywhere=True)
    if save_dir:
        make_folder(context, os.path.join(save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag)))
    return True


def _save_weights(context: Context, _: Any, engine: Any, save_dir: Any = None, *__: Any, **___: Any) -> bool:
    """Replace `engine.save_16bit_model`: only create its folder."""
    make_folder(context, save_dir, anywhere=True)
    return True


def unhooked(context: Context, method: str, *args: Any) -> Any:
    """Call DeepSpeed's own method on the engine that trains, which `quiet` replaces for the script."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return context.patches.original(DeepSpeedEngine, method)(context.engine, *args)


def _initialize(context: Context, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Change the call that makes the engine that trains.

    Later calls change only in the batch, and earlier ones not at all.
    """
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    config, through_args = _config_of(given)
    if not _trains(context, given, config):
        return _build(context, original, *args, **kwargs)
    if election.is_early(context):
        made = _build(context, original, *args, **kwargs)
        context.earlier.append(made[0])
        return made
    if context.engine is not None:
        changed = beside.with_batch(context, config)
        if changed is not config:
            _give_config(given, changed, through_args)
        made = _build(context, original, **given)
        beside.watch(
            context,
            made[0],
            _steps,
            functools.partial(election.stepped, context, take=functools.partial(_take, context)),
        )
        election.stand(context, made[0], config, given.get("optimizer"))
        return made
    try:
        return _made(context, original, given, config, through_args)
    except BaseException as error:
        context.watcher.failed(error)
        raise


def _build(context: Context, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call DeepSpeed's `initialize`, and report that an engine was built."""
    made = original(*args, **kwargs)
    context.watcher.engine_built()
    return made


def _made(
    context: Context, original: Callable[..., Any], given: dict[str, Any], config: dict[str, Any], through_args: bool
) -> Any:
    """Make the engine that trains, and return the result of `deepspeed.initialize`.

    Args:
        given: arguments of the call.
        config: the config in these arguments.
        through_args: True if the config came through `args`.
    """
    import deepspeed

    if isinstance(given.get("model"), deepspeed.PipelineModule):
        raise Unusable(
            "the script trains a pipeline (PipelineModule), which takes no ZeRO stage above 1 and no other "
            "loop than its own: it is not tuned"
        )
    context.watcher.entered(Phase.INIT)
    optimizer = given.get("optimizer")
    note_own(context, config)
    _give_config(given, merged(context, config), through_args)
    lightning.accumulate(context, given.get("model"), given["config"])
    if plan := batch_of(given["config"], context.job.ranks):
        context.watcher.planned(*plan, optimizers.kind_of(context, optimizer))
    checkpointing.apply(context, given["model"])
    made = _build(context, original, **given)
    _check_data_parallel(context, made[0])
    context.engine = made[0]
    watch_module(context, context.engine.module)
    context.watcher.built(context.engine, engine_facts(context, optimizer))
    return made


def _take(context: Context, rival: election.Rival) -> None:
    """Make another engine the one that trains: move the hooks to it, and restart the watcher."""
    if context.module_hook is not None:
        context.module_hook.remove()
        context.module_hook = None
    context.pending.clear()
    context.engine = rival.engine
    note_own(context, rival.config, again=True)
    try:
        _check_data_parallel(context, context.engine)
    except Unusable as error:
        context.watcher.failed(error)
        raise
    watch_module(context, context.engine.module)
    context.watcher.built(context.engine, engine_facts(context, rival.optimizer))


def _check_data_parallel(context: Context, engine: Any) -> None:
    """Check that every rank trains on its own samples, as candidates and samples per second assume.

    Raises:
        Unusable: ranks share samples.
    """
    ranks, among = context.job.ranks, int(engine._config.world_size)
    if among == ranks:
        among //= engine.mp_world_size  # ranks per model under AutoTP, which the config does not include
    if among != ranks:
        raise Unusable(
            f"the script splits its samples or its model over ranks (sequence, tensor or model parallelism: {ranks} ranks "
            f"train on {among} micro-batches at a time), and only data-parallel trainings are tuned"
        )


def _give_config(given: dict[str, Any], config: dict[str, Any], through_args: bool) -> None:
    given.pop("config_params", None)
    given["config"] = config
    if through_args:
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None


def _config_of(given: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the config of a call of `deepspeed.initialize`, and True if it came through `args`."""
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    through_args = config is None and getattr(given.get("args"), "deepspeed_config", None) is not None
    if through_args:
        config = given["args"].deepspeed_config
    if isinstance(config, str | Path):
        config = named_config(config)
    return (config if isinstance(config, dict) else {}), through_args


def _trains(context: Context, given: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return True if a call of `deepspeed.initialize` makes an engine that trains, and not a reference model's."""
    if given.get("optimizer") is not None or given.get("model_parameters") is not None:
        return True
    if not config.get("optimizer"):
        return False
    model: Any = given.get("model")
    if context.accelerated and not getattr(model, "training", True):
        return False  # accelerate passes an optimizer for training; TRL prepares references with the whole config
    return model is None or not hasattr(model, "parameters") or any(one.requires_grad for one in model.parameters())


def _watched(
    context: Context, phase: Phase, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of an engine, and report it if the engine trains and this is no evaluation."""
    if engine is not context.engine or (phase is Phase.FORWARD and _evaluates(engine.module)):
        return original(engine, *args, **kwargs)
    try:
        boundary = phase is Phase.STEP and _steps(engine)
        if phase is Phase.FORWARD:
            if context.script.worst_case:
                kwargs = padded(args, kwargs, _longest_tokens(context))
            _see(context, engine.module, args, kwargs)
        else:
            _count_pending(context)
            if phase is Phase.BACKWARD:
                election.trained(context)
            context.watcher.entered(phase)
        context.inside = phase
        result = original(engine, *args, **kwargs)
        if boundary:
            context.trained_steps += 1
            context.watcher.stepped()
    except BaseException as error:
        context.watcher.failed(error)
        raise
    finally:
        context.inside = None
    return result


def _evaluates(module: Any) -> bool:
    """Return True if no backward can follow a forward that begins now."""
    import torch

    return not module.training and not torch.is_grad_enabled()


def _loss_backward(context: Context, original: Callable[..., Any], engine: Any, /) -> Any:
    """Report the beginning of a backward from any caller."""
    return original(engine) if context.inside else _watched(context, Phase.BACKWARD, original, engine)


def _steps(engine: Any) -> bool:
    """Return True if `engine.step` runs the optimizer; with `managed_gradient_accumulation: false` it always does."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return (managed is not None and not managed()) or bool(engine.is_gradient_accumulation_boundary())


def _see(context: Context, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Report a forward of the engine that trains. A forward without gradients (a reference, a generation) is ignored.

    A model may train in evaluation mode, in which `from_pretrained` returns it. Such a forward counts once a backward
    follows. If a forward in training mode follows, it was an evaluation.
    """
    import torch

    if not torch.is_grad_enabled():
        return
    sizes = sizes_of(args, kwargs, context.script.profile.get("counted_by"))
    if module.training:
        context.pending.clear()
        context.watcher.forward(sizes)
    else:
        context.pending.append(sizes)
    context.watcher.entered(Phase.FORWARD)


def _count_pending(context: Context) -> None:
    for sizes in context.pending:
        context.watcher.forward(sizes)
    context.pending.clear()


def watch_module(context: Context, module: Any) -> None:
    """Report forwards of the trained module too, which a script may call without its engine.

    In a module that the script compiled in place, a hook would enter the graph and break it (`fullgraph=True`). The
    compiled call is wrapped instead.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        see = functools.partial(_see_module, context)
        context.module_hook = module.register_forward_pre_hook(see, with_kwargs=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        _see_module(context, module, args, kwargs)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def _see_module(context: Context, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Report a forward that bypasses the engine, unless the module belongs to a former choice of the engine."""
    if context.inside is None and (context.engine is None or module is context.engine.module):
        _see(context, module, args, kwargs)


def _compile(context: Context, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Remove the module hook before `engine.compile`, because it would become part of the graph."""
    if engine is context.engine and context.module_hook is not None:
        context.module_hook.remove()
    return original(engine, *args, **kwargs)


def _longest_tokens(context: Context) -> int:
    """Return the longest sequence that arguments, tokenizers and the model all allow, or 0 if unknown."""
    config = getattr(context.engine.module, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    return min([*context.allowed_tokens, *([positions] if isinstance(positions, int) else [])], default=0)


def engine_facts(context: Context, optimizer: Any) -> dict[str, Any]:
    """Return facts about the script's engine for the tuner.

    `trained` lists the elements of each trained parameter, and `frozen` sums the elements of all others.

    Args:
        optimizer: the optimizer that the script made itself, or None.
    """
    engine = context.engine
    module = engine.module
    plain = _plain(module)
    config: Any = getattr(plain, "config", None)
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
    own = optimizer if optimizer is None else engine.basic_optimizer
    return {
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "precision": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        "model_config": json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else {},
        "causal": "CausalLM" in type(plain).__name__ or "LMHead" in type(plain).__name__,
        "model": type(plain).__name__,
        "trained": [elements for elements, trained in sizes if trained],
        "frozen": sum(elements for elements, trained in sizes if not trained),
        **late_facts(context),
        "checkpointing_call": checkpointing.call_of(plain),
        "through_arguments": context.through_arguments,
        "lightning": lightning.trainer_of(plain) is not None,
        "zero_init": context.zero_init,
        EARLIER: len(context.earlier),
        KEPT: kept_configs(context),
        "relaunched": context.relaunched,
        "client_optimizer": optimizer is not None,
        "untested_optimizer": not _zero_supports(optimizer),
        "optimizer": optimizers.kind_of(context, own),
        TORCHS: optimizers.torchs_of(own),
        "flags": sorted(context.flags),
        "spellings": dict(sorted(context.spellings.items())),
    }


def _plain(module: Any) -> Any:
    """Return the module without peft's adapters."""
    return getattr(module, "get_base_model", lambda: module)()


def late_facts(context: Context) -> dict[str, bool]:
    """Return facts that may change after the engine was made: activation checkpointing, and the prepared loader."""
    module = context.engine.module
    return {
        "checkpointing": checkpointing.can_switch(_plain(module), context.through_arguments),
        "checkpointed": checkpointing.is_on(module),
        "loader_prepared": context.loader_prepared,
        "loader_split": context.loader_split,
    }


def _zero_supports(optimizer: Any) -> bool:
    """Return True if ZeRO accepts the script's own optimizer without `zero_allow_untested_optimizer`."""
    if optimizer is None or callable(optimizer):
        return True
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))
