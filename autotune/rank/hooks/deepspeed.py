"""Hooks of DeepSpeed: pass the candidate's config to the engine that trains, and report its steps to the watcher."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from autotune.errors import Unusable
from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, CHECKPOINTING, COMPILED, MICRO_BATCH
from autotune.problem.ds_config import named_config
from autotune.problem.outcome import Phase
from autotune.rank.hooks import worst_case
from autotune.rank.hooks.base import Context, OtherEngine, batch_of, sizes_of
from autotune.rank.hooks.config import kept_configs, merged, note_own, with_candidate
from autotune.rank.patches import Call
from autotune.rank.training_trace import TraceRecorder, precision_of
from autotune.rank.versions import backward_prologue
from autotune.script.script import several_configs
from autotune.workers import jit_ops


def install(context: Context) -> None:
    """Hook `deepspeed.initialize`, the methods of its engines, and other calls of a script."""
    import deepspeed
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    hooks: list[tuple[Any, str, Callable[[Context, Call], Any]]] = [
        (deepspeed, "initialize", _initialize),
        (DeepSpeedEngine, "compile", _compile),
        (DeepSpeedEngine, "no_sync", _no_sync),
        (DeepSpeedEngine, "set_train_batch_size", _resize),
        (DeepSpeedEngine, "set_train_micro_batch_size", _resize),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", _fetch),
    ]
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        hooks += [(owner, name, _clip) for owner in (torch.nn.utils, torch.nn.utils.clip_grad)]
    if (prologue := backward_prologue(DeepSpeedEngine)) is not None:
        hooks += [(DeepSpeedEngine, prologue, _loss_backward), (torch.autograd, "backward", _autograd_backward)]
    for owner, name, hook in hooks:
        context.patches.wrap(owner, name, functools.partial(hook, context))
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
        context.patches.wrap(DeepSpeedEngine, str(phase), functools.partial(_watched, context, phase))


def unhooked(context: Context, method: str, *args: Any) -> Any:
    """Call DeepSpeed's own method on the engine that trains, which `quiet` replaces for the script."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return context.patches.original(DeepSpeedEngine, method)(context.engine, *args)


def _initialize(context: Context, call: Call) -> Any:
    """Change the call that makes the engine that trains. Later ones change only in the batch, earlier ones not at all.

    The probe run has counted the earlier ones.
    """
    given = call.given
    config = _taken_config(given)
    if not _trains(context, given, config):
        return _build(context, call)
    if context.engine is None and len(context.earlier) < context.script.profile.earlier:
        made = _build(context, call)
        context.earlier.append(made[0])
        return made
    if context.engine is not None:
        made = _build(context, call, **given, config=with_batch(context, config))
        late, trace = context.trained_steps > 0, context.trace.fresh()
        context.beside.append(OtherEngine(made[0], copy.deepcopy(config), given["optimizer"], late, trace))
        return made
    try:
        return _made(context, call, given, config)
    except BaseException as error:
        context.watcher.failed(error)
        raise


def _build(context: Context, call: Call, **changed: Any) -> Any:
    """Call DeepSpeed's `initialize`, and report that an engine was built."""
    call.change(**changed)
    before, context.inside = context.inside, Phase.INIT
    try:
        made = call()
    finally:
        context.inside = before
    context.watcher.engine_built()
    return made


def _made(context: Context, call: Call, given: dict[str, Any], config: dict[str, Any]) -> Any:
    """Make the engine that trains by a call with the `given` arguments, and return its result."""
    import deepspeed

    if isinstance(given["model"], deepspeed.PipelineModule):
        raise Unusable(
            "the script trains a pipeline (PipelineModule), which takes no ZeRO stage above 1 and no other "
            "loop than its own: it is not tuned"
        )
    context.watcher.entered(Phase.INIT)
    optimizer = given["optimizer"]
    note_own(context, config)
    config = merged(context, config)
    accumulate(context, given["model"], config)
    if plan := batch_of(config, context.job.ranks):
        context.watcher.planned(*plan, kind_of(context, optimizer))
    apply(context, given["model"])
    made = _build(context, call, **given, config=config)
    _check_data_parallel(context, made[0])
    _choose(context, made[0], optimizer)
    if context.knobs.get(COMPILED) and not context.through_arguments:
        made[0].compile()
    return made


