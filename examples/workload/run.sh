#!/usr/bin/env bash
# Tunes a model class of your own by a function that returns it and its batches.
#   bash run.sh                                    on this machine's GPUs
#   bash run.sh --device cpu --gpus 2 --budget 2m  without one, to see it work
set -euo pipefail
cd "$(dirname "$0")"

autotune run --study workload --workload mine:build --budget 30m "$@"
autotune export workload --format deepspeed --out ds.json
