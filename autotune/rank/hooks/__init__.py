"""Hooks between a user's script and the libraries it trains with, in one rank.

The script runs unchanged and unaware. A candidate's keys are merged into its DeepSpeed config from any source (file,
dict, TrainingArguments, accelerate's plugin). Batch sizes are set in arguments and data loaders, and a `TrainingObserver`
observes the trained engine.

Each module hooks one library, in ranks that measure (`script_rank.py`) and in the user's training (`train_rank.py`).

| module | what is hooked |
| --- | --- |
| `config` | argparse: flags that carry knobs, and the rank |
| `process_group` | torch.distributed: the script's process group is the rank's own; sockets: ports that are still in use |
| `deepspeed` | `deepspeed.initialize`, `deepspeed.zero.Init`, Lightning, ops, checkpointing, steps of training engines |
| `accelerate` | its DeepSpeed config and plugin, the loader that `prepare` is given |
| `transformers` | TrainingArguments; saves, evaluations and resumes, which a measurement leaves out |
| `launchers` | subprocess, `os.exec...`, torch's launcher, torch.multiprocessing: a script that starts its ranks itself |
| `environment` | `os.environ`: the variables that a script reads in its first run, and those that carry knobs |
| `source_files` | `open`: the configs that a script reads in its first run |
| `worst_case` | loaders and tokenizers, under `--worst-case` |

`base` has what they share. No library is imported before its hook is installed.
"""

from __future__ import annotations

from autotune.rank.hooks import (
    accelerate,
    config,
    deepspeed,
    environment,
    launchers,
    process_group,
    source_files,
    transformers,
    worst_case,
)
from autotune.rank.hooks.base import Context


def install(context: Context) -> None:
    """Install all hooks. Call this once, before the script runs."""
    config.announce_to_accelerate(context)
    for install_part in (
        config.install,
        process_group.install,
        process_group.install_ports,
        deepspeed.install,
        deepspeed.install_ops,
        deepspeed.install_zero_init,
        deepspeed.install_optimizers,
        accelerate.install,
        transformers.install,
        transformers.install_silence,
        source_files.install,
        environment.install,
        launchers.install_relaunch,
        launchers.install_spawning,
    ):
        install_part(context)
    if context.script.worst_case:
        worst_case.install(context)