def _choose(context: Context, engine: Any, optimizer: Any) -> None:
    """Hook and report the engine that trains; `optimizer` is the one that the script made itself, or None."""
    context.engine = engine
    watch_module(context, engine.module)
    context.watcher.built(engine, engine_facts(context, optimizer))


def _take(context: Context, rival: OtherEngine) -> None:
    """Make another engine the one that trains: move the hooks to it, and restart the watcher."""
    if context.module_hook is not None:
        context.module_hook.remove()
        context.module_hook = None
    context.pending.clear()
    context.trace = context.trace.fresh()
    note_own(context, rival.config, again=True)
    try:
        _check_data_parallel(context, rival.engine)
    except Unusable as error:
        context.watcher.failed(error)
        raise
    _choose(context, rival.engine, rival.optimizer)


def _check_data_parallel(context: Context, engine: Any) -> None:
    """Check that every rank, or group of ranks with one sequence, trains on its own samples, as samples per second assume.

    Raises:
        Unusable: ranks share samples otherwise.
    """
    ranks, among = context.job.ranks, int(engine._config.world_size)
    if among == ranks:
        among //= engine.mp_world_size  # ranks per model under AutoTP, which the config does not include
    among *= max(1, getattr(engine, "sequence_parallel_size", 1))  # Ulysses: groups of ranks share each micro-batch
    if among != ranks:
        raise Unusable(
            f"the script splits its samples or its model over ranks (tensor or model parallelism: {ranks} ranks "
            f"train on {among} micro-batches at a time), and only data-parallel trainings are tuned"
        )


def _taken_config(given: dict[str, Any]) -> dict[str, Any]:
    """Take the config out of a call of `deepspeed.initialize`, which takes none in `args` next to another."""
    named = [one for name in ("config", "config_params") if (one := given.pop(name, None)) is not None]
    if not named and getattr(given.get("args"), "deepspeed_config", None) is not None:
        given["args"] = copy.copy(given["args"])
        named = [given["args"].deepspeed_config]
        given["args"].deepspeed_config = None
    config = named[0] if named else None
    if isinstance(config, str | Path):
        config = named_config(config)
    return config if isinstance(config, dict) else {}


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


def _watched(context: Context, phase: Phase, call: Call) -> Any:
    """Call a method of an engine, and report it if the engine trains and this is no evaluation."""
    engine = call.owner
    other = next((one for one in context.beside if one.engine is engine), None)
    if other is not None:
        return _beside(context, other, phase, call)
    if engine is not context.engine or (phase is Phase.FORWARD and _evaluates(engine.module)):
        return call()
    try:
        if phase is Phase.FORWARD:
            if context.script.worst_case:
                call.kwargs = worst_case.longest(context, call.args[1:], call.kwargs)
            elif pads_to := context.script.profile.pads_to * context.quiet:  # a training is as it is
                ids = sizes_of(call.args[1:], call.kwargs).tensor
                args, call.kwargs = worst_case.padded(call.args[1:], call.kwargs, ids, pads_to)
                call.args = (engine, *args)
            _see(context, engine.module, call.args[1:], call.kwargs)
        else:
            for sizes in context.pending:
                context.watcher.forward(sizes)
            context.pending.clear()
            context.watcher.entered(phase)
        if phase is Phase.BACKWARD:
            note_backward(context)
        context.inside = phase
        result, stepped = _traced(context.trace, phase, call)
        if stepped:
            context.trained_steps += 1
            context.watcher.stepped()
    except BaseException as error:
        context.watcher.failed(error)
        raise
    finally:
        context.inside = None
    return result


