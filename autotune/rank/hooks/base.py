"""Shared parts of hooks: context, training observer, patch registry, batch sizes."""

from __future__ import annotations

import datetime
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.problem.candidate import COMPILED, Candidate, Value
from autotune.problem.job import Job, Script
from autotune.problem.outcome import Phase
from autotune.rank.patches import Patches
from autotune.rank.sandbox import Sandbox
from autotune.rank.training_trace import TraceRecorder


class TrainingObserver:
    """Observer of the script's training, which ignores all events. Every method is called on every rank."""

    def configured(self, config: dict[str, Any]) -> None:
        """Receive the script's own DeepSpeed config without a candidate's keys.

        Called again if the engine that trains has another config than the first one seen.
        """

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        """Receive the script's batch before memory can run out.

        Args:
            micro_batch: sequences per forward.
            accumulation: micro-batches per optimizer step.
            optimizer: kind of the script's own optimizer, see `deepspeed.kind_of`.
        """

    def engine_built(self) -> None:
        """Note that an engine was built, for training or not: its memory is allocated."""

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """Receive the engine that trains, and its facts (`deepspeed.engine_facts`).

        Called again if another engine turns out to be the one that trains (`hooks.deepspeed`). All earlier observations
        are then void.
        """

    def forward(self, sizes: Sizes) -> None:
        """Receive the sizes of a forward with gradients when it begins.

        A forward in evaluation mode is reported when its backward begins.
        """

    def entered(self, phase: Phase) -> None:
        """Note the beginning of INIT, FORWARD, BACKWARD or STEP. A backward may be reported more than once."""

    def stepped(self) -> None:
        """Note the end of an optimizer step."""

    def auxiliary_stepped(self, number: int, rows: int) -> None:
        """Note an optimizer step of auxiliary engine `number`, made after the one that trains, on `rows` rows."""

    def resized(self) -> None:
        """Note that the script changes the batch of its engine during the training."""

    def failed(self, error: BaseException) -> None:
        """Receive an exception of the engine, its construction, or an observation (`Unusable`).

        The script may catch it, so failures that decide a trial are reported here.
        """

    def op_missing(self, builder: str) -> None:
        """Note that the script will load a DeepSpeed op that this environment has not built. Return to allow it."""

    def no_engine_found(self) -> None:
        """Note that the script trains without any DeepSpeed engine."""


# -- context -----------------------------------------------------------------------------------------------------------
#
# State shared by the hooks of one rank.


@dataclass
class VariableRead:
    """Reads of a variable in a probe run."""

    value: str | None  # before the script ran; None if it was not set
    text: str = ""  # value that the last read gave, or its default


@dataclass(eq=False)
class OtherEngine:
    """Engine with an optimizer that was made after the current choice, and may turn out to be the one that trains."""

    engine: Any
    config: dict[str, Any]  # the script's own
    optimizer: Any  # optimizer that the script made itself, or None
    late: bool  # True if the current choice had stepped before this one was made
    trace: TraceRecorder
    steps: int = 0  # in a row
    rows: int = 0  # since its last step


