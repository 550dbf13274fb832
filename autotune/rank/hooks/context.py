"""State shared by the hooks of one rank."""

from __future__ import annotations

import datetime
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Script
from autotune.problem.outcome import Phase
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.patches import Patches
from autotune.rank.hooks.watcher import Watcher
from autotune.rank.sandbox import Sandbox


@dataclass
class Context:
    """Task of one rank's hooks, and their observations so far."""

    job: Job
    candidate: Candidate | None  # None keeps the script's own settings
    watcher: Watcher
    device: str  # `cpu` or `cuda`
    folder: Path  # for merged configs and copies of argument files
    quiet: bool  # True in a measurement: no checkpoints, evaluations, trackers and uploads
    patches: Patches = field(default_factory=Patches)
    sandbox: Sandbox | None = None  # sandbox of a trial; None in a training

    collective_timeout: datetime.timedelta = datetime.timedelta()  # timeout of the process group
    engine: Any = None  # the DeepSpeed engine that trains, once it is built
    inside: Phase | None = None  # method of that engine that is running
    module_hook: Any = None  # handle of the hook on its module
    pending: list[Sizes] = field(default_factory=list)  # forwards in evaluation mode since the last backward
    own_config: dict[str, Any] | None = None  # the script's first config, as reported to the watcher
    through_arguments: bool = False  # True if TrainingArguments carry the batch sizes
    accelerated: bool = False  # True if accelerate makes the engine that trains
    loader_prepared: bool = False  # True if accelerate has prepared the script's own loader
    loader_split: bool = False  # True if accelerate splits that loader's batches over the ranks
    trains_anew: bool = False  # True if transformers' Trainer is kept from resuming
    trainer_silent: bool = False  # True if Trainer is kept from evaluating and saving
    zero_init: bool = False  # True if the script's own code builds its model under `deepspeed.zero.Init`
    relaunched: int = 0  # number of ranks that the script would have started; 1 if unknown
    flags: set[str] = field(default_factory=set)  # flags of `problem.script.FLAGS` that the script's parsers have
    spellings: dict[str, list[str | None]] = field(default_factory=dict)  # flag -> [no, yes], see `hooks.arguments`
    said: dict[str, list[int]] = field(default_factory=dict)  # values in the script's arguments and loaders, by knob
    beside: list[Any] = field(default_factory=list)  # engines with an optimizer, made after the one that trains
    earlier: list[Any] = field(default_factory=list)  # engines made before the one that trains, see `hooks.election`
    rivals: list[Any] = field(default_factory=list)  # entries of `beside` that may turn out to train, in a probe run
    trained: bool = False  # True once the engine that trains has had a backward
    trained_steps: int = 0  # optimizer steps of the engine that trains
    plugins: list[tuple[weakref.ref[Any], dict[str, Any]]] = field(
        default_factory=list
    )  # accelerate's configs, and their original contents
    read: set[str] = field(default_factory=set)  # configs opened in a probe run, see `hooks.sources`
    written: set[str] = field(default_factory=set)  # configs that the script wrote in a probe run
    allowed_tokens: list[int] = field(default_factory=list)  # limits of arguments and tokenizers

    @property
    def script(self) -> Script:
        assert self.job.script is not None
        return self.job.script

    @property
    def batch(self) -> tuple[int, int] | None:
        """(micro-batch, accumulation) that the script must use; None keeps its own."""
        if self.candidate is None or self.script.holds_batch:
            return None
        return self.candidate.micro_batch, self.candidate.accumulation

    def note_said(self, knob: str, value: Any) -> None:
        """Record a batch size from any source in the script. Other values are ignored."""
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        known = self.said.setdefault(knob, [])
        if isinstance(number, int) and not isinstance(number, bool) and number > 0 and number not in known:
            known.append(number)
