from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest

from autotune.problem.space import parse_space
from autotune.search import tpe
from autotune.search.tpe import Answer, Sampler
from tests.conftest import make_job

SPACE = parse_space("knobs: {zero_stage: [0, 1, 2, 3], train_micro_batch_size_per_gpu: [1, 2, 4, 8]}")
CANDIDATES = SPACE.candidates(make_job())


def asked(known: dict[int, Answer], count: int) -> list[int]:
    """What it asks for in order; each answer is the place itself."""
    answers = dict(known)
    sampler, found = Sampler(CANDIDATES, SPACE, 0, answers), []
    allowed, too_large = np.ones(len(CANDIDATES), dtype=bool), np.zeros(len(CANDIDATES), dtype=bool)
    for at in known:
        allowed[at] = False
    for _ in range(count):
        at = sampler.next(allowed, too_large)
        found.append(at)
        answers[at], allowed[at] = (float(at), 0.0), False
    return found


def test_nothing_is_asked_for_twice_until_all_is_known() -> None:
    assert sorted(asked({}, len(CANDIDATES))) == list(range(len(CANDIDATES)))


def test_what_is_known_is_answered_without_a_trial() -> None:
    alone = asked({}, 8)
    known = {at: (float(at), 0.0) for at in alone[:3]}
    assert asked(known, 5) == alone[3:8], "it goes on as if it had measured them itself"


def test_what_is_too_large_is_no_trial() -> None:
    sampler = Sampler(CANDIDATES, SPACE, 0, {})
    allowed = np.array([c.stage == 3 for c in CANDIDATES])
    for _ in range(int(allowed.sum())):
        at = sampler.next(allowed, ~allowed)
        assert allowed[at]
        allowed[at] = False


def test_the_sampler_keeps_the_best_and_the_latest_results_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experienced sampler makes 20 proposals for each trial, which made the tuner grow."""
    monkeypatch.setattr(tpe, "MOST_ANSWERED", 20)
    monkeypatch.setattr(tpe, "MOST_BEST", 5)
    answers: dict[int, tuple[float, float]] = {}
    sampler = Sampler(CANDIDATES, SPACE, 0, answers)
    allowed = np.array([c.stage == 3 for c in CANDIDATES])
    told: list[float] = []
    monkeypatch.setattr(sampler._study, "tell", spied(sampler._study.tell, told))
    for speed in range(40):
        at = sampler.next(allowed, np.zeros(len(CANDIDATES), dtype=bool))
        answers[at] = 100.0 - speed, 0.0
    kept = sampler._study.get_trials(deepcopy=False)
    asked = kept[-1].number + 1
    values = [one.value for one in kept if one.value is not None]
    assert (len(values), len(kept)) == (20, 21), "one waits for its result"
    assert asked > 3 * len(kept)
    assert sorted(values, reverse=True)[:5] == sorted(told, reverse=True)[:5]
    assert set(told[-15:]) <= set(values)
    assert len(sampler._study._storage._trial_id_to_study_id_and_number) == len(kept)  # type: ignore[attr-defined]


def spied(tell: Callable[..., Any], told: list[float]) -> Callable[..., Any]:
    def telling(trial: optuna.Trial, value: float | None = None, **how: Any) -> Any:
        told.extend([] if value is None else [value])
        return tell(trial, value, **how)

    return telling
