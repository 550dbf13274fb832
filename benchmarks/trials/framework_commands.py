"""The frameworks' commands that `command_line.py` tunes, as people type them, and the files that these name.

What is there because ranks are CPUs stands in `needs`: nothing else was changed for the tuner.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENDLESS = 100_000  # steps: a training is ended before
MICRO_BATCH, ACCUMULATION = 2, 4


@dataclass(frozen=True)
class Command:
    """One command, in the environment of its framework."""

    framework: str
    environment: str  # a file of `environments/`
    words: str  # as typed
    needs: str  # on CPU ranks, and why


ZERO2: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 1_000_000,
        "reduce_bucket_size": 1_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
}
SPACE: dict[str, Any] = {
    "knobs": {
        "zero_stage": [0, 1, 2, 3],
        "train_micro_batch_size_per_gpu": {"from": 1, "to": 16},
        "gradient_accumulation_steps": {"from": 1, "to": 16},
        "activation_checkpointing": [False, True],
        "overlap_comm": [False, True],
        "reduce_bucket_size": [1_000_000],
        "allgather_bucket_size": [1_000_000],
        "sub_group_size": [10_000_000],
    }
}
_TRAINER = {
    "per_device_train_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": ENDLESS,
    "learning_rate": 1.0e-4,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 50,
}
_FACTORY = {
    "model_name_or_path": "model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "deepspeed": "ds_z2.json",
    "dataset_dir": ".",
    "dataset": "local",
    "template": "qwen",
    "cutoff_len": 128,
    "preprocessing_num_workers": 1,
    "output_dir": "out",
    **_TRAINER,
}
_AXOLOTL = {
    "base_model": "model",
    "datasets": [{"path": "alpaca.jsonl", "ds_type": "json", "type": "alpaca"}],
    "dataset_prepared_path": "prepared",
    "dataset_num_proc": 1,
    "val_set_size": 0,
    "output_dir": "out",
    "sequence_len": 128,
    "sample_packing": False,
    "micro_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": ENDLESS,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "learning_rate": 1.0e-4,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "gradient_checkpointing": False,
    "attn_implementation": "sdpa",
    "save_strategy": "no",
    "logging_steps": 50,
    "deepspeed": "ds_z3.json",
    "max_memory": {"cpu": "8GiB"},
    "plugins": ["on_cpus.OnCpus"],
}
_ON_CPUS = '''"""axolotl's configuration has no word for CPUs: a plugin may hand it to Trainer's arguments."""

from axolotl.integrations.base import BasePlugin


class OnCpus(BasePlugin):
    def get_training_args(self, cfg):
        return {"use_cpu": True}
'''
_TRL = {
    "model_name_or_path": "model",
    "max_length": 128,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "deepspeed": "ds_z2.json",
    "output_dir": "out",
    **_TRAINER,
}
_SWIFT = (
    "swift sft --model model --model_type qwen2 --template qwen2_5 --tuner_type full --torch_dtype float32 --fp16 false "
    "--bf16 false --dataset alpaca.jsonl --split_dataset_ratio 0 --dataset_num_proc 1 --dataloader_num_workers 0 "
    f"--deepspeed zero2 --per_device_train_batch_size {MICRO_BATCH} --gradient_accumulation_steps {ACCUMULATION} "
    f"--max_length 128 --max_steps {ENDLESS} --learning_rate 1e-4 --gradient_checkpointing false --save_strategy no "
    "--eval_strategy no --report_to none --use_cpu true --output_dir out"
)
_TRL_DPO = (
    "trl dpo --model_name_or_path model --dataset_name pairs --max_length 128 --dtype float32 --bf16 False --use_cpu "
    f"--deepspeed ds_z2.json --per_device_train_batch_size {MICRO_BATCH} --gradient_accumulation_steps {ACCUMULATION} "
    f"--max_steps {ENDLESS} --gradient_checkpointing False --report_to none --save_strategy no --output_dir out "
    "--use_deepspeed --num_processes 2"
)
_RANKS = "--use_deepspeed (accelerate's one launcher that starts CPU ranks)"
_AXOLOTL_NEEDS = (
    f"{_RANKS}; a plugin that says use_cpu (its YAML cannot); max_memory: {{cpu: 8GiB}} (else weights go to GPU LOCAL_RANK); "
    "ZeRO-3 (gloo of torch 2.13 takes no step of stages 1 and 2 of DeepSpeed 0.18, with axolotl or without)"
)
COMMANDS = (
    Command(
        "LLaMA-Factory",
        "llamafactory",
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train sft.yaml",
        "use_cpu: true, NPROC_PER_NODE (it counts GPUs)",
    ),
    Command(
        "LLaMA-Factory",
        "llamafactory",
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train lora.yaml learning_rate=2e-4",
        "use_cpu: true, NPROC_PER_NODE (it counts GPUs)",
    ),
    Command("axolotl", "axolotl", "axolotl train sft.yml -- --use_deepspeed --num_processes 2", _AXOLOTL_NEEDS),
    Command(
        "axolotl",
        "axolotl",
        "accelerate launch --use_deepspeed --num_processes 2 -m axolotl.cli.train sft.yml",
        _AXOLOTL_NEEDS,
    ),
    Command("ms-swift", "ms-swift", f"NPROC_PER_NODE=2 {_SWIFT}", "--use_cpu true, --fp16 and --bf16 false"),
    Command("TRL", "trl", "trl sft --config sft.yaml --use_deepspeed --num_processes 2", f"use_cpu: true; {_RANKS}"),
    Command("TRL", "trl", _TRL_DPO, f"--use_cpu; {_RANKS}"),
    Command("TRL", "trl", "torchrun --nproc-per-node 2 -m trl.scripts.sft --config sft.yaml", "use_cpu: true"),
    Command(
        "TRL",
        "trl",
        "accelerate launch --use_deepspeed --num_processes 2 -m trl.scripts.sft --config sft.yaml",
        f"use_cpu: true; {_RANKS}",
    ),
    Command("TRL", "trl", "deepspeed --num_gpus 2 --module trl.scripts.sft --config sft.yaml", "use_cpu: true"),
)


def write_files(command: Command, folder: Path) -> None:
    """The argument files of a command's framework, its DeepSpeed config, and the space that is searched."""
    files: dict[str, dict[str, Any]] = {
        "llamafactory": {
            "sft.yaml": _FACTORY,
            "lora.yaml": {**_FACTORY, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"},
        },
        "axolotl": {"sft.yml": _AXOLOTL},
        "ms-swift": {},
        "trl": {"sft.yaml": {**_TRL, "dataset_name": "messages"}},
    }[command.environment]
    for name, data in {**files, "space.yaml": SPACE}.items():
        (folder / name).write_text(yaml.safe_dump(data, sort_keys=False))
    for stage in (2, 3):
        config = {**ZERO2, "zero_optimization": {**ZERO2["zero_optimization"], "stage": stage}}
        (folder / f"ds_z{stage}.json").write_text(json.dumps(config, indent=1))
    if command.environment == "axolotl":
        (folder / "on_cpus.py").write_text(_ON_CPUS)


def here(environment: str) -> Path | None:
    """This process's own interpreter, where it is an environment that has the framework."""
    own = Path(sys.executable)
    return own if environment == "trl" and (own.parent / "trl").exists() else None
