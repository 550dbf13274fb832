"""How large a training's checkpoint is at most, and how long it takes."""

from autotune.problem.job import checkpoint_bytes, checkpoint_seconds


def test_weights_twice_and_two_moments_of_what_is_trained_and_the_rest_once() -> None:
    assert checkpoint_bytes(1e9, 0) == 4 * 4e9
    assert checkpoint_bytes(0, 1e9) == 4e9
    assert checkpoint_bytes(1e9, 5e8) == 16e9 + 2e9


def test_it_is_written_and_read_at_a_gigabyte_a_second() -> None:
    assert checkpoint_seconds(1e9, 5e8) == 2 * 18
