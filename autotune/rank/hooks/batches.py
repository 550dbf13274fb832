"""What a batch holds: its sizes from a DeepSpeed config, its sequences and tokens from tensors, and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import Unusable

_BORDERS = (
    "cu_seq_lens_q",
    "cu_seqlens",
    "cu_seq_lens",
    "cu_seqlens_q",
)  # where sequences laid end to end begin, and end
_FROM_ZERO = ("ptr", *_BORDERS)  # one more than there are samples; the first is of PyTorch Geometric's graphs
_CHANNELS = (1, 3, 4)  # of an image
_VALUED = ("position_ids", *_BORDERS)  # whose values count, not their shapes alone
_MOST_KNOWN = 1024
_FILLERS = {"labels": -100, "attention_mask": 1}  # padding is attended to and not learnt from; all else is padded by 0


def batch_of(config: dict[str, Any], ranks: int) -> tuple[int, int] | None:
    """(micro-batch, accumulation) of a DeepSpeed config. Any two of its three batch sizes decide the third; None where it
    says too little (deepspeed 0.19.8, runtime/config.py, `_set_batch_related_parameters`)."""
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
    """What one forward is given: rows of its tensors, the sequences in them, and tokens."""

    rows: int = 0
    sequences: int = 0  # more than rows where they are packed
    tokens: int = 0
    packed: bool = False  # one row, of sequences laid end to end and told apart
    rows_by_name: dict[str, int] = field(default_factory=dict)  # of all tensors


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], counted_by: str | None = None) -> Sizes:
    """Of a batch, from a forward's arguments; zeros where no tensor is among them, however deep in lists, mappings and
    objects.

    The sequences of packed rows start where `position_ids` are 0, or are said by borders, as flash attention takes them.

    Args:
        counted_by: a name of `rows_by_name`: the rows are those of this tensor, and none where there is no such.
    """
    key = None if args else _shapes(kwargs)
    if key is None:
        return _counted(args, kwargs, counted_by)
    if (known := _known.get((counted_by, key))) is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[counted_by, key] = _counted(args, kwargs, counted_by)
    return known


# By what `_shapes` says. Training leaves nothing of ours in the processor's caches: to count a batch of `tiny-gemma-2`
# took 85 us in a training, and 10 in a loop of its own.
_known: dict[tuple[str | None, tuple[Any, ...]], Sizes] = {}


def _shapes(kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Of a batch that holds nothing but tensors of which no value counts; None of any other."""
    import torch

    found = []
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _VALUED:
            found.append((name, value.shape, value.dtype))
        elif value is not None and not isinstance(value, bool):
            return None
    return tuple(found)


def _counted(args: tuple[Any, ...], kwargs: dict[str, Any], counted_by: str | None) -> Sizes:
    """What `sizes_of` says of a batch that is not known."""
    named: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for name, leaf in _leaves([*args, kwargs]):
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = leaf
    if not named:
        return Sizes()
    found = replace(_sizes(named), rows_by_name={name: _rows(name, leaf) for name, leaf in named.items()})
    if counted_by is None:
        return found
    rows = found.rows_by_name.get(counted_by, 0)
    return replace(found, rows=rows, sequences=rows)


def _rows(name: str, leaf: Any) -> int:
    return max(0, len(leaf) - (name in _FROM_ZERO))


def _sizes(named: dict[str, Any]) -> Sizes:
    """By `input_ids`, or the first tensor."""
    import torch

    first = named.get("input_ids", next(iter(named.values())))
    if isinstance(first, list):  # sequences of unlike lengths, or images, one by one
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
        sequences = int((borders.diff() > 0).sum())  # some pad them with their last
    elif isinstance(positions, torch.Tensor) and positions.shape == first.shape:
        sequences = int((positions == 0).sum())
    else:
        told_apart = False
    return Sizes(rows, max(rows, sequences), tokens, packed=told_apart and rows == 1)


def _leaves(value: Any, name: str = "", depth: int = 5) -> Iterator[tuple[str, Any]]:
    """(name, tensor of one dimension or more) of all in a value; a list of samples, one by one, is one leaf."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, torch.nn.Module | str | bytes) or not depth:
        return
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, str(key), depth - 1)
    elif isinstance(value, list | tuple):
        if _are_samples(value):
            yield name, list(value)
            return
        for inner in value:
            yield from _leaves(inner, name, depth - 1)
    elif hasattr(value, "__dict__"):  # a batch of the script's own class
        yield from _leaves(vars(value), name, depth - 1)


def _are_samples(values: Sequence[Any]) -> bool:
    """Whether a list is of samples and not of a batch's parts: vectors of unlike lengths, features of unlike lengths, or
    images, channels first."""
    import torch

    if not values or not all(isinstance(one, torch.Tensor) for one in values):
        return False
    shapes = [tuple(one.shape) for one in values]
    if {len(shape) for shape in shapes} == {1}:
        return len(set(shapes)) > 1
    if not all(one.is_floating_point() for one in values):
        return False
    if {len(shape) for shape in shapes} == {2}:
        return len({shape[0] for shape in shapes}) > 1 and len({shape[1] for shape in shapes}) == 1
    channels = {shape[0] for shape in shapes}
    return {len(shape) for shape in shapes} == {3} and len(channels) == 1 and channels <= set(_CHANNELS)


def padded(args: tuple[Any, ...], kwargs: dict[str, Any], longest: int) -> dict[str, Any]:
    """A forward's arguments with every tensor of the shape (rows, tokens) of `input_ids` padded to `longest` tokens; the
    padding is computed like all else.

    Raises:
        Unusable: `longest` is 0 (nothing says how long a batch may be), or the batch is not one that can be padded.
    """
    import torch

    ids = kwargs.get("input_ids")
    if args or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or "position_ids" in kwargs:
        raise Unusable(
            "--worst-case: the script's batches cannot be padded (expected input_ids of two dimensions, "
            "given by name, not packed): leave it out"
        )
    if not longest:
        raise Unusable(
            "--worst-case: neither max_length, a tokenizer nor the model's configuration says how long a "
            "batch may be: leave it out"
        )
    found = dict(kwargs)
    missing = longest - ids.shape[1]
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape and missing > 0:
            found[name] = torch.nn.functional.pad(value, (0, missing), value=_FILLERS.get(name, 0))
    return found
