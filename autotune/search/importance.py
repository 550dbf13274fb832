"""Importance of knobs for speed, by Optuna's PED-ANOVA."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

from autotune.problem.candidate import Candidate


def knob_importance(samples_per_second: Mapping[Candidate, float]) -> dict[str, float]:
    """Return each varying knob's share of the difference between the fastest tenth and the rest, largest first.

    Only knobs that every measured candidate has are compared. Empty with fewer than two candidates, or if all are as fast.

    Args:
        samples_per_second: measured speeds.
    """
    names = set.intersection(*(set(one.as_dict) for one in samples_per_second)) if samples_per_second else set()
    values = {name: list(dict.fromkeys(one.as_dict[name] for one in samples_per_second)) for name in sorted(names)}
    varying = {name: CategoricalDistribution(found) for name, found in values.items() if len(found) > 1}
    if not varying or len(set(samples_per_second.values())) < 2:
        return {}
    study = optuna.create_study(direction="maximize")
    for candidate, speed in samples_per_second.items():
        params = {name: candidate.as_dict[name] for name in varying}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=dict(varying), value=speed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
