"""Optuna's TPE over the candidates, as it would search alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import optuna

from autotune.predict.knobs import Flags
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate, Value
from autotune.problem.space import SearchSpace
from autotune.search.distances import Distances

MOST_ASKED = 24  # questions in a row whose answer is known already; a sampler that knows much asks little that is new
FAILED = 1.0  # constraint of what did not run, in GiB where it ran out of memory

Answer = tuple[float, float]  # samples a second, GiB over memory


class Sampler:
    """Asks for candidates, and is told of what it asked for and of nothing else: so it needs what plain TPE needs, however the
    other trials of the study were chosen. What is known already is answered without a trial."""

    def __init__(self, candidates: list[Candidate], space: SearchSpace, seed: int, answers: dict[int, Answer]) -> None:
        self.space = space
        self._distances = Distances(candidates)
        names = [name for name in (*space.order, MICRO_BATCH, ACCUMULATION) if name in space.knobs]
        self._names = [name for name in names if name != ACCUMULATION or not _follows(candidates)]
        self._answers = answers  # what is known of the candidate at a place, whoever asked for it
        self._waiting: list[tuple[optuna.Trial, int]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def next(self, allowed: Flags, too_large: Flags, running: Flags | None = None) -> int:
        """The place of the candidate that it would like to see, among those allowed; of these there must be one.

        Args:
            running: those that are measured elsewhere just now: what it asked for of them is yet to come.
        """
        self._tell(running)
        for _ in range(MOST_ASKED):
            trial = self._study.ask()
            distances = self._distances.to(Candidate.of({name: self._suggest(trial, name) for name in self._names}))
            at = int(distances.argmin())
            if at not in self._answers and allowed[at]:
                break
            if at not in self._answers and too_large[at]:
                self._answers[at] = 0.0, FAILED
            if at in self._answers:
                self._answered(trial, self._answers[at])
            else:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            trial = self._study.ask()
            distances = self._distances.to(Candidate.of({name: self._suggest(trial, name) for name in self._names}))
            at = int(np.where(allowed, distances, np.inf).argmin())
        self._waiting.append((trial, at))
        return at

    def _tell(self, running: Flags | None) -> None:
        """What was asked for before and was measured since."""
        asked, self._waiting = self._waiting, []
        for trial, at in asked:
            if at in self._answers:
                self._answered(trial, self._answers[at])
            elif running is not None and running[at]:
                self._waiting.append((trial, at))
            else:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def _answered(self, trial: optuna.Trial, answer: Answer) -> None:
        speed, over = answer
        trial.set_constraint("memory_gib_over", over)
        self._study.tell(trial, speed)

    def _suggest(self, trial: optuna.Trial, name: str) -> Value:
        value: Value = trial.suggest_categorical(name, self.space.knobs[name].values)  # type: ignore[assignment]
        return value


def _follows(candidates: Sequence[Candidate]) -> bool:
    """Whether accumulation is decided by the other knobs, as where the global batch is given."""
    others = {tuple(item for item in candidate.knobs if item[0] != ACCUMULATION) for candidate in candidates}
    return len(others) == len(candidates)
