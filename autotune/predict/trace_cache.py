"""Cache of traces, which is read without starting a process, and the closed-form fallback."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.predict.calibration import UNTRACED
from autotune.predict.step_time import dense_shape, layer_parameters, matmul_parameters, table_sizes
from autotune.predict.trace_data import BACKWARD, FORWARD, Pass, Trace
from autotune.problem.job import CHUNKED, FULL, LIGER_LOSS, Job, ScriptProfile
from autotune.problem.models import CAUSAL, IMAGE_TEXT, SEQ2SEQ, VOCABULARY_SLICES, text_config
from autotune.util.bounds import bounded_bytes
from autotune.util.files import cache_root, shipped_json

RUNS_IT = ("torch", "transformers")
VERSION = 9  # of what the tracer finds: raise it when that changes
_OF_LORA = _OF_CHUNKS = 2  # the same for jobs with adapters, and for losses in chunks, alone
# Attention that can be run without a GPU. All other kernels (FlashAttention 2 and 3, compiled flex attention, those of the
# Hub) keep for backward what `sdpa` keeps: query, key, value, output and a logarithm a row (Dao 2023, algorithm 2;
# transformers' integrations/flash_attention.py adds nothing where batches are not padded).
_RUNS_ANYWHERE = (None, "eager", "sdpa")


def cache_key(job: Job, loss: str = "own", device: str = "cuda", versions: Mapping[str, str] | None = None) -> str:
    """Return a hash of all that decides a trace: model, sequence length, precision, task, and the versions of what runs it.

    Args:
        versions: of torch and transformers; None: those of the job's interpreter.
    """
    parts = {
        "model": asdict(job.model),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "versions": versions or _versions_of_runner(job),
        "version": VERSION,
    }
    omitted = {"loss": "own", "device": "cuda", "task": CAUSAL}  # settings that early traces were made with
    options = {
        "loss": loss,
        "device": device,
        "lora": job.lora and job.lora.to_json(),
        "inputs": job.lora and _OF_LORA,
        "plain": job.lora and job.lora.fp32 and job.plain,
        "autocast": job.autocast,
        "attention": job.attention,
        "task": job.task,
        "image_size": job.image_size,
        "computed": {FULL: None, CHUNKED: f"{CHUNKED} {_OF_CHUNKS}"}.get(job.loss, job.loss),
    }
    parts |= {name: value for name, value in options.items() if value and value != omitted.get(name)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _versions_of_runner(job: Job) -> dict[str, str | None]:
    return {name: job.interpreter.version(name) for name in RUNS_IT}


def with_runnable_attention(job: Job) -> Job:
    """Return the job with an attention that runs without a GPU: the same object if its own does."""
    asked = job.attention or job.model.config.get("attn_implementation")
    if asked in _RUNS_ANYWHERE:
        return job
    return dataclasses.replace(job, attention="sdpa")


def cache_path(job: Job, loss: str, device: str = "cuda") -> Path:
    """Return the file of a job's cached trace."""
    return cache_root() / "traces" / f"{cache_key(job, loss, device)}.json"


def cached(path: Path) -> Trace | None:
    """Return the trace in a file of the cache; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return Trace.from_json(json.loads(bounded_bytes(path, stored=True)))
    return None


@functools.cache
def _shipped() -> tuple[dict[str, str], dict[str, Any]]:
    """Return (versions of what made the shipped traces, traces by cache key) from `data/traces.json`."""
    data = shipped_json("traces.json")
    usable = data["version"] == VERSION  # otherwise an older tracer made them
    return data["versions"], data["traces"] if usable else {}


def shipped_key(job: Job, loss: str, device: str, versions: Mapping[str, str]) -> str:
    """Return the key of a job's trace among the shipped ones; bf16 and fp16 have equal sizes and share one."""
    job = dataclasses.replace(job, precision="bf16") if job.precision == "fp16" else job
    return cache_key(job, loss, device, versions)


def _public(versions: Mapping[str, str | None]) -> dict[str, str]:
    """Return versions without the build, like `+cpu`: all builds of torch run the same operators on fake tensors."""
    return {name: (version or "").partition("+")[0] for name, version in versions.items()}


def known_trace(job: Job, loss: str = "own", device: str = "cuda") -> Trace | None:
    """Return a trace from the cache, or a shipped one; None if the job has to be traced.

    A shipped trace counts if the installed torch and transformers are those that made it, or one of them is not installed.
    """
    if (found := cached(cache_path(job, loss, device))) is not None:
        return found
    made_by, traces = _shipped()
    mine = _versions_of_runner(job)
    if all(mine.values()) and _public(mine) != _public(made_by):
        return None
    data = traces.get(shipped_key(job, loss, device, made_by))
    return Trace.from_json(data) if data else None


def traceable(profile: ScriptProfile) -> bool:
    """Check that a script trains what a trace runs: a whole causal model, on the model's own loss."""
    one_row = profile.rows_per_sample == 1 or profile.counted == "tokens"  # those are packed end to end
    return profile.causal and not profile.frozen and one_row


