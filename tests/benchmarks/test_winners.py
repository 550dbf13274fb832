"""Comparison of a winner's training with the user's own, without trainings."""

from typing import Any

import pytest
import torch

from benchmarks.training.winners import difference, verdict


def run(change: float, *, rows: float = 16.0, start: float = 0.0) -> dict[str, Any]:
    """A training that moved each of three weights from `start` by `change`."""
    initial = torch.full((3,), start)
    return {"rows": [rows] * 2, "losses": [1.0, 1.0 - change], "initial": [initial], "final": [initial + change]}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (run(0.10001), "trains the same"),
        (run(0.15), "DIFFERS: weights and loss"),
        (run(0.1, rows=4.0), "DIFFERS: rows of a step"),
        (run(0.1, start=0.5), "DIFFERS: initial weights"),
    ],
)
def test_a_training_that_differs_from_the_users_own_is_found(theirs: dict[str, Any], expected: str) -> None:
    own = run(0.1)
    still = difference(own, run(0.1))
    assert verdict(own, theirs, difference(own, theirs), lambda: still, "fp32") == expected


@pytest.mark.parametrize(
    ("again", "theirs", "expected"),
    [
        (0.105, 0.11, "the same within its noise"),  # dropout
        (0.19, 0.15, "not shown: its noise is as large"),
    ],
)
def test_noise_is_tolerated_and_named(again: float, theirs: float, expected: str) -> None:
    own, other = run(0.1), run(theirs)
    noise = difference(own, run(again))
    assert verdict(own, other, difference(own, other), lambda: noise, "fp32") == expected
