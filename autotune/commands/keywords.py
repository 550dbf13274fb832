"""Keyword arguments of the Python API, from the fields of Request.

`autotune run --help` describes them. `python -m autotune.commands.request >
autotune/commands/keywords.py` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypedDict


class _RunPlanLaunchOptions(TypedDict, total=False):
    ds_config: str | PurePath | None
    global_batch_size: int | str | float | PurePath | None
    gpus: int | None
    memory_cap: str | float | PurePath | None
    model: str | float | PurePath | None
    nodes: int | None
    precision: str | float | PurePath | None
    python: str | float | PurePath | None
    runs: str | PurePath | None
    seq_len: int | str | float | PurePath | None


class _RunLaunchOptions(TypedDict, total=False):
    device: str | float | PurePath | None
    exclude: str | float | PurePath | None
    executor: str | float | PurePath | None
    exports: Sequence[str] | None
    hostfile: str | PurePath | None
    include: str | float | PurePath | None
    interface: str | float | PurePath | None
    maps: Sequence[str] | None
    storage: str | float | PurePath | None


class _RunPlanOptions(TypedDict, total=False):
    attention: str | float | PurePath | None
    image_size: int | None
    lengths: str | PurePath | None
    lora: str | float | PurePath | None
    loss: str | float | PurePath | None
    optimizer: str | float | PurePath | None
    reserve: str | float | PurePath | None
    space: str | float | PurePath | Mapping[str, Any] | None
    task: str | float | PurePath | None
    trust_remote_code: bool | None
    unprotected: bool | None
    workload: str | float | PurePath | None


class RunOptions(_RunPlanLaunchOptions, _RunLaunchOptions, _RunPlanOptions, total=False):
    """Options of `autotune.tune`; None keeps the default."""

    budget: str | float | PurePath | None
    exhaustive: bool | None
    force: bool | None
    headroom: str | float | PurePath | None
    max_trials: int | None
    no_references: bool | None
    out: str | PurePath | None
    parallel: int | None
    seed: int | None
    study: str | float | PurePath | None
    worst_case: bool | None


class PlanOptions(_RunPlanLaunchOptions, _RunPlanOptions, total=False):
    """Options of `autotune.plan`; None keeps the default."""

    gpu: str | float | PurePath | None
    host_memory: str | float | PurePath | None
    tokens: str | float | PurePath | None


class LaunchOptions(_RunPlanLaunchOptions, _RunLaunchOptions, total=False):
    """Options of `autotune.launch`; None keeps the default."""

    convert: bool | None
    hang_timeout: str | float | PurePath | None
    max_restarts: int | None
