"""Optuna's sampler as an adviser: it learns from every finished trial of the study and suggests settings."""

from __future__ import annotations

import optuna

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate, Value
from autotune.problem.space import SearchSpace
from autotune.search.distributions import distribution
from autotune.search.study import StudyStore

MOST_TRIALS = 500  # the latest; a sampler's own time grows with what it knows


class Sampler:
    """Optuna's TPE; `docs/search.md` compares it with others."""

    def __init__(self, space: SearchSpace, store: StudyStore, seed: int) -> None:
        self.space, self.store = space, store
        self._known: set[int] = set()
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=4)
        self._shadow = optuna.create_study(direction="maximize", sampler=sampler)

    def wanted(self) -> Candidate:
        """A setting that the sampler would like to see; it need not be a candidate of the space's grid."""
        finished = (optuna.trial.TrialState.COMPLETE,)
        for trial in self.store.study.get_trials(deepcopy=False, states=finished)[-MOST_TRIALS:]:
            if trial.number not in self._known:
                self._known.add(trial.number)
                self._shadow.add_trial(trial)
        asked = self._shadow.ask()
        wanted: dict[str, Value] = {}
        for name in (*self.space.order, MICRO_BATCH, ACCUMULATION):
            if name in self.space.knobs:
                wanted[name] = self._suggest(asked, name)
        self._shadow.tell(asked, state=optuna.trial.TrialState.FAIL)
        return Candidate.of(wanted)

    def _suggest(self, trial: optuna.Trial, name: str) -> Value:
        values = self.space.knobs[name].values
        kind = distribution(values, values[0])
        value: Value
        if isinstance(kind, optuna.distributions.CategoricalDistribution):
            value = trial.suggest_categorical(name, kind.choices)  # type: ignore[assignment]
        elif isinstance(kind, optuna.distributions.IntDistribution):
            value = trial.suggest_int(name, kind.low, kind.high, log=kind.log)
        else:
            assert isinstance(kind, optuna.distributions.FloatDistribution)
            value = trial.suggest_float(name, kind.low, kind.high, log=kind.log)
        return value
