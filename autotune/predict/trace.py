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

import psutil

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
from autotune.util.bounds import bounded_bytes
from autotune.util.entry_points import NOT_PROTECTED, TRACER
from autotune.util.files import write_atomically
from autotune.util.interpreter import Interpreter, sandboxed_command
from autotune.workers.launchers import IMPORT_SECONDS

_LOOK_SECONDS = 0.5  # between looks at what the tracer says
_OWN_SHARE = 0.5  # share of a core, below which a trace that does not come tells of the machine and not of the model


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
    or a process that died. The estimate is not cached, as a later version may trace the model. A timeout is cached: these
    versions are not tried again for the same time limit. If the machine was busy, the next call tries again.

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
    late = path.with_suffix(".late.json")
    answer = _known_late(late, timeout_seconds) or _ask_tracer(job, [loss, device], timeout_seconds, cancelled)
    if "late_seconds" in answer:
        with contextlib.suppress(OSError):
            write_atomically(late, json.dumps(answer))
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


def _known_late(path: Path, timeout_seconds: float) -> dict[str, Any] | None:
    """Return the cached answer of an earlier call whose trace timed out after at least as many seconds, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        known: dict[str, Any] = json.loads(bounded_bytes(path, stored=True))
        return known if known["late_seconds"] >= timeout_seconds else None
    return None


def _ask_tracer(job: Job, options: list[str], timeout_seconds: float, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Run the tracer and return its answer.

    The answer is `trace`; `untraceable` with the reason, and the parameters' `sizes` if known; or `impossible` with the
    configuration's error. A process that dies or hangs counts as `untraceable`. The process sees no GPU, unless only sizes
    are requested, as some models do not load without one.
    """
    try:
        asked, agreed = json.dumps(job.order()), job.unprotected or not job.has_own_code
        said, complaint = _run_tracer(options, asked, timeout_seconds, cancelled, job.interpreter, agreed)
    except _TooLong as error:
        late = {"late_seconds": timeout_seconds} if error.worked else {}
        return {"untraceable": str(error), **late, **_last_answer(error.said)}
    except TimeoutError as error:
        return {"untraceable": str(error)}
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
        TimeoutError: it does not end, or the caller cancelled; the message is one line.
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


class _TooLong(TimeoutError):
    """The tracer was ready but did not finish in time."""

    def __init__(self, timeout_seconds: float, said: str, worked: bool) -> None:
        super().__init__(f"no trace within {timeout_seconds:.0f} s" + (" of a busy machine" if not worked else ""))
        self.said, self.worked = said, worked  # output so far; True if the tracer had a core for itself


def _outputs(
    tracing: subprocess.Popen[str], asked: str | None, timeout_seconds: float, cancelled: Callable[[], bool]
) -> tuple[str, str]:
    """Return the process's output when it ends.

    The time limit starts after the imports, which take minutes from a network disk.
    """
    imported, until = False, time.monotonic() + IMPORT_SECONDS
    while True:
        try:
            return tracing.communicate(asked, timeout=min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired as so_far:
            asked = None  # the input is sent only once
            if cancelled():
                raise TimeoutError("no trace before the end of the budget") from None
            if not imported and IMPORTED.encode() in (so_far.output or b"").splitlines():
                imported, until = True, time.monotonic() + timeout_seconds
            elif time.monotonic() >= until:
                if imported:
                    said = (so_far.output or b"").decode(errors="replace")
                    worked_seconds = _worked_seconds(tracing.pid)
                    raise _TooLong(timeout_seconds, said, worked_seconds >= _OWN_SHARE * timeout_seconds) from None
                raise TimeoutError(f"torch and transformers not imported within {IMPORT_SECONDS} s") from None


def _worked_seconds(pid: int) -> float:
    """Return the CPU seconds of a tracer and its forked workers."""
    worked = 0.0
    with contextlib.suppress(psutil.Error):
        tracer = psutil.Process(pid)
        for process in (tracer, *tracer.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                worked += sum(process.cpu_times()[:4])  # includes ended children
    return worked


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
