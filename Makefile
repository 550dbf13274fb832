PYTHON ?= python3
comma := ,
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-gate test-all nightly cluster-tests test-oldest test-oldest-first test-frameworks lint setup coverage flakes mutants faults planted winners clean gpu-acceptance

# Where there is no GPU, DeepSpeed's CPU ops are built with the rest: the first trial that offloads would do it in the study's
# time, and of three workers of the tests two would wait for the third.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
READY := $(if $(GPU),setup,$(VENV)/.ops)

# On GPUs a real model; without one two CPU ranks. Under the cap a micro-batch of 16 runs out of memory and one of 8 has room to spare.
DEMO := $(if $(GPU),--model smollm2-360m --budget $(or $(BUDGET),10m),\
	--model tiny-gemma-2 --device cpu --gpus 2 --memory-cap 704MiB --exhaustive --budget $(or $(BUDGET),165s))

run: $(READY)
	$(BIN)/python -m autotune run $(DEMO) --study demo-$$(date +%Y%m%d-%H%M%S)

# In an order drawn anew each time (`--randomly-seed=N` repeats one). Tests that share what is dear to make run in one worker:
# DEAR in tests/conftest.py. Many tests wait, for hosts that are lost and engines that start: on two cores a third worker uses them meanwhile.
JUNIT ?= build/tests.xml
PYTEST := $(BIN)/python -m pytest -n 3 --durations=20 --junitxml="$(JUNIT)"

test: $(READY)
	$(PYTEST) -m "not slow"

test-gate: $(READY)  # and the slow tests of the main paths
	$(PYTEST) -m "not slow or main_path"

test-all: $(READY)
	$(PYTEST) --hypothesis-profile thorough

nightly: $(READY)  # the long set: hours; PARTS=test-oldest,flakes runs these parts
	$(BIN)/python .ci/nightly.py $(subst $(comma), ,$(PARTS))

setup: $(VENV)/.installed

# torch first, by its exact version: anything looser may pull another build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q "setuptools>=77" wheel ninja -c constraints.txt
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]" -c constraints.txt
	touch $@

# Without a compiler what offloads fails and says so; all else runs.
LOAD_OPS := import sys; from autotune.workers.jit_ops import load_ops; failed = load_ops(['ShareMemCommBuilder', 'CPUAdamBuilder']); \
	sys.exit('; '.join(f"DeepSpeed's {op} was not built ({why})" for op, why in failed.items()) or None)
export LOAD_OPS
$(VENV)/.ops: $(VENV)/.installed
	DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -c "$$LOAD_OPS" && touch $@ || true

# The oldest supported versions, in an environment of their own: ranks, exports, versions. It has links to this environment's torch,
# which saves a download; OLD_TORCH=2.6.0 installs the oldest torch in yet another one. DeepSpeed's ops are built first, since two
# workers that wait for compilers run into their tests' limits. The seed is left alone: DeepSpeed 0.16 has a hook of
# pytest-randomly's that refuses a seed of more than 32 bits. The CUDA build of torch 2.6 brings triton, with which DeepSpeed 0.16
# cannot be imported where there is no GPU.
OLD_TORCH ?=
OLD := .venv-oldest$(OLD_TORCH)
IN_OLD := PATH="$(CURDIR)/$(OLD)/bin:$$PATH" $(OLD)/bin/python
OLD_TESTS := tests/test_versions.py tests/predict/test_features_versions.py tests/predict/test_zero_memory_unmodelled_keys.py \
	tests/rank tests/results/test_export_loaded.py tests/test_scripts.py
test-oldest: $(OLD)/.ops
	$(IN_OLD) -m pytest -n 2 --junitxml="$(JUNIT)" --randomly-dont-reset-seed -m "not slow" $(OLD_TESTS)

# Of these what differs most between versions: what CI has time for.
OLD_FIRST := tests/test_versions.py tests/predict/test_features_versions.py tests/rank/test_versions.py tests/rank/test_checkpoints.py \
	tests/test_scripts.py
