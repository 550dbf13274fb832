"""The search as a sampler for a user's own Optuna study."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError, one_line
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate, Value, samples
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import SearchSpace
from autotune.search.proposer import Proposal, Proposer
from autotune.search.stopping import Stop, StopReason
from autotune.search.trials import distribution, stored_distributions

Sampler = optuna.samplers.BaseSampler
PEAK = "peak_bytes"  # user attribute of a trial: largest memory of a rank


class FeasibleSampler(Sampler):
    """Propose the candidate with the highest expected gain per second among those that may fit.

    The trials of the study are all that is known. The value of a complete trial is its samples per second, over all ranks,
    and its user attribute `peak_bytes` the peak of a rank. A pruned trial ran out of memory. Running trials are not proposed
    again.

    Args:
        make_predictor: returns a predictor without observations.
        space: of the candidates.
    """

    def __init__(self, make_predictor: Callable[[], Predictor], space: SearchSpace) -> None:
        self._make_predictor, self.space = make_predictor, space
        self.job = make_predictor().job
        self._candidates = space.candidates(self.job)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return the DeepSpeed config of the candidate that was proposed for a trial."""
        for name in trial.relative_params:
            trial.suggest_categorical(name, self.space.knobs[name].values)
        return Candidate.of(trial.params).ds_config(self.job)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the values of all knobs."""
        return {name: CategoricalDistribution(knob.values) for name, knob in self.space.knobs.items()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs of the next candidate. Call `study.stop()` if no gain is left, and repeat the best one then."""
        proposer = Proposer(self._candidates, self.space, self._make_predictor())
        known = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        for one in known:
            if one.state.is_finished() and one.params:
                proposer.observe(Candidate.of(one.params), self._outcome(one))
        proposer.reserve(Candidate.of(one.params) for one in known if one.state is TrialState.RUNNING)
        proposal = proposer.next()
        if proposal is not None:
            return dict(proposal.candidate.knobs)
        if study._thread_local.in_optimize_loop:  # `stop` is refused elsewhere
            study.stop()
        complete = [one for one in known if one.state is TrialState.COMPLETE]
        best = max(complete, key=lambda one: one.value or 0.0, default=None)
        return dict(self._candidates[0].knobs if best is None else best.params)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value of a parameter that is no knob of the proposed candidate."""
        return optuna.samplers.RandomSampler(0).sample_independent(study, trial, param_name, param_distribution)

    def _outcome(self, trial: FrozenTrial) -> Outcome:
        if trial.state is TrialState.PRUNED:
            return Outcome(OutcomeKind.OOM_DEVICE)
        if trial.state is not TrialState.COMPLETE or not trial.value:
            return Outcome(OutcomeKind.CRASH, reason="failed")
        trained = samples(self.job, Candidate.of(trial.params))
        measured = Measurement(
            step_seconds=trained / trial.value,
            step_seconds_spread=0.0,
            steps=1,
            samples_per_second=trial.value,
            tokens_per_second=trial.value * self.job.tokens_per_sample,
            peak_bytes=int(trial.user_attrs[PEAK]),
        )
        return Outcome(OutcomeKind.OK, measurement=measured)


_SAMPLERS = {
    "tpe": "optuna.samplers:TPESampler",
    "gp": "optuna.samplers:GPSampler",
    "random": "optuna.samplers:RandomSampler",
}


def named_sampler(name: str, seed: int) -> Sampler:
    """Return a new sampler.

    Args:
        name: tpe, gp or random of Optuna, or `package:Class` of a class that takes a seed.

    Raises:
        UserError: there is no such sampler, or it cannot be made.
    """
    try:
        if name == "gp":
            importlib.import_module("scipy")  # GPSampler imports it after its first trials
        made = pkgutil.resolve_name(_SAMPLERS.get(name, name))(seed=seed)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"--sampler {name}: {one_line(error)}; expected {', '.join(_SAMPLERS)}, or PACKAGE:CLASS"
        ) from None
    if not isinstance(made, Sampler):
        raise UserError(f"--sampler {name}: not a sampler of Optuna")
    return made


class SampledProposer(Proposer):
    """Proposes by another of Optuna's samplers, from the trials of the study alone, until the budget ends.

    Args:
        study: with the trials so far.
        sampler: reads speeds as values, and memory as constraints.
        args: those of `Proposer`.
    """

    def __init__(self, study: optuna.Study, sampler: Sampler, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._study, self._sampler = study, sampler

    def next_rung(self, current: Candidate) -> None:
        """Return None: the sampler proposes each candidate."""

    def _decide(self) -> Proposal | Stop:
        """Return the available candidate that is most like the sampler's, which may be excluded or measured."""
        places = np.flatnonzero(self._available)
        if not len(places):
            return StopReason.ALL_TRIED.stop()
        copied = optuna.create_study(direction="maximize", sampler=self._sampler)
        copied.add_trials(self._study.get_trials(deepcopy=False))
        own = {name: distribution(name, domain.values) for name, domain in self.space.knobs.items()}
        wanted = copied.ask({**own, **stored_distributions(copied)}).params
        open_ones = [self.candidates[place] for place in places]
        nearest = max(open_ones, key=lambda one: sum(_alike(one.get(name), value) for name, value in wanted.items()))
        return Proposal(nearest, f"by {type(self._sampler).__name__}")


def _alike(one: Value | None, other: Value) -> float:
    """Return 1 for equal values, the ratio of two sizes, and 0 for others."""
    if one == other:
        return 1.0
    sizes = [value for value in (one, other) if isinstance(value, int | float)]
    return min(sizes) / max(sizes) if len(sizes) == 2 else 0.0
