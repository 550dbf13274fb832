"""Tracing process (`python -m autotune.predict.tracer`), its losses, and extrapolation over layers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from autotune.predict.fake_tensor_patches import (
    FusedLinear,
    Patch,
    plain_conversion,
    runs_token_by_token,
    shapes_alone,
    with_values,
)
from autotune.predict.op_counters import CountedTensors, Counters, add_counter_hooks, follow_encoder, joined_passes
from autotune.predict.trace_data import BACKWARD, ENTRIES, FORWARD, IMPORTED, Pass, Trace
from autotune.problem.job import CHUNKED, LIGER_LOSS, Job
from autotune.problem.models import DECODED, IMAGE_TEXT, SEQ2SEQ
from autotune.rank import model_builder
from autotune.rank.devices import LiveTensors
from autotune.rank.model_builder import DTYPES, adapted, keep_cache, task_model, transformers_config, without_adapters
from autotune.rank.versions import no_init_weights, refusals
from autotune.rank.workload import forward, one_batch, own_workload, to_device
from autotune.util.linux import die_with_parent

# -- tracer ------------------------------------------------------------------------------------------------------------
#
# The process that traces a model: `python -m autotune.predict.tracer LOSS DEVICE < JOB.json > ANSWER.json`, or with `--sizes`
# alone for the parameters' sizes.
#
# The model's forward and backward run under fake tensors: operators only derive shapes, and use no memory. Two runs, at
# micro-batches of two and three sequences, give every allocation as `fixed + per_sequence x micro_batch`. A deep model
# is traced at two small depths and extrapolated (`extrapolate`).
#
# Within `predict`, only this module, `op_counters` and `fake_tensor_patches` import torch and transformers. The tuner's
# process never imports them.


class Untraceable(Exception):
    """Fake tensors cannot run the model, or it cannot be built here. The message gives the reason."""


class Impossible(Exception):
    """The configuration is wrong: no installation can build the model."""


@dataclass(frozen=True)
class _Options:
    """Options of a traced run."""

    loss: str
    device: str


# -- a trace -------------------------------------------------------------------------------------------------------------


def trace_model(
    job: Job,
    *,
    loss: str = "own",
    device: str = "cuda",
    workers: int = 1,
    on_sizes: Callable[[tuple[list[int], int]], None] = lambda sizes: None,
) -> Trace:
    """Trace the job's model.

    Args:
        loss: one of the ways in `loss_of`.
        device: device whose kernels are counted: `cpu` has no fused attention with dropout.
        on_sizes: called with the parameters' sizes as soon as they are known, in the format of an answer's `sizes`.
        workers: with 2, forked children trace with and without checkpointing at the same time.

    Raises:
        Untraceable: an operator needs values, not shapes, or the model's code needs something that is missing here.
        Impossible: transformers refuses the configuration, or no batch with images can be made for the model.
    """
    config = _configuration(job)
    model = _built(job, config)
    parameters, frozen = _sizes_of(model)
    on_sizes((parameters, sum(frozen)))
    matrices = _orthogonalized(model)
    if runs_token_by_token(model):
        raise Untraceable("without its kernel the model's recurrence runs token by token")
    if job.loss == LIGER_LOSS and config is not None and loss == "own":
        loss = "chunked"
    if job.task == IMAGE_TEXT:
        try:
            blank_batch(job, config, 1)
        except ValueError as error:
            raise Impossible(" ".join(str(error).split())) from None
    depths = None if config is None else extrapolation(config, model)
    del model
    options = _Options(loss, device)
    both = [(job, config, depths, options, checkpointing) for checkpointing in (False, True)]
    if workers > 1:
        # The fork happens before torch has run anything: each child has the imports, and a core. Children end with this
        # process, so that a caller that gives up a trace only has to end the process that it started.
        with multiprocessing.get_context("fork").Pool(workers, die_with_parent, (os.getpid(),)) as pool:
            passes = pool.starmap(_one_pass, both)
    else:
        passes = [_one_pass(*arguments) for arguments in both]
    plain = passes[0]
    assert plain is not None
    largest = max(parameters, default=0)
    return Trace(parameters, sum(frozen), plain, passes[1], largest=largest, frozen_sizes=frozen, matrices=matrices)


def _configuration(job: Job) -> Any:
    """Return transformers' configuration; None for the user's own workload.

    Raises:
        Impossible: transformers refuses it.
        Untraceable: its code cannot be loaded here.
    """
    if job.workload:
        return None
    try:
        return transformers_config(job.model)
    except refusals() as error:
        raise Impossible(_line(error)) from None
    except Exception as error:  # a configuration's own code may need anything that is missing here
        raise Untraceable(_line(error)) from None


def _built(job: Job, config: Any, device: str = "meta") -> Any:
    """Build the whole model.

    Raises:
        Impossible: transformers has no model of the job's task for the configuration.
        Untraceable: the model's code needs something that is missing here: a package, a kernel, a GPU.
    """
    try:
        with torch.device(device):
            model, _ = _build(job, config)
    except (ValueError, KeyError) as error:
        raise (Untraceable if job.workload else Impossible)(_line(error)) from None
    except Exception as error:  # a user's own builder may raise anything
        raise Untraceable(_line(error)) from None
    return model


def _sizes_of(model: Any) -> tuple[list[int], list[int]]:
    """Return (elements of each trainable parameter, elements of each frozen one)."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return [n for n, trained in sizes if trained], [n for n, trained in sizes if not trained]