def _beside(context: Context, other: OtherEngine, phase: Phase, call: Call) -> Any:
    """Call a method of an engine that was made later, and report its steps with the rows since the preceding one."""
    import torch

    if phase is Phase.FORWARD and torch.is_grad_enabled():
        sizes = sizes_of(call.args[1:], call.kwargs)
        other.rows += sizes.rows
        other.trace.forward(sizes.tensor, sizes.rows)
    result, stepped = _traced(other.trace, phase, call)
    if stepped:
        context.watcher.auxiliary_stepped(context.beside.index(other), other.rows)
        other.rows = 0
        _note_step(context, other)
    return result


def _traced(trace: TraceRecorder, phase: Phase, call: Call) -> tuple[Any, bool]:
    """Call a method of an engine and record it. Return its result, and True if it was an optimizer step."""
    engine = call.owner
    stepped = phase is Phase.STEP and _steps(engine)
    if phase is not Phase.FORWARD:
        trace.gradients_used(engine)
    if phase is Phase.BACKWARD:
        args = dict(enumerate(call.args))  # DeepSpeed's own wrapper hides its names
        loss = call.kwargs.get("loss", args.get(1))
        trace.backward(engine, loss, scaled=call.kwargs.get("scale_wrt_gas", args.get(3, True)))
    with trace.step(engine) if stepped else nullcontext():
        result = call()
    if phase is Phase.BACKWARD:
        trace.gradients_made(engine)
    return result, stepped


def _autograd_backward(context: Context, call: Call) -> Any:
    """Note the tensor of a backward that a script starts without its engine."""
    trace = context.trace
    if not context.inside and trace.records:
        tensors = call.given["tensors"]
        trace.root = tensors[0] if isinstance(tensors, Sequence) and len(tensors) else tensors
    try:
        return call()
    finally:
        trace.root = None


def _clip(context: Context, call: Call) -> Any:
    """Call torch's clipping, and note its limit."""
    import torch

    if not context.trace.records:
        return call()
    given = call.given
    limit = given.get("max_norm", given.get("clip_value"))
    parameters = given["parameters"]
    each = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    call.change(parameters=each)
    result = call()
    if isinstance(limit, int | float):
        for engine, trace in context.traces:
            trace.clipped(engine, each, limit)
    return result


