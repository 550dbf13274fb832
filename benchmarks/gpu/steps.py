"""The one list of what only a GPU can prove, from most to least worth. Each step is a module of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.errors import UserError


@dataclass(frozen=True)
class Step:
    """A step, and seconds on one GPU: expected ones of the first minutes and of `overhead` were measured on an H100 with
    16 cores, of `tests` on an H200; others are estimates."""

    name: str  # of its module, whose `run(ground)` yields rows
    limit_seconds: float  # it is ended after so long
    least_seconds: float  # it is not begun if less of the call is left
    expected_seconds: float
    purpose: str
    keys: int = 1  # columns that name a row
    is_first: bool = False  # part of the first minutes
    timed: bool = False  # begins only when no op is being built any more, which takes the cores that its ranks need


STEPS = (
    Step("facts", 60, 20, 8, "the machine, as a reader needs it to debug the rest from afar", is_first=True),
    Step(
        "trials",
        150,
        40,
        78,
        "a trial; true OOM without a cap in forward, backward, step and init, a trial after each",
        is_first=True,
    ),
    Step("launch", 120, 40, 87, "launch goes on after a true OOM of the GPU", is_first=True),
    Step(
        "study", 235, 190, 143, "autotune run of smollm2-360m, 150 s, to a verified winner", is_first=True, timed=True
    ),
    Step(
        "fidelity",
        180,
        40,
        86,
        "the study's winner against plain torchrun; without a study a fixed candidate",
        2,
        is_first=True,
        timed=True,
    ),
    Step("predictions", 130, 40, 85, "peak and step time of six trials against their predictions", 3, True, timed=True),
    Step("held_back", 110, 40, 88, "the same of five trials that no constant was fitted to", 3, True, timed=True),
    # in 200 s on an H200 it profiled the model and ended two experiments, about 62 s each
    Step("deepspeed", 480, 300, 400, "DeepSpeed's own autotuner on the study's model"),
    Step(
        "tests", 480, 60, 193, "tests/gpu under pytest; fork isolation kept, with FusedAdam and its build (finding 8)"
    ),
    Step("overhead", 300, 10, 12, "a process's bytes outside the allocator, by CUDA and NVML (12, 20, 21)", 4),
    Step("ooms", 480, 60, 180, "true OOMs of allocator, libraries and pinned memory: texts, numbers, verdict (4, 22)"),
    Step("capped", 480, 90, 480, "predictions under a cap of 24 GiB, by model, stage and offload", 2),
    Step("product", 480, 400, 480, "autotune run of gemma-2-2b under 24 GiB, its winner trained by torchrun"),
    Step("costs", 480, 90, 360, "cost of the gauge (23), foreach and FusedAdam peaks (18, 16), offload threads (9)", 2),
    Step("resume", 300, 60, 180, "a checkpoint is resumed in fresh ranks, and its peak"),
    Step("variants", 480, 60, 240, "sdpa, eager and flash attention; expandable_segments on and off", 2),
    Step("gain", 480, 420, 480, "the whole space against DeepSpeed's defaults, qwen2.5-0.5b under 24 GiB"),
    Step("doctor", 120, 20, 30, "findings of autotune doctor"),
)
BY_NAME = {step.name: step for step in STEPS}
FIRST = tuple(step.name for step in STEPS if step.is_first)


def chosen(names: Iterable[str] | None, option: str) -> list[Step]:
    """Return the named steps in the order of worth; None: all.

    Raises:
        UserError: there is no such step.
    """
    wanted = set(BY_NAME if names is None else (name.strip() for name in names))
    if unknown := sorted(wanted - BY_NAME.keys()):
        raise UserError(f"{option}: no step {', '.join(unknown) or '(empty)'}; expected some of {','.join(BY_NAME)}")
    return [step for step in STEPS if step.name in wanted]
