"""Fingerprint of a study: job, machine, packages and environment.

Two calls may share a study if the values that both know agree. A missing value is unknown, not different.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from autotune.problem.candidate import ALLOCATOR_VARIABLES
from autotune.problem.ds_config import value_at
from autotune.problem.hardware import Hardware, threads_per_rank
from autotune.problem.job import Job, ScriptProfile
from autotune.problem.nvml import open_nvml
from autotune.script.environment import READ, differing, values_now
from autotune.script.source_digests import SOURCES, edited, sources_of
from autotune.util import inquiry
from autotune.util.interpreter import OWN, Interpreter

THREADS, ENVIRONMENT, VERSIONS = "threads_per_rank", "environment", "versions"
# No measurement depends on the tuner's own package. Its version is stored, but it neither names a study nor separates
# two. The version in study names is the one of all studies that were named with it.
_TUNERS, _NAMED_BY = "optuna", "5.0.0"
# Variables of libraries that compute, communicate and allocate, which change a training's speed or memory with any
# config. The hardware record covers the choice of GPUs.
_WATCHED = (
    *ALLOCATOR_VARIABLES,
    *("DS_PIN_MEMORY_BACKEND", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("LD_PRELOAD", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
_WATCHED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),
    *("CUDA_DEVICE_MAX_", "CUDA_LAUNCH_", "CUDA_MODULE_"),
    *("OMP_PROC_", "OMP_PLACES", "OMP_WAIT_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "MALLOC_"),
)
# They only control logging. Images of NVIDIA set NCCL_VERSION to the version of a package, and NCCL does not read it.
_UNWATCHED_PREFIXES = ("NCCL_DEBUG", "TORCH_NCCL_DUMP", "TORCH_NCCL_TRACE", "NCCL_VERSION")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # a variable's name, as a shell accepts it before a command
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)


def identity(job: Job, hardware: Hardware) -> dict[str, Any]:
    """Return job, machine and packages as JSON.

    The identity names a study, so that the same command finds its study again.
    """
    machine = {key: hardware.to_json()[key] for key in ("device", "name", "count", "memory_bytes", "memory_cap_bytes")}
    if hardware.reserve_bytes:
        machine["reserve_bytes"] = hardware.reserve_bytes
    if hardware.nodes > 1:
        machine["nodes"] = hardware.nodes
    if hardware.device == "cpu" or hardware.unified:
        del machine["memory_bytes"]  # main memory, which differs slightly between boots
    return {
        "job": job.to_json(),
        "hardware": machine,
        VERSIONS: {**package_versions(job.interpreter), _TUNERS: _NAMED_BY},
    }


def fingerprint(job: Job, hardware: Hardware) -> dict[str, Any]:
    """Return the identity, plus digests of the user's files, the driver, CPU threads per rank and watched variables."""
    found = identity(job, hardware)
    found[VERSIONS] |= package_versions(job.interpreter)
    if hardware.device == "cuda":
        found[VERSIONS] |= driver_versions(job.interpreter)
    known = sources_of(job)
    return {
        **found,
        **({SOURCES: known} if known else {}),
        THREADS: hardware.threads or threads_per_rank(hardware.count),
        ENVIRONMENT: watched_variables(),
    }


def package_versions(interpreter: Interpreter = OWN) -> dict[str, str]:
    """Return versions of the packages on which measurements depend.

    The ranks' Python provides them, except for the version of the tuner's package.
    """
    theirs = {package: interpreter.version(package) or "missing" for package in ("torch", "deepspeed", "transformers")}
    return {**theirs, _TUNERS: inquiry.version(_TUNERS) or "missing"}


def driver_versions(interpreter: Interpreter = OWN) -> dict[str, str]:
    """Return versions of the driver, torch's CUDA and its NCCL, without unknown ones."""
    found: dict[str, str | None] = {}
    with suppress(Exception):  # other checks report a driver that does not answer
        if (lib := open_nvml()) is not None:
            driver = lib.nvmlSystemGetDriverVersion()
            found["driver"] = driver.decode() if isinstance(driver, bytes) else str(driver)
    if interpreter.cuda is not None:
        found |= {"cuda": interpreter.cuda, "nccl": interpreter.nccl}
    return {name: version for name, version in found.items() if version}


