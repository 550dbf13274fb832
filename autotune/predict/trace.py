"""Trace of a job, from the cache or from an `autotune.predict.tracer` process. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.errors import NotProtected, UserError
from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import (
    RUNS_IT,
    cache_path,
    closed_form_trace,
    dense_decoder,
    known_trace,
    profile_trace,
    traceable,
    with_liger,
    with_runnable_attention,
)
from autotune.predict.trace_data import IMPORTED, Trace
from autotune.problem.hardware import Hardware
from autotune.problem.job import LIGER_LOSS, Job
from autotune.problem.models import IMAGE_TEXT
from autotune.rank.sandbox import remove
from autotune.util.entry_points import NOT_PROTECTED, TRACER
from autotune.util.files import write_atomically
from autotune.util.interpreter import Interpreter, sandboxed_command
from autotune.workers.launchers import IMPORT_SECONDS

_LOOK_SECONDS = 0.5  # between looks at what the tracer says


_SIXTEEN_BITS = ("flash_attention_2", "flash_attention_3")  # "FlashAttention only support fp16 and bf16 data type"


_NO_GPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# The tracer forks after it has made a batch of images. A child would wait forever for OpenMP's threads, which a fork
# loses.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for a tracer's sandbox, and remove it at the end, with the layers that a killed tracer has left."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-"))
    try:
        yield folder
    finally:
        for left in [*folder.iterdir(), folder]:
            remove(left)


def missing_packages(interpreter: Interpreter) -> list[str]:
    """Return the packages that a trace needs and the ranks' environment lacks."""
    return [name for name in RUNS_IT if interpreter.version(name) is None]


def trace_job(
    job: Job,
    *,
    loss: str = "own",
    device: str = "cuda",
    timeout_seconds: float = 300.0,
    cancelled: Callable[[], bool] = lambda: False,
) -> Trace:
    """Return the job's trace from the cache, or make it in a separate process.

    A model that cannot be traced here gets an estimate. Causes are a kernel that needs a GPU, an operator that needs values,
    a timeout, or a process that died. The estimate is not cached, as a later call may trace the model.

    Args:
        loss: one of the ways in `tracer.loss_of`.
        device: device whose kernels are counted; `cpu` has no fused attention with dropout.
        timeout_seconds: limit after the imports.
        cancelled: polled while the process runs; if True, the estimate is returned at once.

    Raises:
        UserError: no installation could build a model from the configuration.
        NotProtected: the job has its own code, this machine cannot protect the user's files, and `job.unprotected` is false.
    """
    if job.attention in _SIXTEEN_BITS and job.precision == "fp32":
        raise UserError(
            f"--attn {job.attention} computes in 16 bits: give --precision bf16 or fp16, or another attention"
        )
    if job.script and not traceable(job.profile):
        return profile_trace(job)
    if job.liger and job.workload is None:
        plain = dataclasses.replace(job, liger=False, loss=LIGER_LOSS)
        return with_liger(
            trace_job(plain, loss=loss, device=device, timeout_seconds=timeout_seconds, cancelled=cancelled)
        )
    own, job = job, with_runnable_attention(job)
    if (known := known_trace(job, loss, device)) is not None:
        return known
    if missing := missing_packages(job.interpreter):
        return closed_form_trace(
            own, f"{' and '.join(missing)} not installed; --python names an environment that has them"
        )
    path = cache_path(job, loss, device)
    if job.task == IMAGE_TEXT:
        timeout_seconds *= 3  # windows of an image are processed one by one
    answer = _ask_tracer(job, [loss, device], timeout_seconds, cancelled)
    if "trace" in answer:
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(answer["trace"]))
        return Trace.from_json(answer["trace"])
    if "impossible" in answer and job is own:
        raise UserError(f"model {job.model.name} cannot be built: {answer['impossible']}")
    why = answer.get("impossible") or answer.get("untraceable") or "no answer"
    sizes = answer.get("sizes")
    if sizes is None and dense_decoder(job) is None:
        # A workload's code may need the hidden GPU. For other models, only sizes allow an estimate.
        answer = _ask_tracer(job, ["--sizes"], timeout_seconds, cancelled)
        sizes, why = answer.get("sizes"), answer.get("untraceable") or why
    return closed_form_trace(job, why, sizes)