def _orthogonalized(model: Any) -> list[int]:
    """Return the elements of each trainable parameter that Muon steps; its Adam steps the others.

    Source: deepspeed 0.19.8, __init__.py, `set_optimizer_flags`.
    """
    named = ((name.lower(), p) for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1)
    return [p.numel() for name, p in named if "embed" not in name and "lm_head" not in name]


def _one_pass(
    job: Job, config: Any, depths: Extrapolation | None, options: _Options, checkpointing: bool
) -> Pass | None:
    """Return the pass at full depth, extrapolated from small `depths` if given; None for a model without checkpointing.

    Raises:
        Untraceable: on any failure, as a forked child can send this class.
    """
    try:
        if depths is None:
            return _run_both(job, config, checkpointing, options).reduced()
        short = _run_both(job, at_depth(config, depths.short), checkpointing, options)
        longer = [
            (_run_both(job, at_depth(config, one), checkpointing, options), times) for one, times in depths.longer
        ]
        return extrapolate(short, longer).reduced()
    except Exception as error:
        if checkpointing:
            return None
        raise error if isinstance(error, Untraceable) else Untraceable(_line(error)) from None


def _run_both(job: Job, config: Any, checkpointing: bool, options: _Options) -> Pass:
    """Run micro-batches of two and three sequences.

    One sequence would mislead: many operators then make views instead of copies.
    """
    two, three = (_run(job, config, checkpointing, options, n) for n in (2, 3))
    return joined_passes(two, three)


# -- one run -------------------------------------------------------------------------------------------------------------


def _run(job: Job, config: Any, checkpointing: bool, options: _Options, micro_batch: int) -> Counters:
    """Run one forward and backward under fake tensors.

    Raises:
        Untraceable: an operator needs values.
        Exception: the model cannot be built or run.
    """
    run = Counters()
    live = CountedTensors(run)
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            live,
            shapes_alone(fused=options.device == "cuda"),
            contextlib.ExitStack() as looping,
        ):
            model, batches = _model_to_train(job, config, checkpointing)
            for tensor in (*model.parameters(), *model.buffers()):
                live.add(tensor)
            run.base = live.bytes
            # building is no part of a step
            run.operators, run.moved, run.flops = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
            add_counter_hooks(model, run)
            if (encoder := _encoder(model, job.task)) is not None:
                follow_encoder(encoder, run)
            live.watch = run.saw
            looping.enter_context(_first_slices(live, run))
            with autocast(job):
                loss = loss_of(job, model, batches, micro_batch, options.loss, live)
            add_uncounted(run, job, model, micro_batch, options.loss)
            run.after_forward = live.bytes - run.base
            run.frozen_only = 0.0 if checkpointing else run.dropped_inputs()  # checkpoints drop them in any case
            run.phase = BACKWARD
            loss.backward()
            live.watch = None
    except DataDependentOutputException as error:
        raise Untraceable(f"operator {error} needs values") from None
    return run


