"""Fills the cache of traces for many jobs at once; each process that traces imports torch once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.predict.trace_cache import cache_path, with_runnable_attention
from autotune.problem.job import Job
from autotune.util.files import write_atomically
from autotune.util.linux import die_with_parent

WORKERS = 2
MOST_SECONDS = 300  # for one trace
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def trace_jobs(jobs: Sequence[tuple[Job, str]], on_traced: Callable[[int, int], None] | None = None) -> None:
    """Trace the jobs, each with its loss, that the cache lacks.

    A job that cannot be traced is skipped: `trace_job` has the reason. So is one with code of its own, which `trace_job` runs
    in a sandbox.

    Args:
        on_traced: called with (traces made, traces to make) after each.
    """
    missing = {}
    for job, loss in jobs:
        job = with_runnable_attention(job)
        path = cache_path(job, loss)
        if not path.exists() and not job.has_own_code:
            missing[path] = (job, loss)
    if not missing:
        return
    with multiprocessing.get_context("spawn").Pool(WORKERS, _begin, (os.getpid(),)) as pool:
        for made, (path, trace) in enumerate(pool.imap_unordered(_traced, missing.items()), start=1):
            if trace is not None:
                with contextlib.suppress(OSError):
                    write_atomically(path, json.dumps(trace))
            if on_traced:
                on_traced(made, len(missing))


def _begin(parent: int) -> None:
    die_with_parent(parent)
    os.environ.update(ENVIRONMENT)  # before torch is imported


def _traced(one: tuple[Path, tuple[Job, str]]) -> tuple[Path, dict[str, Any] | None]:
    from autotune.predict.tracer import trace_model

    path, (job, loss) = one
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(MOST_SECONDS)
    try:
        return path, trace_model(job, loss=loss).to_json()
    except Exception:  # one model must not end the other traces
        return path, None
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no trace within {MOST_SECONDS} s")