def _ask_tracer(job: Job, options: list[str], timeout_seconds: float, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Run the tracer and return its answer.

    The answer is `trace`; `untraceable` with the reason, and the parameters' `sizes` if known; or `impossible` with the
    configuration's error. A process that dies or hangs counts as `untraceable`. The process sees no GPU, unless only sizes
    are requested, as some models do not load without one.
    """
    asked, agreed = json.dumps(job.order()), job.unprotected or not job.has_own_code
    said, complaint = _run_tracer(options, asked, timeout_seconds, cancelled, job.interpreter, agreed)
    answer = _last_answer(said)
    if answer.keys() - {"sizes"} or (answer and "--sizes" in options):
        return answer
    return {"untraceable": (complaint.strip().splitlines() or ["no answer"])[-1][:300], **answer}


def _last_answer(said: str) -> dict[str, Any]:
    """Parse the last line of output. Return an empty dict if it is not a JSON object, as the model's code may print, too."""
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(said.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return {}


def _run_tracer(
    options: list[str],
    asked: str,
    timeout_seconds: float,
    cancelled: Callable[[], bool],
    interpreter: Interpreter,
    agreed: bool,
) -> tuple[str, str]:
    """Run a tracer in a sandbox, and return its stdout and stderr. User code may run: a workload, or the model's own code.

    Without `--sizes` it sees no GPU.

    Args:
        asked: the job in JSON, for the tracer's standard input.
        agreed: run it without a sandbox on a machine that offers none.

    Raises:
        NotProtected: the machine offers none, and `agreed` is false.
    """
    seen = {} if "--sizes" in options else _NO_GPU
    with (
        temporary_folder() as folder,
        subprocess.Popen(
            sandboxed_command(interpreter.path, str(folder), TRACER, *options, agreed=agreed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**interpreter.environment(), **seen, **_ONE_THREAD, "TRANSFORMERS_VERBOSITY": "error"},
            text=True,
            encoding="utf-8",
        ) as tracing,
    ):
        try:
            found = _outputs(tracing, asked, timeout_seconds, cancelled)
        finally:
            tracing.kill()
    if tracing.returncode == NOT_PROTECTED:
        raise NotProtected
    return found


def _outputs(
    tracing: subprocess.Popen[str], asked: str | None, timeout_seconds: float, cancelled: Callable[[], bool]
) -> tuple[str, str]:
    """Return the process's output. If it is cancelled or late, return the output so far and the reason.

    The time limit starts after the imports, which take minutes from a network disk.
    """
    said, late = b"", f"no trace within {timeout_seconds:.0f} s"
    why, until = f"torch and transformers not imported within {IMPORT_SECONDS} s", time.monotonic() + IMPORT_SECONDS
    while time.monotonic() < until:
        try:
            return tracing.communicate(asked, timeout=min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired as so_far:
            asked, said = None, so_far.output or b""  # the input is sent only once
        if cancelled():
            why = "no trace before the end of the budget"
            break
        if why != late and IMPORTED.encode() in said.splitlines():
            why, until = late, time.monotonic() + timeout_seconds
    return said.decode(errors="replace"), why


def traced_predictor(
    job: Job,
    hardware: Hardware,
    trace: Trace | None = None,
    *,
    widened: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Predictor:
    """Return a predictor that traces what it has to; `widened` as in `Predictor`, `cancelled` as in `trace_job`.

    Raises:
        UserError: the job names no model that could be built, or is a study's (`script.recorded`) and was not accepted.
    """
    tracer = functools.partial(trace_job, cancelled=cancelled)
    known = trace if trace is not None else tracer(job, device=hardware.device)
    return Predictor(job, hardware, known, tracer, widened=widened)
