#!/usr/bin/env bash
# Tunes a LoRA fine-tuning of TRL's. `run` prints the command to train with; `launch` would train under it and survive out-of-memory.
#   bash run.sh                                    on this machine's GPUs
#   bash run.sh --device cpu --gpus 2 --budget 2m  without one, to see it work
set -euo pipefail
cd "$(dirname "$0")"
TRAIN=(sft.py --deepspeed ds.json --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --max_length 128
  --max_steps "${STEPS:-100}" --output_dir out --report_to none)

autotune run --study trl-lora --budget 30m "$@" -- "${TRAIN[@]}"
autotune show trl-lora
