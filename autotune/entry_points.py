"""Modules that autotune runs in their own processes, by purpose.

Launchers take a module's name from here only. `python -m MODULE` starts each of them; the fork server also starts ranks, by the
module's `become`.
"""

from __future__ import annotations

from typing import Final

MODEL_RANK: Final = "autotune.rank.model"  # measures a named model
SCRIPT_RANK: Final = "autotune.rank.script"  # measures a user's script
TRAIN_RANK: Final = "autotune.rank.train"  # trains under `autotune launch`
SELFTEST_RANK: Final = "autotune.rank.check"  # all-reduce before the first trial
FORK_SERVER: Final = "autotune.group.fork_server"  # imports once, forks ranks
TRACER: Final = "autotune.predict.tracer"  # traces a model without a GPU
HUB_READER: Final = "autotune.rank.hub"  # reads a model's config from the Hub
RAY_DRIVER: Final = "autotune.executors.nodes.ray_driver"  # places agents on a Ray cluster
