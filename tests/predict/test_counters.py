"""Two runs become one Pass; no torch."""

from autotune.predict.counters import Counters, joined
from autotune.predict.passes import BACKWARD, FORWARD


def run(micro_batch: int, *, more: bool = False) -> Counters:
    """1000 bytes of parameters; forward keeps 10 and then 20 bytes a sequence and a mask of 7, backward makes gradients."""
    counters = Counters()
    counters.base = 1000
    for alive in (1007, 1007 + 10 * micro_batch, 1007 + 30 * micro_batch, *([1007] if more else [])):
        counters.saw(alive)
    counters.after_forward = 7.0 + 30 * micro_batch
    counters.phase, counters.in_use = BACKWARD, 64
    counters.saw(1007 + 35 * micro_batch)
    counters.gradients = 400
    counters.saw(1007 + 32 * micro_batch)
    counters.saw(1407 + 32 * micro_batch + (1 if more else 0))
    if more:
        counters.saw(1500 + 32 * micro_batch)
    counters.flops, counters.attention = [5.0 * micro_batch, 10.0 * micro_batch], [2.0 * micro_batch, 4.0 * micro_batch]
    counters.moved, counters.operators = [3 + 8.0 * micro_batch, 6 + 9.0 * micro_batch], [11, 22]
    return counters


def test_every_allocation_becomes_a_fixed_part_and_one_a_sequence() -> None:
    found = joined(run(2), run(3))
    assert found.phase == [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert found.fixed == [7, 7, 7, 7, 7]
    assert found.per_sequence == [0, 10, 30, 35, 32]
    assert found.gradients == [0, 0, 0, 0, 400]
    assert found.in_use == [0, 0, 0, 64, 64]
    assert found.after_forward == (7, 30)
    assert (found.flops, found.attention) == ((5, 10), (2, 4))
    assert found.moved == ((3, 8), (6, 9))
    assert found.operators == (11, 22)


def test_runs_that_do_not_match_are_joined_by_their_peaks() -> None:
    found = joined(run(2), run(3, more=True))
    assert found.phase == [FORWARD, BACKWARD]
    assert found.fixed[0] + 2 * found.per_sequence[0] == 7 + 60
    assert found.fixed[0] + 3 * found.per_sequence[0] == 7 + 90
    assert found.gradients == [0, 400]
