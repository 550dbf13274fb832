"""The process that traces a model: `python -m autotune.predict.tracer [--loss KIND] [--cpu] [--sizes] < JOB.json >
ANSWER.json`; `--many` reads a list of jobs with their options and writes one answer per line.

The model's forward and backward run under fake tensors: operators only derive shapes, and use no memory. Two runs, at
micro-batches of two and three sequences, give every allocation as `fixed + per_sequence x micro_batch`. A deep model is
traced at two small depths and extrapolated (`depth.py`).

Within `predict`, only this module and its parts (`losses`, `operators`, `stand_ins`, `fused_kernels`, `recurrences`) import
torch and transformers. The tuner's process never imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from autotune.linux import die_with_parent
from autotune.predict.counters import Counters, follow, follow_encoder, joined
from autotune.predict.depth import Extrapolation, at_depth, depths_of, extrapolate, extrapolation
from autotune.predict.fused_kernels import liger_kernels
from autotune.predict.losses import Uncounted, autocast, blank_batch, bytes_of_head, loss_of
from autotune.predict.operators import CountedTensors
from autotune.predict.passes import BACKWARD, IMPORTED, Pass, Trace
from autotune.predict.recurrences import at_once
from autotune.predict.stand_ins import plain_conversion, shapes_alone
from autotune.problem.job import Job
from autotune.problem.liger import loss_in_kernel
from autotune.problem.tasks import IMAGE_TEXT, SEQ2SEQ
from autotune.rank.building import DTYPES, adapted, keep_cache, task_model, transformers_config, without_adapters
from autotune.rank.versions import no_init_weights, refusals
from autotune.rank.workload import own_workload
from autotune.versions import version_of

MOST_SECONDS = 300  # limit of each trace under --many


class Untraceable(Exception):
    """Fake tensors cannot run the model, or it cannot be built here. The message gives the reason."""


class Impossible(Exception):
    """The configuration is wrong: no installation can build the model."""


@dataclass(frozen=True)
class _Options:
    """Options of a traced run."""

    use_cache: bool = False
    loss: str = "own"
    device: str = "cuda"


# -- a trace -------------------------------------------------------------------------------------------------------------


def trace_model(
    job: Job,
    *,
    use_cache: bool = False,
    whole_depth: bool = False,
    loss: str = "own",
    device: str = "cuda",
    workers: int = 1,
    told: Callable[[tuple[list[int], int]], None] = lambda sizes: None,
) -> Trace:
    """Trace the job's model.

    Args:
        use_cache: keep keys and values, as models do by default; training switches it off.
        whole_depth: trace every layer instead of extrapolating.
        loss: one of `trace.LOSSES`.
        device: device whose kernels are counted: `cpu` has no fused attention with dropout.
        told: called with the parameters' sizes as soon as they are known, in the format of an answer's `sizes`.
        workers: with 2, forked children trace with and without checkpointing at the same time.

    Raises:
        Untraceable: an operator needs values, not shapes, or the model's code needs something that is missing here.
        Impossible: transformers refuses the configuration.
    """
    config = _configuration(job)
    model = _built(job, config)
    parameters, frozen = _sizes_of(model)
    told((parameters, sum(frozen)))
    if job.liger and config is not None and loss == "own":
        liger, torchs, wide = version_of("liger_kernel"), version_of("torch"), job.precision == "fp32"
        loss = loss_in_kernel(model.config.model_type, liger, wide=wide, torch=torchs)
    _try_batch(job, config)
    depths = None if whole_depth or config is None else extrapolation(config, model)
    del model
    options = _Options(use_cache, loss, device)
    both = [(job, config, depths, options, checkpointing) for checkpointing in (False, True)]
    if workers > 1:
        # The fork happens before torch has run anything: each child has the imports, and a core.
        with _children(workers) as pool:
            passes = pool.starmap(_one_pass, both)
    else:
        passes = [_one_pass(*arguments) for arguments in both]
    plain = passes[0]
    assert plain is not None
    return Trace(parameters, sum(frozen), plain, passes[1], largest=max(parameters, default=0), frozen_sizes=frozen)


def allocations(job: Job, checkpointing: bool, micro_batch: int, layers: int) -> list[tuple[int, int]]:
    """Return (storage, bytes) of every allocation in a forward and backward of the job's model cut to `layers` layers. Bytes
    are negative when the storage is freed. A model of an allocator can replay the list."""
    config = transformers_config(job.model)
    config = at_depth(config, dict.fromkeys(depths_of(config) or (), layers))
    return _run(job, config, checkpointing, _Options(), micro_batch, keep_events=True).allocations


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


def _try_batch(job: Job, config: Any) -> None:
    """Check that a batch with images can be made.

    Raises:
        Impossible: no batch with images can be made for the model.
    """
    if job.task == IMAGE_TEXT:
        try:
            blank_batch(job, config, 1)
        except ValueError as error:
            raise Impossible(" ".join(str(error).split())) from None


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
    return joined(two, three)


# -- one run -------------------------------------------------------------------------------------------------------------


class _Passed(torch.autograd.Function):
    """Pass a tensor through, and call `made` when its gradient is made. DeepSpeed's hooks do the same, which separates the
    gradient of one module from those of other modules that read the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, made: Any) -> Any:
        ctx.made = made
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.made()
        return gradients[0], None


