"""What a trial's end rules out."""

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.search.dominance import EVERY_RULE
from autotune.search.openings import Openings
from tests.conftest import make_candidate

CANDIDATES = [
    make_candidate(stage, micro, accumulation) for stage in (1, 2) for micro in (2, 8) for accumulation in (1, 4)
]
ENDED = Outcome(Kind.INVALID, reason="ended after 2 optimizer steps", source=Source.STEPS)


def left(openings: Openings) -> list[Candidate]:
    return [one for one, is_open in zip(openings.candidates, openings.open, strict=True) if is_open]


@pytest.mark.parametrize("worked", [False, True])
def test_a_batch_with_too_few_steps_rules_out_no_smaller_one(worked: bool) -> None:
    openings = Openings(CANDIDATES, EVERY_RULE)
    large, larger = make_candidate(1, 8, 1), make_candidate(2, 8, 4)
    if worked:  # so it was not the batch's size
        openings.observe(larger, Outcome(Kind.OK))
    openings.observe(large, ENDED)
    gone = {large, larger} if worked else {one for one in CANDIDATES if one.micro_batch * one.accumulation >= 8}
    assert set(left(openings)) == set(CANDIDATES) - gone
