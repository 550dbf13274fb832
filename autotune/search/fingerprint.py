"""What a study is of, and what it was measured under. Two calls may share a study only if they agree on what both know.

Version 0.1 wrote down the job, the machine and the packages alone. What it did not write down is unknown, not different.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Any

from autotune import inquiry
from autotune.interpreter import current
from autotune.problem.argument_files import value_at
from autotune.problem.candidate import ALLOCATOR_VARIABLES
from autotune.problem.cpus import threads_per_rank
from autotune.problem.gpus import open_nvml
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.script_job import OPS
from autotune.problem.sources import SOURCES, edited, sources_of

THREADS, ENVIRONMENT, VERSIONS = "threads_per_rank", "environment", "versions"
BESIDES = "watched_besides"  # names of variables that earlier fingerprints, which have none here, say nothing of
# No measurement depends on the tuner's own package: it is written down, and neither names a study nor makes it another. The
# version that stands in every name is the one that all studies had that were named by it.
_TUNERS, _NAMED_BY = "optuna", "5.0.0"
# Variables that change how fast or how large a training is, whatever its config: of libraries that compute, communicate
# and allocate. Which GPUs are meant is not among them: the hardware says it.
_BESIDES = ("DS_PIN_MEMORY_BACKEND", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_WATCHED = (
    *ALLOCATOR_VARIABLES,
    *_BESIDES,
    *("LD_PRELOAD", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
_WATCHED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),
    *("CUDA_DEVICE_MAX_", "CUDA_LAUNCH_", "CUDA_MODULE_"),
    *("OMP_PROC_", "OMP_PLACES", "OMP_WAIT_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "MALLOC_"),
)
_UNWATCHED_PREFIXES = ("NCCL_DEBUG", "TORCH_NCCL_DUMP", "TORCH_NCCL_TRACE")  # they only tell
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # of a variable, as a shell takes it before a command
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)


def identity(job: Job, hardware: Hardware) -> dict[str, Any]:
    """The job, the machine and the packages, as JSON: what names a study, so that the same command finds it again."""
    machine = {key: hardware.to_json()[key] for key in ("device", "name", "count", "memory_bytes", "memory_cap_bytes")}
    if hardware.nodes > 1:
        machine["nodes"] = hardware.nodes
    if hardware.sliced:
        machine["sliced"] = True
    if hardware.device == "cpu" or hardware.unified:
        del machine["memory_bytes"]  # of main memory, which differs a little from boot to boot
    return {"job": job.to_json(), "hardware": machine, VERSIONS: {**package_versions(), _TUNERS: _NAMED_BY}}


def fingerprint(job: Job, hardware: Hardware) -> dict[str, Any]:
    """Its identity, the digests of the user's own files, and the driver, the CPU threads a rank and the variables that it is
    measured under."""
    found = identity(job, hardware)
    found[VERSIONS] |= package_versions()
    if hardware.device == "cuda":
        found[VERSIONS] |= driver_versions()
    known = sources_of(job)
    return {
        **found,
        **({SOURCES: known} if known else {}),
        THREADS: hardware.threads or threads_per_rank(hardware.processes),
        **_watched(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages on which measurements depend, as the ranks have them, and of the tuner's own."""
    theirs = {package: current().version(package) or "missing" for package in ("torch", "deepspeed", "transformers")}
    return {**theirs, _TUNERS: inquiry.version(_TUNERS) or "missing"}


def driver_versions() -> dict[str, str]:
    """Versions of the driver, of the CUDA that torch was built for and of its NCCL; what is not known is left out."""
    found: dict[str, str | None] = {}
    with suppress(Exception):  # a driver that does not answer is another's to complain of
        if (lib := open_nvml()) is not None:
            driver = lib.nvmlSystemGetDriverVersion()
            found["driver"] = driver.decode() if isinstance(driver, bytes) else str(driver)
    if current().cuda is not None:
        found |= {"cuda": current().cuda, "nccl": current().nccl}
    return {name: version for name, version in found.items() if version}


