import numpy as np

from autotune.problem.space import parse_space
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


def test_failed_proposals_keep_no_settings() -> None:
    """An experienced sampler makes 20 proposals for each trial, which made the tuner grow."""
    sampler = Sampler(CANDIDATES, SPACE, 0, {})
    allowed = np.array([c.stage == 3 for c in CANDIDATES])
    for _ in range(8):
        sampler.next(allowed, np.zeros(len(CANDIDATES), dtype=bool), np.zeros(len(CANDIDATES), dtype=bool))
    trials = sampler._study.get_trials(deepcopy=False)
    failed = [one for one in trials if one.state.name == "FAIL"]
    assert len(failed) > 8
    assert not any(one.params or one.system_attrs for one in failed)
    assert all(one.params for one in trials if one not in failed)