# -- fused kernels -----------------------------------------------------------------------------------------------------

# Shares that Liger's kernels leave of what a layer keeps, moves and starts. Llama and Gemma 2 keep 70 and 76 %, move 28 to
# 68 %, and start 39 to 45 %, counted from what each kernel of liger-kernel 0.8.5 allocates.
_KEPT_BY_LIGER, _MOVED_BY_LIGER, _STARTED_BY_LIGER = 0.73, 0.45, 0.42


def with_liger(trace: Trace) -> Trace:
    """Return the trace of a model, with Liger's loss, as one in which all of Liger's kernels replace parts.

    It is a rough factor, so `exact` is False.
    """

    def one(run: Pass) -> Pass:
        fixed, each = run.after_forward
        return dataclasses.replace(
            run,
            per_sequence=[_KEPT_BY_LIGER * size for size in run.per_sequence],
            after_forward=(fixed, _KEPT_BY_LIGER * each),
            moved=tuple((fixed, _MOVED_BY_LIGER * each) for fixed, each in run.moved),  # type: ignore[arg-type]
            operators=tuple(_STARTED_BY_LIGER * count for count in run.operators),  # type: ignore[arg-type]
        )

    checkpointed = trace.checkpointed and one(trace.checkpointed)
    rough = f"Liger's kernels are predicted by a rough factor; intervals are {UNTRACED:g} times as wide until a trial"
    note = "; ".join(filter(None, [trace.note, rough]))
    return dataclasses.replace(trace, plain=one(trace.plain), checkpointed=checkpointed, exact=False, note=note)


# -- closed form -------------------------------------------------------------------------------------------------------
#
# Activations and FLOPs from the configuration alone, for models that cannot run on fake tensors.

# share of what a forward saves: layer inputs and the head; from the traces of the shipped models
_KEPT_BY_CHECKPOINTS = 0.15


Sizes = tuple[list[int], int]  # elements of each trainable parameter, and of all frozen parameters together


def untraced_note(why: str, counted: bool = False) -> str:
    """Describe the closed-form estimate and its wider intervals; FLOPs stay exact if the parameters were `counted`."""
    times = "computing times" if counted else "times"
    return (
        f"the model is not traced ({why}): activations and {times} are those of a dense model of its size, and their "
        f"intervals {UNTRACED:g} times as wide"
    )


def _of_the_loss(job: Job) -> tuple[float, bool]:
    """Return (bytes kept per logit, whether forward makes the head's gradient and keeps it until backward)."""
    width, trains_head = job.element_bytes, not job.lora or "lm_head" in job.lora.saved
    if job.loss == LIGER_LOSS and job.task == CAUSAL:
        return 0.0, trains_head
    if job.loss == CHUNKED:  # logits of one slice, and their copy in 32 bits
        return (width + 4) / VOCABULARY_SLICES, False
    return float(width + 4 + 4), False  # the logits, their copy in 32 bits, and the log-softmax


def loss_bytes(job: Job) -> float:
    """Return the bytes of logits and loss of one sequence of a causal model; 0 for other tasks and unknown vocabularies."""
    text = text_config(job.model.config)
    vocabulary = text.get("vocab_size")
    if job.task != CAUSAL or not isinstance(vocabulary, int):
        return 0.0
    return _of_the_loss(job)[0] * vocabulary * job.seq_len


def closed_form_trace(job: Job, why: str, sizes: Sizes | None = None) -> Trace:
    """Estimate a Trace without running the model, for the reason `why`.

    `exact` is False, so the predictor widens its intervals. For a dense decoder the estimate counts what its layers keep
    (Korthikanti et al. 2022, section 4.1, generalised to grouped heads and gated MLPs; the attention kernel keeps no score
    matrix). Any other model is estimated from the parameters' `sizes`.

    Raises:
        UserError: neither the configuration's shape nor the sizes are known.
    """
    counted = sizes is not None
    note = untraced_note(why, counted)
    text = text_config(job.model.config)
    dense = dense_decoder(job)
    if dense is None:
        if sizes is None or not sizes[0]:
            raise UserError(
                f"model {job.model.name} cannot be built here ({why}), and its configuration names no shape to estimate "
                "it by"
            )
        length = float(job.seq_len)
        saved = None if dense_shape(job.model.config) else _saved_by_layers(text, length)
        return _of_sizes(job, *sizes, length, saved or _saved_by(sum(*sizes), length), note)
    layers, attention, vocabulary, hidden, products = dense
    heads: int = text.get("num_attention_heads", text.get("n_head")) or 1
    key_value = attention // heads * (text.get("num_key_value_heads") or heads)
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    width, tokens = job.element_bytes, job.seq_len
    # A layer holds two norms (most keep their input in 32 bits), q k v, attention's output, two residuals, and the
    # MLP's inner values.
    layer = tokens * (width * (4 * hidden + 3 * attention + 2 * key_value + 4 * inner) + 4 * 2 * hidden)
    per_logit, waits = _of_the_loss(job)
    head = tokens * vocabulary * per_logit
    block = tokens * hidden * width  # bytes that a checkpointed layer keeps: its input
    flops, scores = 2.0 * products * tokens, 4.0 * layers * attention * tokens * tokens
    # With adapters, only the sizes show how little is trained.
    each = (layer_parameters(job.model.config, job.task) or 0) // layers
    parameters, frozen = sizes or ([each] * layers + table_sizes(job.model.config, job.task), 0)
    gradients = float(width * sum(parameters))
    waiting = width * hidden * vocabulary * waits

    def one(kept: float, recompute: float, in_layer: float) -> Pass:
        moved = 3.0 * layer * layers + head
        return Pass(
            phase=[FORWARD, BACKWARD, BACKWARD],
            fixed=[waiting, waiting, 0.0],
            per_sequence=[kept + head, kept + head + in_layer, in_layer],
            gradients=[0.0, 0.0, gradients],
            after_forward=(waiting, kept + head),
            flops=(flops, 2 * flops + recompute),
            attention=(scores, 2.5 * scores + recompute / flops * scores),
            moved=((0.0, moved), (0.0, 2 * moved)),
            operators=(30.0 * layers, 60.0 * layers),
        )

    return Trace(
        parameters,
        frozen,
        one(layer * layers, 0.0, 0.0),
        one(block * layers, flops, layer),
        exact=False,
        note=note,
        counted=counted,
        largest=max(parameters),
    )


