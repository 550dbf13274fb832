"""The trace of a job: from the cache, or made by `autotune.predict.tracer` in a process of its own.

The tuner's process never imports torch, so nothing here does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import write_atomically
from autotune.predict.closed_form import closed_form_trace, profile_trace
from autotune.predict.passes import Trace
from autotune.problem.job import Job
from autotune.problem.tasks import CAUSAL, IMAGE_TEXT, SEQ2SEQ
from autotune.processes import package_environment

__all__ = ["VERSION", "Trace", "cache_folder", "cache_key", "trace_job", "traceable"]

VERSION = 4  # of what the tracer finds: raise it when that changes


def cache_folder() -> Path:
    root = os.environ.get("AUTOTUNE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "autotune" / "traces"


def cache_key(job: Job, fused_loss: bool = False, device: str = "cuda") -> str:
    """A hash of all that decides a trace: model, sequence length, precision, task, and the versions of what runs it."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    parts = {
        "model": asdict(job.model),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "versions": versions,
        "version": VERSION,
        **({"fused_loss": True} if fused_loss else {}),
        **({"device": device} if device != "cuda" else {}),
        **({"lora": asdict(job.lora)} if job.lora else {}),
        **({"attention": job.attention} if job.attention else {}),
        **({"task": job.task} if job.task != CAUSAL else {}),
        **({"image_size": job.image_size} if job.image_size else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


# Attention that can be run without a GPU. All other kernels (FlashAttention 2 and 3, compiled flex attention, those of the
# Hub) keep for backward what `sdpa` keeps: query, key, value, output and a logarithm a row (Dao 2023, algorithm 2;
# transformers' integrations/flash_attention.py adds nothing where batches are not padded).
_RUNS_ANYWHERE = (None, "eager", "sdpa")
_SIXTEEN_BITS = ("flash_attention_2", "flash_attention_3")  # "FlashAttention only support fp16 and bf16 data type"


def trace_job(job: Job, *, fused_loss: bool = False, device: str = "cuda", timeout_seconds: float = 300.0) -> Trace:
    """The job's trace: from the cache, or made in a process of its own.

    A model that cannot be traced here (a kernel that needs a GPU, an operator that needs values, a process that died) gets
    an estimate, which is not cached: a later version may trace it.

    Args:
        fused_loss: the loss is taken from the 16-bit logits in place, as fused cross-entropy kernels do.
        device: whose kernels are counted; `cpu` has no fused attention with dropout.

    Raises:
        UserError: the configuration names no model that could be built anywhere.
    """
    if job.attention in _SIXTEEN_BITS and job.precision == "fp32":
        raise UserError(
            f"--attn {job.attention} computes in 16 bits: give --precision bf16 or fp16, or another attention"
        )
    if job.script and not traceable(job.script.profile):
        return profile_trace(job)
    asked = job.attention or job.model.config.get("attn_implementation")
    replaced = asked not in _RUNS_ANYWHERE
    if replaced:
        job = dataclasses.replace(job, attention="sdpa")
    path = cache_folder() / f"{cache_key(job, fused_loss, device)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Trace.from_json(json.loads(path.read_text()))
    options = ["--fused-loss"] * fused_loss + ["--cpu"] * (device == "cpu")
    if job.task == IMAGE_TEXT:
        timeout_seconds *= 3  # windows of an image are looked at one by one
    answer = _ask_tracer(job, options, timeout_seconds)
    if "trace" in answer:
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(answer["trace"]))
        return Trace.from_json(answer["trace"])
    if "impossible" in answer and not replaced:
        raise UserError(f"model {job.model.name} cannot be built: {answer['impossible']}")
    why = answer.get("impossible") or answer.get("untraceable") or "no answer"
    sizes = answer.get("sizes")
    if sizes is None and (not job.model.config or job.task in (SEQ2SEQ, IMAGE_TEXT)):
        # a workload's code may need the GPU that was hidden from it; of models with two stacks only sizes tell enough
        answer = _ask_tracer(job, ["--sizes"], timeout_seconds)
        sizes, why = answer.get("sizes"), answer.get("untraceable") or why
    return closed_form_trace(job, why, sizes)


def _ask_tracer(job: Job, options: list[str], timeout_seconds: float) -> dict[str, Any]:
    """What the tracing process answers: `trace`; `untraceable` with the reason, and the parameters' `sizes` where they could
    be told; or `impossible` with the configuration's error. A process that dies or hangs counts as `untraceable`.

    It sees no GPU, unless only sizes are asked for: those of a model that insists on one.
    """
    hidden = {} if "--sizes" in options else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "autotune.predict.tracer", *options],
            input=json.dumps(job.to_json()),
            env={**package_environment(), **hidden, "TRANSFORMERS_VERBOSITY": "error"},
            text=True,
            capture_output=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return {"untraceable": f"no trace within {timeout_seconds:.0f} s"}
    with contextlib.suppress(ValueError, IndexError):  # the last line: a model's code may print, too
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return {"untraceable": (done.stderr.strip().splitlines() or ["no answer"])[-1][:300]}


def traceable(profile: dict[str, Any]) -> bool:
    """Whether a script trains what a trace runs: the whole of a causal model, on the model's own loss."""
    return bool(profile.get("causal") and not profile.get("frozen") and profile.get("rows_per_sample") == 1)
