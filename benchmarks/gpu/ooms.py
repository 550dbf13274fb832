"""True out-of-memory errors, each in a process of its own, and what our verdict makes of it.

Beside the results stands NAME-failures.yaml, written as `tests/data/failures.yaml` is: its entries can be added there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import yaml

from autotune.problem.host_memory import host_available_bytes
from autotune.util.units import GIB
from autotune.workers.failure_classifier import FailureEvidence, classify_failure
from autotune.workers.memory_peaks import MemoryPeaks
from benchmarks.gpu.ground import EXPECTED, Child, Ground, Row, run_child

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# name of the row: the case of provoke.py, what it is, and its environment
CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "allocator": ("allocator", "oom_device", {}),
    "cap": ("cap", "oom_device", {}),
    "expandable_segments": ("allocator", "oom_device", EXPANDABLE),
    "expandable_segments, cap": ("cap", "oom_device", EXPANDABLE),
    "cuBLAS handle, 20 MiB left": ("cublas", "oom_device", {}),
    "cuDNN handle, 20 MiB left": ("cudnn", "oom_device", {}),
    "a kernel's code, nothing left": ("module", "oom_device", {}),
    "NCCL, 20 MiB left": ("nccl", "oom_device", {}),
    "Triton, nothing left": ("triton", "oom_device", {}),
    "pinned, ulimit -v": ("pinned_ulimit", "oom_host", {}),
    "pinned, more than there is": ("pinned_too_much", "oom_host", {}),
}


class _Text(yaml.SafeDumper):
    """Texts of several lines as blocks, as people write them."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Text.add_representer(str, _as_block)


def run(ground: Ground) -> Iterator[Row]:
    failures: list[Row] = []
    for name, (case, expected, env) in CASES.items():
        child = run_child("provoke", {"case": case, "device": ground.device}, env, seconds=90)
        row = {"case": name, "is": expected, **judged(child, ground)}
        agreed = row["verdict"] == expected if row.get("verdict") else None  # what did not fail proves nothing
        if child.result:
            failures.append(as_failure(child.result, name, expected, ground))
            row["failure"] = failures[-1]
            path = ground.beside.with_name(f"{ground.beside.name}-failures.yaml")
            path.write_text(yaml.dump(failures, Dumper=_Text, sort_keys=False, width=10**6, allow_unicode=True))
        yield {**row, EXPECTED: ground.choose(agreed, None)}


def judged(child: Child, ground: Ground) -> Row:
    """Our verdict on how the process ended."""
    total = host_available_bytes()
    peaks = MemoryPeaks(used=[1])  # NVML shows the process, and nobody else's growth
    if child.code != 0:
        verdict = classify_failure(
            FailureEvidence(
                ground.device, statuses={0: child.code}, peaks=peaks, host_total_bytes=total, logs={0: child.stderr}
            )
        )
        return {"exception": f"exit {child.code}", "text": child.stderr[-300:], "verdict": verdict.kind.value}
    if child.result is None:
        return {"exception": "none: it did not fail"}
    error = child.result["error"]
    verdict = classify_failure(FailureEvidence(ground.device, [error], peaks=peaks, host_total_bytes=total))
    return {
        "exception": error["kinds"][0],
        "text": error["text"].strip()[:300],
        "verdict": verdict.kind.value,
        "missing bytes": verdict.missing_bytes,
        "by": verdict.evidence,
        "error": error,
    }


def as_failure(result: dict[str, Any], name: str, kind: str, ground: Ground) -> dict[str, Any]:
    """An entry of `tests/data/failures.yaml`."""
    error = result["error"]
    return {
        "source": f"measured: gpu_acceptance.py ooms, {name}, {ground.hardware().name}, {time.strftime('%Y-%m-%d')}",
        "kind": kind,
        "exception": error["kinds"][0],
        "text": error["text"],
        "frames": result["frames"],
        "numbers": {key.removesuffix("_bytes"): round(size / GIB, 6) for key, size in error["numbers"].items()},
    }
