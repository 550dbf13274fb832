#!/usr/bin/env bash
# Rehearse gpu_first.sh as a GPU machine has it: a Python that has torch and transformers, and neither autotune nor the packages that
# such images lack; these come as wheels. The checkout is a copy of the files that git does not ignore, in a
# folder with a space.
# Usage, in the repository's root: bash benchmarks/gpu/rehearse.sh [PYTHON [STEP,STEP... [SECONDS]]]
set -euo pipefail
python=$(realpath --no-symlinks "${1:-.venv/bin/python}") steps=${2:-} seconds=${3:-900}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
copy="$folder/a checkout"
mkdir "$copy"
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract --directory="$copy"
cd "$copy"
bash benchmarks/gpu/make_wheels.sh "$python" "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" >/dev/null
"$python" -m venv --without-pip "$folder/image"
"$python" benchmarks/gpu/image.py "$folder/image" .whl
for lacking in autotune optuna deepspeed pydantic; do
  if (cd / && "$folder/image/bin/python3" -c "import $lacking" 2>/dev/null); then
    echo "rehearse.sh: the image has $lacking. It must come from the checkout or from a wheel." >&2
    exit 1
  fi
done
echo "wheels and image made in $SECONDS s"
unset PYTHONPATH
export AUTOTUNE_CACHE="$folder/cache" TORCH_EXTENSIONS_DIR="$folder/extensions"
OUT="$folder/out" SITE="$folder/site" WORK="$folder/work" REHEARSE=1 PATH="$folder/image/bin:$PATH" \
  bash benchmarks/gpu/gpu_first.sh "$seconds" ${steps:+"$steps"}
test -s "$folder/out/first.json"
