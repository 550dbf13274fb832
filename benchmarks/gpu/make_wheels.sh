#!/usr/bin/env bash
# Write the packages that a GPU machine's image lacks as wheels into .whl, which git ignores. Run it in the repository's root, with a
# network, before the machine is there. DeepSpeed comes as source: its wheel is built here, without any op.
# Usage: bash benchmarks/gpu/make_wheels.sh [PYTHON [VERSION]]
#   PYTHON   has torch, setuptools and pip; default .venv/bin/python
#   VERSION  of the machine's Python; default 3.12
# WHEELS names another folder.
set -euo pipefail
python=${1:-.venv/bin/python} version=${2:-3.12} wheels=${WHEELS:-.whl}
test -f constraints.txt || { echo "make_wheels.sh: no constraints.txt here. Run it in the repository's root." >&2; exit 2; }
rm -rf "$wheels" && mkdir -p "$wheels"
# constraints.txt pins them. pydantic and pydantic_core must be a pair. Images have some version of the last four: ours come first in
# PYTHONPATH.
names=(optuna alembic Mako colorlog SQLAlchemy hjson pydantic pydantic_core annotated-types typing-inspection
       typing_extensions filelock ruamel.yaml nvidia-ml-py py-cpuinfo)
# DeepSpeed's autotuner alone needs tabulate; `levers` measures Liger
pins=(tabulate==0.9.0 liger-kernel==0.8.5)
for name in "${names[@]}"; do pins+=("$(grep -i "^$name==" constraints.txt)"); done
platforms=()
for n in 39 38 36 35 34 31 28 27 26 24 17 12; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp --abi "cp${version/./}" \
  --abi abi3 --abi none "${platforms[@]}" -d "$wheels" "${pins[@]}"
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$wheels" "$(grep -i '^deepspeed==' constraints.txt)"
ls -l "$wheels"
# one version of each: two stop the whole installation
test -z "$(cd "$wheels" && printf '%s\n' *.whl | sed 's/-.*//' | tr '[:upper:]' '[:lower:]' | sort | uniq -d)"
test "$(find "$wheels" -type f -name '*.whl' | wc -l)" = $((${#pins[@]} + 1))
