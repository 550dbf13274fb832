"""Modules that autotune runs in their own processes, by purpose.

Launchers take a module's name from here only. `module_command` and `bound_command` (`util/interpreter.py`) start each of them
like `python -m MODULE`, without the current folder in the path. The fork server also starts ranks, by the module's `become`.

All of them run in the ranks' Python, which may be that of the user's training environment. Only TRAIN_RANK is the user's
real training. The agent of a node is the command `autotune agent`, or an actor of Ray.

Other files run by their path. In another Python, `util/inquiry.py` answers questions about its packages, and `autotune
doctor` examines it. On GPUs `problem/nvml.py` loads the tuner's `pynvml.py` there as `autotune_nvml`, if it has no
nvidia-ml-py (variable AUTOTUNE_NVML). This is the only third-party file of the tuner in a rank, and import-linter cannot see it.
"""

from __future__ import annotations

MODEL_RANK = "autotune.rank.model_rank"  # measures a named model
SCRIPT_RANK = "autotune.rank.script_rank"  # measures a user's script
TRAIN_RANK = "autotune.rank.train_rank"  # trains under `autotune launch`
SELFTEST_RANK = "autotune.rank.selftest_rank"  # all-reduce before the first trial
FORK_SERVER = "autotune.workers.fork_server"  # imports once, forks ranks
TRACER = "autotune.predict.tracer"  # traces a model without a GPU
HUB_READER = "autotune.rank.hub_config"  # reads a model's config from the Hub
SHELL_SCRIPT = "autotune.script.shell_script"  # runs a shell script to see what it starts
SANDBOX = "autotune.rank.sandbox"  # runs another one of these in a sandbox

# Interface of SANDBOX: a word after its folder that runs the module on a machine without a sandbox, too, and the exit
# status on such a machine without that word.
WITHOUT_SANDBOX = "--unprotected"
NOT_PROTECTED = 96
