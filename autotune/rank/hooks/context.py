"""What the hooks of one rank share."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Script
from autotune.problem.outcome import Phase
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.patches import Patches
from autotune.rank.hooks.watcher import Watcher


@dataclass
class Context:
    """The task of one rank's hooks, and what they have seen so far."""

    job: Job
    candidate: Candidate | None  # what is tried; None leaves the script's own settings
    watcher: Watcher
    device: str  # `cpu` or `cuda`
    folder: Path  # for merged configs, and with `quiet` for all that the script writes on its own account
    quiet: bool  # a measurement, not a training: no checkpoints, evaluations, trackers and uploads
    patches: Patches = field(default_factory=Patches)

    collective_timeout: datetime.timedelta = datetime.timedelta()  # of the process group
    engine: Any = None  # the DeepSpeed engine that trains, once it is built
    inside: Phase | None = None  # which method of that engine runs
    module_hook: Any = None  # the handle of the hook on its module
    pending: list[Sizes] = field(default_factory=list)  # of its forwards in evaluation mode since the last backward
    config_seen: bool = False  # the watcher has been told the script's own config
    through_arguments: bool = False  # TrainingArguments carry the batch sizes
    accelerated: bool = False  # accelerate makes the engine that trains
    loader_prepared: bool = False  # accelerate has prepared the script's own loader
    relaunched: int = 0  # ranks that the script would have started itself; 1 where it did not say
    flags: set[str] = field(default_factory=set)  # of `problem.script.FLAGS`, those that the script's parsers have
    spellings: dict[str, list[str | None]] = field(default_factory=dict)  # flag -> [no, yes], see `hooks.arguments`
    allowed_tokens: list[int] = field(default_factory=list)  # longest sequences that arguments and tokenizers allow

    @property
    def script(self) -> Script:
        assert self.job.script is not None
        return self.job.script