def watched_variables() -> dict[str, str]:
    """Return this process's environment variables that affect speed or memory."""
    return {name: value for name, value in sorted(os.environ.items()) if value and _is_watched(name)}


def _is_watched(name: str) -> bool:
    return (name in _WATCHED or name.startswith(_WATCHED_PREFIXES)) and not name.startswith(_UNWATCHED_PREFIXES)


def measured_under(mark: dict[str, Any]) -> dict[str, str]:
    """Return the study's watched variables in a form that can be shown before a command.

    Unwatched variables and names that look like secrets are left out.
    """
    return {
        name: str(value)
        for name, value in mark.get(ENVIRONMENT, {}).items()
        if _is_watched(name) and _NAME.fullmatch(name) and not _SECRET.search(name)
    }


def other_variables(mark: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Return variables that differ between a study and this process: watched ones, and those that the script reads.

    Variables that the study did not record are left out.

    Returns:
        By name: the study's value and this process's value, None if unset.
    """
    read = value_at(mark, (*_PROFILE, READ), {})
    found = {name: (read[name], value) for name, value in values_now(read) if value != read[name]}
    if ENVIRONMENT not in mark:
        return found
    then, now = _watched(mark)[ENVIRONMENT], watched_variables()
    return found | {
        name: (then.get(name), now.get(name))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name) and not _SECRET.search(name)
    }


def _watched(mark: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without variables that are no longer watched."""
    if ENVIRONMENT not in mark:
        return mark
    return {**mark, ENVIRONMENT: {name: value for name, value in mark[ENVIRONMENT].items() if _is_watched(name)}}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences in values that both know, without the tuner's package; a script's files and variables come first."""
    files = [f"{path} was edited" for path in edited(before.get(SOURCES, {}), now.get(SOURCES, {}))]
    variables = differing(*(value_at(mark, (*_PROFILE, READ), {}) for mark in (before, now)))
    before, now = (
        {**_with_profile(_watched(mark), ("version", "attempts", "ops", "seeds", READ)), SOURCES: {}}
        for mark in (before, now)
    )
    both = [{key: mark[key] for key in before.keys() & now.keys()} for mark in (before, now)]
    known = (before.get(VERSIONS, {}).keys() & now.get(VERSIONS, {}).keys()) - {_TUNERS}
    old, new = ({**mark, VERSIONS: {key: mark[VERSIONS][key] for key in known}} for mark in both)
    return [*files, *variables, *differences(old, new)]


def merged_fingerprint(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the merged fingerprint: the present call's values, plus values that only an earlier call knew."""
    known = {**before, **now, VERSIONS: {**before.get(VERSIONS, {}), **now.get(VERSIONS, {})}}
    ops = tuple(dict.fromkeys([*_seen_ops(before), *_seen_ops(now)]))
    return _with_profile(known, ("ops", "seeds"), {"ops": ops} if ops else {})


_PROFILE = ("job", "script", "profile")


def _seen_ops(mark: dict[str, Any]) -> list[str]:
    """Return the DeepSpeed ops that the script's probe run needed and that were not built at the time.

    They are no part of the job.
    """
    return value_at(mark, (*_PROFILE, "ops")) or []


def _with_profile(mark: dict[str, Any], left_out: Sequence[str], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the fingerprint with other keys in its script's profile; without a script it is unchanged."""
    profile = value_at(mark, _PROFILE)
    if profile is None:
        return mark
    known = ScriptProfile.from_json(profile).to_json()  # in the form of this version
    others = {key: value for key, value in known.items() if key not in left_out}
    script = {**mark["job"]["script"], "profile": {**others, **(more or {})}}
    return {**mark, "job": {**mark["job"], "script": script}}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return one line for each leaf or part of a list that differs, such as `job.seq_len: 768 -> 1024`."""
    lines = []
    for key in sorted({*old, *new}, key=str):
        before, after = _by_place(old.get(key)), _by_place(new.get(key))
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {_short(before)} -> {_short(after)}")
    return lines


def _by_place(value: Any) -> Any:
    return dict(enumerate(value)) if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
