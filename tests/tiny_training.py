"""Words of commands that several test files tune: a tiny named model, and a script of Trainer's."""

from __future__ import annotations

import json
from pathlib import Path

TINY_RUN = ("run", "--model", "tiny-llama", "--device", "cpu", "--seq-len", "32")
_FROM_TRAINER = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def trainer_words(script: Path, config: Path | str, steps: int) -> list[str]:
    """A script of Trainer's, on CPU ranks and keeping nothing, with its DeepSpeed config as it is to be typed."""
    words = [str(script), "--deepspeed", str(config), "--output_dir", "out", "--max_steps", str(steps)]
    return [*words, "--per_device_train_batch_size", "2", "--use_cpu", "--report_to", "none", "--save_strategy", "no"]


def write_trainers_config(path: Path, stage: int) -> None:
    """A DeepSpeed config that has its batch from Trainer."""
    path.write_text(json.dumps({**dict.fromkeys(_FROM_TRAINER, "auto"), "zero_optimization": {"stage": stage}}))