def _model_to_train(job: Job, config: Any, checkpointing: bool) -> tuple[Any, Any]:
    """Return the model in training mode and its batches, from `_build`."""
    with plain_conversion():
        model, batches = _build(job, config)
    if job.workload is None:
        keep_cache(model, False)
    model.train()
    if checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise Untraceable("the model has no gradient_checkpointing_enable")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, batches


def _encoder(model: Any, task: str) -> Any:
    """Return the encoder of an encoder-decoder, or the tower of a model with images; None for other models."""
    if task == SEQ2SEQ:
        return without_adapters(model).get_encoder()
    if task == IMAGE_TEXT:
        names = ("visual", "vision_tower", "vision_model")
        return next((module for name, module in model.named_modules() if name.rpartition(".")[2] in names), None)
    return None


def _build(job: Job, config: Any) -> tuple[Any, Any]:
    """Return the model, and the batches of the user's own workload (None for a named model)."""
    if job.workload:
        model, batches = own_workload(job.workload)
        return model.to(DTYPES[job.precision]), batches
    with no_init_weights():
        model = task_model(config, job)
    model.tie_weights()
    model = adapted(model, job)
    if job.loss == CHUNKED:
        model_builder.use_chunked_loss(model)
    return model, None


# Host seconds per operator of a loop without modules and autograd, relative to others: 16 slices took about 1 ms on a core of
# an EPYC.
_OF_LOOP = 0.2


def _first_slices(live: LiveTensors, run: Counters) -> Patch:
    """Record the allocations of two slices of a chunked loss only.

    The others repeat them, and `extrapolate` would take so many for those of layers. Their work is counted.
    """
    slices = model_builder.vocabulary_slices

    def watched(vocabulary: int) -> Iterator[slice]:
        watch, before = live.watch, run.operators[run.phase]
        for number, at in enumerate(slices(vocabulary)):
            live.watch = watch if number < 2 else None
            yield at
        live.watch = watch
        run.operators[run.phase] = before + round(_OF_LOOP * (run.operators[run.phase] - before))

    return patch.object(model_builder, "vocabulary_slices", watched)


# -- the process ---------------------------------------------------------------------------------------------------------


def answer_to(job: Job, options: list[str], on_sizes: Callable[[tuple[list[int], int]], None]) -> dict[str, Any]:
    """Return `trace`; `untraceable` with the reason, and the parameters' `sizes` if known; or `impossible`."""
    try:
        if "--sizes" in options:
            return {"sizes": _sizes(job, "cpu" if job.workload else "meta")}
        loss, device = options
        return {"trace": trace_model(job, loss=loss, device=device, workers=2, on_sizes=on_sizes).to_json()}
    except Impossible as error:
        return {"impossible": str(error)}
    except Untraceable as error:
        answer: dict[str, Any] = {"untraceable": str(error)}
        with contextlib.suppress(Impossible, Untraceable):
            answer["sizes"] = _sizes(job, "meta")
        return answer


def _sizes(job: Job, device: str) -> tuple[list[int], int]:
    """Return (elements of each trainable parameter, elements of all frozen ones)."""
    trained, frozen = _sizes_of(_built(job, _configuration(job), device))
    return trained, sum(frozen)


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())[:300]  # some messages name the problem in their second line
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def main() -> None:
    """Trace the job on standard input; print JSON lines."""
    with contextlib.suppress(Exception):  # a failing import fails again, with a message, when it is needed
        importlib.import_module("transformers.modeling_utils")
    print(IMPORTED, flush=True)
    job = Job.from_json(json.loads(sys.stdin.read()))

    def on_sizes(sizes: tuple[list[int], int]) -> None:  # sizes are reported even if the trace fails
        print(json.dumps({"sizes": sizes}), flush=True)

    print(json.dumps(answer_to(job, sys.argv[1:], on_sizes)))


