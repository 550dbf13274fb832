"""Load a universal checkpoint into stage 3 with DeepSpeed before 0.18.0, which fills only one sub-group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MASTERS = "fp32"
_STATES = (_MASTERS, "exp_avg", "exp_avg_sq")


@contextmanager
def every_sub_group(engine: Any) -> Iterator[None]:
    """Make `engine.load_checkpoint` fill every sub-group from a universal checkpoint while open.

    Args:
        engine: engine of ZeRO stage 3 without NVMe offload.
    """
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer

    def load(folder: str, *args: Any, **kwargs: Any) -> None:
        _load(optimizer, names, Path(folder) / "zero")

    optimizer._load_universal_checkpoint = load
    try:
        yield
    finally:
        del optimizer._load_universal_checkpoint


def _load(optimizer: Any, names: dict[Any, str], folder: Path) -> None:
    """Load like DeepSpeed 0.18.0.

    Source: `DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3`.
    """
    import torch

    saved = torch.load(folder / "optimizer_state.pt", map_location="cpu", weights_only=False)
    optimizer._load_global_state_stage3(saved)
    inner, settings = optimizer.optimizer, saved["optimizer_state_dict"]
    for masters, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        state = inner.state[masters]
        state["step"] = settings["state"][0]["step"]
        for key in _STATES:
            parts = [
                _own_part(folder / names[parameter] / f"{key}.pt", optimizer.dp_process_group) for parameter in group
            ]
            filled = torch.zeros_like(masters)
            filled[: sum(part.numel() for part in parts)] = torch.cat(parts)
            if key == _MASTERS:
                masters.data.copy_(filled)
            else:
                state[key] = filled
    for group in inner.param_groups:
        group.update({**settings["param_groups"][0], "params": []})
    _fill_weights(optimizer)


def _own_part(path: Path, group: Any) -> Any:
    """Return this rank's part of a parameter's state. Stage 3 pads the last part with zeros."""
    import torch

    whole = torch.load(path, map_location="cpu", weights_only=False).view(-1)
    ranks = torch.distributed.get_world_size(group)
    size = -(-whole.numel() // ranks)
    padded = torch.nn.functional.pad(whole, (0, size * ranks - whole.numel()))
    return padded[torch.distributed.get_rank(group) * size :][:size]


def _fill_weights(optimizer: Any) -> None:
    """Copy the masters into the weights in the model's precision."""
    for at, masters in enumerate(optimizer.fp32_partitioned_groups_flat):
        weights = optimizer.fp16_partitioned_groups_flat[at]
        weights.data.copy_(masters.data)
        parts = optimizer.fp16_partitioned_groups[at]
        for part, now in zip(parts, optimizer.unflatten(weights, parts), strict=True):
            part.data = now.data
