"""A Trainer callback that records real training in a study, so that later tuning has more evidence.

trainer = Trainer(..., callbacks=[StudyCallback("my-study")])

The callback runs in the user's own training process, without `autotune launch`. Unlike a rank, this process needs the
tuner's third-party packages, because the callback opens the study with Optuna.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from transformers import TrainerCallback

from autotune.errors import one_line
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, samples
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.rank import devices
from autotune.rank.devices import used_bytes
from autotune.script.script import candidate_of_config
from autotune.search.study import StudyStore
from autotune.search.trials import TRAINING

WARMUP_STEPS = 3


class StudyCallback(TrainerCallback):  # type: ignore[misc]
    """Record the median step time and peak memory of a DeepSpeed training in a study, when the training ends.

    A missing study raises a UserError when training begins. A failure to record at the end only prints one line on standard
    error. The model is not saved yet at that moment, and hours of training are worth more than a trial.

    Args:
        study: name or folder of the study, as for `autotune show`.
        storage: database of the study, if it is not in the folder.
    """

    def __init__(self, study: str, storage: str | None = None) -> None:
        self.study, self.storage = study, storage
        self._began = 0.0
        self._seconds: list[float] = []
        self._peak = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the study on the first rank, so that a wrong path fails early."""
        if state.is_world_process_zero:  # other machines need not have the study
            self._study()

    def _study(self) -> StudyStore:
        return StudyStore.load(self.study, self.storage)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the first step."""
        if not self._began:
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the seconds and the memory of a step."""
        now = time.perf_counter()
        # measured from the end of the last step, so that data and logging are included
        self._seconds.append(now - self._began)
        self._began = now
        if not devices.available():  # torch keeps a GPU's peak itself
            self._peak = max(self._peak, used_bytes())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the training in the study. A failure is printed and does not end the training."""
        seconds = self._seconds[WARMUP_STEPS:]
        config = getattr(getattr(args, "hf_deepspeed_config", None), "config", None)
        if config is None or len(seconds) < 2 or not state.is_world_process_zero:
            return
        try:
            self._peak = max(self._peak, used_bytes())
            store = self._study()
            store.finish(*self._entry(store, args, config, seconds))
        except Exception as error:  # a database, a disk, or a value outside the study's space
            print(f"autotune: this training is not recorded in {self.study}: {one_line(error)}", file=sys.stderr)

    def _entry(self, store: StudyStore, args: Any, config: dict[str, Any], seconds: list[float]) -> tuple[int, Outcome]:
        knobs = {
            **candidate_of_config(config).as_dict,
            MICRO_BATCH: args.per_device_train_batch_size,
            ACCUMULATION: args.gradient_accumulation_steps,
            CHECKPOINTING: bool(args.gradient_checkpointing),
        }
        candidate = Candidate.of(knobs)
        step = statistics.median(seconds)
        speed = samples(store.job, candidate) / step
        spread = statistics.stdev(seconds) / len(seconds) ** 0.5
        measured = Measurement(step, spread, len(seconds), speed, speed * store.job.tokens_per_sample, self._peak)
        number = store.start(candidate, None, TRAINING, "real training")
        return number, Outcome(OutcomeKind.OK, Phase.STEP, measured, peak_bytes=self._peak, seconds=sum(self._seconds))