# -- losses ------------------------------------------------------------------------------------------------------------
#
# Losses of a traced model.


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast for CUDA, as far as the CPU has the same operators: matrix products and attention in 16 bits."""
    if job.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, job.autocast))


def loss_of(job: Job, model: Any, batches: Any, micro_batch: int, loss: str, live: LiveTensors) -> Any:
    """Return the scalar on which backward starts, for one micro-batch.

    Args:
        batches: of the user's own workload.
        loss: how a decoder's loss is computed. `own`: as transformers does (32-bit logits). `fused`: from the 16-bit logits in
            place, as fused cross-entropy kernels do. `chunked`: chunk by chunk, as kernels do that include the head and never
            hold all logits. `shifted*`: from a shifted copy of the logits, as model code did before 2025: in 32 bits, in 16, or
            in 16 with a cast by cross entropy itself, as under autocast (torch's list of operators that autocast to float32).
            `held32` is `shifted32` in a loop that holds the model's outputs until backward is done. Hand-written loops do that;
            transformers' Trainer does not.
    """
    if batches is not None:
        return forward(model, to_device(next(iter(batches(micro_batch))), torch.device("cpu")))
    batch = _counted_batch(job, model.config, micro_batch, live)
    if loss == "own" or job.task not in DECODED:
        return forward(model, batch)
    labels = batch.pop("labels")
    if loss == "chunked":
        return _chunked_loss(model, batch)
    logits = model(**batch).logits
    if loss == "fused":
        return logits.mean()
    if loss in ("shifted32", "held32"):
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    if loss == "shifted-cast":
        shifted = shifted.float()
    scalar = torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].reshape(-1))
    if loss == "held32":
        scalar.held = logits  # type: ignore[attr-defined]
    return scalar


def _chunked_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Run a head and loss that are one kernel (liger-kernel, ops/fused_linear_cross_entropy.py; Hsu et al. 2024).

    Forward handles a part of the tokens at a time, with logits about as large as the hidden states, and already makes both
    gradients.
    """
    head, read = model.get_output_embeddings(), []

    def forward_of_head(hidden: Any) -> Any:
        read.append(hidden)
        return hidden[..., :1]  # the kernel also does what a model does to its logits, so only one column remains here

    head.forward = forward_of_head
    model(**batch)
    hidden = read.pop()
    return FusedLinear.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight)


def add_uncounted(run: Counters, job: Job, model: Any, micro_batch: int, loss: str) -> None:
    """Add the forward work of a loss in chunks: reading the logits twice and writing their gradient once.

    Logits and both gradients are added for all parts except the one that runs.
    """
    if loss != "chunked" or job.task not in DECODED:
        return
    weight = model.get_output_embeddings().weight
    products, (vocabulary, width) = (3 if weight.requires_grad else 2), weight.shape
    tokens = micro_batch * job.seq_len
    chunks = -(-vocabulary // width)
    run.operators[FORWARD] += (products + 1) * (chunks - 1) + 1
    run.moved[FORWARD] += 3.0 * tokens * vocabulary * weight.element_size()
    run.flops[FORWARD] += 2.0 * products * tokens * width * max(0, vocabulary - width)


def blank_batch(job: Job, config: Any, micro_batch: int) -> dict[str, Any]:
    """Return the arguments of a named model's forward, with zeros if values do not matter.

    Raises:
        ValueError: no batch with images can be made for the model.
    """
    return one_batch(job, config, micro_batch, job.seq_len, lambda shape, below: torch.zeros(shape, dtype=torch.long))


def _counted_batch(job: Job, config: Any, micro_batch: int, live: LiveTensors) -> dict[str, Any]:
    """Return a blank batch under fake tensors; with images its values are known."""
    if job.task != IMAGE_TEXT:
        return blank_batch(job, config, micro_batch)
    batch = with_values(lambda: blank_batch(job, config, micro_batch))
    for tensor in batch.values():
        live.add(tensor)
    return batch


# -- layer extrapolation -----------------------------------------------------------------------------------------------
#
# Extrapolate a deep model's pass from those of shallow models: each repeated layer adds as much as the one before.
#
# A model has one stack of layers, or two: an encoder's and a decoder's.

_STACKS = ("ModuleList", "Sequential")
Depths = dict[str, int]  # number of layers of each stack, by the attribute that counts them

# Attributes that count an encoder-decoder's layers (T5's and BART's families).
_TWO_STACKS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))
# Attributes of a model whose layers differ: only some have experts, or share keys and values.
_UNLIKE = ("num_kv_shared_layers", "mlp_only_layers", "first_k_dense_replace", "sparse_step", "encoder_sparse_step")


class Extrapolation(NamedTuple):
    """Shallow models that represent a deep model."""

    short: Depths
    # (depths that have grown from `short`, how many more times that growth is added)
    longer: list[tuple[Depths, float]]


