"""A search space narrowed to one job and one machine: without choices that this job has not or this machine cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

from autotune.errors import UserError
from autotune.interpreter import current
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    CUDA_KNOBS,
    MICRO_BATCH,
    MODEL_KNOBS,
    PACKING,
    TRACED_KNOBS,
    knobs_of,
)
from autotune.problem.job import Job
from autotune.problem.space import Domain, SearchSpace
from autotune.problem.tasks import CAUSAL

_KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}  # attention: its package


def for_job(space: SearchSpace, job: Job) -> SearchSpace:
    """The space for this job: knobs that the user's own config sets and the space does not tune are held at their values;
    knobs that the job's script or workload cannot be told are left out."""
    knobs = dict(_with_base(space, job.base_config).knobs)
    if job.workload is not None:
        for knob in TRACED_KNOBS:
            knobs.pop(knob, None)
    if not job.lengths or job.task != CAUSAL:
        knobs.pop(PACKING, None)
    if job.script is None:
        return dataclasses.replace(space, knobs=knobs)
    seen = job.script.profile
    for knob in MODEL_KNOBS:
        knobs.pop(knob, None)
    if not seen["checkpointing"]:
        knobs.pop(CHECKPOINTING, None)
    if seen["batch_note"]:
        knobs |= {MICRO_BATCH: Domain((seen["micro_batch"],)), ACCUMULATION: Domain((seen["accumulation"],))}
    return dataclasses.replace(space, knobs=knobs)


def for_device(space: SearchSpace, device: str) -> SearchSpace:
    """The space for `cuda` or `cpu`: what is CUDA's alone would only be measured twice on CPU ranks."""
    if device == "cuda":
        return space
    return dataclasses.replace(space, knobs={k: d for k, d in space.knobs.items() if k not in CUDA_KNOBS})


def _with_base(space: SearchSpace, base: dict[str, Any]) -> SearchSpace:
    knobs = dict(space.knobs)
    for name, value in knobs_of(base).items():
        knobs.setdefault(name, Domain((value,)))
    return dataclasses.replace(space, knobs=knobs)


def installed(space: SearchSpace) -> tuple[SearchSpace, list[str]]:
    """The space without values whose package is missing here, and a line for each value left out. Looked up once, so that
    not every trial fails by it.

    Raises:
        UserError: a knob has no value left.
    """
    knobs, lines = dict(space.knobs), []
    for knob in TRACED_KNOBS:
        if knob not in knobs:
            continue
        missing = {value: package for value in knobs[knob].values if (package := missing_package(value))}
        said = [
            f"{knob} {value} needs the package {package}, which is not installed" for value, package in missing.items()
        ]
        left = tuple(value for value in knobs[knob].values if value not in missing)
        if not left:
            raise UserError(f"space {space.name}: {said[0]}; install it or add another")
        knobs[knob] = dataclasses.replace(knobs[knob], values=left)
        lines += [f"{line}: left out" for line in said]
    return dataclasses.replace(space, knobs=knobs), lines


def missing_package(choice: object) -> str | None:
    """The package that an attention kernel or adapters (`r=16,…`) need, where the environment of the ranks lacks it."""
    if choice in (None, "none"):
        return None
    package = "peft" if str(choice).startswith("r=") else _KERNELS.get(str(choice))
    return package if package and not current().has(package) else None
