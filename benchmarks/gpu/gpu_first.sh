#!/usr/bin/env bash
# The first minutes on a GPU machine, in the repository's root: bash benchmarks/gpu/gpu_first.sh [SECONDS [STEP,STEP...]]
# The checkout and .whl (make_wheels.sh) travel with it. Results lie in $OUT: first.json (each row as it comes), log.txt, study.tgz,
# logs.tgz, ops.txt, smi.csv. With REHEARSE=1 it runs on CPUs; WHEELS, SITE and WORK name other folders.
set -uo pipefail
seconds=${1:-470} steps=${2:-}
wheels=${WHEELS:-.whl} site=${SITE:-/tmp/site} work=${WORK:-/tmp/gpu_first}
: "${OUT:=/tmp/out}"; mkdir -p "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
began=$SECONDS
if [ ! -e "$site/.done" ]; then # a warm machine has them
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl || exit 3
  touch "$site/.done"
fi
# $site/bin has the `deepspeed` launcher. The checkout comes second: it has autotune, and folders named `benchmarks` and `tests`.
export PYTHONPATH=$site:$PWD PATH=$PATH:$site/bin
gib() { awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo; }
if [ -z "${REHEARSE:-}" ]; then
  # programs that ask for this machine's own address wait for minutes if nothing resolves its name
  getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname)" >>/etc/hosts
  # torch takes CUDA_HOME from `which nvcc`. A wrapper in /usr/local/bin makes that /usr/local, which has no headers.
  for home in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-1[0-9]* /opt/cuda; do
    if [ -x "$home/bin/nvcc" ] && [ -e "$home/include/cuda_runtime_api.h" ]; then export CUDA_HOME=$home; break; fi
  done
  # A toolkit may lack the headers of cuSPARSE, cuSOLVER and cuBLAS, which torch's include. NVIDIA's Python packages have them.
  if [ -n "${CUDA_HOME:-}" ] && [ ! -e "$CUDA_HOME/include/cusparse.h" ]; then
    extra=$(python3 -c 'import glob, nvidia; print(next(iter(glob.glob([*nvidia.__path__][0] + "/*/include/cusparse.h"))))' 2>/dev/null)
    [ -n "$extra" ] && export CPATH=${extra%/cusparse.h}
  fi
  # keeps the driver awake if persistence mode is off: each first opening of NVML would wake the card for seconds
  nvidia-smi --query-gpu=timestamp,memory.used,clocks.sm,power.draw,utilization.gpu --format=csv,noheader -l 2 >"$OUT/smi.csv" 2>&1 &
  smi=$!; trap 'kill $smi 2>/dev/null' EXIT
  # Main memory of some virtual machines grows as it is used. autotune counts what sysfs shows as plugged in. If that is little, too,
  # 40 GiB are touched once.
  blocks=$(find /sys/devices/system/memory -maxdepth 1 -name 'memory[0-9]*' 2>/dev/null | wc -l)
  plugged=$((blocks * 16#$(cat /sys/devices/system/memory/block_size_bytes 2>/dev/null || echo 0) >> 30))
  if [ "$(gib)" -lt 64 ] && [ "$plugged" -lt 64 ]; then
    echo "MemTotal $(gib) GiB, plugged in $plugged GiB: touching 40 GiB"
    python3 -c 'import mmap; m = mmap.mmap(-1, 40 << 30); [m.write(bytes(1 << 26)) for _ in range(640)]'
  fi
fi
echo "MemTotal $(gib) GiB, CUDA_HOME=${CUDA_HOME:-none}, CPATH=${CPATH:-none}, ready after $((SECONDS - began)) s"
python3 benchmarks/gpu/gpu_first.py --out "$OUT" --work "$work" --seconds $((seconds - (SECONDS - began))) ${steps:+--steps "$steps"} \
  ${REHEARSE:+--rehearse}