def extrapolation(config: Any, model: Any = None) -> Extrapolation | None:
    """Return the shallow models whose passes give that of the configuration; None if all layers must run.

    An encoder-decoder's two stacks grow together if they are equally deep.

    Args:
        model: the whole model, on any device, which shows which layers are alike. Without it the configuration's lists
            decide.
    """
    deep = depths_of(config)
    if deep is None:
        return None
    kinds = {name: None if model is None else layer_kinds(model, layers) for name, layers in deep.items()}
    small = {name: _small_depths(*_place(config, name), _least_layers(config, name), kinds[name]) for name in deep}
    short = {name: small[name][0] if small[name] else deep[name] for name in deep}  # type: ignore[index]
    grown: dict[tuple[int, int, int], Depths] = {}
    for name, pair in small.items():
        if pair is not None:
            grown.setdefault((*pair, deep[name]), {})[name] = pair[1]
    longer = [({**short, **changed}, (whole - high) / (high - low)) for (low, high, whole), changed in grown.items()]
    return Extrapolation(short, longer) if longer else None


def depths_of(config: Any) -> Depths | None:
    """Return the layer counts of a configuration's stacks, for a model with images those of its text; None for other models."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        for names in _TWO_STACKS:
            if all(isinstance(getattr(config, name, None), int) for name in names):
                return {name: getattr(config, name) for name in names}
        return None
    if text is not config and text is not getattr(config, "text_config", None):
        return None
    deep = getattr(text, "num_hidden_layers", None)
    if not isinstance(deep, int):
        return None
    return {"num_hidden_layers": deep, **_tower_depths(config)}


def _tower_depths(config: Any) -> Depths:
    """Return the depth of a tower for images, if its layers all do the same work."""
    vision = getattr(config, "vision_config", None)
    taken = getattr(config, "vision_feature_layer", -1)  # index, from the end, of the layer whose output is used
    if getattr(vision, "deepstack_visual_indexes", None) or not isinstance(taken, int) or taken >= 0:
        return {}
    names = [name for name in ("depth", "num_hidden_layers") if isinstance(getattr(vision, name, None), int)]
    return {f"vision_config.{name}": getattr(vision, name) for name in names[:1]}


def _place(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a configuration that has the attribute of a stack, and the attribute."""
    part, dot, attribute = name.rpartition(".")
    if dot:
        return getattr(config, part), attribute
    return (config.get_text_config() if name == "num_hidden_layers" else config), name


def _least_layers(config: Any, name: str) -> int:
    """Return the fewest layers of a shallow stack.

    A text's first layers may take features of an image each (Qwen3-VL), and two more are alike. A tower's last layers
    may be unused.
    """
    if "." in name:
        return 1 - int(getattr(config, "vision_feature_layer", -1)) + 1
    return 2 + len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def layer_kinds(model: Any, layers: int) -> list[Any]:
    """Return a value per layer that is equal for equal layers: their modules, sizes and switches.

    Configurations name their patterns in many ways (lists of kinds, lists of indices, a period and an offset), but the built
    model always shows the pattern. The list is empty if the model has no list of so many layers.
    """
    stacks = [one for one in model.modules() if type(one).__name__ in _STACKS and len(one) == layers]
    return list(zip(*([_kind(layer) for layer in stack] for stack in stacks), strict=True))


def _kind(layer: Any) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, value is not None and tuple(value.shape)) for key, value in module._parameters.items()),
            tuple((key, _switch(value)) for key, value in sorted(vars(module).items()) if not key.startswith("_")),
        )
        for name, module in layer.named_modules()
    )


def _switch(value: Any) -> Any:
    """Keep flags and names, and reduce other values to their presence. Numbers, and names with digits, may count the layers."""
    plain = isinstance(value, bool) or (isinstance(value, str) and not any(map(str.isdigit, value)))
    return value if plain else value is None


