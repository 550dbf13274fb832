"""Model and batches of a rank without a script.

The source is a named model with random weights and synthetic batches, or the model and batches that a function of the
user returns (`--workload package.module:function`).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.rank.building import DTYPES, build_model
from autotune.rank.synthetic import synthetic_batches, to_device

Batch = Any  # a dict of keyword arguments of the model's forward, or a tuple of positional ones
Source = Callable[[int, torch.device, int], Iterator[Batch]]  # arguments: micro-batch, device, seed


def load_builder(reference: str) -> Callable[[], Any]:
    """Import the function `package.module:function`, with the current folder on the path.

    Raises:
        ValueError: there is no such function.
    """
    name, colon, function = reference.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"{reference}: expected package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(name), function, None)
    except ImportError as error:
        raise ValueError(f"{reference}: {error}") from None
    if not callable(found):
        raise ValueError(f"{reference}: {name} has no function {function}")
    return found  # type: ignore[no-any-return]


def own_workload(reference: str) -> tuple[torch.nn.Module, Callable[[int], Any]]:
    """Call the user's function.

    Returns:
        A model, and a function from a micro-batch size to an iterable of batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    made = load_builder(reference)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise ValueError(
            f"{reference}: expected it to return (model, batches), where batches(micro_batch) gives an "
            "iterable of the forward's arguments"
        )
    return made


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss in a forward's result: its `loss`, the first of a tuple, or the tensor itself."""
    if isinstance(out, dict):
        out = out["loss"]
    elif hasattr(out, "loss"):
        out = out.loss
    elif isinstance(out, tuple):
        out = out[0]
    assert isinstance(out, torch.Tensor)
    return out


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of one batch."""
    return loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))


def build(job: Job, device: torch.device, ds_config: dict[str, Any]) -> tuple[torch.nn.Module, Source]:
    """Build the job's model on the device, and the source of its batches. At stage 3 the model is built partitioned."""
    if job.workload is None:
        model = build_model(job, device, ds_config)
        return model, lambda micro_batch, device, seed: synthetic_batches(job, micro_batch, device, seed)
    import deepspeed

    partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if partitioned else contextlib.nullcontext():
        model, source = own_workload(job.workload)
    if not partitioned:
        model.to(device=device, dtype=DTYPES[job.precision])
    model.train()

    def endless(micro_batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        while True:
            empty = True
            for batch in source(micro_batch):
                empty = False
                yield to_device(batch, device)
            if empty:
                raise ValueError(f"{job.workload}: batches({micro_batch}) gave nothing")

    return model, endless
