#!/usr/bin/env bash
# Tunes the script as it is typed today, then trains under the winner.
#   bash run.sh                                    on this machine's GPUs
#   bash run.sh --device cpu --gpus 2 --budget 2m  without one, to see it work
set -euo pipefail
cd "$(dirname "$0")"
TRAIN=(train.py --deepspeed ds.json --per_device_train_batch_size 4 --gradient_accumulation_steps 4
  --max_steps "${STEPS:-100}" --save_steps 20 --output_dir out --report_to none)

autotune run --study trainer --budget 30m "$@" -- "${TRAIN[@]}"

# When memory runs out at hour three it goes on from the newest checkpoint with a thriftier config.
autotune launch trainer -- "${TRAIN[@]}"