test-oldest-first: $(OLD)/.ops
	$(IN_OLD) -m pytest -n 2 --randomly-dont-reset-seed $(OLD_FIRST) \
		-k "not test_scripts or tuned_as_it_is or rung_loads or longest_batches"

$(OLD)/.ops: $(OLD)/.installed
	DS_ACCELERATOR=cpu $(IN_OLD) -c "$$LOAD_OPS"
	touch $@

$(OLD)/.installed: pyproject.toml environments/oldest.txt $(VENV)/.installed
	test -x $(OLD)/bin/python || $(BIN)/python -m venv $(OLD)
	$(if $(OLD_TORCH),$(OLD)/bin/python -m pip install -q torch==$(OLD_TORCH),$(BIN)/python .ci/share_torch.py $(OLD))
	$(OLD)/bin/python -m pip install -q "setuptools>=77" wheel ninja -c environments/oldest.txt
	$(OLD)/bin/python -m pip install -q --no-build-isolation -r environments/oldest.txt
	$(OLD)/bin/python -m pip install -q --no-build-isolation --no-deps -e .
	$(if $(GPU),,$(OLD)/bin/python -m pip uninstall -q -y triton)
	touch $@

# Several machines: real sshd's in network namespaces, a Slurm of two nodes, a PostgreSQL for several tuners, and a Ray of two, whose
# packages lie in a folder of their own: they are 200 MB, and no other test is to find them.
RAY := .venv-ray
cluster-tests: setup $(RAY)/.installed
	.ci/programs
	$(BIN)/python -m pytest -n 0 -rs --junitxml="$(JUNIT)" tests/executors/cluster tests/search/test_storage_servers.py tests/search/test_heartbeat.py \
		tests/commands/test_run_several_tuners.py

$(RAY)/.installed: constraints.txt $(VENV)/.installed
	$(BIN)/python -m pip install -q --upgrade --target $(RAY) ray -c constraints.txt
	touch $@

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/size.py

.PHONY: docs picture
docs: setup  # the site with its generated pages, into build/docs; a missing page or link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

picture: setup  # the README's and the output in the tutorial, of new runs: three minutes
	$(BIN)/python docs/making/picture.py

# In environments with the frameworks that people fine-tune with, made from environments/*.txt: ENVIRONMENTS, gigabytes.
ENVIRONMENTS ?= $(CURDIR)/.venvs
test-frameworks: setup
	$(BIN)/python benchmarks/trials/framework_environments.py --environments "$(ENVIRONMENTS)" $(ONLY)
	AUTOTUNE_ENVIRONMENTS="$(ENVIRONMENTS)" $(BIN)/python -m pytest -n 0 -m frameworks tests/frameworks

coverage: $(READY)
	$(BIN)/python -m coverage erase
	COVERAGE_PROCESS_START="$(CURDIR)/pyproject.toml" $(PYTEST) --cov --cov-report=term-missing

flakes: $(READY)  # hours
	$(BIN)/python benchmarks/reliability/flakes.py --beside --json benchmarks/results/flakes.json

faults: setup  # an hour and a half; goes on where it was stopped
	$(BIN)/python benchmarks/reliability/faults.py --json benchmarks/results/faults.json

planted: setup  # ten minutes; goes on where it was stopped
	mkdir -p build
	$(BIN)/python benchmarks/training/planted.py --traces build/planted.jsonl --json benchmarks/results/planted.json

winners: setup  # half an hour
	$(BIN)/python benchmarks/training/winners.py --json benchmarks/results/winners.json

mutants: setup
	$(BIN)/python benchmarks/reliability/mutants.py --json benchmarks/results/mutants.json

gpu-acceptance: setup  # ONLY=costs,ooms runs these steps; they are listed by `gpu_acceptance.py --list`; without a network: benchmarks/gpu
	$(BIN)/python benchmarks/gpu/gpu_acceptance.py $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json $(JSON))

.PHONY: benchmarks
benchmarks: setup  # writes benchmarks/results anew but for what has a target of its own (faults, flakes, mutants, planted, winners, gpu-acceptance): hours
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist mutants *.egg-info