def _run(
    job: Job, config: Any, checkpointing: bool, options: _Options, micro_batch: int, keep_events: bool = False
) -> Counters:
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
            model, batches = _model_to_train(job, config, checkpointing, options)
            for tensor in (*model.parameters(), *model.buffers()):
                live.add(tensor)
            run.base = live.bytes
            run.forget_operators()
            run.passed = _Passed.apply
            follow(model, run)
            run.in_use = bytes_of_head(job, model, options.loss)
            looping.enter_context(at_once(run))
            if (encoder := _encoder(model, job.task)) is not None:
                follow_encoder(encoder, run)
            live.watch = run.saw
            live.events = run.allocations if keep_events else None
            if job.liger and job.workload is None:
                looping.enter_context(liger_kernels(model, version_of("liger_kernel")))
            with autocast(job):
                loss = loss_of(job, model, batches, micro_batch, options.loss, live)
            run.add(Uncounted.of(job, model, micro_batch, options.loss))
            run.after_forward = live.bytes - run.base
            run.frozen_only = 0.0 if checkpointing else run.dropped_inputs()  # checkpoints drop them in any case
            run.phase = BACKWARD
            loss.backward()
            live.watch = live.events = None
    except DataDependentOutputException as error:
        raise Untraceable(f"operator {error} needs values") from None
    return run


def _model_to_train(job: Job, config: Any, checkpointing: bool, options: _Options) -> tuple[Any, Any]:
    """Return the model in training mode and its batches, from `_build`."""
    with plain_conversion():
        model, batches = _build(job, config)
    if job.workload is None:
        keep_cache(model, options.use_cache and not checkpointing)
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
    return adapted(model, job), None


# -- the process ---------------------------------------------------------------------------------------------------------


def answer_to(
    job: Job, options: list[str], workers: int = 2, told: Callable[[tuple[list[int], int]], None] = lambda sizes: None
) -> dict[str, Any]:
    """Return `trace`; `untraceable` with the reason, and the parameters' `sizes` if known; or `impossible`."""
    try:
        if "--sizes" in options:
            return {"sizes": _sizes(job, "cpu" if job.workload else "meta")}
        device = "cpu" if "--cpu" in options else "cuda"
        loss = options[options.index("--loss") + 1] if "--loss" in options else "own"
        return {"trace": trace_model(job, loss=loss, device=device, workers=workers, told=told).to_json()}
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


def answer_all(asked: list[dict[str, Any]], workers: int) -> Iterator[dict[str, Any]]:
    """Yield an answer for each `{"job", "options"}` as it arrives, with its index as `at`. Each worker traces one job at a
    time; torch and transformers are imported once."""
    with _children(workers) as pool:
        yield from pool.imap_unordered(_answer_at, enumerate(asked))


def _children(workers: int) -> Any:
    """Create a pool of forked processes that end with this one. A caller that gives up a trace only has to end the process
    that it started."""
    return multiprocessing.get_context("fork").Pool(workers, die_with_parent, (os.getpid(),))


def _answer_at(one: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    at, asked = one
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(MOST_SECONDS)
    try:
        return {"at": at, **answer_to(Job.from_json(asked["job"]), asked["options"], workers=1)}
    except Exception as error:  # one model's code must not end the other traces
        return {"at": at, "untraceable": _line(error)}
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise Untraceable(f"no trace within {MOST_SECONDS} s")


def main() -> None:
    if "--many" in sys.argv:
        for answer in answer_all(json.loads(sys.stdin.read()), workers=2):
            print(json.dumps(answer), flush=True)
        return
    with contextlib.suppress(Exception):  # a failing import fails again, with a message, when it is needed
        importlib.import_module("transformers.modeling_utils")
    print(IMPORTED, flush=True)
    job = Job.from_json(json.loads(sys.stdin.read()))

    def told(sizes: tuple[list[int], int]) -> None:  # sizes are reported even if the trace fails
        print(json.dumps({"sizes": sizes}), flush=True)

    print(json.dumps(answer_to(job, sys.argv[1:], told=told)))


if __name__ == "__main__":
    main()