def dense_decoder(job: Job) -> tuple[int, int, int, int, int] | None:
    """Return (layers, attention width, vocabulary, hidden size, matmul parameters) of a dense decoder; None for others.

    They determine what the layers of a dense decoder keep.
    """
    text = text_config(job.model.config)
    hidden = text.get("hidden_size", text.get("n_embd"))
    shape, products = dense_shape(job.model.config), matmul_parameters(job.model.config, job.task)
    if shape is None or products is None or not isinstance(hidden, int) or job.task in (SEQ2SEQ, IMAGE_TEXT):
        return None
    return *shape[:3], hidden, products


def profile_trace(job: Job) -> Trace:
    """Build a Trace from the probe run of a user's script: parameter sizes, and bytes that one forward saved for backward.

    `exact` is False.

    Raises:
        UserError: the probe run found no trained parameters.
    """
    seen = job.profile
    if not seen.trained:
        raise UserError("the script showed no parameters that are trained")
    trained, tokens = [*seen.trained], seen.tokens_per_sample
    saved = seen.saved_bytes_per_sample or _saved_by(sum(trained, seen.frozen), tokens)
    note = "the script's model is not traced: predicted from what its first steps showed"
    made = _of_sizes(job, trained, seen.frozen, tokens, saved, note)
    made = dataclasses.replace(made, matrices=[*seen.matrices] or None)
    return dataclasses.replace(made, plain=made.of(True)) if seen.checkpointed else made


def _saved_by(elements: int, tokens: float) -> float:
    """Estimate the bytes that a forward saves from the parameter count alone.

    One layer of 12 x width^2 elements saves 34 per token and unit of width (Korthikanti et al. 2022, equation 2).
    """
    return 34 * tokens * math.sqrt(elements / 12)


def _saved_by_layers(text: dict[str, Any], tokens: float) -> float | None:
    """Estimate the bytes that a forward of a model without attention saves, from its layers and width, with 10 bytes a logit.

    Return None if the configuration has no layer count or width.
    """
    layers, hidden, vocabulary = (text.get(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if not isinstance(layers, int) or not isinstance(hidden, int):
        return None
    return tokens * (34.0 * layers * hidden + 10.0 * (vocabulary if isinstance(vocabulary, int) else 0))


def _of_sizes(job: Job, trained: list[int], frozen: int, tokens: float, saved: float, note: str) -> Trace:
    """Build a Trace from parameter sizes, the `tokens` of a sample and the bytes `saved` by a forward."""
    total = sum(trained, frozen)
    kept = _KEPT_BY_CHECKPOINTS * saved
    flops = 2.0 * total * tokens
    backward = flops * (1 + sum(trained) / total)  # frozen weights get no gradient
    gradients = job.element_bytes * sum(trained)

    def one(left: float, recompute: float, again: float) -> Pass:
        return Pass(
            phase=[FORWARD, BACKWARD, BACKWARD],
            fixed=[0.0, 0.0, 0.0],
            per_sequence=[left, 1.2 * left + again, 0.2 * left + again],
            gradients=[0.0, 0.0, gradients],
            after_forward=(0.0, left),
            flops=(flops, backward + recompute),
            attention=(0.0, 0.0),
            moved=((0.0, 3 * saved), (0.0, 6 * saved)),
            operators=(30.0 * 24, 60.0 * 24),
        )

    plain, checkpointed = one(saved, 0.0, 0.0), one(kept, flops, kept)
    return Trace(trained, frozen, plain, checkpointed, exact=False, largest=max(trained), note=note)
