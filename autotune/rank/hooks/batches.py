"""Measure a batch: its sizes from a DeepSpeed config, its sequences and tokens from tensors; pad it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import Unusable

_BORDERS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens", "cu_seqlens_q")  # borders of concatenated sequences
_FROM_ZERO = ("ptr", *_BORDERS)  # one more entry than samples; the first name is of PyTorch Geometric's graphs
_CHANNELS = (1, 3, 4)  # channels of an image
_VALUED = ("position_ids", *_BORDERS)  # tensors whose values matter in addition to their shapes
_MOST_KNOWN = 1024
_FILLERS = {"labels": -100, "attention_mask": 1}  # padding is attended to, without a loss; others take 0


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


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], counted_by: str | None = None) -> Sizes:
    """Return the sizes of a batch from a forward's arguments, or zeros if they hold no tensor.

    Tensors are found in nested lists, mappings and objects. Sequences of packed rows begin at zeros of `position_ids`,
    or at borders in the format of flash attention.

    Args:
        counted_by: name in `rows_by_name` of the tensor that counts the rows; without that tensor there are none.
    """
    key = None if args else _shapes(kwargs)
    if key is None:
        return _counted(args, kwargs, counted_by)
    if (known := _known.get((counted_by, key))) is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[counted_by, key] = _counted(args, kwargs, counted_by)
    return known


# Cache by the key of `_shapes`. Training evicts this code from the processor's caches: counting a batch of
# `tiny-gemma-2` took 85 us in a training and 10 us in a separate loop.
_known: dict[tuple[str | None, tuple[Any, ...]], Sizes] = {}


def _shapes(kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the key of a batch with only tensors whose values do not matter, or None for any other."""
    import torch

    found = []
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _VALUED:
            found.append((name, value.shape, value.dtype))
        elif value is not None and not isinstance(value, bool):
            return None
    return tuple(found)


def _counted(args: tuple[Any, ...], kwargs: dict[str, Any], counted_by: str | None) -> Sizes:
    """Return the sizes of a batch that is not in the cache."""
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
    """Return the sizes by `input_ids`, or by the first tensor."""
    import torch

    first = named.get("input_ids", next(iter(named.values())))
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


def _leaves(value: Any, name: str = "", depth: int = 5) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of all tensors with at least one dimension. A list of samples counts as one tensor."""
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
    """Return True if a list holds samples, in contrast to parts of a batch.

    Samples are vectors of different lengths, features of different lengths, or images with channels first.
    """
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
    """Return a forward's arguments with all (rows, tokens) tensors padded to `longest` tokens.

    Padding is computed like all other tokens.

    Raises:
        Unusable: `longest` is 0 (the maximum length is unknown), or the batch cannot be padded.
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
