"""The trace of a job: from the cache, or made by `autotune.predict.tracer` in a process of its own.

The tuner's process never imports torch, so nothing here does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune.entry_points import TRACER
from autotune.errors import UserError
from autotune.files import write_atomically
from autotune.group.launchers import IMPORT_SECONDS
from autotune.interpreter import current, module_command
from autotune.predict.closed_form import closed_form_trace, profile_trace, told_by_shape
from autotune.predict.passes import IMPORTED, Trace
from autotune.predict.trace_cache import RUNS_IT, cache_path, cached, runnable, traceable
from autotune.problem.job import Job
from autotune.problem.tasks import IMAGE_TEXT

__all__ = ["LOSSES", "Trace", "trace_job", "trace_jobs"]

# How a decoder's loss is taken: as transformers does it (32-bit logits); from the 16-bit logits in place, as fused cross-entropy
# kernels do, or in place of their 32-bit copy; chunk by chunk, as kernels do that hold the head too and never all logits, each
# chunk's part of the head's gradient added in place or made apart in 32 bits; and, as the code of models did it before 2025, from
# a shifted copy of the logits: in 32 bits, in 16, or in 16 and cast by cross entropy itself, as it does under autocast (torch's
# list of operators that autocast to float32). `held32` is `shifted32` in a loop that holds the model's outputs until backward is
# done, as loops written by hand do and transformers' Trainer does not.
LOSSES = ("own", "fused", "fused32", "chunked", "chunked-apart", "shifted32", "held32", "shifted16", "shifted-cast")

_LOOK_SECONDS = 0.5  # between looks at what the tracer says
_OWN_SHARE = 0.5  # of a core, below which a trace that does not come tells of the machine and not of the model


_SIXTEEN_BITS = ("flash_attention_2", "flash_attention_3")  # "FlashAttention only support fp16 and bf16 data type"


_NO_GPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# The tracer forks after it has made a batch of images; a child that finds OpenMP's threads gone waits for them for ever.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _tracer_environment(sees_gpus: bool = False) -> dict[str, str]:
    seen = {} if sees_gpus else _NO_GPU
    return {**current().environment(), **seen, **_ONE_THREAD, "TRANSFORMERS_VERBOSITY": "error"}


def trace_job(job: Job, *, loss: str = "own", device: str = "cuda", timeout_seconds: float = 300.0) -> Trace:
    """The job's trace: from the cache, or made in a process of its own.

    A model that cannot be traced here (a kernel that needs a GPU, an operator that needs values, a process that died) gets
    an estimate, which is not cached: a later version may trace it. That a trace took too long is: these versions are not asked
    again for as many seconds. Where the machine was busy with something else, the next call tries again.

    Args:
        loss: one of LOSSES.
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
    if missing := [name for name in RUNS_IT if current().version(name) is None]:
        return closed_form_trace(
            job, f"{' and '.join(missing)} not installed; --python names an environment that has them"
        )
    job, replaced = runnable(job)
    path = cache_path(job, loss, device)
    if (known := cached(path)) is not None:
        return known
    options = _loss_options(loss) + ["--cpu"] * (device == "cpu")
    if job.task == IMAGE_TEXT:
        timeout_seconds *= 3  # windows of an image are looked at one by one
    late = path.with_suffix(".late.json")
    answer = _known_late(late, timeout_seconds) or _ask_tracer(job, options, timeout_seconds)
    if "late_seconds" in answer:
        with contextlib.suppress(OSError):
            write_atomically(late, json.dumps(answer))
    if "trace" in answer:
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(answer["trace"]))
        return Trace.from_json(answer["trace"])
    if "impossible" in answer and not replaced:
        raise UserError(f"model {job.model.name} cannot be built: {answer['impossible']}")
    why = answer.get("impossible") or answer.get("untraceable") or "no answer"
    sizes = answer.get("sizes")
    if sizes is None and not told_by_shape(job):
        # a workload's code may need the GPU that was hidden from it; of other models only sizes tell enough
        answer = _ask_tracer(job, ["--sizes"], timeout_seconds)
        sizes, why = answer.get("sizes"), answer.get("untraceable") or why
    return closed_form_trace(job, why, sizes)


