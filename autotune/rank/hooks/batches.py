"""What a batch holds: its sizes from a DeepSpeed config, its sequences and tokens from tensors, and padding."""

from __future__ import annotations

from typing import Any

from autotune.errors import Unusable

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


def rows_and_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of a batch, from a forward's arguments; (0, 0) where no tensor is among them.

    A packed batch is one long row; its sequences start where `position_ids` are 0.
    """
    import torch

    inputs = [*args, *kwargs.values()]
    for value in inputs:
        if isinstance(value, dict):
            return rows_and_tokens((), value)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 0]
    if not tensors:
        return 0, 0
    first = kwargs.get("input_ids")
    first = first if isinstance(first, torch.Tensor) else tensors[0]
    rows = int(first.shape[0])
    tokens = int(first.numel()) if first.dim() == 2 and not first.is_floating_point() else rows
    positions = kwargs.get("position_ids")
    if rows == 1 and isinstance(positions, torch.Tensor):
        rows = max(1, int((positions == 0).sum()))
    return rows, tokens


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
