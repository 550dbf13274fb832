"""The tensor for which memory ran out: a row of `data/explanations.json`, by the stack and by its size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.explain.log import LoggedFailure
from autotune.explain.training import Training, data
from autotune.problem.outcome import Phase
from autotune.util.units import MIB, format_bytes

LOADING, INITIALIZATION, STEPPING = "loading the model", "initialization", "a step"
_PHASES: dict[Phase | None, str] = {
    Phase.INIT: INITIALIZATION,
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.STEP: "the optimizer's step",
}


def place_of(failure: LoggedFailure) -> str:
    """Return the part of a training in which it failed, or an empty text."""
    return _first("places", ["\n".join(failure.frames)]) or _PHASES.get(failure.phase, "")


def progress_of(failure: LoggedFailure) -> str:
    """Return what the lines before a failure show last: a place or a step; empty if they do not tell."""
    return _first("progress", reversed(failure.before))


def _first(kind: str, texts: Iterable[str]) -> str:
    found = (place for text in texts for place, pattern in data()[kind].items() if re.search(pattern, text))
    return next(found, "")


@dataclass(frozen=True)
class Tensor:
    """Kind of tensor that DeepSpeed, torch or a model allocates at once."""

    name: str
    places: Sequence[str]
    frames: str  # pattern of its innermost frames; empty: of any
    sizes: Sequence[str] = ()  # keys of `sizes`
    stages: Sequence[int] = range(-1, 4)  # -1: DeepSpeed is not in use
    remedy: str = ""  # the change that helps, and its cost; empty: what the memory table finds
    of_batch: bool = False  # its size depends on the batch
    per_token: str = ""  # size in the model's configuration that each token takes 4 bytes of
    before_batch: bool = False  # True if it exists before any batch, or in each step whatever the batch
    of_optimizer: bool = False  # True if it is on the host when the optimizer is offloaded

    def possible(self, training: Training, place: str) -> bool:
        """Check that a training at this place may allocate it."""
        own = training.candidate
        offloaded = self.of_optimizer and own.offload_optimizer != "none"
        stage = own.stage - (not training.config)  # -1 without DeepSpeed
        return stage in self.stages and not offloaded and (not place or place in self.places)


@dataclass(frozen=True)
class FoundTensor:
    """A tensor that explains an allocation."""

    tensor: Tensor
    asked_bytes: int
    formula: str  # formula of its size; empty: only the stack names the tensor

    def __str__(self) -> str:
        if not self.formula:
            return self.tensor.name
        return f"{format_bytes(self.asked_bytes)} = {self.formula}: {self.tensor.name}"


# -- sizes -------------------------------------------------------------------------------------------------------------

_LENGTHS = tuple(2**power for power in range(9, 16))  # usual tokens of a row

# The next four move with the counts of tests/results/test_explanation.py.
_SEGMENT_BYTES = 2 * MIB  # torch asks for a multiple of it on GPUs, from five times as much on
_ROUNDED = 0.002  # share, at most: figures have three digits or more
_PADDED = 0.01  # share of a flat tensor that is padding, or weights that the model's shape does not tell
_NOMINAL = 0.12  # share by which the number in a name differs: "7B" is 6.2 to 7.8 billion


def find_tensor(failure: LoggedFailure, training: Training) -> FoundTensor | None:
    """Return the tensor that asked for the memory: by the size that the training gives it, then by its stack."""
    asked, place = failure.snapshot.asked, place_of(failure)
    if asked is None:
        return None
    inner = "\n".join(failure.frames[-INNERMOST:])
    found: list[tuple[int, FoundTensor]] = []
    for tensor in (Tensor(**row) for row in data()["tensors"]):
        if not tensor.possible(training, place):
            continue
        by_stack = bool(tensor.frames and re.search(tensor.frames, inner))
        formula = _formula(tensor, training, asked)
        certain = 3 - (tensor.of_batch and not training.tokens)  # a usual number of tokens may fit by chance
        score = 2 * by_stack + certain * bool(formula)
        width = training.counts(0).get(tensor.per_token)
        if by_stack and width and not formula:
            formula = f"{asked // (4 * width):,} tokens x {width:,} x 4 bytes"
        if by_stack or formula or (place and not tensor.frames):
            found.append((score, FoundTensor(tensor, asked, formula)))
    return max(found, key=lambda scored: scored[0], default=(0, None))[1]


INNERMOST = 6  # frames that name a tensor


def _formula(tensor: Tensor, training: Training, asked: int) -> str:
    """Return the formula whose size is what was asked for; empty if there is none."""
    segment = _SEGMENT_BYTES * (asked > 5 * _SEGMENT_BYTES)
    for row in itertools.chain.from_iterable(data()["sizes"][kind] for kind in tensor.sizes):
        for tokens, width in itertools.product(training.lengths(_LENGTHS), row["widths"]):
            known = {**training.counts(tokens), "width": width}
            factors: list[Any] = [known.get(name) for name in row["factors"]]
            padded = _NOMINAL if training.nominal and "parameters" in row["factors"] else _PADDED
            error = _ROUNDED + padded * (not tensor.of_batch)
            if None not in factors and asked * (1 - error) - segment <= width * math.prod(factors) <= asked * (
                1 + error
            ):
                return str(row["text"].format_map(known))
    return ""