def _fetch(context: Context, call: Call) -> Any:
    """Return the next batch of a loader, and count it."""
    batch = call()
    if context.trace.records:
        context.trace.fetched(call.owner)
        sizes = sizes_of((batch,), {})
        context.loader_tokens = max(context.loader_tokens, sizes.tokens // (sizes.rows or 1))
    return batch


def _no_sync(context: Context, call: Call) -> Any:
    """Note that the script sums gradients before they are reduced."""
    context.unsynced = context.unsynced or call.owner is context.engine
    return call()


def _resize(context: Context, call: Call) -> Any:
    """Report that the script changes its engine's batch."""
    if call.owner is context.engine:
        context.watcher.resized()
    return call()


def _evaluates(module: Any) -> bool:
    """Return True if no backward can follow a forward that begins now."""
    import torch

    return not module.training and not torch.is_grad_enabled()


def _loss_backward(context: Context, call: Call) -> Any:
    """Report the beginning of a backward from any caller."""
    if context.inside or call.owner is not context.engine:
        return call()
    return _watched(context, Phase.BACKWARD, call)


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
    sizes = sizes_of(args, kwargs, context.script.profile.counted_by)
    context.trace.forward(sizes.tensor, sizes.rows)
    if module.training:
        context.pending.clear()
        context.watcher.forward(sizes)
    else:
        context.pending.append(sizes)
    context.watcher.entered(Phase.FORWARD)


def watch_module(context: Context, module: Any) -> None:
    """Report forwards of the trained module that bypass its engine, unless another engine is chosen by then.

    In a module that the script compiled in place, a hook would enter the graph and break it (`fullgraph=True`). The
    compiled call is wrapped instead.
    """
    compiled = getattr(module, "_compiled_call_impl", None)

    # A function is shared by a copy of the module (an average of the weights), and a partial's context cannot be copied.
    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if context.inside is None and (context.engine is None or module is context.engine.module):
            _see(context, module, args, kwargs)

    if compiled is None:
        context.module_hook = module.register_forward_pre_hook(see, with_kwargs=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        see(module, args, kwargs)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def _compile(context: Context, call: Call) -> Any:
    """Remove the module hook before `engine.compile`, because it would become part of the graph."""
    context.levers.discard(COMPILED)
    if call.owner is context.engine and context.module_hook is not None:
        context.module_hook.remove()
    return call()


def engine_facts(context: Context, optimizer: Any) -> dict[str, Any]:
    """Return facts about the script's engine for the tuner.

    `trained` lists the elements of each trained parameter, and `frozen` sums the elements of all others. `matrices` are trained
    parameters that DeepSpeed has tagged for Muon.

    Args:
        optimizer: the optimizer that the script made itself, or None.
    """
    engine = context.engine
    module = engine.module
    plain = _plain(module)
    config: Any = getattr(plain, "config", None)
    parameters = [(getattr(p, "ds_numel", p.numel()), p) for p in module.parameters()]
    sizes = [(elements, p.requires_grad) for elements, p in parameters]
    own = optimizer if optimizer is None else engine.basic_optimizer
    return {
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "precision": precision_of(engine),
        "model_config": json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else {},
        "causal": "CausalLM" in type(plain).__name__ or "LMHead" in type(plain).__name__,
        "model": type(plain).__name__,
        "trained": [elements for elements, trained in sizes if trained],
        "frozen": sum(elements for elements, trained in sizes if not trained),
        **late_facts(context),
        "checkpointing_call": call_of(plain),
        "lightning": trainer_of(plain) is not None,
        "earlier": len(context.earlier),
        "kept_configs": kept_configs(context),
        "client_optimizer": optimizer is not None,
        "untested_optimizer": not _zero_supports(optimizer),
        "optimizer": kind_of(context, own),
        "torch_optimizer": torchs_of(own),
        "matrices": [elements for elements, p in parameters if p.requires_grad and getattr(p, "use_muon", False)],
        "experts_elsewhere": sum(map(_elements_elsewhere, module.parameters())),
        "sequence_ranks": max(1, getattr(engine, "sequence_parallel_size", 1)),
        "flags": sorted(context.flags),
        "through_arguments": context.through_arguments,
        "averages_by_rank": context.averages_by_rank,
        "zero_init": context.zero_init,
        "relaunched": context.relaunched,
        "integers": context.integers,
        "spellings": context.spellings,
    }


def _elements_elsewhere(parameter: Any) -> int:
    """Return the elements of the same experts on the other ranks of the parameter's expert-parallel group (`deepspeed.moe`)."""
    if getattr(parameter, "allreduce", True) or not hasattr(parameter, "group_name"):
        return 0
    from deepspeed.utils import groups

    return int(parameter.numel() * (groups._get_expert_parallel_world_size(parameter.group_name) - 1))


def _plain(module: Any) -> Any:
    """Return the module without peft's adapters."""
    return getattr(module, "get_base_model", lambda: module)()


def late_facts(context: Context) -> dict[str, Any]:
    """Return facts that may change after the engine was made: activation checkpointing, the loader, the largest samples."""
    module = context.engine.module
    return {
        "checkpointing": can_switch(_plain(module), context.through_arguments),
        "checkpointed": is_on(module),
        "levers": sorted(context.levers),
        "loader_prepared": context.loader_prepared,
        "loader_split": context.loader_split,
        **({"largest": context.largest, "unread": context.unread} if context.script.worst_case else {}),
    }


def _zero_supports(optimizer: Any) -> bool:
    """Return True if ZeRO accepts the script's own optimizer without `zero_allow_untested_optimizer`."""
    if optimizer is None or callable(optimizer):
        return True
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))


