"""Training trace: what the first optimizer steps of a run computed. Plain data, merged over the ranks."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.util.bounds import known_fields

LEAST_STEPS = 3  # traced optimizer steps that a comparison needs
MOST_STEPS = 5  # traced optimizer steps; a search trial runs two warm-up steps and at least three measured ones
# optimizer steps at which the intervals begin whose learning rates are read from the schedule, each 1.1 times the last
AHEAD = tuple(round(16 * 1.1**at) for at in range(60))


@dataclass(frozen=True)
class TracedStep:
    """One optimizer step, over all ranks. None: the quantity was not seen."""

    micro_batches: int  # iterations of the script's loop: forwards of a rank that a backward follows
    rows: int  # over all ranks
    digest: float  # sum over the rows; independent of their order and of the split into micro-batches
    loss: float | None  # sum over the backwards, each weighted as the engine does; mean over the ranks
    gradient_norm: float | None  # global norm with which the optimizer stepped, before DeepSpeed's clipping
    update: float | None  # root of the mean square by which sampled weights changed
    rates: tuple[float, ...]  # learning rate of every parameter group
    skipped: bool = False  # the optimizer did not run, because fp16 gradients overflowed
    buffers: float | None = None  # root of the mean square by which sampled buffers changed since the preceding step
    changed_by_hand: int = 0  # micro-batches after which the script changed gradients that the optimizer reads
    outside_steps: int = 0  # steps of optimizers that belong to no engine


@dataclass(frozen=True)
class TrainingTrace:
    """First optimizer steps of a run from the study's random state."""

    steps: tuple[TracedStep, ...]
    stage: int
    precision: str  # fp32, bf16 or fp16 by the engine's weights; mixed: fp32 weights, products of fewer bits
    accumulation: int  # micro-batches in the engine's config; a script may run more backwards
    draws: bool = False  # random numbers were drawn between the first forward and the last traced step
    missing: str = ""  # why a quantity was not seen
    holds_frozen: bool = False  # ZeRO's optimizer held parameters that were frozen in a step
    clips_at: float = 0.0  # limit of torch's clipping that the script calls between backward and step; 0 without a call
    # projections of sampled weights before the first step, divided by the root of their sum of squares; empty if unknown
    initial: tuple[float, ...] = ()
    ahead: tuple[tuple[float, float], ...] = ()  # lowest and highest learning rate in the intervals of `AHEAD`
    epoch_steps: float = 0.0  # optimizer steps of an epoch, by the length of the loader that feeds them; 0 if unknown
    # optimizer steps that the script's loop makes, by condition that ends it, with its place
    loop_ends: dict[str, float] = field(default_factory=dict)
    # relative difference between two runs of the user's own config, by quantity; only in the trace of the probe run
    floor: dict[str, float] = field(default_factory=dict)
    # traces of auxiliary engines with an optimizer, in the order in which they were made; without steps if one made none
    auxiliary: tuple[TrainingTrace, ...] = ()

    @property
    def counted(self) -> list[TracedStep]:
        """Steps in which the optimizer ran."""
        return [step for step in self.steps if not step.skipped]

    @property
    def iterations(self) -> int:
        """Iterations of the script's loop per optimizer step; 0 if nothing was traced."""
        return statistics.mode(step.micro_batches for step in self.steps) if self.steps else 0

    @classmethod
    def merged(cls, ranks: Sequence[Mapping[str, Any] | None]) -> TrainingTrace | None:
        """Merge the reports of all ranks (`rank.training_trace.TraceRecorder.report`); None if a rank has none."""
        told = [one for one in ranks if one and one["steps"]]
        if not told or len(told) < len(ranks):
            return None
        return cls.from_json(_reduced(told, _OF_RANKS))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainingTrace:
        """Read the output of `dataclasses.asdict`; fields of a newer version are dropped."""
        known = {name: _frozen(value) for name, value in known_fields(cls, data).items()}
        known["steps"] = tuple(TracedStep(**_frozen(known_fields(TracedStep, step))) for step in known["steps"])
        known["auxiliary"] = tuple(map(cls.from_json, known.get("auxiliary", ())))
        return cls(**known)


def _frozen(value: Any) -> Any:
    """Return JSON data with tuples in place of lists."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return {name: _frozen(one) for name, one in value.items()} if isinstance(value, dict) else value


# -- merging -----------------------------------------------------------------------------------------------------------
#
# Reports of all ranks: the first rank's values, except where a function of all ranks' values is named.


def _reduced(ranks: Sequence[Mapping[str, Any]], functions: Mapping[str, Callable[[list[Any]], Any]]) -> dict[str, Any]:
    """Return one report for those of all ranks. None stands for what no rank has seen."""
    found = dict.fromkeys(ranks[0])
    for name in found:
        if values := [one[name] for one in ranks if one[name] is not None]:
            found[name] = functions.get(name, operator.itemgetter(0))(values)
    return found


def _change(ranks: Sequence[tuple[float, int]]) -> float | None:
    """Return the root of the mean square change of elements that lie on several ranks; None if none was seen.

    Args:
        ranks: (sum of squares, elements) of each rank.
    """
    squares, elements = map(math.fsum, zip(*ranks, strict=True))
    return math.sqrt(squares / elements) if elements else None


def _initial(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Merge the projections of all ranks, which hold parts of the weights or copies of all."""
    if not all(ranks):
        return []
    square, elements, _, *projections = (math.fsum(each) for each in zip(*ranks, strict=True))
    copies = elements / ranks[0][2] if ranks[0][2] else 0.0
    if not copies or not copies.is_integer() or not square:  # some parts were not seen
        return []
    return [one / copies / math.sqrt(square / copies) for one in projections]


_OF_STEPS: dict[str, Callable[[list[Any]], Any]] = {
    "rows": sum,
    "digest": math.fsum,
    "loss": statistics.fmean,
    "gradient_norm": max,
    "update": _change,
    "buffers": _change,
    "changed_by_hand": max,
    "outside_steps": max,
}
_OF_RANKS: dict[str, Callable[[list[Any]], Any]] = {
    "steps": lambda runs: [_reduced(step, _OF_STEPS) for step in zip(*runs, strict=False)],
    "draws": any,
    "missing": max,
    "holds_frozen": any,
    "clips_at": max,
    "initial": _initial,
    "auxiliary": lambda engines: [_reduced(ranks, _OF_RANKS) for ranks in zip(*engines, strict=False)],
}
