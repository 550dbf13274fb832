"""What stands between a user's script and the libraries it trains with, in one rank.

The script is not changed and does not know. A candidate's keys are merged into its DeepSpeed config wherever that comes
from (file, dict, TrainingArguments, accelerate's plugin), its batch sizes set in the arguments and data loaders that
carry them, and a `Watcher` sees what the trained engine does. One module a library that is hooked:

| module | what is hooked |
| --- | --- |
| `arguments` | argparse: flags that carry knobs, and the rank |
| `process_group` | torch.distributed: the script's process group is the rank's own |
| `ports` | sockets: a port that the trial before has just left |
| `deepspeed` | `deepspeed.initialize`, and forward, backward and step of the engine that trains |
| `zero_init` | `deepspeed.zero.Init`: a model that is made in parts, as stage 3 alone trains it |
| `beside` | engines that train, made after the first: their batch, and the rows of their steps |
| `ops` | DeepSpeed's ops: how they are built |
| `election` | which engine trains, where a script makes several |
| `optimizers` | torch's optimizers: a script that trains without DeepSpeed is noticed |
| `checkpointing` | the model's activation checkpointing, once the engine is made |
| `accelerate` | its DeepSpeed config and plugin, the loader that `prepare` is given |
| `transformers` | TrainingArguments |
| `resuming` | `load_checkpoint`, `load_state`, Trainer's `resume_from_checkpoint`: a measurement starts anew |
| `saving` | `save_state`, `save_model`, what Trainer saves and evaluates: a measurement does neither |
| `lightning` | how many batches its Trainer makes a step of, once the engine is made |
| `spawning` | torch.multiprocessing, `notebook_launcher`: where a script would start its ranks by a function |
| `relaunch` | subprocess, `os.exec…`, torch's launcher: where a program would start its ranks itself |
| `sources` | `open`: which configs a script reads, in its first run |
| `tokenizers` | how long a tokenizer lets a sequence be |

Each but `beside`, `election`, `checkpointing` and `lightning` has `install(context)`. No library is imported before its hook is
installed.
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
        """Called once, before the script runs."""
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
        """The script's arguments under the candidate."""
        return config.merged_arguments(self.context)

    def late_facts(self) -> dict[str, bool]:
        """Those of `engine_facts` that may have changed since the engine was made: what they are now."""
        return deepspeed.late_facts(self.context)

    def sources(self) -> list[str]:
        """Files of the user's own that the script has used so far."""
        return sources.found(self.context)

    def save_weights(self, folder: str, name: str) -> Any:
        """Saves the gathered 16-bit weights of the engine that trains, as the script would without `quiet`."""
        return deepspeed.unhooked(self.context, "save_16bit_model", folder, name)

    def save_checkpoint(self, folder: str) -> Any:
        """The same for a whole checkpoint of the engine."""
        return deepspeed.unhooked(self.context, "save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> Any:
        """Loads one into the engine that trains, as the script would without `quiet`."""
        return deepspeed.unhooked(self.context, "load_checkpoint", folder)

    def undo(self) -> None:
        """Puts back all that was replaced."""
        self.context.patches.undo()
