"""What the hooks of one rank share."""

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
    """The task of one rank's hooks, and what they have seen so far."""

    job: Job
    candidate: Candidate | None  # what is tried; None leaves the script's own settings
    watcher: Watcher
    device: str  # `cpu` or `cuda`
    folder: Path  # for merged configs and copies of argument files
    quiet: bool  # a measurement, not a training: no checkpoints, evaluations, trackers and uploads
    patches: Patches = field(default_factory=Patches)
    sandbox: Sandbox | None = None  # of a trial; a training has none

    collective_timeout: datetime.timedelta = datetime.timedelta()  # of the process group
    engine: Any = None  # the DeepSpeed engine that trains, once it is built
    inside: Phase | None = None  # which method of that engine runs
    module_hook: Any = None  # the handle of the hook on its module
    pending: list[Sizes] = field(default_factory=list)  # of its forwards in evaluation mode since the last backward
    own_config: dict[str, Any] | None = None  # the script's first, as the watcher has been told it
    through_arguments: bool = False  # TrainingArguments carry the batch sizes
    accelerated: bool = False  # accelerate makes the engine that trains
    loader_prepared: bool = False  # accelerate has prepared the script's own loader
    loader_split: bool = False  # whose batches accelerate splits over the ranks
    trains_anew: bool = False  # transformers' Trainer is kept from resuming
    trainer_silent: bool = False  # and from evaluating and saving
    zero_init: bool = False  # the script's own code makes its model under `deepspeed.zero.Init`
    relaunched: int = 0  # ranks that the script would have started itself; 1 where it did not say
    flags: set[str] = field(default_factory=set)  # of `problem.script.FLAGS`, those that the script's parsers have
    spellings: dict[str, list[str | None]] = field(default_factory=dict)  # flag -> [no, yes], see `hooks.arguments`
    said: dict[str, list[int]] = field(default_factory=dict)  # by knob, what arguments and loaders of the script say
    beside: list[Any] = field(default_factory=list)  # engines with an optimizer, made after the one that trains
    earlier: list[Any] = field(default_factory=list)  # those made before it, see `hooks.election`
    rivals: list[Any] = field(default_factory=list)  # of `beside`, in the script's first run
    trained: bool = False  # the engine that trains has had a backward
    trained_steps: int = 0  # that it has made
    plugins: list[tuple[weakref.ref[Any], dict[str, Any]]] = field(
        default_factory=list
    )  # accelerate's configs, and as they were
    read: set[str] = field(
        default_factory=set
    )  # configs that a script has opened in its first run, see `hooks.sources`
    written: set[str] = field(default_factory=set)  # those that it has made there
    allowed_tokens: list[int] = field(default_factory=list)  # longest sequences that arguments and tokenizers allow

    @property
    def script(self) -> Script:
        assert self.job.script is not None
        return self.job.script

    @property
    def batch(self) -> tuple[int, int] | None:
        """(micro-batch, accumulation) that the script is told; None where it goes on with its own."""
        if self.candidate is None or self.script.holds_batch:
            return None
        return self.candidate.micro_batch, self.candidate.accumulation

    def note_said(self, knob: str, value: Any) -> None:
        """Notes what the script itself says of a batch size, wherever it has it; what is no such number says nothing."""
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        known = self.said.setdefault(knob, [])
        if isinstance(number, int) and not isinstance(number, bool) and number > 0 and number not in known:
            known.append(number)
