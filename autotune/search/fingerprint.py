"""What a study is of. Two calls may share a study only if their fingerprints are equal."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

from autotune.problem.hardware import Hardware
from autotune.problem.job import Job


def package_versions() -> dict[str, str]:
    """Versions of the packages on which measurements depend."""
    found = {}
    for package in ("torch", "deepspeed", "transformers", "optuna"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def fingerprint(job: Job, hardware: Hardware) -> dict[str, Any]:
    """The job, the machine and the packages, as JSON."""
    machine = {key: hardware.to_json()[key] for key in ("device", "name", "count", "memory_bytes", "memory_cap_bytes")}
    if hardware.device == "cpu":
        del machine["memory_bytes"]  # a share of main memory, which differs a little from boot to boot
    return {"job": job.to_json(), "hardware": machine, "versions": package_versions()}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`job.seq_len: 768 -> 1024` for every leaf that differs."""
    lines = []
    for key in sorted({*old, *new}, key=str):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
