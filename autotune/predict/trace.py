"""The trace of a job: from the cache, or made by `autotune.predict.tracer` in a process of its own.

The tuner's process never imports torch, so nothing here does.
"""

from __future__ import annotations

import contextlib
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
from autotune.processes import package_environment

__all__ = ["VERSION", "Trace", "cache_folder", "cache_key", "trace_job", "traceable"]

VERSION = 4  # of what the tracer finds: raise it when that changes


def cache_folder() -> Path:
    root = os.environ.get("AUTOTUNE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "autotune" / "traces"


def cache_key(job: Job, fused_loss: bool = False) -> str:
    """A hash of all that decides a trace: model, sequence length, precision, and the versions of what runs it."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    parts = {
        "model": asdict(job.model),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "versions": versions,
        "version": VERSION,
        **({"fused_loss": True} if fused_loss else {}),
        **({"lora": asdict(job.lora)} if job.lora else {}),
        **({"attention": job.attention} if job.attention else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def trace_job(job: Job, *, fused_loss: bool = False, timeout_seconds: float = 300.0) -> Trace:
    """The job's trace: from the cache, or made in a process of its own.

    A model that cannot be traced gets the closed form's estimate, which is not cached: a later version may trace it.

    Args:
        fused_loss: the loss is taken from the 16-bit logits in place, as fused cross-entropy kernels do.

    Raises:
        UserError: the model cannot even be built.
    """
    if job.script and not traceable(job.script.profile):
        return profile_trace(job)
    path = cache_folder() / f"{cache_key(job, fused_loss)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Trace.from_json(json.loads(path.read_text()))
    answer = _ask_tracer(job, fused_loss, timeout_seconds)
    if "impossible" in answer:
        raise UserError(f"model {job.model.name} cannot be built: {answer['impossible']}")
    if "trace" not in answer:
        return closed_form_trace(job, answer.get("untraceable") or "no answer")
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps(answer["trace"]))
    return Trace.from_json(answer["trace"])


def _ask_tracer(job: Job, fused_loss: bool, timeout_seconds: float) -> dict[str, Any]:
    """What the tracing process answers: `trace`, `untraceable` with the reason, or `impossible` with the error.

    A process that dies or hangs counts as `untraceable`.
    """
    env = {
        **package_environment(),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "autotune.predict.tracer", *(["--fused-loss"] if fused_loss else [])],
            input=json.dumps(job.to_json()),
            env=env,
            text=True,
            capture_output=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return {"untraceable": f"no trace within {timeout_seconds:.0f} s"}
    if printed := done.stdout.strip().splitlines():
        answer: dict[str, Any] = json.loads(printed[-1])
        return answer
    return {"untraceable": (done.stderr.strip().splitlines() or ["no answer"])[-1]}


def traceable(profile: dict[str, Any]) -> bool:
    """Whether a script trains what a trace runs: the whole of a causal model, on the model's own loss."""
    return bool(profile.get("causal") and not profile.get("frozen") and profile.get("rows_per_sample") == 1)
