"""What is trained: a Job is frozen, and a study belongs to one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.models import ModelSpec

PRECISIONS = ("bf16", "fp16", "fp32")
# `adamw` is torch's, fused: what Hugging Face's Trainer uses by default; offloaded, DeepSpeed replaces it by its own.
OPTIMIZERS = ("adamw", "adam", "fused_adam", "lion", "sgd", "adagrad")


@dataclass(frozen=True)
class Job:
    """Model, data shape and arithmetic of a training; everything a trial must keep as it is."""

    model: ModelSpec
    ranks: int
    seq_len: int  # tokens a sequence
    precision: str = "bf16"
    optimizer: str = "adamw"
    global_batch_size: int | None = None  # sequences an optimizer step, over all ranks
    base_config: dict[str, Any] = field(default_factory=dict)  # the user's own DeepSpeed config

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UserError(f"--gpus {self.ranks}: expected at least 1")
        if not 1 <= self.seq_len <= 10_000_000:
            raise UserError(f"--seq-len {self.seq_len}: expected between 1 and 10000000 tokens")
        if self.precision not in PRECISIONS:
            raise UserError(f"--precision {self.precision}: expected one of {', '.join(PRECISIONS)}")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer {self.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
        if self.global_batch_size is not None:
            if self.global_batch_size < 1:
                raise UserError(f"--global-batch-size {self.global_batch_size}: expected at least 1")
            if self.global_batch_size % self.ranks:
                low = self.global_batch_size // self.ranks * self.ranks
                near = " or ".join(str(size) for size in (low, low + self.ranks) if size)
                raise UserError(
                    f"--global-batch-size {self.global_batch_size} cannot be split evenly over {self.ranks} ranks: "
                    f"try {near}"
                )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        return cls(**{**values, "model": ModelSpec(**values["model"])})

    @property
    def element_bytes(self) -> float:
        """Of a parameter, an activation or a gradient as the model computes with it."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def optimizer_kind(self) -> str:
        """The user's own optimizer where their config names one, in lower case."""
        return str((self.base_config.get("optimizer") or {}).get("type", self.optimizer)).lower()

    @property
    def summary(self) -> str:
        """One line for people."""
        batch = f"global batch {self.global_batch_size}" if self.global_batch_size else "batch free"
        return f"{self.model.name}, {self.seq_len} tokens, {self.precision}, {self.optimizer}, {batch}"

    @property
    def key(self) -> str:
        """A short stable name of everything in the Job."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def longest_sequence(config: dict[str, Any]) -> int | None:
    """The model's longest sequence in tokens, as its configuration says."""
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def load_ds_config(path: Path) -> dict[str, Any]:
    """The user's own DeepSpeed config.

    Raises:
        UserError: the file cannot be read or is no JSON object.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"--ds-config {path}: no such file; expected a DeepSpeed config JSON") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); expected a DeepSpeed config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--ds-config {path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object with DeepSpeed's keys, found {type(data).__name__}")
    zero = data.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError(f"{path}: zero_optimization: expected an object, found {zero!r}")
    return data
