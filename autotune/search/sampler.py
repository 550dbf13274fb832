"""The search as a sampler for a user's own Optuna study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate, samples
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import SearchSpace
from autotune.search.proposer import Proposer

PEAK = "peak_bytes"  # user attribute of a trial: largest memory of a rank


class FeasibleSampler(optuna.samplers.BaseSampler):
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
