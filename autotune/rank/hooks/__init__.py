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
| `source_files` | `open`: the configs that a script reads in its first run |
| `worst_case` | loaders and tokenizers, under `--worst-case` |

`base` has what they share. No library is imported before its hook is installed.
"""

from __future__ import annotations

from typing import Any

from autotune.rank.hooks import (
    accelerate,
    config,
    deepspeed,
    launchers,
    process_group,
    source_files,
    transformers,
    worst_case,
)
from autotune.rank.hooks.base import Context


class Hooks:
    """All hooks of one rank."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def install(self) -> None:
        """Install all hooks. Call this once, before the script runs."""
        context = self.context
        config.announce_to_accelerate(context)
        for install in (
            config.install,
            process_group.install,
            process_group.install_ports,
            deepspeed.install,
            deepspeed.install_ops,
            deepspeed.install_zero_init,
            deepspeed.install_optimizers,
            accelerate.install,
            transformers.install,
            transformers.install_resuming,
            transformers.install_saving,
            source_files.install,
            launchers.install_relaunch,
            launchers.install_spawning,
        ):
            install(context)
        if context.script.worst_case:
            worst_case.install(context)

    def arguments(self) -> list[str]:
        """Return the script's arguments under the candidate."""
        return config.merged_arguments(self.context)

    def late_facts(self) -> dict[str, Any]:
        """Return the current values of the `engine_facts` that may change after the engine was made."""
        return deepspeed.late_facts(self.context)

    def sources(self) -> list[str]:
        """Return the user's own files that the script has used so far."""
        return source_files.found(self.context)

    def save_weights(self, folder: str, name: str) -> Any:
        """Save the gathered 16-bit weights of the engine that trains, as the script would without `quiet`."""
        return deepspeed.unhooked(self.context, "save_16bit_model", folder, name)

    def save_checkpoint(self, folder: str) -> Any:
        """Save a whole checkpoint of the engine that trains, as the script would without `quiet`."""
        return deepspeed.unhooked(self.context, "save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> Any:
        """Load a checkpoint into the engine that trains, as the script would without `quiet`."""
        return deepspeed.unhooked(self.context, "load_checkpoint", folder)

    def undo(self) -> None:
        """Restore all replaced attributes."""
        self.context.patches.undo()
