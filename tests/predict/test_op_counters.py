"""Two runs become one Pass; no torch."""

import gc

from autotune.predict.op_counters import Counters, add_counter_hooks, joined_passes
from autotune.predict.trace_data import BACKWARD, FORWARD


def run(micro_batch: int, *, more: bool = False) -> Counters:
    """1000 bytes of parameters; forward keeps 10 and then 20 bytes a sequence and a mask of 7, backward makes gradients."""
    counters = Counters()
    counters.base = 1000
    for alive in (1007, 1007 + 10 * micro_batch, 1007 + 30 * micro_batch, *([1007] if more else [])):
        counters.saw(alive)
    counters.after_forward = 7.0 + 30 * micro_batch
    counters.phase = BACKWARD
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
    found = joined_passes(run(2), run(3))
    assert found.phase == [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert found.fixed == [7, 7, 7, 7, 7]
    assert found.per_sequence == [0, 10, 30, 35, 32]
    assert found.gradients == [0, 0, 0, 0, 400]
    assert found.after_forward == (7, 30)
    assert (found.flops, found.attention) == ((5, 10), (2, 4))
    assert found.moved == ((3, 8), (6, 9))
    assert found.operators == (11, 22)


def test_runs_that_do_not_match_are_joined_by_their_peaks() -> None:
    found = joined_passes(run(2), run(3, more=True))
    assert found.phase == [FORWARD, BACKWARD]
    assert found.fixed[0] + 2 * found.per_sequence[0] == 7 + 60
    assert found.fixed[0] + 3 * found.per_sequence[0] == 7 + 90
    assert found.gradients == [0, 400]


class Storage:
    _cdata = 7

    def nbytes(self) -> int:
        return 64


class Tensor:
    """What a module reads, as far as the counters look at it."""

    requires_grad = True

    def __init__(self) -> None:
        self.storage = Storage()
        self.hooks: list[object] = []

    def untyped_storage(self) -> Storage:
        return self.storage

    def register_hook(self, hook: object) -> None:
        self.hooks.append(hook)


class Weight:
    nbytes = 200

    def __init__(self, trained: bool) -> None:
        self.requires_grad = trained
        self.hooks: list[object] = []

    def register_post_accumulate_grad_hook(self, hook: object) -> None:
        self.hooks.append(hook)


class Linear:
    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.before: list[object] = []
        self.after: list[object] = []

    def parameters(self, recurse: bool = True) -> list[Weight]:
        return [self.weight]

    def modules(self) -> list["Linear"]:
        return [self]

    def register_forward_pre_hook(self, hook: object) -> None:
        self.before.append(hook)

    def register_forward_hook(self, hook: object) -> None:
        self.after.append(hook)

    def run(self, tensor: Tensor) -> Tensor:
        given = Tensor()
        for hook in self.before:
            hook(self, (tensor,))  # type: ignore[operator]
        for hook in self.after:
            hook(self, (tensor,), given)  # type: ignore[operator]
        return given


def test_what_only_a_frozen_layer_reads_is_counted_once_it_is_gone() -> None:
    counters = Counters()
    module, kept = Linear(Weight(trained=False)), Tensor()
    add_counter_hooks(module, counters)
    module.run(kept)
    assert counters.dropped_inputs() == 0
    del kept
    gc.collect()
    assert counters.dropped_inputs() == 64


def test_inputs_that_follow_each_other_at_one_address_are_each_counted() -> None:
    counters = Counters()
    module, addresses = Linear(Weight(trained=False)), []
    add_counter_hooks(module, counters)
    for _ in range(3):
        read = Tensor()
        read.storage._cdata = 7  # the address of the one before, which is freed
        module.run(read)
        module.run(read)
        addresses.append(read.storage._cdata)
        del read
        gc.collect()
    assert addresses == [7, 7, 7]
    assert counters.dropped_inputs() == 3 * 64
