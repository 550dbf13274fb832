"""Keyword arguments of the Python API, from the fields of Request.

`autotune run --help` describes them. `python -m autotune.commands.request >
autotune/commands/keywords.py` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypedDict


class RunOptions(TypedDict, total=False):
    """Options of `autotune.tune`; None keeps the default."""

    attention: str | float | PurePath | None
    budget: str | float | PurePath | None
    compiled: bool | None
    device: str | float | PurePath | None
    ds_config: str | PurePath | None
    exclude: str | float | PurePath | None
    executor: str | float | PurePath | None
    exhaustive: bool | None
    exports: Sequence[str] | None
    force: bool | None
    global_batch_size: int | str | float | PurePath | None
    gpus: int | None
    headroom: str | float | PurePath | None
    hostfile: str | PurePath | None
    image_size: int | None
    include: str | float | PurePath | None
    interface: str | float | PurePath | None
    isolation: str | float | PurePath | None
    lengths: str | PurePath | None
    lora: str | float | PurePath | None
    loss: str | float | PurePath | None
    maps: Sequence[str] | None
    max_trials: int | None
    memory_cap: str | float | PurePath | None
    model: str | float | PurePath | None
    no_gallery: bool | None
    no_references: bool | None
    nodes: int | None
    optimizer: str | float | PurePath | None
    out: str | PurePath | None
    packed: bool | None
    parallel: int | None
    parallel_offload: bool | None
    precision: str | float | PurePath | None
    python: str | float | PurePath | None
    quantize: str | float | PurePath | None
    ray_address: str | float | PurePath | None
    reserve: str | float | PurePath | None
    seed: int | None
    seq_len: int | str | float | PurePath | None
    space: str | float | PurePath | Mapping[str, Any] | None
    storage: str | float | PurePath | None
    study: str | float | PurePath | None
    sync: bool | None
    task: str | float | PurePath | None
    tolerance: str | float | PurePath | None
    track: Sequence[str] | None
    trust: bool | None
    trust_remote_code: bool | None
    unprotected: bool | None
    workload: str | float | PurePath | None
    worst_case: bool | None
    runs: str | PurePath | None


class PlanOptions(TypedDict, total=False):
    """Options of `autotune.plan`; None keeps the default."""

    attention: str | float | PurePath | None
    ds_config: str | PurePath | None
    global_batch_size: int | str | float | PurePath | None
    gpu: str | float | PurePath | None
    gpus: int | None
    headroom: str | float | PurePath | None
    host_memory: str | float | PurePath | None
    image_size: int | None
    lengths: str | PurePath | None
    lora: str | float | PurePath | None
    loss: str | float | PurePath | None
    max_positions: int | None
    memory_cap: str | float | PurePath | None
    model: str | float | PurePath | None
    nodes: int | None
    optimizer: str | float | PurePath | None
    packed: bool | None
    precision: str | float | PurePath | None
    price: float | None
    python: str | float | PurePath | None
    quantize: str | float | PurePath | None
    reserve: str | float | PurePath | None
    seq_len: int | str | float | PurePath | None
    space: str | float | PurePath | Mapping[str, Any] | None
    task: str | float | PurePath | None
    tokens: str | float | PurePath | None
    trust_remote_code: bool | None
    unprotected: bool | None
    workload: str | float | PurePath | None
    runs: str | PurePath | None


class LaunchOptions(TypedDict, total=False):
    """Options of `autotune.launch`; None keeps the default."""

    convert: bool | None
    device: str | float | PurePath | None
    ds_config: str | PurePath | None
    exclude: str | float | PurePath | None
    executor: str | float | PurePath | None
    exports: Sequence[str] | None
    global_batch_size: int | str | float | PurePath | None
    gpus: int | None
    hang_timeout: str | float | PurePath | None
    hostfile: str | PurePath | None
    image_size: int | None
    include: str | float | PurePath | None
    interface: str | float | PurePath | None
    maps: Sequence[str] | None
    max_restarts: int | None
    memory_cap: str | float | PurePath | None
    model: str | float | PurePath | None
    nodes: int | None
    precision: str | float | PurePath | None
    python: str | float | PurePath | None
    ray_address: str | float | PurePath | None
    seq_len: int | str | float | PurePath | None
    space: str | float | PurePath | Mapping[str, Any] | None
    storage: str | float | PurePath | None
    sync: bool | None
    task: str | float | PurePath | None
    trust: bool | None
    runs: str | PurePath | None
