"""What a script is told instead of its own batch, to see whether it obeys."""

import pytest

from autotune.commands.script_probe import others
from tests.conftest import make_candidate


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ((4, 2), [(2, 4), (8, 1), (1, 8)]),
        ((1, 8), [(2, 4), (4, 2)]),
        ((2, 1), [(1, 2)]),
        ((3, 2), [(6, 1), (2, 3), (1, 6)]),
        ((1, 3), [(3, 1)]),
        ((3, 3), [(1, 9), (9, 1)]),
        # none of the same size but one that memory may not hold
        ((1, 7), [(2, 8)]),
        ((1, 1), [(2, 2)]),
    ],
)
def test_other_batches_of_the_same_size_are_told_first(own: tuple[int, int], told: list[tuple[int, int]]) -> None:
    assert [(one.micro_batch, one.accumulation) for one in others(make_candidate(2, *own))] == told
    assert all(one.stage == 2 for one in others(make_candidate(2, *own)))