# -- choice of the engine that trains ----------------------------------------------------------------------------------
#
# Select the engine that trains if a script makes several: the first, unless the probe run shows another.
#
# A reference model made first has an optimizer if its config has one. A script may also train in phases with an engine
# for each. Only the probe run selects. Its result is part of the profile and applies to later runs.

# Optimizer steps in a row of a later engine during which the current choice has no backward:
_REFERS = 3  # the current choice has never had one, and is in evaluation mode
_ENDED = 2  # the current choice had stepped before the other was made
_SILENT = 16  # neither applies; two engines may alternate, such as a critic's many steps with a generator's one


def note_backward(context: Context) -> None:
    """Record a backward of the engine that trains: other engines then alternate with it."""
    context.trained = True
    for other in context.beside:
        other.steps = 0


def _note_step(context: Context, other: OtherEngine) -> None:
    """Record an optimizer step of another engine, and select it in a probe run if the current choice is idle."""
    other.steps += 1
    refers = not context.trained and not context.engine.module.training
    if context.candidate is not None or other.steps < (_REFERS if refers else _ENDED if other.late else _SILENT):
        return
    at = context.beside.index(other)
    context.earlier += [context.engine, *(one.engine for one in context.beside[:at])]
    del context.beside[: at + 1]
    context.trained, context.trained_steps = True, 0
    _take(context, other)


# -- auxiliary engines -------------------------------------------------------------------------------------------------
#
# Auxiliary engines (a critic, a discriminator): set their batch like that of the first engine.


