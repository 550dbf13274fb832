"""How large a training's checkpoint is at most, and how long it takes."""

import dataclasses

import pytest

from autotune.problem.job import checkpoint_bytes, checkpoint_seconds
from autotune.results.console import sync_note
from tests.conftest import make_job


def test_weights_twice_and_two_moments_of_what_is_trained_and_the_rest_once() -> None:
    assert checkpoint_bytes(1e9, 0) == 4 * 4e9
    assert checkpoint_bytes(0, 1e9) == 4e9
    assert checkpoint_bytes(1e9, 5e8) == 16e9 + 2e9


@pytest.mark.parametrize(
    ("stage", "free_gib", "said"),
    [
        (2, 0, "below stage 3 a rank holds the full weights"),
        (3, 3, "2.00 GiB on a rank if the weights are gathered at once; 3.00 GiB are free at the peak"),
        (3, 1, "1.00 GiB are free at the peak: gather them layer by layer"),
    ],
)
def test_a_weight_sync_needs_room_for_gathered_weights(stage: int, free_gib: int, said: str) -> None:
    job = make_job(precision="bf16")
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, parameters=2**30))
    assert said in sync_note(job, stage, free_gib * 2**30)
    assert ":" not in sync_note(job, 3, 3 * 2**30), "nothing to do"
    unknown = dataclasses.replace(job, model=dataclasses.replace(job.model, parameters=None))
    assert "room for a full copy of the weights" in sync_note(unknown, 3, 0)


def test_it_is_written_and_read_at_a_gigabyte_a_second() -> None:
    assert checkpoint_seconds(1e9, 5e8) == 2 * 18