def watched_variables() -> dict[str, str]:
    """What this process's environment says of speed and memory."""
    return {name: value for name, value in sorted(os.environ.items()) if value and _is_watched(name)}


def _is_watched(name: str) -> bool:
    return (name in _WATCHED or name.startswith(_WATCHED_PREFIXES)) and not name.startswith(_UNWATCHED_PREFIXES)


def _watched() -> dict[str, Any]:
    return {ENVIRONMENT: watched_variables(), BESIDES: list(_BESIDES)}


def measured_under(mark: dict[str, Any]) -> dict[str, str]:
    """The variables that a study was measured under, as they may stand before a command that is shown around: none that is not
    watched, and none that is named like a secret."""
    return {
        name: str(value)
        for name, value in mark.get(ENVIRONMENT, {}).items()
        if _is_watched(name) and _NAME.fullmatch(name) and not _SECRET.search(name)
    }


def other_variables(mark: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Where this process's watched variables are others than those of a study's fingerprint: by name, the study's value and
    this process's, None for none. What the study does not know of is not other."""
    if ENVIRONMENT not in mark:
        return {}
    then, now = (one[ENVIRONMENT] for one in _knowing_alike(mark, _watched()))
    return {
        name: (then.get(name), now.get(name))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name) and not _SECRET.search(name)
    }


def _knowing_alike(*marks: dict[str, Any]) -> list[dict[str, Any]]:
    """Two fingerprints without the variables that only one of them has watched."""
    one, other = ({*mark.get(BESIDES, ())} for mark in marks)
    alike = []
    for mark in marks:
        kept = {name: value for name, value in mark.items() if name != BESIDES}
        if ENVIRONMENT in mark:
            kept[ENVIRONMENT] = {name: value for name, value in mark[ENVIRONMENT].items() if name not in one ^ other}
        alike.append(kept)
    return alike


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences in what both know, but for the tuner's own package; first the files that were edited."""
    files = [f"{path} was edited" for path in edited(before.get(SOURCES, {}), now.get(SOURCES, {}))]
    before, now = ({**_with_seen_ops(mark, []), SOURCES: {}} for mark in _knowing_alike(before, now))
    both = [{key: mark[key] for key in before.keys() & now.keys()} for mark in (before, now)]
    known = (before.get(VERSIONS, {}).keys() & now.get(VERSIONS, {}).keys()) - {_TUNERS}
    old, new = ({**mark, VERSIONS: {key: mark[VERSIONS][key] for key in known}} for mark in both)
    return [*files, *differences(old, new)]


def knowing_more(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint from now on: of the present call, and what only an earlier one knew."""
    known = {**before, **now, VERSIONS: {**before.get(VERSIONS, {}), **now.get(VERSIONS, {})}}
    return _with_seen_ops(known, list(dict.fromkeys([*_seen_ops(before), *_seen_ops(now)])))


_PROFILE = ("job", "script", "profile")


def _seen_ops(mark: dict[str, Any]) -> list[str]:
    """Which of DeepSpeed's ops the script's first run was the first to need: what had not been built where it ran, and no
    part of the job."""
    return value_at(mark, (*_PROFILE, OPS)) or []


def _with_seen_ops(mark: dict[str, Any], ops: list[str]) -> dict[str, Any]:
    profile = value_at(mark, _PROFILE)
    if profile is None:
        return mark
    others = {key: value for key, value in profile.items() if key != OPS}
    script = {**mark["job"]["script"], "profile": {**others, **({OPS: ops} if ops else {})}}
    return {**mark, "job": {**mark["job"], "script": script}}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`job.seq_len: 768 -> 1024` for every leaf that differs."""
    lines = []
    for key in sorted({*old, *new}, key=str):
        before, after = old.get(key), new.get(key)
        if isinstance(before, list | tuple) and isinstance(after, list | tuple):  # JSON has no tuples
            before, after = dict(enumerate(before)), dict(enumerate(after))
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
