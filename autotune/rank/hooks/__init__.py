"""Hooks between a user's script and the libraries it trains with, in one rank.

The script runs unchanged and unaware. A candidate's keys are merged into its DeepSpeed config from any source (file,
dict, TrainingArguments, accelerate's plugin). Batch sizes are set in arguments and data loaders, and a `Watcher`
observes the trained engine.

Each module hooks one library.

| module | hooked |
| --- | --- |
| `arguments` | argparse: flags that carry knobs, and the rank |
| `process_group` | torch.distributed: the script uses the process group of the rank |
| `ports` | sockets: reuse of a port that the preceding trial has just closed |
| `deepspeed` | `deepspeed.initialize`, and forward, backward and step of the engine that trains |
| `zero_init` | `deepspeed.zero.Init`: a partitioned model, which only stage 3 trains |
| `beside` | auxiliary engines, made after the first: their batch, and the rows of their steps |
| `ops` | builds of DeepSpeed's ops |
| `election` | selection of the engine that trains, if a script makes several |
| `optimizers` | torch's optimizers: detection of a training without DeepSpeed |
| `checkpointing` | the model's activation checkpointing, once the engine exists |
| `accelerate` | its DeepSpeed config and plugin, and the loader passed to `prepare` |
| `transformers` | TrainingArguments |
| `resuming` | `load_checkpoint`, `load_state`, Trainer's `resume_from_checkpoint`: measurements start afresh |
| `saving` | `save_state`, `save_model`, Trainer's saves and evaluations: measurements skip them |
| `lightning` | batches per step of its Trainer, once the engine exists |
| `spawning` | torch.multiprocessing, `notebook_launcher`: ranks started by a function |
| `relaunch` | subprocess, `os.exec…`, torch's launcher: ranks started by a program |
| `sources` | `open`: configs that a script reads in its probe run |
| `tokenizers` | maximum sequence length of each tokenizer |

All except `beside`, `election`, `checkpointing` and `lightning` have `install(context)`. No library is imported before
its hook is installed.
"""

from __future__ import annotations

from typing import Any

from autotune.rank.hooks import (
    accelerate,
    arguments,
    config,
    deepspeed,
    ops,
    optimizers,
    ports,
    process_group,
    relaunch,
    resuming,
    saving,
    sources,
    spawning,
    tokenizers,
    transformers,
    zero_init,
)
from autotune.rank.hooks.context import Context


class Hooks:
    """All hooks of one rank."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def install(self) -> None:
        """Install all hooks. Call this once, before the script runs."""
        context = self.context
        config.announce_to_accelerate(context)
        for library in (
            arguments,
            process_group,
            ports,
            deepspeed,
            ops,
            zero_init,
            optimizers,
            accelerate,
            transformers,
            resuming,
            saving,
            sources,
        ):
            library.install(context)
        for starter in (relaunch, spawning):
            starter.install(context)
        if context.script.worst_case:
            tokenizers.install(context)

    def arguments(self) -> list[str]:
        """Return the script's arguments under the candidate."""
        return config.merged_arguments(self.context)

    def late_facts(self) -> dict[str, bool]:
        """Return the current values of the `engine_facts` that may change after the engine was made."""
        return deepspeed.late_facts(self.context)

    def sources(self) -> list[str]:
        """Return the user's own files that the script has used so far."""
        return sources.found(self.context)

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
