"""Cache of traces. Reading it starts no process: the commands that read a study take no other trace (`stored_trace`)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import cache_root
from autotune.interpreter import current
from autotune.predict.closed_form import profile_trace
from autotune.predict.passes import Trace
from autotune.problem.job import Job
from autotune.problem.tasks import CAUSAL

RUNS_IT = ("torch", "transformers")
VERSION = 8  # of what the tracer finds: raise it when that changes
# Attention that can be run without a GPU. All other kernels (FlashAttention 2 and 3, compiled flex attention, those of the
# Hub) keep for backward what `sdpa` keeps: query, key, value, output and a logarithm a row (Dao 2023, algorithm 2;
# transformers' integrations/flash_attention.py adds nothing where batches are not padded).
_RUNS_ANYWHERE = (None, "eager", "sdpa")


def cache_folder() -> Path:
    return cache_root() / "traces"


def cache_key(job: Job, loss: str = "own", device: str = "cuda", versions: Mapping[str, str] | None = None) -> str:
    """Return a hash of all that decides a trace: model, sequence length, precision, task, and the versions of what runs it.

    Args:
        versions: of torch and transformers, as a study records them; None: those of the current Python.
    """
    versions_of_runner = {name: versions.get(name) if versions else current().version(name) for name in RUNS_IT}
    parts = {
        "model": asdict(job.model),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "versions": versions_of_runner,
        "version": VERSION,
        **({"loss": loss} if loss != "own" else {}),
        **({"device": device} if device != "cuda" else {}),
        **({"lora": job.lora.to_json()} if job.lora else {}),
        **({"plain": True} if job.lora and job.lora.fp32 and job.plain else {}),
        **({"autocast": job.autocast} if job.autocast else {}),
        **({"attention": job.attention} if job.attention else {}),
        **({"task": job.task} if job.task != CAUSAL else {}),
        **({"image_size": job.image_size} if job.image_size else {}),
        **({"liger": current().version("liger_kernel")} if job.liger else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def runnable(job: Job) -> tuple[Job, bool]:
    """(the job with an attention that runs without a GPU, whether that is another than its own)."""
    asked = job.attention or job.model.config.get("attn_implementation")
    if asked in _RUNS_ANYWHERE:
        return job, False
    return dataclasses.replace(job, attention="sdpa"), True


def cache_path(job: Job, loss: str, device: str = "cuda", versions: Mapping[str, str] | None = None) -> Path:
    return cache_folder() / f"{cache_key(job, loss, device, versions)}.json"


def cached(path: Path) -> Trace | None:
    """Return the trace in a file of the cache; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Trace.from_json(json.loads(path.read_text(encoding="utf-8")))
    return None


def stored_trace(job: Job, *, device: str = "cuda", versions: Mapping[str, str] | None = None) -> Trace:
    """Return the job's trace without running any of its code: from the cache, or for a script from its profile.

    Args:
        device: whose kernels are counted.
        versions: see `cache_key`.

    Raises:
        UserError: the job was not traced on this machine.
    """
    if job.script and not traceable(job.script.profile):
        return profile_trace(job)
    job, _ = runnable(job)
    found = cached(cache_path(job, "own", device, versions))
    if found is None:
        raise UserError("not traced: this machine has no trace of its model, and reading a study runs none of its code")
    return found


def traceable(profile: dict[str, Any]) -> bool:
    """Whether a script trains what a trace runs: the whole of a causal model, on the model's own loss."""
    one_row = profile.get("rows_per_sample") == 1 or profile.get("counted") == "tokens"  # those are packed end to end
    return bool(profile.get("causal") and not profile.get("frozen") and one_row)