def _known_late(path: Path, timeout_seconds: float) -> dict[str, Any] | None:
    """The answer of an earlier call whose trace did not come within as many seconds."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known if known["late_seconds"] >= timeout_seconds else None
    return None


def trace_jobs(jobs: Sequence[tuple[Job, str]], told: Callable[[int, int], None] | None = None) -> None:
    """Fills the cache for many (job, loss) at once: torch is imported once, and both cores trace.

    A job that cannot be traced is left to `trace_job`, which says why.

    Args:
        told: called with (traces made, traces to make) after each.
    """
    missing = {}
    for job, loss in jobs:
        job, _ = runnable(job)
        path = cache_path(job, loss)
        if not path.exists():
            missing[path] = {"job": job.order(), "options": _loss_options(loss)}
    if not missing:
        return
    paths = list(missing)
    with subprocess.Popen(
        module_command(current().path, TRACER, "--many"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_tracer_environment(),
        text=True,
        encoding="utf-8",
    ) as tracing:
        assert tracing.stdin
        assert tracing.stdout
        tracing.stdin.write(json.dumps(list(missing.values())))
        tracing.stdin.close()
        for made, line in enumerate(_json_lines(tracing.stdout), start=1):
            if "trace" in line:
                with contextlib.suppress(OSError):
                    write_atomically(paths[line["at"]], json.dumps(line["trace"]))
            if told:
                told(made, len(paths))


def _loss_options(loss: str) -> list[str]:
    return [] if loss == "own" else ["--loss", loss]


def _json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects among lines: a model's code may print, too."""
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "at" in found:
                yield found


def _ask_tracer(job: Job, options: list[str], timeout_seconds: float) -> dict[str, Any]:
    """What the tracing process answers: `trace`; `untraceable` with the reason, and the parameters' `sizes` where they could
    be told; or `impossible` with the configuration's error. A process that dies or hangs counts as `untraceable`.

    It sees no GPU, unless only sizes are asked for: those of a model that insists on one.
    """
    try:
        said, complaint = _run_tracer(options, json.dumps(job.order()), timeout_seconds)
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
    """The last line, which is an object unless the model's code has printed, too; empty where it is none."""
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(said.strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return {}


def _run_tracer(options: list[str], asked: str, timeout_seconds: float) -> tuple[str, str]:
    """What a tracing process writes to its two outputs, given these options and a job.

    Raises:
        TimeoutError: it does not end; in one line.
    """
    with subprocess.Popen(
        module_command(current().path, TRACER, *options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_tracer_environment(sees_gpus="--sizes" in options),
        text=True,
        encoding="utf-8",
    ) as tracing:
        try:
            return _outputs(tracing, asked, timeout_seconds)
        finally:
            tracing.kill()


class _TooLong(TimeoutError):
    """The model is there, and its trace does not come."""

    def __init__(self, timeout_seconds: float, said: str, worked: bool) -> None:
        super().__init__(f"no trace within {timeout_seconds:.0f} s" + (" of a busy machine" if not worked else ""))
        self.said, self.worked = said, worked  # by then; whether it had a core for itself


def _outputs(tracing: subprocess.Popen[str], asked: str | None, timeout_seconds: float) -> tuple[str, str]:
    """What the process has written at its end. Its time begins once it has imported all: from a network's disk that takes
    minutes, and says nothing of the model."""
    imported, until = False, time.monotonic() + IMPORT_SECONDS
    while True:
        try:
            return tracing.communicate(asked, timeout=min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired as so_far:
            asked = None  # it has been given
            if not imported and IMPORTED.encode() in (so_far.output or b"").splitlines():
                imported, until = True, time.monotonic() + timeout_seconds
            elif time.monotonic() >= until:
                if imported:
                    said = (so_far.output or b"").decode(errors="replace")
                    worked_seconds = _worked_seconds(tracing.pid)
                    raise _TooLong(timeout_seconds, said, worked_seconds >= _OWN_SHARE * timeout_seconds) from None
                raise TimeoutError(f"torch and transformers not imported within {IMPORT_SECONDS} s") from None


def _worked_seconds(pid: int) -> float:
    """What a tracer and the workers that it has forked have had of cores, in seconds."""
    worked = 0.0
    with contextlib.suppress(psutil.Error):
        tracer = psutil.Process(pid)
        for process in (tracer, *tracer.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                worked += sum(process.cpu_times()[:4])  # and its children's that have ended
    return worked
