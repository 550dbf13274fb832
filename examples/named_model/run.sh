#!/usr/bin/env bash
# Tunes a model by its name: no script, no weights, no download. Options given here go to `autotune run`; the last one counts:
#   bash run.sh                  on this machine's GPUs
#   bash run.sh --model tiny-llama --seq-len 64 --device cpu --gpus 2 --budget 2m     without one, to see it work
set -euo pipefail
cd "$(dirname "$0")"

autotune run --study named-model --model gemma-2-2b --seq-len 4096 --global-batch-size 64 --budget 30m "$@"

autotune show named-model
autotune export named-model --format hf          # TrainingArguments beside the DeepSpeed config
autotune report named-model                      # one page that works offline
