#!/usr/bin/env bash
# Run a built wheel as people without an installation do, by uvx and by pipx, in empty environments without torch:
#   python -m build && packaging/check_wheel.sh dist/*.whl
# Needs PyPI, and a minute. `plan` and `models` must work; `run` must name the missing packages in one line.
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_CACHE_DIR="$folder/uv" PIPX_HOME="$folder/pipx" PIPX_BIN_DIR="$folder/bin" AUTOTUNE_CACHE="$folder/cache" PATH="$folder/tools/bin:$PATH"
unset PYTHONPATH VIRTUAL_ENV AUTOTUNE_PYTHON
cd "$folder"
python3 -m venv tools
tools/bin/pip install -q uv pipx

check() {
  echo "== $*"
  "$@" --version
  "$@" models | grep -q llama-3.1-8b
  "$@" spaces show default | grep -q zero_stage
  "$@" plan --model llama-3.1-8b --gpu a100-80gb --gpus 8 | tee plan.txt | sed -n 1,8p
  grep -q '^fastest' plan.txt
  status=0
  "$@" run --model tiny-llama --device cpu --gpus 1 --budget 1m 2>refused.txt || status=$?
  test $status = 2 && test "$(wc -l <refused.txt)" = 1 && grep "no torch" refused.txt
}

check uvx --from "$wheel" autotune
pipx install -q "$wheel"
check "$folder/bin/autotune"
echo "uvx and pipx: as expected"