@dataclass
class Context:
    """Task of one rank's hooks, and their observations so far."""

    job: Job
    candidate: Candidate | None  # None keeps the script's own settings
    watcher: TrainingObserver
    device: str  # `cpu` or `cuda`
    folder: Path  # for merged configs and copies of argument files
    quiet: bool  # True in a measurement: no checkpoints, evaluations, trackers and uploads
    patches: Patches = field(default_factory=Patches)
    sandbox: Sandbox | None = None  # sandbox of a trial; None in a training
    trace: TraceRecorder = field(
        default_factory=lambda: TraceRecorder(most_steps=0)
    )  # samples of the first optimizer steps

    join: Callable[[str], None] | None = None  # joins the rank's process group; None: it has joined
    collective_timeout: datetime.timedelta = datetime.timedelta()  # timeout of the process group
    engine: Any = None  # the DeepSpeed engine that trains, once it is built
    inside: Phase | None = None  # method of that engine that is running
    module_hook: Any = None  # handle of the hook on its module
    pending: list[Sizes] = field(default_factory=list)  # forwards in evaluation mode since the last backward
    own_config: dict[str, Any] | None = None  # the script's first config, as reported to the watcher
    through_arguments: bool = False  # True if TrainingArguments carry the batch sizes
    averages_by_rank: bool = False  # True if Trainer averages a loss over each rank's own tokens
    levers: set[str] = field(default_factory=lambda: {COMPILED})  # those that the script has off
    accelerated: bool = False  # True if accelerate makes the engine that trains
    loader_prepared: bool = False  # True if accelerate has prepared the script's own loader
    loader_split: bool = False  # True if accelerate splits that loader's batches over the ranks
    trainer_silent: bool = False  # True if transformers' Trainer is kept from resuming, evaluating and saving
    zero_init: bool = False  # True if the script's own code builds its model under `deepspeed.zero.Init`
    relaunched: int = 0  # number of ranks that the script would have started; 1 if unknown
    flags: set[str] = field(default_factory=set)  # flags of `script.script.FLAGS` that the script's parsers have
    spellings: dict[str, list[str | None]] = field(default_factory=dict)  # flag -> [no, yes], see `hooks.config`
    integers: dict[str, int] = field(default_factory=dict)  # positive integers of the script's parsers, by flag
    said: dict[str, list[int]] = field(default_factory=dict)  # values in the script's arguments and loaders, by knob
    beside: list[OtherEngine] = field(default_factory=list)  # made after the one that trains
    earlier: list[Any] = field(default_factory=list)  # engines made before the one that trains, see `hooks.deepspeed`
    trained: bool = False  # True once the engine that trains has had a backward
    trained_steps: int = 0  # optimizer steps of the engine that trains
    unsynced: bool = False  # True if the script sums gradients under that engine's `no_sync`
    # accelerate's configs, and their original contents
    plugins: list[tuple[weakref.ref[Any], dict[str, Any]]] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # configs opened in a probe run, see `hooks.source_files`
    # variables that were read in a probe run, by name, see `hooks.environment`
    variables: dict[str, VariableRead] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # configs that the script wrote in a probe run
    loader_tokens: int = 0  # tokens of the longest row that a loader has given
    allowed_tokens: list[int] = field(default_factory=list)  # limits of arguments and tokenizers
    largest: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key of a data set, see `hooks.worst_case`
    scanned: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)  # same, by loader
    unread: str = "a stream"  # reason for which the samples of a data set cannot be read by number

    @property
    def script(self) -> Script:
        """Return the job's script."""
        assert self.job.script is not None
        return self.job.script

    @property
    def knobs(self) -> dict[str, Value]:
        """Knobs of the candidate; empty without one."""
        return (self.candidate or Candidate(())).as_dict

    @property
    def batch(self) -> tuple[int, int] | None:
        """(micro-batch, accumulation) that the script's engines must use; None keeps its own."""
        if self.candidate is None or self.script.holds_batch:
            return None
        return self.candidate.engine_batch(self.script.profile)

    @property
    def traces(self) -> list[tuple[Any, TraceRecorder]]:
        """The engine that trains and those made after it, each with its recorder."""
        return [(self.engine, self.trace), *((one.engine, one.trace) for one in self.beside)]

    def report(self) -> dict[str, Any]:
        """Return the report of the engine that trains, with those of the engines made after it."""
        found, *auxiliary = (trace.report() for _, trace in self.traces)
        return {**(found or {}), "auxiliary": auxiliary}

    def note_said(self, knob: str, value: Any) -> None:
        """Record a batch size from any source in the script. Other values are ignored."""
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        known = self.said.setdefault(knob, [])
        if isinstance(number, int) and not isinstance(number, bool) and number > 0 and number not in known:
            known.append(number)


# -- batch sizes -------------------------------------------------------------------------------------------------------
#
# Measure a batch: its sizes from a DeepSpeed config, its sequences and tokens from tensors.

_BORDERS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens", "cu_seqlens_q")  # borders of concatenated sequences
_FROM_ZERO = ("ptr", *_BORDERS)  # one more entry than samples; PyTorch Geometric's graphs use the first name
_CHANNELS = (1, 3, 4)  # channels of an image


