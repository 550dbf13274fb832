"""Optuna's TPE over a finite list of candidates."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.predict.features import Flags, Floats
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.space import SearchSpace

# -- sampler -----------------------------------------------------------------------------------------------------------

MOST_ASKED = 24  # consecutive proposals with a known result; an experienced sampler proposes few new candidates
# results that the sampler reads: the best, of which Optuna's TPE models at most 25, and the latest
MOST_BEST, MOST_ANSWERED = 25, 512
FAILED = 1.0  # GiB; constraint value of a failed candidate, as if it were over memory

Answer = tuple[float, float]  # (samples per second, GiB over memory)


class Sampler:
    """TPE sampler that receives results only for its own proposals.

    The sampler therefore needs as many trials as plain TPE, however the study's other trials were chosen. Known results
    are returned to it without a trial.
    """

    def __init__(self, candidates: list[Candidate], space: SearchSpace, seed: int, answers: dict[int, Answer]) -> None:
        self._distances = Distances(candidates)
        names = [name for name in (*space.order, MICRO_BATCH, ACCUMULATION) if name in space.knobs]
        names = [name for name in names if name != ACCUMULATION or not accumulation_follows(candidates)]
        # one object per knob for the whole search: a trial keeps the distributions that it was asked with
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(space.knobs[name].values) for name in names
        }
        self._answers = answers  # known results by place, from any strategy
        self._waiting: list[tuple[optuna.Trial, int]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        self._study = optuna.create_study(storage=_Proposals(), direction="maximize", sampler=sampler)

    def next(self, allowed: Flags, too_large: Flags, running: Flags | None = None) -> int:
        """Return the place of the sampler's next candidate among the allowed ones. At least one must be allowed.

        Args:
            allowed: (n,) candidates that may be tried.
            too_large: (n,) candidates that need at least as much memory as one with an OOM.
            running: (n,) candidates that run elsewhere; the sampler waits for their results.
        """
        self._tell(running)
        for _ in range(MOST_ASKED):
            trial = self._study.ask(self._distributions)
            distances = self._distances.to(Candidate.of(trial.params))
            at = int(distances.argmin())
            if at not in self._answers and allowed[at]:
                break
            if at not in self._answers and too_large[at]:
                self._answers[at] = 0.0, FAILED
            if at in self._answers:
                self._answered(trial, self._answers[at])
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        else:
            trial = self._study.ask(self._distributions)
            distances = self._distances.to(Candidate.of(trial.params))
            at = int(np.where(allowed, distances, np.inf).argmin())
        self._waiting.append((trial, at))
        return at

    def _tell(self, running: Flags | None) -> None:
        """Report results to Optuna for proposals that were measured since."""
        asked, self._waiting = self._waiting, []
        for trial, at in asked:
            if at in self._answers:
                self._answered(trial, self._answers[at])
            elif running is not None and running[at]:
                self._waiting.append((trial, at))
            else:
                self._study.tell(trial, state=TrialState.FAIL)

    def _answered(self, trial: optuna.Trial, answer: Answer) -> None:
        speed, over = answer
        trial.set_constraint("memory_gib_over", over)
        self._study.tell(trial, speed)


class _Proposals(optuna.storages.InMemoryStorage):
    """Storage of MOST_ANSWERED proposals with a result.

    An experienced sampler proposes about 20 settings for each measured trial, and most of them are no candidate. The
    sampler reads nothing of those that failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, FrozenTrial] = {}  # by number, which is the trial's id too

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Forget what the sampler does not read any more, store a new trial and return its id."""
        for one in self._unread():
            del self._kept[one.number], self._trial_id_to_study_id_and_number[one.number]
        self._max_trial_id += 1
        trial = self._create_running_trial()
        trial.number = trial._trial_id = self._max_trial_id
        self._trial_id_to_study_id_and_number[trial.number] = study_id, trial.number
        self._set_trial(trial.number, trial)
        return trial.number

    def _unread(self) -> list[FrozenTrial]:
        failed, answered = (self.get_all_trials(0, False, (one,)) for one in (TrialState.FAIL, TrialState.COMPLETE))
        if (surplus := len(answered) - MOST_ANSWERED) <= 0:
            return failed
        best = {one.number for one in heapq.nlargest(MOST_BEST, answered, key=lambda one: one.value or 0.0)}
        return failed + [one for one in answered if one.number not in best][:surplus]

    def _get_trial(self, trial_id: int) -> FrozenTrial:
        return self._kept[trial_id]

    def _set_trial(self, trial_id: int, trial: FrozenTrial) -> None:
        if trial.state is TrialState.COMPLETE:
            trial.distributions = self._studies[0].param_distribution  # one object for all
        self._kept[trial_id] = trial

    def _update_cache(self, trial_id: int, study_id: int) -> None:
        """Do not keep the best trial: the sampler does not ask for it."""

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the kept trials in order, without copying them."""
        return [one for one in self._kept.values() if states is None or one.state in states]


def accumulation_follows(candidates: Sequence[Candidate]) -> bool:
    """Return True if the other knobs determine accumulation, as with a given global batch."""
    others = {tuple(item for item in candidate.knobs if item[0] != ACCUMULATION) for candidate in candidates}
    return len(others) == len(candidates)


# -- distances ---------------------------------------------------------------------------------------------------------
#
# Distances from a setting to every candidate. The sampler may propose any setting; the nearest candidate is tried.


class Distances:
    """Distances from a setting to all candidates, summed over knobs.

    A number adds the log2 of the ratio, at most FAR. A different choice adds FAR.
    """

    FAR = 4.0

    def __init__(self, candidates: list[Candidate]) -> None:
        self._count = len(candidates)
        names = sorted({name for candidate in candidates for name in candidate.as_dict})
        self._codes: dict[Any, float] = {}
        self._columns = {}
        for name in names:
            values = [candidate.get(name) for candidate in candidates]
            codes = {value: self._code(name, value) for value in dict.fromkeys(values)}
            self._columns[name] = np.array([codes[value] for value in values])

    def _code(self, name: str, value: Value | None) -> float:
        """Return the log2 of a number, or for a choice or missing knob a code far from every such logarithm."""
        if name not in (CHECKPOINTING, "zero_stage") and isinstance(value, int | float) and not isinstance(value, bool):
            return math.log2(max(float(value), 1e-9))
        return self._codes.setdefault((name, value), 1e3 * (1 + len(self._codes)))

    def to(self, wanted: Candidate) -> Floats:
        """Return the distances from `wanted` to the candidates, (n,)."""
        total = np.zeros(self._count)
        for name in {*wanted.as_dict, *self._columns}:
            column = self._columns.get(name)
            if column is None:
                total += self.FAR
            else:
                total += np.minimum(self.FAR, abs(column - self._code(name, wanted.get(name))))
        return total