def with_batch(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's config with the candidate's batch sizes if its own equal those of the first engine.

    The config is returned unchanged if the command names several config files, because the printed command would not
    change the engine's own file.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    own = batch_of(context.own_config or {}, ranks)
    if context.batch is None or own is None or batch_of(config, ranks) != own or several_configs(context.script):
        return config
    found = {key: value for key, value in copy.deepcopy(config).items() if key not in BATCH_KEYS}
    found[MICRO_BATCH], found[ACCUMULATION] = context.batch
    return found


# -- lightning ---------------------------------------------------------------------------------------------------------
#
# Hook Lightning, whose Trainer sets the batches per optimizer step instead of the DeepSpeed config.

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


# -- zero init ---------------------------------------------------------------------------------------------------------
#
# Hook `deepspeed.zero.Init`: build a model whole below stage 3, because no such engine trains a partitioned one.
#
# transformers uses it only if its latest config has stage 3, and that config already has the candidate's keys.

_CONFIGS = ("config_dict_or_path", "config")  # its current and its old name


def install_zero_init(context: Context) -> None:
    """Change the script's calls until the engine that trains exists; later engines keep their own stage.

    If the script has turned partitioning off, it stays off, because an engine of stage 3 also takes a whole model.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    def init(call: Call) -> Any:
        given = call.given
        # an engine of stage 3 under construction partitions whole parameters by this class
        if context.inside or context.engine is not None or not given["enabled"]:
            return call()
        name = next((one for one in _CONFIGS if given[one] is not None), None)
        config = given[name] if name is not None else None
        context.zero_init |= not _transformers_own(config)
        stage = context.knobs.get("zero_stage")
        if stage is not None and stage != 3:
            # other arguments would be checked although they have no effect
            return call.original(call.owner, enabled=False)
        if stage == 3 and name is not None and not _transformers_own(config):
            call.change(**{name: _merged(context, config)})
        return call()

    context.patches.wrap(Init, "__init__", init)


def _transformers_own(config: Any) -> bool:
    """Return True if transformers itself passed the config."""
    library = sys.modules.get("transformers.integrations.deepspeed")
    return config is not None and library is not None and config is library.deepspeed_config()


def _merged(context: Context, config: Any) -> Any:
    """Return the config with the candidate's keys if it belongs to the engine that trains.

    The ZeRO section decides, compared with that of the probe run. A reference model's config stays unchanged.
    """
    read = named_config(config) if isinstance(config, str | Path) else config
    own = context.script.profile.config
    own = read if own is None else own
    section = "zero_optimization"
    return with_candidate(context, read) if isinstance(read, dict) and read.get(section) == own.get(section) else config


# -- ops ---------------------------------------------------------------------------------------------------------------
#
# Build DeepSpeed's ops for a script behind autotune's lock.
#
# A rank that is killed during a build would otherwise leave torch's lock, for which later processes wait for ever.

_MODULES = ("deepspeed.ops.op_builder.builder", "op_builder.builder")  # the second is DeepSpeed from a checkout


def install_ops(context: Context) -> None:
    """Hook the builds and loads of ops at run time. Ops built at DeepSpeed's installation are left alone."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().get_op_builder("CPUAdamBuilder")  # imports the modules that define the ops
    for module in map(sys.modules.get, _MODULES):
        if module is not None:
            context.patches.wrap(module.OpBuilder, "jit_load", functools.partial(_load, context))


def _load(context: Context, call: Call) -> Any:
    from deepspeed.accelerator import get_accelerator

    builder, folder = call.owner, jit_ops.use_own_folder()
    name = type(builder).__name__
    is_built = (folder / builder.name / f"{builder.name}.so").exists()
    if not is_built and get_accelerator().get_op_builder(name) is type(builder):  # excludes the script's own builder
        context.watcher.op_missing(name)
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"  # machines may share a home, but not its locks
    if several or (is_built and not [*folder.glob("*/lock")]):  # ranks load a built op in parallel
        return call()
    with jit_ops.hold_build_lock(folder):
        return call()


# -- checkpointing -----------------------------------------------------------------------------------------------------
#
# Set activation checkpointing as the candidate does, and override the script's own calls.

_ATTRIBUTE = "gradient_checkpointing"  # attribute of layers by which libraries and custom models check if it is on


# Method that turns it on: attribute by which a class declares that it has no support. Another method turns it off. The
# second is from diffusers (models/modeling_utils.py).
_SWITCHES = {
    "gradient_checkpointing_enable": "supports_gradient_checkpointing",
    "enable_gradient_checkpointing": "_supports_gradient_checkpointing",
}
_OF_TRANSFORMERS = "gradient_checkpointing_enable"
_ENABLE = (*_SWITCHES, "activation_checkpointing_enable")  # includes transformers' new name


def apply(context: Context, model: Any) -> None:
    """Switch a model's checkpointing as the candidate says.

    For a candidate without it, checkpointing by the script (or peft's `prepare_model_for_kbit_training`) is turned off
    and stays off. Checkpointing that is already on keeps the script's settings.
    """
    share = context.knobs.get(CHECKPOINTING)
    if share is None:
        return
    if not share or not (is_on(model) or context.through_arguments):
        for module, enable in _parts(model):
            if is_on(module) is not bool(share):
                _turn(module, enable, bool(share))
    if not share:
        _keep_off(context, model)
    elif float(share) < 1:
        from autotune.rank.model_builder import checkpoint_share

        checkpoint_share(model, float(share))


def _parts(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the outermost switchable modules with the method that turns it on, or "" if their code reads the attribute.

    A custom model may wrap a library's model, whose layers inherit the attribute from their class.
    """
    enable = next((name for name in _SWITCHES if hasattr(model, name)), None)
    if enable is not None:
        if getattr(model, _SWITCHES[enable], True):
            yield model, enable
        return
    if isinstance(vars(model).get(_ATTRIBUTE), bool):
        yield model, ""
    for child in model.children():
        yield from _parts(child)


def _off(enable: str) -> str:
    return enable.replace("enable", "disable")


def _turn(module: Any, enable: str, on: bool) -> None:
    if not enable:
        setattr(module, _ATTRIBUTE, on)
    elif not on:
        getattr(module, _off(enable))()
    elif enable == _OF_TRANSFORMERS:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        getattr(module, enable)()


def _keep_off(context: Context, model: Any) -> None:
    """Prevent later calls from turning it on in a model's modules; reference models are not affected."""
    modules = {id(module): type(module) for module in model.modules()}

    def enable(call: Call) -> Any:
        return None if id(call.owner) in modules else call()

    for one in set(modules.values()):
        for name in _ENABLE:
            if hasattr(one, name):
                context.patches.wrap(one, name, enable)


def is_on(model: Any) -> bool:
    """Return True if any part of a model is checkpointed, by the attribute of its layers."""
    return any(getattr(module, _ATTRIBUTE, False) is True for module in model.modules())


def can_switch(model: Any, through_arguments: bool = False) -> bool:
    """Return True if checkpointing can be switched from its current state.

    Args:
        through_arguments: True if transformers' Trainer switches it, which knows only the method of the whole model.
    """
    parts = list(_parts(model))
    if through_arguments and not hasattr(model, _OF_TRANSFORMERS):
        return False
    return bool(parts) and all(not enable or hasattr(one, _off(enable)) or not is_on(one) for one, enable in parts)


def call_of(model: Any) -> str:
    """Return the code that turns it on for the first switchable part, as an expression on the model.

    Returns:
        An empty string if it cannot be turned on, or works as in transformers' models.
    """
    part, enable = next(_parts(model), (model, _OF_TRANSFORMERS))
    if part is model and enable == _OF_TRANSFORMERS:
        return ""
    path = next(name for name, module in model.named_modules() if module is part)
    called = f"{enable}()" if enable else f"{_ATTRIBUTE} = True"
    return f"{path}.{called}" if path else called


# -- optimizers --------------------------------------------------------------------------------------------------------
#
# Detect a training without DeepSpeed, and classify the optimizer that a script makes.

_STEPS_WITHOUT_DEEPSPEED = 2  # one step may be part of a script's preparation
_OF_ONE_PLACE = ("deepspeed", "apex")  # their kernels need all tensors on one device


def install_optimizers(context: Context) -> None:
    """Report optimizer steps without an engine to the watcher, from the second on, and other optimizers to the trace."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def stepped(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        if context.engine is not None:
            engines = [context.engine, *context.earlier, *(one.engine for one in context.beside)]
            if all(optimizer is not getattr(engine, "basic_optimizer", None) for engine in engines):
                context.trace.optimizer_stepped()
        elif not context.earlier:
            steps += 1
            if steps >= _STEPS_WITHOUT_DEEPSPEED:
                context.watcher.no_engine_found()

    context.patches.callback(register_optimizer_step_post_hook(stepped).remove)


def kind_of(context: Context, optimizer: Any) -> str:
    """Return the class name of a script's optimizer if it comes from DeepSpeed or apex, or an empty string.

    Other optimizers step on any device. The result is also empty if accelerate made the CPU variant that the script's
    config needs.
    """
    ancestors = type(optimizer).__mro__ if optimizer is not None else ()
    found = next((one.__name__ for one in ancestors if one.__module__.partition(".")[0] in _OF_ONE_PLACE), "")
    return "" if context.accelerated and "CPU" in found else found


def torchs_of(optimizer: Any) -> dict[str, Any]:
    """Return class and implementation of a script's optimizer if it is torch's own, or an empty dict.

    An implementation of None leaves the choice to torch. Subclasses are excluded, because their step may differ.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    asked = {name: optimizer.defaults.get(name) for name in ("fused", "foreach")}
    return {"class": type(optimizer).__name__, **asked}
