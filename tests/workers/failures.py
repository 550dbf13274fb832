"""The failures of `tests/data/failures.yaml` as the evidence that a group would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from autotune.problem.outcome import Outcome, OutcomeKind, Phase, Source
from autotune.util.units import GIB
from autotune.workers.failure_classifier import FailureEvidence
from autotune.workers.memory_monitor import MemoryPeaks

Failure = dict[str, Any]
FAILURES: list[Failure] = yaml.safe_load((Path(__file__).parents[1] / "data" / "failures.yaml").read_text())
_BASES = {
    "torch.OutOfMemoryError": ["builtins.RuntimeError"],
    "torch.AcceleratorError": ["builtins.RuntimeError"],
    "torch.distributed.DistBackendError": ["torch.distributed.DistError", "builtins.RuntimeError"],
    "torch.distributed.DistStoreError": ["torch.distributed.DistError", "builtins.RuntimeError"],
    "torch.distributed.DistNetworkError": ["torch.distributed.DistError", "builtins.RuntimeError"],
    "numpy.core._exceptions._ArrayMemoryError": ["builtins.MemoryError"],
}


def expected_outcome(
    kind: OutcomeKind, phase: Phase, reason: str, evidence: str, source: Source, rank: int | None = None, **more: Any
) -> Outcome:
    """What `classify_failure` returns."""
    return Outcome(kind, phase, reason=reason, evidence=evidence, source=source, rank=rank, **more)


def name(failure: Failure) -> str:
    """`deepspeedai/DeepSpeed/issues/3860`: what a test is called by."""
    return str(failure["source"]).removeprefix("https://github.com/")


def error(failure: Failure) -> dict[str, Any]:
    """The `error` message of a rank."""
    kind, frames = failure["exception"], failure.get("frames", [])
    lines = [f'  File "{file}", line 1, in {function}\n    {source}\n' for file, function, source in frames]
    numbers = {f"{key}_bytes": int(size * GIB) for key, size in failure.get("numbers", {}).items()}
    return {
        "kinds": [kind, *_BASES.get(kind, []), "builtins.Exception"],
        "text": failure["text"],
        "traceback": f"Traceback (most recent call last):\n{''.join(lines)}{kind.split('.')[-1]}: {failure['text']}\n",
        "file": failure.get("file", frames[-1][0] if frames else "/home/me/train.py"),
        "files": [file for file, _, _ in frames],
        "phase": failure.get("phase", Phase.FORWARD),
        "rank": 0,
        "numbers": numbers,
    }


def evidence(failure: Failure) -> FailureEvidence:
    peaks = MemoryPeaks(used=[5], oom_kills=failure.get("oom_kills", 0))
    if "exception" in failure:
        return FailureEvidence("cuda", [error(failure)], peaks=peaks, host_total_bytes=64 * GIB)
    status = failure.get("status", 1)
    return FailureEvidence(
        "cuda", statuses={0: status}, peaks=peaks, host_total_bytes=64 * GIB, logs={0: failure["text"]}
    )


def kind(failure: Failure) -> OutcomeKind:
    return OutcomeKind(failure["kind"])