def batch_of(config: dict[str, Any], ranks: int) -> tuple[int, int] | None:
    """Return (micro-batch, accumulation) of a DeepSpeed config, or None if it is incomplete.

    Any two of the three batch sizes determine the third. Source: deepspeed 0.19.8, runtime/config.py,
    `_set_batch_related_parameters`.
    """
    micro, steps, total = (
        value if isinstance(value := config.get(key), int) and value > 0 else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    if micro is None and total is None:
        return None
    if micro is None:
        micro = max(1, (total or 1) // (steps or 1) // ranks)
    if steps is None:
        steps = max(1, total // micro // ranks) if total else 1
    return micro, steps


@dataclass(frozen=True)
class Sizes:
    """Sizes of one forward's arguments: rows of tensors, sequences in them, and tokens."""

    rows: int = 0
    sequences: int = 0  # more than rows if rows are packed
    tokens: int = 0
    packed: bool = False  # one row of concatenated, separable sequences
    rows_by_name: dict[str, int] = field(default_factory=dict)  # rows of each tensor
    tensor: Any = field(default=None, compare=False)  # counts the rows


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], counted_by: str = "") -> Sizes:
    """Return the sizes of a batch from a forward's arguments, or zeros if they hold no tensor.

    Tensors are found in nested lists, mappings and objects. Sequences of packed rows begin at zeros of `position_ids`,
    or at borders in the format of flash attention.

    Args:
        counted_by: name in `rows_by_name` of the tensor that counts the rows; without that tensor there are none.
    """
    named: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for name, leaf in leaves([*args, kwargs]):
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = leaf
    if not named:
        return Sizes()
    counts = {name: max(0, len(leaf) - (name in _FROM_ZERO)) for name, leaf in named.items()}
    first = named.get("input_ids", next(iter(named.values())))
    found = replace(_sizes(first, named), rows_by_name=counts, tensor=first)
    if not counted_by:
        return found
    rows = counts.get(counted_by, 0)
    return replace(found, rows=rows, sequences=rows)


def _sizes(first: Any, named: dict[str, Any]) -> Sizes:
    """Return the sizes by `input_ids`, or by the first tensor."""
    import torch

    if isinstance(first, list):  # a list of sequences of different lengths, or of images
        tokens = sum(int(one.numel()) if not one.is_floating_point() else 1 for one in first)
        return Sizes(len(first), len(first), tokens)
    positions = named.get("position_ids")
    borders = next((named[name] for name in _BORDERS if isinstance(named.get(name), torch.Tensor)), None)
    if borders is not None and first.dim() == 1:
        first = first[None]
    rows = int(first.shape[0])
    tokens = int(first.numel()) if first.dim() == 2 and not first.is_floating_point() else rows
    sequences, told_apart = rows, True
    if borders is not None:
        sequences = int((borders.diff() > 0).sum())  # some libraries pad borders with the last one
    elif isinstance(positions, torch.Tensor) and positions.shape == first.shape:
        sequences = int((positions == 0).sum())
    else:
        told_apart = False
    return Sizes(rows, max(rows, sequences), tokens, packed=told_apart and rows == 1)


def leaves(value: Any, name: str = "", depth: int = 5) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of all tensors with at least one dimension. A list of samples counts as one tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, torch.nn.Module | str | bytes) or not depth:
        return
    elif isinstance(value, Mapping):
        columns = _are_columns(value)
        for key, inner in value.items():
            if columns and isinstance(inner[0], torch.Tensor):
                yield str(key), list(inner)
            else:
                yield from leaves(inner, str(key), depth - 1)
    elif isinstance(value, list | tuple):
        if _are_samples(value):
            yield name, list(value)
            return
        for inner in value:
            yield from leaves(inner, name, depth - 1)
    elif hasattr(value, "__dict__"):  # a batch of the script's own class
        yield from leaves(vars(value), name, depth - 1)


def _are_columns(value: Mapping[Any, Any]) -> bool:
    """Return True if a mapping holds columns of a batch: several lists of one length, a list of texts among them."""
    lists = list(value.values())
    if len(lists) < 2 or not all(isinstance(one, list | tuple) and one for one in lists):
        return False
    return len({len(one) for one in lists}) == 1 and any(all(isinstance(i, str) for i in one) for one in lists)


def _are_samples(values: Sequence[Any]) -> bool:
    """Return True if a list holds samples, in contrast to parts of a batch.

    Samples are vectors of different lengths, features of different lengths, or images with channels first.
    """
    import torch

    if not values or not all(isinstance(one, torch.Tensor) for one in values):
        return False
    shapes = [tuple(one.shape) for one in values]
    sizes = [set(each) for each in zip(*shapes, strict=False)]  # by dimension
    dimensions = {len(shape) for shape in shapes}
    if dimensions == {1}:
        return len(sizes[0]) > 1
    if not all(one.is_floating_point() for one in values):
        return False
    if dimensions == {2}:
        return len(sizes[0]) > 1 and len(sizes[1]) == 1
    return dimensions == {3} and len(sizes[0]) == 1 and sizes[0] <= set(_CHANNELS)
