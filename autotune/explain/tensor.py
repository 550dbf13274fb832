"""The tensor for which memory ran out: a row of `data/explanations.json`, by the stack and by its size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from autotune.explain.log import LoggedFailure
from autotune.explain.training import Training
from autotune.problem.candidate import ZERO_DEFAULTS, knobs_of
from autotune.problem.outcome import Phase
from autotune.util.files import shipped_json
from autotune.util.units import MIB, format_bytes, format_count

LOADING, INITIALIZATION = "loading the model", "initialization"
_PHASES = {
    Phase.INIT: INITIALIZATION,
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.STEP: "the optimizer's step",
}


@cache
def data() -> dict[str, Any]:
    """Return `data/explanations.json`."""
    return dict(shipped_json("explanations.json"))


def place_of(failure: LoggedFailure) -> str:
    """Return the part of a training in which it failed, or an empty text."""
    stack = "\n".join(failure.frames)
    found = (place for place, pattern in data()["places"].items() if re.search(pattern, stack))
    return next(found, _PHASES.get(failure.phase, "") if failure.phase else "")


@dataclass(frozen=True)
class Tensor:
    """Kind of tensor that DeepSpeed, torch or a model allocates at once."""

    name: str
    places: Sequence[str]
    frames: str  # pattern of its innermost frames; empty: of any
    size: str  # key of `_SIZES`; empty: unknown
    stages: Sequence[int] = range(-1, 4)  # -1: DeepSpeed is not in use
    remedy: str = ""  # the change that helps, and its cost; empty: what the memory table finds
    of_batch: bool = False  # its size depends on the batch
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

    @property
    def size_text(self) -> str:
        """Return its size and the formula."""
        return f"{format_bytes(self.asked_bytes)} = {self.formula}"

    def __str__(self) -> str:
        return f"{self.size_text}: {self.tensor.name}" if self.formula else self.tensor.name


# -- sizes -------------------------------------------------------------------------------------------------------------

Sizes = Iterator[tuple[float, str]]  # possible (bytes, formula)
_LENGTHS = tuple(2**power for power in range(9, 16))  # usual tokens of a row


def _counted(widths: Iterable[int], text: str, *factors: int | None) -> Sizes:
    """Yield the bytes of a tensor of these factors for each width of an element; nothing if a factor is unknown."""
    known = [factor for factor in factors if factor is not None]
    for width in widths if len(known) == len(factors) else ():
        yield width * math.prod(known), f"{text.format(*known)} x {width} bytes"


def _whole(training: Training, widths: Iterable[int]) -> Sizes:
    """Yield the bytes of all trained parameters."""
    count = training.of_optimizer
    kind = "trained parameters" if training.trained else "parameters"
    yield from _counted(widths, f"{format_count(count or 0).strip()} {kind}", count)


def _share(training: Training, width: int) -> Sizes:
    """Yield the bytes of what a rank steps: its share of the trained parameters from stage 1 on, or all of them."""
    ranks = training.ranks or 1
    for size, text in _whole(training, (width,)):
        divided = training.candidate.stage > 0 and ranks > 1
        yield (size / ranks, f"{text} / {ranks} ranks") if divided else (size, text)


def _bucket(training: Training) -> Sizes:
    size = knobs_of(training.config).get("reduce_bucket_size", ZERO_DEFAULTS["reduce_bucket_size"])
    hidden = training.size("hidden_size")
    yield from _counted((2, 4), "reduce_bucket_size {:,}", int(size))
    yield from _counted((2, 4), "reduce_bucket_size of hidden size² = {0:,}²", hidden, hidden)  # transformers' "auto"


def _weights(training: Training) -> Sizes:
    hidden, inner = training.size("hidden_size"), training.size("intermediate_size")
    yield from _counted((2, 4), "embedding or head of {:,} words x {:,}", training.size("vocab_size"), hidden)
    yield from _counted((2, 4), "a layer's matrix of {:,} x {:,}", inner, hidden)
    yield from _counted((2, 4), "a layer's matrix of {:,} x {:,}", hidden, hidden)


def _of_tokens(training: Training, text: str, key: str) -> Sizes:
    """Yield the bytes of a tensor with an element for each token and each of the sizes `key`."""
    for tokens in training.lengths(_LENGTHS):
        yield from _counted((4, 2), text, training.micro_batch or 1, tokens, training.size(key))


def _scores(training: Training) -> Sizes:
    heads, rows = training.size("num_attention_heads"), training.micro_batch or 1
    for tokens in training.lengths(_LENGTHS):
        yield from _counted((2, 4), "{} x {} heads x {:,} x {:,} tokens", rows, heads, tokens, tokens)


_SIZES: dict[str, Callable[[Training], Sizes]] = {
    "bucket": _bucket,
    "share of 4 bytes": partial(_share, width=4),
    "share of 2 bytes": partial(_share, width=2),
    "copy of 2 bytes": partial(_whole, widths=(2,)),
    "copy": partial(_whole, widths=(2, 4)),
    "weights": _weights,
    "logits": partial(_of_tokens, text="{} x {:,} tokens x {:,} words", key="vocab_size"),
    "inner": partial(_of_tokens, text="{} x {:,} tokens x {:,}", key="intermediate_size"),
    "scores": _scores,
}
_OF_PARAMETERS = ("copy", "copy of 2 bytes", "share of 4 bytes", "share of 2 bytes")

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
    inner = "\n".join(failure.frames[-_INNERMOST:])
    found: list[tuple[int, FoundTensor]] = []
    for tensor in (Tensor(**row) for row in data()["tensors"]):
        if not tensor.possible(training, place):
            continue
        by_stack = bool(tensor.frames and re.search(tensor.frames, inner))
        formula = _formula(tensor, training, asked)
        if by_stack or formula or (place and not tensor.frames):
            found.append((2 * by_stack + 3 * bool(formula), FoundTensor(tensor, asked, formula)))
    return max(found, key=lambda scored: scored[0], default=(0, None))[1]


_INNERMOST = 6  # frames that name a tensor


def _formula(tensor: Tensor, training: Training, asked: int) -> str:
    """Return the formula whose size is what was asked for; empty if there is none."""
    error = _NOMINAL if training.nominal and tensor.size in _OF_PARAMETERS else _PADDED
    error = _ROUNDED + error * (not tensor.of_batch)
    for size, text in _SIZES[tensor.size](training) if tensor.size else ():
        if asked * (1 - error) - _SEGMENT_BYTES * (asked > 5 * _SEGMENT_BYTES) <= size <= asked * (1 + error):
            return text
    return ""