def _small_depths(text: Any, name: str, least: int, kinds: Sequence[Any] | None = None) -> tuple[int, int] | None:
    """Return two depths that differ by whole periods of the layers' pattern.

    Return None if all layers must run, for example if the two have more layers together than the whole model.

    Args:
        kinds: value per layer from `layer_kinds`; None if unknown.
    """
    deep = getattr(text, name)
    if any(getattr(text, key, 0) for key in _UNLIKE) or (getattr(text, "decoder_sparse_step", 1) or 1) > 1:
        return None
    patterns = [list(value) for value in vars(text).values() if isinstance(value, list | tuple) and len(value) == deep]
    if _whole_blocks(text):
        patterns.append([layer in _whole_blocks(text) for layer in range(deep)])
    if kinds is not None:
        if len(kinds) != deep:
            return None
        patterns.append(list(kinds))
    every = list(zip(*patterns, strict=True)) if patterns else [()] * deep
    return next((pair for period in range(1, deep) if (pair := _depths_of_period(every, period, least))), None)


def _depths_of_period(kinds: Sequence[Any], period: int, least: int) -> tuple[int, int] | None:
    """Return the two depths if layers repeat after `period`, else None.

    The first layers may differ from the rest: the shallow model has them, too. Its second half equals the end of the deeper
    model and of the whole.
    """
    deep = len(kinds)
    for short in range(deep % period + period, deep, period):
        long = short + period
        if short + long > deep:
            return None
        first = min(short, period + short // 2)
        if short >= least and all(kinds[at] == kinds[at - period] for at in range(first, deep)):
            return short, long
    return None


def _whole_blocks(vision: Any) -> list[int]:
    """Return the layers of a tower whose attention spans the image; the other layers attend to windows (Qwen2.5-VL)."""
    return list(getattr(vision, "fullatt_block_indexes", None) or ())


def at_depth(config: Any, depths: Depths) -> Any:
    """Copy a transformers configuration with fewer layers, and cut its lists of one entry per layer."""
    changed = copy.deepcopy(config)
    for stack, layers in depths.items():
        part, name = _place(changed, stack)
        deep = getattr(part, name)
        for key, value in list(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == deep > layers:
                setattr(part, key, type(value)(value[:layers]))
        if _whole_blocks(part):
            part.fullatt_block_indexes = [layer for layer in _whole_blocks(part) if layer < layers]
        setattr(part, name, layers)
    return changed


def extrapolate(short: Pass, longer: Sequence[tuple[Pass, float]]) -> Pass:
    """Extrapolate the pass of a deep model from a shallow one and from deeper ones, each with the times its growth is added.

    Allocations are matched by section of each phase (a model's stacks and their surroundings): the first half from the
    section's beginning, the second half from its end. The allocations between are whole layers.
    """
    places = [_matched(short, long) for long, _ in longer]

    def further(of_short: Any, *of_longer: Any) -> Any:
        """Extrapolate a number, or each number of a tuple."""
        if isinstance(of_short, tuple):
            return tuple(further(*parts) for parts in zip(of_short, *of_longer, strict=True))
        # Each longer model includes all of the short one, so only its growth is multiplied.
        return of_short + sum(
            (more - of_short) * (factor + 1) for more, (_, factor) in zip(of_longer, longer, strict=True)
        )

    found: dict[str, Any] = {
        name: [
            further(value, *(getattr(long, name)[at[i]] for at, (long, _) in zip(places, longer, strict=True)))
            for i, value in enumerate(getattr(short, name))
        ]
        for name in ENTRIES
    }
    for name in ("after_forward", "flops", "attention", "moved", "operators", "frozen_only"):
        found[name] = further(getattr(short, name), *(getattr(long, name) for long, _ in longer))
    return replace(short, section=[], **found)


def _matched(short: Pass, long: Pass) -> list[int]:
    """Map each allocation of the shallow model to the matching one of the deeper model."""
    found = [0] * len(short.phase)
    of_mine, of_theirs = _sections(short), _sections(long)
    for section in dict.fromkeys(of_mine):
        mine = [i for i, one in enumerate(of_mine) if one == section]
        theirs = [i for i, one in enumerate(of_theirs) if one == section]
        for at, i in enumerate(mine):
            from_end = len(theirs) - len(mine) + at
            found[i] = theirs[at] if at < len(mine) / 2 else theirs[from_end]
    return found


def _sections(run: Pass) -> list[tuple[int, int]]:
    """Return (phase, section) of each allocation."""
    return list(zip(run.phase, run.section or [0] * len(run.phase), strict=True))


if __name__ == "__main__":
    main()
